"""The error for an action that a replay would not repeat, and helpers of its callers."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

from torch_xla_donate._errors import DonationError, see

RETURN_IT = "Return the tensor and read it outside"


def tensors_of(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def not_lowerable(function: str, where: str, what: str, remedy: str) -> DonationError:
    """The same for `lower` of a function that is not declared pure."""
    at = f"at {where} it" if where else "it"
    return DonationError(f"{function} cannot be lowered, because {at} {what}. {remedy}. {see('ahead')}")


def impure(function: str, where: str, what: str, remedy: str) -> DonationError:
    """The error. `where` is the line, or empty if no line is known."""
    at = f"at {where} it" if where else "it"
    return DonationError(
        f"{function} is declared pure, but {at} {what}. {remedy}, or remove pure=True. Nothing was donated. "
        f"{see('pure')}"
    )
