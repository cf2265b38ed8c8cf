"""python -m torch_xla_donate."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from torch_xla_donate import _C, _config


def run(*args, env=None):
    import os

    return subprocess.run(
        [sys.executable, "-m", "torch_xla_donate", *args],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **(env or {})},
    )


def test_doctor_shows_versions_and_every_hook():
    done = run("doctor")
    assert done.returncode == 0, done.stderr
    assert f"torch         {torch.__version__.split('+')[0]}" in done.stdout
    assert "built against torch " in done.stdout
    assert all(hook["name"] in done.stdout for hook in _C.hooks())
    assert "no setting switches donation off" in done.stdout


def test_doctor_names_a_setting_that_switches_donation_off_and_fails():
    done = run(
        "doctor",
        env={
            "XLA_ENABLE_PARAM_ALIASING": "0",
            "XLA_STABLEHLO_COMPILE": "true",
            "XLA_AUTO_SPMD": "1",
            "TORCH_XLA_DONATE_DEBUG_NANS": "yes",
        },
    )
    assert done.returncode == 1
    assert "PROBLEM: XLA_ENABLE_PARAM_ALIASING=0 switches donation off; unset it" in done.stdout
    assert "PROBLEM: XLA_STABLEHLO_COMPILE=true switches donation off; unset it" in done.stdout
    assert "PROBLEM: XLA_AUTO_SPMD=1 switches donation off; unset it" in done.stdout
    assert "PROBLEM: TORCH_XLA_DONATE_DEBUG_NANS=1 switches donation off" in done.stdout


def test_help_lists_the_commands():
    done = run("--help")
    assert done.returncode == 0
    assert "doctor" in done.stdout


def test_an_unknown_command_is_an_error():
    assert run("nurse").returncode == 2


@pytest.mark.parametrize(
    ("value", "on"),
    [(value, True) for value in ("1", "true", "2", " 3x")] + [(value, False) for value in ("0", "false", "x", "")],
)
def test_settings_that_make_torch_xla_ignore_donors_are_read_as_it_reads_them(monkeypatch, value, on):
    assert _config.ignoring_donors() == []
    monkeypatch.setenv("XLA_ENABLE_PARAM_ALIASING", value)
    assert _config.ignoring_donors() == [f"XLA_ENABLE_PARAM_ALIASING={value}"] * (not on)
    monkeypatch.delenv("XLA_ENABLE_PARAM_ALIASING")
    for name in ("XLA_STABLEHLO_COMPILE", "XLA_AUTO_SPMD"):
        monkeypatch.setenv(name, value)
        assert _config.ignoring_donors() == [f"{name}={value}"] * on
        monkeypatch.delenv(name)
