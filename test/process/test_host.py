"""Loading, hooking and unhooking: what fits is checked, and torch_xla is left as it was."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import shutil
import struct
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import _XLAC
import bare
import numpy as np
import pytest
import torch
import torch_xla
from bare import mapped, state
from children import in_process, run_in_child
from helpers import assert_a_step_donates, consume, error_of, make, run_script
from sharding import mesh, shard
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from torch_xla_donate import (
    _C,
    DonationError,
    _host,
    auto_donate,
    compile,
    donate_buffer,
    donation_report,
    is_donated,
    scan,
    set_auto_donate,
)

BUILD = _host.load.Build("2.9.1+cu128", "2.9.0", "GNU 12")


def test_versions_of_the_builds_minor_are_accepted():
    """Also previews and local builds: the first use compares their layouts, as it does with a stock wheel."""
    major, minor = torch.__version__.split(".")[:2]
    for rest in (".1+cu128", ".0", ".0.dev20250901", ".1+local", "rc1", ".0a0+git7bcbafe"):
        version = f"{major}.{minor}{rest}"
        assert _host.load.module_for(version, version).parent.name == f"torch_{major}_{minor}"
        _host.load.check_build(_host.build(), version, version)
    _host.load.module_for(f"{major}.{minor}.0", f"{major}.{minor}.1")


def test_other_releases_are_refused_with_the_versions_seen_and_supported():
    for torch_version, torch_xla_version, text in [
        ("2.10.0", "2.10.0", "supports torch_xla 2.8 or 2.9, but torch 2.10.0 and torch_xla 2.10.0 are installed"),
        ("2.7.1", "2.7.0", "supports torch_xla 2.8 or 2.9, but torch 2.7.1 and torch_xla 2.7.0 are installed"),
        ("2.8.0", "2.9.0", "torch 2.8.0 and torch_xla 2.9.0 do not belong together"),
        ("2.9.1", "2.8.1", "torch 2.9.1 and torch_xla 2.8.1 do not belong together"),
    ]:
        with pytest.raises(ImportError, match=text):
            _host.load.module_for(torch_version, torch_xla_version)
    for version in ("nightly", "2", "", "2.x", "v2.9", None):
        for versions, package in (((version, "2.9.0"), "torch"), (("2.9.1", version), "torch_xla")):
            message = f"{package} says that its version is {version!r}, expected one such as '2.9.1'"
            assert message in error_of(ImportError, _host.load.module_for, *versions)


def test_a_module_whose_record_does_not_fit_its_folder_is_refused():
    text = (
        r"was built against torch 2.9.1\+cu128 and torch_xla 2.9.0, but torch 2.8.0\+cpu and torch_xla 2.8.1 are "
        r"installed. Rebuild torch_xla_donate in this environment: pip install --no-build-isolation"
    )
    with pytest.raises(ImportError, match=text):
        _host.load.check_build(BUILD, "2.8.0+cpu", "2.8.1")


def test_the_import_is_refused_before_torch_xla_is_loaded():
    """For another release, and without torch_xla."""
    run_script(
        """
        import importlib.metadata, sys
        import torch

        def absent(name):
            raise importlib.metadata.PackageNotFoundError(name)

        torch.__version__ = "2.10.0"
        for version, message in ((lambda name: "2.10.0", sys.argv[1]), (absent, sys.argv[2])):
            importlib.metadata.version = version
            try:
                import torch_xla_donate
            except ImportError as error:
                assert message in str(error), error
            else:
                raise AssertionError
            assert not {"torch_xla", "_XLAC", "torch_xla_donate._C"} & sys.modules.keys()
        """,
        "supports torch_xla 2.8 or 2.9, but torch 2.10.0 and torch_xla 2.10.0 are",
        "needs torch_xla 2.8 or 2.9, which is not installed for",
    )


def copy_without(folder: Path, *files: str) -> Path:
    """A copy of the package that lacks these files."""
    ignored = shutil.ignore_patterns("__pycache__", *files)
    return Path(shutil.copytree(Path(_host.__file__).parents[1], folder / "torch_xla_donate", ignore=ignored))


def test_a_package_without_a_module_for_the_release_names_what_it_has(tmp_path):
    """A module of the other release, also one in the package's folder, must never be loaded in place of the missing."""
    copy = copy_without(tmp_path, "_C.*.so")
    other = "2_8" if torch.__version__.startswith("2.9") else "2_9"
    for folder in (copy / "_built" / f"torch_{other}", copy):
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(_C.__file__, folder)
    done = run_in_child(bare.import_package, str(tmp_path), exit_code=1)
    has = f"has modules for torch and torch_xla {other.replace('_', '.')}, but torch {torch.__version__} and torch_xla"
    assert has in done.stderr


