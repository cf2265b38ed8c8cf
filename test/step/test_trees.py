"""compile and donate_buffer with trees that contain themselves, are very deep, or differ only in what `==` ignores."""

from __future__ import annotations

import dataclasses
import decimal
import enum
import gc
from collections import OrderedDict, defaultdict, deque, namedtuple

import numpy
import pytest
import torch
from helpers import each_backend
from torch.utils import _pytree as pytree

import torch_xla_donate
from torch_xla_donate import _C, _trees, cancel_donation, debug_nans, donate_buffer, is_donated, placeholder_like, scan
from torch_xla_donate.testing import assert_not_donated

# --- Trees that contain themselves, or are deep ---


def loop(tensor):
    node = {"tensor": tensor}
    node["parent"] = [node]
    return node


def deep(tensor):
    tree = [tensor]
    for _ in range(100_000):
        tree = [tree]
    return tree


def first(tree):
    while not isinstance(tree, torch.Tensor):
        tree = tree["tensor"] if isinstance(tree, dict) else tree[0]
    return tree


endless = pytest.mark.parametrize("make_tree", [loop, deep])


def refused(name):
    return pytest.raises(RecursionError, match=f"^{name} contains itself, or is nested deeper than .* limit of 1000 ")


@endless
def test_endless_trees_pass_where_nothing_in_them_is_donated(make, make_tree):
    """As results, as by torch_xla, and as arguments."""
    for donate_argnums in (None, 0):
        x = make(3)
        step = torch_xla_donate.compile(lambda t: make_tree(t + 1), donate_argnums=donate_argnums)
        assert first(step(x)).tolist() == [1, 2, 3]
        assert is_donated(x) is (donate_argnums == 0)
    step = torch_xla_donate.compile(lambda t: (make_tree(t), t + 1), donate_argnums=0, strict="off")
    assert first(step(make(3))[0]).tolist() == [0, 1, 2]  # the argument is returned, and kept
    step = torch_xla_donate.compile(lambda tree: first(tree) + 1)
    assert step(make_tree(make(3))).tolist() == [1, 2, 3]


@each_backend
@endless
def test_an_endless_argument_is_refused_by_its_name(make, options, make_tree):
    x, y = make(3), make(3)
    step = torch_xla_donate.compile(lambda a, b: first(a) + first(b), donate_argnums=0, **options)
    for place, name in enumerate("ab"):
        arguments = [x, y]
        arguments[place] = make_tree(arguments[place])
        with refused(rf"{name} \(argument {place} of <lambda>\)"):
            step(*arguments)
        assert _C.pending() == []
    assert step(x, y).tolist() == [0, 2, 4]


@endless
def test_an_endless_result_of_a_trace_is_refused(make, make_tree):
    x = make(3)
    step = torch_xla_donate.compile(lambda t: make_tree(t + 1), donate_argnums=0, pure=True)
    with refused("the result of <lambda>"):
        step(x)
    with refused("the result of <lambda>"):
        step.lower(x)
    with refused("the result of fn"):
        scan(lambda carry, item: (carry + item, make_tree(carry)), x, make(4, 3))
    assert _C.pending() == []
    assert x.tolist() == [0, 1, 2]


@endless
def test_an_endless_tree_of_marks_is_refused(make, make_tree):
    x, tree = make(3), make_tree(make(3))
    with refused("tensors"):
        donate_buffer(tree)
    with refused("into"):
        donate_buffer(x, into=tree)
    with refused("tensors"):
        cancel_donation(tree)
    with refused("tensors"):
        assert_not_donated(tree)
    with refused("tree"):
        placeholder_like(tree)
    with refused("init"):
        scan(lambda carry, item: (carry, item), tree, x)
    with refused(r"tree \(argument 0 of <lambda>\)"):
        torch_xla_donate.compile(lambda tree: first(tree) + 1).lower(tree)
    assert _C.pending() == []


def test_outputs_in_an_endless_result_are_checked(make):
    with debug_nans(), pytest.raises(FloatingPointError, match="output 0 of 1 of the step"):
        torch_xla_donate.compile(lambda t: loop(t / 0 - t / 0))(make(3))


@pytest.mark.parametrize("kind", [list, dict])
def test_a_container_may_change_while_it_is_walked(kind):
    """An allocation may collect garbage, whose finalizers run at once before Python 3.12."""
    rows = [[{(index, key): key for key in range(30)}] for index in range(50)]
    tree = rows.copy() if kind is list else dict(enumerate(rows))
    collections = []

    def change(phase, info):
        collections.append(phase)
        if len(collections) == 20:
            tree.clear()

    before = gc.get_threshold()
    gc.callbacks.append(change)
    try:
        gc.set_threshold(1, 10_000)
        found = _C.flatten(tree)
    finally:
        gc.set_threshold(*before)
        gc.callbacks.remove(change)
    assert found is None or len(found[0]) == 1500
    assert (found is None) is (len(tree) == 0)


# --- What `==` does not distinguish ---


class Number(enum.IntEnum):
    ONE = 1


class Word(str, enum.Enum):
    A = "a"


@dataclasses.dataclass(frozen=True)
class Frozen:
    value: object


@dataclasses.dataclass
class Box:
    """A registered class with a context."""

    tensor: object
    context: object


pytree.register_pytree_node(Box, lambda box: ([box.tensor], box.context), lambda leaves, context: Box(*leaves, context))
Point = namedtuple("Point", ["x"])
Other = namedtuple("Point", ["x"])

