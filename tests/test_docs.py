"""What the documents show runs, and what they name is there."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from specc import contracts
from specc.pipeline import run_passes
from tests.toy import f32, run, targets, toy

ROOT = Path(__file__).resolve().parent.parent


def test_the_pass_of_writing_passes():
    text = (ROOT / "docs" / "writing_passes.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(code, "writing_passes.md", "exec"), names)

    def function(v):
        y = v["target.x"] * 2
        return {"twice": y.neg().neg(), "thrice": y.neg().neg().neg(), "input": v["target.x"].neg().neg()}

    graph = replace(toy(function, target__x=f32(3)), facts=frozenset({"one-graph"}))
    x = torch.randn(3)
    after, _ = run_passes(graph, (names["drop_double_negation"],))
    for name, value in function({"target.x": x}).items():
        assert torch.equal(run(after, target__x=x)[name], value), name
    assert targets(after).count("aten.neg.default") < 7


def test_files_that_documents_name_exist():
    for document in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]:
        for link in re.findall(r"\]\(([^)#:]+)\)", document.read_text()):
            assert (document.parent / link).exists(), (document.name, link)


def test_every_member_of_a_method_is_explained():
    text = (ROOT / "docs" / "writing_methods.md").read_text()
    members = [name for name in vars(contracts.Method) if not name.startswith("_")]
    assert len(members) > 8
    for name in members:
        assert re.search(rf"`{name}\b", text), name
