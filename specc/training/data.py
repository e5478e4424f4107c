"""Make training data with the target alone: it writes the prompts, answers them, and its states are kept.

Everything goes through one compiled target at once: a slot that ends a prompt is given the next answer, so no
slot waits. The work is cut into shards; a kill loses the one that was being filled.
"""

from __future__ import annotations

import logging
import random
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specc.errors import InputError, UnsupportedError
from specc.models.load import LoadedModel
from specc.runtime.scheduler import Request
from specc.training import prompts as prompting
from specc.training.recipes import compose
from specc.training.record import Recorded, TargetRunner
from specc.training.shards import list_shards, read_facts, write_shard

logger = logging.getLogger(__name__)

_MOST_WASTED = 2000
_SOURCES = 256
_LEAST_ANSWER = 16  # tokens that a prompt must leave room for
_SEED_STRIDE = 1_000_000  # draws of a run are numbered from its seed times this: two seeds share none
_MARK = "\u2603 here"  # stands where the user's words will be; no template has it


@dataclass(frozen=True)
class DataPlan:
    """What to make.

    Attributes:
        tokens: Answer tokens in all.
        answer_tokens, prompt_tokens: Caps on one answer and on one sampled prompt; a longer prompt is
            dropped.
        capacity: Tokens of a whole sequence; a prompt may take five eighths of it.
        slots: Sequences that run at once.
        shard_tokens: Answer tokens of a shard: what a kill can lose.
        greedy: Share of the answers that are greedy; the rest are sampled at a temperature of 0.7 to 1.0.
        composed: Share of prompts put together from parts (`training.recipes`), in English; the target writes the rest.
        sourced: Of those, the share of tasks about one of the target's earlier answers, where a category has such.
        followed: Share of short answers that the target goes on from with a second user turn.
        seed: Of everything that is drawn.
    """

    tokens: int
    answer_tokens: int = 192
    prompt_tokens: int = 144
    capacity: int = 640
    slots: int = 32
    shard_tokens: int = 8192
    greedy: float = 0.5
    composed: float = 0.4
    sourced: float = 0.6
    followed: float = 0.2
    seed: int = 0


@dataclass(eq=False)
class _Conversation:
    """``before`` are the turns that are over, ``messages`` all turns: none until the last one is known."""

    category: str
    opener: str
    setting: str
    messages: list[dict[str, str]] = field(default_factory=list)
    before: list[dict[str, str]] = field(default_factory=list)

    def ask(self, text: str) -> None:
        """End the conversation with this user turn."""
        self.messages = [*self.before, {"role": "user", "content": text}]


