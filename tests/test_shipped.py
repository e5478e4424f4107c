"""The drafters that come with specc: small enough, found by name, lossless, and of use."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import specc
from specc.models.load import load_target
from specc.pairing import SHIPPED
from specc.prompts import built_in_prompts

MOST_BYTES = 25_000_000
FOLDERS = sorted(path.parent for path in SHIPPED.glob("*/*/config.json"))


def test_there_is_one_for_the_default_model():
    assert (SHIPPED / "smollm2-135m" / "dspark") in FOLDERS


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_it_is_small_and_says_where_it_comes_from(folder: Path):
    assert {path.name for path in folder.iterdir()} == {"README.md", "config.json", "model.safetensors"}
    assert sum(path.stat().st_size for path in folder.iterdir()) <= MOST_BYTES
    card = (folder / "README.md").read_text(encoding="utf-8")
    for said in (folder.parent.name, "specc train", "answer tokens", "prefix accepted", "evaluation prompt"):
        assert said in card


@pytest.mark.real_model
def test_nothing_is_held_against_them_but_their_vocabulary():
    target = load_target("smollm2-135m")
    for folder in FOLDERS:
        report = specc.check(target, folder, method=folder.name, probe=False)
        assert {f.subject for f in report.findings if f.effect != "note"} <= {"draft vocabulary"}, (
            report.render()
        )


@pytest.mark.real_model
@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_it_is_found_and_helps_and_changes_nothing(folder: Path):
    target = load_target(folder.parent.name, dtype="float32")
    made = [
        specc.compile(target, method=method, max_length=160, backend="native")
        for method in (folder.name, "plain")
    ]
    tokens = steps = 0
    for prompt in built_in_prompts()[:3]:
        ids = prompt.encode(target.tokenizer)[None]
        drafted, plain = (
            c.generate(ids, max_new_tokens=40, do_sample=False, return_dict_in_generate=True) for c in made
        )
        assert torch.equal(drafted.sequences, plain.sequences)
        tokens, steps = tokens + drafted.stats.tokens, steps + drafted.stats.steps
    card = (folder / "README.md").read_text(encoding="utf-8")
    promised = float(card.split("Mean accepted length, bonus included: ")[1].split(". ")[0].split(".\n")[0])
    # Held-out answers are easier than these prompts; a drafter that does not fit gives 1.0.
    assert tokens / steps - 1 > 0.35 * (promised - 1)
