"""Tiny random causal LMs of every supported family, made in memory, for tests.

They are small but not degenerate: greedy text does not loop at once, biases, norms, sinks and router
corrections are not at their (neutral) initial values, windows are shorter than the tests' texts, and
families that mix kinds of layers have both kinds.
"""

from __future__ import annotations

import copy
import math
import re
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

VOCAB = 96
EOS, PAD, BOS = 1, 0, 2
WINDOW = 8  # shorter than the tests' texts
LONGROPE_ORIGINAL = 24  # phi3: tests reach both sides
MAX_POSITION = 256

_SLIDING, _FULL = "sliding_attention", "full_attention"
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITION,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
}
_GEMMA: dict[str, Any] = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "query_pre_attn_scalar": 12,
    "sliding_window": WINDOW,
    "layer_types": [_SLIDING, _FULL, _SLIDING, _FULL],
}
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}

_FAMILY: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "mistral": {"head_dim": 16, "sliding_window": WINDOW},
    "gemma2": {**_GEMMA, "final_logit_softcapping": 6.0, "attn_logit_softcapping": 4.0},
    "gemma3_text": {**_GEMMA, "layer_types": [_SLIDING, _SLIDING, _FULL, _SLIDING]},
    "phi3": {
        "original_max_position_embeddings": LONGROPE_ORIGINAL,
        "rope_parameters": {
            **_ROPE,
            "rope_type": "longrope",
            "original_max_position_embeddings": LONGROPE_ORIGINAL,
            "short_factor": [1.0, 1.1, 1.3, 1.6],
            "long_factor": [1.0, 2.0, 4.0, 8.0],
        },
    },
    "olmo2": {},
    "smollm3": {"num_hidden_layers": 4, "no_rope_layers": [1, 0, 1, 0]},
    "granite": {
        "embedding_multiplier": 2.0,
        "logits_scaling": 1.5,
        "residual_multiplier": 0.7,
        "attention_multiplier": 0.3,
    },
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {
        **_EXPERTS,
        "num_experts": 6,
        "head_dim": 16,
        "mlp_only_layers": [1],
        "norm_topk_prob": True,
    },
    "gpt_oss": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "head_dim": 16,
        "num_hidden_layers": 4,
        "sliding_window": WINDOW,
        "layer_types": [_SLIDING, _FULL, _SLIDING, _FULL],
        "rope_parameters": _ROPE,
    },
    "glm4_moe": {
        **_EXPERTS,
        "n_routed_experts": 6,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.3,
        "use_qk_norm": True,
        "attention_bias": True,
        "head_dim": 16,
        "rope_parameters": {**_ROPE, "partial_rotary_factor": 0.5},
    },
    "deepseek_v3": {
        **_EXPERTS,
        "n_routed_experts": 8,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
        "num_key_value_heads": 4,
        "q_lora_rank": 20,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 12,
        "v_head_dim": 10,
    },
    "gpt2": {"n_positions": MAX_POSITION, "n_embd": 32, "n_layer": 3, "n_head": 4},
    "gpt_neox": {"use_parallel_residual": True, "rope_parameters": {**_ROPE, "partial_rotary_factor": 0.5}},
}
_NAMES = {"gemma3": "gemma3_text"}  # the name people use -> transformers' model_type

ARCHS: tuple[str, ...] = (
    "llama",
    "qwen2",
    "qwen3",
    "mistral",
    "gemma2",
    "gemma3",
    "phi3",
    "olmo2",
    "smollm3",
    "granite",
    "mixtral",
    "qwen3_moe",
    "gpt_oss",
    "glm4_moe",
    "deepseek_v3",
    "gpt2",
    "gpt_neox",
)
MOE_ARCHS: tuple[str, ...] = ("mixtral", "qwen3_moe", "gpt_oss", "glm4_moe", "deepseek_v3")

HEAD_SPREAD = 3.0  # standard deviation of the logits
TIED_ROW = 0.25  # the same, of a tied head's rows before the last norm's gain
LAYER_GAIN = 1.7
_NORM = re.compile(r"norm|ln_\w")
_LAST_NORM = re.compile(r"^\w+\.(norm|ln_f|final_layer_norm)\.")

_NOT_GPT2 = frozenset(_COMMON) - {"vocab_size", "bos_token_id", "eos_token_id", "pad_token_id"}


