"""Errors of the extension module for arguments that do not fit, which the package never passes."""

from __future__ import annotations

import pytest
import torch
import torch_xla

from torch_xla_donate import _C

PENDING = "the device data of an uploaded tensor is not where it was expected: null"
FIELDS = "view, element type, sharding, alias id or clone flag are not where they were expected in the data of a fresh"


def uploaded(*values, dtype=torch.int32):
    t = torch.tensor(values, dtype=dtype).to("xla")
    torch_xla.sync(wait=True)
    return t


def number_of(t) -> int:
    return torch_xla._XLAC._xla_get_tensor_id(t)


def test_an_argument_that_is_no_tensor_is_named_by_its_type():
    for function in ("has_graph", "has_value", "holds", "identity", "is_donated", "state", "updated_in_place"):
        with pytest.raises(TypeError, match="expected a torch.Tensor, got int"):
            getattr(_C, function)(3)
    for function in ("cancel", "order_parameters"):
        with pytest.raises(TypeError, match="expected a torch.Tensor, got NoneType"):
            getattr(_C, function)([uploaded(1, 2), None])


def test_an_array_is_given_to_a_pending_tensor_only():
    with pytest.raises(ValueError, match="give_array needs a pending and a materialised XLA tensor"):
        _C.give_array(torch.zeros(3), uploaded(1, 2, 3))


def test_only_three_uploaded_integers_are_a_probe_of_the_layouts():
    with pytest.raises(RuntimeError, match="an XLA tensor is a N3c1010TensorImplE, expected N9torch_xla13XLATensor"):
        _C.verify_layouts(torch.zeros(3, dtype=torch.int32), 0)
    number = number_of(probe := uploaded(0, 0, 0))
    with pytest.raises(RuntimeError, match=f"a lazy tensor has id {number}, torch_xla says {number + 1}"):
        _C.verify_layouts(probe, number + 1)
    for probe, message in [
        (uploaded(0.0, 0.0, 0.0, dtype=torch.float32), FIELDS),
        (uploaded(0, 0, 0, 0), r"device data describes itself as 's32\[4\]', expected a text that starts with"),
        (uploaded(0, 0, 0) + 1, PENDING),
    ]:
        with pytest.raises(RuntimeError, match=message):
            _C.verify_layouts(probe, number_of(probe))


def test_a_tensor_without_pending_work_is_not_updated():
    assert not _C.updated_in_place(uploaded(1))


def test_a_scope_without_functions_of_its_own_does_nothing():
    with _C.Scope() as scope:
        assert isinstance(scope, _C.Scope)
