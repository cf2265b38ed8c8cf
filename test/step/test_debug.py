"""debug_nans and donation_disabled(report_reuse=True): bad outputs, uses of what would have been donated."""

from __future__ import annotations

import contextlib
import re
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch_xla
from helpers import compiles, each_backend, pointer, whole_copy

from torch_xla_donate import (
    _C,
    DonationError,
    DonationWarning,
    _report,
    compile,
    debug_nans,
    donate_buffer,
    donation_disabled,
    donation_report,
    is_donated,
)


def line_of(text):
    """The line of this file that ends with the comment."""
    with open(__file__, encoding="utf-8") as file:
        (found,) = [number for number, line in enumerate(file, 1) if line.rstrip().endswith(f"# {text}")]
    return found


@pytest.fixture
def reuses():
    """The warnings of this package, as (line, text); none of them is an error."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", DonationWarning)
        yield lambda: [(w.lineno, str(w.message)) for w in caught if w.category is DonationWarning]


# --- Outputs ---


def test_a_nan_raises_at_its_steps_end_and_names_the_output(make):
    t = make(2, 3)
    with debug_nans():
        _fine, _counts, _bad = t * 2, t.to(torch.int32) * 2, torch.log(t - 2)
        with pytest.raises(FloatingPointError) as caught:
            torch_xla.sync()
    assert str(caught.value) == (
        "1 output is not finite.\n"
        "  output 2 of 3 of the step, f32[2,3]: 2 NaN of 6 values.\n"
        "  Nothing was donated, so the inputs are still there. Run the step again with torch_xla.sync() after each "
        "line. See `python -m torch_xla_donate explain debug_nans`."
    )
    assert caught.value.outputs == ("output 2 of 3 of the step, f32[2,3]: 2 NaN of 6 values",)


def test_every_floating_dtype_is_looked_at(make):
    names = {"bfloat16": "bf16", "float16": "f16", "float64": "f64", "complex64": "c64", "float8_e5m2": "f8e5m2"}
    for dtype, name in names.items():
        t = make(4)
        with debug_nans():
            bad = torch.log(t - 1).to(getattr(torch, dtype))
            bad = bad * 1 if bad.is_complex() else bad
            with pytest.raises(FloatingPointError, match=rf"{name}\[4\]: \d NaN of 4 values"):
                torch_xla.sync()
            del bad


def test_all_bad_outputs_are_listed_and_five_are_in_the_text(make):
    t = make(3)
    with debug_nans():
        _two = [torch.log(t - 1), t, torch.sqrt(-t)]
        with pytest.raises(FloatingPointError, match=r"(?s)2 outputs are not finite.*output 0 of 2.*output 1 of 2"):
            torch_xla.sync()
        _many = [torch.log(t - 1 - k) for k in range(8)]
        with pytest.raises(FloatingPointError, match=r"(?s)8 outputs.*output 4 of 8.*\.\.\. and 3 more\.") as caught:
            torch_xla.sync()
    assert "output 5" not in str(caught.value)
    assert len(caught.value.outputs) == 8


def test_infinities_count_where_somebody_asks_for_them(make):
    t = make(4)
    with debug_nans():
        _one = 1 / t
        torch_xla.sync()
        with debug_nans(infs=True):
            _two = [1 / t, torch.log(t - 1)]
            with pytest.raises(FloatingPointError) as caught, debug_nans():
                torch_xla.sync()
        _three = 2 / t
        torch_xla.sync()
    assert caught.value.outputs == (
        "output 0 of 2 of the step, f32[4]: 1 infinite of 4 values",
        "output 1 of 2 of the step, f32[4]: 1 NaN and 1 infinite of 4 values",
    )


def test_a_scalar_and_an_empty_output_are_looked_at(make):
    t = make(4)
    with debug_nans():
        _empty, _mean = torch.log(t[:0]), t[:0].mean()
        with pytest.raises(FloatingPointError, match=r"1 output is.*\n.*f32\[\]: 1 NaN of 1 value\."):
            torch_xla.sync()


def test_reading_a_nan_does_not_raise(make):
    t = make(2)
    with debug_nans():
        bad = torch.log(t - 1)
        assert bad.isnan().tolist() == [True, False]
        assert "nan" in repr(bad)
        assert str(bad[0].item()) == "nan"
        del bad
        torch_xla.sync()


def test_inputs_of_a_step_that_raised_are_used_without_a_warning(make):
    t = make(4)
    with debug_nans():
        donate_buffer(t)
        bad = torch.log(t - 1)
        with pytest.raises(FloatingPointError):
            torch_xla.sync()
        # Line by line, with warnings as errors.
        del bad
        shifted = t - 1
        torch_xla.sync()
        _bad = torch.log(shifted)
        with pytest.raises(FloatingPointError, match="output 0 of 1 of the step"):
            torch_xla.sync()
    assert shifted.tolist() == [-1, 0, 1, 2]
    assert t.tolist() == [0, 1, 2, 3]


def test_inputs_of_an_earlier_step_than_the_one_that_raised_warn(make, reuses):
    t = make(4)
    with debug_nans():
        donate_buffer(t)
        _fine = t + 1
        torch_xla.sync()
        _bad = torch.log(make(2) - 1)
        with pytest.raises(FloatingPointError):
            torch_xla.sync()
        assert (t * 2).tolist() == [0, 2, 4, 6]
    assert len(reuses()) == 1


def test_an_in_place_update_is_checked_before_the_next_step(make):
    """The next step takes its memory."""
    t = make(4)
    with debug_nans():
        for _ in range(3):
            t.mul_(2)
            torch_xla.sync()
        t.sub_(1).log_()
        with pytest.raises(FloatingPointError, match=r"output 0 of 1 of the step, f32\[4\]: 1 NaN"):
            torch_xla.sync()


@each_backend
def test_outputs_of_compiled_functions_have_their_paths(make, options):
    @compile(**options)
    def losses(x, y):
        return {"total": x.sum() * 2, "parts": [torch.log(x - 3), (y * 3, torch.sqrt(y - 9))]}

    for donating in (False, True):
        x, y = make(4), make(5)
        with debug_nans(), pytest.raises(FloatingPointError) as caught:
            losses(x, y) if not donating else compile(losses.__wrapped__, donate_argnums=(0, 1), **options)(x, y)
        names = [text.partition(" (output ")[0] for text in caught.value.outputs]
        assert sorted(names) == ["result['parts'][0]", "result['parts'][1][1]"]
        assert "f32[4]: 3 NaN of 4 values" in str(caught.value)


def test_a_single_result_and_updated_arguments_have_names(make):
    with debug_nans(), pytest.raises(FloatingPointError, match=r"\n  result \(output 0 of 1 of the step\), f32"):
        compile(lambda x: torch.sqrt(x - 1))(make(4))

    @compile
    def update(state):
        state["w"].sub_(1).log_()

    state = {"w": make(4)}
    with debug_nans(), pytest.raises(FloatingPointError) as caught:
        update(state)
    assert "argument 0 of " in str(caught.value)
    assert "['w']" in str(caught.value)


def test_a_compiled_graph_is_checked_at_sync_and_at_the_exit(make):
    t = make(4)
    compiled = torch.compile(lambda x: torch.log(x - 1), backend="openxla")
    assert compiled(t + 2).tolist()
    expected = r"output 0 of 1 of a compiled graph, f32\[4\]: 1 NaN of 4 values"
    with debug_nans():
        _bad = compiled(t)
        with pytest.raises(FloatingPointError, match=expected):
            torch_xla.sync()
    with pytest.raises(FloatingPointError, match=expected), debug_nans():
        _bad = compiled(t)
    with pytest.raises(KeyError), debug_nans():  # noqa: PT012
        _bad = compiled(t)
        raise KeyError
    with debug_nans():  # what ran before an exception is not checked afterwards
        torch_xla.sync()


def test_an_overwritten_output_of_a_compiled_graph_is_checked(make):
    """The check sees the value that the step overwrites."""
    t = make(4)
    compiled = torch.compile(lambda x: torch.log(x - 1), backend="openxla")
    value = compiled(t + 2)
    with debug_nans():
        value = compiled(t)
        place = pointer(value)
        value.copy_(torch.nan_to_num(value))
        with pytest.raises(FloatingPointError, match="1 output is not finite.\n  output 0 of 1 of a compiled graph"):
            torch_xla.sync()
    assert pointer(value) == place, "torch_xla did not donate, so nothing was tested"


# --- The context ---


@pytest.mark.parametrize("raised", [KeyError, FloatingPointError])
def test_contexts_nest_and_an_exception_leaves_nothing_behind(make, raised):
    t = make(4)
    with debug_nans(), pytest.raises(raised), debug_nans(), debug_nans(infs=True), donation_disabled():  # noqa: PT012
        _bad = torch.log(t - 1)
        if raised is FloatingPointError:
            torch_xla.sync()
        raise KeyError
    assert not _C.disabled()
    assert _C.take_bad_outputs() == []
    donate_buffer(t)
    _bad = torch.log(t - 1)
    torch_xla.sync()
    assert is_donated(t)


def test_an_outer_context_goes_on_when_an_inner_one_ends(make):
    """Also of a decorated function, and for this thread only."""
    t = make(4)

    @debug_nans()
    def step():
        with debug_nans(), donation_disabled():
            pass
        with ThreadPoolExecutor(1) as other:
            other.submit(unchecked).result()
        _bad = torch.log(t - 1)
        torch_xla.sync()

    def unchecked():
        _bad = torch.log(t - 1)
        torch_xla.sync()

    for _ in range(2):
        with pytest.raises(FloatingPointError):
            step()
    assert not _C.disabled()


def test_a_nan_error_has_the_donation_error_as_its_context(make, monkeypatch):
    def warn_or_raise():
        raise DonationError("a strict donation was unusable")

    t = make(4)
    with debug_nans():
        _bad = torch.log(t - 1)
        monkeypatch.setattr(_report, "warn_or_raise", warn_or_raise)
        with pytest.raises(FloatingPointError) as caught:
            torch_xla.sync()
    assert str(caught.value.__context__) == "a strict donation was unusable"


# --- Reuse ---


def spare(t, context=None):
    """A step that would have consumed t; returns its result."""
    with context or donation_disabled(report_reuse=True):
        donate_buffer(t)  # the donation
        out = t * 2
        torch_xla.sync()
    return out


def test_a_use_warns_at_its_line_and_keeps_the_value(make, reuses):
    """The warning names the donation."""
    t = make(4)
    out = spare(t)
    total = t + 1  # the use
    (found,) = reuses()
    assert found[0] == line_of("the use")
    assert re.fullmatch(
        rf"f32\[4\] tensor is used after it was donated at {re.escape(__file__)}:{line_of('the donation')}\. "
        r"With donation enabled, step \d+ reuses its memory and this line raises DonatedBufferError\. Use the step's "
        r"result, or \.clone\(\) it before the step\. See `python -m torch_xla_donate explain debug_nans`\.",
        found[1],
    )
    assert (total.tolist(), out.tolist()) == ([1, 2, 3, 4], [0, 2, 4, 6])
    torch_xla.sync()
    assert t.tolist() == [0, 1, 2, 3]


USES = {
    "op": lambda t: t + 1,
    "in place": lambda t: t.add_(1),
    "view": lambda t: t[1:] + 1,
    "detached": lambda t: t.detach() + 1,
    "repr": repr,
    "cpu": lambda t: t.cpu(),
    "item": lambda t: t[0].item(),
    "read by a function of torch_xla": lambda t: torch_xla._XLAC._xla_get_cpu_tensors([t]),
    "donated again": donate_buffer,
}


@pytest.mark.parametrize("name", USES)
def test_every_use_is_reported_and_an_error_of_it_corrupts_nothing(make, reuses, name):
    """The error is raised at the use's line."""
    use = USES[name]
    t, other = make(4), make(3) + 1
    out = spare(t)
    other = other * 2
    with warnings.catch_warnings():
        warnings.simplefilter("error", DonationWarning)
        for _ in range(2):
            with pytest.raises(DonationWarning, match="is used after it was donated at"):
                use(t)
        torch_xla.sync()
    assert _C.pending() == []
    assert (t.tolist(), out.tolist(), other.tolist()) == ([0, 1, 2, 3], [0, 2, 4, 6], [2, 4, 6])
    t = make(4)
    spare(t)
    use(t)
    assert all("is used after it was donated at" in text for _, text in reuses())
    assert len(reuses()) == 2  # of t.tolist() above, and of the use
    if use is donate_buffer:  # and it is a new mark
        again = t + 1
        torch_xla.sync()
        assert is_donated(t) and again.tolist() == [1, 2, 3, 4] and len(reuses()) == 2


