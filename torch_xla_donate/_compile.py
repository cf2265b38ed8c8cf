"""compile(f, donate_argnums=...): a function runs as one step and gives up the buffers of the arguments named."""

from __future__ import annotations

import enum
import functools
import inspect
import itertools
import numbers
import threading
import types
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, Literal, NoReturn, ParamSpec, Protocol, TypeVar, overload

import torch

from torch_xla_donate import (  # type: ignore[no-redef]
    _C,
    _arguments,
    _bodies,
    _config,
    _debug,
    _donate,
    _interrupts,
    _leaves,
    _log,
    _report,
    _signatures,
)
from torch_xla_donate._arguments import ArgNames, ArgNums, Arguments, CallNames, Plan
from torch_xla_donate._errors import DonationError, DonationWarning
from torch_xla_donate._module import ModuleProxy

if TYPE_CHECKING:
    from torch_xla_donate._ahead import Lowered

Backend = Literal["lazy", "openxla"]

P = ParamSpec("P")
Q = ParamSpec("Q")
R_co = TypeVar("R_co", covariant=True)
R = TypeVar("R")
S = TypeVar("S")

NOT_READ = "not read by the step"


class _Scope(threading.local):
    inside = False  # of a compiled function's call


_scope = _Scope()
_interrupts.restore(_scope, "inside")


def inside() -> bool:
    """Whether this thread is tracing a compiled function, whose arguments alone are donated."""
    return _scope.inside


