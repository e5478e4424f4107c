"""Build an EAGLE-3 drafter from a folder's tensors: what the three EAGLE-3 layouts have in common."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from specc.checkpoints.fields import Fields
from specc.checkpoints.reading import Folder
from specc.checkpoints.skeleton import skeleton
from specc.checkpoints.vocabulary import read_draft_ids
from specc.contracts import DrafterBundle, DrafterInfo, ModelInfo
from specc.drafters.eagle3 import Eagle3Config, Eagle3Drafter


def check_target_hidden(fields: Fields, found: int, target: ModelInfo) -> None:
    if found != target.hidden:
        raise fields.refuse(
            "target_hidden_size", found, f"{target.hidden}, the hidden size of the target {target.name}"
        )


def check_norms(fields: Fields, config: Eagle3Config) -> None:
    if config.fc_norm and config.norm_before_fc:
        raise fields.refuse("norm_before_fc", True, "false: fc_norm is true and the two exclude each other")


def check_taps(fields: Fields, key: str, taps: tuple[int, ...], target: ModelInfo) -> tuple[str, ...]:
    """Refuse taps outside 0..layers; return a note when one is the ambiguous state after all layers."""
    if not taps:
        raise fields.refuse(key, "no taps", "the layers to tap")
    for tap in taps:
        if not 0 <= tap <= target.layers:
            raise fields.refuse(
                key, f"tap {tap}", f"0 to {target.layers}: the target has {target.layers} layers"
            )
    if target.layers not in taps:
        return ()
    return (
        f"{key} has {target.layers}, the state after the last layer: read before the final norm; a drafter "
        "trained on the normed state accepts less",
    )


def default_taps(fields: Fields, target: ModelInfo) -> tuple[int, ...]:
    """Return SafeAILab's fixed taps (methods.md 0.4): after 2, L // 2 and L - 3 layers."""
    if target.layers < 6:
        raise fields.refuse(
            "eagle_aux_hidden_state_layer_ids",
            "no such key",
            f"the layers to tap: the default 2, L // 2, L - 3 needs 6 layers, the target has {target.layers}",
        )
    return (2, target.layers // 2, target.layers - 3)


def load_eagle3(
    folder: Folder, config: Eagle3Config, taps_key: str, rename: dict[str, str], target: ModelInfo
) -> tuple[Eagle3Config, Eagle3Drafter]:
    """Return the drafter with every tensor loaded, in the target's dtype.

    Args:
        folder: Where the tensors are.
        config: What the config says; own_embed, own_head and maps_ids are decided by what is there.
        taps_key: The key the taps come from, for messages.
        rename: Prefixes of the module's parameter names -> prefixes in the files.
        target: The target whose embedding and head fill in for absent ones.
    """

    def there(name: str) -> str:
        for ours, theirs in rename.items():
            if name.startswith(ours):
                return theirs + name.removeprefix(ours)
        return name

    embed, head = there("embed_tokens.weight"), there("lm_head.weight")
    config = replace(config, own_embed=embed in folder.names, own_head=head in folder.names)
    if not config.own_embed and config.hidden != target.hidden:
        raise folder.refuse(
            embed,
            "no such tensor",
            f"an embedding of width {config.hidden}: the target's is {target.hidden} wide",
        )
    if not config.own_head and (config.draft_vocab != target.vocab or config.hidden != target.hidden):
        raise folder.refuse(head, "no such tensor", f"a head of shape {[config.draft_vocab, config.hidden]}")
    fuse = there("fc.weight")
    if fuse in folder.names:
        wide = folder.shape(fuse)[-1]
        if wide != config.taps * config.target_hidden:
            raise folder.refuse(
                taps_key,
                f"{config.taps} taps",
                f"{wide / config.target_hidden:g}: {fuse} is {list(folder.shape(fuse))}, "
                f"{wide / config.target_hidden:g} taps of {config.target_hidden}",
            )
    ids = read_draft_ids(folder, config.draft_vocab, config.vocab)
    config = replace(config, maps_ids=ids is not None or config.draft_vocab < target.vocab)
    drafter = skeleton(folder, Eagle3Drafter, config)
    weights: dict[str, Tensor] = {}
    for name, value in drafter.state_dict().items():
        if name != "target_ids":
            weights[name] = folder.take(there(name), tuple(value.shape)).to(target.dtype)
    if ids is not None:
        weights["target_ids"] = ids
    elif drafter.target_ids is not None:
        weights["target_ids"] = torch.arange(config.draft_vocab)
    drafter.load_state_dict(weights, assign=True)
    return config, drafter.eval().requires_grad_(False)


def bundle(
    folder: Folder,
    layout: str,
    config: Eagle3Config,
    drafter: nn.Module,
    taps: tuple[int, ...],
    block: int | None,
    notes: tuple[str, ...],
    target: ModelInfo,
) -> DrafterBundle:
    """Return the drafter with its facts; refuses tensors nobody read."""
    info = DrafterInfo(
        name=folder.path.name,
        method="eagle3",
        layout=layout,
        hidden=config.hidden,
        target_hidden=config.target_hidden,
        vocab=config.draft_vocab,
        target_vocab=config.vocab,
        taps=taps,
        max_position=config.max_position,
        block=block,
        config=config,
    )
    shared = [name for name, own in (("embedding", config.own_embed), ("head", config.own_head)) if not own]
    if shared:
        notes = (*notes, f"the target's {' and '.join(shared)} used: the checkpoint has none")
    limit = config.max_position
    if limit is not None and limit < target.max_position:
        notes = (
            *notes,
            f"for {limit} of the target's {target.max_position} positions; nothing is drafted past {limit}",
        )
    return DrafterBundle(info, drafter, unused=folder.finish(), notes=notes)
