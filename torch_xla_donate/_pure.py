"""compile(f, pure=True): the function is traced once for each signature of its arguments, and replayed afterwards."""

from __future__ import annotations

import contextlib
import gc
import itertools
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch_xla
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from torch_xla_donate import (
    _C,
    _arguments,
    _bodies,
    _donate,
    _errors,
    _host,
    _interrupts,
    _leaves,
    _log,
    _numbers,
    _runs,
    _signatures,
)
from torch_xla_donate._arguments import Arguments, CallNames, Plan
from torch_xla_donate._compile import Compiled, Donated


class Recorder(TorchFunctionMode):
    """Watches a trace at the level of torch's functions: what it reads from outside, and what it changes there.

    Attributes:
        captured: the tensors that the function uses and has not been given, by identity.
        given: the identities of those that it has been given.
        inseparable: ids of tensors that the function must not close over, as nothing would tell them from arguments.
        seed_buffer: of the random seed, if a loop may have taken its id away.
        reads: what knows whether this thread has drawn random numbers on the host; None if nothing does.
        modules: those that the function calls.
        has_numbers: whether Python floats among the arguments are traced.
    """

    def __init__(self, function: str, arguments: Sequence[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.reads: HostReads | None = None
        self.has_numbers = False
        self.modules = ModulesCalled()
        self._function = function
        self.seed_buffer: int | None = None
        self._pauses = False
        self._arguments = [leaf for leaf in arguments if isinstance(leaf, torch.Tensor)]
        self.given = {_C.identity(leaf)[0] for leaf in self._arguments}
        self.captured: dict[int, torch.Tensor] = {}
        self.inseparable: set[int] = set()
        self._before = [Before(leaf) for leaf in self._arguments if leaf.device.type == "xla"]
        self._made: list[tuple[weakref.ref[torch.Tensor], str]] = []
        self._results: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()  # by id
        self._outside_ids = {id(leaf) for leaf in self._arguments}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._pauses:
            return self._call_with_numbers(func, args, kwargs) if self.has_numbers else func(*args, **kwargs)
        return self._watch(func, args, kwargs)

    def as_one(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if self._pauses:
            return func(*args, **kwargs)
        if self.seed_buffer is None:
            self.seed_buffer = _host.seed_buffer()

        def paused(*args: Any, **kwargs: Any) -> Any:
            self._pauses = True
            try:
                return func(*args, **kwargs)
            finally:
                self._pauses = False

        return self._watch(paused, args, kwargs, is_torch=False)

    def _call_with_numbers(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Calls a function of torch; the error for a read on the host names the floats that it has been given."""
        numbers = _numbers.numbers_in(_tensors((args, kwargs)))
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
        reads = self.reads
        if reads is not None:
            reads.numbers = numbers
        try:
            return _numbers.call(func, args, kwargs)
        except _numbers.HostUse:
            raise numbers[0].refuse(numbers) from None
        finally:
            if reads is not None:
                reads.numbers = []

    def uses(self, modules: Iterable[torch.nn.Module]) -> None:
        for module in modules:
            self.modules.note(module)

    def _watch(self, func: Any, args: Any, kwargs: Any, is_torch: bool = True) -> Any:
        tensors = _tensors((args, kwargs))
        used = [(tensor, *self._read(tensor)) for tensor in tensors]
        self._check_attribute(func, args)
        if func in _TEXTS and tensors[0].device.type == "xla" and not _numbers.numbers_in(tensors):
            raise self.refuse(f"reads {_leaves.array(tensors[0])} on the host", _RETURN_IT)
        seed = torch.default_generator.get_state()
        has_numbers = is_torch and self.has_numbers
        result = self._call_with_numbers(func, args, kwargs) if has_numbers else func(*args, **kwargs)
        # Threads of the program, such as a data loader's, draw from the same generator.
        if self.reads is None or self.reads.drew:
            self._check_generator(seed)
        if func is torch.Tensor.backward:
            self._check_gradients(_donate.call_site())
        for tensor, identity, buffer in used:
            if buffer and _C.identity(tensor) != (identity, buffer):
                raise self._updated(tensor, identity)
            # A write through a view changes its base.
            base = tensor._base if tensor.device.type == "xla" and not buffer else None
            if base is not None and id(base) in self._outside_ids and _C.identity(base)[0] not in self._outside():
                raise self._updated(base, 0)
        for tensor in _tensors(result):
            if id(tensor) in self._outside_ids:
                continue
            self._results[id(tensor)] = tensor
            if tensor.device.type == "xla":
                self._made.append((weakref.ref(tensor), _donate.call_site()))
        return result

    def _check_generator(self, before: torch.Tensor) -> None:
        if not torch.equal(before, torch.default_generator.get_state()):
            torch.default_generator.set_state(before)
            raise self.refuse(
                "draws random numbers on the host, which a replay would not draw again",
                'Draw them on the device (device="xla")',
            )

    def _read(self, tensor: torch.Tensor) -> tuple[int, int]:
        """Identity and buffer of a tensor from outside; no buffer for one that the trace has made."""
        made = self._results.get(id(tensor)) is tensor
        if tensor.device.type != "xla":
            if tensor.device.type == "cpu" and not made:
                raise self.refuse(
                    f"reads {_leaves.array(tensor)} on {tensor.device}, which a replay would not read again",
                    "Move it to the XLA device outside, or make it an argument",
                )
            return 0, 0
        identity, buffer = _C.identity(tensor)
        if identity in self.given:
            if id(tensor) in self.inseparable:
                raise self.refuse(f"closes over {_leaves.array(tensor)}, which is an argument, too", "Pass a .clone()")
            return identity, buffer
        if made:
            return (identity, buffer) if identity in self.captured else (0, 0)
        base = tensor._base if not buffer else None
        if base is not None and _C.identity(base)[1]:
            self._read(base)  # the graph computes the view anew
        if buffer:
            known = self.captured.get(identity)
            if known is None:
                self._before.append(Before(tensor))
            if known is None or isinstance(tensor, torch.nn.Parameter):
                self.captured[identity] = tensor
                self._outside_ids.add(id(tensor))
        return identity, buffer

    def _check_attribute(self, func: Any, args: Sequence[Any]) -> None:
        """Attributes of a tensor from outside: a replay neither reads nor writes them again."""
        tensor = args[0] if args else None
        if not isinstance(tensor, torch.Tensor) or id(tensor) not in self._outside_ids:
            return
        owner, name = getattr(func, "__self__", None), getattr(func, "__name__", "")
        if owner == _GRAD and name == "__get__":
            gradient = tensor.grad
            if gradient is not None and self._results.get(id(gradient)) is not gradient:
                raise self.refuse(
                    f"reads .grad of {_leaves.array(tensor)}, a tensor from outside, which would be read only once",
                    "Make the gradient an argument",
                )
        elif owner == _GRAD and name == "__set__":
            raise self.refuse(f"sets .grad of {_leaves.array(tensor)}, a tensor from outside", "Do that outside")
        elif (owner == _REQUIRES_GRAD and name == "__set__") or func is torch.Tensor.requires_grad_:
            if tensor.requires_grad != (args[1] if len(args) > 1 else True):
                raise self.refuse(
                    f"sets requires_grad of {_leaves.array(tensor)}, a tensor from outside", "Use .detach() of it"
                )

    def _check_gradients(self, where: str) -> None:
        for before in self._before:
            if before.has_new_gradient():
                raise impure(
                    self._function,
                    where,
                    f"adds to the gradient of {_leaves.array(before.tensor)}, a tensor from outside",
                    "Use torch.autograd.grad, or call backward() on .detach().requires_grad_() of it",
                )

    def is_outside(self, tensor: torch.Tensor) -> bool:
        """Whether it is an argument, or a tensor that the function closes over; not an alias of one."""
        return id(tensor) in self._outside_ids

    def note_returned(self, results: Iterable[Any]) -> None:
        """A tensor from outside that is only returned is read by no operation, and captured all the same."""
        for leaf in results:
            if isinstance(leaf, torch.Tensor) and leaf.device.type == "xla":
                self._read(leaf)

    def _outside(self) -> set[int]:
        return self.given | self.captured.keys()

    def _updated(self, tensor: torch.Tensor, identity: int) -> Exception:
        which = "an argument" if identity in self.given or any(tensor is t for t in self._arguments) else "a tensor"
        return self.refuse(
            f"updates {which} from outside, {_leaves.array(tensor)}, in place", "Compute a new tensor and return it"
        )

    def refuse(self, what: str, remedy: str) -> Exception:
        return impure(self._function, _donate.call_site(), what, remedy)

    def restore(self) -> None:
        """Gives the tensors from outside back what they held before the trace."""
        for before in self._before:
            before.restore()

    def check(self) -> None:
        """DonationError if the trace has changed something outside in a way that was not seen when it happened."""
        for tensor in [*self._arguments, *self.captured.values()]:
            if _C.identity(tensor)[0] not in self._outside() or not _C.identity(tensor)[1]:
                raise self._updated(tensor, 0)
        self._check_gradients("unknown line")

    def made(self) -> list[tuple[weakref.ref[torch.Tensor], str]]:
        """What must be gone when the trace is over: the tensors that it has made, each with its line."""
        return self._made


class Before:
    """What a tensor from outside held when the trace came upon it."""

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
            with torch.no_grad():
                self.tensor.copy_(self.same)
        if self.has_new_gradient():
            self.tensor.grad = self._gradient
            if self._gradient_same is not None and self.has_new_gradient():
                with torch.no_grad():
                    self._gradient.copy_(self._gradient_same)  # type: ignore[union-attr]


class Restoring(_C.Scope):
    """Gives the tensors from outside back what they held, once a trace is over."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def leave(self, raised: bool) -> None:
        self._recorder.restore()


class HostReads(TorchDispatchMode):
    """Refuses to bring a value to the host, which a replay would not do again.

    Attributes:
        drew: whether random numbers have been drawn there.
        numbers: of the operation under way, which the error is about if there are any.
    """

    def __init__(self, function: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._function = function
        self.drew = False
        self.numbers: Sequence[_numbers.Number] = ()
        self._transfers = _host.transfers()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket is torch.ops.aten._local_scalar_dense or str(kwargs.get("device", "xla")) == "cpu":
            for tensor in _tensors((args, kwargs)):
                if tensor.device.type == "xla":
                    raise self._refuse(tensor)
        result = func(*args, **kwargs)
        on_host = any(tensor.device.type == "cpu" for tensor in _tensors(result))
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.drew = self.drew or on_host
        elif on_host:  # as copy_ to a tensor on the host
            for tensor in _tensors((args, kwargs)):
                if tensor.device.type == "xla":
                    raise self._refuse(tensor)
        self.check(_donate.call_site)
        return result

    def _refuse(self, tensor: torch.Tensor) -> Exception:
        if self.numbers:
            return self.numbers[0].refuse(self.numbers)
        return impure(self._function, _donate.call_site(), f"reads {_leaves.array(tensor)} on the host", _RETURN_IT)

    def check(self, where: Callable[[], str] = lambda: "unknown line") -> None:
        """DonationError if something has been read meanwhile: operations without an XLA lowering run on the host."""
        # Both: other threads may read, and this one may wait without reading.
        if all(now != before for now, before in zip(_host.transfers(), self._transfers)):
            raise impure(self._function, where(), "reads a tensor on the host", _RETURN_IT)


_RETURN_IT = "Return the tensor and read it outside"
_CLOSED_OVER = "the function closes over it, too"
_TEXTS = (torch.Tensor.__repr__, torch.Tensor.__format__)
_GRAD, _REQUIRES_GRAD = torch._C.TensorBase.grad, torch._C.TensorBase.requires_grad


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _reads_float(function: str, numbers: Sequence[_numbers.Number]) -> Exception:
    names = _numbers.joined(numbers)
    return impure(
        function,
        _donate.call_site(),
        f"reads {names} on the host, a Python float, which is traced",
        "Name that argument in static_argnums, so that each value has a trace, or compute with torch's operations only",
    )


def impure(function: str, where: str, what: str, remedy: str) -> _errors.DonationError:
    return _errors.DonationError(
        f"{function} is declared pure, and at {where} it {what}. {remedy}, or take pure=True out. Nothing was donated."
    )


class Slot(NamedTuple):
    """Where a result, or an input of the graph, comes from."""

    kind: str  # "graph", "argument", "detached argument", "value", "detached value", "copied value" or "floats"
    source: Any
    like: Any = None  # Parameter or requires_grad, of a result that is one


class Program:
    """A traced function: its compiled graph, and where inputs and results come from."""

    def __init__(self, compiled: PureCompiled, plan: Plan, args: Any, kwargs: Any, offered: Sequence[int]) -> None:
        self.name = _runs.graph_name()
        stand_ins = StandIns(compiled, plan, args, kwargs)
        while self._trace(compiled, stand_ins, offered):
            stand_ins.separate()
        stand_ins.refuse_kept(compiled.function)

    def _trace(self, compiled: PureCompiled, stand_ins: StandIns, offered: Sequence[int]) -> bool:
        """True if the buffer of an argument is another input, too, which the graph takes for the same one."""
        with _host.tracing():
            args, kwargs, leaves = stand_ins.make()
            recorder = Recorder(compiled.function, leaves)
            recorder.inseparable = stand_ins.inseparable()
            recorder.has_numbers = bool(stand_ins.floats)
            with Restoring(recorder):
                reads = recorder.reads = HostReads(compiled.function)
                watched = _bodies.watched(recorder)
                refused = _host_reads_refused(compiled.function)
                with _interrupts.Restored(), refused, recorder.modules, reads, recorder, watched:
                    tree = compiled.trace(*args, **kwargs)
                    results, self._structure = pytree.tree_flatten(tree)
                    plain = _C.flatten(tree)
                    self._tokens = None if plain is None else plain[1]
                    del tree
                reads.check()
                _refuse_gradients(compiled.function, results, recorder)
                recorder.note_returned(results)
                recorder.check()
                # A float that the function returns as it came is that of the call.
                passed_on = {id(leaf): stand_ins.floats.get(id(leaf)) for leaf in results}
                own = [
                    leaf if passed_on[id(leaf)] is not None else self._own(_numbers.as_result(leaf), recorder)
                    for leaf in results
                ]
                outputs: dict[int, torch.Tensor] = {}
                for leaf in own:
                    if isinstance(leaf, torch.Tensor) and _C.has_graph(leaf) and passed_on.get(id(leaf)) is None:
                        outputs.setdefault(_C.identity(leaf)[0], leaf)
                places = {identity: place for place, identity in enumerate(outputs)}
                given: dict[int, int] = {}
                for i, leaf in enumerate(leaves):
                    if isinstance(leaf, torch.Tensor):
                        given.setdefault(_C.identity(leaf)[0], i)
                stand_ins.note_made(recorder.made())
                if stand_ins.are_shared(recorder.captured.values(), leaves):
                    return True
                self._results = [
                    self._result(leaf, places, given, leaves, recorder)
                    if (index := passed_on.get(id(leaf))) is None
                    else Slot("argument", index)
                    for leaf in own
                ]
                # By buffer: several arguments may hold one. Which of them do is a part of the signature.
                kept = {_C.identity(tensor)[1] for tensor in _leaves.tensors_in(own)} - {0}
                tensors = [(i, leaf) for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
                self.returned = [i for i, leaf in tensors if _C.identity(leaf)[1] in kept]
                donors = [i for i in offered if i not in self.returned]
                pending, given_up = list(outputs.values()), [leaves[i] for i in donors]
                _log.dump_lowered(compiled.function, lambda: _host.hlo_text(pending, given_up))
                graph = _host.compile_graph(pending, given_up, recorder.seed_buffer)
        self._hash, self._seed = graph.hash, graph.seeds[0] if graph.seeds else None
        by_buffer: dict[int, Slot] = {}
        if stand_ins.values is not None:
            by_buffer[_C.identity(stand_ins.values)[1]] = Slot("floats", None)
        for tensor in recorder.captured.values():
            by_buffer[_C.identity(tensor)[1]] = Slot("value", tensor)
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                by_buffer.setdefault(_C.identity(leaf)[1], Slot("argument", i))
        sources = [by_buffer.get(_C.identity(tensor)[1], Slot("value", tensor)) for tensor in graph.inputs]
        self._inputs = [None if slot.kind == "argument" else slot.source for slot in sources]
        self._floats = next((place for place, slot in enumerate(sources) if slot.kind == "floats"), None)
        self._arguments = [(place, slot.source) for place, slot in enumerate(sources) if slot.kind == "argument"]
        self.captured = list(recorder.captured.values())
        self._signature = self._sign()
        self._modules = recorder.modules.found
        self._places = {source: (place, graph.successors[place]) for place, source in self._arguments}
        read = self._places.keys()
        self._usable = read - set(self.returned)
        self.donors = [i for i in donors if i in read]
        return False

    def _own(self, leaf: Any, recorder: Recorder) -> Any:
        """A result that no operation of the graph has made (a constant, a whole copy) becomes an output of it."""
        if not isinstance(leaf, torch.Tensor) or leaf.device.type != "xla" or _C.has_graph(leaf):
            return leaf
        identity = _C.identity(leaf)[0]
        return leaf if identity in recorder.given or identity in recorder.captured else _host.computed(leaf)

    @staticmethod
    def _result(
        leaf: Any, places: Mapping[int, int], given: Mapping[int, int], leaves: Sequence[Any], recorder: Recorder
    ) -> Slot:
        if not isinstance(leaf, torch.Tensor):
            return Slot("value", leaf)
        identity = _C.identity(leaf)[0] if leaf.device.type == "xla" else 0
        like = torch.nn.Parameter if isinstance(leaf, torch.nn.Parameter) else True if leaf.requires_grad else None
        if identity in places:
            return Slot("graph", places[identity], like)
        if identity in given:
            same = leaf is leaves[given[identity]]
            return Slot("argument" if same else "detached argument", given[identity], None if same else like)
        known = recorder.captured.get(identity)
        if known is not None:
            return Slot("value" if leaf is known else "detached value", known, None if leaf is known else like)
        return Slot("copied value", leaf)

    def _sign(self) -> tuple[Hashable, bool]:
        found = _signatures.signature_of(self.captured)
        return (found.key, _host.graph_key(self.captured)), found.pending

    def is_current(self) -> bool:
        """Whether what the function closes over is still of the kind that the graph was traced for."""
        if self.captured:
            signature, pending = self._sign()
            if pending:
                torch_xla.sync()
                signature, _ = self._sign()
            if signature != self._signature[0]:
                return False
        for reference, training in self._modules:
            module = reference()
            if module is not None and module.training != training:
                return False
        return True

    def usable(self, positions: Sequence[int]) -> list[int]:
        """Those of the arguments that a run reads and does not return: it may consume them."""
        return [i for i in positions if i in self._usable]

    def places(self, positions: Sequence[int]) -> list[tuple[int | None, int | None]]:
        """For each of these arguments its number among the graph's parameters, and that of the output made of it."""
        return [self._places[i] for i in positions]

    def run(self, leaves: Sequence[Any]) -> Any:
        inputs = list(self._inputs)
        for place, index in self._arguments:
            inputs[place] = leaves[index]
        if self._floats is not None:
            inputs[self._floats] = upload_floats(leaves)
        outputs = _host.run_graph(self._hash, inputs, self._seed) if self._hash is not None else []
        pick: dict[str, Callable[[Any], Any]] = {
            "graph": outputs.__getitem__,
            "argument": leaves.__getitem__,
            "detached argument": lambda index: leaves[index].detach(),
            "value": lambda value: value,
            "detached value": lambda value: value.detach(),
            "copied value": lambda value: value.clone(),
        }
        results = [
            pick[kind](source) if like is None else _like(pick[kind](source), like)
            for kind, source, like in self._results
        ]
        if self._tokens is not None:  # the same in C++
            return _C.unflatten(results, self._tokens)
        return pytree.tree_unflatten(results, self._structure)


def upload_floats(leaves: Sequence[Any]) -> torch.Tensor:
    """The floats among a call's leaves, in one transfer. One vector: torch_xla would cache a tensor of one number."""
    device = next((leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor)), "xla")
    return torch.tensor(_numbers.values_of(leaves), dtype=torch.float64, device="cpu").to(device)


def put_numbers(
    compiled: Compiled, plan: Plan, args: list[Any], kwargs: dict[str, Any], values: torch.Tensor
) -> list[_numbers.Number]:
    """Puts numbers in the place of the floats among the arguments, and returns them; `values` as uploaded."""
    slots = plan.donated + plan.kept
    parts = [_leaves.flatten(_arguments.value(slot, args, kwargs)) for slot in slots]
    names = CallNames([(slot, len(found), names) for slot, (found, names) in zip(slots, parts)])
    leaves = itertools.chain.from_iterable(found for found, _ in parts)
    texts = [names.name(position) for position, leaf in enumerate(leaves) if _numbers.is_float(leaf)]
    numbers = _numbers.stand_ins(values, texts, lambda used: _reads_float(compiled.function, used))
    following = iter(numbers)
    for slot in slots:
        into: Any = kwargs if isinstance(slot.key, str) else args
        into[slot.key] = pytree.tree_map(
            lambda leaf: next(following) if _numbers.is_float(leaf) else leaf, into[slot.key]
        )
    return numbers


def _like(result: torch.Tensor, like: Any) -> torch.Tensor:
    return result.requires_grad_() if like is True else torch.nn.Parameter(result)


class StandIns:
    """The tensors that the trace is given for the arguments: others of the same buffers.

    So a tensor that is an argument of this call and that the function closes over, too, is told apart from it. Tensors
    of modules and optimizers stay what they are. With SPMD others would lose the sharding, so aliases stand in.

    Attributes:
        values: the floats among the arguments; None if there are none.
        floats: the position among the leaves of the float that a tensor stands for, by the tensor's id.
    """

    def __init__(self, compiled: PureCompiled, plan: Plan, args: Any, kwargs: Any) -> None:
        self._compiled, self._plan, self._args, self._kwargs = compiled, plan, args, kwargs
        self._plain: dict[int, torch.Tensor] = {}
        for slot in plan.donated + plan.kept:
            for leaf in pytree.tree_leaves(_arguments.value(slot, args, kwargs)):
                tensor = _leaves.without_wrapper(leaf)
                if type(tensor) in (torch.Tensor, torch.nn.Parameter) and _C.identity(tensor)[1]:
                    self._plain[id(leaf)] = tensor
        leaves = compiled.leaves(plan, args, kwargs)
        self._float_positions = [i for i, leaf in enumerate(leaves) if _numbers.is_float(leaf)]
        self.values = upload_floats(leaves) if self._float_positions else None
        self.floats: dict[int, int] = {}
        self._spmd = bool(_host.runtime().is_spmd())
        # Constants of the function may share these.
        self._to_copy = {_C.identity(leaf)[1] for leaf in self._plain.values() if _C.state(leaf) == "read_only"}
        self._copies: dict[int, torch.Tensor] = {}
        self._to_move: list[torch.Tensor] = []
        self._made: list[tuple[weakref.ref[torch.Tensor], str]] = []
        self._given: list[weakref.ref[torch.Tensor]] = []
        self._buffers: set[int] = set()
        self.separate()

    def separate(self) -> None:
        """Before the next trace: arguments get copies, and what the function closes over buffers of its own."""
        for leaf in self._plain.values():
            buffer = _C.identity(leaf)[1]
            if buffer in self._to_copy and buffer not in self._copies:
                self._copies[buffer] = _host.computed(leaf)
        for tensor in self._to_move:
            _host.give_own_buffer(tensor)
        self._to_move.clear()

    def make(self) -> tuple[list[Any], dict[str, Any], list[Any]]:
        """Arguments, keyword arguments, and their leaves."""
        args, kwargs = list(self._args), dict(self._kwargs)
        made = {i: self._stand_in(leaf) for i, leaf in self._plain.items()}
        self._given = [] if self._spmd else [weakref.ref(leaf) for leaf in made.values()]
        for slot in self._plan.donated + self._plan.kept:
            value = _arguments.value(slot, args, kwargs)
            into: Any = kwargs if isinstance(slot.key, str) else args
            into[slot.key] = pytree.tree_map(lambda leaf: made.get(id(leaf), leaf), value)
        leaves = self._compiled.leaves(self._plan, args, kwargs)
        if self.values is not None:
            numbers = put_numbers(self._compiled, self._plan, args, kwargs, self.values)
            self.floats = {id(one): position for one, position in zip(numbers, self._float_positions)}
            self._given += [weakref.ref(one) for one in numbers]
        return args, kwargs, leaves

    def _stand_in(self, leaf: torch.Tensor) -> torch.Tensor:
        source = self._copies.get(_C.identity(leaf)[1], leaf)
        made = leaf.detach() if self._spmd else _host.same_buffer(source)
        if isinstance(leaf, torch.nn.Parameter):
            made = torch.nn.Parameter(made, leaf.requires_grad)
        else:
            made.requires_grad_(leaf.requires_grad)
        if leaf.is_leaf and leaf.grad is not None:
            made.grad = _host.same_buffer(leaf.grad)
        return made

    def inseparable(self) -> set[int]:
        """The ids of the tensors for which others of the same identity stand."""
        return {id(leaf) for leaf in self._plain.values()} if self._spmd else set()

    def are_shared(self, captured: Iterable[torch.Tensor], leaves: Sequence[Any]) -> bool:
        """Whether tensors have to get buffers of their own (`separate`) before a trace can tell them apart."""
        given = {_C.identity(leaf)[1] for leaf in leaves if isinstance(leaf, torch.Tensor)}
        plain = {_C.identity(leaf)[1] for leaf in self._plain.values()} - self._to_copy
        found = False
        for tensor in captured:
            buffer = _C.identity(tensor)[1]
            if buffer in plain and not self._spmd:
                self._to_copy.add(buffer)
                found = True
            elif buffer in given or _C.state(tensor) == "read_only":
                self._to_move.append(tensor)
                found = True
        return found

    def note_made(self, made: list[tuple[weakref.ref[torch.Tensor], str]]) -> None:
        """What the trace has made, and has been given in the place of arguments."""
        given = [(reference, "unknown line") for reference in self._given]
        self._made = [*made, *given]
        self._buffers = {_C.identity(tensor)[1] for reference, _ in given if (tensor := reference()) is not None}

    def refuse_kept(self, function: str) -> None:
        """DonationError if something outside of the function keeps a tensor that depends on the arguments."""

        def kept() -> list[tuple[torch.Tensor, str]]:
            alive = [(reference(), where) for reference, where in self._made]
            return [
                (tensor, where)
                for tensor, where in alive
                if tensor is not None and (_C.has_graph(tensor) or _C.identity(tensor)[1] in self._buffers)
            ]

        if kept():
            gc.collect()  # what only a reference cycle keeps is garbage
        for tensor, where in kept():
            raise impure(
                function,
                where,
                f"makes {_leaves.array(tensor)}, which something outside of the function keeps",
                "Return it",
            )


class ModulesCalled(_C.Scope):
    """Notes which modules a trace calls, and in which mode each is."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[weakref.ref[torch.nn.Module], bool]] = []
        self._seen: set[int] = set()

    def enter(self) -> None:
        torch.nn.modules.module.register_module_forward_pre_hook(self._hook)

    def leave(self, raised: bool) -> None:
        _host.remove_module_hook(self._hook)

    def _hook(self, module: torch.nn.Module, _: Any) -> None:
        self.note(module)

    def note(self, module: torch.nn.Module) -> None:
        if id(module) not in self._seen:
            self._seen.add(id(module))
            self.found.append((weakref.ref(module), module.training))


@contextlib.contextmanager
def _host_reads_refused(function: str) -> Iterator[None]:
    """Turns the error of an execution inside of the trace into one that names the line."""
    try:
        yield
    except RuntimeError as error:
        if not _host.is_refused_execution(error):
            raise
        where = _errors.line_of(error)
        raise impure(
            function, where, "makes torch_xla run something, as a read on the host does", _RETURN_IT
        ) from error


def _refuse_gradients(function: str, results: Sequence[Any], recorder: Recorder) -> None:
    for leaf in results:
        if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None and not recorder.is_outside(leaf):
            raise _errors.DonationError(
                f"{function} is declared pure and returns {_leaves.array(leaf)} with a gradient history, which a "
                "replay does not have. Call backward() inside, or return .detach(), or use torch.no_grad(). "
                "Nothing was donated."
            )


class _Call:
    """The arguments of a call, taken apart."""

    def __init__(self, plan: Plan, args: Any, kwargs: Any, leaves: list[Any], structures: Sequence[Hashable]) -> None:
        self.plan, self.args, self.kwargs = plan, args, kwargs
        self.leaves, self.structures = leaves, structures
        self.sign()

    def sign(self) -> None:
        found = _signatures.signature_of(self.leaves)
        self.signature, self.pending, self.others = found.key, found.pending, found.others


class PureCompiled(Compiled):
    """Traces the function once for each signature, then runs the compiled graph on the arguments of each call."""

    per_signature = "traced"

    def __init__(
        self,
        f: Callable[..., Any],
        arguments: Arguments,
        strict: bool | None,
        *,
        name: str | None = None,
        full_graph: bool = True,
        max_different_graphs: int | None = None,
    ) -> None:
        super().__init__(f, arguments, strict)
        self._graph_name = name or arguments.function
        self._limit = max_different_graphs
        self._programs: dict[Hashable, Program] = {}

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        with _host.graph_name(self._graph_name):
            return self._f(*args, **kwargs)

    def leaves(self, plan: Plan, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """Donated leaves first, then the others; static arguments have none."""
        return self._chain(self._parts(plan, args, kwargs))

    @staticmethod
    def _parts(plan: Plan, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[tuple[list[Any], Hashable]]:
        return [_leaves.structure(_arguments.value(slot, args, kwargs)) for slot in plan.donated + plan.kept]

    @staticmethod
    def _chain(parts: Sequence[tuple[list[Any], Hashable]]) -> list[Any]:
        leaves = list(itertools.chain.from_iterable(found for found, _ in parts))
        return [_leaves.without_wrapper(leaf) for leaf in leaves] if _host.runtime().is_spmd() else leaves

    def _run(self, plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any], where: str) -> Any:
        parts = self._parts(plan, args, kwargs)
        call = _Call(plan, args, kwargs, self._chain(parts), [structure for _, structure in parts])
        if call.pending:
            torch_xla.sync()
            call.sign()
        offer = _runs.Offer(Donated(self, plan, args, kwargs, parts), args, kwargs, where) if plan.donated else None
        try:
            try:
                result = self._replay(call, offer)
            except RuntimeError as error:
                if not _host.is_evicted(error):
                    raise
                self._programs.clear()  # what else was compiled before is likely to be gone, too
                result = self._replay(call, offer)
        except BaseException:
            if offer is not None:
                offer.cancel()
            raise
        if offer is not None:
            offer.end()
        return result

    def _replay(self, call: _Call, offer: _runs.Offer | None) -> Any:
        while True:
            key = (
                id(call.plan),
                *call.structures,
                call.signature,
                offer.choice() if offer is not None else None,
                self._values(call),
                torch.is_grad_enabled(),
                torch.is_inference_mode_enabled(),
                _host.autocast_state(),
                torch.get_default_dtype(),
                _host.shardings(call.leaves),
            )
            program = self._programs.get(key)
            if program is None or not program.is_current():
                program = self._trace_program(key, call, offer)
            if offer is None or not program.captured or not offer.refuse(program.captured, _CLOSED_OVER):
                break
        if offer is None:
            return program.run(call.leaves)
        if program.returned:
            offer.keep_returned([call.leaves[i] for i in program.returned])
        donors = program.donors or program.usable(offer.spared(call.leaves))
        with offer.consumed([call.leaves[i] for i in donors], program.name, program.places(donors)):
            return program.run(call.leaves)

    def _values(self, call: _Call) -> Hashable:
        """What is no tensor is a part of the program, as are static arguments; 1, 1.0 and True are told apart."""
        values = [*call.others, *(_arguments.value(slot, call.args, call.kwargs) for slot in call.plan.static)]
        for value in call.others:
            try:
                hash(value)
            except TypeError:
                raise ValueError(
                    f"{self.function} is declared pure, and a leaf of its arguments is of type "
                    f"{type(value).__name__}, which is no tensor and cannot be hashed. Register its class with "
                    "torch.utils._pytree, or pass something that has a hash."
                ) from None
        # Floats among the arguments are inputs of the graph. Of static ones 0.0 equals -0.0, and not a number does not
        # equal itself.
        count = len(call.others)
        return (
            *("float" if _numbers.is_float(value) else (type(value), value) for value in values[:count]),
            *((type(value), value.hex() if isinstance(value, float) else value) for value in values[count:]),
        )

    def note_compilation(self, plan: Plan, args: Sequence[Any], kwargs: Mapping[str, Any], where: str) -> None:
        pass  # its traces are counted

    def note_signature(self, plan: Plan, args: Sequence[Any], kwargs: Mapping[str, Any], where: str) -> None:
        # Floats are inputs. Static ones are not.
        into = list(args), dict(kwargs)
        for slot in (*plan.donated, *plan.kept):
            target: Any = into[isinstance(slot.key, str)]
            target[slot.key] = pytree.tree_map(
                lambda leaf: "a float" if _numbers.is_float(leaf) else leaf, target[slot.key]
            )
        super().note_signature(plan, *into, where)

    def _refuse_others(self, leaves: Sequence[Any]) -> None:
        elsewhere = _leaves.elsewhere(leaves)
        if elsewhere is not None:
            raise ValueError(
                f"{self.function} is declared pure, and one of its arguments holds {_leaves.array(elsewhere)} on "
                f"{elsewhere.device}: its value would become a constant of the graph. Move it with .to('xla')."
            )

    def _trace_program(self, key: Hashable, call: _Call, offer: _runs.Offer | None) -> Program:
        self._refuse_others(call.leaves)
        if self._limit is not None and key not in self._programs and len(self._programs) >= self._limit:
            raise RuntimeError(
                f"{self.function} would get more than max_different_graphs={self._limit} graphs; its arguments differ "
                "in structure, shape, dtype or value from those before."
            )
        if key not in self._programs:
            self.note_signature(call.plan, call.args, call.kwargs, _donate.call_site())
        offered = offer.positions(call.leaves) if offer is not None else ()
        program = self._programs[key] = Program(self, call.plan, call.args, call.kwargs, offered)
        return program
