"""The commands on packages: run, inspect, and what a package does not let one choose."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from specc import cli
from tests.tiny import tiny_tokenizer
from tests.toy_source import VOCAB, toy_compiled

Invoke = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("package") / "toy.specc"
    toy_compiled(tokenizer=tiny_tokenizer(VOCAB)).save(path)
    return path


@pytest.fixture
def invoke(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Invoke:
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["specc", *arguments])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        return int(stop.value.code or 0), *capsys.readouterr()

    return run


def test_run_gives_the_saved_object_s_text(invoke: Invoke, saved: Path) -> None:
    asked = ["--prompt", "w8 w9", "--max-new-tokens", "8", "--backend", "eager", "--device", "cpu"]
    status, out, _ = invoke("run", str(saved), *asked)
    assert status == 0
    compiled = toy_compiled(tokenizer=tiny_tokenizer(VOCAB))
    ids = compiled.tokenizer.apply_chat_template(
        [{"role": "user", "content": "w8 w9"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )["input_ids"]
    answer = compiled.generate(ids, max_new_tokens=8)[0, ids.shape[1] :]
    assert out.strip() == compiled.tokenizer.decode(answer, skip_special_tokens=True).strip()
    again = invoke(
        "run", str(saved), *asked, "--sha256", hashlib.sha256(saved.read_bytes()).hexdigest(), "--json"
    )
    assert json.loads(again[1])["text"].strip() == out.strip()


def test_inspect(invoke: Invoke, saved: Path) -> None:
    status, out, _ = invoke("inspect", str(saved), "--json")
    assert status == 0
    assert json.loads(out)["method"] == "ngram"
    status, out, _ = invoke("inspect", str(saved), "--stage", "verify")
    assert status == 0
    assert "specc.attend" in out
    assert "weights.safetensors" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "{}", "--prompt", "a", "--method", "ngram"], "--method: left out: {} has its own"),
        (["run", "{}", "--prompt", "a", "--block", "4"], "--block: left out"),
        (["run", "{}", "--prompt", "a", "--sha256", "0" * 64], "{}: sha256 of the file"),
        (["run", "{}", "--prompt", "a", "--sha256", "00"], "sha256: 64 hexadecimal digits"),
        (["run", "smollm2-135m", "--prompt", "a", "--sha256", "0" * 64], "MODEL: a .specc package"),
        (["run", "smollm2-135m", "--prompt", "a", "--native-only"], "MODEL: a .specc package"),
        (["run", "{}", "--prompt", " "], "--prompt: a text that is not empty"),
        (["run", "{}", "--prompt", "a", "--max-new-tokens", "-3"], "--max-new-tokens: 0 or more"),
        (["run", "{}", "--prompt", "a", "--top-p", "2"], "top_p"),
        (["export", "smollm2-135m", "-o", "nofolder/x.specc"], "--output: a file in a folder that exists"),
        (["export", "smollm2-135m", "-o", "{}"], "--output: a new file"),
        (["run", "{}", "--prompt", "a", "--native-only"], "{}: native: found none"),
        (["run", "{}x.specc", "--prompt", "a"], "{}x.specc: file: found no file"),
        (["inspect", "{}", "--batch", "2"], "--batch: left out"),
        (["inspect", "{}", "--stage", "verfy"], "did you mean 'verify'?"),
    ],
)
def test_wrong_requests(invoke: Invoke, saved: Path, arguments: list[str], message: str) -> None:
    status, _, err = invoke(*(a.format(saved) for a in arguments))
    assert status == 2
    assert message.format(saved) in err
    assert "Traceback" not in err
