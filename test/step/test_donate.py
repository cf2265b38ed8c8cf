"""donate_buffer: what is donated or refused, the states of a mark, and marks that an error must not leave behind."""

from __future__ import annotations

import contextlib
import gc
import inspect
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch_xla
import torch_xla.core.xla_model as xm
from helpers import Couple, consume, each_backend, lose, no_collections, pointer, whole_copy

from torch_xla_donate import (
    _C,
    DonatedBufferError,
    DonationError,
    DonationWarning,
    _report,
    call_jax,
    cancel_donation,
    compile,
    debug_nans,
    donate_buffer,
    donation_report,
    gradient_accumulation,
    is_donated,
    scan,
    scan_layers,
    user_computation,
)
from torch_xla_donate._text import percent

# --- A donation that happens ---


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of mark_step
@pytest.mark.parametrize("step", [torch_xla.sync, lambda: torch_xla.sync(wait=True), xm.mark_step])
def test_the_output_takes_over_the_donated_memory(make, step):
    """And not the mark: the next step leaves the output alone."""
    t = make(8, 4)
    address = pointer(t)

    donate_buffer(t)
    out = t * 2
    step()
    again = out + 1
    step()

    assert is_donated(t) and not is_donated(out)
    assert pointer(out) == address
    assert torch.equal(out.cpu(), torch.arange(32.0).reshape(8, 4) * 2)
    assert torch.equal(again.cpu(), torch.arange(32.0).reshape(8, 4) * 2 + 1)


def test_any_dtype_can_be_donated(make):
    for name in ("float64", "bfloat16", "float16", "int8", "int64", "bool", "complex64"):
        t = make(6, dtype=getattr(torch, name))
        assert consume(t, torch.logical_not if name == "bool" else lambda t: t + t, wait=True).dtype is t.dtype


@pytest.mark.parametrize("last", [False, True])
def test_a_live_tensor_that_is_device_data_disturbs_no_step(make, last):
    """torch_xla asks such a tensor twice while it collects; the hooks must not take that for a read."""
    t, other = make(4), make(5)
    first, second = torch.empty(5, device="xla"), torch.empty(5, device="xla")
    torch_xla.sync()
    donate_buffer(t)
    out = None if last else t + 1
    first.copy_(other)
    out = t + 1 if out is None else out
    second.copy_(other)
    torch_xla.sync()
    assert is_donated(t)
    assert out.tolist() == [1, 2, 3, 4]
    assert first.tolist() == second.tolist() == [0, 1, 2, 3, 4]


def test_a_mark_whose_tensor_is_dropped_unread_leaves_no_trace(make):
    t = make(16)
    donate_buffer(t)
    del t
    assert _C.pending() == []
    torch_xla.sync()
    assert _C.sizes()["pending"] == 0


# --- Several leaves ---


def test_a_pytree_with_a_module_is_donated_leaf_by_leaf(make):
    module, state = torch.nn.BatchNorm1d(3).to("xla"), [make(2, 2), (make(4), None)]
    torch_xla.sync()
    before = {name: value.cpu().clone() for name, value in module.state_dict().items()}
    donate_buffer({"model": module, "m": state})
    new = {name: value + 1 for name, value in module.state_dict().items()}
    out = [state[0] + 1, state[1][0] + 1]
    torch_xla.sync()
    names = {"weight", "bias", "running_mean", "running_var", "num_batches_tracked"}
    expected = {"['m'][0]", "['m'][1][0]", *(f"['model'].{name}" for name in names)}
    assert {donor.name for donor in donation_report(steps=1).donors} == expected
    assert all(map(is_donated, (module.weight, state[0], state[1][0])))
    assert all(torch.equal(new[name].cpu(), before[name] + 1) for name in before)
    assert [t.flatten().tolist() for t in out] == [[1, 2, 3, 4]] * 2


def test_tied_weights_are_one_donor_with_both_names(make):
    module = torch.nn.Sequential(torch.nn.Linear(3, 3, bias=False), torch.nn.Linear(3, 3, bias=False)).to("xla")
    module[1].weight = module[0].weight
    torch_xla.sync()
    donate_buffer(module)
    _new = module[0].weight.detach() * 2
    torch_xla.sync()
    (donor,) = donation_report(steps=1).donors
    assert donor.name == "0.weight, 1.weight"
    assert is_donated(module[0].weight)
    assert is_donated(module[1].weight)


