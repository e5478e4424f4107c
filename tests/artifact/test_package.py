"""Packages of a toy: the same tokens, the same bytes, one typed error for whatever is wrong."""

from __future__ import annotations

import hashlib
import json
import logging
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from specc.artifact import save as save_module
from specc.artifact.fields import write_json
from specc.artifact.manifest import FORMAT_VERSION
from specc.artifact.package import Package, open_package
from specc.errors import ArtifactError, InputError, InvariantError, UnknownNameError, UnsupportedError
from specc.loading import inspect_package, load
from specc.runtime.compiled import Compiled
from tests.packages import Files, edit_json, pack, repack, unpack
from tests.tiny import tiny_tokenizer
from tests.toy_source import VOCAB, toy_compiled

ROOT = Path(__file__).resolve().parent.parent.parent
CPU = torch.device("cpu")
PROMPTS = torch.tensor([[5, 6, 7, 8], [2, 3, 4, 5]])
WEIGHTS = "weights.safetensors"


@pytest.fixture(scope="module")
def compiled() -> Compiled:
    return toy_compiled(2, tokenizer=tiny_tokenizer(VOCAB))


@pytest.fixture(scope="module")
def saved(compiled: Compiled, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("package") / "toy.specc"
    compiled.save(path)
    return path


@pytest.fixture(scope="module")
def loaded(saved: Path) -> Compiled:
    return load(saved, device="cpu", backend="eager")


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"do_sample": True, "seed": 3, "top_k": 0},
        {"do_sample": True, "seed": 3, "top_k": 0, "accept": "coupled"},
        {"do_sample": True, "seed": 4, "top_k": 5},  # a family that the package does not hold
        {"repetition_penalty": 1.4},
    ],
    ids=["greedy", "seeded", "coupled", "other-family", "processor"],
)
def test_tokens_equal_the_saving_object_s(compiled: Compiled, loaded: Compiled, settings: Any) -> None:
    one = compiled.generate(PROMPTS, max_new_tokens=20, **settings)
    assert torch.equal(loaded.generate(PROMPTS, max_new_tokens=20, **settings), one)


def test_slots_that_are_refilled_while_others_draft(compiled: Compiled, loaded: Compiled) -> None:
    requests = [
        (n, {"input_ids": torch.arange(2, 4 + 3 * n) % VOCAB, "max_new_tokens": 9 - n}) for n in range(5)
    ]
    one, other = (list(c.stream(iter(requests))) for c in (compiled, loaded))
    assert other == one
    assert {(2, 8)} <= {(k.block, k.feed) for k in loaded.engine._runners}


