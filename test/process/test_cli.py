"""python -m torch_xla_donate."""

from __future__ import annotations

import runpy
import sys

import pytest
import torch
from children import Ended, Environment, run_in_child

from torch_xla_donate import _C, _host


def run(*words: str, env: Environment | None = None, exit_code: int = 0) -> Ended:
    return run_in_child(run_module, *words, env=env, exit_code=exit_code)


def run_module(*words: str) -> None:
    """What `python -m torch_xla_donate` runs."""
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


def test_help_lists_the_commands():
    assert "doctor" in run("--help").stdout


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
