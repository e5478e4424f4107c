"""A run on a tiny model: it learns, resumes to the bit, survives a kill, and two processes equal one."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import specc
from specc.cli.train import train
from specc.contracts import DrafterBundle
from specc.drafters.eagle3 import Eagle3Drafter
from specc.errors import InputError, UnknownNameError, UnsupportedError
from specc.models.load import LoadedModel, load_target
from specc.training.loop import Plan, Trainer, summarize
from specc.training.run import TrainOptions
from specc.training.start import METHODS, Sizes, go_on_from, make_drafter
from specc.training.terms import LossOptions, Result
from tests.tiny import tiny_model, tiny_tokenizer

ROOT = Path(__file__).resolve().parents[2]
TAPS = (1, 2, 3)
LOSS = LossOptions(anchors=8, steps=3)
COMMON: dict[str, Any] = {
    "taps": TAPS, "slots": 8, "answer_tokens": 24, "capacity": 64, "backend": "eager", "tokens": 500, "rate": 3e-3,
    "block": 3, "markov_rank": 4, "selector_rank": 4, "loss": LOSS, "held_out": 8,
}  # fmt: skip


def make_target() -> LoadedModel:
    return load_target(tiny_model("llama", num_hidden_layers=4), tokenizer=tiny_tokenizer())


@pytest.fixture(scope="module")
def target() -> LoadedModel:
    return make_target()


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    generator = torch.Generator().manual_seed(0)
    lines = []
    for _ in range(24):
        words = torch.randint(7, 96, (6,), generator=generator).tolist()
        lines.append(json.dumps({"prompt": " ".join(f"w{word}" for word in words)}))
    path = tmp_path_factory.mktemp("prompts") / "p.jsonl"
    path.write_text("\n".join(lines))
    return path


@pytest.fixture(scope="module")
def data(target: LoadedModel, prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of shards, made by a first run of one step."""
    folder = tmp_path_factory.mktemp("data")
    specc.train(
        target,
        method="dflash",
        output=folder / "first",
        prompts=prompts,
        data=folder / "shards",
        steps=1,
        **COMMON,
    )
    return folder / "shards"


def make(
    target: LoadedModel,
    data: Path,
    output: Path,
    steps: int | None = None,
    method: str = "dspark",
    **more: Any,
) -> Trainer:
    sizes = Sizes(method, 1, 3, None if method == "dflash2" else 64, 4, 4, TAPS)
    plan = Plan(steps=steps, batch=4, rate=3e-3, held_out=4, **more)
    return Trainer(target, sizes, plan, LOSS, data, output, resume=True)


@pytest.mark.parametrize("method", METHODS)
def test_loss_falls_and_the_drafter_runs(
    target: LoadedModel, data: Path, tmp_path: Path, method: str
) -> None:
    vocab = None if method == "dflash2" else 64
    report = specc.train(
        target, method=method, output=tmp_path, data=data, steps=40, draft_vocab=vocab, batch=4, **COMMON
    )
    trained = make(target, data, tmp_path / "other", 40, method)
    losses = trained.run().losses
    assert sum(losses[-5:]) < 0.95 * sum(losses[:5])  # 0.93 at most; 1.0 where nothing is learnt
    assert len(report.values["acceptance"]) == 3
    assert report.values["steps"] == 40
    card = (tmp_path / "README.md").read_text()
    assert method in card
    assert f"{report.values['data_tokens']} answer tokens" in card
    compiled = specc.compile(target, tmp_path, method=method, backend="eager", max_length=48, block=3)
    ids = torch.tensor([[5, 9, 11, 12]])
    plain = specc.compile(target, method="plain", backend="eager", max_length=48)
    same = [c.generate(ids, max_new_tokens=24, eos_token_id=None) for c in (compiled, plain)]
    assert torch.equal(*same)
    if method == "dspark":
        temperatures = json.loads((tmp_path / "config.json").read_text())["sts_temperatures"]
        assert len(temperatures) == 3
        assert report.values["calibration"]["temperatures"] == tuple(temperatures)


