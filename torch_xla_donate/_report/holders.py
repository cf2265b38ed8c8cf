"""Finds the holder of a buffer among Python's objects: a variable, an attribute or a graph of autograd."""

from __future__ import annotations

import contextlib
import dis
import functools
import gc
import sys
import threading
import types
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from torch_xla_donate import _C
from torch_xla_donate._frames import is_internal
from torch_xla_donate._locks import make_lock

UNKNOWN = "unknown holder"
_SEARCHED = 16  # buffers, or graphs; each needs several walks over all objects
_DEPTH = 6  # containers between a variable and a tensor
_REFERRERS = 32  # of one object
_SCANS = 256  # for referrers in a search; objects that refer to each other have countless paths
_NODES = 20000  # of all graphs of autograd
# Held during a search for names or holders. A search would find the lists of another one, and take them for holders.
searching = make_lock()


def holders_of(buffers: Sequence[int]) -> dict[int, str]:
    """The holder of each buffer, as far as Python can find it. Omits buffers with an unknown holder."""
    return _find(buffers, _tensors(), _Search()) if buffers else {}


def _tensors() -> list[torch.Tensor]:
    return [leaf for leaf in gc.get_objects() if _is_tensor(leaf)]


def _find(buffers: Sequence[int], tensors: list[torch.Tensor], search: _Search) -> dict[int, str]:
    wanted = set(buffers[:_SEARCHED])
    found: dict[int, str] = {}
    for tensor in tensors:
        buffer = _C.holds(tensor)
        if buffer in wanted and buffer not in found:
            name = search.name(tensor)
            if name is not None:
                found[buffer] = name
    missing = wanted - found.keys()
    for text, saved in _Graphs(tensors, search.name).saving(missing):
        found.update(dict.fromkeys(saved, text))
        missing -= saved
    return found


def other_holders(known: Mapping[int, int], name_of: Callable[[torch.Tensor], str | None]) -> dict[int, list[str]]:
    """The holders of each buffer beside those that are known: graphs of autograd, and what else refers to its tensors.

    Args:
        known: for each buffer the number of known references of Python to its tensors.
        name_of: the name of a tensor, if it is known.
    """
    tensors = _tensors()
    references, objects = Counter[int](), Counter[int]()
    for probe in [object()]:
        ours = sys.getrefcount(probe)  # of a list, a loop and this function
    for tensor in tensors:
        buffer = _C.holds(tensor)
        references[buffer] += sys.getrefcount(tensor) - ours
        objects[buffer] += 1
    search = _Search()
    graphs = _Graphs(tensors, lambda tensor: name_of(tensor) or search.name(tensor))
    found: dict[int, list[str]] = {buffer: [] for buffer in known}
    for text, saved in graphs.saving(set(known)):
        for buffer in saved:
            found[buffer].append(text)
    hidden = []
    for buffer, texts in found.items():
        # A graph refers to a tensor only if Python does not.
        of_graphs = objects[buffer] - min(known[buffer], 1) if texts else 0
        is_all = references[buffer] <= known[buffer] + of_graphs and not (texts and graphs.are_more)
        if not is_all or not (known[buffer] or texts):
            hidden.append(buffer)
    names = _find([buffer for buffer in hidden if not known[buffer]], tensors, search)
    for buffer in hidden:
        text = names.get(buffer, UNKNOWN)
        found[buffer].append(UNKNOWN if text in found[buffer] else text)
    return found


def _is_tensor(leaf: object) -> bool:
    # isinstance() would call a proxy's __class__.
    return issubclass(type(leaf), torch.Tensor) and leaf.device.type == "xla"  # type: ignore[attr-defined, no-any-return]


class _Graphs:
    """The graphs of autograd of some tensors, as far as Python can read them.

    are_more: whether a bound has ended the search.
    """

    def __init__(self, tensors: list[torch.Tensor], name_of: Callable[[torch.Tensor], str | None]) -> None:
        self._tensors = tensors
        self._name_of = name_of
        self._nodes_left = _NODES
        self.are_more = False

    def saving(self, buffers: set[int]) -> Iterator[tuple[str, set[int]]]:
        """The graphs that save some of these buffers, until all are taken out of the set."""
        named = 0
        for tensor in self._tensors:
            if not buffers:
                return
            if tensor.grad_fn is None:
                continue
            if named == _SEARCHED or self._nodes_left == 0:
                self.are_more = True
                return
            # A result inside another graph does not keep that graph alive.
            saved = {_C.holds(leaf) for leaf in self._saved(tensor.grad_fn)} & buffers
            name = self._name_of(tensor) if saved else None
            if name is not None:
                named += 1
                yield f"grad_fn of {name}", saved

    def _saved(self, node: Any) -> Iterator[torch.Tensor]:
        """The tensors that a graph saves."""
        seen: set[Any] = set()
        open_nodes = [node]
        while open_nodes and self._nodes_left > 0:
            node = open_nodes.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            self._nodes_left -= 1
            open_nodes += [following for following, _ in node.next_functions]
            names = [name for name in dir(node) if name.startswith("_saved_")] + ["variable", "saved_tensors"]
            for name in names:
                try:
                    value = getattr(node, name, None)
                except RuntimeError:  # the backward pass has freed it
                    continue
                for leaf in value if isinstance(value, list | tuple) else (value,):
                    if isinstance(leaf, torch.Tensor) and leaf.device.type == "xla":
                        yield leaf


