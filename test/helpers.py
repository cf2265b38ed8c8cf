"""Fresh processes for the tests: state of torch_xla that is global, or set by the environment."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch


def run_script(
    source: str,
    *args: str,
    env: Mapping[str, str] | None = None,
    timeout: float = 120.0,
    exit_code: int | None = 0,
) -> subprocess.CompletedProcess[str]:
    """Runs Python source in a fresh process on XLA's CPU backend; returns its output as text.

    The source is dedented and run from a file `script.py`, so that tracebacks and warnings have
    lines; `args` are its arguments. `env` is added to this process's environment, of which
    XLA_FLAGS is not passed on. Fails the test with stdout and stderr if the exit code is not
    `exit_code` (None accepts any), or after `timeout` seconds.
    """
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    environment.update({"PJRT_DEVICE": "CPU", **(env or {})})
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "script.py")
        script.write_text(textwrap.dedent(source), encoding="utf-8")
        child = subprocess.Popen(
            [sys.executable, str(script), *args],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # Its own group, so that a timeout ends the processes it started, too.
            start_new_session=True,
        )
        try:
            stdout, stderr = child.communicate(timeout=timeout)
        except BaseException as error:
            os.killpg(child.pid, signal.SIGKILL)
            stdout, stderr = child.communicate()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            pytest.fail(f"still running after {timeout} s\n{_shown(stdout, stderr)}")
    if exit_code is not None and child.returncode != exit_code:
        pytest.fail(f"found exit code {child.returncode}, expected {exit_code}\n{_shown(stdout, stderr)}")
    return subprocess.CompletedProcess(child.args, child.returncode, stdout, stderr)


def dump_env(folder: str | os.PathLike[str], *flags: str) -> dict[str, str]:
    """The environment that makes XLA dump HLO text to `folder`; `flags` are added to XLA_FLAGS."""
    return {"XLA_FLAGS": " ".join((f"--xla_dump_to={folder}", "--xla_dump_hlo_as_text", *flags))}


def _shown(stdout: str, stderr: str) -> str:
    return f"--- stdout\n{stdout}\n--- stderr\n{stderr}"


def pointer(tensor: torch.Tensor) -> int:
    """The address of an XLA tensor's memory, once it has been computed."""
    import torch_xla
    import torch_xla.core.xla_model as xm

    xm.wait_device_ops()
    return int(torch_xla._XLAC._unsafe_buffer_pointer(tensor))
