"""Finds the user's frames, and clears the others after an error."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import traceback
import types
from collections.abc import Sequence


def is_internal(frame: types.FrameType) -> bool:
    """Whether a frame belongs to this package, torch, torch_xla, pytest or a helper, and not to the user."""
    return is_internal_code(str(frame.f_globals.get("__name__", "")), frame.f_code.co_filename)


@functools.lru_cache(maxsize=1024)  # called for each donation
def is_internal_code(module: str, file: str) -> bool:
    """The same for code of this module and file."""
    generated = file.startswith("<eval_with_key>")  # torch.fx
    return generated or module.partition(".")[0] in _INTERNAL


_INTERNAL = {
    *("torch", "torch_xla", "torch_xla_donate", "contextlib", "functools", "runpy", "typing_extensions"),
    # A search for names through the variables of pytest and its workers would visit all tests.
    *("_pytest", "pluggy", "xdist", "execnet", "__channelexec__"),
}


def call_site(stacklevel: int = 1) -> str:
    """``file:line`` of the nearest caller outside this package, torch and torch_xla. With 2: of its caller."""
    frame = sys._getframe(1)
    while stacklevel > 0 and (back := frame.f_back) is not None:
        frame = back
        stacklevel -= not is_internal(frame)
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def site_of(stack: Sequence[tuple[str, str, int]]) -> str:
    """``file:line`` of the innermost user frame of (module, file, line), innermost first; empty if there is none."""
    found = next((frame for frame in stack if not is_internal_code(frame[0], frame[1])), None)
    # Processes of multiprocessing normalise the path of the program.
    return "" if found is None else f"{os.path.normpath(found[1])}:{found[2]}"


def line_of(error: BaseException) -> str:
    """``file:line`` of the innermost user frame in an error's traceback."""
    found = "unknown line"
    for frame, line in traceback.walk_tb(error.__traceback__):
        if not is_internal(frame):
            found = f"{frame.f_code.co_filename}:{line}"
    return found


def user_frame() -> types.FrameType | None:
    """The innermost frame outside torch, torch_xla and this package; None if there is none."""
    frame = _outside(sys._getframe(1))
    if frame is not None:
        return frame
    # Autograd runs the backward pass on threads without Python frames, while its caller waits.
    waiting = [frame for frame in sys._current_frames().values() if frame.f_code.co_name == "_engine_run_backward"]
    return _outside(waiting[0]) if len(waiting) == 1 else None


def _outside(frame: types.FrameType | None) -> types.FrameType | None:
    while frame is not None and is_internal(frame):
        frame = frame.f_back
    return frame


def forget_values(error: BaseException, handled: BaseException | None, *, of_user: bool = False) -> None:
    """Clears the frames in an error's traceback; the user's, whose values a debugger may show, only with `of_user`.

    After a failed trace of torch_xla they hold placeholders. A sync ends the process if one of these is alive.
    handled: what the program was handling before the trace. Its frames stay: one may be a generator that waits.
    """
    found: BaseException | None = error
    while found is not None and found is not handled:
        for frame, _ in traceback.walk_tb(found.__traceback__):
            if of_user or is_internal(frame):
                with contextlib.suppress(RuntimeError):  # a running frame cannot be cleared
                    frame.clear()
        found = found.__context__
