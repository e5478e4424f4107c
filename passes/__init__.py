"""The rewrites of a step graph, one per file, and the order in which they run."""

from __future__ import annotations

if __name__ != "specc.passes":  # two names for one module would be two registries
    raise ImportError(f"this package is specc.passes; it cannot be imported as {__name__}")

from collections.abc import Sequence

from specc.contracts import Pass
from specc.passes.check_capturable import check_capturable
from specc.passes.drop_noops import drop_noops
from specc.passes.expose_hidden import expose_hidden
from specc.passes.follow_tree import follow_tree
from specc.passes.functionalize import functionalize
from specc.passes.fuse_step import fuse_step
from specc.passes.insert_taps import insert_taps
from specc.passes.replace_foreign_ops import replace_foreign_ops
from specc.passes.share_weights import share_weights
from specc.passes.slice_logits import slice_logits


def rows_pipeline(
    taps: Sequence[int], layer_paths: Sequence[str], hidden: int, *, follows_tree: bool = False
) -> tuple[Pass, ...]:
    """Return the passes over a model's rows graph, in order; ``follows_tree`` where drafts may be a tree."""
    return (
        # Taps early, while the trace still says which layer each node came from.
        functionalize,
        insert_taps(taps, layer_paths, hidden),
        slice_logits,
        expose_hidden,
        replace_foreign_ops,
        *((follow_tree,) if follows_tree else ()),
    )


STEP_PIPELINE: tuple[Pass, ...] = (
    # One graph
    fuse_step,
    share_weights,
    # Clean up
    drop_noops,
    # Refuse what no backend could capture
    check_capturable,
)
