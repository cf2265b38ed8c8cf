"""Random programs that call a function of a state several times, as source for one device and one way of donating.

A program is abstract: lists of operations, each a name and three numbers. `render` writes it as straight-line Python.
While it writes, it runs each line on the CPU, so that the numbers choose among what is there by metadata, and so that
the expected value of each tensor is known. It also knows which tensors a donation may consume.

Values are small integers in every dtype, which all devices compute exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st

Operation = tuple[str, int, int, int]
Operations = tuple[Operation, ...]

MODES = ("lazy", "pure", "openxla", "marks", "auto", "stock", "stock_lazy", "stock_openxla", "stock_marks")
# torch.compile takes ten times as long as the others to trace a function.
TURNS = ("lazy", "pure", "marks", "auto", "lazy", "pure", "marks", "auto", "lazy", "pure", "marks", "auto", "openxla")
FORMS = ("arguments", "tuple", "dict", "module", "nested")
SHAPES = ((3, 3), (4,), (2, 4), (4, 4), (8,), (2, 3, 2))
DTYPES = (torch.float32, torch.float32, torch.int32, torch.bfloat16)
MODULUS = 13  # products of two such values are exact in bfloat16


class Program(NamedTuple):
    """An abstract program. `render` gives every combination of these fields a meaning."""

    leaves: Operations  # of the state
    body: Operations  # of the function
    results: Operations  # which local becomes which leaf of the next state
    extras: Operations  # what else the function returns
    before: Operations  # what the caller does before the donation
    between: Operations  # and between the donation and the step
    after: Operations
    form: int
    donated: int  # bits: which leaves, or arguments
    writes: int  # odd: the function and the caller write to the state in place
    calls: int


VIEWS = ("transpose", "row", "tail", "head", "narrow", "diagonal", "unsqueeze", "view_as", "reshape", "expand")
WRITES = ("assign_row", "assign_slice", "add_in_place", "fill_in_place", "copy_in_place", "copy_from", "index_copy")
BODY = (
    *("update", "update", "add", "mul", "scale", "scale", "matmul", "flip", "concatenate", "total", "where"),
    *("clone", "clone", "cast", "detach", "data", "batch", "closure", "factory", "factory"),
    *VIEWS,
    *("transpose", "row", *WRITES),
)
CALLER = ("hold", "hold", "hold_view", "hold_view", "hold_view_of_held", "hold_alias", "hold_clone", "hold_result")
BEFORE = (*CALLER, "write", "replace", "renew", "tie", "sync", "sync", "read", "forget", "shard")
AFTER = ("read", "read", "read", "hold", "hold_view", "write", "sync", "forget")


NUMBERS = st.integers(0, 23)


def _some(names: Sequence[str], least: int, most: int) -> st.SearchStrategy[Operations]:
    operations = st.lists(st.tuples(st.sampled_from(names), NUMBERS, NUMBERS, NUMBERS), min_size=least, max_size=most)
    return operations.map(tuple)  # type: ignore[arg-type]


PROGRAMS = st.builds(
    Program,
    leaves=_some(("new", "like", "like", "like", "same", "detach", "data", "view"), 1, 4).map(
        lambda leaves: (("new", *leaves[0][1:]), *leaves[1:])
    ),
    body=_some(BODY, 1, 10),
    results=_some(("pick",), 4, 4),
    extras=_some(("pick",), 0, 3),
    before=_some(BEFORE, 0, 3),
    between=_some(CALLER, 0, 2),
    after=_some(AFTER, 0, 3),
    form=st.integers(0, len(FORMS) - 1),
    donated=st.one_of(st.just(31), st.integers(1, 31)),
    writes=st.sampled_from((0, 0, 1)),
    calls=st.sampled_from((2, 3, 4, 5, 6, 7, 8)),
)


def stock_of(mode: str) -> str:
    """The mode for torch_xla without this package."""
    return {"pure": "stock_lazy", "auto": "stock"}.get(mode, f"stock_{mode}")


UP_TO_DATE = "+"  # ends a mode in which the function gives its tensors their new values, as a step that donates does
BRING_UP_TO_DATE = (
    "    for t in tuple(locals().values()): torch.is_tensor(t) and torch._is_functional_tensor(t) and torch._sync(t)"
)


class Expected(NamedTuple):
    """The expected result of a check."""

    name: str
    value: tuple[str, Any]
    may_raise: bool  # a donation may have consumed the tensor


class Rendered(NamedTuple):
    """A program's source, whose `check(i, tensor)` stands for the i-th of `expected`."""

    source: str
    expected: list[Expected]
    calls: dict[int, int]  # the number of the call, by the line of the source

    def alone(self, sharded: bool) -> str:
        """The source as a program that needs nothing else and ends with an AssertionError at a wrong value."""
        source = self.source
        for number in range(len(self.expected) - 1, -1, -1):
            name, (dtype, value), may_raise = self.expected[number]
            known = f"{value!r}, {dtype}" + ", may_raise=True" * may_raise
            source = source.replace(f"check({number}, {name})", f'check("{name}", {name}, {known})')
        return PRELUDE + (SPMD + SHARD if sharded else "") + CHECK + source


