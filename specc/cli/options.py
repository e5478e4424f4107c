"""The options that several commands share, so that one word means one thing everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specc.errors import InputError

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A folder, a .gguf file, a hub id, or a built-in name such as smollm2-135m.",
    ),
]
Method = Annotated[
    str,
    typer.Option(
        help="Drafting method: plain, ngram, draft_model, eagle3, eagle3_tree, mtp, dflash, dspark, dflash2."
    ),
]
Drafter = Annotated[
    str | None,
    typer.Option(
        help="A checkpoint folder, or a model for draft_model. Default: the one that comes with specc."
    ),
]
Block = Annotated[
    int | None,
    typer.Option(
        metavar="K", min=0, help="Draft tokens per step; 0 is plain decoding. Default: the method's own."
    ),
]
Backend = Annotated[str, typer.Option(help="How the step is run: auto, inductor, native, eager.")]
Accept = Annotated[str, typer.Option(help="Acceptance rule when sampling: ratio or coupled.")]
Dtype = Annotated[
    str | None,
    typer.Option(help="float32, bfloat16 or float16. Default: the checkpoint's, where it is fast."),
]
Device = Annotated[str | None, typer.Option(help="Device to run on. Default: where the model is, else cpu.")]
MaxLength = Annotated[
    int | None, typer.Option(help="Tokens a slot can hold. Default: the model's limit, at most 4096.")
]
Sha256 = Annotated[
    str | None,
    typer.Option(metavar="HEX", help="For a package: the sum its file must have. Default: not checked."),
]
NativeOnly = Annotated[
    bool,
    typer.Option(
        "--native-only", help="For a package: refuse to lower its graphs here, run native code only."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else on stdout.")]
DisablePass = Annotated[
    list[str] | None, typer.Option(metavar="NAME", help="Leave out a pass, to bisect; may be repeated.")
]
Dump = Annotated[
    Path | None,
    typer.Option(metavar="DIR", file_okay=False, help="Write the graph after every pass as text into DIR."),
]


def numbers(option: str, text: str | None) -> tuple[int, ...]:
    """Return the whole numbers of a list with commas; none of None."""
    try:
        return tuple(int(part) for part in text.split(",")) if text else ()
    except ValueError:
        raise InputError(option, text, "whole numbers with commas between, such as 2,15,28") from None
