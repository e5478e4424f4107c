"""``specc bench``: measure methods side by side in one interleaved run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specc.cli import console, options


def bench(
    context: typer.Context,
    model: options.Model,
    methods: Annotated[str, typer.Option(help="Methods to compare, separated by commas.")] = "plain,ngram",
    drafter: options.Drafter = None,
    block: options.Block = None,
    prompts: Annotated[
        Path | None,
        typer.Option(metavar="FILE.jsonl", help="Prompts, one JSON object a line. Default: built in."),
    ] = None,
    repeats: Annotated[
        int, typer.Option(min=1, help="Interleaved rounds; medians and spread are over these.")
    ] = 5,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens generated per prompt.")] = 64,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="DIR", file_okay=False, help="Write charts here (needs matplotlib)."),
    ] = None,
    dtype: options.Dtype = None,
    device: options.Device = None,
    backend: options.Backend = "auto",
    json_output: options.Json = False,
) -> None:
    """Measure methods against plain decoding and transformers, interleaved on one machine."""
    console.show_options(context)

    from specc import api  # heavy: torch and the compiler

    report = api.bench(
        model,
        drafter,
        methods=tuple(name.strip() for name in methods.split(",") if name.strip()),
        block=block,
        prompts=prompts,
        repeats=repeats,
        max_new_tokens=max_new_tokens,
        plot=plot,
        dtype=dtype,
        device=device,
        backend=backend,
    )
    if json_output:
        console.print_json({"options": context.params, **report.to_dict()})
        return
    console.show(report.to_dict(), f"{model}, {repeats} rounds")
    if plot:
        console.say(f"charts written to {plot}")
