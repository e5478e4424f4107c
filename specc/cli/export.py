"""``specc export``: save a compiled step as one self-contained package."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specc.cli import console, options
from specc.files import check_new_file


def export(
    context: typer.Context,
    model: options.Model,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE.specc", dir_okay=False, help="Where to write it.")
    ],
    method: options.Method = "dspark",
    drafter: options.Drafter = None,
    block: options.Block = None,
    batch: Annotated[int, typer.Option(min=1, help="Sequences that run at once.")] = 1,
    max_length: options.MaxLength = None,
    accept: options.Accept = "ratio",
    dtype: options.Dtype = None,
    device: options.Device = None,
    native: Annotated[bool, typer.Option("--native", help="Also store native code for this device.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is there.")] = False,
    json_output: options.Json = False,
) -> None:
    """Write a package that `specc run FILE.specc` loads without tracing and without transformers."""
    check_new_file("--output", output, force=force)
    console.show_options(context)

    import specc  # heavy: torch and the compiler

    compiled = specc.compile(
        model,
        drafter,
        method=method,
        block=block,
        batch=batch,
        max_length=max_length,
        accept=accept,  # type: ignore[arg-type]  # checked by compile
        dtype=dtype,
        device=device,
        backend="eager",  # a package holds graphs: where it is loaded, they are lowered
    )
    compiled.save(output, native=native, force=force)
    size = output.stat().st_size
    if json_output:
        console.print_json({"options": context.params, "output": output, "size_bytes": size})
        return
    console.say(f"written: {output}, {size:,} bytes")
