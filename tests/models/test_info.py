"""Facts of the supported families: sizes, and ends (embedding, head) that do what the model does."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from specc.errors import UnsupportedError
from specc.models import info as info_module
from specc.models.info import (
    embed,
    embed_module,
    ends_mismatch,
    final_logit_transform,
    head,
    head_module,
    model_info,
)
from tests.tiny import ARCHS, MAX_POSITION, VOCAB, tiny_model, tiny_tokenizer

TIED = {"gemma2", "gemma3", "smollm3", "gpt2"}
HEAD_DIM = {
    "qwen3": 16,
    "mistral": 16,
    "gemma2": 16,
    "gemma3": 16,
    "qwen3_moe": 16,
    "gpt_oss": 16,
    "glm4_moe": 16,
    "deepseek_v3": 20,
}


@pytest.mark.parametrize("arch", ARCHS)
def test_head_and_embed_are_the_models_own(arch):
    model = tiny_model(arch)
    ids = torch.randint(3, VOCAB, (2, 9), generator=torch.Generator().manual_seed(0))
    out = model(ids, output_hidden_states=True, use_cache=False)
    assert torch.equal(head(model, out.hidden_states[-1]), out.logits)
    first = out.hidden_states[0]
    if arch == "gpt2":
        first = first - model.transformer.wpe.weight[:9]
    torch.testing.assert_close(embed(model, ids), first, rtol=0, atol=1e-6)
    assert ends_mismatch(model) == ()


@pytest.mark.parametrize("arch", ["gemma2", "granite"])
def test_transform_is_not_the_identity_where_the_family_has_one(arch):
    model = tiny_model(arch)
    logits = torch.tensor([[-30.0, 1.0, 30.0]])
    assert not torch.equal(final_logit_transform(model)(logits), logits)


@pytest.mark.parametrize("arch", ARCHS)
def test_sizes(arch):
    model = tiny_model(arch)
    info = model_info(model, tiny_tokenizer())
    layer_count = len(next(m for m in model.modules() if isinstance(m, nn.ModuleList)))
    assert (info.layers, info.hidden, info.vocab, info.heads) == (layer_count, 32, VOCAB, 4)
    assert info.tokenizer_vocab == VOCAB
    assert info.max_position == MAX_POSITION
    assert info.head_dim == HEAD_DIM.get(arch, 8)
    assert info.kv_heads == (4 if arch in {"gpt2", "gpt_neox", "deepseek_v3"} else 2)
    assert info.tied_head == (arch in TIED)
    assert info.dtype == torch.float32
    assert info.model_type == ("gemma3_text" if arch == "gemma3" else arch)
    assert info.config["vocab_size"] == VOCAB


def test_padded_vocabulary_is_the_heads():
    assert model_info(tiny_model("llama", vocab_size=128), tiny_tokenizer()).vocab == 128


def test_unknown_logit_rule_is_named():
    model = tiny_model("llama")
    model.lm_head.register_forward_hook(lambda _module, _args, out: out)  # harmless
    assert ends_mismatch(model) == ()
    original = model.forward

    def scaled(*args, **kwargs):
        out = original(*args, **kwargs)
        out.logits = out.logits * 1.01
        return out

    model.forward = scaled
    assert any("logits" in reason for reason in ends_mismatch(model))


def test_unknown_embedding_rule_is_named():
    model = tiny_model("granite")
    model.model.embedding_multiplier *= 1.05
    assert any("embedding" in reason for reason in ends_mismatch(model))


def test_what_is_no_causal_lm_is_refused():
    with pytest.raises(UnsupportedError, match=r"no \.config"):
        model_info(nn.Linear(2, 2))
    with pytest.raises(UnsupportedError, match="output head"):
        model_info(tiny_model("llama").model)


def test_modules_are_returned_not_copies():
    model = tiny_model("gpt_neox")
    assert embed_module(model) is model.gpt_neox.embed_in
    assert head_module(model) is model.get_output_embeddings()
    assert info_module.is_head_tied(model) is False
