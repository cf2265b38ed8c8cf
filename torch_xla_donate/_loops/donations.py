"""The arguments that a loop donates, by request of its caller or of its body."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch_xla_donate import _host, _marks, _trees
from torch_xla_donate._errors import DonationError, see


def chosen_arguments(donate: str | Sequence[str], arguments: tuple[str, str]) -> tuple[str, ...]:
    """The arguments of a loop that `donate` names. Raises ValueError for another name, TypeError for another type."""
    names = (donate,) if isinstance(donate, str) or not isinstance(donate, Iterable) else tuple(donate)
    for name in names:
        if name not in arguments:
            kind = ValueError if isinstance(name, str) else TypeError
            raise kind(f'donate is {donate!r}. Pass "{arguments[0]}", "{arguments[1]}" or both. {see("scan")}')
    return names


def loop_donations(
    arguments: Iterable[tuple[str, Sequence[Any], _trees.Names]],
    chosen: Sequence[str],
    outside: _marks.DonationRequest,
    found: Mapping[int, _marks.DonationRequest | None],
) -> list[_marks.Donation]:
    """The donations of a loop's arguments. Cancels the marks that the body cancelled.

    arguments: for each argument its name, its leaves and their names, in the body's order.
    chosen: the arguments that the caller donates.
    outside: their request. Its ``strict`` is the default for requests of the body.
    found: the body's requests, by the number of the leaf.
    """
    flat = [(name, names, index, leaf) for name, leaves, names in arguments for index, leaf in enumerate(leaves)]
    _marks.cancel_donation([flat[number][-1] for number, request in found.items() if request is None])
    requests: dict[int, _marks.DonationRequest | None] = {
        number: outside for number, (name, *_) in enumerate(flat) if name in chosen
    }
    donations = []
    for number, request in (requests | dict(found)).items():
        if request is None:  # the body has cancelled it
            continue
        if request.strict is None:
            request = request._replace(strict=outside.strict)
        name, names, index, leaf = flat[number]
        donations.append(_marks.Donation(_trees.qualified_name(name, names.name(index)), leaf, request))
    return donations


def call_stock(loop: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Calls torch_xla's loop while the package is switched off, on a release that may not know the newest options."""
    with _marks.inside_call.replaced(True):  # a compiled function in the body is a part of it
        return loop(*args, **{name: value for name, value in options.items() if value is not False})


def refuse_eager_mode(loop: str) -> None:
    """Raises DonationError in eager mode, in which the operations of a body would run at once."""
    if _host.in_eager_mode():
        raise DonationError(
            f"{loop} is called in eager mode, but torch_xla has to trace the body of a loop. Call {loop} in a function "
            f"made by torch_xla_donate.compile or torch_xla.compile, where eager mode is off. {see('scan')}"
        )
