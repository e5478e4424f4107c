"""Build an MTP drafter from named parts: what the layouts of MTP modules have in common."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from specc.checkpoints.reading import Folder
from specc.contracts import DrafterBundle, DrafterInfo, ModelInfo
from specc.drafters.mtp import MtpConfig, MtpDrafter
from specc.models.decoder_layer import LoadedLayer, load_decoder_layer

OF_THE_TARGET = "the target's"  # why a tensor of the same folder is not the drafter's to read


@dataclass(frozen=True)
class MtpNames:
    """Where a layout keeps the parts of one module; the decoder layer is everything else under ``layer``."""

    layer: str  # prefix
    norm_embed: str
    norm_hidden: str
    project: str
    norm_out: str
    embed: str | None = None  # a copy of the target's embedding, or an embedding of its own
    head: str | None = None
    embed_first: bool = True

    @property
    def parts(self) -> tuple[str, ...]:
        return (self.norm_embed, self.norm_hidden, self.project, self.norm_out)


@dataclass(frozen=True)
class TargetNames:
    """The target's tensors in the same folder: copies inside the module are compared with them."""

    embed: str
    head: str
    norm: str


def read_module(
    folder: Folder,
    layout: str,
    names: MtpNames,
    layer_config: Mapping[str, Any],
    target: ModelInfo,
    *,
    modules: int = 1,
    block: int | None = None,
    inside: TargetNames | None = None,
    notes: tuple[str, ...] = (),
) -> DrafterBundle:
    """Return the drafter; every tensor under ``names`` is read, and what does not fit is refused by name."""
    hidden, vocab = target.hidden, target.vocab
    norms = [folder.take(name, (hidden,)) for name in (names.norm_embed, names.norm_hidden, names.norm_out)]
    project = folder.take(names.project, (hidden, 2 * hidden))
    embed = _own(folder, names.embed, (vocab, hidden), inside.embed if inside else None)
    head = _own(folder, names.head, (vocab, hidden), _head_of(folder, inside, target))
    aside = {*names.parts, names.embed, names.head}
    members = sorted(name for name in folder.names if name.startswith(names.layer) and name not in aside)
    tensors = {name.removeprefix(names.layer): folder.take(name) for name in members}
    loaded = load_decoder_layer(layer_config, tensors, target.dtype)
    _refuse_misfits(folder, names, loaded)
    config = MtpConfig(
        hidden=hidden,
        vocab=vocab,
        modules=modules,
        embed_first=names.embed_first,
        own_embed=embed is not None,
        own_head=head is not None,
    )
    target_norm = None
    if inside is not None and inside.norm in folder.names:
        target_norm = loaded.norm_of(folder.take(inside.norm, (hidden,)).to(target.dtype))
    norm_embed, norm_hidden, norm_out = (loaded.norm_of(weight.to(target.dtype)) for weight in norms)
    drafter = MtpDrafter(config, loaded.layer, (norm_embed, norm_hidden, norm_out), target_norm)
    _assign(drafter.project, project, target.dtype)
    if embed is not None:
        _assign(drafter.embed_tokens, embed, target.dtype)
    if head is not None:
        _assign(drafter.lm_head, head, target.dtype)
    notes += (
        "the module reads the target's last state after its final norm, and carries its own output after its "
        "norm: engines disagree on both, and only the acceptance of the second and later drafts tells",
    )
    info = DrafterInfo(
        name=folder.path.name,
        method="mtp",
        layout=layout,
        hidden=hidden,
        target_hidden=hidden,
        vocab=vocab,
        target_vocab=vocab,
        taps=(target.layers,),
        max_position=None,
        block=block,
        config=config,
    )
    unused = tuple(item for item in folder.finish() if not item.endswith(f": {OF_THE_TARGET}"))
    return DrafterBundle(info, drafter.eval().requires_grad_(False), unused=unused, notes=notes)


def _assign(module: torch.nn.Module, weight: Tensor, dtype: torch.dtype) -> None:
    module.load_state_dict({"weight": weight.to(dtype)}, assign=True)


def _head_of(folder: Folder, inside: TargetNames | None, target: ModelInfo) -> str | None:
    """Return the tensor that is the target's head: the embedding, when it is tied and not written out."""
    if inside is None:
        return None
    return inside.embed if target.tied_head and inside.head not in folder.names else inside.head


def _own(folder: Folder, name: str | None, shape: tuple[int, ...], copied_from: str | None) -> Tensor | None:
    """Return a module's own embedding or head; None when there is none or it equals the target's."""
    if name is None or name not in folder.names:
        return None
    tensor = folder.take(name, shape)
    if (
        copied_from is None
        or copied_from not in folder.names
        or not torch.equal(tensor, folder.take(copied_from))
    ):
        return tensor
    folder.leave(name, f"a copy of {copied_from}, which is used")
    folder.leave(copied_from, OF_THE_TARGET)
    return None


def _refuse_misfits(folder: Folder, names: MtpNames, loaded: LoadedLayer) -> None:
    for name, found, expected in loaded.mismatched:
        raise folder.refuse(names.layer + name, f"shape {list(found)}", f"shape {list(expected)}")
    for name in loaded.missing:
        raise folder.refuse(
            names.layer + name, "no such tensor", "every tensor of the target's decoder layer"
        )
    for name in loaded.unexpected:
        raise folder.refuse(
            names.layer + name,
            "a tensor that the target's decoder layer does not have",
            "every tensor to be read: ignoring it could change the numbers",
        )


def with_prefix(names: MtpNames, prefix: str) -> MtpNames:
    """Return the names inside a prefix."""
    return replace(
        names,
        layer=prefix + names.layer,
        norm_embed=prefix + names.norm_embed,
        norm_hidden=prefix + names.norm_hidden,
        project=prefix + names.project,
        norm_out=prefix + names.norm_out,
        embed=None if names.embed is None else prefix + names.embed,
        head=None if names.head is None else prefix + names.head,
    )
