"""The errors for tensors that cannot be marked."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from torch_xla_donate import _C, _trees
from torch_xla_donate._errors import DonationError


def describe(tensor: torch.Tensor) -> str:
    return f"{_trees.dtype_and_shape(tensor)} on {tensor.device}"


def refusal(leaf: Any, obstacle: str, name: str) -> Exception:
    """The error for a leaf that cannot be marked; obstacle as `_C.mark` gives it."""
    nothing = "Nothing was marked."
    if obstacle == "not_tensor" and isinstance(leaf, Iterator):
        return TypeError(
            f"{name} is of type {type(leaf).__name__}, which can be gone through once only. Pass a list of it, or the "
            f"module itself in the place of module.parameters(). {nothing}"
        )
    if obstacle == "not_tensor":
        return TypeError(
            f"{name} is of type {type(leaf).__name__}, which is neither a tensor nor a registered pytree. "
            f"Take this leaf out, or register its class with torch.utils._pytree. {nothing}"
        )
    if obstacle == "not_xla":
        why, remedy = "", "move it with .to('xla')"
        if leaf.layout != torch.strided:
            why, remedy = f", with layout {leaf.layout}", "make it dense"
        elif leaf.device.type == "xla":
            why, remedy = f", in a {type(leaf).__name__} that does not hold its buffer itself", "give the tensor inside"
        return ValueError(
            f"{name} is {describe(leaf)}{why}. Only plain XLA tensors have a buffer to donate: "
            f"{remedy}, or take this leaf out. {nothing}"
        )
    if obstacle == "pending" and leaf._is_view():
        return DonationError(
            f"{name} is {describe(leaf)}, a view, whose value is worked out anew from its base and has no buffer of "
            f"its own. Donate the base; or a .clone() of the view, after torch_xla.sync(). {nothing}"
        )
    if obstacle == "pending" and _C.updated_in_place(leaf):
        return DonationError(
            f"{name} is {describe(leaf)}, updated in place since the last step. torch_xla reuses its memory for the "
            f"new value automatically: take this leaf out. To donate the old value, compute the new one as another "
            f"tensor. {nothing}"
        )
    if obstacle == "pending":
        return DonationError(
            f"{name} is {describe(leaf)}, not materialised: its value is still pending work. "
            f"Call torch_xla.sync() first, then donate. Mark a tensor that is written through a view before the write. "
            f"{nothing}"
        )
    if obstacle == "read_only":
        return DonationError(
            f"{name} is {describe(leaf)}, in a buffer that torch_xla shares between tensors (a cached constant or "
            f"the RNG seed); donating it would destroy them all. Donate a .clone() instead. {nothing}"
        )
    if obstacle == "viewed":
        return DonationError(
            f"{name} is {describe(leaf)}, and it is a view or has views while functionalization is off "
            f"(XLA_DISABLE_FUNCTIONALIZATION): they share its graph. Donate a tensor without views. {nothing}"
        )
    if obstacle == "dynamic":
        return DonationError(
            f"{name} is {describe(leaf)}, a tensor whose size only the device knows: how many bytes it has, and so "
            f"which output could take them, cannot be told. Take this leaf out. {nothing}"
        )
    raise AssertionError(f"unknown obstacle {obstacle}")


def passed_twice(donated: str, kept: str) -> ValueError:
    """The error for a buffer that is to be given away and kept."""
    return ValueError(
        f"{donated} is donated, and {kept}, which is not, has the same buffer. Donate both, or pass a .clone() as one "
        "of them. Nothing was donated."
    )
