"""Watches a trace at the level of torch's functions."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.nn.modules import module as modules
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from torch_xla_donate import _C, _frames, _host, _numbers, _trees
from torch_xla_donate._host import interrupts
from torch_xla_donate._trace.host_reads import HostReads, Refusal, tensors_of

_TEXTS = (torch.Tensor.__repr__, torch.Tensor.__format__)
_GRAD, _REQUIRES_GRAD = torch._C.TensorBase.grad, torch._C.TensorBase.requires_grad


class TensorSnapshot:
    """The buffer and the gradient of a tensor from outside at its first use in the trace."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self._buffer = _C.identity(tensor)[1]
        self.same = _host.same_buffer(tensor)
        self._gradient = tensor.grad if tensor.is_leaf else None
        self._gradient_buffer = _C.identity(self._gradient)[1] if self._gradient is not None else 0
        known = self._gradient is not None and self._gradient_buffer
        self._gradient_same = _host.same_buffer(self._gradient) if known else None  # type: ignore[arg-type]

    def has_new_gradient(self) -> bool:
        gradient = self.tensor.grad if self.tensor.is_leaf else None
        return gradient is not self._gradient or (
            gradient is not None and _C.identity(gradient)[1] != self._gradient_buffer
        )

    def is_replaced(self) -> bool:
        return bool(_C.identity(self.tensor)[1] != self._buffer)

    def restore(self) -> None:
        if self.is_replaced():
            _give_back_buffer(self.tensor, self.same)
        if self.has_new_gradient():
            self.tensor.grad = self._gradient
            if self._gradient_same is not None and self.has_new_gradient():
                _give_back_buffer(self._gradient, self._gradient_same)  # type: ignore[arg-type]


