"""Third-party checkpoints and reference numbers: tests/oracles/, whose README says what each file holds.

Each tensor is stored once. A file ``F.borrowed.json`` beside (or instead of) ``F`` names the tensors of F
that are kept in another file, "FILE#TENSOR", or, when it is a string, the file that F equals byte for byte.
`folder` puts such folders together again in a temporary place; the content is what the writers saved.
"""

from __future__ import annotations

import functools
import json
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

ROOT = Path(__file__).parent / "oracles"
_SUFFIX = ".borrowed.json"
_built = tempfile.TemporaryDirectory(prefix="specc-oracles-")


def names(kind: str, *prefixes: str) -> list[str]:
    """Return the sorted names in folder ``kind`` ("targets", "drafters", ...) that begin with a prefix."""
    found = {path.name.split(".")[0] for path in (ROOT / kind).iterdir() if path.name != "broken.json"}
    return sorted(name for name in found if name.startswith(prefixes or ("",)))


def tensors(path: str) -> dict[str, Tensor]:
    """Return all tensors of a file, borrowed ones included; ``path`` is relative to the oracles."""
    file, note = ROOT / path, ROOT / (path + _SUFFIX)
    found: dict[str, Tensor] = {}
    if file.exists():
        with safe_open(file, framework="pt") as opened:
            found = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118  not a dict
    if note.exists():
        for name, place in json.loads(note.read_text()).items():
            other, source = place.split("#")
            with safe_open(ROOT / other, framework="pt") as opened:
                found[name] = opened.get_tensor(source)
    return found


@functools.cache
def folder(name: str) -> Path:
    """Return a folder such as ``drafters/dflash-zlab``, complete; treat it as read-only."""
    source = ROOT / name
    notes = list(source.glob("*" + _SUFFIX))
    if not notes:
        return source
    made = Path(_built.name) / name
    made.mkdir(parents=True)
    for file in source.iterdir():
        if not file.name.endswith(_SUFFIX):
            shutil.copyfile(file, made / file.name)
    for note in notes:
        file_name = note.name.removesuffix(_SUFFIX)
        content = json.loads(note.read_text())
        if isinstance(content, str):
            shutil.copyfile(ROOT / content, made / file_name)
        else:
            save_file(tensors(f"{name}/{file_name}"), made / file_name, metadata={"format": "pt"})
    return made


@dataclass(frozen=True)
class Reference:
    """What a third party computed: the json, the tensors, and the taps the drafter was fed."""

    info: dict[str, Any]
    tensors: dict[str, Tensor]
    taps: Tensor | None

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]


@functools.cache
def reference(name: str) -> Reference:
    info = json.loads((ROOT / "refs" / f"{name}.json").read_text())
    taps = tensors(info["taps_file"])["taps"] if "taps_file" in info else None
    return Reference(info, tensors(f"refs/{name}.safetensors"), taps)


@functools.cache
def target(name: str) -> Any:
    """Return a target ("llama", or "targets/llama") as a float32 transformers model in eval mode."""
    from transformers import AutoModelForCausalLM

    path = folder(f"targets/{name.removeprefix('targets/')}")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    return model.eval().requires_grad_(False)