class Collector:
    """Fills a folder with shards.

    Args:
        target: The model, with its tokenizer.
        runner: The compiled target.
        folder: Where shards are and go; what is there is gone on from.
        plan: What to make.
        user: Conversations of a user's file, answered first; without them the target writes the prompts.
        evaluation: Prompts to keep out.
    """

    def __init__(
        self,
        target: LoadedModel,
        runner: TargetRunner,
        folder: Path,
        plan: DataPlan,
        user: list[list[dict[str, str]]] | None = None,
        evaluation: prompting.Evaluation | None = None,
    ) -> None:
        if target.tokenizer is None or not getattr(target.tokenizer, "chat_template", None):
            raise UnsupportedError(
                "this target cannot make its own training data",
                ["its tokenizer has no chat template, so there is no user turn to write or answer"],
                "Train an instruct model.",
            )
        self.tokenizer, self.runner, self.folder, self.plan = target.tokenizer, runner, folder, plan
        self.evaluation = evaluation or prompting.read_evaluation(None)
        self.dropped: Counter[str] = Counter()
        self._wasted = 0
        self._queue: deque[_Conversation] = deque()
        self._follow: deque[_Conversation] = deque()  # wait for their next user turn
        # What the target wrote lately, for tasks that need a source.
        self._texts: deque[str] = deque(maxlen=_SOURCES)
        self._code: deque[str] = deque(maxlen=_SOURCES)
        self._pending: list[Recorded] = []
        self._kept: list[dict[str, Any]] = []
        self._begin = time.perf_counter()
        self._specials = [t for t in self.tokenizer.all_special_tokens if t]
        done = [read_facts(p) for p in list_shards(folder)]
        self.tokens = sum(f["answer_tokens"] for f in done)
        self._next = 1 + max((f["last_seed"] for f in done), default=plan.seed * _SEED_STRIDE - 1)
        self._shards = len(done)
        self.seen = prompting.Seen(k["text"] for f in done for k in f["prompts"])
        self._user = deque(
            m
            for m in user or []
            if prompting.text_of(m) not in {k["text"] for f in done for k in f["prompts"]}
        )
        self._from_user = user is not None

    def run(
        self, progress: Callable[[str], None] = logger.info, stop: Callable[[], bool] = lambda: False
    ) -> None:
        """Make shards until the plan is met, the user's prompts are answered, or ``stop`` says so."""
        self._stop = stop
        for item in self.runner.run(self._requests()):
            conversation = item.key
            assert isinstance(conversation, _Conversation)
            if conversation.messages:
                self._answered(conversation, item)
            else:
                self._prompted(conversation, item)
            if sum(len(p.ids) - p.prompt for p in self._pending) >= self.plan.shard_tokens:
                self._flush(progress)
        if self._pending:
            self._flush(progress)
        if not self._shards:
            raise InputError(
                "prompts", dict(self.dropped), "some that are of use: all were dropped, for these reasons"
            )

    def _requests(self) -> Iterator[Request]:
        """Yield answers to prompts that are ready first, then new prompts."""
        while self.tokens < self.plan.tokens and not self._stop():
            if self._queue:
                conversation = self._queue.popleft()
                yield self._answer(conversation)
            elif self._user:
                messages = self._user.popleft()
                if self._keep(prompting.text_of(messages)):
                    self._queue.append(_Conversation("user", "", "user file", messages))
            elif self._from_user:
                return
            elif self._follow:
                yield self._write(self._follow.popleft(), random.Random(self._next))
            else:
                made = self._invent(random.Random(self._next))
                if made is not None:
                    yield made

    def _seed(self) -> int:
        self._next += 1
        return self._next

    def _invent(self, chance: random.Random) -> Request | None:
        """Return the request for a new prompt, or None when one needed no writing."""
        seed = self._seed()
        category = prompting.CATEGORIES[seed % len(prompting.CATEGORIES)]
        if chance.random() < self.plan.composed:
            self._ask(category, compose(category, chance), "composed", may_resemble=True)
            return None
        text = self._sourced(category, chance) if chance.random() < self.plan.sourced else None
        if text is not None:
            self._ask(category, text, "own text")
            return None
        opener = ""
        if chance.random() < 0.75:
            opener = chance.choice(prompting.OPENERS[category])
            if category == "chat" and chance.random() < 0.25:
                opener += f" about {chance.choice(prompting.TOPICS)}"
        return self._write(_Conversation(category if opener else "bare", opener, ""), chance, seed)

    def _ask(self, category: str, text: str, setting: str, *, may_resemble: bool = False) -> None:
        """Queue a prompt that is ready, if it is of use."""
        if self._keep(text, may_resemble=may_resemble):
            conversation = _Conversation(category, "", setting)
            conversation.ask(text)
            self._queue.append(conversation)

    def _sourced(self, category: str, chance: random.Random) -> str | None:
        """Return a task about something that the target wrote, or None where there is nothing yet."""
        if category == "code":
            return (
                chance.choice(prompting.CODE_TASKS).format(chance.choice(self._code)) if self._code else None
            )
        tasks = prompting.TASKS.get(category)
        return chance.choice(tasks).format(chance.choice(self._texts)) if tasks and self._texts else None

    def _write(self, conversation: _Conversation, chance: random.Random, seed: int | None = None) -> Request:
        """Return the request for a conversation's next user turn."""
        hot = chance.random() < 0.5
        conversation.setting = "t1.0" if hot else "t0.8"
        ids = self._encode(self._header(conversation.before) + conversation.opener)
        if len(ids) + self.plan.prompt_tokens > self.plan.capacity:
            raise InputError(
                "capacity", self.plan.capacity, "more tokens than the chat template and a prompt take"
            )
        return self.runner.request(
            conversation,
            ids,
            self.plan.prompt_tokens,
            self._seed() if seed is None else seed,
            do_sample=True,
            temperature=1.0 if hot else 0.8,
            top_p=0.95,
            top_k=0,
        )

    def _answer(self, conversation: _Conversation) -> Request:
        seed = self._seed()
        chance = random.Random(seed)
        ids = self._encode(self._template(conversation.messages))
        room = min(self.plan.answer_tokens, self.plan.capacity - len(ids))
        settings: dict[str, Any] = {"do_sample": False}
        conversation.setting += ", greedy"
        if chance.random() >= self.plan.greedy:
            temperature = round(chance.uniform(0.7, 1.0), 2)
            settings = {"do_sample": True, "temperature": temperature, "top_p": 1.0, "top_k": 0}
            conversation.setting = conversation.setting.removesuffix("greedy") + f"t{temperature}"
        return self.runner.request(conversation, ids, room, seed, **settings)

    def _encode(self, text: str) -> Tensor:
        return torch.tensor(self.tokenizer.encode(text, add_special_tokens=False), dtype=torch.int64)

    def _template(self, messages: list[dict[str, str]]) -> str:
        """Return the template up to where the answer begins."""
        text: str = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return text

    def _header(self, messages: list[dict[str, str]]) -> str:
        """Return the template up to where the next user turn's words begin."""
        text: str = self.tokenizer.apply_chat_template(
            [*messages, {"role": "user", "content": _MARK}], tokenize=False
        )
        return text[: text.index(_MARK)]

    def _prompted(self, conversation: _Conversation, item: Recorded) -> None:
        if not item.ended:
            self._drop("too long")
            return
        written = self.tokenizer.decode(item.ids[item.prompt : -1], skip_special_tokens=False)
        text = (conversation.opener + written).strip()
        if self._keep(text):
            conversation.ask(text)
            if len(self._encode(self._template(conversation.messages))) + _LEAST_ANSWER > self.plan.capacity:
                self._drop("too long")
            else:
                self._queue.append(conversation)

    def _drop(self, why: str) -> None:
        """Count a prompt that is of no use; a target that writes nothing else is told so."""
        self.dropped[why] += 1
        self._wasted += 1
        if self._wasted >= _MOST_WASTED:
            raise UnsupportedError(
                "this target cannot make its own training data",
                [f"{_MOST_WASTED} prompts in a row were of no use: {dict(self.dropped)}"],
                "Give prompts in a file.",
            )

    def _keep(self, text: str, *, may_resemble: bool = False) -> bool:
        """Return whether a prompt is of use; ``may_resemble`` lets one pass that shares most words with others."""
        alike = ("duplicate" if text in self.seen else None) if may_resemble else self.seen.fault(text)
        why = prompting.fault(text, self._specials) or alike
        if why is None and len(self._encode(text)) > 5 * self.plan.capacity // 8:
            why = "too long"
        if why is None and self.evaluation.is_close(text):
            why = "close to an evaluation prompt"
        if why is not None:
            self._drop(why)
            return False
        self._wasted = 0
        self.seen.add(text)
        return True

    def _answered(self, conversation: _Conversation, item: Recorded) -> None:
        if len(item.ids) - item.prompt < 8:
            self.dropped["short answer"] += 1
            return
        self._pending.append(item)
        self.tokens += len(item.ids) - item.prompt
        self._kept.append({
            "text": prompting.text_of(conversation.messages), "category": conversation.category,
            "setting": conversation.setting, "tokens": len(item.ids) - item.prompt,
        })  # fmt: skip
        chance = random.Random(self.tokens)
        answer = self.tokenizer.decode(item.ids[item.prompt :], skip_special_tokens=True).strip()
        room = 5 * self.plan.capacity // 8
        prose = prompting.prose_source(answer, int(chance.uniform(0.1, 0.6) * room))
        code = prompting.code_source(answer)
        if prose is not None:
            self._texts.append(prose)
        if code is not None and len(self._encode(code)) < 0.8 * room:
            self._code.append(code)
        short = len(item.ids) + self.plan.prompt_tokens <= room
        if item.ended and short and not self._from_user and chance.random() < self.plan.followed:
            turns = [*conversation.messages, {"role": "assistant", "content": answer}]
            self._follow.append(_Conversation(conversation.category, "", "", before=turns))

    def _flush(self, progress: Callable[[str], None]) -> None:
        answer = sum(len(p.ids) - p.prompt for p in self._pending)
        facts = {
            "answer_tokens": answer, "last_seed": self._next, "taps": list(self.runner.taps),
            "seconds": round(time.perf_counter() - self._begin, 1), "dropped": dict(self.dropped),
            "checked": self.evaluation.checked, "flagged": self.evaluation.flagged, "prompts": self._kept,
        }  # fmt: skip
        write_shard(self.folder, self._shards, self._pending, facts)
        categories = dict(Counter(k["category"] for k in self._kept))
        progress(
            f"shard {self._shards}: {len(self._pending)} answers, {answer} tokens "
            f"({self.tokens} of {self.plan.tokens}), "
            f"{facts['seconds']} s, {categories}, dropped {dict(self.dropped)}"
        )
        self.evaluation.checked = self.evaluation.flagged = 0  # a shard says what was checked for it
        self._shards += 1
        self._pending, self._kept = [], []
        self._begin = time.perf_counter()
