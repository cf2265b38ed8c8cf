"""Assertions on donation for tests. The fixtures of `torch_xla_donate_pytest` use its contexts."""

from __future__ import annotations

import os
import re
import reprlib
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from torch_xla_donate import _C, _config, _report, _trees, hlo
from torch_xla_donate._checks import check_fraction
from torch_xla_donate._errors import see
from torch_xla_donate._modes import ThreadMode
from torch_xla_donate._text import cut, percent

__all__ = [
    "HloDump",
    "assert_aliased",
    "assert_donated",
    "assert_not_donated",
    "assert_reused",
    "no_unusable_donation",
]

pytest_plugins = ["torch_xla_donate_pytest"]  # for `pytest -p torch_xla_donate.testing`


def assert_donated(tensors: Any) -> None:
    """Asserts that steps have consumed the buffers of all ``tensors``.

    Waits until running steps have started on the device.

    Args:
        tensors: as for `donate_buffer`.

    Raises:
        AssertionError: a leaf is not donated. The text gives the reason for each, if the report has it.
        TypeError: a leaf is not a tensor.
        ValueError: ``tensors`` has no tensor.
    """
    _C.wait_for_steps()
    others = [(name, tensor) for name, tensor in _leaves(tensors) if not _C.is_donated(tensor)]
    if others and not _config.IS_OFF:
        reasons = dict(reversed(_report.reasons_by_buffer()))  # the last step's reason counts
        wrong = [f"{name}: {_why_not(tensor, reasons)}" for name, tensor in others]
        raise AssertionError(f"expected to be donated:\n  {_lines(wrong)}\n{see('testing')}")


def assert_not_donated(tensors: Any) -> None:
    """Asserts that no step has consumed the buffer of one of ``tensors``.

    Args, Raises: as for `assert_donated`.
    """
    _C.wait_for_steps()
    wrong = [f"{name} was donated" for name, tensor in _leaves(tensors) if _C.is_donated(tensor)]
    if wrong:
        raise AssertionError(f"expected not to be donated:\n  {_lines(wrong)}\n{see('testing')}")


def assert_reused(at_least: float = 0.95, *, steps: int | None = None) -> None:
    """Asserts the `reused_fraction` of the last steps.

    It reads `donation_report`, which has steps that ran before the test, too. `expect_donated` counts only its own.

    Args:
        at_least: the least `DonationReport.reused_fraction`.
        steps: as for `donation_report`.

    Raises:
        AssertionError: less was reused. The text is the report.
        TypeError, ValueError: ``at_least`` is not a number above 0 and at most 1, or as for `donation_report`.
        DonationError: as for `donation_report`.
    """
    check_fraction("at_least", at_least)
    report = _report.donation_report(steps=steps)
    if not report.reused_fraction >= at_least and not _config.IS_OFF:
        raise AssertionError(
            f"reused_fraction is {percent(report.reused_fraction)}, expected at least "
            f"{percent(at_least)}.\n{report}\n{see('testing')}"
        )


def assert_aliased(module: Any, *parameters: int | str) -> None:
    """Asserts that outputs of a compiled module reuse the memory of its parameters.

    Args:
        module: HLO after optimisation: its text or path, an `hlo.HloModule`, `hlo.DumpedModule` or
            `hlo.TopologyModule`, or what ``lower(...).compile()`` returns.
        *parameters: numbers of input arrays, or names as in ``lower(...).compile().donors``, such as
            ``state['w']``. Without them: all donors, of which there must be one.

    Raises:
        AssertionError: no output reuses one of them.
        ValueError: a parameter does not exist, or is a name and the module has none; or a text is not HLO.
        TypeError: ``module`` or a parameter has another type.
    """
    compiled, donors = _donors_of(module)
    asked = [_find(parameter, compiled, donors) for parameter in parameters] if parameters else donors
    numbers = {hlo.BufferDonor(*place): number for number, place in enumerate(compiled.leaves)}
    wrong = [
        f"{donor.name or f'parameter {numbers[donor.donor]}'} {donor.shape}{': ' if donor.reason else ''}{donor.reason}"
        for donor in asked
        if donor.output is None
    ]
    if wrong:
        raise AssertionError(f"no output reuses the memory of:\n  {_lines(wrong)}\n{see('testing')}")
    if not asked:
        raise AssertionError(f"the module has neither donors nor aliases, expected at least one. {see('testing')}")


def _donors_of(module: Any) -> tuple[hlo.HloModule, list[hlo.DonorOutcome]]:
    """The compiled module, and its donors."""
    if isinstance(module, str | os.PathLike):
        if os.path.isdir(module):
            raise ValueError(
                f"module is the folder {os.fspath(module)!r}. Pass one of hlo.read_dump(folder), or a file. "
                f"{see('testing')}"
            )
        module = hlo.parse(module)
    if isinstance(module, hlo.DumpedModule):
        module = module.after if module.after is not None else module.before
    if isinstance(module, hlo.HloModule):
        taken = [hlo.DonorOutcome(one.donor, module.shape_of(one), one.output_index) for one in module.aliases]
        return module, [*taken, *(hlo.DonorOutcome(one, module.shape_of(one), None) for one in module.donors)]
    outcomes = getattr(module, "donors", None)
    if not isinstance(outcomes, tuple) or not callable(getattr(module, "as_text", None)):
        raise TypeError(
            f"module is of type {type(module).__name__}, which is not compiled HLO. Pass its text, its path, an "
            f"hlo.HloModule or the result of lower(...).compile(). {see('testing')}"
        )
    return hlo.parse(module.as_text()), [*outcomes]


