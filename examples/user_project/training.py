"""A training step of a project that uses torch_xla_donate; test_training.py guards its donation."""

import torch

import torch_xla_donate as txd


def loss_of(weights: dict[str, torch.Tensor], batch: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    hidden = torch.tanh(batch @ weights["hidden"])
    return ((hidden @ weights["output"] - target) ** 2).mean()


@txd.compile(donate_argnums=(0, 1))
def train_step(
    weights: dict[str, torch.Tensor], momenta: dict[str, torch.Tensor], batch: torch.Tensor, target: torch.Tensor
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], torch.Tensor]:
    """SGD with momentum, as a function: it returns new weights and momenta."""
    loss = loss_of(weights, batch, target)
    gradients = dict(zip(weights, torch.autograd.grad(loss, list(weights.values()))))
    momenta = {name: 0.9 * momenta[name] + gradients[name] for name in weights}
    weights = {name: (weights[name] - 0.05 * momenta[name]).detach().requires_grad_() for name in weights}
    return weights, momenta, loss.detach()


def initial_state() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    weights = {"hidden": torch.randn(16, 32), "output": torch.randn(32, 4)}
    on_device = {name: value.to("xla").requires_grad_() for name, value in weights.items()}
    return on_device, {name: torch.zeros_like(value).to("xla") for name, value in weights.items()}
