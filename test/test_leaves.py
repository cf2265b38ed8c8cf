"""The leaves of what is donated, and their names."""

from __future__ import annotations

import gc
import weakref
from collections import OrderedDict, namedtuple

import pytest
import torch

from torch_xla_donate import _leaves

Point = namedtuple("Point", ["x", "y"])


def names_of(tree):
    leaves, names = _leaves.flatten(tree)
    return [names.name(i) for i in range(len(leaves))]


@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        (1, [""]),
        ([1, 2], ["[0]", "[1]"]),
        ((1, [2, 3]), ["[0]", "[1][0]", "[1][1]"]),
        ({"a": 1, "b": {"c": 2}}, ["['a']", "['b']['c']"]),
        (OrderedDict(z=1, a=2), ["['z']", "['a']"]),
        (Point(1, {"k": 2}), [".x", ".y['k']"]),
        ([], []),
        ([None, 1], ["[0]", "[1]"]),
    ],
)
def test_leaves_are_named_by_their_path(tree, expected):
    assert names_of(tree) == expected


def test_a_module_is_its_parameters_and_buffers_with_every_name_of_a_tied_tensor():
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


def test_names_keep_no_tensor_alive():
    tensor = torch.ones(3)
    names = _leaves.flatten({"a": [tensor]})[1]
    watch = weakref.ref(tensor)
    del tensor
    gc.collect()
    assert watch() is None
    assert names.name(0) == "['a'][0]"


def test_labels_join_the_argument_and_the_path():
    assert _leaves.label("tensors", "") == "tensors"
    assert _leaves.label("tensors", "[0]") == "tensors[0]"
    assert _leaves.label("tensors", ".x") == "tensors.x"
    assert _leaves.label("tensors", "layer.weight") == "tensors (layer.weight)"
