"""Every example runs, on tiny models, and greedy ones print what transformers generates."""

from __future__ import annotations

import ast
import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from tests import oracles

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
# Example -> target, drafter, and whether it is greedy.
RUNS = {
    "plain": ("llama", None, True),
    "ngram": ("llama", None, True),
    "draft_model": ("llama", "drafters/draft-llama", False),
    "eagle3": ("llama", "drafters/eagle3-spec", True),
    "eagle3_tree": ("llama", "drafters/eagle3-spec", True),
    "mtp": ("glm4moe-mtp1", None, True),
    "dflash": ("qwen3", "drafters/dflash-zlab", True),
    "dspark": ("llama", "drafters/dspark-spec-vanilla", True),
    "dflash2": ("qwen3", "drafters/dflash2-zlab", False),
    "own_method": ("llama", None, True),
}
TOKENS = 12


def names() -> list[str]:
    return sorted(path.stem for path in EXAMPLES.glob("*.py"))


def prompt_of(target: str) -> tuple[str, torch.Tensor]:
    """Return text in the target's own language, and its ids."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(oracles.folder(f"targets/{target}"))
    known = oracles.reference(
        {"qwen3": "dflash-zlab", "glm4moe-mtp1": "mtp-glm4moe-mtp1"}.get(target, "eagle3-spec")
    )
    ids = known["p0.ids"][: known.info["prompts"][0]["prompt_length"]]
    text = tokenizer.decode(ids, skip_special_tokens=True)
    return text, tokenizer(text, return_tensors="pt")["input_ids"]


def test_every_example_is_run() -> None:
    assert names() == sorted(RUNS)


@pytest.mark.parametrize("name", names())
def test_an_example_imports_only_specc(name: str) -> None:
    tree = ast.parse((EXAMPLES / f"{name}.py").read_text())
    tops = {
        alias.name.split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    tops |= {str(node.module).split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    allowed = {"specc", "torch"} if name == "own_method" else {"specc"}  # a method is made of tensors
    assert tops - allowed <= set(sys.stdlib_module_names)


@pytest.mark.parametrize("name", sorted(RUNS))
def test_an_example_runs(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target, drafter, is_greedy = RUNS[name]
    text, ids = prompt_of(target)
    arguments = [
        str(oracles.folder(f"targets/{target}")),
        *([str(oracles.folder(drafter))] if drafter else []),
    ]
    arguments += ["--prompt", text, "--tokens", str(TOKENS), "--backend", "eager"]
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments])
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main()
    out = capsys.readouterr().out
    assert "tokens per step" in out
    if is_greedy:
        from transformers import AutoTokenizer

        expected = oracles.target(target).generate(ids, max_new_tokens=TOKENS, do_sample=False)
        tokenizer = AutoTokenizer.from_pretrained(oracles.folder(f"targets/{target}"))
        assert tokenizer.decode(expected[0]) in out