def _find(parameter: int | str, compiled: hlo.HloModule, donors: list[hlo.DonorOutcome]) -> hlo.DonorOutcome:
    if isinstance(parameter, str):
        found = next((donor for donor in donors if donor.name and parameter in (donor.name, _path(donor))), None)
        if found is not None:
            return found
        names = ", ".join(repr(_path(donor)) for donor in donors if donor.name)
        raise ValueError(
            f"parameters has {parameter!r}, which is not the name of a donor. Use one of {names}, or a number."
            f" {see('testing')}"
            if names
            else f"parameters has {parameter!r}, but this module has no names. Pass the number. {see('testing')}"
        )
    if isinstance(parameter, bool) or not isinstance(parameter, int):
        raise TypeError(
            f"parameters has {parameter!r}, of type {type(parameter).__name__}. Pass numbers or names. {see('testing')}"
        )
    if not 0 <= parameter < len(compiled.leaves):
        raise ValueError(
            f"parameters has {parameter}, but the module has {len(compiled.leaves)} input arrays. Count from 0. "
            f"{see('testing')}"
        )
    place, shape = list(compiled.leaves.items())[parameter]
    asked = hlo.BufferDonor(*place)
    not_offered = hlo.DonorOutcome(asked, shape, None, "it is not a donor")
    return next((donor for donor in donors if donor.donor == asked), not_offered)


def _path(donor: hlo.DonorOutcome) -> str:
    """The name without its argument: ``state['w']`` of ``state['w'] (argument 0 of train)``."""
    return donor.name.rpartition(" (argument ")[0] or donor.name


class HloDump:
    """A context that records the compiled modules of this thread's steps. The fixture ``hlo_dump`` is one.

    XLA reads ``XLA_FLAGS`` once in a process, so a test cannot switch XLA's own dump on. This takes the modules after
    optimisation from torch_xla, each when it first runs inside. Reads (``print``, ``.item()``) are not recorded.

    Args:
        folder: the folder for the texts.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = Path(folder)
        self._record = _C.GraphRecord()
        self._texts: deque[str] = deque()  # not written yet
        self._count = 0

    def __enter__(self) -> HloDump:
        self._record.open()
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._write()
        finally:
            self._record.close()

    @property
    def folder(self) -> Path:
        """The folder, with the modules of all steps until now, for `hlo.read_dump`."""
        self._write()
        return self._folder

    def modules(self) -> tuple[hlo.DumpedModule, ...]:
        """The modules of the steps until now, in the order of their first run. Their ``before`` is None."""
        folder = self.folder
        return hlo.read_dump(folder) if self._count else ()

    def _write(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._texts += (graph.text for graph in self._record.take())
        while self._texts:
            name = re.sub(r"[^\w.-]", "_", hlo.parse(self._texts[0]).name)[:200]
            path = self._folder / f"module_{self._count:04}.{name}.after_optimizations.txt"
            path.write_text(self._texts[0], encoding="utf-8")
            self._texts.popleft()
            self._count += 1


class no_unusable_donation(ThreadMode[_C.StepTally]):
    """A context whose end raises if a donation of a step inside was unusable, on any thread.

    The fixture ``fail_on_unusable_donation`` is one. Donations that `donation_disabled` or `debug_nans` prevented do
    not count, nor do steps that failed.

    Raises:
        AssertionError: at the end, with the reasons.
    """

    def __init__(self) -> None:
        super().__init__(_C.StepTally, lambda tally: tally.open(all_threads=True), _C.StepTally.close)

    def finish(self) -> None:
        _C.wait_for_steps()
        texts = [text for step in self.last_entry().read()["unusable"] for text in _report.unusable_texts(step)]
        # Otherwise a strict error would reach the next test.
        _report.raise_with_notices(AssertionError("\n".join(texts)) if texts else None, everywhere=True)

    def leave(self, raised: bool) -> None:
        super().leave(raised)
        # After an exception of the block there was no `finish`. Later steps would raise what it left.
        _report.print_notices()


def _leaves(tensors: Any) -> list[tuple[str, torch.Tensor]]:
    """The tensors with a text for each."""
    found = []
    for name, tensor in _trees.named_leaves(tensors, "tensors"):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(
                f"{name} is of type {type(tensor).__name__}, not a tensor. Remove this leaf. {see('testing')}"
            )
        found.append((f"{name} {_trees.dtype_and_shape(tensor)}", tensor))
    if not found:
        raise ValueError(f"tensors has no tensor: {reprlib.repr(tensors)}. Pass at least one tensor. {see('testing')}")
    return found


def _why_not(tensor: torch.Tensor, reasons: Mapping[int, str]) -> str:
    state = _C.state(tensor) if tensor.device.type == "xla" else "not_xla"
    if state == "marked":
        return "no step has read it yet"
    buffer = _C.identity(tensor)[1] if state == "materialized" else 0
    return reasons.get(buffer, "no kept step was offered it")


def _lines(texts: list[str]) -> str:
    return "\n  ".join(cut(texts, 20))
