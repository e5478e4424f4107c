"""The facts of a transformers causal LM: sizes, its embedding and its output head.

``head(hidden)`` and ``embed(ids)`` reproduce what the model itself does around its layers; `ends_mismatch`
runs the model on two tokens and says where they do not, so that an unknown family is refused, never guessed.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from specc.contracts import ModelInfo
from specc.errors import UnsupportedError


class _Sized(Protocol):
    def __len__(self) -> int: ...


# Configuration keys under which families scale their token embeddings after the lookup (granite; hrm_text).
# gemma's scale needs no entry: its embedding module applies it.
_EMBED_SCALES = ("embedding_multiplier", "embedding_scale")


def text_config(module: nn.Module) -> Any:
    """Return the configuration of the text decoder, also when a wrapper's configuration holds it inside."""
    config: Any = getattr(module, "config", None)
    if config is None:
        raise UnsupportedError(f"{type(module).__name__} is not a transformers model", ["it has no .config"])
    return config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config


def plain_config(module: nn.Module) -> dict[str, Any]:
    """Return the text configuration as plain JSON values, without the path it was read from."""
    values: dict[str, Any] = json.loads(text_config(module).to_json_string(use_diff=False))
    values.pop("_name_or_path", None)
    return values


def embed_module(module: nn.Module) -> nn.Module:
    """Return the token embedding; `embed_transform` gives what the model does to its output."""
    return _end(module, "get_input_embeddings", "token embedding")


def head_module(module: nn.Module) -> nn.Module:
    """Return the output head, bias included; `final_logit_transform` gives what the model does to it."""
    return _end(module, "get_output_embeddings", "output head")


def _end(module: nn.Module, getter: str, what: str) -> nn.Module:
    get: Any = getattr(module, getter, None)
    found = get() if callable(get) else None
    if not isinstance(found, nn.Module) or not isinstance(getattr(found, "weight", None), Tensor):
        raise UnsupportedError(f"{type(module).__name__} is not a causal LM", [f"it has no {what}"])
    return found


def embed_weight(module: nn.Module) -> Tensor:
    """Return the embedding table, [vocab, hidden]."""
    weight: Tensor = embed_module(module).get_parameter("weight")
    return weight


def head_weight(module: nn.Module) -> Tensor:
    """Return the output head's matrix, [vocab, hidden]."""
    weight: Tensor = head_module(module).get_parameter("weight")
    return weight


def embed_scale(module: nn.Module) -> float | None:
    """Return the factor applied to embeddings after the lookup, or None."""
    config = text_config(module)
    for key in _EMBED_SCALES:
        value = getattr(config, key, None)
        if value is not None and float(value) != 1.0:
            return float(value)
    return None


def embed_transform(module: nn.Module) -> Callable[[Tensor], Tensor]:
    """Return what the model does to the embedding module's output before its first layer; traceable."""
    scale = embed_scale(module)
    if scale is None:
        return _identity
    factor = scale
    return lambda embedded: embedded * factor


def final_logit_transform(module: nn.Module) -> Callable[[Tensor], Tensor]:
    """Return what the model does to the head's output (softcap, scale) to get its logits; traceable."""
    config = text_config(module)
    cap = getattr(config, "final_logit_softcapping", None)
    if cap is not None:
        return lambda logits: torch.tanh(logits / cap) * cap
    divisor = getattr(config, "logits_scaling", None)
    if divisor is not None and float(divisor) != 1.0:
        return lambda logits: logits / divisor
    factor = getattr(config, "logit_scale", None)
    if factor is not None and float(factor) != 1.0:
        return lambda logits: logits * factor
    return _identity


def _identity(value: Tensor) -> Tensor:
    return value


def embed(module: nn.Module, ids: Tensor) -> Tensor:
    """Return the states before layer 0, learned position tables not added: ids -> [.., hidden]."""
    return embed_transform(module)(embed_module(module)(ids))


def head(module: nn.Module, hidden: Tensor) -> Tensor:
    """Return the logits of states after the final norm: [.., hidden] -> [.., vocab]."""
    return final_logit_transform(module)(head_module(module)(hidden))


