"""The stages of one step as plain functions of named tensors: what is traced, stitched and run.

Names of a step graph's inputs: ``state.*`` (tokens, lengths, stops), ``cache.*`` (the target's K/V), ``method.*``
(the drafter's own state), ``setting.*`` (per-slot sampling settings), ``feed.*`` (prompt rows the host adds),
``target.*`` and ``drafter.*`` (weights). Values between stages: ``draft.*``, ``verify.*``, ``accept.*``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from specc.contracts import (
    STAGES,
    AcceptRule,
    Draft,
    Method,
    MethodContext,
    Proposal,
    Rows,
    Stage,
    TensorSpec,
)
from specc.errors import UnsupportedError
from specc.ops import move_rows, put, store
from specc.sampling import SamplingContext, is_sampled, process, settings_columns
from specc.sampling.accept import Accepted
from specc.sampling.accept import accept as accept_drafts
from specc.sampling.accept_tree import AcceptedPath, accept_tree, as_slots
from specc.sampling.draw import Drawer
from specc.tree import Tree, table

Values = Mapping[str, Tensor]

# Columns of the record that a step hands to the host, before the emitted tokens.
RECORD = ("count", "accepted", "drafted", "finish", "fault")
RUNNING, STOP, LENGTH = 0, 1, 2
MAX_EOS = 8  # end-of-sequence ids a slot can hold


@dataclass(frozen=True)
class StepKey:
    """Everything that makes one step graph differ from another of the same compiled object.

    ``block`` drafts per slot (0: none), ``feed`` prompt rows beside the slots' own, the accept ``rule`` ("mixed": each
    slot its own), the settings ``families`` in use, and what ``extras`` ("logits", "scores", "hidden") are outputs.
    ``part`` is the whole step; or, where the host judges the drafts, what comes before and what comes after that; or
    the target's rows alone, with drafts of the host's.
    """

    block: int
    feed: int
    rule: AcceptRule | Literal["mixed"]
    families: tuple[str, ...] = ()
    extras: tuple[str, ...] = ()
    part: Literal["whole", "verify", "commit", "target"] = "whole"

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages in this part of the step."""
        parts: dict[str, tuple[Stage, ...]] = {
            "whole": STAGES,
            "verify": ("draft", "verify"),
            "commit": ("commit",),
            "target": ("verify",),
        }
        return parts[self.part]

    def halves(self) -> tuple[StepKey, StepKey]:
        """Return the keys of the parts around a judgement on the host, which applies the settings itself."""
        kept = replace(self, families=("temperature",) if self.sampled else (), extras=())
        hidden = tuple(extra for extra in self.extras if extra == "hidden")
        return replace(kept, part="verify", extras=hidden), replace(kept, part="commit")

    @property
    def sampled(self) -> bool:
        """Whether any slot may sample; a greedy-only step holds no softmax and no noise."""
        return is_sampled(self.families)


@dataclass(frozen=True)
class Shape:
    """The sizes a compiled object is bound to."""

    slots: int
    capacity: int  # tokens a slot can hold
    vocab: int
    switch: int | None = None  # longer sequences use other rotary frequencies at every position (longrope)


@dataclass(frozen=True)
class Parts:
    """The callables a stage function uses, each taking the stage's named tensors first."""

    target: Callable[..., Mapping[str, Tensor]]
    drafter: Callable[[Values, Callable[[object], object]], object]
    embed: Callable[[Values, Tensor], Tensor]
    head: Callable[[Values, Tensor], Tensor]
    drafter_limit: int | None


