# Types of the extension module; csrc/bindings.cpp documents each function beside its binding.
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypedDict

import torch

class _Names(Protocol):
    def name(self, index: int) -> str: ...

class _Hook(TypedDict):
    name: str
    symbol: str
    purpose: str
    slots: int
    in_place: int

class _Donor(TypedDict):
    name: str
    holders: list[tuple[Any, int]]
    where: str
    strict: bool
    shape: str
    bytes: int
    device: str
    outcome: str
    reason: str
    told: bool

class _Step(TypedDict):
    number: int
    graph: str
    status: str
    failure: str
    donors: list[_Donor]
    outputs: list[str]

class _BadOutput(TypedDict):
    compiled: bool
    index: int
    outputs: int
    array: str
    values: int
    nans: int
    infs: int

class _Sizes(TypedDict):
    pending: int
    consumed: int
    spared: int
    steps: int
    outcomes: int

def set_callbacks(
    donated_buffer_error: type[BaseException],
    format_use: Callable[[str, str, str, int], str],
    report_reuse: Callable[[str, str, str, int], None],
    step_ended: Callable[[], None],
) -> None: ...
def install(library_path: str) -> None: ...
def uninstall() -> int: ...
def installed() -> bool: ...
def hooks() -> list[_Hook]: ...
def verify_layouts(probe: torch.Tensor, tensor_id: int) -> None: ...
def mark(
    leaves: Sequence[Any], where: str, strict: bool, names: _Names, targets: dict[int, torch.Tensor]
) -> tuple[int, str] | None: ...
def cancel(leaves: Sequence[torch.Tensor]) -> int: ...
def state(tensor: torch.Tensor) -> str: ...
def has_value(tensor: torch.Tensor) -> bool: ...
def steps() -> list[_Step]: ...
def pending() -> list[_Donor]: ...
def take_notices() -> list[_Step]: ...
def wait_for_steps() -> None: ...
def sizes() -> _Sizes: ...
def push_disabled(report_reuse: bool, check_outputs: bool) -> None: ...
def pop_disabled(report_reuse: bool, check_outputs: bool) -> None: ...
def disabled() -> bool: ...
def set_debug_process(on: bool) -> None: ...
def take_bad_outputs(infs: bool) -> list[_BadOutput]: ...
def set_switched_off(reason: str) -> None: ...
