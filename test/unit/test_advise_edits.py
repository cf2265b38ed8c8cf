"""Edits are proposed only where the source shows that they cannot change a program's values."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sysconfig
import types
from pathlib import Path

import pytest

from torch_xla_donate import __main__ as command_line
from torch_xla_donate._tools import edits, source
from torch_xla_donate._tools.hints import Advice, Change, Hint
from torch_xla_donate._tools.names import Name
from torch_xla_donate._tools.summary import RunSummary

HEAD = "import torch\nimport torch_xla\n"
LOOP = """
x = torch.ones(4).to("xla")
for i in range(3):
    x = x * 2  # update
    torch_xla.sync()  # sync
print(x)
"""
LOSS = """
for i in range(3):
    loss = f(p)
    loss.backward()
    print(loss.item())
    torch_xla.sync()  # sync
"""
GRADIENTS = """
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters())
for i in range(3):
    optimizer.zero_grad()
    model(x).sum().backward()
    optimizer.step()
    torch_xla.sync()  # sync
"""


def written(tmp_path: Path, source: str) -> str:
    file = tmp_path / "train.py"
    file.write_text(HEAD + source, encoding="utf-8", newline="")
    return str(file)


def place(file: str, comment: str) -> str:
    with open(file, encoding="utf-8") as stream:
        numbers = [number for number, line in enumerate(stream, 1) if f"# {comment}" in line]
    return f"{file}:{numbers[0]}"


def line_of(file: str, comment: str) -> int:
    return int(place(file, comment).rpartition(":")[2])


def marks(file: str, function: str = "<module>") -> list[Change]:
    with open(file, encoding="utf-8") as stream:
        code = compile(stream.read(), file, "exec")
    inner = [const for const in code.co_consts if isinstance(const, types.CodeType) and const.co_name == function]
    sync = place(file, "sync")
    name = Name("x", "", inner[0] if inner else code, file, int(sync.rpartition(":")[2]))
    return edits.donate_before(name, place(file, "update"), sync)


def hint(changes: list[Change]) -> Hint:
    return Hint("reassignment", 1, "f32[4]", 1, "x", "", "", "", "", 1, tuple(changes))


def applied(file: str, changes: list[Change]) -> str:
    text, left_out = edits.diff([hint(changes)], os.path.dirname(file))
    subprocess.run(["patch", "-s", "-p0"], input=text, cwd=os.path.dirname(file), check=True)
    assert left_out == []
    return Path(file).read_text(encoding="utf-8")


def test_a_mark_goes_before_the_update(tmp_path: Path) -> None:
    file = written(tmp_path, LOOP)
    assert "    torch_xla_donate.donate_buffer(x)\n    x = x * 2" in applied(file, marks(file))


UPDATES = ["x - 0.1 * torch.tanh(x)", "torch.where(x > 0, x, -x)", "x.clamp(0).relu()", "-x"]


@pytest.mark.parametrize("value", UPDATES)
def test_an_update_that_computes_a_new_array_is_marked(tmp_path: Path, value: str) -> None:
    assert len(marks(written(tmp_path, LOOP.replace("x * 2", value)))) == 2


def inside(function: str) -> str:
    """The program as the body of a function."""
    return f"def {function}:\n" + "".join(f"    {line}\n" for line in LOOP.splitlines())


# Each of these could lead to a use of the donated value, or to a mark of a tensor without a buffer.
UNSAFE = {
    "kept in a list": LOOP.replace("    x = x", "    kept.append(x)\n    x = x"),
    "another name before the loop": LOOP.replace("for", "first = x\nfor"),
    "another name in the loop": LOOP.replace("    x = x", "    old = x\n    x = x"),
    "an attribute": LOOP.replace("    x = x", "    model.x = x\n    x = x"),
    "a graph of autograd before the loop": LOOP.replace("for", "loss = (s * x).sum()\nfor"),
    "a graph of autograd in some rounds": LOOP.replace("    x = x", "    if i == 0:\n        y = x * s\n    x = x"),
    "a view": LOOP.replace("    x = x", "    head = x[0]\n    x = x"),
    "an unknown function": LOOP.replace("x * 2", "f(x)"),
    "an operation that may return a view": LOOP.replace("x * 2", "x.reshape(2, 2)"),
    "a part of it in a list": LOOP.replace("x * 2", "[x * 2, x][0]"),
    "a function that reads it": f"def report():\n    print(x)\n{LOOP}",
    "a lambda that reads it": LOOP.replace("for", "show = lambda: x\nfor"),
    "a comprehension that reads it": LOOP.replace("    x = x", "    rows = [x for _ in y]\n    x = x"),
    "locals()": LOOP.replace("    x = x", "    save(locals())\n    x = x"),
    "an item of a sum of lists": LOOP.replace("    x = x", "    kept = kept + [x]\n    x = x"),
    "a method of another object": LOOP.replace("x * 2", "history.add(x)"),
    "a result in place": LOOP.replace("x * 2", "torch.add(x, 1, out=y)"),
    "a case": LOOP.replace("    x = x", "    match y:\n        case [x]:\n            pass\n    x = x"),
    "an import": LOOP.replace("    x = x", "    from state import x\n    x = x"),
    "a scalar": LOOP.replace("torch.ones(4)", "torch.tensor(1.0)"),
    "on the host": LOOP.replace('"xla"', "torch.float32"),
    "a default device": f"torch.set_default_device('xla')\n{LOOP}",
    "under a default device": LOOP.replace("x = torch.ones", "with torch.device('xla'): x = torch.ones"),
    "gradients in some rounds": LOOP.replace("x * 2", "x * (w if i > 5 else 2)"),
    "an operand from elsewhere": LOOP.replace("x * 2", "x * w"),
    "a frame": f"def peek():\n    kept.append(sys._getframe(1).f_locals)\n{LOOP}",
    "the middle of a logical line": LOOP.replace("    x = x", "    y = 1; \\\n  x = x"),
    "a round without a step": LOOP.replace("    torch_xla", "    if i:\n        continue\n    torch_xla"),
    "not updated in each round": LOOP.replace("    x = x * 2", "    if i:\n        x = x * 2"),
    "updated twice": LOOP.replace("    torch_xla", "    x = x + 1\n    torch_xla"),
    "no step in each round": LOOP.replace("    torch_xla.sync()", "    if i:\n        torch_xla.sync()"),
    "updated after the step": LOOP.replace("    x = x * 2  # update\n", "").replace(
        "# sync\n", "# sync\n    x = x * 2  # update\n"
    ),
    "a loop around the loop": LOOP.replace("for i", "for _ in range(2):\n  for i").replace("    ", "      "),
    "from elsewhere": LOOP.replace('torch.ones(4).to("xla")', "model.x"),
    "without a buffer": LOOP.replace('torch.ones(4).to("xla")', 'torch.ones(4, device="xla")'),
    "computed": LOOP.replace('torch.ones(4).to("xla")', 'torch.ones(4).to("xla") * 2'),
    "a target of several": LOOP.replace("    x = x * 2", "    x = y = x * 2"),
    "two statements on a line": LOOP.replace("    x = x * 2", "    y = 1; x = x * 2"),
    "an update in place": LOOP.replace("x = x * 2", "x *= 2"),
    "not a step": LOOP.replace("torch_xla.sync()", "print(i)"),
}


@pytest.mark.parametrize("case", UNSAFE)
def test_no_mark_where_the_old_value_may_be_used(tmp_path: Path, case: str) -> None:
    assert UNSAFE[case] != LOOP
    assert marks(written(tmp_path, UNSAFE[case])) == []


def test_a_local_variable_and_an_argument(tmp_path: Path) -> None:
    assert len(marks(written(tmp_path, inside("train()")), "train")) == 2
    assert marks(written(tmp_path, inside("train(x)")), "train") == []
    assert marks(written(tmp_path, f"def outer():\n    global x\n{LOOP}")) == []


def test_a_detach_goes_before_the_end_of_the_step(tmp_path: Path) -> None:
    file = written(tmp_path, LOSS)
    changes = edits.detach_before("loss", place(file, "sync"))
    assert "    loss = loss.detach()\n    torch_xla.sync()" in applied(file, changes)


@pytest.mark.parametrize(
    "source",
    [
        LOSS + "loss.backward()\n",
        LOSS.replace("    print", "    losses.append(loss)\n    print"),
        LOSS.replace("# sync", "# sync\n    total = total + loss"),
        LOSS.replace("    loss = f(p)\n", "").replace("for", "loss = f(p)\nfor"),
        LOSS + "def report():\n    loss.backward()\n",
    ],
    ids=["backward", "list", "sum", "assigned outside", "function"],
)
def test_no_detach_where_the_graph_may_be_used(tmp_path: Path, source: str) -> None:
    file = written(tmp_path, source)
    assert edits.detach_before("loss", place(file, "sync")) == []


def test_the_optimizer_of_the_parameters_is_named(tmp_path: Path) -> None:
    file = written(tmp_path, GRADIENTS)
    assert edits.optimizer_of(["model"], place(file, "sync")) == "optimizer"
    both = GRADIENTS.replace("for i", "other = torch.optim.SGD(critic.parameters())\nfor i").replace(
        "    optimizer.step()\n", "    other.step()\n    optimizer.step()\n"
    )
    file = written(tmp_path, both)
    found = [edits.optimizer_of([root], place(file, "sync")) for root in ("model", "critic", "unknown")]
    assert found == ["optimizer", "other", ""]
    file = written(tmp_path, GRADIENTS.replace("    optimizer.step()\n", ""))
    assert edits.optimizer_of(["model"], place(file, "sync")) == ""


def test_auto_donate_goes_after_the_last_import(tmp_path: Path) -> None:
    file = written(tmp_path, f"import torch_xla\nx = 1\nimport os\n{LOOP}import sys\n")
    text = applied(file, edits.call_auto_donate(file, line_of(file, "sync")))
    assert "import os\nimport torch_xla_donate\n\ntorch_xla_donate.auto_donate()\n" in text
    assert text.count("import torch_xla_donate\n") == 1


@pytest.mark.parametrize(
    ("head", "has_place"),
    [
        ('"""doc"""\nfrom __future__ import annotations; import torch; import torch_xla  # here\n', True),
        ("import torch_xla.core; x = 1\n", True),
        ("from torch_xla import sync; x = 1\n", True),
        ("import torch, \\\n  os\n", True),
        ("import torch; x = (1,\n 2)\n", False),
        # torch_xla reads such variables when it is imported.
        ("import os\nos.environ['XLA_FLAGS'] = ''\ndef f():\n    import torch_xla\n", False),
        ("import os\nos.environ['XLA_FLAGS'] = ''\nimport train\n", True),
        ("import torch; \\\nx = 1\n", False),
        ("x = 1\n", False),
    ],
)
def test_auto_donate_goes_after_whole_lines(tmp_path: Path, head: str, has_place: bool) -> None:
    file = tmp_path / "train.py"
    file.write_text(f"{head}f()\n", encoding="utf-8")
    changes = edits.call_auto_donate(str(file), head.count("\n") + 1)
    text, left_out = edits.diff([dataclasses.replace(hint(changes), edit=edits.AUTO_DONATE)], str(tmp_path))
    assert bool(text) == has_place
    if has_place:
        after = applied(str(file), changes)
        assert after == f"{head}import torch_xla_donate\n\ntorch_xla_donate.auto_donate()\nf()\n"
        compile(after, "train.py", "exec")
        assert left_out == []
    else:
        (message,) = left_out
        assert message.startswith("The diff does not call auto_donate(): the main script shows no line of imports")


@pytest.mark.parametrize("after", ["import os; y = (1,\n2)\n", "import os; y = \\\n2\n"])
def test_an_import_on_a_line_that_goes_on_is_passed_over(tmp_path: Path, after: str) -> None:
    file = tmp_path / "train.py"
    file.write_text(f"import torch_xla\n{after}f()\n", encoding="utf-8")
    text = applied(str(file), edits.call_auto_donate(str(file), 4))
    assert text == f"import torch_xla\nimport torch_xla_donate\n\ntorch_xla_donate.auto_donate()\n{after}f()\n"


def test_installed_files_get_no_call_of_auto_donate() -> None:
    """Such as that of a tool that runs the program."""
    script = Path(sysconfig.get_path("scripts"), "pytest")
    for file in map(str, (Path(pytest.__file__).with_name("__main__.py"), script)):
        assert source.read(file) is not None
        assert edits.call_auto_donate(file, 1000) == []


# Bytes of files whose lines or letters Python's parser, text files and `patch` treat differently.
FILES = {
    "line feeds": (HEAD + LOOP).encode(),
    "no line end at the end": (HEAD + LOOP).rstrip().encode(),
    "carriage returns": (HEAD + LOOP).replace("\n", "\r").encode(),
    "both": (HEAD + LOOP).replace("\n", "\r\n").encode(),
    "separators in strings": (HEAD + 's = "\x1c\x0b\x85\u2028\u2029"\n\x0c' + LOOP).encode(),
    "byte order mark": b"\xef\xbb\xbfimport torch_xla, torch" + LOOP.encode(),
    "latin-1": b"# coding: latin-1\n" + (HEAD + "s = '\xe9\x85'" + re.sub(r"\bx\b", "\xfc", LOOP)).encode("latin-1"),
    "another spelling": b"# coding: latin-1\n" + (HEAD + re.sub(r"\bx\b", "\xb5", LOOP)).encode("latin-1"),
}


@pytest.mark.parametrize("case", FILES)
def test_patch_adds_only_the_edits_to_the_bytes_of_a_file(tmp_path: Path, case: str) -> None:
    raw = FILES[case]
    path = tmp_path / "train.py"
    path.write_bytes(raw)
    numbers = {
        part: n for n, line in enumerate(raw.splitlines(), 1) for part in (b"# update", b"# sync") if part in line
    }
    code = compile(raw, str(path), "exec")
    (variable,) = {"x", "\xfc", "\u03bc"} & set(code.co_names)
    site = f"{path}:{numbers[b'# sync']}"
    found = edits.donate_before(Name(variable, "", code, str(path), 0), f"{path}:{numbers[b'# update']}", site)
    found = [*edits.call_auto_donate(str(path), numbers[b"# sync"]), *found]
    text, left_out = edits.diff([hint(found), hint(found)], str(tmp_path))
    done = subprocess.run(["patch", "-p0"], input=text, cwd=tmp_path, capture_output=True, check=True)
    assert b"fuzz" not in done.stdout and left_out == []
    after = path.read_bytes()
    end = b"\r\n" if b"\r\n" in raw else b"\r" if b"\r" in raw else b"\n"
    name = raw.splitlines()[numbers[b"# update"] - 1].split()[0]
    added = (
        b"import torch_xla_donate",
        b"",
        b"torch_xla_donate.auto_donate()",
        b"    torch_xla_donate.donate_buffer(%s)" % name,
    )
    assert after.replace(end.join(added[:3]) + end, b"", 1).replace(added[3] + end, b"", 1) == raw
    compile(after, str(path), "exec")


def test_the_diff_names_files_as_patch_finds_them(tmp_path: Path) -> None:
    files = [tmp_path / "my train.py", tmp_path / "lib" / "größe.py"]
    files[1].parent.mkdir()
    for path in files:
        path.write_text(HEAD + LOOP, encoding="utf-8")
    text, left_out = edits.diff([hint(marks(str(path))) for path in files], str(tmp_path))
    for command in ["patch", "-p0"], ["git", "apply", "-R", "-p0"], ["git", "apply", "-p0"]:
        subprocess.run(command, input=text, cwd=tmp_path, check=True)
    assert left_out == []
    assert all("donate_buffer(x)" in path.read_text(encoding="utf-8") for path in files)


def test_the_diff_leaves_out_files_that_patch_refuses(tmp_path: Path) -> None:
    file = written(tmp_path, LOOP)
    (tmp_path / "folder").mkdir()
    os.symlink(file, tmp_path / "folder" / "link.py")
    link = str(tmp_path / "folder" / "link.py")
    for name in (file, link):
        text, (message,) = edits.diff([hint(marks(name))], str(tmp_path / "folder"))
        assert text == b""
        assert message.startswith(f"The diff leaves {file} out: patch cannot change it from {tmp_path}/folder. Run")
    assert b"--- train.py\t\n" in edits.diff([hint(marks(link))], str(tmp_path))[0]


def test_the_diff_leaves_out_files_that_changed_or_are_gone(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    good, changed = written(tmp_path, LOOP), written(tmp_path / "other", LOOP)
    hints = [hint(marks(changed)), hint(marks(good))]
    Path(changed).write_text(HEAD + LOOP + "print(1)\n", encoding="utf-8")
    text, (message,) = edits.diff(hints, str(tmp_path))
    assert b"other" not in text and b"+++ train.py" in text
    assert message.startswith(f"The diff leaves {changed} out: it cannot be read, or has changed since")
    os.remove(changed)
    assert edits.diff(hints, str(tmp_path)) == (text, [message])


def test_verify_shows_which_files_its_diff_leaves_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    file = written(tmp_path, LOOP)
    monkeypatch.chdir(tmp_path)
    gone = Change("gone.py", 1, 0, "", "")
    found = RunSummary("train.py", (), (), (), 0, (hint([gone]), hint(marks(file))))
    command_line._show(lambda progress: found, None, None, None, applies=True)
    shown = capfd.readouterr()
    assert shown.out.startswith("--- train.py\t\n")
    assert f"The diff leaves {tmp_path}/gone.py out" in shown.err


def test_a_source_shows_whether_it_is_that_of_a_function(tmp_path: Path) -> None:
    file = written(tmp_path, inside("train()"))
    code = compile(Path(file).read_bytes(), "elsewhere.py", "exec", dont_inherit=True)
    (inner,) = (const for const in code.co_consts if isinstance(const, types.CodeType))
    found = source.read(file)
    assert found is not None and found.compiles_to(code) and found.compiles_to(inner)
    for changed in (HEAD + "\n" + inside("train()"), HEAD + inside("train()").replace("x * 2", "x * 3")):
        Path(file).write_text(changed, encoding="utf-8")
        found = source.read(file)
        assert found is not None and not found.compiles_to(inner)


def test_a_file_that_is_gone_or_not_python_gets_no_edit(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text("def", encoding="utf-8")
    for path in (str(file), str(tmp_path / "gone.py"), "<stdin>"):
        assert edits.call_auto_donate(path, 1) == []
        assert edits.detach_before("loss", f"{path}:1") == []
        assert edits.optimizer_of(["x"], f"{path}:1") == ""
        name = Name("x", "", test_a_mark_goes_before_the_update.__code__, path, 1)
        assert edits.donate_before(name, "", f"{path}:1") == []


def test_advice_is_ranked_and_plain_data() -> None:
    holder = "variable 'old' at train.py:2"
    small = hint([])
    large = Hint("held_input", 4096, "f32[32,32]", 2, "model.w", "/a/train.py:3", holder, "", "train.py:9", 3)
    advice = Advice([small, large])
    assert list(advice) == [large, small]
    assert advice[0] == large
    assert list(advice[:1]) == [large]
    assert Advice.from_dict(advice.to_dict()) == advice
    assert "4.0 KiB" in str(advice)
    assert "held by variable 'old'" in " ".join(str(advice).replace("│", " ").split())
    odd = dataclasses.replace(small, name="params[key 3][/]")
    assert "params[key 3][/]: " in str(Advice([odd]))  # not rich's markup
    assert str(Advice()).startswith("Nothing to gain: every input that a step could reuse is reused. Graphs of")
