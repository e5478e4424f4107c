"""A drafter to start from: sizes from the target, weights from the target wherever they fit.

A short run cannot find again what the target knows. Layers start as copies of the target's late layers,
``fc`` passes the last tap through, the head is the target's own rows, and the norms are the target's. The final
norm starts at a fraction of it: at full scale a drafter that knows nothing is sure of it, and its first steps go
into unlearning that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from specc.checkpoints import read_drafter
from specc.contracts import DrafterInfo
from specc.drafters.block import BlockConfig, BlockDrafter
from specc.drafters.convolution import ConvolutionConfig
from specc.drafters.eagle3 import Eagle3Config, Eagle3Drafter
from specc.drafters.layers import LayerConfig, RopeConfig
from specc.drafters.markov import ConfidenceConfig, MarkovConfig
from specc.drafters.selector import SelectorConfig
from specc.errors import InputError, UnknownNameError, UnsupportedError
from specc.models.decoder_layer import final_norm
from specc.models.info import embed_module, embed_transform, final_logit_transform, head_module
from specc.models.load import LoadedModel
from specc.models.paths import layer_paths
from specc.training.grow import add_layers, change_vocabulary, copies_head

_FIRST_SCALE = 0.2  # of the final norm; cross-entropy after 50 steps was 6.5 instead of 7.5 with it

METHODS = ("dspark", "eagle3", "dflash", "dflash2")


@dataclass(frozen=True)
class Sizes:
    """What the caller may choose of a drafter.

    Attributes:
        method: What drafts with it.
        layers: Decoder layers.
        block: Draft tokens that it is trained for (block methods).
        draft_vocab: Rows of its head; None = the target's whole vocabulary and head.
        markov_rank: DSpark's sequential head; 0 = none.
        selector_rank: DFlash 2's codebooks.
        taps: Target states read, each "after j layers"; None = three of them, spread.
        start: A drafter's folder to go on from; what it is made of is then its own, not as asked for here,
            but for more layers and another draft vocabulary.
    """

    method: str
    layers: int = 1
    block: int = 5
    draft_vocab: int | None = None
    markov_rank: int = 32
    selector_rank: int = 32
    taps: tuple[int, ...] | None = None
    start: str | None = None

    def resolved_taps(self, layers: int) -> tuple[int, ...]:
        """Return the taps: the ones given, else after 2 layers, half of them, and two before the last."""
        if self.taps is not None:
            return self.taps
        return tuple(dict.fromkeys(max(j, 0) for j in (min(2, layers - 2), layers // 2, layers - 2)))


@dataclass(frozen=True)
class TargetParts:
    """What training needs of the target, without running it."""

    embed: Callable[[Tensor], Tensor]
    head: Tensor
    transform: Callable[[Tensor], Tensor]
    norm: Tensor | None
    layers: tuple[nn.Module, ...]


def target_parts(target: LoadedModel) -> TargetParts:
    """Return the target's embedding, head, final norm and layers."""
    module = target.module
    embed, scale = embed_module(module), embed_transform(module)
    head = head_module(module)
    if getattr(head, "bias", None) is not None:
        raise UnsupportedError("this target cannot be trained for", ["its output head has a bias"])
    layers = tuple(module.get_submodule(p) for p in layer_paths(module, target.info.layers))
    weight: Any = head.weight
    return TargetParts(
        lambda ids: scale(embed(ids)),
        weight.detach(),
        final_logit_transform(module),
        getattr(final_norm(module), "weight", None),
        layers,
    )


