"""One call that makes a drafter: data, training, calibration, model card."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from specc.contracts import Backend
from specc.drafters.block import BlockConfig
from specc.errors import InputError, UnknownNameError
from specc.models.default import cache_folder
from specc.models.load import LoadedModel
from specc.training import prompts as prompting
from specc.training.calibration import Calibration, fit_confidence
from specc.training.card import write_card
from specc.training.data import Collector, DataPlan
from specc.training.loop import Plan, Trainer
from specc.training.record import TargetRunner
from specc.training.shards import list_shards, read_facts
from specc.training.start import METHODS, Sizes, go_on_from
from specc.training.terms import LossOptions

logger = logging.getLogger(__name__)

DEFAULT_TOKENS = 200_000
_PATIENCE = timedelta(hours=24)  # other processes wait while the first one makes data


@dataclass(frozen=True)
class TrainOptions:
    """What `specc.train` takes beside the model.

    Attributes:
        method: dspark, eagle3, dflash or dflash2.
        output: The drafter's folder; a run's state is kept in ``state`` inside it.
        prompts: A JSONL file of prompts to answer; None = the target writes its own.
        tokens: Answer tokens of data; what is in the cache already counts.
        minutes, steps: When training ends, whichever comes first; data takes its own time before.
        draft_vocab, layers, block, markov_rank, selector_rank, taps: See `training.start.Sizes`.
        start: A finished drafter's folder to train further, in a run of its own: sizes and taps are its own,
            but for more ``layers`` and another ``draft_vocab``.
        resume: Go on with the run in ``output``.
        avoid: Evaluation prompts, a JSONL file or a folder of them, that nothing trained on may resemble.
        data: The folder of shards; None = in the cache, by the target's fingerprint and the taps.
        composed: Share of prompts that are put together from English parts rather than written by the target.
        slots, answer_tokens: Sequences answered at once, and the cap on an answer.
        batch, rate, seed, save_minutes, report_steps, held_out: See `training.loop.Plan`.
        loss: Weights of the objective's terms.
        command: What the card calls the command.
    """

    method: str
    output: Path | str
    prompts: Path | str | None = None
    tokens: int | None = None
    minutes: float | None = None
    steps: int | None = None
    draft_vocab: int | None = None
    layers: int = 1
    block: int = 7
    markov_rank: int = 32
    selector_rank: int = 32
    taps: tuple[int, ...] | None = None
    start: Path | str | None = None
    resume: bool = False
    avoid: Path | str | None = None
    data: Path | str | None = None
    slots: int = 32
    answer_tokens: int = 192
    composed: float = 0.4
    capacity: int = 640
    batch: int = 4
    rate: float = 6e-4
    seed: int = 0
    save_minutes: float = 3.0
    report_steps: int = 20
    held_out: int = 32
    loss: LossOptions = field(default_factory=LossOptions)
    command: str = ""

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise UnknownNameError("method to train", self.method, METHODS)
        for name, least in (("tokens", 1), ("layers", 1), ("block", 1), ("slots", 1), ("answer_tokens", 8),
                            ("batch", 1), ("markov_rank", 0), ("selector_rank", 1), ("steps", 1)):  # fmt: skip
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
                raise InputError(name, value, f"a whole number of at least {least}")
        for name in ("minutes", "rate"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, int | float) and 0 < value < float("inf")):
                raise InputError(name, value, "a number above 0")
        if not (isinstance(self.composed, int | float) and 0 <= self.composed <= 1):
            raise InputError("composed", self.composed, "a share from 0 to 1")
        if self.minutes is None and self.steps is None:
            raise InputError("minutes", None, "minutes or steps: a run needs an end")


@dataclass(frozen=True)
class TrainReport:
    """What came of a run; ``values`` is what the card and report.json say."""

    folder: Path
    values: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        return self.values


def train_drafter(
    target: LoadedModel, backend: Backend, options: TrainOptions, say: Callable[[str], None] = logger.info
) -> TrainReport:
    """Make data if there is too little, train, calibrate and write the card."""
    _join_processes()
    sizes = Sizes(
        options.method,
        options.layers,
        options.block,
        options.draft_vocab,
        options.markov_rank,
        options.selector_rank,
        options.taps,
        None if options.start is None else str(options.start),
    )
    if sizes.start is not None:
        sizes = replace(sizes, taps=go_on_from(sizes, target)[0].taps)
    taps = sizes.resolved_taps(target.info.layers)
    if not taps or len(set(taps)) < len(taps) or not all(0 <= tap <= target.info.layers for tap in taps):
        raise InputError("taps", taps, f"different numbers of layers, each 0 to {target.info.layers}")
    folder = data_folder(target, taps, options)
    if _rank() == 0:
        collect(target, backend, folder, taps, options, say)
    if distributed.is_initialized():
        distributed.barrier()
    plan = Plan(
        options.steps,
        options.minutes,
        options.batch,
        options.rate,
        save_minutes=options.save_minutes,
        report_steps=options.report_steps,
        held_out=options.held_out,
        seed=options.seed,
    )
    sizes = replace(sizes, taps=taps)
    output = Path(options.output)
    trainer = Trainer(target, sizes, plan, options.loss, folder, output, resume=options.resume, say=say)
    trainer.run()
    calibration = calibrate(trainer) if options.method == "dspark" else None
    if calibration is not None:
        say(
            f"confidence: bias {calibration.bias:+}, temperatures {calibration.temperatures}, "
            f"ECE {calibration.before} -> {calibration.after}"
        )
    values = _report(trainer, folder, options, calibration)
    if _rank() == 0:
        (output / "report.json").write_text(json.dumps(values, indent=1) + "\n")
        (output / "README.md").write_text(write_card(values))
        say(f"wrote {output}: mean accepted length {values['accepted_length']:.2f} on held-out answers")
    return TrainReport(output, values)


def data_folder(target: LoadedModel, taps: tuple[int, ...], options: TrainOptions) -> Path:
    """Return where the shards of a target, its taps and, if given, a file of prompts are."""
    if options.data is not None:
        return Path(options.data)
    name = "data-" + "-".join(map(str, taps))
    if options.prompts is not None:
        name += "-" + hashlib.sha256(Path(options.prompts).read_bytes()).hexdigest()[:12]
    return cache_folder() / "train" / f"{target.info.name}-{target.fingerprint[:12]}" / name


def collect(
    target: LoadedModel,
    backend: Backend,
    folder: Path,
    taps: tuple[int, ...],
    options: TrainOptions,
    say: Callable[[str], None],
) -> None:
    """Fill the folder up to the tokens asked for; nothing is compiled when they are there."""
    wanted = DEFAULT_TOKENS if options.tokens is None else options.tokens
    have = [read_facts(p) for p in list_shards(folder)]
    for facts in have:
        if tuple(facts["taps"]) != taps:
            raise InputError("data", str(folder), f"shards of the taps {taps}; these have {facts['taps']}")
    if have and (sum(f["answer_tokens"] for f in have) >= wanted or options.prompts is not None):
        return
    user = prompting.read_conversations(options.prompts) if options.prompts is not None else None
    plan = DataPlan(
        wanted,
        options.answer_tokens,
        capacity=min(options.capacity, target.info.max_position),
        slots=options.slots,
        shard_tokens=max(min(wanted // 8, 8192), 64),
        composed=options.composed,
        seed=options.seed,
    )
    runner = TargetRunner(target, taps, slots=plan.slots, capacity=plan.capacity, backend=backend)
    Collector(target, runner, folder, plan, user, prompting.read_evaluation(options.avoid)).run(say)


def calibrate(trainer: Trainer) -> Calibration | None:
    """Fit the confidence head's bias and temperatures on held-out answers and write the drafter again with them."""
    examples = trainer.feed.held_out(trainer.plan.held_out)
    config = trainer.info.config
    if not examples or not isinstance(config, BlockConfig) or config.confidence is None:
        return None
    judged = [r for r in trainer.judge(examples) if r.confidence is not None and r.accepted is not None]
    logits = torch.cat([r.confidence.cpu() for r in judged if r.confidence is not None])
    accepted = torch.cat([r.accepted.cpu() for r in judged if r.accepted is not None])
    if not len(logits):
        return None
    fitted = fit_confidence(logits, accepted, has_bias=config.confidence.bias)
    if config.confidence.bias:
        with torch.no_grad():
            trainer.module.get_parameter("confidence_head.proj.bias").add_(fitted.bias)
    trainer.info = replace(
        trainer.info,
        config=replace(config, confidence=replace(config.confidence, temperatures=fitted.temperatures)),
    )
    trainer.save()
    return fitted