def test_donating_twice_is_the_same_as_once(make):
    t = make(4)
    donate_buffer(t)
    donate_buffer([t, t.detach()])
    assert _C.sizes()["pending"] == 1
    out = t + 1
    torch_xla.sync()
    assert is_donated(t)
    assert out.tolist() == [1, 2, 3, 4]


def test_nothing_is_marked_when_the_argument_is_empty():
    donate_buffer([])
    donate_buffer({})
    donate_buffer(None)
    assert _C.pending() == []


# --- States ---


def test_partial_syncs_never_donate(make):
    """They do not see every live tensor."""
    t = make(4)
    donate_buffer(t)
    out, pending = t + 1, t * 10
    reads = (str, lambda t: t.sum().item(), torch.Tensor.cpu, torch.Tensor.tolist)
    for read in (*reads, lambda t: torch_xla._XLAC._xla_sync_multi([t], [])):
        read(out)
        read(t)
        assert not is_donated(t) and len(_C.pending()) == 1
    torch_xla.sync()
    assert is_donated(t)
    assert pending.tolist() == [0, 10, 20, 30] and out.tolist() == [1, 2, 3, 4]


def test_a_cancelled_mark_is_over(make):
    t = make(4)
    donate_buffer({"t": t})
    cancel_donation({"t": t, "unmarked": make(2)})
    out = t + 1
    torch_xla.sync()
    assert not is_donated(t)
    assert t.tolist() == [0, 1, 2, 3]
    assert out.tolist() == [1, 2, 3, 4]


def test_a_donation_that_happened_cannot_be_cancelled(make):
    t, marked = make(4), make(3)
    consume(t)
    donate_buffer(marked)
    with pytest.raises(DonationError, match=r"tensors\[1\].*a step has consumed it. .*No mark was cancelled"):
        cancel_donation([marked, t])
    assert len(_C.pending()) == 1
    cancel_donation(marked)


@pytest.mark.parametrize("refuse", [False, True])
def test_a_step_leaves_marks_out_that_were_cancelled_before_its_claim(make, refuse):
    """As by another thread, after the step has found them."""
    t, kept = make(4), make(5)
    donate_buffer([t, kept])
    assert _C.claim_marks([t, kept], lambda: cancel_donation(t), refuse) == 1
    assert [donor.array for donor in donation_report(steps=1).donors] == ["f32[5]"]
    donate_buffer(t)  # a consumed tensor would raise
    assert _C.claim_marks([t], lambda: cancel_donation(t), refuse) == 0
    assert t.tolist() == [0, 1, 2, 3] and not is_donated(t)


def test_is_donated_needs_a_tensor_and_is_false_elsewhere(make):
    written = make(3)
    written[0] = 1  # out of date until it is used
    others = [written, written + 1, written[:0], torch.tensor(1, device="xla"), torch.ones(2), torch.eye(2).to_sparse()]
    assert not any(map(is_donated, [*others, torch.ones(2, device="meta")]))
    torch_xla.sync()
    with pytest.raises(TypeError, match="t is of type list, not a tensor"):
        is_donated([])


# --- Refusals: all or nothing ---


def test_a_leaf_that_cannot_be_donated_is_named_and_nothing_marked(make):
    good, host = make(2), torch.ones(2)
    packed = torch.nn.utils.rnn.pack_padded_sequence(torch.ones(4, 2, 3), [4, 3]).to("xla")
    torch_xla.sync()
    pending = good + 1
    for leaf, error, text in [
        ({"b": [host]}, ValueError, r"\['b'\]\[0\] is float32\[2\] on cpu.*\.to\('xla'\)"),
        (Couple(good, host), ValueError, r"\[1\] is float32\[2\] on cpu"),
        (packed, ValueError, r"\.batch_sizes is int64\[4\] on cpu"),
        (torch.nn.Linear(2, 2), ValueError, r"\.weight is float32\[2,2\] on cpu"),
        (torch.ones(2, device="meta"), ValueError, r" is float32\[2\] on meta"),
        (torch.eye(2).to_sparse(), ValueError, r" .*with layout torch.sparse_coo, but only plain XLA.*Make it dense"),
        (pending, DonationError, r" is float32\[2\] on xla:0 and has no buffer yet.*torch_xla.sync\(\)"),
        (3, TypeError, " is of type int, which is neither a tensor nor"),
        ("name", TypeError, " is of type str, which is neither a tensor nor"),
    ]:
        with pytest.raises(error, match=rf"(?s)tensors\[1\]{text}.*Nothing was marked"):
            donate_buffer([good, leaf])
        assert _C.pending() == []
    with pytest.raises(ValueError, match=r"tensors \(weight\) is float32\[2,2\] on cpu"):
        donate_buffer(torch.nn.Linear(2, 2))
    with pytest.raises(TypeError, match="of type generator, which can be iterated only once. Pass a list, or the"):
        donate_buffer(torch.nn.Linear(2, 2).to("xla").parameters())


