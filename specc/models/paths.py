"""Where the parts of a transformers model sit: the paths of its decoder layers, embedding and head."""

from __future__ import annotations

from torch import nn

from specc.errors import UnsupportedError


def layer_paths(module: nn.Module, count: int) -> tuple[str, ...]:
    """Return the paths of the decoder layers, in order: the outermost list of ``count`` modules."""
    lists = [
        name
        for name, child in module.named_modules()
        if isinstance(child, nn.ModuleList) and len(child) == count
    ]
    if not lists:
        raise UnsupportedError(
            f"{type(module).__name__} cannot be traced over rows",
            [f"it has no list of {count} decoder layers"],
        )
    outermost = min(lists, key=lambda name: (name.count("."), name))
    return tuple(f"{outermost}.{index}" for index in range(count))


def path_of(module: nn.Module, child: nn.Module) -> str:
    """Return the path of ``child`` inside ``module``."""
    for name, candidate in module.named_modules():
        if candidate is child:
            return str(name)
    raise UnsupportedError(
        f"{type(module).__name__} is not a causal LM", [f"{type(child).__name__} is not inside it"]
    )
