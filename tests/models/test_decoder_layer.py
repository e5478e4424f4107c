"""A decoder layer loaded alone equals the same layer inside its model, for families of every kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from specc.errors import UnsupportedError
from specc.models.decoder_layer import final_norm, load_decoder_layer
from tests.tiny import tiny_model

ARCHS = ("llama", "qwen2", "qwen3", "qwen3_moe", "glm4_moe", "deepseek_v3")
TOLERANCE = 1e-5  # fp32, other kernels


def layer_tensors(model: Any, folder: Path, index: int) -> dict[str, Tensor]:
    """Return one layer's tensors under the names and shapes of a published checkpoint."""
    model.save_pretrained(folder)
    prefix = f"model.layers.{index}."
    stored = load_file(folder / "model.safetensors")
    return {name.removeprefix(prefix): value for name, value in stored.items() if name.startswith(prefix)}


@pytest.mark.parametrize("arch", ARCHS)
def test_equals_the_layer_inside_its_model(arch: str, tmp_path: Path) -> None:
    model, kept = tiny_model(arch), {}
    last = model.config.num_hidden_layers - 1

    def keep(_module: object, inputs: tuple[Any, ...], output: Any) -> None:
        kept["in"], kept["out"] = inputs[0][0], (output[0] if isinstance(output, tuple) else output)[0]

    model.model.layers[last].register_forward_hook(keep)
    ids = torch.randint(3, 90, (1, 20), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        model(input_ids=ids, use_cache=False)
    loaded = load_decoder_layer(model.config.to_dict(), layer_tensors(model, tmp_path, last), torch.float32)
    assert loaded.missing == loaded.unexpected == loaded.mismatched == ()
    layer = loaded.layer
    assert layer is not None
    caches = {
        "key_cache": torch.full((2, layer.cache.heads, 33, layer.cache.key_size), torch.nan),
        "value_cache": torch.full((2, layer.cache.heads, 33, layer.cache.value_size), torch.nan),
    }
    out = []
    for begin, end in ((0, 7), (7, 8), (8, 20)):
        position = torch.arange(begin, end)
        with torch.no_grad():
            out.append(
                layer(
                    kept["in"][begin:end],
                    position,
                    slot=torch.ones_like(position),
                    cache_row=position,
                    first=torch.zeros_like(position),
                    **caches,
                )
            )
    torch.testing.assert_close(torch.cat(out), kept["out"], rtol=0, atol=TOLERANCE)


def test_norm_is_of_the_familys_class() -> None:
    model = tiny_model("llama")
    loaded = load_decoder_layer(model.config.to_dict(), {}, torch.float32)
    hidden = torch.randn(3, 32)
    norm = loaded.norm_of(model.model.norm.weight)
    assert torch.equal(norm(hidden), model.model.norm(hidden))
    assert final_norm(model) is model.model.norm


def test_names_what_does_not_fit(tmp_path: Path) -> None:
    model = tiny_model("llama")
    tensors = layer_tensors(model, tmp_path, 1)
    tensors["self_attn.q_norm.weight"] = torch.ones(8)
    tensors["mlp.down_proj.weight"] = tensors["mlp.down_proj.weight"].T.contiguous()
    del tensors["input_layernorm.weight"]
    loaded = load_decoder_layer(model.config.to_dict(), tensors, torch.float32)
    assert loaded.layer is None
    assert loaded.missing == ("input_layernorm.weight",)
    assert loaded.unexpected == ("self_attn.q_norm.weight",)
    assert loaded.mismatched == (("mlp.down_proj.weight", (48, 32), (32, 48)),)


def test_ambiguous_attention_is_refused() -> None:
    config = {**tiny_model("qwen3").config.to_dict(), "layer_types": ["sliding_attention", "full_attention"]}
    with pytest.raises(UnsupportedError, match="mtp_layer_types"):
        load_decoder_layer(config, {}, torch.float32)


def test_unknown_family_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="no_such_family"):
        load_decoder_layer({"model_type": "no_such_family"}, {}, torch.float32)
