"""`python -m torch_xla_donate run`: a program runs as if Python ran it directly."""

from __future__ import annotations

import json
import subprocess
import sys
import zipapp
from pathlib import Path

import pytest
from children import run_command

ROOT = Path(__file__).resolve().parents[2]
SHOWS_ITSELF = """
import json, os, pickle, sys

class Thing:
    pass

if __name__ == "__main__":
    os.chdir("/")
    import helper_of_the_script
    main = sys.modules["__main__"]
    print(json.dumps({
        "argv": sys.argv,
        "path": sys.path[0],
        "file": __file__,
        "globals": sorted(globals()),
        "spec": [getattr(__spec__, name, None) for name in ("name", "origin", "parent", "cached")],
        "package": __package__,
        "loader": type(__loader__).__name__,
        "cached": __cached__,
        "is_main": vars(main) is globals() and Thing.__module__ == "__main__",
        "pickled": type(pickle.loads(pickle.dumps(Thing()))) is Thing,
        "helper": helper_of_the_script.__file__,
        "stdin": sys.stdin.read() if "--stdin" in sys.argv else "",
    }))
"""


def directly(*words: str, cwd: Path | None = None, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *words], cwd=cwd, input=stdin, capture_output=True, text=True, check=False)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "helper_of_the_script.py").write_text("")
    path = tmp_path / "script.py"
    path.write_text(SHOWS_ITSELF)
    return path


@pytest.mark.parametrize("arguments", [[], ["-m", "--auto", "--help", "--", "two words"]], ids=["none", "options"])
def test_a_script_sees_what_python_shows_it(script: Path, arguments: list[str]):
    """Options behind the script are the script's."""
    found, expected = run_command("run", str(script), *arguments), directly(str(script), *arguments)
    assert json.loads(found.stdout) == json.loads(expected.stdout)
    assert json.loads(found.stdout)["argv"] == [str(script), *arguments]


# Python 3.10 leaves the dot in the path of the program.
DOT = pytest.param(".", marks=pytest.mark.skipif(sys.version_info < (3, 11), reason="has another path in Python 3.10"))


@pytest.mark.parametrize("target", ["../{0}/script.py", "link.py", "folder/", "link", "a.pyz", DOT])
def test_a_relative_program_sees_what_python_shows_it(script: Path, monkeypatch: pytest.MonkeyPatch, target: str):
    """A script, a folder or an archive, each also by a link. It changes the folder before its first import."""
    folder = script.parent / "folder"
    folder.mkdir()
    (folder / "__main__.py").write_text(SHOWS_ITSELF)
    (folder / "helper_of_the_script.py").write_text("")
    zipapp.create_archive(folder, script.parent / "a.pyz")
    (folder / "script.py").write_text(SHOWS_ITSELF)
    (script.parent / "link.py").symlink_to(folder / "script.py")
    (script.parent / "link").symlink_to(folder)
    monkeypatch.chdir(folder if target == "." else script.parent)
    target = target.format(script.parent.name)
    found, expected = run_command("run", target, "x"), directly(target, "x")
    assert json.loads(found.stdout) == json.loads(expected.stdout)
    assert json.loads(found.stdout)["argv"] == [target, "x"]


def test_an_interpreter_shows_a_folder_the_same(script: Path):
    """Options of the interpreter are for the program: with -P a folder is on the path, and that of a script is not.

    Standard input is the program's. An interrupt ends it by SIGINT, and its traceback begins in the program.
    """
    options = ["-P"] if sys.version_info >= (3, 11) else []  # new in Python 3.11
    script.rename(script.parent / "__main__.py").write_text(f"{SHOWS_ITSELF}    raise KeyboardInterrupt\n")
    words = (str(script.parent), "--stdin")
    found = directly(*options, "-m", "torch_xla_donate", "run", *words, cwd=ROOT, stdin="given")
    expected = directly(*options, *words, stdin="given")
    assert json.loads(found.stdout) == json.loads(expected.stdout)
    assert json.loads(found.stdout)["stdin"] == "given"
    assert found.returncode == expected.returncode == -2
    assert found.stderr[found.stderr.index("Traceback") :] == expected.stderr


def test_a_module_sees_what_python_shows_it(script: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(script.parent)
    found, expected = run_command("run", "-m", "script", "--epochs", "3"), directly("-m", "script", "--epochs", "3")
    assert json.loads(found.stdout) == json.loads(expected.stdout)
    assert json.loads(found.stdout)["argv"] == [str(script), "--epochs", "3"]


@pytest.mark.parametrize(
    ("statement", "code"),
    [
        *(("sys.exit(3)", 3), ("sys.exit()", 0), ("sys.exit('no')", 1)),
        *(("raise KeyError('lost')", 1), ("os.kill(os.getpid(), signal.SIGTERM)", -15)),
    ],
)
def test_the_exit_code_is_the_scripts(tmp_path: Path, statement: str, code: int):
    """And the traceback, which begins in the script."""
    path = tmp_path / "script.py"
    path.write_text(f"import os, signal, sys\nprint('before', flush=True)\n{statement}\n")
    expected = directly(str(path))
    assert expected.returncode == code
    found = run_command("run", str(path), exit_code=code)
    assert found.stdout == "before\n" and found.stderr.endswith(expected.stderr)


def test_auto_donates_only_if_asked(tmp_path: Path):
    path = tmp_path / "script.py"
    path.write_text(
        "import os, sys\nfrom torch_xla_donate import _C\n"
        "print(_C.auto_donates(), os.environ.get('TORCH_XLA_DONATE_AUTO'))\n"
    )
    assert run_command("run", str(path)).stdout == "False None\n"
    assert run_command("run", "--auto", str(path)).stdout == "True 1\n"
    assert run_command("run", "--no-auto", str(path)).stdout == "False 0\n"


def test_a_missing_script_is_one_line():
    done = run_command("run", "no_such_script.py", exit_code=2)
    assert "script 'no_such_script.py' does not exist. Give its path, or a module with -m." in done.stderr
    assert "Traceback" not in done.stderr
