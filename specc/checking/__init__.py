"""Check a pair before it costs anything: every reason at once, and a live probe. Nothing here raises."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import nn

from specc.checking.folder import FolderFacts, look, mismatches
from specc.checking.pair import pair_findings
from specc.checking.probe import PROBE_TOKENS, Compile, probe, self_written
from specc.checking.report import Finding, Probe, Reading, Report
from specc.contracts import DrafterBundle, Method
from specc.errors import ArtifactError, SpeccError, UnsupportedError
from specc.models.load import LoadedModel, load_target
from specc.pairing import default_block, find_drafter, reasons_against
from specc.prompts import Prompt, built_in_prompts, read_prompts, suits

logger = logging.getLogger(__name__)

__all__ = ["PROBE_TOKENS", "Finding", "Probe", "Reading", "Report", "check_pair"]

NEARLY_NOTHING = (
    0.05  # of first drafts: random guessing of frequent tokens comes near this, a trained drafter never
)
OUTSIDE = 0.05  # of the target's tokens beyond the draft vocabulary: each ends a block


def check_pair(
    compile_step: Compile,
    prepare: Any,
    resolve: Any,
    model: Any,
    drafter: Any,
    *,
    method: str | Method,
    prompts: str | Path | Sequence[Any] | None = None,
    block: int | None = None,
    live: bool = True,
    tokens: int = PROBE_TOKENS,
    dtype: Any = None,
    device: Any = None,
) -> Report:
    """Return what speaks against a pair; see `specc.check`, whose arguments these are.

    ``compile_step``, ``prepare`` and ``resolve`` are `specc.api`'s, which this package may not import;
    ``live`` says whether to measure, and ``tokens`` is the length of the answers that the probe drafts along.
    """
    shown = _name(model), _name(drafter), method if isinstance(method, str) else method.name
    findings: list[Finding] = []
    facts: dict[str, Any] = {}
    try:
        chosen: Method = resolve(method)
        target = model if isinstance(model, LoadedModel) else load_target(model, dtype=dtype, device=device)
    except Exception as error:
        return Report(*shown, tuple(_stops("model" if shown[2] else "method", error)))
    facts["target"] = _target_facts(target)
    path = _folder_path(chosen, target, drafter)
    folder = look(path) if path is not None else None
    bundle = _load(chosen, target, drafter, folder, findings)
    measured = None
    info = None if bundle is None else bundle.info
    wanted = default_block(chosen, info) if block is None else block
    if bundle is not None or not any(f.effect == "stops" for f in findings):
        reasons = reasons_against(chosen, target.info, info, wanted)
        findings += [Finding("stops", "pair", reason) for reason in reasons]
    if bundle is not None:
        facts["drafter"] = _drafter_facts(bundle)
        findings += pair_findings(chosen, target, bundle, folder, path)
        if live and not any(f.effect == "stops" for f in findings):
            measured = _measure(
                compile_step, prepare, target, bundle, chosen, wanted, prompts, tokens, findings
            )
    return Report(*shown, tuple(findings), facts["target"], facts.get("drafter", {}), measured)


def _load(
    method: Method, target: LoadedModel, drafter: Any, folder: FolderFacts | None, findings: list[Finding]
) -> DrafterBundle | None:
    """Return the drafter, or None with every reason in ``findings``."""
    try:
        bundle = find_drafter(method, target, drafter)
    except Exception as error:
        findings += _stops("drafter", error)
        said = error.field if isinstance(error, ArtifactError) else ""
        if folder is not None and method.name not in ("draft_model", "mtp"):
            findings += [f for f in mismatches(folder, target.info) if f.subject not in said]
        return None
    if bundle is None:
        findings.append(
            Finding(
                "note", "drafter", f"method {method.name!r} drafts without one: there is no pair to check"
            )
        )
    return bundle


def _measure(
    compile_step: Compile,
    prepare: Any,
    target: LoadedModel,
    bundle: DrafterBundle,
    method: Method,
    block: int,
    prompts: str | Path | Sequence[Any] | None,
    tokens: int,
    findings: list[Finding],
) -> Probe | None:
    try:
        step = functools.partial(compile_step, prepare(target), backend="eager")
        if prompts is not None:
            chosen: Sequence[Prompt] = read_prompts(prompts)
        else:
            chosen = built_in_prompts() if suits(target.tokenizer) else self_written(step, target)
        encoded = [prompt.encode(target.tokenizer) for prompt in chosen]
        result = probe(step, target, bundle, method, block, encoded, tokens)
    except Exception as error:
        findings += _stops("probe", error)
        return None
    first = result.readings[0].acceptance
    if result.better() is not None:
        findings.append(Finding("loses", "taps", result.verdict()))
    if first and first[0] < NEARLY_NOTHING:
        findings.append(
            Finding(
                "loses", "probe", f"{first[0]:.0%} of first drafts are accepted: not trained for this target?"
            )
        )
    if result.outside_draft_vocab is not None and result.outside_draft_vocab > OUTSIDE:
        share = (
            f"{result.outside_draft_vocab:.0%} of the target's tokens are outside it, and each ends a block"
        )
        findings.append(Finding("loses", "draft vocabulary", share))
    return result


def _stops(subject: str, error: Exception) -> list[Finding]:
    """Return an error's reasons as findings."""
    if isinstance(error, UnsupportedError):
        found = [Finding("stops", subject, f"{error.asked}: {reason}") for reason in error.reasons]
        return [*found, Finding("note", subject, error.change)] if error.change else found
    if isinstance(error, ArtifactError):
        return [
            Finding("stops", error.field, f"found {error.found}, expected {error.expected} ({error.path})")
        ]
    if isinstance(error, SpeccError):
        return [Finding("stops", subject, str(error))]
    logger.exception("a check met an error it does not know")
    return [
        Finding(
            "stops", subject, f"{type(error).__name__}: {error}. This is a fault in specc: please report it."
        )
    ]


def _folder_path(method: Method, target: LoadedModel, drafter: Any) -> Path | None:
    if isinstance(drafter, str | Path):
        return Path(drafter).expanduser()
    return target.path if drafter is None and method.name == "mtp" else None


def _name(value: Any) -> str:
    if isinstance(value, str | Path):
        return str(value)
    if isinstance(value, LoadedModel | DrafterBundle):
        return value.info.name
    if isinstance(value, nn.Module):
        return type(value).__name__
    return "no drafter" if value is None else type(value).__name__


def _target_facts(target: LoadedModel) -> dict[str, Any]:
    facts = asdict(target.info)
    del facts["config"]
    return {**facts, "dtype": str(target.info.dtype).removeprefix("torch.")}


def _drafter_facts(bundle: DrafterBundle) -> dict[str, Any]:
    info = bundle.info
    names = (
        "name",
        "method",
        "layout",
        "hidden",
        "target_hidden",
        "vocab",
        "target_vocab",
        "taps",
        "max_position",
        "block",
    )
    return {name: getattr(info, name) for name in names}
