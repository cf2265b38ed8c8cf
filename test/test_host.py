"""Loading, hooking and unhooking: what fits is checked, and torch_xla is left as it was."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from helpers import run_script

from torch_xla_donate import _C, _host

BUILD = _host.Build("2.9.1+cu128", "2.9.0", True, "GNU 12")


def test_the_versions_of_the_build_are_accepted():
    _host.check_versions("2.9.1+cu128", "2.9.0", BUILD)
    _host.check_versions("2.9.0", "2.9.1", BUILD)


@pytest.mark.parametrize(
    ("torch_version", "torch_xla_version", "text"),
    [
        ("2.10.0", "2.10.0", r"supports torch_xla 2.7, 2.8, 2.9; found torch_xla 2.10.0"),
        ("2.6.0", "2.6.0", r"supports torch_xla 2.7, 2.8, 2.9; found torch_xla 2.6.0"),
        ("2.8.0", "2.9.0", r"torch 2.8.0 and torch_xla 2.9.0 do not belong together"),
        (
            "2.8.0+cpu",
            "2.8.1",
            r"was built against torch 2.9.1\+cu128 and torch_xla 2.9.0; found torch 2.8.0\+cpu and torch_xla 2.8.1. "
            r"Rebuild torch_xla_donate in this environment: pip install --no-build-isolation",
        ),
    ],
)
def test_other_versions_are_refused_with_what_to_do(torch_version, torch_xla_version, text):
    with pytest.raises(ImportError, match=text):
        _host.check_versions(torch_version, torch_xla_version, BUILD)


def test_another_abi_is_refused():
    other = dataclasses.replace(BUILD, cxx11_abi=False)
    with pytest.raises(ImportError, match=r"C\+\+11 ABI off.*Rebuild"):
        _host.check_versions("2.9.1", "2.9.0", other)


def test_a_missing_torch_xla_is_an_import_error_with_what_to_do():
    run_script(
        """
        import importlib.metadata as metadata
        real = metadata.version
        def version(name):
            if name == "torch_xla":
                raise metadata.PackageNotFoundError(name)
            return real(name)
        metadata.version = version
        try:
            import torch_xla_donate
        except ImportError as error:
            assert "needs torch_xla (2.7, 2.8, 2.9), which is not installed for" in str(error), error
        else:
            raise AssertionError
        import sys
        assert "torch_xla" not in sys.modules
        """
    )


def test_a_package_that_was_not_built_says_so(tmp_path):
    import shutil

    shutil.copytree(
        Path(_host.__file__).parent, tmp_path / "torch_xla_donate", ignore=shutil.ignore_patterns("_C*", "__pycache__")
    )
    done = run_script(
        "import sys; sys.path.insert(0, sys.argv[1]); import torch_xla_donate", str(tmp_path), exit_code=1
    )
    assert "ImportError: torch_xla_donate has not been built. Rebuild torch_xla_donate" in done.stderr


def test_the_module_records_what_it_was_built_against(tmp_path):
    import torch

    built = _host.build()
    assert built.torch == torch.__version__
    assert built.torch_xla.startswith("2.")
    assert built.cxx11_abi == torch.compiled_with_cxx11_abi()

    stranger = tmp_path / "_C.so"
    stranger.write_bytes(b"\x7fELF")
    with pytest.raises(ImportError, match="does not say what it was built against. Rebuild"):
        _host.build_record(stranger)


def test_every_hook_of_the_table_is_in_place():
    hooks = _C.hooks()
    assert len(hooks) == 9
    assert all(hook["slots"] >= 1 and hook["slots"] == hook["in_place"] for hook in hooks)
    assert len({hook["symbol"] for hook in hooks}) == 9


STATE = """
import hashlib, sys
import _XLAC

def state():
    # The read-only data of torch_xla's module (its relocation slots are there), and how its pages are protected.
    digest, lines = hashlib.sha256(), []
    with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb", 0) as memory:
        for line in maps:
            if line.rstrip().endswith(_XLAC.__file__):
                lines.append(line)
                first, last = (int(part, 16) for part in line.split()[0].split("-"))
                if line.split()[1] == "r--p":
                    memory.seek(first)
                    digest.update(memory.read(last - first))
    assert lines
    return digest.hexdigest(), lines
"""


def test_uninstalling_leaves_torch_xla_byte_for_byte_as_it_was():
    run_script(
        "import torch_xla\n"
        + STATE
        + """
before = state()
import torch_xla_donate
from torch_xla_donate import _C, _host
patched = state()
assert patched[0] != before[0] and patched[1] == before[1]
_host.install_hooks()
assert state() == patched
for _ in range(3):
    _host.uninstall_hooks()
    assert state() == before
