"""A pure function computes with each operation of torch what a plain one computes, on torch's own samples.

The samples of a child process are numbered. A sample for which torch_xla itself raises may leave work that cannot run,
or end the process, so the next child goes on after it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

DIFFERS, SAME, REFUSED, STOCK, RANDOM = "differs", "same", "refused", "stock raises", "random"


def is_tensor(leaf: object) -> bool:
    return isinstance(leaf, torch.Tensor)


def samples(gradients: bool) -> Iterator[tuple[str, Callable[..., Any], list[Any], Any]]:
    """The name, the function, the leaves of its arguments and their structure."""
    from torch.testing._internal.common_methods_invocations import op_db  # needs expecttest

    for op in op_db:
        if torch.float32 not in op.supported_dtypes("cpu") or (gradients and not op.supports_autograd):
            continue
        in_place = None if gradients else op.inplace_variant
        for suffix, function in (("", op.op), ("_", in_place)):
            if function is None:
                continue
            for number, sample in enumerate(op.sample_inputs("cpu", torch.float32)):
                if number == 3:
                    break
                leaves, structure = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
                if all(leaf.layout == torch.strided for leaf in leaves if is_tensor(leaf)):
                    yield f"{op.name}{suffix} {op.variant_test_name} {number}", function, leaves, structure


def call_of(function: Callable[..., Any], leaves: list[Any], structure: Any, gradients: bool) -> Callable[..., Any]:
    """A function of the tensors among the leaves: of the gradients of the results, or of the results."""

    def call(*tensors: torch.Tensor) -> Any:
        # A function that updates its argument gets a new one, because a pure function refuses to do that.
        given = [t.detach().requires_grad_(t.is_floating_point()) if gradients else t.clone() for t in tensors]
        following = iter(given)
        value, args, kwargs = pytree.tree_unflatten([next(following) if is_tensor(x) else x for x in leaves], structure)
        if "device" in kwargs:
            kwargs["device"] = "xla"
        result = function(value, *args, **kwargs)
        if not gradients:
            return result
        sums = [t.sum() for t in pytree.tree_leaves(result) if is_tensor(t) and t.requires_grad]
        inputs = [t for t in given if t.requires_grad]
        return torch.autograd.grad(sum(sums), inputs, allow_unused=True) if sums else ()

    return call


def outcomes(call: Callable[..., Any], leaves: list[Any]) -> Iterator[tuple[str, str]]:
    """What holds if the process ends now; the last one is the outcome."""
    import torch_xla

    import torch_xla_donate

    def run(function: Callable[..., Any]) -> list[Any]:
        tensors = [leaf.detach().to("xla") for leaf in leaves if is_tensor(leaf)]
        torch_xla.sync()
        found = pytree.tree_leaves(function(*tensors))
        return [leaf.detach().cpu() if is_tensor(leaf) else leaf for leaf in found]

    def is_same(one: list[Any], other: list[Any]) -> bool:
        try:
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5, equal_nan=True)
        except AssertionError:
            return False
        return True

    yield STOCK, "ended the process"
    try:
        expected = run(call)
        is_random = not is_same(expected, run(call))
    except Exception as error:
        yield STOCK, str(error)
        return
    if is_random:
        yield RANDOM, ""
        return
    yield DIFFERS, "ended the process"
    pure = torch_xla_donate.compile(call, pure=True)
    try:
        found = [run(pure), run(pure)]
    except torch_xla_donate.DonationError as error:
        yield REFUSED, str(error)
    except Exception as error:
        yield DIFFERS, repr(error)
    else:
        is_right = all(is_same(expected, one) for one in found)
        yield (SAME, "") if is_right else (DIFFERS, f"{found}, not {expected}")


def main(first: int, gradients: bool) -> None:
    import torch_xla

    for number, (name, function, leaves, structure) in enumerate(samples(gradients)):
        if number >= first:
            kind = ""
            for kind, text in outcomes(call_of(function, leaves, structure, gradients), leaves):
                print(json.dumps([number, name, kind, text]), flush=True)
            if kind == STOCK:
                try:
                    torch_xla.sync()
                    assert (torch.arange(2).to("xla") + 1).tolist() == [1, 2]
                except Exception:
                    os._exit(1)  # its work would fail with that of the next sample


@pytest.mark.parametrize(("gradients", "least"), [(False, 1200), (True, 700)])
def test_operations_in_a_pure_function(gradients, least):
    found: dict[int, list[Any]] = {}
    while True:
        command = [sys.executable, __file__, str(len(found)), str(int(gradients))]
        done = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=False)
        lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
        found |= {number: rest for number, *rest in lines}
        if done.returncode == 0:
            break
        assert lines, done.stderr  # it ended at a sample
    counts = Counter(kind for _, kind, _ in found.values())
    differing = {name: text for name, kind, text in found.values() if kind == DIFFERS}
    assert not differing
    assert counts[SAME] >= least, counts


if __name__ == "__main__":
    main(int(sys.argv[1]), bool(int(sys.argv[2])))
