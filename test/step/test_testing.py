"""torch_xla_donate.testing: the assertions and the contexts of the fixtures."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch_xla
from helpers import consume, error_of, lose

from torch_xla_donate import (
    DonationWarning,
    _report,
    cancel_donation,
    compile,
    donate_buffer,
    donation_disabled,
    donation_report,
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
