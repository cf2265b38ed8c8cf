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
    """Shows a page of the documentation, such as `unusable`. Without PAGE, lists them."""
    titles = _pages.titles()
    if page is None:
        width = max(map(len, titles))
        for name, title in titles.items():
            click.echo(f"{name:<{width}}  {title}")
        return
    # Both forms are accepted: the name in messages, and the file's path.
    name = page.removeprefix("docs/").removesuffix(".md")
    if name not in titles:
        raise click.BadParameter(f"page {page!r} does not exist. Choose one of {', '.join(titles)}.", param_hint="PAGE")
    if sys.stdout.isatty():
        Console().print(Markdown(_pages.text(name)))
    else:
        click.echo(_pages.text(name), nl=False)


if __name__ == "__main__":
    main(prog_name="python -m torch_xla_donate")