def test_a_class_without_keys_is_donated_refused_and_cancelled(make):
    t, u = make(2), make(3)
    donate_buffer(Couple(t, u))
    cancel_donation(Couple(t, u))
    assert _C.pending() == []

    new = Couple(t + 1, u + 1)
    donate_buffer(Couple(t, u), into=new)
    torch_xla.sync()
    donors = donation_report(steps=1).donors
    assert [(donor.name, donor.into_kept) for donor in donors] == [("[0]", True), ("[1]", True)]
    with pytest.raises(DonationError, match=r"tensors\[0\] is float32\[2\] on xla:0, and a step has consumed it"):
        cancel_donation(Couple(t, u))
    with pytest.raises(DonatedBufferError, match=r"'\[1\]' was donated at"):
        u + 1


def test_a_key_of_a_reported_donor_is_not_kept(make):
    key = torch.nn.Parameter(torch.ones(3))
    t, gone = make(3), weakref.ref(key)
    consume({key: t}, lambda tree: t + 1)
    del key
    gc.collect()
    assert gone() is None
    assert donation_report(steps=1).donors[0].name == "[key 0: Parameter float32[3]]"


def test_a_leaf_whose_class_is_asked_of_the_program_is_no_tensor(make):
    """Such a property may run while the tensors before it are marked."""
    asked = []

    class Proxy:
        @property
        def __class__(self):
            asked.append(is_donated(t))
            return torch.Tensor

    t = make(3)
    with pytest.raises(TypeError, match=r"tensors\[1\] is of type Proxy, which is neither a tensor"):
        donate_buffer([t, Proxy()])
    assert not _C.pending() and not any(asked)


def test_cached_constants_are_refused_and_their_clones_donated():
    cached = torch.tensor(42.0, device="xla")
    clone = cached.clone()
    torch_xla.sync()
    with pytest.raises(DonationError, match=r"shares between tensors \(a cached constant or the RNG seed\).*clone"):
        donate_buffer(cached)
    out, fresh = consume(clone, lambda clone: (clone + 1, torch.tensor(42.0, device="xla") + 0))
    assert (out.item(), fresh.item(), cached.item()) == (43.0, 42.0, 42.0)


def test_an_array_whose_element_type_torch_does_not_know_is_refused(make):
    weight = make(6, dtype=torch.int32)
    packed = torch_xla._XLAC._xla_cast_int4(weight, weight.tolist())
    torch_xla.sync()
    for give in (donate_buffer, compile(lambda x: x + 1, donate_argnums=0, pure=True)):
        with pytest.raises(ValueError, match="element type 21 .*int4.*Remove this leaf"):
            give([make(3), packed])
    assert not _C.pending() and (packed + 1).tolist() == [1, 2, 3, 4, 5, 6]


def test_random_numbers_are_the_same_with_and_without_donation(make):
    def draw(donate):
        torch_xla.manual_seed(7)
        t = torch.rand(16, device="xla")
        torch_xla.sync()
        if donate:
            donate_buffer(t)
        out = [torch.rand(16, device="xla") + t * 0, torch.rand(16, device="xla")]
        torch_xla.sync()
        assert is_donated(t) == donate
        return [o.cpu() for o in out]

    assert all(torch.equal(a, b) for a, b in zip(draw(False), draw(True)))


def test_a_buffer_is_donated_only_if_all_its_holders_are_offered(make):
    for offered in (False, True):
        t = make(4)
        copy = whole_copy(t)
        donate_buffer([t, copy] if offered else t)
        out = t + copy
        why = "another live tensor, which was not donated, holds the same buffer"
        with contextlib.nullcontext() if offered else pytest.warns(DonationWarning, match=why):
            torch_xla.sync(wait=True)
        assert is_donated(t) == is_donated(copy) == offered
        assert offered or t.tolist() == copy.tolist() == [0, 1, 2, 3]
        assert out.tolist() == [0, 2, 4, 6]


