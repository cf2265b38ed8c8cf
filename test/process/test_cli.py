"""python -m torch_xla_donate."""

from __future__ import annotations

import pytest
import torch
from children import run_command
from click.testing import CliRunner
from helpers import ROOT

from torch_xla_donate import _C, _host
from torch_xla_donate import __main__ as command_line


def test_doctor_shows_versions_and_every_hook():
    done = run_command("doctor")
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
    done = run_command("doctor", env=env, exit_code=1)
    assert "PROBLEM: XLA_ENABLE_PARAM_ALIASING=0 switches donation off; unset it" in done.stdout
    assert "PROBLEM: XLA_STABLEHLO_COMPILE=true switches donation off; unset it" in done.stdout
    assert "PROBLEM: XLA_AUTO_SPMD=1 switches donation off; unset it" in done.stdout
    assert "PROBLEM: TORCH_XLA_DONATE_DEBUG_NANS=1 switches donation off" in done.stdout


def explained(*words: str, exit_code: int = 0) -> str:
    done = CliRunner().invoke(command_line.main, ["explain", *words])
    assert done.exit_code == exit_code, done.output
    return str(done.output)


def test_explain_shows_the_section_that_a_message_names():
    page = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
    assert explained("errors") == explained("docs/errors.md") == page
    section = explained("unusable")
    assert section.startswith("## Unusable donations\n") and section in page
    assert "### The reasons" in section and "## Refused donations" not in section
    assert explained("errors#the-reasons") in section


def test_explain_without_a_word_lists_the_pages():
    lines = explained().splitlines()
    assert {line.split()[0] for line in lines} == {path.stem for path in (ROOT / "docs").glob("*.md")}
    assert any(line.startswith("errors ") and line.endswith("Errors and warnings by message") for line in lines)


def test_explain_names_the_pages_there_are():
    shown = explained("nosuchword", exit_code=2)
    assert "'nosuchword' is neither a page nor a word that a message names, and no section contains it." in shown
    assert "errors, " in shown
    explained("errors#no-such-section", exit_code=2)


def test_explain_names_the_sections_that_contain_a_message():
    """Case and line breaks do not matter. A word that is no page is looked for, too."""
    found = explained("has  No buffer\nyet").splitlines()
    assert any(line.startswith("errors#refused-donations ") for line in found)
    assert any(line.startswith("safety#") for line in explained("settings").splitlines())
    assert "'no page says this' is neither a page" in explained("no page says this", exit_code=2)


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
