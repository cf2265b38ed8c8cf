"""`python -m torch_xla_donate verify`, and the record that it reads."""

from __future__ import annotations

import inspect
import json
import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch_xla
from children import in_process, run_command, run_in_child
from click.testing import CliRunner
from helpers import HAS_JAX, make, needs_jax
from rich.console import Group
from sharding import mesh, shard

from torch_xla_donate import _C, compile, donate_buffer, set_auto_donate
from torch_xla_donate import __main__ as command_line
from torch_xla_donate._report import console as tables
from torch_xla_donate._tools import children, record, table
from torch_xla_donate._tools import verify as verifying
from torch_xla_donate._tools.collect import collect
from torch_xla_donate._tools.summary import RunSummary


def recorded(function, folder: Path, *args, exit_code: int | None = None, **options) -> RunSummary:
    """The steps of a function that runs in a forked child."""
    run_in_child(record_and_call, function.__name__, folder, *args, exit_code=exit_code, **options)
    return collect(folder, "test", exit_code=0)


def record_and_call(function: str, folder: Path, *args) -> None:
    record.start(folder)
    globals()[function](*args)
    record.record_runs()  # a forked child ends without atexit


def line_of(function, text: str) -> str:
    """``file:line`` of the only line of a function with a text."""
    lines, first = inspect.getsourcelines(function)
    (number,) = [number for number, line in enumerate(lines) if text in line]
    return f"{inspect.getsourcefile(function)}:{first + number}"