_host.install_hooks()
assert state() == patched
"""
    )


def test_unhooked_nothing_is_donated_and_hooked_again_it_is():
    run_script(
        """
        import torch, torch_xla
        import torch_xla_donate as txd
        from torch_xla_donate import _host
        t = torch.arange(4.0).to("xla"); torch_xla.sync()
        txd.donate_buffer(t)
        _host.uninstall_hooks()
        out = t + 1
        torch_xla.sync(wait=True)
        assert t.tolist() == [0, 1, 2, 3] and not txd.is_donated(t)
        try:
            txd.donate_buffer(t)
        except txd.DonationError as error:
            assert "hooks of torch_xla_donate have been taken out" in str(error)
        else:
            raise AssertionError
        _host.install_hooks()
        out = t + 2
        torch_xla.sync()
        assert txd.is_donated(t) and out.tolist() == [2, 3, 4, 5]
        """
    )


def test_installing_and_uninstalling_from_many_threads_while_steps_run_does_no_harm():
    run_script(
        "import torch_xla\n"
        + STATE
        + """
before = state()
import threading, torch
import torch_xla_donate as txd
from torch_xla_donate import _host
stop = threading.Event()
errors = []
def flip():
    try:
        while not stop.is_set():
            _host.uninstall_hooks()
            _host.install_hooks()
    except BaseException as error:
        errors.append(error)
threads = [threading.Thread(target=flip) for _ in range(3)]
for thread in threads: thread.start()
t = torch.zeros(64).to("xla")
for _ in range(200):
    t = t + 1
    torch_xla.sync()
stop.set()
for thread in threads: thread.join()
assert errors == [], errors
assert t[0].item() == 200
_host.uninstall_hooks()
assert state() == before
"""
    )


@pytest.mark.parametrize(
    ("question", "answer", "found"),
    [
        ("_xla_get_tensor_id(self, tensor)", "-1", "torch_xla says -1"),
        ("_get_use_eager_mode(self)", "True", "does not keep the switch of eager mode"),
        ("_get_allow_execution(self)", "False", "does not keep the switch of eager mode"),
    ],
)
def test_a_layout_that_differs_takes_the_hooks_out_again(question, answer, found):
    run_script(
        "import torch_xla\n"
        + STATE
        + f"""
before = state()
import torch
import torch_xla_donate as txd
from torch_xla_donate import _host
class Xlac:
    def __getattr__(self, name):
        import _XLAC
        return getattr(_XLAC, name)
    def {question}:
        return {answer}
_host.xlac = Xlac
t = torch.arange(4.0).to("xla"); torch_xla.sync()
try:
    txd.donate_buffer(t)
except ImportError as error:
    assert "laid out differently" in str(error) and "{found}" in str(error), error
else:
    raise AssertionError