class Donated:
    """The donated leaves of one call, and their names.

    parts: what `_leaves.structure` gives for each argument, first those donated, then those kept.
    """

    def __init__(
        self,
        compiled: Compiled,
        plan: Plan,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        parts: Sequence[tuple[list[Any], Hashable]] | None = None,
    ) -> None:
        self._plan, self._compiled = plan, compiled
        if parts is None:
            parts = [_leaves.structure(_arguments.value(slot, args, kwargs)) for slot in (*plan.donated, *plan.kept)]
        count = len(plan.donated)
        self.leaves = list(itertools.chain.from_iterable(leaves for leaves, _ in parts[:count]))
        self._kept = list(itertools.chain.from_iterable(leaves for leaves, _ in parts[count:]))
        values = [_arguments.value(slot, args, kwargs) for slot in plan.donated]
        self.names = compiled.names(plan, values, [structure for _, structure in parts[:count]])

    def mark(self, args: Sequence[Any], kwargs: Mapping[str, Any], where: str, *, held: bool) -> _C.Call:
        """Marks them, all or none. Held marks are for a run of a compiled graph; steps leave them alone.

        Raises:
            ValueError: a leaf is no XLA tensor, or is passed as an argument that is not donated, too.
            DonationError: a leaf is pending.
            DonatedBufferError: a leaf has been donated already.
        """
        strict = self._compiled.is_strict()
        marked = _C.mark_arguments(self.leaves, self._kept, where, strict, held, self.names)
        if marked.refusal is not None and marked.refusal.obstacle == "not_xla":
            self.leaves = [_leaves.without_wrapper(leaf) for leaf in self.leaves]
            marked = _C.mark_arguments(self.leaves, self._kept, where, strict, held, self.names)
        why = marked.refusal
        if why is None:
            return marked
        if why.kept is not None:
            self._passed_twice(why.leaf, why.kept, args, kwargs)
        raise _donate.refusal(self.leaves[why.leaf], why.obstacle, self.names.name(why.leaf))

    def _passed_twice(self, donated: int, kept: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> NoReturn:
        parts = []
        for slot in self._plan.kept:
            leaves, names = _leaves.flatten(_arguments.value(slot, args, kwargs))
            parts.append((slot, len(leaves), names))
        raise _donate.passed_twice(self.names.name(donated), CallNames(parts).name(kept))


class Compiled:
    """A function that runs as one step. `compile` makes it; the subclasses know how the step is run.

    Attributes:
        per_signature: what messages say is done for each signature.
        has_captured: whether torch.compile has captured a graph in the last call.
    """

    per_signature = "compiled"
    has_captured = False

    def __init__(self, f: Callable[..., Any], arguments: Arguments, strict: bool | None) -> None:
        functools.update_wrapper(self, f, updated=())
        self._f = f
        self._arguments = arguments
        self._strict = strict
        self._names: dict[Any, CallNames] = {}
        self._signatures = _signatures.Signatures(arguments.function, self.per_signature)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._arguments.function}>"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Inside of another step, or of a loop's body, this is a part of that: it has no step of its own at which it
        # could donate.
        if _scope.inside or _bodies.current() is not None or torch.compiler.is_compiling():
            return self._f(*args, **kwargs)
        with _interrupts.Restored():
            return self._call(args, kwargs)

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        where = _donate.call_site()
        _donate.prepare(where)
        plan = self._arguments.plan(args, kwargs)
        for slot in plan.static:
            _check_static(slot, _arguments.value(slot, args, kwargs))
        _scope.inside = True
        try:
            # What the step has to tell waits until torch_xla has put its own state in order. Threads of autograd would
            # keep gradients into the step, at random.
            with (
                _report.later(),
                _log.compilations(self.function) as compiled,
                torch.autograd.set_multithreading_enabled(False),
            ):
                result = self._run(plan, args, kwargs, where)
        finally:
            _scope.inside = False
        try:
            if plan.donated and self.is_strict():
                # Else the error would come out of some later step, and without this call's result.
                _C.wait_for_steps()
            if _C.has_notices():
                _report.tell()
            if _C.disabled():
                _debug.check_outputs()
            if compiled.value or self.has_captured:
                self.has_captured = False
                self.note_compilation(plan, args, kwargs, where)
        except (DonationError, DonationWarning) as error:
            if isinstance(error, DonationError):
                error.result = result
            raise
        return result

    @property
    def function(self) -> str:
        """What messages call the function."""
        return self._arguments.function

    def body(self, *args: Any, **kwargs: Any) -> Any:
        """The function itself, as a part of a step of somebody else's."""
        inside, _scope.inside = _scope.inside, True
        try:
            with torch.autograd.set_multithreading_enabled(False):
                return self._f(*args, **kwargs)
        finally:
            _scope.inside = inside

    def lower(self, *args: Any, **kwargs: Any) -> Lowered:
        """Traces the function for these arguments, without running it.

        Args:
            *args: as for a call. Arrays may be placeholders, which take no memory
                (``torch_xla.core.xla_builder.create_placeholder_tensor``); real ones are not consumed.
            **kwargs: the same.

        Returns:
            An object with ``as_text()`` (HLO), ``args_info`` and ``compile()``, which has ``memory_analysis()``. It is
            traced by torch_xla's lazy tensors whatever the backend.

        Raises:
            DonationError: the function reads a value on the host.
        """
        from torch_xla_donate._ahead import Lowered

        _donate.prepare(_donate.call_site())
        return Lowered(self, self._arguments.plan(args, kwargs), args, kwargs)

    def _run(self, plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any], where: str) -> Any:
        """Runs the step, and ends the marks that it has made. Returns f's result."""
        raise NotImplementedError

    def note_compilation(self, plan: Plan, args: Sequence[Any], kwargs: Mapping[str, Any], where: str) -> None:
        """Counts the signature of a call that has compiled a graph."""
        self.note_signature(plan, args, kwargs, where)

    def note_signature(self, plan: Plan, args: Sequence[Any], kwargs: Mapping[str, Any], where: str) -> None:
        """Counts a signature, and warns at the tenth."""
        slots = (*plan.donated, *plan.kept)
        flat = [_leaves.flatten(_arguments.value(slot, args, kwargs)) for slot in slots]
        names = CallNames([(slot, len(leaves), names) for slot, (leaves, names) in zip(slots, flat)])
        leaves = itertools.chain.from_iterable(leaves for leaves, _ in flat)
        static = [(f"{slot.name} ({slot.place})", _arguments.value(slot, args, kwargs)) for slot in plan.static]
        self._signatures.note([*((names.name(i), leaf) for i, leaf in enumerate(leaves)), *static], where)

    def is_strict(self) -> bool:
        """Whether an unusable donation of this function is an error."""
        return _config.strict_by_default() if self._strict is None else self._strict

    def names(self, plan: Plan, values: Sequence[Any], structures: Sequence[Hashable]) -> CallNames:
        """The names of a call's donated leaves; worked out once for each structure, since that takes a while.

        Raises:
            TypeError: a leaf is an object that might hold tensors.
        """
        key = (id(plan), *structures)
        found = self._names.get(key)
        if found is None:
            flat = [_leaves.flatten(value) for value in values]
            found = CallNames([(slot, len(leaves), names) for slot, (leaves, names) in zip(plan.donated, flat)])
            _refuse_opaque([leaf for leaves, _ in flat for leaf in leaves], found)
            self._names[key] = found
        return found


_HARMLESS = (torch.Tensor, numbers.Number, str, bytes, types.NoneType, enum.Enum, torch.dtype, torch.device)