def layer_config(target: LoadedModel) -> LayerConfig:
    """Return a drafter layer of the target's sizes."""
    info, config = target.info, target.info.config
    rope: Mapping[str, Any] = config.get("rope_parameters") or {}
    known = {"rope_theta": "theta", "rope_type": "type", "original_max_position_embeddings": "original_max_position",
             "partial_rotary_factor": "partial"}  # fmt: skip
    names = {f.name for f in fields(RopeConfig)}
    values = {known.get(k, k): v for k, v in rope.items() if known.get(k, k) in names}
    plain = values.get("type", "default") in ("default", "linear", "llama3", "yarn")
    turned = RopeConfig(**values) if plain else RopeConfig(theta=float(values.get("theta", 10000.0)))
    return LayerConfig(
        hidden=info.hidden,
        intermediate=int(config.get("intermediate_size") or 4 * info.hidden),
        heads=info.heads,
        kv_heads=info.kv_heads,
        head_dim=info.head_dim,
        eps=float(config.get("rms_norm_eps") or 1e-6),
        rope=turned,
        qk_norm=config.get("model_type") == "qwen3",
    )


def choose_vocabulary(counts: Tensor, size: int | None) -> Tensor | None:
    """Return the sorted target ids of the draft vocabulary: the commonest; ties and unseen ids by lowest id.

    Low ids are the early merges of a byte-pair vocabulary, so they are the likelier of the unseen ones.
    """
    if size is None or size >= len(counts):
        return None
    if size < 2:
        raise InputError("draft_vocab", size, "at least 2 tokens")
    return counts.argsort(descending=True, stable=True)[:size].sort().values


def choose_mask(target: LoadedModel, counts: Tensor) -> int:
    """Return an id that no text has: a special token without a role here, else the highest unseen id."""
    tokenizer, config = target.tokenizer, target.info.config
    roles: set[int] = set()
    for key in ("eos_token_id", "bos_token_id", "pad_token_id"):
        for source in (config, target.generation):
            value = source.get(key)
            roles |= set(value) if isinstance(value, list) else {value} if value is not None else set()
    special = sorted(getattr(tokenizer, "all_special_ids", None) or ())
    unseen = [i for i in special if i not in roles and i < len(counts) and not counts[i]]
    unseen += [i for i in range(len(counts) - 1, -1, -1) if i not in roles and not counts[i]][:1]
    if not unseen:
        raise UnsupportedError(
            "no mask token can be chosen", ["every id of the vocabulary occurs in the data"]
        )
    return int(unseen[0])


def make_drafter(
    sizes: Sizes, target: LoadedModel, counts: Tensor, seed: int
) -> tuple[DrafterInfo, nn.Module]:
    """Return a drafter with its facts, started from the target.

    Args:
        sizes: What to make.
        target: What it drafts for.
        counts: int64 [vocabulary], how often each id is in the training answers.
        seed: For the few weights that the target has no counterpart of.
    """
    if sizes.method not in METHODS:
        raise UnknownNameError("method to train", sizes.method, METHODS)
    if sizes.method == "dflash2" and sizes.draft_vocab is not None:
        raise InputError("draft_vocab", sizes.draft_vocab, "None for dflash2: its codebooks name target ids")
    if sizes.start is not None:
        return go_on_from(sizes, target, counts)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        ids = choose_vocabulary(counts, sizes.draft_vocab)
        if sizes.method == "eagle3":
            return _eagle3(sizes, target, ids)
        return _block(sizes, target, ids, choose_mask(target, counts))


def go_on_from(
    sizes: Sizes, target: LoadedModel, counts: Tensor | None = None
) -> tuple[DrafterInfo, nn.Module]:
    """Return the drafter in ``sizes.start``, ready to be trained further; its head stays as frozen as it was.

    Args:
        sizes: What to make; of its sizes only more layers and a draft vocabulary are heeded.
        target: What it drafts for.
        counts: int64 [vocabulary], how often each id is in the training answers: what a draft vocabulary
            that is asked for is chosen by. None = it stays.

    Raises:
        InputError: Taps were asked for that it does not read, or sizes that it cannot be brought to.
        ArtifactError, UnsupportedError: The folder holds no drafter of this method for this target.
    """
    assert sizes.start is not None
    bundle = read_drafter(sizes.start, target.info, sizes.method)
    info, module = bundle.info, bundle.module
    if sizes.taps is not None and tuple(sizes.taps) != info.taps:
        raise InputError("taps", sizes.taps, f"none, or those that {sizes.start} reads: {info.taps}")
    if isinstance(module.config, Eagle3Config) and not module.config.own_head:
        raise UnsupportedError(
            f"training {sizes.start} further",
            ["it has no head of its own, and EAGLE-3's objective is taken over one"],
            "Start from a drafter with a head, or leave start out: a new one begins with a copy of the target's.",
        )
    module, config = _resized(sizes, module, counts, target_parts(target).head)
    module.requires_grad_()
    if config.own_head:
        module.get_submodule("lm_head").requires_grad_(requires_grad=False)
    changed = replace(info, config=config, vocab=config.draft_vocab, layout="speculators")
    return replace(changed, name=f"{target.info.name}-{sizes.method}"), module


