"""Every key of every layout's config with values that cannot be meant: one typed error, or the drafter loads."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specc.checkpoints import read_drafter
from specc.contracts import ModelInfo
from specc.errors import ArtifactError, SpeccError
from tests import oracles
from tests.methods.harness import model_info

NAMES = ("dflash-zlab-swa", "dflash-hf-swa", "dflash2-spec", "dspark-spec-rnn", "dspark-specforge", "eagle3-spec-31",
         "eagle3-specforge", "eagle3-safeai-full", "mtp-spec")  # fmt: skip
VALUES = (
    "3",
    -1,
    0,
    7,
    1.5,
    float("nan"),
    float("inf"),
    2**31 - 1,
    2**70,
    1e300,
    True,
    [],
    ["x"],
    [2**70],
    [[1]],
    {},
    {"a": 1},
)


@pytest.fixture(scope="module")
def target() -> ModelInfo:
    return model_info(oracles.target("llama"), "llama")


def places(values: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Return where every value of a JSON object is, the objects themselves included."""
    for key, value in values.items():
        yield (*at, key)
        if isinstance(value, dict):
            yield from places(value, (*at, key))


@pytest.mark.parametrize("name", NAMES)
def test_no_value_of_a_config_ends_in_a_traceback(name: str, target: ModelInfo, tmp_path: Path) -> None:
    folder = tmp_path / name
    shutil.copytree(oracles.folder(f"drafters/{name}"), folder)
    config = json.loads((folder / "config.json").read_text())
    refused = 0
    for place in places(config):
        for value in VALUES:
            changed = json.loads(json.dumps(config))
            inner = changed
            for key in place[:-1]:
                inner = inner[key]
            inner[place[-1]] = value
            (folder / "config.json").write_text(json.dumps(changed))
            try:
                read_drafter(folder, target)
            except SpeccError:
                refused += 1
            except BaseException as error:
                pytest.fail(f"{'.'.join(place)} = {value!r}: {type(error).__name__}: {error}")
    assert refused > len(config), "this layout heeds hardly anything"


@pytest.mark.parametrize(
    "text", ["[" * 100_000, "{", '{"a": 1' + "0" * 5000 + "}", "[1]", "\udcff"], ids=range(5)
)
def test_a_config_that_is_no_json_object(text: str, target: ModelInfo, tmp_path: Path) -> None:
    folder = tmp_path / "d"
    shutil.copytree(oracles.folder("drafters/dflash-zlab"), folder)
    (folder / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ArtifactError, match=r"config\.json|layout"):
        read_drafter(folder, target)


@pytest.mark.parametrize("key", ["rms_norm_eps", "rope_theta"])
@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf")])
def test_numbers_that_would_be_taken(key: str, value: float, target: ModelInfo, tmp_path: Path) -> None:
    folder = tmp_path / "d"
    shutil.copytree(oracles.folder("drafters/eagle3-specforge"), folder)
    config = json.loads((folder / "config.json").read_text())
    config.pop("rope_parameters", None)
    config.setdefault("rope_theta", 10000.0)
    (folder / "config.json").write_text(json.dumps(config | {key: value}))
    with pytest.raises(ArtifactError, match=key):
        read_drafter(folder, target)


@pytest.mark.parametrize(
    "dtype", [torch.float8_e4m3fn, torch.int8, torch.uint8, torch.bool, torch.complex64], ids=str
)
def test_weights_that_are_no_floats(dtype: torch.dtype, target: ModelInfo, tmp_path: Path) -> None:
    folder = tmp_path / "d"
    shutil.copytree(oracles.folder("drafters/dspark-spec-vanilla"), folder)
    file = folder / "model.safetensors"
    weights = load_file(file)
    name = next(name for name in sorted(weights) if name.endswith("q_proj.weight"))
    save_file(weights | {name: weights[name].to(dtype)}, file)
    with pytest.raises(ArtifactError, match=r"dtype .*float weights"):
        read_drafter(folder, target)


def test_an_index_that_does_not_fit_its_shards(target: ModelInfo, tmp_path: Path) -> None:
    """A lost shard may hold what is optional, such as an embedding of its own: the target's would fill in silently."""
    folder = tmp_path / "d"
    shutil.copytree(oracles.folder("drafters/eagle3-spec-full-nbr"), folder)
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    lost = next(n for n in sorted(weights) if n.startswith("embed_tokens"))
    shards = {"a.safetensors": [n for n in weights if n != lost], "b.safetensors": [lost]}
    for shard, names in shards.items():
        save_file({n: weights[n] for n in names}, folder / shard)
    index = folder / "model.safetensors.index.json"

    def write(**changes: str) -> None:
        where = {n: shard for shard, names in shards.items() for n in names} | changes
        index.write_text(json.dumps({"metadata": {}, "weight_map": where}))

    write()
    read_drafter(folder, target)
    write(**{lost: "a.safetensors"})
    with pytest.raises(ArtifactError, match=f"{lost}: found it in b"):
        read_drafter(folder, target)
    write()
    (folder / "b.safetensors").unlink()
    with pytest.raises(ArtifactError, match=f"{lost}: found no such tensor"):
        read_drafter(folder, target)
    index.write_text('{"weight_map": 3}')
    with pytest.raises(ArtifactError, match="weight_map"):
        read_drafter(folder, target)
