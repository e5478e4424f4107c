"""EAGLE-3's tree: its drafts against chains of the same drafter, its text and counts against the chain's."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import specc
from specc.backends.eager import Eager
from specc.build import Drafter, StepBuilder, make_target
from specc.contracts import DrafterInfo, DraftsTree, ModelInfo
from specc.errors import UnsupportedError
from specc.methods import METHODS
from specc.methods.eagle3 import Eagle3
from specc.methods.eagle3_tree import Eagle3Tree
from specc.runtime.engine import Engine
from specc.runtime.scheduler import Request, Scheduler
from specc.runtime.stats import Stats
from specc.step import Shape
from specc.tree import Tree
from tests import automaton, oracles
from tests.methods.harness import GreedyDraw, model_info
from tests.methods.test_eagle3 import driver_of, load, random_drafter, random_text

SHAPE = Tree((0, 0, 0, 1, 1, 2, 4, 4, 7, 5))
NEW = 48


@dataclass(frozen=True)
class Shaped(Eagle3Tree):
    """A tree of a shape that a test chooses."""

    copies: int | None = 0
    shape: Tree = SHAPE

    def tree(self, block: int) -> Tree:
        return self.shape


class Forced(GreedyDraw):
    """Draws given tokens, whatever the logits say."""

    def __init__(self, tokens: Tensor) -> None:
        super().__init__()
        self._given = tokens  # [slots, block]

    def __call__(self, logits: Tensor, index: int, ids: Tensor | None = None) -> Tensor:
        super().__call__(logits, index, ids)
        return self._given[:, index]


def lines(tree: Tree) -> list[list[int]]:
    """Return the nodes from the root to every leaf."""
    found = []
    for leaf in range(1, tree.nodes):
        if not tree.children[leaf]:
            line, at = [], leaf
            while at:
                line.insert(0, at)
                at = tree.parents[at - 1]
            found.append(line)
    return found


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("changes", [{}, {"carry": "post", "fc_norm": True}], ids=["plain", "flags"])
def test_every_node_drafts_what_a_chain_would_after_its_path(layers, changes):
    drafter = random_drafter(layers, **changes)
    driver = driver_of(drafter, slots=2, block=SHAPE.nodes - 1)
    texts = [random_text(2), random_text(3, prompt=5)]
    for slot, text in enumerate(texts):
        driver.prefill(slot, text)
    with torch.no_grad():
        drafts = Eagle3Tree(copies=0).draft(replace(driver.context(), tree=SHAPE)).tokens
        for line in lines(SHAPE):
            given = drafts[:, [node - 1 for node in line]]
            # One more draft than the path has nodes: the chain runs a row only where another draft follows.
            draw = Forced(torch.cat([given, given[:, :1]], 1))
            Eagle3().draft(replace(driver.context(), block=len(line) + 1, draw=draw))
            for depth, node in enumerate([0, *line]):
                if children := SHAPE.children[node]:
                    best = draw.logits[depth].topk(len(children), -1).indices
                    assert torch.equal(drafts[:, [c - 1 for c in children]], best), (line, depth)


def test_nodes_without_a_row_or_an_id_are_no_drafts():
    drafter = random_drafter(1)
    driver = driver_of(drafter, slots=1, capacity=14, block=SHAPE.nodes - 1)
    text = random_text(2)
    driver.prefill(0, text)  # 10 committed tokens: true rows up to 8, so row 8 + node must be below 14
    with torch.no_grad():
        drafts = Eagle3Tree(copies=0).draft(replace(driver.context(), tree=SHAPE)).tokens[0]
    has_row = [8 + parent < 14 for parent in SHAPE.parents]
    assert [token >= 0 for token in drafts.tolist()] == has_row
    assert not all(has_row)
    driver.length[0] = 1
    with torch.no_grad():
        drafts = Eagle3Tree(copies=0).draft(replace(driver.context(), tree=SHAPE)).tokens[0]
    assert drafts.tolist() == [-1] * 10
    few = random_drafter(1, vocab=3, draft_vocab=3)
    driver = driver_of(few, slots=1, block=5)
    driver.prefill(0, replace(text, ids=text.ids % 3))
    star = Tree((0,) * 5)
    with torch.no_grad():
        drafts = Eagle3Tree(copies=0).draft(replace(driver.context(), tree=star)).tokens[0]
    assert sorted(drafts[:3].tolist()) == [0, 1, 2]
    assert drafts[3:].tolist() == [-1, -1]


def run(method: Any, block: int, name: str, slots: int = 2) -> tuple[list[list[int]], list[list[int]]]:
    """Return the text and the accepted counts of every prompt of an oracle."""
    reference, model, bundle = load(name)
    info = model_info(model)
    assert method.reject(info, bundle.info, block) == ()
    builder = StepBuilder(
        make_target(model, info), method, Drafter(bundle.info, bundle.module), Shape(slots, 160, info.vocab)
    )
    scheduler = Scheduler(Engine(builder, Eager(), feed=8), block, "ratio")
    prompts = reference.info["prompts"]
    ids = [reference[f"p{i}.ids"][: p["prompt_length"]] for i, p in enumerate(prompts)]
    requests = [Request(one, limit=len(one) + NEW, key=i) for i, one in enumerate(ids)]
    texts: list[list[int]] = [[] for _ in prompts]
    counts: list[list[int]] = [[] for _ in prompts]
    for progress in scheduler.run(iter(requests), Stats()):
        texts[progress.request.key] += progress.record.tokens
        if progress.record.drafted:
            counts[progress.request.key].append(progress.record.accepted)
    return texts, counts


@pytest.mark.slow
@pytest.mark.parametrize("name", ["eagle3-spec", "eagle3-specforge-fcnorm-tied"])
def test_text_is_the_oracles_and_a_tree_accepts_more_than_its_chain(name):
    reference = oracles.reference(name)
    chain, chain_counts = run(Eagle3(), 4, name)
    tree, tree_counts = run(Eagle3Tree(copies=0), 15, name)
    for index, prompt in enumerate(reference.info["prompts"]):
        begin = prompt["prompt_length"]
        assert tree[index] == chain[index] == reference[f"p{index}.ids"][begin : begin + NEW].tolist()
    steps = [sum(map(len, counts)) for counts in (chain_counts, tree_counts)]
    assert steps[1] < 0.95 * steps[0], steps
    # The chain is the tree's first path, so it never accepts more from the same anchor.
    same = Shaped(shape=Tree((0, 1, 2, 3)))
    assert run(same, 4, name) == (chain, chain_counts)


def test_a_right_drafter_is_accepted_to_the_top():
    """The automaton's drafter is right about the circle, so its first path always is; states move to their rows."""
    automaton.make_wander(0.0)
    model, bundle = automaton.target(), automaton.drafter("eagle3")
    method = Shaped()
    target = make_target(model.module, model.info)
    builder = StepBuilder(target, method, Drafter(bundle.info, bundle.module), Shape(1, 64, automaton.VOCAB))
    scheduler = Scheduler(Engine(builder, Eager(), feed=16), 10, "ratio")
    request = Request(torch.tensor(automaton.circle(0, 9)), limit=9 + 26)
    records = [p.record for p in scheduler.run(iter([request]), Stats())]
    assert [token for r in records for token in r.tokens] == automaton.circle(9, 26)
    assert {r.accepted for r in records[1:-1]} == {SHAPE.height}


