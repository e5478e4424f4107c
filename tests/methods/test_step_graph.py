"""Drafter methods inside the one step graph: accepted counts per step equal the third party's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specc.backends.eager import Eager
from specc.build import Drafter, StepBuilder, make_target
from specc.checkpoints import read_drafter
from specc.methods import METHODS
from specc.models.decoder_layer import final_norm
from specc.models.info import model_info
from specc.runtime.engine import Engine
from specc.runtime.scheduler import Request, Scheduler
from specc.runtime.stats import Stats
from specc.step import Shape
from tests import oracles


def generate(
    name: str, method: str, place: str, block: int, slots: int
) -> tuple[oracles.Reference, dict[int, list[Any]]]:
    reference = oracles.reference(name)
    model = oracles.target(reference.info["target"])
    info = model_info(model)
    bundle = read_drafter(oracles.folder(place), info, method)
    if method == "mtp":
        bundle.module.attach(final_norm(model))
    chosen = METHODS[method]
    assert chosen.reject(info, bundle.info, block) == ()
    shape = Shape(slots=slots, capacity=160, vocab=info.vocab)
    builder = StepBuilder(make_target(model, info), chosen, Drafter(bundle.info, bundle.module), shape)
    scheduler = Scheduler(Engine(builder, Eager(), feed=8), block, "ratio")
    requests = []
    for index, prompt in enumerate(reference.info["prompts"]):
        ids = reference[f"p{index}.ids"][: prompt["prompt_length"]]
        requests.append(Request(ids, limit=len(ids) + 64, key=index))
    records: dict[int, list[Any]] = {index: [] for index in range(len(requests))}
    for progress in scheduler.run(iter(requests), Stats()):
        records[progress.request.key].append(progress.record)
    return reference, records


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "method", "place", "block"),
    [
        ("eagle3-spec", "eagle3", "drafters/eagle3-spec", 4),
        ("mtp-glm4moe-mtp1", "mtp", "targets/glm4moe-mtp1", 1),
        ("mtp-spec", "mtp", "drafters/mtp-spec", 3),
        ("dflash-spec-swa", "dflash", "drafters/dflash-spec-swa", 5),
        ("dspark-spec-gated", "dspark", "drafters/dspark-spec-gated", 6),
        ("dflash2-zlab-swa", "dflash2", "drafters/dflash2-zlab-swa", 4),
    ],
)
def test_steps_equal_third_party(name: str, method: str, place: str, block: int) -> None:
    # One slot, handed from request to request: what the one before left in it must not matter.
    reference, records = generate(name, method, place, block, slots=1)
    for index, prompt in enumerate(reference.info["prompts"]):
        tokens = torch.tensor([token for record in records[index] for token in record.tokens])
        assert torch.equal(tokens, reference[f"p{index}.ids"][prompt["prompt_length"] :][:64])
        assert records[index][0].drafted == 0  # the step that reads the prompt's end
        steps = [record.accepted for record in records[index][1:]]
        assert steps[: prompt["full_steps"]] == prompt["steps"][: prompt["full_steps"]]


@pytest.mark.slow
def test_two_slots_give_the_same_tokens() -> None:
    reference, records = generate("eagle3-spec-31", "eagle3", "drafters/eagle3-spec-31", 3, slots=2)
    for index, prompt in enumerate(reference.info["prompts"]):
        tokens = torch.tensor([token for record in records[index] for token in record.tokens])
        assert torch.equal(tokens, reference[f"p{index}.ids"][prompt["prompt_length"] :][:64])
        assert sum(record.accepted for record in records[index]) > 20
