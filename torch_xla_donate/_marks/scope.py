"""Whether this thread is inside a call of a compiled function, which donates only its arguments."""

from __future__ import annotations

import threading

from torch_xla_donate._host import interrupts


class _Scope(threading.local):
    inside = False  # of a compiled function's call


call_scope = _Scope()
interrupts.restore(call_scope, "inside")


def is_inside_call() -> bool:
    """Whether this thread is tracing a compiled function, which donates only its arguments."""
    return call_scope.inside
