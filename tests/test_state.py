"""What lies in the state: committed rows are a fresh prefill's, garbage is never read, addresses are fixed."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import specc
from specc.runtime.compiled import Compiled
from specc.step import StepKey
from tests import oracles
from tests.rig import Rig, drafters, generate, loaded, own_text, padded, recorded
from tests.tiny import tiny_model

SAME_ROWS = 1e-5  # float32 kernels round differently for other row counts
TWO_RUNS = 2e-5  # two runs, each that close to exact rows
LENGTHS = (5, 17, 11)
COUNT = 24


def prompts(lengths: Sequence[int] = LENGTHS, vocab: int = 96) -> list[list[int]]:
    generator = torch.Generator().manual_seed(8)
    return [torch.randint(3, vocab, (n,), generator=generator).tolist() for n in lengths]


@functools.cache
def rig(arch: str = "llama", slots: int = 4, feed: int = 16, capacity: int = 64) -> Rig:
    return Rig(arch, "draft_model", loaded(arch).module, slots=slots, feed=feed, capacity=capacity)


def noisy(arch: str = "llama") -> Any:
    return drafters(loaded(arch).module)["noisy"]


def rows_of(compiled: Compiled, slot: int, count: int, owners: Sequence[str]) -> dict[str, Tensor]:
    """Return the first ``count`` cache rows of a slot, by name; method state without rows is left out."""
    capacity = compiled.engine.capacity
    return {
        name: tensor[slot, :, :count].clone()
        for name, tensor in compiled.engine.state.named().items()
        if name.split(".")[0] in owners and tensor.dim() == 4 and tensor.shape[2] == capacity + 1
    }


def assert_as_prefilled(compiled: Compiled, slots: int, behind: int) -> None:
    """Compare every slot's committed rows with those of a prefill of its whole text, in a slot full of NaN.

    The drafter's last ``behind`` committed rows run with the next draft.
    """
    state = compiled.engine.state
    seen = []
    for slot in range(slots):
        history = compiled.engine.history(slot).tolist()
        counts = {"cache": len(history) - 1, "method": len(history) - behind}
        seen.append((history, counts, {o: rows_of(compiled, slot, n, [o]) for o, n in counts.items()}))
    for history, counts, found in seen:
        state.state["length"].zero_()
        for tensor in (*state.cache.values(), *state.method.values()):
            if tensor.is_floating_point():
                tensor[0] = float("nan")
        compiled.generate(torch.tensor([history]), max_new_tokens=1, eos_token_id=None)
        for owner, count in counts.items():
            expected = rows_of(compiled, 0, count, [owner])
            assert expected
            for name, rows in found[owner].items():
                torch.testing.assert_close(rows, expected[name], atol=SAME_ROWS, rtol=SAME_ROWS, msg=name)


@pytest.mark.parametrize("arch", ["llama", "gemma2"])
def test_committed_rows_equal_a_fresh_prefill(arch):
    compiled = rig(arch).at(3, noisy(arch))
    with recorded(compiled) as steps:
        generate(compiled, prompts(), COUNT, eos_token_id=None)
    seen = {r.accepted for key, records in steps if key.block for r in records if r.drafted}
    assert seen == {0, 1, 2, 3}, "accept patterns are missing"
    assert_as_prefilled(compiled, len(LENGTHS), behind=2)


@pytest.mark.parametrize(
    ("method", "drafter", "target"),
    [
        ("eagle3", "drafters/eagle3-spec", "llama"),
        ("dspark", "drafters/dspark-spec-vanilla", "llama"),
        ("dflash", "drafters/dflash-zlab", "qwen3"),
        ("dflash2", "drafters/dflash2-spec", "qwen3"),
        ("mtp", "targets/glm4moe-mtp1", "glm4moe-mtp1"),
    ],
)
def test_drafter_state_equals_a_fresh_prefill(method, drafter, target):
    compiled = specc.compile(
        oracles.target(target),
        oracles.folder(drafter),
        method=method,
        batch=2,
        max_length=64,
        backend="eager",
    )
    generator = torch.Generator().manual_seed(2)
    ids, mask = padded([torch.randint(3, 60, (n,), generator=generator).tolist() for n in (5, 9)])
    with recorded(compiled) as steps:
        compiled.generate(ids, mask, max_new_tokens=COUNT, eos_token_id=None)
    assert len({r.accepted for key, records in steps if key.block for r in records if r.drafted}) > 1
    assert_as_prefilled(compiled, 2, behind=2)


def poison(compiled: Compiled, key: StepKey) -> None:
    """Write NaN where nothing that the next step reads may lie, and ids of no meaning behind every text."""
    state = compiled.engine.state
    capacity = compiled.engine.capacity
    for slot in range(compiled.engine.slots):
        length = int(state.state["length"][slot])
        running = bool(state.state["running"][slot])
        # A slot that is filling has rows up to its length; of one that runs, row n - 1 is written by this step.
        live = {"cache": length - 1 if running else length, "method": length - 2 if running else length}
        for name, tensor in state.named().items():
            owner = name.split(".")[0]
            if owner in live and tensor.dim() == 4 and tensor.shape[2] == capacity + 1:
                tensor[slot, :, max(live[owner], 0) :] = float("nan")
        state.state["tokens"][slot, length:] = 7 + slot


@pytest.mark.parametrize("block", [0, 3])
@pytest.mark.parametrize("arch", ["llama", "gemma2", "gpt_oss"])
def test_nan_in_garbage_rows_changes_no_token(arch, block, monkeypatch):
    compiled = rig(arch).at(block, noisy(arch))
    expected = generate(compiled, prompts(), COUNT)
    compiled.engine.state.state["length"].zero_()
    real, poisoned = compiled.engine.step, []

    def step(key: StepKey, *more: Any) -> Any:
        poison(compiled, key)
        poisoned.append(key)
        return real(key, *more)

    monkeypatch.setattr(compiled.engine, "step", step)
    assert generate(compiled, prompts(), COUNT) == expected == own_text(arch, prompts(), COUNT)
    assert len(poisoned) > 5
    garbage = next(iter(rows_of(compiled, 3, 64, ["cache"]).values()))
    assert garbage.isnan().all(), "the slot that ran nothing was not poisoned"


def test_nan_is_planted_where_it_matters(monkeypatch):
    """The same poison one row lower is seen: otherwise the test above could not fail."""
    compiled = rig().at(3, noisy())
    expected = generate(compiled, prompts(), COUNT)
    compiled.engine.state.state["length"].zero_()
    real = compiled.engine.step

    def step(key: StepKey, *more: Any) -> Any:
        if key.block:
            length = int(compiled.engine.state.state["length"][0])
            for tensor in compiled.engine.state.cache.values():
                tensor[0, :, length - 2] = float("nan")
        return real(key, *more)

    monkeypatch.setattr(compiled.engine, "step", step)
    with pytest.raises(specc.UnsupportedError, match="NaN"):
        assert generate(compiled, prompts(), COUNT) == expected


def test_addresses_never_change():
    compiled = rig().at(3, noisy())
    tensors = compiled.engine.state.named() | compiled.engine.builder.weights
    before = {name: tensor.data_ptr() for name, tensor in tensors.items()}
    generate(compiled, prompts(), COUNT)
    generate(compiled, prompts((3, 4)), 5, do_sample=True, seed=1)
    after = compiled.engine.state.named() | compiled.engine.builder.weights
    assert {name: tensor.data_ptr() for name, tensor in after.items()} == before
    for runner in compiled.engine._runners.values():
        for given, tensor in zip(runner.built.graph.inputs, runner.inputs, strict=True):
            name = given.storage if given.kind == "weight" else given.name
            assert given.kind == "setting" or tensor.data_ptr() == before[name], name


def test_chunked_prefill_equals_whole():
    whole, chunked = rig(feed=40).at(3, noisy()), rig(feed=3).at(3, noisy())
    with recorded(whole) as steps:
        expected_text = generate(whole, prompts(), COUNT)
    assert sum(bool(key.feed) for key, _ in steps) == 1
    with recorded(chunked) as steps:
        assert generate(chunked, prompts(), COUNT) == expected_text == own_text("llama", prompts(), COUNT)
    assert sum(bool(key.feed) for key, _ in steps) >= sum(n - 1 for n in LENGTHS) // 3
    for slot in range(3):
        count = len(chunked.engine.history(slot)) - 2
        expected = rows_of(whole, slot, count, ["cache", "method"])
        for name, rows in rows_of(chunked, slot, count, ["cache", "method"]).items():
            torch.testing.assert_close(rows, expected[name], atol=TWO_RUNS, rtol=TWO_RUNS, msg=name)


def test_left_padding_means_nothing():
    compiled = rig().at(3, noisy())
    expected = own_text("llama", prompts(), COUNT)
    alone = [generate(compiled, [prompt], COUNT)[0] for prompt in prompts()]
    assert alone == generate(compiled, prompts(), COUNT) == expected
    for pad in (0, 50):
        ids, mask = padded(prompts(), pad)
        wider = torch.nn.functional.pad(ids, (4, 0), value=pad), torch.nn.functional.pad(mask, (4, 0))
        out = compiled.generate(*wider, max_new_tokens=COUNT)
        assert out[:, : wider[0].shape[1]].equal(wider[0])
        assert out[:, wider[0].shape[1] :].tolist() == expected


def test_more_prompts_than_slots():
    many = prompts((4, 30, 9, 1, 2, 12, 21))
    assert generate(rig(feed=3).at(3, noisy()), many, COUNT) == own_text("llama", many, COUNT)


def test_a_slot_is_bit_equal_whatever_the_others_do():
    compiled = rig().at(3, noisy())
    settings: dict[str, Any] = {
        "max_new_tokens": COUNT,
        "return_dict_in_generate": True,
        "output_logits": True,
    }
    alone = compiled.generate(torch.tensor([prompts()[1]]), **settings)
    compiled.engine.state.state["length"].zero_()
    ids, mask = padded([prompts()[1], *prompts()[::2]])
    together = compiled.generate(ids, mask, **settings)
    for one, three in zip(alone.logits, together.logits, strict=True):
        torch.testing.assert_close(one[0], three[0], atol=SAME_ROWS, rtol=SAME_ROWS)
    compiled.engine.state.state["length"].zero_()
    again = compiled.generate(torch.tensor([prompts()[1]]), **settings)
    assert all(torch.equal(one, two) for one, two in zip(alone.logits, again.logits, strict=True))


@pytest.mark.parametrize("room", [1, 2, 3, 4, 5, 8])
def test_the_last_rows_of_the_cache(room):
    """The capacity ends inside a block, at its end, or before it begins."""
    prompt = prompts((20 - room,))[0]
    compiled = rig(slots=2, capacity=20).at(3, loaded().module)
    out = compiled.generate(torch.tensor([prompt]), return_dict_in_generate=True, eos_token_id=None)
    assert out.sequences[0, len(prompt) :].tolist() == own_text("llama", [prompt], room)[0]
    assert out.finish_reasons == ("length",)
    assert out.stats.tokens == room


def test_the_last_positions_of_the_model():
    """A learned position table ends there: rows beyond must not reach it."""
    model = tiny_model("gpt2", n_positions=24)
    own = Rig("gpt2", "draft_model", model, slots=2, capacity=24, overrides={"n_positions": 24})
    ids, mask = padded(prompts((3, 20)))
    for block in (0, 3):
        out = own.at(block, model).generate(ids, mask, eos_token_id=None)[:, 20:].tolist()
        for row, prompt in zip(out, prompts((3, 20)), strict=True):
            count = 24 - len(prompt)
            one = torch.tensor([prompt])
            text = model.generate(
                one, attention_mask=torch.ones_like(one), max_new_tokens=count, eos_token_id=None
            )
            assert row[:count] == text[0, len(prompt) :].tolist()


def test_a_drafter_whose_positions_end_first():
    target = loaded("gpt2").module
    drafter = tiny_model("gpt2", n_positions=16)
    weights = {n: w[:16] if w.shape[:1] == (256,) else w for n, w in target.state_dict().items()}
    drafter.load_state_dict(weights)
    compiled = Rig("gpt2", "draft_model", drafter, slots=2, capacity=64).at(3)
    with recorded(compiled) as steps:
        assert generate(compiled, prompts((5, 30)), COUNT) == own_text("gpt2", prompts((5, 30)), COUNT)
    first, second = ([r[slot] for key, r in steps if key.block and r[slot].tokens] for slot in (0, 1))
    assert any(r.accepted for r in first)
    assert not any(r.drafted for r in second)
