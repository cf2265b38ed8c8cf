"""test/upstream/run.py: what it says of a small folder in place of pytorch/xla's, and when it fails."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
from children import run_file
from upstream.run import Run, error_of, failing_with_auto

TOOL = Path(__file__).resolve().parents[1] / "upstream" / "run.py"
FILES = {
    "test_steps.py": """
        import unittest, torch, torch_xla, torch_xla.runtime

        class Steps(unittest.TestCase):
            def test_a_step(self):
                t = torch.arange(4.0).to("xla")
                t = t + 1
                torch_xla.sync()
                self.assertEqual(t.tolist(), [1, 2, 3, 4])
                self.assertEqual(torch_xla.runtime.global_runtime_device_count(), 2)

            def test_that_fails_both_ways(self):
                self.fail()

        def test(self):
            pass

        # As parametrized tests do.
        setattr(Steps, f"test_of_{object()}", test)

        unittest.main()
        """,
    "test_differs.py": """
        import os, sys, unittest, torch_xla
        auto = "torch_xla_donate" in sys.modules and sys.modules["torch_xla_donate"]._C.auto_donates()

        class Differs(unittest.TestCase):
            def test_a_is_the_same(self):
                pass

            def test_b_fails(self):
                self.assertFalse(auto)

            def test_c_fails_in_part(self):
                for part in range(2):
                    with self.subTest(part=part):
                        self.assertFalse(auto and part == 0)

            @unittest.skipIf(auto, "with donation")
            def test_d_is_skipped(self):
                pass

            def test_e_ends_the_process(self):
                if auto:
                    os._exit(3)

            def test_f_comes_too_late(self):
                pass

        unittest.main()
        """,
    "test_broken.py": "import no_such_module\n",
}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / "test").mkdir()
    for name, text in FILES.items():
        (tmp_path / "test" / name).write_text(textwrap.dedent(text), encoding="utf-8")
    return tmp_path


def run_tool(checkout: Path, *cases: str, exit_code: int) -> str:
    return run_file(TOOL, str(checkout), *cases, timeout=900, exit_code=exit_code).stdout


def test_a_file_that_passes_is_counted_with_its_donating_steps(checkout: Path) -> None:
    printed = run_tool(checkout, "CPU_NUM_DEVICES=2 test_steps.py", exit_code=0)
    counts = "2 / 1 / 0 without, 2 / 1 / 0 with, 1 donating steps"
    assert f"CPU_NUM_DEVICES=2 test_steps.py: {counts}\n" in printed
    assert "Every test that passes without automatic donation passes with it." in printed


def test_failures_with_automatic_donation_are_named(checkout: Path) -> None:
    names = ("test_differs.py", "test_broken.py", "test_missing.py")
    printed = run_tool(checkout, *names, exit_code=1)
    assert "test_differs.py: 6 / 0 / 0 without, 1 / 3 / 1 with, ? donating steps" in printed
    failing = [line for line in printed.splitlines() if line.startswith(tuple(f"{name}: " for name in names))]
    for expected in (
        "test_differs.py: __main__.Differs.test_b_fails: failed",
        "test_differs.py: __main__.Differs.test_c_fails_in_part: failed",
        "test_differs.py: __main__.Differs.test_d_is_skipped: skipped",
        "test_differs.py: __main__.Differs.test_e_ends_the_process: ended the process",
        "test_differs.py: __main__.Differs.test_f_comes_too_late: not run",
        "test_broken.py: no test passes without automatic donation (exit code 1): "
        "ModuleNotFoundError: No module named 'no_such_module'",
        f"test_missing.py: there is no such file in {checkout / 'test'}",
    ):
        assert expected in failing
    assert "test_a_is_the_same" not in printed
    assert "Every test" not in printed


def test_another_exit_with_automatic_donation_fails() -> None:
    passed = {"a": "passed", "b": "failed"}
    without, with_auto = Run(passed, exit_code=1), Run(passed, auto=True, exit_code=-11)
    assert error_of(without, with_auto) == ""
    assert failing_with_auto(without, with_auto) == ["exit code -11, without automatic donation exit code 1"]
    assert failing_with_auto(without, Run(passed, auto=True, exit_code=1)) == []
    assert failing_with_auto(without, Run(passed, auto=True)) == [
        "ran out of time, without automatic donation exit code 1"
    ]


def test_one_run_of_the_two_has_automatic_donation() -> None:
    without, with_auto = Run({"a": "passed"}, exit_code=0), Run({"a": "passed"}, auto=True, exit_code=0)
    assert "imported without automatic donation, too" in error_of(with_auto, with_auto)
    assert "automatic donation was not on (exit code 0)" in error_of(without, without)
