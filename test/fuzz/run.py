"""Runs random programs with and without donation and on the CPU, and compares: python -m fuzz.run.

`--kind states` runs programs that call a function of a state several times, in each way of donating (`fuzz.states`,
`fuzz.farm`). The rest of this file is about `--kind operations`: programs with automatic donation and without it.

A difference between with and without is a failure, which hypothesis shrinks. If torch_xla without donation differs from
the CPU, or goes wrong itself, the program says nothing about donation; such programs are counted.
"""

from __future__ import annotations

import collections
import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

import click
import torch
import torch_xla
import torch_xla.core.xla_model as xm
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as with_seed
from hypothesis import strategies as st

import torch_xla_donate
from fuzz import states
from fuzz.farm import Worker
from fuzz.programs import WEIGHTED, Machine, Program

PROGRAMS = st.lists(st.tuples(st.sampled_from(WEIGHTED), *[states.NUMBERS] * 3), min_size=3, max_size=28)
counts = collections.Counter(programs=0, of_stock=0, compared=0, donated=0)


def _step(wait: bool) -> None:
    torch_xla.sync(wait=wait)
    counts["steps"] += 1
    for donor in torch_xla_donate.donation_report(steps=1).donors if counts["steps"] % 7 == 0 else ():
        counts["donors"] += 1
        counts["donated"] += donor.outcome == "donated"


def _outside(machine: Machine, x: torch.Tensor, number: int) -> None:
    """A view of the buffer that torch_xla does not see as a tensor, and what it shows at the end."""
    if x.dtype != torch.float32 or not x.dim() or x.requires_grad:
        return
    if machine.device == "cpu":
        machine.put(machine.small(x + 1), number)
    else:
        from torch_xla.utils.dlpack import to_dlpack

        fresh = machine.small(x + 1)  # stock torch_xla ends the process for a view
        torch_xla.sync(wait=True)
        view = torch.utils.dlpack.from_dlpack(to_dlpack(fresh))
        machine.put(fresh, number)
        machine.views.append((view, view.clone()))  # type: ignore[attr-defined]


def _closure(machine: Machine, x: torch.Tensor, number: int) -> None:
    value = x.detach()
    if machine.device == "cpu":
        machine.seen.append(("closure", value.tolist()))
    else:
        xm.add_step_closure(lambda t: machine.seen.append(("closure", t.cpu().tolist())), args=(value,))


def _marked(machine: Machine, x: torch.Tensor, number: int) -> None:
    """An explicit mark in the same step."""
    fresh = machine.small(x.detach() + 1)
    machine.step(True)
    if machine.device != "cpu":
        torch_xla_donate.donate_buffer(fresh)
    machine.put(machine.small(fresh * 3), number)
    del fresh
    machine.step(True)


def _shard(machine: Machine, x: torch.Tensor, number: int) -> None:
    import numpy as np
    import torch_xla.distributed.spmd as xs

    if machine.device == "cpu" or x.dim() == 0 or x._is_view() or x.requires_grad:
        return
    mesh = xs.Mesh(np.arange(4), (4,), ("x",))
    dims = [i for i, size in enumerate(x.shape) if size % 4 == 0]
    spec: list[Any] = [None] * x.dim()
    if dims and number % 3:
        spec[dims[number % len(dims)]] = "x"
    xs.mark_sharding(x, mesh, tuple(spec))


def _run(program: Program, device: str, sharded: bool) -> dict[str, Any]:
    extra = {"closure": _closure, "marked": _marked}
    if sharded:
        extra["shard"] = _shard
    else:
        extra["outside"] = _outside
    machine = Machine(device, _step if device != "cpu" else lambda wait: None, extra)
    machine.views = []  # type: ignore[attr-defined]
    result = machine.run(program)
    # A closure runs at the end of a step, and the last has been: what is seen is the same, at another place.
    result["closures"] = sorted(str(item) for item in result["seen"] if isinstance(item, tuple))
    result["seen"] = [item for item in result["seen"] if not isinstance(item, tuple)]
    result["outside"] = [bool(torch.equal(view, copy)) for view, copy in machine.views]  # type: ignore[attr-defined]
    return result


