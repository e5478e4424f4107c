"""Ratio acceptance through the real step graph: three emitted tokens are distributed as plain sampling's.

Every drafter method runs on 20,000 slots of one step graph, all with the same prompt and each with its own seed, over a
vocabulary of four. The joint counts of the first three tokens are compared with the probabilities that transformers'
forward gives; planted faults of q must show at the same number of draws. The error rate of the whole family is 1e-4.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from specc.backends import choose
from specc.build import StepBuilder, Target, make_drafter, make_target
from specc.checkpoints.block_weights import describe
from specc.contracts import Draft, DrafterBundle, DrafterInfo, MethodContext, Proposal
from specc.drafters.block import BlockDrafter
from specc.drafters.eagle3 import Eagle3Config, Eagle3Drafter
from specc.drafters.layers import LayerConfig
from specc.drafters.markov import MarkovConfig
from specc.drafters.mtp import MtpConfig, MtpDrafter
from specc.drafters.selector import SelectorConfig
from specc.methods.dflash import DFlash
from specc.methods.dflash2 import DFlash2
from specc.methods.draft_model import DraftModel
from specc.methods.dspark import DSpark
from specc.methods.eagle3 import Eagle3
from specc.methods.eagle3_tree import Eagle3Tree
from specc.methods.mtp import Mtp
from specc.models.decoder_layer import final_norm, load_decoder_layer
from specc.models.load import LoadedModel, load_target
from specc.pairing import find_drafter
from specc.runtime.state import allocate
from specc.sampling import bind_all, fit, join, settings_columns
from specc.step import Shape, StepKey
from tests import chi_square, reference
from tests.methods.block_reference import block_config, random_drafter
from tests.tiny import noisy_copy, tiny_model

VOCAB, EMITTED, DRAWS = 4, 3, 20_000
LIMIT = 1e-4 / 100  # Bonferroni: fewer than a hundred chi-square tests here
HIDDEN, TAPS = 16, (0, 1)
LAYER = LayerConfig(HIDDEN, 24, heads=2, kv_heads=1, head_dim=8)
PROMPT = (2, 3, 0, 3, 2)
PLAIN = {"temperature": 1.0}
CUT = {"temperature": 1.2, "top_k": 3, "top_p": 0.9, "min_p": 0.08}
SETTINGS: tuple[dict[str, float], ...] = ({"temperature": 0.7}, PLAIN, {"temperature": 1.5}, CUT)


@functools.cache
def target() -> LoadedModel:
    model = tiny_model(
        "llama", vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1,
    )  # fmt: skip
    with torch.no_grad():
        model.lm_head.weight.mul_(0.4)  # so that no token is all but certain
    return load_target(model)


@functools.cache
def traced() -> Target:
    return make_target(target().module, target().info)


@functools.cache
def chances(settings: tuple[tuple[str, float], ...]) -> Tensor:
    """Return the exact joint probabilities of three tokens after the prompt, float64 [vocab, vocab, vocab]."""
    more = [list(pair) for pair in itertools.product(range(VOCAB), repeat=EMITTED - 1)]
    texts = torch.tensor([[*PROMPT, *pair] for pair in more])
    logits = target().module(texts).logits[:, len(PROMPT) - 1 :]
    scores = torch.stack(
        [
            torch.stack([reference.process(row, [], dict(settings), do_sample=True) for row in rows])
            for rows in logits
        ]
    )
    probs = scores.double().softmax(-1).view(VOCAB, VOCAB, EMITTED, VOCAB)
    return probs[0, 0, 0][:, None, None] * probs[:, 0, 1][:, :, None] * probs[:, :, 2]


# --- the methods, with drafters that know little --------------------------------------------------------


def _random(module: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, value in module.named_parameters():
        noise = torch.randn(value.shape, generator=generator)
        value.data.copy_(1 + 0.2 * noise if "norm" in name else noise / value.shape[-1] ** 0.5)
    module.eval().requires_grad_(requires_grad=False)


def _eagle3() -> DrafterBundle:
    """Its head names three of the target's four tokens."""
    config = Eagle3Config(LAYER, HIDDEN, len(TAPS), vocab=VOCAB, draft_vocab=3, maps_ids=True)
    module = Eagle3Drafter(config)
    _random(module, 1)
    module.lm_head.weight.mul_(1.5)
    assert module.target_ids is not None
    module.target_ids.copy_(torch.tensor([0, 2, 3]))
    info = DrafterInfo("random", "eagle3", "made", HIDDEN, HIDDEN, 3, VOCAB, TAPS, None, None, config=config)
    return DrafterBundle(info, module)


