"""Recorded sequences on disk: safetensors shards with what is needed to go on after them.

A shard holds its sequences one after another: ``ids``, ``lengths``, ``prompts``, and for the positions that
have one (all but each sequence's last) ``features`` and ``final`` in float16 and ``log_total`` in float32.
The JSON beside it holds the prompts' texts, what was counted, and the seed after its last sequence.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from specc.training.record import Recorded

_LIMIT = 65504.0  # float16's largest; a state beyond it says nothing more than that it is huge


@dataclass(frozen=True)
class Example:
    """One sequence of a shard; see `record.Recorded`."""

    ids: Tensor
    prompt: int
    features: Tensor
    final: Tensor
    log_total: Tensor

    @property
    def answer(self) -> int:
        """Tokens of the answer."""
        return len(self.ids) - self.prompt


def read_lengths(path: Path) -> list[int]:
    """Return the tokens of each sequence of a shard, prompts included."""
    with safe_open(path, "pt") as file:
        lengths: list[int] = file.get_tensor("lengths").tolist()
    return lengths


def write_shard(folder: Path, number: int, sequences: Sequence[Recorded], facts: Mapping[str, Any]) -> Path:
    """Write shard ``number``; the JSON comes last, so a shard without one was not finished."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        "ids": torch.cat([s.ids for s in sequences]),
        "lengths": torch.tensor([len(s.ids) for s in sequences]),
        "prompts": torch.tensor([s.prompt for s in sequences]),
        "features": _half(torch.cat([s.features for s in sequences])),
        "final": _half(torch.cat([s.final for s in sequences])),
        "log_total": torch.cat([s.log_total for s in sequences]),
    }
    path = folder / f"shard-{number:05d}.safetensors"
    part = path.with_suffix(".part")
    save_file(tensors, part)
    part.replace(path)
    beside = path.with_suffix(".json")
    part = beside.with_suffix(".json.part")
    part.write_text(json.dumps(dict(facts), indent=1))
    part.replace(beside)
    return path


def _half(value: Tensor) -> Tensor:
    return value.clamp(-_LIMIT, _LIMIT).half()


def list_shards(folder: Path) -> list[Path]:
    """Return the finished shards in order."""
    return [p for p in sorted(folder.glob("shard-*.safetensors")) if p.with_suffix(".json").is_file()]


def read_facts(path: Path) -> dict[str, Any]:
    """Return what stands beside a shard."""
    facts: dict[str, Any] = json.loads(path.with_suffix(".json").read_text())
    return facts


def read_shard(path: Path) -> Iterator[Example]:
    """Yield a shard's sequences; the tensors are read once and the sequences view them."""
    with safe_open(path, framework="pt") as file:
        held = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  not a mapping
    start = row = 0
    for length, prompt in zip(held["lengths"].tolist(), held["prompts"].tolist(), strict=True):
        rows = slice(row, row + length - 1)
        yield Example(
            held["ids"][start : start + length],
            prompt,
            held["features"][rows],
            held["final"][rows],
            held["log_total"][rows],
        )
        start, row = start + length, row + length - 1