def compare(program: Program, sharded: bool) -> None:
    """AssertionError if automatic donation changes anything that the program computes."""
    counts["programs"] += 1
    if counts["programs"] % 1000 == 0:  # two hours are long
        click.echo(json.dumps(counts), err=True)
    expected = _run(program, "cpu", sharded)
    try:
        without = _run(program, "xla", sharded)
    except torch_xla_donate.DonationError:
        raise
    except RuntimeError:
        # Stock torch_xla has destroyed a buffer that its own last step needs: there is nothing to compare with.
        without = None
    if without is None:
        counts["of_stock"] += 1
        gc.collect()  # as long as tensors without a buffer live, each step fails
        return
    counts["compared"] += 1
    if any(without[key] != expected[key] for key in expected if key != "outside"):
        counts["of_stock"] += 1
    with torch_xla_donate.auto_donate():
        found = _run(program, "xla", sharded)
    told = [] if all(found["outside"]) else ["memory seen from outside has changed"]
    for key in without:
        if found[key] != without[key]:
            told.append(f"{key}: {found[key]} with automatic donation, {without[key]} without")
    assert not told, "\n".join(told)


def compile_fast() -> None:
    """XLA without its optimisations: compiling takes half the time. Donors, aliases and copies stay as they are."""
    flag = "--xla_backend_optimization_level"
    flags = os.environ.get("XLA_FLAGS", "")
    if flag not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {flag}=0"


def compare_state(worker: Worker, program: states.Program, mode: str) -> None:
    """AssertionError if a program of `fuzz.states` has a wrong value that torch_xla alone does not have."""
    outcome, fault = worker.judge(program, mode)
    counts.update(
        {mode: 1, "refused": bool(outcome.refused), "consumed": outcome.consumed, "checks": outcome.checks},
        programs=1,
        donated=outcome.donated,
    )
    counts[fault or "compared"] += 1
    if counts["programs"] % 1000 == 0:  # an hour is long
        click.echo(json.dumps(counts), err=True)
    alone = states.render(program, mode, worker.sharded).alone(worker.sharded)
    assert fault != "ours", "\n".join([mode, *outcome.wrong, "", alone])


@click.command()
@click.option("--programs", default=300, show_default=True, help="How many to try.")
@click.option("--seed", default=0, show_default=True, help="Programs follow from it.")
@click.option("--sharded", is_flag=True, help="Under SPMD, with operations that shard.")
@click.option("--kind", type=click.Choice(("operations", "states")), default="operations", show_default=True)
@click.option("--mode", "modes", multiple=True, type=click.Choice(states.MODES), default=states.TURNS, help="States.")
@click.option("--last", type=click.Path(path_type=Path), help="Receives each program before it runs, for a crash.")
def main(programs: int, seed: int, sharded: bool, kind: str, modes: tuple[str, ...], last: Path | None) -> None:
    compile_fast()
    worker = Worker(sharded)
    if sharded and kind == "operations":
        import torch_xla.runtime as xr

        xr.use_spmd()

    @with_seed(seed)
    @settings(
        max_examples=programs,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink),
    )
    @given(
        st.tuples(states.PROGRAMS, st.integers(0, 999).map(lambda number: modes[number % len(modes)]))
        if kind == "states"
        else st.tuples(PROGRAMS)
    )
    def check(drawn: tuple[Any, ...]) -> None:
        if last is not None:
            last.write_text(repr(drawn))
        if kind == "states":
            compare_state(worker, *drawn)
        else:
            compare(*drawn, sharded)

    check()
    print(json.dumps(counts))
    if not counts["compared"]:
        raise click.ClickException("no program says anything about donation: torch_xla itself fails in each.")


if __name__ == "__main__":
    sys.exit(main())