def _mtp() -> DrafterBundle:
    model: Any = target().module
    tensors = {name: value.clone() for name, value in model.model.layers[1].state_dict().items()}
    loaded = load_decoder_layer(target().info.config, tensors, torch.float32)
    norm_embed, norm_hidden, norm_out = (loaded.norm_of(torch.ones(HIDDEN)) for _ in range(3))
    config = MtpConfig(hidden=HIDDEN, vocab=VOCAB)
    module = MtpDrafter(config, loaded.layer, (norm_embed, norm_hidden, norm_out), None)
    _random(module, 2)
    module.attach(final_norm(model))
    info = DrafterInfo("random", "mtp", "made", HIDDEN, HIDDEN, VOCAB, VOCAB, (2,), None, None, config=config)
    return DrafterBundle(info, module)


def _block(kind: str, seed: int = 3, **changes: Any) -> DrafterBundle:
    config = block_config(
        kind, layer=LAYER, layers=1, target_hidden=HIDDEN, causal=(False,), windows=(None,), taps=TAPS,
        vocab=VOCAB, draft_vocab=VOCAB, mask_token=1, confidence=None, **changes,
    )  # fmt: skip
    return DrafterBundle(describe("random", kind, "made", config), random_drafter(config, seed))


def _draft_model() -> DrafterBundle:
    bundle = find_drafter(DraftModel(), target(), noisy_copy(target().module, 0.3))
    assert bundle is not None
    return bundle


@dataclass(frozen=True)
class Case:
    method: Any
    drafter: Callable[[], DrafterBundle]
    block: int = 3
    height: int | None = None  # of a tree

    @property
    def reach(self) -> int:
        """The most drafts that a step can accept."""
        return self.block if self.height is None else self.height


CASES = {
    "eagle3-reduced": Case(Eagle3(), _eagle3),
    "eagle3-tree": Case(Eagle3Tree(height=2), _eagle3, block=5, height=2),
    "mtp": Case(Mtp(), _mtp, block=2),  # the third token may be the bonus
    "draft_model": Case(DraftModel(), _draft_model),
    "dflash": Case(DFlash(), lambda: _block("dflash")),
    "dspark-rnn": Case(DSpark(), lambda: _block("dspark", markov=MarkovConfig("rnn", 8))),
    "dspark-pruned": Case(
        DSpark(candidates=2), lambda: _block("dspark", markov=MarkovConfig("gated", 8)), block=2
    ),
    "dflash2-sparse": Case(DFlash2(), lambda: _block("dflash2", 5, selector=SelectorConfig(8, 2))),
}


# --- one step graph, many slots --------------------------------------------------------------------------


