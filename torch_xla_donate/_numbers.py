"""Python floats among the arguments of a pure function. They are inputs of its graph, and the trace promotes them as
numbers.

A plain tensor instead of a float would change dtypes and precision: bf16[] times f64[] is f64[]. So each operation gets
the number in the dtype that torch's rule gives a Python number there. Torch also has a bit for this ("wrapped number"),
but fails an assertion if such a tensor is not on the CPU and meets a dispatch mode, under which a trace runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy
import torch
from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND, elementwise_dtypes
from torch.utils import _pytree as pytree


def is_float(leaf: object) -> bool:
    """Whether a leaf is traced as a number. Enums and other classes derived from float stay static."""
    return type(leaf) is float or isinstance(leaf, numpy.floating)


class Number(torch.Tensor):
    """A float in a trace, or a result computed from such floats only: float64 (bool for a comparison), no dimensions.

    Attributes:
        origin: the names of the arguments.
        refuse: makes the error for a use on the host.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    origin: tuple[str, ...]
    refuse: Callable[[Sequence[Number]], Exception]

    def _read(self, *_: object, **__: object) -> Any:
        raise self.refuse([self])

    # Those of a float that torch.Tensor lacks, or answers without the value; and NumPy's way to the value.
    __hash__ = __round__ = __trunc__ = __divmod__ = __rdivmod__ = _read  # type: ignore[assignment]
    __array__ = __array_ufunc__ = _read  # type: ignore[assignment]
    is_integer = as_integer_ratio = hex = conjugate = _read


def number(tensor: torch.Tensor, origin: tuple[str, ...], refuse: Callable[[Sequence[Number]], Exception]) -> Number:
    made: Number = torch.Tensor._make_subclass(Number, tensor)  # type: ignore[assignment, arg-type]
    made.origin, made.refuse = origin, refuse
    return made


def numbers_in(tensors: Sequence[torch.Tensor]) -> list[Number]:
    return [tensor for tensor in tensors if type(tensor) is Number]


def joined(numbers: Sequence[Number]) -> str:
    """The names of the arguments that numbers come from, for messages."""
    return ", ".join(dict.fromkeys(name for one in numbers for name in one.origin))


def as_result(leaf: Any) -> Any:
    """A computed number as the tensor that `torch.tensor` makes of a float; any other leaf unchanged."""
    if type(leaf) is not Number:
        return leaf
    plain = leaf.as_subclass(torch.Tensor)
    return plain.to(torch.get_default_dtype()) if plain.is_floating_point() else plain


