"""DSpark's walk: methods.md 5.3, 5.5, 5.6 and 5.8."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from specc.drafters.block import BlockConfig, BlockDrafter
from specc.drafters.markov import ConfidenceConfig, MarkovConfig
from specc.methods.dflash import DFlash
from specc.methods.dspark import DSpark
from tests.methods.block_reference import block_config, random_drafter
from tests.methods.harness import Driver, Text
from tests.tiny import VOCAB, tiny_model

RANK, REDUCED = 8, 40
HEADS = ["vanilla", "gated", "rnn"]


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("llama")


def _config(head: str, reduced: bool = False, **changes: Any) -> BlockConfig:
    if reduced:
        changes |= {"draft_vocab": REDUCED, "own_head": True, "maps_ids": True}
    return block_config("dspark", markov=MarkovConfig(head, RANK), **changes)  # type: ignore[arg-type]


def _drafter(config: BlockConfig) -> BlockDrafter:
    drafter = random_drafter(config)
    if drafter.target_ids is not None:
        drafter.target_ids.copy_(2 * torch.arange(REDUCED) + 1)  # odd target ids
    return drafter


def _draft(
    model: Any, drafter: BlockDrafter, method: Any, block: int | None = None
) -> tuple[Driver, Any, Tensor]:
    """Return a driver after one draft of two slots, the draft, and the outputs [slots, rows, hidden]."""
    driver = Driver(method, drafter, model, slots=2, capacity=64, block=block or drafter.config.drafts)
    outputs: list[Tensor] = []
    handle = drafter.register_forward_hook(lambda _module, _inputs, output: outputs.append(output))
    for slot, prompt in enumerate((5, 11)):
        generator = torch.Generator().manual_seed(slot)
        ids = torch.randint(3, VOCAB - 1, (40,), generator=generator)
        driver.prefill(slot, Text(ids, prompt, torch.randn(40, 64, generator=generator)))
    draft = driver.draft()
    handle.remove()
    return driver, draft, outputs[-1]


def _walk(
    drafter: BlockDrafter, model: Any, rows: Tensor, anchor: int
) -> tuple[list[int], list[Tensor], list[float]]:
    """Walk one slot's rows by the formulas of methods.md 5.3, one token at a time."""
    head, config = drafter.markov_head, drafter.config
    w1, w2 = head.markov_w1.weight, head.markov_w2.weight
    table = drafter.lm_head.weight if config.own_head else model.get_output_embeddings().weight
    state, previous = torch.zeros(RANK), anchor
    tokens, corrected, confidence = [], [], []
    for h in rows:
        e = w1[previous]
        if config.markov is not None and config.markov.type == "gated":
            latent = torch.sigmoid(head.gate_proj.weight @ torch.cat([h, e]) + head.gate_proj.bias) * e
        elif config.markov is not None and config.markov.type == "rnn":
            joint = head.joint_proj.weight @ torch.cat([state, e, h]) + head.joint_proj.bias
            gate, content, out = joint[:RANK], joint[RANK : 2 * RANK], joint[2 * RANK :]
            state = torch.sigmoid(gate) * state + (1 - torch.sigmoid(gate)) * torch.tanh(content)
            latent = torch.tanh(out)
        else:
            latent = e
        logits = table @ h + w2 @ latent
        proj = drafter.confidence_head.proj
        confidence.append(float(proj.weight[0] @ torch.cat([h, e]) + proj.bias[0]))
        best = int(logits.argmax())
        previous = best if drafter.target_ids is None else int(drafter.target_ids[best])
        tokens.append(previous)
        corrected.append(logits)
    return tokens, corrected, confidence


@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("own_position", [False, True])
@pytest.mark.parametrize("head", HEADS)
def test_equals_a_walk_by_the_formulas(model: Any, head: str, own_position: bool, reduced: bool) -> None:
    """S1, S2: tokens, the logits they were drawn from, and the confidence."""
    drafter = _drafter(_config(head, reduced, sample_from_anchor=not own_position))
    driver, draft, outputs = _draft(model, drafter, DSpark())
    assert driver.block == (5 if own_position else 6)
    for slot in range(2):
        anchor = int(driver.tokens[slot, driver.length[slot] - 1])
        tokens, corrected, confidence = _walk(drafter, model, outputs[slot, int(own_position) :], anchor)
        assert draft.tokens[slot].tolist() == tokens
        for index, expected in enumerate(corrected):
            torch.testing.assert_close(driver.draw.logits[index][slot], expected, atol=1e-4, rtol=0)
        torch.testing.assert_close(draft.confidence[slot], torch.tensor(confidence), atol=1e-4, rtol=0)