def _report(
    trainer: Trainer, folder: Path, options: TrainOptions, calibration: Calibration | None
) -> dict[str, Any]:
    facts = [read_facts(p) for p in list_shards(folder)]
    entries = [entry for f in facts for entry in f["prompts"]]
    history, last = trainer.history, trainer.history.held_out[-1]
    acceptance = last.get("acceptance") or []
    parameters = list(trainer.module.parameters())
    return {
        "target": trainer.target.info.name, "fingerprint": trainer.target.fingerprint, "method": options.method,
        "block": trainer.info.block, "taps": list(trainer.info.taps),
        "data_tokens": sum(f["answer_tokens"] for f in facts),
        "data_answers": sum(len(f["prompts"]) for f in facts),
        "data_source": _source(entries),
        "flagged": sum(f["flagged"] for f in facts), "checked": sum(f["checked"] for f in facts),
        "steps": history.step, "trained_tokens": history.tokens, "minutes": history.seconds / 60,
        "loss": history.losses[-1] if history.losses else float("nan"), "held_out": options.held_out,
        "acceptance": acceptance, "overlap": last.get("overlap"), "accepted_length": last.get("accepted_length", 1.0),
        "parameters": sum(p.numel() for p in parameters),
        "trained_parameters": sum(p.numel() for p in parameters if p.requires_grad),
        "calibration": asdict(calibration) if calibration is not None else None, "command": options.command,
        "history": history.held_out,
    }  # fmt: skip


def _source(entries: Sequence[Mapping[str, Any]]) -> str:
    """Return who wrote the prompts, each kind with its share."""
    known = {"composed": "put together from parts", "user file": "of a file"}
    kinds = Counter(known.get(entry["setting"].split(",")[0], "the target's own") for entry in entries)
    return ", ".join(f"{count / len(entries):.0%} {kind}" for kind, count in kinds.most_common())


def _rank() -> int:
    return distributed.get_rank() if distributed.is_initialized() else 0


def _join_processes() -> None:
    """Join the processes that torchrun started, if it started this one."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not distributed.is_initialized():
        distributed.init_process_group("gloo", timeout=_PATIENCE)
