"""The children of the fork server: what reaches them, what comes back, and what is left of them."""

from __future__ import annotations

import os
import signal
import sys
import warnings

import pytest
from children import in_process, run_in_child

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


def test_a_failed_assertion_shows_its_values():
    message = failed(fail, "assertion", [1, 2, 4])
    assert "assert found == [1, 2, 3]" in message
    assert "assert [1, 2, 4] == [1, 2, 3]" in message
    assert "printed before" in message
    assert '/test_children.py", line ' in message
    assert "/children.py" not in message


@pytest.mark.parametrize(("how", "code"), [("exit", 0), ("_exit", 0), ("signal", -signal.SIGSEGV)])
def test_an_end_is_an_exit_code_and_never_a_success(how, code):
    done = run_in_child(end, how, exit_code=code)
    assert done.returncode == code
    assert done.stdout == "printed before\n"
    ended = "signal SIGSEGV" if code < 0 else f"exit code {code}"
    assert f"end did not return: {ended}\n" in failed(end, how)
    assert f"found {ended}, expected exit code 7\n" in failed(end, how, exit_code=7)


def test_a_variable_that_is_read_before_a_child_begins_is_refused():
    with pytest.raises(ValueError, match="PYTHONPATH is read before a forked child begins; use run_script"):
        run_in_child(fail, env={"PYTHONPATH": "x"})


# --- What reaches a child ---


@pytest.mark.filterwarnings("ignore:seen")
@in_process
def test_a_marks_filter_reaches_the_child():
    warnings.warn("seen", stacklevel=1)
    with pytest.raises(DonationWarning):
        warnings.warn("unseen", DonationWarning, stacklevel=1)


def test_a_decorated_test_fails_with_its_childs_failure():
    with pytest.raises(pytest.fail.Exception, match="Failure: of ours"):
        in_process(fail)(error="of ours", found=[])
