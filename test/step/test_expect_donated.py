"""expect_donated: it counts the steps that begin inside, and no others."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch_xla
from helpers import each_backend, error_of, lose

from torch_xla_donate import (
    _C,
    DonationError,
    DonationWarning,
    Reason,
    _report,
    auto_donate,
    compile,
    donate_buffer,
    donation_disabled,
    donation_report,
    expect_donated,
)


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
