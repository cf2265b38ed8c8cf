"""Computations of torch_xla's builder."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from torch_xla_donate import hlo
from torch_xla_donate._host.load import xlac


def is_computation(value: Any) -> bool:
    """Whether a value is a computation of torch_xla's builder."""
    return isinstance(value, xlac().XlaComputation)


def computation_text(computation: Any) -> str:
    """The HLO of a computation, with the donors, aliases and names of its module."""
    return str(xlac()._xla_computation_text(computation))


def call_computation(name: str, inputs: Sequence[torch.Tensor], computation: Any) -> list[torch.Tensor]:
    """The pending results of a computation. torch_xla needs a namespace in an operation's name."""
    qualified = name if "::" in name else f"xla::{name}"
    return list(xlac()._xla_user_computation(qualified, list(inputs), computation))


def calling(computation: Any, parameters: Sequence[hlo.HloShape]) -> Any:
    """A computation that takes the arrays of these parameters one by one and calls the given computation.

    Raises RuntimeError if torch_xla's builder cannot import the computation. Names without a dot end the process.
    """
    from torch_xla.core import xla_builder

    name = "call"
    builder = xla_builder.create_builder(name)  # type: ignore[no-untyped-call]
    numbers = itertools.count()

    def operand(shape: hlo.HloShape) -> Any:
        if shape.is_tuple:
            return xla_builder.Op.tuple([operand(element) for element in shape.elements], builder=builder)  # type: ignore[no-untyped-call]
        dynamic = [number in shape.dynamic for number in range(len(shape.dims))] if shape.dynamic else None
        array = xla_builder.mkshape(shape.dtype, shape.dims, dynamic)  # type: ignore[no-untyped-call]
        return xla_builder.mkparam(builder, next(numbers), array)  # type: ignore[no-untyped-call]

    operands = [operand(parameter) for parameter in parameters]
    caller = xla_builder.Op.call(computation, operands, builder=builder).build(name)  # type: ignore[no-untyped-call]
    computation_text(caller)  # checks the module that the builder has made
    return caller
