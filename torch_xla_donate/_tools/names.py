"""Names the tensors that a program can reach, as the program would write them: ``model.fc.weight``."""

from __future__ import annotations

import dataclasses
import sys
import sysconfig
import types
import weakref
from collections.abc import Iterator
from typing import Any

import torch

from torch_xla_donate import _C
from torch_xla_donate._report.holders import assigned_at, user_frames, user_modules, variables_of

_DEPTH = 8  # containers between a variable and a tensor
_OBJECTS = 100_000


@dataclasses.dataclass(frozen=True)
class Name:
    """A path from a variable to a tensor.

    variable: the variable's name.
    path: what follows it, such as ``.fc.weight`` or ``['w'].grad``.
    code: of the variable's function; None for a variable of an imported module.
    file: the source file of the variable.
    line: the line that its frame runs; 0 without a frame.
    owner_file: the source file of the class of the last object in the path; empty without one.
    """

    variable: str
    path: str
    code: types.CodeType | None
    file: str
    line: int
    owner_file: str = ""

    def __str__(self) -> str:
        return self.variable + self.path

    @property
    def is_gradient(self) -> bool:
        return self.path.endswith(".grad")

    @property
    def place(self) -> tuple[object, ...]:
        """Equal for one place of the program, whatever line runs."""
        return self.variable, self.path, self.code, self.file

    def assigned(self) -> int:
        """The line that assigned the variable last; 0 if unknown."""
        return assigned_at(self.variable, self.code, self.line) if self.code is not None else 0


@dataclasses.dataclass
class Named:
    """A tensor and its names. Does not keep the tensor alive."""

    tensor: weakref.ref[torch.Tensor]
    names: list[Name]


def name_tensors() -> dict[int, Named]:
    """The XLA tensors that variables lead to, by `_C.alias_ids`, and their names, the shortest path first.

    It reads the frames of all threads, the modules of the program, and from there containers, modules, optimizers,
    closures and attributes. It calls no code of the program.
    """
    walk = _Walk()
    with torch._C.DisableTorchFunctionSubclass():  # type: ignore[no-untyped-call]
        for frame in user_frames():
            for variable, value in variables_of(frame).items():
                walk.visit(value, Name(variable, "", frame.f_code, frame.f_code.co_filename, frame.f_lineno), _DEPTH)
        for module in user_modules():
            file = str(vars(module).get("__file__") or "")
            if not file or file.startswith(_INSTALLED):
                continue
            for variable, value in list(vars(module).items()):
                walk.visit(value, Name(variable, "", None, file, 0), _DEPTH)
    for named in walk.found.values():
        named.names.sort(key=lambda name: len(name.path))
    return walk.found


_INSTALLED = tuple(f"{sysconfig.get_path(name)}/" for name in ("stdlib", "purelib", "platlib"))


class _Walk:
    def __init__(self) -> None:
        self.found: dict[int, Named] = {}
        self._seen: set[tuple[int, str]] = set()
        self._kept: list[Any] = []  # a freed object would give its number to another one

    def visit(self, value: Any, name: Name, depth: int) -> None:
        kind = type(value)
        if issubclass(kind, torch.Tensor):
            self._note(value, name)
        elif depth > 0 and not issubclass(kind, _PLAIN) and len(self._seen) < _OBJECTS:
            # Again from another variable, as each of a tensor's names may be the one that its next value gets.
            key = (id(value), name.variable)
            if key not in self._seen:
                self._seen.add(key)
                self._kept.append(value)
                for step, child in _children(value):
                    owner = _file_of(kind) if step.startswith(".") else name.owner_file
                    below = dataclasses.replace(name, path=name.path + step, owner_file=owner)
                    self.visit(child, below, depth - 1)

    def _note(self, tensor: torch.Tensor, name: Name) -> None:
        if tensor.device.type != "xla":
            return
        for alias in dict.fromkeys(_C.alias_ids(tensor)):
            self.found.setdefault(alias, Named(weakref.ref(tensor), [])).names.append(name)
        gradient = tensor.grad if tensor.is_leaf else None
        parts = [("grad", gradient), *vars(tensor).items()]  # a sharded tensor of torch_xla wraps another
        for attribute, part in parts:
            if issubclass(type(part), torch.Tensor):
                self._note(part, dataclasses.replace(name, path=f"{name.path}.{attribute}"))


_PLAIN = (str, bytes, int, float, complex, type(None), type, types.ModuleType, types.CodeType, torch.dtype)


def _file_of(kind: type) -> str:
    module = sys.modules.get(kind.__module__)
    return getattr(module, "__file__", None) or ""


def _children(value: Any) -> Iterator[tuple[str, Any]]:
    """The parts of an object, with the text that leads to each."""
    kind = type(value)  # isinstance() would call a proxy's __class__
    if issubclass(kind, list | tuple):
        fields = getattr(kind, "_fields", None)
        for i, item in enumerate((list if issubclass(kind, list) else tuple).__iter__(value)):
            yield (f".{fields[i]}" if fields else f"[{i}]"), item
    elif issubclass(kind, dict):
        for i, (key, item) in enumerate(list(dict.items(value))):
            yield (f"[{key!r}]" if isinstance(key, str | int) else f"[key {i}]"), item
    elif kind is types.FunctionType:
        for variable, cell in zip(value.__code__.co_freevars, value.__closure__ or ()):
            try:
                yield f"'s {variable}", cell.cell_contents
            except ValueError:  # not assigned yet
                continue
    elif kind is types.MethodType:
        yield "'s object", value.__self__
    elif issubclass(kind, _OF_TORCH) or not kind.__module__.startswith(("torch.", "torch_xla")):
        space = getattr(value, "__dict__", None)
        if type(space) is dict:
            for attribute, item in list(space.items()):
                if attribute in _REGISTRIES and issubclass(kind, torch.nn.Module):
                    for key, part in list(item.items()):
                        yield f".{key}", part
                else:
                    yield f".{attribute}", item


_OF_TORCH = (torch.nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)
_REGISTRIES = ("_parameters", "_buffers", "_modules")
