"""compile(f, donate_argnums=...): runs a function as one step, which may reuse the buffers of donated arguments."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Concatenate, Literal, ParamSpec, Protocol, TypedDict, TypeVar, overload

import torch

from torch_xla_donate import _config, _marks
from torch_xla_donate._checks import kind_of_lazy_body
from torch_xla_donate._compile.arguments import ArgNames, ArgNums, Arguments, function_name
from torch_xla_donate._compile.base import Compiled
from torch_xla_donate._compile.lazy import LazyCompiled, PlainCompiled
from torch_xla_donate._compile.module import ModuleProxy
from torch_xla_donate._compile.pure import PureCompiled
from torch_xla_donate._errors import see

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from torch_xla_donate._compile.lower import Lowered

Backend = Literal["lazy", "openxla"]

P = ParamSpec("P")
Q = ParamSpec("Q")
R_co = TypeVar("R_co", covariant=True)
R = TypeVar("R")
S = TypeVar("S")


class CompiledFunction(Protocol[P, R_co]):
    """The type of a function made by `compile`: called like the function, and has `lower`."""

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
        """The type of a module made by `compile`: a module with the attributes of the original, and `lower`."""

        def lower(self, *args: Any, **kwargs: Any) -> Lowered: ...
        def __getattr__(self, name: str) -> Any: ...


class Decorator(Protocol):
    """The type of `compile` without a function."""

    @overload
    def __call__(self, f: torch.nn.Module, /) -> CompiledModule: ...  # type: ignore[overload-overlap]
    @overload
    def __call__(self, f: Callable[P, R], /) -> CompiledFunction[P, R]: ...


class Options(TypedDict, total=False):
    """The options of `compile`. The last ones are those of `torch_xla.compile` and `torch.compile`."""

    donate_argnums: ArgNums
    donate_argnames: ArgNames
    static_argnums: ArgNums
    static_argnames: ArgNames
    backend: Backend
    pure: bool
    strict: _config.Strict
    stacklevel: int
    full_graph: bool
    name: str | None
    max_different_graphs: int | None
    fullgraph: bool
    dynamic: bool | None
    mode: str | None
    options: dict[str, Any] | None
    disable: bool


@overload
def compile(f: torch.nn.Module, **options: Unpack[Options]) -> CompiledModule: ...  # type: ignore[overload-overlap]
@overload
def compile(f: Callable[P, R], **options: Unpack[Options]) -> CompiledFunction[P, R]: ...
@overload
def compile(f: None = None, **options: Unpack[Options]) -> Decorator: ...
def compile(
    f: Callable[..., Any] | None = None,
    *,
    donate_argnums: ArgNums = None,
    donate_argnames: ArgNames = None,
    static_argnums: ArgNums = None,
    static_argnames: ArgNames = None,
    backend: Backend = "lazy",
    pure: bool = False,
    strict: _config.Strict = None,
    stacklevel: int = 1,
    **kwargs: Any,
) -> Any:
    """Makes ``f`` run as one step, which may reuse the buffers of the arguments named.

    A call donates each tensor of a donated argument (a tensor, a pytree, an ``nn.Module`` or an optimizer). XLA may
    write an output of the same bytes into its memory, and a later use raises `DonatedBufferError`. An argument that
    ``f`` returns unchanged keeps its buffer.

    Use it as a decorator, with or without arguments, or as a call. A call inside another compiled function belongs to
    that function's step and donates nothing.

    Args:
        f: the function, method or module.
        donate_argnums: position of the argument to donate, or several. Negative ones count from the end. It includes
            the same argument given by keyword.
        donate_argnames: name of the argument to donate, or several, in addition to ``donate_argnums``.
        static_argnums: positions of arguments that are never donated and must be hashable. With ``pure`` each value
            has a separate graph.
        static_argnames: names of such arguments.
        backend: ``lazy`` traces at every call, as `torch_xla.compile` does; ``openxla`` is
            ``torch.compile(backend="openxla")``.
        pure: only with ``lazy``. Declares ``f`` to be pure, so that it is traced once for each signature and replayed.
        strict: whether an unusable donation raises `DonationError`; its ``result`` is the result of ``f``. Default:
            the environment variable ``TORCH_XLA_DONATE_STRICT``.
        stacklevel: which line messages and the report show for a call: 1 for the line of the call, 2 for the line that
            calls the function with the call, and so on.
        **kwargs: for `torch_xla.compile` (``full_graph``, ``name``, ``max_different_graphs``), or for `torch.compile`.

    Returns:
        An object that is called like ``f`` and has ``lower``. For a module it also has the module's attributes.
        Without ``f``, a decorator.

    Raises:
        TypeError: numbers, names, ``pure``, ``strict`` or ``stacklevel`` have another type, or ``f`` is a generator or
            ``async def`` function. At a call: a donated leaf is neither a tensor nor a registered pytree.
        ValueError: a number is out of range, a name or the backend is unknown, an argument is both static and donated,
            or names are given for a callable without a signature. At a call: a donated leaf is not an XLA tensor, or
            shares its buffer with an argument that is not donated.
        DonationError: at a call: a donated leaf is a view or cannot be donated otherwise, a donation is unusable and
            ``strict`` says ``"error"``, or ``pure=True`` refuses the function.
    """
    options: dict[str, Any] = {
        "donate_argnums": donate_argnums,
        "donate_argnames": donate_argnames,
        "static_argnums": static_argnums,
        "static_argnames": static_argnames,
    }
    _marks.check_options(strict, stacklevel)
    if not isinstance(pure, bool):
        raise TypeError(
            f"pure is of type {type(pure).__name__}, not a bool. Pass True or False. {see('compile_errors')}"
        )
    remake = functools.partial(
        compile, **options, backend=backend, pure=pure, strict=strict, stacklevel=stacklevel, **kwargs
    )
    if f is None:
        return remake  # type: ignore[return-value]
    if not callable(f):
        raise TypeError(
            f"f is of type {type(f).__name__}, which cannot be called. Pass a function or a module. "
            f"{see('compile_errors')}"
        )
    if kind := kind_of_lazy_body(f):  # its step would be empty
        raise TypeError(
            f"{function_name(f)} is {kind}, and a call of it returns before the body runs. Compile a function "
            f"that returns its results, and call that function here. {see('compile_errors')}"
        )
    arguments = Arguments(f, **options)
    if pure and backend != "lazy":
        raise ValueError(
            f'pure=True needs backend="lazy", but backend is {backend!r}. Remove one of them. {see("compile_errors")}'
        )
    if backend not in ("lazy", "openxla"):
        raise ValueError(f'backend is {backend!r}. Pass "lazy" or "openxla". {see("compile_errors")}')
    compiled: Compiled
    if _config.IS_OFF:
        compiled = PlainCompiled(f, arguments, strict)
    elif pure:
        compiled = PureCompiled(f, arguments, strict, **kwargs)
    elif backend == "lazy":
        compiled = LazyCompiled(f, arguments, strict, **kwargs)
    else:
        from torch_xla_donate._compile.openxla import OpenxlaCompiled  # torch.compile takes a while to import

        compiled = OpenxlaCompiled(f, arguments, strict, **kwargs)
    compiled.stacklevel, compiled.remake = stacklevel, remake
    return ModuleProxy(compiled) if isinstance(f, torch.nn.Module) else compiled  # type: ignore[return-value]
