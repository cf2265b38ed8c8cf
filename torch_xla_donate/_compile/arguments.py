"""Resolves JAX's donate_argnums and donate_argnames against a signature."""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from torch_xla_donate import _trees
from torch_xla_donate._errors import see

ArgNums = int | Sequence[int] | None
ArgNames = str | Iterable[str] | None

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class Argument(NamedTuple):
    """The place of one argument in a call, and its name in messages."""

    key: int | str  # position in args, or name in kwargs
    name: str  # "state"
    place: str  # "argument 0 of update"

    def value(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The argument's value in a call."""
        return kwargs[self.key] if isinstance(self.key, str) else args[self.key]

    def __str__(self) -> str:
        return f"{self.name} ({self.place})"


class ArgumentRoles(NamedTuple):
    """The arguments of a call, by their role.

    nonstatic: the arguments that may hold tensors, first the donated ones, then the kept ones.
    """

    donated: tuple[Argument, ...]
    kept: tuple[Argument, ...]
    static: tuple[Argument, ...]
    nonstatic: tuple[Argument, ...]


class CallArguments(NamedTuple):
    """The arguments of one call."""

    roles: ArgumentRoles
    args: Sequence[Any]
    kwargs: Mapping[str, Any]

    def values(self, arguments: Iterable[Argument]) -> list[Any]:
        return [argument.value(self.args, self.kwargs) for argument in arguments]

    def flattened(self, arguments: Iterable[Argument]) -> list[tuple[list[Any], Hashable]]:
        """`_trees.flatten_fast` for each of these arguments."""
        return [_trees.flatten_fast(argument.value(self.args, self.kwargs), argument) for argument in arguments]

    def leaves(self, arguments: Iterable[Argument]) -> tuple[list[Any], _trees.Places]:
        """The leaves of these arguments, and their names."""
        leaves: list[Any] = []
        names: list[tuple[str, ...]] = []
        for argument in arguments:
            found, inner = _trees.flatten(argument.value(self.args, self.kwargs), argument)
            leaves += found
            texts = (_trees.qualified_name(argument.name, inner.name(i), ".") for i in range(len(found)))
            names += [(f"{text} ({argument.place})",) for text in texts]
        return leaves, _trees.Places(names)

    def replaced(self, replace: Callable[[Any], Any]) -> CallArguments:
        """The call with other leaves, which are replaced in their order. Static arguments stay."""
        args, kwargs = list(self.args), dict(self.kwargs)
        for argument in self.roles.nonstatic:
            into: Any = kwargs if isinstance(argument.key, str) else args
            into[argument.key] = pytree.tree_map(replace, into[argument.key])
        return CallArguments(self.roles, args, kwargs)


def _numbers(value: ArgNums, argument: str) -> tuple[int, ...]:
    if value is None:
        return ()
    try:
        return tuple(operator.index(number) for number in (value if isinstance(value, Iterable) else (value,)))
    except TypeError:
        raise TypeError(
            f"{argument} is {value!r}. Pass an int or a sequence of ints. {see('compile_errors')}"
        ) from None


def _names(value: ArgNames, argument: str) -> tuple[str, ...]:
    if value is None:
        return ()
    names = (value,) if isinstance(value, str) or not isinstance(value, Iterable) else tuple(value)
    if not all(isinstance(name, str) for name in names):
        raise TypeError(f"{argument} is {value!r}. Pass a string or a sequence of strings. {see('compile_errors')}")
    return names


def function_name(f: Callable[..., Any]) -> str:
    """The name of a callable in messages."""
    while isinstance(f, functools.partial):
        f = f.func
    return getattr(f, "__name__", None) or type(f).__name__


class Arguments:
    """Resolves which arguments of ``f`` are donated or static.

    A number and the name of the same parameter mean the same argument, given by position or by keyword. JAX's
    documentation excludes keyword arguments from `donate_argnums`, but its tests donate them.

    Raises:
        TypeError: a number is not an int, or a name is not a string.
        ValueError: a number is out of range, a name is unknown, an argument is both donated and static, or names are
            given for a callable without a signature.
    """

    def __init__(
        self,
        f: Callable[..., Any],
        donate_argnums: ArgNums = None,
        donate_argnames: ArgNames = None,
        static_argnums: ArgNums = None,
        static_argnames: ArgNames = None,
    ) -> None:
        self.function = function_name(f)
        self._positional: list[str] = []  # names of the positional parameters
        self._by_name: list[str] = []  # parameters that a keyword can give
        self._varargs: str | None = None
        self._has_varkw = False
        self._known = True
        try:
            parameters = inspect.signature(f.forward if isinstance(f, torch.nn.Module) else f).parameters.values()
        except (ValueError, TypeError):
            parameters, self._known = (), False  # type: ignore[assignment]
        for parameter in parameters:
            if parameter.kind in _POSITIONAL:
                self._positional.append(parameter.name)
            elif parameter.kind is inspect.Parameter.VAR_POSITIONAL:
                self._varargs = parameter.name
            elif parameter.kind is inspect.Parameter.VAR_KEYWORD:
                self._has_varkw = True
            if parameter.kind in _NAMED:
                self._by_name.append(parameter.name)
        self._donated_numbers, self._donated_names = self._resolve("donate", donate_argnums, donate_argnames)
        self._static_numbers, self._static_names = self._resolve("static", static_argnums, static_argnames)
        both = sorted(self._donated_names & self._static_names) + sorted(
            str(number) for number in self._donated_numbers & self._static_numbers
        )
        if both:
            raise self._static_and_donated(both[0])
        self._known_roles: dict[tuple[int, tuple[str, ...]], ArgumentRoles] = {}

    def _static_and_donated(self, argument: str | int) -> ValueError:
        return ValueError(
            f"argument {argument} of {self.function} is both static and donated, but a static argument has no buffer. "
            "Remove it from static_argnums/static_argnames or from donate_argnums/donate_argnames. "
            f"{see('compile_errors')}"
        )

    def _resolve(self, what: str, argnums: ArgNums, argnames: ArgNames) -> tuple[set[int], set[str]]:
        """The numbers and the names of the arguments. Each set completes the other."""
        numbers = set(_numbers(argnums, f"{what}_argnums"))
        names = set(_names(argnames, f"{what}_argnames"))
        if not self._known:
            if names:
                raise ValueError(
                    f"{what}_argnames is {argnames!r}, but {self.function} has no signature to find the names in. "
                    f"Use {what}_argnums, or wrap it in a function with named parameters. {see('compile_errors')}"
                )
            return numbers, names
        count = len(self._positional)
        for number in sorted(numbers):
            if self._varargs is None and not -count <= number < count:
                raise ValueError(
                    f"{what}_argnums is {argnums!r}, and {number} is out of range, because {self.function} accepts "
                    f"{count} positional argument{'' if count == 1 else 's'}. Name one of these. "
                    f"{see('compile_errors')}"
                )
        for name in sorted(names.difference(self._by_name)):
            if not self._has_varkw:
                raise ValueError(
                    f"{what}_argnames is {argnames!r}, but {self.function} has no keyword parameter {name!r}. "
                    f"Use one of its keyword parameters: {', '.join(self._by_name) or 'none'}. {see('compile_errors')}"
                )
        if self._varargs is None:
            numbers = {number % count for number in numbers}
        for number in list(numbers):
            if 0 <= number < count and self._positional[number] in self._by_name:
                names.add(self._positional[number])
        for name in names.intersection(self._by_name):  # a name that only **kwargs takes may be a positional one, too
            if name in self._positional:
                numbers.add(self._positional.index(name))
        return numbers, names

    def roles(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> ArgumentRoles:
        """The arguments of a call by their role. Raises ValueError for a number beyond the call's arguments."""
        key = (len(args), tuple(kwargs))
        found = self._known_roles.get(key)
        if found is None:
            # Another thread may have made them: programs are found by the identity of the roles.
            found = self._known_roles.setdefault(key, self._make_roles(len(args), key[1]))
        return found

    def _make_roles(self, count: int, keywords: tuple[str, ...]) -> ArgumentRoles:
        # A negative number is left only if f takes any number of arguments. It counts from the call's end.
        donated_numbers, static_numbers = (
            {number + count if number < 0 else number for number in numbers}
            for numbers in (self._donated_numbers, self._static_numbers)
        )
        if not self._known or self._varargs is not None:
            known = range(len(self._positional))  # these may have defaults
            for number in sorted(self._donated_numbers):
                if not -count <= number < count and number not in known:
                    raise ValueError(
                        f"donate_argnums names argument {number} of {self.function}, but this call has {count} "
                        f"positional argument{'' if count == 1 else 's'}. Pass that argument by position. "
                        f"{see('compile_errors')}"
                    )
            if both := donated_numbers & static_numbers:
                raise self._static_and_donated(min(both))
        donated: list[Argument] = []
        kept: list[Argument] = []
        static: list[Argument] = []
        for number in range(count):
            argument = Argument(number, self._name(number), f"argument {number} of {self.function}")
            (static if number in static_numbers else donated if number in donated_numbers else kept).append(argument)
        for name in keywords:
            argument = Argument(name, name, f"argument {name!r} of {self.function}")
            static_name, donated_name = name in self._static_names, name in self._donated_names
            (static if static_name else donated if donated_name else kept).append(argument)
        return ArgumentRoles(tuple(donated), tuple(kept), tuple(static), (*donated, *kept))

    def _name(self, number: int) -> str:
        if number < len(self._positional):
            return self._positional[number]
        if self._varargs is not None:
            return f"{self._varargs}[{number - len(self._positional)}]"
        return f"args[{number}]"
