"""The benchmarks run, in their smallest sizes, and write well-formed results. No time is asserted."""

from __future__ import annotations

import importlib
import json
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from children import in_process, run_file, run_in_child

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
HEAD = {"benchmark", "date", "command", "options", "machine", "versions"}


def run(script: str, results: Path, *options: str, exit_code: int = 0) -> tuple[str, dict[str, Any]]:
    """The output of the benchmark, and its result file."""
    done = run_file(BENCHMARKS / script, "--results", str(results), *options, timeout=1800, exit_code=exit_code)
    path = results / script.replace(".py", ".json")
    found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return done.stdout, found


def assert_neutral(found: dict[str, Any]) -> None:
    """The head is complete, and does not identify the machine."""
    assert found.keys() >= HEAD
    assert found["versions"].keys() == {"torch_xla_donate", "torch", "torch_xla", "python"}
    assert str(Path.home()) not in json.dumps(found)
    assert str(BENCHMARKS.parent) not in json.dumps(found)


def assert_ratio(found: dict[str, float]) -> None:
    assert found.keys() == {"median", "quarter", "three_quarters", "low", "high"}
    assert 0 < found["low"] <= found["median"] <= found["high"]


def test_mark_cost_compares_each_form_with_the_private_call(tmp_path: Path) -> None:
    printed, found = run("mark_cost.py", tmp_path, "--tiny")
    assert "mark_cost" in printed
    assert_neutral(found)
    assert {row["form"] for row in found["rows"]} == {"list", "dict", "module"}
    for row in found["rows"]:
        assert row["donate_buffer_ns"] > 0
        assert row["set_buffer_donation_ns"] > 0
        assert_ratio(row["ratio"])
    assert found["aim"].keys() == {"text", "limit", "met"}


def test_step_overhead_compares_hooks_and_ways_to_donate(tmp_path: Path) -> None:
    """It compares hooked with unhooked, and donated with in-place."""
    printed, found = run("step_overhead.py", tmp_path, "--tiny")
    assert "hooked / unhooked" in printed
    assert_neutral(found)
    assert found["instructions"] in ("available", "not available")
    for row in found["nothing_marked"]:
        assert_ratio(row["wall"])
        assert_ratio(row["processor"])
        assert (row["instructions"] is None) == (found["instructions"] == "not available")
    for row in found["all_donated"]:
        assert_ratio(row["donated_over_in_place"]["wall"])
        assert_ratio(row["donated_over_not_donated"]["wall"])
    assert found["growth_per_parameter"].keys() == {"from", "to", "donated", "not_donated"}
    assert found["aim"].keys() == {"text", "limit", "verdict"}


def test_peak_memory_runs_every_variant_in_a_process_of_its_own(tmp_path: Path) -> None:
    printed, found = run("peak_memory.py", tmp_path, "--tiny")
    assert "peak / live" in printed
    assert_neutral(found)
    assert [row["variant"] for row in found["rows"]] == ["not_donated", "donated", "in_place"]
    for row in found["rows"]:
        assert row["live_bytes"] > 0
        assert row["peak_over_live"] >= 0
        assert_ratio(row["time"])


def test_jax_side_by_side_compares_each_variant_with_jax(tmp_path: Path) -> None:
    """JAX donates, too."""
    printed, found = run("jax_side_by_side.py", tmp_path, "--tiny")
    assert "peak / live" in printed
    assert_neutral(found)
    variants = ["jax", "jax_donated", "lazy", "lazy_donated", "pure_donated", "openxla_donated"]
    assert [row["variant"] for row in found["rows"]] == variants * 2
    assert [row["update"] for row in found["rows"]] == ["sgd"] * 6 + ["adam"] * 6
    for row in found["rows"]:
        assert row["live_bytes"] > 0
        # Next to nothing at this size, and below the start where the process gives memory back meanwhile.
        assert math.isfinite(row["peak_over_live"])
        assert 0 < row["dispatch_ms"] <= row["step_ms"]
        assert_ratio(row["step"])
        assert_ratio(row["dispatch"])


