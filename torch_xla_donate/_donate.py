"""Marking: donate_buffer, cancel_donation, is_donated, donation_disabled."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from torch_xla_donate import _C, _bodies, _config, _host, _into, _leaves, _reasons, _report
from torch_xla_donate._errors import DonationError, is_internal, warn


class Marks:
    """What `donate_buffer` returns: a context that takes the marks back if its block raises. Holds no tensor."""

    def __init__(self, call: _C.Call | None) -> None:
        self._call = call

    def __enter__(self) -> Marks:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if kind is not None and self._call is not None:
            _C.cancel_marks(self._call)


def donate_buffer(tensors: Any, *, into: Any = None, strict: bool | None = None) -> Marks:
    """Gives the buffers of ``tensors`` to the next step that reads them.

    At that step (``torch_xla.sync()`` or ``xm.mark_step()``) XLA may write an output into each buffer. Afterwards
    the tensors can no longer be used: any use raises `DonatedBufferError`. A donor for which XLA finds no output
    of the same number of bytes per device stays alive and is told by a `DonationWarning`. Either way the mark is
    over: it holds for one step and does not pass on to the outputs. Steps that do not read the buffer, and partial
    syncs (``print``, ``.item()``, ``.cpu()``), leave it pending.

    Args:
        tensors: a materialised XLA tensor of any shape and dtype, a pytree of them (``None`` leaves are skipped),
            an ``nn.Module`` (its parameters and buffers) or an optimizer (parameters and state), also inside a pytree.
            All are marked, or none.
            Marking a tensor twice is the same as once.
        into: the tensor that should take the buffer over, or a pytree of them with as many leaves as ``tensors``
            (``None`` for a leaf without a wish). Each must be pending work of the same shape, dtype and sharding.
            Without it XLA pairs donors and outputs of the same size in their order, and where that crosses (a new
            moment goes to a parameter's buffer) it has to copy. With it the graph's parameters are put into the
            order that gives the pairs asked for. That succeeds where every output of that size is somebody's
            target; `donation_report` tells whether the pair was kept.
        strict: whether a donation that could not be used raises `DonationError` at the end of the step, instead of
            warning. Default: the environment variable ``TORCH_XLA_DONATE_STRICT``.

    Returns:
        A context manager, for marks that an error must not leave behind. ``with donate_buffer(state):`` takes the marks
        of these tensors back if the block raises; otherwise it changes nothing. It may be ignored.

    Raises:
        TypeError: a leaf is not a tensor, or ``strict`` is no bool.
        ValueError: a leaf is not an XLA tensor, or ``into`` does not fit, or is given inside of a loop's body.
        DonationError: a leaf is pending (call ``torch_xla.sync()`` first), or shares a buffer that torch_xla keeps
            for everybody (cached constants, the RNG seed).
        DonatedBufferError: a leaf has been donated already.
    """
    _config.check_strict(strict)
    where = call_site()
    body = _bodies.current()
    if body is not None:
        donations = _donations(tensors, _bodies.Wish(where, strict))
        stands_for = next((given.name for given in donations if body.argument(given.tensor) is not None), None)
        if stands_for is not None and into is not None:
            raise ValueError(
                f"into is given for {stands_for}, which stands for an argument of {body.loop} in its body: the buffer "
                "goes to an output of the step, and those are not known inside. Call donate_buffer with into= after "
                f"{body.loop}, on its argument and its result. Nothing was marked."
            )
        if stands_for is not None:
            mark_all(donations)
            return Marks(None)  # an error ends the trace of the body, and the marks with it
    prepare(where)
    if strict is None:
        strict = _config.strict_by_default()
    leaves: Sequence[Any]
    names: _leaves.Names
    if isinstance(tensors, torch.Tensor):
        leaves, names = [tensors], _leaves.Single()
    elif type(tensors) in (list, tuple):
        # The common case needs no pytree, unless a leaf turns out to be a container.
        leaves, names = tensors, _leaves.Positions()
    else:
        leaves, names = _leaves.flatten(tensors)
    if _into.open_pairs():
        _into.resolve_pairs(wait=False)
    paired: _into.Paired | None = None
    targets: dict[int, torch.Tensor] = {}
    if into is not None:
        leaves, places = _leaves.flatten(tensors)
        paired, targets = _into.pair(leaves, places, _into.in_order(places, into, len(leaves)), where)
        names = paired

    marked = _C.mark(leaves, where, strict, names, targets)
    if marked.refusal is not None and isinstance(names, _leaves.Positions):
        leaves, names = _leaves.flatten(tensors)
        marked = _C.mark(leaves, where, strict, names, targets)
    if marked.refusal is not None and marked.refusal.obstacle == "not_xla":
        leaves = [_leaves.without_wrapper(leaf) for leaf in leaves]
        marked = _C.mark(leaves, where, strict, names, targets)
    if (why := marked.refusal) is not None:
        raise refusal(leaves[why.leaf], why.obstacle, _leaves.label("tensors", names.name(why.leaf)))
    if paired is not None:
        _into.watch(paired, where)
    return Marks(marked)


class Donation(NamedTuple):
    """A tensor to be donated.

    name: what messages call it, which may be the name of another one, too.
    target: the output that should take the buffer over, as with ``into=``.
    """

    name: str
    tensor: Any
    wish: _bodies.Wish
    target: torch.Tensor | None = None


def _donations(tensors: Any, wish: _bodies.Wish) -> list[Donation]:
    leaves, names = _leaves.flatten(tensors)
    return [
        Donation(_leaves.label("tensors", names.name(index)), _leaves.without_wrapper(leaf), wish)
        for index, leaf in enumerate(leaves)
        if leaf is not None
    ]


def of_a_loop(
    arguments: Iterable[tuple[str, Sequence[Any], _leaves.Names]],
    chosen: Sequence[str],
    outside: _bodies.Wish,
    found: Mapping[int, _bodies.Wish | None],
) -> list[Donation]:
    """What a loop donates of its arguments. Marks that the body has taken back are taken back.

    arguments: the name of each, its leaves and their names, in the order that the body counts in.
    chosen: the arguments that are donated from outside of the body.
    outside: their wish; its ``strict`` holds for wishes of the body that do not say.
    found: the body's wishes, by the number of the leaf.
    """
    flat = [(name, names, index, leaf) for name, leaves, names in arguments for index, leaf in enumerate(leaves)]
    wanted = {number: outside for number, (name, *_) in enumerate(flat) if name in chosen}
    wishes, cancelled = _bodies.settle(wanted, found, outside.strict)
    cancel_donation([flat[number][-1] for number in cancelled])
    donations = []
    for number, wish in wishes.items():
        name, names, index, leaf = flat[number]
        donations.append(Donation(_leaves.label(name, names.name(index)), leaf, wish))
    return donations


def mark_all(donations: Sequence[Donation]) -> None:
    """`donate_buffer` for tensors that messages know by a name of their own; all are marked, or none.

    Inside of a loop's body those that stand for its arguments are left to the loop.
    """
    body = _bodies.current()
    arguments = [body.argument(given.tensor) if body is not None else None for given in donations]
    if _into.open_pairs():
        _into.resolve_pairs(wait=False)
    for wish, free in _by_wish([given for given, argument in zip(donations, arguments) if argument is None]):
        leaves = [given.tensor for given in free]
        names: _leaves.Names = _leaves.Listed([given.name for given in free])
        paired: _into.Paired | None = None
        wanted: dict[int, torch.Tensor] = {}
        if any(given.target is not None for given in free):
            paired, wanted = _into.pair(leaves, names, [given.target for given in free], wish.where)
            names = paired
        marked = _C.mark(leaves, wish.where, wish.is_strict(), names, wanted)
        if (why := marked.refusal) is not None:
            raise refusal(leaves[why.leaf], why.obstacle, free[why.leaf].name)
        if paired is not None:
            _into.watch(paired, wish.where)
    if body is not None:
        for given, argument in zip(donations, arguments):
            if argument is not None:
                body.donate(argument, given.wish)


def refuse_all(donations: Sequence[Donation], reason: str) -> None:
    """Ends donations before they begin: the report has them as unusable, for this reason, and they are told.

    Raises DonationError if one is strict; inside of a compiled function, at the end of its call.
    """
    off = _reasons.sentence(_C.disabled_reason())
    for wish, group in _by_wish(donations):
        leaves = [given.tensor for given in group]
        names = _leaves.Listed([given.name for given in group])
        call = _C.mark_arguments(leaves, [], wish.where, wish.is_strict(), True, names)
        assert call.refusal is None, "the leaves have been checked"
        _C.end_call(call, {}, off or reason, tell=not off)
        _C.expect_run()  # these donors are the next run's, for the report
    _report.tell()


def _by_wish(donations: Sequence[Donation]) -> Iterator[tuple[_bodies.Wish, list[Donation]]]:
    """The donations of each wish, without wrappers, once it is known that all can be marked."""
    plain = [given._replace(tensor=_leaves.without_wrapper(given.tensor)) for given in donations]
    for given in plain:
        obstacle = _C.state(given.tensor) if isinstance(given.tensor, torch.Tensor) else "not_tensor"
        if obstacle not in ("materialized", "marked", "donated"):  # what has been donated raises when it is marked
            raise refusal(given.tensor, obstacle, given.name)
    for wish in dict.fromkeys(given.wish for given in plain):
        prepare(wish.where)
        yield wish, [given for given in plain if given.wish == wish]


def _describe(tensor: torch.Tensor) -> str:
    return f"{_leaves.array(tensor)} on {tensor.device}"


def refusal(leaf: Any, obstacle: str, name: str) -> Exception:
    """The error for a leaf that cannot be marked; obstacle as `_C.mark` gives it."""
    nothing = "Nothing was marked."
    if obstacle == "not_tensor" and isinstance(leaf, Iterator):
        return TypeError(
            f"{name} is of type {type(leaf).__name__}, which can be gone through once only. Pass a list of it, or the "
            f"module itself in the place of module.parameters(). {nothing}"
        )
    if obstacle == "not_tensor":
        return TypeError(
            f"{name} is of type {type(leaf).__name__}, which is neither a tensor nor a registered pytree. "
            f"Take this leaf out, or register its class with torch.utils._pytree. {nothing}"
        )
    if obstacle == "not_xla":
        why, remedy = "", "move it with .to('xla')"
        if leaf.layout != torch.strided:
            why, remedy = f", with layout {leaf.layout}", "make it dense"
        elif leaf.device.type == "xla":
            why, remedy = f", in a {type(leaf).__name__} that does not hold its buffer itself", "give the tensor inside"
        return ValueError(
            f"{name} is {_describe(leaf)}{why}. Only plain XLA tensors have a buffer to donate: "
            f"{remedy}, or take this leaf out. {nothing}"
        )
    if obstacle == "pending" and leaf._is_view():
        return DonationError(
            f"{name} is {_describe(leaf)}, a view, whose value is worked out anew from its base and has no buffer of "
            f"its own. Donate the base; or a .clone() of the view, after torch_xla.sync(). {nothing}"
        )
    if obstacle == "pending" and _C.updated_in_place(leaf):
        return DonationError(
            f"{name} is {_describe(leaf)}, updated in place since the last step. torch_xla reuses its memory for the "
            f"new value automatically: take this leaf out. To donate the old value, compute the new one as another "
            f"tensor. {nothing}"
        )
    if obstacle == "pending":
        return DonationError(
            f"{name} is {_describe(leaf)}, not materialised: its value is still pending work. "
            f"Call torch_xla.sync() first, then donate. Mark a tensor that is written through a view before the write. "
            f"{nothing}"
        )
    if obstacle == "read_only":
        return DonationError(
            f"{name} is {_describe(leaf)}, in a buffer that torch_xla shares between tensors (a cached constant or "
            f"the RNG seed); donating it would destroy them all. Donate a .clone() instead. {nothing}"
        )
    if obstacle == "viewed":
        return DonationError(
            f"{name} is {_describe(leaf)}, and it is a view or has views while functionalization is off "
            f"(XLA_DISABLE_FUNCTIONALIZATION): they share its graph. Donate a tensor without views. {nothing}"
        )
    if obstacle == "dynamic":
        return DonationError(
            f"{name} is {_describe(leaf)}, a tensor whose size only the device knows: how many bytes it has, and so "
            f"which output could take them, cannot be told. Take this leaf out. {nothing}"
        )
    raise AssertionError(f"unknown obstacle {obstacle}")


def passed_twice(donated: str, kept: str) -> ValueError:
    """The error for a buffer that is to be given away and kept."""
    return ValueError(
        f"{donated} is donated, and {kept}, which is not, has the same buffer. Donate both, or pass a .clone() as one "
        "of them. Nothing was donated."
    )


def cancel_donation(tensors: Any) -> None:
    """Takes back the marks of ``tensors`` that no step has read yet.

    Inside of a loop's body, an argument of the body stands for that of the loop, as it does for `donate_buffer`.

    Args:
        tensors: as for `donate_buffer`. Tensors without a mark are passed over.

    Raises:
        TypeError: a leaf is not a tensor.
        DonationError: a leaf has been donated already; no mark is taken back then.
    """
    body = _bodies.current()
    arguments: list[int] = []
    found: list[torch.Tensor] = []
    leaves, names = _leaves.flatten(tensors)
    for index, leaf in enumerate(leaves):
        if leaf is None:
            continue
        tensor = _leaves.without_wrapper(leaf)
        if not isinstance(tensor, torch.Tensor):
            raise refusal(tensor, "not_tensor", _leaves.label("tensors", names.name(index)))
        argument = body.find(tensor) if body is not None else None
        if argument is not None:
            arguments.append(argument)
            continue
        state = _C.state(tensor)
        if state == "donated":
            name = _leaves.label("tensors", names.name(index))
            raise DonationError(
                f"{name} is {_describe(tensor)} and has been consumed by a step: its donation can no longer be "
                "cancelled. No mark was taken back."
            )
        if state == "marked":
            found.append(tensor)
    _C.cancel(found)
    if body is not None:
        body.cancel(arguments)


def is_donated(t: torch.Tensor) -> bool:
    """True once a step has consumed ``t``'s buffer. Never waits for the device.

    While the very first run of a graph is in flight it is not known yet whether XLA could use the buffer; the answer
    is True then, and turns False if the donation proves unusable. A view is donated if it can no longer be computed,
    as a step has consumed its base; one that has a value is not.

    Args:
        t: any tensor; one that is not on an XLA device is never donated.

    Raises:
        TypeError: ``t`` is not a tensor.
    """
    tensor = _leaves.without_wrapper(t)
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"t is of type {type(t).__name__}, not a tensor; ask for one tensor at a time.")
    return _C.is_donated(tensor)


class donation_disabled(_C.Scope, contextlib.ContextDecorator):
    """Steps of this thread inside the context donate nothing of this package's.

    A mark that such a step reads is over, as always; the report gives the reason. No warning is made of it. What
    torch_xla aliases by itself (in-place updates) stays as it is.

    Args:
        report_reuse: whether the use of a tensor that such a step would have consumed is told by a `DonationWarning` at
            the line of the use, also after the context has been left. The value is right, and stays. Whether XLA would
            have consumed a donor is predicted: by the bytes per device of donors and outputs, in the order of the
            graph's parameters. Inside another context: in addition to what that one asks for.
    """

    def __init__(self, *, report_reuse: bool = False) -> None:
        super().__init__()
        self._report_reuse = report_reuse
        self._checks = False
        self._options = {"report_reuse": report_reuse}
        self._open: list[_C.Disabling] = []  # for each time that it has been entered

    def _recreate_cm(self) -> donation_disabled:
        return type(self)(**self._options)

    def enter(self) -> None:
        self._open.append(_C.Disabling(self._report_reuse, self._checks))
        self._open[-1].on()

    def leave(self, raised: bool) -> None:
        if self._open:
            self._open[-1].off()
            self._open.pop()


def call_site() -> str:
    """``file:line`` of the nearest caller outside this package, torch and torch_xla."""
    frame = sys._getframe(1)
    while frame.f_back is not None and is_internal(frame):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def prepare(where: str) -> None:
    """Before a mark at ``where``: hooks and layouts must be right, and a setting that ignores donors is told.

    Raises:
        DonationError: the hooks have been taken out.
        ImportError: the layouts are not those relied on.
    """
    if not _C.installed():
        raise DonationError(
            "the hooks of torch_xla_donate have been taken out of torch_xla, so nothing can be donated. "
            "Start a new process to have them again."
        )
    _host.verify_layouts()
    setting = _host.ignores_donors()
    if setting and setting not in _switch_told:
        _switch_told.add(setting)
        warn(
            f"{setting} switches donation off in torch_xla for the whole process: marked buffers will be "
            "read and kept. Unset it to donate.",
            where,
        )
    if _C.has_notices() and _host.in_eager_mode():
        # There may be no step at whose end this would be told.
        _report.tell()


_switch_told: set[str] = set()