def tiny_config(arch: str, **overrides: Any) -> Any:
    """Return the transformers configuration of a tiny ``arch``; ``overrides`` are its configuration keys."""
    model_type = _NAMES.get(arch, arch)
    values = {**_COMMON, **_FAMILY[model_type]}
    if model_type == "gpt2":
        values = {key: value for key, value in values.items() if key not in _NOT_GPT2}
        values.update(attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0)
    if model_type == "gpt_neox":
        del values["num_key_value_heads"]  # it has no such key
    return AutoConfig.for_model(model_type, **copy.deepcopy({**values, **overrides}))


def tiny_model(arch: str, seed: int = 0, *, experts: str | None = None, **overrides: Any) -> Any:
    """Return a tiny random float32 causal LM of family ``arch`` in eval mode; equal arguments, equal weights.

    Args:
        arch: One of `ARCHS`.
        seed: Seed of the weights; the global generator is left as it was.
        experts: Experts implementation of the MoE families ("eager", "grouped_mm", "batched_mm"); None leaves
            transformers' default.
        **overrides: Configuration keys, e.g. ``num_hidden_layers=6, vocab_size=128``.
    """
    config = tiny_config(arch, **overrides)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if experts is not None and arch in MOE_ARCHS:
        model.set_experts_implementation(experts)
    _randomise(model, seed)
    if arch == "gemma2":  # transformers 5.17 picks sdpa, which passes over this family's softcap
        model.set_attn_implementation("eager")
    return model.eval().requires_grad_(False)


def _randomise(model: nn.Module, seed: int) -> None:
    """Give every weight a scale at which it matters: outputs of unit order, logits with a clear winner."""
    generator = torch.Generator().manual_seed(1000 + seed)
    embedding = model.get_input_embeddings().weight
    head = model.get_output_embeddings().weight
    # A tied head favours the token just read, and greedy text would repeat it: small rows keep the layers'
    # say larger than the embedding's, and the last norm makes up for them in the logits.
    row, gain = (TIED_ROW, HEAD_SPREAD / TIED_ROW) if head is embedding else (HEAD_SPREAD, 1.0)
    weights = list(model.named_parameters())
    weights += [(name, value) for name, value in model.named_buffers() if "correction_bias" in name]
    with torch.no_grad():
        for name, value in weights:
            noise = torch.randn(value.shape, generator=generator)
            if value is head:
                value.copy_(noise * row / math.sqrt(value.shape[1]))
            elif value is embedding:
                value.copy_(noise)
            elif _NORM.search(name):
                value.add_(noise * 0.2)
                if _LAST_NORM.search(name):
                    offset = 1.0 if model.config.model_type.startswith("gemma") else 0.0  # 1 + weight there
                    value.copy_((value + offset) * gain - offset)
            elif value.dim() == 1 or name.endswith(("bias", "sinks")):
                value.copy_(noise * 0.3)
            else:
                value.copy_(noise * LAYER_GAIN / math.sqrt(min(value.shape[-2:])))
        # The end token's logit is always 0: greedy text never stops by itself, sampled text may.
        head[EOS] = 0.0


def noisy_copy(model: Any, scale: float = 0.03, seed: int = 0) -> Any:
    """Return a copy: weights are off by ``scale`` of each tensor's own spread: a drafter, often right.

    At 0.03 greedy choices agree on half to four fifths of the positions, at 0.1 on a quarter.
    """
    twin = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for value in twin.parameters():
            spread = value.float().std() if value.numel() > 1 else value.float().abs().mean()
            value.add_((torch.randn(value.shape, generator=generator) * scale * spread).to(value.dtype))
    return twin


CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'] }} {{ message['content'] }} "
    "{{ eos_token }} {% endfor %}{% if add_generation_prompt %}assistant {% endif %}"
)


def tiny_tokenizer(vocab: int = VOCAB) -> PreTrainedTokenizerFast:
    """Return a word tokenizer of ``vocab`` ids: <pad> <eos> <bos> <unk>, three roles, then w7, w8, ..."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    special = ["<pad>", "<eos>", "<bos>", "<unk>"]
    words = [*special, "system", "user", "assistant"]
    words += [f"w{index}" for index in range(len(words), vocab)]
    inner = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.add_special_tokens(special)
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<pad>",
        eos_token="<eos>",
        bos_token="<bos>",
        unk_token="<unk>",
        padding_side="left",
        chat_template=CHAT_TEMPLATE,
    )
