"""The speculators layout of MTP: a module ``mtp_layers.0.``, its layer in ``transformer_layer_config``."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import replace
from typing import Any

from specc.checkpoints.fields import Fields
from specc.checkpoints.mtp_module import read_module, with_prefix
from specc.checkpoints.reading import Folder
from specc.checkpoints.speculators_keys import read_speculators
from specc.checkpoints.target_mtp import MIMO
from specc.contracts import DrafterBundle, ModelInfo

name = "speculators-mtp"
# MiMo's names in the order of `mtp.fc`, which its converter maps onto them: embedding first.
_NAMES = replace(
    with_prefix(MIMO, "mtp_layers.0."), embed_first=True, embed="embed_tokens.weight", head="lm_head.weight"
)


def recognise(config: Mapping[str, Any], names: Set[str]) -> bool:
    return config.get("speculators_model_type") == "mtp"


def read(folder: Folder, target: ModelInfo) -> DrafterBundle:
    fields = Fields(folder.path, folder.config)
    block, notes = read_speculators(fields, "mtp", target)
    modules = fields.integer("num_nextn_predict_layers", 1, least=1)
    if modules != 1:
        raise fields.refuse("num_nextn_predict_layers", modules, "1: several MTP modules are not supported")
    layer = fields.fields("transformer_layer_config")
    if (found := layer.integer("hidden_size", least=1)) != target.hidden:
        raise layer.refuse(
            "hidden_size", found, f"{target.hidden}, the hidden size of the target {target.name}"
        )
    if (found := layer.integer("vocab_size", least=1)) != target.vocab:
        raise layer.refuse("vocab_size", found, f"{target.vocab}, the vocabulary of the target {target.name}")
    # The layer's keys are transformers' own: its configuration class reads them all.
    fields.finish()
    return read_module(folder, name, _NAMES, layer.values, target, block=block, notes=notes)
