"""Random programs over tensors, and what they compute on a device: for comparing automatic donation with its absence.

A program is a list of operations, each a name and three numbers. The numbers choose among what is there when the
operation is reached, only by metadata, so that a program means the same on every device. Values are small integers
in every dtype, which all devices compute exactly. An exception of an operation is part of its result.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

Operation = tuple[str, int, int, int]
Program = Sequence[Operation]

SHAPES = ((4,), (2, 4), (4, 4), (8,), (3, 2, 4), (1, 4))
DTYPES = (torch.float32, torch.int32, torch.bfloat16, torch.float32)
MODULUS = 13  # products of two such values, and sums of a few, are exact in bfloat16


class Cycle:
    """Part of a cycle, which only the garbage collector frees."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.myself = self


class Machine:
    """Runs programs. Device-dependent actions (steps, sharding, views from outside) are given by the caller."""

    def __init__(self, device: str, step: Callable[[bool], None], extra: dict[str, Callable[..., Any]]) -> None:
        self.device = device
        self.step = step
        self.extra = extra
        self.tensors: list[torch.Tensor] = []
        self.kept: list[Any] = []  # what holds tensors without being a variable
        self.seen: list[Any] = []  # what the program has read

    # --- choosing ---

    def any(self, number: int) -> torch.Tensor:
        return self.tensors[number % len(self.tensors)]

    def like(self, tensor: torch.Tensor, number: int) -> torch.Tensor:
        alike = [t for t in self.tensors if t.shape == tensor.shape and t.dtype == tensor.dtype]
        return alike[number % len(alike)] if alike else tensor

    def put(self, tensor: torch.Tensor, number: int) -> None:
        """A new variable, or a new value for one: then the old value may be out of reach."""
        if len(self.tensors) >= 8 or number % 3 == 0:
            self.tensors[number % len(self.tensors)] = tensor
        else:
            self.tensors.append(tensor)

    def small(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.remainder(tensor, MODULUS)

    # --- operations: each takes three numbers. VALUES and WRITES have more of them. ---

    def operation(self, name: str, a: int, b: int, c: int) -> None:
        if name in VALUES:
            made = VALUES[name](self, self.any(a), b, c)
            if made is not None:
                self.put(made, c)
        elif name in WRITES:
            with torch.no_grad():
                WRITES[name](self, self.any(a), b, c)
        else:
            getattr(self, f"op_{name}")(a, b, c)

    def op_upload(self, a: int, b: int, c: int) -> None:
        shape, dtype = SHAPES[a % len(SHAPES)], DTYPES[b % len(DTYPES)]
        count = int(torch.tensor(shape).prod())
        value = ((torch.arange(count) + c) % MODULUS).reshape(shape).to(dtype)
        self.put(value.to(self.device), c)

    def op_fill(self, a: int, b: int, c: int) -> None:
        shape, dtype = SHAPES[a % len(SHAPES)], DTYPES[b % len(DTYPES)]
        self.put(torch.full(shape, c % MODULUS, dtype=dtype, device=self.device), c)

    def op_scalar(self, a: int, b: int, c: int) -> None:
        self.put(torch.tensor(float(a % MODULUS), device=self.device), c)

    def op_update(self, a: int, b: int, c: int) -> None:
        """x = f(x, y): the pattern that automatic donation is for."""
        i = a % len(self.tensors)
        x = self.tensors[i]
        self.tensors[i] = self.small(x - 2 * self.like(x, b))

    def op_matmul(self, a: int, b: int, c: int) -> None:
        squares = [t for t in self.tensors if t.shape == (4, 4) and t.dtype == torch.float32]
        if squares:
            self.put(self.small(squares[a % len(squares)] @ squares[b % len(squares)]), c)

    def op_assign_slice(self, a: int, b: int, c: int) -> None:
        x = self.any(a)
        with torch.no_grad():
            if x.dim():
                row = b % x.shape[0]
                x[row] = self.small(x[(row + c) % x.shape[0]] + 1)

    def op_set_data(self, a: int, b: int, c: int) -> None:
        x = self.any(a)
        if not x._is_view():
            x.data = self.small(self.like(x, b).detach() + 3)

    def op_loss(self, a: int, b: int, c: int) -> None:
        """Keeps a graph, whose saved tensors a later backward() reads."""
        x = self.any(a)
        if x.is_floating_point():
            self.kept.append(("loss", (x * self.like(x, b)).sum()))

    def op_backward(self, a: int, b: int, c: int) -> None:
        losses = [item for item in self.kept if isinstance(item, tuple) and item[0] == "loss"]
        if losses:
            chosen = losses[a % len(losses)]
            self.kept = [item for item in self.kept if item is not chosen]
            if chosen[1].requires_grad:
                chosen[1].backward()

    def op_gradient(self, a: int, b: int, c: int) -> None:
        """An optimizer's step by hand, with the gradient kept, dropped or zeroed."""
        for x in self.tensors:
            if x.is_leaf and x.requires_grad and x.grad is not None:
                with torch.no_grad():
                    x.sub_(x.grad).remainder_(MODULUS)
                if c % 3 == 0:
                    x.grad = None
                elif c % 3 == 1:
                    x.grad.zero_()
                else:
                    self.put(x.grad, c)

    def op_delete(self, a: int, b: int, c: int) -> None:
        if len(self.tensors) > 2:
            del self.tensors[a % len(self.tensors)]

    def op_keep(self, a: int, b: int, c: int) -> None:
        x = self.any(a)
        if b % 3 == 0:
            self.kept.append([x])
        elif b % 3 == 1:
            self.kept.append(lambda: x)
        else:
            self.kept.append(Cycle(x))

    def op_drop(self, a: int, b: int, c: int) -> None:
        if self.kept:
            del self.kept[a % len(self.kept)]

    def op_collect(self, a: int, b: int, c: int) -> None:
        gc.collect()

    def op_read(self, a: int, b: int, c: int) -> None:
        x = self.any(a).detach()
        if b % 3 == 0:
            self.seen.append(x.cpu().tolist())
        elif b % 3 == 1:
            self.seen.append(x.sum().item())
        else:
            self.seen.append(len(str(x)) > 0)

    def op_step(self, a: int, b: int, c: int) -> None:
        self.step(b % 2 == 0)

    def op_thread(self, a: int, b: int, c: int) -> None:
        """An update and a step on another thread, while this one waits."""

        def work() -> None:
            self.op_update(a, b, c)
            if c % 2:
                self.step(False)

        worker = threading.Thread(target=work)
        worker.start()
        worker.join()

    def op_extra(self, a: int, b: int, c: int) -> None:
        if self.extra:
            names = sorted(self.extra)
            self.extra[names[b % len(names)]](self, self.any(a), c)

    # --- running ---

    def run(self, program: Program) -> dict[str, Any]:
        self.op_upload(1, 0, 1)
        self.op_upload(2, 0, 2)
        outcomes = []
        for name, a, b, c in program:
            try:
                self.operation(name, a, b, c)
                outcomes.append("")
            except RuntimeError as error:
                outcomes.append(type(error).__name__)
        self.step(True)
        kept = []
        for item in self.kept:
            if isinstance(item, list):
                kept.append(item[0])
            elif isinstance(item, tuple):
                kept.append(item[1])
            elif isinstance(item, Cycle):
                kept.append(item.tensor)
            elif callable(item):
                kept.append(item())
        return {
            "outcomes": outcomes,
            "seen": self.seen,
            "values": [_value(t) for t in self.tensors],
            "kept": [_value(t) for t in kept],
            "gradients": [_value(t.grad) for t in self.tensors if t.is_leaf and t.grad is not None],
        }


def _value(tensor: torch.Tensor) -> tuple[str, Any]:
    return str(tensor.dtype), tensor.detach().cpu().tolist()


#: Of a tensor and two numbers: a new value, or None where there is none.
VALUES: dict[str, Callable[[Machine, torch.Tensor, int, int], torch.Tensor | None]] = {
    "add": lambda m, x, b, c: m.small(x + m.like(x, b)),
    "mul": lambda m, x, b, c: m.small(x * m.like(x, b)),
    "sum": lambda m, x, b, c: m.small(x.sum()),
    "row": lambda m, x, b, c: x[b % x.shape[0]] if x.dim() else None,
    "slice": lambda m, x, b, c: x[..., : 1 + b % (x.shape[-1] - 1)] if x.dim() and x.shape[-1] > 1 else None,
    "transpose": lambda m, x, b, c: x.transpose(0, -1) if x.dim() >= 2 else None,
    "flat": lambda m, x, b, c: x.view(-1) if x.is_contiguous() else None,
    "detach": lambda m, x, b, c: x.detach(),
    "data": lambda m, x, b, c: x.data,
    "clone": lambda m, x, b, c: x.clone(),
    "cast": lambda m, x, b, c: x.to(DTYPES[b % len(DTYPES)]),
    "parameter": lambda m, x, b, c: x.detach().clone().requires_grad_() if x.is_floating_point() else None,
}
#: In place.
WRITES: dict[str, Callable[[Machine, torch.Tensor, int, int], object]] = {
    "add_in_place": lambda m, x, b, c: x.add_(m.like(x, b)).remainder_(MODULUS),
    "mul_in_place": lambda m, x, b, c: x.mul_(c % 5).remainder_(MODULUS),
    "fill_in_place": lambda m, x, b, c: x.fill_(c % MODULUS),
    # Of a computed value: a plain copy shares the buffer in stock torch_xla, which then destroys the source.
    "copy_in_place": lambda m, x, b, c: x.copy_(m.like(x, b) + 1).remainder_(MODULUS),
    "assign_row": lambda m, x, b, c: x.__setitem__(b % x.shape[0], c % MODULUS) if x.dim() else None,
    "index_copy": lambda m, x, b, c: (
        x.index_copy_(0, torch.tensor([b % x.shape[0]], device=m.device), m.small(x[:1] + c)) if x.dim() else None
    ),
}
OPERATIONS = tuple(sorted([*VALUES, *WRITES, *(name[3:] for name in vars(Machine) if name.startswith("op_"))]))
# Steps and updates more often than the rest: without them nothing is donated.
WEIGHTED = OPERATIONS + ("step", "update") * 4 + ("add", "delete", "assign_slice", "add_in_place") * 2
