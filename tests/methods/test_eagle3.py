"""EAGLE-3 against third-party drafts and accepted counts, and against its own from-scratch definition."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from specc.checkpoints import read_drafter
from specc.contracts import DrafterBundle
from specc.drafters.eagle3 import Eagle3Config, Eagle3Drafter
from specc.drafters.layers import LayerConfig
from specc.methods.eagle3 import Eagle3
from tests import oracles
from tests.methods.harness import Driver, Text, model_info, record

NAMES = oracles.names("drafters", "eagle3")
STATE_TOLERANCE = 1e-5  # fp32: chunks change the order of sums, nothing else
LOGITS_TOLERANCE, HIDDEN_TOLERANCE = 5e-5, 1e-5  # the oracles' README


def load(name: str) -> tuple[oracles.Reference, object, DrafterBundle]:
    reference = oracles.reference(name)
    model = oracles.target(reference.info["target"])
    return reference, model, read_drafter(oracles.folder(f"drafters/{name}"), model_info(model), "eagle3")


def texts_of(reference: oracles.Reference, model: object, taps: tuple[int, ...]) -> list[Text]:
    texts = []
    for index, prompt in enumerate(reference.info["prompts"]):
        ids = reference[f"p{index}.ids"]
        texts.append(Text(ids, prompt["prompt_length"], record(model, ids, taps)))
    return texts


def random_drafter(layers: int = 2, **changes: object) -> Eagle3Drafter:
    torch.manual_seed(0)
    layer = LayerConfig(hidden=16, intermediate=24, heads=4, kv_heads=2, head_dim=8)
    config = replace(
        Eagle3Config(
            layer=layer, target_hidden=12, taps=3, vocab=40, draft_vocab=40, layers=layers, own_embed=True
        ),
        **changes,
    )
    drafter = Eagle3Drafter(config).eval().requires_grad_(False)
    for parameter in drafter.parameters():
        parameter.normal_(std=0.4)
    return drafter


class Stub(nn.Module):
    """A target that nobody runs: drafters with their own embedding and head need only its sizes."""

    def __init__(self, hidden: int = 12, vocab: int = 40) -> None:
        super().__init__()
        self.config = SimpleNamespace(vocab_size=vocab)
        self.embedding, self.head = nn.Embedding(vocab, hidden), nn.Linear(hidden, vocab, bias=False)

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def get_output_embeddings(self) -> nn.Module:
        return self.head


def random_text(seed: int, length: int = 40, prompt: int = 9) -> Text:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 40, (length,), generator=generator)
    return Text(ids, prompt, torch.randn(length, 36, generator=generator))


def driver_of(
    drafter: Eagle3Drafter, slots: int, method: Eagle3 | None = None, capacity: int = 48, block: int = 4
):
    info = model_info(oracles.target("llama"))  # only read for its dtype
    return Driver(method or Eagle3(), drafter, Stub(), slots=slots, capacity=capacity, block=block, info=info)


@pytest.mark.parametrize("name", NAMES)
def test_walk_equals_third_party(name: str) -> None:
    reference, model, bundle = load(name)
    assert list(bundle.info.taps) == reference.info["taps_after_layers"]
    texts = texts_of(reference, model, bundle.info.taps)
    Driver(Eagle3(), bundle.module, model, slots=3, capacity=140, block=4).walk(texts, 64)
    for text, prompt in zip(texts, reference.info["prompts"], strict=True):
        full = prompt["full_steps"]
        assert text.steps[:full] == prompt["steps"][:full]
        assert text.anchors[:full] == prompt["anchors"][:full]


@pytest.mark.parametrize("name", NAMES)
def test_drafts_of_every_anchor_equal_third_party(name: str) -> None:
    reference, model, bundle = load(name)
    texts = texts_of(reference, model, bundle.info.taps)
    driver = Driver(Eagle3(), bundle.module, model, slots=3, capacity=140, block=4)
    for slot, text in enumerate(texts):
        driver.prefill(slot, text)
    for _ in range(64):
        driver.step(texts, allowed=lambda slot, step: 0)
    for index, text in enumerate(texts):
        assert text.anchors == reference[f"p{index}.anchors"].tolist()
        assert text.drafts == reference[f"p{index}.drafts"].tolist()


@pytest.mark.parametrize("name", NAMES)
def test_numbers_equal_third_party(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reference, model, bundle = load(name)
    assert reference.taps is not None
    outputs: list[Tensor] = []
    head = bundle.module.head

    def keep(output: Tensor, target_head: object = None) -> Tensor:
        outputs.append(output)
        return head(output, target_head)

    monkeypatch.setattr(bundle.module, "head", keep)
    for index, anchor in enumerate(reference["anchors"].tolist()):
        driver = Driver(Eagle3(), bundle.module, model, slots=1, capacity=140, block=4)
        driver.prefill(0, Text(reference["p0.ids"], anchor, reference.taps[:anchor]))
        outputs.clear()
        draft = driver.draft()
        assert draft.tokens[0].tolist() == reference["tokens"][index].tolist()
        hidden, logits = torch.cat(outputs), torch.cat(driver.draw.logits)
        torch.testing.assert_close(hidden, reference["hidden_pre_norm"][index], rtol=0, atol=HIDDEN_TOLERANCE)
        torch.testing.assert_close(logits, reference["logits"][index], rtol=0, atol=LOGITS_TOLERANCE)


def test_recorded_taps_equal_the_references() -> None:
    reference, model, bundle = load("eagle3-spec")
    assert reference.taps is not None
    taps = record(model, reference["p0.ids"], bundle.info.taps)
    torch.testing.assert_close(taps[: len(reference.taps)], reference.taps, rtol=0, atol=HIDDEN_TOLERANCE)


@pytest.mark.parametrize("shift", [-1, 1])
def test_shifted_tap_accepts_less(shift: int) -> None:
    reference, model, bundle = load("eagle3-spec")
    walked = {}
    for by in (0, shift):
        texts = texts_of(reference, model, tuple(tap + by for tap in bundle.info.taps))
        Driver(Eagle3(), bundle.module, model, slots=3, capacity=140, block=4).walk(texts, 64)
        walked[by] = [step for text in texts for step in text.steps]
    assert walked[shift] != walked[0]
    assert sum(walked[shift]) / len(walked[shift]) < 0.9 * sum(walked[0]) / len(walked[0])


def test_reduced_vocabulary_drafts_only_its_ids() -> None:
    reference, model, bundle = load("eagle3-specforge-fcnorm-tied")
    flags = oracles.tensors("drafters/eagle3-specforge-fcnorm-tied/model.safetensors")["t2d"]
    assert bundle.module.target_ids.tolist() == flags.nonzero().flatten().tolist()
    driver = Driver(Eagle3(), bundle.module, model, slots=1, capacity=140, block=6)
    text = texts_of(reference, model, bundle.info.taps)[0]
    driver.prefill(0, text)
    for _ in range(8):
        assert bool(flags[driver.step([text], allowed=lambda slot, step: 0).tokens].all())


def dense_outputs(drafter: Eagle3Drafter, ids: Tensor, features: Tensor) -> tuple[Tensor, dict[int, tuple]]:
    """Return outputs of rows 0..len(ids)-2 and each layer's K/V by one causal forward, as in training."""
    kept: dict[int, tuple[Tensor, Tensor]] = {}

    def attend(index: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        kept[index] = key[0], value[0]
        out = nn.functional.scaled_dot_product_attention(
            query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), is_causal=True, enable_gqa=True
        )
        return out.transpose(1, 2)

    embedding = drafter.embed(ids[None, 1:], nn.Identity())
    position = torch.arange(len(ids) - 1)[None]
    return drafter.step(drafter.fuse(features[None, : len(ids) - 1]), embedding, position, attend)[0], kept


