"""Runs a program in this process, as `python SCRIPT` or `python -m MODULE` would."""

from __future__ import annotations

import builtins
import dataclasses
import os
import pkgutil
import runpy
import sys
import types
from importlib.machinery import SourceFileLoader

from torch_xla_donate._modes import set_auto_donate
from torch_xla_donate._tools import children


@dataclasses.dataclass(frozen=True)
class Program:
    """A script or a module, with its arguments.

    Attributes:
        target: path of the script, or name of the module.
        args: its arguments.
        is_module: whether `target` is a module.
        auto: whether `auto_donate` is on; None to let the environment decide.
    """

    target: str
    args: tuple[str, ...] = ()
    is_module: bool = False
    auto: bool | None = None

    def arguments(self) -> list[str]:
        """The arguments of `python -m torch_xla_donate run` that run it."""
        auto = {True: ["--auto"], False: ["--no-auto"], None: []}[self.auto]
        return [*auto, *(["-m"] if self.is_module else []), "--", self.target, *self.args]

    def path(self) -> str:
        """The absolute path of the script, as Python has it in ``__file__``: joined, and not normalised."""
        return os.getcwd() if self.target == os.curdir else os.path.join(os.getcwd(), self.target)

    def __str__(self) -> str:
        return " ".join([*(["-m"] if self.is_module else []), self.target, *self.args])


def run(program: Program) -> None:
    """Runs a program as `__main__` in this process. Its exceptions are passed on, SystemExit among them.

    Call it last, because it replaces `sys.modules["__main__"]`, `sys.argv` and `sys.path[0]`. The traceback that Python
    prints for an uncaught exception begins in the program, as without this function.
    """
    if program.auto is not None:
        os.environ["TORCH_XLA_DONATE_AUTO"] = str(int(program.auto))  # for child processes
        set_auto_donate(program.auto)
    children.prepare()
    sys.argv = [program.target, *program.args]
    main = types.ModuleType("__main__")
    main.__dict__.update(__builtins__=builtins, __annotations__={})
    sys.modules["__main__"] = main
    try:
        _execute(program, main)
    except SystemExit:
        raise
    except BaseException:
        _hide_frames()
        raise


def _execute(program: Program, main: types.ModuleType) -> None:
    path = program.path()
    if program.is_module:
        _set_first_path(os.getcwd())
        # The function behind `python -m`.
        runpy._run_module_as_main(program.target, alter_argv=True)  # type: ignore[attr-defined]
    elif pkgutil.get_importer(path) is not None:  # a folder or archive with __main__.py
        _set_first_path(path, is_safe=True)
        runpy._run_module_as_main("__main__", alter_argv=False)  # type: ignore[attr-defined]
    else:
        _set_first_path(os.path.dirname(os.path.realpath(path)))
        loader = SourceFileLoader("__main__", path)
        main.__dict__.update(__file__=path, __loader__=loader, __cached__=None, __spec__=None)
        exec(compile(loader.get_data(path), path, "exec", dont_inherit=True), main.__dict__)


def _set_first_path(path: str, is_safe: bool = False) -> None:
    """Sets the path that Python adds for a program. With -P and PYTHONSAFEPATH it adds only safe ones."""
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = path
    elif is_safe:
        sys.path.insert(0, path)


def _hide_frames() -> None:
    """Lets Python print the next uncaught exception without the frames of this package that called the program."""
    show = sys.excepthook

    def show_program(kind: type[BaseException], error: BaseException, traceback: types.TracebackType | None) -> None:
        found = traceback
        while found is not None and found.tb_frame.f_code is not _execute.__code__:
            found = found.tb_next
        inner = traceback if found is None else found.tb_next
        show(kind, error.with_traceback(inner), inner)

    sys.excepthook = show_program