def test_a_package_that_was_not_built_says_so(tmp_path):
    copy_without(tmp_path, "_C*", "_built")
    done = run_in_child(bare.import_package, str(tmp_path), exit_code=1)
    assert "ImportError: torch_xla_donate has not been built. Rebuild torch_xla_donate" in done.stderr


def test_the_module_records_what_it_was_built_against(tmp_path):
    built = _host.build()
    assert built.torch == torch.__version__
    assert built.torch_xla.startswith("2.")

    stranger = tmp_path / "_C.so"
    stranger.write_bytes(b"\x7fELF")
    with pytest.raises(ImportError, match="has no record of its build. Rebuild"):
        _host.load.build_record(stranger)


def unhooked() -> object:
    """The result of `state` without the hooks. It installs them again."""
    _host.uninstall_hooks()
    found = state()
    _host.install_hooks()
    return found


def test_uninstalling_leaves_torch_xla_byte_for_byte_as_it_was():
    run_in_child(bare.hooks_come_and_go)


def slots_of_libtorch(wanted):
    """How often the data of libtorch points to each of these functions of libtorch."""
    found = [data for _, data in mapped("/libtorch_cpu.so", "r--p", "rw-p")]
    return [sum(data.count(address) for data in found) for address in wanted]


@in_process
def test_uninstalling_gives_libtorch_its_slots_back():
    library = ctypes.CDLL("libtorch_cpu.so")
    symbols = [hook["symbol"] for hook in _C.hooks() if hook["library"] == "libtorch_cpu"]
    wanted = [struct.pack("<Q", ctypes.cast(library[symbol], ctypes.c_void_p).value) for symbol in symbols]
    hooked = slots_of_libtorch(wanted)
    _host.uninstall_hooks()
    assert slots_of_libtorch(wanted) == [count + 1 for count in hooked]
    _host.install_hooks()
    assert slots_of_libtorch(wanted) == hooked
    c, k = torch.zeros(4, 4).to("xla"), torch.ones(4).to("xla")
    _host.uninstall_hooks()
    c[0] = k
    assert _C.sizes()["outdated"] == 0
    _host.install_hooks()
    c[1] = k
    assert _C.sizes()["outdated"] == 1
    assert c[:, 0].tolist() == [1, 1, 0, 0]
    # An overwrite is seen again, too.
    torch_xla.sync()
    new = consume(c, wait=True)
    c.zero_()
    assert c[0].tolist() == [0] * 4 and new[0].tolist() == [2] * 4


@in_process
def test_unhooked_nothing_is_donated_and_hooked_again_it_is():
    t = make(4)
    donate_buffer(t)
    _host.uninstall_hooks()
    out = t + 1
    torch_xla.sync(wait=True)
    assert t.tolist() == [0, 1, 2, 3] and not is_donated(t)
    with pytest.raises(DonationError, match="hooks of torch_xla_donate have been removed"):
        donate_buffer(t)
    _host.install_hooks()
    out = t + 2
    torch_xla.sync()
    assert is_donated(t) and out.tolist() == [2, 3, 4, 5]


@in_process
def test_threads_may_install_and_uninstall_while_steps_run():
    before = unhooked()
    sys.setswitchinterval(0.0002)  # more turns, and no 5 ms of waiting for each
    stop = threading.Event()
    turns = [0, 0, 0]

    def flip(number):
        while not stop.is_set():
            _host.uninstall_hooks()
            _host.install_hooks()
            turns[number] += 1

    with ThreadPoolExecutor(3) as threads:
        flips = [threads.submit(flip, number) for number in range(3)]
        t, steps = torch.zeros(64).to("xla"), 0
        try:
            # Until all have had their turns, however they are scheduled.
            while steps < 100 or (min(turns) < 10 and not any(one.done() for one in flips)):
                t = t + 1
                torch_xla.sync()
                steps += 1
        finally:
            stop.set()
    assert [one.result() for one in flips] == [None] * 3
    assert t[0].item() == steps
    _host.uninstall_hooks()
    assert state() == before


@in_process
def test_a_layout_that_differs_takes_the_hooks_out_again():
    before = unhooked()
    t = make(4)
    _XLAC._xla_get_tensor_id = lambda _: -1
    with pytest.raises(ImportError, match="laid out differently.*torch_xla says -1"):
        donate_buffer(t)
    assert state() == before
    out = t + 1
    torch_xla.sync()
    assert out.tolist() == [1, 2, 3, 4]


