"""The matrix of tests/test_matrix.py for methods with a drafter of specc's own: each at every block.

The target and the drafters are those of tests/automaton.py: right in full on one text, right at times on another, and
never but by chance. In one step some slots are greedy and others coupled. Batches of 1 and 3 take turns, so that every
method and every block meets both.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from specc import methods
from specc.backends import choose
from specc.build import StepBuilder, Target, make_drafter, make_target
from specc.contracts import DrafterBundle, DrafterInfo, ModelInfo
from specc.methods.mtp import Mtp
from specc.runtime.compiled import Compiled
from specc.runtime.engine import Engine
from specc.step import Shape
from tests import automaton
from tests.rig import recorded

METHODS = ("eagle3", "mtp", "dflash", "dspark", "dflash2")
BLOCKS = (1, 2, 3, 5, 8)
COUNT, CAPACITY = 30, 64
FEED = 64  # holds all prompts: they are read in one step, and from then on every slot drafts
PROMPTS = tuple(tuple(automaton.circle(begin, length)) for begin, length in ((0, 10), (5, 13), (7, 21)))
ON_CIRCLE, WANDERING = 0.0, 1.9
FORGOTTEN = (
    1,
    3,
    5,
    7,
    9,
)  # elements that drafters of short blocks hardly know: else few blocks would be cut inside
HOT: dict[str, Any] = {"do_sample": True, "temperature": 0.7, "top_k": 0, "top_p": 1.0}


@dataclass(frozen=True)
class Asked:
    """One sequence: which prompt, and the seed of its noise, or None for greedy."""

    prompt: int
    seed: int | None

    def arguments(self) -> dict[str, Any]:
        settings = {"do_sample": False} if self.seed is None else {**HOT, "seed": self.seed}
        ids = torch.tensor([PROMPTS[self.prompt]])
        return {"input_ids": ids, "max_new_tokens": COUNT, "eos_token_id": None, **settings}


GREEDY = tuple(Asked(prompt, None) for prompt in range(3))
MIXED = (Asked(0, None), Asked(1, 21), Asked(2, None)), (Asked(0, 22), Asked(1, None), Asked(2, 23))


@functools.cache
def _traced() -> Target:
    model = automaton.target()
    return make_target(model.module, model.info)


def _engine(method: Any, bundle: DrafterBundle | None, slots: int) -> Engine:
    shape = Shape(slots, CAPACITY, automaton.VOCAB)
    builder = StepBuilder(_traced(), method, make_drafter(bundle) if bundle else None, shape)
    return Engine(builder, choose("eager", torch.device("cpu"))[0], FEED)


@functools.cache
def _rig(method: str, slots: int) -> tuple[Engine, DrafterBundle]:
    bundle = automaton.drafter(method)
    return _engine(methods.get(method), bundle, slots), bundle


def _compiled(engine: Engine, block: int) -> Compiled:
    engine.state.state["length"].zero_()  # nothing that other weights wrote is used again
    model = automaton.target()
    return Compiled(
        engine, engine.builder.method, block, "coupled", info=model.info, generation=model.generation
    )


@dataclass
class Run:
    """The texts, and per step what was accepted of a slot's drafts: greedy slots' and all slots'."""

    texts: list[list[int]]
    greedy: list[list[int]]
    all: list[list[int]]


def _run(compiled: Compiled, asked: Sequence[Asked]) -> Run:
    texts: list[list[int]] = [[] for _ in asked]
    # One after the other, a batch of 1 keeps the settings of the request before: the hot one first is one step for all.
    order = sorted(range(len(asked)), key=lambda i: asked[i].seed is None)
    order = order if compiled.batch == 1 else list(range(len(asked)))
    with recorded(compiled) as steps:
        for index, tokens in compiled.stream((i, asked[i].arguments()) for i in order):
            texts[int(str(index))] += tokens
    run, ended = Run(texts, [], []), 0
    for key, records in steps:
        holders = order[ended:] if compiled.batch == 1 else order  # whose slot 0, 1, .. are
        live = [(asked[i], r) for i, r in zip(holders, records, strict=False) if key.block and r.drafted]
        run.greedy.append([r.accepted for one, r in live if one.seed is None and not r.finish])
        run.all.append([r.accepted for _, r in live if not r.finish])
        ended += sum(bool(r.finish) for r in records)
    return run


