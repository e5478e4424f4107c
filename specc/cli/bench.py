"""``specc bench``: measure methods side by side in one interleaved run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from specc.cli import console, options
from specc.errors import InputError


def _drafters(given: list[str] | None) -> str | dict[str, str] | None:
    """Return one drafter, or a mapping when they are written METHOD=PATH."""
    if not given:
        return None
    pairs = [item.partition("=") for item in given]
    if len(given) == 1 and not pairs[0][1]:
        return given[0]
    if not all(sign and path for _, sign, path in pairs):
        raise InputError("--drafter", given, "one drafter, or METHOD=PATH for each")
    return {method: path for method, _, path in pairs}


def bench(
    context: typer.Context,
    model: options.Model,
    methods: Annotated[
        str,
        typer.Option(
            help="What to compare, separated by commas: methods, and transformers, transformers-static, "
            "transformers-compiled, assisted, prompt_lookup."
        ),
    ] = "plain,ngram,transformers",
    drafter: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[METHOD=]PATH", help="The drafter, or one per method. Default: what comes with specc."
        ),
    ] = None,
    block: options.Block = None,
    blocks: Annotated[
        str | None,
        typer.Option(metavar="K,K,..", help="Measure every drafting method with each of these blocks."),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="Prompts: a JSONL file or a folder of them. Default: built in."),
    ] = None,
    each: Annotated[
        int | None, typer.Option(min=1, help="Use the first so many prompts of every category.")
    ] = None,
    repeats: Annotated[
        int, typer.Option(min=1, help="Interleaved rounds; medians and spread are over these.")
    ] = 5,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens generated per prompt.")] = 64,
    temperature: Annotated[
        float | None, typer.Option(help="Sample at this temperature. Default: greedy.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of all draws.")] = 0,
    accept: options.Accept = "ratio",
    plot: Annotated[
        Path | None,
        typer.Option(metavar="DIR", file_okay=False, help="Write charts here (needs matplotlib)."),
    ] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the tables in Markdown.")] = False,
    dtype: options.Dtype = None,
    device: options.Device = None,
    backend: options.Backend = "auto",
    max_length: Annotated[
        int | None, typer.Option(help="Tokens a slot can hold. Default: what the longest prompt needs.")
    ] = None,
    json_output: options.Json = False,
) -> None:
    """Measure methods against plain decoding and transformers, interleaved on one machine."""
    drafters, lengths = _drafters(drafter), options.numbers("--blocks", blocks)
    console.show_options(context)

    from specc import api  # heavy: torch and the compiler

    report = api.bench(
        model,
        drafters,
        methods=tuple(name.strip() for name in methods.split(",") if name.strip()),
        block=block,
        blocks=lengths,
        prompts=prompts,
        each=each,
        repeats=repeats,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        seed=seed,
        accept=accept,
        plot=plot,
        dtype=dtype,
        device=device,
        backend=backend,
        max_length=max_length,
        command=" ".join(["specc", *sys.argv[1:]]),
    )
    if json_output:
        console.print_json({"options": context.params, **report.to_dict()})
    elif markdown:
        print(report.render())
    else:
        console.show(_folded(report.to_dict()), f"{model}, {repeats} rounds")
    if plot:
        console.say(f"charts written to {plot}")


def _folded(document: dict[str, object]) -> dict[str, object]:
    """Put each spread into its median's cell: "41.2 (39.8 to 42.0)"."""
    return {
        key: [_fold(row) if isinstance(row, dict) else row for row in value]
        if isinstance(value, list | tuple)
        else value
        for key, value in document.items()
        if value not in ((), [])
    }


def _fold(row: dict[str, object]) -> dict[str, object]:
    out: dict[str, object] = {}
    for name, value in row.items():
        if name.endswith(("_least", "_most")):
            continue
        least, most = row.get(f"{name}_least"), row.get(f"{name}_most")
        if isinstance(value, float) and isinstance(least, float) and isinstance(most, float):
            out[name] = f"{value:.4g} ({least:.4g} to {most:.4g})"
        else:
            out[name] = value
    return out
