"""Walks over Python objects, and names the tensors that a program can reach: ``model.fc.weight``."""

from __future__ import annotations

import contextlib
import dataclasses
import dis
import functools
import itertools
import sys
import sysconfig
import threading
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch

from torch_xla_donate import _C
from torch_xla_donate._frames import is_internal, is_internal_code

_DEPTH = 8  # containers between a variable and a tensor
OBJECTS = 250_000  # visited in one walk
_TURN = 256  # children of a container in one turn
_LONGEST = 100  # characters of a key in a path


@dataclasses.dataclass(frozen=True)
class Name:
    """A path from a variable to a tensor.

    variable: the variable's name.
    path: what follows it, such as ``.fc.weight`` or ``['w'].grad``.
    code: of the variable's function; None for a variable of an imported module.
    file: the source file of the variable.
    line: the line that its frame runs; 0 without a frame.
    slot: equal for names of one reference: of a variable, or of a place in an object.
    """

    variable: str
    path: str
    code: types.CodeType | None
    file: str
    line: int
    slot: tuple[object, ...] = dataclasses.field(default=(), compare=False)

    def __str__(self) -> str:
        return self.variable + self.path

    @property
    def place(self) -> tuple[object, ...]:
        """Equal for one place of the program, whatever line runs."""
        return self.variable, self.path, id(self.code), self.file  # the hash of a code object reads all of it

    @property
    def root(self) -> tuple[object, ...]:
        """Equal for one variable of the program."""
        is_global = self.code is None or self.code.co_name == "<module>"
        return self.variable, self.file, 0 if is_global else id(self.code)

    def assigned(self) -> int:
        """The line that assigned the variable last; 0 if unknown."""
        return assigned_at(self.variable, self.code, self.line) if self.code is not None else 0

    def place_of_assignment(self) -> str:
        """``file:line``; empty if unknown. Of an item or attribute, the assignment to it or to another one.

        A function inside that assigns the variable (``nonlocal``, ``global``) comes first, as it changes it later.
        """
        if self.code is None:
            return ""
        inner = list(_inner_stores(self.variable, self.code, _PARTS))
        parts = stores_of(self.variable, self.code, _PARTS) if self.path else ()
        return f"{self.file}:{max([*inner, *parts], default=self.assigned())}"

    def holder(self, *, with_path: bool) -> str:
        """The text for what holds the tensor: this name, or the variable."""
        what = str(self) if with_path and self.path else f"variable {self.variable!r}"
        file = self.file.rpartition("/")[2]
        return f"{what} in {file}" if self.code is None else f"{what} at {file}:{self.assigned()}"


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
    walk = Walk()
    with torch._C.DisableTorchFunctionSubclass():  # type: ignore[no-untyped-call]
        for frame in user_frames():
            walk.add_frame(frame)
        for module in list(sys.modules.values()):
            space = vars(module) if type(module) is types.ModuleType else {}
            name, file = space.get("__name__", ""), space.get("__file__", "")
            is_named = type(name) is str and type(file) is str and file
            if is_named and not file.startswith(_INSTALLED) and not is_internal_code(name, file):
                walk.add_variables(space, Name("", "", None, file, 0), space)
        walk.run()
    for named in walk.found.values():
        named.names.sort(key=lambda name: len(name.path))
    return walk.found


_PARTS = ("STORE_SUBSCR", "STORE_SLICE", "STORE_ATTR")


def _inner_stores(variable: str, code: types.CodeType, parts: tuple[str, ...] = ()) -> Iterator[int]:
    """The lines of functions inside that assign a variable of this code, or by these instructions a part of it."""
    for const in code.co_consts:
        if isinstance(const, types.CodeType) and variable not in (*const.co_varnames, *const.co_cellvars):
            yield from stores_of(variable, const, ("STORE_DEREF", "STORE_GLOBAL", *parts))
            yield from _inner_stores(variable, const, parts)


@functools.lru_cache(maxsize=256)
def assigned_at(name: str, code: types.CodeType, line: int) -> int:
    """The last line up to this one that assigns a variable; a later one, or the function's, if there is none.

    Of a variable that only functions inside assign (``global``), their last line.
    """
    lines = list(stores_of(name, code)) or list(_inner_stores(name, code))
    before = [number for number in lines if number <= line]
    return max(before, default=max(lines, default=code.co_firstlineno))