def state_specs(shape: Shape) -> dict[str, TensorSpec]:
    """Return the spine's own state. Column ``capacity`` of the tokens is scratch."""
    slots = shape.slots
    return {
        "state.tokens": TensorSpec((slots, shape.capacity + 1), torch.int64),
        "state.length": TensorSpec((slots,), torch.int64),
        "state.prompt_length": TensorSpec((slots,), torch.int64),
        "state.reach": TensorSpec((slots,), torch.int64),
        "state.limit": TensorSpec((slots,), torch.int64),
        "state.running": TensorSpec((slots,), torch.bool),
        "state.fresh": TensorSpec(
            (slots,), torch.bool
        ),  # runs for the first time: its method has no context yet
        "state.eos": TensorSpec((slots, MAX_EOS), torch.int64),
        "state.seed": TensorSpec((slots,), torch.int64),
        "state.coupled": TensorSpec((slots,), torch.bool),
    }


def setting_specs(shape: Shape, families: tuple[str, ...]) -> dict[str, TensorSpec]:
    """Return the per-slot tensors that the families of settings read."""
    columns = settings_columns(families)
    return {f"setting.{name}": TensorSpec((shape.slots, *c.shape), c.dtype) for name, c in columns.items()}


def draft_stage(
    v: Values, key: StepKey, shape: Shape, method: Method, parts: Parts, tree: Tree | None = None
) -> dict[str, Tensor]:
    """Draft ``block`` tokens per slot: ``draft.tokens`` and the distributions they were drawn from.

    A slot does not draft in its first step, which reads the end of its prompt: so its text does not depend on
    whether other slots draft in that step.
    """
    if key.block == 0:
        return {}
    ready = v["state.running"] & ~v["state.fresh"]
    draw = Drawer(shape.vocab)
    if key.sampled:
        draw = Drawer(
            shape.vocab, v["setting.temperature"], v["state.seed"], v["state.length"], _rule(v, key)
        )

    def run(drafter: object) -> Draft:
        context = _context(v, key, shape, parts, drafter, draw)
        return method.draft(replace(context, running=ready, tree=tree))

    draft = parts.drafter(v, run)
    if not isinstance(draft, Draft) or not _is_draft(draft.tokens, (shape.slots, key.block)):
        made = draft.tokens if isinstance(draft, Draft) else draft
        found = f"{made.dtype} {list(made.shape)}" if isinstance(made, Tensor) else type(made).__name__
        raise UnsupportedError(
            f"method {method.name!r} cannot be run",
            [f"its draft is {'' if isinstance(draft, Draft) else 'no Draft but '}{found}"],
            f"Return a contracts.Draft of whole numbers [{shape.slots}, {key.block}], -1 where there is none.",
        )
    # A draft for a position the slot cannot hold has no row to be verified in.
    length = v["state.length"][:, None]
    # A tree's drafts stand in the cache one behind the other, never at less than their position.
    position = length + torch.arange(key.block, device=draft.tokens.device)
    fits = (position < shape.capacity) & ready[:, None]
    if shape.switch is not None:
        # Rows on both sides of the switch cannot share a cache: the scheduler feeds the slot again in between.
        fits = fits & ((position < shape.switch) | (length > shape.switch))
    out = {"draft.tokens": torch.where(fits, draft.tokens, -1)}
    if draft.proposal is not None and draft.drawn is not None:
        out |= {"draft.probs": draft.proposal.probs, "draft.drawn": draft.drawn}
        if draft.proposal.ids is not None:
            out["draft.ids"] = draft.proposal.ids
    if draft.confidence is not None:
        out["draft.confidence"] = draft.confidence
    return out


def _is_draft(tokens: object, shape: tuple[int, int]) -> bool:
    if not isinstance(tokens, Tensor) or tokens.shape != shape:
        return False
    return not tokens.is_floating_point() and tokens.dtype is not torch.bool


