"""The fork server: a process that has imported torch and torch_xla, and forks one child for each request.

A new interpreter needs 6.5 s for these imports, a forked child some milliseconds. The server never starts torch_xla's
runtime and never imports torch_xla_donate: a child inherits neither clients nor hooks, and reads both settings from
its own environment. The server has one thread whenever it forks, because a child keeps only the thread that forks.

`children.py` is the other side. It sends one line of JSON for each child: the folder with the request, the
environment, and the working directory. The server answers `started`, and later the child's wait status. In between a
line with the number of a signal sends that signal to the child, and SIGABRT first to the other processes of its group.
The child reads `request` from the folder and writes `stdout`, `stderr` and `outcome` into it. When the connection
closes, the server kills the running child and ends.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import importlib.util
import io
import json
import os
import pickle
import random
import resource
import runpy
import select
import signal
import socket
import sys
import traceback
import warnings
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, TextIO

HERE = Path(__file__).resolve().parent


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    rewriting = _import_all()
    # Frozen objects cost a child's collector nothing, and their pages stay shared.
    gc.collect()
    gc.freeze()
    with control.makefile("r", encoding="utf-8") as requests:
        for line in requests:
            request = json.loads(line)
            if isinstance(request, int):
                continue  # a signal for a child that had ended when it came
            pid = _fork(request, rewriting, control)
            control.sendall(b"started\n")
            status = _wait(pid, control, requests)
            control.sendall(f"{status}\n".encode())


def _import_all() -> Any:
    """Imports what most tests need; returns pytest's import hook, which rewrites assertions."""
    import numpy  # noqa: F401
    import torch_xla.core.xla_model
    import torch_xla.debug.metrics
    import torch_xla.distributed.spmd
    import torch_xla.experimental.gradient_accumulation
    import torch_xla.experimental.scan
    import torch_xla.runtime  # noqa: F401
    from _pytest.assertion import util
    from _pytest.assertion.rewrite import assertstate_key
    from _pytest.config import _prepareconfig
    from _pytest.terminal import TerminalReporter

    with contextlib.suppress(ImportError):  # the pinned one has no wheel for Python 3.10
        import jax  # noqa: F401

    plugins = ("xdist", "randomly", "cacheprovider", "hypothesispytest")
    config = _prepareconfig(
        ["--noconftest", "--capture=no", "-vv", "-o", "addopts=", f"--rootdir={HERE.parent}"]
        + [word for plugin in plugins for word in ("-p", f"no:{plugin}")]
    )

    def explain(operator: str, left: object, right: object) -> str | None:
        """The comparison that pytest shows for a failed assertion."""
        for lines in config.hook.pytest_assertrepr_compare(config=config, op=operator, left=left, right=right):
            if lines:
                return "\n~".join(line.replace("\n", "\\n") for line in lines).replace("%", "%%")
        return None

    config.pluginmanager.register(TerminalReporter(config, io.StringIO()), "terminalreporter")
    util._reprcompare = explain
    hook = config.stash[assertstate_key].hook
    hook.mark_rewrite("helpers")
    return hook


def _fork(request: dict[str, Any], rewriting: Any, control: socket.socket) -> int:
    threads = os.listdir("/proc/self/task")
    if len(threads) != 1:
        raise RuntimeError(f"found {len(threads)} threads, expected 1: an import started one; take it out of the list")
    sys.stdout.flush()
    sys.stderr.flush()
    if pid := os.fork():
        return pid
    code = 1
    try:
        control.close()
        code = _child(request, rewriting)
    except BaseException:  # of this module itself: the test's own errors are in the outcome
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _wait(pid: int, control: socket.socket, requests: TextIO) -> int:
    """The wait status of a child that has ended. Ends all processes of its group."""
    end = os.pidfd_open(pid)
    try:
        while end not in select.select([end, control], [], [])[0]:
            signal_ = requests.readline()
            if signal_ and int(signal_) == signal.SIGABRT:
                _abort_the_others(pid)
            # The child itself: it may not have its group yet.
            os.kill(pid, int(signal_ or signal.SIGKILL))
            if not signal_:
                select.select([end], [], [])
                break
    finally:
        os.close(end)
    # Before the child is reaped: until then no other group can have its number.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    return os.waitpid(pid, 0)[1]


