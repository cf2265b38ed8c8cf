"""Bytes that a step aliases without donation, with marks by hand, and with auto_donate(), for common patterns."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import _common
import click
import torch
import torch.nn.functional as F
import torch_xla.core.xla_model as xm
from torch.utils import _pytree as pytree
from torch_xla import _XLAC

import torch_xla_donate
from torch_xla_donate.hlo.dump import copies

VARIANTS = ("upstream", "by hand", "auto")
# The first steps compile, and find out what is dead; the others must all be alike.
WARM_UP, STEADY = 5, 3
RATE, DECAY, TAU = 1e-2, 0.9, 0.005
BETA1, BETA2 = 0.9, 0.999
BATCH, POSITIONS, HEADS = 8, 2, 4

Tensors = dict[str, torch.Tensor]
State = dict[str, Any]
# donate_buffer in the variant "by hand", nothing in the others.
Give = Callable[..., None]
# Replaces what it computes in the state, and returns a value to look at.
Step = Callable[[State, int, Give], torch.Tensor]


def array(*shape: int, seed: int = 0) -> torch.Tensor:
    """The same numbers in every process, of about the size that keeps a layer's output at 1."""
    numbers = torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))
    return (numbers / shape[-1] ** 0.5).to("xla")


def layers(size: int, seed: int) -> Tensors:
    made = {f"w{i}": array(size, size, seed=seed + i) for i in range(3)}
    return {**made, **{f"b{i}": array(size, seed=seed + 10 + i) for i in range(3)}}


def like(tensors: Tensors) -> Tensors:
    return {key: torch.zeros_like(tensor) for key, tensor in tensors.items()}


def batch(size: int, index: int) -> torch.Tensor:
    return array(BATCH, size, seed=100 + index)


def run_layers(weights: Tensors, x: torch.Tensor) -> torch.Tensor:
    for i in range(3):
        x = torch.tanh(x @ weights[f"w{i}"] + weights[f"b{i}"])
    return x