# --- Unusable donations ---


def test_an_unusable_donation_warns_once_for_each_place(make, recwarn):
    """The tensor lives on."""

    def step():
        t = make(3)
        donate_buffer(t)
        total = t.sum()
        torch_xla.sync(wait=True)
        assert t.tolist() == [0, 1, 2]
        assert total.item() == 3
        return t

    kept = [step() for _ in range(3)]
    assert not any(is_donated(t) for t in kept)
    (warning,) = [w for w in recwarn.list if w.category is DonationWarning]
    text = str(warning.message)
    assert text.startswith("Some donated buffers were not usable: f32[3] (donated at ")
    assert "no output of the step has its size of 12 bytes (outputs: 1 of 4 bytes)" in text
    where = f"{warning.filename}:{warning.lineno}"
    assert where == f"{__file__}:{step.__code__.co_firstlineno + 2}"
    assert where in text


@pytest.mark.filterwarnings("error::torch_xla_donate.DonationWarning")
def test_an_error_made_of_a_warning_does_not_swallow_the_others(make):
    a, b, c = make(3), make(5), make(7)
    donate_buffer(a)
    donate_buffer(b)
    donate_buffer(c, strict=True)
    total = a.sum() + b.sum() + c.sum()
    with pytest.raises(DonationError, match=r"f32\[7\]") as raised:
        torch_xla.sync(wait=True)
    assert isinstance(raised.value.__cause__, DonationWarning)
    assert total.item() == 3 + 10 + 21


def test_an_unknown_strict_or_stacklevel_is_refused_by_every_function(make):
    t = make(3)
    strict = r"strict is 'no', of type str, and unknown. Pass 'off', 'warn' or 'error', a bool, or omit it to use"
    level = "stacklevel is .*Pass 1 for the line of the call, or 2"
    for options, error, message in [
        ({"strict": "no"}, ValueError, strict),
        ({"stacklevel": 0}, ValueError, level),
        ({"stacklevel": "1"}, TypeError, level),
        ({"stacklevel": True}, TypeError, level),
    ]:
        for call in (
            lambda **options: donate_buffer(t, **options),
            lambda **options: compile(lambda x: x + 1, donate_argnums=0, **options),
            lambda **options: compile(donate_argnums=0, **options),
            lambda **options: scan(lambda c, x: (c + x, c), t, make(2, 3), **options),
            lambda **options: scan_layers([], t, **options),
            lambda **options: gradient_accumulation(lambda x: x.sum(), (t,), torch.nn.Linear(1, 1), **options),
            lambda **options: user_computation("add", [t], None, **options),
            lambda **options: call_jax(None, (t,), **options),
        ):
            with pytest.raises(error, match=message):
                call(**options)
    with pytest.raises(TypeError, match="strict is 1, of type int, and unknown"):
        donate_buffer(t, strict=1)
    assert _C.pending() == []


def test_strict_is_off_warn_or_error(make, monkeypatch):
    """By the argument, which wins over the environment. Also an error loses nothing."""
    expected = {
        "warns": lambda: pytest.warns(DonationWarning, match="f32.3."),
        "raises": lambda: pytest.raises(DonationError, match=r"Some donated buffers were not usable: f32\[3\]"),
        "nothing": contextlib.nullcontext,
    }
    for environment, strict, outcome in [
        (None, None, "warns"),
        (None, "off", "nothing"),
        (None, "warn", "warns"),
        (None, "error", "raises"),
        ("error", None, "raises"),
        ("on", None, "raises"),
        ("1", None, "raises"),
        ("warn", None, "warns"),
        ("0", None, "warns"),
        ("off", None, "nothing"),
        ("error", "off", "nothing"),
        ("error", False, "warns"),
        ("off", True, "raises"),
        ("perhaps", "warn", "warns"),
    ]:
        monkeypatch.setenv("TORCH_XLA_DONATE_STRICT", environment or "")
        if environment is None:
            monkeypatch.delenv("TORCH_XLA_DONATE_STRICT")
        _report.notices._warned_sites.clear()
        t, other = make(3), make(5)
        donate_buffer(t, strict=strict)
        total, kept = t.sum(), other + 1
        with expected[outcome]():
            torch_xla.sync(wait=True)
        assert donation_report(steps=1).donors[0].outcome == "unusable"
        assert (total.item(), kept.tolist(), t.tolist()) == (3, [1, 2, 3, 4, 5], [0, 1, 2])
    monkeypatch.setenv("TORCH_XLA_DONATE_STRICT", "perhaps")
    with pytest.raises(ValueError, match="TORCH_XLA_DONATE_STRICT='perhaps' is unknown. Set it to off, warn or error"):
        donate_buffer(t)
    compile(torch.neg, donate_argnums=0, strict="warn")(t)
    compile(torch.neg).lower(make(3))


