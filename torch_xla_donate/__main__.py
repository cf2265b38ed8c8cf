"""The command line: `python -m torch_xla_donate`."""

from __future__ import annotations

import sys

import click
from rich.console import Console
from rich.markdown import Markdown

from torch_xla_donate import _doctor, _pages


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Buffer donation for PyTorch/XLA."""


@main.command()
def doctor() -> None:
    """Shows versions, hooks, and settings that switch donation off. Exits with 1 if something is wrong."""
    lines, well = _doctor.examine()
    for line in lines:
        click.echo(line)
    sys.exit(0 if well else 1)


@main.command()
@click.argument("page", required=False)
def explain(page: str | None) -> None:
    """Shows a page of the documentation, such as `unusable`.

    Without PAGE, lists all pages. For several words of a message, lists the pages that contain them.
    """
    titles = _pages.titles()
    # Both forms are accepted: the name in messages, and the file's path.
    name = (page or "").removeprefix("docs/").removesuffix(".md")
    if name not in titles:
        listed = _pages.containing(name) if " " in name else list(titles) if page is None else []
        if not listed:
            raise click.BadParameter(
                f"page {page!r} does not exist. Choose one of {', '.join(titles)}. To look up a message, run "
                "`python -m torch_xla_donate explain troubleshooting`.",
                param_hint="PAGE",
            )
        for found in listed:
            click.echo(f"{found:<{max(map(len, listed))}}  {titles[found]}")
        return
    if sys.stdout.isatty():
        Console().print(Markdown(_pages.text(name)))
    else:
        click.echo(_pages.text(name), nl=False)


if __name__ == "__main__":
    main(prog_name="python -m torch_xla_donate")
