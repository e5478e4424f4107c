"""What cannot be traced is refused by name, with every reason; what can is not."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from specc.errors import UnsupportedError
from specc.models.load import load_target
from specc.models.refusals import config_reasons, reasons_untraceable
from tests.tiny import ARCHS, tiny_model

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
_STATE = "keep"  # "layers 0 (conv) keep a recurrent state", "X keeps a recurrent state"


def _from_config(model_type: str, **values):
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **values)).eval()


@pytest.mark.parametrize("arch", ARCHS)
def test_supported_families_are_not_refused(arch):
    assert reasons_untraceable(tiny_model(arch)) == ()


@pytest.mark.parametrize(
    ("model_type", "values", "said"),
    [
        ("mamba", {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2}, _STATE),
        (
            "mamba2",
            {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 4, "head_dim": 16,
             "state_size": 8, "n_groups": 1},
            _STATE,
        ),
        ("rwkv", {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2}, _STATE),
        ("recurrent_gemma", {**SMALL, "num_hidden_layers": 3, "lru_width": 32}, _STATE),
        ("lfm2", {**SMALL, "full_attn_idxs": [1], "block_ff_dim": 32}, _STATE),
        ("jamba", {**SMALL, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2}, _STATE),
        ("falcon_h1", {**SMALL, "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8}, _STATE),
        (
            "qwen3_next",
            {**SMALL, "layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 2,
             "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
             "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16,
             "shared_expert_intermediate_size": 16},
            _STATE,
        ),
        ("bloom", {"vocab_size": 64, "hidden_size": 32, "n_layer": 2, "n_head": 2}, "position_ids"),
        ("mpt", {"vocab_size": 64, "d_model": 32, "n_layers": 2, "n_heads": 2}, "ALiBi|position_ids"),
        ("bert", {**SMALL, "is_decoder": False}, "not causal"),
        ("gpt_neo", {"vocab_size": 64, "hidden_size": 32, "num_layers": 2, "num_heads": 2,
                     "attention_types": [[["global", "local"], 1]]}, "attention be replaced"),
        ("llama", {**SMALL, "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
         "dynamic"),
    ],
)  # fmt: skip
def test_families_that_rows_cannot_carry(model_type, values, said):
    with pytest.raises(UnsupportedError, match=said):
        load_target(_from_config(model_type, **values))


@pytest.mark.parametrize(
    ("model_type", "values", "said"),
    [
        ("t5", {}, "encoder-decoder"),
        ("llava", {}, "wrapper around a text model"),
        ("gemma3", {}, "wrapper around a text model"),
        ("qwen3_5_text", {}, "linear_attention"),
        ("bamba", {"num_hidden_layers": 4, "attn_layer_indices": [1]}, "recurrent|linear_attention|hybrid"),
        (
            "granitemoehybrid",
            {"num_hidden_layers": 2, "layer_types": ["mamba", "attention"]},
            "recurrent state",
        ),
        ("minimax", {"num_hidden_layers": 2}, "linear_attention"),
        ("llama4_text", {}, "chunked_attention"),
        ("gpt2", {"add_cross_attention": True}, "cross-attention"),
        ("gemma2", {"use_bidirectional_attention": True}, "bidirectional"),
    ],
)
def test_configurations_that_rows_cannot_carry(model_type, values, said):
    reasons = config_reasons(AutoConfig.for_model(model_type, **values))
    assert any(re.search(said, reason) for reason in reasons), reasons


def test_every_reason_is_given_at_once():
    model = tiny_model("llama")
    model.config.rope_parameters = {"rope_type": "dynamic", "factor": 2.0}
    model.config.layer_types = ["full_attention", "conv", "conv"]
    model.train()
    reasons = reasons_untraceable(model)
    assert any("dynamic" in reason for reason in reasons)
    assert any(reason.startswith("layers 1, 2 (conv)") for reason in reasons)
    assert any(".eval()" in reason for reason in reasons)


def test_training_mode_is_refused_and_left_alone():
    model = tiny_model("llama").train()
    with pytest.raises(UnsupportedError, match="training mode"):
        load_target(model)
    assert model.training


class _Wrapped(torch.Tensor):
    pass


def test_tensor_subclasses_are_refused():
    model = tiny_model("llama")
    weight = model.model.layers[0].mlp.up_proj.weight
    model.model.layers[0].mlp.up_proj.weight = nn.Parameter(weight.data.as_subclass(_Wrapped), False)
    assert any("tensor subclass (_Wrapped)" in reason for reason in reasons_untraceable(model))


def test_integer_weights_are_refused():
    model = tiny_model("llama")
    weight = model.lm_head.weight
    model.lm_head.weight = nn.Parameter(weight.data.to(torch.int8), requires_grad=False)
    assert any("int8" in reason for reason in reasons_untraceable(model))


def test_quantised_flags_are_refused():
    model = tiny_model("llama")
    model.is_quantized = True
    assert any("quantised" in reason for reason in reasons_untraceable(model))


def test_weights_that_are_not_there_are_refused():
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_model("llama").config)
    assert any("meta device" in reason for reason in reasons_untraceable(model.eval()))


def test_offloaded_modules_are_refused():
    accelerate = pytest.importorskip("accelerate")
    model = accelerate.cpu_offload(tiny_model("llama"), execution_device=torch.device("cpu"))
    assert any("offloaded" in reason for reason in reasons_untraceable(model))


def test_adapters_that_are_not_merged_are_refused():
    model = tiny_model("llama")
    model.model.layers[0].mlp.up_proj.lora_A = nn.ModuleDict({"default": nn.Linear(32, 4)})
    assert any("merge_and_unload" in reason for reason in reasons_untraceable(model))


def test_modules_without_a_configuration_are_refused():
    with pytest.raises(UnsupportedError, match=r"no \.config"):
        load_target(nn.Linear(2, 2))


def test_a_base_model_is_refused():
    with pytest.raises(UnsupportedError, match="no output head"):
        load_target(tiny_model("llama").model)


def test_ends_that_specc_does_not_reproduce_are_refused():
    model = tiny_model("granite")
    model.model.embedding_multiplier = 3.5
    with pytest.raises(UnsupportedError, match="token embedding is changed"):
        load_target(model)