class Memory:
    """This process's memory in words of 8 bytes. Reading anything that is not mapped gives 0."""

    def __init__(self) -> None:
        self.file = os.open("/proc/self/mem", os.O_RDONLY)

    def read(self, address: int, size: int) -> bytes:
        try:
            return os.pread(self.file, size, address)
        except (OSError, OverflowError, ValueError):
            return bytes(size)

    def word(self, address: int) -> int:
        return int.from_bytes(self.read(address, 8), "little")

    def type_name(self, address: int) -> bytes:
        """The class of the object there, as in typeid(); empty if it has no vtable."""
        name = self.word(self.word(self.word(address) - 8) + 8)
        return self.read(name, 200).split(b"\0")[0] if name else b""

    def place_of(self, owner: int, size: int, type_name: bytes) -> int:
        """The first place in the owner that points to an object of the class."""
        return next(p for p in range(owner, owner + size, 8) if self.type_name(self.word(p)) == type_name)

    def places_in_module(self, text: bytes) -> list[int]:
        """The addresses of these bytes in torch_xla's module."""
        found = []
        for first, data in mapped(_XLAC.__file__, "r--p", "r-xp", "rw-p"):
            at = -1
            while (at := data.find(text, at + 1)) >= 0:
                found.append(first + at)
        return found


@contextlib.contextmanager
def changed(place: int, value: int):
    word = ctypes.c_uint64.from_address(place)
    before, word.value = word.value, value
    try:
        yield
    finally:
        word.value = before


CLIENT = b"N9torch_xla7runtime21PjRtComputationClient"
WILD = (0, 8, 0xDEAD0000, 0x7FFF_FFFF_F000, 2**63, 2**64 - 8)
keep: list[object] = []


def made_up_layouts(probe: torch.Tensor) -> dict[str, tuple[int, int]]:
    """By name, the place of a pointer that leads to the probe's device data, and another value for it."""
    memory = Memory()
    impl = torch._from_functional_tensor(probe)._cdata
    places = {"lazy tensor": memory.place_of(impl + 128, 128, b"N9torch_xla9XLATensorE")}
    tensor = memory.word(places["lazy tensor"])
    places["data"] = memory.place_of(tensor, 64, b"N9torch_xla9XLATensor4DataE")
    data = memory.word(places["data"])
    places["device data"] = memory.place_of(data, 64, CLIENT + b"8PjRtDataE")
    buffer = memory.word(places["device data"])
    vtables = {"vtable of the lazy tensor": tensor, "vtable of the data": data, "vtable of the device data": buffer}

    heap = np.zeros(512, dtype=np.uint64)
    copy = np.frombuffer(memory.read(memory.word(buffer) - 16, 80), dtype=np.uint64).copy()
    keep.extend((heap, copy))
    libc = ctypes.cast(ctypes.CDLL(None).malloc, ctypes.c_void_p).value
    values = {f"{value:#x}": value for value in WILD}
    values |= {"zeros": heap.ctypes.data, "code": libc, "copied vtable": copy.ctypes.data + 16}
    values |= {f"the {name}": memory.word(place) for name, place in (places | vtables).items()}
    found = {}
    for pointer, place in (places | vtables).items():
        right = memory.word(place)
        shifted = {f"shifted by {shift}": right + shift for shift in (-16, -8, 4, 8, 16, 64)}
        found |= {f"{pointer}: {name}": (place, value) for name, value in (values | shifted).items() if value != right}
    # It follows the text of the device, which lies inside of its string.
    place = buffer + memory.read(buffer, 256).index(b"CPU:0") + 16
    assert memory.word(place) & 0xFFFFFFFF == 4  # xla::S32
    return found | {"element type: s64": (place, memory.word(place) + 1)}


@in_process
def test_a_made_up_layout_is_an_error_and_no_crash():
    probe = torch.zeros(3, dtype=torch.int32).to("xla")
    _XLAC._xla_sync_multi([probe], [], True, True)
    number = _XLAC._xla_get_tensor_id(probe)
    _C.verify_layouts(probe, number)
    layouts = made_up_layouts(probe)
    assert len(layouts) > 100
    for name, (place, value) in layouts.items():
        print(name, flush=True)  # shown if the child ends here
        with changed(place, value):
            assert "expected" in error_of(RuntimeError, _C.verify_layouts, probe, number), name
    _C.verify_layouts(probe, number)

    # At a mark, the program gets an ImportError with what to do.
    t = make(4)
    before = unhooked()
    _host.hooks._probe = lambda device: (probe, number)
    place, value = layouts["device data: 0x0"]
    with changed(place, value):
        error = error_of(ImportError, donate_buffer, t)
    assert "the device data of an uploaded tensor is not where it was expected: null" in error
    assert error.endswith("Install a stock wheel of torch_xla 2.8 or 2.9.")
    assert state() == before and (t + 1).tolist() == [1, 2, 3, 4]


