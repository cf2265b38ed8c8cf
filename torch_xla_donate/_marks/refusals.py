"""The errors for tensors that cannot be marked."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from torch_xla_donate import _C, _trees
from torch_xla_donate._errors import DonationError, see


def describe(tensor: torch.Tensor) -> str:
    return f"{_trees.dtype_and_shape(tensor)} on {tensor.device}"


def refusal(leaf: Any, obstacle: str, name: str) -> Exception:
    """The error for a leaf that cannot be marked. obstacle: from `_C.mark`."""
    nothing = f"Nothing was marked. {see('refused')}"
    if obstacle == "not_tensor" and isinstance(leaf, Iterator):
        return TypeError(
            f"{name} is of type {type(leaf).__name__}, which can be iterated only once. Pass a list, or the module "
            f"instead of module.parameters(). {nothing}"
        )
    if obstacle == "not_tensor":
        return TypeError(
            f"{name} is of type {type(leaf).__name__}, which is neither a tensor nor a registered pytree. "
            f"Remove this leaf, or register its class with torch.utils._pytree. {nothing}"
        )
    if obstacle == "not_xla":
        why, remedy = "", "Move it with .to('xla')"
        if leaf.layout != torch.strided:
            why, remedy = f" with layout {leaf.layout}", "Make it dense"
        elif leaf.device.type == "xla":
            why, remedy = f" in a {type(leaf).__name__}, which wraps the buffer", "Pass the tensor inside"
        return ValueError(
            f"{name} is {describe(leaf)}{why}, but only plain XLA tensors have a buffer to donate. "
            f"{remedy}, or remove this leaf. {nothing}"
        )
    if obstacle == "pending" and leaf._is_view():
        return DonationError(
            f"{name} is {describe(leaf)}, a view, which torch_xla computes from its base and which has no buffer. "
            f"Donate the base, or a .clone() of the view after torch_xla.sync(). {nothing}"
        )
    if obstacle == "pending" and _C.updated_in_place(leaf):
        return DonationError(
            f"{name} is {describe(leaf)}, updated in place since the last step, so torch_xla reuses its memory "
            f"automatically. Remove this leaf. To donate the old value, compute the new one as another tensor. "
            f"{nothing}"
        )
    if obstacle == "pending":
        return DonationError(
            f"{name} is {describe(leaf)} and has no buffer yet, because its value is still pending. "
            f"Call torch_xla.sync() first, or mark the tensor before you write to it through a view. {nothing}"
        )
    if obstacle == "read_only":
        return DonationError(
            f"{name} is {describe(leaf)}, in a buffer that torch_xla shares between tensors (a cached constant or "
            f"the RNG seed). Donate a .clone() instead, or pass a list of the other tensors. {nothing}"
        )
    if obstacle == "viewed":
        return DonationError(
            f"{name} is {describe(leaf)} and shares its graph with a view, because functionalization is off "
            f"(XLA_DISABLE_FUNCTIONALIZATION). Donate a tensor without views. {nothing}"
        )
    if obstacle == "dynamic":
        return DonationError(
            f"{name} is {describe(leaf)}, a tensor whose size only the device knows, so no output can be chosen for "
            f"it. Remove this leaf. {nothing}"
        )
    raise AssertionError(f"unknown obstacle {obstacle}")


def passed_twice(donated: str, kept: str) -> ValueError:
    """The error for a buffer that a call both donates and keeps."""
    return ValueError(
        f"{donated} is donated, and {kept}, which is not, has the same buffer. Donate both, or pass a .clone() or "
        f"another placeholder as one of them. Nothing was donated. {see('refused')}"
    )