def assert_state_is_from_scratch(driver: Driver, slot: int, text: Text) -> None:
    length = int(driver.length[slot])
    outputs, kept = dense_outputs(driver.drafter, text.ids[:length], text.features)
    torch.testing.assert_close(driver.state["hidden"][slot], outputs[-1], rtol=0, atol=STATE_TOLERANCE)
    for index, (key, value) in kept.items():
        for name, want in (("key", key), ("value", value)):
            got = driver.state[f"{name}.{index}"][slot, :, : length - 1].transpose(0, 1)
            torch.testing.assert_close(got, want, rtol=0, atol=STATE_TOLERANCE)


@pytest.mark.parametrize("chunk", [1, 4, 100])
@pytest.mark.parametrize(
    "flags", [{}, {"norm_before_residual": True, "fc_norm": True}, {"norm_before_fc": True}]
)
def test_prefill_in_chunks_equals_one_forward(chunk: int, flags: dict[str, bool]) -> None:
    driver, text = driver_of(random_drafter(**flags), slots=2), random_text(1)
    driver.prefill(1, text, chunk=chunk)
    assert_state_is_from_scratch(driver, 1, text)


def test_state_after_ragged_accepts_equals_from_scratch() -> None:
    driver, texts = driver_of(random_drafter(), slots=2), [random_text(2), random_text(3, prompt=5)]
    for slot, text in enumerate(texts):
        driver.prefill(slot, text)
    pattern = [(0, 4), (3, 1), (4, 0), (2, 2), (1, 4)]
    truth = [text.ids.clone() for text in texts]
    for step in range(len(pattern)):
        # Rewrite the future so that exactly the wanted number of drafts is right.
        proposed = driver.draft().tokens
        for slot, text in enumerate(texts):
            at = int(driver.length[slot])
            wanted = pattern[step][slot]
            truth[slot][at : at + wanted] = proposed[slot, :wanted]
            if wanted < 4:
                truth[slot][at + wanted] = (proposed[slot, wanted] + 1) % 40
            text.ids = truth[slot]
        driver.step(texts)
        assert tuple(text.steps[-1] for text in texts) == pattern[step]
        for slot, text in enumerate(texts):
            assert_state_is_from_scratch(driver, slot, text)


