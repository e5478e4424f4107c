"""The tiny models are good test material: they do not loop at once, stop by themselves, or repeat by seed."""

from __future__ import annotations

import pytest
import torch

from tests.tiny import ARCHS, EOS, VOCAB, WINDOW, noisy_copy, tiny_model, tiny_tokenizer


def _continue(model, count: int = 24) -> list[list[int]]:
    """Return greedy continuations of four random prompts."""
    prompts = torch.randint(3, VOCAB, (4, 5), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(prompts)
    out = model.generate(prompts, attention_mask=mask, max_new_tokens=count, do_sample=False)
    return out[:, 5:].tolist()


@pytest.mark.parametrize("arch", ARCHS)
def test_greedy_text_is_varied_and_does_not_stop(arch):
    texts = _continue(tiny_model(arch))
    assert all(len(text) == 24 and EOS not in text for text in texts)
    distinct = sorted(len(set(text)) for text in texts)
    assert distinct[1] >= 6, distinct


@pytest.mark.parametrize("arch", ["mistral", "gemma2", "gemma3", "gpt_oss"])
def test_window_matters(arch):
    """Logits inside the first window do not depend on the window, later ones do."""
    model = tiny_model(arch)
    wide = tiny_model(arch, sliding_window=200)
    prompt = torch.randint(3, VOCAB, (1, 3 * WINDOW), generator=torch.Generator().manual_seed(0))
    difference = (model(prompt).logits - wide(prompt).logits).abs().amax(-1)[0]
    assert difference[: WINDOW - 1].max() < 1e-4
    assert difference[-1] > 1e-2


def test_seed_decides_the_weights_and_leaves_the_global_generator_alone():
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    first, again, other = tiny_model("llama"), tiny_model("llama"), tiny_model("llama", seed=1)
    assert torch.equal(torch.rand(1), expected)
    prompt = torch.arange(3, 9)[None]
    assert torch.equal(first(prompt).logits, again(prompt).logits)
    assert not torch.equal(first(prompt).logits, other(prompt).logits)


def test_noisy_copy_agrees_often_but_not_always():
    model = tiny_model("llama")
    twin = noisy_copy(model)
    prompt = torch.randint(3, VOCAB, (16, 24), generator=torch.Generator().manual_seed(0))
    agree = (model(prompt).logits.argmax(-1) == twin(prompt).logits.argmax(-1)).float().mean()
    assert 0.4 < agree < 0.9, agree


def test_tokenizer_round_trips_and_has_a_chat_template():
    tokenizer = tiny_tokenizer()
    assert len(tokenizer) == VOCAB
    ids = tokenizer("w20 w7 w95")["input_ids"]
    assert ids == [20, 7, 95]
    assert tokenizer.decode(ids) == "w20 w7 w95"
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "w9"}], add_generation_prompt=True)
    assert list(chat["input_ids"]) == [2, 5, 9, 1, 6]