def loss_of(weights: Tensors, x: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(run_layers(weights, x), x)


def gradients(of: Callable[..., torch.Tensor], weights: Tensors, *rest: Any) -> tuple[Tensors, torch.Tensor]:
    # Autograd's own thread may hold a gradient into the step, now and then.
    with torch.autograd.set_multithreading_enabled(False):
        return torch.func.grad_and_value(of)(weights, *rest)


def descend(weights: Tensors, grads: Tensors) -> Tensors:
    return {key: weight - RATE * grads[key] for key, weight in weights.items()}


def average(slow: Tensors, fast: Tensors, rate: float) -> Tensors:
    return {key: (1 - rate) * value + rate * fast[key] for key, value in slow.items()}


# ---- The patterns: what there is before the first step, and the step ----


def functional_sgd(size: int) -> tuple[State, Step]:
    def step(state: State, index: int, give: Give) -> torch.Tensor:
        grads, loss = gradients(loss_of, state["weights"], batch(size, index))
        updated = descend(state["weights"], grads)
        give(state["weights"], into=updated)
        state["weights"] = updated
        return loss

    return {"weights": layers(size, 0)}, step


def functional_adam(size: int) -> tuple[State, Step]:
    weights = layers(size, 0)

    def step(state: State, index: int, give: Give) -> torch.Tensor:
        grads, loss = gradients(loss_of, state["weights"], batch(size, index))
        m = {key: BETA1 * state["m"][key] + (1 - BETA1) * grad for key, grad in grads.items()}
        v = {key: BETA2 * state["v"][key] + (1 - BETA2) * grad * grad for key, grad in grads.items()}
        moved = {key: value - RATE * m[key] / (v[key].sqrt() + 1e-8) for key, value in state["weights"].items()}
        updated = {"weights": moved, "m": m, "v": v}
        give(dict(state), into=updated)
        state.update(updated)
        return loss

    return {"weights": weights, "m": like(weights), "v": like(weights)}, step


def momentum_by_autograd(size: int, keeps_loss: bool) -> tuple[State, Step]:
    """The usual loop of torch.autograd.grad, with the loss alive at the step as it is, or detached."""

    def step(state: State, index: int, give: Give) -> torch.Tensor:
        for weight in state["weights"].values():
            weight.requires_grad_()
        with torch.autograd.set_multithreading_enabled(False):
            loss = loss_of(state["weights"], batch(size, index))
            found = torch.autograd.grad(loss, list(state["weights"].values()))
        speed = {key: DECAY * value + grad for (key, value), grad in zip(state["speed"].items(), found)}
        updated = {
            "weights": {key: value.detach() for key, value in descend(state["weights"], speed).items()},
            "speed": speed,
        }
        give(dict(state), into=updated)
        state.update(updated)
        return loss if keeps_loss else loss.detach()

    weights = layers(size, 0)
    return {"weights": weights, "speed": like(weights)}, step


def adamw_in_place(size: int) -> tuple[State, Step]:
    weights = {key: torch.nn.Parameter(value) for key, value in layers(size, 0).items()}
    optimizer = torch.optim.AdamW(weights.values(), lr=RATE, foreach=False)

    def step(state: State, index: int, give: Give) -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(weights, batch(size, index))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()  # a gradient that is kept is an output, which takes memory
        return loss.detach()

    return {"weights": weights, "optimizer": optimizer.state}, step


def moving_average(size: int) -> tuple[State, Step]:
    weights = {key: torch.nn.Parameter(value) for key, value in layers(size, 0).items()}
    optimizer = torch.optim.SGD(weights.values(), lr=RATE, foreach=False)

    def step(state: State, index: int, give: Give) -> torch.Tensor:
        loss = loss_of(weights, batch(size, index))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        updated = average(state["average"], {key: weight.detach() for key, weight in weights.items()}, 1 - DECAY)
        give(state["average"], into=updated)
        state["average"] = updated
        return loss.detach()

    return {"weights": weights, "average": {key: value.detach().clone() for key, value in weights.items()}}, step


def two_optimizers(size: int) -> tuple[State, Step]:
    def fool(maker: Tensors, judge: Tensors, x: torch.Tensor) -> torch.Tensor:
        return -run_layers(judge, run_layers(maker, x)).mean()

    def tell(judge: Tensors, maker: Tensors, x: torch.Tensor) -> torch.Tensor:
        return run_layers(judge, run_layers(maker, x)).mean() - run_layers(judge, x).mean()

    def step(state: State, index: int, give: Give) -> torch.Tensor:
        updated, losses = {}, []
        for name, other, of in (("judge", "maker", tell), ("maker", "judge", fool)):
            # The maker learns from the judge as it is now: what is donated is read once more in the same step.
            rest = (updated.get(other, state[other]), batch(size, index))
            grads, loss = gradients(of, state[name], *rest)
            speed = {key: DECAY * state[f"{name}'s speed"][key] + grad for key, grad in grads.items()}
            updated[name], updated[f"{name}'s speed"] = descend(state[name], speed), speed
            losses.append(loss)
        give({key: state[key] for key in updated}, into=updated)
        state.update(updated)
        return torch.stack(losses)

    judge, maker = layers(size, 0), layers(size, 20)
    return {"judge": judge, "judge's speed": like(judge), "maker": maker, "maker's speed": like(maker)}, step


def target_network(size: int) -> tuple[State, Step]:
    def bellman(online: Tensors, target: Tensors, x: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(run_layers(online, x), x + DECAY * run_layers(target, x))

    def step(state: State, index: int, give: Give) -> torch.Tensor:
        grads, loss = gradients(bellman, state["online"], state["target"], batch(size, index))
        online = descend(state["online"], grads)
        updated = {"online": online, "target": average(state["target"], online, TAU)}
        give(dict(state), into=updated)
        state.update(updated)
        return loss

    online = layers(size, 0)
    return {"online": online, "target": {key: value.clone() for key, value in online.items()}}, step


def gradient_buffers(size: int) -> tuple[State, Step]:
    """The weights are read, and stay; the sums of the gradients are replaced."""

    def step(state: State, index: int, give: Give) -> torch.Tensor:
        grads, loss = gradients(loss_of, state["weights"], batch(size, index))
        updated = {key: value + grads[key] for key, value in state["sums"].items()}
        give(state["sums"], into=updated)
        state["sums"] = updated
        return loss

    weights = layers(size, 0)
    return {"weights": weights, "sums": like(weights)}, step


def cache_of_one_sequence(size: int) -> tuple[State, Step]:
    """The cache is (positions, heads, width of a head)."""

    def step(state: State, index: int, give: Give) -> torch.Tensor:
        give(state["cache"])
        token = batch(size, index)[0]
        state["cache"][index % POSITIONS] = (token @ state["key"]).view(HEADS, -1)
        scores = torch.einsum("hw,phw->hp", token.view(HEADS, -1), state["cache"])
        return torch.einsum("hp,phw->hw", torch.softmax(scores, -1), state["cache"])

    return {"cache": array(size, HEADS, size // HEADS), "key": array(size, size)}, step


def cache_read_by_a_vector(size: int) -> tuple[State, Step]:
    """The cache is (positions, width); XLA for CPU writes the slice once more inside the product that reads it."""

    def step(state: State, index: int, give: Give) -> torch.Tensor:
        give(state["cache"])
        token = batch(size, index)[0]
        state["cache"][index % POSITIONS] = token @ state["key"]
        return torch.softmax(token @ state["cache"].T, -1) @ state["cache"]

    return {"cache": array(4 * size, size), "key": array(size, size)}, step


def cache_of_a_batch(size: int) -> tuple[State, Step]:
    """The cache is (sequences, positions, width)."""

    def step(state: State, index: int, give: Give) -> torch.Tensor:
        give(state["cache"])
        token = batch(size, index)
        state["cache"][:, index % POSITIONS] = token @ state["key"]
        scores = torch.softmax(token[:, None] @ state["cache"].transpose(1, 2), -1)
        return scores @ state["cache"]

    return {"cache": array(BATCH, size, size), "key": array(size, size)}, step


def scan_over_layers(size: int) -> tuple[State, Step]:
    def layer(carry: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        carry = torch.tanh(carry @ weight)
        return carry, carry.mean()

    def step(state: State, index: int, give: Give) -> torch.Tensor:
        x = batch(size, index)
        weights = state["layers"].detach().requires_grad_()
        with torch.autograd.set_multithreading_enabled(False):
            loss = F.mse_loss(torch_xla_donate.scan(layer, x, weights)[0], x)
            (grad,) = torch.autograd.grad(loss, weights)
        speed = DECAY * state["speed"] + grad
        updated = {"layers": state["layers"] - RATE * speed, "speed": speed}
        give(dict(state), into=updated)
        state.update(updated)
        return loss.detach()

    stack = array(4, size, size)
    return {"layers": stack, "speed": torch.zeros_like(stack)}, step


# The graph of the loss holds the old weights, so auto_donate skips them. A mark says that they are not needed.
LOSS_KEPT = "torch.autograd.grad, loss kept"
PATTERNS: dict[str, Callable[[int], tuple[State, Step]]] = {
    "functional SGD": functional_sgd,
    "functional Adam": functional_adam,
    "torch.autograd.grad, loss.detach()": functools.partial(momentum_by_autograd, keeps_loss=False),
    LOSS_KEPT: functools.partial(momentum_by_autograd, keeps_loss=True),
    "torch.optim.AdamW, in place": adamw_in_place,
    "moving average of weights": moving_average,
    "two optimizers": two_optimizers,
    "target network": target_network,
    "sums of gradients": gradient_buffers,
    "KV cache, cache[i] = k": cache_of_one_sequence,
    "KV cache, cache[:, i] = k": cache_of_a_batch,
    "KV cache, read by one vector": cache_read_by_a_vector,
    "scan over layers": scan_over_layers,
}


# ---- A run, in a process that starts the runtime itself ----


def places(state: State) -> dict[int, int]:
    """Address of each tensor of the state, and its bytes."""
    xm.wait_device_ops()
    tensors = [leaf for leaf in pytree.tree_leaves(state) if isinstance(leaf, torch.Tensor)]
    return {_XLAC._unsafe_buffer_pointer(tensor): tensor.nbytes for tensor in tensors if tensor.device.type == "xla"}


def run(pattern: str, variant: str, size: int) -> dict[str, Any]:
    """Runs the loop; the values, and how many bytes of the state stay in memory of the state at a steady step."""
    give: Give = functools.partial(torch_xla_donate.donate_buffer, strict=True) if variant == "by hand" else ignore
    torch_xla_donate.set_auto_donate(variant == "auto")
    state, step = PATTERNS[pattern](size)
    _common.step()
    values = hashlib.sha256()
    kept, warm = [], 0
    for index in range(WARM_UP + STEADY):
        if index == WARM_UP:
            warm = _common.compiles()
        before = places(state)
        seen = step(state, index, give)
        _common.step()
        kept.append(sum(count for place, count in places(state).items() if place in before))
        values.update(seen.detach().cpu().numpy())
        del seen
    compiled = _common.compiles() - warm
    if compiled or len(set(kept[WARM_UP:])) != 1:
        raise RuntimeError(
            f"{pattern}, {variant}: {compiled} compilations and kept bytes of {kept[WARM_UP:]} in the last {STEADY} "
            "steps; expected a steady loop"
        )
    for leaf in pytree.tree_leaves(state):
        values.update(leaf.detach().cpu().numpy() if isinstance(leaf, torch.Tensor) else repr(leaf).encode())
    return {"values": values.hexdigest(), "kept_bytes": kept[-1]}


def ignore(tensors: Any, into: Any = None) -> None:
    """Nothing is donated by hand."""


def measure(pattern: str, variant: str, size: int) -> dict[str, Any]:
    """A run, and what the HLO of its step says after XLA's optimisation."""
    with _common.dumped_step(run, pattern, variant, size) as (found, step, text):
        return {
            "pattern": pattern,
            "variant": variant,
            **found,
            "aliased_bytes": step.aliased_bytes,
            # What XLA moves because it must not write where a value is.
            "copied_bytes": sum(shape.bytes for shape, _ in copies(text)),
        }


def tables(result: Mapping[str, Any]) -> dict[str, _common.Table]:
    kinds = ("aliased", "copied")
    return {
        "all": _common.Table(
            "auto_patterns: MiB that a steady step aliases, and copies",
            ("pattern", *(f"{kind}: {variant}" for kind in kinds for variant in VARIANTS)),
            [
                (
                    row["pattern"],
                    *(f"{row[f'{kind}_bytes'][of] / _common.MIB:.2f}" for kind in kinds for of in VARIANTS),
                )
                for row in result["rows"]
            ],
            _common.aim(result),
        )
    }


@click.command()
@_common.tiny_option
@_common.results_option
def main(tiny: bool, results: Path) -> None:
    """Aliased bytes of common patterns."""
    size = 16 if tiny else 512
    rows = []
    for pattern in PATTERNS:
        runs: Mapping[str, dict[str, Any]] = {variant: measure(pattern, variant, size) for variant in VARIANTS}
        rows.append(
            {
                "pattern": pattern,
                "same_values": len({found["values"] for found in runs.values()}) == 1,
                **{
                    key: {variant: found[key] for variant, found in runs.items()}
                    for key in ("aliased_bytes", "copied_bytes", "kept_bytes")
                },
            }
        )
    result = _common.describe("auto_patterns", {"tiny": tiny})
    result["step"] = "steady; bytes of the HLO after XLA's optimisation"
    result["rows"] = rows
    result["aim"] = {
        "text": f"auto aliases at least what is aliased by hand (not asked of {LOSS_KEPT}), and all values are equal",
        "met": all(
            row["same_values"]
            and (row["pattern"] == LOSS_KEPT or row["aliased_bytes"]["auto"] >= row["aliased_bytes"]["by hand"])
            for row in rows
        ),
    }
    _common.finish(results, result, tables(result))


if __name__ == "__main__":
    main()
