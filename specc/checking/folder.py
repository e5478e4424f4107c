"""Look over a drafter's folder without building anything: every mismatch with the target, not only one.

A layout's reader stops at the first thing it must refuse. This looks at the keys and tensors that layouts
share, so that a report can name the rest beside it. It raises nothing; what it does not know, it leaves to
the reader.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from specc.checking.report import Finding
from specc.contracts import ModelInfo
from specc.drafters.layers import ROPE_TYPES

_INNER = ("transformer_layer_config", "dflash_config", "eagle_config")
_TAPS_AFTER = ("eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids")  # id m is "after m layers"
_TAPS_OF = ("target_layer_ids", "dspark_target_layer_ids")  # id m is the output of layer m: after m + 1


@dataclass(frozen=True)
class FolderFacts:
    """What a drafter's folder says about itself; empty where it could not be read."""

    config: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]
    dtypes: tuple[str, ...]
    files: Mapping[str, Path]

    def find(self, *keys: str) -> Any:
        """Return the first of ``keys`` that is set, at the top or in one of the inner objects."""
        places = [self.config, *(self.config.get(name) for name in _INNER)]
        for key in keys:
            for place in places:
                if isinstance(place, Mapping) and place.get(key) is not None:
                    return place[key]
        return None

    def shape(self, *endings: str) -> tuple[int, ...] | None:
        """Return the shape of the first tensor that has one of these names, whatever its prefix."""
        for ending in endings:
            for name, shape in self.shapes.items():
                if name == ending or name.endswith(f".{ending}"):
                    return shape
        return None


def look(path: Path) -> FolderFacts:
    """Return what can be read of a folder."""
    config: dict[str, Any] = {}
    try:
        read = json.loads((path / "config.json").read_text(encoding="utf-8"))
        config = read if isinstance(read, dict) else {}
    except (OSError, ValueError):
        config = {}  # the layout's reader reports it
    shapes, dtypes, files = {}, set(), {}
    for file in sorted(path.glob("*.safetensors")) if path.is_dir() else ():
        try:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118  not a dict
                    part = opened.get_slice(name)
                    shapes[name], files[name] = tuple(part.get_shape()), file
                    dtypes.add(str(part.get_dtype()))
        except (SafetensorError, OSError):
            continue  # the layout's reader reports it
    return FolderFacts(config, shapes, tuple(sorted(dtypes)), files)


def mismatches(facts: FolderFacts, target: ModelInfo) -> list[Finding]:
    """Return everything in a folder that contradicts the target or itself."""
    found = [
        *_sizes(facts, target),
        *_taps(facts, target),
        *_vocabulary(facts, target),
        *_rope(facts),
        *_weights(facts),
    ]
    return [Finding("stops", subject, text) for subject, text in found]


Pair = tuple[str, str]


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _sizes(facts: FolderFacts, target: ModelInfo) -> Iterator[Pair]:
    width = _whole(facts.find("target_hidden_size"))
    if width is not None and width != target.hidden:
        yield (
            "target_hidden_size",
            f"the drafter reads states of width {width}, the target's are {target.hidden} wide",
        )
    vocab = _whole(facts.find("vocab_size"))
    if vocab is not None and vocab != target.vocab:
        yield "vocab_size", f"the drafter's vocabulary has {vocab} ids, the target's head {target.vocab}"
    mask = facts.find("mask_token_id")
    if mask is not None and not 0 <= (_whole(mask) if _whole(mask) is not None else -1) < target.vocab:  # type: ignore[operator]
        yield "mask_token_id", f"{mask!r} is not one of the target's {target.vocab} ids"
    layers = _whole(facts.find("num_target_layers"))
    if layers is not None and layers != target.layers:
        yield "num_target_layers", f"made for a target of {layers} layers, this one has {target.layers}"
    block = facts.find("block_size")
    if block is not None and (_whole(block) is None or block < 1):
        yield "block_size", f"{block!r} is not a block of at least 1 row"


def _taps(facts: FolderFacts, target: ModelInfo) -> Iterator[Pair]:
    for key in (*_TAPS_AFTER, *_TAPS_OF):
        ids = facts.find(key)
        if not isinstance(ids, list) or not all(_whole(i) is not None for i in ids):
            continue
        taps = [i + 1 for i in ids] if key in _TAPS_OF else ids
        outside = [i for i, tap in zip(ids, taps, strict=True) if not 0 <= tap <= target.layers]
        if outside:
            yield key, f"{outside} are not layers of the target, which has {target.layers}"
        fuse = facts.shape("fc.weight")
        if fuse is not None and len(fuse) == 2 and fuse[1] != len(taps) * target.hidden:
            yield (
                key,
                (
                    f"{len(taps)} taps of width {target.hidden} make {len(taps) * target.hidden}, but "
                    f"fc.weight reads {fuse[1]}: {fuse[1] / target.hidden:g} taps"
                ),
            )
        return


def _vocabulary(facts: FolderFacts, target: ModelInfo) -> Iterator[Pair]:
    draft, full = _whole(facts.find("draft_vocab_size")), _whole(facts.find("vocab_size")) or target.vocab
    head, names = facts.shape("lm_head.weight"), facts.shape("d2t")
    if draft is None:
        return
    if head is not None and head[0] != draft:
        yield "lm_head.weight", f"{head[0]} rows, but draft_vocab_size is {draft}"
    if names is None and draft < full:
        yield "d2t", f"missing: which of the target's {full} ids the {draft} draft ids are is not said"
    if names is not None and names != (draft,):
        yield "d2t", f"{list(names)}, but draft_vocab_size is {draft}"
    ids = _load(facts, "d2t")
    if ids is None or ids.dim() != 1 or ids.is_floating_point():
        return
    named = torch.arange(ids.shape[0]) + ids.long()
    if bool(((named < 0) | (named >= target.vocab)).any()):
        yield (
            "d2t",
            f"draft id + d2t leaves the target's {target.vocab} ids: it holds offsets, not absolute ids",
        )
    if bool((named[1:] <= named[:-1]).any()):
        yield "d2t", "the target ids it names do not rise with the draft id"


def _rope(facts: FolderFacts) -> Iterator[Pair]:
    rope = facts.find("rope_parameters", "rope_scaling")
    kind = rope.get("rope_type", rope.get("type")) if isinstance(rope, Mapping) else None
    if kind is not None and kind not in ROPE_TYPES:
        yield "rope_type", f"{kind!r} is not one of {', '.join(ROPE_TYPES)}"


def _weights(facts: FolderFacts) -> Iterator[Pair]:
    for name in facts.shapes:
        tensor = _load(facts, name)
        if tensor is not None and tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            yield name, "holds NaN or infinite values"


def _load(facts: FolderFacts, name: str) -> torch.Tensor | None:
    if name not in facts.files:
        return None
    try:
        with safe_open(facts.files[name], framework="pt") as opened:
            tensor: torch.Tensor = opened.get_tensor(name)
            return tensor
    except (SafetensorError, OSError):
        return None  # the layout's reader reports it
