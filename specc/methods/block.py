"""What DFlash, DSpark and DFlash 2 share: context K/V from target features, and one pass over a block.

The block's own K/V are written into the same caches at their positions, n - 1 and on. Nothing reads them
after the step: `observe` overwrites those of committed positions with the context's, and the next block the
rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from specc import ops
from specc.contracts import DrafterInfo, MethodContext, ModelInfo, Rows, TensorSpec
from specc.drafters.block import Attend, BlockConfig, BlockDrafter


def block_config(drafter: DrafterInfo) -> BlockConfig | None:
    """Return the drafter's configuration if it is a block drafter."""
    return drafter.config if isinstance(drafter.config, BlockConfig) else None


def reject_pair(
    method: str, target: ModelInfo, drafter: DrafterInfo | None, block: int, window: int | None
) -> tuple[str, ...]:
    """Return every reason why a block method cannot run this pair; empty when it can."""
    if drafter is None:
        return (f"{method} needs a drafter; give the folder of a {method} checkpoint of this target",)
    reasons = []
    config = block_config(drafter)
    if drafter.method != method or config is None:
        reasons.append(f"the drafter {drafter.name} is made for {drafter.method}, not for {method}")
    if block < 1:
        reasons.append(f"block is {block}; {method} drafts at least 1 token (plain is method='plain')")
    if window is not None and window < 1:
        reasons.append(f"draft_attention_window is {window}; at least 1, or None for all")
    if config is None:
        return tuple(reasons)
    if block > config.drafts:
        reasons.append(
            f"block is {block}; the drafter was trained to draft {config.drafts} tokens, and fewer work too"
        )
    if config.target_hidden != target.hidden:
        reasons.append(
            f"the drafter reads states of width {config.target_hidden}, the target's is {target.hidden}"
        )
    outside = [tap for tap in config.taps if not 0 <= tap < target.layers]
    if outside:
        reasons.append(
            f"the drafter taps the states after layers {outside}; the target has {target.layers}, and the "
            "state after its last layer is read before the final norm by some and after it by others"
        )
    if config.vocab != target.vocab:
        reasons.append(f"the drafter's vocabulary has {config.vocab} ids, the target's {target.vocab}")
    if not 0 <= config.mask_token < min(config.vocab, target.vocab):
        reasons.append(f"the mask token is {config.mask_token}, outside the vocabulary of {target.vocab} ids")
    shared = [part for part, own in (("embedding", config.own_embed), ("head", config.own_head)) if not own]
    if shared and config.hidden != target.hidden:
        reasons.append(
            f"the drafter uses the target's {' and '.join(shared)}, but its width is {config.hidden} and the "
            f"target's {target.hidden}"
        )
    return tuple(reasons)


def cache_specs(drafter: Any, slots: int, capacity: int) -> Mapping[str, TensorSpec]:
    """Declare the K/V of each layer, [slots, kv_heads, capacity + 1, head_dim]."""
    config: BlockConfig = drafter.config
    cache = TensorSpec((slots, config.layer.kv_heads, capacity + 1, config.layer.head_dim), drafter.dtype)
    return {f"{part}.{index}": cache for index in range(config.layers) for part in ("key", "value")}


def observe_features(context: MethodContext, rows: Rows) -> None:
    """Write every layer's context K/V of the rows; garbage rows go to the scratch row."""
    drafter: BlockDrafter = context.drafter
    assert rows.features is not None, "block drafters have taps"
    cache_row = rows.cache_row.clamp(max=context.capacity)
    for index, (key, value) in enumerate(
        drafter.context_key_value(drafter.context(rows.features), rows.position)
    ):
        ops.write_rows(context.state[f"key.{index}"], key, rows.slot, cache_row)
        ops.write_rows(context.state[f"value.{index}"], value, rows.slot, cache_row)


def run_block(context: MethodContext, window: int | None) -> tuple[Tensor, Tensor]:
    """Run the drafter over each slot's block [anchor, mask, mask, ...].

    Fewer drafts than trained make a shorter block: with bidirectional layers that is another (also lossless)
    proposal than the front of a whole block. Rows past the slot's capacity, or past the positions the drafter
    was made for, are garbage: no other row sees them and their drafts are not valid.

    Args:
        context: What the method sees.
        window: Context positions before the anchor that a row may see; None = what the drafter says.

    Returns:
        The outputs of the rows that draft [slots, block, hidden], and which drafts are valid, bool [slots,
        block].
    """
    drafter: BlockDrafter = context.drafter
    config = drafter.config
    rows = config.rows(context.block)
    limit = context.capacity if config.max_position is None else min(config.max_position, context.capacity)
    anchor = (context.length - 1).clamp(min=0)[:, None]  # [slots, 1]
    offset = torch.arange(rows, device=anchor.device)
    position = anchor + offset  # [slots, rows]
    inside = (position < limit) & context.running[:, None]
    end = (anchor + rows - 1).clamp(max=limit - 1)
    masks = torch.full_like(position[:, 1:], config.mask_token)
    embedded = drafter.embed(torch.cat([context.anchor[:, None], masks], dim=1), context.embed)
    hidden = drafter(
        embedded,
        position,
        _attend(context, position, context.cache_rows(position, inside), anchor, end, window),
    )
    drafting = slice(rows - context.block, None)
    predicted = context.length[:, None] + torch.arange(context.block, device=anchor.device)
    return hidden[:, drafting], inside[:, drafting] & (predicted < context.capacity)


def _attend(
    context: MethodContext,
    position: Tensor,
    cache_row: Tensor,
    anchor: Tensor,
    end: Tensor,
    window: int | None,
) -> Attend:
    config: BlockConfig = context.drafter.config
    slots, rows = position.shape
    slot = torch.arange(slots, device=position.device)[:, None].expand(-1, rows).reshape(-1)

    def attend(index: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        first, last = config.visible(index, position, anchor, end)
        if window is not None:
            first = torch.maximum(first, anchor - window)
        last = torch.minimum(last, end)
        out: Tensor = ops.attend(
            query.flatten(0, 1),
            key.flatten(0, 1),
            value.flatten(0, 1),
            context.state[f"key.{index}"],
            context.state[f"value.{index}"],
            slot,
            cache_row.flatten(),
            first.expand(-1, rows).flatten(),
            last.expand(-1, rows).flatten(),
            config.layer.scale,
        )
        return torch.unflatten(out, 0, (slots, rows))

    return attend