def _resized(sizes: Sizes, module: Any, counts: Tensor | None, head: Tensor) -> tuple[nn.Module, Any]:
    config = module.config
    if sizes.layers > config.layers:
        module = add_layers(module, sizes.layers)
    if counts is not None and sizes.draft_vocab is not None:
        copies = copies_head(module, head)
        if not copies:  # rows of another head are no rows of this one: the ids it has are all there are
            if sizes.draft_vocab > config.draft_vocab:
                raise InputError("draft_vocab", sizes.draft_vocab, f"at most {config.draft_vocab}: {sizes.start} has "
                                 "a head of its own, not rows of the target's")  # fmt: skip
            known = torch.full_like(counts, -1)
            ids = torch.arange(config.draft_vocab) if module.target_ids is None else module.target_ids
            known[ids] = counts[ids]
            counts = known
        chosen = choose_vocabulary(counts, sizes.draft_vocab)
        if chosen is not None:
            module = change_vocabulary(module, chosen, head if copies else None)
    return module, module.config


def _info(
    sizes: Sizes, target: LoadedModel, config: Any, taps: tuple[int, ...], mask: int | None
) -> DrafterInfo:
    return DrafterInfo(
        name=f"{target.info.name}-{sizes.method}",
        method=sizes.method,
        layout="speculators",
        hidden=config.hidden,
        target_hidden=target.info.hidden,
        vocab=config.draft_vocab,
        target_vocab=target.info.vocab,
        taps=taps,
        max_position=target.info.max_position,
        block=sizes.block,
        mask_token=mask,
        config=config,
    )


def _block(sizes: Sizes, target: LoadedModel, ids: Tensor | None, mask: int) -> tuple[DrafterInfo, nn.Module]:
    info = target.info
    taps = sizes.resolved_taps(info.layers)
    spark, second = sizes.method == "dspark", sizes.method == "dflash2"
    config = BlockConfig(
        layer=layer_config(target),
        layers=sizes.layers,
        target_hidden=info.hidden,
        taps=taps,
        vocab=info.vocab,
        draft_vocab=info.vocab if ids is None else len(ids),
        mask_token=mask,
        block=sizes.block if spark else sizes.block + 1,
        causal=(False,) * sizes.layers,
        windows=(None,) * sizes.layers,
        window_rule="speculators",
        sample_from_anchor=spark,
        own_head=ids is not None,
        maps_ids=ids is not None,
        max_position=info.max_position,
        markov=MarkovConfig("vanilla", sizes.markov_rank) if spark and sizes.markov_rank else None,
        confidence=ConfidenceConfig(with_markov=sizes.markov_rank > 0) if spark else None,
        convolution=ConvolutionConfig(16 if info.hidden % 16 == 0 else 1, 2) if second else None,
        selector=SelectorConfig(sizes.selector_rank, 16) if second else None,
    )
    drafter = BlockDrafter(config)
    parts = target_parts(target)
    drafter.rotary.inverse = drafter.rotary.inverse.to(parts.head.device)
    with torch.no_grad():
        _pass_last_tap(drafter.fc, info.hidden)
        _start_block_layers(drafter, parts)
        _start_ends(drafter, parts, ids)
        if config.markov is not None:
            drafter.markov_head.markov_w1.weight.normal_(std=0.02)
            drafter.markov_head.markov_w2.weight.zero_()
        if config.confidence is not None:
            drafter.confidence_head.proj.weight.zero_()
        if config.selector is not None:
            drafter.candidate_selector.predecessor_codebook.normal_(std=0.1)
    return _info(sizes, target, config, taps, mask), drafter


