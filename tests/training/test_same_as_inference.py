"""A training block's logits are what inference computes at the same anchor: the classic silent loss, caught."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from specc import methods
from specc.models.load import LoadedModel, load_target
from specc.training.loop import make_reference
from specc.training.losses import dflash_logits, dspark_logits, selector_scores
from specc.training.packing import Batch, collate, run_blocks
from specc.training.rollout import rollout
from specc.training.shards import Example
from specc.training.start import Sizes, make_drafter, target_parts
from tests.methods.harness import Driver, Text, record
from tests.tiny import VOCAB, tiny_model

TAPS = (1, 2, 3)
LENGTH, BLOCK = 24, 4
ANCHORS = (5, 9, 17)


@pytest.fixture(scope="module")
def target() -> LoadedModel:
    return load_target(tiny_model("llama", num_hidden_layers=4))


def make(target: LoadedModel, method: str, layers: int) -> Any:
    sizes = Sizes(
        method,
        layers=layers,
        block=BLOCK,
        taps=TAPS,
        markov_rank=4,
        selector_rank=4,
        draft_vocab=None if method == "dflash2" else 40,
    )
    _, module = make_drafter(sizes, target, torch.arange(VOCAB) % 7, seed=1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():  # nothing stays at a value that hides a mistake: zeros, ones, copies
        for parameter in module.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return module.eval()


def inferred(
    target: LoadedModel, method: str, module: Any, ids: Tensor, anchor: int
) -> tuple[list[Tensor], Tensor]:
    """Return the logits that a draft at ``anchor`` is drawn from, and the tokens drawn."""
    driver = Driver(
        methods.get(method),
        module,
        target.module,
        slots=1,
        capacity=LENGTH + BLOCK,
        block=BLOCK,
        info=target.info,
    )
    text = Text(ids, anchor, record(target.module, ids, TAPS))
    driver.prefill(0, text)
    drafted = driver.draft().tokens[0]
    return [logits[0] for logits in driver.draw.logits], drafted


def as_batch(target: LoadedModel, ids: Tensor, anchor: int, drafted: Tensor) -> Batch:
    """Return the text up to the anchor and the drafted tokens as a training sequence."""
    whole = torch.cat([ids[: anchor + 1], drafted, ids[:1]])
    features = record(target.module, whole[:-1], TAPS)
    example = Example(
        whole, 3, features, torch.zeros(len(features), target.info.hidden), torch.zeros(len(features))
    )
    return collate([example], [0])


@pytest.mark.parametrize("method", ["dspark", "dflash", "dflash2"])
@pytest.mark.parametrize("layers", [1, 2])
@torch.no_grad()
def test_block(target: LoadedModel, method: str, layers: int) -> None:
    module = make(target, method, layers)
    parts = target_parts(target)
    ids = torch.randint(3, VOCAB, (LENGTH,), generator=torch.Generator().manual_seed(3))
    for anchor in ANCHORS:
        expected, drafted = inferred(target, method, module, ids, anchor)
        batch = as_batch(target, ids, anchor, drafted)
        # Other anchors in the same pass must change nothing.
        anchors = torch.tensor([[4, anchor, anchor + 2]])
        blocks = run_blocks(module, batch, anchors, torch.ones_like(anchors, dtype=torch.bool), parts.embed)
        if method == "dspark":
            logits, confidence = dspark_logits(module, blocks)
            assert confidence is not None
            assert confidence.shape == logits.shape[:-1]
        else:
            logits = dflash_logits(module, blocks, make_reference(parts, module))
            if method == "dflash2":
                logits, _ = selector_scores(module, blocks, logits)
        torch.testing.assert_close(logits[0, 1], torch.stack(expected), rtol=0, atol=1e-4)
        assert blocks.valid[0, 1].all()
        assert torch.equal(blocks.label[0, 1], drafted)
        assert not blocks.valid[0, 2, -1], "the last block reaches past the text's end by one"


@pytest.mark.parametrize("layers", [1, 2])
@torch.no_grad()
def test_eagle3(target: LoadedModel, layers: int) -> None:
    module = make(target, "eagle3", layers)
    parts = target_parts(target)
    ids = torch.randint(3, VOCAB, (LENGTH,), generator=torch.Generator().manual_seed(3))
    for anchor in ANCHORS:
        expected, drafted = inferred(target, "eagle3", module, ids, anchor)
        batch = as_batch(target, ids, anchor, drafted)
        rows = torch.tensor([[2, anchor - 1, batch.ids.shape[1] - 1]])
        outputs = rollout(module, batch.features, batch.ids, parts.embed, BLOCK, rows)
        logits = torch.stack([module.head(o[0, 1]) for o in outputs])
        torch.testing.assert_close(logits, torch.stack(expected), rtol=0, atol=1e-4)
