"""MTP against third-party drafts and accepted counts, and against its own from-scratch definition."""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from specc.checkpoints import read_drafter
from specc.contracts import DrafterBundle
from specc.methods.mtp import Mtp
from specc.models.decoder_layer import final_norm
from tests import oracles
from tests.methods.harness import Driver, Text, model_info, record

STATE_TOLERANCE = 1e-5  # fp32: chunks change the order of sums, nothing else
LOGITS_TOLERANCE, HIDDEN_TOLERANCE = 5e-5, 1e-5  # the oracles' README


@dataclass(frozen=True)
class Case:
    """A reference, the drafts asked of it, and under which prefix it keeps them."""

    reference: str
    block: int
    prefix: str = ""


CASES = {
    "speculators": Case("mtp-spec", 3),
    "glm": Case("mtp-glm4moe-mtp1", 1),
    "glm-reused": Case("mtp-glm4moe-mtp1", 3, "recursive_"),
    "two-modules": Case("mtp-llama-mtp2", 1),  # its first column: the second module is not run
}
WALKS = ("speculators", "glm", "glm-reused")  # of two-modules, only drafts of depth 1 are the third party's


def load(case: Case) -> tuple[oracles.Reference, Any, DrafterBundle]:
    reference = oracles.reference(case.reference)
    model = oracles.target(reference.info["target"])
    place = reference.info["drafter"] if case.reference == "mtp-spec" else reference.info["target"]
    bundle = read_drafter(oracles.folder(place), model_info(model), "mtp")
    assert bundle.module.needs_target_norm == (case.reference == "mtp-spec")
    bundle.module.attach(final_norm(model))
    return reference, model, bundle


def texts_of(reference: oracles.Reference, model: Any) -> list[Text]:
    texts = []
    for index, prompt in enumerate(reference.info["prompts"]):
        ids = reference[f"p{index}.ids"]
        texts.append(
            Text(ids, prompt["prompt_length"], record(model, ids, (model.config.num_hidden_layers,)))
        )
    return texts


def driver_of(
    bundle: DrafterBundle, model: Any, block: int, slots: int = 3, method: Mtp | None = None
) -> Driver:
    return Driver(method or Mtp(), bundle.module, model, slots=slots, capacity=140, block=block)


@pytest.mark.parametrize("name", WALKS)
def test_walk_equals_third_party(name: str) -> None:
    case = CASES[name]
    reference, model, bundle = load(case)
    texts = texts_of(reference, model)
    driver_of(bundle, model, case.block).walk(texts, 64)
    for text, prompt in zip(texts, reference.info["prompts"], strict=True):
        want = prompt["recursive"] if case.prefix else prompt
        assert text.steps[: want["full_steps"]] == want["steps"][: want["full_steps"]]
        assert text.anchors[: want["full_steps"]] == want["anchors"][: want["full_steps"]]


@pytest.mark.parametrize("name", CASES)
def test_drafts_of_every_anchor_equal_third_party(name: str) -> None:
    case = CASES[name]
    reference, model, bundle = load(case)
    texts = texts_of(reference, model)
    driver = driver_of(bundle, model, case.block)
    for slot, text in enumerate(texts):
        driver.prefill(slot, text)
    for _ in range(64):
        driver.step(texts, allowed=lambda slot, step: 0)
    for index, text in enumerate(texts):
        assert text.anchors == reference[f"p{index}.anchors"].tolist()
        assert text.drafts == reference[f"p{index}.{case.prefix}drafts"][:, : case.block].tolist()


@pytest.mark.parametrize("name", CASES)
def test_numbers_equal_third_party(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]
    reference, model, bundle = load(case)
    # The reference's features are after the final norm already.
    monkeypatch.setattr(bundle.module, "fuse", lambda features: features)
    features, outputs = reference["last_hidden_post_norm"], []
    head = bundle.module.head

    def keep(output: Tensor, target_head: Any) -> Tensor:
        outputs.append(bundle.module.norm_out(output))
        return head(output, target_head)

    monkeypatch.setattr(bundle.module, "head", keep)
    for index, anchor in enumerate(reference["anchors"].tolist()):
        driver = driver_of(bundle, model, case.block, slots=1)
        driver.prefill(0, Text(reference["p0.ids"], anchor, features[:anchor]))
        outputs.clear()
        draft = driver.draft()
        want = {
            key: reference[case.prefix + key][index, : case.block] for key in ("tokens", "hidden", "logits")
        }
        assert draft.tokens[0].tolist() == want["tokens"].tolist()
        torch.testing.assert_close(torch.cat(outputs), want["hidden"], rtol=0, atol=HIDDEN_TOLERANCE)
        torch.testing.assert_close(
            torch.cat(driver.draw.logits), want["logits"], rtol=0, atol=LOGITS_TOLERANCE
        )


