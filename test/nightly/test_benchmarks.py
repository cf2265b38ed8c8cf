"""The benchmarks run, in their smallest sizes, and write well-formed results. No time is asserted."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch_xla
from children import in_process, run_file, run_in_child
from helpers import ROOT, import_from

import torch_xla_donate

BENCHMARKS = ROOT / "benchmarks"
HEAD = {"benchmark", "date", "commit", "command", "options", "cpu", "cores", "machine", "versions"}


def run(script: str, results: Path, *options: str, exit_code: int = 0) -> tuple[str, dict[str, Any]]:
    """The output of the benchmark, and its result file."""
    done = run_file(BENCHMARKS / script, "--results", str(results), *options, timeout=1800, exit_code=exit_code)
    path = results / script.replace(".py", ".json")
    found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return done.stdout, found


def assert_neutral(found: dict[str, Any]) -> None:
    """The head is complete, and does not identify the machine."""
    assert found.keys() >= HEAD
    assert found["versions"].keys() - {"jax", "jaxlib", "libtpu"} == {
        "torch_xla_donate",
        "torch",
        "torch_xla",
        "python",
    }
    assert str(Path.home()) not in json.dumps(found)
    assert str(BENCHMARKS.parent) not in json.dumps(found)


def measured(script: str, results: Path, *said: str) -> dict[str, Any]:
    """The result file of the smallest size, after a look at its head, its numbers and what the benchmark prints."""
    printed, found = run(script, results, "--tiny")
    assert all(text in printed for text in said)
    assert_neutral(found)
    assert_numbers(found)
    return found


#: Costs, sizes and ratios.
ABOVE_0 = {
    *("donate_buffer_ns", "set_buffer_donation_ns", "ms", "step_ms", "live_bytes", "peak_bytes", "ratio", "time"),
    *("over_plain", "over_not_donated", "over_jax_donated", "over_jax", "wall", "processor", "thread"),
}


def assert_numbers(found: Any) -> None:
    """Each number is finite, those of `ABOVE_0` are above 0, and what was measured several times is in its order."""
    if isinstance(found, float):
        assert math.isfinite(found)
    if isinstance(found, dict):
        assert "low" not in found or found["low"] <= found["median"] <= found["high"]
        for name in ABOVE_0 & found.keys():
            assert (found[name]["low"] if isinstance(found[name], dict) else found[name]) > 0, name
    for one in found.values() if isinstance(found, dict) else found if isinstance(found, list) else ():
        assert_numbers(one)


FUNCTIONAL = ["not donated", "marks", "compile", "pure=True", "openxla", "JAX", "JAX, donated"]
#: What a benchmark prints, the name of a part of each row, and these parts. It makes its tables of the other parts.
ROWS: dict[str, tuple[str, str, list[str]]] = {
    "mark_cost": ("mark_cost", "state", ["warm", "warm", "after a step"]),
    "jax_side_by_side": (
        "peak memory / live bytes",
        "variant",
        [*FUNCTIONAL[:5], "in place", *FUNCTIONAL[5:], *FUNCTIONAL],
    ),
    "demo": ("Medians of 2 runs.", "mode", ["plain", "donate", "auto"]),
    "step_cost": (
        "hooked / unhooked",
        "case",
        ["nothing marked"] * 2 + ["all replaced"] * 2 + ["beside"] * 3 + ["beside read"] * 3,
    ),
    "call_cost": ("call_cost", "call", ["torch_xla.compile", "lazy", "pure"]),
    "overlap": ("overlap", "variant", ["not donated", "marks", "pure=True", "JAX, donated"]),
}


@pytest.mark.parametrize("name", ROWS)
def test_a_benchmark_measures_what_its_table_compares(name: str, tmp_path: Path) -> None:
    said, part, expected = ROWS[name]
    assert [row[part] for row in measured(f"{name}.py", tmp_path, said)["rows"]] == expected


def test_auto_donate_aliases_at_least_what_an_expert_donates(tmp_path: Path) -> None:
    found = measured("auto_patterns.py", tmp_path, "aliased: auto", "cache[:, i] = k")
    rows = {row["pattern"]: row for row in found["rows"]}
    assert len(rows) == 13
    # The weights are held by the graph of the loss; the momentum, half of the bytes, is not.
    loss_kept = rows.pop("torch.autograd.grad, loss kept")
    assert 2 * loss_kept["aliased_bytes"]["auto"] == loss_kept["aliased_bytes"]["by hand"] > 0
    for row in rows.values():
        aliased, copied, kept = row["aliased_bytes"], row["copied_bytes"], row["kept_bytes"]
        assert aliased["by hand"] > 0
        assert copied["auto"] <= copied["by hand"]
        assert kept["auto"] >= kept["by hand"]
    assert found["aim"]["met"] is True  # the values are the same, and as much is aliased
    # Patterns that torch_xla aliases automatically stay so, with fewer copies. It aliases at most a part of the others.
    for key in ("aliased_bytes", "kept_bytes"):
        assert len(set(rows["torch.optim.AdamW, in place"][key].values())) == 1
    without_upstream = [name for name, row in rows.items() if row["aliased_bytes"]["upstream"] == 0]
    assert set(rows) - set(without_upstream) == {"torch.optim.AdamW, in place", "moving average of weights"}
    # A slice assignment copies the whole cache, unless it is donated.
    for name, cache in (("KV cache, cache[i] = k", 16 * 16 * 4), ("KV cache, cache[:, i] = k", 8 * 16 * 16 * 4)):
        assert rows[name]["copied_bytes"]["upstream"] >= cache
        assert rows[name]["copied_bytes"]["auto"] < cache
        assert rows[name]["aliased_bytes"]["auto"] >= cache


def test_the_bits_of_an_example_are_compared(tmp_path: Path) -> None:
    found = measured("example_bits.py", tmp_path, "met")
    assert [row["example"] for row in found["rows"]] == ["quickstart"]
    assert all(found["rows"][0][way] == {"tensors": 2, "different": 0} for way in ("as written", "automatic"))


def test_a_kept_order_leaves_the_last_bits_as_they_are(tmp_path: Path) -> None:
    found = measured("last_bits.py", tmp_path, "torch.optim, auto, order kept")
    different = {row["way"]: row["different"] for row in found["rows"]}
    assert len(different) == 6
    assert different["torch.optim, auto"] == 1  # the known one, so the switch has something to keep
    assert different["torch.optim, auto, order kept"] == different["functions, auto, order kept"] == 0
    assert found["aim"]["met"] is True


DUMP = """# callgrind format
thread: {thread}

