"""SafeAILab's EAGLE-3 layout: SpecForge's with the architecture LlamaForCausalLM and no norm flags."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

from specc.checkpoints import specforge_eagle3
from specc.checkpoints.reading import Folder
from specc.contracts import DrafterBundle, ModelInfo

name = "safeai-eagle3"


def recognise(config: Mapping[str, Any], names: Set[str]) -> bool:
    return specforge_eagle3.looks_flat(config, names) and not specforge_eagle3.recognise(config, names)


def read(folder: Folder, target: ModelInfo) -> DrafterBundle:
    return specforge_eagle3.read_flat(folder, target, name, has_norm_flags=False)