@pytest.mark.parametrize("method", ["dspark", "eagle3"])
def test_resumed_run_is_the_uninterrupted_one(
    target: LoadedModel, data: Path, tmp_path: Path, method: str
) -> None:
    whole = make(target, data, tmp_path / "whole", 12, method).run()
    broken = make(target, data, tmp_path / "broken", 12, method)
    broken.run(stop=lambda: broken.history.step >= 5)
    resumed = make(target, data, tmp_path / "broken", 12, method)
    assert resumed.history.step == 5
    assert resumed.run().losses == whole.losses  # to the bit


def test_a_kill_loses_what_came_after_the_last_save(target: LoadedModel, data: Path, tmp_path: Path) -> None:
    killed = make(target, data, tmp_path, 20, save_minutes=0.0)  # saves after every step

    class KilledError(Exception):
        pass

    def kill() -> bool:
        if killed.history.step == 7:
            raise KilledError
        return False

    with pytest.raises(KilledError):
        killed.run(stop=kill)
    part = tmp_path / "state" / "training.safetensors.part"
    part.write_bytes(b"half")  # a save that was cut off
    resumed = make(target, data, tmp_path, 20)
    assert resumed.history.step == 7


def test_refusals(target: LoadedModel, data: Path, tmp_path: Path) -> None:
    make(target, data, tmp_path, 1).run()
    with pytest.raises(InputError, match="resume=True"):
        Trainer(target, Sizes("dspark"), Plan(steps=1), LOSS, data, tmp_path)
    sizes = make(target, data, tmp_path, 1).sizes
    with pytest.raises(InputError, match="began with"):
        Trainer(target, replace(sizes, markov_rank=8), Plan(steps=1), LOSS, data, tmp_path, resume=True)
    with pytest.raises(UnknownNameError, match="dspark"):
        TrainOptions("dsprak", tmp_path, steps=1)
    with pytest.raises(InputError, match="minutes"):
        TrainOptions("dspark", tmp_path)
    for name, value in (
        ("rate", -1),
        ("rate", "fast"),
        ("minutes", 0),
        ("minutes", float("nan")),
        ("layers", 0),
    ):
        with pytest.raises(InputError, match=name):
            TrainOptions("dspark", tmp_path, **{"steps": 1, name: value})
    for taps in ((1, 77), (), (1, 1), (-1, 2)):
        with pytest.raises(InputError, match="taps"):
            specc.train(target, method="dspark", output=tmp_path / "t", data=data, steps=1, taps=taps)
    with pytest.raises(UnknownNameError, match="markov_rank"):
        specc.train(target, method="dspark", output=tmp_path, markof_rank=1)


WORKER = """
import sys, time
from pathlib import Path
import torch
from torch import distributed
from specc.training import loop
from tests.training.test_run import make, make_target
torch.set_num_threads(1)
distributed.init_process_group("gloo")
rank = distributed.get_rank()
class Clock:
    monotonic = time.monotonic
    perf_counter = staticmethod(lambda: time.perf_counter() * (1 + rank))  # the second one's runs twice as fast
loop.time = Clock
bounds = {"steps": 4} if sys.argv[4] == "steps" else {"minutes": 0.05}
trainer = make(make_target(), Path(sys.argv[1]), Path(sys.argv[2]), method=sys.argv[3], **bounds)
history = trainer.run()
weights = float(sum(p.double().sum() for p in trainer.module.parameters()))
print(f"RANK{rank} {history.step} {weights!r} {' '.join(map(str, history.losses))}.", flush=True)
distributed.destroy_process_group()
"""


def in_two_processes(folder: Path, data: Path, method: str, bounds: str) -> list[list[str]]:
    """Return what each of two processes says of the same run: steps, a sum of its weights, its losses."""
    worker = folder / "worker.py"
    worker.write_text(WORKER)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0"]
    done = subprocess.run(
        [*command, "--standalone", str(worker), str(data), str(folder / "two"), method, bounds],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return [done.stdout.split(f"RANK{rank} ")[1].split(".\n")[0].split() for rank in (0, 1)]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["dspark", "eagle3"])
def test_two_processes_equal_one(target: LoadedModel, data: Path, tmp_path: Path, method: str) -> None:
    alone = make(target, data, tmp_path / "alone", 4, method).run().losses
    first, second = in_two_processes(tmp_path, data, method, "steps")
    assert first == second
    losses = [float(v) for v in first[2:]]
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(alone), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_processes_with_other_clocks_end_together(data: Path, tmp_path: Path) -> None:
    first, second = in_two_processes(tmp_path, data, "eagle3", "minutes")
    assert int(first[0]) > 2
    assert first == second, "the rate and the end come from one clock"