@pytest.mark.parametrize(("field", "same_first"), [("reads", False), ("carry", True)])
def test_the_other_side_of_a_norm_is_noticed(field: str, same_first: bool) -> None:
    reference, model, bundle = load(CASES["speculators"])
    text = texts_of(reference, model)[0]
    # The module's own norm follows, so tokens seldom change: only the logits tell.
    logits: list[list[Tensor]] = []
    for config in (bundle.module.config, replace(bundle.module.config, **{field: "pre"})):
        bundle.module.config = config
        driver = driver_of(bundle, model, 3, slots=1)
        driver.prefill(0, text)
        driver.draft()
        logits.append(driver.draw.logits)
    assert torch.equal(logits[0][0], logits[1][0]) == same_first
    assert float((logits[0][1] - logits[1][1]).abs().max()) > 100 * LOGITS_TOLERANCE


def test_a_state_a_layer_early_accepts_less() -> None:
    case = CASES["glm-reused"]
    reference, model, bundle = load(case)
    last, walked = model.config.num_hidden_layers, []
    for layer in (last, last - 1):
        texts = [
            Text(text.ids, text.prompt, record(model, text.ids, (layer,)))
            for text in texts_of(reference, model)
        ]
        driver_of(bundle, model, case.block).walk(texts, 64)
        steps = [step for text in texts for step in text.steps]
        walked.append(sum(steps) / len(steps))
    assert walked[1] < 0.9 * walked[0]


@pytest.mark.parametrize("name", ["speculators", "glm-reused"])
def test_state_after_ragged_accepts_equals_from_scratch(name: str) -> None:
    case = CASES[name]
    reference, model, bundle = load(case)
    texts = texts_of(reference, model)[:2]
    driver = driver_of(bundle, model, case.block, slots=2)
    for slot, text in enumerate(texts):
        driver.prefill(slot, text, chunk=3 + slot)
    for _ in range(8):
        driver.step(texts, allowed=lambda slot, step: (step + 2 * slot) % 4)
    assert len({step for text in texts for step in text.steps}) > 2
    for slot, text in enumerate(texts):
        length = int(driver.length[slot])
        fresh = driver_of(bundle, model, case.block, slots=1)
        fresh.prefill(0, Text(text.ids, length - 1, text.features), chunk=200)
        torch.testing.assert_close(
            driver.state["hidden"][slot], fresh.state["hidden"][0], rtol=0, atol=STATE_TOLERANCE
        )
        for key in ("key.0", "value.0"):
            ours, theirs = driver.state[key][slot, :, : length - 1], fresh.state[key][0, :, : length - 1]
            torch.testing.assert_close(ours, theirs, rtol=0, atol=STATE_TOLERANCE)


def test_one_draft_equals_the_first_of_three() -> None:
    reference, model, bundle = load(CASES["glm-reused"])
    text = texts_of(reference, model)[0]
    firsts = []
    for block in (1, 3):
        driver = driver_of(bundle, model, block, slots=1)
        driver.prefill(0, text)
        firsts.append(
            [int(driver.step([text], allowed=lambda slot, step: 0).tokens[0, 0]) for _ in range(12)]
        )
    assert firsts[0] == firsts[1]


def test_window_limits_only_drafted_rows() -> None:
    reference, model, bundle = load(CASES["speculators"])
    text = texts_of(reference, model)[0]
    logits = {}
    for window in (None, 100, 2):
        driver = driver_of(bundle, model, 4, slots=1, method=Mtp(draft_attention_window=window))
        driver.prefill(0, text)
        driver.draft()
        logits[window] = torch.cat(driver.draw.logits)
    assert torch.equal(logits[None], logits[100])
    assert torch.equal(logits[None][0], logits[2][0])
    assert not torch.allclose(logits[None][1], logits[2][1])


@pytest.mark.parametrize("name", ["speculators", "glm-reused"])
def test_traces_to_operators_alone(name: str) -> None:
    reference, model, bundle = load(CASES[name])
    driver, text = driver_of(bundle, model, 3, slots=2), texts_of(reference, model)[0]
    driver.prefill(0, text)
    driver.prefill(1, text)
    names = sorted(driver.state)

    def step(length: Tensor, *state: Tensor) -> Tensor:
        context = replace(driver.context(), length=length, state=dict(zip(names, state, strict=True)))
        return driver.method.draft(context).tokens

    inputs = (driver.length, *(driver.state[key].clone() for key in names))
    with torch.no_grad():
        graph = make_fx(step, tracing_mode="fake", pre_dispatch=True, _allow_non_fake_inputs=True)(*inputs)
        called = [node.target for node in graph.graph.nodes if node.op == "call_function"]
        assert {target for target in called if not isinstance(target, torch._ops.OpOverload)} <= {
            operator.getitem
        }
        assert torch.ops.specc.attend.default in called
        assert graph(*inputs).tolist() == driver.draft().tokens.tolist()


def test_reject_gives_every_reason() -> None:
    _, model, bundle = load(CASES["two-modules"])
    target, method = model_info(model), Mtp()
    assert method.reject(target, bundle.info, 1) == ()
    assert method.blocks(bundle.info) == 1
    assert method.taps(target, bundle.info) == (6,)
    assert any("2 MTP modules" in reason for reason in method.reject(target, bundle.info, 2))
    wrong = replace(bundle.info, hidden=32, vocab=600, method="eagle3")
    assert len(Mtp(draft_attention_window=0).reject(target, wrong, 0)) == 5
    assert "checkpoint" in method.reject(target, None, 3)[0]