def test_a_zero_head_is_dflash_from_the_anchor(model: Any) -> None:
    """S3, bit for bit."""
    drafter = _drafter(_config("vanilla"))
    drafter.markov_head.markov_w2.weight.zero_()
    spark, sparked, _ = _draft(model, drafter, DSpark())
    flash, flashed, _ = _draft(model, drafter, DFlash())
    assert torch.equal(sparked.tokens, flashed.tokens)
    assert torch.equal(torch.stack(spark.draw.logits), torch.stack(flash.draw.logits))


@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("head", HEADS)
def test_pruned_walk(model: Any, head: str, reduced: bool) -> None:
    """All candidates: the whole walk. A few: the walk in which every other token is impossible."""
    drafter = _drafter(_config(head, reduced))
    drafter.markov_head.markov_w2.weight.mul_(4)  # biases that lift tokens from far behind
    width = drafter.config.draft_vocab
    _, whole, outputs = _draft(model, drafter, DSpark())
    _, every, _ = _draft(model, drafter, DSpark(candidates=width))
    assert torch.equal(every.tokens, whole.tokens)
    pruned, few, _ = _draft(model, drafter, DSpark(candidates=3))
    assert [tuple(logits.shape) for logits in pruned.draw.logits] == [(2, 3)] * 6
    base = drafter.head(outputs, model.get_output_embeddings())
    for slot in range(2):
        previous = int(pruned.tokens[slot, pruned.length[slot] - 1])
        state = torch.zeros(RANK)
        for index in range(6):
            embedded = drafter.markov_head.markov_w1.weight[previous]
            latent, state = drafter.markov_head.latent(outputs[slot, index], embedded, state)
            logits = base[slot, index] + drafter.markov_head.markov_w2(latent)
            kept = base[slot, index].topk(3).indices
            best = int(torch.full((width,), float("-inf")).index_copy(0, kept, logits[kept]).argmax())
            previous = best if drafter.target_ids is None else int(drafter.target_ids[best])
            assert int(few.tokens[slot, index]) == previous
    assert not torch.equal(few.tokens, whole.tokens)  # else this compared nothing


def test_confidence_threshold_drops_the_tail(model: Any) -> None:
    drafter = _drafter(_config("gated"))
    drafter.confidence_head.proj.weight.neg_()  # of both signs a seed gives, the one with high first rows
    _, whole, _ = _draft(model, drafter, DSpark())
    probability = whole.confidence.sigmoid()
    assert float(probability.min()) > 0
    threshold = float(probability.flatten().sort().values[4]) + 1e-6
    _, cut, _ = _draft(model, drafter, DSpark(confidence_threshold=threshold))
    for slot in range(2):
        low = [index for index in range(6) if float(probability[slot, index]) < threshold]
        kept = min(low, default=6)
        assert cut.tokens[slot].tolist() == whole.tokens[slot, :kept].tolist() + [-1] * (6 - kept)
    assert bool((cut.tokens == -1).any())
    assert not bool((cut.tokens == -1).all())
    assert math.isclose(float(cut.confidence[0, 0]), float(whole.confidence[0, 0]))


def test_confidence_may_ignore_the_markov_table_or_be_absent(model: Any) -> None:
    plain = _drafter(_config("vanilla", confidence=ConfidenceConfig(with_markov=False)))
    _, draft, outputs = _draft(model, plain, DSpark())
    torch.testing.assert_close(
        draft.confidence, plain.confidence_head.proj(outputs)[..., 0], atol=1e-5, rtol=0
    )
    none = _drafter(_config("vanilla", confidence=None))
    assert _draft(model, none, DSpark())[1].confidence is None


def test_options_are_part_of_the_method() -> None:
    assert replace(DSpark(), candidates=4) == DSpark(candidates=4)
    assert DSpark(candidates=4) != DSpark()