def test_the_command_for_several_processes_is_torchruns() -> None:
    from torch.distributed.run import parse_args

    line = next(line for line in str(train.__doc__).splitlines() if "torchrun --" in line).split()
    options = ["--" + name.replace("_", "-") for name in inspect.signature(train).parameters]
    assert "--start" in options
    given = ["2" if word == "N" else word for word in line[1:-2]]
    # torchrun takes whatever begins like an option of its own, --start among them, even behind the script's name.
    found = parse_args([*given, "folder", *options])
    assert [found.training_script, *found.training_script_args] == ["specc", "train", "folder", *options]


def go_on(first: Trainer, sizes: Sizes, output: Path) -> tuple[Trainer, set[str]]:
    """Train a finished drafter two steps further; it begins where it was. Returns the names of what moved."""
    again = Trainer(first.target, sizes, replace(first.plan, steps=2), LOSS, first.feed.folder, output)
    reached, begins = first.history.held_out[-1]["loss"], again.measure()["loss"]
    assert abs(begins - reached) < 0.02 * abs(reached)  # bfloat16 is what was written
    before = {n: p.detach().clone() for n, p in again.module.named_parameters()}
    again.run()
    return again, {n for n, p in again.module.named_parameters() if not torch.equal(p, before[n])}


def test_the_held_out_length_walks_as_decoding_does() -> None:
    runs = torch.tensor([[-1, -1, 2, 0, 3, 0, 1, 0, -1], [-1, 0, 0, 0, -1, -1, -1, -1, -1]])
    results = [Result({}, torch.tensor([4, 2, 1]), torch.tensor([10, 9, 8]), runs)]
    results[0].terms["ce"] = (1.0, torch.tensor(3.0), torch.tensor(2.0))
    found = summarize(results, [9, 5])
    # First: from 2 over 3 tokens to 5, one to 6, two to 8, its last. Second: three steps of one token.
    assert found["accepted_length"] == round((6 + 3) / (3 + 3), 4)
    assert found["acceptance"] == [0.4, round(2 / 9, 4), 0.125]
    assert found["loss"] == 1.5


@pytest.mark.parametrize("method", METHODS)
def test_the_held_out_length_is_the_step_graphs(
    target: LoadedModel, data: Path, tmp_path: Path, method: str
) -> None:
    trained = make(target, data, tmp_path, 40, method)
    trained.run()
    examples = [e for e in trained.feed.held_out(4) if e.answer > 3][:3]
    compiled = specc.compile(target, tmp_path, method=method, backend="eager", max_length=64, block=3)
    steps = tokens = 0
    for example in examples:
        made = compiled.generate(
            example.ids[None, : example.prompt],
            max_new_tokens=example.answer,
            eos_token_id=None,
            return_dict_in_generate=True,
        )
        assert torch.equal(made.sequences[0], example.ids)  # greedy answers are held out first
        # The prompt's own step drafts nothing and commits the first token.
        steps, tokens = steps + made.stats.steps - 1, tokens + made.stats.tokens - 1
    found = summarize(trained.judge(examples), [len(e.ids) for e in examples])
    assert found["accepted_length"] > 1.0, "nothing was accepted: the comparison says nothing"
    assert found["accepted_length"] == pytest.approx(tokens / steps, abs=1e-3)


@pytest.mark.parametrize("method", ["dspark", "eagle3"])
def test_a_finished_drafter_is_trained_further(
    target: LoadedModel, data: Path, tmp_path: Path, method: str
) -> None:
    first = make(target, data, tmp_path / "first", 6, method)
    first.run()
    sizes = Sizes(
        method, 1, 5, None, 8, 8, None, str(tmp_path / "first")
    )  # all but the method is the drafter's
    again, moved = go_on(first, sizes, tmp_path / "again")
    assert again.info.config == first.info.config
    assert "fc.weight" in moved
    assert not {"lm_head.weight", "embed_tokens.weight"} & moved
    with pytest.raises(InputError, match="taps"):
        Trainer(target, replace(sizes, taps=(1, 2)), first.plan, LOSS, data, tmp_path / "third")


