"""Stands in for the extension module while `TORCH_XLA_DONATE=0` switches the package off.

`from torch_xla_donate import _C` finds this module, so the Python part can be imported and checks arguments. It answers
as a process without marks and steps does. A name that is not here is an error, so nothing runs half switched off.
"""

from __future__ import annotations

import contextlib
from typing import Any

from torch_xla_donate._errors import DonationError, see


class Scope:
    """Calls the same methods as the context in C++, but neither counts entries nor guards against interrupts."""

    depth = 1

    def __init__(self, lock: Any = None) -> None:
        self._lock = lock if lock is not None else contextlib.nullcontext()

    def enter(self) -> None: ...

    def leave(self, raised: bool) -> None: ...

    def finish(self) -> None: ...

    def __enter__(self) -> Scope:
        self._lock.__enter__()
        self.enter()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        try:
            if kind is None:
                self.finish()
        finally:
            self.leave(kind is not None)
            self._lock.__exit__(None, None, None)


class Nothing:
    """A mode, a tally, a record or a reason that knows of nothing."""

    def __init__(self, *args: object, **options: object) -> None: ...

    def on(self) -> None: ...

    def off(self) -> None: ...

    def open(self, **options: object) -> None: ...

    def close(self) -> None: ...

    def read(self) -> dict[str, list[Any]]:
        return {"unusable": []}

    def take(self) -> list[Any]:
        return []


Mode = StepTally = GraphRecord = Reason = WatchedStep = Nothing

_ANSWERS: dict[str, object] = {
    **dict.fromkeys(("cancel", "disarm_run", "flatten", "note_placeholder", "set_auto_donate", "wait_for_steps")),
    "is_donated": False,
    **dict.fromkeys(("auto_held", "auto_refusals", "pending", "steps", "take_bad_outputs", "take_notices"), ()),
    "identity": (0, 0),
    "state": "materialized",
}


def hook_errors() -> dict[str, int]:
    return {}


def give_array(*arrays: object) -> None:
    raise DonationError(
        "a sharded placeholder needs the hooks, which TORCH_XLA_DONATE=0 keeps out of this process. Unset it to "
        f"lower a function. {see('switched_off')}"
    )


def __getattr__(name: str) -> Any:
    if name in _ANSWERS:
        return lambda *args, **options: _ANSWERS[name]
    raise AttributeError(f"TORCH_XLA_DONATE=0 switches torch_xla_donate off, so it has no {name!r}")
