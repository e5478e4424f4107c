"""Data is what the target says: recorded states and sums equal a plain forward; collecting goes on where it was."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from specc.backends import choose
from specc.errors import UnsupportedError
from specc.models.load import LoadedModel, load_target
from specc.training.data import Collector, DataPlan
from specc.training.feeding import HELD_OUT, Cursor, Feed
from specc.training.prompts import CATEGORIES, Evaluation, fault
from specc.training.recipes import compose, parts
from specc.training.record import Recorded, TargetRunner
from specc.training.shards import list_shards, read_facts, read_shard
from tests.methods.harness import record
from tests.tiny import tiny_model, tiny_tokenizer

TAPS = (1, 3)
PLAN = DataPlan(200, answer_tokens=16, prompt_tokens=40, capacity=72, slots=6, shard_tokens=40, composed=0.0)


@pytest.fixture(scope="module")
def target() -> LoadedModel:
    return load_target(tiny_model("llama", num_hidden_layers=4), tokenizer=tiny_tokenizer())


@pytest.fixture(scope="module")
def runner(target: LoadedModel) -> TargetRunner:
    backend, _ = choose("eager", torch.device("cpu"))
    return TargetRunner(target, TAPS, slots=PLAN.slots, capacity=PLAN.capacity, backend=backend)


def test_recorded_is_what_a_forward_gives(target: LoadedModel, runner: TargetRunner) -> None:
    generator = torch.Generator().manual_seed(0)
    requests = [
        runner.request(n, torch.randint(7, 96, (4 + n,), generator=generator), 9, n, do_sample=False)
        for n in range(9)
    ]
    found = list(runner.run(requests))
    assert sorted(int(str(item.key)) for item in found) == list(range(9))
    for item in found:
        logits = target.module(input_ids=item.ids[None, :-1]).logits[0]
        assert torch.equal(item.ids[item.prompt :], logits[item.prompt - 1 :].argmax(-1))
        torch.testing.assert_close(
            item.features, record(target.module, item.ids[:-1], TAPS), rtol=1e-4, atol=1e-4
        )
        answer = slice(item.prompt - 1, None)
        torch.testing.assert_close(item.log_total[answer], logits[answer].logsumexp(-1), rtol=1e-4, atol=1e-4)
        head: Any = target.module.get_output_embeddings()
        torch.testing.assert_close(head(item.final), logits, rtol=1e-4, atol=1e-4)


def test_evaluation_prompts_are_kept_out(target: LoadedModel, runner: TargetRunner, tmp_path: Path) -> None:
    user = [[{"role": "user", "content": f"w{n} w{n + 1} w{n + 2} w{n + 3} w{n + 4}"}] for n in (10, 30, 50)]
    evaluation = Evaluation([user[1][0]["content"]])
    Collector(target, runner, tmp_path, PLAN, user, evaluation).run()
    facts = [read_facts(path) for path in list_shards(tmp_path)]
    assert {entry["text"] for f in facts for entry in f["prompts"]} == {
        user[0][0]["content"],
        user[2][0]["content"],
    }
    assert (facts[0]["checked"], facts[0]["flagged"]) == (3, 1)


def test_without_a_chat_template(target: LoadedModel, runner: TargetRunner, tmp_path: Path) -> None:
    bare = load_target(target.module)
    with pytest.raises(UnsupportedError, match="chat template"):
        Collector(bare, runner, tmp_path, PLAN)


def test_collecting_goes_on_where_it_was(target: LoadedModel, runner: TargetRunner, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(1)
    words = torch.randint(7, 96, (20, 5), generator=generator).tolist()
    user = [[{"role": "user", "content": " ".join(f"w{word}" for word in row)}] for row in words]
    first = Collector(target, runner, tmp_path, PLAN, user)
    first.run(stop=lambda: bool(list_shards(tmp_path)))  # as if it had been ended after a shard
    before = {path: path.read_bytes() for path in list_shards(tmp_path)}
    assert before
    assert first.tokens < PLAN.tokens
    (tmp_path / "shard-00009.safetensors").write_bytes(b"half")  # no JSON beside it: not finished
    second = Collector(target, runner, tmp_path, PLAN, user)
    assert second.tokens == first.tokens
    second.run()
    assert second.tokens > first.tokens
    assert all(path.read_bytes() == content for path, content in before.items())
    facts = [read_facts(path) for path in list_shards(tmp_path)]
    seeds = [f["last_seed"] for f in facts]
    assert seeds == sorted(seeds)
    kept = [entry for f in facts for entry in f["prompts"]]
    assert len({entry["text"] for entry in kept}) == len(kept)
    sequences = [example for path in list_shards(tmp_path) for example in read_shard(path)]
    assert sum(example.answer for example in sequences) == sum(entry["tokens"] for entry in kept)


class Scripted:
    """A target that writes what a test says: random words, an answer of one paragraph, then its end."""

    taps = TAPS

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def request(self, key: object, ids: torch.Tensor, new_tokens: int, seed: int, **settings: Any) -> Any:
        return key, ids, new_tokens, seed

    def run(self, requests: Any) -> Iterator[Recorded]:
        for key, ids, new_tokens, seed in requests:
            generator = torch.Generator().manual_seed(seed)
            new = torch.randint(7, 96, (min(14, new_tokens - 1),), generator=generator)
            whole = torch.cat([ids, new, torch.tensor([self.tokenizer.eos_token_id])])
            rows = len(whole) - 1
            states = torch.zeros(rows, 2 * 32), torch.zeros(rows, 32), torch.zeros(rows)
            yield Recorded(key, whole, len(ids), *states, ended=True)


def test_short_answers_are_followed_by_a_second_turn(target: LoadedModel, tmp_path: Path) -> None:
    scripted: Any = Scripted(target.tokenizer)
    plan = DataPlan(600, 16, 24, capacity=192, shard_tokens=100, composed=0.0, sourced=0.0, followed=1.0)
    Collector(target, scripted, tmp_path, plan).run()
    kept = [entry for path in list_shards(tmp_path) for entry in read_facts(path)["prompts"]]
    sequences = [example for path in list_shards(tmp_path) for example in read_shard(path)]
    turns = [target.tokenizer.decode(s.ids[: s.prompt]).count("user") for s in sequences]
    assert max(turns) >= 2
    assert turns.count(2) >= turns.count(1) // 2
    for entry, sequence, count in zip(kept, sequences, turns, strict=True):
        # The words of a second turn's card are the user's own, and its context holds the answer between them.
        context = target.tokenizer.decode(sequence.ids[: sequence.prompt])
        assert context.count("assistant") == count
        assert all(word in context.split() for word in entry["text"].split()[-10:])
        assert len(sequence.ids) <= plan.capacity


def test_tasks_hold_what_the_target_wrote(target: LoadedModel, tmp_path: Path) -> None:
    scripted: Any = Scripted(target.tokenizer)
    plan = DataPlan(900, 16, 24, capacity=192, shard_tokens=100, composed=0.0, sourced=1.0, followed=0.0)
    Collector(target, scripted, tmp_path, plan).run()
    facts = [read_facts(path) for path in list_shards(tmp_path)]
    sourced = [e for f in facts for e in f["prompts"] if e["setting"].startswith("own text")]
    assert {e["category"] for e in sourced} >= {"rewrite", "summary", "list", "chat"}
    answers = {
        target.tokenizer.decode(s.ids[s.prompt : -1]) for p in list_shards(tmp_path) for s in read_shard(p)
    }
    assert all(any(answer in entry["text"] for answer in answers) for entry in sourced)


def test_composed_prompts_may_resemble_each_other_but_none_of_the_evaluation(
    target: LoadedModel, tmp_path: Path
) -> None:
    scripted: Any = Scripted(target.tokenizer)
    plan = DataPlan(600, 16, 24, capacity=600, shard_tokens=100, composed=1.0, followed=0.0)
    chance = random.Random(5)
    kept_out = {compose(category, chance) for category in ("chat", "list", "maths") for _ in range(150)}
    Collector(target, scripted, tmp_path, plan, None, Evaluation(kept_out)).run()
    facts = [read_facts(path) for path in list_shards(tmp_path)]
    kept = [e for f in facts for e in f["prompts"]]
    assert len({e["text"] for e in kept}) == len(kept) > 30
    assert {e["category"] for e in kept} == set(CATEGORIES)
    assert all(e["setting"].startswith("composed, ") for e in kept)
    assert sum(f["flagged"] for f in facts) > 0
    assert not {e["text"] for e in kept} & kept_out
    # The same seed walks the same way.
    assert [compose("chat", random.Random(3)) for _ in range(2)] == [compose("chat", random.Random(3))] * 2


def test_every_part_of_a_recipe_is_there_and_used() -> None:
    slots = {name for texts in parts().values() for text in texts for name in re.findall(r"\{(\w+)\}", text)}
    assert slots - {"n1", "n2", "n3"} == set(parts()) - set(CATEGORIES)
    chance = random.Random(1)
    for category in CATEGORIES:
        texts = [compose(category, chance) for _ in range(400)]
        assert len(set(texts)) > 200, category
        odd = [t for t in texts if fault(t) not in (None, "short") or re.search(r"\{\w+\}|\S  | $", t)]
        assert not odd, category


def test_batches_are_of_like_length_and_leave_nothing_out(target: LoadedModel, tmp_path: Path) -> None:
    scripted: Any = Scripted(target.tokenizer)
    plan = DataPlan(3000, 16, 24, capacity=192, shard_tokens=100, composed=0.0, followed=0.5)
    Collector(target, scripted, tmp_path, plan).run()
    feed, alone = Feed(tmp_path, 0, batch=4), Feed(tmp_path, 0)
    count = sum(len(read_facts(path)["prompts"]) for path in list_shards(tmp_path))
    count -= count // HELD_OUT
    batches = [feed.take(4) for _ in range(count // 4)]
    assert feed.cursor.epoch == 0
    seen = {
        tuple(row[:end].tolist()) for b in batches for row, end in zip(b.ids, b.end.tolist(), strict=True)
    }
    assert len(seen) == 4 * len(batches), "a sequence was taken twice in an epoch"
    padded = sum(b.ids.numel() for b in batches) / sum(int(b.end.sum()) for b in batches)
    plain = [alone.take(4) for _ in range(count // 4)]
    assert padded < 1.15 < sum(b.ids.numel() for b in plain) / sum(int(b.end.sum()) for b in plain)
    # The order is the seed's: a run that resumes reads on where it was.
    again = Feed(tmp_path, 0, Cursor(**{**feed.cursor.to_dict(), "taken": 8, "number": 8}), batch=4)
    assert torch.equal(again.take(4).ids, batches[2].ids)
