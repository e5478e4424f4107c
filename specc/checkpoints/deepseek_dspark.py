"""DeepSeek-V4's DSpark, which lives inside the target's checkpoint: known, and refused by name."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

from specc.checkpoints.reading import Folder
from specc.contracts import DrafterBundle, ModelInfo
from specc.errors import UnsupportedError

name = "deepseek-v4-dspark"


def recognise(config: Mapping[str, Any], names: Set[str]) -> bool:
    return "dspark_block_size" in config or "mtp.0.main_proj.weight" in names


def read(folder: Folder, target: ModelInfo) -> DrafterBundle:
    raise UnsupportedError(
        f"{folder.path} holds DeepSeek-V4's DSpark drafter",
        ["specc does not compute its mixture-of-experts layers with residual streams and latent attention"],
    )
