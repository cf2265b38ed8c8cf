"""Whether this thread is inside a call of a compiled function, which donates only its arguments."""

from __future__ import annotations

from torch_xla_donate._host import interrupts

inside_call = interrupts.per_thread(False)


def is_inside_call() -> bool:
    """Whether this thread is tracing a compiled function, which donates only its arguments."""
    return inside_call.value
