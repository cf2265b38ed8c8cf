"""`python -m torch_xla_donate doctor`: versions, ABI, hooks, and settings that switch donation off."""

from __future__ import annotations

import importlib.metadata
import platform

from rich.table import Table

from torch_xla_donate import _C, _config, _host
from torch_xla_donate._report import console as tables


def examine() -> tuple[list[str], bool]:
    """Returns the lines to print, and whether it found no problem. Does not start the XLA runtime."""
    lines = [f"python        {platform.python_version()} on {platform.system()} {platform.machine()}"]
    for package in ("torch", "torch_xla", "torch_xla_donate"):
        try:
            lines.append(f"{package:13} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            lines.append(
                f"{package:13} no metadata (run from its sources)"
                if package == "torch_xla_donate"
                else f"{package:13} not installed"
            )
    if _config.IS_OFF:
        return [*lines, "PROBLEM: TORCH_XLA_DONATE=0 switches the package off; unset it"], False
    built = _host.build()
    lines.append(f"built against torch {built.torch}, torch_xla {built.torch_xla}, {built.compiler}")
    hooks = _C.hooks()
    for library in dict.fromkeys(hook["library"] for hook in hooks):
        table = Table(title=f"hooks in {library}", title_justify="left")
        table.add_column("function", no_wrap=True)
        table.add_column("slots", justify="right")
        table.add_column("in place", justify="right")
        table.add_column("what for")
        for hook in hooks:
            if hook["library"] == library:
                table.add_row(hook["name"], str(hook["slots"]), str(hook["in_place"]), hook["purpose"])
        lines.append(tables.render(table))
    in_place = all(hook["slots"] > 0 and hook["slots"] == hook["in_place"] for hook in hooks)
    if not in_place:
        lines.append("PROBLEM: a hook is not in place; another tool may have patched torch_xla")
    problems = [f"{setting} switches donation off; unset it" for setting in _host.ignoring_donors()]
    if _config.flag("TORCH_XLA_DONATE_DEBUG_NANS"):
        problems.append("TORCH_XLA_DONATE_DEBUG_NANS=1 switches donation off and checks every step's outputs; unset it")
    lines += [f"PROBLEM: {problem}" for problem in problems] or ["no setting switches donation off"]
    return lines, in_place and not problems
