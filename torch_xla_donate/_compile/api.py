"""compile(f, donate_argnums=...): a function runs as one step and gives up the buffers of the arguments named."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Concatenate, Literal, ParamSpec, Protocol, TypeVar, overload

import torch

from torch_xla_donate import _config
from torch_xla_donate._compile.arguments import ArgNames, ArgNums, Arguments, function_name
from torch_xla_donate._compile.base import Compiled
from torch_xla_donate._compile.lazy import LazyCompiled
from torch_xla_donate._compile.module import ModuleProxy
from torch_xla_donate._compile.pure import PureCompiled
from torch_xla_donate._errors import see

if TYPE_CHECKING:
    from torch_xla_donate._compile.lower import Lowered

Backend = Literal["lazy", "openxla"]

P = ParamSpec("P")
Q = ParamSpec("Q")
R_co = TypeVar("R_co", covariant=True)
R = TypeVar("R")
S = TypeVar("S")


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
                f"{function_name(f)} is {kind}, and a call of it returns before the body runs. Compile a function "
                f"that returns its results, and call that function here. {see('compile')}"
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
        raise TypeError(
            f"f is of type {type(f).__name__}, which cannot be called. Pass a function or a module. {see('compile')}"
        )
    _refuse_lazy_bodies(f)
    remake = functools.partial(compile, **options, backend=backend, pure=pure, strict=strict, **kwargs)
    compiled = _make(f, options, backend, pure, strict, kwargs)
    return ModuleProxy(compiled, remake) if isinstance(f, torch.nn.Module) else compiled  # type: ignore[return-value]


def _make(
    f: Callable[..., Any], options: dict[str, Any], backend: Backend, pure: bool, strict: bool | None, kwargs: Any
) -> Compiled:
    arguments = Arguments(f, **options)
    if pure and backend != "lazy":
        raise ValueError(
            f'pure=True needs backend="lazy", but backend is {backend!r}. Remove one of them. {see("pure")}'
        )
    if pure:
        return PureCompiled(f, arguments, strict, **kwargs)
    if backend == "lazy":
        return LazyCompiled(f, arguments, strict, **kwargs)
    if backend == "openxla":
        from torch_xla_donate._compile.openxla import OpenxlaCompiled  # torch.compile takes a while to import

        return OpenxlaCompiled(f, arguments, strict, **kwargs)
    raise ValueError(f'backend is {backend!r}. Pass "lazy" or "openxla". {see("compile")}')
