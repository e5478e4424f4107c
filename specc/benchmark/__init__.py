"""Measure methods side by side: interleaved rounds in one process, medians and spread, ratios, floors."""

from __future__ import annotations

import logging
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from specc.benchmark.contestants import Contestant, PeerContestant, SpeccContestant
from specc.benchmark.floor import cache_bytes_per_token, weight_bytes
from specc.benchmark.measure import (
    Measured,
    Task,
    acceptance_by_position,
    accepted_length,
    measure,
    rates,
    ratios,
    spread,
)
from specc.benchmark.plots import draw, require_plots
from specc.benchmark.report import BenchReport
from specc.contracts import AcceptRule, Method, drafts_with
from specc.device import describe, measure_bandwidth
from specc.errors import InputError, UnsupportedError
from specc.models.load import LoadedModel
from specc.models.peers import LOOKUP_TOKENS, PEERS, Peer
from specc.pairing import find_drafter
from specc.prompts import Prompt, built_in_prompts, first_of_each, read_prompts, suits
from specc.runtime.compiled import Compiled
from specc.runtime.inspection import memory_by_part
from specc.step import StepKey

logger = logging.getLogger(__name__)

__all__ = ["BenchOptions", "BenchReport", "run_bench"]


@dataclass(frozen=True)
class BenchOptions:
    """What `specc.bench` was asked for.

    Attributes:
        methods: contestants in the order of the rows: methods of specc and names in `PEERS`.
        blocks: several block lengths to compare; every drafting method is compiled for each.
        each: Prompts of every category that are used, the first ones; None = all.
        temperature: None or 0 = greedy.
        command: how to run the same again; None = a command line made from the options.
    """

    methods: tuple[str | Method, ...] = ("plain", "ngram", "transformers")
    block: int | None = None
    blocks: tuple[int, ...] = ()
    prompts: str | Path | Sequence[Any] | None = None
    each: int | None = None
    repeats: int = 5
    max_new_tokens: int = 64
    temperature: float | None = None
    seed: int = 0
    accept: AcceptRule = "ratio"
    backend: str = "auto"
    max_length: int | None = None
    plot: Path | None = None
    command: str | None = None

    def __post_init__(self) -> None:
        if not self.methods:
            raise InputError("methods", list(self.methods), "at least one method or peer")
        counts = {"repeats": self.repeats, "max_new_tokens": self.max_new_tokens, "each": self.each}
        for name, value in counts.items():
            if name == "each" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InputError(name, value, "a whole number, 1 or more")
        if any(isinstance(b, bool) or not isinstance(b, int) or b < 1 for b in self.blocks):
            raise InputError("blocks", self.blocks, "whole numbers, 1 or more; plain is a method")

    @property
    def sampling(self) -> dict[str, Any]:
        """Return the settings of every call: penalties of the model's own defaults are off for all."""
        neutral = {"repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "top_k": 0, "top_p": 1.0}
        if not self.temperature:
            return {"do_sample": False, **neutral, "temperature": 1.0}
        return {"do_sample": True, **neutral, "temperature": self.temperature}


@dataclass
class _Field:
    """The contestants of one benchmark, and what to say about those that are missing."""

    contestants: list[Contestant] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def run_bench(
    compile_step: Callable[..., Compiled],
    prepare: Callable[..., Any],
    resolve: Callable[[str | Method], Method],
    model: Any,
    drafter: Any,
    options: BenchOptions,
    *,
    device: Any = None,
    dtype: Any = None,
) -> BenchReport:
    """Measure; see `specc.bench`, whose arguments these are.

    ``compile_step``, ``prepare`` and ``resolve`` are `specc.api`'s, which this package may not import.
    """
    if options.plot is not None:
        require_plots()
    chosen = [m if isinstance(m, str) and m in PEERS else resolve(m) for m in options.methods]
    prepared = prepare(model, device=device, dtype=dtype)
    target: LoadedModel = prepared.loaded
    tasks = _tasks(target, options)
    capacity = _capacity(target, tasks, options)
    entrants = _Field()
    for item in chosen:
        if isinstance(item, str):
            _add_peer(entrants, item, target, resolve, _drafter_for("draft_model", drafter, chosen), options)
        else:
            given = _drafter_for(item.name, drafter, chosen) if item.needs_drafter else None
            _add_method(entrants, compile_step, prepared, item, given, capacity, options)
    measured = measure(entrants.contestants, tasks, options.repeats, logger.info)
    report = _report(model, target, options, tasks, measured, entrants.notes)
    if options.plot is not None:
        draw(report, options.plot)
    return report


def _tasks(target: LoadedModel, options: BenchOptions) -> list[Task]:
    if options.prompts is not None:
        prompts: tuple[Prompt, ...] = read_prompts(options.prompts)
    elif suits(target.tokenizer) or target.tokenizer is not None:
        prompts = built_in_prompts()
    else:
        raise InputError("prompts", None, "token ids: this model came without a tokenizer")
    if options.each is not None:
        prompts = first_of_each(prompts, options.each)
    return [
        Task(
            p.encode(target.tokenizer),
            min(p.max_new_tokens or options.max_new_tokens, options.max_new_tokens),
            p.name,
            p.category,
        )
        for p in prompts
    ]


def _capacity(target: LoadedModel, tasks: Sequence[Task], options: BenchOptions) -> int:
    """Return the slots' capacity: what the longest task needs."""
    longest = max(task.ids.shape[0] + task.max_new_tokens for task in tasks)
    if options.max_length is not None:
        return options.max_length
    if longest > target.info.max_position:
        raise InputError(
            "prompts", f"{longest} tokens with the answer", f"at most {target.info.max_position} positions"
        )
    return min(max(longest, 2), target.info.max_position)


def _drafter_for(name: str, drafter: Any, chosen: Sequence[str | Method]) -> Any:
    """Return the drafter of a method out of one drafter or a mapping; methods of one kind of drafter can share it."""
    if isinstance(drafter, Mapping):
        return drafter.get(name)
    needing = {m.name: drafts_with(m) for m in chosen if not isinstance(m, str) and m.needs_drafter}
    needing |= {"draft_model": "draft_model"} if "assisted" in chosen else {}
    if drafter is not None and len(set(needing.values())) > 1:
        raise InputError(
            "drafter", str(drafter), f"a drafter per method, since {', '.join(sorted(needing))} need one each"
        )
    return drafter if name in needing else None


def _add_peer(
    entrants: _Field,
    name: str,
    target: LoadedModel,
    resolve: Callable[[str | Method], Method],
    drafter: Any,
    options: BenchOptions,
) -> None:
    assistant = None
    if name == "assisted":
        if drafter is None:
            raise InputError("drafter", None, "'assisted' needs the draft_model drafter")
        bundle = find_drafter(resolve("draft_model"), target, drafter)
        assert bundle is not None
        assistant = bundle.module
    block = LOOKUP_TOKENS if name == "prompt_lookup" else None
    seed = options.seed if options.temperature else None
    entrants.contestants.append(
        PeerContestant(Peer(name, target.module, assistant), block, options.sampling, seed)
    )


def _add_method(
    entrants: _Field,
    compile_step: Callable[..., Compiled],
    prepared: Any,
    method: Method,
    drafter: Any,
    capacity: int,
    options: BenchOptions,
) -> None:
    sweeps = bool(options.blocks) and method.name != "plain"
    for block in options.blocks if sweeps else (None if method.name == "plain" else options.block,):
        try:
            compiled = compile_step(
                prepared,
                drafter,
                method=method,
                block=block,
                max_length=capacity,
                accept=options.accept,
                backend=options.backend,
            )
        except UnsupportedError as error:
            if not sweeps:
                raise
            entrants.notes.append(
                f"{method.name} with block {block} was left out: {'; '.join(error.reasons)}"
            )
            continue
        settings = options.sampling | {"seed": options.seed}
        entrants.contestants.append(SpeccContestant(method.name, compiled, settings))


def _report(
    model: Any,
    target: LoadedModel,
    options: BenchOptions,
    tasks: Sequence[Task],
    measured: Sequence[Measured],
    notes: Sequence[str],
) -> BenchReport:
    place = next(target.module.parameters()).device
    bandwidth = measure_bandwidth(place)
    every = range(len(tasks))
    by_name = {m.contestant.name: m for m in reversed(measured)}
    plain, theirs = by_name.get("plain"), by_name.get("transformers")
    rows = [_row(m, plain, theirs, tasks, every, bandwidth, options) for m in measured]
    # The built-in prompts are one or two of a kind: too few to say anything about kinds.
    kinds = dict.fromkeys(task.category for task in tasks if options.prompts is not None)
    by_category = [
        _category_row(m, plain, theirs, kind, [i for i in every if tasks[i].category == kind])
        for kind in kinds for m in measured if len(kinds) > 1
    ]  # fmt: skip
    facts = describe(place)
    cores = f", {facts.cores} thread{'s' if facts.cores != 1 else ''}" if facts.kind == "cpu" else ""
    named = [m for m in measured if isinstance(m.contestant, SpeccContestant)]
    return BenchReport(
        model=target.info.name if not isinstance(model, str | Path) else str(model),
        dtype=str(target.info.dtype).removeprefix("torch."),
        device=f"{facts.name} ({facts.capability}{cores})",
        versions=(
            f"torch {torch.__version__}, transformers {version('transformers')}, "
            f"Python {platform.python_version()}"
        ),
        command=options.command or _command(model, options),
        bandwidth_gb_per_s=bandwidth / 1e9,
        settings={
            "rounds": options.repeats,
            "prompts": len(tasks),
            "new tokens": options.max_new_tokens,
            "sampling": f"temperature {options.temperature}" if options.temperature else "greedy",
            "batch": 1,
            "backend": named[0].contestant.compiled.engine.backend.name if named else "none",  # type: ignore[attr-defined]
        },
        rows=tuple(rows),
        by_category=tuple(by_category),
        by_position=tuple(row for m in named if (row := _position_row(m, every))),
        memory=tuple(_memory_row(m) for m in named),
        notes=tuple(notes),
    )


def _row(
    m: Measured,
    plain: Measured | None,
    theirs: Measured | None,
    tasks: Sequence[Task],
    every: range,
    bandwidth: float,
    options: BenchOptions,
) -> dict[str, Any]:
    runs = [run for runs in m.rounds for run in runs]
    steps = sum(run.decode_steps for run in runs)
    row: dict[str, Any] = {"method": m.contestant.name, "block": m.contestant.block}
    _put(row, "tokens_per_s", rates(m, every))
    _put(row, "vs_plain", ratios(m, plain, every))
    _put(row, "vs_transformers", ratios(m, theirs, every))
    row["ms_per_step"] = 1e3 * sum(run.decode_s for run in runs) / steps if steps else None
    _put(row, "first_token_ms", [1e3 * sum(r.first_token_s for r in runs) / len(runs) for runs in m.rounds])
    row["accepted_length"] = accepted_length(m, every)
    row["floor_ms"] = None
    if isinstance(m.contestant, SpeccContestant):
        row["floor_ms"] = 1e3 * _step_bytes(m.contestant.compiled, tasks) / bandwidth
    if plain is not None and not options.temperature:
        same = sum(a.tokens == b.tokens for a, b in zip(m.rounds[0], plain.rounds[0], strict=True))
        row["same_text"] = f"{same}/{len(tasks)}"
    return row


def _put(row: dict[str, Any], name: str, values: Sequence[float] | None) -> None:
    found = spread(values) if values else None
    row[name] = found.median if found else None
    row[f"{name}_least"], row[f"{name}_most"] = (found.least, found.most) if found else (None, None)


def _step_bytes(compiled: Compiled, tasks: Sequence[Task]) -> float:
    """Return the bytes a greedy step must read, with the K/V of the tasks' mean length."""
    builder = compiled.engine.builder
    weights = weight_bytes(builder.step(StepKey(compiled.block, 0, compiled.accept)).graph)
    mean = sum(task.ids.shape[0] + task.max_new_tokens / 2 for task in tasks) / len(tasks)
    return weights + mean * cache_bytes_per_token(builder.state(), compiled.engine.capacity)


def _category_row(
    m: Measured, plain: Measured | None, theirs: Measured | None, kind: str, chosen: Sequence[int]
) -> dict[str, Any]:
    row: dict[str, Any] = {
        "category": kind or "none",
        "method": m.contestant.name,
        "block": m.contestant.block,
    }
    _put(row, "tokens_per_s", rates(m, chosen))
    _put(row, "vs_plain", ratios(m, plain, chosen))
    _put(row, "vs_transformers", ratios(m, theirs, chosen))
    row["accepted_length"] = accepted_length(m, chosen)
    shares = acceptance_by_position(m, chosen)
    row["acceptance"] = " ".join(f"{share:.2f}" for share in shares) if shares else None
    return row


def _position_row(m: Measured, every: range) -> dict[str, Any]:
    shares = acceptance_by_position(m, every)
    if not shares:
        return {}
    named = {f"position_{index}": share for index, share in enumerate(shares, 1)}
    return {"method": m.contestant.name, "block": m.contestant.block, **named}


def _memory_row(m: Measured) -> dict[str, Any]:
    assert isinstance(m.contestant, SpeccContestant)
    parts = memory_by_part(m.contestant.compiled.engine)
    return {
        "method": m.contestant.name,
        "block": m.contestant.block,
        **{p.replace(" ", "_"): b for p, b in parts.items()},
    }


def _command(model: Any, options: BenchOptions) -> str:
    shown = str(model) if isinstance(model, str | Path) else "MODEL"
    names = ",".join(m if isinstance(m, str) else m.name for m in options.methods)
    parts = [f"specc bench {shown} --methods {names}"]
    if options.block is not None:
        parts.append(f"--block {options.block}")
    if options.blocks:
        parts.append(f"--blocks {','.join(map(str, options.blocks))}")
    if isinstance(options.prompts, str | Path):
        parts.append(f"--prompts {options.prompts}")
    if options.each is not None:
        parts.append(f"--each {options.each}")
    parts.append(f"--repeats {options.repeats} --max-new-tokens {options.max_new_tokens}")
    if options.temperature:
        parts.append(f"--temperature {options.temperature}")
    return " ".join(parts)
