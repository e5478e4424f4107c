"""The command line: it parses and prints, the work is in `specc.api`.

Nothing here may import torch at the top: ``specc --help`` answers at once.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

import specc
from specc.cli import console
from specc.cli.bench import bench
from specc.cli.cache import cache
from specc.cli.check import check
from specc.cli.export import export
from specc.cli.inspect import inspect
from specc.cli.run import run
from specc.cli.train import train
from specc.cli.verify import verify
from specc.errors import SpeccError

COMMANDS = (run, inspect, bench, check, cache, train, verify, export)

app = typer.Typer(
    name="specc",
    help="Compile a language model with its drafter into one speculative decoding step, and run it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"specc {specc.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True),
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Log every pass and every compiled step on stderr.")
    ] = False,
) -> None:
    """Compile a language model with its drafter into one speculative decoding step, and run it."""
    console.show_logs(verbose=verbose)


for _command in COMMANDS:
    app.command()(_command)


def main() -> None:
    """Run the command line. Exit status: 0 done, 1 a check failed, 2 a wrong request."""
    try:
        app()
    except SpeccError as error:
        notes = getattr(error, "__notes__", ())
        print("\n".join([f"specc: {error}", *(f"  ({note})" for note in notes)]), file=sys.stderr)
        sys.exit(2)
    except OSError as error:  # a full disk, a pipe that closed: nobody's bug, and no traceback helps
        print(f"specc: {error}", file=sys.stderr)
        sys.exit(2)
