"""Tests in separate processes: a real Python function runs in a forked child of the fork server."""

from __future__ import annotations

import atexit
import contextlib
import functools
import inspect
import json
import os
import pickle
import random
import signal
import socket
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
Environment = Mapping[str, "str | None"]

# An interpreter reads them before it runs a line of Python, or torch while it is imported. A forked child is too late.
_TOO_LATE = ("PYTHON", "LD_", "GLIBC_", "MALLOC_", "OMP_", "MKL_", "OPENBLAS_", "TORCH_LOGS", "PJRT_DYNAMIC_PLUGINS")
# Python's own filters, as of an interpreter without options.
_DEFAULT_FILTERS = [
    ("default", None, DeprecationWarning, "__main__", 0),
    ("ignore", None, DeprecationWarning, None, 0),
    ("ignore", None, PendingDeprecationWarning, None, 0),
    ("ignore", None, ImportWarning, None, 0),
    ("ignore", None, ResourceWarning, None, 0),
]


@dataclass(frozen=True)
class Ended:
    """A child that has ended."""

    returncode: int  #: negative: the signal that ended it
    stdout: str
    stderr: str
    value: Any = None  #: what the function returned

    @property
    def last_line(self) -> str:
        return self.stdout.splitlines()[-1]


def in_process(
    function: Callable[..., None] | None = None,
    *,
    env: Environment | Callable[..., Environment] | None = None,
    devices: int | None = None,
    flags: tuple[str, ...] = (),
    timeout: float = 300.0,
) -> Any:
    """Decorator of a test: its body runs in a forked child, and its failure is this test's failure.

    Fixtures and parameters are made in pytest's process. Their values are pickled; functions and classes at the top
    of a module travel by name. A test with a `dump_folder` finds XLA's dump there, from the first step on.

    Args:
      env: set before torch_xla's runtime starts and before torch_xla_donate is imported; None removes a variable. A
        function gets the test's arguments that it names.
      devices: the number of virtual CPU devices.
      flags: added to XLA_FLAGS.
      timeout: seconds. A child that needs longer is killed. The test fails with its stack and its forks' stacks.
    """
    if function is None:
        return functools.partial(in_process, env=env, devices=devices, flags=flags, timeout=timeout)

    @functools.wraps(function)
    def test(**kwargs: Any) -> None:
        __tracebackhide__ = True
        environment = env
        if callable(env):
            environment = env(**{name: kwargs[name] for name in inspect.signature(env).parameters})
        run_in_child(
            function,
            env=environment,  # type: ignore[arg-type]
            devices=devices,
            flags=flags,
            dump=kwargs.get("dump_folder"),
            timeout=timeout,
            kwargs=kwargs,
        )

    test.__in_process__ = function  # type: ignore[attr-defined]
    return test


def run_in_child(
    function: Callable[..., Any],
    *args: Any,
    kwargs: Mapping[str, Any] | None = None,
    env: Environment | None = None,
    devices: int | None = None,
    flags: tuple[str, ...] = (),
    dump: str | os.PathLike[str] | None = None,
    timeout: float = 300.0,
    exit_code: int | None = None,
) -> Ended:
    """Runs a function of a module's top level in a forked child; returns its value, its output and its exit code.

    The child has this process's environment without XLA_FLAGS, its working directory and its warning filters.

    Args:
      args, kwargs: the function's arguments, which are pickled.
      env, devices, flags, timeout: as of `in_process`.
      dump: the folder for XLA's dump.
      exit_code: None: the function has to return. A number: the child has to end with it. An uncaught exception
        gives 1 and its traceback on stderr, a signal its negative number.
    """
    __tracebackhide__ = True
    call = {
        "function": function.__qualname__,
        "module": function.__module__,
        "file": inspect.getfile(function),
        "argv": [inspect.getfile(function)],
        "arguments": _pickled(function, args, kwargs or {}),
        "filters": pickle.dumps(list(warnings.filters)),
        "seed": random.randrange(2**32),
    }
    return _run(call, env, devices, flags, dump, timeout, exit_code, function.__qualname__)


def run_file(
    path: str | os.PathLike[str],
    *argv: str,
    env: Environment | None = None,
    devices: int | None = None,
    flags: tuple[str, ...] = (),
    dump: str | os.PathLike[str] | None = None,
    timeout: float = 300.0,
    exit_code: int = 0,
) -> Ended:
    """Runs a Python file as `__main__` in a forked child, with the warning filters of `python path argv`.

    For programs that are files, such as examples and benchmarks. `atexit` does not run.
    """
    __tracebackhide__ = True
    call = {
        "function": None,
        "file": os.fspath(path),
        "argv": [os.fspath(path), *argv],
        "filters": pickle.dumps(_DEFAULT_FILTERS),
        "seed": None,
    }
    return _run(call, env, devices, flags, dump, timeout, exit_code, os.fspath(path))


