"""The speculators layout of DFlash, DSpark and DFlash 2; the key ``speculators_model_type`` says which.

Tensor names are z-lab's, so that key is also what tells the two layouts apart: only z-lab's has
``dflash_config``.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import replace
from typing import Any

from specc.checkpoints.block_weights import (
    bundle,
    check_taps,
    check_target_hidden,
    load_block,
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
from specc.checkpoints.speculators_keys import read_speculators
from specc.contracts import DrafterBundle, ModelInfo
from specc.drafters.block import BlockConfig

name = "speculators-block"
METHODS = ("dflash", "dspark", "dflash2")
_TAPS = "aux_hidden_state_layer_ids"


def recognise(config: Mapping[str, Any], names: Set[str]) -> bool:
    return config.get("speculators_model_type") in METHODS and "dflash_config" not in config


def read(folder: Folder, target: ModelInfo) -> DrafterBundle:
    fields = Fields(folder.path, folder.config)
    method = fields.choice("speculators_model_type", METHODS)
    proposed, notes = read_speculators(fields, method, target)
    inner = fields.fields("transformer_layer_config")
    layer = read_layer(inner)
    layers, vocab = read_depth(inner), inner.integer("vocab_size", least=1)
    windows = read_windows(inner, layers)
    max_position = optional_integer(inner, "max_position_embeddings")
    inner.finish()
    target_hidden = fields.integer("target_hidden_size", layer.hidden, least=1)
    check_target_hidden(fields, target_hidden, target)
    # "Input of layer j" is "after j layers"; the default is speculators' own (methods.md 0.4).
    taps = fields.integers(_TAPS, [2, target.layers // 2, target.layers - 3])
    check_taps(fields, _TAPS, taps, target, 0)
    draft_vocab = fields.integer("draft_vocab_size", vocab, least=1)
    causal = _causal(fields, windows)
    config = BlockConfig(
        layer=layer,
        layers=layers,
        target_hidden=target_hidden,
        taps=taps,
        vocab=vocab,
        draft_vocab=draft_vocab,
        mask_token=read_mask_token(fields, vocab),
        block=fields.integer("block_size", 8, least=1),
        causal=causal,
        windows=windows,
        window_rule="speculators",
        sample_from_anchor=fields.flag("sample_from_anchor", method == "dspark"),
        markov=read_markov(fields) if method == "dspark" else None,
        confidence=read_confidence(fields, folder, with_markov=True) if method == "dspark" else None,
        convolution=read_convolution(fields, layer.hidden) if method == "dflash2" else None,
        selector=read_selector(fields, draft_vocab) if method == "dflash2" else None,
        max_position=max_position,
    )
    if method == "dflash2" and draft_vocab != vocab:
        raise fields.refuse(
            "draft_vocab_size", draft_vocab, f"{vocab}: DFlash 2 codebooks are indexed by target ids"
        )
    if config.confidence is not None and fields.has("sts_temperatures"):
        config = replace(
            config, confidence=replace(config.confidence, temperatures=_temperatures(fields, config.drafts))
        )
    if config.drafts < 1:
        raise fields.refuse("block_size", config.block, "at least 2: the anchor's row drafts nothing")
    fields.finish()
    found = bundle(folder, method, f"speculators-{method}", load_block(folder, config, target), notes)
    # Some files propose the block's rows, the anchor included: more than there are drafts is all of them.
    return replace(found, info=replace(found.info, proposed=proposed and min(proposed, config.drafts)))


def _temperatures(fields: Fields, drafts: int) -> tuple[float, ...]:
    """Read the confidence head's temperatures: one per draft position, as TensorRT-LLM names them."""
    found = fields.raw("sts_temperatures", None)
    right = isinstance(found, list) and len(found) == drafts
    if not right or not all(isinstance(t, int | float) and not isinstance(t, bool) and t > 0 for t in found):
        raise fields.refuse(
            "sts_temperatures", repr(found), f"{drafts} numbers above 0, one per draft position"
        )
    return tuple(float(t) for t in found)


def _causal(fields: Fields, windows: tuple[int | None, ...]) -> tuple[bool, ...]:
    """Layers with a window are causal unless the config says otherwise; it must say so if there are any."""
    if not any(windows):
        fields.raw("sliding_window_non_causal", None)
        return (False,) * len(windows)
    non_causal = fields.flag("sliding_window_non_causal")
    return tuple(window is not None and not non_causal for window in windows)
