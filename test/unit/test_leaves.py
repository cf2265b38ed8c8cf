"""The leaves of what is donated, and their names."""

from __future__ import annotations

import enum
from collections import OrderedDict, defaultdict, deque, namedtuple

import numpy
import torch
from helpers import Couple
from torch.utils import _pytree as pytree

from torch_xla_donate import _trees

Point = namedtuple("Point", ["x", "y"])


class Keyed(Couple):
    """Registered with keys of each kind."""


class CheckedPoint(namedtuple("CheckedPoint", ["x", "y"])):
    def __new__(cls, x, y):
        return super().__new__(cls, x + torch.zeros(1), y + torch.zeros(1))


def children_with_keys(pair):
    return [(pytree.GetAttrKey("first"), pair.first), (pytree.MappingKey("second"), pair.second)], None


pytree.register_pytree_node(
    Keyed,
    lambda pair: ([pair.first, pair.second], None),
    lambda leaves, _: Keyed(*leaves),
    flatten_with_keys_fn=children_with_keys,
)


class Color(enum.Enum):
    RED = 1


class Alike:
    """Keys that differ, and whose text must not be computed."""

    def __repr__(self):
        raise AssertionError


def names_of(tree):
    leaves, names = _trees.flatten(tree, "tree")
    return [names.name(i) for i in range(len(leaves))]


def test_leaves_are_named_by_their_path():
    for tree, expected in [
        (1, [""]),
        ([1, 2], ["[0]", "[1]"]),
        ((1, [2, 3]), ["[0]", "[1][0]", "[1][1]"]),
        ({"a": 1, "b": {"c": 2}}, ["['a']", "['b']['c']"]),
        (OrderedDict(z=1, a=2), ["['z']", "['a']"]),
        (Point(1, {"k": 2}), [".x", ".y['k']"]),
        (deque([1, {"k": 2}]), ["[0]", "[1]['k']"]),
        (defaultdict(list, {0: 1, None: 2, b"b": 3}), ["[0]", "[None]", "[b'b']"]),
        ({Color.RED: 1, ("w", 0): 2, torch.int8: 3}, ["[<Color.RED: 1>]", "[('w', 0)]", "[torch.int8]"]),
        ([], []),
        ([None, 1], ["[0]", "[1]"]),
    ]:
        assert names_of(tree) == expected, tree


def test_a_module_is_its_tensors_with_every_name_of_a_tied_one():
    module = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False), torch.nn.BatchNorm1d(2))
    module.tied = module[0]
    assert names_of(module) == [
        "0.weight",
        "1.weight",
        "1.bias",
        "tied.weight",
        "1.running_mean",
        "1.running_var",
        "1.num_batches_tracked",
    ]
    assert names_of({"m": torch.nn.Linear(1, 1), "s": [0]}) == ["['m'].weight", "['m'].bias", "['s'][0]"]


def test_labels_join_the_argument_and_the_path():
    assert _trees.qualified_name("tensors", "") == "tensors"
    assert _trees.qualified_name("tensors", "[0]") == "tensors[0]"
    assert _trees.qualified_name("tensors", ".x") == "tensors.x"
    assert _trees.qualified_name("tensors", "layer.weight") == "tensors (layer.weight)"


def test_leaves_of_a_class_without_keys_are_numbered():
    """No instance is made to name them."""
    one = torch.ones(1)
    assert names_of({"p": Couple(one, one)}) == ["['p'][0]", "['p'][1]"]
    assert names_of([Keyed(one, one)]) == ["[0].first", "[0]['second']"]
    assert names_of(CheckedPoint(one, one)) == [".x", ".y"]


def test_names_are_those_that_torch_gives():
    tree = [{"a": (1, Point(2, [3])), 7: deque([4])}, OrderedDict(z=Keyed(torch.ones(1), torch.ones(1))), None]
    assert names_of(tree) == [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(tree)[0]]
    assert _trees.with_places(tree)[0] == pytree.tree_leaves(tree)


def test_a_key_of_tensors_or_long_text_shows_as_number_and_type():
    keys = [torch.nn.Parameter(torch.ones(30, 2)), torch.nn.Linear(2, 2), ("w", torch.ones(1)), frozenset(range(99))]
    assert names_of({key: [0] for key in keys}) == [
        "[key 0: Parameter float32[30,2]][0]",
        "[key 1: Linear][0]",
        "[key 2: ('w', Tensor float32[1])][0]",
        "[key 3: frozenset][0]",
    ]
    assert names_of({"x" * 200: 0}) == [f"['{'x' * 200}']"]


def test_keys_of_one_class_have_places_of_their_own():
    first, second = Alike(), Alike()
    one, other = (_trees.flatten(tree, "tree")[1] for tree in ({first: 1, second: 2}, {second: 2, first: 1}))
    assert (one.name(0), one.name(1)) == ("[key 0: Alike]", "[key 1: Alike]") == (other.name(0), other.name(1))
    assert one.places[0] == other.places[1] != one.places[1] == other.places[0]


def test_static_arrays_with_other_fields_differ():
    """Their dtypes have the same size, and numpy's short name for both is '|V8'."""
    numbers = numpy.zeros(2, "i4,i4")
    assert _trees.exact(numbers) == _trees.exact(numbers.copy())
    assert _trees.exact(numbers) != _trees.exact(numpy.zeros(2, "f4,i4"))
