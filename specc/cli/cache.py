"""``specc cache``: what specc keeps between runs, and how to drop it."""

from __future__ import annotations

from typing import Annotated

import typer

from specc.cli import console, options


def cache(
    context: typer.Context,
    clear: Annotated[bool, typer.Option("--clear", help="Delete everything in the cache.")] = False,
    json_output: options.Json = False,
) -> None:
    """Show the cache folder with its sizes, or empty it."""
    console.show_options(context)

    from specc import api  # heavy: torch and the compiler

    report = api.cache(clear=clear)
    if json_output:
        console.print_json({"options": context.params, **report.to_dict()})
        return
    console.show(report.to_dict(), "cache")
