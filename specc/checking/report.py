"""What a check says: findings, readings of a live probe, and the verdict."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Effect = Literal["stops", "loses", "note"]
_HEADINGS: Mapping[Effect, str] = {
    "stops": "will not work",
    "loses": "may lose acceptance",
    "note": "good to know",
}
SIGNIFICANT = (
    3.0  # standard errors; three readings are compared, so chance alone says so once in several hundred pairs
)


@dataclass(frozen=True)
class Finding:
    """One thing about a pair: what it concerns, what was found, and what it does.

    ``effect`` is "stops" (the pair will not work), "loses" (it works and may accept less), or "note".
    """

    effect: Effect
    subject: str
    text: str


@dataclass(frozen=True)
class Reading:
    """Acceptance measured with every tap moved by ``shift`` layers; index i of a list is draft position i.

    ``acceptance`` is the share of places where that draft, and all before it, were right; ``gain`` the mean
    difference to the pair as it is, place by place.
    """

    shift: int
    taps: tuple[int, ...]
    places: int
    acceptance: tuple[float, ...]
    standard_error: tuple[float, ...]
    accepted: float  # drafts accepted in a row
    accepted_error: float
    gain: float = 0.0
    gain_error: float = 0.0


@dataclass(frozen=True)
class Probe:
    """Live readings: the first is the pair as it is."""

    prompts: int
    block: int
    readings: tuple[Reading, ...]
    outside_draft_vocab: float | None = None  # share of the target's tokens that can never be drafted

    def better(self) -> Reading | None:
        """Return the shifted reading that is significantly better than the pair as it is, if there is one."""
        best = max(self.readings[1:], key=lambda r: r.gain, default=None)
        return best if best is not None and best.gain > SIGNIFICANT * best.gain_error else None

    def verdict(self) -> str:
        """Return in a sentence what the shifted readings say."""
        own, better = self.readings[0], self.better()
        if len(self.readings) == 1:
            return "this method has no taps to shift"
        if better is not None:
            return (
                f"off by one: with its taps moved by {better.shift:+d} (after layers {list(better.taps)}) "
                f"the drafter is right {better.gain:.2f} ± {better.gain_error:.2f} drafts further than as it is (after "
                f"layers {list(own.taps)})"
            )
        if all(r.gain < -SIGNIFICANT * r.gain_error for r in self.readings[1:]):
            return "the taps are right: every shifted reading accepts significantly less"
        return f"no shifted reading is significantly better ({own.places} places); more prompts tell more"


@dataclass(frozen=True)
class Report:
    """Every reason at once why a pair will not work, or works and loses acceptance.

    Attributes:
        works: Nothing found stops the pair.
        clean: Nothing found stops it or costs acceptance.
    """

    model: str
    drafter: str
    method: str
    findings: tuple[Finding, ...]
    target_facts: Mapping[str, Any] = field(default_factory=dict)
    drafter_facts: Mapping[str, Any] = field(default_factory=dict)
    probe: Probe | None = None

    @property
    def works(self) -> bool:
        return not any(f.effect == "stops" for f in self.findings)

    @property
    def clean(self) -> bool:
        return all(f.effect == "note" for f in self.findings)

    @property
    def verdict(self) -> str:
        """Return the outcome in a few words."""
        count = {e: sum(f.effect == e for f in self.findings) for e in _HEADINGS}
        if not self.works:
            return f"will not work: {count['stops']} reason{'s' if count['stops'] > 1 else ''}"
        return f"works; {count['loses']} thing(s) may cost acceptance" if count["loses"] else "works"

    def to_dict(self) -> dict[str, Any]:
        """Return everything, for JSON."""
        probe = None
        if self.probe is not None:
            probe = {**asdict(self.probe), "verdict": self.probe.verdict()}
        return {
            "model": self.model,
            "drafter": self.drafter,
            "method": self.method,
            "verdict": self.verdict,
            "works": self.works,
            "clean": self.clean,
            "findings": [asdict(f) for f in self.findings],
            "target_facts": dict(self.target_facts),
            "drafter_facts": dict(self.drafter_facts),
            "probe": probe,
        }

    def render(self) -> str:
        """Return the report as text."""
        lines = [f"{self.model} with {self.drafter} as {self.method}: {self.verdict}"]
        for effect, heading in _HEADINGS.items():
            found = [f for f in self.findings if f.effect == effect]
            lines += [heading + ":", *(f"  - {f.subject}: {f.text}" for f in found)] if found else []
        if self.probe is not None:
            lines += _render_probe(self.probe)
        return "\n".join(lines)


def _render_probe(probe: Probe) -> list[str]:
    lines = [f"probe: {probe.prompts} prompts, block {probe.block}; drafts right in a row, then by position"]
    for r in probe.readings:
        label = "as it is" if r.shift == 0 else f"taps {r.shift:+d}"
        shares = "  ".join(f"{a:.2f}±{e:.2f}" for a, e in zip(r.acceptance, r.standard_error, strict=True))
        lines.append(f"  {label:9} {r.accepted:.2f}±{r.accepted_error:.2f} | {shares}  ({r.places} places)")
    return [*lines, f"  {probe.verdict()}"]
