"""`specc.bench`: who takes part, in which order, what is counted, how it is written. Nothing is timed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from specc import api
from specc.benchmark.contestants import Run
from specc.benchmark.floor import cache_bytes_per_token, weight_bytes
from specc.benchmark.measure import (
    Measured,
    Task,
    acceptance_by_position,
    accepted_length,
    measure,
    rates,
    ratios,
)
from specc.benchmark.report import BenchReport
from specc.errors import InputError, UnknownNameError, UnsupportedError
from specc.step import StepKey
from tests.tiny import noisy_copy, tiny_model

PROMPTS = [torch.tensor([2, 7, 8, 9, 7, 8]), torch.tensor([2, 11, 12, 13])]


class Counter:
    """A contestant that notes what it was asked and answers at a fixed pace."""

    def __init__(self, name: str, log: list[str], seconds: float = 1.0) -> None:
        self.name, self.block, self.log, self.seconds = name, None, log, seconds

    def run(self, ids: torch.Tensor, max_new_tokens: int) -> Run:
        self.log.append(f"{self.name}{ids.shape[0]}")
        return Run((1,) * max_new_tokens, self.seconds, 0.5, 2, 0.5, 1, (1, 0), (2, 1))


def test_rounds_are_interleaved_and_the_first_one_changes() -> None:
    log: list[str] = []
    tasks = [Task(torch.tensor([1]), 4), Task(torch.tensor([1, 2]), 4)]
    measured = measure([Counter("a", log), Counter("b", log)], tasks, repeats=2)
    assert log[:2] == ["a1", "b1"]  # warm-up
    assert log[2:] == ["a1", "b1", "b2", "a2", "b1", "a1", "a2", "b2"]
    assert [len(m.rounds) for m in measured] == [2, 2]


def runs(*pairs: tuple[int, float]) -> tuple[Run, ...]:
    return tuple(Run((1,) * count, seconds, 0.1, 2, seconds, 2, (2, 1), (2, 2)) for count, seconds in pairs)


def test_rates_and_ratios_are_per_round() -> None:
    log: list[str] = []
    fast = Measured(Counter("a", log), (runs((10, 1.0), (10, 3.0)), runs((20, 1.0), (20, 1.0))))
    slow = Measured(Counter("b", log), (runs((10, 2.0), (10, 2.0)), runs((10, 2.0), (10, 2.0))))
    assert rates(fast, (0, 1)) == [5.0, 20.0]
    assert rates(fast, (0,)) == [10.0, 20.0]
    assert ratios(fast, slow, (0, 1)) == [1.0, 4.0]
    assert ratios(fast, None, (0, 1)) is None
    assert accepted_length(fast, (0,)) == 30 / 4
    assert acceptance_by_position(fast, (0, 1)) == [1.0, 0.5]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> BenchReport:
    model = tiny_model("llama")
    names = [
        "plain",
        "ngram",
        "draft_model",
        "transformers",
        "transformers-static",
        "assisted",
        "prompt_lookup",
    ]
    return api.bench(
        model,
        {"draft_model": noisy_copy(model)},
        methods=names,
        prompts=PROMPTS,
        repeats=2,
        max_new_tokens=10,
        backend="eager",
        block=2,
    )


def test_every_contestant_has_a_row_and_writes_the_same_text(report: BenchReport) -> None:
    names = [row["method"] for row in report.rows]
    assert names == [
        "plain",
        "ngram",
        "draft_model",
        "transformers",
        "transformers-static",
        "assisted",
        "prompt_lookup",
    ]
    assert [row["same_text"] for row in report.rows] == ["2/2"] * 7
    for row in report.rows:
        assert row["tokens_per_s_least"] <= row["tokens_per_s"] <= row["tokens_per_s_most"]
        assert row["first_token_ms"] > 0
    plain = report.rows[0]
    assert (plain["vs_plain"], plain["accepted_length"], plain["block"]) == (1.0, 1.0, 0)
    assert report.rows[3]["accepted_length"] == 1.0  # one pass of transformers' model per token
    assert report.rows[2]["accepted_length"] > 1.0
    assert report.rows[5]["accepted_length"] > 1.0


def test_positions_memory_and_floor(report: BenchReport) -> None:
    drafted = {row["method"]: [row["position_1"], row["position_2"]] for row in report.by_position}
    assert drafted["draft_model"][0] >= drafted["draft_model"][1] > 0
    assert "plain" not in drafted
    memory = {row["method"]: row for row in report.memory}
    assert memory["plain"]["drafter_weights"] == 0 < memory["draft_model"]["drafter_weights"]
    floors = {row["method"]: row["floor_ms"] for row in report.rows}
    assert floors["plain"] < floors["draft_model"]
    assert floors["transformers"] is None


def test_a_report_is_json_and_markdown(report: BenchReport) -> None:
    document = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert document["command"].startswith("specc bench MODEL --methods plain,ngram,draft_model,")
    text = report.render()
    assert "| draft_model | 2 |" in text
    assert "Acceptance by position" in text
    assert "_least" not in text
    assert report.settings["sampling"] == "greedy"


def test_the_floor_counts_each_weight_once_and_tables_by_row() -> None:
    model = tiny_model("llama")  # embedding and head apart
    compiled = api.compile(model, method="plain", backend="eager", max_length=32)
    builder = compiled.engine.builder
    found = weight_bytes(builder.step(StepKey(0, 0, "ratio")).graph)
    table = model.get_input_embeddings().weight
    every = sum(p.numel() * 4 for p in model.parameters())
    assert every - table.numel() * 4 <= found <= every - table.numel() * 4 + 4 * (table.shape[1] + 64)
    per_token = 3 * 2 * 2 * (32 // 4) * 4  # layers, key and value, heads, size, float32
    assert cache_bytes_per_token(builder.state(), compiled.engine.capacity) == per_token


def test_kinds_blocks_and_charts(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    lines = [
        {
            "id": f"p{i}",
            "category": kind,
            "messages": [{"role": "user", "content": "w7 w8 w7 w8"}],
            "max_new_tokens": 6,
        }
        for i, kind in enumerate(("list", "list", "chat"))
    ]
    (tmp_path / "prompts").mkdir()
    for number, line in enumerate(lines):
        (tmp_path / "prompts" / f"{number}.jsonl").write_text(json.dumps(line))
    from specc.models.load import load_target
    from tests.tiny import tiny_tokenizer

    model = tiny_model("llama")
    loaded = load_target(model, tokenizer=tiny_tokenizer())
    report = api.bench(
        loaded,
        noisy_copy(model),
        methods=("plain", "draft_model"),
        blocks=(1, 2),
        prompts=tmp_path / "prompts",
        each=1,
        repeats=1,
        backend="eager",
        plot=tmp_path / "charts",
        command="a b",
    )
    assert [(row["method"], row["block"]) for row in report.rows] == [
        ("plain", 0),
        ("draft_model", 1),
        ("draft_model", 2),
    ]
    assert [row["category"] for row in report.by_category] == ["list"] * 3 + ["chat"] * 3
    assert report.settings["prompts"] == 2
    assert [len((row["acceptance"] or "").split()) for row in report.by_category] == [0, 1, 2] * 2
    assert sorted(p.name for p in (tmp_path / "charts").iterdir()) == [
        "acceptance_by_position.png",
        "speedup_by_block.png",
    ]
    assert all(p.read_bytes().startswith(b"\x89PNG") for p in (tmp_path / "charts").iterdir())
    assert report.command == "a b"


def test_charts_without_matplotlib_are_refused_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UnsupportedError, match="matplotlib is not installed"):
        api.bench(tmp_path / "nothing", plot=tmp_path)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"methods": ("plain", "ngrm")}, UnknownNameError, "did you mean 'ngram'"),
        ({"methods": ()}, InputError, "at least one method"),
        ({"repeats": 0}, InputError, "repeats"),
        ({"blocks": (0,)}, InputError, "blocks"),
        ({"repeat": 3}, UnknownNameError, "did you mean 'repeats'"),
        ({"methods": ("assisted",)}, InputError, "needs the draft_model drafter"),
        ({"methods": ("plain",), "prompts": [[1] * 300]}, InputError, "at most 256 positions"),
        ({"methods": ("plain",), "prompts": None}, InputError, "without a tokenizer"),
    ],
)
def test_wrong_requests(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        api.bench(tiny_model("llama"), **{"prompts": PROMPTS, **options})


def test_one_drafter_does_not_serve_two_methods() -> None:
    model = tiny_model("llama")
    with pytest.raises(InputError, match="a drafter per method, since dspark, eagle3 need one each"):
        api.bench(model, "somewhere", methods=("dspark", "eagle3"), prompts=PROMPTS)
