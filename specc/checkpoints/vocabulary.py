"""Read a reduced draft vocabulary: which target id each draft id stands for."""

from __future__ import annotations

import torch
from torch import Tensor

from specc.checkpoints.reading import Folder

# Frequent tokens have neighbours: among this many there is a pair, and its offsets are equal.
_ENOUGH = 32


def read_draft_ids(folder: Folder, draft_vocab: int, vocab: int) -> Tensor | None:
    """Return the target id of every draft id, int64 [draft_vocab]; None when the two vocabularies are one.

    ``d2t`` holds offsets: target id = draft id + d2t[draft id]. Absolute ids, ids outside the vocabulary, ids
    that do not rise, and a ``t2d`` mask that names other ids are refused.
    """
    if "d2t" not in folder.names:
        if draft_vocab != vocab:
            raise folder.refuse(
                "d2t", "no such tensor", f"int64 [{draft_vocab}], since the vocabulary is reduced"
            )
        folder.leave("t2d", "a full vocabulary needs no mask")
        return None
    offsets = folder.take_integers("d2t", (draft_vocab,))
    if offsets.dtype == torch.bool:
        raise folder.refuse("d2t", str(offsets.dtype), "integer offsets")
    ids = torch.arange(draft_vocab) + offsets.long()
    outside = (ids < 0) | (ids >= vocab)
    if bool(outside.any()):
        worst = int(outside.nonzero()[0])
        raise folder.refuse(
            "d2t",
            f"draft id {worst} + {int(offsets[worst])} = target id {int(ids[worst])}",
            f"offsets that stay inside the target's {vocab} ids (absolute ids are another convention)",
        )
    falls = ids[1:] <= ids[:-1]
    if bool(falls.any()):
        worst = int(falls.nonzero()[0])
        raise folder.refuse(
            "d2t",
            f"target ids {int(ids[worst])}, {int(ids[worst + 1])} at draft ids {worst}, {worst + 1}",
            "target ids that rise with the draft id",
        )
    if "t2d" in folder.names:
        mask = folder.take_integers("t2d", (vocab,)).bool()
        if not torch.equal(mask.nonzero().flatten(), ids):
            raise folder.refuse(
                "t2d",
                f"{int(mask.sum())} ids that are not d2t's target ids",
                f"the {draft_vocab} ids d + d2t[d] (absolute ids in d2t, instead of offsets, look like this)",
            )
    elif draft_vocab >= _ENOUGH and bool((offsets[1:] > offsets[:-1]).all()):
        raise folder.refuse(
            "d2t",
            "values that rise at every draft id, and no t2d that confirms them",
            "offsets to the target id, which stay equal where two drafted ids are neighbours "
            "(absolute ids instead of offsets look like this)",
        )
    return None if draft_vocab == vocab else ids