def _start_block_layers(drafter: BlockDrafter, parts: TargetParts) -> None:
    """Copy the layers from the one that reads the last tap on: its context K/V are then the target's own."""
    first = min(drafter.config.taps[-1], len(parts.layers) - drafter.config.layers)
    width = drafter.key_value.out_features // (2 * drafter.config.layers)
    for index, layer in enumerate(drafter.blocks):
        theirs = dict(parts.layers[first + index].named_parameters())
        for name, value in layer.named_parameters():
            source = theirs.get(f"self_attn.{name}", theirs.get(name))
            if source is not None and source.shape == value.shape:
                value.copy_(source)
        for place, which in ((2 * index, "k_proj"), (2 * index + 1, "v_proj")):
            source = theirs.get(f"self_attn.{which}.weight")
            if source is not None and source.shape == (width, drafter.config.hidden):
                drafter.key_value.weight[place * width : (place + 1) * width].copy_(source)
    norm = dict(parts.layers[first].named_parameters()).get("input_layernorm.weight")
    if norm is not None and norm.shape == drafter.hidden_norm.weight.shape:
        drafter.hidden_norm.weight.copy_(norm)


def _start_ends(drafter: Any, parts: TargetParts, ids: Tensor | None) -> None:
    if parts.norm is not None and parts.norm.shape == drafter.norm.weight.shape:
        drafter.norm.weight.copy_(parts.norm * _FIRST_SCALE)
    if ids is not None:
        drafter.target_ids.copy_(ids)
    if drafter.config.own_head:
        drafter.lm_head.weight.copy_(parts.head if ids is None else parts.head[ids])
        drafter.lm_head.weight.requires_grad_(False)  # a frozen copy, as in the released recipes


def _pass_last_tap(fc: nn.Linear, hidden: int) -> None:
    """Make a projection of concatenated taps return the last of them, with a trace of the others."""
    fc.weight.normal_(std=1e-4)
    fc.weight[:, -hidden:] += torch.eye(fc.weight.shape[0], hidden)


def _eagle3(sizes: Sizes, target: LoadedModel, ids: Tensor | None) -> tuple[DrafterInfo, nn.Module]:
    info = target.info
    taps = sizes.resolved_taps(info.layers)
    config = Eagle3Config(
        layer=replace(layer_config(target), qk_norm=False),
        target_hidden=info.hidden,
        taps=len(taps),
        vocab=info.vocab,
        draft_vocab=info.vocab if ids is None else len(ids),
        layers=sizes.layers,
        own_head=True,
        maps_ids=ids is not None,
        max_position=info.max_position,
    )
    drafter = Eagle3Drafter(config)
    parts = target_parts(target)
    with torch.no_grad():
        _pass_last_tap(drafter.fc, info.hidden)
        first = min(taps[-1], len(parts.layers) - config.layers)
        for index, layer in enumerate(drafter.layers):
            _start_eagle3_layer(layer, dict(parts.layers[first + index].named_parameters()), info.hidden)
        _start_ends(drafter, parts, ids)
    return _info(sizes, target, config, taps, None), drafter


def _start_eagle3_layer(layer: nn.Module, theirs: Mapping[str, Tensor], hidden: int) -> None:
    """Copy a layer; where it reads [embedding, feature], the feature's half is the target's."""
    for name, value in layer.named_parameters():
        source = theirs.get(name)
        if name == "hidden_norm.weight":
            source = theirs.get("input_layernorm.weight")
        if source is None:
            continue
        if source.shape == value.shape:
            value.copy_(source)
        elif value.dim() == 2 and value.shape == (source.shape[0], 2 * hidden):
            value[:, :hidden].normal_(std=1e-3)
            value[:, hidden:].copy_(source)
