"""``specc inspect``: show the step that would run, without running it."""

from __future__ import annotations

from typing import Annotated

import typer

from specc.cli import console, options, package

# Options that a package was saved with.
_SETTLED = (
    "method", "drafter", "block", "batch", "dump", "disable_pass", "accept", "dtype", "device", "backend",
    "max_length",
)  # fmt: skip


def _inspect_package(
    context: typer.Context, model: str, stage: str | None, *, graph: bool, json_output: bool
) -> None:
    import specc  # heavy: torch

    summary = specc.inspect_package(model)
    if json_output:
        console.print_json({"options": context.params, **summary.to_dict()})
        return
    console.show(summary.to_dict(), model)
    if graph or stage:
        print(summary.render(stage))


def inspect(
    context: typer.Context,
    model: options.Model,
    method: options.Method = "dspark",
    drafter: options.Drafter = None,
    block: options.Block = None,
    batch: Annotated[int, typer.Option(min=1, help="Sequences that run at once.")] = 1,
    stage: Annotated[
        str | None, typer.Option(help="Print only this stage of the graph: draft, verify, accept, commit.")
    ] = None,
    graph: Annotated[bool, typer.Option("--graph", help="Print the whole graph, one line per node.")] = False,
    dump: options.Dump = None,
    disable_pass: options.DisablePass = None,
    accept: options.Accept = "ratio",
    dtype: options.Dtype = None,
    device: options.Device = None,
    backend: options.Backend = "auto",
    max_length: options.MaxLength = None,
    json_output: options.Json = False,
) -> None:
    """Show a step: its stages, taps, nodes and bytes, what each pass changed, memory by part.

    MODEL may be a .specc package: its weights are not read.
    """
    console.show_options(context)

    if package.is_package(model):
        package.refuse_given(context, *_SETTLED)
        _inspect_package(context, model, stage, graph=graph, json_output=json_output)
        return

    from specc import api  # heavy: torch and the compiler

    inspection = api.inspect(
        model,
        drafter,
        method=method,
        block=block,
        batch=batch,
        accept=accept,
        dtype=dtype,
        device=device,
        backend=backend,
        max_length=max_length,
        dump=dump,
        disable_passes=tuple(disable_pass or ()),
    )
    if json_output:
        console.print_json({"options": context.params, **inspection.to_dict()})
        return
    console.show(inspection.to_dict(), f"{model} with {method}")
    if graph or stage:
        print(inspection.render(stage))
    if dump:
        console.say(f"graphs written to {dump}")
