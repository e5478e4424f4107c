"""Why a model cannot be traced over rows: every reason at once, before any tracing.

A decision rests on what the model says and is (its configuration's layer types, flags of its class, its
submodules, its parameters), not on a list of names, so that families newer than this file are judged too.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from specc.models.info import max_position, text_config

# Layer kinds whose state is the K/V of past tokens, read whole or through a causal window.
_ATTENTION = frozenset({"full_attention", "sliding_attention"})
_RECURRENT = frozenset({"linear_attention", "conv", "hybrid", "hybrid_sliding", "mamba", "recurrent", "rwkv"})
_ROPES = frozenset({"default", "linear", "llama3", "yarn", "longrope", "su", "proportional"})
_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def reasons_untraceable(module: nn.Module) -> tuple[str, ...]:
    """Return every reason why ``module`` cannot be traced; empty when nothing speaks against it."""
    if not hasattr(module, "config"):
        return (f"{type(module).__name__} is not a transformers model: it has no .config",)
    return tuple(
        dict.fromkeys(
            [
                *_wrapper_reasons(module),
                *config_reasons(module.config),
                *_structure_reasons(module),
                *_parameter_reasons(module),
                *_mode_reasons(module),
            ]
        )
    )


def config_reasons(config: Any) -> tuple[str, ...]:
    """Return the reasons that a transformers configuration alone gives; usable before weights are read."""
    reasons: list[str] = []
    if getattr(config, "is_encoder_decoder", False):
        reasons.append("it is an encoder-decoder model")
        return tuple(reasons)
    if getattr(config, "quantization_config", None) is not None:
        reasons.append(f"its weights are quantised ({_quantisation(config.quantization_config)})")
    text = config.get_text_config(decoder=True)
    if text is not config:
        reasons.append(
            f"{config.model_type} is a wrapper around a text model ({text.model_type}): pass that model"
        )
    if getattr(text, "add_cross_attention", False):
        reasons.append("its layers attend to another model's output (cross-attention)")
    reasons += _layer_reasons(text)
    reasons += [
        f"its rope is of type {kind!r}, which depends on the length of the whole text"
        if "dynamic" in kind
        else f"its rope is of type {kind!r}, which specc does not know"
        for kind in sorted(_rope_types(text))
        if kind not in _ROPES
    ]
    if getattr(text, "alibi", False) or getattr(getattr(text, "attn_config", None), "alibi", False):
        reasons.append("it biases attention by distance (ALiBi), which rows do not carry")
    if getattr(text, "use_bidirectional_attention", None) in (True, "all"):
        reasons.append("its attention is bidirectional")
    return tuple(reasons)


def _quantisation(value: Any) -> str:
    values = value if isinstance(value, Mapping) else vars(value)
    method = values.get("quant_method", type(value).__name__)
    return str(getattr(method, "value", method))


def _layer_reasons(config: Any) -> Iterator[str]:
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ()
    for kind in sorted({str(kind) for kind in kinds} - _ATTENTION - {"attention"}):
        where = [index for index, other in enumerate(kinds) if str(other) == kind]
        what = "keep a recurrent state" if kind in _RECURRENT else "are of a kind specc does not know"
        yield f"layers {_few(where)} ({kind}) {what}"
    if not kinds and getattr(config, "attention_chunk_size", None):
        yield "its attention is chunked"


def _few(items: list[Any]) -> str:
    shown = ", ".join(str(item) for item in items[:6])
    return shown if len(items) <= 6 else f"{shown} and {len(items) - 6} more"


def _rope_types(config: Any) -> set[str]:
    values = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    per_layer = [value for value in values.values() if isinstance(value, Mapping)]
    found = per_layer or [values]
    return {str(value.get("rope_type", value.get("type", "default"))) for value in found}


def _wrapper_reasons(module: nn.Module) -> Iterator[str]:
    adapters = sorted(
        name
        for name, part in module.named_modules()
        if type(part).__module__.partition(".")[0] == "peft" or hasattr(part, "lora_A")
    )
    if adapters or getattr(module, "_hf_peft_config_loaded", False):
        yield "it carries adapters that are not merged: call merge_and_unload() first"
    if isinstance(module, nn.DataParallel) or type(module).__name__ in {
        "DistributedDataParallel",
        "OptimizedModule",
    }:
        yield f"it is wrapped in {type(module).__name__}: pass the model inside"


def _structure_reasons(module: nn.Module) -> Iterator[str]:
    parts = list(module.modules())
    if any(getattr(part, "_is_stateful", False) for part in parts):
        yield f"{type(module).__name__} keeps a recurrent state"
    convolutions = [name for name, part in module.named_modules() if isinstance(part, nn.Conv1d)]
    if convolutions:
        yield f"it mixes tokens by convolution, which needs a state ({_few(convolutions[:1])})"
    if any(hasattr(part, "layer_idx") and getattr(part, "is_causal", True) is False for part in parts):
        yield "its attention is not causal"
    if getattr(module, "_supports_attention_backend", False) is not True:
        yield f"{type(module).__name__} does not let its attention be replaced"
    if "position_ids" not in inspect.signature(type(module).forward).parameters:
        yield f"{type(module).__name__} takes no position_ids"
    head: Any = getattr(module, "get_output_embeddings", None)
    if head is None or head() is None:
        yield f"{type(module).__name__} has no output head: it is not a causal LM"
    if max_position(module) is None:
        yield "its configuration names no largest position (max_position_embeddings)"


def _parameter_reasons(module: nn.Module) -> Iterator[str]:
    if getattr(module, "is_quantized", False) or getattr(module, "hf_quantizer", None) is not None:
        yield "its weights are quantised"
    devices = set()
    for name, value in module.named_parameters():
        if value.is_meta:
            yield f"{name} is on the meta device: its weights are offloaded or were never loaded"
            break
        devices.add(value.device)
        kind = type(value.data)
        if kind is not Tensor:
            yield f"{name} is a tensor subclass ({kind.__name__})"
            break
        if value.dtype not in _FLOATS:
            yield f"{name} is {str(value.dtype).removeprefix('torch.')}: quantised weights are not traced"
            break
    if len(devices) > 1:
        yield f"its weights are spread over devices: {_few(sorted(str(device) for device in devices))}"
    for name, part in module.named_modules():
        hook = getattr(part, "_hf_hook", None)
        if hook is not None and any(
            getattr(h, "offload", False) for h in (hook, *getattr(hook, "hooks", ()))
        ):
            yield f"{name or 'it'} is offloaded: its weights move while it runs"
            break


def _mode_reasons(module: nn.Module) -> Iterator[str]:
    if any(part.training for part in module.modules()):
        yield "it is in training mode (dropout would be traced): call .eval() first"


def model_name(module: nn.Module) -> str:
    """Return what to call a model in messages."""
    config = text_config(module) if hasattr(module, "config") else None
    return str(getattr(config, "_name_or_path", "") or type(module).__name__)