def test_drafts_are_a_chain_from_the_newest_true_row() -> None:
    drafter = random_drafter(carry="post")
    driver, text = driver_of(drafter, slots=1), random_text(4)
    driver.prefill(0, text)
    got = driver.draft().tokens[0].tolist()
    # From scratch: append each drafted token as a row whose feature is the previous row's normed output.
    ids, rows = text.ids[: text.prompt + 1], drafter.fuse(text.features[: text.prompt])
    want = []
    for _ in range(4):

        def attend(index: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            out = nn.functional.scaled_dot_product_attention(
                query.transpose(0, 1),
                key.transpose(0, 1),
                value.transpose(0, 1),
                is_causal=True,
                enable_gqa=True,
            )
            return out.transpose(0, 1)

        position = torch.arange(len(ids) - 1)
        output = drafter.step(rows, drafter.embed(ids[1:], nn.Identity()), position, attend)
        token = drafter.head(output[-1:]).argmax(-1)
        want.append(int(token))
        ids, rows = torch.cat([ids, token]), torch.cat([rows, drafter.carried(output[-1:])])
    assert got == want


def test_first_token_has_no_draft_and_stale_state_does_not_matter() -> None:
    driver, text = driver_of(random_drafter(), slots=2), random_text(5)
    driver.prefill(0, random_text(6))
    fresh = driver_of(random_drafter(), slots=2)
    for each in (driver, fresh):
        each.clear(0)
        each.commit(0, text.ids[:1])
        assert each.draft().tokens[0].tolist() == [-1] * 4
        each.commit(0, text.ids[1:2])
        each.observe([(0, 0, True), (0, 0, False)], [text.features] * 2)
    assert driver.draft().tokens[0].tolist() == fresh.draft().tokens[0].tolist()
    assert_state_is_from_scratch(driver, 0, text)


@pytest.mark.parametrize("limit", ["capacity", "positions"])
def test_drafts_past_the_end_are_none_and_the_rest_unchanged(limit: str) -> None:
    drafter, text = random_drafter(), random_text(7, prompt=20)
    roomy = driver_of(drafter, slots=2)
    if limit == "capacity":
        tight = driver_of(drafter, slots=2, capacity=22)
    else:
        ends = Eagle3Drafter(replace(drafter.config, max_position=22))
        ends.load_state_dict(drafter.state_dict())
        tight = driver_of(ends.eval(), slots=2)
    for driver in (roomy, tight):
        driver.prefill(1, text)
    wide, narrow = roomy.draft().tokens[1].tolist(), tight.draft().tokens[1].tolist()
    # Rows 19 (true), 20 and 21 exist; the next would sit at position 22.
    assert narrow == [*wide[:3], -1]
    assert not bool(torch.isnan(tight.state["key.0"][1, :, :22]).any())


def test_window_limits_only_drafted_rows() -> None:
    drafter, text = random_drafter(), random_text(8, prompt=20)
    drafts = {}
    for window in (None, 100, 1):
        driver = driver_of(drafter, slots=1, method=Eagle3(draft_attention_window=window), block=8)
        driver.prefill(0, text)
        assert_state_is_from_scratch(driver, 0, text)
        drafts[window] = (driver.draft().tokens[0].tolist(), torch.cat(driver.draw.logits))
    assert drafts[None][0] == drafts[100][0]
    assert drafts[1][0][0] == drafts[None][0][0]
    assert not torch.allclose(drafts[1][1][1], drafts[None][1][1])


def automaton_drafter(vocab: int, following: Tensor) -> Eagle3Drafter:
    """A drafter that reads only the newest token and knows its successor: right iff rows are aligned."""
    layer = LayerConfig(
        hidden=vocab, intermediate=4, heads=1, kv_heads=1, head_dim=vocab, attention_bias=True
    )
    drafter = (
        Eagle3Drafter(
            Eagle3Config(
                layer=layer,
                target_hidden=6,
                taps=2,
                vocab=vocab,
                draft_vocab=vocab,
                own_embed=True,
                norm_before_residual=True,  # with hidden_norm at zero nothing is carried along the chain
            )
        )
        .eval()
        .requires_grad_(False)
    )
    for parameter in drafter.parameters():
        parameter.zero_()
    first = drafter.layers[0]
    for norm in (first.input_layernorm, drafter.norm):
        norm.weight.fill_(1.0)
    drafter.embed_tokens.weight.copy_(torch.eye(vocab))
    # Turned by rope, constant queries and keys score highest at distance 0: a row sees nothing but itself.
    for projection in (first.self_attn.q_proj, first.self_attn.k_proj):
        projection.bias.fill_(40.0)
    first.self_attn.v_proj.weight[:, :vocab] = torch.eye(vocab)
    first.self_attn.o_proj.weight.copy_(torch.eye(vocab))
    drafter.lm_head.weight[following, torch.arange(vocab)] = 1.0
    return drafter


def test_perfect_drafter_is_accepted_in_full() -> None:
    vocab, length = 16, 60
    following = torch.randperm(vocab, generator=torch.Generator().manual_seed(3))
    drafter = automaton_drafter(vocab, following)
    texts = []
    for begin in (1, 4):
        ids = [begin]
        while len(ids) < length:
            ids.append(int(following[ids[-1]]))
        texts.append(Text(torch.tensor(ids), 1 + begin, torch.randn(length, 12)))
    driver = driver_of(drafter, slots=2, capacity=length, block=5)
    driver.walk(texts, 36)
    assert [step for text in texts for step in text.steps] == [5] * 12


def test_traces_without_reading_a_value() -> None:
    drafter, method = random_drafter(maps_ids=True, draft_vocab=12), Eagle3(draft_attention_window=3)
    driver, text = driver_of(drafter, slots=2, method=method), random_text(9)
    driver.prefill(0, text)
    names = sorted(driver.state)

    def step(length: Tensor, running: Tensor, *state: Tensor) -> Tensor:
        context = replace(
            driver.context(), length=length, running=running, state=dict(zip(names, state, strict=True))
        )
        return method.draft(context).tokens

    inputs = (driver.length, driver.running, *(driver.state[name].clone() for name in names))
    with torch.no_grad():
        graph = make_fx(step, tracing_mode="fake", _allow_non_fake_inputs=True)(*inputs)
        assert graph(*inputs)[0].tolist() == driver.draft().tokens[0].tolist()


def test_reject_gives_every_reason() -> None:
    _, model, bundle = load("eagle3-spec")
    target = model_info(model)
    assert Eagle3().reject(target, bundle.info, 4) == ()
    wrong = replace(bundle.info, target_hidden=32, taps=(1, 9), target_vocab=600)
    reasons = Eagle3(draft_attention_window=0).reject(target, wrong, 0)
    assert len(reasons) == 5
    assert any("32" in reason and "64" in reason for reason in reasons)
    assert any("[9]" in reason for reason in reasons)
    assert Eagle3().reject(target, None, 4) != ()