def verify_stage(
    v: Values, key: StepKey, shape: Shape, parts: Parts, tree: Tree | None = None
) -> dict[str, Tensor]:
    """Run the target on every slot's anchor and drafts, and on the rows the host feeds."""
    rows = _rows(v, key, shape, tree)
    wanted = torch.arange(shape.slots * (key.block + 1), device=rows.token.device)
    sees = {} if tree is None else {"last": rows.last, "path": rows.path}
    out = parts.target(
        v, rows.token, rows.slot, rows.position, rows.cache_row, rows.reach, logit_rows=wanted, **sees
    )
    found = {"verify.logits": out["logits"].view(shape.slots, key.block + 1, -1)}
    if "taps" in out:
        found["verify.taps"] = out["taps"]
    if "hidden" in key.extras:
        # Of a tree only the rows of the path that is kept are asked for, and accept knows which they are.
        name = "hidden" if tree is None else "verify.hidden"
        found[name] = out["hidden"].view(shape.slots, key.block + 1, -1)
    return found


def accept_stage(v: Values, key: StepKey, shape: Shape, tree: Tree | None = None) -> dict[str, Tensor]:
    """Keep the longest valid prefix of the drafts plus one token; cut at stops and caps."""
    length, running = v["state.length"], v["state.running"]
    draft = v.get("draft.tokens")
    if draft is None:
        draft = length.new_empty(shape.slots, 0)
    raw = v["verify.logits"].float()
    logits = raw
    if key.families:
        settings = {n.removeprefix("setting."): t for n, t in v.items() if n.startswith("setting.")}
        context = SamplingContext(
            tokens=v["state.tokens"],
            length=length,
            prompt_length=v["state.prompt_length"],
            draft=draft,
            settings=settings,
            eos=v["state.eos"],
            max_length=v["state.limit"],
        )
        if tree is None:
            logits = process(raw, context, key.families)
        else:
            rows = raw.flatten(0, 1)[:, None]
            logits = process(rows, as_slots(context, tree), key.families).view_as(raw)
    verdict = _verdict(v, key, draft, logits, raw, tree)
    count, finish = _stop(v, verdict.count + 1, verdict.tokens)
    kept = torch.arange(verdict.tokens.shape[1], device=count.device) < count[:, None]
    emitted = torch.where(kept, verdict.tokens, -1)
    columns = [
        count,
        torch.minimum(verdict.count, count),
        verdict.drafted * running,
        finish,
        (verdict.broken & running).long(),
    ]
    out = {
        "accept.count": count,
        "accept.finish": finish,
        "accept.emitted": emitted,
        "record": torch.cat([torch.stack(columns, 1), emitted], dim=1),
    }
    extras = {"logits": raw, "scores": logits}
    if isinstance(verdict, AcceptedPath):
        out["accept.path"] = verdict.path
        extras |= {"hidden": v["verify.hidden"]} if "hidden" in key.extras else {}
    for name, rows in extras.items():
        if name not in key.extras:
            continue
        out[name] = _along(rows, verdict.path) if isinstance(verdict, AcceptedPath) else rows
    return out


def _along(rows: Tensor, path: Tensor) -> Tensor:
    """Return the rows [slots, nodes, width] of a path's nodes, [slots, height + 1, width]."""
    return rows.gather(1, path[..., None].expand(-1, -1, rows.shape[2]))


def _verdict(
    v: Values, key: StepKey, draft: Tensor, logits: Tensor, raw: Tensor, tree: Tree | None
) -> Accepted | AcceptedPath:
    sampling: dict[str, Any] = {"raw": raw}
    if key.sampled:
        sampling |= {
            "temperature": v["setting.temperature"], "seed": v["state.seed"], "length": v["state.length"],
            "rule": _rule(v, key),
        }  # fmt: skip
    if tree is not None:
        return accept_tree(logits, draft, tree, **sampling)
    proposal = Proposal(v["draft.probs"], v.get("draft.ids")) if "draft.probs" in v else None
    return accept_drafts(logits, Draft(draft, proposal, v.get("draft.drawn")), **sampling)


