"""Marks a batch of named tensors: all of them, or none."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from torch_xla_donate import _C, _config, _report, _trees
from torch_xla_donate._marks.into import check_outputs
from torch_xla_donate._marks.refusals import refusal
from torch_xla_donate._marks.request import DonationRequest, prepare
from torch_xla_donate._marks.scope import current_body


def mark(
    leaves: Sequence[Any],
    names: _trees.Names,
    preferred_outputs: Sequence[Any],
    request: DonationRequest,
    argument: str = "",
) -> _C.Call:
    """Marks all leaves, or none and raises an error.

    preferred_outputs: the output for each leaf, or None; empty without outputs.
    argument: the argument that the names belong to.
    """
    outputs = check_outputs(leaves, names, preferred_outputs) if preferred_outputs else {}
    marks = _C.mark(leaves, request.where, _config.strictness(request.strict), names, outputs)
    if isinstance(marks, _C.Refusal):
        name = names.name(marks.leaf)
        name = _trees.qualified_name(argument, name) if argument else name
        raise refusal(leaves[marks.leaf], marks.obstacle, name)
    return marks


class Donation(NamedTuple):
    """A tensor to be donated.

    name: its name in messages, which need not be unique.
    preferred_output: the output that should reuse the buffer, as with ``into=``.
    """

    name: str
    tensor: Any
    request: DonationRequest
    preferred_output: torch.Tensor | None = None


def mark_all(donations: Sequence[Donation]) -> None:
    """`donate_buffer` for named tensors. Marks all of them, or none.

    Inside a loop's body the loop gets the requests for its arguments.
    """
    body = current_body.value
    arguments = [body.argument(given.tensor) if body is not None else None for given in donations]
    for request, free in _by_request([given for given, argument in zip(donations, arguments) if argument is None]):
        outputs = [given.preferred_output for given in free]
        names = _trees.Places([(given.name,) for given in free])
        mark([given.tensor for given in free], names, outputs, request)
    if body is not None:
        for given, argument in zip(donations, arguments):
            if argument is not None:
                body.donate(argument, given.request)


def refuse_all(donations: Sequence[Donation], reason: _C.Reason) -> None:
    """Ends donations before they begin. The report and a warning show them as unusable, for this reason.

    Raises DonationError if one is strict. Inside a compiled function the end of its call raises the error.
    """
    off = _C.disabled_reason()
    for request, group in _by_request(donations):
        leaves = [given.tensor for given in group]
        names = _trees.Places([(given.name,) for given in group])
        strict = _config.strictness(request.strict)
        marks = _C.mark_arguments(leaves, [], request.where, strict, True, names)
        assert isinstance(marks, _C.Call), "the leaves have been checked"
        _C.end_call(marks, {}, off or reason, notify=not off)
    _report.warn_or_raise()
    if donations:
        _C.expect_run()  # the report counts these donors with the next run


def _by_request(donations: Sequence[Donation]) -> Iterator[tuple[DonationRequest, list[Donation]]]:
    """The donations of each request. Raises an error first if one of them cannot be marked."""
    for given in donations:
        obstacle = _C.state(given.tensor) if isinstance(given.tensor, torch.Tensor) else "not_tensor"
        if obstacle not in ("materialized", "marked", "donated"):  # marking a consumed tensor raises
            raise refusal(given.tensor, obstacle, given.name)
    for request in dict.fromkeys(given.request for given in donations):
        prepare(request.where)
        yield request, [given for given in donations if given.request == request]
