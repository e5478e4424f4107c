"""Build a block drafter (DFlash, DSpark, DFlash 2) from a folder: what its layouts have in common."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from specc.checkpoints.fields import Fields
from specc.checkpoints.reading import Folder
from specc.checkpoints.skeleton import skeleton
from specc.checkpoints.vocabulary import read_draft_ids
from specc.contracts import DrafterBundle, DrafterInfo, ModelInfo
from specc.drafters.block import BlockConfig, BlockDrafter
from specc.drafters.convolution import ConvolutionConfig
from specc.drafters.markov import MARKOV_TYPES, ConfidenceConfig, MarkovConfig
from specc.drafters.selector import SelectorConfig

SLIDING, FULL = "sliding_attention", "full_attention"
_IN_ATTENTION = ("q_proj", "o_proj", "q_norm", "k_norm")  # kept under ``self_attn`` in every layout


def checkpoint_name(name: str) -> str:
    """Return the name that the layouts give to a parameter of `BlockDrafter` (key_value aside)."""
    parts = name.split(".")
    if parts[0] == "layers" and parts[2] in _IN_ATTENTION:
        parts.insert(2, "self_attn")
    return ".".join(parts)


def check_taps(fields: Fields, key: str, taps: tuple[int, ...], target: ModelInfo, shift: int) -> None:
    """Refuse taps that the target does not have; ``shift`` is what was added to the layout's numbers."""
    if not taps:
        raise fields.refuse(key, "no taps", "the layers to tap")
    for tap in taps:
        if not 0 <= tap < target.layers:
            last = (
                ""
                if tap != target.layers
                else ("; some read the state after the last layer before the final norm, some after it")
            )
            raise fields.refuse(
                key,
                tap - shift,
                f"{-shift} to {target.layers - 1 - shift}: the target has {target.layers} layers{last}",
            )


def check_target_hidden(fields: Fields, hidden: int, target: ModelInfo) -> None:
    if hidden != target.hidden:
        raise fields.refuse(
            "target_hidden_size", hidden, f"{target.hidden}, the hidden size of {target.name}"
        )


def read_mask_token(fields: Fields, vocab: int) -> int:
    token = fields.integer("mask_token_id")
    if token >= vocab:
        raise fields.refuse("mask_token_id", token, f"an id below the vocabulary size, {vocab}")
    return token


def read_windows(fields: Fields, layers: int, size: int | None = None) -> tuple[int | None, ...]:
    """Return each layer's sliding window, or None; ``size`` overrides ``sliding_window``."""
    if fields.has("layer_types"):
        kinds = fields.strings("layer_types")
    else:
        if fields.flag("use_sliding_window", False):
            raise fields.refuse(
                "layer_types", "no such key", "a kind for each layer, since use_sliding_window is true"
            )
        kinds = (FULL,) * layers
    if len(kinds) != layers or not {*kinds} <= {SLIDING, FULL}:
        raise fields.refuse("layer_types", repr(kinds), f"{layers} of {SLIDING} and {FULL}")
    fields.raw("sliding_window", None)
    if SLIDING in kinds and size is None:
        size = fields.integer("sliding_window", least=1)
    return tuple(size if kind == SLIDING else None for kind in kinds)


def read_markov(fields: Fields) -> MarkovConfig | None:
    """Read the sequential head; rank 0 means there is none."""
    rank = fields.integer("markov_rank", 0)
    kind = fields.choice("markov_head_type", MARKOV_TYPES, "vanilla")
    return MarkovConfig(kind, rank) if rank else None  # type: ignore[arg-type]  # choice() checked it


def read_confidence(fields: Fields, folder: Folder, with_markov: bool) -> ConfidenceConfig | None:
    """Read the confidence head; ``with_markov`` is the layout's default of what it reads."""
    with_markov = fields.flag("confidence_head_with_markov", with_markov)
    if not fields.flag("enable_confidence_head", "confidence_head.proj.weight" in folder.names):
        return None
    return ConfidenceConfig(with_markov, bias="confidence_head.proj.bias" in folder.names)


def read_convolution(fields: Fields, hidden: int) -> ConvolutionConfig:
    group = fields.integer("conv_group_size", least=1)
    if hidden % group:
        raise fields.refuse("conv_group_size", group, f"a divisor of the hidden size, {hidden}")
    return ConvolutionConfig(group, fields.integer("conv_kernel_size", least=1))


def read_selector(fields: Fields, vocab: int) -> SelectorConfig:
    top_k = fields.integer("selector_top_k", least=1)
    if top_k > vocab:
        raise fields.refuse("selector_top_k", top_k, f"at most the vocabulary size, {vocab}")
    return SelectorConfig(fields.integer("selector_rank", least=1), top_k)


