"""The operators of a step graph: attention over fixed caches, and writes into declared state.

Every mutation in a step graph goes through one of these, so a graph shows all it writes in its
schema (``Tensor(a!)``). They are opaque to tracing: a backend replaces their kernels, not the graph.
The implementations here are the reference. They run anywhere and never look at a length on the host
unless the tensors already are on the host.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specc.tree import MOST_DRAFTS

_LIB = torch.library.Library("specc", "DEF")

# attend: rows write their K/V into the caches, then each row reads cache rows first..last of its slot.
# An interval per row covers causal rows, sliding windows (of any rule) and bidirectional blocks alike,
# so one operator serves targets and every drafter. The last row of a cache is scratch: a row that writes
# there is garbage, reads nothing, and its output is zero.
# With ``path``, a row of a tree also reads cache row last + 1 + i where bit i of its path is set: its own and its
# ancestors', among rows of other branches.
_LIB.define(
    "attend(Tensor query, Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, "
    "Tensor slot, Tensor cache_row, Tensor first, Tensor last, float scale, "
    "float? softcap=None, Tensor? sinks=None, Tensor? path=None) -> Tensor"
)
# write_rows: cache[slot, :, cache_row] = value, for K/V that are stored without attending.
_LIB.define("write_rows(Tensor(a!) cache, Tensor value, Tensor slot, Tensor cache_row) -> ()")
# move_rows: cache[slot, :, target] = cache[slot, :, source], all read before any is written.
_LIB.define("move_rows(Tensor(a!) cache, Tensor slot, Tensor source, Tensor target) -> ()")
# put: buffer[slot, column] = value, for token histories and per-slot rings.
_LIB.define("put(Tensor(a!) buffer, Tensor value, Tensor slot, Tensor column) -> ()")
# store: state = value, whole.
_LIB.define("store(Tensor(a!) state, Tensor value) -> ()")
# grouped_mm: rows [rows, in], sorted by group, times their group's weight [groups, in, out]; ends [groups] are
# where each group's rows end. Rows behind the last end give zeros.
_LIB.define("grouped_mm(Tensor rows, Tensor weight, Tensor ends) -> Tensor")


def _visible(index: Tensor, first: Tensor, last: Tensor, path: Tensor | None) -> Tensor:
    """Return which cache rows each row reads, bool [rows, cache rows]."""
    visible = (index >= first[:, None]) & (index <= last[:, None])
    if path is None:
        return visible
    behind = index - last[:, None] - 1
    return visible | ((behind >= 0) & ((path[:, None] >> behind.clamp(0, MOST_DRAFTS)) & 1 > 0))


def _attend_slot(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    first: Tensor,
    last: Tensor,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
    path: Tensor | None,
) -> Tensor:
    """Attend rows of one slot: query [rows, heads, size], key and value [kv_heads, live, size]."""
    index = torch.arange(key.shape[1], device=key.device)
    visible = _visible(index, first, last, path)  # [rows, live]
    if path is not None:
        # Between the branches lie rows that nobody may see: they can hold anything, NaN included.
        unseen = ~visible.any(0)[:, None]
        key, value = key.masked_fill(unseen, 0.0), value.masked_fill(unseen, 0.0)
    if softcap is None and sinks is None:
        out = torch.nn.functional.scaled_dot_product_attention(
            query.transpose(0, 1)[None],
            key[None],
            value[None],
            attn_mask=visible[None, None],
            scale=scale,
            enable_gqa=key.shape[0] != query.shape[1],
        )
        return out[0].transpose(0, 1)
    groups = query.shape[1] // key.shape[0]
    rows = query.shape[0]
    grouped = query.view(rows, key.shape[0], groups, -1).permute(1, 2, 0, 3).flatten(1, 2)
    scores = (grouped @ key.transpose(-1, -2)).float().view(key.shape[0], groups, rows, -1) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        sink = sinks.float().view(key.shape[0], groups, 1, 1).expand(-1, -1, rows, 1)
        probs = torch.cat([scores, sink], dim=-1).softmax(-1)[..., :-1]
    else:
        probs = scores.softmax(-1)
    out = probs.to(value.dtype).flatten(1, 2) @ value
    return out.view(key.shape[0], groups, rows, -1).permute(2, 0, 1, 3).flatten(1, 2)


def _attend_host(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot: Tensor,
    cache_row: Tensor,
    first: Tensor,
    last: Tensor,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    path: Tensor | None = None,
) -> Tensor:
    """Run attend on the CPU, reading only live cache rows: lengths are already on the host here."""
    key_cache[slot, :, cache_row] = key
    value_cache[slot, :, cache_row] = value
    out = query.new_zeros(query.shape[0], query.shape[1], value.shape[2])
    scratch = key_cache.shape[2] - 1
    owners, rows_of = slot.tolist(), cache_row.tolist()
    live: dict[int, list[int]] = {}
    for row, (owner, at) in enumerate(zip(owners, rows_of, strict=True)):
        if at < scratch:
            live.setdefault(owner, []).append(row)
    for owner, rows in live.items():
        whole = rows[-1] - rows[0] + 1 == len(rows)
        pick = slice(rows[0], rows[-1] + 1) if whole else torch.tensor(rows)
        low, high = int(first[pick].min()), int(last[pick].max()) + 1
        if path is not None:
            high += int(path[pick].max()).bit_length()  # too far for some rows; never past the cache
            high = min(high, scratch)
        out[pick] = _attend_slot(
            query[pick],
            key_cache[owner, :, low:high],
            value_cache[owner, :, low:high],
            first[pick] - low,
            last[pick] - low,
            scale,
            softcap,
            sinks,
            None if path is None else path[pick],
        )
    return out


def _attend_device(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot: Tensor,
    cache_row: Tensor,
    first: Tensor,
    last: Tensor,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    path: Tensor | None = None,
) -> Tensor:
    """Run attend without any host read: every row sees its slot's whole cache through a mask."""
    key_cache[slot, :, cache_row] = key
    value_cache[slot, :, cache_row] = value
    keys, values = key_cache[slot].float(), value_cache[slot].float()  # [rows, kv_heads, cache, size]
    rows, groups = query.shape[0], query.shape[1] // key.shape[1]
    index = torch.arange(keys.shape[2], device=keys.device)
    visible = _visible(index, first, last, path)[:, None, None]
    # Rows nobody may see can hold anything, NaN included, and 0 * NaN is NaN.
    values = values.masked_fill(~visible[:, :, 0, :, None], 0.0)
    grouped = query.float().view(rows, key.shape[1], groups, -1)
    scores = torch.einsum("nhgd,nhrd->nhgr", grouped, keys) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        sink = sinks.float().view(1, key.shape[1], groups, 1).expand(rows, -1, -1, 1)
        probs = torch.cat([scores, sink], dim=-1).softmax(-1)[..., :-1]
    else:
        probs = scores.softmax(-1)
    out = torch.einsum("nhgr,nhrd->nhgd", probs, values)
    garbage = (cache_row == key_cache.shape[2] - 1)[:, None, None]
    return out.flatten(1, 2).masked_fill(garbage, 0.0).to(query.dtype)