PRELUDE = """\
import torch
import torch_xla
import torch_xla.distributed.spmd

import torch_xla_donate
from torch_xla_donate import compile, donate_buffer, set_auto_donate


def make(shape, dtype, first):
    count = torch.Size(shape).numel()
    return ((torch.arange(count) + first) % 13).reshape(shape).to(dtype).to("xla")

"""
SPMD = "torch_xla.runtime.use_spmd()\n"
SHARD = """

def shard(tensor, spec):
    torch_xla.core.xla_model.wait_device_ops()  # mark_sharding raises while the tensor's step runs (torch_xla 2.9.0)
    mesh = torch_xla.distributed.spmd.Mesh([0, 1, 2, 3], (4,), ("x",))
    torch_xla.distributed.spmd.mark_sharding(tensor, mesh, spec)

"""
CHECK = """
def check(name, tensor, value, dtype, may_raise=False):
    try:
        torch_xla_donate.is_donated(tensor)
        found = tensor.cpu().tolist()
    except torch_xla_donate.DonatedBufferError:
        assert may_raise, f"{name} is lost"
    else:
        assert (tensor.dtype, found) == (dtype, value), f"{name} is {found}, not {value}"


"""

CALL_TEXT = {"lazy": "", "pure": ", pure=True", "openxla": ', backend="openxla"'}


def value_of(tensor: torch.Tensor) -> tuple[str, Any]:
    """The subject of a check."""
    return str(tensor.dtype), tensor.cpu().tolist()


def _small(text: str) -> str:
    return f"torch.remainder({text}, {MODULUS})"


#: Of a tensor, one of its shape and dtype, and two numbers: a new value.
TEXTS: dict[str, Callable[[str, str | None, int, int], str]] = {
    "add": lambda x, other, b, c: _small(f"{x} + {other}"),
    "mul": lambda x, other, b, c: _small(f"{x} * {other}"),
    "where": lambda x, other, b, c: f"torch.where({x} > {c % MODULUS}, {x}, {other})",
    "scale": lambda x, other, b, c: _small(f"{x} * {1 + c % 5} + {b % MODULUS}"),
    "total": lambda x, other, b, c: _small(f"{x}.sum()"),
    "clone": lambda x, other, b, c: f"{x}.clone()",
    "cast": lambda x, other, b, c: f"{x}.to({DTYPES[b % len(DTYPES)]})",
    "detach": lambda x, other, b, c: f"{x}.detach()",
    "data": lambda x, other, b, c: f"{x}.data",
}


#: Of a shape, a dtype and a number: a new tensor, made on the device of `x` from no other.
FACTORIES: tuple[Callable[[tuple[int, ...], torch.dtype, int], str], ...] = (
    lambda shape, dtype, c: f"torch.zeros({shape}, dtype={dtype}, device=x.device)",
    lambda shape, dtype, c: f"torch.full({shape}, {c % MODULUS}, dtype={dtype}, device=x.device)",
    lambda shape, dtype, c: f"torch.empty({shape}, dtype={dtype}, device=x.device).fill_({c % MODULUS})",
    lambda shape, dtype, c: (
        f"torch.arange({torch.Size(shape).numel()}, device=x.device).reshape({shape}).remainder({MODULUS}).to({dtype})"
    ),
    lambda shape, dtype, c: f"torch.full({shape}, {c % MODULUS}, dtype={dtype}).to(x.device)",
)


