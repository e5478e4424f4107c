"""`specc.check`: every broken folder gives reasons and no exception; a tap off by one shows in the probe."""

from __future__ import annotations

import functools
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specc import api, methods
from specc.checking.probe import pad_left, probe
from specc.checking.report import Finding, Probe, Reading, Report
from specc.models.load import LoadedModel, load_target
from tests import automaton, oracles
from tests.tiny import tiny_model

BROKEN = json.loads((oracles.ROOT / "broken" / "broken.json").read_text())
METHOD = {
    "good-eagle3": "eagle3",
    "good-eagle3-specforge": "eagle3",
    "good-dspark": "dspark",
    "good-dflash2": "dflash2",
}
METHOD |= {"good-dflash": "dflash", "good-dflash-zlab": "dflash", "good-dflash2-zlab": "dflash2"}


@pytest.fixture(scope="module")
def loaded() -> dict[str, LoadedModel]:
    return {name: load_target(oracles.folder(f"targets/{name}")) for name in ("llama", "qwen3")}


def check(target: Any, name: str, method: str, **options: Any) -> Report:
    return api.check(target, oracles.folder(name), method=method, **options)


def text(report: Report, *effects: str) -> str:
    return "\n".join(f"{f.subject}: {f.text}" for f in report.findings if f.effect in effects)


@pytest.mark.parametrize("name", sorted(BROKEN))
def test_every_folder_gives_reasons_and_no_exception(name: str, loaded: dict[str, LoadedModel]) -> None:
    entry = BROKEN[name]
    method = METHOD[entry.get("copy_of", name)]
    target = loaded["qwen3" if name == "wrong-target" else entry["target"].removeprefix("targets/")]
    report = check(target, f"broken/{name}", method, probe=False)
    json.dumps(report.to_dict())
    assert report.render()
    if name.startswith("good-"):
        assert report.works, report.render()
    elif name in ("wrong-target", "last-layer-tap"):
        assert not report.clean, report.render()
    else:
        assert not report.works, report.render()
        assert "fault in specc" not in report.render()


def test_the_wrong_target_is_named(loaded: dict[str, LoadedModel]) -> None:
    report = check(loaded["qwen3"], "broken/wrong-target", "eagle3", probe=False)
    assert report.works
    assert "made for 'targets/llama', this is 'qwen3'" in text(report, "loses")


def test_all_reasons_come_at_once(loaded: dict[str, LoadedModel], tmp_path: Path) -> None:
    folder = tmp_path / "drafter"
    shutil.copytree(oracles.folder("broken/good-eagle3"), folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"eagle_aux_hidden_state_layer_ids": [1, 3, 9, 2], "target_hidden_size": 128}
    config["transformer_layer_config"] |= {
        "vocab_size": 600,
        "rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4},
    }
    (folder / "config.json").write_text(json.dumps(config))
    report = api.check(loaded["llama"], folder, method="eagle3", probe=False)
    found = text(report, "stops")
    assert "states of width 128, the target's are 64 wide" in found
    assert "[9] are not layers of the target" in found
    assert "4 taps of width 64 make 256, but fc.weight reads 192" in found
    assert "600 ids, the target's head 512" in found
    assert "spiral" in found


def test_what_cannot_be_loaded_is_a_report(tmp_path: Path) -> None:
    for report in (
        api.check(tmp_path / "nothing", None, method="ngram"),
        api.check(tiny_model("llama"), tmp_path / "nothing", method="eagle3"),
        api.check(tiny_model("llama"), None, method="eagel3"),
        api.check(tiny_model("llama"), None, method="dspark"),
        api.check(3, 4, method="eagle3"),
    ):
        assert not report.works
        assert report.verdict.startswith("will not work")
    assert api.check(tiny_model("llama"), None, method="ngram").works


