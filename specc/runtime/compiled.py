"""`Compiled`: what `specc.compile` returns; a drop-in for a model's ``generate``."""

from __future__ import annotations

import copy
import logging
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from specc.contracts import ACCEPT_RULES, AcceptRule, Method, ModelInfo
from specc.errors import InputError, SpeccError, UnsupportedError
from specc.files import check_new_file
from specc.models.generation import check_streamer
from specc.runtime.arguments import Arguments, read_arguments
from specc.runtime.engine import Engine
from specc.runtime.generation import FinishReason, Generation
from specc.runtime.inspection import Inspection, inspect_engine
from specc.runtime.scheduler import Progress, Request, Scheduler
from specc.runtime.stats import Stats
from specc.runtime.stopping import StopStrings
from specc.runtime.weights import WeightWatch
from specc.sampling import join

logger = logging.getLogger(__name__)


class Compiled:
    """A target with a drafting method, compiled for a device.

    Not built by hand: `specc.compile` and `specc.load` return it. One call runs at a time; a second thread waits.

    Attributes:
        method: the drafting method.
        block: draft tokens per step; 0 for plain decoding.
        record: the TuneRecord that chose the block, if one did.
        tokenizer: the target's, if one came with it.
    """

    def __init__(
        self,
        engine: Engine,
        method: Method,
        block: int,
        accept: AcceptRule,
        *,
        info: ModelInfo,
        tokenizer: Any = None,
        generation: Mapping[str, Any] | None = None,
        record: Any = None,
        exact: Literal["bitwise"] | None = None,
    ) -> None:
        self.engine, self.method, self.block, self.exact = engine, method, block, exact
        self.accept: AcceptRule = accept if block else "coupled"
        self.info, self.tokenizer, self.record = info, tokenizer, record
        self.generation_defaults = dict(generation or {})
        self._watch = WeightWatch(engine.builder.weights)
        self._lock = threading.Lock()
        self._drafts = True
        # The thread that holds the lock, and its stream if it is one: a stream left half read must not block its owner.
        self._open: list[tuple[int, weakref.ref[Any] | None]] = []

    def without_drafts(self) -> Compiled:
        """Return the same object decoding plainly: the baseline. Engine and lock are shared.

        With exact="bitwise" its steps run the same rows as before, only without drafts in them.
        """
        plain = copy.copy(self)
        plain._drafts, plain.accept = False, "coupled"
        if plain.exact is None:
            plain.block = 0
        return plain

    def forget(self) -> None:
        """Forget the texts of earlier calls: the next prompts are read whole, whatever they share with them."""
        with self._alone():
            for slot in range(self.engine.slots):
                self.engine.forget(slot, 0)

    @property
    def max_length(self) -> int:
        """The most tokens a sequence can have, prompt included."""
        return self.engine.capacity

    @property
    def reach(self) -> int:
        """The most drafts that a step can accept: the block, or the height of a tree."""
        tree = self.engine.builder.tree(self.block)
        return self.block if tree is None else tree.height

    @property
    def batch(self) -> int:
        """Sequences that run at once; more are queued."""
        return self.engine.slots

    def generate(
        self,
        input_ids: Any = None,
        attention_mask: Any = None,
        *,
        generation_config: Any = None,
        streamer: Any = None,
        seed: int | Sequence[int] | None = None,
        accept: AcceptRule | None = None,
        inputs: Any = None,
        tokenizer: Any = None,
        **settings: Any,
    ) -> Tensor | Generation:
        """Generate as transformers' ``generate`` does, several tokens per step.

        Args:
            input_ids: int64 [batch, tokens] (or [tokens]), left-padded where ``attention_mask`` is 0.
            attention_mask: the same shape, zeros then ones in every row.
            generation_config: a transformers GenerationConfig; arguments win over it.
            streamer: anything with ``put`` and ``end``; one sequence only, as in transformers.
            seed: of all random streams; sequence i uses ``seed + i``, or give one per sequence. None draws one from
                torch's global generator.
            accept: overrides the rule that was given to compile, for this call.
            inputs: another name of ``input_ids``.
            tokenizer: for ``stop_strings``; the compiled model's own by default.
            **settings: transformers' generation settings, and ours (docs/design.md lists them).

        Returns:
            int64 [sequences, longest], prompts included, or a `Generation` with ``return_dict_in_generate=True``.
            Without ``max_new_tokens`` or ``max_length`` it goes on until a stop or the compiled ``max_length``.

        Raises:
            InputError, UnknownNameError, UnsupportedError: before any work is done.
        """
        arguments, stops = self._read(
            input_ids, attention_mask, generation_config=generation_config, streamer=streamer, seed=seed,
            accept=accept, inputs=inputs, tokenizer=tokenizer, **settings,
        )  # fmt: skip
        _say(arguments)
        with self._alone():
            self._watch.check()
            out = _Collector(self.engine, arguments, streamer, stops).run(self._scheduler(arguments.extras))
        return out if arguments.returns_dict else out.sequences

    def check_request(self, input_ids: Any = None, attention_mask: Any = None, **arguments: Any) -> None:
        """Raise what `generate` would raise for these arguments; nothing is compiled and nothing runs."""
        self._read(input_ids, attention_mask, **arguments)

    def _read(
        self, input_ids: Any, attention_mask: Any, *, generation_config: Any = None, streamer: Any = None,
        seed: int | Sequence[int] | None = None, accept: Any = None, inputs: Any = None, tokenizer: Any = None,
        **settings: Any,
    ) -> tuple[Arguments, StopStrings | None]:  # fmt: skip
        if (input_ids is None) == (inputs is None):
            raise InputError("input_ids", "both" if inputs is not None else None, "token ids, given once")
        arguments = read_arguments(
            input_ids if input_ids is not None else inputs,
            attention_mask,
            defaults=self.generation_defaults,
            generation_config=generation_config,
            given=settings,
            seed=seed,
            accept=self._rule(accept),
            vocab=self.info.vocab,
            capacity=self.engine.capacity,
        )
        if streamer is not None:
            check_streamer(streamer)
            if len(arguments.requests) > 1:
                raise InputError("streamer", f"{len(arguments.requests)} sequences", "one sequence at a time")
        tokenizer = tokenizer if tokenizer is not None else self.tokenizer
        stops = StopStrings(arguments.stop_strings, tokenizer) if arguments.stop_strings else None
        for request in arguments.requests:
            request.own = replace(request.own, stops=stops)
        return arguments, stops

    def stream(
        self, requests: Iterable[tuple[object, Mapping[str, Any]]]
    ) -> Iterator[tuple[object, list[int]]]:
        """Serve an iterator of requests on the compiled slots; finished slots are refilled while others run.

        A stream that is left before its end is closed by the next call of its thread; other threads wait for it.

        Args:
            requests: pairs of an id and the arguments that `generate` takes for one sequence.

        Yields:
            (id, tokens): new tokens as they are decided; an empty list says that the sequence has ended.

        Raises:
            InputError, UnknownNameError, UnsupportedError: A request is wrong. It is the last one that is read;
                those before it are served to their end first, so that none of them loses its text.
        """
        if not isinstance(requests, Iterable):
            raise InputError(
                "requests", type(requests).__name__, "an iterable of (id, arguments of generate)"
            )
        me: list[weakref.ref[Any]] = []
        served = self._serve(requests, me)
        me.append(weakref.ref(served))
        return served

    def _serve(
        self, requests: Iterable[tuple[object, Mapping[str, Any]]], me: Sequence[weakref.ref[Any]]
    ) -> Iterator[tuple[object, list[int]]]:
        with self._alone():
            self._open[:] = [(threading.get_ident(), me[0])]
            self._watch.check()
            held: dict[int, tuple[object, StopStrings | None, list[int]]] = {}
            wrong: list[SpeccError] = []

            def read() -> Iterator[Request]:
                for number, item in enumerate(requests):
                    try:
                        name, arguments, stops = self._asked(item)
                    except SpeccError as error:
                        error.add_note(f"request {number}, the last one that was read")
                        wrong.append(error)
                        return
                    _say(arguments)
                    request = arguments.requests[0]
                    request.key = number
                    held[number] = (name, stops, [])
                    if request.limit > request.ids.shape[0]:
                        yield request
                    else:
                        done.append(number)

            done: list[int] = []
            scheduler = self._scheduler(())
            progress = scheduler.run(read(), Stats())
            try:
                for item in progress:
                    for number in done:
                        yield held.pop(number)[0], []
                    done.clear()
                    name, stops, tokens = held[int(str(item.request.key))]
                    new, finish = _cut(item, stops, tokens)
                    if finish == "stop" and item.finish is None:
                        scheduler.cancel(item.request)
                    yield name, new
                    if finish is not None:
                        held.pop(int(str(item.request.key)))
                        yield name, []
                for number in done:
                    yield held.pop(number)[0], []
                if wrong:
                    raise wrong[0]
            finally:
                progress.close()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Let one call run at a time; an unfinished stream of this thread is closed first."""
        me = threading.get_ident()
        if not self._lock.acquire(blocking=False):
            busy = UnsupportedError(
                "this compiled object is in use",
                ["it is called from its own streamer, logits processor, constraint or iterator of requests"],
            )
            for stream in [stream for owner, stream in self._open if owner == me]:
                if stream is None:
                    raise busy
                left = stream()
                try:
                    if left is not None:
                        left.close()
                except ValueError:  # it runs: we were called from inside of it
                    raise busy from None
            self._lock.acquire()
        self._open[:] = [(me, None)]
        try:
            yield
        finally:
            self._open.clear()
            self._lock.release()

    def inspect(self) -> Inspection:
        """Return the step graph as text by stage, what each pass changed, and memory by part."""
        return inspect_engine(self.engine, self.method, self.block, self.accept)

    def warm_up(self, **settings: Any) -> list[str]:
        """Compile every step that a call with ``settings`` needs; returns what was compiled."""
        before = len(self.engine.compiles)
        limit = min(3 + 2 * (self.block + 1), self.engine.capacity)
        self.generate(
            torch.zeros(1, 1, dtype=torch.int64), max_length=limit, eos_token_id=None, seed=0, **settings
        )
        width = self.engine.feed + 2
        if self.batch > 1 and self.block and width + 2 <= self.engine.capacity:
            # A prompt of two chunks beside one of a token: the second chunk is read while the other sequence drafts.
            mask = torch.ones(2, width, dtype=torch.int64)
            mask[0, :-1] = 0
            self.generate(
                torch.zeros_like(mask), mask, max_new_tokens=2, eos_token_id=None, seed=0, **settings
            )
        return self.engine.compiles[before:]

    def save(self, path: str | Path, *, native: bool = False, force: bool = False) -> None:
        """Write one self-contained package that `specc.load` runs without transformers and without tracing.

        It holds the stages as graphs, the weights once, the tokenizer, the generation defaults and the tuning record.
        Writing is atomic and reproducible.

        Args:
            path: the file, usually ``NAME.specc``.
            native: also store native code for this device.
            force: replace a file that is there.

        Raises:
            InputError: a file is there, or its folder is not.
            UnsupportedError: a package cannot hold this; says what.
        """
        file = check_new_file("path", path, force=force)
        from specc.artifact.save import Content, save  # heavy, and rarely needed

        if self.exact is not None:
            raise UnsupportedError(
                f"a package with exact={self.exact!r}",
                ["it would have to be self-tested again where it is loaded"],
                "Compile without exact to save.",
            )
        with self._alone():
            self._watch.check()
            content = Content(
                self.engine.builder,
                self.method.name,
                self.method.default_block,
                self.block,
                self.accept,
                self.engine.feed,
                self.usual_families(),
                self.tokenizer,
                self.generation_defaults,
                self.record,
            )
            save(content, file, native=native, force=force)

    def usual_families(self) -> tuple[tuple[str, ...], ...]:
        """Return the settings families that most calls of this model need: its defaults, greedy and sampled."""
        families = []
        for do_sample in (False, True):
            one = torch.zeros(1, 1, dtype=torch.int64)
            arguments, _ = self._read(one, None, do_sample=do_sample, seed=0)
            families.append(arguments.requests[0].families)
        greedy, sampled = families
        wanted = [greedy, join(greedy, ("temperature",)), sampled, join(sampled, ("top_p",))]
        return tuple(dict.fromkeys(f for f in wanted if f))

    def _rule(self, asked: Any) -> Any:
        """Return the accept rule of a request.

        Without drafts there is nothing to judge, and both rules draw from the same distribution. The coupled draw is
        taken, so that plain text with a seed is what every method gives with accept="coupled".
        """
        is_plain = not self.block or not self._drafts
        return self.accept if asked is None or (is_plain and asked in ACCEPT_RULES) else asked

    def _asked(self, item: Any) -> tuple[object, Arguments, StopStrings | None]:
        """Return the id, the arguments of one request and its stop strings, of an item of `stream`."""
        if not isinstance(item, tuple | list) or len(item) != 2 or not isinstance(item[1], Mapping):
            raise InputError("requests", item, "pairs of an id and a mapping of generate's arguments")
        name, given = item[0], dict(item[1])
        if not all(isinstance(key, str) for key in given):
            raise InputError("requests", list(given), "generate's arguments by name")
        if given.get("streamer") is not None:
            raise InputError("streamer", "a streamer", "none: a stream yields its tokens itself")
        arguments, stops = self._read(
            given.pop("input_ids", None), given.pop("attention_mask", None), **given
        )
        if len(arguments.requests) != 1:
            raise InputError("input_ids", f"{len(arguments.requests)} sequences", "one sequence per request")
        if arguments.extras or arguments.returns_dict:
            asked = ", ".join((*arguments.extras, *["return_dict_in_generate"] * arguments.returns_dict))
            raise InputError("requests", asked, "tokens only: a stream yields nothing else, generate does")
        return name, arguments, stops

    def _scheduler(self, extras: tuple[str, ...]) -> Scheduler:
        uniform = self.exact is not None
        return Scheduler(
            self.engine, self.block, self.accept, extras, is_uniform=uniform, drafts=self._drafts
        )


def _say(arguments: Arguments) -> None:
    for note in arguments.notes:
        logger.warning(note)


def _cut(item: Progress, stops: StopStrings | None, tokens: list[int]) -> tuple[list[int], str | None]:
    """Add a step's tokens to ``tokens``; return those that count and how the sequence ended, if it did."""
    new, finish = list(item.record.tokens), item.finish
    if stops is not None:
        keep = stops.find(tokens, new)
        if keep is not None:
            new, finish = new[:keep], "stop"
    tokens.extend(new)
    return new, finish


