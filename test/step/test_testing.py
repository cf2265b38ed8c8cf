"""torch_xla_donate.testing and expect_donated: the assertions and the contexts of the fixtures."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch_xla
from helpers import consume, each_backend, error_of, lose

from torch_xla_donate import (
    _C,
    DonationError,
    DonationWarning,
    Reason,
    _report,
    auto_donate,
    cancel_donation,
    compile,
    donate_buffer,
    donation_disabled,
    donation_report,
    expect_donated,
    hlo,
    testing,
)
from torch_xla_donate.testing import (
    assert_aliased,
    assert_donated,
    assert_not_donated,
    assert_reused,
    no_unusable_donation,
)


def test_donated_tensors_are_told_from_others(make):
    state = {"w": make(30), "n": make(7)}
    assert_not_donated(state)
    donate_buffer(state, strict="off")
    _out = state["w"] + state["n"].sum()
    torch_xla.sync()
    assert_donated(state["w"])
    assert_not_donated([state["n"], None])
    assert error_of(AssertionError, assert_donated, state) == (
        "expected to be donated:\n"
        "  tensors['n'] float32[7]: no output of the step has its size of 28 bytes (outputs: 1 of 120 bytes)\n"
        "See `python -m torch_xla_donate explain testing`."
    )
    with pytest.raises(AssertionError, match=r"not to be donated:\n  tensors\['w'\] float32\[30\] was donated"):
        assert_not_donated(state)
    assert_reused(0.81, steps=1)
    with pytest.raises(AssertionError, match=r"reused_fraction is 81.1%, expected at least 95.0%.\n1"):
        assert_reused(steps=1)


def test_marks_and_other_tensors_are_explained(make):
    """Long lists are cut."""
    t = make(3)
    donate_buffer(t)
    for tensor, why in [
        (t, "no step has read it yet"),
        (make(3), "no kept step was offered it"),
        (torch.ones(3), ""),
    ]:
        with pytest.raises(AssertionError, match=f"float32.3.: {why}"):
            assert_donated(tensor)
    cancel_donation(t)
    with pytest.raises(AssertionError, match=r"\.\.\. and 5 more"):
        assert_donated([torch.ones(1)] * 25)
    with pytest.raises(TypeError, match="tensors.1. is of type str, not a tensor. Remove this leaf"):
        assert_donated([t, "t"])


@pytest.fixture(scope="module")
def executable():
    """Of three arguments the first two are donated, and the first is aliased."""
    update = compile(lambda state, small, x: state * 2 + small.sum() + x, donate_argnums=(0, 1))
    arguments = [torch.ones(30).to("xla"), torch.ones(7).to("xla"), torch.ones(30).to("xla")]
    torch_xla.sync(wait=True)
    return update.lower(*arguments).compile()


def test_aliases_are_found_by_number_and_by_name(executable):
    names = {donor.name: donor for donor in executable.donors}
    (used,) = [name for name, donor in names.items() if donor.output is not None]
    (unused,) = [name for name, donor in names.items() if donor.output is None]
    assert_aliased(executable, used, "state")
    assert_aliased(executable, names[used].donor.parameter_number)
    for asked in ([], [unused], [used, unused], [names[unused].donor.parameter_number]):
        with pytest.raises(
            AssertionError,
            match=r"no output reuses the memory of:\n  .*f32\[7\]: no output of the step",
        ):
            assert_aliased(executable, *asked)


def test_texts_files_and_modules_are_accepted(executable, tmp_path):
    text = executable.as_text()
    (tmp_path / "step.txt").write_text(text, encoding="utf-8")
    module = hlo.parse(text)
    used = module.aliases[0].parameter_number
    (unused,) = [donor.parameter_number for donor in module.donors]
    for given in (text, tmp_path / "step.txt", module, hlo.DumpedModule(None, module)):
        assert_aliased(given, used)
        with pytest.raises(AssertionError, match=rf"no output reuses the memory of:\n  parameter {unused} f32\[7\]"):
            assert_aliased(given)
        other = min(set(range(len(module.leaves))) - {used, unused})
        with pytest.raises(AssertionError, match=rf"parameter {other} f32\[30\]: it is not a donor"):
            assert_aliased(given, other)


def test_bad_modules_and_parameters_are_refused(executable, tmp_path):
    text = executable.as_text()
    count = len(hlo.parse(text).leaves)
    plain = "HloModule m, entry_computation_layout={(f32[2]{0})->f32[2]{0}}\n"
    for module, parameters, error, message in [
        (text, [count], ValueError, f"parameters has {count}, but the module has {count} input arrays"),
        (text, [-1], ValueError, f"parameters has -1, but the module has {count} input arrays"),
        (text, ["w"], ValueError, "parameters has 'w', but this module has no names. Pass the number"),
        (executable, ["w"], ValueError, "parameters has 'w', which is not the name of a donor. Use one of 'small'"),
        (text, [1.0], TypeError, "parameters has 1.0, of type float. Pass numbers or names"),
        (3, [], TypeError, "module is of type int, which is not compiled HLO"),
        (tmp_path, [], ValueError, r"module is the folder '.*'. Pass one of hlo.read_dump\(folder\)"),
        (plain, [], AssertionError, "the module has neither donors nor aliases, expected at least one"),
    ]:
        with pytest.raises(error, match=message):
            assert_aliased(module, *parameters)


@pytest.mark.parametrize("options", [{}, {"pure": True}], ids=["lazy", "pure"])
def test_the_modules_of_a_test_are_recorded(make, tmp_path, options):
    update = compile(lambda x: x * 3 - 1, donate_argnums=0, **options)
    value = update(make(11))
    with testing.HloDump(tmp_path / "hlo") as dump:
        assert dump.modules() == ()
        value = update(value)
        value = update(value)
        (first,) = dump.modules()
        assert_aliased(first)
        other = value + 1
        str(other)  # a read is not a step
        assert len(dump.modules()) == 1
        _total = value.sum()
        torch_xla.sync()
    update(make(12))
    modules = hlo.read_dump(tmp_path / "hlo")
    assert [len(module.aliases) for module in modules] == [1, 0]
    assert dump.modules() == modules


def lose_inside(lost, error=None, **options):
    with testing.no_unusable_donation():
        lose(lost, **options)
        if error is not None:
            raise error


def test_an_unusable_donation_fails_the_context(make):
    value, lost = make(30), make(7)
    with testing.no_unusable_donation():
        consume(value)
        with donation_disabled():
            lose(lost)
    with pytest.warns(DonationWarning), pytest.raises(AssertionError, match=r"f32\[7\]: no output of the step"):
        lose_inside(lost)
    with pytest.raises(AssertionError, match=r"f32\[7\]: no output of the step"):
        lose_inside(lost, strict="off")
    with pytest.raises(KeyError):
        lose_inside(lost, KeyError("mine"), strict="off")


def test_other_threads_fail_the_context_too(make):
    lost = make(7)
    watch = testing.no_unusable_donation()
    watch.enter()
    with ThreadPoolExecutor(1) as other:
        other.submit(lose, lost, strict="off").result()
    with pytest.raises(AssertionError, match=r"f32\[7\]: no output of the step"):
        watch.finish()
    watch.leave(raised=True)


@pytest.mark.parametrize("failed", [False, True])
def test_a_strict_error_does_not_reach_the_next_test(make, failed):
    """`sync` would raise it in the step that follows."""
    lost, watch = make(3), no_unusable_donation()
    watch.enter()
    try:
        with _report.postpone_notices():  # or sync() raises, if the step has started by then
            total = lose(lost, strict="error")
        if not failed:
            with pytest.raises(AssertionError, match="were not usable: f32"):
                watch.finish()
    finally:
        watch.leave(raised=failed)
    donation_report()
    torch_xla.sync(wait=True)
    assert total.item() == 3.0


def test_dumps_may_overlap(make, tmp_path):
    def step(value):
        value = value + 1
        torch_xla.sync()
        return value

    value = step(make(9))
    with testing.HloDump(tmp_path / "outer") as outer:
        value = step(value)
        with testing.HloDump(tmp_path / "inner") as inner:
            value = step(value) * 2
            torch_xla.sync()
        value = step(value)
    assert len(inner.modules()) == 2
    assert len(outer.modules()) == 2


@pytest.mark.parametrize("check", [assert_donated, assert_not_donated])
def test_no_tensor_is_refused(check):
    with pytest.raises(ValueError, match=r"tensors has no tensor: \[None\]. Pass at least one tensor. .* testing"):
        check([None])


@pytest.mark.parametrize(("value", "error"), [("a", TypeError), (95, ValueError), (float("nan"), ValueError)])
def test_a_bad_fraction_is_refused(value, error):
    with pytest.raises(error, match="at_least is"):
        assert_reused(value)


# --- expect_donated counts the steps that begin inside, and no others ---


def step(value, mark=True):
    if mark:
        donate_buffer(value)
    value = value * 0.5
    torch_xla.sync()
    return value


def loop(value, *marks):
    """A step for each of these: whether it donates its input."""
    for mark in marks:
        value = step(value, mark)
    return value


def test_steps_beyond_the_kept_ones_count(make):
    """The first step is not donated, and 20 others are."""
    block = expect_donated(0.999)
    with pytest.warns(DonationWarning, match="no output"), pytest.raises(DonationError) as raised, block:  # noqa: PT012
        lose(make(7))
        loop(make(100), *[True] * 20)
    assert len(donation_report().steps) == 8
    assert donation_report().reused_fraction == 1.0
    text = str(raised.value)
    assert text.startswith("expect_donated: the reused_fraction of this block is 99.7%, and min_fraction is 0.999. ")
    assert "f32[7]: no output of the step has its size of 28 bytes" in text


def test_steps_before_and_after_do_not_count(make):
    value = make(100)
    lose(make(7), strict="off")
    with expect_donated(1.0):
        value = step(value)
    lose(make(7), strict="off")


def test_no_donor_is_a_failure(make):
    for steps in (0, 2):
        value = step(make(10))  # a step before that donates does not count
        with pytest.raises(DonationError, match="expect_donated: no donor was offered in the steps") as raised:
            expect_donated()(loop)(value, *[False] * steps)
        assert "explain testing" in str(raised.value)


def test_a_loop_that_loses_its_donors_fails(make):
    """The text has the fraction and both of its factors."""
    text = error_of(DonationError, expect_donated()(loop), make(10), True, True, False, False)
    assert "the reused_fraction of this block is 50.0%, and min_fraction is 0.95" in text
    assert "reused 100.0% of the bytes offered (80 of 80), and 2 of 4 steps had donors" in text
    expect_donated(0.5)(loop)(make(10), True, True, False, False)
    expect_donated(1.0)(loop)(make(10), False, False, True, True)  # as in the report


def test_nested_blocks_count_separately(make):
    value = make(10)
    with expect_donated(0.5):
        value = step(value)
        with expect_donated(1.0):
            value = step(value)
        value = step(value, mark=False)  # 2 of 3 steps
    block = expect_donated(0.6)
    with block:
        with block:
            value = step(value)
        value = loop(value, True, False)  # 2 of 3 steps


def test_a_block_entered_by_two_threads_counts_each_ones_steps(make):
    """The second thread enters the block before the first one leaves it. Their steps come one after the other."""
    block, donated, kept = expect_donated(1.0), make(30), make(40)
    with ThreadPoolExecutor(1) as other:
        with block:
            other.submit(block.__enter__).result()
            step(donated)
            other.submit(step, kept, mark=False).result()
        with pytest.raises(DonationError, match="no donor was offered in the steps of this block"):
            other.submit(block.__exit__, None, None, None).result()


def test_a_failed_end_leaves_the_block(make):
    block = expect_donated()
    value = make(10)
    for _ in range(2):
        with pytest.raises(DonationError, match="no donor was offered"), block:
            value = step(value, mark=False)
    with pytest.raises(KeyError, match="mine"), block:  # the exception of the block
        raise KeyError("mine")
    with block:
        with block:
            value = step(value)
        with pytest.raises(KeyError), block:
            raise KeyError
        value = step(value)
    assert not block.depth


def test_strict_donations_are_the_cause_of_the_failure(make):
    @expect_donated()
    def run(lost):
        with _report.postpone_notices():  # else the sync raises, if the step has started by then
            lose(lost, strict=True)

    with pytest.raises(DonationError, match="expect_donated: the reused_fraction of this block is 0.0%") as raised:
        run(make(7))
    assert isinstance(raised.value.__cause__, DonationError)


def test_disabled_donation_fails_and_says_so(make):
    with pytest.raises(DonationError, match=r"block is 0.0%(.|\n)*ran inside donation_disabled\(\) or debug_nans\(\)"):
        expect_donated()(donation_disabled()(step))(make(10))


def test_automatic_donors_count(make):
    def loop(value, kept=None):
        """With a list it keeps each value."""
        with expect_donated(), auto_donate():
            for _ in range(3):
                value = value + 1
                if kept is not None:
                    kept.append(value)
                torch_xla.sync()
        return value

    value = loop(make(50))
    with pytest.raises(DonationError, match="no donor was offered"):
        loop(value, [value])


def counted(make, call, *args) -> tuple[int, int, int, int, int]:
    """One call: its steps with donors and without, bytes offered and donated, and steps that lost donors."""
    tally = _C.StepTally()
    tally.open(all_threads=False)
    try:
        step(make(10))  # steps without donors count from the first step with donors on
        call(*args)
        _C.wait_for_steps()
        found = tally.read()
    finally:
        tally.close()
    assert found["unusable"] == [] or len(found["unusable"]) == 1
    return (
        found["steps"] - 1,
        found["plain_steps"],
        found["offered_bytes"] - 40,
        found["donated_bytes"] - 40,
        len(found["unusable"]),
    )


@each_backend
def test_a_call_with_unread_arguments_is_one_step(make, options):
    """Also if it has compiled its graph before, and if its run still goes on when the call ends."""
    for reads in (True, False):

        def scale(x, y, reads=reads):
            return x * 0.5 if reads else torch.ones(3, device="xla")

        f = compile(scale, donate_argnums=(0, 1), strict="off", **options)
        for _ in range(2):
            x, y = make(100), make(50)
            assert counted(make, f, x, y) == (1, 0, 600, 400 if reads else 0, 1)
            donors = donation_report(steps=1).donors
            assert [donor.outcome for donor in donors] == ["donated" if reads else "unusable", "unusable"]
            assert donors[1].reason_code is Reason.NOT_READ
            assert y.tolist() == list(range(50))


@each_backend
def test_a_call_counts_as_one_step_unless_it_fails(make, options):
    def fail(x):
        raise KeyError("mine")

    def call(x):
        with pytest.raises(KeyError):
            compile(fail, donate_argnums=0, **options)(x)

    x = make(7)
    assert counted(make, call, x) == (0, 0, 0, 0, 0)
    assert counted(make, step, x) == (1, 0, 28, 28, 0)
    assert counted(make, step, make(3), False) == (0, 1, 0, 0, 0)
    assert counted(make, compile(lambda x: x * 0.5, **options), make(9)) == (0, 1, 0, 0, 0)
    g = compile(lambda x: x * 1, donate_argnums=0, **options)
    assert counted(make, g, make(9)) == (1, 0, 36, 36, 0)
    with donation_disabled():
        assert counted(make, g, make(9))[:2] == (1, 0)


def test_a_closed_tally_counts_no_steps(make):
    value = make(10)
    with expect_donated():
        value = step(value)
    tally = _C.StepTally()
    tally.open(all_threads=True)
    tally.close()
    tally.close()
    value = step(value)
    assert tally.read() == {"steps": 0, "plain_steps": 0, "offered_bytes": 0, "donated_bytes": 0, "unusable": []}


def test_a_fraction_is_a_number_above_0():
    for fraction, error in (
        ("0.5", "is of type str, not a number"),
        (True, "is of type bool"),
        (0, "is 0. Pass"),
        (1.5, "is 1.5. Pass"),
    ):
        with pytest.raises((TypeError, ValueError), match=f"min_fraction {error}"):
            expect_donated(fraction)