def give_back(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Gives a tensor this value, with its dtype and shape, which an update in place may have changed, too."""
    if (tensor.dtype, tensor.shape) != (value.dtype, value.shape):
        tensor.data = value
        return
    with torch.no_grad():
        tensor.copy_(value)


def _give_back_buffer(tensor: torch.Tensor, same: torch.Tensor) -> None:
    give_back(tensor, same)
    if _C.has_graph(tensor):  # a lowered function's pending work is dropped
        _C.give_array(tensor, same)


def state_of(module: torch.nn.Module) -> tuple[Any, ...]:
    """What a graph depends on besides the module's tensors."""
    return module.training, _host.hooks_of(module)


class ModulesCalled(_C.Scope):
    """Notes the modules that a trace calls, their modes and hooks, and the hooks of all modules."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[weakref.ref[torch.nn.Module], tuple[Any, ...]]] = []
        self._seen: set[int] = set()

    def enter(self) -> None:
        self._next_hook = RemovableHandle.next_id
        self.global_hooks = _host.global_hooks()
        modules.register_module_forward_pre_hook(self.note)

    def leave(self, raised: bool) -> None:
        # Without its handle, since an interrupt may come before the handle is stored.
        hooks = modules._global_forward_pre_hooks
        for key in [key for key, found in list(hooks.items()) if found == self.note]:
            hooks.pop(key, None)

    def note(self, module: torch.nn.Module, _: Any = None) -> None:
        if id(module) not in self._seen:
            self._seen.add(id(module))
            training, hooks = state_of(module)
            # A hook that the function itself registers is gone after the trace.
            self.found.append((weakref.ref(module), (training, tuple(one for one in hooks if one < self._next_hook))))


class Recorder(TorchFunctionMode):
    """Watches a trace at the level of torch's functions: its reads and changes of tensors from outside.

    Attributes:
        refuse: makes the errors.
        captured: tensors that the function uses and that are not arguments, by identity.
        aliases: pairs of such tensors that have the same identity, which the graph does not distinguish.
        given: the identities of the arguments.
        inseparable: ids of tensors that the function must not close over, because arguments have the same identity.
        donated_copies: the identities of copies of donated arguments.
        first_id: tensors from outside have smaller ids.
        seed_buffer: the buffer of the random seed, if a loop may have removed its id.
        reads: notes reads on the host, and random draws.
        modules: the modules that the function calls.
        without_gradient: ids of the tensors from outside whose missing `.grad` it has read.
        outside_ids: ids of the arguments, and of the tensors that the function closes over; not of aliases of these.
        made: the tensors that the trace has made, with their lines. They must be gone after the trace.
    """

    def __init__(self, refuse: Refusal, arguments: Sequence[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.reads = HostReads(refuse)
        self.refuse = refuse
        self._has_numbers = any(map(_numbers.is_float, arguments))
        self.modules = ModulesCalled()
        self.seed_buffer: int | None = None
        self._pauses = False
        self._arguments = [leaf for leaf in arguments if isinstance(leaf, torch.Tensor)]
        self.given = {_C.identity(leaf)[0] for leaf in self._arguments}
        self.captured: dict[int, torch.Tensor] = {}
        self.aliases: list[tuple[weakref.ref[torch.Tensor], weakref.ref[torch.Tensor]]] = []
        self.without_gradient: set[int] = set()
        self.inseparable: set[int] = set()
        self.donated_copies: set[int] = set()
        self.first_id = 0
        self._snapshots = [TensorSnapshot(leaf) for leaf in self._arguments if leaf.device.type == "xla"]
        self.made: list[tuple[weakref.ref[torch.Tensor], str]] = []
        self._results: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()  # by id
        self.outside_ids = {id(leaf) for leaf in self._arguments}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        return self._call(func, args, kwargs) if self._pauses else self._watch(self._call, func, args, kwargs)

    def as_one(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if self._pauses:
            return func(*args, **kwargs)
        if self.seed_buffer is None:
            self.seed_buffer = _host.seed_buffer()

        def call_paused(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            self._pauses = True
            try:
                return func(*args, **kwargs)
            finally:
                self._pauses = False

        return self._watch(call_paused, func, args, kwargs)

    def _call(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Calls a function of torch. The error for a read on the host names the floats among its arguments."""
        tensors = tensors_of((args, kwargs))
        if any(_host.without_wrapper(tensor) is not tensor for tensor in tensors):
            # torch breaks the wrappers that operations make inside of a TorchDispatchMode.
            args, kwargs = pytree.tree_map(_host.without_wrapper, (args, kwargs))
        numbers = _numbers.numbers_in(tensors) if self._has_numbers else []
        if not numbers:
            return func(*args, **kwargs)
        if self._pauses:  # the trace of a loop's body takes no tensors from outside
            raise self.refuse(
                f"uses {_numbers.joined(numbers)}, a Python float, in the body of a loop",
                'Pass it to the loop as a tensor, such as torch.full((), lr, device="xla"), or name that argument in '
                "static_argnums",
            )
        if func in _TEXTS:
            raise numbers[0].refuse(numbers)
        self.reads.numbers = numbers
        try:
            return _numbers.call(func, args, kwargs)
        finally:
            self.reads.numbers = []

    def _watch(self, call: Callable[..., Any], func: Any, args: Any, kwargs: Any) -> Any:
        tensors = [self._behind(tensor) for tensor in tensors_of((args, kwargs))]
        used = [(tensor, *self._read(tensor)) for tensor in tensors]
        self._check_attribute(func, args, kwargs)
        if func in _TEXTS and tensors[0].device.type == "xla" and not _numbers.numbers_in(tensors):
            raise self.reads.refuse_read(tensors[0])
        seed = torch.default_generator.get_state()
        result = call(func, args, kwargs)
        # Other threads, such as a data loader's, draw from the same generator.
        if self.reads.drew:
            self._check_generator(seed)
        if func is torch.Tensor.backward:
            self._check_gradients()
        for tensor, identity, buffer in used:
            if buffer and _C.identity(tensor) != (identity, buffer):
                raise self._updated(tensor, identity)
            # A write through a view changes its base.
            base = tensor._base if tensor.device.type == "xla" and not buffer else None
            if base is not None and id(base) in self.outside_ids and _C.identity(base)[0] not in self._outside():
                raise self._updated(base, 0)
        for tensor in tensors_of(result):
            if id(tensor) in self.outside_ids:
                continue
            self._results[id(tensor)] = tensor
            if tensor.device.type == "xla":
                self.made.append((weakref.ref(tensor), _frames.call_site()))
        return result

    def _behind(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor from outside that ``torch.func.grad`` and the like have wrapped where the trace does not look."""
        inner = _host.unwrapped(tensor)
        is_outside = inner is not tensor and _C.identity(inner)[0] and _host.tensor_id(inner) < self.first_id
        return inner if is_outside else tensor

    def _check_generator(self, before: torch.Tensor) -> None:
        if not torch.equal(before, torch.default_generator.get_state()):
            torch.default_generator.set_state(before)
            raise self.reads.refuse_draw()

    def _read(self, tensor: torch.Tensor) -> tuple[int, int]:
        """The identity and the buffer of a tensor from outside; (0, 0) for a tensor that the trace has made."""
        made = self._results.get(id(tensor)) is tensor
        if tensor.device.type != "xla":
            if tensor.device.type == "cpu" and not made:
                raise self.refuse(
                    f"reads {_trees.dtype_and_shape(tensor)} on {tensor.device}, which a replay would not read again",
                    "Move it to the XLA device outside, or make it an argument",
                )
            return 0, 0
        identity, buffer = _C.identity(tensor)
        if identity in self.given:
            if id(tensor) in self.inseparable:
                raise self.refuse(
                    f"closes over {_trees.dtype_and_shape(tensor)}, which is also an argument", "Pass a .clone()"
                )
            return identity, buffer
        if made:
            return (identity, buffer) if identity in self.captured else (0, 0)
        base = tensor._base if not buffer else None
        if base is not None and _C.identity(base)[1]:
            self._read(base)  # the graph computes the view again
        if buffer:
            tensor = _host.without_wrapper(tensor)
            known = self.captured.get(identity)
            if known is None:
                self._snapshots.append(TensorSnapshot(tensor))
            if known is None or isinstance(tensor, torch.nn.Parameter):
                self.captured[identity] = tensor
                self.outside_ids.add(id(tensor))
            if known is not None and known is not tensor:
                self.aliases.append((weakref.ref(known), weakref.ref(tensor)))
        return identity, buffer

    def _check_attribute(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Refuses attributes of a tensor from outside, which a replay neither reads nor writes again."""
        tensor = args[0] if args else None
        if not isinstance(tensor, torch.Tensor) or id(tensor) not in self.outside_ids:
            return
        owner, name = getattr(func, "__self__", None), getattr(func, "__name__", "")
        if owner == _GRAD and name == "__get__":
            gradient = tensor.grad
            if gradient is None:
                self.without_gradient.add(id(tensor))
            elif self._results.get(id(gradient)) is not gradient:
                raise self.refuse(
                    f"reads .grad of {_trees.dtype_and_shape(tensor)}, a tensor from outside, which would be read only "
                    "once",
                    "Make the gradient an argument",
                )
        elif owner == _GRAD and name == "__set__":
            raise self.refuse(
                f"sets .grad of {_trees.dtype_and_shape(tensor)}, a tensor from outside", "Do that outside"
            )
        elif (owner == _REQUIRES_GRAD and name == "__set__") or func is torch.Tensor.requires_grad_:
            value = args[1] if len(args) > 1 else kwargs.get("requires_grad", True)
            if tensor.requires_grad != value:
                raise self.refuse(
                    f"sets requires_grad of {_trees.dtype_and_shape(tensor)}, a tensor from outside",
                    "Use .detach() of it",
                )

    def _check_gradients(self, where: str | None = None) -> None:
        for snapshot in self._snapshots:
            if snapshot.has_new_gradient():
                raise self.refuse(
                    f"adds to the gradient of {_trees.dtype_and_shape(snapshot.tensor)}, a tensor from outside",
                    "Use torch.autograd.grad, or call backward() on .detach().requires_grad_() of it",
                    where,
                )

    def note_returned(self, results: Iterable[Any]) -> None:
        """Captures tensors from outside that the function only returns, since no operation reads them."""
        for leaf in results:
            if isinstance(leaf, torch.Tensor) and leaf.device.type == "xla":
                self._read(leaf)

    def _outside(self) -> set[int]:
        return self.given | self.captured.keys()

    def _updated(self, tensor: torch.Tensor, identity: int) -> Exception:
        which = "an argument" if identity in self.given or any(tensor is t for t in self._arguments) else "a tensor"
        return self.refuse(
            f"updates {which} from outside, {_trees.dtype_and_shape(tensor)}, in place",
            "Compute a new tensor and return it",
        )

    def restore(self) -> None:
        """Restores the values that tensors from outside had before the trace."""
        for snapshot in reversed(self._snapshots):  # a view before its base, which it writes to
            snapshot.restore()

    def check(self) -> None:
        """Raises DonationError if the trace has changed a tensor from outside in a way that no operation showed."""
        for tensor in [*self._arguments, *self.captured.values()]:
            if _C.identity(tensor)[0] not in self._outside() or not _C.identity(tensor)[1]:
                raise self._updated(tensor, 0)
        self._check_gradients("unknown line")


class Restoring(_C.Scope):
    """Restores the tensors from outside at the end of a trace."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def leave(self, raised: bool) -> None:
        self._recorder.restore()


# The recorder of this thread's operations, if the function is traced for a replay.
current_watcher: interrupts.PerThread[Recorder | None] = interrupts.per_thread(None)


def as_one(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls a function that traces the body of a loop. The recorder sees it as one operation."""
    by = current_watcher.value
    return func(*args, **kwargs) if by is None else by.as_one(func, args, kwargs)