@in_process
def test_a_made_up_class_of_graphs_is_an_error_in_the_report():
    """The vtable of its class ends earlier, so the package calls none of its functions."""
    memory = Memory()
    names = memory.places_in_module(CLIENT + b"15PjRtComputationE\0")
    infos = [place - 8 for name in names for place in memory.places_in_module(struct.pack("<Q", name))]
    found = {place + 8 for info in infos for place in memory.places_in_module(struct.pack("<Q", info))}
    (vtable,) = (place for place in found if memory.word(place - 16) == 0)
    last_function = vtable + 7 * 8
    page = last_function & ~(mmap.PAGESIZE - 1)
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(page), ctypes.c_size_t(2 * mmap.PAGESIZE), 3) == 0
    t = make(4)
    with changed(last_function, 0):
        for _ in range(2):
            t = consume(t, wait=True)
        report = donation_report()
    assert [donor.outcome for donor in report.donors] == ["donated"] * 2
    assert report.errors == {"a run's graph has 7 virtual functions, expected 8": 2}
    assert t.tolist() == [2, 3, 4, 5]
    consume(t)
    assert donation_report().errors == report.errors


seen = []


class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        seen.append(func)
        return func(*args, **(kwargs or {}))


AMBIENTS = {
    "bfloat16": lambda contexts: torch.set_default_dtype(torch.bfloat16),
    "the device": lambda contexts: torch.set_default_device("xla"),
    "the meta device": lambda contexts: contexts.enter_context(torch.device("meta")),
    "fake tensors": lambda contexts: contexts.enter_context(FakeTensorMode()),
    "a dispatch mode": lambda contexts: contexts.enter_context(Mode()),
    "inference mode": lambda contexts: contexts.enter_context(torch.inference_mode()),
    "XLA_USE_BF16": lambda contexts: os.environ.update(XLA_USE_BF16="1"),
}


@pytest.mark.parametrize("ambient", AMBIENTS)
@in_process
def test_the_layouts_are_right_in_any_ambient_mode(ambient):
    t = torch.arange(4.0).to("xla") + 0
    torch_xla.sync()
    out = t + 1
    with contextlib.ExitStack() as contexts:
        AMBIENTS[ambient](contexts)
        donate_buffer(t)
        torch_xla.sync()
    assert [donor.outcome for donor in donation_report().donors] == ["donated"]
    t, out = out, out + 1
    del t
    with contextlib.ExitStack() as contexts:
        AMBIENTS[ambient](contexts)
        _host.hooks._verified = False
        set_auto_donate(True)
        torch_xla.sync()
    assert not seen
    assert [donor.outcome for donor in donation_report().donors] == ["donated"] * 2
    assert not donation_report().auto_refusals
    assert out.cpu().tolist() == [2, 3, 4, 5]


@pytest.mark.parametrize("first", ["donate_buffer", "compile"])
@in_process
def test_the_layouts_are_right_in_the_trace_of_a_loop(first):
    outside, init, xs = (torch.ones(*shape).to("xla") for shape in ((3,), (3,), (4, 3)))
    torch_xla.sync()

    def body(carry, x):
        if first == "donate_buffer":
            donate_buffer(outside)
        else:
            compile(lambda t: t)(carry)
        return carry + x, carry

    final, _ = scan(body, init, xs)
    torch_xla.sync()
    assert final.tolist() == [5, 5, 5]
    assert_a_step_donates()


@in_process
def test_a_layout_that_differs_is_a_reason_of_automatic_donation():
    _XLAC._xla_get_tensor_id = lambda *_: -1
    p = make(4)
    with auto_donate():
        for _ in range(3):
            p = p + 1
            torch_xla.sync()
    assert p.tolist() == [3, 4, 5, 6] and not _C.installed()
    ((reason, steps),) = donation_report().auto_refusals.items()
    assert "laid out differently" in reason and steps == 1


