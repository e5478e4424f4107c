"""SpecForge's EAGLE-3 layout: a flat config of architecture LlamaForCausalLMEagle3, ``midlayer.*`` tensors.

SafeAILab's older layout (`safeai_eagle3`) is the same without the norm flags and mostly without tap ids.
"""

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
from specc.contracts import DrafterBundle, ModelInfo
from specc.drafters.eagle3 import Eagle3Config

name = "specforge-eagle3"
ARCHITECTURE = "LlamaForCausalLMEagle3"
_TAPS = "eagle_aux_hidden_state_layer_ids"


def looks_flat(config: Mapping[str, Any], names: Set[str]) -> bool:
    """Return whether this is a flat EAGLE-3 config with EAGLE-3's first layer."""
    if "speculators_model_type" in config or "dflash_config" in config or "mask_hidden" in names:
        return False
    bare = {item.removeprefix("model.") for item in names}
    first = any(item.startswith("midlayer.") for item in bare) or "layers.0.hidden_norm.weight" in bare
    return first or ARCHITECTURE in (config.get("architectures") or ())


def recognise(config: Mapping[str, Any], names: Set[str]) -> bool:
    return looks_flat(config, names) and ARCHITECTURE in (config.get("architectures") or ())


def read(folder: Folder, target: ModelInfo) -> DrafterBundle:
    return read_flat(folder, target, name, has_norm_flags=True)


def read_flat(folder: Folder, target: ModelInfo, layout: str, has_norm_flags: bool) -> DrafterBundle:
    """Read either flat layout; without ``has_norm_flags`` the keys of the norm variants are unknown keys."""
    fields = Fields(folder.path, folder.config)
    layer = read_layer(fields)
    refuse_windows(fields)
    taps, taps_key = _taps(fields, target)
    target_hidden = fields.integer("target_hidden_size", layer.hidden, least=1)
    check_target_hidden(fields, target_hidden, target)
    notes = check_taps(fields, taps_key, taps, target)
    if has_norm_flags:
        notes += _norm_output(fields)
    vocab = fields.integer("vocab_size", least=1)
    limit = (
        fields.integer("max_position_embeddings", least=1) if fields.has("max_position_embeddings") else None
    )
    config = Eagle3Config(
        layer=layer,
        layers=read_depth(fields, 1),
        target_hidden=target_hidden,
        taps=len(taps),
        vocab=vocab,
        draft_vocab=fields.integer("draft_vocab_size", vocab, least=1),
        fc_bias=fields.flag("bias", False),
        norm_before_residual=has_norm_flags and fields.flag("norm_before_residual", False),
        norm_before_fc=has_norm_flags and fields.flag("norm_before_fc", False),
        fc_norm=has_norm_flags and fields.flag("fc_norm", False),
        max_position=limit,
    )
    check_norms(fields, config)
    # The head that is used is the tensor lm_head.weight, whatever this copy of the target's flag says.
    fields.raw("tie_word_embeddings", None)
    fields.finish()
    config, drafter = load_eagle3(folder, config, taps_key, _rename(folder.names), target)
    return bundle(folder, layout, config, drafter, taps, None, notes, target)


def _norm_output(fields: Fields) -> tuple[str, ...]:
    if not fields.flag("norm_output", True):
        raise fields.refuse(
            "norm_output",
            False,
            "true or absent: SpecForge then leaves out the norm before the head, other "
            "writers mean that the hidden is carried before the norm",
        )
    if not fields.has("norm_output"):
        return ()
    return ("norm_output is read as SpecForge means it: norm before the head, hidden carried before it",)


def _rename(names: Set[str]) -> dict[str, str]:
    """Return the module's name prefixes -> the file's: ``midlayer.`` and ``model.`` are both optional."""
    prefix = "model." if any(item.startswith("model.") for item in names) else ""
    first = "midlayer." if any(item.startswith(f"{prefix}midlayer.") for item in names) else "layers.0."
    rename = {"layers.0.": prefix + first}
    for part in ("layers.", "embed_tokens.", "fc.", "fc_norm.", "input_norm.", "norm.", "lm_head."):
        # A head often stays outside ``model.``.
        rename[part] = prefix + part if any(item.startswith(prefix + part) for item in names) else part
    return rename


def _taps(fields: Fields, target: ModelInfo) -> tuple[tuple[int, ...], str]:
    """Return the taps, "after j layers" (this layout's ids are that already), and the key they come from."""
    taps, where = (fields.integers(_TAPS) if fields.has(_TAPS) else None), _TAPS
    if fields.has("eagle_config"):
        inner = fields.fields("eagle_config")
        if not inner.flag("use_aux_hidden_state", True):
            raise inner.refuse(
                "use_aux_hidden_state", False, "true: reading only the last hidden state is not EAGLE-3"
            )
        if inner.has(_TAPS):
            nested = inner.integers(_TAPS)
            if taps is not None and nested != taps:
                raise inner.refuse(_TAPS, list(nested), f"the same as at the top level, {list(taps)}")
            taps, where = nested, f"eagle_config.{_TAPS}"
        inner.finish()
    return (default_taps(fields, target) if taps is None else taps), where
