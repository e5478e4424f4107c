"""The model card of a trained drafter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def write_card(report: Mapping[str, Any]) -> str:
    """Return the README.md of a drafter's folder, from a run's report."""
    acceptance: Sequence[float] = report.get("acceptance") or ()
    lines = [
        f"# {report['method']} drafter for {report['target']}",
        "",
        f"Trained by `specc train`. It drafts {report['block']} tokens per step for the target with fingerprint "
        f"`{report['fingerprint']}`; with any other model its acceptance is near zero. The layout is speculators'.",
        "",
        f"- data: {report['data_tokens']} answer tokens, written by the target, to {report['data_answers']} prompts "
        f"({report['data_source']}); {report['flagged']} of {report['checked']} prompts were dropped for being "
        "close to an evaluation prompt",
        f"- training: {report['steps']} steps, {report['trained_tokens']} answer tokens seen, "
        f"{report['minutes']:.1f} minutes, final loss {report['loss']:.3f}",
        f"- parameters: {report['parameters']:,}, of which {report['trained_parameters']:,} trained",
        f"- command: `{report['command']}`",
        "",
        f"Greedy drafts on {report['held_out']} held-out answers (never trained on; a prefix counts when every draft "
        "up to it is the text's own token):",
        "",
        "| draft position | " + " | ".join(str(i + 1) for i in range(len(acceptance))) + " |",
        "|---|" + "---|" * len(acceptance),
        "| prefix accepted | " + " | ".join(f"{v:.3f}" for v in acceptance) + " |",
    ]
    if report.get("overlap"):
        lines.append(
            "| 1 - TV (sampling, T = 1) | " + " | ".join(f"{v:.3f}" for v in report["overlap"]) + " |"
        )
    lines += [
        "",
        f"Mean accepted length, bonus included: {report['accepted_length']:.2f}. Decoding these answers takes that "
        "many tokens a step; steps begin where the last one ended, so more of them begin at words that are hard to "
        "guess than the table's places do.",
    ]
    if report.get("calibration"):
        fitted = report["calibration"]
        lines += [
            "",
            f"Confidence head: bias moved by {fitted['bias']:+g}, sequential temperatures "
            + ", ".join(f"{v:g}" for v in fitted["temperatures"])
            + "; expected calibration error before "
            + ", ".join(f"{v:.4f}" for v in fitted["before"])
            + ", after "
            + ", ".join(f"{v:.4f}" for v in fitted["after"])
            + " (per position, on the held-out answers).",
        ]
    return "\n".join(lines) + "\n"
