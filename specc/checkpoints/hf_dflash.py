"""transformers' own DFlash layout (MuseGlimmerAssistantModel): flat keys, features under ``encoder``."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

from specc.checkpoints.block_weights import (
    bundle,
    check_taps,
    load_block,
    optional_integer,
    read_mask_token,
    read_windows,
)
from specc.checkpoints.fields import Fields
from specc.checkpoints.layer_config import read_depth, read_layer
from specc.checkpoints.reading import Folder
from specc.contracts import DrafterBundle, ModelInfo
from specc.drafters.block import BlockConfig

name = "hf-dflash"
_MODEL_TYPE = "muse_glimmer_assistant"
_RENAME = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}


def recognise(config: Mapping[str, Any], names: Set[str]) -> bool:
    return config.get("model_type") == _MODEL_TYPE


def read(folder: Folder, target: ModelInfo) -> DrafterBundle:
    # Its decoder layer is qwen3's.
    fields = Fields(folder.path, {**folder.config, "model_type": "qwen3"})
    layer, layers = read_layer(fields), read_depth(fields)
    taps = tuple(index + 1 for index in fields.integers("target_layer_ids"))
    check_taps(fields, "target_layer_ids", taps, target, 1)
    vocab = target.vocab  # the config has none: embedding and head are the target's
    config = BlockConfig(
        layer=layer,
        layers=layers,
        target_hidden=target.hidden,
        taps=taps,
        vocab=vocab,
        draft_vocab=vocab,
        mask_token=read_mask_token(fields, vocab),
        block=fields.integer("block_size", least=2),
        causal=(False,) * layers,
        windows=read_windows(fields, layers),
        window_rule="transformers",
        max_position=optional_integer(fields, "max_position_embeddings"),
    )
    fields.finish()
    return bundle(folder, "dflash", name, load_block(folder, config, target, _RENAME))
