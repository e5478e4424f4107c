"""Run a target over requests and keep the states that drafters read, as the step graph itself makes them.

A drafter is trained on what it will see: the taps come out of the compiled step, not out of another forward.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specc import ops
from specc.build import StepBuilder, make_target
from specc.contracts import Backend, Draft, DrafterInfo, MethodContext, ModelInfo, Rows, TensorSpec
from specc.models.decoder_layer import final_norm
from specc.models.load import LoadedModel
from specc.runtime.arguments import read_arguments
from specc.runtime.engine import Engine
from specc.runtime.scheduler import Request, Scheduler
from specc.runtime.stats import Stats
from specc.step import Shape

FEED_ROWS = 64


@dataclass(frozen=True)
class Recorder:
    """A method that drafts nothing and writes down the target's states of every committed position."""

    tapped: tuple[int, ...]
    name: str = "record"
    default_block: int = 0
    needs_drafter: bool = False
    history: int = 0

    def reject(self, target: ModelInfo, drafter: DrafterInfo | None, block: int) -> tuple[str, ...]:
        return ()

    def blocks(self, drafter: DrafterInfo | None) -> int | None:
        return 0

    def taps(self, target: ModelInfo, drafter: DrafterInfo | None) -> tuple[int, ...]:
        return self.tapped

    def state(self, target: ModelInfo, drafter: Any, slots: int, capacity: int) -> Mapping[str, TensorSpec]:
        return {"features": TensorSpec((slots, capacity + 1, len(self.tapped) * target.hidden), target.dtype)}

    def draft(self, context: MethodContext) -> Draft:
        return context.draw.draft()

    def observe(self, context: MethodContext, rows: Rows) -> None:
        assert rows.features is not None, "a recorder has taps"
        cache_row = rows.cache_row.clamp(max=context.capacity)
        ops.put(context.state["features"], rows.features, rows.slot, cache_row)


@dataclass(frozen=True)
class Recorded:
    """One finished sequence.

    Attributes:
        key: What the request was called.
        ids: int64 [tokens], prompt and answer.
        prompt: Tokens of the prompt.
        features: [tokens - 1, taps * hidden], the state of every position that has one.
        final: [tokens - 1, hidden], after the final norm: what the head reads.
        log_total: float32 [tokens - 1]; logsumexp of the logits of answer rows (prompt - 1 and on), else 0.
        ended: Whether it ended by itself, not by a cap.
    """

    key: object
    ids: Tensor
    prompt: int
    features: Tensor
    final: Tensor
    log_total: Tensor
    ended: bool


class TargetRunner:
    """A compiled target that answers requests and records its states.

    Args:
        target: The model.
        taps: The states to keep, each "after j layers"; the last layer's is kept anyway.
        slots: Sequences that run at once.
        capacity: Tokens a sequence can hold.
        backend: What compiles the step.
    """

    def __init__(
        self, target: LoadedModel, taps: tuple[int, ...], *, slots: int, capacity: int, backend: Backend
    ) -> None:
        self.target, self.taps = target, taps
        shape = Shape(slots, capacity, target.info.vocab)
        method = Recorder((*taps, target.info.layers))
        builder = StepBuilder(make_target(target.module, target.info), method, None, shape)
        self.engine = Engine(builder, backend, min(FEED_ROWS, capacity))
        self._norm = final_norm(target.module)

    def request(self, key: object, ids: Tensor, new_tokens: int, seed: int, **settings: Any) -> Request:
        """Return a request as `Compiled.generate` would make it."""
        arguments = read_arguments(
            ids[None],
            None,
            defaults=self.target.generation,
            generation_config=None,
            accept="ratio",
            given={"max_new_tokens": new_tokens, **settings},
            seed=seed,
            vocab=self.target.info.vocab,
            capacity=self.engine.capacity,
        )
        request = arguments.requests[0]
        request.key = key
        return request

    @torch.no_grad()
    def run(self, requests: Iterable[Request]) -> Iterator[Recorded]:
        """Yield sequences as they end; requests are read when a slot is free, so they may depend on results."""
        totals: dict[int, list[float]] = {}
        made: dict[int, list[int]] = {}
        scheduler = Scheduler(self.engine, 0, "ratio", ("logits",))
        step, lse = -1, torch.empty(0)
        stats = Stats()
        for item in scheduler.run(requests, stats):
            if stats.device_steps != step:
                step, lse = stats.device_steps, self.engine.outputs["logits"][:, 0].logsumexp(-1)
            totals.setdefault(item.slot, []).append(float(lse[item.slot]))
            made.setdefault(item.slot, []).extend(item.record.tokens)
            if item.finish is None:
                continue
            yield self._recorded(
                item.request, item.slot, made.pop(item.slot), totals.pop(item.slot), item.finish
            )

    def _recorded(
        self, request: Request, slot: int, new: list[int], totals: list[float], finish: str
    ) -> Recorded:
        ids = torch.cat([request.ids.cpu(), torch.tensor(new, dtype=torch.int64)])
        prompt = int(request.ids.shape[0])
        rows = self.engine.state.method["features"][slot, : len(ids) - 1]
        hidden = self.target.info.hidden
        final = self._norm(rows[:, -hidden:])
        log_total = torch.zeros(len(ids) - 1)
        log_total[prompt - 1 :] = torch.tensor(totals)
        return Recorded(
            request.key,
            ids,
            prompt,
            rows[:, :-hidden].cpu().clone(),
            final.cpu(),
            log_total,
            finish == "stop",
        )
