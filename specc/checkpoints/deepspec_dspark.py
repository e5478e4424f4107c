"""DeepSpec's layout of DSpark (Qwen3DSparkModel): flat keys, copies of embedding and head.

Its own "DFlash" checkpoints are this model with ``markov_rank`` 0: they draft from the anchor's row, K =
block, so they are read as DFlash drafters of that alignment (methods.md 4.3).
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

from specc.checkpoints.block_weights import (
    bundle,
    check_taps,
    load_block,
    optional_integer,
    read_confidence,
    read_markov,
    read_mask_token,
    read_windows,
)
from specc.checkpoints.fields import Fields
from specc.checkpoints.layer_config import read_depth, read_layer
from specc.checkpoints.reading import Folder
from specc.contracts import DrafterBundle, ModelInfo
from specc.drafters.block import BlockConfig
from specc.errors import UnsupportedError

name = "deepspec-dspark"
_ARCHITECTURES = ("Qwen3DSparkModel", "Gemma4DSparkModel")


def recognise(config: Mapping[str, Any], names: Set[str]) -> bool:
    return any(item in _ARCHITECTURES for item in config.get("architectures") or ())


def read(folder: Folder, target: ModelInfo) -> DrafterBundle:
    if "Gemma4DSparkModel" in folder.config["architectures"]:
        raise UnsupportedError(
            f"{folder.path} holds a Gemma 4 DSpark drafter",
            ["its layers have sandwich norms, value norms and scalars, which specc does not compute yet"],
        )
    fields = Fields(folder.path, folder.config)
    layer, layers = read_layer(fields), read_depth(fields)
    windows = read_windows(fields, layers)
    if any(windows):
        raise fields.refuse(
            "layer_types", folder.config["layer_types"], "full_attention only: no windows in this layout"
        )
    if fields.integer("num_target_layers", target.layers) != target.layers:
        raise fields.refuse(
            "num_target_layers", folder.config["num_target_layers"], f"{target.layers}, the target's"
        )
    taps = tuple(index + 1 for index in fields.integers("target_layer_ids"))
    check_taps(fields, "target_layer_ids", taps, target, 1)
    vocab = fields.integer("vocab_size", least=1)
    markov = read_markov(fields)
    config = BlockConfig(
        layer=layer,
        layers=layers,
        target_hidden=target.hidden,
        taps=taps,
        vocab=vocab,
        draft_vocab=vocab,
        mask_token=read_mask_token(fields, vocab),
        block=fields.integer("block_size", least=1),
        causal=(False,) * layers,
        windows=windows,
        sample_from_anchor=True,
        markov=markov,
        confidence=read_confidence(fields, folder, with_markov=markov is not None),
        max_position=optional_integer(fields, "max_position_embeddings"),
    )
    fields.finish()
    method = "dspark"
    notes: tuple[str, ...] = ("embedding and head are the checkpoint's own copies",)
    if config.markov is None and config.confidence is None:
        method = "dflash"
        notes = (
            *notes,
            f"markov_rank is 0: a DFlash drafter that drafts from the anchor's row, {config.drafts} tokens",
        )
    return bundle(folder, method, name, load_block(folder, config, target), notes)
