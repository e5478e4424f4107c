"""The objectives of the block methods and the choice of one: methods.md 4.5, 5.4 and 6.3.

An objective returns terms, each a sum and what to divide it by, so that the division can be by the sum over
all processes. Its counts are for reports: rows right and prefixes right, per position.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from specc.drafters.block import BlockDrafter
from specc.training.packing import Batch, Blocks, draw_anchors, run_blocks
from specc.training.rollout import eagle3
from specc.training.terms import Embed, LossOptions, Objective, Reference, Result


def objective(method: str) -> Objective:
    """Return the objective of a method."""
    known: dict[str, Objective] = {"dspark": dspark, "dflash": dflash, "dflash2": dflash, "eagle3": eagle3}
    return known[method]


def dspark(
    drafter: BlockDrafter, batch: Batch, reference: Reference, embed: Embed, options: LossOptions, seed: int
) -> Result:
    """CE with the text, L1 with the target, and the confidence head's BCE against 1 - TV."""
    anchors, real = draw_anchors(batch, options.anchors, seed)
    blocks = run_blocks(drafter, batch, anchors, real, embed)
    logits, confidence = dspark_logits(drafter, blocks)
    log_q = logits.log_softmax(-1)
    p = blocks.gather(reference.probabilities(batch))
    weight = _decay(blocks, options.decay or 4.0)
    label = reference.draft_index[blocks.label]
    named = (label >= 0) & blocks.valid
    q = log_q.exp()
    inside = torch.minimum(q, p).sum(-1)
    # ||q - p||_1 over the whole vocabulary: q is nothing outside the draft's, so it is 2 (1 - sum of minima).
    distance = 2 * (1 - inside)
    result = Result()
    truth = -log_q.gather(-1, label.clamp(min=0)[..., None])[..., 0]
    result.terms["ce"] = (options.ce, (truth * weight * named).sum(), (weight * named).sum())
    result.terms["l1"] = (options.l1, (distance * weight).sum(), weight.sum())
    if options.soft:
        result.terms["soft"] = (options.soft, *_soft(p, log_q, weight))
    if confidence is not None:
        goal = inside.detach().clamp(0, 1)
        error = functional.binary_cross_entropy_with_logits(confidence, goal, reduction="none")
        result.terms["confidence"] = (options.confidence, (error * weight).sum(), weight.sum())
        whole = blocks.valid.all(-1)
        result.confidence, result.accepted = confidence[whole].detach(), goal[whole]
    _count(result, batch, blocks, (anchors, real), logits.argmax(-1) == label, inside)
    return result


def _soft(p: Tensor, log_q: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return cross-entropy with the target's distribution within the draft vocabulary, rows weighing its mass there.

    Dividing p by that mass and weighing the row by it cancel, so neither is done.
    """
    return -((p * log_q).sum(-1) * weight).sum(), (weight * p.sum(-1)).sum()


def dspark_logits(drafter: BlockDrafter, blocks: Blocks) -> tuple[Tensor, Tensor | None]:
    """Return corrected logits, with the text's own tokens before each row, and confidence logits."""
    base = drafter.head(blocks.hidden).float()
    embedded: Tensor | None = None
    if drafter.config.markov is not None:
        head = drafter.markov_head
        embedded = head.look_up(blocks.previous)
        state = head.start(embedded[..., 0, :])
        latents = []
        for row in range(embedded.shape[-2]):
            latent, state = head.latent(blocks.hidden[..., row, :], embedded[..., row, :], state)
            latents.append(latent)
        base = base + head.bias(torch.stack(latents, dim=-2)).float()
    if drafter.config.confidence is None:
        return base, None
    return base, drafter.confidence_head(blocks.hidden, embedded).float()


def dflash(
    drafter: BlockDrafter, batch: Batch, reference: Reference, embed: Embed, options: LossOptions, seed: int
) -> Result:
    """Cross-entropy per row with decay; DFlash 2 adds the selector's over its candidates."""
    anchors, real = draw_anchors(batch, options.anchors, seed)
    blocks = run_blocks(drafter, batch, anchors, real, embed)
    logits = dflash_logits(drafter, blocks, reference)
    log_q = logits.log_softmax(-1)
    weight = _decay(blocks, options.decay or flash_decay(drafter.config.block))
    label = reference.draft_index[blocks.label]
    named = (label >= 0) & blocks.valid
    truth = -log_q.gather(-1, label.clamp(min=0)[..., None])[..., 0]
    result = Result()
    result.terms["ce"] = (1.0, (truth * weight * named).sum(), (weight * named).sum())
    if options.soft:
        p = blocks.gather(reference.probabilities(batch))
        result.terms["soft"] = (options.soft, *_soft(p, log_q, weight))
    drafted = logits.argmax(-1)
    if drafter.config.selector is not None:
        scores, ids = selector_scores(drafter, blocks, logits)
        hit = (ids == label[..., None]) & named[..., None]
        chosen = (scores.log_softmax(-1) * hit).sum(-1)
        listed = weight * hit.any(-1)
        result.terms["selector"] = (options.selector, -(chosen * listed).sum(), listed.sum())
        drafted = ids.gather(-1, scores.argmax(-1, keepdim=True))[..., 0]
    _count(result, batch, blocks, (anchors, real), drafted == label, None)
    return result


def dflash_logits(drafter: BlockDrafter, blocks: Blocks, reference: Reference) -> Tensor:
    """Return each row's logits over the draft vocabulary."""
    return drafter.head(
        blocks.hidden, lambda hidden: reference.transform(functional.linear(hidden, reference.head))
    ).float()


def selector_scores(drafter: BlockDrafter, blocks: Blocks, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the candidates' scores given the text's own token before each row, and their ids."""
    selector = drafter.candidate_selector
    ids, unary = selector.candidates(logits)
    return selector.score(blocks.hidden, ids, unary, blocks.previous), ids


def flash_decay(block: int) -> float:
    """Return g of DFlash's row weights: 7, 5 and 4 for blocks of 16, 10 and 8 (methods.md 4.5)."""
    return 7.0 if block >= 16 else 5.0 if block >= 10 else 4.0


def _decay(blocks: Blocks, g: float) -> Tensor:
    rows = blocks.valid.shape[-1]
    weight = torch.exp(-torch.arange(rows, device=blocks.valid.device) / g)
    return weight * blocks.valid


def _count(
    result: Result,
    batch: Batch,
    blocks: Blocks,
    drawn: tuple[Tensor, Tensor],
    right: Tensor,
    inside: Tensor | None,
) -> None:
    counted = tuple(range(right.dim() - 1))
    prefix = (right & blocks.valid).cumprod(-1)
    result.prefix = prefix.sum(counted).detach()
    result.total = blocks.valid.sum(counted)
    anchors, real = drawn
    result.runs = torch.full_like(batch.ids, -1)
    sequence, which = real.nonzero(as_tuple=True)
    result.runs[sequence, anchors[sequence, which]] = prefix.sum(-1)[sequence, which]
    if inside is not None:
        result.overlap = (inside * blocks.valid).sum(counted).detach()