def test_each_line_is_reported_once_and_all_lines_are(make, reuses):
    for _ in range(3):
        t = make(4)
        spare(t)
        for _ in range(2):
            _first = t + 1  # the first line
            _second = t * 3  # the second line
            t.cpu()  # the third line
    assert [line for line, _ in reuses()] == [line_of(f"the {which} line") for which in ("first", "second", "third")]


def test_a_whole_overwrite_ends_it_and_metadata_is_no_use(make, reuses):
    for overwrite in (lambda t: t.copy_(torch.ones(4)), lambda t: t.fill_(1), lambda t: t.zero_().copy_(torch.ones(4))):
        t = make(4)
        spare(t)
        assert (t.shape, t.dtype, t.device.type, is_donated(t)) == ((4,), torch.float32, "xla", False)
        overwrite(t)
        assert (t + 1).tolist() == [2] * 4
        torch_xla.sync()
        assert t.tolist() == [1] * 4
    assert reuses() == []


def test_without_report_reuse_nothing_is_remembered(make, reuses):
    t, other = make(4), make(4)
    spare(t, donation_disabled())
    assert (t + 1).tolist() == [1, 2, 3, 4]
    assert _C.sizes()["undonated"] == 0
    spare(other)
    assert _C.sizes()["undonated"] == 1
    del other  # of tensors that are gone, nothing
    _new = make(2) + 1
    torch_xla.sync()
    assert _C.sizes()["undonated"] == 0
    assert reuses() == []


