"""Python floats among the arguments of a pure function. They are inputs of its graph, and the trace promotes them as
numbers.

A plain tensor instead of a float would change dtypes and precision: bf16[] times f64[] is f64[]. Torch has a bit for
this ("wrapped number"), but torch_xla reads it only in a few operations. So each operation gets the number as a tensor
without dimensions, in the dtype that a Python number would take there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy
import torch
from torch.utils import _pytree as pytree


def is_float(leaf: object) -> bool:
    """Whether a leaf is traced as a number. Enums and other classes derived from float stay static."""
    return type(leaf) is float or isinstance(leaf, numpy.floating)


class HostUse(Exception):
    """An operation needs the value of a number on the host."""


class Number(torch.Tensor):
    """A float in a trace, or a result computed from such floats only: float64 (bool for a comparison), no dimensions.

    Attributes:
        origin: the names of the arguments.
        refuse: makes the error for a use on the host.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    origin: tuple[str, ...]
    refuse: Callable[[Sequence[Number]], Exception]

    def __hash__(self) -> int:
        raise self.refuse([self])


def number(tensor: torch.Tensor, origin: tuple[str, ...], refuse: Callable[[Sequence[Number]], Exception]) -> Number:
    made: Number = torch.Tensor._make_subclass(Number, tensor)  # type: ignore[assignment, arg-type]
    made.origin, made.refuse = origin, refuse
    return made


def numbers_in(tensors: Sequence[torch.Tensor]) -> list[Number]:
    return [tensor for tensor in tensors if type(tensor) is Number]


def as_result(leaf: Any) -> Any:
    """A computed number as the tensor that `torch.tensor` makes of a float; any other leaf unchanged."""
    if type(leaf) is not Number:
        return leaf
    plain = leaf.as_subclass(torch.Tensor)
    return plain.to(torch.get_default_dtype()) if plain.is_floating_point() else plain