@pytest.mark.parametrize("method", ["dspark", "eagle3"])
def test_a_drafter_with_more_layers_says_the_same_and_learns(
    target: LoadedModel, data: Path, tmp_path: Path, method: str
) -> None:
    first = make(target, data, tmp_path / "first", 6, method)
    first.run()
    sizes = Sizes(method, 3, start=str(tmp_path / "first"))
    grown, moved = go_on(first, sizes, tmp_path / "grown")
    assert grown.info.config.layers == 3
    attention = "" if method == "dspark" else "self_attn."
    learnt = (f"{attention}o_proj", "mlp.down_proj", f"{attention}q_proj")
    assert {f"layers.{i}.{part}.weight" for i in range(3) for part in learnt} <= moved
    read = specc.compile(target, tmp_path / "grown", method=method, backend="eager", max_length=48)
    assert read.generate(torch.tensor([[5, 9, 11, 12]]), max_new_tokens=8, eos_token_id=None).shape == (1, 12)


@pytest.mark.parametrize("method", ["dspark", "eagle3"])
def test_another_vocabulary_keeps_the_logits_of_ids_that_stay(
    target: LoadedModel, data: Path, tmp_path: Path, method: str
) -> None:
    first = make(target, data, tmp_path / "first", 6, method)
    first.run()
    counts = first.feed.counts(target.info.vocab)
    whole = go_on_from(Sizes(method, start=str(tmp_path / "first")), target)[1]
    counts[90:] += 100  # commonest now, and no rows of the first vocabulary
    info, other = go_on_from(Sizes(method, draft_vocab=40, start=str(tmp_path / "first")), target, counts)
    assert info.vocab == len(other.target_ids) == 40
    assert (
        other.target_ids.tolist() == counts.argsort(descending=True, stable=True)[:40].sort().values.tolist()
    )
    kept = torch.isin(other.target_ids, whole.target_ids)
    rows = torch.isin(whole.target_ids, other.target_ids)
    assert 0 < kept.sum() < 40
    hidden = torch.randn(3, target.info.hidden)
    theirs = target.module.get_submodule("lm_head").weight[other.target_ids]
    torch.testing.assert_close(other.lm_head(hidden)[:, kept], whole.lm_head(hidden)[:, rows])
    assert torch.equal(
        other.lm_head.weight[kept], theirs[kept].to(torch.bfloat16).float()
    )  # what was written
    assert torch.equal(other.lm_head.weight[~kept], theirs[~kept])
    if method == "dspark":
        bias = other.markov_head.bias(torch.randn(3, 4, generator=torch.Generator().manual_seed(0)))
        same = whole.markov_head.bias(torch.randn(3, 4, generator=torch.Generator().manual_seed(0)))
        torch.testing.assert_close(bias[:, kept], same[:, rows])
        assert not bias[:, ~kept].any()


def test_a_head_of_its_own_gets_no_rows_of_the_targets(
    target: LoadedModel, data: Path, tmp_path: Path
) -> None:
    first = make(target, data, tmp_path / "first", 2, "eagle3")
    with torch.no_grad():
        first.module.lm_head.weight.mul_(1.5)
    first.save()
    counts = first.feed.counts(target.info.vocab)
    had = set(first.module.target_ids.tolist())
    counts[90:] += 100
    cut = go_on_from(Sizes("eagle3", draft_vocab=40, start=str(tmp_path / "first")), target, counts)[1]
    assert set(cut.target_ids.tolist()) <= had
    with pytest.raises(InputError, match="head of its own"):
        go_on_from(Sizes("eagle3", draft_vocab=80, start=str(tmp_path / "first")), target, counts)


def test_an_eagle3_drafter_without_a_head_is_refused(
    target: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    info, module = make_drafter(Sizes("eagle3", draft_vocab=40, taps=TAPS), target, torch.ones(96), 0)
    config = replace(module.config, own_head=False, maps_ids=False, draft_vocab=96)
    bundle = DrafterBundle(replace(info, config=config, vocab=96), Eagle3Drafter(config))
    monkeypatch.setattr("specc.training.start.read_drafter", lambda *_: bundle)
    with pytest.raises(UnsupportedError, match="no head of its own"):
        go_on_from(Sizes("eagle3", start="somewhere"), target)
