"""Read the decoder-layer part of a config: sizes, biases, q/k norms and rope, in old and new spellings."""

from __future__ import annotations

from specc.checkpoints.keys import Keys
from specc.drafters.layers import ROPE_TYPES, LayerConfig, RopeConfig

LAYER_TYPES = ("llama", "qwen3")  # model types whose decoder layer `drafters.layers` computes


def read_layer(keys: Keys) -> LayerConfig:
    """Return the layer that ``model_type`` and its keys describe; reads rope and refuses windows."""
    model_type = keys.need("model_type", str)
    if model_type not in LAYER_TYPES:
        raise keys.refuse("model_type", repr(model_type), f"one of {', '.join(LAYER_TYPES)}")
    activation = keys.get("hidden_act", str, "silu")
    if activation not in ("silu", "gelu_pytorch_tanh"):
        raise keys.refuse("hidden_act", repr(activation), "'silu' or 'gelu_pytorch_tanh'")
    hidden, heads = keys.need("hidden_size", int, 1), keys.need("num_attention_heads", int, 1)
    kv_heads = keys.get("num_key_value_heads", int, heads, 1)
    if heads % kv_heads:
        raise keys.refuse("num_key_value_heads", kv_heads, f"a divisor of num_attention_heads, {heads}")
    head_dim = keys.maybe("head_dim", int, 1)
    if head_dim is None:
        if hidden % heads:
            raise keys.refuse("head_dim", "no such key", f"a value: {hidden} is not a multiple of {heads} heads")
        head_dim = hidden // heads
    return LayerConfig(
        hidden=hidden,
        intermediate=keys.need("intermediate_size", int, 1),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        eps=keys.get("rms_norm_eps", float, 1e-6, 0.0),
        rope=read_rope(keys),
        qk_norm=model_type == "qwen3",
        attention_bias=keys.get("attention_bias", bool, False),
        mlp_bias=keys.get("mlp_bias", bool, False),
        activation=activation,  # type: ignore[arg-type]  # checked above
    )


def refuse_windows(keys: Keys, layers: int) -> None:
    """Refuse sliding windows in a layout whose layers always see everything."""
    keys.only("layer_types", (["full_attention"] * layers,), "no sliding windows in this layout")
    if keys.get("use_sliding_window", bool, False):
        raise keys.refuse("use_sliding_window", True, "false: this layout has no sliding windows")
    keys.ignore("sliding_window")  # without use_sliding_window it says nothing


def read_rope(keys: Keys) -> RopeConfig:
    """Return rope parameters from ``rope_parameters``, or from ``rope_theta`` with ``rope_scaling``."""
    theta = keys.get("rope_theta", float, 10000.0, 0.0)
    partial = keys.get("partial_rotary_factor", float, 1.0, 0.0)
    original = keys.maybe("original_max_position_embeddings", int, 1)
    spelling = next((name for name in ("rope_parameters", "rope_scaling") if name in keys), None)
    if spelling is None:
        return RopeConfig(theta=theta, partial=partial)
    if spelling == "rope_parameters":
        keys.ignore("rope_scaling")  # the old spelling of the same
    rope = keys.inner(spelling)
    kind = rope.maybe("rope_type", str) or rope.get("type", str, "default")
    rope.ignore("type")
    if kind not in ROPE_TYPES:
        raise rope.refuse("rope_type", repr(kind), f"one of {', '.join(ROPE_TYPES)}")
    theta = rope.get("rope_theta", float, theta, 0.0)
    partial = rope.get("partial_rotary_factor", float, partial, 0.0)
    if kind == "default":
        # Left over by copying a config: the default type reads none of them.
        rope.ignore("factor", "original_max_position_embeddings")
        config = RopeConfig(theta=theta, partial=partial)
    elif kind == "linear":
        config = RopeConfig(theta=theta, type="linear", partial=partial, factor=rope.need("factor", float, 0.0))
    elif kind == "llama3":
        config = RopeConfig(
            theta=theta, type="llama3", partial=partial, factor=rope.need("factor", float, 0.0),
            low_freq_factor=rope.need("low_freq_factor", float, 0.0),
            high_freq_factor=rope.need("high_freq_factor", float, 0.0),
            original_max_position=_original(rope, original),
        )
    else:
        rope.only("truncate", (True,), "untruncated yarn bounds are not supported")
        config = RopeConfig(
            theta=theta, type="yarn", partial=partial, factor=rope.need("factor", float, 0.0),
            beta_fast=rope.get("beta_fast", float, 32.0, 0.0), beta_slow=rope.get("beta_slow", float, 1.0, 0.0),
            attention_factor=rope.maybe("attention_factor", float, 0.0),
            original_max_position=_original(rope, original),
        )
    rope.finish()
    return config


def _original(rope: Keys, outer: int | None) -> int:
    if outer is not None and "original_max_position_embeddings" not in rope:
        return outer
    return rope.need("original_max_position_embeddings", int, 1)
