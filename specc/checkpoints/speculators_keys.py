"""The keys that every speculators checkpoint has: who wrote it, for which verifier, how many tokens."""

from __future__ import annotations

from specc.checkpoints.fields import Fields
from specc.contracts import ModelInfo


def read_speculators(fields: Fields, algorithm: str, target: ModelInfo) -> tuple[int | None, tuple[str, ...]]:
    """Return the proposed draft length and notes on the verifier; refuses another algorithm."""
    fields.choice("speculators_model_type", (algorithm,))
    for key in ("speculators_version", "embed_requires_grad"):
        fields.raw(key, None)
    if not fields.has("speculators_config"):
        return None, ()
    inner = fields.fields("speculators_config")
    inner.choice("algorithm", (algorithm,), algorithm)
    inner.raw("default_proposal_method", None)
    length = None
    proposals = inner.raw("proposal_methods", [])
    if not isinstance(proposals, list):
        raise inner.refuse("proposal_methods", repr(proposals), "a list")
    for proposal in proposals:
        tokens = proposal.get("speculative_tokens") if isinstance(proposal, dict) else None
        if not isinstance(tokens, int) or tokens < 1:
            raise inner.refuse("proposal_methods", repr(proposal), "speculative_tokens of at least 1")
        length = tokens if length is None else length
    notes = _verifier_notes(inner.fields("verifier"), target) if inner.has("verifier") else ()
    inner.finish()
    return length, notes


def _verifier_notes(verifier: Fields, target: ModelInfo) -> tuple[str, ...]:
    named = verifier.raw("name_or_path", None)
    architectures = verifier.strings("architectures", [])
    verifier.finish()
    notes = []
    if named:
        notes.append(f"made for the target {named} ({', '.join(architectures) or 'architecture not said'})")
    own = target.config.get("architectures") or []
    if architectures and own and not set(architectures) & set(own):
        notes.append(
            f"its target is a {', '.join(architectures)}, this a {', '.join(own)}: acceptance may be near 0"
        )
    return tuple(notes)