@functools.cache
def _expected(asked: Asked, spread: float) -> list[int]:
    """Return transformers' greedy text, or that of plain decoding with the seed."""
    automaton.make_wander(spread)
    given = asked.arguments()
    if asked.seed is None:
        model: Any = automaton.target().module
        out = model.generate(attention_mask=torch.ones_like(given["input_ids"]), **given)
    else:
        out = _compiled(_plain(), 0).generate(**given)
    return [int(token) for token in out[0, len(PROMPTS[asked.prompt]) :]]


@functools.cache
def _plain() -> Engine:
    return _engine(methods.get("plain"), None, 1)


def _slots(method: str, block: int) -> int:
    return 1 if (METHODS.index(method) + BLOCKS.index(block)) % 2 else 3


def _check(compiled: Compiled, spread: float, mixes: Sequence[Sequence[Asked]]) -> Run:
    """Run the mixes, compare every text, and return what was accepted."""
    runs = [_run(compiled, mix) for mix in mixes]
    for mix, run in zip(mixes, runs, strict=True):
        for one, text in zip(mix, run.texts, strict=True):
            assert text == _expected(one, spread), one
    return Run([], [s for run in runs for s in run.greedy], [s for run in runs for s in run.all])


def _flat(steps: Sequence[Sequence[int]]) -> list[int]:
    return [accepted for step in steps for accepted in step]


@contextlib.contextmanager
def _scaled(bundle: DrafterBundle, factor: float, elements: Sequence[int]) -> Iterator[None]:
    """Change what a drafter believes; factors are powers of two, so that it comes back to the bit."""
    automaton.scale(bundle.module, factor, elements)
    try:
        yield
    finally:
        automaton.scale(bundle.module, 1 / factor, elements)


@pytest.fixture(scope="module", autouse=True)
def _texts() -> None:
    """Compute what is expected before anything else: it needs other weights of the target than a run that goes on."""
    for one in (*GREEDY, *MIXED[0], *MIXED[1]):
        for spread in (ON_CIRCLE, WANDERING):
            _expected(one, spread)


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("method", METHODS)
def test_text_is_the_targets_own(method, block):
    slots = _slots(method, block)
    engine, bundle = _rig(method, slots)

    automaton.make_wander(ON_CIRCLE)
    right = _check(_compiled(engine, block), ON_CIRCLE, MIXED[:1])
    assert set(_flat(right.greedy)) == {block}, "a right drafter is accepted in full"

    automaton.make_wander(WANDERING)
    with _scaled(bundle, 0.25, FORGOTTEN if block in (2, 3) else ()):
        noisy = _check(_compiled(engine, block), WANDERING, MIXED)
    flat = _flat(noisy.all)
    if block == 1:
        shares = [flat.count(accepted) / len(flat) for accepted in (0, 1)]
    else:
        shares = [sum(0 < accepted < block for accepted in flat) / len(flat)]
    assert min(shares) >= 0.2, shares
    assert slots == 1 or any(len(set(step)) > 1 for step in noisy.all)

    with _scaled(bundle, -1.0, range(automaton.CIRCLE)):
        adverse = _check(_compiled(engine, block), WANDERING, MIXED[:1])
    flat = _flat(adverse.greedy)
    assert sum(flat) < 0.15 * block * len(flat)


@pytest.mark.parametrize("method", METHODS)
def test_greedy_steps_hold_no_noise(method):
    """A call without sampling has a step of its own."""
    automaton.make_wander(WANDERING)
    compiled = _compiled(_rig(method, 3)[0], 3)
    noisy = _check(compiled, WANDERING, [GREEDY])
    assert 0 < sum(_flat(noisy.all)) < 3 * len(_flat(noisy.all))
    assert compiled.engine.compiles[-1] == "block 3, feed 0, greedy"


class EarlierMtp(Mtp):
    """Reads the state a layer too early."""

    def taps(self, target: ModelInfo, drafter: DrafterInfo | None) -> tuple[int, ...]:
        return (target.layers - 1,)


@pytest.mark.parametrize("method", METHODS)
def test_a_tap_a_layer_off_shows(method):
    """The drafters of this file are right because every part is where it belongs."""
    bundle = automaton.drafter(method)
    if method != "mtp":
        bundle = replace(bundle, info=replace(bundle.info, taps=tuple(tap - 1 for tap in bundle.info.taps)))
    engine = _engine(EarlierMtp() if method == "mtp" else methods.get(method), bundle, 1)
    automaton.make_wander(ON_CIRCLE)
    accepted = _flat(_check(_compiled(engine, 3), ON_CIRCLE, [GREEDY[:1]]).greedy)
    assert sum(accepted) < 0.7 * 3 * len(accepted), accepted