def test_loops_know_the_modes(make):
    carry, _ = scan(lambda c, x: (c + x.sum(), c), make(), make(2, 3), donate="xs", strict="off")
    torch_xla.sync(wait=True)
    assert carry.item() == 15


def test_a_mark_made_in_a_helper_has_its_callers_line(make):
    def helper(t, level):
        donate_buffer(t, stacklevel=level)

    def outer(t, level):
        helper(t, level)

    def line_of(level):
        t = make(3)
        outer(t, level)
        (pending,) = donation_report().pending
        cancel_donation(t)
        return int(pending.where.rpartition(":")[2])

    first = helper.__code__.co_firstlineno
    assert line_of(1) == first + 1
    assert line_of(2) == outer.__code__.co_firstlineno + 1
    assert line_of(3) == line_of.__code__.co_firstlineno + 2
    assert line_of(10**20) > 0  # the outermost line


@each_backend
def test_a_library_that_wraps_compile_shows_its_callers_line(make, options):
    inner = compile(lambda x: x.sum(), donate_argnums=0, strict="error", stacklevel=2, **options)
    default = compile(lambda x: x.sum(), donate_argnums=0, strict="error", **options)

    def library(x, step):
        return step(x)

    for step, line in [
        (inner, inspect.currentframe().f_lineno + 4),
        (default, library.__code__.co_firstlineno + 1),
    ]:
        with pytest.raises(DonationError, match="no output of the step") as raised:
            library(make(3), step)
        assert f"(donated at {__file__}:{line}, step" in str(raised.value)
        assert donation_report(steps=1).donors[-1].where == f"{__file__}:{line}"
    other = compile(donate_argnums=0, strict="off", stacklevel=2)(torch.nn.Linear(3, 3).to("xla"))
    torch_xla.sync()
    library(make(3), other)
    assert donation_report(steps=1).donors[-1].where == f"{__file__}:{inspect.currentframe().f_lineno - 1}"


def test_a_loop_takes_a_stacklevel(make):
    def helper(*args, **kwargs):
        return scan(lambda c, x: (c + x, c), *args, donate="init", stacklevel=2, **kwargs)

    line = inspect.currentframe().f_lineno + 1
    _kept = helper(make(3), make(2, 3))
    assert donation_report().pending[0].where == f"{__file__}:{line}"
    torch_xla.sync()


def test_an_unusable_mark_is_over_and_may_be_made_again(make):
    t = make(3)
    with pytest.warns(DonationWarning):
        total = lose(t)
    out = t + total
    torch_xla.sync()
    assert not is_donated(t) and out.tolist() == [3, 4, 5]
    assert consume(t, lambda t: t + total).tolist() == [3, 4, 5]


def test_a_refused_mark_is_over_and_may_be_made_again(make):
    t = make(4)
    copy = whole_copy(t)
    donate_buffer(t, strict="off")
    out = t + copy
    torch_xla.sync()
    assert not is_donated(t) and not _C.pending()
    del copy
    assert consume(t).tolist() == [1, 2, 3, 4]
    assert is_donated(t) and out.tolist() == [0, 2, 4, 6]


# --- Memory that others see ---


