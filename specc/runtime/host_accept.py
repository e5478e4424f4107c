"""Judge drafts on the host, for requests with processors or a constraint of their own: Python between two graphs.

Row i of such a slot is looked at only after draft i was accepted, and nothing behind the first rejection, stop or cap
is, so a processor sees exactly the calls that plain decoding would make. Other slots of the same step are judged by
the stage function that is traced elsewhere, run as it stands.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specc.contracts import Draft, Proposal
from specc.errors import InputError
from specc.runtime.stopping import StopStrings
from specc.sampling import SamplingContext, process, split
from specc.sampling.accept import accept
from specc.sampling.constraint import Constraint, mask_rows
from specc.step import LENGTH, RECORD, RUNNING, STOP, Shape, StepKey, accept_stage
from specc.tree import Tree

Processor = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class OwnRules:
    """What a request brings that only the host can apply.

    ``processors`` take (ids int64 [1, tokens], scores float32 [1, vocab]) and return new scores, as transformers' do;
    ids hold the drafts accepted so far and no padding. ``stops`` are here because plain decoding would end with them.
    """

    processors: tuple[Processor, ...] = ()
    constraint: Constraint | None = None
    stops: StopStrings | None = None

    @property
    def needs_host(self) -> bool:
        return bool(self.processors) or self.constraint is not None


@dataclass
class _Judged:
    """What one slot emits; one scores row per emitted token."""

    tokens: list[int]
    accepted: int
    drafted: int
    finish: int
    fault: bool
    scores: list[Tensor]
    path: list[int]  # of a tree: the node that each token comes from


def judge(
    values: Mapping[str, Tensor],
    key: StepKey,
    shape: Shape,
    rules: Mapping[int, OwnRules],
    tree: Tree | None = None,
) -> dict[str, Tensor]:
    """Return what the accept stage returns, with the slots in ``rules`` judged row by row.

    Args:
        values: state, settings of the key's families, and what the verify part of the step made.
        key: the whole step's.
        shape: the compiled sizes.
        rules: by slot; running slots only.
        tree: the shape of the drafts, where they are a tree.
    """
    found = accept_stage(values, key, shape, tree)
    found = {name: tensor.clone() for name, tensor in found.items()}  # logits and scores may be one tensor
    count, emitted, finish, record = (
        found[name] for name in ("accept.count", "accept.emitted", "accept.finish", "record")
    )
    for slot, own in rules.items():
        judged = _Judge(values, key, slot, own, tree).run()
        made = len(judged.tokens)
        row = torch.full_like(emitted[slot], -1)
        row[:made] = torch.tensor(judged.tokens)
        count[slot], finish[slot], emitted[slot] = made, judged.finish, row
        facts = (made, judged.accepted, judged.drafted, judged.finish, int(judged.fault))
        record[slot, : len(RECORD)] = torch.tensor(facts)
        record[slot, len(RECORD) :] = row
        if tree is not None:
            path = found["accept.path"]
            path[slot, :made] = torch.tensor(judged.path)
            for name, rows in (("logits", "verify.logits"), ("hidden", "verify.hidden")):
                if name in found:
                    found[name][slot] = values[rows][slot, path[slot]].to(found[name].dtype)
        if "scores" in found:
            found["scores"][slot, :made] = torch.stack(judged.scores)
    return found


class _Judge:
    """Judges the drafts of one slot."""

    def __init__(
        self, values: Mapping[str, Tensor], key: StepKey, slot: int, own: OwnRules, tree: Tree | None
    ) -> None:
        self._values, self._own = values, own
        one = slice(slot, slot + 1)
        self._one = {n: t[one] for n, t in values.items() if n.startswith(("state.", "setting."))}
        self._logits = values["verify.logits"][slot].float()
        self._tree = tree
        drafts = values["draft.tokens"][slot].tolist() if "draft.tokens" in values else []
        self._drafts = drafts if tree is not None or -1 not in drafts else drafts[: drafts.index(-1)]
        self._proposal = _proposal(values, slot)
        self._before, self._after = split(key.families)
        self._sampled = key.sampled
        self._rule = self._one["state.coupled"] if key.rule == "mixed" else key.rule
        length = int(self._one["state.length"])
        self._prompt = int(self._one["state.prompt_length"])
        self._limit = int(self._one["state.limit"])
        self._eos = set(self._one["state.eos"][0].tolist()) - {-1}
        self._history = self._one["state.tokens"][0, :length].clone()

    def run(self) -> _Judged:
        return self._run_chain() if self._tree is None else self._run_tree(self._tree)

    def _run_chain(self) -> _Judged:
        vocab = self._logits.shape[1]
        constraint = self._own.constraint
        masks = mask_rows(constraint, self._drafts, vocab) if constraint is not None else None
        out = _Judged([], 0, len(self._drafts), RUNNING, False, [], [])
        while out.finish == RUNNING:
            index = len(out.tokens)
            scores = self._scores(index, masks[index] if masks is not None else None)
            draft = self._drafts[index] if index < len(self._drafts) else None
            token, is_kept, broken = self._decide(scores, index, draft)
            out.accepted += is_kept
            self._take(out, token, scores, broken=broken)
            if not is_kept or broken:
                break
        return out

    def _run_tree(self, tree: Tree) -> _Judged:
        """Say a token at each node and go on to the children that say the same: drafts are certain here."""
        none = sum(1 << i for i, draft in enumerate(self._drafts) if draft < 0)
        depths = [
            tree.depths[node] for node in range(tree.nodes) if self._drafts and not tree.paths[node] & none
        ]
        out = _Judged([], 0, max(depths, default=0), RUNNING, False, [], [])
        constraint, alike = (
            self._own.constraint,
            [0],
        )  # nodes whose paths are the text so far: siblings may be equal
        while out.finish == RUNNING:
            node = alike[0]
            mask = mask_rows(constraint, (), self._logits.shape[1])[0] if constraint is not None else None
            scores = self._scores(node, mask)
            token, _, broken = self._decide(scores, node, None)
            following = [
                c for n in alike for c in tree.children[n] if self._drafts and self._drafts[c - 1] == token
            ]
            is_kept = bool(following) and not broken
            out.accepted += is_kept
            self._take(out, token, scores, broken=broken)
            if not is_kept:
                break
            alike = following
        # K/V and states are those of one path: the last node's.
        last = alike[0] if len(out.tokens) > tree.depths[alike[0]] else tree.parents[alike[0] - 1]
        out.path = [0, *(n for n in range(1, tree.nodes) if tree.paths[last] >> (n - 1) & 1)]
        return out

    def _take(self, out: _Judged, token: int, scores: Tensor, *, broken: bool) -> None:
        """Emit a token."""
        out.fault |= broken
        out.tokens.append(token)
        out.scores.append(scores[0, 0])
        if self._own.constraint is not None and not broken:
            self._own.constraint.advance(token)
        self._history = torch.cat([self._history, self._history.new_tensor([token])])
        out.finish = self._ending(token)

    def _scores(self, index: int, mask: Tensor | None) -> Tensor:
        """Return row ``index`` after all settings, [1, 1, vocab]: transformers' order, the constraint last."""
        row = self._logits[None, index : index + 1]
        context = self._context()
        scores = process(row, context, self._before)[0]
        ids = self._history[None]
        for processor in self._own.processors:
            scores = _checked(processor(ids.clone(), scores.clone()), scores)
        if mask is not None:
            if not bool(mask.any()):
                raise InputError(
                    "constraint", "a mask that allows no id", "masks with an id left, if only an end id"
                )
            scores = scores.masked_fill(~mask.to(scores.device), float("-inf"))
        return process(scores[None], context, self._after)

    def _context(self) -> SamplingContext:
        one = self._one
        length = one["state.length"].new_tensor([self._history.shape[0]])
        return SamplingContext(
            tokens=self._history[None], length=length, prompt_length=one["state.prompt_length"],
            draft=length.new_empty(1, 0), settings={
                n.removeprefix("setting."): t for n, t in one.items() if n.startswith("setting.")
            },
            eos=one["state.eos"], max_length=one["state.limit"],
        )  # fmt: skip

    def _decide(self, scores: Tensor, index: int, draft: int | None) -> tuple[int, bool, bool]:
        """Return the token of row ``index``, whether it is the draft, and whether the row had no distribution."""
        one = self._one
        drafts = None
        raw = self._logits[None, index : index + 1]
        if draft is not None:
            proposal, drawn = self._proposal(index) if self._proposal is not None else (None, None)
            drafts = Draft(torch.tensor([[draft]], device=scores.device), proposal, drawn)
            scores, raw = scores.expand(1, 2, -1), raw.expand(1, 2, -1)  # the second row is read by nobody
        if self._sampled:
            length = one["state.length"].new_tensor([self._history.shape[0]])
            verdict = accept(
                scores, drafts, temperature=one["setting.temperature"], seed=one["state.seed"], length=length,
                rule=self._rule, raw=raw,
            )  # fmt: skip
        else:
            verdict = accept(scores, drafts, raw=raw)
        is_kept = draft is not None and int(verdict.count) == 1
        return int(verdict.tokens[0, 0]), is_kept, bool(verdict.broken) and not is_kept

    def _ending(self, token: int) -> int:
        if token in self._eos:
            return STOP
        if self._history.shape[0] >= self._limit:
            return LENGTH
        if self._own.stops is not None:
            new = self._history[self._prompt :].tolist()
            if self._own.stops.find(new[:-1], new[-1:]) is not None:
                return STOP
        return RUNNING


