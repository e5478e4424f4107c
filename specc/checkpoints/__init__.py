"""Readers of drafter checkpoints: one file per layout, recognised by content."""

from __future__ import annotations

from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any, Protocol

from specc.checkpoints import (
    deepseek_dspark,
    deepspec_dspark,
    hf_dflash,
    safeai_eagle3,
    specforge_eagle3,
    speculators_block,
    speculators_eagle3,
    speculators_mtp,
    speculators_peagle,
    target_mtp,
    zlab_dflash,
)
from specc.checkpoints.reading import Folder
from specc.contracts import DrafterBundle, ModelInfo
from specc.errors import ArtifactError, UnsupportedError


class Layout(Protocol):
    """One way of laying out a drafter's config and tensors."""

    @property
    def name(self) -> str: ...

    def recognise(self, config: Mapping[str, Any], names: Set[str]) -> bool:
        """Return whether a folder with this config.json and these tensor names is of this layout."""

    def read(self, folder: Folder, target: ModelInfo) -> DrafterBundle:
        """Read the drafter; ArtifactError names what is wrong with it, or with it for this target."""


LAYOUTS: tuple[Layout, ...] = (
    safeai_eagle3,
    specforge_eagle3,
    speculators_eagle3,
    speculators_peagle,
    speculators_block,
    zlab_dflash,
    hf_dflash,
    deepspec_dspark,
    deepseek_dspark,
    speculators_mtp,
    target_mtp,
)


def read_drafter(
    path: str | Path, target: ModelInfo, method: str | None = None, *, asked: str | None = None
) -> DrafterBundle:
    """Read the drafter in a folder for a target; its content decides the layout and the method.

    Args:
        path: A folder with config.json and safetensors.
        target: The model it will draft for.
        method: The method whose drafter is wanted; another one in the folder is refused.
        asked: What to call the method in an error, where it takes another's drafters.
    """
    folder = Folder(Path(path))
    found = [layout for layout in LAYOUTS if layout.recognise(folder.config, folder.names)]
    if len(found) != 1:
        raise ArtifactError(
            path,
            "layout",
            f"{' and '.join(layout.name for layout in found) or 'none'} ({_looks(folder.config)})",
            f"exactly one of {', '.join(layout.name for layout in LAYOUTS)}",
        )
    bundle = found[0].read(folder, target)
    if method is not None and bundle.info.method != method:
        raise UnsupportedError(
            f"method {(asked or method)!r} cannot use {path}",
            [f"the folder holds a {bundle.info.method!r} drafter in the {found[0].name} layout"],
            f"Use method={bundle.info.method!r}, or another drafter.",
        )
    return bundle


def _looks(config: Mapping[str, Any]) -> str:
    keys = ("speculators_model_type", "architectures", "model_type")
    return ", ".join(f"{key} {config.get(key)!r}" for key in keys)
