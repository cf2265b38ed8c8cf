"""Tests of donation in a user's project: `pytest examples/user_project`. The plugin gives the fixtures."""

import pytest
import torch
from training import initial_state, train_step

from torch_xla_donate import expect_donated
from torch_xla_donate.testing import assert_aliased, assert_donated, assert_not_donated, assert_reused

# Every test of this file fails if one of its donations is unusable.
pytestmark = pytest.mark.usefixtures("fail_on_unusable_donation")


@pytest.fixture
def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(8, 16).to("xla"), torch.randn(8, 4).to("xla")


def test_the_loop_reuses_the_memory_of_its_state(batch):
    weights, momenta = initial_state()
    with expect_donated(min_fraction=0.95):
        for _ in range(20):
            weights, momenta, loss = train_step(weights, momenta, *batch)
    assert torch.isfinite(loss)


def test_a_step_consumes_the_old_state_and_keeps_the_batch(batch):
    weights, momenta = initial_state()
    new_weights, new_momenta, _ = train_step(weights, momenta, *batch)
    assert_donated([weights, momenta])
    assert_not_donated([new_weights, new_momenta, batch])
    assert_reused(steps=1)


def test_xla_aliases_every_array_of_the_state(batch, hlo_dump):
    weights, momenta = initial_state()
    train_step(weights, momenta, *batch)
    (module,) = [module for module in hlo_dump.modules() if module.donors]
    assert len(module.donors) == 4
    assert_aliased(module)


def test_the_same_ahead_of_time_by_name(batch):
    executable = train_step.lower(*initial_state(), *batch).compile()
    assert_aliased(executable, *(donor.name for donor in executable.donors))
