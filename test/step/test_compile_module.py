"""compile(module): calls are steps, everything else is the module's."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch_xla

from torch_xla_donate import compile, is_donated


@pytest.fixture
def linear():
    torch.manual_seed(0)
    module = torch.nn.Linear(3, 3).to("xla")
    torch_xla.sync()
    return module


def test_attributes_are_the_modules(linear):
    compiled = compile(linear)
    assert compiled.weight is linear.weight
    assert compiled.in_features == 3
    assert [name for name, _ in compiled.named_parameters()] == ["weight", "bias"]
    assert list(compiled.state_dict()) == ["weight", "bias"]
    assert {id(p) for p in compiled.parameters()} == {id(p) for p in linear.parameters()}
    assert isinstance(compiled, torch.nn.Module) and isinstance(compiled, torch.nn.Linear)
    assert "weight" in dir(compiled) and "lower" in dir(compiled)
    assert repr(compiled) == f"compile({linear!r})"
    assert compiled._orig_mod is linear and compiled.__wrapped__ is linear
    with pytest.raises(AttributeError, match="'Linear' object has no attribute 'absent'"):
        compiled.absent  # noqa: B018
    assert compiled.lower(torch.ones(3, 3, device="xla")).as_text().startswith("HloModule")


def test_methods_that_return_the_module_stay_compiled(linear):
    compiled = compile(linear)
    for method in ("eval", "train", "float", "requires_grad_"):
        assert getattr(compiled, method)() is compiled
    assert compiled.eval() is compiled and not linear.training
    compiled.train()
    assert linear.training
    compiled.load_state_dict({"weight": torch.zeros(3, 3), "bias": torch.ones(3)})
    assert linear.bias.tolist() == [1.0, 1.0, 1.0]


def test_attributes_are_set_and_deleted_on_the_module(linear):
    compiled = compile(linear)
    compiled.extra = 3
    compiled.weight = torch.nn.Parameter(torch.zeros(3, 3, device="xla"))
    assert linear.extra == 3 and linear.weight is compiled.weight
    del compiled.extra
    assert not hasattr(linear, "extra")


def test_a_compiled_module_inside_another_module(linear, make):
    whole = torch.nn.Sequential(compile(linear), torch.nn.ReLU()).to("xla")
    assert list(whole.state_dict()) == ["0.weight", "0.bias"]
    whole.load_state_dict({"0.weight": torch.eye(3), "0.bias": torch.zeros(3)})
    assert torch.equal(whole(make(3, 3)).detach().cpu(), torch.arange(9.0).reshape(3, 3))
    assert len(list(whole.modules())) == 3


def test_containers_are_indexed_and_counted():
    compiled = compile(torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Tanh()))
    assert len(compiled) == 2 and isinstance(compiled[1], torch.nn.Tanh)
    assert [type(layer).__name__ for layer in compiled] == ["ReLU", "Tanh"]
    assert bool(compile(torch.nn.ReLU()))
    with pytest.raises(TypeError, match="len"):
        len(compile(torch.nn.ReLU()))


def test_names_of_the_package_do_not_hide_the_modules(make):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.body = torch.nn.Linear(3, 3)
            self.names = ["a"]
            self.function = 1

        def forward(self, x):
            return self.body(x)

    model = Model().to("xla")
    compiled = compile(model)
    assert compiled.body is model.body and compiled.names == ["a"] and compiled.function == 1
    with torch.no_grad():
        assert compiled(make(3, 3)).shape == (3, 3)


def test_a_copy_is_compiled_and_has_its_own_parameters(linear, make):
    copied = copy.deepcopy(compile(linear, donate_argnums=0))
    assert copied.weight is not linear.weight
    with torch.no_grad():
        copied.weight.zero_()
        x = make(3, 3)
        assert torch.equal(copied(x).cpu(), linear.bias.cpu().expand(3, 3))
    assert is_donated(x)


def test_pickling_is_refused_with_a_remedy(linear):
    with pytest.raises(TypeError, match=r"a compiled Linear cannot be pickled.*state_dict\(\)"):
        pickle.dumps(compile(linear))