def test_auto_donate_aliases_at_least_what_an_expert_donates(tmp_path: Path) -> None:
    printed, found = run("auto_patterns.py", tmp_path, "--tiny")
    assert "auto / hand" in printed and "cache[:, i] = k" in printed
    assert_neutral(found)
    rows = {row["pattern"]: row for row in found["rows"]}
    assert len(rows) == 13
    # The weights are held by the graph of the loss; the momentum, half of the bytes, is not.
    loss_kept = rows.pop("torch.autograd.grad, loss kept")
    assert loss_kept["same_values"]
    assert 2 * loss_kept["aliased_bytes"]["auto"] == loss_kept["aliased_bytes"]["by hand"] > 0
    for row in rows.values():
        aliased, copied, kept = row["aliased_bytes"], row["copied_bytes"], row["kept_bytes"]
        assert row["same_values"]
        assert aliased["auto"] >= aliased["by hand"] > 0
        assert copied["auto"] <= copied["by hand"]
        assert kept["auto"] >= kept["by hand"]
    assert found["aim"]["met"] is True
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
    printed, found = run("example_bits.py", tmp_path, "--tiny")
    assert "met" in printed
    assert [row["example"] for row in found["rows"]] == ["quickstart"]
    assert all(found["rows"][0][way] == {"tensors": 2, "different": 0} for way in ("as written", "automatic"))


def test_a_kept_order_leaves_the_last_bits_as_they_are(tmp_path: Path) -> None:
    printed, found = run("last_bits.py", tmp_path, "--tiny")
    assert "torch.optim, auto, order kept" in printed
    assert_neutral(found)
    different = {row["way"]: row["different"] for row in found["rows"]}
    assert len(different) == 6
    assert different["torch.optim, auto"] == 1  # the known one, so the switch has something to keep
    assert different["torch.optim, auto, order kept"] == different["functions, auto, order kept"] == 0
    assert found["aim"]["met"] is True


def assert_difference(found: dict[str, float]) -> None:
    assert found.keys() == {"median", "quarter", "three_quarters", "low", "high"}
    assert found["low"] <= found["median"] <= found["high"]


def test_auto_cost_measures_tensors_donors_and_nothing(tmp_path: Path) -> None:
    printed, found = run("auto_cost.py", tmp_path, "--tiny")
    assert "for each tensor, ns" in printed and "hooked / unhooked" in printed
    assert_neutral(found)
    assert found["instructions"] in ("available", "not available")
    assert [(row["live"], row["read_before"]) for row in found["live_tensors"]] == [
        (live, read) for read in (False, True) for live in (0, 2, 20)
    ]
    for row in found["live_tensors"]:
        assert_ratio(row["on_over_off"])
        assert_difference(row["step_us"])
        if row["live"]:
            assert_difference(row["ns_per_tensor"])
            assert (row["instructions_per_tensor"] is None) == (found["instructions"] == "not available")
    assert [row.keys() for row in found["growth_per_tensor"]] == [{"read_before", "from", "to", "ns"}] * 2
    for row in found["all_replaced"]:
        for key in ("auto_over_not_donated", "by_hand_over_not_donated", "auto_over_by_hand"):
            assert_ratio(row[key]["wall"])
            assert_ratio(row[key]["processor"])
    for row in found["off"]:
        assert_ratio(row["wall"])
    assert [aim.keys() for aim in found["aims"]] == [{"text", "limit", "verdict"}] * 2


DUMP = """# callgrind format
pid: 7
part: {part}
thread: {thread}

desc: Timerange: Basic block 0 - 12
desc: Trigger: {trigger}

positions: line
events: Ir
summary: {count}

fn=(0)
16 2
"""


def import_benchmark(name: str) -> ModuleType:
    sys.path.insert(0, str(BENCHMARKS))
    return importlib.import_module(name)