def test_a_fault_of_ours_is_reported_as_one(
    monkeypatch: pytest.MonkeyPatch, loaded: dict[str, LoadedModel]
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("inner")

    monkeypatch.setattr("specc.checking.find_drafter", fail)
    report = check(loaded["llama"], "drafters/eagle3-spec", "eagle3")
    assert "RuntimeError: inner. This is a fault in specc" in text(report, "stops")


def _prompts() -> list[torch.Tensor]:
    known = oracles.reference("eagle3-spec")
    return [known[f"p{p}.ids"][: prompt["prompt_length"]] for p, prompt in enumerate(known.info["prompts"])]


@pytest.mark.slow
def test_a_tap_that_is_off_by_one_shows_itself(loaded: dict[str, LoadedModel], tmp_path: Path) -> None:
    folder = tmp_path / "drafter"
    shutil.copytree(oracles.folder("drafters/eagle3-spec"), folder)
    config = json.loads((folder / "config.json").read_text())
    config["eagle_aux_hidden_state_layer_ids"] = [2, 4, 6]  # 1, 3, 5 counted by outputs
    (folder / "config.json").write_text(json.dumps(config))
    report = api.check(loaded["llama"], folder, method="eagle3", prompts=_prompts(), max_new_tokens=40)
    assert report.works
    assert "off by one: with its taps moved by -1 (after layers [1, 3, 5])" in text(report, "loses"), (
        report.render()
    )


@pytest.mark.slow
def test_the_probe_counts_what_a_third_party_counts(loaded: dict[str, LoadedModel]) -> None:
    known = oracles.reference("eagle3-spec")
    report = check(loaded["llama"], "drafters/eagle3-spec", "eagle3", prompts=_prompts())
    assert report.probe is not None
    own = report.probe.readings[0]
    theirs = torch.cat([known[f"p{p}.accepted"] for p in range(len(known.info["prompts"]))])
    assert own.places == len(theirs)
    assert own.accepted == pytest.approx(float(theirs.double().mean()))
    assert own.acceptance == pytest.approx([float((theirs > i).double().mean()) for i in range(4)])
    assert report.probe.outside_draft_vocab is not None
    assert report.probe.better() is None
    assert [r.shift for r in report.probe.readings] == [0, -1, 1]
    for moved in report.probe.readings[1:]:  # trained and aligned: with its taps moved, less at every place
        assert moved.gain < -3 * moved.gain_error
        assert all(less < more for less, more in zip(moved.acceptance, own.acceptance, strict=True))
    assert report.probe.verdict().startswith("the taps are right")


@pytest.mark.parametrize("off_by", [0, -1])
def test_a_block_drafters_taps(off_by: int) -> None:
    """One that is right about its target where it is meant to read; trained ones lose little, and need many prompts."""
    made, target = automaton.drafter("dflash"), automaton.target()
    automaton.make_wander(0.0)
    taps = tuple(tap + off_by for tap in made.info.taps)
    given = replace(made, info=replace(made.info, taps=taps))
    prompts = [torch.tensor(automaton.circle(begin, 10)) for begin in (0, 4)]
    compile_step = functools.partial(api.compile, target, backend="eager")
    found = probe(compile_step, target, given, methods.get("dflash"), 3, prompts, 20)
    own = found.readings[0]
    assert (own.accepted > 2.5) is (off_by == 0)
    if off_by:
        assert found.verdict().startswith("off by one: with its taps moved by +1 (after layers [1, 2])")
    else:
        assert all(max(moved.acceptance) < min(own.acceptance) for moved in found.readings[1:])
        assert found.verdict().startswith("the taps are right")


def reading(shift: int, gain: float, error: float) -> Reading:
    return Reading(shift, (shift + 2,), 100, (0.5,), (0.1,), 2.0 + gain, 0.1, gain, error)


@pytest.mark.parametrize(
    ("shifted", "expected"),
    [
        ((-0.4, 0.1), "the taps are right"),
        ((-0.2, 0.1), "no shifted reading is significantly better"),
        ((0.29, 0.1), "no shifted reading is significantly better"),
        ((0.31, 0.1), "off by one: with its taps moved by +1"),
    ],
)
def test_a_verdict_needs_three_standard_errors(shifted: tuple[float, float], expected: str) -> None:
    probe = Probe(4, 4, (reading(0, 0.0, 0.0), reading(1, *shifted)))
    assert probe.verdict().startswith(expected)


def test_a_report_is_clean_only_with_notes_alone() -> None:
    notes, loses, stops = (Finding(effect, "x", "y") for effect in ("note", "loses", "stops"))  # type: ignore[arg-type]
    verdicts = [
        (r.works, r.clean)
        for r in (Report("m", "d", "x", f) for f in ((notes,), (notes, loses), (loses, stops)))
    ]
    assert verdicts == [(True, True), (True, False), (False, False)]


def test_prompts_are_padded_at_the_left() -> None:
    ids, mask = pad_left([torch.tensor([5, 6, 7]), torch.tensor([8])])
    assert ids.tolist() == [[5, 6, 7], [0, 0, 8]]
    assert mask.tolist() == [[1, 1, 1], [0, 0, 1]]
