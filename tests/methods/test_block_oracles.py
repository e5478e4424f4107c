"""DFlash, DSpark and DFlash 2 against other projects' numbers, drafts and accepted counts (tests/oracles)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from specc.checkpoints import read_drafter
from specc.methods.dflash import DFlash
from specc.methods.dflash2 import DFlash2
from specc.methods.dspark import DSpark
from tests import oracles
from tests.methods.harness import Driver, Text, model_info, record

METHODS = {method.name: method for method in (DFlash(), DSpark(), DFlash2())}
REFS = oracles.names("refs", "dflash", "dspark")
HIDDEN, LOGITS = 1e-5, 5e-5  # fp32 noise, from the oracles' README
CAPACITY = 128


def _load(name: str, **options: Any) -> tuple[Any, Any, Driver]:
    reference = oracles.reference(name)
    model = oracles.target(reference.info["target"])
    bundle = read_drafter(oracles.folder(reference.info["drafter"]), model_info(model))
    driver = Driver(
        METHODS[bundle.info.method],
        bundle.module,
        model,
        capacity=CAPACITY,
        block=reference.info["K"],
        **{"slots": 3, **options},
    )
    return reference, bundle, driver


def test_every_reference_of_the_family_is_here() -> None:
    assert len(REFS) == 19


@pytest.mark.parametrize("name", REFS)
def test_walk(name: str) -> None:
    reference, bundle, driver = _load(name)
    assert list(bundle.info.taps) == reference.info["taps_after_layers"]
    assert bundle.info.block == reference.info["K"]
    prompts = reference.info["prompts"]
    texts = [
        Text(ids, prompt["prompt_length"], record(driver.model, ids, bundle.info.taps))
        for prompt, ids in ((prompt, reference[f"p{index}.ids"]) for index, prompt in enumerate(prompts))
    ]
    driver.walk(texts, reference.info["new_tokens"])
    for index, (text, prompt) in enumerate(zip(texts, prompts, strict=True)):
        full = prompt["full_steps"]
        assert text.steps[:full] == prompt["steps"][:full]
        assert text.anchors[:full] == prompt["anchors"][:full]
        rows = [anchor - text.prompt for anchor in text.anchors]
        assert text.drafts == reference[f"p{index}.drafts"][rows].tolist()
        assert text.steps == reference[f"p{index}.accepted"][rows].tolist()


@pytest.mark.parametrize("name", ["dflash-zlab", "dspark-spec-vanilla", "dflash2-spec"])
@pytest.mark.parametrize("shift", [-1, 1])
def test_taps_off_by_one_lose_acceptance(name: str, shift: int) -> None:
    """The walk above can fail: the most likely mistake in reading a checkpoint breaks it."""
    reference, bundle, driver = _load(name, slots=1)
    prompt, ids = reference.info["prompts"][0], reference["p0.ids"]
    shifted = [tap + shift for tap in bundle.info.taps]
    text = Text(ids, prompt["prompt_length"], record(driver.model, ids, shifted))
    driver.walk([text], reference.info["new_tokens"])
    full = prompt["full_steps"]
    assert text.steps[:full] != prompt["steps"][:full]


@pytest.mark.parametrize("name", REFS)
def test_numbers(name: str) -> None:
    reference, bundle, driver = _load(name, slots=5)
    outputs: list[Tensor] = []
    bundle.module.register_forward_hook(lambda _module, _inputs, output: outputs.append(output))
    assert reference.taps is not None
    for slot, anchor in enumerate(reference["anchors"].tolist()):
        driver.prefill(slot, Text(reference["p0.ids"], anchor, reference.taps))
    draft = driver.draft()
    hidden = outputs[0]
    with torch.no_grad():
        logits = bundle.module.head(hidden, driver.model.get_output_embeddings())
    _close(hidden, reference["hidden"], HIDDEN)
    _close(logits, reference["logits"], LOGITS)
    assert draft.tokens.tolist() == reference["tokens"].tolist()
    drawn = torch.stack(driver.draw.logits, dim=1)
    if bundle.info.method == "dspark":
        _close(drawn, reference["corrected"], LOGITS)
        assert draft.confidence is not None
        _close(draft.confidence, reference["confidence_logit"], HIDDEN)
    elif bundle.info.method == "dflash2":
        ids, _ = bundle.module.candidate_selector.candidates(logits[:, 1:])
        _close_by_id(ids, drawn, reference["candidates"], reference["scores"])
    else:
        _close(drawn, reference["logits"][:, 1:], LOGITS)


def _close(found: Tensor, expected: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=0)


def _close_by_id(ids: Tensor, scores: Tensor, expected_ids: Tensor, expected_scores: Tensor) -> None:
    """Compare candidates as sets: z-lab does not sort them."""
    order, expected_order = ids.argsort(-1), expected_ids.argsort(-1)
    assert torch.equal(ids.gather(-1, order), expected_ids.gather(-1, expected_order))
    _close(scores.gather(-1, order), expected_scores.gather(-1, expected_order), LOGITS)
