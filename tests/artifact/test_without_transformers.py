"""A package of a real model runs where transformers cannot be imported, and gives the same tokens."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import specc
from specc.models.load import load_target
from tests.tiny import noisy_copy, tiny_model, tiny_tokenizer

ROOT = Path(__file__).resolve().parent.parent.parent
GREEDY: dict[str, Any] = {"max_new_tokens": 12}
SEEDED: dict[str, Any] = {"max_new_tokens": 12, "do_sample": True, "seed": 11, "temperature": 0.9}

# Run in another process, in a folder that has nothing of the tests.
CODE = """
import importlib.abc, json, sys

class Blocked(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "transformers":
            raise ImportError("transformers is blocked here: " + name)

sys.meta_path.insert(0, Blocked())
sys.modules["transformers"] = None

import specc
import torch

path, calls = sys.argv[1], json.loads(sys.argv[2])
compiled = specc.load(path, device="cpu", backend="eager")
tokenizer = compiled.tokenizer
given = tokenizer("w9 w8 w7 w9 w8", return_tensors="pt", add_special_tokens=False)
chat = tokenizer.apply_chat_template(
    [{"role": "user", "content": "w9 w8"}], add_generation_prompt=True, return_tensors="pt"
)
out = [compiled.generate(**given, **call).tolist() for call in calls]
out += [compiled.generate(**chat, **call).tolist() for call in calls]
text = tokenizer.decode(out[0][0])
loaded = sorted(name for name in sys.modules if sys.modules[name] is not None and (
    name.startswith(("transformers", "specc.checkpoints"))
    or name in ("specc.api", "specc.build", "specc.trace", "specc.models.load", "specc.pairing")
))
print(json.dumps({"out": out, "text": text, "loaded": loaded}))
"""


def run_elsewhere(path: Path, calls: list[dict[str, Any]], folder: Path) -> Any:
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(path), json.dumps(calls)],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(("arch", "method"), [("llama", "draft_model"), ("mixtral", "ngram")])
def test_tokens_equal_without_transformers(arch: str, method: str, tmp_path: Path) -> None:
    model = tiny_model(arch, num_hidden_layers=1)
    tokenizer = tiny_tokenizer()
    drafter = noisy_copy(model) if method == "draft_model" else None
    compiled = specc.compile(
        load_target(model), drafter, method=method, block=2, backend="eager", max_length=48
    )
    compiled.tokenizer = tokenizer
    compiled.usual_families = lambda: (("temperature", "top_k"),)  # type: ignore[method-assign]  # what is called below
    path = tmp_path / "x.specc"
    compiled.save(path)

    weights = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
        for t in compiled.engine.builder.weights.values()
    }
    assert path.stat().st_size < 1.03 * sum(weights.values()) + 5e6

    found = run_elsewhere(path, [GREEDY, SEEDED], tmp_path)
    assert found["loaded"] == []
    plain = tokenizer("w9 w8 w7 w9 w8", return_tensors="pt", add_special_tokens=False)["input_ids"]
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "w9 w8"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )["input_ids"]
    expected = [compiled.generate(ids, **call) for ids in (plain, chat) for call in (GREEDY, SEEDED)]
    assert [torch.tensor(out).tolist() for out in found["out"]] == [out.tolist() for out in expected]
    assert found["text"] == tokenizer.decode(expected[0][0])
