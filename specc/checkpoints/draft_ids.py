"""Read a reduced draft vocabulary: offsets ``d2t`` (target id = d + d2t[d]) and the flags ``t2d``."""

from __future__ import annotations

import torch
from torch import Tensor

from specc.checkpoints.reading import Folder


def read_draft_ids(folder: Folder, draft_vocab: int, vocab: int, prefix: str = "") -> Tensor | None:
    """Return the target id of each candidate, int64 [draft_vocab], or None when candidate c is target id c.

    Refuses ids outside the vocabulary, ids that do not rise, and offsets that ``t2d`` contradicts, each of
    which would draft other tokens than the drafter was trained to.
    """
    offsets_name, flags_name = f"{prefix}d2t", f"{prefix}t2d"
    if draft_vocab > vocab:
        raise folder.refuse("draft_vocab_size", draft_vocab, f"at most the vocabulary of {vocab} ids")
    if draft_vocab == vocab and offsets_name not in folder.names:
        folder.leave(flags_name, "all target ids can be drafted")
        return None
    offsets = folder.take(offsets_name, (draft_vocab,))
    if offsets.is_floating_point() or offsets.dtype == torch.bool:
        raise folder.refuse(offsets_name, f"type {offsets.dtype}", "integers")
    ids = torch.arange(draft_vocab) + offsets.long()
    rises = "offsets: target id = d + d2t[d], rising"
    if int(ids.min()) < 0 or int(ids.max()) >= vocab:
        row = int(((ids < 0) | (ids >= vocab)).nonzero()[0])
        raise folder.refuse(
            offsets_name, f"{int(offsets[row])} at {row}, so target id {int(ids[row])}",
            f"{rises} ids below {vocab} (absolute ids instead of offsets look like this)",
        )
    falls = (ids[1:] <= ids[:-1]).nonzero()
    if len(falls):
        row = int(falls[0]) + 1
        raise folder.refuse(offsets_name, f"target id {int(ids[row])} after {int(ids[row - 1])} at {row}", rises)
    if flags_name in folder.names:
        _check_flags(folder, flags_name, ids, vocab)
    return None if draft_vocab == vocab else ids


def _check_flags(folder: Folder, name: str, ids: Tensor, vocab: int) -> None:
    flags = folder.take(name, (vocab,)).bool()
    want = torch.zeros(vocab, dtype=torch.bool)
    want[ids] = True
    wrong = (flags != want).nonzero()
    if len(wrong):
        token = int(wrong[0])
        said = "can" if flags[token] else "cannot"
        raise folder.refuse(
            name, f"{len(wrong)} ids that d2t contradicts, first {token}, which t2d says {said} be drafted",
            "the ids d + d2t[d] (absolute ids in d2t, instead of offsets, look like this)",
        )
