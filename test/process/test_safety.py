"""What docs/safety.md says that the import does to a process, and under what else it runs."""

from __future__ import annotations

import bdb
import ctypes
import importlib.util
import os
import platform
import shutil
import sys
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar

import bare
import pytest
import torch_xla
from children import in_process, run_in_child
from helpers import DONATING_PROGRAM, assert_a_step_donates, make, run_script

import torch_xla_donate
from torch_xla_donate import _C, auto_donate, donation_report

# --- What changes ---


def test_no_code_changes_and_no_table_of_another_library() -> None:
    """Of all mapped files. libtorch's slots are in pages that anybody may write, so they are not among these."""
    changed, code = run_in_child(bare.changed_by_the_import).value
    assert [name.split(".")[0] for name in changed] == ["_XLAC"]
    assert code == [] and {hook["library"] for hook in _C.hooks()} == {"_XLAC", "libtorch_cpu"}


@in_process
def test_python_opens_no_connection_and_writes_no_file() -> None:
    seen = []

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if writes or event.split(".")[0] in {"socket", "subprocess", "urllib", "ftplib"} or event == "os.system":
            seen.append((event, arguments))

    for name in [name for name in sys.modules if name.startswith("torch_xla_donate") and not name.endswith("._C")]:
        del sys.modules[name]
    sys.addaudithook(audit)
    spec = importlib.util.find_spec("torch_xla_donate")
    assert spec is not None and spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    assert_a_step_donates()
    step = torch_xla_donate.compile(lambda a: a + 1, donate_argnums=0, pure=True)
    with auto_donate():
        step(make(3))
        assert str(donation_report())
    assert seen == []
    Path(os.devnull).write_text("")
    assert [event for event, _ in seen] == ["open"]  # so the hook sees such a call


def test_the_extension_module_cannot_connect_write_or_start_a_program() -> None:
    """Of the functions of the C library for that it imports only `open`, for the map of its own memory."""
    names = set(Path(_C.__file__).read_bytes().split(b"\0"))
    if any(name.startswith(b"__gcov") for name in names):
        pytest.skip("the build of `make coverage` writes down which lines have run")
    outside = {
        *("accept", "bind", "connect", "getaddrinfo", "recv", "send", "sendto", "socket"),
        *(
            "creat",
            "fopen",
            "fopen64",
            "fwrite",
            "open",
            "open64",
            "openat",
            "pwrite",
            "remove",
            "rename",
            "unlink",
            "write",
        ),
        *("execv", "execve", "execvp", "fork", "popen", "posix_spawn", "system", "vfork"),
        *("process_vm_writev", "ptrace"),
    }
    assert names & {name.encode() for name in outside} == {b"open"}
    assert b"mprotect" in names and not [name for name in names if b"basic_ofstream" in name]


# --- Where it may not, or runs twice ---


def forbid_writable_pages() -> None:
    """From now on this thread may not make a page writable (seccomp), as in a sandbox."""
    numbers = {"x86_64": 10, "aarch64": 226}

    class Instruction(ctypes.Structure):
        _fields_: ClassVar = [
            ("code", ctypes.c_uint16),
            ("yes", ctypes.c_uint8),
            ("no", ctypes.c_uint8),
            ("k", ctypes.c_uint32),
        ]

    class Program(ctypes.Structure):
        _fields_: ClassVar = [("length", ctypes.c_uint16), ("filter", ctypes.POINTER(Instruction))]

    code = [
        (0x20, 0, 0, 0),  # the number of the call
        (0x15, 0, 3, numbers[platform.machine()]),  # mprotect, or allow
        (0x20, 0, 0, 32),  # the low half of its third argument
        (0x15, 0, 1, 3),  # PROT_READ | PROT_WRITE, or allow
        (0x06, 0, 0, 0x00050000 | 13),  # EACCES
        (0x06, 0, 0, 0x7FFF0000),  # allow
    ]
    program = Program(len(code), (Instruction * len(code))(*(Instruction(*line) for line in code)))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0  # no new privileges
    assert libc.prctl(22, 2, ctypes.byref(program), 0, 0) == 0, os.strerror(ctypes.get_errno())


