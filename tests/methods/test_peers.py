"""Other projects' own code, run live: their draft tokens and accepted counts are ours.

tests/oracles holds what one version of each said; this asks the version that is installed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers.generation import candidate_generator

from specc.checkpoints import read_drafter
from specc.methods import METHODS
from specc.models.decoder_layer import final_norm
from tests import oracles
from tests.methods.harness import Driver, Text, model_info, record

NEW_TOKENS = 64
LOGITS_TOLERANCE = 5e-5  # the oracles' README
SPECULATORS = "speculators is not installed: its live drafts were not compared (pip install speculators)"


def own(name: str, method: str, place: str, block: int) -> tuple[oracles.Reference, Any, Driver, Text]:
    """Return a driver of a folder's drafter, and prompt 0 with its text."""
    reference = oracles.reference(name)
    model = oracles.target(reference.info["target"])
    bundle = read_drafter(oracles.folder(place), model_info(model), method)
    if method == "mtp":
        bundle.module.attach(final_norm(model))
    driver = Driver(METHODS[method], bundle.module, model, slots=1, capacity=140, block=block)
    ids = reference["p0.ids"]
    text = Text(ids, reference.info["prompts"][0]["prompt_length"], record(model, ids, bundle.info.taps))
    return reference, model, driver, text


def theirs(
    generator: str, model: Any, prompt: torch.Tensor, monkeypatch: pytest.MonkeyPatch, **settings: Any
) -> list[tuple[int, list[int]]]:
    """Return, per round of transformers' assisted generation, the anchor and the drafts."""
    kind = getattr(candidate_generator, generator, None)
    if kind is None:
        pytest.skip(f"this transformers has no {generator}: its live drafts were not compared")
    rounds: list[tuple[int, list[int]]] = []
    real: Callable[..., Any] = kind.get_candidates

    def get_candidates(self: Any, input_ids: torch.Tensor, *given: Any, **more: Any) -> Any:
        out = real(self, input_ids, *given, **more)
        length = input_ids.shape[1]
        rounds.append((length - 1, out[0][0, length:].tolist()))
        return out

    monkeypatch.setattr(kind, "get_candidates", get_candidates)
    model.generate(
        prompt[None], attention_mask=torch.ones_like(prompt[None]), max_new_tokens=NEW_TOKENS, do_sample=False,
        eos_token_id=None, **settings,
    )  # fmt: skip
    return rounds[1:]  # the first reads the prompt


def assert_same_walk(text: Text, rounds: list[tuple[int, list[int]]], block: int) -> None:
    whole = [
        (anchor, drafts) for anchor, drafts in rounds if len(drafts) == block
    ]  # cut at the end of the text
    assert len(whole) > 10
    assert whole == list(zip(text.anchors, text.drafts, strict=True))[: len(whole)]
    counts = [after - before - 1 for (before, _), (after, _) in itertools.pairwise(whole)]
    assert counts == text.steps[: len(counts)]
    assert len(set(counts)) > 1


def test_mtp_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    _, model, driver, text = own("mtp-glm4moe-mtp1", "mtp", "targets/glm4moe-mtp1", 1)
    # They find the module by the layer numbers of released models; this one has four layers.
    monkeypatch.setattr(model, "_keys_to_ignore_on_load_unexpected", [r"model\.layers\.4\."], raising=False)
    rounds = theirs("MTPCandidateGenerator", model, text.ids[: text.prompt], monkeypatch, use_mtp=True)
    driver.walk([text], NEW_TOKENS)
    assert_same_walk(text, rounds, 1)


@pytest.mark.parametrize("name", ["dflash-hf", "dflash-hf-swa"])
def test_dflash_of_transformers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers: Any = pytest.importorskip(
        "transformers.models.muse_glimmer_assistant", reason="this transformers has no DFlash drafter"
    )
    _, model, driver, text = own(name, "dflash", f"drafters/{name}", 5)
    assistant = transformers.MuseGlimmerAssistantModel.from_pretrained(
        oracles.folder(f"drafters/{name}")
    ).eval()
    rounds = theirs(
        "DFlashTokenCandidateGenerator", model, text.ids[: text.prompt], monkeypatch,
        assistant_model=assistant, speculation_type="dflash",
    )  # fmt: skip
    driver.walk([text], NEW_TOKENS)
    assert_same_walk(text, rounds, 5)


@pytest.fixture
def speculators() -> Any:
    return pytest.importorskip("speculators", reason=SPECULATORS, exc_type=ImportError)


@pytest.mark.peers
@pytest.mark.parametrize("name", ["dflash-spec", "dflash-spec-swa", "dspark-spec-vanilla"])
def test_blocks_of_speculators(name: str, speculators: Any) -> None:
    """Their training forward with one anchor is the pass over a draft's block."""
    method, reference = name.split("-")[0], oracles.reference(name)
    _, model, driver, text = own(name, method, f"drafters/{name}", reference.info["K"])
    kind = speculators.DFlashDraftModel if method == "dflash" else speculators.DSparkDraftModel
    config = kind.config_class.from_pretrained(oracles.folder(f"drafters/{name}"))
    config.speculators_config.verifier.name_or_path = str(oracles.folder(reference.info["target"]))
    config.transformer_layer_config._attn_implementation = "eager"
    drafter = kind.from_pretrained(oracles.folder(f"drafters/{name}"), config=config).eval()
    ids, features = text.ids[None], text.features[None]
    last = torch.zeros(1, ids.shape[1], model.config.hidden_size)  # for labels, which nobody asks for
    outputs: list[torch.Tensor] = []
    driver.drafter.register_forward_hook(lambda _module, _inputs, output: outputs.append(output))
    for anchor in range(text.prompt, text.prompt + 40, 7):
        where = torch.zeros_like(ids)
        where[0, anchor] = 1
        with torch.no_grad():
            _, logits, *_ = drafter._backbone_forward(
                features, ids, where, last, torch.zeros_like(ids), max_anchors=1
            )
        driver.prefill(0, Text(text.ids, anchor, text.features))
        draft = driver.draft()
        mine = driver.drafter.head(outputs[-1], model.get_output_embeddings())
        torch.testing.assert_close(mine, logits, rtol=0, atol=LOGITS_TOLERANCE)
        if method == "dflash":
            assert draft.tokens[0].tolist() == logits[0, 1:].argmax(-1).tolist()