def call(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Calls a function of torch with numbers among its arguments.

    Raises HostUse for a new tensor that would not be on the XLA device.
    """
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    numbers = numbers_in(tensors)
    if not numbers:
        return func(*args, **kwargs)
    name = getattr(func, "__name__", "")
    if name.startswith("_foreach_"):
        return _each(name, args, kwargs)
    if name in _FROM_DATA:
        return _from_data(args, kwargs)
    if name in _FILLED:
        return _filled(func, args, kwargs)
    if name in ("fill", "fill_") and not isinstance(args[0], Number):
        return _overwrite(args[0] if name == "fill_" else torch.empty_like(args[0]), numbers[0])
    if name in _SCALED and isinstance(kwargs.get("alpha"), Number):
        return _add_scaled(func, args, dict(kwargs))
    if name in _WITH_VALUE and isinstance(kwargs.get("value"), Number):
        return _add_product(name, *args, **kwargs)
    if len(numbers) == len(tensors):
        return _of_numbers(name.rstrip("_") if name in _IN_PLACE else name, func, numbers, args, kwargs)
    if args and isinstance(args[0], Number) and name in _IN_PLACE:  # `lr *= x` binds the name to another value
        name = name.rstrip("_")
        func = getattr(torch.Tensor, name)
    if name in _REFLECTED and len(args) == 2 and isinstance(args[0], Number):
        func, args = _REFLECTED[name], (args[1], args[0])
    if name == "float_power":  # computes in float64, whatever the inputs
        return func(*args, **kwargs)
    dtype = args[0].dtype if name in _DESTINATION else _result_type(tensors)

    def cast(leaf: Any) -> Any:
        is_number = type(leaf) is Number and leaf.is_floating_point()
        return leaf.as_subclass(torch.Tensor).to(dtype) if is_number else leaf

    args, kwargs = pytree.tree_map(cast, (tuple(args), dict(kwargs)))
    if name in _WITHOUT_PROMOTION:
        condition = None if name != "where" else args[1] if func is torch.Tensor.where else args[0]
        args = [leaf.to(dtype) if isinstance(leaf, torch.Tensor) and leaf is not condition else leaf for leaf in args]
    return func(*args, **kwargs)


# The numbers are elements of the new tensor.
_FROM_DATA = {"tensor", "as_tensor", "asarray", "scalar_tensor"}
# The number is each element of the new tensor.
_FILLED = {"full", "full_like", "new_full"}
# The result has the first argument's dtype, and torch converts the number to it.
_DESTINATION = {"masked_fill", "masked_fill_", "index_fill", "index_fill_", "__setitem__"}
# Torch promotes integers here. torch_xla fails, or computes in the dtype of a tensor.
_WITHOUT_PROMOTION = {"clamp", "clip", "clamp_min", "clamp_max", "remainder", "fmod", "__rmod__", "where"}
# These take a factor that must be a number.
_SCALED = {"add", "add_", "sub", "sub_", "subtract", "subtract_", "rsub"}
_WITH_VALUE = {"addcmul", "addcmul_", "addcdiv", "addcdiv_"}
# An assignment such as `lr *= 2` calls one of these.
_IN_PLACE = {"add_", "sub_", "mul_", "div_", "true_divide_", "pow_", "floor_divide_", "remainder_"}
# For a float as the first operand, Python calls these with the tensor first.
_REFLECTED: dict[str, Callable[..., Any]] = {
    "sub": torch.Tensor.__rsub__,
    "div": torch.Tensor.__rdiv__,
    "true_divide": torch.Tensor.__rdiv__,
    "pow": torch.Tensor.__rpow__,
    "__floordiv__": torch.Tensor.__rfloordiv__,
    "floor_divide": torch.Tensor.__rfloordiv__,
    "remainder": torch.Tensor.__rmod__,
}


def _result_type(tensors: Sequence[torch.Tensor]) -> torch.dtype:
    """The dtype that a Python float takes in an operation with these tensors."""
    with_dims = [t.dtype for t in tensors if type(t) is not Number and t.dim()]
    without = [t.dtype for t in tensors if type(t) is not Number and not t.dim()]
    groups = [functools.reduce(torch.promote_types, group) for group in (with_dims, without) if group]
    if len(groups) == 2 and _category(groups[0]) < _category(groups[1]):
        groups = [torch.promote_types(*groups)]
    return groups[0] if _category(groups[0]) > 1 else torch.get_default_dtype()


def _category(dtype: torch.dtype) -> int:
    return 3 if dtype.is_complex else 2 if dtype.is_floating_point else int(dtype is not torch.bool)


def _of_numbers(
    name: str, func: Callable[..., Any], numbers: Sequence[Number], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Arithmetic of numbers gives a number, in full precision."""
    if name != getattr(func, "__name__", ""):
        func = getattr(torch.Tensor, name)
    result = func(*args, **kwargs)
    if isinstance(result, torch.Tensor) and not result.dim() and result.dtype in (torch.float64, torch.bool):
        origin = tuple(dict.fromkeys(name for one in numbers for name in one.origin))
        return number(result, origin, numbers[0].refuse)
    return result


def _each(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Runs torch._foreach_add and its relatives on one tensor after the other."""
    plain = name.removeprefix("_foreach_")
    if plain.rstrip("_") in ("addcmul", "addcdiv") and len(args) == 4:
        args, kwargs = args[:3], {"value": args[3]}
    if plain.rstrip("_") in ("add", "sub") and "scalar" in kwargs:
        args, kwargs = [*args, kwargs["scalar"]], {}
    count = next(len(arg) for arg in args if isinstance(arg, list | tuple))
    results = []
    for i in range(count):
        one = [arg[i] if isinstance(arg, list | tuple) else arg for arg in args]
        func = torch.pow if plain == "pow" else getattr(torch.Tensor, plain)
        results.append(call(func, one, kwargs))
    return None if plain.endswith("_") else results


def _add_scaled(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    alpha = kwargs.pop("alpha")
    if "other" in kwargs:
        args = (*args, kwargs.pop("other"))
    base, other = args
    reverse = func.__name__ == "rsub"
    scaled = base if reverse else other
    if not isinstance(scaled, torch.Tensor) or isinstance(scaled, Number):
        scaled = call(torch.Tensor.mul, (alpha, scaled), {})
    else:
        tensors = [t for t in (base, other) if isinstance(t, torch.Tensor)]
        dtype = _result_type(tensors)
        if not any(_category(t.dtype) > 1 for t in tensors if not isinstance(t, Number)):
            raise RuntimeError("For integral input tensors, argument alpha must not be a floating point number.")
        scaled = scaled.to(dtype) * alpha.as_subclass(torch.Tensor).to(dtype)
    return call(func, (scaled, other) if reverse else (base, scaled), kwargs)


def _add_product(name: str, base: Any, one: Any, other: Any, *, value: Number) -> Any:
    product = one * other if name.startswith("addcmul") else one / other
    if _category(product.dtype) < 2:  # torch converts the factor to the integers' dtype
        product = product * value.as_subclass(torch.Tensor).to(product.dtype)
        return base.add_(product) if name.endswith("_") else base + product
    return call(torch.Tensor.add_ if name.endswith("_") else torch.Tensor.add, (base, product), {"alpha": value})


def _from_data(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    data, *rest = args
    options = {**dict(zip(("dtype", "device"), rest)), **kwargs}
    device = torch.device(options.get("device") or torch.get_default_device())
    if device.type != "xla":
        raise HostUse

    def build(item: Any) -> torch.Tensor:
        if isinstance(item, list | tuple):
            return torch.stack([build(part) for part in item])
        if isinstance(item, torch.Tensor):
            return item.as_subclass(torch.Tensor)
        return torch.tensor(item, dtype=torch.float64, device=device)

    made = build(data).to(options.get("dtype") or torch.get_default_dtype()).clone()
    return made.requires_grad_() if options.get("requires_grad") else made


def _filled(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    found = numbers_in(pytree.tree_leaves((list(args), dict(kwargs))))
    args, kwargs = pytree.tree_map(lambda leaf: 0.0 if isinstance(leaf, Number) else leaf, (tuple(args), dict(kwargs)))
    made = func(*args, **kwargs)
    if made.device.type != "xla":
        raise HostUse
    return _overwrite(made, found[0])


def _overwrite(tensor: torch.Tensor, value: Number) -> torch.Tensor:
    return tensor.copy_(value.as_subclass(torch.Tensor).to(tensor.dtype))  # fill_ would read the value on the host


def joined(numbers: Sequence[Number]) -> str:
    """The names of the arguments that numbers come from, for messages."""
    return ", ".join(dict.fromkeys(name for one in numbers for name in one.origin))