@in_process
def test_a_sandbox_that_forbids_the_patch_is_an_import_error() -> None:
    _host = torch_xla_donate._host
    old = make(4)
    assert (old + 1).tolist() == [1, 2, 3, 4]  # the runtime's threads have their stacks now
    _host.uninstall_hooks()
    before = bare.state()
    forbid_writable_pages()
    with pytest.raises(ImportError, match=r"changing its page's protection gave .Permission denied.*is unchanged"):
        _host.install_hooks()
    assert bare.state() == before and not _C.installed()
    assert (old + 1).tolist() == [1, 2, 3, 4]


@in_process
def test_a_second_copy_of_the_package_is_refused(tmp_path: Path) -> None:
    """And the first one donates as before."""
    before = bare.state()
    path = shutil.copy(_C.__file__, tmp_path)

    def load() -> None:
        spec = importlib.util.spec_from_file_location("copy._C", path)
        assert spec is not None and spec.loader is not None
        copy = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(copy)
        copy.install(torch_xla._XLAC.__file__)

    with pytest.raises(ImportError, match="already registered"):
        load()
    assert bare.state() == before
    assert_a_step_donates()


LOADS_NO_TOOLS = """
import sys, torch_xla
before = set(sys.modules)
import torch_xla_donate
loaded = {name.partition(".")[0] for name in set(sys.modules) - before}
tools = {"ast", "difflib", "tokenize", "jinja2", "matplotlib", "rich", "click"} & loaded
assert not tools, tools
assert not [name for name in sys.modules if name.startswith(("torch_xla_donate._tools", "torch_xla_donate.hlo."))]
assert {*torch_xla_donate.hlo.__all__} <= {*dir(torch_xla_donate.hlo)}
assert "advise" in dir(torch_xla_donate) and callable(torch_xla_donate.advise)
assert str(torch_xla_donate.donation_report()) and "rich" in sys.modules
"""
LOSES_A_DONATION = """
lost = torch.arange(3.0).to("xla")
torch_xla.sync(wait=True)
txd.donate_buffer(lost); total = lost.sum(); torch_xla.sync()
"""


def test_bound_symbols_change_nothing() -> None:
    """LD_BIND_NOW has the loader resolve all symbols first, and makes more pages read-only.

    A program shows more from its start to its end. Tools come with their first use: `advise`, the command line, what
    reads HLO, and the text of a report. A warning that no sync has collected is shown at the exit.
    """
    done = run_script(LOADS_NO_TOOLS + DONATING_PROGRAM + LOSES_A_DONATION, env={"LD_BIND_NOW": "1"})
    assert "DONATED" in done.stdout
    assert "DonationWarning: Some donated buffers were not usable: f32[3]" in done.stderr


# --- Debuggers ---


class Debugger(bdb.Bdb):
    """Stops at each line. shows: whether it reads the variables there, as a window of variables does."""

    def __init__(self, shows: bool) -> None:
        super().__init__()
        self.shows, self.lines = shows, 0

    def user_line(self, frame: FrameType) -> None:
        self.lines += 1
        if self.shows:
            assert frame.f_locals is not None
        self.set_step()


def three_steps() -> None:
    value = make(16)
    for _ in range(3):
        value = value + 1
        torch_xla.sync(wait=True)
    assert value.tolist() == list(range(3, 19))


@pytest.mark.parametrize("shows", [False, True])
@in_process
def test_a_debugger_of_python_changes_no_value(shows: bool) -> None:
    """One that shows variables may keep old values alive, which `auto_donate` then leaves alone."""
    debugger = Debugger(shows)
    with auto_donate():
        debugger.runcall(three_steps)
    debugger.runcall(assert_a_step_donates)
    assert debugger.lines > 10
    if not shows:
        assert donation_report(steps=2).reused_fraction == 1.0
