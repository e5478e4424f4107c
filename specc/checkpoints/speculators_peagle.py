"""P-EAGLE in the speculators layout: recognised only to be refused by name, never read as EAGLE-3."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

from specc.checkpoints.reading import Folder
from specc.contracts import DrafterBundle, ModelInfo
from specc.errors import UnsupportedError

name = "speculators-peagle"


def recognise(config: Mapping[str, Any], names: Set[str]) -> bool:
    return config.get("speculators_model_type") == "peagle" or "mask_hidden" in names


def read(folder: Folder, target: ModelInfo) -> DrafterBundle:
    raise UnsupportedError(
        f"the drafter in {folder.path}",
        ["it is a P-EAGLE drafter (parallel drafting from mask_hidden), which specc has no method for"],
        "Use an EAGLE-3, DFlash or DSpark drafter of the same target.",
    )