def _write_rows(cache: Tensor, value: Tensor, slot: Tensor, cache_row: Tensor) -> None:
    cache[slot, :, cache_row] = value.to(cache.dtype)


def _move_rows(cache: Tensor, slot: Tensor, source: Tensor, target: Tensor) -> None:
    cache[slot, :, target] = cache[slot, :, source]


def _put(buffer: Tensor, value: Tensor, slot: Tensor, column: Tensor) -> None:
    buffer[slot, column] = value.to(buffer.dtype)


def _store(state: Tensor, value: Tensor) -> None:
    state.copy_(value)


def _grouped_mm_host(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Run grouped_mm on the CPU, a product per group that has rows."""
    out = rows.new_zeros(rows.shape[0], weight.shape[2])
    start = 0
    for group, end in enumerate(ends.tolist()):
        if end > start:
            torch.mm(rows[start:end], weight[group], out=out[start:end])
        start = max(start, end)
    return out


def _grouped_mm_device(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Run grouped_mm without any host read: every group sees all rows through a mask."""
    out = rows.new_zeros(rows.shape[0], weight.shape[2])
    group = torch.bucketize(torch.arange(rows.shape[0], device=rows.device), ends, right=True)
    for index in range(weight.shape[0]):
        out = torch.where((group == index)[:, None], rows @ weight[index], out)
    return out


def _grouped_mm_fake(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], weight.shape[2])


def _attend_fake(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot: Tensor,
    cache_row: Tensor,
    first: Tensor,
    last: Tensor,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    path: Tensor | None = None,
) -> Tensor:
    return query.new_empty(query.shape[0], query.shape[1], value.shape[2])


_LIB.impl("attend", _attend_host, "CPU")
_LIB.impl("attend", _attend_device, "CUDA")
_LIB.impl("grouped_mm", _grouped_mm_host, "CPU")
_LIB.impl("grouped_mm", _grouped_mm_device, "CUDA")
for _name, _kernel in (
    ("write_rows", _write_rows), ("move_rows", _move_rows), ("put", _put), ("store", _store),
):  # fmt: skip
    _LIB.impl(_name, _kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"specc::{_name}", lambda *_: None, lib=_LIB)
torch.library.register_fake("specc::attend", _attend_fake, lib=_LIB)
torch.library.register_fake("specc::grouped_mm", _grouped_mm_fake, lib=_LIB)

attend = torch.ops.specc.attend
write_rows = torch.ops.specc.write_rows
move_rows = torch.ops.specc.move_rows
put = torch.ops.specc.put
grouped_mm = torch.ops.specc.grouped_mm
store = torch.ops.specc.store

MUTATING = frozenset(
    getattr(torch.ops.specc, name).default for name in ("attend", "write_rows", "move_rows", "put", "store")
)
