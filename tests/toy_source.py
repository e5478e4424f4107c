"""A step source without a transformers model: one attention layer over an embedding, drafted by n-grams.

The real stages, state and scheduler run on it, so packages can be tested in a second instead of a minute.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from specc.backends.eager import Eager
from specc.contracts import STAGES, AcceptRule, DrafterInfo, ModelInfo, Stage, TensorSpec
from specc.graph import StepGraph
from specc.methods.ngram import Ngram
from specc.ops import attend
from specc.pipeline import PassReport
from specc.runtime.compiled import Compiled
from specc.runtime.engine import Engine
from specc.step import (
    Parts,
    Shape,
    StepKey,
    accept_stage,
    commit_stage,
    draft_stage,
    setting_specs,
    state_specs,
    verify_stage,
)
from specc.stitch import BuiltStep, assemble, relevant, stage_inputs
from specc.trace import Tracer

VOCAB, HIDDEN, FEED = 24, 8, 8


class ToySource:
    """A `StepSource` over two weights; the head is the embedding, so their storage is one."""

    def __init__(self, slots: int = 1, capacity: int = 32) -> None:
        generator = torch.Generator().manual_seed(0)
        self.shape = Shape(slots, capacity, VOCAB)
        self.device = torch.device("cpu")
        table = torch.randn(VOCAB, HIDDEN, generator=generator)
        self.weights: dict[str, Tensor] = {
            "target.embed.weight": table,
            "target.head.weight": table,
            "target.mix.weight": torch.randn(HIDDEN, HIDDEN, generator=generator),
            "target.scale": torch.tensor([3, 1], dtype=torch.int64),
        }
        self._storage = {n: n for n in self.weights} | {"target.head.weight": "target.embed.weight"}
        self.target_info = ModelInfo(
            "toy", "toy", 1, HIDDEN, VOCAB, VOCAB, 64, 1, 1, HIDDEN, tied_head=True, dtype=torch.float32,
            config={"rope_theta": 1e4},
        )  # fmt: skip
        self.drafter_info: DrafterInfo | None = None
        self.taps = (1,)
        self.rows_reports = (PassReport("slice_logits", 9, 8, 100, 100, 1.5),)
        self._tracer = Tracer(self.device)
        self._stages: dict[tuple[Stage, StepKey], StepGraph] = {}

    def tree(self, block: int) -> None:
        return None

    def state(self) -> dict[str, TensorSpec]:
        cache = TensorSpec((self.shape.slots, 1, self.shape.capacity + 1, HIDDEN))
        return state_specs(self.shape) | {"cache.key.0": cache, "cache.value.0": cache}

    def step(self, key: StepKey) -> BuiltStep:
        return assemble([self.stage(stage, key) for stage in key.stages], key)

    def stage(self, stage: Stage, key: StepKey) -> StepGraph:
        kept = relevant(stage, key)
        if (stage, kept) not in self._stages:
            specs = self.state() | setting_specs(self.shape, key.families)
            if key.feed:
                specs |= {n: TensorSpec((key.feed,), torch.int64) for n in ("feed.slot", "feed.position")}
            specs |= {n: TensorSpec(tuple(t.shape), t.dtype) for n, t in self.weights.items()}
            earlier = [self.stage(name, key) for name in STAGES[: STAGES.index(stage)]]
            inputs = stage_inputs(specs, self._storage, earlier)
            parts, method = Parts(self._target, lambda _, run: run(None), _no, _no, None), Ngram()
            functions = {
                "draft": lambda v: draft_stage(v, kept, self.shape, method, parts),
                "verify": lambda v: verify_stage(v, kept, self.shape, parts),
                "accept": lambda v: accept_stage(v, kept, self.shape),
                "commit": lambda v: commit_stage(v, kept, self.shape, method, parts),
            }
            self._stages[stage, kept] = self._tracer.trace(stage, functions[stage], inputs)
        return self._stages[stage, kept]

    def _target(
        self, v: Mapping[str, Tensor], token: Tensor, slot: Tensor, position: Tensor, cache_row: Tensor,
        reach: Tensor, *, logit_rows: Tensor,
    ) -> dict[str, Tensor]:  # fmt: skip
        hidden = torch.nn.functional.embedding(token, v["target.embed.weight"])
        mixed = torch.tanh(hidden @ v["target.mix.weight"])
        read = attend(
            mixed[:, None], hidden[:, None], mixed[:, None], v["cache.key.0"], v["cache.value.0"], slot,
            cache_row, torch.zeros_like(position), position, 0.5,
        )  # fmt: skip
        hidden = (read[:, 0] + mixed + position[:, None] % v["target.scale"][0])[logit_rows]
        return {"logits": hidden @ v["target.head.weight"].t(), "hidden": hidden}


def _no(*_: Any) -> Tensor:
    raise AssertionError("the toy's drafts read no model")


def toy_compiled(
    slots: int = 1, *, block: int = 2, accept: AcceptRule = "ratio", tokenizer: Any = None, **generation: Any
) -> Compiled:
    """Return a compiled toy that few settings families are saved for, so that saving is quick."""
    source = ToySource(slots)
    made = Compiled(
        Engine(source, Eager(), FEED), Ngram(), block, accept, info=source.target_info, tokenizer=tokenizer,
        generation={"eos_token_id": 1, "pad_token_id": 0, **generation},
    )  # fmt: skip
    made.usual_families = lambda: (("temperature",),)  # type: ignore[method-assign]  # what tests are about is elsewhere
    return made


def with_hidden(key: StepKey) -> StepKey:
    return replace(key, extras=("hidden",))
