"""``specc verify``: does speculation change the text, and if so, is it a tie or a bug?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from specc.cli import console, options, package
from specc.errors import InputError


def verify(
    context: typer.Context,
    model: options.Model,
    drafter: options.Drafter = None,
    method: options.Method = "dspark",
    prompts: Annotated[
        Path | None,
        typer.Option(metavar="FILE.jsonl", help="Prompts, one JSON object a line. Default: built in."),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens generated per prompt.")] = 64,
    block: options.Block = None,
    batch: Annotated[int, typer.Option(min=1, help="Sequences that run at once.")] = 1,
    exact: Annotated[
        str | None,
        typer.Option(help="bitwise: the same rows in both runs, so nothing may differ. Default: off."),
    ] = None,
    original: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="For a package: the model that it must have the weights and the text of; --drafter adds its own.",
        ),
    ] = None,
    max_length: options.MaxLength = None,
    dtype: options.Dtype = None,
    device: options.Device = None,
    backend: options.Backend = "auto",
    json_output: options.Json = False,
) -> None:
    """Generate with and without speculation and judge every first difference. Exit status 1: there is a bug.

    MODEL may be a .specc package, which brings its own drafter and method.
    """
    console.show_options(context)

    from specc import api  # heavy: torch and the compiler

    chosen: dict[str, Any] = {
        "drafter": drafter,
        "method": method,
        "block": block,
        "batch": batch,
        "exact": exact,
    }
    chosen |= {"max_length": max_length, "dtype": dtype}
    if package.is_package(model):
        settled = ("method", "block", "batch", "exact", "max_length", "dtype")
        package.refuse_given(context, *settled, *(() if original else ("drafter",)))
        chosen = {"original": original, "drafter": drafter}
    elif original is not None:
        raise InputError("--original", original, f"left out: {model} is no package")
    report = api.verify(
        model, prompts, max_new_tokens=max_new_tokens, device=device, backend=backend, **chosen
    )
    if json_output:
        console.print_json({"options": context.params, **report.to_dict()})
    else:
        print(report.render())
    if not report.is_lossless:
        raise typer.Exit(1)