def _refuse_opaque(leaves: Sequence[Any], names: CallNames) -> None:
    """TypeError for a donated leaf that may hold tensors which nobody sees, such as an unregistered dataclass."""
    for index, leaf in enumerate(leaves):
        tensor = _leaves.without_wrapper(leaf)
        if not isinstance(tensor, _HARMLESS) and not callable(tensor):
            raise _donate.refusal(leaf, "not_tensor", names.name(index))


def _check_static(slot: _arguments.Slot, value: Any) -> None:
    try:
        hash(value)
    except TypeError:
        raise ValueError(
            f"{slot.name} ({slot.place}) is static, and {type(value).__name__} cannot be hashed. Static arguments are "
            "told apart by their hash; pass something that has one."
        ) from None


class LazyCompiled(Compiled):
    """Runs the function as `torch_xla.compile` does: traced at every call."""

    def __init__(self, f: Callable[..., Any], arguments: Arguments, strict: bool | None, **options: Any) -> None:
        super().__init__(f, arguments, strict)
        import torch_xla

        options.setdefault("name", arguments.function)
        self._step = torch_xla.compile(self._trace, **options)

    def _run(self, plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any], where: str) -> Any:
        calls: list[_C.Call] = []
        try:
            result = self._step(plan, args, kwargs, where, calls)
        except BaseException:
            # f has returned, and its step was refused (max_different_graphs) or has failed.
            for call in calls:
                _C.cancel_call(call)
            raise
        for call in calls:
            _C.end_call(call, {}, NOT_READ, tell=True)
        return result

    def _trace(
        self, plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any], where: str, calls: list[_C.Call]
    ) -> Any:
        # Here torch_xla has run what was pending, so a mark can only be meant for the step of this function.
        if not plan.donated:
            return self._f(*args, **kwargs)
        call = Donated(self, plan, args, kwargs).mark(args, kwargs, where, held=False)
        try:
            result = self._f(*args, **kwargs)
        except BaseException:
            _C.cancel_call(call)
            raise
        _C.keep_returned(_leaves.tensors_in(result))
        calls.append(call)
        return result


def _refuse_lazy_bodies(f: Callable[..., Any]) -> None:
    """TypeError for a function whose call returns before its body has run: the step would be empty."""
    call: Any = f
    while isinstance(call, functools.partial):
        call = call.func
    if isinstance(call, torch.nn.Module):
        call = call.forward
    elif not inspect.isroutine(call):
        call = type(call).__call__
    kinds = {
        "a generator function": inspect.isgeneratorfunction,
        "an async def function": inspect.iscoroutinefunction,
        "an async generator function": inspect.isasyncgenfunction,
    }
    for kind, is_kind in kinds.items():
        if is_kind(call):
            raise TypeError(
                f"{_arguments.function_name(f)} is {kind}: a call returns before the body has run, so that there is no "
                "step. Compile a function that returns its results, and call it from there."
            )


class CompiledFunction(Protocol[P, R_co]):
    """What type checkers know of a function made by `compile`: it is called like the function, and can be lowered."""

    __name__: str
    __qualname__: str

    @property
    def __wrapped__(self) -> Callable[P, R_co]: ...
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...
    def lower(self, *args: P.args, **kwargs: P.kwargs) -> Lowered: ...
    @overload
    def __get__(self, instance: None, owner: type | None = None) -> CompiledFunction[P, R_co]: ...
    @overload
    def __get__(
        self: CompiledFunction[Concatenate[S, Q], R], instance: S, owner: type | None = None
    ) -> Callable[Q, R]: ...


if TYPE_CHECKING:

    class CompiledModule(torch.nn.Module):
        """What type checkers know of a module made by `compile`: a module, with the attributes of the original."""

        def lower(self, *args: Any, **kwargs: Any) -> Lowered: ...
        def __getattr__(self, name: str) -> Any: ...


class Decorator(Protocol):
    """What type checkers know of `compile` without a function."""

    @overload
    def __call__(self, f: torch.nn.Module, /) -> CompiledModule: ...  # type: ignore[overload-overlap]
    @overload
    def __call__(self, f: Callable[P, R], /) -> CompiledFunction[P, R]: ...


