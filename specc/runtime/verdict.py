"""Say whether speculation changed greedy text, and if so whether rounding explains it: the verdict "tie" or "bug".

Two steps that run other numbers of rows round differently, so where two tokens are nearly equal either may win. That
is a tie: the gap between the two tokens is within the error measured between row counts at that very position, the
logits of the speculative run are as near to a fresh reading as rounding allows, and so are the two runs' scores, which
is what penalties and bans made of the logits. Everything else is a bug.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from specc.errors import InputError
from specc.runtime.compiled import Compiled
from specc.runtime.generation import Generation

_OURS = frozenset({
    "num_return_sequences", "return_dict_in_generate", "output_logits", "output_scores", "pad_token_id", "streamer",
    "input_ids", "attention_mask", "inputs",
})  # fmt: skip
# A flip needs two logits to move, and each reading is one sample of an error that also piles up in K/V.
_SPREAD = 4.0
# More than so many roundings of the largest logit between two row counts is no rounding error.
_PLAUSIBLE = 64.0


@dataclass(frozen=True)
class Divergence:
    """The first place where a prompt's text differs.

    Attributes:
        prompt: index of the prompt.
        position: of the token in the sequence, prompt included.
        plain: token of the run without speculation; None where that run had ended.
        speculative: token of the run with speculation; None where that run had ended.
        gap: how far the plain run's scores put its own token ahead of the other: the top-2 gap, as a rule.
        error: largest difference of the position's logits between row counts, fresh readings on this device.
        strayed: largest difference of the speculative run's logits there to the fresh reading of one row.
        bent: largest difference of the two runs' scores there.
        verdict: "tie" where rounding explains it, else "bug".
        reason: the verdict in words.
    """

    prompt: int
    position: int
    plain: int | None
    speculative: int | None
    gap: float
    error: float
    strayed: float
    bent: float
    verdict: Literal["tie", "bug"]
    reason: str


@dataclass(frozen=True)
class WeightCheck:
    """How the weights compare with those of the original, by name: equal means bit for bit.

    ``missing`` are names that only the verified object has, a drafter's where the original was given without one.
    """

    equal: int
    different: tuple[str, ...]
    missing: tuple[str, ...]

    def render(self) -> str:
        """Return the outcome as a line of text."""
        known = self.equal + len(self.different)
        line = f"weights: {self.equal} of {known} equal the original's"
        line += f"; DIFFERENT: {', '.join(self.different)}" if self.different else ""
        return line + (
            f"; {len(self.missing)} that it does not have are not compared" if self.missing else ""
        )


@dataclass(frozen=True)
class VerifyReport:
    """What `verify` found; equal prompts have no entry. ``weights`` is there if an original was given.

    ``logit_error`` is the largest difference of logits between the two runs where their texts are equal, and
    ``rounding`` one rounding of the largest logit: far more than that is a fault that has not reached the text yet.
    """

    method: str
    block: int
    backend: str
    dtype: str
    exact: str | None
    prompts: int
    tokens: int  # that were compared
    mean_accepted_length: float
    logit_error: float
    rounding: float
    divergences: tuple[Divergence, ...]
    weights: WeightCheck | None = None

    @property
    def is_lossless(self) -> bool:
        """Whether every divergence is a tie and no weight differs; with exact="bitwise" there must be none at all."""
        same_weights = self.weights is None or not self.weights.different
        return same_weights and not any(d.verdict == "bug" for d in self.divergences)

    def to_dict(self) -> dict[str, Any]:
        """Return everything, for JSON."""
        return {**asdict(self), "is_lossless": self.is_lossless}

    def render(self) -> str:
        """Return the report as text."""
        same = self.prompts - len(self.divergences)
        without = "without" if self.weights is None else "from the original, without"
        lines = [
            f"{self.method}, block {self.block}, {self.backend}, {self.dtype}: {same} of {self.prompts} prompts equal, "
            f"{self.tokens} tokens compared, {self.mean_accepted_length:.2f} tokens per step; logits differ by at most "
            f"{self.logit_error:.3g} along equal text, where one rounding is {self.rounding:.3g}"
        ]
        lines.extend(
            (
                f"  {d.verdict}: prompt {d.prompt}, position {d.position}: token {_name(d.plain)} {without}, "
                f"{_name(d.speculative)} with speculation; gap {d.gap:.3g}, error between row counts {d.error:.3g}, "
                f"speculative logits off by {d.strayed:.3g}, scores by {d.bent:.3g}: {d.reason}"
            )
            for d in self.divergences
        )
        if self.weights is not None:
            lines.append(self.weights.render())
        differs = self.weights is not None and self.weights.different
        bad = "NOT the original" if differs else "NOT lossless: please report this"
        lines.append("lossless" if self.is_lossless else bad)
        return "\n".join(lines)


def verify_text(
    compiled: Compiled,
    prompts: Sequence[Tensor],
    *,
    max_new_tokens: int = 64,
    original: Compiled | None = None,
    **settings: Any,
) -> VerifyReport:
    """Generate with and without speculation and judge every first difference.

    Args:
        compiled: what is judged.
        prompts: int64 [tokens] each.
        max_new_tokens: of each prompt.
        original: what runs without speculation, and whose weights are compared; None = ``compiled`` itself.
        **settings: of generation, processors and penalties included; it stays greedy.
    """
    if not prompts:
        raise InputError("prompts", "none", "at least one prompt")
    if settings.get("do_sample"):
        raise InputError(
            "do_sample", True, "greedy text only: sampled text is compared with accept='coupled' and a seed"
        )
    for name in _OURS & set(settings):
        raise InputError("settings", name, "settings that do not decide what is compared")
    given = {**settings, "do_sample": False, "pad_token_id": -1, "max_new_tokens": max_new_tokens}
    ids, mask = _padded(prompts)
    plain = _Run((original or compiled).without_drafts(), ids, mask, given)
    drafted = _Run(compiled, ids, mask, given)
    found = []
    compared, error, largest = 0, 0.0, 0.0
    for index, prompt in enumerate(prompts):
        one, other = plain.text(index), drafted.text(index)
        at = next(
            (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
        )
        compared += at
        for position in range(at):
            rows = [run.logits(index, position) for run in (plain, drafted)]
            error, largest = max(error, _difference(*rows)), max(largest, _largest(rows[0]))
        if len(one) != len(other) or at < len(one):
            found.append(_judge(compiled, prompt, index, at, plain, drafted, settings))
    return VerifyReport(
        compiled.method.name,
        compiled.block,
        compiled.engine.backend.name,
        str(_dtype(compiled)).removeprefix("torch."),
        compiled.exact,
        len(prompts),
        compared,
        drafted.result.stats.mean_accepted_length,
        error,
        torch.finfo(_dtype(compiled)).eps * largest,
        tuple(found),
        None if original is None else compare_weights(compiled, original),
    )


def compare_weights(compiled: Compiled, original: Compiled) -> WeightCheck:
    """Compare the weights of two compiled objects, name by name and bit by bit."""
    known = original.engine.builder.weights
    equal, different, missing = 0, [], []
    for name, tensor in sorted(compiled.engine.builder.weights.items()):
        if name not in known:
            missing.append(name)
        elif _bits(tensor) == _bits(known[name]):
            equal += 1
        else:
            different.append(name)
    return WeightCheck(equal, tuple(different), tuple(missing))


def _bits(tensor: Tensor) -> tuple[object, ...]:
    """Return a weight's dtype, shape and the sum of its bytes."""
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return tensor.dtype, tuple(tensor.shape), hashlib.sha256(flat.numpy().data).hexdigest()


