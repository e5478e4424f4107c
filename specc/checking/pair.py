"""What a loaded pair says about itself: nothing here stops it, some of it costs acceptance."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from specc.checking.folder import FolderFacts
from specc.checking.report import Effect, Finding
from specc.contracts import DrafterBundle, DraftsTree, Method, drafts_with
from specc.drafters.layers import RopeConfig
from specc.errors import SpeccError
from specc.models.generation import tokenizer_difference
from specc.models.load import LoadedModel
from specc.models.reading import load_tokenizer

_DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
# How the readers' notes begin on what the findings here say more exactly.
_SAID_ABOVE = (
    "made for the target",
    "its target is a",
    "the target's embedding",
    "the target's head",
    "for ",
)
Item = tuple[Effect, str, str]


def pair_findings(
    method: Method, target: LoadedModel, bundle: DrafterBundle, folder: FolderFacts | None, path: Path | None
) -> list[Finding]:
    """Return what is worth knowing about a pair that loads."""
    found: list[Item] = [
        *_taps(method, target, bundle),
        *_limits(target, bundle),
        *_vocabulary(target, bundle),
    ]
    found += [*_rope(target, bundle), *_block(method, bundle), *_ends(bundle), *_mask(target, bundle)]
    if folder is not None and path is not None:
        found += [*_verifier(target, folder), *_dtype(target, folder), *_tokenizer(target, bundle, path)]
    found += [("note", "reading", note) for note in bundle.notes if not note.startswith(_SAID_ABOVE)]
    found += [("note", "not read", name) for name in bundle.unused if "target" not in name.split(": ")[-1]]
    return [Finding(*item) for item in found]


def _taps(method: Method, target: LoadedModel, bundle: DrafterBundle) -> Iterator[Item]:
    taps, layers = method.taps(target.info, bundle.info), target.info.layers
    if not taps:
        return
    yield "note", "taps", f"reads the states after layers {', '.join(map(str, taps))} of {layers}"
    if taps != tuple(sorted(taps)):
        yield "loses", "taps", "they do not rise: the order must be the one the drafter was trained with"
    if layers in taps and method.name != "mtp":
        yield (
            "loses",
            "taps",
            (
                f"the state after all {layers} layers is read before the final norm; a drafter trained on the "
                "normed one accepts less"
            ),
        )
    if drafts_with(method) == "eagle3" and taps == (1, layers // 2 - 1, layers - 4):
        yield (
            "loses",
            "taps",
            (
                "these are the default layers counted by their outputs; in this layout numbers count inputs, "
                "so the drafter may have been trained one layer later: compare the shifted readings"
            ),
        )


def _limits(target: LoadedModel, bundle: DrafterBundle) -> Iterator[Item]:
    limit = bundle.info.max_position
    if limit is not None and limit < target.info.max_position:
        yield (
            "loses",
            "positions",
            (
                f"the drafter knows {limit} positions, the target {target.info.max_position}: nothing is "
                "drafted beyond"
            ),
        )


def _vocabulary(target: LoadedModel, bundle: DrafterBundle) -> Iterator[Item]:
    info, full = bundle.info, target.info
    ids = getattr(bundle.module, "target_ids", None)
    if isinstance(ids, torch.Tensor) and info.vocab < full.vocab:
        yield "note", "draft vocabulary", f"{info.vocab} of the target's {full.vocab} ids can be drafted"
        beyond = 0 if full.tokenizer_vocab is None else int((ids >= full.tokenizer_vocab).sum())
        if beyond:
            yield (
                "loses",
                "draft vocabulary",
                f"{beyond} of its ids are padding that the tokenizer never produces",
            )
    if full.tokenizer_vocab is not None and full.tokenizer_vocab != full.vocab:
        yield (
            "note",
            "padding",
            f"the target's head has {full.vocab} rows for {full.tokenizer_vocab} tokenizer ids",
        )
    if info.method == "draft_model" and info.vocab != full.vocab:
        yield (
            "note",
            "padding",
            f"the drafter scores {info.vocab} ids, the target {full.vocab}; the rest is never drafted",
        )


def _rope(target: LoadedModel, bundle: DrafterBundle) -> Iterator[Item]:
    own = getattr(getattr(bundle.info.config, "layer", None), "rope", None)
    theirs: Mapping[str, Any] = target.info.config.get("rope_parameters") or {}
    theta, kind = theirs.get("rope_theta"), theirs.get("rope_type", "default")
    if not isinstance(own, RopeConfig) or theta is None:
        return
    if own.theta != theta:
        yield (
            "note",
            "rope",
            f"the drafter's base is {own.theta:g}, the target's {theta:g}: right if it was trained so",
        )
    if own.type != kind:
        yield (
            "note",
            "rope",
            f"the drafter's is {own.type!r}, the target's {kind!r}: right if it was trained so",
        )


def _block(method: Method, bundle: DrafterBundle) -> Iterator[Item]:
    made = method.blocks(bundle.info)
    if made is not None:
        proposed = bundle.info.proposed
        asked = f", its makers propose {proposed}" if proposed not in (None, made) else ""
        yield "note", "block", f"made to draft {made} tokens per step{asked}; fewer work too, more do not"
    elif bundle.info.block is not None and not isinstance(method, DraftsTree):
        yield "note", "block", f"its maker proposes {bundle.info.block} tokens per step"


def _ends(bundle: DrafterBundle) -> Iterator[Item]:
    config = bundle.info.config
    for end in ("embed", "head"):
        own = getattr(config, f"own_{end}", None)
        if isinstance(own, bool):
            whose = "its own, private" if own else "the target's, shared"
            yield "note", {"embed": "embedding", "head": "head"}[end], whose


def _mask(target: LoadedModel, bundle: DrafterBundle) -> Iterator[Item]:
    mask = getattr(bundle.info.config, "mask_token", None)
    if not isinstance(mask, int) or target.tokenizer is None:
        return
    if target.info.tokenizer_vocab is not None and mask >= target.info.tokenizer_vocab:
        yield "note", "mask token", f"id {mask} is padding of the vocabulary: no text contains it"
        return
    text = target.tokenizer.convert_ids_to_tokens(mask)
    ends = {"pad": target.tokenizer.pad_token_id, "end": target.tokenizer.eos_token_id}
    clash = [name for name, token in ends.items() if token == mask]
    if clash:
        yield (
            "note",
            "mask token",
            f"id {mask} is {text!r}, also the {' and the '.join(clash)} token: right if trained so",
        )
    else:
        yield "note", "mask token", f"id {mask} is {text!r}"


def _verifier(target: LoadedModel, folder: FolderFacts) -> Iterator[Item]:
    inner = folder.config.get("speculators_config")
    verifier = inner.get("verifier") if isinstance(inner, Mapping) else None
    if not isinstance(verifier, Mapping):
        return
    # Not the folder's name: a built-in model lies in one of the cache, and a .gguf file has an ending.
    named, own = str(verifier.get("name_or_path") or ""), target.info.name
    if named and Path(named).name.lower() != Path(own).name.lower():
        yield (
            "loses",
            "target",
            f"the drafter was made for {named!r}, this is {own!r}: another model accepts nearly nothing",
        )
    architectures, mine = verifier.get("architectures") or (), target.info.config.get("architectures") or ()
    if architectures and mine and not set(architectures) & set(mine):
        yield "loses", "target", f"its target is a {', '.join(architectures)}, this a {', '.join(mine)}"


def _dtype(target: LoadedModel, folder: FolderFacts) -> Iterator[Item]:
    floats = [_DTYPES[name] for name in folder.dtypes if name in _DTYPES]
    if len(floats) > 1:
        yield "note", "dtype", f"its files mix {', '.join(str(d).removeprefix('torch.') for d in floats)}"
    wanted = target.info.dtype
    if any(d.itemsize > wanted.itemsize for d in floats):
        yield "note", "dtype", f"its weights are rounded to the target's {str(wanted).removeprefix('torch.')}"


def _tokenizer(target: LoadedModel, bundle: DrafterBundle, path: Path) -> Iterator[Item]:
    if bundle.info.method in ("draft_model", "mtp") or target.tokenizer is None:
        return  # a draft model's tokenizer decides whether it works at all; an MTP module has the target's
    try:
        own = load_tokenizer(path)
    except SpeccError as error:
        yield "note", "tokenizer", f"the one beside the drafter cannot be read: {error}"
        return
    difference = tokenizer_difference(target.tokenizer, own) if own is not None else None
    if difference is not None:
        yield "loses", "tokenizer", f"the drafter comes with another one: {difference}"
