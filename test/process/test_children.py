"""The children of the fork server: what reaches them, what comes back, and what is left of them."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch_xla.runtime as xr
from children import Ended, in_process, run_file, run_in_child

from torch_xla_donate import DonationWarning


class Failure(ValueError):
    pass


def fail(error: str, found: list[int]) -> None:
    print("printed before")
    if error == "assertion":
        assert found == [1, 2, 3]
    raise Failure(error)


def end(how: str) -> None:
    print("printed before")
    if how == "signal":
        os.kill(os.getpid(), signal.SIGSEGV)
    elif how == "_exit":
        os._exit(0)
    sys.exit(0)


def failed(function, *args, **options) -> str:
    with pytest.raises(pytest.fail.Exception) as caught:
        run_in_child(function, *args, **options)
    return str(caught.value)


# --- What comes back ---


def test_value_output_and_code_come_back():
    done = run_in_child(divmod_loudly, 17, kwargs={"by": 5})
    assert done == Ended(0, "out\n", "err\n", (3, 2))
    assert done.last_line == "out"


def divmod_loudly(number: int, by: int) -> tuple[int, int]:
    print("out")
    print("err", file=sys.stderr)
    return divmod(number, by)


def test_a_failed_assertion_shows_its_values():
    message = failed(fail, "assertion", [1, 2, 4])
    assert "assert found == [1, 2, 3]" in message
    assert "assert [1, 2, 4] == [1, 2, 3]" in message
    assert "printed before" in message
    assert '/test_children.py", line ' in message
    assert "/children.py" not in message


def test_an_expected_error_ends_with_1_and_its_traceback():
    done = run_in_child(fail, "of ours", [], exit_code=1)
    assert done.returncode == 1
    assert done.stderr.startswith("Traceback (most recent call last):\n")
    assert "Failure: of ours" in done.stderr.splitlines()[-1]
    assert "/children.py" not in done.stderr


@pytest.mark.parametrize(("how", "code"), [("exit", 0), ("_exit", 0), ("signal", -signal.SIGSEGV)])
def test_an_end_is_an_exit_code_and_never_a_success(how, code):
    done = run_in_child(end, how, exit_code=code)
    assert done.returncode == code
    assert done.stdout == "printed before\n"
    ended = "signal SIGSEGV" if code < 0 else f"exit code {code}"
    assert f"end did not return: {ended}\n" in failed(end, how)
    assert f"found {ended}, expected exit code 7\n" in failed(end, how, exit_code=7)


def wait_for_a_fork(marker: Path) -> None:
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    marker.write_text(str(sleeper.pid))
    pid = os.fork()
    if not pid:
        hang_in_the_fork()
    os.waitpid(pid, 0)
    time.sleep(1000)


def hang_in_the_fork() -> None:
    time.sleep(1000)


def test_a_timeout_shows_all_stacks_and_ends_all_processes(tmp_path):
    for timeout in (1, 4, 16, 64, 256):
        message = failed(wait_for_a_fork, tmp_path / "pid", timeout=timeout)
        assert f"wait_for_a_fork still ran after {timeout} s" in message
        if "in hang_in_the_fork" in message:
            break  # a busy machine may need longer to come there
    assert "in wait_for_a_fork" in message and "in hang_in_the_fork" in message
    assert message.count("Fatal Python error: Aborted") == 2, "of the child and of the process that it has forked"
    assert has_ended(int((tmp_path / "pid").read_text()))


def has_ended(pid: int) -> bool:
    """Waits for a process that has been killed."""
    try:
        end = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    ready, _, _ = select.select([end], [], [], 60)
    os.close(end)
    return bool(ready)


def test_a_variable_that_is_read_before_a_child_begins_is_refused():
    with pytest.raises(ValueError, match="PYTHONPATH is read before a forked child begins; use run_script"):
        run_in_child(fail, env={"PYTHONPATH": "x"})


def start_a_child() -> None:
    run_in_child(divmod_loudly, 17, 5)


def test_a_child_starts_no_children():
    assert "RuntimeError: a child cannot start children" in failed(start_a_child)


# --- What reaches a child ---


@pytest.mark.parametrize("number", [1, 4])
@in_process(env=lambda number: {"CPU_NUM_DEVICES": str(number), "GREETING": str(number), "TF_CPP_MIN_LOG_LEVEL": None})
def test_the_environment_may_depend_on_parameters(number):
    assert os.environ["GREETING"] == str(number)
    assert "TF_CPP_MIN_LOG_LEVEL" not in os.environ
    assert xr.global_runtime_device_count() == number


@pytest.mark.filterwarnings("ignore:seen")
@in_process
def test_a_marks_filter_reaches_the_child():
    warnings.warn("seen", stacklevel=1)
    with pytest.raises(DonationWarning):
        warnings.warn("unseen", DonationWarning, stacklevel=1)


def test_a_decorated_test_fails_with_its_childs_failure():
    with pytest.raises(pytest.fail.Exception, match="Failure: of ours"):
        in_process(fail)(error="of ours", found=[])


# --- Files ---


def test_a_file_runs_as_a_program(tmp_path):
    program = tmp_path / "program.py"
    (tmp_path / "neighbour.py").write_text("word = 'imported'")
    program.write_text(
        "import sys, warnings\nfrom neighbour import word\n"
        "warnings.warn('shown')\nprint(__name__, sys.argv, word)\nraise ValueError('at the end')\n"
    )
    done = run_file(program, "a", "b", exit_code=1)
    assert done.stdout == f"__main__ {[str(program), 'a', 'b']} imported\n"
    warning, source, first, frame, *_, last = done.stderr.splitlines()
    assert warning == f"{program}:3: UserWarning: shown"
    assert source.strip() == "warnings.warn('shown')"
    assert first == "Traceback (most recent call last):"
    assert frame.strip() == f'File "{program}", line 5, in <module>'
    assert last == "ValueError: at the end"
