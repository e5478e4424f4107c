"""MTP modules inside a target's own checkpoint, which transformers drops on load: three families of names.

- DeepSeek and GLM: ``model.layers.{L + m}.`` with enorm, hnorm, eh_proj, shared_head beside the layer's;
- Qwen3-Next and later: ``mtp.`` with fc, pre_fc_norm_embedding, pre_fc_norm_hidden, norm and layers.0;
- MiMo: ``model.mtp_layers.{m}.`` with token_layernorm, hidden_layernorm, final_layernorm and input_proj
  ([hidden, embedding]), beside the layer's names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Set
from typing import Any

from specc.checkpoints.mtp_module import OF_THE_TARGET, MtpNames, TargetNames, read_module, with_prefix
from specc.checkpoints.reading import Folder
from specc.contracts import DrafterBundle, ModelInfo

name = "target-mtp"
DEEPSEEK = MtpNames(
    layer="",
    norm_embed="enorm.weight",
    norm_hidden="hnorm.weight",
    project="eh_proj.weight",
    norm_out="shared_head.norm.weight",
    embed="embed_tokens.weight",
    head="shared_head.head.weight",
)
QWEN = MtpNames(
    layer="layers.0.",
    norm_embed="pre_fc_norm_embedding.weight",
    norm_hidden="pre_fc_norm_hidden.weight",
    project="fc.weight",
    norm_out="norm.weight",
    embed="embed_tokens.weight",
    head="lm_head.weight",
)
MIMO = MtpNames(
    layer="",
    norm_embed="token_layernorm.weight",
    norm_hidden="hidden_layernorm.weight",
    project="input_proj.weight",
    norm_out="final_layernorm.weight",
    embed_first=False,
)
_FAMILIES: tuple[tuple[re.Pattern[str], MtpNames], ...] = (
    (re.compile(r"^(?P<root>.*\blayers)\.(?P<module>\d+)\.eh_proj\.weight$"), DEEPSEEK),
    (re.compile(r"^(?P<root>mtp)\.fc\.weight$"), QWEN),
    (re.compile(r"^(?P<root>model\.mtp_layers)\.(?P<module>\d+)\.input_proj\.weight$"), MIMO),
)
_COUNTS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")


def recognise(config: Mapping[str, Any], names: Set[str]) -> bool:
    if "speculators_model_type" in config:
        return False
    return any(pattern.match(item) for item in names for pattern, _ in _FAMILIES)


def read(folder: Folder, target: ModelInfo) -> DrafterBundle:
    found = [
        (pattern, names) for pattern, names in _FAMILIES if any(pattern.match(item) for item in folder.names)
    ]
    if len(found) != 1:
        raise folder.refuse("MTP modules", "names of several families", "one family of MTP module names")
    pattern, names = found[0]
    matches = [match for item in sorted(folder.names) if (match := pattern.match(item))]
    prefixes = _prefixes(folder, names, matches, target)
    _check_config(folder, len(prefixes))
    for item in folder.names:
        if not item.startswith(tuple(prefixes)):
            folder.leave(item, OF_THE_TARGET)
        elif not item.startswith(prefixes[0]):
            folder.leave(item, "a later MTP module: only the first is run")
    notes: tuple[str, ...] = ()
    if len(prefixes) > 1:
        notes = (
            f"{len(prefixes)} MTP modules, one per draft token; only the first is used, so the block is 1",
        )
    embeds = [
        item
        for item in sorted(folder.names)
        if item.endswith("embed_tokens.weight") and not item.startswith(tuple(prefixes))
    ]
    root = embeds[0].removesuffix("embed_tokens.weight") if embeds else "model."
    inside = TargetNames(f"{root}embed_tokens.weight", "lm_head.weight", f"{root}norm.weight")
    config = {**folder.config, **dict(folder.config.get("text_config") or {})}
    return read_module(
        folder,
        name,
        with_prefix(names, prefixes[0]),
        config,
        target,
        modules=len(prefixes),
        block=1 if len(prefixes) > 1 else None,
        inside=inside,
        notes=notes,
    )


def _prefixes(folder: Folder, names: MtpNames, matches: list[re.Match[str]], target: ModelInfo) -> list[str]:
    """Return the prefix of each module's tensors, in module order; refuses gaps and unexpected places."""
    root = matches[0]["root"]
    if names is QWEN:
        layers = {item.split(".")[2] for item in folder.names if item.startswith("mtp.layers.")}
        if layers != {"0"}:
            raise folder.refuse("mtp.layers", sorted(layers), "one layer, 0: several are not supported")
        return ["mtp."]
    first = target.layers if names is DEEPSEEK else 0
    at = sorted(int(match["module"]) for match in matches)
    want = list(range(first, first + len(at)))
    if at != want or any(match["root"] != root for match in matches):
        raise folder.refuse(
            f"{root}.*.{names.project}", at, f"MTP modules at {want}: the target has {target.layers} layers"
        )
    return [f"{root}.{index}." for index in at]


def _check_config(folder: Folder, modules: int) -> None:
    config = {**folder.config, **dict(folder.config.get("text_config") or {})}
    for key in _COUNTS:
        if config.get(key) is not None and config[key] != modules:
            raise folder.refuse(key, config[key], f"{modules}, the number of MTP modules in the files")
    if config.get("mtp_hidden_states_first"):
        raise folder.refuse("mtp_hidden_states_first", True, "absent: this family's order is embedding first")
    if "chain_hidden_post_norm" in config:
        raise folder.refuse(
            "chain_hidden_post_norm", config["chain_hidden_post_norm"], "no such key: not supported"
        )