def test_a_user_s_processor_runs_on_the_host(compiled: Compiled, loaded: Compiled) -> None:
    def no_eights(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.index_fill(1, torch.tensor([8]), float("-inf"))

    one, other = (
        c.generate(PROMPTS, max_new_tokens=9, logits_processor=[no_eights]) for c in (compiled, loaded)
    )
    assert torch.equal(one, other)
    assert not (one[:, 4:] == 8).any()


def test_logits_and_hidden_states_equal(compiled: Compiled, loaded: Compiled) -> None:
    wanted = {"output_logits": True, "output_hidden_states": True, "return_dict_in_generate": True}
    one, other = (c.generate(PROMPTS, max_new_tokens=6, **wanted) for c in (compiled, loaded))
    for made, again in ((one.logits, other.logits), (one.hidden_states, other.hidden_states)):
        assert len(made) == len(again) == 6
        assert all(torch.equal(a, b) for a, b in zip(made, again, strict=True))


def test_a_loaded_object_is_what_was_saved(compiled: Compiled, loaded: Compiled) -> None:
    for name in ("block", "accept", "batch", "max_length", "generation_defaults"):
        assert getattr(loaded, name) == getattr(compiled, name)
    assert loaded.method.name == "ngram"
    assert loaded.inspect().graph == compiled.inspect().graph
    package = loaded.engine.builder
    assert isinstance(package, Package)
    package.check()


def test_weights_are_there_once_and_mapped(saved: Path, loaded: Compiled) -> None:
    weights = loaded.engine.builder.weights
    assert set(weights) == {
        "target.embed.weight",
        "target.mix.weight",
        "target.scale",
    }  # the head is the embedding
    assert saved.stat().st_size < 1.03 * sum(t.nbytes for t in weights.values()) + 5e6
    before = hashlib.sha256(saved.read_bytes()).hexdigest()
    weights["target.mix.weight"].add_(1)
    assert hashlib.sha256(saved.read_bytes()).hexdigest() == before
    weights["target.mix.weight"].sub_(1)


def test_saving_a_loaded_package_gives_the_same_bytes(saved: Path, tmp_path: Path) -> None:
    again = load(saved, device="cpu", backend="eager")
    again.usual_families = lambda: (("temperature",),)  # type: ignore[method-assign]  # as when it was saved
    again.save(tmp_path / "again.specc")
    assert (tmp_path / "again.specc").read_bytes() == saved.read_bytes()


def test_two_processes_write_the_same_bytes(saved: Path, tmp_path: Path) -> None:
    code = """
import sys
from pathlib import Path
from tests.tiny import tiny_tokenizer
from tests.toy_source import VOCAB, toy_compiled
toy_compiled(2, tokenizer=tiny_tokenizer(VOCAB)).save(Path(sys.argv[1]))
"""
    path = tmp_path / "other.specc"
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], cwd=ROOT,
        env={"PYTHONHASHSEED": "77", "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert path.read_bytes() == saved.read_bytes()


def test_nothing_of_this_machine_is_in_a_package(saved: Path) -> None:
    content = saved.read_bytes()
    assert str(ROOT).encode() not in content
    assert str(Path.home()).encode() not in content


# Saving


def test_a_file_is_not_replaced_unless_asked(compiled: Compiled, tmp_path: Path) -> None:
    path = tmp_path / "x.specc"
    path.write_text("precious")
    with pytest.raises(InputError, match="--force"):
        compiled.save(path)
    assert path.read_text() == "precious"
    compiled.save(path, force=True)
    assert list(tmp_path.iterdir()) == [path]
    assert load(path, device="cpu", backend="eager").block == compiled.block


def test_a_failure_in_the_middle_leaves_the_old_file(
    compiled: Compiled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.specc"
    path.write_text("old")

    def break_off(_: object) -> Any:
        yield b"half"
        assert path.read_text() == "old"
        raise KeyboardInterrupt

    monkeypatch.setattr(save_module, "write_weights", break_off)
    with pytest.raises(KeyboardInterrupt):
        compiled.save(path, force=True)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_came_in_the_meantime_is_kept(
    compiled: Compiled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.specc"

    def race(weights: Any) -> Any:
        path.write_text("another's")
        yield from ()

    monkeypatch.setattr(save_module, "write_weights", race)
    with pytest.raises(InputError, match="--force"):
        compiled.save(path)
    assert path.read_text() == "another's"


def test_refusals_of_saving(compiled: Compiled, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="a folder that exists"):
        compiled.save(tmp_path / "no" / "x.specc")
    assert list(tmp_path.iterdir()) == []


# Loading


def test_the_file_s_own_sum_can_be_asked_for(saved: Path) -> None:
    digest = hashlib.sha256(saved.read_bytes()).hexdigest()
    assert load(saved, device="cpu", backend="eager", sha256=digest.upper()).block == 2
    with pytest.raises(ArtifactError, match="sha256 of the file: found"):
        load(saved, device="cpu", backend="eager", sha256="0" * 64)


def test_native_only_refuses_a_portable_package(saved: Path) -> None:
    with pytest.raises(ArtifactError, match="native: found none"):
        load(saved, device="cpu", native_only=True)


def test_what_differs_from_the_saving_machine_is_said(
    saved: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def older(manifest: Any) -> None:
        manifest["torch"] = "2.0.1"
        manifest["made_on"] = {"kind": "cuda", "name": "A card", "capability": "sm_80"}

    path = repack(saved, tmp_path / "x.specc", manifest=older)
    with caplog.at_level(logging.INFO, logger="specc"):
        load(path, device="cpu", backend="eager")
    said = next(m for m in caplog.messages if "lowered again" in m)
    assert "saved with A card" in said
    assert "saved with sm_80" in said
    assert "saved with 2.0.1" in said


def test_inspection_reads_no_weights(saved: Path, tmp_path: Path) -> None:
    summary = inspect_package(saved).to_dict()
    assert json.loads(json.dumps(summary)) == summary
    assert (summary["method"], summary["block"], summary["slots"], summary["model"]) == ("ngram", 2, 2, "toy")
    assert summary["settings"] == ["greedy", "temperature"]
    assert summary["memory"]["weights"] == VOCAB * 8 * 4 + 8 * 8 * 4 + 16
    assert {s["stage"] for s in summary["stages"]} == {"draft", "verify", "accept", "commit"}
    read = inspect_package(saved)
    assert "specc.attend" in read.render("verify")
    assert read.render().count("return ") == 4
    with pytest.raises(UnknownNameError, match="verify"):
        read.render("verfy")
    broken = repack(saved, tmp_path / "x.specc", files=flip(WEIGHTS), honest=False)
    assert inspect_package(broken).manifest.files == inspect_package(saved).manifest.files


def flip(name: str) -> Callable[[Files], None]:
    def change(files: Files) -> None:
        found = next(n for n in files if n.startswith(name))
        content = bytearray(files[found])
        content[len(content) // 2] ^= 1
        files[found] = bytes(content)

    return change


def drop(name: str) -> Callable[[Files], None]:
    return lambda files: files.pop(next(n for n in files if n.startswith(name))) and None


def put(**values: Any) -> Callable[[Any], None]:
    return lambda manifest: manifest.update(values)


def within(*place: Any, **values: Any) -> Callable[[Any], None]:
    def change(manifest: Any) -> None:
        for step in place:
            manifest = manifest[step]
        manifest.update(values)

    return change


MANIFEST_FAULTS: list[tuple[Callable[[Any], object], str]] = [
    (put(format="other"), "manifest.json.format: found 'other'"),
    (
        put(format_version=FORMAT_VERSION + 1),
        f"format_version: found {FORMAT_VERSION + 1}, expected a whole number",
    ),
    (put(format_version=True), "format_version"),
    (put(torch="99.1.0"), "torch: found 99.1.0, by which the package was saved, expected at most"),
    (put(torch="3.0.0"), "torch"),
    (put(specc="7.1.0"), "specc: found 7.1.0"),
    (put(surprise=1), "manifest.json.surprise: found a field this version does not know"),
    (lambda m: m.pop("method"), "manifest.json.method: found nothing"),
    (put(method=3), "manifest.json.method: found 3"),
    (put(block=-1), "manifest.json.block"),
    (put(block=1.0), "manifest.json.block"),
    (put(accept="mixed"), "manifest.json.accept"),
    (put(native={"library": "x.so"}), "manifest.json.native.key: found nothing"),
    (put(feed=16), "feed 8, expected 0 or 16"),
    (within("shape", slots=0), "manifest.json.shape.slots"),
    (within("shape", slots=3), "found"),
    (within("shape", more=1), "manifest.json.shape.more"),
    (within("model", dtype="int8"), "manifest.json.model.dtype"),
    (within("made_on", kind="abacus"), "manifest.json.made_on.kind"),
    (within("state", "state.length", shape=[3]), "state.length: found I64[2], expected I64[3]"),
    (lambda m: m["state"].pop("cache.key.0"), "cache.key.0"),
    (within("weights", "target.mix.weight", shape=[8, 9]), "target.mix.weight"),
    (within("weights", "target.mix.weight", dtype="F16"), "target.mix.weight"),
    (lambda m: m["weights"].pop("target.scale"), "target.scale"),
    (within("weights", extra={"dtype": "F32", "shape": [1]}), "extra"),
    (within("stages", 0, file="../../etc/passwd"), "a file of the package"),
    (within("stages", 0, stage="verify"), "stage: found"),
    (within("stages", 0, "key", rule="fair"), "key.rule"),
    (lambda m: m["stages"][-1]["key"].update(families=["no_such"]), "no_such"),
    (lambda m: m.update(stages=[s for s in m["stages"] if s["stage"] != "verify"]), "an earlier stage makes"),
    (within("files", WEIGHTS, size_bytes=10), f"size of {WEIGHTS}"),
    (within("files", WEIGHTS, sha256="0" * 64), f"sha256 of {WEIGHTS}"),
    (within("files", WEIGHTS, sha256="xyz"), "64 hexadecimal digits"),
    (lambda m: m["files"].pop(WEIGHTS), f"file {WEIGHTS}: found in the package only"),
    (
        within("files", **{"more.bin": {"sha256": "0" * 64, "size_bytes": 1}}),
        "more.bin: found in the manifest only",
    ),
    # Right each for itself, and not together.
    (within("shape", capacity=33), "state.tokens"),
    (within("shape", capacity=1 << 20), "shape.capacity"),
    (within("model", vocab=5000), "manifest.json.shape.vocab"),
    (within("model", max_position=1), "manifest.json.shape.capacity"),
    (put(stages=[]), "manifest.json.stages: found no draft stage"),
    (put(block=5), "manifest.json.stages: found no draft stage of block 5"),
    (put(families=[["nope"]]), "manifest.json.families"),
    (put(method=""), "manifest.json.method"),
    (put(method="dspark"), "manifest.json.drafter: found none"),
    (put(taps=[99]), "manifest.json.taps"),
    (put(generation={"eos_token_id": "x"}), "manifest.json.generation.eos_token_id"),
    (put(generation={"max_length": -3}), "manifest.json.generation.max_length"),
    (put(generation={"top_p": 2.0, "do_sample": True}), "manifest.json.generation.top_p"),
]


@pytest.mark.parametrize(("change", "says"), MANIFEST_FAULTS, ids=[says for _, says in MANIFEST_FAULTS])
def test_manifest_faults(saved: Path, tmp_path: Path, change: Callable[[Any], None], says: str) -> None:
    refused(repack(saved, tmp_path / "x.specc", manifest=change), says)


def refused(path: Path, says: str) -> None:
    with pytest.raises(ArtifactError) as caught:
        load(path, device="cpu", backend="eager")
    assert says in str(caught.value)
    assert str(path) in str(caught.value)
    assert (caught.value.field, caught.value.found is not None, caught.value.expected is not None)[1:] == (
        True,
        True,
    )


@pytest.mark.parametrize("name", [WEIGHTS, "graph.txt", "graphs/accept", "tokenizer/tokenizer.json"])
def test_a_changed_byte_in_a_file(saved: Path, tmp_path: Path, name: str) -> None:
    refused(repack(saved, tmp_path / "x.specc", files=flip(name), honest=False), f"sha256 of {name}")


@pytest.mark.parametrize("name", [WEIGHTS, "graphs/verify", "tokenizer/config.json"])
def test_a_missing_file(saved: Path, tmp_path: Path, name: str) -> None:
    refused(repack(saved, tmp_path / "x.specc", files=drop(name), honest=False), f"file {name}")


def test_a_file_too_many(saved: Path, tmp_path: Path) -> None:
    path = repack(saved, tmp_path / "x.specc", files=lambda f: f.update({"extra.so": b"code"}), honest=False)
    refused(path, "file extra.so: found in the package only")


def test_no_weights_at_all(saved: Path, tmp_path: Path) -> None:
    refused(repack(saved, tmp_path / "x.specc", files=drop(WEIGHTS)), f"file {WEIGHTS}: found nowhere")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"", "no JSON"),
        (b"[1]", "found list, expected an object"),
        (b"{" * 100_000, "no JSON"),
        (b"[" * 100_000, "no JSON"),
        (b'{"a": 1, "a": 2}', "stands twice"),
        (b'{"a": NaN}', "NaN is not a JSON number"),
        (b'{"format": "\xff"}', "no JSON"),
    ],
)
def test_a_manifest_that_is_none(saved: Path, tmp_path: Path, text: bytes, says: str) -> None:
    refused(pack(tmp_path / "x.specc", unpack(saved) | {"manifest.json": text}), says)


def test_no_manifest(saved: Path, tmp_path: Path) -> None:
    files = unpack(saved)
    del files["manifest.json"]
    refused(pack(tmp_path / "x.specc", files), "manifest.json: found no such file")


def test_an_oversized_manifest(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specc.artifact.fields.MAX_BYTES", 1000)
    refused(saved, "bytes, expected at most 1000")


def test_order_of_checks(saved: Path, tmp_path: Path) -> None:
    """The first fault in order is the one that is told: format version, files, versions, contents."""

    def all_wrong(manifest: Any) -> None:
        manifest.update(format_version=9, torch="99.0.0", method=3)
        manifest["files"][WEIGHTS]["sha256"] = "0" * 64

    order: list[tuple[str, Callable[[Any], None]]] = [
        ("format_version", put(format_version=FORMAT_VERSION)),
        (f"sha256 of {WEIGHTS}", lambda m: m["files"].pop(WEIGHTS)),
        ("torch", put(torch="2.0.0")),
        ("method", put(method="ngram")),
    ]
    path = repack(saved, tmp_path / "0.specc", manifest=all_wrong)
    for index, (says, mend) in enumerate(order):
        refused(path, says)
        honest = json.loads(unpack(saved)["manifest.json"])["files"][WEIGHTS]

        def mended(manifest: Any, mend: Any = mend, honest: Any = honest) -> None:
            mend(manifest)
            manifest["files"].setdefault(WEIGHTS, honest)

        path = repack(path, tmp_path / f"{index + 1}.specc", manifest=mended, honest=False)
    assert load(path, device="cpu", backend="eager").block == 2


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("graphs/accept", lambda g: g.update(operators=["aten.from_file.default"] * 40), "from_file"),
        ("graphs/accept", lambda g: g["outputs"].pop(), "record"),
        ("graphs/verify", lambda g: g["outputs"][0].update(name="verify.other"), "verify.logits"),
        ("graphs/draft", lambda g: g.update(stage="commit"), "stage: found"),
        ("tokenizer/config", lambda c: c.update(cleans_spaces="no"), "cleans_spaces"),
        ("tokenizer/config", lambda c: c.update(auto_map="x"), "auto_map"),
        ("tokenizer/config", lambda c: c.update(special_tokens={"eos_token": 7}), "special_tokens.eos_token"),
        ("tokenizer/config", lambda c: c.update(chat_template=7), "chat_template"),
        ("tokenizer/tokenizer", lambda t: t.update(model={"type": "Spell"}), "the tokenizers library"),
    ],
)  # fmt: skip
def test_honest_sums_over_wrong_contents(
    saved: Path, tmp_path: Path, name: str, change: Callable[[Any], None], says: str
) -> None:
    refused(repack(saved, tmp_path / "x.specc", files=edit_json(name, change)), says)


def test_a_graph_that_reads_well_and_does_not_work_is_the_file_s_fault(saved: Path, tmp_path: Path) -> None:
    def wrong(graph: Any) -> None:
        graph["nodes"][0] = [graph["nodes"][0][0], []]

    package = open_package(repack(saved, tmp_path / "x.specc", files=edit_json("graphs/verify", wrong)), CPU)
    with pytest.raises(ArtifactError, match="arguments that it takes"):
        package.check()


def test_bytes_changed_anywhere(saved: Path, tmp_path: Path) -> None:
    """One byte, anywhere: contents, padding, names, sizes, manifest."""
    content = saved.read_bytes()
    chosen = random.Random(0).sample(range(len(content)), 60)
    path = tmp_path / "x.specc"
    for index in chosen:
        changed = bytearray(content)
        changed[index] ^= 1 << (index % 8)
        path.write_bytes(changed)
        with pytest.raises(ArtifactError):
            load(path, device="cpu", backend="eager")


def test_truncated_anywhere(saved: Path, tmp_path: Path) -> None:
    content = saved.read_bytes()
    path = tmp_path / "x.specc"
    for length in [0, 1, 97, 98, *random.Random(1).sample(range(len(content)), 40), len(content) - 1]:
        path.write_bytes(content[:length])
        with pytest.raises(ArtifactError):
            load(path, device="cpu", backend="eager")


def test_other_files(tmp_path: Path) -> None:
    path = tmp_path / "x.specc"
    for content in (b"not a package", b"PK\x05\x06" + b"\0" * 200, write_json({"format": "specc package"})):
        path.write_bytes(content)
        with pytest.raises(ArtifactError):
            load(path, device="cpu", backend="eager")


def test_a_stage_that_is_not_held_is_named(loaded: Compiled) -> None:
    from specc.step import StepKey

    with pytest.raises(
        UnsupportedError, match=r"draft stage of block 5.*\n.*it holds block 0, feed 0; .*block 2"
    ):
        loaded.engine.builder.step(StepKey(5, 0, "ratio"))
    assert not issubclass(UnsupportedError, InvariantError)