def _abort_the_others(group: int) -> None:
    """Aborts the processes that the child has started. Those that it has forked write their stacks to its stderr."""
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if pid == group or os.getpgid(pid) != group:
                continue
            end = os.pidfd_open(pid)
            try:
                signal.pidfd_send_signal(end, signal.SIGABRT)
                select.select([end], [], [], 2)  # seconds; one after another, so that their stacks do not mix
            finally:
                os.close(end)


# --- In the child ---


def _child(request: dict[str, Any], rewriting: Any) -> int:
    import children
    import torch_xla

    own = os.getpid()
    os.setsid()
    folder = Path(request["folder"])
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        opened = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(opened, descriptor)
        os.close(opened)
    # Keeps the output before a crash.
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    # torch_xla does this when it is imported.
    torch_xla._setup_xla_flags()
    faulthandler.enable()
    # A program in the background of a shell ignores SIGINT, and so do the processes that it starts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    children.in_child = True
    outcome, code = _run(pickle.loads((folder / "request").read_bytes()), rewriting)
    if os.getpid() == own:  # and not a process that the test has forked
        (folder / "outcome").write_bytes(pickle.dumps(outcome))
    return code


def _run(call: dict[str, Any], rewriting: Any) -> tuple[dict[str, Any], int]:
    """Runs a request; its outcome, and the exit code of the child."""
    import numpy
    import pytest

    try:
        sys.path[:] = call["path"]
        sys.argv[:] = call["argv"]
        if call["seed"] is not None:
            random.seed(call["seed"])
            numpy.random.seed(call["seed"])
        # Their categories may be classes of modules that are imported here.
        warnings.filters[:] = pickle.loads(call["filters"])
        warnings._filters_mutated()
        if call["function"] is None:
            sys.path.insert(0, os.path.dirname(call["file"]))
            runpy.run_path(call["file"], run_name="__main__")
            return {"returned": True, "value": None}, 0
        function: Any = _module(call["module"], Path(call["file"]), rewriting)
        for name in call["function"].split("."):
            function = getattr(function, name)
        # `in_process` leaves its wrapper in the module.
        function = getattr(function, "__in_process__", function)
        args, kwargs = pickle.loads(call["arguments"])
        return {"returned": True, "value": pickle.dumps(function(*args, **kwargs))}, 0
    except pytest.skip.Exception as skipped:
        return {"skipped": str(skipped.msg)}, 0
    except SystemExit as exit_:
        if exit_.code is None or isinstance(exit_.code, int):
            return {}, exit_.code or 0
        print(exit_.code, file=sys.stderr)
        return {}, 1
    except BaseException as error:
        error.__traceback__ = _without_server(error.__traceback__)
        sys.excepthook(type(error), error, error.__traceback__)
        shown = pytest.ExceptionInfo.from_exception(error).getrepr(style="long", funcargs=False)
        return {"failure": str(shown)}, 1


def _without_server(traceback_: TracebackType | None) -> TracebackType | None:
    """The traceback from the test's own frame on."""
    entry = traceback_
    while entry is not None and entry.tb_frame.f_code.co_filename in (__file__, "<frozen runpy>", runpy.__file__):
        entry = entry.tb_next
    return entry or traceback_


def _module(name: str, file: Path, rewriting: Any) -> ModuleType:
    """The module of a file, imported under the name that it has in pytest's process: pickles refer to it."""
    if name in sys.modules:
        return sys.modules[name]
    spec = rewriting.find_spec(name, [str(file.parent)]) or importlib.util.spec_from_file_location(name, file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main()
    os._exit(0)  # an interpreter with torch takes seconds to end, and pytest waits