class _Writer:
    """Names tensors, writes lines, and runs each on the CPU."""

    def __init__(self, writes: bool) -> None:
        self.lines: list[str] = []
        self.writes = writes
        self.names: dict[str, torch.Tensor] = {}
        self.alive: list[torch.Tensor] = []  # so that no two storages ever have one address
        self.copied: set[int] = set()  # storages of which a device may make a view and another one a copy
        self.count = 0

    def line(self, text: str) -> None:
        self.lines.append(text)

    def run(self, text: str) -> torch.Tensor:
        found = eval(text, {"torch": torch}, dict(self.names))
        self.alive.append(found)
        return found  # type: ignore[no-any-return]

    def name(self, number: int) -> str:
        names = list(self.names)
        return names[number % len(names)]

    def alike(self, like: torch.Tensor, number: int, names: Iterable[str] | None = None) -> str | None:
        found = [
            name
            for name in (self.names if names is None else names)
            if self.names[name].shape == like.shape and self.names[name].dtype == like.dtype
        ]
        return found[number % len(found)] if found else None

    def storage(self, tensor: torch.Tensor) -> int:
        return tensor.untyped_storage().data_ptr()

    def elsewhere(self, like: torch.Tensor, number: int, names: Iterable[str]) -> str | None:
        """A tensor of this shape and dtype in other memory."""
        apart = [name for name in names if self.storage(self.names[name]) != self.storage(like)]
        return self.alike(like, number, apart)

    def view(self, kind: str, name: str, a: int, b: int) -> str | None:
        """The text of a view; None where there is none of that kind."""
        x = self.names[name]
        if kind == "transpose" and x.dim() >= 2:
            return f"{name}.t()" if x.dim() == 2 else f"{name}.transpose({a % x.dim()}, {b % x.dim()})"
        if kind == "row" and x.dim() and x.shape[0]:
            return f"{name}[{a % x.shape[0]}]"
        if kind == "tail" and x.dim() and x.shape[0] > 1:
            return f"{name}[{1 + a % (x.shape[0] - 1)}:]"
        if kind == "head" and x.dim() and x.shape[-1] > 1:
            return f"{name}[..., :{1 + a % (x.shape[-1] - 1)}]"
        if kind == "narrow" and x.dim() and x.shape[-1] > 1:
            return f"{name}.narrow(-1, {a % (x.shape[-1] - 1)}, 2)"
        if kind == "diagonal" and x.dim() == 2:  # torch_xla is wrong for three dimensions
            return f"{name}.diagonal()"
        if kind == "unsqueeze" and x.dim() < 3:
            return f"{name}.unsqueeze({a % (x.dim() + 1)})"
        if kind == "view_as":
            return f"{name}.view_as({name})"
        if kind == "reshape" and x.dim() and x.numel():
            shape = (-1,) if a % 2 or x.shape[0] % 2 else (2, -1)
            # Tensors on the device are contiguous, so that it makes a view where the CPU may have to copy. A function
            # gets the strides with each call, so there it makes a view of a copy.
            if x.dim() > 1 and isinstance(self, _Body):
                return f"{name}.clone().reshape({shape})"
            return f"{name}.reshape({shape})" if self.storage(x.reshape(shape)) == self.storage(x) else None
        # It copies on the CPU and is a view on the device, so a later write makes them differ.
        if kind == "expand" and x.dim() < 3 and not (self.writes and self.storage(x) in self.written_storages()):
            self.copied.add(self.storage(x))
            return f"{name}.unsqueeze(0).expand({(2, *x.shape)})"
        return None

    def written_storages(self) -> set[int]:
        """Storages that a later operation may write to."""
        raise NotImplementedError