@overload
def compile(  # type: ignore[overload-overlap]
    f: torch.nn.Module,
    *,
    donate_argnums: ArgNums = None,
    donate_argnames: ArgNames = None,
    static_argnums: ArgNums = None,
    static_argnames: ArgNames = None,
    backend: Backend = "lazy",
    pure: bool = False,
    strict: bool | None = None,
    **kwargs: Any,
) -> CompiledModule: ...
@overload
def compile(
    f: Callable[P, R],
    *,
    donate_argnums: ArgNums = None,
    donate_argnames: ArgNames = None,
    static_argnums: ArgNums = None,
    static_argnames: ArgNames = None,
    backend: Backend = "lazy",
    pure: bool = False,
    strict: bool | None = None,
    **kwargs: Any,
) -> CompiledFunction[P, R]: ...
@overload
def compile(
    f: None = None,
    *,
    donate_argnums: ArgNums = None,
    donate_argnames: ArgNames = None,
    static_argnums: ArgNums = None,
    static_argnames: ArgNames = None,
    backend: Backend = "lazy",
    pure: bool = False,
    strict: bool | None = None,
    **kwargs: Any,
) -> Decorator: ...
def compile(
    f: Callable[..., Any] | None = None,
    *,
    donate_argnums: ArgNums = None,
    donate_argnames: ArgNames = None,
    static_argnums: ArgNums = None,
    static_argnames: ArgNames = None,
    backend: Backend = "lazy",
    pure: bool = False,
    strict: bool | None = None,
    **kwargs: Any,
) -> Any:
    """Makes ``f`` run as one step, which may take over the buffers of the arguments named.

    Each tensor of a donated argument (of a pytree, an ``nn.Module``, an optimizer) is given up by the call: its memory
    goes to an output of the same bytes, and using it afterwards raises `DonatedBufferError`. Use as a decorator, with
    or without arguments, or as a call. Inside of another compiled function it is a part of that one's step and donates
    nothing of its own. An argument that ``f`` returns unchanged stays as it is.

    Args:
        f: the function, method or module.
        donate_argnums: positions of the arguments to donate, an int or several; negative ones count from the end. An
            argument that is named here is donated, too, where a call gives it by keyword.
        donate_argnames: the same by name; both together mean their union.
        static_argnums: positions of arguments that are never donated and must be hashable; with ``pure`` each value
            has a graph of its own.
        static_argnames: the same by name.
        backend: ``lazy`` traces at every call, as `torch_xla.compile` does; ``openxla`` is
            ``torch.compile(backend="openxla")``.
        pure: with ``lazy``: ``f`` is declared to be pure, is traced once for each signature and replayed.
        strict: whether a donation that could not be used raises `DonationError`; its ``result`` is what ``f``
            returned. Default: the environment variable ``TORCH_XLA_DONATE_STRICT``.
        **kwargs: for `torch_xla.compile` (``full_graph``, ``name``, ``max_different_graphs``), or for `torch.compile`.

    Returns:
        An object to be called like ``f``, with ``lower``; for a module, with the module's attributes. Without ``f``, a
        decorator.

    Raises:
        TypeError: numbers, names or ``strict`` of another type; a generator or ``async def`` function. At a call: a
            donated leaf is an object that is no pytree.
        ValueError: numbers out of range, unknown names, an argument both static and donated, names for a callable
            without a signature, or an unknown backend. At a call: a donated leaf is no XLA tensor, or is passed as an
            argument that is not donated, too.
    """
    options: dict[str, Any] = {
        "donate_argnums": donate_argnums,
        "donate_argnames": donate_argnames,
        "static_argnums": static_argnums,
        "static_argnames": static_argnames,
    }
    _config.check_strict(strict)
    if f is None:
        return functools.partial(compile, **options, backend=backend, pure=pure, strict=strict, **kwargs)  # type: ignore[return-value]
    if not callable(f):
        raise TypeError(f"f is of type {type(f).__name__}, which cannot be called.")
    _refuse_lazy_bodies(f)
    remake = functools.partial(compile, **options, backend=backend, pure=pure, strict=strict, **kwargs)
    compiled = _compile(f, options, backend, pure, strict, kwargs)
    return ModuleProxy(compiled, remake) if isinstance(f, torch.nn.Module) else compiled  # type: ignore[return-value]


def _compile(
    f: Callable[..., Any], options: dict[str, Any], backend: Backend, pure: bool, strict: bool | None, kwargs: Any
) -> Compiled:
    arguments = Arguments(f, **options)
    if pure and backend != "lazy":
        raise ValueError(f'pure=True goes with backend="lazy" only; backend is {backend!r}.')
    if pure:
        from torch_xla_donate._pure import PureCompiled

        return PureCompiled(f, arguments, strict, **kwargs)
    if backend == "lazy":
        return LazyCompiled(f, arguments, strict, **kwargs)
    if backend == "openxla":
        from torch_xla_donate._openxla import OpenxlaCompiled  # torch.compile takes a while to import

        return OpenxlaCompiled(f, arguments, strict, **kwargs)
    raise ValueError(f'backend is {backend!r}; it must be "lazy" or "openxla".')