class _Collector:
    """Gathers the progress of one call into a `Generation`."""

    def __init__(
        self, engine: Engine, arguments: Arguments, streamer: Any, stops: StopStrings | None
    ) -> None:
        self._engine, self._arguments, self._streamer, self._stops = engine, arguments, streamer, stops
        count = len(arguments.requests)
        self._tokens: list[list[int]] = [[] for _ in range(count)]
        self._reasons: list[FinishReason] = ["length"] * count
        self._rows: dict[str, list[list[Tensor]]] = {e: [[] for _ in range(count)] for e in arguments.extras}

    def run(self, scheduler: Scheduler) -> Generation:
        stats = Stats()
        if self._streamer is not None:
            self._streamer.put(self._arguments.prompts.cpu())
        wanted = [r for r in self._arguments.requests if r.limit > r.ids.shape[0]]
        # Closed at once, whatever happens: later, it would end the slots of another call.
        with closing(scheduler.run(wanted, stats)) as progress:
            for item in progress:
                self._take(item, scheduler, stats)
        if self._streamer is not None:
            self._streamer.end()
        return Generation(
            self._sequences(),
            tuple(self._reasons),
            stats.finish(),
            **{name: self._stack(extra) for extra, name in _EXTRA_NAMES.items()},
        )

    def _take(self, item: Progress, scheduler: Scheduler, stats: Stats) -> None:
        """Add what one step did to one sequence."""
        index = int(str(item.request.key))
        new, finish = _cut(item, self._stops, self._tokens[index])
        if len(new) < len(item.record.tokens):
            stats.forget(item.record, len(new))
        for extra, rows in self._rows.items():
            made = self._engine.outputs[extra][item.slot, : len(new)]
            rows[index].extend(made.clone().unbind(0))
        if self._streamer is not None and new:
            self._streamer.put(torch.tensor(new))
        if finish == "stop":
            self._reasons[index] = "stop"
            if item.finish is None:
                scheduler.cancel(item.request)

    def _sequences(self) -> Tensor:
        prompts = self._arguments.prompts
        longest = max((len(t) for t in self._tokens), default=0)
        new = torch.full((len(self._tokens), longest), self._arguments.pad, dtype=torch.int64)
        for row, tokens in zip(new, self._tokens, strict=True):
            row[: len(tokens)] = torch.tensor(tokens, dtype=torch.int64)
        return torch.cat([prompts.to(torch.int64), new.to(prompts.device)], dim=1)

    def _stack(self, extra: str) -> tuple[Tensor, ...] | None:
        """Return a tensor [sequences, width] per emitted position; ended sequences have zeros."""
        if extra not in self._rows:
            return None
        rows = self._rows[extra]
        longest = max(len(r) for r in rows)
        width = next((r[0] for r in rows if r), None)
        if width is None:
            return ()
        blank = torch.zeros_like(width)
        return tuple(torch.stack([r[i] if i < len(r) else blank for r in rows]) for i in range(longest))


_EXTRA_NAMES = {"logits": "logits", "scores": "scores", "hidden": "hidden_states"}
