"""Snapshots of tensors from outside, taken before a trace changes them."""

from __future__ import annotations

import torch

from torch_xla_donate import _C, _host


class TensorSnapshot:
    """The buffer and the gradient of a tensor from outside at its first use in the trace."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self._buffer = _C.identity(tensor)[1]
        self.same = _host.same_buffer(tensor)

        self._gradient = tensor.grad if tensor.is_leaf else None
        self._gradient_buffer = _C.identity(self._gradient)[1] if self._gradient is not None else 0
        known = self._gradient is not None and self._gradient_buffer
        self._gradient_same = _host.same_buffer(self._gradient) if known else None  # type: ignore[arg-type]

    def has_new_gradient(self) -> bool:
        gradient = self.tensor.grad if self.tensor.is_leaf else None
        return gradient is not self._gradient or (
            gradient is not None and _C.identity(gradient)[1] != self._gradient_buffer
        )

    def is_replaced(self) -> bool:
        return bool(_C.identity(self.tensor)[1] != self._buffer)

    def restore(self) -> None:
        if self.is_replaced():
            with torch.no_grad():
                self.tensor.copy_(self.same)
        if self.has_new_gradient():
            self.tensor.grad = self._gradient
            if self._gradient_same is not None and self.has_new_gradient():
                with torch.no_grad():
                    self._gradient.copy_(self._gradient_same)  # type: ignore[union-attr]
