"""The training loop: plain PyTorch, one process or several of them under torchrun.

The gradient is that of the whole batch whatever the number of processes: each takes a share of the sequences,
divides by sums over all, and gradients are added up.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn

from specc.checkpoints.write_speculators import write_drafter
from specc.contracts import DrafterInfo
from specc.errors import InputError
from specc.models.load import LoadedModel
from specc.training.checkpoint import read_state, restore, save_state
from specc.training.feeding import Cursor, Feed
from specc.training.losses import objective
from specc.training.packing import Batch, collate
from specc.training.shards import Example
from specc.training.start import Sizes, TargetParts, make_drafter, target_parts
from specc.training.terms import LossOptions, Reference, Result

logger = logging.getLogger(__name__)

_HELD_BATCH = 4  # every place of an answer is drafted at, so fewer sequences than a training step takes


@dataclass(frozen=True)
class Plan:
    """How long and how fast to train.

    Attributes:
        steps, minutes: The end, whichever comes first; the schedule runs over the nearer one. Only a run
            bounded
            by steps alone is the same run again: minutes depend on the machine.
        batch: Sequences per step, over all processes.
        rate: Peak learning rate; warmed up over ``warmup`` of the run, then down a cosine to zero.
        clip: Largest gradient norm.
        save_minutes: Between checkpoints.
        report_steps: Between lines of progress.
        held_out: Sequences that acceptance is measured on.
        seed: Of the order, the anchors and the few random weights.
    """

    steps: int | None = None
    minutes: float | None = None
    batch: int = 4
    rate: float = 6e-4
    warmup: float = 0.04
    clip: float = 1.0
    weight_decay: float = 0.0
    save_minutes: float = 3.0
    report_steps: int = 20
    held_out: int = 32
    seed: int = 0

    def __post_init__(self) -> None:
        if self.steps is None and self.minutes is None:
            raise InputError("minutes", None, "minutes or steps: a run needs an end")

    def progress(self, step: int, seconds: float) -> float:
        """Return how much of the run is over, 0 to 1."""
        parts = [step / self.steps] if self.steps is not None else []
        parts += [seconds / (60 * self.minutes)] if self.minutes is not None else []
        return min(max(parts), 1.0)

    def rate_at(self, progress: float) -> float:
        if progress < self.warmup:
            return self.rate * max(progress, 1e-3) / self.warmup
        return self.rate * 0.5 * (1 + math.cos(math.pi * (progress - self.warmup) / (1 - self.warmup)))


@dataclass
class History:
    """What a run did so far; kept in its checkpoints."""

    step: int = 0
    seconds: float = 0.0
    tokens: int = 0
    losses: list[float] = field(default_factory=list)
    held_out: list[dict[str, Any]] = field(default_factory=list)


class Trainer:
    """One drafter's run.

    Args:
        target: The model.
        sizes: The drafter's.
        plan, options: The run's.
        data: The folder of shards.
        output: Where the state and the drafter are written.
        resume: Go on from the state in ``output``.
        say: Where lines of progress go.
    """

    def __init__(
        self,
        target: LoadedModel,
        sizes: Sizes,
        plan: Plan,
        options: LossOptions,
        data: Path,
        output: Path,
        *,
        resume: bool = False,
        say: Callable[[str], None] = logger.info,
    ) -> None:
        self.target, self.sizes, self.plan = target, sizes, plan
        self.options = replace(options, steps=options.steps or sizes.block)
        self.output, self.say = output, say
        self.device = next(target.module.parameters()).device
        self._half = target.info.dtype in (torch.bfloat16, torch.float16)
        self.rank, self.world = _place()
        if plan.batch % self.world:
            raise InputError("batch", plan.batch, f"a multiple of {self.world}, the number of processes")
        self.history = History()
        self.feed = Feed(data, plan.seed, batch=plan.batch)
        found = read_state(output)
        if found is not None and not resume:
            raise InputError("output", str(output), "a folder without a run, or resume=True to go on with it")
        self.info, self.module = self._make(found)
        self.module.to(self.device, torch.float32).train()
        self.optimizer = torch.optim.AdamW(
            [p for p in self.module.parameters() if p.requires_grad],
            lr=plan.rate,
            betas=(0.9, 0.95),
            weight_decay=plan.weight_decay,
            fused=True,  # one pass over ten million weights instead of a dozen
        )
        if found is not None:
            restore(found[0], self.module, self.optimizer)
            self.history = History(**found[1]["history"])
            self.feed.cursor = Cursor(**found[1]["cursor"])
        self.parts = target_parts(target)
        self.reference = make_reference(self.parts, self.module)
        self.objective = objective(sizes.method)
        self._held: list[Example] | None = None
        self._saved = time.monotonic()

    def _make(self, found: tuple[dict[str, Tensor], dict[str, Any]] | None) -> tuple[DrafterInfo, nn.Module]:
        """Return the drafter; a run that goes on takes its draft vocabulary and mask from what it began with."""
        if found is None:
            counts = self.feed.counts(self.target.info.vocab)
            self._counts = counts
            return make_drafter(self.sizes, self.target, counts, self.plan.seed)
        began = found[1]["sizes"]
        wanted = _plain(asdict(self.sizes))
        if began != wanted:
            raise InputError(
                "resume", wanted, f"the drafter that the run in {self.output} began with: {began}"
            )
        counts = torch.tensor(found[1]["counts"])
        self._counts = torch.zeros(self.target.info.vocab, dtype=torch.int64)
        self._counts[counts[:, 0]] = counts[:, 1]
        return make_drafter(self.sizes, self.target, self._counts, self.plan.seed)

    def run(self, stop: Callable[[], bool] = lambda: False) -> History:
        """Train to the plan's end, or until ``stop``; the state is saved every few minutes and at the end.

        Args:
            stop: Asked before each step; of several processes, all must answer alike.
        """
        while self.plan.progress(self.history.step, self.history.seconds) < 1.0 and not stop():
            begin = time.perf_counter()
            result, loss = self._step()
            self.history.seconds = self._agreed(self.history.seconds + time.perf_counter() - begin)
            self.history.losses.append(loss)
            if self.rank == 0 and self.history.step % self.plan.report_steps == 0:
                self.say(self._line(result))
            if time.monotonic() - self._saved > 60 * self.plan.save_minutes:
                self.measure()
                self.save()
        self.measure()
        self.save()
        return self.history

    def _step(self) -> tuple[Result, float]:
        batch = share(self.feed.take(self.plan.batch), self.rank, self.world).to(self.device)
        rate = self.plan.rate_at(self.plan.progress(self.history.step, self.history.seconds))
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad(set_to_none=True)
        with self._precision():
            result = self.objective(
                self.module, batch, self.reference, self.parts.embed, self.options, self.plan.seed
            )
        loss = result.loss(self._sum)
        loss.backward()
        trained = [p for p in self.module.parameters() if p.requires_grad]
        if self.world > 1:
            for parameter in trained:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                distributed.all_reduce(parameter.grad)
        nn.utils.clip_grad_norm_(trained, self.plan.clip)
        self.optimizer.step()
        self.history.step += 1
        self.history.tokens += int((batch.end - batch.first).sum()) * self.world
        return result, float(self._sum(loss.detach()))

    def _precision(self) -> torch.autocast:
        """Multiply in bfloat16 where the target runs in half precision; weights and losses stay float32."""
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self._half)

    def _agreed(self, seconds: float) -> float:
        """Return the first process's clock: the rate and the end depend on it, and must be the same in all."""
        if self.world > 1:
            clock = torch.tensor([seconds], dtype=torch.float64)
            distributed.broadcast(clock, 0)
            seconds = float(clock)
        return seconds

    def _sum(self, value: Tensor) -> Tensor:
        if self.world > 1:
            value = value.clone()
            distributed.all_reduce(value)
        return value

    @torch.no_grad()
    def measure(self) -> dict[str, Any]:
        """Measure acceptance per position on held-out sequences and remember it."""
        if self._held is None or len(self._held) < self.plan.held_out:
            self._held = self.feed.held_out(self.plan.held_out)
        found: dict[str, Any] = {"step": self.history.step, "minutes": round(self.history.seconds / 60, 2)}
        if self._held:
            results = self.judge(self._held)
            found |= summarize(results, [len(e.ids) for e in self._held])
        self.history.held_out.append(found)
        if self.rank == 0:
            self.say(f"held out: {found}")
        return found

    @torch.no_grad()
    def judge(self, examples: list[Example]) -> list[Result]:
        """Return what the objective says of every place in the answers, a few at a time."""
        self.module.eval()
        results = []
        for begin in range(0, len(examples), _HELD_BATCH):
            part = examples[begin : begin + _HELD_BATCH]
            batch = collate(part, range(begin, begin + len(part))).to(self.device)
            everywhere = replace(self.options, anchors=max(e.answer for e in part))
            with self._precision():
                results.append(
                    self.objective(self.module, batch, self.reference, self.parts.embed, everywhere, 1)
                )
        self.module.train()
        return results

    def save(self) -> None:
        """Write the state, and the drafter as it is now in the speculators layout."""
        self._saved = time.monotonic()
        if self.rank:
            return
        seen = self._counts.nonzero()[:, 0]
        facts = {
            "history": asdict(self.history), "cursor": self.feed.cursor.to_dict(), "sizes": _plain(asdict(self.sizes)),
            "counts": torch.stack([seen, self._counts[seen]], 1).tolist(),
        }  # fmt: skip
        save_state(self.output, self.module, self.optimizer, facts)
        export(self.output, self.info, self.module, self.target)

    def _line(self, result: Result) -> str:
        h = self.history
        terms = ", ".join(
            f"{n} {float(s.detach() / d.clamp(min=1e-9)):.3f}" for n, (_, s, d) in result.terms.items()
        )
        rate = ""
        if result.prefix is not None and result.total is not None:
            shares = (result.prefix / result.total.clamp(min=1)).tolist()
            rate = " prefix " + "/".join(f"{v:.2f}" for v in shares)
        return f"step {h.step} ({h.seconds / 60:.1f} min, epoch {self.feed.cursor.epoch}): {terms}{rate}"


