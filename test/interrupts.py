"""Interrupts a function at every instruction that enters or leaves a context, or by a signal as it is called."""

from __future__ import annotations

import collections
import ctypes
import dis
import functools
import gc
import operator
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
from helpers import no_collections
from torch.nn.modules import module as modules
from torch.utils import _python_dispatch
from torch_xla import _XLAC

from torch_xla_donate import _C, _host, _marks, _report, _trace

# Entering and leaving, of this package, of torch's modes and of contextlib, and what they call.
FUNCTIONS: set[str] = {
    "__enter__", "__exit__", "enter", "leave", "finish", "restore", "check_outputs",
    "_push_mode", "_pop_mode", "register_module_forward_pre_hook", "postpone_notices",
    "graph_name", "replaced", "host_reads_refused", "donor_flags", "consumed", "is_replaced",
    "has_new_gradient", "compile_graph", "_recreate_cm", "_mark", "read", "write", "one_scan",
    "compiling_graphs", "make_entry", "last_entry", "switch_on", "switch_off",
}  # fmt: skip
FLAGS = [name for name in vars(_python_dispatch) if name.startswith("_is_in_")]


def state() -> dict[str, Any]:
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
        "postponed": _report.postponed.value,
        "disabled": _C.disabled_reason().code,
        "auto": _C.auto_donates(),
        "eager": _XLAC._get_use_eager_mode(),
        "executes": _XLAC._get_allow_execution(),
        "aliases": _XLAC._xla_get_enable_alias_with_buffer_donor_config(),
        "graph name": _XLAC._get_current_graph_name(),
        "locks": [lock._is_owned() for lock in (_host.switches.compiling, _host.loops._scanning)],
    }


@functools.cache
def ends_of_with(code: types.CodeType) -> frozenset[int]:
    """At the end of a `with` without an error. Python checks for no signal between the three Nones and the call.

    Python 3.10 loads one None, and copies it twice.
    """
    plain = [i for i in dis.get_instructions(code) if i.opname not in ("PRECALL", "CACHE")]
    found: set[int] = set()
    for at in range(len(plain) - 3):
        *nones, call = plain[at : at + 4]
        is_none = [i.opname == "DUP_TOP" or (i.opname == "LOAD_CONST" and i.argval is None) for i in nones]
        if all(is_none) and call.opname.startswith("CALL"):
            found.update(range(nones[0].offset, call.offset + 1))
    return frozenset(found)


class Interrupter:
    """Raises an error of a signal handler before the k-th instruction that the functions named execute."""

    def __init__(self, at, error=KeyboardInterrupt):
        self._left = at
        self._error = error
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
                raise self._error
        return self._instruction

    def run(self, function):
        """Whether it was interrupted."""
        before = sys.gettrace()
        # Python 3.12 sends events of instructions only if the frame that sets the trace function asks for them.
        sys._getframe().f_trace_opcodes = True
        sys.settrace(self._call)
        try:
            function()
        except self._error:
            pass
        finally:
            sys.settrace(before)
        return self.where is not None


def interrupt_everywhere(
    function: Callable[[], Any],
    check: Callable[[str | None], Any],
    error: type[BaseException] = KeyboardInterrupt,
) -> int:
    """Runs it once for each instruction, and once more without an interrupt; how often it was interrupted."""
    before = state()
    Interrupter(sys.maxsize).run(function)  # Python 3.13.0 sends none the first time that code is traced
    gc.collect()
    with no_collections():  # objects made inside stay in the youngest generation, which is collected quickly
        for at in range(100_000):
            interrupter = Interrupter(at, error)
            interrupted = interrupter.run(function)
            gc.collect(0)  # a generator that was left suspended ends now
            after, where = state(), interrupter.where
            assert after == before, (where, {k: (before[k], after[k]) for k in before if before[k] != after[k]})
            check(where)
            if not interrupted:
                return at
    raise AssertionError("it does not end")


def with_pending(number: int, call: Callable[[], object]) -> type[BaseException] | None:
    """Calls a function that is not Python code with a signal pending; returns the type of what it raises.

    C's `raise` returns when Python has noted the signal, unlike Python's, which runs the handler before it returns.
    No bytecode runs between it and the call.
    """
    send = functools.partial(ctypes.CDLL(None)["raise"], int(number))
    calls = map(operator.methodcaller("__call__"), [send, call])
    gc.disable()  # JAX has a callback of the collector, in which the handler would run and its error would be ignored
    try:
        collections.deque(calls, maxlen=0)
    except BaseException as error:
        return type(error)
    finally:
        gc.enable()
    return None