def stores_of(name: str, code: types.CodeType, kinds: tuple[str, ...] = ("STORE_",)) -> Iterator[int]:
    """The lines of the instructions of these kinds that store a variable, or an item or attribute on its line."""
    starts = dict(dis.findlinestarts(code))
    instructions = list(dis.get_instructions(code))
    # Python 3.12 has comprehensions in the code around them. Their variables are others, even of the same name.
    inlined = [_place(one) for one in instructions if one.opname == "LOAD_FAST_AND_CLEAR" and one.argval == name]
    current = code.co_firstlineno
    line_of_load = 0
    for instruction in instructions:
        current = starts.get(instruction.offset) or current
        if inlined and any(start <= _place(instruction)[0] and _place(instruction)[1] <= end for start, end in inlined):
            continue
        for operation, variable in _accesses(instruction):
            if variable == name and operation.startswith(_LOADS):
                line_of_load = current
            is_part = operation in kinds and current == line_of_load
            if is_part or (variable == name and operation.startswith(kinds)):
                yield current


# Of variables; other instructions load attributes and constants, which may have the same name.
_LOADS = ("LOAD_FAST", "LOAD_NAME", "LOAD_GLOBAL", "LOAD_DEREF", "LOAD_CLASSDEREF")


def _place(instruction: dis.Instruction) -> tuple[tuple[int, int], tuple[int, int]]:
    """Where the code of an instruction begins and ends: lines and columns. Python 3.11 and newer know it."""
    place = instruction.positions
    assert place is not None
    return (place.lineno or 0, place.col_offset or 0), (place.end_lineno or 0, place.end_col_offset or 0)


def _accesses(instruction: dis.Instruction) -> Iterator[tuple[str, object]]:
    """An instruction and its argument. Python 3.13 has instructions that load or store two variables."""
    parts = instruction.opname.replace("_FAST", "").split("_")
    if isinstance(instruction.argval, tuple) and set(parts) <= {"LOAD", "STORE"}:
        yield from ((f"{part}_FAST", variable) for part, variable in zip(parts, instruction.argval))
    else:
        yield instruction.opname, instruction.argval


# Files of Python and of installed packages.
_INSTALLED = tuple(f"{sysconfig.get_path(name)}/" for name in ("stdlib", "purelib", "platlib", "scripts"))
_PLAIN = (str, bytes, int, float, complex, type(None), type, types.ModuleType, types.CodeType, torch.dtype)
_OF_TORCH = (torch.nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)
_REGISTRIES = ("_parameters", "_buffers", "_modules")
_OF_IMPORT = ("__builtins__", "__loader__", "__spec__")  # pytest's loader leads to all tests
# The members of a class that its own code cannot replace.
_IS_LEAF, _GRADIENT = (vars(torch._C.TensorBase)[name].__get__ for name in ("is_leaf", "grad"))
_MODULE_OF = vars(type)["__module__"].__get__


