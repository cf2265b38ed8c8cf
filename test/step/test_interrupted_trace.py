"""KeyboardInterrupt at every instruction that enters or leaves a context of the package leaves nothing behind."""

from __future__ import annotations

import contextlib
import dis
import functools
import gc
import sys
import threading
import types

import pytest
import torch
import torch_xla
from children import in_process
from helpers import make
from torch.nn.modules import module as modules
from torch.utils import _python_dispatch
from torch_xla import _XLAC
from torch_xla._dynamo import dynamo_bridge

from torch_xla_donate import (
    _C,
    _host,
    _marks,
    _modes,
    _report,
    _trace,
    auto_donate,
    compile,
    debug_nans,
    donate_buffer,
    donation_disabled,
    expect_donated,
    is_donated,
)

pytestmark = pytest.mark.filterwarnings("ignore::torch_xla_donate.DonationWarning")

# Entering and leaving, of this package, of torch's modes and of contextlib, and what they call.
FUNCTIONS = {
    "__enter__", "__exit__", "enter", "leave", "finish", "restore", "check_outputs", "remove_module_hook",
    "_push_mode", "_pop_mode", "register_module_forward_pre_hook", "postpone_notices", "compilations",
    "tracing", "graph_name", "replaced", "host_reads_refused", "donor_flags", "consumed", "is_replaced",
    "has_new_gradient", "compile_graph", "cancel", "_recreate_cm", "_mark", "read", "write", "one_scan",
    "compiling_graphs", "last_entry",
}  # fmt: skip
FLAGS = [name for name in vars(_python_dispatch) if name.startswith("_is_in_")]


def state():
    """The state that an interrupt could leave behind on this thread."""
    return {
        "function modes": torch._C._len_torch_function_stack(),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "gradients": torch.is_grad_enabled(),
        "threads of autograd": torch._C._is_multithreading_enabled(),
        "flags of modes": [getattr(_python_dispatch, name) for name in FLAGS],
        "module hooks": len(modules._global_forward_pre_hooks),
        "inside": _marks.inside_call.value,
        "body": _marks.current_body.value,
        "watcher": _trace.current_watcher.value,
        "postponed": _report.notices._postponed.value,
        "disabled": _C.disabled_reason().code,
        "auto": _C.auto_donates(),
        "eager": _XLAC._get_use_eager_mode(),
        "executes": _XLAC._get_allow_execution(),
        "aliases": _XLAC._xla_get_enable_alias_with_buffer_donor_config(),
        "graph name": _XLAC._get_current_graph_name(),
        "bridge": (dynamo_bridge.extract_graph_helper, dynamo_bridge.SpecialReturnHandler),
        "locks": [lock._is_owned() for lock in (_host.switches.compiling, _host.loops._scanning)],
    }


@functools.cache
def ends_of_with(code: types.CodeType) -> frozenset[int]:
    """At the end of a `with` without an error. Python checks for no signal between the three Nones and the call."""
    plain = [i for i in dis.get_instructions(code) if i.opname not in ("PRECALL", "CACHE")]
    found: set[int] = set()
    for at in range(len(plain) - 3):
        *nones, call = plain[at : at + 4]
        if all(i.opname == "LOAD_CONST" and i.argval is None for i in nones) and call.opname.startswith("CALL"):
            found.update(range(nones[0].offset, call.offset + 1))
    return frozenset(found)


class Interrupter:
    """Raises KeyboardInterrupt before the k-th instruction that the functions named execute."""

    def __init__(self, at):
        self._left = at
        self.where = None

    def _call(self, frame, event, argument):
        if frame.f_code.co_name not in FUNCTIONS or not self._is_known(frame.f_code):
            return None
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        return self._instruction

    @staticmethod
    def _is_known(code: types.CodeType) -> bool:
        return any(part in code.co_filename for part in ("torch_xla_donate/", "torch/", "contextlib.py"))

    def _instruction(self, frame, event, argument):
        if event == "opcode" and self.where is None and frame.f_lasti not in ends_of_with(frame.f_code):
            self._left -= 1
            if self._left < 0:
                self.where = f"{frame.f_code.co_name}:{frame.f_lineno} at {frame.f_lasti}"
                raise KeyboardInterrupt
        return self._instruction

    def run(self, function):
        """Whether it was interrupted."""
        before = sys.gettrace()
        sys.settrace(self._call)
        try:
            function()
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        return self.where is not None


def interrupt_everywhere(function, check):
    """Runs it once for each instruction, and once more without an interrupt; how often it was interrupted."""
    before = state()
    with collected_by_hand():
        return _interrupt_everywhere(function, check, before)