def test_memory_that_dlpack_sees_is_not_changed(make):
    """Also in a graph that has donated before, whose outcome is remembered."""
    from torch_xla.utils import dlpack

    for exported in (True, False, True):
        t = make(1024)
        seen = torch.utils.dlpack.from_dlpack(dlpack.to_dlpack(t)) if exported else None
        assert seen is None or seen.data_ptr() == pointer(t), "the view shares memory, or this test shows nothing"
        before = t.cpu()
        donate_buffer(t)
        out = t * 2
        if exported:
            with pytest.warns(DonationWarning, match="the buffer is exported"):
                torch_xla.sync(wait=True)
            assert torch.equal(seen, before) and torch.equal(t.cpu(), before)
        else:
            torch_xla.sync(wait=True)
        assert is_donated(t) != exported
        assert torch.equal(out.cpu(), before * 2)
        _report.notices._warned_sites.clear()


def test_a_host_array_that_was_not_copied_is_not_changed():
    """torch_xla took it over without a copy."""
    from torch_xla.utils import dlpack

    host = torch.arange(1 << 16).float()
    before = host.clone()
    t = dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(host))
    assert pointer(t) == host.data_ptr(), "no copy was made, or this test shows nothing"
    donate_buffer(t)
    out = t * 2
    torch_xla.sync(wait=True)
    assert torch.equal(host, before)
    assert torch.equal(out.cpu(), before * 2)
    assert pointer(out) != host.data_ptr() and [d.array for d in donation_report(steps=1).donors] == ["f32[65536]"]
    _C.take_notices()


# --- Threads ---


def test_marks_from_several_threads_meet_in_one_step(make):
    tensors = [make(64) + k for k in range(8)]
    torch_xla.sync()
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(donate_buffer, tensors))
    out = [t + 1 for t in tensors]
    torch_xla.sync(wait=True)
    assert all(is_donated(t) for t in tensors)
    assert [o[0].item() for o in out] == [k + 1 for k in range(8)]


def test_an_in_place_update_fulfils_the_mark_and_keeps_tensors(make):
    t = make(4)
    address = pointer(t)
    donate_buffer(t)
    t.add_(1)
    torch_xla.sync(wait=True)
    assert not is_donated(t)
    assert t.tolist() == [1, 2, 3, 4]
    assert pointer(t) == address
    assert donation_report(steps=1).donors[0].outcome == "donated"


def test_steps_that_do_not_read_the_buffer_leave_the_mark(make):
    t, other = make(4), make(4)
    donate_buffer(t)
    torch_xla.sync()
    moved = other + 1
    torch_xla.sync()
    assert not is_donated(t)
    assert [donor.outcome for donor in donation_report().pending] == ["pending"]
    out = t + moved
    torch_xla.sync()
    assert is_donated(t)
    assert out.tolist() == [1, 3, 5, 7]


def just_consumed() -> int:
    """How many buffers stay, when nothing runs any more."""
    xm.wait_device_ops()
    return _C.sizes()["just_consumed"]


def marked(tensors):
    donate_buffer(tensors)
    updated = [t + 1.0 for t in tensors]
    tensors.clear()
    torch_xla.sync()
    return updated


pure = compile(lambda tensors: [t + 1.0 for t in tensors], donate_argnums=0, pure=True)


@pytest.mark.parametrize("update", [marked, pure])
def test_consumed_buffers_stay_until_the_next_run(make, update):
    """XLA's CPU client waits for a run to destroy it. A run that donates nothing ends them, and the hooks rest."""
    other = make(4)
    tensors = [make(4) for _ in range(5)]
    before = _C.sizes()["consumed"]  # tensors of other tests that still wait for the garbage collector
    for _ in range(3):
        memory = pointer(tensors[0])
        tensors = update(tensors)
        assert just_consumed() == 5
        assert pointer(tensors[0]) == memory  # and the array itself is not one of them
    for _ in range(2):
        other = other * 2
        torch_xla.sync()
        assert just_consumed() == 0
    assert _C.sizes()["consumed"] <= before
    assert [t.tolist() for t in tensors] == [[3.0, 4.0, 5.0, 6.0]] * 5


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_an_error_in_the_block_takes_the_marks_back(make, error):
    w, m = make(3), make(5)
    with pytest.raises(error), donate_buffer({"w": w, "m": m}):  # noqa: PT012
        new = w - 0.5 * w, m + 1
        raise error
    torch_xla.sync()  # as a handler that saves a checkpoint
    assert not is_donated(w) and not is_donated(m)
    assert w.tolist() == [0, 1, 2]
    assert new[0].tolist() == [0, 0.5, 1]