def child_environment(
    env: Environment | None, devices: int | None, flags: tuple[str, ...], dump: str | os.PathLike[str] | None
) -> dict[str, str]:
    """This process's environment without XLA_FLAGS, with what a child asks for."""
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    environment["PJRT_DEVICE"] = "CPU"
    asked = dict(env or {})
    words = [word for word in (asked.pop("XLA_FLAGS", None),) if word]
    if dump is not None:
        words += [f"--xla_dump_to={os.fspath(dump)}", "--xla_dump_hlo_as_text"]
    if devices is not None:
        words.append(f"--xla_force_host_platform_device_count={devices}")
        asked["CPU_NUM_DEVICES"] = str(devices)
    words += flags
    if words:
        asked["XLA_FLAGS"] = " ".join(words)
    for name, value in asked.items():
        if name.startswith(_TOO_LATE):
            raise ValueError(f"{name} is read before a forked child begins; use run_script")
        if value is None:
            environment.pop(name, None)
        else:
            environment[name] = value
    return environment


def _pickled(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bytes:
    if "<locals>" in function.__qualname__ or "<lambda>" in function.__qualname__:
        raise TypeError(f"{function.__qualname__} is not at the top of its module: a child cannot import it")
    try:
        return pickle.dumps((args, dict(kwargs)))
    except Exception as error:
        raise TypeError(
            f"an argument of {function.__qualname__} cannot be pickled ({error}); pass a name, a path or a function "
            "of a module's top level"
        ) from error


def _run(
    call: dict[str, Any],
    env: Environment | None,
    devices: int | None,
    flags: tuple[str, ...],
    dump: str | os.PathLike[str] | None,
    timeout: float,
    exit_code: int | None,
    name: str,
) -> Ended:
    __tracebackhide__ = True
    environment = child_environment(env, devices, flags, dump)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "request").write_bytes(pickle.dumps({**call, "path": sys.path}))
        status = _server().run(Path(folder), environment, timeout)
        stdout, stderr = (_text(Path(folder, stream)) for stream in ("stdout", "stderr"))
        # A child that was killed while it wrote its outcome has none.
        outcome: dict[str, Any] = {}
        if status is not None and status >= 0 and Path(folder, "outcome").exists():
            outcome = pickle.loads(Path(folder, "outcome").read_bytes())
    shown = f"--- stdout of the child\n{stdout}\n--- stderr of the child\n{stderr}"
    if status is None:
        pytest.fail(f"{name} still ran after {timeout} s\n{shown}", pytrace=False)
    if "skipped" in outcome:
        pytest.skip(outcome["skipped"])
    if exit_code is None:
        if "failure" in outcome:
            # The same traceback is on stderr, where programs show it.
            pytest.fail(f"in a child:\n{outcome['failure']}\n{shown}", pytrace=False)
        if not outcome.get("returned"):
            pytest.fail(f"{name} did not return: {_ended(status)}\n{shown}", pytrace=False)
    elif status != exit_code:
        pytest.fail(f"found {_ended(status)}, expected exit code {exit_code}\n{shown}", pytrace=False)
    value = outcome.get("value")
    return Ended(status, stdout, stderr, None if value is None else pickle.loads(value))


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


def _ended(status: int) -> str:
    return f"exit code {status}" if status >= 0 else f"signal {signal.Signals(-status).name}"


class _Server:
    """The connection to a fork server; it starts with the first child."""

    def __init__(self) -> None:
        self._control, other = socket.socketpair()
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "PJRT_DEVICE": "CPU"}
        environment.pop("XLA_FLAGS", None)
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "fork_server.py"), str(other.fileno())],
            pass_fds=[other.fileno()],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            # A Ctrl-C at the terminal ends pytest, and pytest ends the server.
            start_new_session=True,
        )
        other.close()

    def run(self, folder: Path, environment: dict[str, str], timeout: float) -> int | None:
        """Runs the request in a folder; the exit code, or None after a timeout."""
        request = {"folder": str(folder), "env": environment, "cwd": os.getcwd()}
        self._control.sendall(json.dumps(request).encode() + b"\n")
        # The server may still be importing.
        self._control.settimeout(300)
        self._line()
        self._control.settimeout(timeout)
        try:
            return os.waitstatus_to_exitcode(int(self._line()))
        except TimeoutError:
            # faulthandler writes the stack of each thread to stderr, also in processes that the child has forked.
            self._end(signal.SIGABRT)
            return None
        except BaseException:
            self._end(signal.SIGKILL)
            raise

    def _end(self, first: signal.Signals) -> None:
        for ending in (first, signal.SIGKILL):
            self._control.sendall(f"{int(ending)}\n".encode())
            self._control.settimeout(10)
            with contextlib.suppress(TimeoutError):
                self._line()
                return
        raise RuntimeError("the child cannot be killed")

    def _line(self) -> str:
        received = b""
        while not received.endswith(b"\n"):
            byte = self._control.recv(1)
            if not byte:
                global _running
                _running = None
                self._process.wait()
                with self._log:
                    self._log.seek(0)
                    raise RuntimeError(f"the fork server ended\n{self._log.read()}")
            received += byte
        return received.decode()

    def close(self) -> None:
        self._control.close()
        self._log.close()
        self._process.wait(timeout=30)


_running: _Server | None = None
in_child = False  #: set in the children


def _server() -> _Server:
    global _running
    if in_child:
        raise RuntimeError("a child cannot start children")
    if _running is None:
        _running = _Server()
        atexit.register(_running.close)
    return _running
