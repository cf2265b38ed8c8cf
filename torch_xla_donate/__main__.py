"""The command line: `python -m torch_xla_donate`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click
from rich.console import Console
from rich.markdown import Markdown

from torch_xla_donate import _doctor, _pages
from torch_xla_donate._errors import see
from torch_xla_donate._report.console import console
from torch_xla_donate._text import percent
from torch_xla_donate._tools import collect, record, table
from torch_xla_donate._tools import run as running
from torch_xla_donate._tools import verify as verifying
from torch_xla_donate._tools.summary import RunSummary

# Exit codes of `verify` and `inspect`; a program's own code comes first, and 2 is wrong usage.
BELOW = 1
SKIPPED = 3

_F = TypeVar("_F", bound=Callable[..., Any])


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Buffer donation for PyTorch/XLA."""


def _program(command: _F) -> _F:
    """Adds the arguments that name a program. Options after it belong to it."""
    for add in (
        click.argument("arguments", metavar="PROGRAM [ARGS]...", nargs=-1, required=True, type=click.UNPROCESSED),
        click.option(
            "--auto/--no-auto", default=None, help="auto_donate on or off; the environment decides otherwise."
        ),
        click.option("-m", "is_module", is_flag=True, help="PROGRAM is a module, as for `python -m`."),
    ):
        command = add(command)
    return command


def _in_a_folder(context: click.Context, option: click.Parameter, file: str | None) -> str | None:
    """Refuses a file that cannot be written, before a long program runs for nothing."""
    if file is not None and file != "-" and not os.access(Path(file).parent, os.W_OK):
        raise click.BadParameter(
            f"folder {str(Path(file).parent)!r} cannot be written to. Make it, or name another one. {see('verify')}"
        )
    return file


def _output(command: _F) -> _F:
    """Adds the options of the commands that show steps."""
    for add in (
        click.option(
            "--topology", default="", metavar="NAME", help="Also compile each step for TPUs, such as v6e:4x8."
        ),
        click.option(
            "--fail-under",
            type=click.FloatRange(0, 100),
            metavar="PERCENT",
            help=f"Exit with {BELOW} if outputs reuse less of the bytes offered.",
        ),
        click.option(
            "--json",
            "json_file",
            type=click.Path(dir_okay=False, allow_dash=True),
            callback=_in_a_folder,
            help="Write JSON; - for stdout.",
        ),
        click.option("--undonated", is_flag=True, help="Also compile each step without donation, for its memory."),
    ):
        command = add(command)
    return command


@main.command(context_settings={"allow_interspersed_args": False, "ignore_unknown_options": False})
@_program
@click.option("--record", "folder", hidden=True, type=click.Path(path_type=Path))
@click.pass_obj
def run(
    programs: list[tuple[running.Program, Path | None]],
    arguments: tuple[str, ...],
    auto: bool | None,
    is_module: bool,
    folder: Path | None,
) -> None:
    """Runs a script with this package loaded, without an edit.

    Example: `python -m torch_xla_donate run --auto train.py --epochs 3`
    """
    programs.append((_named(arguments, auto, is_module), folder))


@main.command(context_settings={"allow_interspersed_args": False})
@_program
@_output
@click.option("--keep", type=click.Path(file_okay=False, path_type=Path), help="Keep the dump here, for `inspect`.")
def verify(
    arguments: tuple[str, ...],
    auto: bool | None,
    is_module: bool,
    topology: str,
    fail_under: float | None,
    json_file: str | None,
    undonated: bool,
    keep: Path | None,
) -> None:
    """Runs a script, and shows the donors of each step.

    Exits with the script's own code if that is not 0 (128 and the signal's number, if one ended it); else with 3 if a
    file of the dump could not be read, 1 below --fail-under, 2 for wrong usage.

    Example: `python -m torch_xla_donate verify --auto --fail-under 95 train.py --epochs 3`
    """
    program = _named(arguments, auto, is_module)
    _show(
        lambda: verifying.verify(
            program, keep=keep, topology=topology, undonated=undonated, keeps_stdout=json_file == "-"
        ),
        fail_under,
        json_file,
    )