desc: Trigger: {trigger}
events: Ir
summary: {count}
"""


@in_process
def test_step_cost_counts_the_thread_that_steps(tmp_path: Path) -> None:
    # GIVEN the files of two dumps with two threads each, of an empty dump, and of the end of the process
    for part, thread, trigger, count in (
        (1, 1, "dump 10 False on", 500),
        (1, 2, "dump 10 False on", 7),
        (2, 1, "dump 10 False off", 300),
        (2, 2, "dump 10 False off", 9),
        (3, 1, "dump nothing", 20),
        (4, 1, "Program termination", 1000),
    ):
        text = DUMP.format(thread=thread, trigger=trigger, count=count)
        (tmp_path / f"counts.{part}-0{thread}").write_text(text, encoding="utf-8")
    # WHEN they are read
    totals = import_from("benchmarks", "step_cost").totals(tmp_path)
    # THEN each dump has the count of its first thread, without what an empty dump has
    assert totals == {"10 False on": 480, "10 False off": 280}


def test_step_cost_takes_what_a_step_without_live_tensors_costs_from_that_of_each() -> None:
    step_cost = import_from("benchmarks", "step_cost")
    rows: list[dict[str, Any]] = [{"case": "beside", "tensors": 10}, {"case": "all replaced", "tensors": 10}]
    counts = {"on": (700, 100), "off": (400, 90), "unhooked": (380, 80)}
    found = {f"beside,{n},{name}": pair[n == 0] for name, pair in counts.items() for n in (10, 0)}
    step_cost.add_instructions(rows, found)
    assert rows[0]["auto_instructions_for_each"] == (700 - 100) / 10 - (400 - 90) / 10
    assert rows[0]["stock_instructions_for_each"] == (380 - 80) / 10
    assert "instructions" not in rows[1]


def test_run_runs_the_named_benchmarks_and_refuses_others(tmp_path: Path) -> None:
    printed, _ = run("run.py", tmp_path, "--tiny", "mark_cost")
    assert "mark_cost" in printed
    assert [path.name for path in tmp_path.iterdir()] == ["mark_cost.json"]
    run("run.py", tmp_path, "no_such_benchmark", exit_code=2)


def test_soak_passes_its_own_checks_over_a_few_hundred_steps(tmp_path: Path) -> None:
    printed, found = run("soak.py", tmp_path, "--steps", "400", "--devices", "4")
    assert "420 steps on 4 devices, a thread for each" in printed
    assert_neutral(found)
    assert found["failures"] == []
    assert found["compiles"] > 0 and found["compiles_after_warm_up"] == 0
    assert len(found["kinds"]) == 7 and not any(found["kinds"].values())
    assert found["registry_after_warm_up"].keys() == found["registry_allowed"].keys() >= {"pending", "consumed"}


def soak_with(change: str, results: Path) -> None:
    soak = import_from("benchmarks", "soak")
    if change == "wrong values":
        soak.expected = lambda updates: (0.0, 0.0)
    if change == "a leak":
        kept = []
        soak.KINDS = (*soak.UPDATES, lambda loop: not kept.append(torch.ones(1 << 18)))
    if change == "marks that stay":
        kept = []

        def mark(loop):
            kept.append(torch.ones(8).to(loop.device))
            torch_xla.sync()
            torch_xla_donate.donate_buffer(kept[-1])
            return True

        soak.KINDS = (*soak.UPDATES, mark)
    soak.main(["--steps", "280", "--devices", "2", "--results", str(results)])


@pytest.mark.filterwarnings("ignore:TORCH_XLA_DONATE=0 switches")
@pytest.mark.parametrize(
    ("change", "env", "says"),
    [
        ("wrong values", {}, "the weights are"),
        ("a leak", {}, "resident memory grows by"),
        ("marks that stay", {}, "the registry grows"),
        ("no donation", {"TORCH_XLA_DONATE_DEBUG_NANS": "1"}, "0 of 20 steps of kind marked did what they are for"),
        ("no package", {"TORCH_XLA_DONATE": "0"}, "FAILED: device"),
    ],
)
def test_soak_fails_without_its_subject(change: str, env: dict[str, str], says: str, tmp_path: Path) -> None:
    process = run_in_child(soak_with, change, tmp_path, env=env, timeout=1800, exit_code=1)
    assert says in process.stderr
    assert change == "no package" or json.loads((tmp_path / "soak.json").read_text(encoding="utf-8"))["failures"]


def test_no_tensor_of_a_state_moves_in_any_way_of_donating(tmp_path: Path) -> None:
    found = measured("moved_tensors.py", tmp_path, "AdamW in place", "Aim")
    assert found["rows"][0]["pattern"] == "functional Adam"
    stock = found["rows"][0]["ways"]["stock"]
    assert stock["moved"] == stock["tensors"]  # so a tensor that moves is seen
    for row in found["rows"]:
        assert row["ways"]["stock"]["compiled"] == 0
        assert all(counts["tensors"] >= 8 for counts in row["ways"].values())
    assert found["aim"]["met"]


def test_donation_copies_compares_the_compilers(tmp_path: Path) -> None:
    found = measured("donation_copies.py", tmp_path, "copied: v6e")
    rows = {row["program"]: row["compilers"] for row in found["rows"]}
    assert list(rows) == ["cache: index_copy", "SGD of three layers", "old @ old"]
    for row in found["rows"]:
        for topology, compiled in row["compilers"].items():
            assert compiled["donated"]["alias_bytes"] == row["donated_bytes"][topology] > 0
            assert compiled["not donated"]["alias_bytes"] == 0
    # A write into a cache copies the cache, unless it is donated.
    for compiled in rows["cache: index_copy"].values():
        assert (compiled["not donated"]["copies"], compiled["donated"]["copies"]) == (1, 0)
    added = {
        topology: compiled["donated"]["copies"] - compiled["not donated"]["copies"]
        for topology, compiled in rows["SGD of three layers"].items()
    }
    assert added["cpu"] > 0 == added["v6e:1x1"]
    assert found["aim"]["met"]


def test_growth_measures_each_part_at_each_size_and_draws_it(tmp_path: Path) -> None:
    found = measured("growth.py", tmp_path, "donation_report")
    assert len(found["ns"]) == 8
    for part, by_size in found["ns"].items():
        assert list(by_size) == ["2", "20"]
        if part not in ("auto_donate, beside live tensors", "outcomes, on other threads"):  # differences of two times
            assert all(cost > 0 for cost in by_size.values())
    assert "donate_buffer of a list" in (tmp_path / "growth.svg").read_text(encoding="utf-8")


def test_growth_finds_the_parts_that_bend() -> None:
    growth = import_from("benchmarks", "growth")
    flat, bent = {"10": 90.0, "1000": 5.0, "10000": 9.0}, {"1000": 5.0, "10000": 11.0, "100000": 30.0}
    assert growth.bends({"flat": flat, "bent": bent, "without 1,000": {"10": 1.0}}) == {"bent": 10_000}


def test_first_call_measures_the_import_and_the_same_step_in_three_ways(tmp_path: Path) -> None:
    found = measured("first_call.py", tmp_path, "first_call", "The import takes")
    for row in found["rows"]:
        assert 0 < row["compile"] < row["seconds"]