def ends_mismatch(module: nn.Module) -> tuple[str, ...]:
    """Run two tokens and return where `embed` or `head` differ from what the model does, in words."""
    ids = torch.tensor([[1, 2]], device=embed_weight(module).device)
    with torch.no_grad():
        out = module(input_ids=ids, use_cache=False, output_hidden_states=True)
        embedded, logits = embed(module, ids), head(module, out.hidden_states[-1])
        # A learned position table is added to the first state: the difference must not depend on the token.
        swapped = module(input_ids=ids.flip(1), use_cache=False, output_hidden_states=True)
        offset = out.hidden_states[0] - embedded
        other = swapped.hidden_states[0] - embed(module, ids.flip(1))
    reasons = []
    if not _close(offset, other, out.hidden_states[0]):
        reasons.append("its token embedding is changed before the first layer in a way specc does not know")
    if logits.shape != out.logits.shape or not _close(logits, out.logits, out.logits):
        reasons.append("its logits are not its head's output under any rule specc knows (softcap or scale)")
    return tuple(reasons)


def _close(found: Tensor, expected: Tensor, scale: Tensor) -> bool:
    """Whether two tensors agree within a few roundings, relative to the largest value of ``scale``."""
    tolerance = 8 * torch.finfo(expected.dtype).eps * float(scale.float().abs().max())
    return float((found.float() - expected.float()).abs().max()) <= max(tolerance, 1e-30)


def is_head_tied(module: nn.Module) -> bool:
    """Whether head and embedding are one storage."""
    first, second = embed_weight(module), head_weight(module)
    return first is second or (first.data_ptr() == second.data_ptr() and first.shape == second.shape)


def max_position(module: nn.Module) -> int | None:
    """Return the number of positions the model was made for, or None when its configuration does not say."""
    config = text_config(module)
    for key in ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length"):
        value = getattr(config, key, None)
        if isinstance(value, int) and value > 0:
            return value
    return None


def shortest_window(info: ModelInfo) -> int | None:
    """Return the sliding window of a model whose layers have one, by its configuration; None = all see everything."""
    window, kinds = info.config.get("sliding_window"), info.config.get("layer_types")
    slides = "sliding_attention" in kinds if kinds else info.config.get("use_sliding_window", True)
    return int(window) if isinstance(window, int) and slides else None


def _head_dim(config: Any, heads: int) -> int:
    if getattr(config, "qk_head_dim", None) or getattr(config, "qk_rope_head_dim", None):
        # multi-head latent attention: a query is a part with rope and a part without
        return int(config.qk_nope_head_dim + config.qk_rope_head_dim)
    return int(getattr(config, "head_dim", None) or config.hidden_size // heads)


def model_info(module: nn.Module, tokenizer: _Sized | None = None, name: str | None = None) -> ModelInfo:
    """Return the facts of a causal LM.

    Args:
        module: A transformers causal LM.
        tokenizer: Its tokenizer, if known: only the number of its ids is read.
        name: What to call it in messages; default: the configuration's name or the class.

    Raises:
        UnsupportedError: The module is not a causal LM specc can describe.
    """
    config = text_config(module)
    limit = max_position(module)
    if limit is None:
        raise UnsupportedError(
            f"{type(module).__name__} cannot be used",
            ["its configuration names no largest position"],
            "set config.max_position_embeddings",
        )
    heads = int(config.num_attention_heads)
    return ModelInfo(
        name=name or str(getattr(config, "_name_or_path", "") or type(module).__name__),
        model_type=str(config.model_type),
        layers=int(config.num_hidden_layers),
        hidden=int(config.hidden_size),
        vocab=head_weight(module).shape[0],
        tokenizer_vocab=None if tokenizer is None else len(tokenizer),
        max_position=limit,
        heads=heads,
        kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
        head_dim=_head_dim(config, heads),
        tied_head=is_head_tied(module),
        dtype=embed_weight(module).dtype,
        config=plain_config(module),
    )
