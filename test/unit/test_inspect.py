"""Dumps read as text: donors, and files that cannot be read."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Group

from torch_xla_donate import __main__ as command_line
from torch_xla_donate._report import console as tables
from torch_xla_donate._tools import table
from torch_xla_donate._tools.collect import collect, folders_of
from torch_xla_donate._tools.hints import Advice, Hint
from torch_xla_donate._tools.summary import RunSummary, StepDonor, StepSummary

NO_OUTPUT = "no output of the step has its size of 12 bytes (outputs: 1 of 4 bytes, 1 of 128 bytes)"
DONORS = "buffer_donor={ (0, {}), (1, {}) }, "
ALIASES = "input_output_alias={ {0}: (0, {}, may-alias) }, buffer_donor={ (1, {}) }, "
BODY = """
ENTRY %main (p: f32[8,4], q: f32[3]) -> (f32[8,4], f32[]) {
  %p = f32[8,4]{1,0} parameter(0)
  %q = f32[3]{0} parameter(1)
  %copy.1 = f32[8,4]{1,0} copy(f32[8,4]{1,0} %p)
  ROOT %t = (f32[8,4]{1,0}, f32[]) tuple(%copy.1, %q)
}

"""


def rendered(run: RunSummary, width: int = 100) -> str:
    return tables.render(Group(*table.tables(run)), width)


def text(name: str, attributes: str = "", body: str = BODY) -> str:
    layout = "entry_computation_layout={(f32[8,4]{1,0}, f32[3]{0})->(f32[8,4]{1,0}, f32[])}"
    return f"HloModule {name}, is_scheduled=true, {attributes}{layout}\n{body}"


def write(folder: Path, number: int, name: str, *, before: str = DONORS, after: str = ALIASES, prefix: str = "cpu_"):
    (folder / f"module_{number:04}.{name}.before_optimizations.txt").write_text(text(name, before))
    path = folder / f"module_{number:04}.{name}.{prefix}after_optimizations.txt"
    path.write_text(text(name, after))
    return path


def inspected(*words: str, exit_code: int = 0) -> str:
    done = CliRunner().invoke(command_line.main, ["inspect", *words])
    assert done.exit_code == exit_code, done.output
    return str(done.output)


def test_a_donor_has_its_output_and_its_copied_bytes(tmp_path):
    after = write(tmp_path, 0, "step.1")
    run = collect(tmp_path, "dump")
    (step,) = run.steps
    used, unused = step.donors
    assert (step.module, step.file, step.parameters, step.outputs, step.aliases) == ("step.1", str(after), 2, 2, 1)
    assert (used.parameter, used.array, used.bytes, used.kind, used.output) == (0, "f32[8,4]", 128, "unknown", 0)
    assert (used.copied_bytes, used.reason) == (128, "")
    assert (unused.output, unused.reason) == (None, NO_OUTPUT)
    assert (step.executed, step.memory, run.exit_code) == (None, None, None)
    assert (run.donated_fraction, step.donated_bytes, step.offered_bytes) == (128 / 140, 128, 140)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", "input_output_alias={ {0}: (0, {}, may-alias) }, "),
        ("input_output_alias={ {0}: (0, {}, may-alias) }, ", "input_output_alias={ {0}: (0, {}, must-alias) }, "),
        ("input_output_alias={ {0}: (0, {}, may-alias) }, ", ""),
    ],
    ids=["after only", "aliases in both", "dropped"],
)
def test_aliases_are_donors_in_either_text(tmp_path, before, after):
    """As in the dumps of JAX, which writes aliases before optimisation."""
    write(tmp_path, 0, "jit_step", before=before, after=after, prefix="sm_8.0_gpu_")
    (donor,) = collect(tmp_path, "dump").steps[0].donors
    assert (donor.parameter, donor.output) == (0, 0 if after else None)
    assert donor.reason == ("" if after else "the compiler dropped the donation")


def test_one_text_of_a_module_is_enough(tmp_path):
    write(tmp_path, 0, "both").unlink()
    after = write(tmp_path, 1, "after")
    (tmp_path / "module_0001.after.before_optimizations.txt").unlink()
    not_compiled, compiled = collect(tmp_path, "dump").steps
    assert [donor.reason for donor in not_compiled.donors] == ["the dump has no text after optimisation"] * 2
    assert (not_compiled.file, not_compiled.aliases) == ("", 0)
    assert (compiled.file, [donor.output for donor in compiled.donors]) == (str(after), [0, None])


def test_equal_modules_are_one_step(tmp_path):
    write(tmp_path, 0, "step")
    write(tmp_path, 1, "step")
    write(tmp_path, 2, "step", after="")
    assert [step.aliases for step in collect(tmp_path, "dump").steps] == [1, 0]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (text("x", ALIASES)[:40], "it is truncated: it ends in its first line"),
        (text("x", ALIASES)[:-40], "it is truncated: its entry computation has no end"),
        ("PNG\r\n\x00", "it is not HLO text; it begins with 'PNG"),
        ("", "it is not HLO text; it begins with ''"),
        (text("x", "buffer_donor={ (7, {}) }, "), "expected a parameter number below 2"),
    ],
    ids=["header", "body", "foreign", "empty", "broken"],
)
def test_files_that_cannot_be_read_are_named(tmp_path, content, reason):
    write(tmp_path, 0, "good")
    bad = tmp_path / "module_0001.x.cpu_after_optimizations.txt"
    bad.write_text(content)
    run = collect(tmp_path, "dump")
    assert [step.module for step in run.steps] == ["good"]
    (skipped,) = run.skipped
    assert skipped.file == str(bad)
    assert reason in skipped.reason
    shown = inspected(str(tmp_path), exit_code=command_line.SKIPPED)
    assert re.sub(r"\s", "", f"skipped {bad}") in re.sub(r"\s", "", shown)


def test_records_match_without_replicas_to_the_last_line(tmp_path):
    """The header of a running executable lacks the number of replicas. A killed process leaves half a line."""
    folder = tmp_path / "main"
    folder.mkdir()
    path = write(folder, 0, "step")
    header, _, body = path.read_text().partition("\n")
    path.write_text(f"{header}, replica_count=2\n{body}")
    donor = {"parameter": 0, "array": "", "bytes": 128, "kind": "marked", "name": "w", "where": "a.py:3", "reason": ""}
    refused = {**donor, "parameter": -1, "name": "tied", "reason": "another tensor holds it"}
    lines = [
        {"executable": 1, "header": header, "memory": ""},
        {"run": 1, "site": "a.py:4"},
        {"donors_of": 1, "donors": [donor, refused]},
        {"run": 1, "site": "a.py:5"},
        {"run": 1, "site": "a.py:5"},
    ]
    (folder / "record.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines) + '{"run": 1, "si')
    run = collect(tmp_path, "dump")
    (step,) = run.steps
    assert (step.executed, step.sites) == (3, ("a.py:5", "a.py:4"))
    assert [(donor.kind, donor.name, donor.parameter, donor.reason) for donor in step.donors] == [
        ("marked", "w", 0, ""),
        ("torch_xla", "", 1, NO_OUTPUT),
        ("marked", "tied", -1, "another tensor holds it"),
    ]


def test_the_table_fits_eighty_columns(tmp_path):
    write(tmp_path, 0, "step")
    write(tmp_path, 1, "plain", before="", after="")
    shown = inspected(str(tmp_path))
    assert max(map(len, shown.splitlines())) <= 80
    assert "Step 1: step" in shown
    assert "2 parameters, 2 outputs, 2 donors, 1 alias, 128 B saved" in shown
    assert "output 0, 128 B copied" in shown
    assert "Step 2: plain" in shown
    assert "2 distinct steps: 128 B donated, 91.4% of the bytes offered" in shown


NAME, FILE = "state['encoder.layers'][key 3].weight", "a_program_with_a_long_name.py"
DONOR = StepDonor(10, "bf16[1024,1024,512]", 1 << 30, "marked", NAME, f"/user/{FILE}:12", reason="no output is free")
HINT = Hint(
    kind="kept_graph",
    bytes=1 << 30,
    array="bf16[1024,1024,512]",
    count=3,
    name=NAME,
    where=f"/user/{FILE}:12",
    holder=f"variable 'kept' at {FILE}:77",
    edit="call torch_xla_donate.set_auto_donate(True) before the loop",
    site=f"/user/{FILE}:14",
    runs=3,
)


@pytest.mark.parametrize("kind", ["donors", "hints"])
def test_a_narrow_table_keeps_every_letter(kind):
    """Names may look like markup."""
    if kind == "donors":
        there = StepSummary("step", "", 2, 1, (DONOR,), 1, topology="v6e:16x16")
        shown = rendered(RunSummary("program", (replace(there, topology="", on_topology=there),)), 60)
        first = ["10", "bf16[1024,1024,512]", "1.0GiB", f"marked{NAME}({FILE}:12)", *["none:nooutputisfree"] * 2]
    else:
        shown = tables.render(Advice((HINT,)).table(), 60)
        finding = f"{NAME}: {HINT.sentence}; held by variable 'kept' at {FILE}:77"
        first = ["1.0GiB", "bf16[1024,1024,512]and2more", f"{FILE}:12", finding, HINT.edit]
    lines = shown.splitlines()
    assert max(map(len, lines)) <= 60
    columns = zip(*(line.split("│")[1:-1] for line in lines if line.startswith("│")))
    assert ["".join("".join(column).split()) for column in columns] == ["".join(cell.split()) for cell in first]


def test_steps_of_one_line_are_shown_once(tmp_path):
    """A cache that is written at a Python number has a graph for each position."""
    step = StepSummary("step", "", 2, 1, (StepDonor(0, "f32[4]", 16, "marked", output=0),), 1, executed=2)
    at_line = [replace(step, module=f"step.{i}", sites=("loop.py:9",)) for i in range(50)]
    other = replace(step, module="other", sites=("loop.py:12",))
    shown = rendered(RunSummary("loop.py", (at_line[0], other, *at_line[1:])))
    assert "Step 1 and 49 alike: step.0, ran 100 times at loop.py:9" in shown
    assert "50 graphs were compiled for it." in shown
    assert "Step 2: other, ran 2 times at loop.py:12" in shown
    assert "51 distinct steps" in shown
    shown = rendered(RunSummary("dump", tuple(replace(one, sites=(), executed=None) for one in at_line)))
    assert "Step 40: step.39\n" in shown
    assert "... and 10 more steps; --json has all." in shown


def test_the_processes_of_a_program_are_in_the_order_of_their_starts(tmp_path):
    names = ["main", "process_1", "process_2", "process_10"]
    for name in reversed(names):
        (tmp_path / name).mkdir()
        (tmp_path / name / "record.jsonl").write_text("")
    assert [path.name for path in folders_of(tmp_path)] == names


@pytest.mark.parametrize("text", ["[1, 2]\n", "{half\n"])
def test_a_foreign_record_is_named_and_skipped(tmp_path, text):
    folder = tmp_path / "main"
    folder.mkdir()
    write(folder, 0, "step")
    (folder / "record.jsonl").write_text(text)
    run = collect(tmp_path, "dump")
    assert len(run.steps) == 1
    assert [file.file for file in run.skipped] == [str(folder / "record.jsonl")]
    assert "this version cannot read it: " in run.skipped[0].reason


@pytest.mark.parametrize(("percent", "code"), [("91", 0), ("91.5", command_line.BELOW)])
def test_a_lost_donation_fails_in_ci(tmp_path, percent, code):
    write(tmp_path, 0, "step")
    shown = inspected("--fail-under", percent, str(tmp_path), exit_code=code)
    assert ("below 91.5%. Look for donors without an output in the table." in shown) == bool(code)


def test_no_donor_at_all_fails_with_the_ways_to_get_some(tmp_path):
    write(tmp_path, 0, "plain", before="", after="")
    shown = inspected("--fail-under", "95", str(tmp_path), exit_code=command_line.BELOW)
    assert "No step has a donor, so nothing is reused, and --fail-under is 95%. Run verify with --auto to" in shown
    assert "in the table" not in shown


def test_json_has_everything_and_nothing_else(tmp_path):
    write(tmp_path, 0, "step")
    run = collect(tmp_path, str(tmp_path))
    done = CliRunner(mix_stderr=False).invoke(command_line.main, ["inspect", "--json", "-", str(tmp_path)])
    assert json.loads(done.stdout) == json.loads(json.dumps(run.to_dict()))
    inspected("--json", str(tmp_path / "steps.json"), str(tmp_path))
    assert json.loads((tmp_path / "steps.json").read_text()) == json.loads(done.stdout)


def test_a_file_that_cannot_be_written_is_refused_first(tmp_path):
    write(tmp_path, 0, "step")
    shown = inspected("--json", str(tmp_path / "missing" / "x"), str(tmp_path), exit_code=2)
    assert "missing' cannot be written to. Make it, or name another one." in " ".join(shown.split())
    assert "Step 1" not in shown


@pytest.mark.parametrize("folder", ["missing", "."])
def test_a_folder_without_a_dump_is_one_line(tmp_path, folder):
    shown = inspected(str(tmp_path / folder), exit_code=2)
    assert 'XLA_FLAGS="--xla_dump_to=DIR --xla_dump_hlo_as_text"' in shown
    assert shown.count("Error:") == 1


def test_completion_knows_commands_and_options():
    done = CliRunner().invoke(
        command_line.main,
        env={"_TORCH_XLA_DONATE_COMPLETE": "bash_complete", "COMP_WORDS": "torch_xla_donate ve", "COMP_CWORD": "1"},
        complete_var="_TORCH_XLA_DONATE_COMPLETE",
    )
    assert done.output.split() == ["plain,verify"]