def summarize(results: Sequence[Result], lengths: Sequence[int]) -> dict[str, Any]:
    """Return acceptance by position over all places of the answers, and the length that a decoder would see.

    Decoding does not start a step at every place: it steps over what it accepted, so it starts more often
    where text is hard to guess. ``accepted_length`` walks the answers as it does, and is below
    1 + sum(acceptance).

    Args:
        results: Of batches of held-out sequences, with every place an anchor.
        lengths: Tokens of each sequence, prompt included.
    """
    prefix = torch.stack([r.prefix for r in results if r.prefix is not None]).sum(0)
    total = torch.stack([r.total for r in results if r.total is not None]).sum(0).clamp(min=1)
    overlaps = [r.overlap for r in results if r.overlap is not None]
    overlap = torch.stack(overlaps).sum(0) / total if overlaps else None
    runs = [row for r in results if r.runs is not None for row in r.runs.tolist()]
    steps = tokens = 0
    for row, length in zip(runs, lengths, strict=True):
        begin = place = next((i for i, run in enumerate(row) if run >= 0), length)
        while place < length - 1:
            steps += 1
            place += 1 + row[place]
        tokens += max(place - begin, 0)
    return {
        "acceptance": [round(v, 4) for v in (prefix / total).tolist()],
        "overlap": None if overlap is None else [round(v, 4) for v in overlap.tolist()],
        "accepted_length": round(tokens / max(steps, 1), 4),
        "loss": round(sum(float(r.loss().detach()) for r in results) / len(results), 4),
    }


