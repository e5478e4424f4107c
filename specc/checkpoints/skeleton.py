"""Build a drafter's module without memory for weights: the files give them, or show that a size is wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn

from specc.checkpoints.reading import Folder

M = TypeVar("M", bound=nn.Module)


def skeleton(folder: Folder, make: Callable[[Any], M], config: Any) -> M:
    """Return ``make(config)`` with parameters on the meta device; ArtifactError if its sizes cannot be meant."""
    try:
        with torch.device("meta"):
            return make(config)
    except (RuntimeError, OverflowError, TypeError) as error:
        raise folder.refuse(
            "config.json", f"sizes without meaning: {error}", "the sizes of the tensors"
        ) from error