class Walk:
    """Finds the names of tensors. Containers take turns, so that a large one leaves some of the budget to the others.

    visited: how many objects it has looked at.
    """

    def __init__(self) -> None:
        self.found: dict[int, Named] = {}
        self.visited = 0
        self._parts: deque[_Part] = deque()
        self._generators: set[int] = set()  # `_seen` keeps them alive
        self._seen: dict[tuple[int, str], Any] = {}  # a freed object would give its number to another one

    def add_frame(self, frame: types.FrameType) -> None:
        """Adds the variables of a frame."""
        code = frame.f_code
        space = frame.f_globals if code.co_name == "<module>" else None
        self.add_variables(_C.frame_variables(frame), Name("", "", code, code.co_filename, frame.f_lineno), space)

    def add_variables(self, variables: dict[str, Any], root: Name, space: dict[str, Any] | None = None) -> None:
        """Adds the variables of a frame, or of a module, whose dictionary is `space`. The name of `root` is empty."""
        for variable, value in list(itertools.islice(dict.items(variables), OBJECTS)):
            self.visited += 1
            if type(variable) is str and variable not in _OF_IMPORT and not issubclass(type(value), _PLAIN):
                name = dataclasses.replace(root, variable=variable)
                self._visit(value, _Owner(name, "", 0), "", self._slot_of(name, value, space), _DEPTH)

    def _slot_of(self, name: Name, value: Any, space: dict[str, Any] | None) -> tuple[object, ...]:
        """The slot of a variable."""
        if space is not None:
            return id(space), _item(0, name.variable)
        is_cell = name.code is not None and name.variable in (*name.code.co_cellvars, *name.code.co_freevars)
        return _cell(name.variable, value) if is_cell else (name.variable, self.visited)

    def run(self) -> None:
        """Follows the variables."""
        while self._parts and self.visited < OBJECTS:
            part = self._parts.popleft()
            children = list(itertools.islice(part.children, min(_TURN, OBJECTS - self.visited)))
            self.visited += len(children)
            if len(children) == _TURN:
                self._parts.append(part)
            for position, (key, child) in children:
                text = None if issubclass(type(child), _PLAIN) else part.text(position, key)
                if text is not None:
                    slot = _cell(key, child) if part.is_closure else (part.owner.number, text)
                    self._visit(child, part.owner, text, slot, part.depth)

    def _visit(self, value: Any, owner: _Owner, text: str, slot: tuple[object, ...], depth: int) -> None:
        is_tensor = issubclass(type(value), torch.Tensor)  # isinstance() would call a proxy's __class__
        # Again from another variable, as each of a tensor's names may be the one that its next value gets.
        key = id(value), owner.root.variable
        is_new = key not in self._seen and (is_tensor or depth > 0)
        try:
            for alias in dict.fromkeys(_C.alias_ids(value)) if is_tensor else ():
                name = dataclasses.replace(owner.root, path=owner.path + text, slot=slot)
                self.found.setdefault(alias, Named(weakref.ref(value), [])).names.append(name)
            if is_new:
                self._seen[key] = value
                frame = suspended_frame(value)
                if frame is not None and id(value) not in self._generators:
                    self._generators.add(id(value))
                    self.add_frame(frame)
                # Of a tensor's parts only tensors: a sharded tensor of torch_xla wraps another.
                below = _Owner(owner.root, owner.path + text, id(value))
                self._parts.extend(_parts_of(value, below, 0 if is_tensor else depth - 1))
        except Exception as error:  # the others still get their names
            _C.note_error(f"search for names: {type(error).__name__}: {error}")


class _Owner(NamedTuple):
    """An object to which a path leads.

    root: its variable.
    number: its id().
    """

    root: Name
    path: str
    number: int


class _Part:
    """A container whose children the walk reads in turns.

    depth: of its children.
    text: what a child's path adds to the owner's, from its position and its key; None to skip the child.
    """

    def __init__(
        self,
        container: Any,
        owner: _Owner,
        depth: int,
        text: Callable[[int, Any], str | None],
        is_closure: bool = False,
    ) -> None:
        self.owner, self.depth, self.text, self.is_closure = owner, depth, text, is_closure
        self.children = enumerate(_entries(container))


def _entries(container: Any) -> Iterable[tuple[Any, Any]]:
    """The keys and values of a dictionary, or the numbers and items of a list or tuple. Calls no code of its class."""
    kind = type(container)
    if issubclass(kind, dict):  # a copy, as other threads may change it
        return list(itertools.islice(dict.items(container), OBJECTS))
    return enumerate(list.__iter__(container) if issubclass(kind, list) else tuple.__iter__(container))


def _parts_of(value: Any, owner: _Owner, depth: int) -> Iterator[_Part]:
    """The containers of which an object consists."""
    kind = type(value)
    if issubclass(kind, dict | list):
        yield _Part(value, owner, depth, _item)
    elif issubclass(kind, tuple):
        # As a class defines it: getattr() would call code of its metaclass.
        fields = next((_MEMBERS(base)["_fields"] for base in _MRO(kind) if "_fields" in _MEMBERS(base)), None)
        yield _Part(value, owner, depth, functools.partial(_field, fields) if type(fields) is tuple else _item)
    elif kind is types.FunctionType:
        if value.__closure__:
            yield _Part(dict(_closure(value)), owner, depth, lambda _, variable: f"'s {variable}", is_closure=True)
    elif kind is types.MethodType:
        yield _Part((value.__self__,), owner, depth, lambda *_: "'s object")
    elif issubclass(kind, torch.Tensor):
        yield _Part({"grad": _GRADIENT(value) if _IS_LEAF(value) else None}, owner, depth, _attribute)
        yield from (_Part(space, owner, depth, _attribute) for space in attributes_of(value))
    else:
        yield from _attributes(value, owner, depth)


