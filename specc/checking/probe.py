"""Measure acceptance live, as the pair is and with every tap moved by one layer.

A tap that is off by one loads, runs and stays lossless; only acceptance tells. So the same prompts are run
with the taps one layer earlier and one later: the right numbering is the one that accepts most.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from specc.checking.report import Probe, Reading
from specc.contracts import DrafterBundle, Method
from specc.models.load import LoadedModel
from specc.prompts import SELF_WRITTEN_TOKENS, Prompt, starts
from specc.runtime.compiled import Compiled
from specc.runtime.scheduler import Request, Scheduler
from specc.runtime.stats import Stats

Compile = Callable[..., Compiled]
PROBE_TOKENS = 64  # per prompt: with 8 prompts some 400 places to draft from
SLOTS = 8


def probe(
    compile_step: Compile,
    target: LoadedModel,
    bundle: DrafterBundle,
    method: Method,
    block: int,
    prompts: Sequence[Tensor],
    new_tokens: int = PROBE_TOKENS,
) -> Probe:
    """Draft from every place of the target's own greedy answers and count how many drafts are right.

    The readings draft from the same places, so that their difference is judged place by place.
    ``compile_step`` is `specc.compile` with the target bound, a prompt int64 [tokens].
    """
    capacity = min(max(p.shape[0] for p in prompts) + new_tokens + block + 2, target.info.max_position)
    texts: list[Tensor] = []
    reach = block
    counts: list[Tensor] = []
    shifts: list[tuple[int, tuple[int, ...]]] = []
    for shift in (0, -1, 1):
        shifted = _shift(target, bundle, method, shift)
        if shifted is None:
            continue
        compiled = compile_step(shifted, method=method, block=block, batch=SLOTS, max_length=capacity)
        reach = compiled.reach
        texts = texts or _answers(compiled, prompts, new_tokens)
        counts.append(_count(compiled, prompts, texts))
        shifts.append((shift, shifted.info.taps))
    ids = getattr(bundle.module, "target_ids", None)
    outside = None
    if isinstance(ids, Tensor):
        answers = torch.cat([text[p.shape[0] :] for p, text in zip(prompts, texts, strict=True)])
        outside = float((~torch.isin(answers, ids.cpu())).float().mean())
    readings = [_reading(*s, count, counts[0], reach) for s, count in zip(shifts, counts, strict=True)]
    return Probe(len(prompts), block, tuple(readings), outside)


def _shift(target: LoadedModel, bundle: DrafterBundle, method: Method, shift: int) -> DrafterBundle | None:
    """Return the drafter with every tap moved, or None where that is the same or leaves the target."""
    if shift == 0:
        return bundle
    taps = tuple(tap + shift for tap in bundle.info.taps)
    moved = replace(bundle, info=replace(bundle.info, taps=taps))
    follows = method.taps(target.info, moved.info) == taps  # an MTP module has one place to read from
    return moved if taps and follows and all(0 <= tap <= target.info.layers for tap in taps) else None


def _answers(compiled: Compiled, prompts: Sequence[Tensor], new_tokens: int) -> list[Tensor]:
    """Return prompts with their greedy answers, int64 [tokens] each, cut behind the first end token."""
    ids, mask = pad_left(prompts)
    settings = {"max_new_tokens": new_tokens, "do_sample": False, "pad_token_id": -1, **_OFF}
    out = compiled.generate(ids, mask, **settings)
    assert isinstance(out, Tensor)
    answers = [row[ids.shape[1] :] for row in out]
    return [torch.cat([p, answer[answer >= 0]]) for p, answer in zip(prompts, answers, strict=True)]


def _count(compiled: Compiled, prompts: Sequence[Tensor], texts: Sequence[Tensor]) -> Tensor:
    """Return how many drafts are accepted at each place of the texts, int64 [places].

    A place is a request that ends with its first drafting step.
    """
    places = [
        (number, at) for number, text in enumerate(texts) for at in range(prompts[number].shape[0], len(text))
    ]
    reach = compiled.reach + 2
    requests = (
        Request(texts[number][:at], min(at + reach, compiled.max_length), key=index)
        for index, (number, at) in enumerate(places)
    )
    scheduler = Scheduler(compiled.engine, compiled.block, compiled.accept)
    counts = torch.zeros(len(places), dtype=torch.int64)
    for item in scheduler.run(requests, Stats()):
        if item.record.drafted or item.finish is not None:
            counts[int(str(item.request.key))] = item.record.accepted
            scheduler.cancel(item.request)
    return counts


# Penalties of the model's own defaults would make "greedy" another text; the probe wants the argmax.
_OFF: dict[str, Any] = {"repetition_penalty": 1.0, "no_repeat_ngram_size": 0}


def pad_left(prompts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return ids and attention mask, [prompts, longest]."""
    longest = max(prompt.shape[0] for prompt in prompts)
    ids = torch.zeros(len(prompts), longest, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - prompt.shape[0] :] = prompt
        mask[row, longest - prompt.shape[0] :] = 1
    return ids, mask


def _reading(shift: int, taps: tuple[int, ...], counts: Tensor, own: Tensor, reach: int) -> Reading:
    shares = [_mean(counts > index, reach) for index in range(reach)]
    accepted, error = _mean(counts, reach)
    gain, gain_error = _mean(counts - own, reach)
    return Reading(
        shift,
        taps,
        counts.shape[0],
        tuple(s for s, _ in shares),
        tuple(e for _, e in shares),
        accepted,
        error,
        gain,
        gain_error,
    )


def _mean(values: Tensor, reach: int) -> tuple[float, float]:
    """Return the mean and its standard error; neighbours share drafts, so the places of a step count as one."""
    groups = torch.stack([part.double().mean() for part in values.split(reach + 1)])
    error = float(groups.std()) / math.sqrt(len(groups)) if len(groups) > 1 else float("inf")
    return float(values.double().mean()), error


def self_written(compile_step: Compile, target: LoadedModel) -> list[Prompt]:
    """Return prompts that the target writes itself: for models without a chat template, or without words."""
    compiled = compile_step(method="plain", batch=SLOTS, max_length=SELF_WRITTEN_TOKENS + 4)
    first = [value for value in (target.generation.get("bos_token_id"),) if isinstance(value, int)]
    begin = torch.stack(starts(first, target.info.vocab))
    out = compiled.generate(
        begin,
        max_new_tokens=SELF_WRITTEN_TOKENS,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        seed=0,
        eos_token_id=None,
        **_OFF,
    )
    assert isinstance(out, Tensor)
    return [Prompt(f"self-written-{index}", row) for index, row in enumerate(out)]