def export(folder: Path, info: DrafterInfo, module: nn.Module, target: LoadedModel) -> None:
    """Write the drafter in bfloat16 in the speculators layout."""
    import copy

    written = copy.deepcopy(module).to(torch.bfloat16)
    write_drafter(folder, info, written, target.info)


def make_reference(parts: TargetParts, module: Any) -> Reference:
    """Return what the target says, over the drafter's vocabulary."""
    vocab = parts.head.shape[0]
    ids = (
        module.target_ids if module.target_ids is not None else torch.arange(vocab, device=parts.head.device)
    )
    index = torch.full((vocab,), -1, dtype=torch.int64, device=parts.head.device)
    index[ids] = torch.arange(len(ids), device=parts.head.device)
    head = parts.head if len(ids) == vocab else parts.head[ids]
    return Reference(head.float(), index, parts.transform)


def share(batch: Batch, rank: int, world: int) -> Batch:
    """Return one process's part of a batch: every ``world``-th sequence."""
    if world == 1:
        return batch
    pick = slice(rank, None, world)
    return Batch(
        batch.ids[pick],
        batch.first[pick],
        batch.end[pick],
        batch.features[pick],
        batch.final[pick],
        batch.log_total[pick],
        batch.number[pick],
    )


def _place() -> tuple[int, int]:
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return 0, 1


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    return {key: list(v) if isinstance(v, tuple) else v for key, v in values.items()}
