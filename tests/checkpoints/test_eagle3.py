"""EAGLE-3 readers: every broken folder is refused by what is wrong with it, every good one loads."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specc.checkpoints import read_drafter
from specc.contracts import ModelInfo
from specc.errors import ArtifactError, SpeccError, UnsupportedError
from tests import oracles
from tests.methods.harness import model_info

_LISTED: dict[str, dict[str, Any]] = json.loads((oracles.ROOT / "broken" / "broken.json").read_text())
GOOD = ("good-eagle3", "good-eagle3-specforge")
THETA = {"rope_theta": 10000.0}
IDS = "eagle_aux_hidden_state_layer_ids"

# What the message must name: the key or tensor, what was found, what was expected.
EXPECTED: dict[str, tuple[str, ...]] = {
    "tap-count": (IDS, "4 taps", "expected 3", "[64, 192]"),
    "tap-out-of-range": (IDS, "tap 9", "6 layers"),
    "tap-count-specforge": (f"eagle_config.{IDS}", "2 taps", "expected 3", "[64, 192]"),
    "d2t-absolute": ("t2d", "d + d2t[d]", "absolute"),
    "d2t-absolute-no-t2d": ("d2t", "rise at every", "absolute"),  # every d + d2t[d] is inside the vocabulary
    "d2t-not-monotone": ("d2t", "rise"),
    "d2t-short": ("d2t", "[58]", "[64]"),
    "missing-tensor": ("layers.0.self_attn.k_proj.weight", "no such tensor", "[16, 128]"),
    "missing-d2t": ("d2t", "no such tensor", "[64]"),
    "extra-tensor": ("layers.0.self_attn.q_norm.weight", "[16]"),
    "extra-fc-norm": ("fc_norm.0.weight", "[64]"),
    "wrong-rope-type": ("rope_type", "'spiral'", "default, linear, llama3, yarn"),
    "rope-incomplete": ("rope_parameters.factor", "no such key"),
    "wrong-shape": ("layers.0.mlp.down_proj.weight", "[32, 64]", "[64, 32]"),
    "wrong-target-hidden": ("target_hidden_size", "128", "64"),
    "both-norm-flags": ("norm_before_fc", "fc_norm"),
    "unknown-type": ("eagle9", "speculators-eagle3"),
    "truncated-file": ("model.safetensors", "safetensors file"),
    "nan-weights": ("fc.weight", "NaN"),
    "pickle-only": ("pytorch_model.bin", "save_file"),
}


def info_of(name: str) -> ModelInfo:
    return model_info(oracles.target(name), name)


def test_every_listed_folder_is_tested() -> None:
    listed = {name for name, entry in _LISTED.items() if entry.get("copy_of") in GOOD}
    assert listed == EXPECTED.keys() | {"wrong-target"}


@pytest.mark.parametrize("name", EXPECTED)
def test_broken_is_refused_by_name(name: str) -> None:
    with pytest.raises(ArtifactError) as caught:
        read_drafter(oracles.folder(f"broken/{name}"), info_of(_LISTED[name]["target"]))
    for part in EXPECTED[name]:
        assert part in str(caught.value)


@pytest.mark.parametrize("name", GOOD)
def test_good_loads_in_the_targets_dtype(name: str) -> None:
    found = read_drafter(oracles.folder(f"broken/{name}"), info_of(_LISTED[name]["target"]), "eagle3")
    assert found.info.taps == (1, 3, 5)
    assert found.unused == ()
    assert any("embedding" in note for note in found.notes)
    assert {parameter.dtype for parameter in found.module.parameters()} == {torch.float32}


def test_wrong_target_is_noted() -> None:
    found = read_drafter(oracles.folder("broken/wrong-target"), info_of("targets/qwen3"))
    notes = "\n".join(found.notes)
    assert "targets/llama" in notes
    assert "LlamaForCausalLM" in notes
    assert "Qwen3ForCausalLM" in notes


def test_another_method_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="'eagle3' drafter"):
        read_drafter(oracles.folder("broken/good-eagle3"), info_of("targets/llama"), "dspark")


@pytest.mark.parametrize("name", oracles.names("drafters", "eagle3"))
def test_every_tensor_is_read(name: str) -> None:
    target = oracles.reference(name).info["target"]
    found = read_drafter(oracles.folder(f"drafters/{name}"), info_of(target))
    assert found.unused in ((), ("t2d: a full vocabulary needs no mask",))
    stored = load_file(oracles.folder(f"drafters/{name}") / "model.safetensors")
    held = sum(value.numel() for value in found.module.parameters())
    assert held == sum(value.numel() for value in stored.values() if value.is_floating_point())


def changed(tmp_path: Path, name: str, edit: Callable[[dict[str, Any], dict[str, Any]], None]) -> Path:
    """Return a copy of a good folder whose config and tensors ``edit`` changed."""
    source = oracles.folder(f"broken/{name}")
    config, tensors = (
        json.loads((source / "config.json").read_text()),
        load_file(source / "model.safetensors"),
    )
    edit(config, tensors)
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    return tmp_path


@pytest.mark.parametrize(
    ("name", "key", "value", "parts"),
    [
        ("good-eagle3-specforge", "residual_scale", 0.5, ("residual_scale", "0.5")),
        ("good-eagle3-specforge", "norm_output", False, ("norm_output", "False")),
        ("good-eagle3-specforge", "model_type", "mamba", ("model_type", "mamba", "llama")),
        ("good-eagle3-specforge", "quantization_config", {"bits": 4}, ("quantization_config",)),
        (
            "good-eagle3-specforge",
            "rope_parameters",
            {**THETA, "rope_type": "dynamic", "factor": 2.0},
            ("rope_type", "dynamic"),
        ),
        ("good-eagle3-specforge", "eagle_config", {"use_aux_hidden_state": False}, ("use_aux_hidden_state",)),
        ("good-eagle3-specforge", IDS, [1, 3, 4], (IDS, "same")),
        ("good-eagle3-specforge", IDS, [1, "x", 4], (IDS, "integers")),
        ("good-eagle3-specforge", "num_key_value_heads", 3, ("num_key_value_heads", "divisor")),
        ("good-eagle3", "target_hidden_size", 32, ("target_hidden_size", "32", "64")),
        ("good-eagle3", "norm_before_residul", True, ("norm_before_residul",)),
    ],
)
def test_keys_that_would_change_the_numbers_are_refused(
    tmp_path: Path, name: str, key: str, value: object, parts: tuple[str, ...]
) -> None:
    folder = changed(tmp_path, name, lambda config, tensors: config.update({key: value}))
    with pytest.raises(ArtifactError) as caught:
        read_drafter(folder, info_of("targets/llama"))
    for part in parts:
        assert part in str(caught.value)


def test_norm_flags_are_not_safeai_keys(tmp_path: Path) -> None:
    folder = changed(
        tmp_path,
        "good-eagle3-specforge",
        lambda config, tensors: config.update(architectures=["LlamaForCausalLM"], norm_before_residual=True),
    )
    with pytest.raises(ArtifactError, match="norm_before_residual"):
        read_drafter(folder, info_of("targets/llama"))


def test_model_prefix_and_layer_zero_names_load_alike(tmp_path: Path) -> None:
    def edit(config: dict[str, Any], tensors: dict[str, Any]) -> None:
        for name in list(tensors):
            if name not in ("lm_head.weight", "d2t", "t2d"):
                tensors["model." + name.replace("midlayer.", "layers.0.")] = tensors.pop(name)

    target = info_of("targets/llama")
    plain = read_drafter(oracles.folder("broken/good-eagle3-specforge"), target).module.state_dict()
    prefixed = read_drafter(changed(tmp_path, "good-eagle3-specforge", edit), target).module.state_dict()
    assert plain.keys() == prefixed.keys()
    assert all(torch.equal(value, prefixed[name]) for name, value in plain.items())


def test_flag_and_mask_that_disagree_are_refused(tmp_path: Path) -> None:
    def edit(config: dict[str, Any], tensors: dict[str, Any]) -> None:
        flags = tensors["t2d"]
        on, off = int(flags.nonzero()[3]), int((~flags).nonzero()[0])
        flags[on], flags[off] = False, True

    with pytest.raises(ArtifactError, match="t2d"):
        read_drafter(changed(tmp_path, "good-eagle3-specforge", edit), info_of("targets/llama"))


def test_tap_after_the_last_layer_is_noted(tmp_path: Path) -> None:
    folder = changed(tmp_path, "good-eagle3", lambda config, tensors: config.update({IDS: [1, 3, 6]}))
    found = read_drafter(folder, info_of("targets/llama"))
    assert any("final norm" in note for note in found.notes)


def test_positions_that_end_early_are_noted(tmp_path: Path) -> None:
    folder = changed(
        tmp_path, "good-eagle3-specforge", lambda config, tensors: config.update(max_position_embeddings=64)
    )
    found = read_drafter(folder, info_of("targets/llama"))
    assert found.info.max_position == 64
    assert any("nothing is drafted past 64" in note for note in found.notes)


@pytest.mark.parametrize("where", ["type", "tensor"])
def test_p_eagle_is_refused_by_its_name(tmp_path: Path, where: str) -> None:
    def edit(config: dict[str, Any], tensors: dict[str, Any]) -> None:
        if where == "type":
            config["speculators_model_type"] = "peagle"
        else:
            tensors["mask_hidden"] = torch.zeros(1, 1, 192)

    with pytest.raises(SpeccError, match="P-EAGLE"):
        read_drafter(changed(tmp_path, "good-eagle3", edit), info_of("targets/llama"))