def commit_stage(
    v: Values, key: StepKey, shape: Shape, method: Method, parts: Parts, tree: Tree | None = None
) -> dict[str, Tensor]:
    """Append the emitted tokens, move the lengths, and hand the method its new rows."""
    count, emitted = v["accept.count"], v["accept.emitted"]
    length, tokens = v["state.length"], v["state.tokens"]
    if tree is not None:
        _settle(v, shape)
    column = length[:, None] + torch.arange(emitted.shape[1], device=length.device)
    column = torch.where(emitted >= 0, column, shape.capacity)
    slot = torch.arange(shape.slots, device=length.device)[:, None].expand_as(column)
    rows = _observed(v, _rows(v, key, shape, tree), key, shape, tree)
    put(tokens, emitted.clamp(min=0), slot, column)
    store(v["state.running"], v["state.running"] & (v["accept.finish"] == RUNNING))
    store(v["state.fresh"], torch.zeros_like(v["state.fresh"]))

    def run(drafter: object) -> None:
        method.observe(_context(v, key, shape, parts, drafter, Drawer(shape.vocab)), rows)

    parts.drafter(v, run)
    store(length, length + count)
    return {}


def _settle(v: Values, shape: Shape) -> None:
    """Move the K/V of the accepted path's rows to where its tokens stand in the text."""
    path = v["accept.path"]
    depth = torch.arange(path.shape[1], device=path.device)
    base = v["state.length"][:, None] - 1
    accepted = (depth >= 1) & (depth < v["accept.count"][:, None])
    source = torch.where(accepted, base + path, shape.capacity)[:, 1:]
    target = torch.where(accepted, base + depth, shape.capacity)[:, 1:]
    slot = torch.arange(shape.slots, device=path.device)[:, None].expand_as(source)
    rows = slot.flatten(), source.flatten(), target.flatten()
    for name, cache in v.items():
        if name.startswith("cache."):
            move_rows(cache, *rows)


def _rule(v: Values, key: StepKey) -> AcceptRule | Tensor:
    return v["state.coupled"] if key.rule == "mixed" else key.rule


