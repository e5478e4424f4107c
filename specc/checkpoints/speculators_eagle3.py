"""The speculators layout of EAGLE-3: flags at the top, the layer in ``transformer_layer_config``."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

from specc.checkpoints.eagle3_weights import (
    bundle,
    check_norms,
    check_taps,
    check_target_hidden,
    default_taps,
    load_eagle3,
)
from specc.checkpoints.fields import Fields
from specc.checkpoints.layer_config import read_depth, read_layer, refuse_windows
from specc.checkpoints.reading import Folder
from specc.checkpoints.speculators_keys import read_speculators
from specc.contracts import DrafterBundle, ModelInfo
from specc.drafters.eagle3 import Eagle3Config

name = "speculators-eagle3"
_TAPS = "eagle_aux_hidden_state_layer_ids"


def recognise(config: Mapping[str, Any], names: Set[str]) -> bool:
    return config.get("speculators_model_type") == "eagle3" and "mask_hidden" not in names


def read(folder: Folder, target: ModelInfo) -> DrafterBundle:
    fields = Fields(folder.path, folder.config)
    block, notes = read_speculators(fields, "eagle3", target)
    inner = fields.fields("transformer_layer_config")
    layer = read_layer(inner)
    refuse_windows(inner)
    layers, vocab = read_depth(inner, 1), inner.integer("vocab_size", least=1)
    max_position = (
        inner.integer("max_position_embeddings", least=1) if inner.has("max_position_embeddings") else None
    )
    inner.finish()
    target_hidden = fields.integer("target_hidden_size", layer.hidden, least=1)
    check_target_hidden(fields, target_hidden, target)
    # "Input of layer j" is "after j layers" (methods.md 0.4).
    taps = fields.integers(_TAPS) if fields.has(_TAPS) else default_taps(fields, target)
    notes += check_taps(fields, _TAPS, taps, target)
    config = Eagle3Config(
        layer=layer,
        layers=layers,
        target_hidden=target_hidden,
        taps=len(taps),
        vocab=vocab,
        draft_vocab=fields.integer("draft_vocab_size", vocab, least=1),
        norm_before_residual=fields.flag("norm_before_residual", False),
        norm_before_fc=fields.flag("norm_before_fc", False),
        fc_norm=fields.flag("fc_norm", False),
        carry="post" if fields.flag("norm_output", False) else "pre",
        max_position=max_position,
    )
    check_norms(fields, config)
    fields.finish()
    config, drafter = load_eagle3(folder, config, _TAPS, {}, target)
    return bundle(folder, name, config, drafter, taps, block, notes, target)
