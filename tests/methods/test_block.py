"""What must hold for every block drafter: methods.md 4.6, 5.8, 6.5 and section 9."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from specc.contracts import Draft
from specc.drafters.block import BlockConfig, BlockDrafter
from specc.methods.dflash import DFlash
from specc.methods.dflash2 import DFlash2
from specc.methods.dspark import DSpark
from tests.methods.block_reference import MASK, block_config, naive_forward, random_drafter
from tests.methods.harness import Driver, GreedyDraw, Text, model_info
from tests.tiny import VOCAB, tiny_model

METHODS: dict[str, Any] = {"dflash": DFlash(), "dspark": DSpark(), "dflash2": DFlash2()}
KINDS = sorted(METHODS)
FP32 = 1e-4  # another order of float32 sums, amplified by random weights; a wrong row differs by 0.1 and more
CAPACITY = 64


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("llama")


def _text(seed: int, prompt: int, length: int = 50) -> Text:
    """Return a slot's text with features nobody computed: the methods cannot tell."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCAB - 1, (length,), generator=generator)
    return Text(ids, prompt, torch.randn(length, 64, generator=generator))


def _driver(
    model: Any,
    kind: str,
    drafter: BlockDrafter,
    *,
    slots: int = 1,
    block: int | None = None,
    capacity: int = CAPACITY,
    method: Any = None,
) -> Driver:
    return Driver(
        method or METHODS[kind],
        drafter,
        model,
        slots=slots,
        capacity=capacity,
        block=block or drafter.config.drafts,
    )


def _outputs(driver: Driver) -> list[Tensor]:
    """Return a list that each later draft appends the drafter's outputs [slots, rows, hidden] to."""
    kept: list[Tensor] = []
    driver.drafter.register_forward_hook(lambda _module, _inputs, output: kept.append(output))
    return kept


WINDOWED: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": (True, False)},
    "speculators": {"windows": (3, None), "causal": (True, False), "window_rule": "speculators"},
    "speculators-both": {"windows": (3, 5), "window_rule": "speculators"},
    "zlab": {"windows": (4, None), "causal": (True, False), "window_rule": "zlab"},
    "zlab-both": {"windows": (3, 7), "window_rule": "zlab"},
    "transformers": {"windows": (None, 3), "window_rule": "transformers"},
}


@pytest.mark.parametrize("windows", WINDOWED)
@pytest.mark.parametrize("kind", KINDS)
def test_block_equals_a_forward_over_everything(model: Any, kind: str, windows: str) -> None:
    """D1, D4's positions, F2: two slots, other lengths, other accepts, against the naive forward."""
    drafter = random_drafter(block_config(kind, **WINDOWED[windows]))
    driver = _driver(model, kind, drafter, slots=2)
    outputs = _outputs(driver)
    texts = [_text(1, 3), _text(2, 9)]
    for slot, text in enumerate(texts):
        driver.prefill(slot, text, chunk=4)
    for step in range(3):
        # The drafts agree with nothing, so `_accept` commits what it likes.
        for slot, text in enumerate(texts):
            _accept(driver, slot, text, (step + 2 * slot) % 4)
    driver.draft()
    for slot, text in enumerate(texts):
        anchor = int(driver.length[slot]) - 1
        ids = [int(text.ids[anchor])] + [MASK] * (outputs[-1].shape[1] - 1)
        expected = naive_forward(drafter, text.features[:anchor], ids, model.get_input_embeddings())
        torch.testing.assert_close(outputs[-1][slot], expected, atol=FP32, rtol=0)


def _accept(driver: Driver, slot: int, text: Text, count: int) -> None:
    """Run a step of one slot in which ``count`` drafts were right; the other verify rows are garbage."""
    driver.draft()
    anchor = int(driver.length[slot]) - 1
    driver.commit(slot, text.ids[anchor + 1 : anchor + 2 + count])
    rows = [(slot, anchor + row, row <= count) for row in range(driver.block + 1)]
    driver.observe(rows, [text.features] * driver.slots)