@in_process
def test_auto_instructions_counts_the_thread_that_steps(tmp_path: Path) -> None:
    # GIVEN the files of two dumps with two threads each, and of the end of the process
    for part, thread, trigger, count in (
        (1, 1, "dump 10 False on", 500),
        (1, 2, "dump 10 False on", 7),
        (2, 1, "dump 10 False off", 300),
        (2, 2, "dump 10 False off", 9),
        (3, 1, "Program termination", 1000),
    ):
        text = DUMP.format(part=part, thread=thread, trigger=trigger, count=count)
        (tmp_path / f"counts.{part}-0{thread}").write_text(text, encoding="utf-8")
    # WHEN they are read
    totals = import_benchmark("auto_instructions").totals(tmp_path)
    # THEN each dump has the count of its first thread
    assert totals == {"10 False on": 500, "10 False off": 300}


def test_auto_instructions_names_what_it_needs(tmp_path: Path) -> None:
    path = BENCHMARKS / "auto_instructions.py"
    done = run_file(path, "--results", str(tmp_path), env={"PATH": str(tmp_path)}, exit_code=1)
    assert "install valgrind" in done.stderr
    assert not list(tmp_path.iterdir())


def test_call_cost_compares_the_ways_to_call_a_function(tmp_path: Path) -> None:
    printed, found = run("call_cost.py", tmp_path, "--tiny")
    assert "call_cost" in printed
    assert_neutral(found)
    assert [row["call"] for row in found["rows"]] == ["torch_xla.compile", "lazy", "pure", "arguments and marks"]
    for row in found["rows"]:
        assert row["ms"] > 0
        assert_ratio(row["ratio"])


def test_run_runs_the_named_benchmarks_and_refuses_others(tmp_path: Path) -> None:
    printed, _ = run("run.py", tmp_path, "--tiny", "mark_cost")
    assert "mark_cost" in printed
    assert [path.name for path in tmp_path.iterdir()] == ["mark_cost.json"]
    run("run.py", tmp_path, "no_such_benchmark", exit_code=2)


def test_soak_passes_its_own_checks_over_a_few_hundred_steps(tmp_path: Path) -> None:
    printed, found = run("soak.py", tmp_path, "--steps", "400")
    assert "400 donating steps" in printed
    assert_neutral(found)
    assert found["failures"] == []
    assert found["compiles"] == 1
    assert found["registry_at_end"] == found["registry_after_warm_up"]


def soak_that_expects_too_little(results: Path) -> None:
    soak = import_benchmark("soak")
    soak.expected = lambda steps: (0.0, 0.0)
    soak.main(["--steps", "100", "--results", str(results)])


def test_soak_exits_non_zero_when_a_check_fails(tmp_path: Path) -> None:
    process = run_in_child(soak_that_expects_too_little, tmp_path, timeout=1800, exit_code=1)
    assert "FAILED: the weights are" in process.stderr
    assert json.loads((tmp_path / "soak.json").read_text(encoding="utf-8"))["failures"]


@pytest.mark.parametrize("path", sorted((BENCHMARKS / "results").glob("*.json")), ids=lambda path: path.stem)
def test_committed_results_are_neutral_and_not_of_a_tiny_run(path: Path) -> None:
    found = json.loads(path.read_text(encoding="utf-8"))
    assert found["benchmark"] == path.stem
    assert_neutral(found)
    assert not found["options"].get("tiny", False)


def test_no_tensor_of_a_state_moves_in_any_way_of_donating(tmp_path: Path) -> None:
    printed, found = run("moved_tensors.py", tmp_path, "--tiny")
    assert "AdamW in place" in printed and "Aim" in printed
    assert_neutral(found)
    assert found["rows"][0]["pattern"] == "functional Adam"
    stock = found["rows"][0]["ways"]["stock"]
    assert stock["moved"] == stock["tensors"]  # so a tensor that moves is seen
    for row in found["rows"]:
        for way, measured in row["ways"].items():
            assert measured["compiled"] == 0
            assert measured["tensors"] >= 8
            if way != "stock":
                assert measured["moved"] == 0, (row["pattern"], way)
    assert found["aim"]["met"]
