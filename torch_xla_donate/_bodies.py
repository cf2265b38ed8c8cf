"""donate_buffer inside of a loop's body: which argument of the loop a traced tensor stands for."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from torch_xla_donate import _config, _host, _interrupts, _leaves
from torch_xla_donate._errors import DonationError


class Wish(NamedTuple):
    """A donation that waits for its loop to be called.

    where: its ``file:line``.
    strict: as for `donate_buffer`.
    """

    where: str
    strict: bool | None

    def is_strict(self) -> bool:
        """Whether it raises if it cannot be used."""
        return _config.strict_by_default() if self.strict is None else self.strict


class Body:
    """The trace of one body, and what it has asked for.

    Args:
        loop: what messages call the loop, such as ``scan``.
        leaves: the traced tensors, each in the place of the loop's argument that it stands for.

    Attributes:
        wishes: by the number of the argument; None for one whose donation the body has taken back, whoever had asked
            for it.
    """

    def __init__(self, loop: str, leaves: Iterable[Any]) -> None:
        self.loop = loop
        self._numbers = {id(leaf): number for number, leaf in enumerate(leaves)}
        self.wishes: dict[int, Wish | None] = {}

    def find(self, tensor: Any) -> int | None:
        """The number of the loop's argument that a tensor stands for, if it does."""
        return self._numbers.get(id(tensor))

    def argument(self, tensor: Any) -> int | None:
        """The same for a tensor to be donated; None for one that exists outside of the trace.

        Raises DonationError for a tensor that the body has made.
        """
        number = self.find(tensor)
        if number is not None or not _host.is_traced(tensor):
            return number
        raise DonationError(
            f"tensors is {_leaves.array(tensor)}, which the body of {self.loop} has made or sliced: inside of the "
            "loop it has no buffer of its own, and XLA reuses its memory anyway. Donate an argument of the body as it "
            "came. Nothing was marked."
        )

    def donate(self, number: int, wish: Wish) -> None:
        """Notes the wish for an argument of the loop. The first one holds, as a mark does."""
        if self.wishes.get(number) is None:
            self.wishes[number] = wish

    def cancel(self, numbers: Iterable[int]) -> None:
        """The arguments of the loop are not donated."""
        self.wishes.update(dict.fromkeys(numbers))


def chosen(donate: str | Sequence[str], arguments: tuple[str, str]) -> tuple[str, ...]:
    """The arguments of a loop that `donate` names. ValueError if it names another, TypeError if it is no name."""
    names = (donate,) if isinstance(donate, str) or not isinstance(donate, Iterable) else tuple(donate)
    for name in names:
        if name not in arguments:
            kind = ValueError if isinstance(name, str) else TypeError
            raise kind(f'donate is {donate!r}; it takes "{arguments[0]}", "{arguments[1]}" or both.')
    return names


def settle(
    wanted: Mapping[int, Wish], found: Mapping[int, Wish | None], strict: bool | None
) -> tuple[dict[int, Wish], list[int]]:
    """What is donated of a loop's arguments, and what the body has taken back; all by their numbers.

    wanted: from outside of the body.
    found: the body's wishes.
    strict: the loop's, for wishes of the body that do not say.
    """
    wishes = dict(wanted)
    for number, wish in found.items():
        if wish is not None:
            wishes[number] = wish if wish.strict is not None else wish._replace(strict=strict)
    cancelled = [number for number, wish in found.items() if wish is None]
    return {number: wish for number, wish in wishes.items() if number not in cancelled}, cancelled


def refuse_eager_mode(loop: str) -> None:
    """DonationError in eager mode, in which the operations of a body would run instead of becoming a loop's."""
    if _host.in_eager_mode():
        raise DonationError(
            f"{loop} is called in eager mode, in which torch_xla runs each operation at once: the body of a loop has "
            f"to be traced. Call {loop} in a function made by torch_xla_donate.compile or torch_xla.compile, inside "
            "of which eager mode is off."
        )


class Watcher(Protocol):
    """Looks at each operation of a function that is traced to be replayed."""

    def as_one(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Calls a function that is one operation to the watcher: it reads its arguments and makes its result."""

    def uses(self, modules: Iterable[torch.nn.Module]) -> None:
        """Notes modules whose mode the trace depends on, though it calls copies of them."""

    def refuse(self, what: str, remedy: str) -> Exception:
        """The error for what a replay would not do again."""


class _Current(threading.local):
    body: Body | None = None
    watcher: Watcher | None = None


_current = _Current()
_interrupts.restore(_current, "body", "watcher")


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


def watcher() -> Watcher | None:
    """Who looks at the operations of this thread, if somebody does."""
    return _current.watcher


@contextlib.contextmanager
def watched(by: Watcher) -> Iterator[None]:
    outer, _current.watcher = _current.watcher, by
    try:
        yield
    finally:
        _current.watcher = outer


def as_one(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls what traces the body of a loop: that is nobody's but the loop's."""
    by = watcher()
    return func(*args, **kwargs) if by is None else by.as_one(func, args, kwargs)