assert state() == before
out = t + 1
torch_xla.sync()
assert out.tolist() == [1, 2, 3, 4]
"""
    )


@pytest.mark.parametrize("automatic", [False, True])
@pytest.mark.parametrize(
    "ambient",
    [
        "torch.set_default_dtype(torch.bfloat16)",
        "torch.set_default_device('xla')",
        "open_contexts.enter_context(torch.device('meta'))",
        "open_contexts.enter_context(FakeTensorMode())",
        "open_contexts.enter_context(Mode())",
        "open_contexts.enter_context(torch.inference_mode())",
        "os.environ['XLA_USE_BF16'] = '1'",
    ],
)
def test_the_layouts_are_right_whatever_holds_where_they_are_looked_at(ambient, automatic):
    run_script(f"""
        import contextlib, os
        import torch, torch_xla
        import torch_xla_donate as txd
        from torch._subclasses.fake_tensor import FakeTensorMode
        from torch.utils._python_dispatch import TorchDispatchMode
        seen = []
        class Mode(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                seen.append(func)
                return func(*args, **(kwargs or {{}}))
        host = torch.arange(4.0)
        with contextlib.ExitStack() as open_contexts:
            if {automatic}:
                t = host.to("xla") + 0; torch_xla.sync()
                out = t + 1; del t
                {ambient}
                txd.auto_donate()
                torch_xla.sync()
            else:
                t = host.to("xla")
                out = t + 1
                {ambient}
                txd.donate_buffer(t)
                torch_xla.sync()
            assert not seen, seen
        assert [donor.outcome for donor in txd.donation_report().donors] == ["donated"]
        assert not txd.donation_report().auto_refusals
        assert out.cpu().tolist() == [1, 2, 3, 4]
    """)


@pytest.mark.parametrize("first", ["donate_buffer(outside)", "compile(lambda t: t)(carry)"])
def test_the_layouts_are_right_in_the_trace_of_a_loop(first):
    run_script(f"""
        import torch, torch_xla
        from torch_xla_donate import compile, donate_buffer, donation_report, is_donated, scan
        outside, init, xs = (torch.ones(*shape).to("xla") for shape in ((3,), (3,), (4, 3)))
        torch_xla.sync()
        def body(carry, x):
            {first}
            return carry + x, carry
        final, _ = scan(body, init, xs)
        torch_xla.sync()
        assert final.tolist() == [5, 5, 5]
        t = torch.ones(5).to("xla"); torch_xla.sync()
        out = t + 1; donate_buffer(t); torch_xla.sync()
        assert is_donated(t) and out.tolist() == [2] * 5
    """)


def test_a_layout_that_differs_is_a_reason_of_automatic_donation():
    run_script("""
        import torch, torch_xla
        import torch_xla_donate as txd
        from torch_xla_donate import _C, _host
        class Xlac:
            def __getattr__(self, name):
                import _XLAC
                return getattr(_XLAC, name)
            def _xla_get_tensor_id(self, tensor):
                return -1
        _host.xlac = Xlac
        p = torch.arange(4.0).to("xla"); torch_xla.sync()
        with txd.auto_donate():
            for _ in range(3):
                p = p + 1; torch_xla.sync()
        assert p.tolist() == [3, 4, 5, 6] and not _C.installed()
        ((reason, steps),) = txd.donation_report().auto_refusals.items()
        assert "laid out differently" in reason and steps == 1, (reason, steps)
    """)


def test_the_layouts_are_right_after_graphs_with_names_of_all_lengths():
    # A string that has been long keeps its place when it gets short.
    run_script(
        """
import torch, torch_xla
import torch_xla_donate as txd
from torch_xla_donate import _C
t = torch.arange(4.0).to("xla"); torch_xla.sync()
for name in ("", "f", "f" * 15, "f" * 16, "f" * 300, "f"):
    with torch_xla.compile(name=name):
        txd._host._verified = False
        txd.donate_buffer(t)
        txd.cancel_donation(t)
        t = t + 1
assert _C.installed() and t.tolist() == [6, 7, 8, 9]
"""
    )


def test_a_slot_that_somebody_else_has_patched_is_an_import_error_and_nothing_changes():
    run_script(
        "import torch_xla\n"
        + STATE
        + """
import torch_xla_donate
from torch_xla_donate import _C, _host
_host.uninstall_hooks()
before = state()

# A stranger's patch of one of the slots: it is moved to another function of libtorch.
import ctypes, mmap, struct
libc = ctypes.CDLL(None, use_errno=True)
torch_library = ctypes.CDLL("libtorch_cpu.so")
symbol = next(hook["symbol"] for hook in _C.hooks() if hook["name"].endswith("RunPostOrder"))
expected = ctypes.cast(getattr(torch_library, symbol), ctypes.c_void_p).value
other = ctypes.cast(torch_library._ZN5torch4lazy10getBackendEv, ctypes.c_void_p).value
slot = None
with open("/proc/self/mem", "rb", 0) as memory:
    for line in before[1]:
        first, last = (int(part, 16) for part in line.split()[0].split("-"))
        if line.split()[1] == "r--p":
            memory.seek(first)
            data = memory.read(last - first)
            at = data.find(struct.pack("<Q", expected))
            if at >= 0:
                slot = first + at
assert slot is not None
page = slot & ~(mmap.PAGESIZE - 1)
assert libc.mprotect(ctypes.c_void_p(page), ctypes.c_size_t(mmap.PAGESIZE), 3) == 0
ctypes.c_uint64.from_address(slot).value = other
strangers = state()[0]
try:
    _host.install_hooks()
except ImportError as error:
    assert "torch_xla is unchanged" in str(error), error
    assert symbol in str(error), error
else:
    raise AssertionError
assert state()[0] == strangers
assert not _C.installed()
"""
    )


@pytest.mark.parametrize("where", ["atexit.register(last)", "threading.Thread(target=late).start()"])
@pytest.mark.parametrize("automatic", [False, True])
def test_the_layouts_are_right_where_the_interpreter_is_ending(where, automatic):
    done = run_script(f"""
        import atexit, threading
        import torch, torch_xla
        import torch_xla_donate as txd
        p = torch.arange(4.0).to("xla"); torch_xla.sync(wait=True)
        def last():
            global p
            if {automatic}:
                txd.auto_donate()
            else:
                txd.donate_buffer(p)
            p = p + 1
            torch_xla.sync(wait=True)
            print(txd.donation_report().donors[0].outcome, p.tolist())
        def late():
            threading.main_thread().join()
            last()
        {where}
    """)
    assert done.stdout == "donated [1.0, 2.0, 3.0, 4.0]\n", (done.stdout, done.stderr)