def test_it_takes_an_eagle3_drafter_and_refuses_what_it_cannot_do():
    _, model, bundle = load("eagle3-spec")
    info: ModelInfo = model_info(model)
    drafter: DrafterInfo = bundle.info
    method = METHODS["eagle3_tree"]
    assert isinstance(method, DraftsTree)
    assert not isinstance(METHODS["eagle3"], DraftsTree)
    assert method.reject(info, drafter, method.default_block) == ()
    assert len(method.tree(method.default_block).parents) == method.default_block
    assert "at most 62 drafts" in method.reject(info, drafter, 63)[0]
    assert "not for eagle3_tree" in method.reject(info, replace(drafter, method="mtp"), 3)[0]
    assert method.reject(info, None, 3)
    assert Eagle3Tree(height=0).reject(info, drafter, 3)
    assert Eagle3Tree(draft_attention_window=4).reject(info, drafter, 3)
    assert "has room for 10 drafts" in Eagle3Tree(height=1, copies=0).reject(info, drafter, 15)[0]
    assert Eagle3Tree(copies=3).reject(info, drafter, 3)
    assert Eagle3Tree(copies=-1).reject(info, drafter, 3)


def test_a_branch_is_copied_where_the_text_repeats():
    """A text that goes round in a circle is copied; where there is nothing to copy the drafter's branches are kept."""
    automaton.make_wander(0.0)
    model, bundle = automaton.target(), automaton.drafter("eagle3")
    info = model.info
    method = Eagle3Tree(height=2, copies=6)
    shape = method.tree(9)
    assert shape.parents[3:] == (0, 4, 5, 6, 7, 8)
    builder = StepBuilder(
        make_target(model.module, info),
        method,
        Drafter(bundle.info, bundle.module),
        Shape(2, 64, automaton.VOCAB),
    )
    scheduler = Scheduler(Engine(builder, Eager(), feed=32), 9, "ratio")
    prompts = [automaton.circle(0, 20), automaton.circle(4, 7)]  # once round, and less than once
    requests = [Request(torch.tensor(p), limit=len(p) + 30, key=i) for i, p in enumerate(prompts)]
    counts: list[list[int]] = [[], []]
    texts: list[list[int]] = [[], []]
    for progress in scheduler.run(iter(requests), Stats()):
        texts[progress.request.key] += progress.record.tokens
        counts[progress.request.key].append(progress.record.accepted)
    assert texts == [automaton.circle(20, 30), automaton.circle(11, 30)]
    assert set(counts[0][1:-1]) == {6}, (
        "its first draft is the drafter's too: the longer of equal branches is kept"
    )
    assert counts[1][1:3] == [2, 2], "nothing to copy yet"
    assert counts[1][-2] == 6


def test_taps_cannot_be_disabled():
    target, drafter = oracles.folder("targets/llama"), oracles.folder("drafters/eagle3-spec")
    given = {"method": "eagle3", "backend": "eager", "max_length": 40, "disable_passes": ["insert_taps"]}
    with pytest.raises(UnsupportedError, match="insert_taps"):
        specc.compile(str(target), str(drafter), **given)


def test_check_reads_a_tree_by_depth_and_names_the_method_that_was_asked_for():
    target, drafter = oracles.folder("targets/llama"), oracles.folder("drafters/eagle3-spec")
    report = specc.check(str(target), str(drafter), method="eagle3_tree", block=7, max_new_tokens=12)
    assert report.works
    assert report.probe is not None
    assert len(report.probe.readings[0].acceptance) == METHODS["eagle3_tree"].tree(7).height < 7
    assert not [f for f in report.findings if f.subject == "block"]
    with pytest.raises(UnsupportedError, match="method 'eagle3_tree' cannot use"):
        specc.compile(str(target), str(oracles.folder("drafters/dspark-spec-vanilla")), method="eagle3_tree")