@pytest.mark.parametrize("window", [1, 4])
def test_draft_attention_window(model: Any, window: int) -> None:
    drafter = random_drafter(block_config("dflash"))
    driver = _driver(model, "dflash", drafter, method=DFlash(draft_attention_window=window))
    outputs, text = _outputs(driver), _text(1, 9)
    driver.prefill(0, text)
    driver.draft()
    ids = [int(text.ids[9])] + [MASK] * 5
    expected = naive_forward(drafter, text.features[:9], ids, model.get_input_embeddings(), window)
    torch.testing.assert_close(outputs[-1][0], expected, atol=FP32, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("block", [1, 2, 4])
def test_fewer_drafts_are_a_shorter_block(model: Any, kind: str, block: int) -> None:
    drafter = random_drafter(block_config(kind))
    driver = _driver(model, kind, drafter, block=block)
    outputs, text = _outputs(driver), _text(1, 9)
    driver.prefill(0, text)
    draft = driver.draft()
    rows = block if kind == "dspark" else block + 1
    assert draft.tokens.shape == (1, block)
    assert outputs[-1].shape[1] == rows
    ids = [int(text.ids[9])] + [MASK] * (rows - 1)
    expected = naive_forward(drafter, text.features[:9], ids, model.get_input_embeddings())
    torch.testing.assert_close(outputs[-1][0], expected, atol=FP32, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_one_committed_token_needs_no_context(model: Any, kind: str) -> None:
    drafter = random_drafter(block_config(kind))
    driver = _driver(model, kind, drafter)
    outputs, text = _outputs(driver), _text(1, 0)
    driver.commit(0, text.ids[:1])
    driver.draft()
    ids = [int(text.ids[0])] + [MASK] * (outputs[-1].shape[1] - 1)
    expected = naive_forward(drafter, text.features[:0], ids, model.get_input_embeddings())
    torch.testing.assert_close(outputs[-1][0], expected, atol=FP32, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_context_is_that_of_a_fresh_prefill(model: Any, kind: str) -> None:
    """I6, I9: after any accepts and any chunks, K/V of positions 0..n-2 equal those of one long observe."""
    drafter = random_drafter(block_config(kind))
    driver = _driver(model, kind, drafter, slots=2)
    texts = [_text(1, 5), _text(2, 8)]
    for slot, text in enumerate(texts):
        driver.prefill(slot, text, chunk=3 + slot)
    for count in (0, 3, 1, 4):
        for slot, text in enumerate(texts):
            _accept(driver, slot, text, (count + slot) % 5)
    for slot, text in enumerate(texts):
        length = int(driver.length[slot])
        fresh = _driver(model, kind, drafter)
        fresh.prefill(0, Text(text.ids, length - 1, text.features), chunk=CAPACITY)
        for name, state in driver.state.items():
            kept = state[slot, :, : length - 1]
            torch.testing.assert_close(kept, fresh.state[name][0, :, : length - 1], atol=FP32, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_drafting_leaves_the_context_alone(model: Any, kind: str) -> None:
    """D2: bit for bit, whatever the block holds; and rows nobody may write stay as they were."""
    driver = _driver(model, kind, random_drafter(block_config(kind)), slots=2)
    text = _text(1, 9)
    driver.prefill(0, text)
    before = {name: state.clone() for name, state in driver.state.items()}
    driver.draft()
    rows = driver.drafter.config.rows(driver.block)
    for name, state in driver.state.items():
        assert torch.equal(state[0, :, :9], before[name][0, :, :9])
        assert bool(state[0, :, 9 : 9 + rows].isfinite().all())
        assert bool(state[0, :, 9 + rows : CAPACITY].isnan().all())
        assert bool(state[1, :, :CAPACITY].isnan().all())  # a slot that does not run


@pytest.mark.parametrize("kind", KINDS)
def test_what_stands_behind_the_anchor_is_not_read(model: Any, kind: str) -> None:
    """D3, I5: rejected K/V, the scratch row and slots that do not run change no bit."""
    driver = _driver(model, kind, random_drafter(block_config(kind)), slots=2)
    driver.prefill(0, _text(1, 9))
    first = driver.draft().tokens[0]
    logits = torch.stack(driver.draw.logits)[:, 0]
    for state in driver.state.values():
        state[0, :, 9:] = float("nan")
        state[1] = float("nan")
    again = driver.draft().tokens[0]
    assert torch.equal(first, again)
    assert torch.equal(torch.stack(driver.draw.logits)[:, 0], logits)


@pytest.mark.parametrize("causal", [False, True])
def test_who_sees_a_block_row(model: Any, causal: bool) -> None:
    """D3: bidirectional layers let every row see row 3, causal ones only the rows from 3 on."""
    drafter = random_drafter(block_config("dflash", causal=(causal, causal)))
    driver = _driver(model, "dflash", drafter)
    outputs = _outputs(driver)
    driver.prefill(0, _text(1, 9))
    driver.draft()
    embed = drafter.embed

    def disturbed(ids: Tensor, target_embed: Callable[[Tensor], Tensor]) -> Tensor:
        return embed(ids, target_embed).index_add(1, torch.tensor([3]), torch.ones(1, 1, 32))

    drafter.embed = disturbed  # type: ignore[method-assign]  # a test's own drafter
    driver.draft()
    changed = (outputs[0] != outputs[1]).any(-1)[0].tolist()
    assert changed == ([False] * 3 + [True] * 3 if causal else [True] * 6)


class _Oracle(nn.Module):
    """Stands in for a drafter's layers: the output of a row is its position."""

    def __init__(self, drafter: BlockDrafter) -> None:
        super().__init__()
        self.inner, self.config, self.dtype, self.target_ids = drafter, drafter.config, torch.float32, None

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.inner, name)

    def forward(self, embedded: Tensor, position: Tensor, attend: object) -> Tensor:
        return torch.zeros(*position.shape, 32).index_fill_(-1, torch.tensor([0]), 1.0) * position[..., None]


@pytest.mark.parametrize("kind", KINDS)
def test_a_drafter_that_is_right_is_accepted_in_full(model: Any, kind: str) -> None:
    """D4, I7: the head knows the text by the position a row predicts, own or next."""
    config = block_config(kind, markov=None, confidence=None) if kind == "dspark" else block_config(kind)
    drafter = random_drafter(config)
    if config.selector is not None:
        drafter.candidate_selector.successor_codebook.zero_()
    oracle, text = _Oracle(drafter), _text(3, 6)
    shift = int(config.sample_from_anchor)
    oracle.head = lambda hidden, _head: nn.functional.one_hot(  # type: ignore[assignment]
        text.ids[(hidden[..., 0].long() + shift).clamp(max=len(text.ids) - 1)], VOCAB
    ).float()
    driver = Driver(METHODS[kind], oracle, model, slots=1, capacity=CAPACITY, block=config.drafts)
    driver.walk([text], 30)
    assert set(text.steps) == {config.drafts}


class _Forced(GreedyDraw):
    """Draws greedily but for one draft, which is given."""

    def __init__(self, index: int, token: int) -> None:
        super().__init__()
        self.at, self.token = index, token

    def __call__(self, logits: Tensor, index: int, ids: Tensor | None = None) -> Tensor:
        drawn = super().__call__(logits, index, ids)
        if index == self.at:
            drawn = self.tokens[-1] = torch.full_like(drawn, self.token)
        return drawn


def _forced(driver: Driver, index: int, token: int) -> tuple[Draft, list[Tensor]]:
    draw = _Forced(index, token)
    context = replace(driver.context(), draw=draw)
    return driver.method.draft(context), draw.logits


@pytest.mark.parametrize("kind", KINDS)
def test_who_depends_on_a_drawn_token(model: Any, kind: str) -> None:
    """D5 and S5's cause: DFlash rows are independent; walks condition later rows, and no earlier one."""
    driver = _driver(model, kind, random_drafter(block_config(kind)))
    driver.prefill(0, _text(1, 9))
    (one, one_logits), (two, two_logits) = _forced(driver, 2, 10), _forced(driver, 2, 20)
    same = [torch.equal(a, b) for a, b in zip(one_logits, two_logits, strict=True)]
    assert same[:3] == [True] * 3
    assert same[3] is (kind == "dflash")
    if kind == "dflash":
        assert all(same)
    if kind == "dspark":
        assert one.confidence is not None
        assert two.confidence is not None
        assert torch.equal(one.confidence[:, :3], two.confidence[:, :3])
        assert not torch.equal(one.confidence[:, 3], two.confidence[:, 3])


@pytest.mark.parametrize("kind", KINDS)
def test_near_the_end_of_a_slot(model: Any, kind: str) -> None:
    """Rows past the capacity are garbage nobody sees: what is left is the block of the rows inside.

    With c rows inside, the outputs equal those of a c-row block in a longer slot bit for bit up to the order
    of sums; a draft is valid if its row is inside and the token it drafts has a place.
    """
    drafter = random_drafter(block_config(kind))
    text = _text(1, 9)
    for spare in range(6):
        capacity = 10 + spare  # the anchor at 9 is inside, and `spare` positions after it
        driver = _driver(model, kind, drafter, capacity=capacity)
        outputs = _outputs(driver)
        driver.prefill(0, text)
        found = driver.draft().tokens[0]
        rows = min(drafter.config.rows(driver.block), 1 + spare)
        assert (found >= 0).tolist() == [index < spare for index in range(driver.block)]
        drafts = rows if drafter.config.sample_from_anchor else rows - 1
        if drafts == 0:
            continue
        longer = _driver(model, kind, drafter, block=drafts)
        longer.prefill(0, text)
        expected = longer.draft().tokens[0]
        valid = min(spare, drafts)
        assert found[:valid].tolist() == expected[:valid].tolist()
        torch.testing.assert_close(outputs[-2][0, :rows], outputs[-1][0], atol=FP32, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_drafting_stops_where_the_drafters_positions_end(model: Any, kind: str) -> None:
    drafter = random_drafter(block_config(kind, max_position=12))
    driver, text = _driver(model, kind, drafter), _text(1, 9)
    driver.prefill(0, text)  # anchor at 9, so rows 9, 10 and 11 are left
    valid = (driver.draft().tokens[0] >= 0).tolist()
    last = 3 if drafter.config.sample_from_anchor else 2
    assert valid == [index < last for index in range(driver.block)]
    _accept(driver, 0, text, 4)
    assert driver.draft().tokens[0].tolist() == [-1] * driver.block
    assert not any(bool(logits.isnan().any()) for logits in driver.draw.logits)


@pytest.mark.parametrize("kind", KINDS)
def test_traces_without_a_host_value(model: Any, kind: str) -> None:
    driver = _driver(model, kind, random_drafter(block_config(kind)), slots=2)
    driver.prefill(0, _text(1, 9))
    context = driver.context()
    names = list(context.state)

    def step(tokens: Tensor, length: Tensor, running: Tensor, *state: Tensor) -> Tensor:
        found = replace(
            context,
            tokens=tokens,
            length=length,
            running=running,
            state=dict(zip(names, state, strict=True)),
            draw=GreedyDraw(),
        )
        return driver.method.draft(found).tokens

    inputs = (context.tokens, context.length, context.running, *context.state.values())
    expected = step(*inputs)
    traced = make_fx(step, tracing_mode="fake", _allow_non_fake_inputs=True)(*inputs)
    assert torch.equal(traced(*inputs), expected)


def test_rejects_a_pair_for_every_reason(model: Any) -> None:
    from specc.checkpoints.block_weights import describe

    target = model_info(model)
    good = block_config("dspark")
    assert DSpark().reject(target, describe("d", "dspark", "x", good), 6) == ()
    assert DSpark().reject(target, None, 6) == (
        "dspark needs a drafter; give the folder of a dspark checkpoint of this target",
    )
    bad: BlockConfig = replace(
        good,
        target_hidden=48,
        taps=(0, 3, -1),
        vocab=VOCAB + 1,
        mask_token=VOCAB,
        draft_vocab=50,
        layer=replace(good.layer, hidden=40),
        confidence=None,
    )
    method = DSpark(candidates=51, confidence_threshold=1.5, draft_attention_window=0)
    reasons = method.reject(target, describe("d", "dflash", "x", bad), 7)
    told = [
        "made for dflash",
        "draft_attention_window is 0",
        "trained to draft 6",
        "width 48",
        "layers [3, -1]",
        f"{VOCAB + 1} ids",
        f"mask token is {VOCAB}",
        "embedding and head",
        "candidates is 51",
        "between 0 and 1",
        "needs a confidence head",
    ]
    assert [part for part in told if not any(part in reason for reason in reasons)] == []
    assert len(reasons) == len(told)
    assert "block is 0" in DSpark().reject(target, describe("d", "dspark", "x", good), 0)[0]
    no_selector = describe("d", "dflash2", "x", block_config("dflash"))
    assert "no candidate selector" in DFlash2().reject(target, no_selector, 5)[0]
