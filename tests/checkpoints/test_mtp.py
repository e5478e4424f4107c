"""MTP readers: three families of names inside a target, and speculators; everything else refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from specc.checkpoints import read_drafter
from specc.contracts import DrafterBundle, ModelInfo
from specc.errors import ArtifactError
from tests import oracles
from tests.methods.harness import model_info

Edit = Callable[[dict[str, Any], dict[str, Tensor]], None]
_MODULE = "model.layers.4."


def info_of(name: str) -> ModelInfo:
    return model_info(oracles.target(name), name)


def read(name: str) -> DrafterBundle:
    return read_drafter(oracles.folder(f"targets/{name}"), info_of(name), "mtp")


def changed(tmp_path: Path, source: str, edit: Edit) -> Path:
    folder = oracles.folder(source)
    config, tensors = (
        json.loads((folder / "config.json").read_text()),
        load_file(folder / "model.safetensors"),
    )
    edit(config, tensors)
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    return tmp_path


def moved(tensors: dict[str, Tensor], names: dict[str, str], rest: str) -> None:
    """Rename the module's tensors: ``names`` for its own parts, prefix ``rest`` for its layer."""
    for name in [name for name in tensors if name.startswith(_MODULE)]:
        short = name.removeprefix(_MODULE)
        value = tensors.pop(name)
        if short not in ("embed_tokens.weight", "shared_head.head.weight"):
            tensors[names.get(short, rest + short)] = value


def test_copies_of_the_targets_tensors_are_not_kept() -> None:
    found = read("glm4moe-mtp1")
    assert len(found.unused) == 2
    assert all("a copy of" in item for item in found.unused)
    assert not found.module.config.own_embed
    assert not found.module.config.own_head


