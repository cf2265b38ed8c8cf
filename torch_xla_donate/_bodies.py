"""donate_buffer inside of a loop's body: which argument of the loop a traced tensor stands for."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence

import torch

from torch_xla_donate import _leaves
from torch_xla_donate._errors import DonationError


class Body:
    """The trace of one body, and what it has asked for.

    Args:
        loop: what messages call the loop, such as ``scan``.
        leaves: the traced tensors by identity, each with the name of the loop's argument that it stands for.
    """

    def __init__(self, loop: str, leaves: Mapping[int, str]) -> None:
        self._loop = loop
        self._leaves = leaves
        self.wishes: dict[str, str] = {}  # argument, and where it was donated

    def donate(self, tensor: torch.Tensor, where: str) -> bool:
        """Notes the wish for an argument of the loop; False for a tensor that exists outside of the trace.

        Raises DonationError for a tensor that the body has made.
        """
        name = self._leaves.get(id(tensor))
        if name is not None:
            self.wishes.setdefault(name, where)
            return True
        if type(tensor) in (torch.Tensor, torch.nn.Parameter):
            return False
        raise DonationError(
            f"tensors is {_leaves.array(tensor)}, which the body of {self._loop} has made or sliced: inside of the "
            "loop it has no buffer of its own, and XLA reuses its memory anyway. Donate an argument of the body as it "
            "came. Nothing was marked."
        )


def chosen(donate: str | Sequence[str], arguments: tuple[str, str]) -> tuple[str, ...]:
    """The arguments of a loop that `donate` names. ValueError if it names another."""
    names = (donate,) if isinstance(donate, str) else tuple(donate)
    for name in names:
        if name not in arguments:
            raise ValueError(f'donate is {donate!r}; it takes "{arguments[0]}", "{arguments[1]}" or both.')
    return names


class _Current(threading.local):
    body: Body | None = None


_current = _Current()


def current() -> Body | None:
    """The body that this thread is tracing; None outside of one."""
    return _current.body


@contextlib.contextmanager
def tracing(body: Body) -> Iterator[None]:
    outer, _current.body = _current.body, body
    try:
        yield
    finally:
        _current.body = outer
