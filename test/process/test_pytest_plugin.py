"""torch_xla_donate_pytest: pytest finds it by its entry point, and it costs a project nothing."""

from __future__ import annotations

import subprocess
import sys

import pytest
from children import run_in_child
from helpers import ROOT


def run_pytest(*arguments: str) -> int:
    return int(pytest.main(["-p", "no:cacheprovider", "-p", "no:randomly", "-p", "no:xdist", *arguments]))


def run_installed(folder: str, *arguments: str) -> int:
    sys.path.insert(0, folder)
    return run_pytest(*arguments)


UNUSED = """
import sys

def test_nothing(request):
    assert request.config.pluginmanager.has_plugin("torch_xla_donate_pytest")
    found = [name for name in sys.modules if name.split(".")[0] in ("torch", "torch_xla", "torch_xla_donate")]
    assert found == []
"""


def test_pytest_finds_it_by_its_entry_point(tmp_path):
    """A project that does not donate imports nothing. The example project passes, also with both ways at once."""
    # GIVEN a folder with the package's metadata, as an installation has it
    installed, unused = tmp_path / "installed", tmp_path / "unused"
    installed.mkdir()
    command = [sys.executable, "setup.py", "-q", "egg_info", "-e", str(installed)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)

    unused.mkdir()
    (unused / "test_unused.py").write_text(UNUSED, encoding="utf-8")
    (unused / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(unused)],
        env={"PATH": "", "PYTHONPATH": f"{installed}:{ROOT}:{ROOT / 'torch_xla_donate' / '_pytest'}"},
        cwd=unused,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout

    for also in ((), ("-p", "torch_xla_donate.testing")):
        ended = run_in_child(run_installed, str(installed), "-q", *also, str(ROOT / "examples" / "user_project"))
        assert ended.value == 0, ended.stdout
        assert "4 passed" in ended.stdout


UNUSABLE = """
import torch, torch_xla
from torch_xla_donate import donate_buffer

def lose(size):
    t = torch.ones(size).to("xla")
    torch_xla.sync()
    donate_buffer(t, strict="off")
    total = t.sum()
    torch_xla.sync()
    return total

def test_lost(fail_on_unusable_donation):
    lose(7)

def test_lost_by_name(request):
    request.getfixturevalue("fail_on_unusable_donation")
    lose(11)

def test_own_error(fail_on_unusable_donation):
    assert lose(9).item() == 8

def test_fine(fail_on_unusable_donation, hlo_dump):
    t = torch.ones(8).to("xla")
    torch_xla.sync()
    donate_buffer(t)
    out = t + 1
    torch_xla.sync()
    assert len(hlo_dump.modules()[-1].aliases) == 1
    assert hlo_dump.folder.is_dir()
"""


def test_an_unusable_donation_fails_its_test(tmp_path):
    """With `-p torch_xla_donate.testing`, in a project without the entry point."""
    (tmp_path / "test_lost.py").write_text(UNUSABLE, encoding="utf-8")
    (tmp_path / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    ended = run_in_child(run_pytest, "-q", "-p", "torch_xla_donate.testing", str(tmp_path))
    assert ended.value == 1
    assert "3 failed, 1 passed" in ended.stdout
    assert "f32[11]: no output of the step has its size of 44 bytes" in ended.stdout
    assert "f32[7]: no output of the step has its size of 28 bytes" in ended.stdout
    assert "f32[9]: no output" not in ended.stdout
    assert "assert 9.0 == 8" in ended.stdout
