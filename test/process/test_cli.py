"""python -m torch_xla_donate."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest
import torch
from children import Ended, Environment, run_in_child

import torch_xla_donate
from torch_xla_donate import _C, _host, _pages

ROOT = Path(__file__).resolve().parents[2]


def run(*words: str, env: Environment | None = None, exit_code: int = 0) -> Ended:
    return run_in_child(run_module, *words, env=env, exit_code=exit_code)


def run_module(*words: str) -> None:
    """The command line of `python -m torch_xla_donate`."""
    sys.argv = ["torch_xla_donate", *words]
    runpy.run_module("torch_xla_donate", run_name="__main__", alter_sys=True)


def test_doctor_shows_versions_and_every_hook():
    done = run("doctor")
    assert f"torch         {torch.__version__.split('+')[0]}" in done.stdout
    assert "built against torch " in done.stdout
    assert all(hook["name"] in done.stdout for hook in _C.hooks())
    assert "no setting switches donation off" in done.stdout


def test_doctor_fails_for_settings_that_switch_donation_off():
    """It names each of them."""
    env = {
        "XLA_ENABLE_PARAM_ALIASING": "0",
        "XLA_STABLEHLO_COMPILE": "true",
        "XLA_AUTO_SPMD": "1",
        "TORCH_XLA_DONATE_DEBUG_NANS": "yes",
    }
    done = run("doctor", env=env, exit_code=1)
    assert "PROBLEM: XLA_ENABLE_PARAM_ALIASING=0 switches donation off; unset it" in done.stdout
    assert "PROBLEM: XLA_STABLEHLO_COMPILE=true switches donation off; unset it" in done.stdout
    assert "PROBLEM: XLA_AUTO_SPMD=1 switches donation off; unset it" in done.stdout
    assert "PROBLEM: TORCH_XLA_DONATE_DEBUG_NANS=1 switches donation off" in done.stdout


def test_explain_shows_the_page_that_a_message_names():
    page = (ROOT / "docs" / "unusable.md").read_text(encoding="utf-8")
    assert run("explain", "unusable").stdout == page
    assert run("explain", "docs/unusable.md").stdout == page


def test_explain_without_a_page_lists_them():
    lines = run("explain").stdout.splitlines()
    assert {line.split()[0] for line in lines} == {path.stem for path in (ROOT / "docs").glob("*.md")}
    title = (ROOT / "docs" / "unusable.md").read_text(encoding="utf-8").splitlines()[0]
    assert any(line.startswith("unusable ") and line.endswith(title.removeprefix("# ")) for line in lines)


def test_explain_names_the_pages_there_are():
    done = run("explain", "donations", exit_code=2)
    assert "page 'donations' does not exist. Choose one of" in done.stderr
    assert "unusable" in done.stderr
    assert "To look up a message, run `python -m torch_xla_donate explain troubleshooting`." in done.stderr


def test_explain_names_the_pages_that_contain_a_message():
    """Case and line breaks do not matter, and a single word is the name of a page."""
    found = run("explain", "some donated  buffers\nwere not usable").stdout.splitlines()
    assert {"unusable", "troubleshooting"} < {line.split()[0] for line in found} < set(_pages.titles())
    assert any(line.endswith("  Troubleshooting by message") for line in found)
    done = run("explain", "no page says this", exit_code=2)
    assert "page 'no page says this' does not exist" in done.stderr


def test_every_message_names_a_page_there_is():
    package = Path(torch_xla_donate.__file__).parent
    code = "".join(path.read_text(encoding="utf-8") for path in package.rglob("*.py"))
    named = set(re.findall(r"\bsee\(['\"](\w+)['\"]\)", code))
    assert len(named) >= 5
    assert named <= set(_pages.titles())


def test_help_lists_the_commands():
    assert "doctor" in run("--help").stdout
    assert "explain" in run("--help").stdout


def test_an_unknown_command_is_an_error():
    run("nurse", exit_code=2)


@pytest.mark.parametrize(
    ("value", "on"),
    [(value, True) for value in ("1", "true", "2", " 3x")] + [(value, False) for value in ("0", "false", "x", "")],
)
def test_settings_are_read_as_torch_xla_reads_them(monkeypatch, value, on):
    assert _host.ignoring_donors() == []
    monkeypatch.setenv("XLA_ENABLE_PARAM_ALIASING", value)
    assert _host.ignoring_donors() == [f"XLA_ENABLE_PARAM_ALIASING={value}"] * (not on)
    monkeypatch.delenv("XLA_ENABLE_PARAM_ALIASING")
    for name in ("XLA_STABLEHLO_COMPILE", "XLA_AUTO_SPMD"):
        monkeypatch.setenv(name, value)
        assert _host.ignoring_donors() == [f"{name}={value}"] * on
        monkeypatch.delenv(name)
