"""What a loop donates of its arguments: what the caller names, and what the body asks for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch_xla_donate import _host, _marks, _trees
from torch_xla_donate._errors import DonationError


def chosen_arguments(donate: str | Sequence[str], arguments: tuple[str, str]) -> tuple[str, ...]:
    """The arguments of a loop that `donate` names. ValueError if it names another, TypeError if it is no name."""
    names = (donate,) if isinstance(donate, str) or not isinstance(donate, Iterable) else tuple(donate)
    for name in names:
        if name not in arguments:
            kind = ValueError if isinstance(name, str) else TypeError
            raise kind(f'donate is {donate!r}; it takes "{arguments[0]}", "{arguments[1]}" or both.')
    return names


def _settle(
    wanted: Mapping[int, _marks.Wish], found: Mapping[int, _marks.Wish | None], strict: bool | None
) -> tuple[dict[int, _marks.Wish], list[int]]:
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


def of_a_loop(
    arguments: Iterable[tuple[str, Sequence[Any], _trees.Names]],
    chosen: Sequence[str],
    outside: _marks.Wish,
    found: Mapping[int, _marks.Wish | None],
) -> list[_marks.Donation]:
    """What a loop donates of its arguments. Marks that the body has taken back are taken back.

    arguments: the name of each, its leaves and their names, in the order that the body counts in.
    chosen: the arguments that are donated from outside of the body.
    outside: their wish; its ``strict`` holds for wishes of the body that do not say.
    found: the body's wishes, by the number of the leaf.
    """
    flat = [(name, names, index, leaf) for name, leaves, names in arguments for index, leaf in enumerate(leaves)]
    wanted = {number: outside for number, (name, *_) in enumerate(flat) if name in chosen}
    wishes, cancelled = _settle(wanted, found, outside.strict)
    _marks.cancel_donation([flat[number][-1] for number in cancelled])
    donations = []
    for number, wish in wishes.items():
        name, names, index, leaf = flat[number]
        donations.append(_marks.Donation(_trees.qualified_name(name, names.name(index)), leaf, wish))
    return donations


def refuse_eager_mode(loop: str) -> None:
    """DonationError in eager mode, in which the operations of a body would run instead of becoming a loop's."""
    if _host.in_eager_mode():
        raise DonationError(
            f"{loop} is called in eager mode, in which torch_xla runs each operation at once: the body of a loop has "
            f"to be traced. Call {loop} in a function made by torch_xla_donate.compile or torch_xla.compile, inside "
            "of which eager mode is off."
        )
