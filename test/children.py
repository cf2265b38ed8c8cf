"""Tests in separate processes: a function runs in a child that the standard library's fork server forks.

The server has imported what `preload.py` lists. A child is a `multiprocessing` process until it calls `_child`, which
sets the environment, and ends the process by `os._exit`: neither torch_xla's nor multiprocessing's exit handlers run.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import importlib.util
import inspect
import multiprocessing
import os
import pickle
import resource
import runpy
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing import forkserver
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any
from unittest import mock

import pytest

Environment = Mapping[str, "str | None"]

# An interpreter reads them before it runs a line of Python, or torch while it is imported. A forked child is too late.
_TOO_LATE = ("PYTHON", "LD_", "GLIBC_", "MALLOC_", "OMP_", "MKL_", "OPENBLAS_", "TORCH_LOGS", "PJRT_DYNAMIC_PLUGINS")

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["preload", "children"])


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
    **options: Any,
) -> Any:
    """Decorator of a test: its body runs in a forked child, and its failure is this test's failure.

    Fixtures and parameters are made in pytest's process. Their values are pickled; functions and classes at the top
    of a module travel by name. A test with a `dump_folder` finds XLA's dump there, from the first step on.

    Args:
      env: as of `run_in_child`, or a function of the test's arguments that it names.
      options: devices and timeout, as of `run_in_child`.
    """
    if function is None:
        return functools.partial(in_process, env=env, **options)

    @functools.wraps(function)
    def test(**kwargs: Any) -> None:
        __tracebackhide__ = True
        environment: Any = env
        if callable(env):
            environment = env(**{name: kwargs[name] for name in inspect.signature(env).parameters})
        run_in_child(function, kwargs=kwargs, env=environment, dump=kwargs.get("dump_folder"), **options)

    test.__in_process__ = function  # type: ignore[attr-defined]
    return test


def run_in_child(
    function: Callable[..., Any],
    *args: Any,
    kwargs: Mapping[str, Any] | None = None,
    env: Environment | None = None,
    devices: int | None = None,
    dump: str | os.PathLike[str] | None = None,
    timeout: float = 300.0,
    exit_code: int | None = None,
) -> Ended:
    """Runs a function of a module's top level in a forked child; returns its value, its output and its exit code.

    The child has this process's environment without XLA_FLAGS, its working directory and its warning filters.

    Args:
      args, kwargs: the function's arguments, which are pickled.
      env: set before torch_xla's runtime starts and before torch_xla_donate is imported; None removes a variable.
      devices: the number of virtual CPU devices.
      dump: the folder for XLA's dump.
      timeout: seconds. A child that needs longer is killed. The test fails with its stack and its forks' stacks.
      exit_code: None: the function has to return. A number: the child has to end with it. An uncaught exception
        gives 1 and its traceback on stderr, a signal its negative number.
    """
    __tracebackhide__ = True
    name = function.__qualname__
    environment = _environment(env, devices, dump)
    arguments = pickle.dumps((args, dict(kwargs or {}), list(warnings.filters)))
    call = (inspect.getfile(function), function.__module__, name, arguments)
    if multiprocessing.parent_process() is not None:
        raise RuntimeError("a child cannot start children")
    sys.audit("children.run_in_child", name)
    with tempfile.TemporaryDirectory() as folder:
        status = _run(Path(folder), environment, call, timeout)
        files = [Path(folder, name) for name in ("stdout", "stderr", "outcome")]
        stdout, stderr, outcome = (file.read_bytes() if file.exists() else b"" for file in files)
    output = [text.decode(encoding="utf-8", errors="replace") for text in (stdout, stderr)]
    shown = "--- stdout of the child\n{}\n--- stderr of the child\n{}".format(*output)
    if status is None:
        pytest.fail(f"{name} still ran after {timeout} s\n{shown}", pytrace=False)
    skipped, value = pickle.loads(outcome) if outcome and status == 0 else (None, None)
    if skipped is not None:
        pytest.skip(skipped)
    if exit_code is None and (status != 0 or not outcome):
        pytest.fail(f"{name} did not return: {_ended(status)}\n{shown}", pytrace=False)
    if exit_code is not None and status != exit_code:
        pytest.fail(f"found {_ended(status)}, expected exit code {exit_code}\n{shown}", pytrace=False)
    return Ended(status, *output, value)


def run_command(*words: str, exit_code: int = 0, **options: Any) -> Ended:
    """Runs `python -m torch_xla_donate` with these words in a forked child. The options are those of `run_in_child`."""
    __tracebackhide__ = True
    return run_in_child(_command, *words, exit_code=exit_code, **options)


def _command(*words: str) -> None:
    sys.argv[:] = ["torch_xla_donate", *words]
    sys.path.insert(0, os.getcwd())
    runpy.run_module("torch_xla_donate", run_name="__main__", alter_sys=True)


def run_file(path: str | os.PathLike[str], *argv: str, exit_code: int = 0, **options: Any) -> Ended:
    """Runs a Python file as `__main__` in a forked child, with the warning filters of `python path argv`.

    For programs that are files, such as examples and benchmarks. `atexit` does not run. The options are those of
    `run_in_child`.
    """
    __tracebackhide__ = True
    return run_in_child(_program, os.fspath(path), *argv, exit_code=exit_code, **options)


def _program(path: str, *argv: str) -> None:
    sys.argv[:] = [path, *argv]
    sys.path.insert(0, os.path.dirname(path))
    # Python's own filters, as of an interpreter without options.
    warnings.resetwarnings()
    for category in (ResourceWarning, ImportWarning, PendingDeprecationWarning, DeprecationWarning):
        warnings.simplefilter("ignore", category)
    warnings.filterwarnings("default", category=DeprecationWarning, module="__main__")
    runpy.run_path(path, run_name="__main__")


def _environment(env: Environment | None, devices: int | None, dump: str | os.PathLike[str] | None) -> dict[str, str]:
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


def _run(folder: Path, environment: dict[str, str], call: tuple[str, str, str, bytes], timeout: float) -> int | None:
    """Runs a call in a child and ends all processes of its group; its exit code, or None after a timeout."""
    # Threads of OpenBLAS would not survive the fork. The plugins and options of a developer's pytest are not for it.
    server = {"OPENBLAS_NUM_THREADS": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": ""}
    server["PYTHONPATH"] = os.pathsep.join((os.path.dirname(__file__), os.environ.get("PYTHONPATH", "")))
    with mock.patch.dict(os.environ, server):
        forkserver.ensure_running()
    # Each process that the child forks holds the other end: it is closed when the last has ended.
    forks, alive = _context.Pipe(duplex=False)
    child = _context.Process(target=_child, args=(folder, environment, call, alive))
    child.start()
    assert child.pid is not None
    alive.close()
    try:
        child.join(timeout)
        status = child.exitcode
        if status is None:
            # faulthandler writes the stack of each thread to stderr, and the stacks of two processes must not mix.
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.pid, signal.SIGABRT)
                child.join(10)
                os.killpg(child.pid, signal.SIGABRT)
                forks.poll(10)
        return status
    finally:
        child.kill()  # it may not have its group yet
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.join()
        child.close()
        forks.close()


def _ended(status: int) -> str:
    return f"exit code {status}" if status >= 0 else f"signal {signal.Signals(-status).name}"


# --- In the child ---


def _child(folder: Path, environment: dict[str, str], call: tuple[str, str, str, bytes], alive: object) -> None:
    own, code = os.getpid(), 1
    os.setsid()
    try:
        _prepare(folder, environment)
        outcome = _outcome(*call)
        if os.getpid() == own:  # and not a process that the test has forked
            (folder / "outcome").write_bytes(outcome)
        code = 0
    except SystemExit as exit_:
        code = exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
        if isinstance(exit_.code, str):
            print(exit_.code, file=sys.stderr)
    except BaseException as error:
        error.__traceback__ = _without_this_file(error.__traceback__)
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _prepare(folder: Path, environment: dict[str, str]) -> None:
    import torch_xla

    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        with open(folder / name, "ab") as file:
            os.dup2(file.fileno(), descriptor)
    # Keeps the output before a crash.
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    os.environ.clear()
    os.environ.update(environment)
    # torch_xla does this when it is imported.
    torch_xla._setup_xla_flags()
    faulthandler.enable()
    # A program in the background of a shell ignores SIGINT, and so do the processes that it starts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _outcome(file: str, module: str, name: str, arguments: bytes) -> bytes:
    """Calls the function; pickles the reason of a skip, or the value."""
    sys.argv[:] = [file]
    function: Any = _module(module, file)
    for part in name.split("."):
        function = getattr(function, part)
    # Their classes may be of modules that are imported here.
    args, kwargs, filters = pickle.loads(arguments)
    warnings.resetwarnings()
    warnings.filters.extend(filters)  # type: ignore[attr-defined]
    try:
        # `in_process` leaves its wrapper in the module.
        return pickle.dumps((None, getattr(function, "__in_process__", function)(*args, **kwargs)))
    except pytest.skip.Exception as skipped:
        return pickle.dumps((str(skipped.msg), None))


def _module(name: str, file: str) -> ModuleType:
    """The module of a file, imported under the name that it has in pytest's process: pickles refer to it."""
    if name in sys.modules:
        return sys.modules[name]
    found = (finder.find_spec(name, [os.path.dirname(file)]) for finder in sys.meta_path)
    spec = next(spec for spec in found if spec is not None)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _without_this_file(traceback: TracebackType | None) -> TracebackType | None:
    """The traceback from the test's own frame on."""
    entry = traceback
    while entry is not None and entry.tb_frame.f_code.co_filename in (__file__, "<frozen runpy>", runpy.__file__):
        entry = entry.tb_next
    return entry or traceback