def _stop(v: Values, count: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Cut at the first end-of-sequence id and at the slot's limit; the first of the two decides the reason."""
    length, running, limit = v["state.length"], v["state.running"], v["state.limit"]
    count = torch.minimum(count, (limit - length).clamp(min=0))
    index = torch.arange(tokens.shape[1], device=tokens.device)
    is_eos = (tokens[:, :, None] == v["state.eos"][:, None, :]).any(-1) & (tokens >= 0)
    is_eos = is_eos & (index < count[:, None])
    stops = is_eos.any(1)
    first = torch.where(is_eos, index, tokens.shape[1]).amin(1)
    count = torch.where(stops, first + 1, count)
    full = length + count >= limit
    finish = torch.where(stops, STOP, torch.where(full, LENGTH, RUNNING))
    return torch.where(running, count, 0), torch.where(running, finish, RUNNING)


@dataclass(frozen=True)
class _StepRows:
    token: Tensor
    slot: Tensor
    position: Tensor
    cache_row: Tensor
    reach: Tensor  # the sequence length a plain decode would have had at this row
    last: Tensor | None = None  # of a tree's step: the newest committed cache row that this row sees
    path: Tensor | None = None  # and the drafts on its path, as bits


def _rows(v: Values, key: StepKey, shape: Shape, tree: Tree | None) -> _StepRows:
    """Return the step's rows: block + 1 per slot in slot order, then the fed ones."""
    tokens, length, running = v["state.tokens"], v["state.length"], v["state.running"]
    device = length.device
    anchor = tokens.gather(1, (length - 1).clamp(min=0)[:, None])
    block = torch.cat([anchor, v["draft.tokens"].clamp(min=0)], 1) if key.block else anchor
    base = length[:, None] - 1
    place = position = base + torch.arange(key.block + 1, device=device)
    last = path = None
    if tree is not None:
        position = base + table(tree.depths, device)
        last = base.expand(-1, tree.nodes).flatten()
        path = table(tree.paths, device)[None].expand(shape.slots, -1).flatten()
    live = running[:, None] & (place >= 0) & (place < shape.capacity)
    slot = torch.arange(shape.slots, device=device)[:, None].expand_as(position)
    token, slot, position, live = block.flatten(), slot.flatten(), position.flatten(), live.flatten()
    place = position if tree is None else place.flatten()
    if key.feed:
        fed_slot, fed = v["feed.slot"], v["feed.position"]
        fed_token = tokens[fed_slot, fed.clamp(min=0)]
        token, slot = torch.cat([token, fed_token]), torch.cat([slot, fed_slot])
        position, live = torch.cat([position, fed]), torch.cat([live, fed >= 0])
        place = position if tree is None else torch.cat([place, fed])
        if last is not None and path is not None:
            last, path = torch.cat([last, fed]), torch.cat([path, torch.zeros_like(fed)])
    cache_row = torch.where(live, place, shape.capacity)
    reach = torch.maximum(position + 1, v["state.reach"][slot])
    return _StepRows(token, slot, position.clamp(0, shape.capacity - 1), cache_row, reach, last, path)


def _observed(v: Values, rows: _StepRows, key: StepKey, shape: Shape, tree: Tree | None) -> Rows:
    """Return the step's rows as the method sees them: what was not accepted is garbage."""
    count, emitted, tokens = v["accept.count"], v["accept.emitted"], v["state.tokens"]
    per_slot = key.block + 1
    own = shape.slots * per_slot
    index = torch.arange(per_slot, device=count.device)
    slots = torch.arange(shape.slots, device=count.device)
    newest, has_newest = slots * per_slot + (count - 1).clamp(min=0), count > 0
    if tree is None:
        true = (index < count[:, None]).flatten()
        next_token = emitted.clamp(min=0).flatten()
        cache_row = torch.where(true, rows.cache_row[:own], shape.capacity)
    else:
        path, depth = v["accept.path"], table(tree.depths, count.device).expand(shape.slots, -1)
        true = (path.gather(1, depth) == index) & (depth < count[:, None])
        next_token = emitted.gather(1, depth).clamp(min=0).flatten()
        cache_row = torch.where(true.flatten(), rows.position[:own], shape.capacity)
        newest = slots * per_slot + path.gather(1, (count - 1).clamp(min=0)[:, None])[:, 0]
    if key.feed:
        fed_slot, fed = v["feed.slot"], v["feed.position"]
        cache_row = torch.cat([cache_row, rows.cache_row[own:]])
        next_token = torch.cat([next_token, tokens[fed_slot, fed.clamp(min=0) + 1]])
        mine = (fed_slot == slots[:, None]) & (fed >= 0)
        last_fed = torch.where(mine, torch.arange(key.feed, device=count.device), -1).amax(1)
        newest = torch.where(has_newest, newest, own + last_fed.clamp(min=0))
        has_newest = has_newest | (last_fed >= 0)
    return Rows(
        token=rows.token,
        next_token=next_token,
        slot=rows.slot,
        position=rows.position,
        cache_row=cache_row,
        features=v.get("verify.taps"),
        newest=newest,
        has_newest=has_newest,
        reach=rows.reach,
    )


def _context(
    v: Values, key: StepKey, shape: Shape, parts: Parts, drafter: object, draw: Drawer
) -> MethodContext:
    return MethodContext(
        slots=shape.slots,
        block=key.block,
        capacity=shape.capacity,
        tokens=v["state.tokens"],
        length=v["state.length"],
        running=v["state.running"],
        state={n.removeprefix("method."): t for n, t in v.items() if n.startswith("method.")},
        drafter=drafter,
        embed=lambda ids: parts.embed(v, ids),
        head=lambda hidden: parts.head(v, hidden),
        draw=draw,
        vocab=shape.vocab,
        drafter_limit=parts.drafter_limit,
    )
