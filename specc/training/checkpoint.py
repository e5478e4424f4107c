"""A run's state in one safetensors file: weights and moments as tensors, the rest as JSON in its header."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from specc.errors import ArtifactError

NAME = "state/training.safetensors"  # in a folder of its own: a drafter folder holds the drafter alone


def save_state(
    folder: Path, module: nn.Module, optimizer: torch.optim.Optimizer, facts: Mapping[str, Any]
) -> None:
    """Write the state; the old file is there until the new one is whole."""
    tensors = {f"module.{n}": t.detach().cpu().contiguous() for n, t in module.state_dict().items()}
    for name, value in _trained(module).items():
        for key, moment in optimizer.state.get(value, {}).items():
            tensors[f"optimizer.{name}.{key}"] = torch.as_tensor(moment).detach().cpu().contiguous().clone()
    path = folder / NAME
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    save_file(tensors, part, metadata={"facts": json.dumps(dict(facts))})
    part.replace(path)


def read_state(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """Return the tensors and facts of a run, or None if the folder has none."""
    path = folder / NAME
    if not path.is_file():
        return None
    with safe_open(path, framework="pt") as file:
        header = file.metadata() or {}
        if "facts" not in header:
            raise ArtifactError(path, "metadata", sorted(header), "facts: a state that specc wrote")
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  not a mapping
    return tensors, json.loads(header["facts"])


def restore(tensors: Mapping[str, Tensor], module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Put a state's weights and moments back."""
    module.load_state_dict(
        {n.removeprefix("module."): t for n, t in tensors.items() if n.startswith("module.")}
    )
    for name, value in _trained(module).items():
        prefix = f"optimizer.{name}."
        own = {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
        if own:
            optimizer.state[value] = {k: t if k == "step" else t.to(value.device) for k, t in own.items()}


def _trained(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name: value for name, value in module.named_parameters() if value.requires_grad}