class Slots:
    """All draws of a case side by side, each a slot; what a scheduler does to slots is done to all at once."""

    def __init__(self, case: Case, families: tuple[str, ...]) -> None:
        self.case, self.families = case, families
        self.backend = choose("native", torch.device("cpu"))[0]
        shape = Shape(DRAWS, len(PROMPT) + EMITTED * (case.block + 1), VOCAB)
        self.builder = StepBuilder(traced(), case.method, make_drafter(case.drafter()), shape)
        self.specs = self.builder.state()
        self.tensors = allocate(self.specs, torch.device("cpu")).named() | self.builder.weights
        columns = settings_columns(families)
        self.tensors |= {
            f"setting.{n}": torch.full((DRAWS, *c.shape), c.neutral, dtype=c.dtype)
            for n, c in columns.items()
        }
        self._read_prompt()
        self.run = self._runner(StepKey(case.block, 0, "ratio", families))

    def _runner(self, key: StepKey) -> Callable[[], dict[str, Tensor]]:
        graph = self.builder.step(key).graph
        call = self.backend.build(graph)
        inputs = [self.tensors[i.storage if i.kind == "weight" else i.name] for i in graph.inputs]
        return lambda: dict(zip(graph.outputs, call(*inputs), strict=True))

    def _read_prompt(self) -> None:
        """Feed the prompt to one slot and copy what it left to all others."""
        count = len(PROMPT) - 1
        self.tensors["feed.slot"] = torch.zeros(count, dtype=torch.int64)
        self.tensors["feed.position"] = torch.arange(count)
        self.tensors["state.tokens"][:, : len(PROMPT)] = torch.tensor(PROMPT)
        self.tensors["state.length"].fill_(len(PROMPT))
        self._runner(StepKey(0, count, "ratio"))()
        self.read = {
            name: self.tensors[name][0].clone()
            for name in self.specs
            if name.startswith(("cache.", "method."))
        }

    def draw(self, settings: Mapping[str, float], first_seed: int) -> tuple[Tensor, list[Tensor]]:
        """Return the first tokens emitted, int64 [draws, 3], and the accepted count of each step's slots."""
        values, families = bind_all(settings, vocab=VOCAB, do_sample=True)
        for name, value in fit(values, join(self.families, families)).items():
            self.tensors[f"setting.{name}"][:] = value
        for name, value in self.read.items():
            self.tensors[name][:] = value
        for name in ("length", "prompt_length", "reach"):
            self.tensors[f"state.{name}"].fill_(len(PROMPT))
        self.tensors["state.limit"].fill_(self.builder.shape.capacity)
        self.tensors["state.running"].fill_(True)
        self.tensors["state.eos"].fill_(-1)
        self.tensors["state.seed"].copy_(torch.arange(DRAWS) * 7919 + first_seed)
        accepted = []
        for _ in range(EMITTED):
            record = self.run()["record"]
            assert int(record[:, 2].min()) == self.case.reach, "a slot did not draft"
            accepted.append(record[:, 1])
        return self.tensors["state.tokens"][:, len(PROMPT) : len(PROMPT) + EMITTED], accepted


@pytest.mark.parametrize("name", CASES)
def test_ratio_keeps_the_joint_distribution(name):
    families = join(*(bind_all(s, vocab=VOCAB, do_sample=True)[1] for s in SETTINGS))
    slots = Slots(CASES[name], families)
    for seed, settings in enumerate(SETTINGS):
        exact = chances(tuple(settings.items()))
        assert settings is not CUT or 0 < int((exact == 0).sum()) < exact.numel()
        tokens, accepted = slots.draw(settings, seed)
        assert chi_square.p_value(tokens, exact) > LIMIT, settings
        shares = [float((accepted[0] == count).double().mean()) for count in range(slots.case.reach + 1)]
        assert min(shares) > 0.01, "some count of accepted drafts never happened"


# --- planted faults --------------------------------------------------------------------------------------


class Watched:
    """A Draw that keeps what it is given."""

    def __init__(self, draw: Any) -> None:
        self._draw = draw
        self.logits: list[Tensor] = []

    def __call__(self, logits: Tensor, index: int, ids: Tensor | None = None) -> Tensor:
        self.logits.append(logits)
        return self._draw(logits, index, ids)

    def draft(self, **more: Any) -> Draft:
        return self._draw.draft(**more)


@dataclass(frozen=True)
class Planted:
    """A method whose drafts are drawn as before, and whose q is what a fault says."""

    inner: Any
    fault: Callable[..., Draft]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def draft(self, context: MethodContext) -> Draft:
        watched = Watched(context.draw)
        parts: dict[str, list[Any]] = {}
        with _kept(context.drafter, parts):
            draft = self.inner.draft(replace(context, draw=watched))
        return self.fault(draft, watched.logits, parts, context.drafter)


class _kept:  # noqa: N801  a context manager, used like a function
    """Keep what the parts of a drafter return while it drafts."""

    NAMES = ("head", "markov_head.bias", "markov_head.latent", "candidate_selector.candidates")

    def __init__(self, drafter: Any, parts: dict[str, list[Any]]) -> None:
        self.drafter, self.parts = drafter, parts

    def __enter__(self) -> None:
        for name in self.NAMES:
            owner, _, function = name.rpartition(".")
            place = getattr(self.drafter, owner, None) if owner else self.drafter
            if place is not None and hasattr(place, function):
                real = getattr(place, function)
                setattr(place, function, self._keep(name, real))

    def _keep(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **more: Any) -> Any:
            out = real(*given, **more)
            self.parts.setdefault(name, []).append(out)
            return out

        return call

    def __exit__(self, *_: object) -> None:
        for name in self.NAMES:
            owner, _, function = name.rpartition(".")
            place = getattr(self.drafter, owner, None) if owner else self.drafter
            if place is not None:
                vars(place).pop(function, None)