def test_what_is_reported_is_what_a_step_with_donation_takes(make):
    def step(context):
        tensors = [make(4), make(4), make(4), make(8), make(2), make(6)]
        counter, alias = make(4), whole_copy(tensors[5])  # which shares the buffer, so that it is refused
        with context:
            donate_buffer(tensors)
            a, b, c, d, e, f = tensors
            counter.add_(c)
            out = [a * b + c, b.sum(), (c + d[4:]).to(torch.float64), e.sum(), f + 1]
            torch_xla.sync(wait=True)
        return tensors, out, alias

    def reported(t):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            t.cpu()
        _report.notices._reported.clear()
        return bool(caught)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DonationWarning)
        tensors, *_kept = step(contextlib.nullcontext())
    donated = [is_donated(t) for t in tensors]
    tensors, *_kept = step(donation_disabled(report_reuse=True))
    assert [reported(t) for t in tensors] == donated
    assert donated.count(True) == 2, "one f32[4] of three, and f32[8] for f64[4]"


def test_a_backward_pass_is_reported_at_the_line_that_calls_it(reuses):
    def loss_of_a_donated_weight():
        weight = torch.arange(3.0).to("xla").requires_grad_()
        loss = (weight * weight).sum()
        torch_xla.sync()
        with donation_disabled(report_reuse=True):
            donate_buffer(weight)
            with torch.no_grad():
                _new = weight * 0.5
            torch_xla.sync()
        return loss, weight

    loss, weight = loss_of_a_donated_weight()
    loss.backward()  # the backward pass
    assert weight.grad.tolist() == [0, 2, 4]
    assert {line for line, _ in reuses()} == {line_of("the backward pass")}
    loss, _ = loss_of_a_donated_weight()
    warnings.simplefilter("error", DonationWarning)
    with pytest.raises(DonationWarning, match=r"f32\[3\] tensor is used after"):
        loss.backward()