class _Search:
    """Names objects by the variables that lead to them."""

    def __init__(self) -> None:
        self._scans = 0
        self._variables: dict[int, str] = {}
        self._values: list[Any] = []  # another thread could drop one, and a new object could get its number
        for frame in user_frames():
            for name, value in _C.frame_variables(frame).items():
                self._add(value, _variable(name, frame.f_code, frame.f_lineno))
        for module in user_modules():
            for name, value in list(vars(module).items()):
                self._add(value, f"variable {name!r} of module {vars(module).get('__name__')}")

    def _add(self, value: Any, name: str) -> None:
        if self._variables.setdefault(id(value), name) is name:
            self._values.append(value)

    def name(self, thing: Any, depth: int = _DEPTH, path: tuple[int, ...] = ()) -> str | None:
        """The path from a variable to the object; None if it has more than `depth` steps."""
        name = self._variables.get(id(thing))
        if name is not None or depth == 0 or self._scans == _SCANS:
            return name
        self._scans += 1
        seen = (*path, id(self._values))
        referrers = [r for r in gc.get_referrers(thing) if id(r) not in seen and not _is_ours(r)]
        for referrer in referrers[:_REFERRERS]:
            frame = suspended_frame(referrer)
            if frame is not None:
                for variable, value in _C.frame_variables(frame).items():
                    if value is thing:
                        return _variable(variable, frame.f_code, frame.f_lineno)
                continue
            step = _step(referrer, thing)
            if step is None:
                continue
            owner, text = step
            outer = self.name(owner, depth - 1, (*path, id(thing), id(referrers), id(owner)))
            if outer is not None:
                return f"{text} of {outer}"
        return None


def user_frames() -> Iterator[types.FrameType]:
    """The user's frames, the innermost of each thread first; this thread comes before all others."""
    others = sys._current_frames()
    others.pop(threading.get_ident(), None)
    for top in (sys._getframe(), *others.values()):
        frame: types.FrameType | None = top
        while frame is not None:
            if not is_internal(frame):
                yield frame
            frame = frame.f_back


def user_modules() -> Iterator[types.ModuleType]:
    """The imported modules, without those of torch, torch_xla and this package."""
    for module in list(sys.modules.values()):
        if type(module) is types.ModuleType:
            name = vars(module).get("__name__")
            if type(name) is str and name.partition(".")[0] not in ("torch", "torch_xla", "torch_xla_donate"):
                yield module


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


def static_member(kind: type, name: str) -> Any:
    """A member of a class as it is defined, or None. Calls no code of the class or of its metaclass."""
    return next((_MEMBERS(base)[name] for base in _MRO(kind) if name in _MEMBERS(base)), None)


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


def _is_ours(referrer: object) -> bool:
    return isinstance(referrer, types.FrameType) and is_internal(referrer)


def _variable(name: str, code: types.CodeType, line: int) -> str:
    """The text for a variable, with the last line that assigned it."""
    return f"variable {name!r} at {code.co_filename.rpartition('/')[2]}:{assigned_at(name, code, line)}"


@functools.lru_cache(maxsize=256)
def assigned_at(name: str, code: types.CodeType, line: int) -> int:
    """The last line up to this one that assigns a variable; a later one, or the function's, if there is none."""
    lines = list(stores_of(name, code))
    before = [number for number in lines if number <= line]
    return max(before, default=max(lines, default=code.co_firstlineno))


def stores_of(name: str, code: types.CodeType, kinds: tuple[str, ...] = ("STORE_",)) -> Iterator[int]:
    """The lines of the instructions of these kinds that store a variable, or an item or attribute on its line."""
    current = code.co_firstlineno
    line_of_load = 0
    for instruction in dis.get_instructions(code):
        current = instruction.starts_line or current
        if instruction.argval == name and instruction.opname.startswith("LOAD_"):
            line_of_load = current
        is_part = instruction.opname in kinds and current == line_of_load
        if is_part or (instruction.argval == name and instruction.opname.startswith(kinds)):
            yield current


def _step(referrer: Any, thing: Any) -> tuple[Any, str] | None:
    """The owner of a referrer, and the thing's place in it."""
    if type(referrer) in (list, tuple):
        return referrer, f"item {next(i for i, item in enumerate(referrer) if item is thing)}"
    kind = type(referrer)  # isinstance() would call a proxy's __class__
    if issubclass(kind, dict):
        key = _key_of(thing, referrer)
        if key is None:
            return None
        for owner in gc.get_referrers(referrer):
            if any(space is referrer for space in attributes_of(owner)):
                return owner, f"attribute {key}"
        for registry in gc.get_referrers(referrer):  # a module keeps its parameters in a dictionary of its __dict__
            if issubclass(type(registry), dict) and any(
                dict.get(registry, name) is referrer for name in ("_parameters", "_buffers", "_modules")
            ):
                for module in gc.get_referrers(registry):
                    if issubclass(type(module), torch.nn.Module):
                        return module, f"attribute {key}"
            if issubclass(type(registry), torch.nn.Module):
                return registry, f"attribute {key}"
        return referrer, f"item {key}"
    if kind is types.CellType:
        function = next(_closures(referrer), None)
        if function is None:
            return None
        name = function.__code__.co_freevars[list(function.__closure__ or ()).index(referrer)]
        return function, f"{name!r} in the closure"
    if kind in (types.FrameType, types.FunctionType, types.ModuleType, types.GeneratorType):
        return None
    for space in attributes_of(referrer):
        key = _key_of(thing, space)
        if key is not None:
            return referrer, f"attribute {key}"
    return None


def _key_of(thing: Any, space: dict[Any, Any]) -> str | None:
    """The text of the key of a value."""
    for key, value in list(dict.items(space)):
        if value is thing:
            return repr(key) if type(key) in (str, int) else f"of key {type(key).__name__}"
    return None


def _closures(cell: types.CellType) -> Iterator[types.FunctionType]:
    for closure in gc.get_referrers(cell):
        if type(closure) is tuple:
            for function in gc.get_referrers(closure):
                if isinstance(function, types.FunctionType) and function.__closure__ is closure:
                    yield function