def all_kinds_of_donors() -> None:
    set_auto_donate(True)
    state = {"marked": make(1024)}
    taken = make(1024)
    layer = torch.nn.Linear(8, 8).to("xla")
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    torch_xla.sync()
    for _ in range(3):
        taken = taken + 1
        old, state = state, {"marked": state["marked"] * 2}
        donate_buffer(old)  # the mark
        del old
        layer(torch.ones(2, 8).to("xla")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        torch_xla.sync()  # the step


def test_marked_automatic_and_own_donors_are_distinguished(tmp_path):
    steps = recorded(all_kinds_of_donors, tmp_path).steps
    looped = [step for step in steps if line_of(all_kinds_of_donors, "# the step") in step.sites]
    assert sum(step.executed or 0 for step in looped) == 3
    last = steps[-1]
    kinds = {(donor.kind, donor.name) for donor in last.donors}
    assert sorted(kinds) == [("automatic", ""), ("marked", "['marked']"), ("torch_xla", "")]
    (marked,) = [donor for donor in last.donors if donor.kind == "marked"]
    assert marked.where == line_of(all_kinds_of_donors, "# the mark")
    assert (marked.array, marked.bytes, marked.reason) == ("f32[1024]", 4096, "")
    assert marked.output is not None
    assert last.aliases == len(last.donors) >= 4
    assert last.donated_bytes == last.offered_bytes >= 8192
    assert last.memory is not None
    assert last.memory.alias_bytes >= 8192


def compiled_functions() -> None:
    step = compile(lambda a, b: (a + b, a - 1), donate_argnums=(0, 1), pure=True)
    a, b = make(64), make(64)
    for _ in range(4):
        a, b = step(a, b)


def test_runs_of_compiled_functions_are_recorded(tmp_path):
    run = recorded(compiled_functions, tmp_path)
    (step,) = [step for step in run.steps if step.executed == 4]
    assert [donor.kind for donor in step.donors] == ["marked", "marked"]
    assert step.aliases == 2


def unusable_donors() -> None:
    a, b = make(64), make(3)
    out = a.sum() + b.sum()
    donate_buffer({"long": a, "short": b})
    torch_xla.sync()
    print(out)


@pytest.mark.filterwarnings("ignore::torch_xla_donate.DonationWarning")
def test_a_donor_without_an_output_has_a_reason(tmp_path):
    run = recorded(unusable_donors, tmp_path)
    (step,) = [step for step in run.steps if step.donors]
    assert {(donor.name, donor.output) for donor in step.donors} == {("['long']", None), ("['short']", None)}
    assert all("no output of the step has its size" in donor.reason for donor in step.donors)
    assert run.donated_fraction == 0.0


def killed_in_a_loop() -> None:
    x = make(64)
    for _ in range(3):
        x = x + 1
        torch_xla.sync()
        os.closerange(3, 64)  # as a program that becomes a daemon does
    os.kill(os.getpid(), signal.SIGKILL)


def test_the_record_survives_a_kill_and_closed_files(tmp_path):
    run = recorded(killed_in_a_loop, tmp_path, exit_code=-signal.SIGKILL)
    assert sum(step.executed or 0 for step in run.steps) == 3


@in_process
def test_donors_that_are_not_found_do_not_wait_at_each_run(tmp_path):
    """A wait at each run would let no run begin before the one before has ended."""
    waits = []
    runs = record._Record(tmp_path)
    run = {"executable": 1, "header": "", "stack": [], "has_donors": True, "graph": "dropped"}
    sys.setprofile(lambda frame, event, call: waits.append(1) if call is _C.wait_for_steps else None)
    for _ in range(50):
        runs.add(run)
    sys.setprofile(None)
    assert 0 < len(waits) <= 2 * record._TRIES  # c_call and c_return
    assert len((tmp_path / "main" / record.NAME).read_text().splitlines()) == 50


def alike_graphs() -> None:
    for _ in range(2):
        x, y = make(64), make(64)
        x = x + 2
        torch_xla.sync()  # the sum
        y = y * 2
        torch_xla.sync()  # the product


def test_graphs_of_one_signature_are_distinguished(tmp_path):
    steps = recorded(alike_graphs, tmp_path).steps
    found = [(step.executed, step.sites) for step in steps]
    assert (2, (line_of(alike_graphs, "# the sum"),)) in found
    assert (2, (line_of(alike_graphs, "# the product"),)) in found


def flags_of_the_user() -> None:
    before = os.environ["XLA_FLAGS"]
    x = make(8) + 1
    torch_xla.sync()
    print(before, os.environ["XLA_FLAGS"], x.shape, sep="\n")


def test_xla_flags_of_the_user_are_kept(tmp_path):
    """Except the folder of a dump. Programs that this one starts later must not dump into the folder."""
    # torch_xla 2.8 adds the second one if it is not there.
    given = ["--xla_cpu_enable_fast_math=false", "--xla_gpu_force_compilation_parallelism=8"]
    flags = " ".join([*given, f"--xla_dump_to={tmp_path / 'users'}"])
    done = run_in_child(record_and_call, "flags_of_the_user", tmp_path / "ours", env={"XLA_FLAGS": flags})
    during, after, _ = done.stdout.splitlines()
    assert during.split() == [*given, f"--xla_dump_to={tmp_path / 'ours' / 'main'}", "--xla_dump_hlo_as_text"]
    assert after == flags
    assert not (tmp_path / "users").exists()


SPAWNS = """
import multiprocessing, sys
import torch, torch_xla

def work(rank):
    x = torch.ones(16, 16).to("xla")
    for _ in range(2 + rank):
        x = x * 0.5
        torch_xla.sync()

if __name__ == "__main__":
    process = multiprocessing.get_context("spawn").Process(target=work, args=(0,))
    process.start()
    process.join()
    work(1)
    print("arguments", sys.argv[1:])
    sys.exit(7)
"""


def test_a_program_of_several_processes_is_verified(tmp_path):
    """Each process has a record. The exit code is the program's; the JSON has the steps of all processes."""
    script = tmp_path / "spawns.py"
    script.write_text(SPAWNS)
    options = ["--auto", "--json", "-", "--keep", str(tmp_path / "kept")]
    done = run_command("verify", *options, str(script), "--json", "x", exit_code=7)
    assert "arguments ['--json', 'x']" in done.stderr
    assert "the program ended with exit code 7" in done.stderr
    found = json.loads(done.stdout)
    assert found["exit_code"] == 7
    (step,) = [step for step in found["steps"] if step["executed"] == 5]
    assert step["sites"] == [f"{script}:9"]
    assert [donor["kind"] for donor in step["donors"]] == ["automatic"]
    assert {path.name for path in (tmp_path / "kept").iterdir()} == {"main", "process_1"}


def sharded_donors() -> None:
    mesh()
    x = shard(make(64), "x")
    torch_xla.sync()
    for _ in range(3):
        old, x = x, x * 2
        donate_buffer(old)
        del old
        torch_xla.sync()


def test_a_sharded_program_has_the_bytes_of_a_device(tmp_path):
    steps = recorded(sharded_donors, tmp_path, devices=4).steps
    assert sum(step.executed or 0 for step in steps if step.donors) == 3
    donors = [donor for step in steps for donor in step.donors]
    assert {(donor.kind, donor.array, donor.bytes, donor.output) for donor in donors} == {("marked", "f32[16]", 64, 0)}


LOOP = """
import os, signal
import torch
import torch_xla
import torch_xla_donate

x = torch.ones(64, 64).to("xla")
torch_xla.sync()
y = x * 3
torch_xla.sync()
torch_xla_donate.set_auto_donate(True)
for _ in range(4):
    x = x * 0.5 + 1
    torch_xla.sync()
print(x[0, 0].item(), y[0, 0].item(), flush=True)
os.kill(os.getppid(), signal.SIGTERM)
signal.pause()
"""


def test_a_program_that_a_signal_ends_has_its_table(tmp_path):
    """`verify` passes SIGTERM on, and ends with the code that a shell shows for it.

    With `--undonated` the table of the same run has the memory without donation.
    """
    script, file = tmp_path / "script.py", tmp_path / "run.json"
    script.write_text(LOOP)
    options = ["--json", str(file), *["--undonated"] * HAS_JAX]
    shown = run_command("verify", *options, str(script), exit_code=128 + signal.SIGTERM).stdout
    assert "1.9375 3.0" in shown
    assert "ran 1 time at script.py:10" in shown
    assert "the program ended with signal 15" in " ".join(shown.split())
    steps = json.loads(file.read_text())["steps"]
    (donating,) = [step for step in steps if step["donors"]]
    plain = [step for step in steps if step is not donating]
    assert plain
    if HAS_JAX:
        assert donating["memory"]["alias_bytes"] - donating["undonated"]["alias_bytes"] == 16384
        assert all(step["undonated"] == step["memory"] for step in plain)


@in_process
def test_an_ignored_signal_stays_ignored():
    """As under `nohup`. The child inherits it."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    mine = signal.getsignal(signal.SIGTERM)
    popen = subprocess.Popen

    def start(*args, **options):
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        os.kill(os.getpid(), signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGTERM)  # before the child has started
        return popen(*args, **options)

    with mock.patch.object(subprocess, "Popen", start):
        assert verifying._run(["sleep", "600"], None) == -signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is mine


def halve(size: int, *others: int) -> None:
    if others:
        fork_halves(*others)
    x = torch.ones(size, 64).to("xla")
    torch_xla.sync()
    for _ in range(4):
        x = x * 0.5
        torch_xla.sync()


def fork_halves(*sizes: int) -> None:
    """A child process for the first size. It has a child for the others, before it steps."""
    process = multiprocessing.get_context("fork").Process(target=halve, args=sizes)
    process.start()
    process.join()


def run_forked_halves() -> None:
    children.prepare()
    fork_halves(64)
    fork_halves(64, 256)


def test_forked_processes_have_records(tmp_path):
    """multiprocessing ends them without atexit."""
    run = recorded(run_forked_halves, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"main", "process_1", "process_2", "process_3"}
    assert run.skipped == ()
    assert [step.executed for step in run.steps if step.parameters == 2] == [8, 4]


@needs_jax
@in_process
def test_a_dump_of_jax_is_read(dump_folder):
    import jax

    def update(state, gradients):
        return {name: value - 0.1 * gradients[name] for name, value in state.items()}

    state, gradients = ({name: jax.numpy.ones((64, 4)) for name in "ab"} for _ in range(2))
    jax.block_until_ready(jax.jit(update, donate_argnums=0)(state, gradients))
    (step,) = [step for step in collect(dump_folder, "jax").steps if step.module == "jit_update"]
    assert [(donor.kind, donor.array, donor.output) for donor in step.donors] == [
        ("unknown", "f32[64,4]", 0),
        ("unknown", "f32[64,4]", 1),
    ]


@needs_jax
@pytest.mark.filterwarnings("ignore::torch_xla_donate.DonationWarning")
@in_process
def test_a_topology_shows_where_it_differs(dump_folder):
    """f32[100] is padded to a tile of 128 elements on a TPU, so f32[128] takes its memory there."""
    a = make(100)
    out = torch.cat([a, make(28)])
    donate_buffer(a)
    torch_xla.sync()
    run = collect(dump_folder, "test", topology="v6e:1x1")
    (step,) = [step for step in run.steps if any(donor.array == "f32[100]" for donor in step.donors)]
    there = step.on_topology
    assert there is not None
    assert (there.topology, there.module, run.skipped) == ("v6e:1x1", step.module, ())
    assert [donor.output for donor in step.donors if donor.array == "f32[100]"] == [None]
    assert [donor.output for donor in there.donors if donor.array == "f32[100]"] == [0]
    shown = tables.render(Group(*table.tables(run)), width=80)
    assert "on v6e:1x1" in shown
    assert "(differs)" in shown
    assert "peak on v6e:1x1" in shown
    assert out.shape == (128,)


@needs_jax
def test_an_unknown_topology_is_refused_before_the_program_runs(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("raise SystemExit('it ran')\n")
    done = CliRunner().invoke(command_line.main, ["verify", "--topology", "v9z:1x1", str(script)])
    assert done.exit_code == 2
    assert "topology 'v9z:1x1' does not exist" in done.output
    assert "it ran" not in done.output
