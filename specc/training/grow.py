"""A finished drafter in other sizes, saying what it said: more layers, other words.

A new layer adds nothing at first, because what it would add is multiplied by zero; training finds a use for it
(the zero start of residual branches, as in Net2Net's identity layers). In another draft vocabulary the ids
that stay keep their rows and logits.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from specc.drafters.block import BlockDrafter
from specc.drafters.eagle3 import Eagle3Drafter
from specc.errors import InputError

Growing = BlockDrafter | Eagle3Drafter


def add_layers(drafter: Growing, layers: int) -> Growing:
    """Return the drafter with ``layers`` layers; the new ones are copies of its last that add nothing yet.

    Raises:
        InputError: It has more layers than that.
    """
    if layers < drafter.config.layers:
        raise InputError("layers", layers, f"at least the {drafter.config.layers} that the drafter has")
    return _add_block(drafter, layers) if isinstance(drafter, BlockDrafter) else _add_eagle3(drafter, layers)


def _copied(name: str, value: Tensor) -> Tensor:
    """Return a new layer's weight: the old one's, or zeros for what is added to the residual."""
    adds = name.split(".")[-2] in ("o_proj", "down_proj")
    return torch.zeros_like(value) if adds else value


def _add_eagle3(drafter: Eagle3Drafter, layers: int) -> Eagle3Drafter:
    """Add layers; a copy of the first, which reads [embedding, feature], keeps the half that reads the feature."""
    old = drafter.config
    deeper = Eagle3Drafter(replace(old, layers=layers))
    state = drafter.state_dict()
    for index in range(old.layers, layers):
        for name, value in drafter.layers[-1].state_dict().items():
            if name == "hidden_norm.weight":
                continue
            kept = value
            if old.layers == 1 and name == "input_layernorm.weight":
                kept = drafter.layers[-1].state_dict()["hidden_norm.weight"]
            elif value.dim() == 2 and value.shape[1] == 2 * old.hidden and ".self_attn." in f".{name}":
                kept = value[:, old.hidden :]
            state[f"layers.{index}.{name}"] = _copied(name, kept)
    deeper.load_state_dict(state)
    return deeper


def _add_block(drafter: BlockDrafter, layers: int) -> BlockDrafter:
    old = drafter.config
    more = layers - old.layers
    config = replace(
        old,
        layers=layers,
        causal=(*old.causal, *old.causal[-1:] * more),
        windows=(*old.windows, *old.windows[-1:] * more),
    )
    wider = BlockDrafter(config)
    state = drafter.state_dict()
    for index in range(old.layers, layers):
        for name, value in drafter.layers[-1].state_dict().items():
            state[f"layers.{index}.{name}"] = _copied(name, value)
    for name in ("key_value.weight", "key_value.bias"):
        if name in state:
            width = len(state[name]) // old.layers
            state[name] = torch.cat([state[name], *[state[name][-width:]] * more])
    wider.load_state_dict(state)
    return wider


def change_vocabulary(drafter: Any, ids: Tensor, head: Tensor | None = None) -> Any:
    """Return the drafter with the target ids ``ids``, int64 [rows] ascending, for its draft vocabulary.

    Args:
        drafter: Any with a head of its own.
        ids: The ids to keep or to take up.
        head: [vocabulary, hidden], the target's head: rows of ids that the drafter has none of. DSpark's
            sequential head says nothing of those yet. None = all ids must be the drafter's.

    Raises:
        InputError: It has no draft vocabulary of its own, or not all of those ids.
    """
    kept = drafter.target_ids
    if kept is None or not drafter.config.own_head:
        raise InputError("draft_vocab", len(ids), "none: the drafter uses the target's head and vocabulary")
    rows = torch.searchsorted(kept, ids).clamp(max=len(kept) - 1)
    known = kept[rows] == ids
    if head is None and not known.all():
        raise InputError("draft_vocab", ids[~known][:5].tolist(), "ids that the drafter has a row for")
    changed = type(drafter)(replace(drafter.config, draft_vocab=len(ids)))
    state = dict(drafter.state_dict())
    for name in ("lm_head.weight", "markov_head.markov_w2.weight"):
        if name in state:
            theirs = (
                head[ids]
                if head is not None and name == "lm_head.weight"
                else torch.zeros_like(state[name][:1])
            )
            state[name] = torch.where(known[:, None], state[name][rows], theirs.to(state[name]))
    state["target_ids"] = ids
    changed.load_state_dict(state)
    return changed


def copies_head(drafter: Any, head: Tensor) -> bool:
    """Return whether a drafter's head is the target's rows ``head`` [vocabulary, hidden], as bfloat16 holds them."""
    if drafter.target_ids is None or not drafter.config.own_head:
        return False
    own = drafter.lm_head.weight
    if own.shape[1] != head.shape[1]:
        return False
    return torch.equal(own.to(torch.bfloat16), head[drafter.target_ids].to(own.device, torch.bfloat16))
