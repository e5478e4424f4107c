"""Save a drafter in the speculators layout, which engines load: eagle3, dflash, dspark and dflash2.

`auto_map` is left out: it names a Python file beside the weights, and a checkpoint needs no code.
"""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from specc.checkpoints.block_weights import FULL, SLIDING, checkpoint_name
from specc.contracts import DrafterInfo, ModelInfo
from specc.drafters.block import BlockConfig
from specc.drafters.eagle3 import Eagle3Config
from specc.drafters.layers import LayerConfig, RopeConfig
from specc.errors import UnsupportedError

SPECULATORS_VERSION = "0.9.0"  # the release whose keys and names are written
_ARCHITECTURES = {
    "eagle3": "Eagle3DraftModel",
    "dflash": "DFlashDraftModel",
    "dspark": "DSparkDraftModel",
    "dflash2": "DFlash2DraftModel",
}


def write_drafter(
    path: str | Path, info: DrafterInfo, module: nn.Module, target: ModelInfo, verifier: str = ""
) -> None:
    """Write config.json and model.safetensors.

    Args:
        path: The folder; it is made if need be, and its two files are replaced.
        info: The drafter's facts; ``info.config`` is its BlockConfig or Eagle3Config.
        module: The drafter.
        target: The model it drafts for.
        verifier: The target's hub id or path, for whoever loads the drafter; "" = the target's name.
    """
    config = info.config
    if info.method not in _ARCHITECTURES or not isinstance(config, (BlockConfig, Eagle3Config)):
        raise UnsupportedError(
            f"cannot write a {info.method} drafter", ["the speculators layout has no such drafter"]
        )
    reasons = _block_reasons(config) if isinstance(config, BlockConfig) else _eagle3_reasons(config)
    if reasons:
        raise UnsupportedError("the speculators layout cannot hold this drafter", reasons)
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    dtype = next(module.parameters()).dtype
    written = _config(info, config, target, verifier or target.name, dtype)
    _replace(
        folder / "config.json",
        lambda file: file.write_text(json.dumps(written, indent=2, sort_keys=True) + "\n"),
    )
    tensors = _tensors(config, module)
    _replace(folder / "model.safetensors", lambda file: save_file(tensors, file, metadata={"format": "pt"}))


def _replace(file: Path, write: Any) -> None:
    """Write beside a file and rename, so that nobody sees half of it."""
    part = file.with_name(file.name + ".part")
    write(part)
    part.replace(file)


def _block_reasons(config: BlockConfig) -> list[str]:
    windowed = {
        causal for causal, window in zip(config.causal, config.windows, strict=True) if window is not None
    }
    full = {causal for causal, window in zip(config.causal, config.windows, strict=True) if window is None}
    selector, confidence = config.selector, config.confidence
    wrong = {
        "full-attention layers are causal": True in full,
        "windowed layers are in part causal, in part not": len(windowed) > 1,
        "windowed layers have different windows": len({*config.windows} - {None}) > 1,
        f"sliding windows are the {config.window_rule} rule": bool(windowed)
        and config.window_rule != "speculators",
        "it scales its embedding": config.embedding_scale != 1.0,
        "the mask token has an embedding of its own": config.mask_embedding,
        "the selector scales or caps logits": selector is not None
        and (selector.multiplier, selector.softcap) != (1.0, None),
        "its rope turns neighbouring pairs": config.layer.rope.interleaved,
        "the confidence head has no bias": confidence is not None and not confidence.bias,
    }
    return [reason for reason, is_so in wrong.items() if is_so]


def _eagle3_reasons(config: Eagle3Config) -> list[str]:
    wrong = {
        "fc has a bias": config.fc_bias,
        "there is no fc": not config.uses_fc,
        "its rope turns neighbouring pairs": config.layer.rope.interleaved,
    }
    return [reason for reason, is_so in wrong.items() if is_so]


def _config(
    info: DrafterInfo,
    config: BlockConfig | Eagle3Config,
    target: ModelInfo,
    verifier: str,
    dtype: torch.dtype,
) -> dict[str, Any]:
    proposal = {
        "accept_tolerance": 0.0,
        "proposal_type": "greedy",
        "speculative_tokens": info.proposed or info.block,
        "verifier_accept_k": 1,
    }
    written: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[info.method]],
        "draft_vocab_size": config.draft_vocab,
        "dtype": str(dtype).removeprefix("torch."),
        "speculators_config": {
            "algorithm": info.method,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {
                "architectures": list(target.config.get("architectures") or []),
                "name_or_path": verifier,
            },
        },
        "speculators_model_type": info.method,
        "speculators_version": SPECULATORS_VERSION,
        "target_hidden_size": None if config.target_hidden == config.hidden else config.target_hidden,
        "tie_word_embeddings": False,
        "transformer_layer_config": _layer(config, target),
        "transformers_version": version("transformers"),
    }
    written |= (
        _block_keys(config)
        if isinstance(config, BlockConfig)
        else {
            "eagle_aux_hidden_state_layer_ids": list(info.taps),
            "embed_requires_grad": False,
            "fc_norm": config.fc_norm,
            "norm_before_fc": config.norm_before_fc,
            "norm_before_residual": config.norm_before_residual,
            "norm_output": config.carry == "post",
        }
    )
    if info.method == "dspark":
        assert isinstance(config, BlockConfig)
        markov, confidence = config.markov, config.confidence
        written |= {
            "confidence_head_with_markov": confidence is not None and confidence.with_markov,
            "enable_confidence_head": confidence is not None,
            "markov_head_type": markov.type if markov is not None else "vanilla",
            "markov_rank": markov.rank if markov is not None else 0,
        }
        if confidence is not None and confidence.temperatures is not None:
            written["sts_temperatures"] = list(confidence.temperatures)
    return written