class _Body(_Writer):
    """The function."""

    def __init__(self, program: Program, leaves: Sequence[torch.Tensor], batch: torch.Tensor, writes: bool) -> None:
        super().__init__(writes)
        # A call on the CPU must not change the caller's tensors, and ties among the leaves matter.
        storages: dict[int, torch.Tensor] = {}
        self.leaf_names = [f"s{i}" for i in range(len(leaves))]
        for name, leaf in zip(self.leaf_names, leaves):
            key = self.storage(leaf)
            if key not in storages:
                bare = torch.empty(0, dtype=leaf.dtype).set_(leaf.untyped_storage())  # type: ignore[call-overload]
                storages[key] = bare.clone()
            self.names[name] = storages[key].as_strided(leaf.shape, leaf.stride(), leaf.storage_offset())
        self.names["x"] = batch.clone()
        batch_storage = self.storage(self.names["x"])
        self.alive.extend(self.names.values())
        self.given = {self.storage(tensor) for tensor in self.alive}
        self.closure = batch.clone()
        self.made: list[str] = []
        self.written: set[int] = set()
        self.updates = False  # of what the caller has given
        for operation in program.body:
            self.operation(*operation)
        everything = list(self.names)
        self.results: list[str] = []
        for i, leaf in enumerate(self.leaf_names):
            numbers = program.results[i][1:] if i < len(program.results) else (0, 0, 0)
            # The batch is not donated, and must not meet itself as a part of the state that is.
            banned = {batch_storage, *(self.copied if writes else ())}
            allowed = [name for name in everything if self.storage(self.names[name]) not in banned]
            found = self.alike(self.names[leaf], numbers[0], allowed)
            result = leaf if found is None or numbers[1] % 12 == 0 else found
            if numbers[2] % 4:  # most results are computed from their leaf, and can take its buffer
                self.put(_small(f"{leaf} + {result}"))
                result = next(reversed(self.names))
            self.results.append(result)
        self.extras = [self.name(a) for _, a, _, _ in program.extras]

    def written_storages(self) -> set[int]:
        return self.written | self.given

    def put(self, text: str | None) -> None:
        if text is None:
            return
        name = f"v{self.count}"
        self.count += 1
        self.names[name] = self.run(text)
        self.line(f"{name} = {text}")

    def operation(self, kind: str, a: int, b: int, c: int) -> None:
        name = self.name(a)
        x = self.names[name]
        other = self.alike(x, b)
        if kind == "update":
            name = self.leaf_names[a % len(self.leaf_names)]
            self.put(_small(f"{name} - 2 * {self.alike(self.names[name], b)}"))
        elif kind in TEXTS:
            self.put(TEXTS[kind](name, other, b, c))
        elif kind == "matmul":
            squares = [n for n, t in self.names.items() if t.dim() == 2 and len(set(t.shape)) == 1]
            squares = [n for n in squares if self.names[n].dtype == torch.float32]
            if squares:
                same = [n for n in squares if self.names[n].shape == self.names[squares[a % len(squares)]].shape]
                self.put(_small(f"{squares[a % len(squares)]} @ {same[b % len(same)]}"))
        elif kind == "flip" and x.dim():
            self.put(f"{name}.flip(0)")
        elif kind == "concatenate" and x.dim() and x.numel() <= 32:
            self.put(f"torch.cat(({name}, {other}))")
        elif kind == "factory":
            self.put(FACTORIES[b % len(FACTORIES)](tuple(x.shape), x.dtype, c))
            self.write(WRITES[a % len(WRITES)], next(reversed(self.names)), b, c)
        elif kind == "batch":
            same = self.alike(self.names["x"], b)
            self.put(_small(f"{same} + x"))
        elif kind == "closure":
            self.names["k"] = self.closure
            text = _small(f"{self.alike(self.closure, b)} + k")
            self.put(text)
            del self.names["k"]
        elif kind in VIEWS:
            self.put(self.view(kind, name, b, c))
        elif kind in WRITES:
            self.write(kind, name, b, c)

    def write(self, kind: str, name: str, b: int, c: int) -> None:
        x = self.names[name]
        storage = self.storage(x)
        given = storage in self.given
        if storage in self.copied or (given and not self.writes) or name == "x":
            return
        text = write_text(kind, name, x, b, c, self.elsewhere(x, c, self.names))
        if text is not None:
            self.written.add(storage)
            self.updates = self.updates or given
            self.line(text)