@main.command()
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@_output
def inspect(
    folder: Path,
    topology: str,
    fail_under: float | None,
    json_file: str | None,
    undonated: bool,
) -> None:
    """Shows the donors of each step in a folder that XLA dumped to.

    Reads text only: dumps of torch_xla, this package and JAX, from CPU, GPU and TPU. Exits with 3 if a file could not
    be read, 1 below --fail-under, 2 for wrong usage.

    Example: `python -m torch_xla_donate inspect --json steps.json dump/`
    """

    _show(lambda: collect.collect(folder, str(folder), topology=topology, undonated=undonated), fail_under, json_file)


def _named(arguments: tuple[str, ...], auto: bool | None, is_module: bool) -> running.Program:
    target, *rest = arguments
    if not is_module and not Path(target).exists():
        raise click.BadParameter(
            f"script {target!r} does not exist. Give its path, or a module with -m. {see('verify')}",
            param_hint="PROGRAM",
        )
    return running.Program(target, tuple(rest), is_module, auto)


def _show(summarize: Callable[[], RunSummary], fail_under: float | None, json_file: str | None) -> None:
    """Shows a summary, and exits with its code."""
    try:
        found = summarize()
    except (ImportError, ValueError, OSError) as error:
        raise click.UsageError(str(error)) from error
    if json_file == "-":
        click.echo(table.summary_line(found), err=True)
    else:
        shown = console()
        for part in table.tables(found):
            shown.print(part)
    if json_file is not None:
        try:
            with click.open_file(json_file, "w", encoding="utf-8") as file:
                json.dump(found.to_dict(), file, indent=2)
                file.write("\n")
        except BrokenPipeError:  # `| head`, which click ends quietly
            raise
        except OSError as error:
            raise click.UsageError(str(error)) from error
    if found.exit_code:
        sys.exit(found.exit_code if found.exit_code > 0 else 128 - found.exit_code)
    if found.skipped:
        sys.exit(SKIPPED)
    if fail_under is not None and found.donated_fraction * 100 < fail_under:
        if found.offered_bytes:
            failure = (
                f"{percent(found.donated_fraction)} of the bytes offered are reused, below {fail_under:g}%. Look for "
                "donors without an output in the table."
            )
        else:
            failure = (
                f"No step has a donor, so nothing is reused, and --fail-under is {fail_under:g}%. Run verify with "
                "--auto to donate automatically, or call advise(f) to see what a step could donate."
            )
        click.echo(f"{failure} {see('verify')}", err=True)
        sys.exit(BELOW)


@main.command()
def doctor() -> None:
    """Shows versions, hooks, and settings that switch donation off. Exits with 1 if something is wrong."""
    lines, well = _doctor.examine()
    for line in lines:
        click.echo(line)
    sys.exit(0 if well else 1)


@main.command()
@click.argument("word", required=False)
def explain(word: str | None) -> None:
    """Shows the section of the documentation that a message names by WORD, or a page, such as `errors`.

    Without WORD, lists all pages. For other words, lists the sections that contain them.
    """
    titles = _pages.titles()
    # Both forms are accepted: the name in messages, and the file's path.
    name = (word or "").removeprefix("docs/").replace(".md", "", 1)
    try:
        shown = _pages.text(name)
    except KeyError:
        listed = list(titles) if word is None else _pages.containing(name)
        if not listed:
            raise click.BadParameter(
                f"{word!r} is neither a page nor a word that a message names, and no section contains it. Choose one "
                f"of {', '.join(titles)}, or give a few words of a message.",
                param_hint="WORD",
            ) from None
        for found in listed:
            click.echo(f"{found:<{max(map(len, listed))}}  {titles[found.partition('#')[0]]}")
        return
    if sys.stdout.isatty():
        Console().print(Markdown(shown))
    else:
        click.echo(shown, nl=False)


def entry(prog_name: str | None = None) -> None:
    """The program `torch_xla_donate`. A program to run begins outside click, which handles some exceptions."""
    programs: list[tuple[running.Program, Path | None]] = []
    try:
        main(prog_name=prog_name, obj=programs, complete_var="_TORCH_XLA_DONATE_COMPLETE")
    except SystemExit:
        if not programs:
            raise
    ((program, folder),) = programs
    record.start(folder)
    running.run(program)


if __name__ == "__main__":
    entry("python -m torch_xla_donate")