def call(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Calls a function of torch with numbers among its arguments.

    torch reads a number on the host if the function takes a Python number there and nothing else, and `HostReads`
    refuses that. `_scaled` and `_filled` replace the common ones of these functions.
    """
    args, kwargs = list(args), dict(kwargs)
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    numbers = numbers_in(tensors)
    if not numbers:
        return func(*args, **kwargs)
    name = getattr(func, "__name__", "")
    if name.startswith("_foreach_"):
        return _each(name.removeprefix("_foreach_"), args, kwargs)
    first: Any = args[0] if args else kwargs.get("input")
    if name in _FILLED or (name == "fill_" and type(first) is not Number):
        return _filled(func, args, kwargs, numbers)
    if name in ("scatter", "scatter_") and len(args) == 4 and type(args[3]) is Number:
        # torch takes a tensor there for the one that has an element for each index
        args[3] = args[3].as_subclass(torch.Tensor).to(first.dtype).expand(args[2].shape)
        return func(*args, **kwargs)
    if type(first) is Number and name.endswith("_") and hasattr(torch.Tensor, name.rstrip("_")):
        func = getattr(torch.Tensor, name := name.rstrip("_"))  # `lr *= x` binds the name to another value
    factor = _SCALED.get(name.rstrip("_"), "")
    if type(kwargs.get(factor)) is Number and kwargs.keys() <= {factor, *_SUMMANDS}:
        return _scaled(func, name, args, kwargs, kwargs.pop(factor))
    if len(numbers) == len(tensors):
        return _of_numbers(func(*args, **kwargs), numbers)
    if name in ("div", "true_divide") and len(args) == 2 and type(args[0]) is Number:
        func, args = torch.Tensor.__rdiv__, args[::-1]  # as Python does
    dtype = first.dtype if name in _INTO_FIRST else torch.float64 if name == "float_power" else _result_type(tensors)
    is_rounded = dtype in (torch.bfloat16, torch.float16) and name.rstrip("_") in _PRODUCTS

    def cast(leaf: Any) -> Any:
        is_number = type(leaf) is Number and leaf.is_floating_point()
        return leaf.as_subclass(torch.Tensor).to(torch.float32 if is_rounded else dtype) if is_number else leaf

    args, kwargs = pytree.tree_map(cast, (args, kwargs))
    if name in _WITHOUT_PROMOTION:
        place = 1 if func is torch.Tensor.where else 0
        condition = None if name != "where" else args[place] if len(args) > place else kwargs["condition"]
        unchanged = (condition, kwargs.get("out"))
        args, kwargs = pytree.tree_map_only(
            torch.Tensor,
            lambda leaf: leaf if any(leaf is each for each in unchanged) else leaf.to(dtype),
            (args, kwargs),
        )
    result = func(*args, **kwargs)
    return result.to(dtype) if is_rounded and "out" not in kwargs else result


# With a tensor of 16-bit floats, torch rounds the result of these, and not the number.
_PRODUCTS = {"mul", "multiply", "div", "divide", "true_divide"}
# The factor that multiplies the second argument, or the product or quotient of the second and third.
_SCALED = dict.fromkeys(("add", "sub", "subtract", "rsub", "addmm", "addmv", "addr", "addbmm", "baddbmm"), "alpha")
_SCALED |= {"addcmul": "value", "addcdiv": "value"}
_SUMMANDS = ("input", "other", "tensor1", "tensor2")  # as keywords, in the order of the positions
# The number is each element of the new tensor.
_FILLED = {"full", "full_like", "new_full", "tensor", "as_tensor", "asarray", "scalar_tensor"}
# The result has the dtype of the first argument, and torch converts the number to it.
_INTO_FIRST = {"masked_fill", "masked_fill_", "index_fill", "index_fill_", "__setitem__"}
# torch promotes integers here. torch_xla fails, or computes in the dtype of a tensor.
_WITHOUT_PROMOTION = {"clamp", "clip", "clamp_min", "clamp_max", "remainder", "fmod", "__rmod__", "where"}


def _result_type(tensors: Sequence[torch.Tensor]) -> torch.dtype:
    """The dtype that a Python float takes in an operation with these tensors."""
    others = [tensor for tensor in tensors if type(tensor) is not Number]
    _, found = elementwise_dtypes(*others, 0.0, type_promotion_kind=ELEMENTWISE_TYPE_PROMOTION_KIND.DEFAULT)
    return found


def _of_numbers(result: Any, numbers: Sequence[Number]) -> Any:
    """Arithmetic of numbers gives a number, in full precision."""
    if isinstance(result, torch.Tensor) and not result.dim() and result.dtype in (torch.float64, torch.bool):
        origin = tuple(dict.fromkeys(name for one in numbers for name in one.origin))
        return number(result, origin, numbers[0].refuse)
    return result


def _each(name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Runs torch._foreach_add and its relatives on one tensor after the other."""
    if name.startswith("addc") and len(args) == 4:
        kwargs["value"] = args.pop()
    results = [
        call(getattr(torch.Tensor, name), [arg[i] if isinstance(arg, list | tuple) else arg for arg in args], kwargs)
        for i in range(len(args[0]))
    ]
    return None if name.endswith("_") else results


def _scaled(func: Callable[..., Any], name: str, args: list[Any], kwargs: dict[str, Any], factor: Number) -> Any:
    """Multiplies by the factor ``alpha`` or ``value``, which torch would read on the host."""
    args += [kwargs[key] for key in _SUMMANDS if key in kwargs]
    is_product = name.startswith("addc")
    if is_product:
        base, one, other = args
        args = [base, one * other if name.startswith("addcmul") else one / other]
        func = torch.Tensor.add_ if name.endswith("_") else torch.Tensor.add
    place = 0 if name == "rsub" else 1
    tensors = [leaf for leaf in args if isinstance(leaf, torch.Tensor)]
    if any(leaf.is_floating_point() or leaf.is_complex() for leaf in tensors if type(leaf) is not Number):
        if isinstance(args[place], torch.Tensor) and type(args[place]) is not Number:
            args[place] = args[place].to(_result_type(tensors))
    elif not is_product:
        raise RuntimeError("For integral input tensors, argument alpha must not be a floating point number.")
    else:
        factor = factor.as_subclass(torch.Tensor).to(args[place].dtype)  # type: ignore[assignment]  # as torch does
    args[place] = call(torch.Tensor.mul, (factor, args[place]), {})
    return call(func, args, {})


def _filled(func: Callable[..., Any], args: list[Any], kwargs: dict[str, Any], numbers: Sequence[Number]) -> Any:
    """A tensor of one number. Torch would read it on the host."""
    direct = [leaf for leaf in (*args, *kwargs.values()) if type(leaf) is Number]
    in_place = func.__name__ == "fill_"
    if in_place:
        made = args[0] if args else kwargs["input"]
    elif direct:
        made = func(
            *(0.0 if type(leaf) is Number else leaf for leaf in args),
            **{key: 0.0 if type(leaf) is Number else leaf for key, leaf in kwargs.items()},
        )
    if not direct or made.device.type != "xla":
        raise numbers[0].refuse(numbers)
    with torch.set_grad_enabled(in_place and torch.is_grad_enabled()):
        return made.copy_(direct[0].as_subclass(torch.Tensor).to(made.dtype))
