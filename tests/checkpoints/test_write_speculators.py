"""Writing the speculators layout: what is read from an oracle and written again is the oracle."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from specc import methods
from specc.checkpoints import read_drafter
from specc.checkpoints.block_weights import describe
from specc.checkpoints.write_speculators import write_drafter
from specc.drafters.block import BlockConfig
from specc.errors import UnsupportedError
from specc.pairing import default_block
from tests import oracles
from tests.methods.block_reference import block_config, random_drafter
from tests.methods.harness import model_info

NAMES = [name for name in oracles.names("drafters", "dflash", "dspark", "eagle3") if "-spec-" in f"{name}-"]
# auto_map names a Python file that is not written; the version is this machine's.
NOT_COMPARED = {"auto_map", "transformers_version"}


def _target(name: str) -> Any:
    return model_info(oracles.target(name), name)


@pytest.mark.parametrize("name", NAMES)
def test_round_trip(name: str, tmp_path: Path) -> None:
    source = oracles.folder(f"drafters/{name}")
    saved = json.loads((source / "config.json").read_text())
    verifier = saved["speculators_config"]["verifier"]["name_or_path"]
    target = _target(verifier)
    bundle = read_drafter(source, target)
    write_drafter(tmp_path, bundle.info, bundle.module, target, verifier)
    written = json.loads((tmp_path / "config.json").read_text())
    assert {key: value for key, value in written.items() if key not in NOT_COMPARED} == {
        key: value for key, value in saved.items() if key not in NOT_COMPARED
    }
    before, after = load_file(source / "model.safetensors"), load_file(tmp_path / "model.safetensors")
    assert before.keys() == after.keys()
    assert [name for name in before if not torch.equal(before[name], after[name])] == []
    assert sorted(file.name for file in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    again = read_drafter(tmp_path, target)
    assert again.info.config == bundle.info.config
    assert again.info.layout == bundle.info.layout


def test_bytes_do_not_change_from_one_write_to_the_next(tmp_path: Path) -> None:
    target = _target("llama")
    bundle = read_drafter(oracles.folder("drafters/dspark-spec-vanilla"), target)
    for folder in ("a", "b"):
        write_drafter(tmp_path / folder, bundle.info, bundle.module, target)
    for file in ("config.json", "model.safetensors"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"causal": (True, False)}, "full-attention layers are causal"),
        ({"windows": (4, 5), "window_rule": "speculators"}, "different windows"),
        ({"windows": (4, 4), "causal": (True, False), "window_rule": "speculators"}, "in part causal"),
        ({"windows": (4, None), "window_rule": "zlab"}, "zlab rule"),
        ({"embedding_scale": 2.0}, "scales its embedding"),
        ({"mask_embedding": True}, "an embedding of its own"),
    ],
)
def test_what_the_layout_cannot_say_is_refused(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    config: BlockConfig = replace(block_config("dflash"), **changes)
    with pytest.raises(UnsupportedError, match=says):
        write_drafter(
            tmp_path, describe("d", "dflash", "x", config), random_drafter(config), _target("llama")
        )
    assert list(tmp_path.iterdir()) == []


def test_what_its_makers_propose_is_the_default_block(tmp_path: Path) -> None:
    target = _target("llama")
    bundle = read_drafter(oracles.folder("drafters/dspark-spec-vanilla"), target)
    method = methods.get("dspark")
    assert default_block(method, bundle.info) == bundle.info.block
    write_drafter(tmp_path, replace(bundle.info, proposed=2), bundle.module, target)
    found = read_drafter(tmp_path, target).info
    assert (found.proposed, found.block) == (2, bundle.info.block)
    assert default_block(method, found) == 2
    config = json.loads((tmp_path / "config.json").read_text())
    config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] = 99
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_drafter(tmp_path, target).info.proposed == bundle.info.block
    assert default_block(methods.get("eagle3"), None) == methods.get("eagle3").default_block