def _block_keys(config: BlockConfig) -> dict[str, Any]:
    windowed = [
        causal for causal, window in zip(config.causal, config.windows, strict=True) if window is not None
    ]
    keys: dict[str, Any] = {
        "aux_hidden_state_layer_ids": list(config.taps),
        "block_size": config.block,
        "mask_token_id": config.mask_token,
        "sample_from_anchor": config.sample_from_anchor,
        # Without windows it says nothing; this is what speculators itself leaves there.
        "sliding_window_non_causal": not windowed[0] if windowed else config.selector is not None,
    }
    if config.convolution is not None:
        keys |= {"conv_group_size": config.convolution.group, "conv_kernel_size": config.convolution.kernel}
    if config.selector is not None:
        keys |= {"selector_rank": config.selector.rank, "selector_top_k": config.selector.top_k}
    return keys


def _layer(config: BlockConfig | Eagle3Config, target: ModelInfo) -> dict[str, Any]:
    layer: LayerConfig = config.layer
    windows = config.windows if isinstance(config, BlockConfig) else (None,) * config.layers
    written: dict[str, Any] = {
        "attention_bias": layer.attention_bias,
        "attention_dropout": 0.0,
        "head_dim": layer.head_dim,
        "hidden_act": layer.activation,
        "hidden_size": layer.hidden,
        "initializer_range": 0.02,
        "intermediate_size": layer.intermediate,
        "max_position_embeddings": config.max_position or target.max_position,
        "model_type": "qwen3" if layer.qk_norm else "llama",
        "num_attention_heads": layer.heads,
        "num_hidden_layers": config.layers,
        "num_key_value_heads": layer.kv_heads,
        "rms_norm_eps": layer.eps,
        "rope_parameters": _rope(layer.rope),
        "tie_word_embeddings": False,
        "use_cache": True,
        "vocab_size": config.vocab,
        **{key: target.config.get(key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")},
    }
    if layer.qk_norm:
        sizes = {window for window in windows if window is not None}
        written |= {
            "layer_types": [FULL if window is None else SLIDING for window in windows],
            "max_window_layers": 0 if sizes else 28,  # transformers' own default; layer_types decides
            "sliding_window": next(iter(sizes), None),
            "use_sliding_window": bool(sizes),
        }
    else:
        written |= {"mlp_bias": layer.mlp_bias, "pretraining_tp": 1}
        if any(windows):
            raise UnsupportedError(
                "the speculators layout cannot hold this drafter", ["its layers have windows but no q/k norm"]
            )
    return written


def _rope(rope: RopeConfig) -> dict[str, Any]:
    written: dict[str, Any] = {"rope_theta": rope.theta, "rope_type": rope.type}
    if rope.partial != 1.0:
        written["partial_rotary_factor"] = rope.partial
    if rope.type != "default":
        written["factor"] = rope.factor
    if rope.type in ("llama3", "yarn"):
        written["original_max_position_embeddings"] = rope.original_max_position
    if rope.type == "llama3":
        written |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.type == "yarn":
        written |= {
            "beta_fast": rope.beta_fast,
            "beta_slow": rope.beta_slow,
            "attention_factor": rope.attention_factor,
        }
    return written


def _tensors(config: BlockConfig | Eagle3Config, module: nn.Module) -> dict[str, Tensor]:
    written: dict[str, Tensor] = {}
    for name, value in module.state_dict().items():
        if name == "target_ids":
            written["d2t"] = value.cpu() - torch.arange(len(value))
            written["t2d"] = torch.zeros(config.vocab, dtype=torch.bool).index_fill_(0, value.cpu(), True)
        elif name.startswith("key_value."):
            part = name.removeprefix("key_value.")
            # Copies: a file holds each projection on its own, the drafter all of them in one.
            for index, piece in enumerate(value.chunk(2 * config.layers)):
                which = "v_proj" if index % 2 else "k_proj"
                written[f"layers.{index // 2}.self_attn.{which}.{part}"] = piece.contiguous().clone()
        else:
            own = checkpoint_name(name) if isinstance(config, BlockConfig) else name
            written[own] = value.detach().contiguous()
    return {name: value.cpu() for name, value in written.items()}
