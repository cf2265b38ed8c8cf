"""Marking tensors that messages know by a name of their own: all of them, or none."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from torch_xla_donate import _C, _report, _trees
from torch_xla_donate._marks.into import pair_leaves
from torch_xla_donate._marks.prepare import prepare
from torch_xla_donate._marks.refusals import refusal
from torch_xla_donate._marks.request import DonationRequest
from torch_xla_donate._marks.traced_body import current_body


class Donation(NamedTuple):
    """A tensor to be donated.

    name: what messages call it, which may be the name of another one, too.
    target: the output that should take the buffer over, as with ``into=``.
    """

    name: str
    tensor: Any
    request: DonationRequest
    target: torch.Tensor | None = None


def mark_all(donations: Sequence[Donation]) -> None:
    """`donate_buffer` for tensors that messages know by a name of their own; all are marked, or none.

    Inside of a loop's body those that stand for its arguments are left to the loop.
    """
    body = current_body()
    arguments = [body.argument(given.tensor) if body is not None else None for given in donations]
    if _report.open_pairs():
        _report.resolve_pairs(wait=False)
    for request, free in _by_request([given for given, argument in zip(donations, arguments) if argument is None]):
        leaves = [given.tensor for given in free]
        names: _trees.Names = _trees.FixedNames([given.name for given in free])
        paired: _report.Paired | None = None
        wanted: dict[int, torch.Tensor] = {}
        if any(given.target is not None for given in free):
            paired, wanted = pair_leaves(leaves, names, [given.target for given in free], request.where)
            names = paired
        marked = _C.mark(leaves, request.where, request.is_strict(), names, wanted)
        if (why := marked.refusal) is not None:
            raise refusal(leaves[why.leaf], why.obstacle, free[why.leaf].name)
        if paired is not None:
            _report.watch_pairs(paired, request.where)
    if body is not None:
        for given, argument in zip(donations, arguments):
            if argument is not None:
                body.donate(argument, given.request)


def refuse_all(donations: Sequence[Donation], reason: str) -> None:
    """Ends donations before they begin: the report has them as unusable, for this reason, and they are told.

    Raises DonationError if one is strict; inside of a compiled function, at the end of its call.
    """
    off = _report.sentence(_C.disabled_reason())
    for request, group in _by_request(donations):
        leaves = [given.tensor for given in group]
        names = _trees.FixedNames([given.name for given in group])
        call = _C.mark_arguments(leaves, [], request.where, request.is_strict(), True, names)
        assert call.refusal is None, "the leaves have been checked"
        _C.end_call(call, {}, off or reason, notify=not off)
        _C.expect_run()  # these donors are the next run's, for the report
    _report.warn_or_raise()


def _by_request(donations: Sequence[Donation]) -> Iterator[tuple[DonationRequest, list[Donation]]]:
    """The donations of each request, without wrappers, once it is known that all can be marked."""
    plain = [given._replace(tensor=_trees.without_wrapper(given.tensor)) for given in donations]
    for given in plain:
        obstacle = _C.state(given.tensor) if isinstance(given.tensor, torch.Tensor) else "not_tensor"
        if obstacle not in ("materialized", "marked", "donated"):  # what has been donated raises when it is marked
            raise refusal(given.tensor, obstacle, given.name)
    for request in dict.fromkeys(given.request for given in plain):
        prepare(request.where)
        yield request, [given for given in plain if given.request == request]
