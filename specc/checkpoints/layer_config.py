"""Read the decoder-layer part of a config: sizes, biases, q/k norms and rope."""

from __future__ import annotations

from specc.checkpoints.fields import Fields, read_rope
from specc.drafters.layers import LayerConfig

LAYER_TYPES = ("llama", "qwen3")  # model types whose decoder layer `drafters.layers` computes
_WIDEST, _DEEPEST = 65536, 1024
_ACTIVATIONS = ("silu", "gelu_pytorch_tanh")


def read_layer(fields: Fields) -> LayerConfig:
    """Return the layer that ``model_type`` and its keys describe."""
    model_type = fields.choice("model_type", LAYER_TYPES)
    hidden, heads = fields.integer("hidden_size", least=1), fields.integer("num_attention_heads", least=1)
    kv_heads = fields.integer("num_key_value_heads", heads, least=1)
    if heads % kv_heads:
        raise fields.refuse("num_key_value_heads", kv_heads, f"a divisor of num_attention_heads, {heads}")
    if not fields.has("head_dim") and hidden % heads:
        raise fields.refuse(
            "head_dim", "no such key", f"a value: {hidden} is not a multiple of {heads} heads"
        )
    head_dim, rope = fields.integer("head_dim", hidden // heads, least=1, most=_WIDEST), read_rope(fields)
    turned = int(head_dim * rope.partial)
    if turned % 2 or not 2 <= turned <= head_dim:
        raise fields.refuse(
            "head_dim", f"{head_dim}, of which rope turns {turned}", "an even number of 2 or more"
        )
    return LayerConfig(
        hidden=hidden,
        intermediate=fields.integer("intermediate_size", least=1),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        eps=fields.number("rms_norm_eps", 1e-6, above=0),
        rope=rope,
        qk_norm=model_type == "qwen3",
        attention_bias=fields.flag("attention_bias", False),
        mlp_bias=fields.flag("mlp_bias", False),
        activation=fields.choice("hidden_act", _ACTIVATIONS, "silu"),  # type: ignore[arg-type]  # choice checks
    )


def read_depth(fields: Fields, default: int | None = None) -> int:
    """Return ``num_hidden_layers``."""
    given = {} if default is None else {"default": default}
    return fields.integer("num_hidden_layers", least=1, most=_DEEPEST, **given)


def refuse_windows(fields: Fields) -> None:
    """Refuse sliding windows in a layout whose layers always see everything."""
    kinds = fields.strings("layer_types", [])
    if any(kind != "full_attention" for kind in kinds):
        raise fields.refuse(
            "layer_types", repr(kinds), "full_attention only: this layout has no sliding windows"
        )
    if fields.flag("use_sliding_window", False):
        raise fields.refuse("use_sliding_window", True, "false: this layout has no sliding windows")
    fields.raw("sliding_window", None)  # without use_sliding_window it says nothing
