"""The command line: `python -m torch_xla_donate`."""

from __future__ import annotations

import sys

import click

from torch_xla_donate import _doctor


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Buffer donation for PyTorch/XLA."""


@main.command()
def doctor() -> None:
    """Versions, hooks, and settings that switch donation off. Exits with 1 if something is wrong."""
    lines, well = _doctor.examine()
    for line in lines:
        click.echo(line)
    sys.exit(0 if well else 1)


if __name__ == "__main__":
    main(prog_name="python -m torch_xla_donate")
