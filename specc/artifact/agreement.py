"""What the fields of a manifest say of each other: each may be right alone and the package still not run."""

from __future__ import annotations

from collections.abc import Iterator, Set

from specc.artifact.manifest import Manifest
from specc.contracts import Stage
from specc.errors import SpeccError
from specc.step import StepKey, setting_specs, state_specs
from specc.stitch import relevant

Misfit = tuple[str, object, object]


def misfits(manifest: Manifest, held: Set[tuple[Stage, StepKey]]) -> Iterator[Misfit]:
    """Yield (field, found, expected) for every contradiction; ``held`` are the stages there are graphs of."""
    shape, model = manifest.shape, manifest.model
    if shape.vocab != model.vocab:
        yield "shape.vocab", shape.vocab, f"{model.vocab}, as model.vocab"
    if shape.capacity > model.max_position:
        yield "shape.capacity", shape.capacity, f"at most model.max_position, {model.max_position}"
    for name, spec in state_specs(shape).items():
        if manifest.state.get(name) != spec:
            yield f"state.{name}", manifest.state.get(name, "nothing"), spec
    if manifest.tree is not None and len(manifest.tree.parents) != manifest.block:
        yield "tree", f"{len(manifest.tree.parents)} drafts", f"{manifest.block}, as block"
    if not manifest.method:
        yield "method", repr(manifest.method), "a method's name"
    if any(not 0 <= tap <= model.layers for tap in manifest.taps):
        yield "taps", list(manifest.taps), f"0 to model.layers, {model.layers}"
    for families in manifest.families:
        try:
            setting_specs(shape, families)
        except (SpeccError, ValueError) as error:
            yield "families", list(families), f"settings of this version ({error})"
    for block, feed in ((manifest.block, 0), (0, manifest.feed), (0, 0)):
        key = StepKey(block, feed, manifest.accept)
        for stage in key.stages:
            # Verify is kept with hidden states; a missing accept stage is traced when it is used.
            extras = ("hidden",) if stage == "verify" else ()
            kept = relevant(stage, StepKey(block, feed, manifest.accept, extras=extras))
            if (stage, kept) not in held:
                yield (
                    "stages",
                    f"no {stage} stage of block {block}, feed {feed}",
                    "every stage of the package's steps",
                )
