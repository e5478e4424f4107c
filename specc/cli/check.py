"""``specc check``: will this drafter work with this model, and does anything cost acceptance?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specc.cli import console, options


def check(
    context: typer.Context,
    model: options.Model,
    drafter: Annotated[
        str | None,
        typer.Argument(metavar="[DRAFTER]", help="The drafter. Default: the one that comes with specc."),
    ] = None,
    method: options.Method = "dspark",
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.jsonl",
            help="Prompts of the probe. Default: built in, or written by the model itself.",
        ),
    ] = None,
    block: options.Block = None,
    probe: Annotated[
        bool, typer.Option(help="Measure acceptance, as it is and with the taps shifted by one.")
    ] = True,
    max_new_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens of each answer the probe drafts along.")
    ] = 64,
    strict: Annotated[bool, typer.Option("--strict", help="Fail also when acceptance may be lost.")] = False,
    dtype: options.Dtype = None,
    device: options.Device = None,
    json_output: options.Json = False,
) -> None:
    """Say everything at once that stops a pair or silently costs acceptance. Exit status 1: will not work."""
    console.show_options(context)

    from specc import api  # heavy: torch and the compiler

    report = api.check(
        model,
        drafter,
        method=method,
        prompts=prompts,
        block=block,
        probe=probe,
        max_new_tokens=max_new_tokens,
        dtype=dtype,
        device=device,
    )
    if json_output:
        console.print_json({"options": context.params, **report.to_dict()})
    else:
        print(report.render())
    if not report.works or (strict and not report.clean):
        raise typer.Exit(1)