EQUAL = {
    "numbers": [1, True, 1.0, 1 + 0j, Number.ONE, numpy.int64(1), decimal.Decimal(1), decimal.Decimal("1.0")],
    "zeros": [0.0, -0.0, numpy.float32(0.0), numpy.float32(-0.0), complex(0.0, -0.0), complex(-0.0, 0.0)],
    "texts": ["a", Word.A],
    "tuples": [(1,), (True,), (1.0,), Point(1), Other(1), Point(True)],
    "nested tuples": [("a", (0.0,)), ("a", (-0.0,)), ("a", (False,))],
    "sets": [frozenset([1]), frozenset([True])],
    "dataclasses": [Frozen(1), Frozen(True), Frozen(1.0), Frozen((0.0,)), Frozen((-0.0,))],
}
CONTEXTS = {
    **EQUAL,
    "lists": [[1], [True], [[1]], [[1.0]]],
    "dicts": [{1: "a"}, {True: "a"}, {"a": 1}, {"a": True}],
    "records": [Box(0, 1), Box(0, True)],
    "slices": [slice(0, 1), slice(False, 1), range(0, 3, 2), range(0, 4, 2)],
    "arrays": [numpy.zeros(2), numpy.zeros(2, "float32"), numpy.zeros((1, 2)), -numpy.zeros(2)],
    "deques": [deque([1]), deque([1], 3), deque([True])],
}


def key_of(tree):
    return _trees.flatten_fast(tree, "tree")[1]


def test_equal_keys_and_contexts_make_different_structures():
    def check(kind, keys_of):
        keys = keys_of()
        assert len(set(keys)) == len(keys), kind
        assert keys == keys_of(), kind

    for kind, values in EQUAL.items():
        for container in (dict, OrderedDict):
            check(kind, lambda container=container, values=values: [key_of([container({key: 0})]) for key in values])
    for kind, values in CONTEXTS.items():
        check(kind, lambda values=values: [key_of(Box(0, context)) for context in values])


def test_a_context_without_hash_counts_by_its_identity():
    class Unhashable:
        __hash__ = None

    one, other = Unhashable(), Unhashable()
    assert key_of(Box(0, one)) == key_of(Box(0, one)) != key_of(Box(0, other))


def test_nan_is_equal_to_nan():
    nans = [float("nan"), -float("nan"), float("inf") - float("inf")]
    assert len({key_of({nan: 0}) for nan in nans}) == 1
    assert len({key_of(Box(0, (numpy.float32(nan),))) for nan in nans}) == 1


def test_structures_of_different_containers_differ():
    trees = [
        [],
        (),
        {},
        [[]],
        [None],
        OrderedDict(),
        defaultdict(int),
        defaultdict(float),
        deque(),
        deque(maxlen=2),
        [[0], []],
        [[], [0]],
        [[[0]]],
        [OrderedDict(a=[0]), 0],
        [OrderedDict(a=0), [0]],
        [OrderedDict(a=[0, 0])],
        Point(0),
        Other(0),
    ]
    assert len({key_of(tree) for tree in trees}) == len(trees)


FACTORS = {int: 2, bool: 3, float: 5, str: 7, Number: 11, Word: 13}


def scaled(tree):
    return {str(number): value * FACTORS[type(key)] for number, (key, value) in enumerate(tree.items())}


@pytest.mark.parametrize("options", [{}, {"pure": True}], ids=["lazy", "pure"])
def test_a_function_sees_the_type_of_each_key(make, options):
    step = torch_xla_donate.compile(scaled, donate_argnums=0, **options)
    for container in (dict, OrderedDict):
        for key in (1, True, 1.0, Number.ONE, "a", Word.A, 1):
            expected = [0, FACTORS[type(key)], 2 * FACTORS[type(key)]]
            assert step(container({key: make(3)}))["0"].tolist() == expected


def test_a_pure_function_sees_types_in_contexts_and_statics(make):
    def factor(value):
        return FACTORS[type(value.value)] if isinstance(value, Frozen) else FACTORS[type(value)]

    in_context = torch_xla_donate.compile(lambda box: box.tensor * factor(box.context), pure=True)
    static = torch_xla_donate.compile(lambda t, value=1: t * factor(value), pure=True, static_argnames="value")
    leaf = torch_xla_donate.compile(lambda pair: pair[0] * factor(pair[1]), pure=True)
    x = make(3)
    for value in (1, True, Number.ONE, "a", Word.A, Frozen(1), Frozen(True), Frozen(1.0), 1):
        expected = (x * factor(value)).tolist()
        assert in_context(Box(x, value)).tolist() == expected
        assert static(x, value=value).tolist() == expected
        assert leaf((x, value)).tolist() == expected
    assert static(x).tolist() == [0, 2, 4]


def test_a_pure_body_of_a_scan_sees_the_type_of_each_key(make):
    def body(carry, item):
        return {key: value * FACTORS[type(key)] for key, value in carry.items()}, sum(carry.values())

    for key in (1, True, 1.0, 1):
        carry, _ = scan(body, {key: torch.ones(3, device="xla")}, make(2, 3), is_fn_pure=True)
        assert carry[key].tolist() == [FACTORS[type(key)] ** 2] * 3


def test_an_executable_refuses_equal_values_of_other_types(make):
    x = make(3)
    compiled = torch_xla_donate.compile(scaled).lower({1: x}).compile()
    with pytest.raises(TypeError, match="was compiled for arguments of the structure"):
        compiled({True: x})
    compiled = torch_xla_donate.compile(lambda t, n: t * FACTORS[type(n)]).lower(x, 1).compile()
    with pytest.raises(TypeError, match="argument 1: compiled for 1, called with True"):
        compiled(x, True)


def test_an_executable_accepts_nan_and_equal_arrays(make):
    x, array = make(3), numpy.ones(2)
    compiled = torch_xla_donate.compile(lambda t, n, a: t + a.size).lower(x, float("nan"), array).compile()
    assert compiled(x, float("nan"), array.copy()).tolist() == [2, 3, 4]
