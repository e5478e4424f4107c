"""Packages with learned drafters: saved, loaded and run, against what saved them and against the original."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import specc
from specc import cli
from specc.artifact.package import Package
from specc.errors import ArtifactError, InputError
from specc.loading import inspect_package, load
from specc.runtime.compiled import Compiled
from tests import oracles
from tests.packages import repack

# Method, target, the drafter's folder, and the block: two MTP modules make one draft.
PAIRS: dict[str, tuple[str, str, int]] = {
    "eagle3": ("llama", "drafters/eagle3-spec", 2),
    "eagle3_tree": ("llama", "drafters/eagle3-spec", 5),
    "dspark": ("llama", "drafters/dspark-spec-vanilla", 2),
    "mtp": ("llama-mtp2", "targets/llama-mtp2", 1),
}
FAMILIES = (("temperature",),)
GREEDY: dict[str, Any] = {"max_new_tokens": 10}
SEEDED: dict[str, Any] = {"max_new_tokens": 10, "do_sample": True, "top_k": 0, "temperature": 0.7, "seed": 5}


def places(method: str) -> tuple[str, str]:
    """Return the folders of a pair."""
    target, drafter, _ = PAIRS[method]
    return str(oracles.folder(f"targets/{target}")), str(oracles.folder(drafter))


@functools.cache
def original(method: str) -> Compiled:
    target, drafter = places(method)
    made = specc.compile(
        target, drafter, method=method, block=PAIRS[method][2], max_length=64, backend="eager"
    )
    made.usual_families = lambda: FAMILIES  # type: ignore[method-assign]  # what is called below
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("packages")


@functools.cache
def package(method: str, folder: Path) -> Path:
    path = folder / f"{method}.specc"
    original(method).save(path)
    return path


def prompt(method: str) -> torch.Tensor:
    """Return a prompt of the targets' own language, int64 [1, tokens]."""
    known = oracles.reference("eagle3-spec")
    return known["p0.ids"][: known.info["prompts"][0]["prompt_length"]][None]


@pytest.mark.parametrize("backend", ["eager", "native"])
@pytest.mark.parametrize("method", PAIRS)
def test_a_loaded_package_equals_what_saved_it(method: str, backend: str, folder: Path) -> None:
    loaded = load(package(method, folder), device="cpu", backend=backend)
    source = loaded.engine.builder
    assert isinstance(source, Package)
    info = original(method).engine.builder.drafter_info
    assert source.drafter_info is not None
    assert info is not None
    assert (source.drafter_info.method, source.drafter_info.taps) == (info.method, info.taps)
    for settings in (GREEDY, SEEDED):
        one, other = (
            c.generate(prompt(method), return_dict_in_generate=True, **settings)
            for c in (original(method), loaded)
        )
        assert torch.equal(one.sequences, other.sequences)
        assert one.stats.accepted == other.stats.accepted
        assert one.stats.drafted == other.stats.drafted > 0


@pytest.mark.slow
def test_a_loaded_package_through_inductor(folder: Path) -> None:
    loaded = load(package("dspark", folder), device="cpu", backend="inductor")
    one, other = (c.generate(prompt("dspark"), **GREEDY) for c in (original("dspark"), loaded))
    assert torch.equal(one, other)


@pytest.mark.parametrize("method", PAIRS)
def test_weights_are_there_once(method: str, folder: Path) -> None:
    """What a drafter shares with its target, an embedding or a head, is one tensor in the file."""
    weights = original(method).engine.builder.weights
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in weights.values()}
    assert package(method, folder).stat().st_size < 1.03 * sum(storages.values()) + 5e6


def test_a_packages_tree_is_the_one_it_was_saved_with(folder: Path) -> None:
    """Settings that the package has not met are judged along its tree, and states come from the path kept."""
    loaded = load(package("eagle3_tree", folder), device="cpu", backend="eager")
    assert loaded.engine.builder.tree(5) == original("eagle3_tree").engine.builder.tree(5)
    given = {**SEEDED, "top_p": 0.9, "repetition_penalty": 1.2, "output_hidden_states": True}
    one, other = (
        c.generate(prompt("eagle3_tree"), return_dict_in_generate=True, **given)
        for c in (original("eagle3_tree"), loaded)
    )
    assert torch.equal(one.sequences, other.sequences)
    for mine, theirs in zip(
        *(torch.utils._pytree.tree_leaves(r.hidden_states) for r in (one, other)), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("parents", "says"),
    [([0, 1, 2, 0, 0, 0], "6 drafts"), ([0, 0, 1, 9, 1], "draft 3 continues node 9"), ([], "0 drafts"), ([0.5], "tree"),
     ([0, 1, 2, 3, 4], "record")],
)  # fmt: skip
def test_a_wrong_tree_is_refused(folder: Path, tmp_path: Path, parents: list[Any], says: str) -> None:
    path = repack(
        package("eagle3_tree", folder), tmp_path / "x.specc", manifest=lambda m: m.update(tree=parents)
    )
    with pytest.raises(ArtifactError, match=says):
        load(path, device="cpu", backend="eager")


