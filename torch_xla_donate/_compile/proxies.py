"""The tensors that replace the arguments of a call in a trace."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Container, Iterable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torch_xla_donate import _C, _host, _numbers, _trace, _trees
from torch_xla_donate._compile.arguments import Argument, CallArguments
from torch_xla_donate._compile.donation import leaves_of_call
from torch_xla_donate._compile.floats import put_numbers, upload_floats
from torch_xla_donate._errors import DonationError, see


def tensors_among(leaves: Sequence[Any]) -> list[tuple[int, torch.Tensor]]:
    return [(i, leaf) for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]


class ArgumentProxies:
    """Other tensors of the same buffers, which replace the arguments in the trace.

    They distinguish an argument from the same tensor in the function's closure. Tensors of modules and optimizers are
    not replaced. Under SPMD other tensors would lose the sharding, so aliases replace the arguments.

    Attributes:
        values: the floats among the arguments; None if there are none.
        floats: the position among the leaves of the float that a tensor stands for, by the tensor's id.
        donated_copies: the identities of copies of donated arguments, which have no marks.
    """

    def __init__(self, function: str, call: CallArguments, refuse: _trace.Refusal) -> None:
        self._function, self._call, self._refuse = function, call, refuse
        self._plain: dict[int, torch.Tensor] = {}
        tree = pytree.tree_leaves(call.values(call.roles.nonstatic))
        for leaf in tree:
            if isinstance(leaf, torch.Tensor) and _C.identity(leaf)[1]:
                self._plain[id(leaf)] = _host.without_wrapper(leaf)
        leaves, _ = leaves_of_call(call)
        refuse_composed(function, "its arguments have", leaves)
        # A module or optimizer among the arguments may hold such a tensor, too: for autograd they must stay one.
        held = Counter(map(id, leaves)) - Counter(id(_host.without_wrapper(leaf)) for leaf in tree)
        inside = {_C.identity(leaf)[0] for _, leaf in tensors_among(leaves) if id(leaf) in held}
        self._plain = {i: leaf for i, leaf in self._plain.items() if _C.identity(leaf)[0] not in inside}
        self._refuse_views(leaves)
        self.values = upload_floats(leaves)
        self.floats: dict[int, int] = {}
        self._spmd = bool(_host.runtime().is_spmd())
        # Constants of the function may share these buffers.
        self._to_copy = {_C.identity(leaf)[1] for leaf in self._plain.values() if _C.is_constant(leaf)}
        self._copies: dict[int, torch.Tensor] = {}
        self.donated_copies: set[int] = set()
        self._to_move: list[torch.Tensor] = []
        self._made: list[tuple[weakref.ref[torch.Tensor], str]] = []
        self._given: list[weakref.ref[torch.Tensor]] = []
        self._buffers: set[int] = set()
        # Of each argument in the trace: its value, and its leaves and structure before the trace.
        self._contents: list[tuple[Argument, Any, list[Any], Any]] = []
        self.separate()

    def _refuse_views(self, leaves: Sequence[Any]) -> None:
        """Raises DonationError for a view that the trace does not replace: a view of it would read its base."""
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor) and id(leaf) not in self._plain and leaf._is_view():
                raise DonationError(
                    f"{self._function} is declared pure, but a module or optimizer among its arguments holds "
                    f"{_trees.dtype_and_shape(leaf)}, a view of another tensor, which the graph may read instead. Put "
                    f"a .clone() of the view there. Nothing was donated. {see('pure')}"
                )

    def separate(self) -> None:
        """Copies arguments, and gives tensors in the closure separate buffers, before the next trace."""
        for leaf in self._plain.values():
            buffer = _C.identity(leaf)[1]
            if buffer in self._to_copy and buffer not in self._copies:
                self._copies[buffer] = _host.computed(leaf)
        for tensor in self._to_move:
            _host.give_own_buffer(tensor)
        self._to_move.clear()

    def make(self) -> tuple[CallArguments, list[Any]]:
        """The call to trace. Also the leaves of its arguments, with floats where the trace has numbers."""
        made = {i: self._proxy_of(leaf) for i, leaf in self._plain.items()}
        for leaf in self._plain.values():  # also that of making its replacement
            _C.drop_node(leaf)
        self.donated_copies = {
            _C.identity(made[i])[0]
            for i, leaf in self._plain.items()
            if _C.identity(leaf)[1] in self._copies and _C.state(leaf) == "marked"
        }
        self._given = [] if self._spmd else [weakref.ref(leaf) for leaf in made.values()]
        call = self._call.replaced(lambda leaf: made.get(id(leaf), leaf))
        leaves, _ = leaves_of_call(call)
        call, numbers = put_numbers(call, self.values, self._refuse)
        positions = [i for i, leaf in enumerate(leaves) if _numbers.is_float(leaf)]
        self.floats = {id(one): position for one, position in zip(numbers, positions)}
        self._given += [weakref.ref(one) for one in numbers]
        arguments = call.roles.nonstatic
        self._contents = [
            (argument, value, *pytree.tree_flatten(value)) for argument, value in zip(arguments, call.values(arguments))
        ]
        return call, leaves

    def refuse_changed(self) -> None:
        """Raises DonationError if the trace has changed a container among the arguments, which a replay would not."""
        contents, self._contents = self._contents, []  # or they would keep the tensors
        for argument, value, leaves, structure in contents:
            now, new_structure = pytree.tree_flatten(value)
            is_same = _trees.structure_key(structure) == _trees.structure_key(new_structure)
            if not is_same or any(one is not other for one, other in zip(leaves, now, strict=True)):
                raise self._refuse(f"changes what {argument} contains", "Return a new container", "")

    def _proxy_of(self, leaf: torch.Tensor) -> torch.Tensor:
        source = self._copies.get(_C.identity(leaf)[1], leaf)
        made = _host.stand_in(source)
        if type(leaf) is torch.Tensor:
            made.requires_grad_(leaf.requires_grad)
        else:
            made = torch.Tensor._make_subclass(type(leaf), made, leaf.requires_grad)
        made.__dict__.update(leaf.__dict__)
        if leaf.requires_grad:
            for hook in (leaf._backward_hooks or {}).values():
                made.register_hook(hook)  # type: ignore[no-untyped-call]
        if leaf.is_leaf and leaf.grad is not None:
            made.grad = _host.same_buffer(leaf.grad)
        return made

    def inseparable(self) -> set[int]:
        """The ids of the tensors whose replacements have the same identity."""
        return {id(leaf) for leaf in self._plain.values()} if self._spmd else set()

    def read_unseen(self, captured: Container[int]) -> torch.Tensor | None:
        """An argument that the trace has read in place of its replacement, without seeing it; not under SPMD.

        captured: the identities of the tensors that it has seen.
        """
        if self._spmd:
            return None
        unseen = [leaf for leaf in self._plain.values() if _C.identity(leaf)[0] not in captured]
        return next((leaf for leaf in unseen if _C.drop_node(leaf)), None)

    def are_shared(self, captured: Iterable[torch.Tensor], leaves: Sequence[Any]) -> bool:
        """Whether tensors need separate buffers (`separate`) before a trace can distinguish them."""
        given = {_C.identity(leaf)[1] for leaf in leaves if isinstance(leaf, torch.Tensor)}
        plain = {_C.identity(leaf)[1] for leaf in self._plain.values()} - self._to_copy
        found = False
        for tensor in captured:
            buffer = _C.identity(tensor)[1]
            if buffer in plain and not self._spmd:
                self._to_copy.add(buffer)
                found = True
            elif buffer in given or _C.is_constant(tensor):
                self._to_move.append(tensor)
                found = True
        return found

    def note_made(self, made: list[tuple[weakref.ref[torch.Tensor], str]]) -> None:
        """Notes the tensors that the trace has made, and those that replaced arguments."""
        given = [(reference, "") for reference in self._given]
        self._made = [*made, *given]
        self._buffers = {_C.identity(tensor)[1] for reference, _ in given if (tensor := reference()) is not None}

    def refuse_kept(self, opaque: str) -> None:
        """Raises DonationError if something outside the function keeps a tensor that depends on the arguments.

        opaque: the type of a result that may hold tensors and is not a pytree node; empty if there is none.
        """

        def kept() -> list[tuple[torch.Tensor, str]]:
            alive = [(reference(), where) for reference, where in self._made]
            return [
                (tensor, where)
                for tensor, where in alive
                if tensor is not None and (_C.has_graph(tensor) or _C.identity(tensor)[1] in self._buffers)
            ]

        if kept():
            gc.collect()  # a reference cycle may keep it
        for tensor, where in kept():
            raise self._refuse(
                f"{'makes' if where else 'gets the argument'} {_trees.dtype_and_shape(tensor)}, which "
                + (
                    f"a result of type {opaque} keeps" if opaque else "something outside the function, or a hook, keeps"
                ),
                "Return the tensor in a tuple, list or dict, or register the type with torch.utils._pytree"
                if opaque
                else "Return it",
                where,
            )


def refuse_composed(function: str, who: str, leaves: Iterable[Any]) -> None:
    """Raises DonationError for a tensor that is made of other tensors, except for torch_xla's own wrapper."""
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and leaf.device.type == "xla" and not _C.identity(leaf)[0]:
            raise DonationError(
                f"{function} is declared pure, but {who} {_trees.dtype_and_shape(leaf)} of the class "
                f"{type(leaf).__name__}, which is made of other tensors. Use these, or remove pure=True. Nothing was "
                f"donated. {see('pure')}"
            )