@in_process
def test_a_slot_that_another_library_patched_is_an_import_error():
    """The error names the symbol, and nothing is changed."""
    _host.uninstall_hooks()

    # A stranger's patch of one of the slots: it is moved to another function of libtorch.
    libc = ctypes.CDLL(None, use_errno=True)
    torch_library = ctypes.CDLL("libtorch_cpu.so")
    symbol = next(hook["symbol"] for hook in _C.hooks() if hook["name"].endswith("RunPostOrder"))
    expected = ctypes.cast(getattr(torch_library, symbol), ctypes.c_void_p).value
    other = ctypes.cast(torch_library._ZN5torch4lazy10getBackendEv, ctypes.c_void_p).value
    found = ((first, data.find(struct.pack("<Q", expected))) for first, data in mapped(_XLAC.__file__, "r--p"))
    *_, slot = (first + at for first, at in found if at >= 0)

    def write(address):
        page = slot & ~(mmap.PAGESIZE - 1)
        assert libc.mprotect(ctypes.c_void_p(page), ctypes.c_size_t(mmap.PAGESIZE), 3) == 0
        ctypes.c_uint64.from_address(slot).value = address

    write(other)
    strangers = state()[0]
    error = error_of(ImportError, _host.install_hooks)
    assert "torch_xla is unchanged" in error and symbol in error
    assert state()[0] == strangers
    assert not _C.installed()

    write(expected)
    _host.install_hooks()
    ours = ctypes.c_uint64.from_address(slot).value
    write(other)
    assert "has patched 1 slots" in error_of(RuntimeError, _host.uninstall_hooks)
    assert not _C.installed()
    assert "have been removed" in error_of(DonationError, donate_buffer, make(4))
    assert "still holds slots" in error_of(ImportError, _host.install_hooks)
    write(ours)
    _host.uninstall_hooks()
    _host.install_hooks()
    assert_a_step_donates()


def test_the_layouts_are_right_where_the_interpreter_is_ending():
    """On a thread that has outlived the main one, and at the exit."""
    done = run_script("""
        import atexit, threading
        import torch, torch_xla
        import torch_xla_donate as txd
        p = torch.arange(4.0).to("xla"); torch_xla.sync(wait=True)
        def step(begin):
            global p
            txd._host.hooks._verified = False
            begin()
            p = p + 1
            torch_xla.sync(wait=True)
            print(txd.donation_report(steps=1).donors[0].outcome, p.tolist(), txd._host.hooks._verified)
        def late():
            threading.main_thread().join()
            step(lambda: txd.donate_buffer(p))
        threading.Thread(target=late).start()
        atexit.register(step, lambda: txd.set_auto_donate(True))
    """)
    expected = "donated [1.0, 2.0, 3.0, 4.0] True\ndonated [2.0, 3.0, 4.0, 5.0] True\n"
    assert done.stdout == expected, (done.stdout, done.stderr)


@in_process(devices=4)
def test_a_fresh_tensor_may_be_sharded_as_replicated():
    """torch_xla does so in programs that switch SPMD off and on again."""
    mesh()
    probe = shard(torch.zeros(3, dtype=torch.int32).to("xla"), None)
    number = _XLAC._xla_get_tensor_id(probe)
    with pytest.raises(RuntimeError, match="element type int32 set, sharding set, clone flag empty, alias id"):
        _C.verify_layouts(probe, number, False)
    _C.verify_layouts(probe, number, _XLAC._get_xla_sharding_type(probe) is not None)


# --- Errors of the extension module ---


@in_process
def test_a_lock_that_cannot_be_released_raises():
    """An exception from a C++ destructor would end the process."""

    class Lock:
        def acquire(self):
            pass

        def release(self):
            raise ValueError("not released")

    calls = []

    class Failing(_C.Scope):
        def leave(self, raised):
            calls.append(raised)
            raise KeyError("not left")

    scope = _C.Scope(Lock())
    with pytest.raises(ValueError, match="not released"), scope:
        pass
    assert scope.depth == 0
    # The first error counts; the second one goes to sys.unraisablehook.
    with pytest.raises(KeyError, match="not left"), Failing(Lock()):
        pass
    assert calls == [False] * 10  # an exception of a signal handler would not come again


@in_process
def test_the_texts_of_errors_are_bounded():
    """A message with an address or a number in it is another text each time."""
    before = sum(_C.hook_errors().values())
    for number in range(200):
        _C.note_error(f"error {number}")
        _C.note_auto_refusal(_C.Reason("failed", f"error {number}"))
    assert len(_C.hook_errors()) <= 65 and sum(_C.hook_errors().values()) == before + 200
    assert len(_C.auto_refusals()) <= 65