class _Run:
    """One generation over all prompts, with logits."""

    def __init__(self, compiled: Compiled, ids: Tensor, mask: Tensor, settings: dict[str, Any]) -> None:
        self.result = generate(compiled, ids, mask, **settings)
        self._width = ids.shape[1]

    def text(self, index: int) -> list[int]:
        row: list[int] = self.result.sequences[index, self._width :].tolist()
        return row[: row.index(-1)] if -1 in row else row

    def logits(self, index: int, at: int) -> Tensor:
        assert self.result.logits is not None
        return self.result.logits[at][index].float()

    def scores(self, index: int, at: int) -> Tensor:
        assert self.result.scores is not None
        return self.result.scores[at][index].float()


def generate(compiled: Compiled, ids: Tensor, mask: Tensor | None = None, **settings: Any) -> Generation:
    """Generate and return logits and scores, too; nothing cached by an earlier call is used."""
    compiled.forget()
    out = compiled.generate(
        ids, mask, output_logits=True, output_scores=True, return_dict_in_generate=True, **settings
    )
    assert isinstance(out, Generation)
    return out


def _judge(
    compiled: Compiled,
    prompt: Tensor,
    index: int,
    at: int,
    plain: _Run,
    drafted: _Run,
    settings: dict[str, Any],
) -> Divergence:
    """Judge one divergence by fresh readings of its position with one row and with a block of rows."""
    nan = float("nan")
    text = torch.cat([prompt, torch.tensor(plain.text(index)[:at], dtype=torch.int64)])
    tokens = [run.text(index)[at] if at < len(run.text(index)) else None for run in (plain, drafted)]
    ours, theirs = tokens
    nothing = (nan, nan, nan, nan)

    def found(
        reason: str, measured: tuple[float, float, float, float] = nothing, *, is_tie: bool = False
    ) -> Divergence:
        verdict: Literal["tie", "bug"] = "tie" if is_tie else "bug"
        return Divergence(index, text.shape[0], ours, theirs, *measured, verdict, reason)

    if ours is None or theirs is None:
        return found("one run ended before the other")
    one, many = _fresh(compiled, text)
    logits = [run.logits(index, at) for run in (plain, drafted)]
    scores = [run.scores(index, at) for run in (plain, drafted)]
    floor = torch.finfo(_dtype(compiled)).eps * float(one.abs().max())
    error = max(float((one - many).abs().max()), float((logits[0] - one).abs().max()))
    strayed = float((logits[1] - one).abs().max())
    gap = float(scores[0][ours] - scores[0][theirs])
    bent = _difference(scores[0], scores[1])
    measured = (gap, error, strayed, bent)
    allowed = max(error, floor)
    if compiled.exact is not None:
        return found("exact='bitwise' promises equal bits", measured)
    if error > _PLAUSIBLE * floor:
        return found(f"rounding moves logits by some {floor:.1g}, the row counts differ by more", measured)
    if strayed > _SPREAD * allowed:
        return found("the speculative run's logits are not those of this text", measured)
    stretch = max(1.0, _largest(scores[0]) / max(_largest(logits[0]), 1e-30))  # penalties stretch errors, too
    if bent > _SPREAD * allowed * stretch:
        return found("the settings did not do the same to both runs", measured)
    if not gap <= _SPREAD * allowed * stretch:
        return found("the gap is larger than the error", measured)
    return found("rounding explains it", measured, is_tie=True)