def test_a_tree_where_there_is_none_is_refused(folder: Path, tmp_path: Path) -> None:
    summary = inspect_package(package("eagle3_tree", folder)).to_dict()
    assert summary["tree"] == list(original("eagle3_tree").engine.builder.tree(5).parents)
    gone = repack(package("eagle3_tree", folder), tmp_path / "x.specc", manifest=lambda m: m.pop("tree"))
    with pytest.raises(ArtifactError, match=r"tree|record"):
        load(gone, device="cpu", backend="eager")
    more = repack(package("eagle3", folder), tmp_path / "y.specc", manifest=lambda m: m.update(tree=[0, 1]))
    with pytest.raises(ArtifactError, match="tree: found a tree, expected what method eagle3 drafts"):
        load(more, device="cpu", backend="eager")


@pytest.mark.parametrize("method", ["dspark", "mtp", "eagle3_tree"])
def test_verified_against_the_original(method: str, folder: Path) -> None:
    target, drafter = places(method)
    given = {"original": target, "drafter": drafter, "backend": "eager", "device": "cpu"}
    report = specc.verify(package(method, folder), [prompt(method)[0].tolist()], max_new_tokens=12, **given)
    assert report.is_lossless, report.render()
    assert report.divergences == ()
    assert report.weights is not None
    assert report.weights.different == ()
    held = load(package(method, folder), device="cpu", backend="eager").engine.builder.weights
    assert report.weights.missing == ()
    assert report.weights.equal == len(held)


def changed(source: str, folder: Path) -> Path:
    """Return a copy of a model's folder whose head says the token before each that it should."""
    for file in Path(source).iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights["lm_head.weight"].roll(-1, 0).contiguous()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_another_original_is_told(folder: Path, tmp_path: Path) -> None:
    target, _ = places("eagle3")
    given = {"original": str(changed(target, tmp_path)), "backend": "eager", "device": "cpu"}
    report = specc.verify(package("eagle3", folder), [[5, 9, 7]], max_new_tokens=2, **given)
    assert not report.is_lossless
    assert report.weights is not None
    assert len(report.weights.different) == 1
    assert "lm_head" in report.weights.different[0]
    assert [d.verdict for d in report.divergences] == ["bug"], "the text is that of another model"
    assert "from the original" in report.render()
    assert report.weights.missing, "the drafter's, as the original was given without one"
    assert "NOT the original" in report.render()
    assert json.loads(json.dumps(report.to_dict()))["weights"]["different"] == list(report.weights.different)


def test_only_what_is_compiled_has_an_original(folder: Path) -> None:
    target, drafter = places("eagle3")
    with pytest.raises(InputError, match="the model given is the original"):
        specc.verify(target, [[5, 9]], original=target, method="plain", backend="eager")
    with pytest.raises(InputError, match="drafter"):
        specc.verify(package("eagle3", folder), [[5, 9]], drafter=drafter)


@pytest.fixture
def invoke(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["specc", *arguments])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        return int(stop.value.code or 0), *capsys.readouterr()

    return run


def test_the_command_compares_with_the_original(
    invoke: Callable[..., Any], folder: Path, tmp_path: Path
) -> None:
    target, drafter = places("eagle3")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "one two three"}\n')
    asked = ["verify", str(package("eagle3", folder)), "--prompts", str(prompts), "--max-new-tokens", "4"]
    asked += ["--backend", "eager", "--device", "cpu"]
    status, out, _ = invoke(*asked, "--original", target, "--drafter", drafter)
    assert (status, "equal the original's" in out, "lossless" in out) == (0, True, True)
    place = tmp_path / "other"
    place.mkdir()
    status, out, _ = invoke(*asked, "--original", str(changed(target, place)))
    assert (status, "NOT the original" in out) == (1, True)
    status, _, err = invoke(*asked, "--drafter", drafter)
    assert (status, "--drafter: left out" in err) == (2, True)
    status, _, err = invoke("verify", target, "--original", target)
    assert (status, "is no package" in err) == (2, True)
