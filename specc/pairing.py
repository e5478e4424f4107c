"""Find and load the drafter for a target and a method."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from specc.checkpoints import read_drafter
from specc.contracts import (
    DrafterBundle,
    DrafterInfo,
    DraftsTree,
    Method,
    ModelInfo,
    ReadsFinalNorm,
    drafts_with,
)
from specc.errors import InputError, UnsupportedError
from specc.files import read_path
from specc.models.decoder_layer import final_norm
from specc.models.generation import tokenizer_difference
from specc.models.info import shortest_window
from specc.models.load import LoadedModel, load_drafter_model
from specc.tree import Tree

SHIPPED = (
    Path(__file__).resolve().parent / "shipped"
)  # shipped/<target>/<method>: drafters that come with specc


def find_drafter(method: Method, target: LoadedModel, drafter: Any) -> DrafterBundle | None:
    """Return the drafter that ``method`` needs for ``target``, on its device, or None if it needs none.

    Args:
        drafter: what the caller gave: a module, a path, a bundle, or None.

    Raises:
        InputError: one was given that the method cannot take, or none where one is needed.
        UnsupportedError: the pair does not fit, with the reasons.
        ArtifactError: the files are wrong.
    """
    if isinstance(drafter, DrafterBundle):
        return drafter
    if method.name == "draft_model":
        return _draft_model(target, drafter)
    if drafter is None and method.name == "mtp" and target.path is not None:
        drafter = target.path
    if drafter is None and method.needs_drafter:
        drafter = _shipped(method, target)
    if drafter is None:
        return None
    if not method.needs_drafter and method.name != "mtp":
        given = type(drafter).__name__ if isinstance(drafter, nn.Module) else str(drafter)
        raise InputError("drafter", given, f"none: method {method.name!r} drafts without one")
    if isinstance(drafter, nn.Module):
        raise InputError("drafter", type(drafter).__name__, f"a checkpoint folder for method {method.name!r}")
    bundle = read_drafter(read_path("drafter", drafter), target.info, drafts_with(method), asked=method.name)
    if isinstance(bundle.module, ReadsFinalNorm):
        bundle.module.attach(final_norm(target.module))
    weight = next(target.module.parameters())
    bundle.module.to(device=weight.device, dtype=weight.dtype).eval().requires_grad_(requires_grad=False)
    return bundle


def reasons_against(
    method: Method, target: ModelInfo, drafter: DrafterInfo | None, block: int
) -> tuple[str, ...]:
    """Return every reason why a method cannot run a pair with a block: its own, and what speaks against its tree."""
    reasons = method.reject(target, drafter, block)
    if reasons or not block or not isinstance(method, DraftsTree):
        return reasons
    made: object = method.tree(block) if callable(method.tree) else method.tree
    if not isinstance(made, Tree):
        return (f"its tree({block}) is no specc.tree.Tree but {type(made).__name__}",)
    if len(made.parents) != block:
        return (f"its tree({block}) has {len(made.parents)} drafts instead of {block}",)
    window = shortest_window(target)
    if window is not None and window <= made.height:
        return (f"a path of {made.height} drafts reaches past the target's sliding window of {window}",)
    return ()


def default_block(method: Method, info: DrafterInfo | None) -> int:
    """Return the draft tokens a step where none are asked for: what its makers propose, else the whole block.

    Makers count the drafts of a chain, so a tree goes by its method.
    """
    if isinstance(method, DraftsTree):
        return method.default_block
    if info is not None and info.proposed is not None:
        return info.proposed
    made = method.blocks(info)
    if made is None and info is not None:
        made = info.block  # what a chain was trained or proposed for: no limit, but the best guess
    return method.default_block if made is None else made


def _shipped(method: Method, target: LoadedModel) -> Path:
    folder = SHIPPED / target.info.name / drafts_with(method)
    if folder.is_dir():
        return folder
    raise InputError(
        "drafter",
        None,
        f"method {method.name!r} needs a drafter for {target.info.name!r}, and none comes with specc: "
        "give a checkpoint folder, train one where `specc train` knows the method, or use method 'ngram', "
        "which needs none",
    )


def _draft_model(target: LoadedModel, drafter: Any) -> DrafterBundle:
    if drafter is None:
        raise InputError(
            "drafter", None, "method 'draft_model' needs a smaller causal LM with the target's tokenizer"
        )
    loaded = drafter if isinstance(drafter, LoadedModel) else load_drafter_model(drafter, target=target)
    if target.tokenizer is not None and loaded.tokenizer is not None:
        difference = tokenizer_difference(target.tokenizer, loaded.tokenizer)
        if difference is not None:
            raise UnsupportedError(
                "method 'draft_model' cannot run this pair",
                [f"the tokenizers differ: {difference}"],
                "Choose a drafter with the target's own tokenizer.",
            )
    places = [next(m.parameters()).device for m in (target.module, loaded.module)]
    if places[0] != places[1]:
        raise UnsupportedError(
            "method 'draft_model' cannot run this pair",
            [f"the target is on {places[0]}, the drafter on {places[1]}"],
        )
    info = DrafterInfo(
        name=loaded.info.name,
        method="draft_model",
        layout="transformers",
        hidden=loaded.info.hidden,
        target_hidden=None,
        vocab=loaded.info.vocab,
        target_vocab=loaded.info.vocab,
        taps=(),
        max_position=loaded.info.max_position,
        block=None,
        config=loaded.info,
    )
    return DrafterBundle(info, loaded.module)