def _attributes(value: Any, owner: _Owner, depth: int) -> Iterator[_Part]:
    """The attributes of an object that is not of torch, or is a module, an optimizer or a scheduler."""
    kind = type(value)
    module = _MODULE_OF(kind)
    if type(module) is not str or (module.startswith(("torch.", "torch_xla")) and not issubclass(kind, _OF_TORCH)):
        return
    for space in attributes_of(value):
        if not issubclass(kind, torch.nn.Module):
            yield _Part(space, owner, depth, _attribute)
            continue
        for registry in (dict.get(space, key) for key in _REGISTRIES):
            if issubclass(type(registry), dict):
                yield _Part(registry, owner, depth, _attribute)
        yield _Part(space, owner, depth, _own_attribute)


def _cell(variable: str, value: Any) -> tuple[object, ...]:
    """The slot of a variable that functions share. A frame does not show its cell."""
    return "cell", variable, id(value)


def _closure(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
        with contextlib.suppress(ValueError):  # not assigned yet
            yield variable, cell.cell_contents


def _item(position: int, key: Any) -> str:
    return f"[{key!r}]" if _is_short(key) else f"[key {position}]"


def _field(fields: tuple[Any, ...], position: int, key: int) -> str:
    return _attribute(position, fields[position]) if position < len(fields) else f"[{position}]"


def _attribute(position: int, key: Any) -> str:
    return f".{key}" if _is_short(key) else f"[key {position}]"


def _own_attribute(position: int, key: Any) -> str | None:
    """Of a module, whose parameters, buffers and modules are separate parts."""
    return None if type(key) is str and key in _REGISTRIES else _attribute(position, key)


def _is_short(key: Any) -> bool:
    """Whether a key has a text of sensible length, which no code of the program makes."""
    return len(key) <= _LONGEST if type(key) is str else type(key) in (bool, int) and -(2**63) <= key < 2**63


def user_frames() -> Iterator[types.FrameType]:
    """The user's frames, the innermost of each thread first; this thread comes before all others."""
    others = sys._current_frames()
    others.pop(threading.get_ident(), None)
    # Not the frame of this generator, which would refer to itself and so keep the walk and its tensors.
    for top in (sys._getframe().f_back, *others.values()):
        frame: types.FrameType | None = top
        while frame is not None:
            if not is_internal(frame):
                yield frame
            frame = frame.f_back


def suspended_frame(value: Any) -> types.FrameType | None:
    """The frame of a user's generator or coroutine that waits; None if it runs or has ended, and for other objects."""
    for kind, prefix in _WITH_FRAMES:
        if kind is type(value):
            frame: types.FrameType | None = getattr(value, f"{prefix}_frame")
            is_running = getattr(value, f"{prefix}_running")
            return None if frame is None or is_running or is_internal(frame) else frame
    return None


_WITH_FRAMES = ((types.GeneratorType, "gi"), (types.CoroutineType, "cr"), (types.AsyncGeneratorType, "ag"))


_MRO, _MEMBERS = (vars(type)[name].__get__ for name in ("__mro__", "__dict__"))
_READS_A_SLOT = (types.GetSetDescriptorType, types.MemberDescriptorType)


def attributes_of(value: Any) -> list[dict[Any, Any]]:
    """The attributes of an object: its `__dict__`, and a copy of its slots. Calls no code of its class."""
    space: Any = None
    slots = {}
    for base in _MRO(type(value)):
        members = _MEMBERS(base)
        if space is None:
            space = members.get("__dict__")
        for name, member in list(members.items()) if "__slots__" in members else ():
            if type(member) is types.MemberDescriptorType:
                with contextlib.suppress(AttributeError):  # empty
                    slots[name] = member.__get__(value)
    found = [space.__get__(value)] if issubclass(type(space), _READS_A_SLOT) else []
    return [space for space in (*found, slots) if issubclass(type(space), dict)]
