"""z-lab's layout of DFlash and DFlash 2, and SpecForge's of DFlash and DSpark: keys in ``dflash_config``.

A DFlash 2 checkpoint is known by its architecture, its selector keys or its selector tensors: any one of
them, so that a checkpoint that lost the others is refused and never runs as DFlash. DSpark likewise.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import replace
from typing import Any

from specc.checkpoints.block_weights import (
    bundle,
    check_taps,
    load_block,
    nested,
    optional_integer,
    read_confidence,
    read_convolution,
    read_markov,
    read_mask_token,
    read_selector,
    read_windows,
)
from specc.checkpoints.fields import Fields
from specc.checkpoints.layer_config import read_depth, read_layer
from specc.checkpoints.reading import Folder
from specc.contracts import DrafterBundle, ModelInfo
from specc.drafters.block import BlockConfig
from specc.drafters.selector import SelectorConfig

name = "zlab-dflash"
_TAPS = "target_layer_ids"
# Keys that DFlash 2 configs keep in dflash_config, some writers at the top level: the former wins.
_EITHER = (
    "block_size",
    "mask_token_id",
    _TAPS,
    "conv_group_size",
    "conv_kernel_size",
    "selector_rank",
    "selector_top_k",
    "final_logit_softcapping",
    "output_multiplier",
    "input_embedding_scale",
)


def recognise(config: Mapping[str, Any], names: Set[str]) -> bool:
    if "speculators_model_type" in config:
        return False
    named = any(str(item).startswith(("DFlash", "DSpark")) for item in config.get("architectures") or ())
    return "dflash_config" in config or named


def read(folder: Folder, target: ModelInfo) -> DrafterBundle:
    top = Fields(folder.path, _hoist(folder.config))
    inner = nested(top, "dflash_config")
    method = _method(folder, inner)
    layer, vocab = read_layer(top), top.integer("vocab_size", least=1)
    layers = read_depth(top)
    size = optional_integer(inner, "swa_window_size")
    windows = read_windows(top, layers, size)
    if inner.flag("use_swa", False):
        size = size if size is not None else top.integer("sliding_window", least=1)
        windows = (size,) * layers
    taps, notes = _taps(top, layers, target)
    config = BlockConfig(
        layer=layer,
        layers=layers,
        target_hidden=target.hidden,
        taps=taps,
        vocab=vocab,
        draft_vocab=vocab,
        mask_token=read_mask_token(top, vocab),
        block=top.integer("block_size", least=2),
        causal=_causal(top, inner, windows),
        windows=windows,
        window_rule="zlab",
        markov=read_markov(inner) if method == "dspark" else None,
        confidence=read_confidence(inner, folder, with_markov=False) if method == "dspark" else None,
        convolution=read_convolution(top, layer.hidden) if method == "dflash2" else None,
        selector=_selector(top, folder, vocab, target) if method == "dflash2" else None,
        max_position=optional_integer(top, "max_position_embeddings"),
    )
    scale = top.number("input_embedding_scale", 1.0, above=0)
    if scale != 1.0 and "embed_tokens.weight" not in folder.names:
        raise top.refuse(
            "input_embedding_scale", scale, "1.0: the target's own embedding is scaled as the target does"
        )
    top.raw("projector_type", None)
    inner.finish()
    top.finish()
    layout = "specforge-dspark" if method == "dspark" else f"zlab-{method}"
    drafter = load_block(folder, replace(config, embedding_scale=scale), target)
    return bundle(folder, method, layout, drafter, notes)


def _hoist(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config with the keys of `_EITHER` at the top level, wherever they were."""
    inner = config.get("dflash_config")
    if not isinstance(inner, dict):
        return config
    found = {key: inner[key] for key in _EITHER if key in inner}
    rest = {key: value for key, value in inner.items() if key not in _EITHER}
    return {**config, **found, "dflash_config": rest}


def _method(folder: Folder, inner: Fields) -> str:
    projector = inner.choice("projector_type", ("dflash", "dspark", "dflash2"), "dflash")
    inner.choice("attention_mode", ("gqa",), "gqa")  # SpecForge's other modes are other layers
    said = {
        projector,
        *(str(item).removesuffix("DraftModel").lower() for item in folder.config.get("architectures") or ()),
    }
    if "dspark" in said or any(item.startswith("markov_head.") for item in folder.names):
        return "dspark"
    selects = any(item.startswith("candidate_selector.") or "_conv." in item for item in folder.names)
    return "dflash2" if "dflash2" in said or selects else "dflash"


def _taps(top: Fields, layers: int, target: ModelInfo) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return the taps, "after j layers": this layout's numbers plus one, so that -1 is the embedding."""
    top_layers = top.integer("num_target_layers", target.layers)
    if top_layers != target.layers:
        raise top.refuse(
            "num_target_layers", top_layers, f"{target.layers}, the layers of the target {target.name}"
        )
    notes: tuple[str, ...] = ()
    if top.has(_TAPS):
        ids = top.integers(_TAPS)
    else:
        ids = default_ids(layers, target.layers)
        notes = (f"{_TAPS} is absent: the layout's default, {list(ids)}",)
    taps = tuple(index + 1 for index in ids)
    check_taps(top, _TAPS, taps, target, 1)
    return taps, notes


def default_ids(layers: int, target_layers: int) -> tuple[int, ...]:
    """Return z-lab's default target layers: evenly from 1 to L - 3, one per drafter layer."""
    if layers == 1:
        return (target_layers // 2,)
    return tuple(round(1 + index * (target_layers - 4) / (layers - 1)) for index in range(layers))


def _causal(top: Fields, inner: Fields, windows: tuple[int | None, ...]) -> tuple[bool, ...]:
    """``is_causal`` decides, else ``dflash_config.causal``, else a layer is causal if it has a window."""
    for fields, key in ((top, "is_causal"), (inner, "causal")):
        if fields.has(key):
            inner.raw("causal", None)
            return (fields.flag(key),) * len(windows)
    return tuple(window is not None for window in windows)


def _selector(top: Fields, folder: Folder, vocab: int, target: ModelInfo) -> SelectorConfig:
    """Read the selector; a target's own head has applied the target's multiplier and softcap already."""
    selector = read_selector(top, vocab)
    multiplier = top.number("output_multiplier", 1.0, above=0)
    softcap = top.number("final_logit_softcapping", above=0) if top.has("final_logit_softcapping") else None
    if "lm_head.weight" in folder.names:
        return replace(selector, multiplier=multiplier, softcap=softcap)
    for key, value, neutral in (
        ("output_multiplier", multiplier, 1.0),
        ("final_logit_softcapping", softcap, None),
    ):
        own = target.config.get(key)
        if own is not None and value not in (neutral, own):
            raise top.refuse(key, value, f"{own}, the target's, whose head the drafter uses")
    return replace(
        selector,
        multiplier=1.0 if target.config.get("output_multiplier") is not None else multiplier,
        softcap=None if target.config.get("final_logit_softcapping") is not None else softcap,
    )