def test_an_embedding_or_head_of_its_own_is_kept(tmp_path: Path) -> None:
    def edit(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        tensors[f"{_MODULE}embed_tokens.weight"] += 1.0
        tensors[f"{_MODULE}shared_head.head.weight"] *= 2.0

    found = read_drafter(changed(tmp_path, "targets/glm4moe-mtp1", edit), info_of("glm4moe-mtp1"))
    assert found.module.config.own_embed
    assert found.module.config.own_head
    ids = torch.arange(5)
    base = oracles.target("glm4moe-mtp1").get_input_embeddings()
    torch.testing.assert_close(found.module.embed(ids, base), base(ids) + 1.0)


@pytest.mark.parametrize("family", ["qwen", "mimo"])
def test_other_families_names_load_alike(tmp_path: Path, family: str) -> None:
    names = {
        "qwen": {
            "enorm.weight": "mtp.pre_fc_norm_embedding.weight",
            "hnorm.weight": "mtp.pre_fc_norm_hidden.weight",
            "eh_proj.weight": "mtp.fc.weight",
            "shared_head.norm.weight": "mtp.norm.weight",
        },
        "mimo": {
            "enorm.weight": "model.mtp_layers.0.token_layernorm.weight",
            "hnorm.weight": "model.mtp_layers.0.hidden_layernorm.weight",
            "eh_proj.weight": "model.mtp_layers.0.input_proj.weight",
            "shared_head.norm.weight": "model.mtp_layers.0.final_layernorm.weight",
        },
    }[family]
    rest = {"qwen": "mtp.layers.0.", "mimo": "model.mtp_layers.0."}[family]

    def edit(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        if family == "mimo":  # its projection reads [hidden, embedding]
            project = tensors[f"{_MODULE}eh_proj.weight"]
            tensors[f"{_MODULE}eh_proj.weight"] = torch.cat(project.chunk(2, dim=1)[::-1], dim=1).contiguous()
        moved(tensors, names, rest)

    target = info_of("glm4moe-mtp1")
    ours, plain = (
        read_drafter(changed(tmp_path, "targets/glm4moe-mtp1", edit), target, "mtp").module,
        read("glm4moe-mtp1").module,
    )
    generator = torch.Generator().manual_seed(0)
    feature, embedding = (torch.randn(6, 64, generator=generator) for _ in range(2))
    position = torch.arange(6)
    outputs = []
    for module in (ours, plain):
        rows = {
            "slot": torch.zeros_like(position),
            "cache_row": position,
            "first": torch.zeros_like(position),
        }
        caches = {f"{kind}_cache": torch.zeros(1, 2, 9, 16) for kind in ("key", "value")}
        outputs.append(module.step(module.fuse(feature), embedding, position, **rows, **caches))
    torch.testing.assert_close(outputs[0], outputs[1], rtol=0, atol=1e-5)


def test_later_modules_are_named_and_left() -> None:
    found = read("llama-mtp2")
    assert found.module.config.modules == 2
    assert found.info.block == 1
    assert "model.layers.7.eh_proj.weight: a later MTP module: only the first is run" in found.unused
    assert any("2 MTP modules" in note for note in found.notes)


def without(name: str) -> Edit:
    return lambda config, tensors: tensors.__delitem__(name) or None


def with_tensor(name: str, *shape: int) -> Edit:
    return lambda config, tensors: tensors.update({name: torch.ones(*shape)})


def with_key(**values: object) -> Edit:
    return lambda config, tensors: config.update(values)


@pytest.mark.parametrize(
    ("edit", "parts"),
    [
        (without(f"{_MODULE}hnorm.weight"), ("hnorm.weight", "no such tensor", "[64]")),
        (without(f"{_MODULE}self_attn.k_norm.weight"), ("self_attn.k_norm.weight", "no such tensor")),
        (without(f"{_MODULE}input_layernorm.weight"), ("input_layernorm.weight", "no such tensor")),
        (with_tensor(f"{_MODULE}self_attn.sinks", 4), ("self_attn.sinks", "does not have")),
        (with_tensor(f"{_MODULE}eh_proj.weight", 64, 64), ("eh_proj.weight", "[64, 64]", "[64, 128]")),
        (
            with_tensor(f"{_MODULE}self_attn.o_proj.weight", 32, 64),
            ("self_attn.o_proj.weight", "[32, 64]", "[64, 64]"),
        ),
        (with_tensor("model.layers.6.eh_proj.weight", 64, 128), ("eh_proj", "[4, 6]", "[4, 5]")),
        (with_tensor("mtp.fc.weight", 64, 128), ("MTP modules", "one family")),
        (with_key(num_nextn_predict_layers=3), ("num_nextn_predict_layers", "3", "1")),
        (with_key(mtp_hidden_states_first=True), ("mtp_hidden_states_first",)),
        (with_key(chain_hidden_post_norm=False), ("chain_hidden_post_norm",)),
    ],
)
def test_what_does_not_fit_is_refused_by_name(tmp_path: Path, edit: Edit, parts: tuple[str, ...]) -> None:
    with pytest.raises(ArtifactError) as caught:
        read_drafter(changed(tmp_path, "targets/glm4moe-mtp1", edit), info_of("glm4moe-mtp1"))
    for part in parts:
        assert part in str(caught.value)


def test_a_target_without_modules_is_not_a_drafter() -> None:
    with pytest.raises(ArtifactError, match="layout"):
        read_drafter(oracles.folder("targets/llama"), info_of("llama"), "mtp")


@pytest.mark.parametrize(
    ("edit", "parts"),
    [
        (with_key(num_nextn_predict_layers=2), ("num_nextn_predict_layers", "2", "1")),
        (with_key(residual_scale=2.0), ("residual_scale",)),
        (without("mtp_layers.0.token_layernorm.weight"), ("token_layernorm.weight", "no such tensor")),
        (
            with_tensor("mtp_layers.1.input_proj.weight", 64, 128),
            ("mtp_layers.1.input_proj.weight", "does not have"),
        ),
    ],
)
def test_speculators_misfits_are_refused_by_name(tmp_path: Path, edit: Edit, parts: tuple[str, ...]) -> None:
    with pytest.raises(ArtifactError) as caught:
        read_drafter(changed(tmp_path, "drafters/mtp-spec", edit), info_of("qwen3"))
    for part in parts:
        assert part in str(caught.value)