def _with_q(draft: Draft, probs: Tensor, ids: Tensor | None) -> Draft:
    """Return the draft with another q, [slots, block, candidates]."""
    named = torch.arange(VOCAB) if ids is None else ids
    drawn = (probs * (named.expand_as(probs) == draft.tokens[..., None])).sum(-1)
    return replace(draft, proposal=Proposal(probs, ids), drawn=drawn)


def _q(draft: Draft) -> tuple[Tensor, Tensor | None]:
    assert draft.proposal is not None
    return draft.proposal.probs, draft.proposal.ids


def _other_temperature(draft: Draft, *_: Any) -> Draft:
    probs, ids = _q(draft)
    return _with_q(draft, probs.pow(0.6) / probs.pow(0.6).sum(-1, keepdim=True), ids)


def _of_the_draft_before(draft: Draft, *_: Any) -> Draft:
    probs, ids = _q(draft)
    return _with_q(draft, probs.roll(1, dims=1), ids)


def _unnamed(draft: Draft, *_: Any) -> Draft:
    """Candidate c is taken for target id c in the residual."""
    return replace(draft, proposal=Proposal(_q(draft)[0]))


def _without_markov(draft: Draft, logits: list[Tensor], parts: dict[str, list[Any]], _: Any) -> Draft:
    base = [corrected - bias for corrected, bias in zip(logits, parts["markov_head.bias"], strict=True)]
    return _with_q(draft, torch.stack(base, 1).softmax(-1), _q(draft)[1])


def _not_pruned(draft: Draft, logits: list[Tensor], parts: dict[str, list[Any]], drafter: Any) -> Draft:
    latents = torch.stack([latent for latent, _ in parts["markov_head.latent"]], 1)
    return _with_q(draft, (parts["head"][0] + drafter.markov_head.bias(latents)).softmax(-1), None)


def _without_edges(draft: Draft, logits: list[Tensor], parts: dict[str, list[Any]], _: Any) -> Draft:
    ids, unary = parts["candidate_selector.candidates"][0]
    return _with_q(draft, unary.softmax(-1), ids)


FAULTS: tuple[tuple[str, Callable[..., Draft]], ...] = (
    ("eagle3-reduced", _other_temperature),
    ("eagle3-reduced", _unnamed),
    ("mtp", _of_the_draft_before),
    ("dflash", _other_temperature),
    ("dspark-rnn", _without_markov),
    ("dspark-pruned", _not_pruned),
    ("dflash2-sparse", _without_edges),
    ("dflash2-sparse", _unnamed),
)


@pytest.mark.parametrize(("name", "fault"), FAULTS, ids=[f"{n}{f.__name__}" for n, f in FAULTS])
def test_a_planted_fault_shows(name, fault):
    case = CASES[name]
    slots = Slots(replace(case, method=Planted(case.method, fault)), ("temperature",))
    tokens, _ = slots.draw(PLAIN, 1)
    assert chi_square.p_value(tokens, chances(tuple(PLAIN.items()))) < LIMIT


def test_planting_alone_changes_nothing():
    case = CASES["dflash2-sparse"]
    same = Planted(case.method, lambda draft, *_: _with_q(draft, *_q(draft)))
    tokens, _ = Slots(replace(case, method=same), ("temperature",)).draw(PLAIN, 1)
    assert chi_square.p_value(tokens, chances(tuple(PLAIN.items()))) > LIMIT


def test_drafters_are_of_the_kinds_that_are_claimed():
    eagle3, dflash2 = CASES["eagle3-reduced"].drafter(), CASES["dflash2-sparse"].drafter()
    assert eagle3.info.vocab < target().info.vocab
    assert isinstance(dflash2.module, BlockDrafter)
    assert dflash2.module.candidate_selector.config.top_k < VOCAB