def load_block(
    folder: Folder, config: BlockConfig, target: ModelInfo, rename: Mapping[str, str] | None = None
) -> BlockDrafter:
    """Return the drafter with every tensor loaded, in the target's dtype.

    Args:
        folder: Where the tensors are.
        config: What the config says; own_embed, own_head, maps_ids and mask_embedding are decided here, by
            what is in the files.
        target: The target whose embedding and head fill in for absent ones.
        rename: Names that this layout spells its own way.
    """
    names = folder.names
    config = replace(
        config,
        own_embed="embed_tokens.weight" in names,
        own_head="lm_head.weight" in names,
        mask_embedding="mask_embedding" in names,
    )
    for name, own, shape in (
        ("embed_tokens.weight", config.own_embed, [target.vocab, target.hidden]),
        ("lm_head.weight", config.own_head, [target.vocab, target.hidden]),
    ):
        rows = config.draft_vocab if name.startswith("lm") else config.vocab
        if not own and [rows, config.hidden] != shape:
            raise folder.refuse(
                name,
                "no such tensor",
                f"a tensor {[rows, config.hidden]}: the target's is {shape} and cannot fill in",
            )
    if config.own_embed and not config.own_head and folder.config.get("tie_word_embeddings"):
        raise folder.refuse(
            "lm_head.weight", "no such tensor, and tie_word_embeddings is true", "a head of its own"
        )
    _check_fusion(folder, config, rename or {})
    ids = read_draft_ids(folder, config.draft_vocab, config.vocab)
    drafter = skeleton(folder, BlockDrafter, replace(config, maps_ids=ids is not None))
    weights: dict[str, Tensor] = {}
    for name, value in drafter.state_dict().items():
        if name == "target_ids":
            assert ids is not None
            weights[name] = ids
        elif name.startswith("key_value."):
            weights[name] = _fused(folder, config, name.removeprefix("key_value.")).to(target.dtype)
        else:
            theirs = (rename or {}).get(name, checkpoint_name(name))
            weights[name] = folder.take(theirs, tuple(value.shape)).to(target.dtype)
    drafter.load_state_dict(weights, assign=True)
    return drafter.eval().requires_grad_(False)


def _check_fusion(folder: Folder, config: BlockConfig, rename: Mapping[str, str]) -> None:
    name = rename.get("fc.weight", "fc.weight")
    if name not in folder.names:
        return
    found = list(folder.shape(name))
    if found[-1] != len(config.taps) * config.target_hidden:
        raise folder.refuse(
            name,
            f"shape {found}",
            f"[{config.hidden}, {len(config.taps) * config.target_hidden}]: the config lists "
            f"{len(config.taps)} taps, and the target's states are {config.target_hidden} wide",
        )


def _fused(folder: Folder, config: BlockConfig, part: str) -> Tensor:
    """Return all layers' key and value projections below each other."""
    width = config.layer.kv_heads * config.layer.head_dim
    shape = (width, config.hidden) if part == "weight" else (width,)
    return torch.cat(
        [
            folder.take(f"layers.{index}.self_attn.{which}.{part}", shape)
            for index in range(config.layers)
            for which in ("k_proj", "v_proj")
        ]
    )


def describe(name: str, method: str, layout: str, config: BlockConfig) -> DrafterInfo:
    """Return the facts of a block drafter, for `Method.reject` and `write_drafter`."""
    return DrafterInfo(
        name=name,
        method=method,
        layout=layout,
        hidden=config.hidden,
        target_hidden=config.target_hidden,
        vocab=config.draft_vocab,
        target_vocab=config.vocab,
        taps=config.taps,
        max_position=config.max_position,
        block=config.drafts,
        mask_token=config.mask_token,
        config=config,
    )


def bundle(
    folder: Folder, method: str, layout: str, drafter: BlockDrafter, notes: tuple[str, ...] = ()
) -> DrafterBundle:
    """Return the drafter with its facts; refuses tensors nobody read."""
    config = drafter.config
    info = describe(folder.path.name, method, layout, config)
    shared = [part for part, own in (("embedding", config.own_embed), ("head", config.own_head)) if not own]
    if shared:
        notes = (*notes, f"the target's {' and '.join(shared)} fill in: the checkpoint has none")
    if any(config.windows):
        notes = (*notes, f"sliding windows are read as {config.window_rule} reads them")
    return DrafterBundle(info, drafter, unused=folder.finish(), notes=notes)


def optional_integer(fields: Fields, key: str) -> int | None:
    return fields.integer(key, least=1) if fields.has(key) else None


def nested(fields: Fields, key: str) -> Fields:
    """Return the object ``key``, or an empty one if it is absent."""
    empty: dict[str, Any] = {}
    return fields.fields(key) if fields.has(key) else Fields(fields.path, empty, f"{key}.")