def _difference(one: Tensor, other: Tensor) -> float:
    """Return the largest difference; what both ban does not count, what one alone bans is infinitely far off."""
    both = one.isneginf() & other.isneginf()
    return float((one - other).abs().masked_fill(both, 0.0).max())


def _largest(scores: Tensor) -> float:
    return float(scores.masked_fill(scores.isinf(), 0.0).abs().max())


def _fresh(compiled: Compiled, text: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logits behind ``text`` read anew: by a step of one row, and by a step of a block of rows.

    The second reads a token less as its prompt and is made to say that token, so that its next step is the one wanted.
    """
    settings: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "repetition_penalty": 1.0}
    count = text.shape[0]
    one = generate(compiled.without_drafts(), text[None], max_new_tokens=1, **settings)
    assert one.logits is not None
    if count < 2:
        return one.logits[0][0], one.logits[0][0]
    many = generate(
        compiled,
        text[None, :-1],
        max_new_tokens=2,
        logits_processor=[_forced(count - 1, int(text[-1]))],
        **settings,
    )
    assert many.logits is not None
    return one.logits[0][0], many.logits[1][0]


def _forced(length: int, token: int) -> Callable[[Tensor, Tensor], Tensor]:
    def force(ids: Tensor, scores: Tensor) -> Tensor:
        if ids.shape[1] != length:
            return scores
        out = torch.full_like(scores, float("-inf"))
        out[:, token] = 0.0
        return out

    return force


def _name(token: int | None) -> str:
    return "none" if token is None else str(token)


def _dtype(compiled: Compiled) -> torch.dtype:
    weights = compiled.engine.builder.weights.items()
    return next(t.dtype for n, t in weights if n.startswith("target.") and t.is_floating_point())


def _padded(prompts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    width = max(prompt.shape[0] for prompt in prompts)
    ids = torch.zeros(len(prompts), width, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - prompt.shape[0] :] = prompt
        mask[row, width - prompt.shape[0] :] = 1
    return ids, mask
