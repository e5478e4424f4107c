"""The order in which recorded sequences are trained on: shuffled, bounded in memory, and exact to resume.

A run's order depends on its seed, the epoch and how many shards there were when the epoch began; a cursor of
those is all that a checkpoint keeps.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specc.errors import InputError
from specc.training.packing import Batch, collate
from specc.training.shards import Example, list_shards, read_facts, read_lengths, read_shard

HELD_OUT = 16  # one sequence of so many is never trained on
_WINDOW = 16  # shards held in memory at once, and shuffled together
_POOL = 16  # batches whose sequences are sorted by length together: a batch is padded to its longest


@dataclass(frozen=True)
class Cursor:
    """Where a run stands in its data: the epoch, its shards, sequences taken in it, and in all."""

    epoch: int = 0
    shards: int = 0
    taken: int = 0
    number: int = 0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class Feed:
    """Batches of a folder's shards.

    Args:
        folder: Where the shards are; new ones join when an epoch begins.
        seed: Of the order.
        cursor: Where to go on.
        batch: Sequences that are taken at once: such are of like length.
    """

    def __init__(self, folder: Path, seed: int, cursor: Cursor = Cursor(), batch: int = 1) -> None:
        self.folder, self.seed, self.cursor, self.batch = folder, seed, cursor, batch
        self._held: dict[Path, list[Example]] = {}
        self._order: list[tuple[int, int]] = []
        self._key = (-1, -1)

    def take(self, count: int) -> Batch:
        """Return the next ``count`` sequences; an epoch's rest that is too short for a batch is passed over."""
        if self.cursor.shards == 0:
            self.cursor = replace(self.cursor, shards=len(self._shards()))
        self._arrange()
        if self.cursor.taken + count > len(self._order):
            self.cursor = Cursor(self.cursor.epoch + 1, len(self._shards()), 0, self.cursor.number)
            self._arrange()
            if count > len(self._order):
                raise InputError(
                    "batch", count, f"at most {len(self._order)}, the sequences there are to train on"
                )
        picked = self._order[self.cursor.taken : self.cursor.taken + count]
        examples = [self._examples(shard)[index] for shard, index in picked]
        numbers = range(self.cursor.number, self.cursor.number + count)
        self.cursor = replace(self.cursor, taken=self.cursor.taken + count, number=self.cursor.number + count)
        return collate(examples, list(numbers))

    def held_out(self, limit: int) -> list[Example]:
        """Return up to ``limit`` sequences that are never trained on, with greedy answers where there are any."""
        found: list[tuple[bool, Example]] = []
        ordinal = 0
        for path in self._shards():
            kept = read_facts(path)["prompts"]
            for entry, example in zip(kept, read_shard(path), strict=True):
                if _is_held_out(ordinal) and example.answer > 2:
                    found.append((entry["setting"].endswith("greedy"), example))
                ordinal += 1
            if sum(greedy for greedy, _ in found) >= limit:
                break
        found.sort(key=lambda item: not item[0])
        return [example for _, example in found[:limit]]

    def counts(self, vocab: int) -> Tensor:
        """Return how often each id is in the answers, int64 [vocab]."""
        total = torch.zeros(vocab, dtype=torch.int64)
        for path in self._shards():
            for example in read_shard(path):
                total += torch.bincount(example.ids[example.prompt :], minlength=vocab)
        return total

    def _shards(self) -> list[Path]:
        found = list_shards(self.folder)
        if not found:
            raise InputError("data", str(self.folder), "a folder with at least one finished shard")
        return found

    def _arrange(self) -> None:
        key = (self.cursor.epoch, self.cursor.shards)
        if key == self._key:
            return
        self._key = key
        generator = torch.Generator().manual_seed((self.seed << 20) ^ self.cursor.epoch)
        shards = torch.randperm(self.cursor.shards, generator=generator).tolist()
        kept = [read_facts(path)["prompts"] for path in self._shards()[: self.cursor.shards]]
        begins = [0, *itertools.accumulate(map(len, kept))]
        self._order = []
        rest: list[tuple[int, int]] = []
        for begin in range(0, len(shards), _WINDOW):
            group = [
                (shard, index)
                for shard in shards[begin : begin + _WINDOW]
                for index, entry in enumerate(kept[shard])
                if not _is_held_out(begins[shard] + index) and entry["tokens"] > 2
            ]
            picked = [group[i] for i in torch.randperm(len(group), generator=generator).tolist()]
            over = len(picked) % self.batch
            rest += picked[len(picked) - over :]
            self._order += self._by_length(picked[: len(picked) - over], generator)
        self._order += rest

    def _by_length(self, picked: list[tuple[int, int]], generator: torch.Generator) -> list[tuple[int, int]]:
        """Return sequences, a multiple of the batch, as batches of like length in a random order."""
        if self.batch == 1:
            return picked
        paths = self._shards()
        lengths = {shard: read_lengths(paths[shard]) for shard in {shard for shard, _ in picked}}
        batches = []
        for begin in range(0, len(picked), _POOL * self.batch):
            pool = sorted(picked[begin : begin + _POOL * self.batch], key=lambda at: lengths[at[0]][at[1]])
            batches += [pool[i : i + self.batch] for i in range(0, len(pool), self.batch)]
        shuffled = torch.randperm(len(batches), generator=generator).tolist()
        return [at for index in shuffled for at in batches[index]]

    def _examples(self, shard: int) -> Sequence[Example]:
        path = self._shards()[shard]
        if path not in self._held:
            while len(self._held) >= _WINDOW:
                self._held.pop(next(iter(self._held)))
            self._held[path] = list(read_shard(path))
        return self._held[path]


def _is_held_out(ordinal: int) -> bool:
    """Return whether the sequence with this number, counted over all shards, is kept for measuring."""
    return ordinal % HELD_OUT == HELD_OUT - 1