@pytest.mark.filterwarnings("error::torch_xla_donate.DonationWarning")
@pytest.mark.parametrize("error", [DonationError, DonationWarning, FloatingPointError])
def test_an_error_of_a_step_keeps_no_tensor_alive(make, error):
    """Without a collection, since automatic donation must not depend on one."""
    tensors = []

    def fail():
        x = make(8)
        tensors.append(weakref.ref(x))
        if error is FloatingPointError:
            with debug_nans():
                y = (x - 1).log()
                torch_xla.sync()
        else:
            donate_buffer(x, strict=error is DonationError)
            y = x[:1] + 1
            torch_xla.sync(wait=True)
        del y

    gc.collect()
    with no_collections():
        failed = False
        try:
            fail()
        except error:
            failed = True
        assert failed
        assert tensors[0]() is None


def test_an_error_in_the_search_of_a_result_takes_the_marks_back(make):
    class Odd:
        @property
        def __class__(self):
            raise ValueError("odd")

    x = make(3)
    with pytest.raises(ValueError, match="odd"):
        compile(lambda x: [x + 1, Odd()], donate_argnums=0)(x)
    torch_xla.sync()
    assert x.tolist() == [0, 1, 2]


@pytest.mark.parametrize(("inside", "fails"), [(True, False), (False, False), (True, True)])
def test_a_block_donates_unless_an_error_comes_before_the_step(make, inside, fails):
    """An error after the step is too late."""
    w = make(3)
    with pytest.raises(ValueError, match="late") if fails else contextlib.nullcontext(), donate_buffer(w):
        new = w + 1
        if inside:
            torch_xla.sync()
        if fails:
            raise ValueError("late")
    torch_xla.sync()
    assert is_donated(w)
    assert torch.equal(new.cpu(), torch.arange(3.0) + 1)


def test_an_error_takes_back_the_marks_of_its_block_only(make):
    """Also those of `into` and of modules. A buffer that was marked before the block is safe as well."""
    module, outer, inner, twice = torch.nn.Linear(3, 3).to("xla"), make(3), make(5), make(6)
    new = inner * 2
    donate_buffer([outer, twice])
    with pytest.raises(ValueError, match="no"), donate_buffer(inner, into=new), donate_buffer([module, twice]):
        raise ValueError("no")
    _results = outer + 1, twice + 1, module.weight + 1
    torch_xla.sync()
    assert [is_donated(t) for t in (outer, inner, twice, module.weight)] == [True, False, False, False]


def test_the_context_holds_no_tensor(make):
    w = make(3)
    gone = weakref.ref(w)
    marks = donate_buffer(w)
    del w
    gc.collect()
    assert gone() is None
    with pytest.raises(ValueError, match="no"), marks:
        raise ValueError("no")


def test_after_an_update_in_place_the_remedy_is_not_a_sync(make):
    """Unless the tensor never had memory."""
    w, pending = make(3), make(3) + 1
    w.mul_(2).add_(1)
    pending.mul_(2)
    with pytest.raises(DonationError, match=r"updated in place since the last step.*automatically. Remove") as error:
        donate_buffer(w)
    assert "torch_xla.sync()" not in str(error.value)
    with pytest.raises(DonationError, match=r"has no buffer yet.*Call torch_xla.sync\(\) first"):
        donate_buffer(pending)
    torch_xla.sync()


def test_a_write_through_a_view_is_marked_before_it(make):
    cache = make(3)
    cache[0] = 7
    with pytest.raises(DonationError, match="mark the tensor before you write to it through a view"):
        donate_buffer(cache)
    torch_xla.sync()
    place = pointer(cache)
    donate_buffer(cache)
    cache[1] = 8
    torch_xla.sync()
    assert cache.tolist() == [7.0, 8.0, 2.0]
    assert pointer(cache) == place
    assert donation_report(steps=1).reused_fraction == 1.0


def test_less_than_everything_is_never_100_percent(make):
    assert percent(1.0) == "100.0%"
    assert percent(0.9999999) == "99.9%"
    assert percent(0.0) == "0.0%"
    large, small = make(512, 512), make(3)
    donate_buffer([large, small])
    _result = large + small.sum()
    with pytest.warns(UserWarning, match="not usable"):
        torch_xla.sync(wait=True)
    assert "1 of 2 donors donated, 1.0 MiB (99.9% of" in str(donation_report(steps=1))