def write_text(kind: str, name: str, x: torch.Tensor, b: int, c: int, source: str | None) -> str | None:
    """A write in place. Its operands are computed first, as tensors that share memory must not meet in one.

    source: a tensor of the same shape and dtype in other memory; None if there is none.
    """
    if kind == "copy_from":
        return source and f"{name}.copy_({source})"
    if kind == "add_in_place":
        return f"{name}.copy_({_small(f'{name} + {1 + c % 5}')})"
    if kind == "fill_in_place":
        return f"{name}.fill_({c % MODULUS})"
    if kind == "copy_in_place":
        return f"{name}.add_({_small(f'{name} * 2')}).remainder_({MODULUS})"
    if not x.dim() or not x.shape[0]:
        return None
    row = b % x.shape[0]
    if kind == "assign_row":
        return f"{name}[{row}] = {c % MODULUS}"
    if kind == "assign_slice":
        return f"{name}[{row}] = {_small(f'{name}[{(row + c) % x.shape[0]}] + 1')}"
    if kind == "index_copy":
        at = f"torch.tensor([{row}], device={name}.device)"
        return f"{name}.index_copy_(0, {at}, {_small(f'{name}[:1] + {c}')})"
    return None


class _Caller(_Writer):
    """The program around the function."""

    def __init__(self, program: Program, mode: str, stop: int | None, sharded: bool) -> None:
        # A pure function refuses to write to its arguments, and its results share nothing: writes would differ.
        super().__init__(bool(program.writes % 2) and mode != "pure")
        self.program, self.mode, self.sharded = program, mode.removesuffix(UP_TO_DATE), sharded
        self.is_up_to_date = mode.endswith(UP_TO_DATE)
        self.form = FORMS[program.form % len(FORMS)]
        self.expected: list[Expected] = []
        self.call_lines: dict[int, int] = {}
        # The donation after which a variable was made: what the caller holds, and the others.
        self.held: dict[str, int] = {}
        self.moments: dict[str, int] = {}
        self.donations: list[set[int]] = []  # storages that each has consumed
        self.leaves: list[str] = []
        self.ties: dict[int, torch.Tensor] = {}  # of a tensor that is `detach()` or `data` of another leaf: that leaf
        for operation in program.leaves:
            self.leaf(*operation)
        first = self.names[self.leaves[0]]
        self.batch = f"make({tuple(first.shape)}, {first.dtype}, %d)"
        self.put("x", self.batch % 5)
        self.put("k", self.batch % 3)
        self.body = _Body(program, [self.names[leaf] for leaf in self.leaves], self.names["x"], self.writes)
        self.define()
        self.line("torch_xla.sync()")
        calls = max(1, program.calls)
        for call in range(calls if stop is None else min(stop, calls)):
            self.line(f"# call {call}")
            self.section(program.before, call)
            self.call(call)
            self.section(program.after, call)
        if stop is not None and stop < calls:
            self.line(f"# call {stop}")
            self.section(program.before, stop)
            self.up_to_the_call(stop)
        elif program.donated % 2:
            self.line("torch_xla.sync()")
        for name in [*self.leaves, *self.held, "x", "k"]:
            self.check(name)

    def written_storages(self) -> set[int]:
        return {self.storage(tensor) for tensor in self.alive}

    def source(self) -> str:
        lines = self.lines
        if self.mode == "auto":
            lines = ["set_auto_donate(True)", *lines]
        return "\n".join(lines) + "\n"

    # --- variables ---

    def put(self, name: str, text: str) -> None:
        source = self.names.get(text.partition(".")[0])  # before `name` means another tensor
        if text.startswith("make("):
            tensor = eval(text, {"torch": torch, "make": _make_on_cpu})
            self.alive.append(tensor)
        else:
            tensor = self.run(text)
        self.names[name] = tensor
        if source is not None and text.endswith((".detach()", ".data")):
            self.ties[id(tensor)] = source
        made = self.moments if name in self.leaves or name in ("x", "k") else self.held
        made[name] = len(self.donations)
        self.line(f"{name} = {text}")

    def may_raise(self, name: str) -> bool:
        made = self.moments[name] if name in self.moments else self.held[name]
        storage = self.storage(self.names[name])
        return any(storage in consumed for consumed in self.donations[made:])

    def check(self, name: str) -> None:
        self.line(f"check({len(self.expected)}, {name})")
        self.expected.append(Expected(name, value_of(self.names[name]), self.may_raise(name)))

    def hold(self, text: str | None) -> None:
        if text is not None:
            name = f"h{self.count}"
            self.count += 1
            self.put(name, text)

    # --- the state ---

    def leaf(self, kind: str, a: int, b: int, c: int) -> None:
        name = f"s{len(self.leaves)}"
        text = None
        if kind == "like":
            first = self.names[self.leaves[0]]
            text = f"make({tuple(first.shape)}, {first.dtype}, {c})"
        elif kind in ("same", "detach", "data", "view"):
            other = self.leaves[a % len(self.leaves)]
            if kind == "same":
                text = other
            elif kind == "view":
                text = self.view(VIEWS[b % 8], other, a, c)
            else:
                text = f"{other}.detach()" if kind == "detach" else f"{other}.data"
        if text is None:
            text = f"make({SHAPES[a % len(SHAPES)]}, {DTYPES[b % len(DTYPES)]}, {c})"
        self.leaves.append(name)
        self.put(name, text)

    def define(self) -> None:
        """The function, and what donates."""
        body = self.body
        names = self.leaves
        returned = ", ".join(body.results) + ","
        structure = f"({returned})"
        taken: list[str] = []
        if self.form == "arguments":
            head = f"def f({', '.join(names)}, x):"
        elif self.form == "tuple":
            head = "def f(state, x):"
            taken = [f"{', '.join(names)}, = state"]
        elif self.form == "dict":
            head = "def f(state, x):"
            taken = [f'{name} = state["{name}"]' for name in names]
            structure = "{" + ", ".join(f'"{name}": {result}' for name, result in zip(names, body.results)) + "}"
        elif self.form == "nested":
            head = "def f(state, x):"
            taken = [f'{names[0]}, rest = state["first"], state["rest"]']
            taken += [f"{name} = rest[{i}]" for i, name in enumerate(names[1:])]
            rest = "".join(f"{result}, " for result in body.results[1:])
            structure = f'{{"first": {body.results[0]}, "rest": [{rest}]}}'
        else:
            self.line("class State(torch.nn.Module):")
            self.line(f"    def __init__(self, {', '.join(names)}):")
            self.line("        super().__init__()")
            for name in names:
                self.line(f'        self.register_buffer("{name}", {name})')
            head = "def f(state, x):"
            taken = [f"{name} = state.{name}" for name in names]
        if self.mode == "stock_openxla":
            self.line('@torch.compile(backend="openxla")')
        elif self.mode == "stock_lazy":
            self.line("@torch_xla.compile")
        elif self.mode in CALL_TEXT:
            self.line(f"@compile(donate_argnums={self.donated_arguments()}{CALL_TEXT[self.mode]})")
        self.line(head)
        for text in [*taken, *body.lines]:
            self.line(f"    {text}")
        extras = "".join(f"{name}, " for name in body.extras)
        if self.is_up_to_date:
            self.line(BRING_UP_TO_DATE)
        self.line(f"    return {structure}, ({extras})")
        # On the CPU the function has its leaves as arguments, whatever the form.
        text = f"def f({', '.join(names)}, x, k):\n"
        text += "".join(f"    {line}\n" for line in body.lines)
        text += f"    return ({returned}), ({extras})\n"
        scope: dict[str, Any] = {"torch": torch}
        exec(text, scope)
        self.function: Callable[..., Any] = scope["f"]

    def donated_arguments(self) -> tuple[int, ...]:
        if self.form == "arguments":
            found = tuple(i for i in range(len(self.leaves)) if self.program.donated >> i & 1)
            return found or (0,)
        return (0,)

    def donated_leaves(self) -> list[str]:
        if self.mode == "marks":
            found = [name for i, name in enumerate(self.leaves) if self.program.donated >> i & 1]
            return found or self.leaves[:1]
        if self.mode in CALL_TEXT:
            return [self.leaves[i] for i in self.donated_arguments()] if self.form == "arguments" else self.leaves
        return []

    def up_to_the_call(self, call: int) -> None:
        if self.program.writes // 2 % 2 == 0 and call % 2:
            self.put("x", self.batch % (call + 1))
        if self.mode == "openxla":
            # torch.compile reads the base of a view, also of one that has kept its value when the base was donated.
            for leaf in self.leaves:
                x = self.names[leaf]
                if x._is_view() and any(self.storage(x) in consumed for consumed in self.donations):
                    self.put(leaf, f"{leaf}.clone()")
        if self.mode in ("marks", "stock_marks"):
            self.line("torch_xla.sync()")

    def call(self, call: int) -> None:
        self.up_to_the_call(call)
        donated = self.donated_leaves()
        if self.mode == "marks":
            donated = [name for name in donated if self.storage(self.names[name]) not in self.handed_on()]
        consumed = {self.storage(self.names[name]) for name in donated}
        if self.mode == "marks" and donated:
            self.call_lines[len(self.lines) + 1] = call
            self.line(f"donate_buffer([{', '.join(donated)}])")
            self.donations.append(consumed)
        self.section(self.program.between, call)
        if self.mode != "marks":
            self.donations.append(consumed)
        given = {name: self.names[name] for name in self.leaves}
        versions = {name: tensor._version for name, tensor in given.items()}
        results, extras = self.function(*given.values(), self.names["x"], self.names["k"])
        # An unchanged result has not been consumed, unless a donated view had another buffer on the device.
        if self.mode != "marks":
            back = {id(tensor) for tensor in (*results, *extras)}
            here = {id(tensor) for tensor in given.values()}
            kept = [
                name
                for name in donated
                if given[name]._version == versions[name]
                # A result that has taken the place of the other leaf has a separate buffer.
                and (id(given[name]) in back or id(self.ties.get(id(given[name]))) in here)
            ]
            for name in kept:
                storage = self.storage(given[name])
                group = [other for other in donated if self.storage(given[other]) == storage]
                # A view of another form has another buffer on the device, whatever it is a view of.
                forms = {(given[other].shape, given[other].stride()) for other in group}
                returned = {(given[other].shape, given[other].stride()) for other in group if id(given[other]) in back}
                if set(group) <= set(kept) and forms == returned:
                    consumed.discard(storage)
        self.alive.extend([*results, *extras])
        names = self.leaves
        extra_names = [f"e{call}_{i}" for i in range(len(extras))]
        unpacked = "".join(f"{name}, " for name in extra_names)
        target = f"({unpacked})" if extra_names else "_"
        self.call_lines[len(self.lines) + 1] = call
        listed = "".join(f"{name}, " for name in names)
        if self.form == "arguments":
            self.line(f"({listed}), {target} = f({listed}x)")
        elif self.form == "tuple":
            self.line(f"({listed}), {target} = f(({listed}), x)")
        elif self.form == "dict":
            argument = ", ".join(f'"{name}": {name}' for name in names)
            self.line(f"new, {target} = f({{{argument}}}, x)")
            for name in names:
                self.line(f'{name} = new["{name}"]')
            self.line("del new")
        elif self.form == "nested":
            self.line(f'new, {target} = f({{"first": {names[0]}, "rest": [{", ".join(names[1:])}]}}, x)')
            self.line(f'{names[0]} = new["first"]')
            for i, name in enumerate(names[1:]):
                self.line(f'{name} = new["rest"][{i}]')
            self.line("del new")
        else:
            if call == 0 or self.program.calls % 2:
                self.line(f"state = State({', '.join(names)})")
            else:
                for name in names:
                    self.line(f"state.{name} = {name}")
            self.call_lines[len(self.lines) + 1] = call
            self.line(f"({listed}), {target} = f(state, x)")
        if self.mode not in (*CALL_TEXT, "stock_lazy", "stock_openxla"):
            self.line("torch_xla.sync()")
        for name, tensor in zip(names, results):
            self.names[name] = tensor
            self.moments[name] = len(self.donations)
        for name, tensor in zip(extra_names, extras):
            self.names[name] = tensor
            self.held[name] = len(self.donations)

    def handed_on(self) -> set[int]:
        """Storages of leaves that the function hands on as they are: a mark, unlike `compile`, consumes these."""
        leaves = [self.names[name] for name in self.leaves]
        copies = [leaf.detach() for leaf in leaves]
        body = self.body
        found = set()
        for result in (*body.results, *body.extras):
            source = body.names[result]
            for name, leaf in zip(body.leaf_names, copies):
                given = body.names[name]
                same = body.storage(source) == body.storage(given) and source.shape == given.shape
                if same and source.stride() == given.stride():
                    found.add(self.storage(leaf))
        return found

    # --- what the caller does ---

    def section(self, operations: Operations, call: int) -> None:
        for kind, a, b, c in operations:
            if c % 2 == 0 or c // 2 % max(1, self.program.calls) == call:
                self.operation(kind, a, b, c)

    def operation(self, kind: str, a: int, b: int, c: int) -> None:
        leaf = self.leaves[a % len(self.leaves)]
        x = self.names[leaf]
        sound = [name for name in self.held if not self.may_raise(name)]
        if kind == "hold":
            self.hold(_small(f"{leaf} * 2 + {b % MODULUS}"))
        elif kind == "hold_view":
            self.hold(self.view(VIEWS[b % len(VIEWS)], leaf, b, c))
        elif kind == "hold_view_of_held" and sound:
            self.hold(self.view(VIEWS[b % len(VIEWS)], sound[a % len(sound)], c, b))
        elif kind == "hold_alias":
            self.hold((f"{leaf}", f"{leaf}.detach()", f"{leaf}.data")[b % 3])
            # It is the tensor that may have been marked just now.
            self.held[f"h{self.count - 1}"] = self.moments[leaf]
        elif kind == "hold_clone":
            self.hold(f"{leaf}.clone()")
        elif kind == "hold_result" and sound:
            self.hold(_small(f"{sound[b % len(sound)]} + {1 + c % 3}"))
        elif kind == "write" and self.writes and self.storage(x) not in self.copied:
            text = write_text(WRITES[b % len(WRITES)], leaf, x, b, c, self.elsewhere(x, a, [*self.leaves, "x"]))
            if text is not None:
                exec(text, {"torch": torch}, dict(self.names))
                self.line(text)
                if c % 3 == 0:
                    self.line("torch_xla.sync()")
        elif kind == "replace":
            self.put(leaf, f"make({tuple(x.shape)}, {x.dtype}, {b})")
        elif kind == "renew":
            self.put(leaf, (f"{leaf}.clone()", _small(f"{leaf} + {c % 4}"))[b % 2])
        elif kind == "tie":
            other = self.alike(x, b, self.leaves)
            square = x.dim() == 2 and x.shape[0] == x.shape[1]
            texts = (f"{other}", f"{other}.detach()", f"{other}.t()" if square else f"{other}.data")
            self.put(leaf, texts[c % 3])
        elif kind == "sync":
            self.line("torch_xla.sync()")
        elif kind == "read":
            names = [*self.leaves, *self.held]
            self.check(names[b % len(names)])
        elif kind == "forget" and self.held:
            name = list(self.held)[a % len(self.held)]
            del self.held[name], self.names[name]
            self.line(f"del {name}")
        elif kind == "shard" and self.sharded and x.dim() and x._base is None:
            dims = [i for i, size in enumerate(x.shape) if size % 4 == 0]
            spec: list[Any] = [None] * x.dim()
            if dims and b % 3:
                spec[dims[b % len(dims)]] = "x"
            self.line(f"shard({leaf}, {tuple(spec)})")


def _make_on_cpu(shape: Sequence[int], dtype: torch.dtype, first: int) -> torch.Tensor:
    return ((torch.arange(torch.Size(shape).numel()) + first) % MODULUS).reshape(shape).to(dtype)


def render(program: Program, mode: str, sharded: bool = False, stop: int | None = None) -> Rendered:
    """The program in one way of donating; up to the call of number `stop`, if given."""
    caller = _Caller(program, mode, stop, sharded)
    return Rendered(caller.source(), caller.expected, caller.call_lines)
