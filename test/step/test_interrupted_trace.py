"""A signal at every instruction that enters or leaves a context of the package leaves nothing behind."""

from __future__ import annotations

import contextlib
import functools
from concurrent.futures import ThreadPoolExecutor

import pytest
from interrupts import interrupt_everywhere, state

from torch_xla_donate import _C, _host, _marks, _modes, _report, auto_donate, debug_nans, donation_disabled

pytestmark = pytest.mark.filterwarnings("ignore::torch_xla_donate.DonationWarning")

CONTEXTS = {
    "donation_disabled": donation_disabled,
    "donation_disabled with reports": lambda: donation_disabled(report_reuse=True),
    "debug_nans": debug_nans,
    "debug_nans with infs": lambda: debug_nans(infs=True),
    "auto_donate": auto_donate,
    "auto_donate off": lambda: auto_donate(False),
    "restored": lambda: _host.interrupts.Restored(),
    "postpone_notices": _report.postpone_notices,
    "a scan": lambda: _host.one_scan(),
    "replaced": lambda: _marks.inside_call.replaced(True),
}


@pytest.mark.parametrize("error", [KeyboardInterrupt, TimeoutError])
@pytest.mark.parametrize("name", CONTEXTS)
def test_every_instruction_of_a_context(name, error):
    def use(raises):
        try:
            with CONTEXTS[name]():
                if raises:
                    raise ValueError
        except ValueError:
            pass

    for raises in (False, True):
        assert interrupt_everywhere(functools.partial(use, raises), lambda where: None, error) > 0


@pytest.mark.parametrize("name", [name for name in CONTEXTS if isinstance(CONTEXTS[name](), _modes.ThreadMode)])
def test_every_instruction_of_a_context_entered_again(name):
    """An interrupt of the inner entry must not end the outer one."""
    before = state()
    context = CONTEXTS[name]()

    def use():
        with context:
            pass

    with context:
        outer = state()
        assert interrupt_everywhere(use, lambda where: None) > 0
        with context, context:
            pass
        assert state() == outer
    assert state() == before


def test_a_context_of_several_threads():
    """They are inside one object at the same time, and leave it in the order in which they came."""
    contexts = [donation_disabled(), debug_nans(infs=True), auto_donate(False)]
    with ThreadPoolExecutor(1) as thread, contextlib.ExitStack() as first:

        def there(function, *args):
            return thread.submit(function, *args).result()

        before, before_there, second = state(), there(state), contextlib.ExitStack()
        for context in contexts:
            first.enter_context(context)
        inside = state()
        for context in contexts:
            there(second.enter_context, context)
        assert state() == inside
        inside_there = there(state)
        first.close()
        assert (state(), there(state)) == (before, inside_there)
        there(second.close)
        assert (state(), there(state)) == (before, before_there)


def test_a_decorated_function_may_call_itself():
    @donation_disabled()
    def disabled(depth):
        assert _C.disabled()
        return disabled(depth - 1) if depth else _C.disabled_reason().code == "disabled"

    assert disabled(2)
    assert not _C.disabled()
