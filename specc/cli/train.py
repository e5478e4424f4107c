"""``specc train``: make a drafter for a model from nothing but the model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specc.cli import console, options


def train(
    context: typer.Context,
    model: options.Model,
    method: Annotated[str, typer.Option(help="dspark, eagle3, dflash or dflash2.")],
    output: Annotated[Path, typer.Option(metavar="DIR", file_okay=False, help="The drafter's folder.")],
    prompts: Annotated[
        Path | None,
        typer.Option(metavar="FILE.jsonl", help="Prompts to answer. Default: the model writes its own."),
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="Answer tokens of data, the cache's included. Default: 200000."
        ),
    ] = None,
    slots: Annotated[
        int, typer.Option(min=1, help="Answers made at once; more are faster as long as memory lasts.")
    ] = 32,
    composed: Annotated[
        float,
        typer.Option(
            min=0,
            max=1,
            help="Share of the prompts put together from English parts; the model writes the rest.",
        ),
    ] = 0.4,
    minutes: Annotated[
        float | None, typer.Option(metavar="M", help="Minutes of training; making data takes its own.")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Training steps, if they end before.")] = None,
    draft_vocab: Annotated[
        int | None, typer.Option(metavar="V", min=2, help="Rows of the drafter's head. Default: all ids.")
    ] = None,
    layers: Annotated[int, typer.Option(min=1, help="Decoder layers of the drafter.")] = 1,
    block: Annotated[int, typer.Option(min=1, help="Draft tokens it is trained for.")] = 7,
    markov_rank: Annotated[int, typer.Option(min=0, help="DSpark's sequential head; 0: none.")] = 32,
    selector_rank: Annotated[int, typer.Option(min=1, help="DFlash 2's selector.")] = 32,
    taps: Annotated[
        str | None,
        typer.Option(
            help="Target states read, as numbers of layers before them: 2,15,28. Default: three, spread."
        ),
    ] = None,
    start: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Train this drafter further; its sizes are its own, but for more layers and another vocabulary.",
        ),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Sequences per step, over all processes.")] = 4,
    rate: Annotated[float, typer.Option(help="Peak learning rate.")] = 6e-4,
    soft: Annotated[
        float,
        typer.Option(
            help="Weight of cross-entropy with the target's distribution: helps short runs (block methods)."
        ),
    ] = 0.0,
    anchors: Annotated[
        int,
        typer.Option(min=1, help="Places per sequence that blocks are drafted at in a step (block methods)."),
    ] = 64,
    seed: Annotated[int, typer.Option(help="Of the order, the anchors, the prompts.")] = 0,
    avoid: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="Evaluation prompts to keep out: a JSONL file or a folder."),
    ] = None,
    data: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where the data is kept. Default: in the cache.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in DIR.")] = False,
    dtype: options.Dtype = None,
    device: options.Device = None,
    backend: options.Backend = "auto",
    json_output: options.Json = False,
) -> None:
    """Train a drafter: the model writes prompts, answers them, and the drafter learns to guess the answers.

    Under torchrun every process takes a share of each batch:
    torchrun --nproc-per-node N --no-python -- specc train MODEL ...
    """
    console.show_options(context)

    chosen = options.numbers("--taps", taps) or None
    from specc import api  # heavy: torch and the compiler
    from specc.api import LossOptions

    report = api.train(
        model, method=method, output=output, prompts=prompts, tokens=tokens, slots=slots, composed=composed,
        minutes=minutes, steps=steps,
        draft_vocab=draft_vocab, layers=layers, block=block, markov_rank=markov_rank, selector_rank=selector_rank,
        taps=chosen, start=start, batch=batch, rate=rate, seed=seed, avoid=avoid, data=data, resume=resume,
        loss=LossOptions(soft=soft, anchors=anchors), dtype=dtype, device=device, backend=backend, say=console.say,
        command=_command(context),
    )  # fmt: skip
    if json_output:
        console.print_json({"options": context.params, **report.to_dict()})
        return
    console.show(
        {k: v for k, v in report.to_dict().items() if k != "history"}, f"{method} drafter for {model}"
    )


def _command(context: typer.Context) -> str:
    """Return the command that says the same, without options at their defaults and without folders' parents."""
    parts = ["specc train", str(context.params["model"])]
    defaults = {p.name: p.default for p in context.command.params}
    for name, value in context.params.items():
        if name in ("model", "json_output", "data") or value is None or value == defaults.get(name):
            continue
        flag = "--" + name.replace("_", "-")
        parts.append(
            flag if value is True else f"{flag} {Path(value).name if isinstance(value, Path) else value}"
        )
    return " ".join(parts)
