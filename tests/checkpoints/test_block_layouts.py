"""Layouts of the DFlash family: which are recognised, what is refused, and by which name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from specc.checkpoints import read_drafter
from specc.checkpoints.zlab_dflash import default_ids
from specc.contracts import ModelInfo
from specc.drafters.block import BlockConfig
from specc.errors import ArtifactError, UnsupportedError
from tests import oracles
from tests.methods.harness import model_info

BROKEN = json.loads((oracles.ROOT / "broken" / "broken.json").read_text())
FAMILY = ("good-dflash", "good-dflash-zlab", "good-dflash2", "good-dflash2-zlab", "good-dspark")
# What each refusal must name: the key or tensor, and what was found.
REFUSED = {
    "mask-token-missing": ("mask_token_id", "null"),
    "mask-token-out-of-range": ("mask_token_id", "512"),
    "last-layer-tap": ("target_layer_ids", "found 7"),
    "markov-rank": ("markov_head.markov_w1.weight", "[512, 8]", "[512, 32]"),
    "markov-head-type": ("markov_head.gate_proj",),
    "conv-group": ("kernel_projection.weight", "[16, 64]", "[8, 64]"),
    "missing-selector": ("candidate_selector.successor_codebook", "no such tensor"),
}
LAYOUTS = {
    "dflash-hf": "hf-dflash",
    "dflash-spec": "speculators-dflash",
    "dflash-zlab": "zlab-dflash",
    "dflash2-spec": "speculators-dflash2",
    "dflash2-zlab": "zlab-dflash2",
    "dspark-spec-rnn": "speculators-dspark",
    "dspark-specforge": "specforge-dspark",
}


def _target(name: str) -> ModelInfo:
    return model_info(oracles.target(name), name)


def test_every_broken_folder_of_the_family_is_tested() -> None:
    assert {name for name, what in BROKEN.items() if what.get("copy_of") in FAMILY} == REFUSED.keys()


@pytest.mark.parametrize("name", REFUSED)
def test_broken_is_refused_by_name(name: str) -> None:
    with pytest.raises(ArtifactError) as caught:
        read_drafter(oracles.folder(f"broken/{name}"), _target(BROKEN[name]["target"]))
    message = str(caught.value)
    assert [part for part in REFUSED[name] if part not in message] == []
    assert "expected" in message


@pytest.mark.parametrize("name", FAMILY)
def test_good_loads(name: str) -> None:
    bundle = read_drafter(oracles.folder(f"broken/{name}"), _target(BROKEN[name]["target"]))
    assert bundle.info.method == name.removeprefix("good-").removesuffix("-zlab")
    assert bundle.unused == ()
    assert {value.dtype for value in bundle.module.parameters()} == {
        torch.float32
    }  # the target's, from bfloat16


@pytest.mark.parametrize("name", LAYOUTS)
def test_content_decides_the_layout(name: str) -> None:
    target = _target(oracles.reference(name).info["target"])
    folder = oracles.folder(f"drafters/{name}")
    bundle = read_drafter(folder, target)
    assert bundle.info.layout == LAYOUTS[name]
    wrong = "dspark" if bundle.info.method != "dspark" else "dflash"
    with pytest.raises(UnsupportedError, match=f"{wrong}(?s:.*){bundle.info.method}"):
        read_drafter(folder, target, wrong)


def test_each_weight_is_stored_once() -> None:
    """The fused keys and values hold what the file has per layer, and there is no second copy."""
    folder = oracles.folder("drafters/dspark-spec-vanilla")
    module = read_drafter(folder, _target("llama")).module
    saved = load_file(folder / "model.safetensors")
    assert sum(value.numel() for value in module.parameters()) == sum(
        value.numel() for value in saved.values()
    )
    fused = torch.cat(
        [saved[f"layers.{index}.self_attn.{kind}_proj.weight"] for index in (0, 1) for kind in "kv"]
    )
    assert torch.equal(module.key_value.weight, fused)


def _changed(tmp_path: Path, name: str, edit: Any = None, tensors: Any = None) -> Path:
    """Copy a drafter with its config or its tensors changed by a function."""
    source = oracles.folder(name)
    config, weights = (
        json.loads((source / "config.json").read_text()),
        load_file(source / "model.safetensors"),
    )
    if edit is not None:
        edit(config)
    if tensors is not None:
        tensors(weights)
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(weights, tmp_path / "model.safetensors")
    return tmp_path


@pytest.mark.parametrize(
    ("name", "edit", "says"),
    [
        ("broken/good-dflash-zlab", lambda c: c.update(logit_scale=2.0), "logit_scale"),
        (
            "broken/good-dflash-zlab",
            lambda c: c["dflash_config"].update(attention_sink_bias=True),
            "attention_sink_bias",
        ),
        (
            "broken/good-dflash-zlab",
            lambda c: c["dflash_config"].update(attention_mode="mla"),
            "attention_mode",
        ),
        ("broken/good-dflash-zlab", lambda c: c["rope_parameters"].update(rope_type="spiral"), "spiral"),
        (
            "broken/good-dflash-zlab",
            lambda c: c["dflash_config"].update(target_layer_ids=[1, 3]),
            "fc.weight",
        ),
        (
            "broken/good-dflash-zlab",
            lambda c: c["dflash_config"].update(target_layer_ids=[1, 3, 9]),
            "found 9",
        ),
        ("broken/good-dflash-zlab", lambda c: c.update(num_target_layers=6), "num_target_layers"),
        ("broken/good-dflash-zlab", lambda c: c.update(model_type="gemma3"), "model_type"),
        ("broken/good-dflash-zlab", lambda c: c.update(layer_types=["linear_attention"]), "layer_types"),
        ("broken/good-dflash-zlab", lambda c: c.update(layer_types=["sliding_attention"]), "sliding_window"),
        ("broken/good-dflash-zlab", lambda c: c.update(speculators_model_type="dflash"), "layout"),
        ("broken/good-dflash", lambda c: c.update(target_hidden_size=128), "target_hidden_size"),
        ("broken/good-dflash", lambda c: c.update(draft_vocab_size=64), "lm_head.weight"),
        ("broken/good-dflash", lambda c: c.update(speculators_model_type="dflash9"), "dflash9"),
        ("broken/good-dspark", lambda c: c.update(markov_head_type="lstm"), "lstm"),
        ("broken/good-dspark", lambda c: c.update(enable_confidence_head=False), "confidence_head.proj"),
        ("broken/good-dflash2", lambda c: c.update(conv_group_size=24), "conv_group_size"),
        ("broken/good-dflash2", lambda c: c.update(selector_top_k=600), "selector_top_k"),
        (
            "broken/good-dflash2-zlab",
            lambda c: c["dflash_config"].update(input_embedding_scale=2.0),
            "input_embedding_scale",
        ),
    ],
)
def test_a_config_that_means_something_else_is_refused(
    tmp_path: Path, name: str, edit: Any, says: str
) -> None:
    with pytest.raises(ArtifactError, match="found") as caught:
        read_drafter(_changed(tmp_path, name, edit), _target("qwen3"))
    assert says in str(caught.value)


@pytest.mark.parametrize("name", ["broken/good-dflash", "broken/good-dflash2-zlab", "broken/good-dspark"])
def test_leftover_and_missing_tensors_are_refused(tmp_path: Path, name: str) -> None:
    def add(weights: dict[str, Tensor]) -> None:
        weights["layers.0.self_attn.sinks"] = torch.zeros(2)

    with pytest.raises(ArtifactError, match=r"layers.0.self_attn.sinks"):
        read_drafter(_changed(tmp_path, name, tensors=add), _target("qwen3"))
    with pytest.raises(ArtifactError, match=r"layers.0.self_attn.v_proj.weight: found no such tensor"):
        read_drafter(
            _changed(tmp_path, name, tensors=lambda w: w.pop("layers.0.self_attn.v_proj.weight")),
            _target("qwen3"),
        )


def test_dflash2_never_becomes_dflash(tmp_path: Path) -> None:
    """Whichever of its marks is lost, what is left is refused."""

    def strip(weights: dict[str, Tensor]) -> None:
        for name in [name for name in weights if name.startswith("candidate_selector.") or "_conv." in name]:
            del weights[name]

    with pytest.raises(ArtifactError, match="_conv"):
        read_drafter(_changed(tmp_path, "broken/good-dflash2-zlab", tensors=strip), _target("qwen3"))
    with pytest.raises(ArtifactError, match="no such key"):
        read_drafter(
            _changed(
                tmp_path,
                "broken/good-dflash2-zlab",
                lambda c: c.update(
                    architectures=["DFlashDraftModel"],
                    dflash_config={"mask_token_id": 511, "target_layer_ids": [1, 3, 5]},
                ),
            ),
            _target("qwen3"),
        )


@pytest.mark.parametrize(
    ("keys", "causal"),
    [
        ({}, (True, False)),
        ({"is_causal": False}, (False, False)),
        ({"is_causal": True}, (True, True)),
        ({"inner": False}, (False, False)),
        ({"is_causal": True, "inner": False}, (True, True)),
    ],
)
def test_who_decides_that_a_zlab_layer_is_causal(
    tmp_path: Path, keys: dict[str, bool], causal: tuple[bool, ...]
) -> None:
    def edit(config: dict[str, Any]) -> None:
        config["layer_types"] = ["sliding_attention", "full_attention"]
        if "inner" in keys:
            config["dflash_config"]["causal"] = keys["inner"]
        config.update({key: value for key, value in keys.items() if key != "inner"})

    read = read_drafter(_changed(tmp_path, "drafters/dflash-zlab-swa", edit), _target("llama"))
    config = read.info.config
    assert isinstance(config, BlockConfig)
    assert config.causal == causal
    assert config.windows == (12, None)


def test_zlab_windows_from_its_own_keys(tmp_path: Path) -> None:
    def edit(config: dict[str, Any]) -> None:
        config["dflash_config"] |= {"swa_window_size": 9, "use_swa": True}

    config = read_drafter(_changed(tmp_path, "drafters/dflash-zlab", edit), _target("qwen3")).info.config
    assert isinstance(config, BlockConfig)
    assert config.windows == (9, 9)


def test_zlab_default_taps() -> None:
    """The published Qwen3-4B and Qwen3.5 ids, from the numbers of layers alone."""
    assert default_ids(5, 36) == (1, 9, 17, 25, 33)
    assert default_ids(1, 36) == (18,)


def _deepspec(config: dict[str, Any], weights: dict[str, Tensor]) -> None:
    """Turn z-lab's SpecForge DSpark folder into DeepSpec's layout: flat keys, embedding and head inside."""
    inner = config.pop("dflash_config")
    inner.pop("attention_mode")
    inner.pop("projector_type")
    config.update(inner, architectures=["Qwen3DSparkModel"], num_anchors=512)
    source = oracles.target("qwen3")
    weights["embed_tokens.weight"] = source.get_input_embeddings().weight.clone()
    weights["lm_head.weight"] = source.get_output_embeddings().weight.clone()


def test_deepspec(tmp_path: Path) -> None:
    kept: dict[str, Any] = {}
    folder = _changed(tmp_path, "drafters/dspark-specforge", kept.update, lambda weights: None)
    config, weights = (
        json.loads((folder / "config.json").read_text()),
        load_file(folder / "model.safetensors"),
    )
    _deepspec(config, weights)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors")
    bundle = read_drafter(folder, _target("qwen3"))
    read = bundle.info.config
    assert isinstance(read, BlockConfig)
    assert (bundle.info.method, bundle.info.layout, bundle.info.block) == ("dspark", "deepspec-dspark", 6)
    assert read.sample_from_anchor
    assert read.own_embed
    assert read.own_head
    assert bundle.info.taps == (2, 4, 6)

    config.update(markov_rank=0, enable_confidence_head=False)
    plain = {name: value for name, value in weights.items() if not name.startswith(("markov", "confidence"))}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(plain, folder / "model.safetensors")
    bundle = read_drafter(folder, _target("qwen3"))
    assert (bundle.info.method, bundle.info.block) == ("dflash", 6)
    assert any("anchor" in note for note in bundle.notes)


def test_known_but_not_supported(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="Gemma 4"):
        read_drafter(
            _changed(
                tmp_path,
                "drafters/dspark-specforge",
                lambda c: (c.pop("dflash_config"), c.update(architectures=["Gemma4DSparkModel"])),
            ),
            _target("qwen3"),
        )
    with pytest.raises(UnsupportedError, match="DeepSeek-V4"):
        read_drafter(
            _changed(
                tmp_path,
                "drafters/dspark-specforge",
                lambda c: (
                    c.pop("dflash_config"),
                    c.update(architectures=["DeepseekV4ForCausalLM"], dspark_block_size=5),
                ),
            ),
            _target("qwen3"),
        )
