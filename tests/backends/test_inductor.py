"""Inductor gives eager's text, compiles each unit once, and nothing that follows compiles again."""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor.utils import run_and_get_code

from specc.backends.inductor import Inductor
from specc.runtime.compiled import Compiled
from tests.rig import Rig, generate, own_text, padded

pytestmark = pytest.mark.slow  # each unit takes seconds to compile

COUNT = 12
CAPACITY = 59  # 60 cache rows: a number that no other tensor's shape has
FEW: dict[str, Any] = {"vocab_size": 16}
SMALL: dict[str, dict[str, Any]] = {
    "llama": {**FEW, "num_hidden_layers": 1},
    "gemma2": {**FEW, "num_hidden_layers": 2, "layer_types": ("sliding_attention", "full_attention")},
    "qwen3_moe": {**FEW, "num_hidden_layers": 1, "mlp_only_layers": ()},
}
# Two shapes in all; the models of one shape share a backend, and so the units that are equal.
SHAPES = {"llama": (2, 2), "gemma2": (1, 3), "qwen3_moe": (1, 3)}  # slots, block
PROMPTS = [[5, 9, 5, 9, 7], [4, 12, 3, 3, 8, 4, 12, 3, 11, 6, 4, 12], [13]]
OTHERS = [
    [3],
    [15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 3, 4, 5, 6, 7, 8, 9, 10],
    [8, 8, 8],
    [4, 5, 4, 5, 4],
]
SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 0.8, "top_k": 0, "seed": 3}


@functools.cache
def backend(slots: int, block: int) -> Inductor:
    return Inductor()


@functools.cache
def engine(arch: str, name: str) -> Rig:
    slots, block = SHAPES[arch]
    chosen = backend(slots, block) if name == "inductor" else None
    return Rig(arch, "ngram", slots=slots, capacity=CAPACITY, feed=8, backend=chosen, overrides=SMALL[arch])


@functools.cache
def codes(arch: str) -> list[str]:
    """Run the engine for the first time, and return the code that was generated for it."""
    compiled = engine(arch, "inductor").at(SHAPES[arch][1])
    with torch._inductor.config.patch(force_disable_caches=True):
        _, made = run_and_get_code(lambda: generate(compiled, PROMPTS, COUNT))
    return list(made)


def at(arch: str, name: str = "inductor") -> Compiled:
    if name == "inductor":
        codes(arch)
    return engine(arch, name).at(SHAPES[arch][1])


def compilations(arch: str) -> tuple[int, int, dict[str, int]]:
    """Return what has been compiled so far: specc's units, its steps, and torch's own count."""
    compiled = at(arch)
    return len(backend(*SHAPES[arch]).compiled), len(compiled.engine.compiles), dict(counters["inductor"])


@pytest.mark.parametrize("arch", SHAPES)
def test_equals_eager_and_transformers(arch):
    assert generate(at(arch), PROMPTS, COUNT) == own_text(arch, PROMPTS, COUNT, SMALL[arch])
    settings: dict[str, Any] = {"max_new_tokens": COUNT, "return_dict_in_generate": True}
    found, expected = (
        at(arch, name).generate(*padded(PROMPTS), **settings) for name in ("inductor", "eager")
    )
    assert torch.equal(found.sequences, expected.sequences)
    assert found.stats.accepted == expected.stats.accepted
    assert found.stats.drafted == expected.stats.drafted > 0


@pytest.mark.parametrize("arch", SHAPES)
def test_nothing_is_compiled_again(arch):
    generate(at(arch), PROMPTS, COUNT)
    before = compilations(arch)
    assert before[0] > 0
    with torch.compiler.set_stance("fail_on_recompile"):
        for prompts in (OTHERS, OTHERS[:1], PROMPTS[::-1]):
            for count in (1, 2, COUNT + 1):
                expected = own_text(arch, prompts, count, SMALL[arch])
                assert generate(at(arch), prompts, count, seed=count) == expected
    assert compilations(arch) == before


def test_a_new_family_compiles_the_accept_unit_alone():
    generate(at("llama"), PROMPTS, COUNT)
    kept = list(backend(*SHAPES["llama"]).compiled)
    found = generate(at("llama"), PROMPTS, COUNT, **SAMPLED)
    new = [text for text in backend(*SHAPES["llama"]).compiled if text not in kept]
    assert len(new) == 2, "one tail for prompts, one for drafts"
    assert not any("specc.attend" in text or "specc.put" in text for text in new)
    assert found == generate(at("llama", "eager"), PROMPTS, COUNT, **SAMPLED)
    before = compilations("llama")
    with torch.compiler.set_stance("fail_on_recompile"):
        for temperature, seed in ((0.3, 1), (1.7, 2), (0.8, 99)):
            given = {**SAMPLED, "temperature": temperature, "seed": seed}
            assert generate(at("llama"), OTHERS, COUNT, **given) == generate(
                at("llama", "eager"), OTHERS, COUNT, **given
            )
    assert compilations("llama") == before


@pytest.mark.parametrize("arch", SHAPES)
def test_no_cache_is_copied(arch):
    """The generated code allocates nothing of a cache's shape: it writes into the caches it is given."""
    shapes = {tuple(t.shape) for t in at(arch).engine.state.cache.values()}
    rows = CAPACITY + 1
    assert all(shape[2] == rows for shape in shapes)
    made = [
        line for code in codes(arch) for line in code.splitlines() if re.search(r"empty_strided\w*\(", line)
    ]
    assert made
    assert not [line for line in made if re.search(rf"\(\d+, \d+, {rows}, \d+\)", line)]
    assert any(str(shape)[1:-1] in code for shape in shapes for code in codes(arch)), "no code takes a cache"