@contextlib.contextmanager
def collected_by_hand():
    """Objects made inside stay in the youngest generation, which is collected quickly."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _interrupt_everywhere(function, check, before):
    for at in range(100_000):
        interrupter = Interrupter(at)
        interrupted = interrupter.run(function)
        gc.collect(0)  # a generator that was left suspended ends now
        after = state()
        assert after == before, (interrupter.where, {k: (before[k], after[k]) for k in before if before[k] != after[k]})
        check(interrupter.where)
        if not interrupted:
            return at
    raise AssertionError("it does not end")


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
    "replaced": lambda: _host.interrupts.replaced(
        dynamo_bridge, "extract_graph_helper", None, _host.switches.compiling
    ),
}


@pytest.mark.parametrize("raises", [False, True])
@pytest.mark.parametrize("name", CONTEXTS)
def test_every_instruction_of_a_context(name, raises):
    def use():
        try:
            with CONTEXTS[name]():
                if raises:
                    raise ValueError
        except ValueError:
            pass

    assert interrupt_everywhere(use, lambda where: None) > 0


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
    entered, first_left = threading.Barrier(2), threading.Barrier(2)
    failures = []

    def visit(leaves_first):
        try:
            before = state()
            with contextlib.ExitStack() as stack:
                for context in contexts:
                    stack.enter_context(context)
                inside = state()
                entered.wait()
                if not leaves_first:
                    first_left.wait()
                assert state() == inside
            assert state() == before
            if leaves_first:
                first_left.wait()
        except BaseException as error:
            failures.append(repr(error))
            entered.abort()
            first_left.abort()

    threads = [threading.Thread(target=visit, args=[first]) for first in (True, False)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def generator():
    yield


async def coroutine():
    pass


async def asynchronous_generator():
    yield


@pytest.mark.parametrize("mode", [donation_disabled, debug_nans, expect_donated])
def test_a_mode_refuses_functions_whose_body_runs_later(mode):
    class Callable:
        def __call__(self):
            yield

    for function, kind in [
        (generator, "generator is a generator function"),
        (coroutine, "coroutine is an async def function"),
        (asynchronous_generator, "asynchronous_generator is an async generator function"),
        (functools.partial(generator), "is a generator function"),
        (Callable(), "is a generator function"),
    ]:
        with pytest.raises(TypeError, match=rf"{kind}, and .*`with {mode.__name__}\(\):` inside its body"):
            mode()(function)
    assert donation_disabled()(lambda: _C.disabled())()


def test_nested_contexts_end_in_their_order():
    with donation_disabled() as outer:
        assert _C.disabled()
        with outer, debug_nans(infs=True):
            assert _C.disabled()
        assert _C.disabled()
    assert not _C.disabled()

    @donation_disabled()
    def disabled(depth):
        assert _C.disabled()
        return disabled(depth - 1) if depth else _C.disabled_reason().code == "disabled"

    assert disabled(2)
    assert not _C.disabled()


@pytest.mark.parametrize("fails", [False, True])
@in_process()
def test_every_instruction_of_a_pure_trace(fails):
    """The trace enters its modes, hooks, switches and flags, and leaves them; the next call is right."""
    module = torch.nn.Linear(3, 3).to("xla").requires_grad_(False)
    w, x = make(3), make(3)
    marks = len(_C.pending())

    def f(s):
        if fails:
            raise ValueError
        return {"w": s["w"] + module(s["x"]) * 0, "x": s["x"]}

    def use():
        g = compile(f, pure=True, donate_argnums=0)
        with contextlib.suppress(ValueError):
            g({"w": w, "x": x})

    def check(where):
        nonlocal w
        assert x.tolist() == [0, 1, 2], where
        assert len(_C.pending()) == marks, where
        if is_donated(w):
            w = make(3)
        assert w.tolist() == [0, 1, 2], where

    assert interrupt_everywhere(use, check) > 200
    g = compile(lambda s: s + 1, pure=True, donate_argnums=0)
    y = make(3)
    assert g(y).tolist() == [1, 2, 3]
    assert is_donated(y)


@pytest.mark.parametrize(
    "options", [{}, {"backend": "openxla"}, {"pure": True}], ids=["lazy", "openxla", "pure replay"]
)
@in_process()
def test_every_instruction_of_a_call(options):
    g = compile(lambda s: {"w": s["w"] + 1, "x": s["x"]}, donate_argnums=0, **options)
    x = make(3)
    g({"w": make(3), "x": x})
    made = [make(3)]

    def use():
        result = g({"w": made[0], "x": x})
        assert result["w"].tolist() == [1, 2, 3]

    def check(where):
        torch_xla.sync()
        assert x.tolist() == [0, 1, 2], where
        assert not _C.pending(), where
        if is_donated(made[0]):
            made[0] = make(3)
        assert made[0].tolist() == [0, 1, 2], where

    assert interrupt_everywhere(use, check) > 50
    use()


@in_process()
def test_every_instruction_of_lower():
    g = compile(lambda a: a + 1, donate_argnums=0)
    a = make(3)

    def check(where):
        assert a.tolist() == [0, 1, 2], where

    assert interrupt_everywhere(lambda: g.lower(a).compile(), check) > 100
    donate_buffer(a)
    b = a + 1
    torch_xla.sync(wait=True)
    assert is_donated(a)
    assert b.tolist() == [1, 2, 3]
