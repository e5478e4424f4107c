"""One engine on a tiny target, run at any block and with any drafter: tracing is what costs time, so it is shared."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from specc import methods
from specc.api import switch_length
from specc.backends import choose
from specc.build import StepBuilder, Target, make_drafter, make_target
from specc.contracts import Backend
from specc.models.load import LoadedModel, load_target
from specc.pairing import find_drafter
from specc.runtime.compiled import Compiled
from specc.runtime.engine import Engine, SlotRecord
from specc.step import Shape, StepKey
from tests.tiny import noisy_copy, tiny_model


@functools.cache
def loaded(arch: str = "llama", **overrides: Any) -> LoadedModel:
    # A cache needs tuples, a configuration lists.
    values = {key: list(value) if isinstance(value, tuple) else value for key, value in overrides.items()}
    return load_target(tiny_model(arch, **values))


@functools.cache
def traced(arch: str = "llama", **overrides: Any) -> Target:
    """Return a tiny target, traced once for all builders of a test run."""
    model = loaded(arch, **overrides)
    return make_target(model.module, model.info)


class Rig:
    """An engine, and a `Compiled` around it for each block and drafter.

    Args:
        arch: what `tiny_model` takes; the target.
        method: a method's name or a `Method`.
        drafter: a model of the drafter's architecture; its weights are replaced by those that `at` is given.
        slots, capacity, feed: the engine's sizes.
    """

    def __init__(
        self, arch: str, method: Any, drafter: Any = None, *, slots: int = 3, capacity: int = 96, feed: int = 16,
        backend: Backend | None = None, accept: Any = "coupled", overrides: dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        self.model = loaded(arch, **(overrides or {}))
        self.method = methods.get(method) if isinstance(method, str) else method
        self.accept = accept
        bundle = find_drafter(self.method, self.model, copy.deepcopy(drafter))
        shape = Shape(slots, capacity, self.model.info.vocab, switch_length(self.model))
        builder = StepBuilder(
            traced(arch, **(overrides or {})), self.method, make_drafter(bundle) if bundle else None, shape
        )
        chosen = backend or choose("eager", builder.device)[0]
        self.engine = Engine(builder, chosen, feed)

    def at(self, block: int, drafter: Any = None) -> Compiled:
        """Return the engine as a `Compiled` of this block; ``drafter`` gives the draft model its weights."""
        if drafter is not None:
            assert self.engine.builder.drafter is not None
            self.engine.builder.drafter.module.load_state_dict(drafter.state_dict())
        self.engine.state.state["length"].zero_()  # nothing cached by another drafter is used again
        return Compiled(
            self.engine,
            self.method,
            block,
            self.accept,
            info=self.model.info,
            generation=self.model.generation,
        )


def drafters(model: Any) -> dict[str, Any]:
    """Return drafters by how good they are: always right, often right, never right but by chance."""
    return {"copy": model, "noisy": noisy_copy(model), "adversarial": noisy_copy(model, 3.0)}


def padded(prompts: Sequence[Sequence[int]], pad: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return prompts padded at the left, and their mask."""
    width = max(map(len, prompts))
    ids = torch.tensor([[pad] * (width - len(p)) + list(p) for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    return ids, mask


def generate(
    compiled: Compiled, prompts: Sequence[Sequence[int]], count: int, **settings: Any
) -> list[list[int]]:
    """Return the new tokens of every prompt, without what pads them at the right."""
    ids, mask = padded(prompts)
    out = compiled.generate(ids, mask, max_new_tokens=count, return_dict_in_generate=True, **settings)
    rows = out.sequences[:, ids.shape[1] :].tolist()
    ends = settings.get("eos_token_id", compiled.generation_defaults.get("eos_token_id"))
    stops = {ends} if isinstance(ends, int) else set(ends or ())
    cut = [next((i + 1 for i, t in enumerate(row) if t in stops), len(row)) for row in rows]
    return [row[:end] for row, end in zip(rows, cut, strict=True)]


@functools.cache
def _own_text(
    arch: str, overrides: tuple[tuple[str, Any], ...], prompt: tuple[int, ...], count: int
) -> list[int]:
    model = loaded(arch, **dict(overrides)).module
    ids = torch.tensor([prompt])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False)
    return [int(t) for t in out[0, len(prompt) :]]


def own_text(
    arch: str, prompts: Sequence[Sequence[int]], count: int, overrides: dict[str, Any] | None = None
) -> list[list[int]]:
    """Return transformers' own greedy text of every prompt, each run alone and unpadded."""
    given = tuple(sorted((overrides or {}).items()))
    return [list(_own_text(arch, given, tuple(p), count)) for p in prompts]


@contextlib.contextmanager
def recorded(compiled: Compiled) -> Iterator[list[tuple[StepKey, list[SlotRecord]]]]:
    """Collect what every step did to every slot."""
    seen: list[tuple[StepKey, list[SlotRecord]]] = []
    engine: Any = compiled.engine
    real = engine.step

    def step(key: StepKey, *more: Any) -> list[SlotRecord]:
        records: list[SlotRecord] = real(key, *more)
        seen.append((key, records))
        return records

    engine.step = step
    try:
        yield seen
    finally:
        del engine.step