def _proposal(values: Mapping[str, Tensor], slot: int) -> Callable[[int], tuple[Proposal, Tensor]] | None:
    """Return how to take one draft's distribution out of the slot's, or None for point masses."""
    if "draft.probs" not in values:
        return None
    probs, drawn, ids = values["draft.probs"], values["draft.drawn"], values.get("draft.ids")

    def pick(index: int) -> tuple[Proposal, Tensor]:
        place = (slice(slot, slot + 1), slice(index, index + 1))
        named = ids if ids is None or ids.dim() == 1 else ids[place]
        return Proposal(probs[place], named), drawn[place]

    return pick


def _checked(scores: object, like: Tensor) -> Tensor:
    if not isinstance(scores, Tensor) or scores.shape != like.shape:
        given = list(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
        raise InputError(
            "logits_processor", given, f"processors that return scores of shape {list(like.shape)}"
        )
    return scores.to(like)


def read_processors(given: object, settings: Mapping[str, object]) -> tuple[Processor, ...]:
    """Return a user's processors as a tuple, each once.

    Raises:
        InputError: one cannot be called, or is of a kind that a setting of the same call makes, too: transformers
            would let it replace that setting in its place, here it would be applied twice.
    """
    if given is None:
        return ()
    listed: Sequence[object] = list(given) if isinstance(given, (list, tuple)) else [given]
    processors: list[Processor] = []
    for item in listed:
        if not callable(item):
            raise InputError(
                "logits_processor", type(item).__name__, "callables (input_ids, scores) -> scores"
            )
        setting = _SAME.get(type(item).__name__)
        if setting is not None and settings.get(setting) not in (None, 0, 1.0, ()):
            raise InputError(
                "logits_processor",
                type(item).__name__,
                f"one of the two: this processor, or the setting {setting}",
            )
        if all(item is not known for known in processors):
            processors.append(item)
    return tuple(processors)


# transformers' classes by the setting that makes them.
_SAME: Mapping[str, str] = {
    "SequenceBiasLogitsProcessor": "sequence_bias", "RepetitionPenaltyLogitsProcessor": "repetition_penalty",
    "NoRepeatNGramLogitsProcessor": "no_repeat_ngram_size", "NoBadWordsLogitsProcessor": "bad_words_ids",
    "MinLengthLogitsProcessor": "min_length", "MinNewTokensLengthLogitsProcessor": "min_new_tokens",
    "ForcedEOSTokenLogitsProcessor": "forced_eos_token_id", "SuppressTokensLogitsProcessor": "suppress_tokens",
    "SuppressTokensAtBeginLogitsProcessor": "begin_suppress_tokens",
}  # fmt: skip