def test_what_shows_the_warning_may_use_the_tensor(make, monkeypatch):
    t = make(4)
    spare(t)
    shown = []
    with warnings.catch_warnings():
        warnings.simplefilter("always", DonationWarning)
        monkeypatch.setattr(warnings, "showwarning", lambda *_: shown.append(t.tolist()))
        assert (t + 1).tolist() == [1, 2, 3, 4]
    assert shown == [[0, 1, 2, 3]]


def test_debug_nans_reports_a_use_by_its_leaf_and_gives_its_reason(make, reuses):
    state = {"layer": [make(2)]}
    with debug_nans():
        donate_buffer(state, strict=True)
        _out = state["layer"][0] + 1
        torch_xla.sync()
        state["layer"][0].cpu()
    ((_, text),) = reuses()
    assert text.startswith("f32[2] tensor \"['layer'][0]\" is used after")
    (donor,) = donation_report(steps=1).donors
    assert (donor.outcome, donor.reason) == ("unusable", "donation is disabled (debug_nans())")


def test_donation_is_off_inside_and_nothing_compiles_again(make):
    """Outside it is on again."""

    def step(value):
        donate_buffer(value)
        new = value * 2
        torch_xla.sync(wait=True)
        return new

    old = make(4)
    new = step(old)
    assert is_donated(old)
    with debug_nans():
        old, new = new, step(new)
        assert not is_donated(old)
        before = compiles()
        old, new = new, step(new)
    for _ in range(3):
        old, new = new, step(new)
        assert is_donated(old)
    with debug_nans():
        old, new = new, step(new)
        assert not is_donated(old)
    assert compiles() == before
    assert new.tolist() == [i * 2**7 for i in range(4)]
