"""Trees of drafts: their shapes, what their rows see, and the text that comes out of them on every kind of target."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import specc
from specc import ops
from specc.backends.kernels.attend_cpu import attend_cpu
from specc.contracts import Draft, DrafterInfo, MethodContext, ModelInfo, Rows, TensorSpec
from specc.errors import InputError, UnsupportedError
from specc.ops import _attend_device
from specc.sampling import SamplingContext, process
from specc.sampling.accept_tree import as_slots
from specc.tree import MOST_DRAFTS, Tree, likeliest_tree, table
from tests.rig import Rig, generate, loaded, own_text, padded
from tests.tiny import VOCAB, WINDOW

#        1     2     3
#      4   5   6     |
#      |       |     7
#      8       9
BUSHY = Tree((0, 0, 0, 1, 1, 2, 3, 4, 6))
shapes = st.lists(st.integers(0, 1 << 20), min_size=1, max_size=20).map(
    lambda draws: Tree(tuple(draw % (index + 1) for index, draw in enumerate(draws)))
)


# --- shapes -----------------------------------------------------------------------------------------------


def test_a_shape_knows_its_levels_and_paths():
    assert BUSHY.nodes == 10
    assert BUSHY.depths == (0, 1, 1, 1, 2, 2, 2, 2, 3, 3)
    assert BUSHY.height == 3
    assert BUSHY.children == ((1, 2, 3), (4, 5), (6,), (7,), (8,), (), (9,), (), (), ())
    assert BUSHY.level(2) == (4, 5, 6, 7)
    assert BUSHY.paths[9] == 1 << 1 | 1 << 5 | 1 << 8


@given(shapes)
def test_masks_hold_exactly_the_ancestors(tree):
    on_path = tree.on_path(torch.device("cpu"))
    for node in range(tree.nodes):
        line, at = set(), node
        while at:
            line.add(at - 1)
            at = tree.parents[at - 1]
        assert set(on_path[node].nonzero().flatten().tolist()) == line
        assert len(line) == tree.depths[node]


@pytest.mark.parametrize("parents", [(), (1,), (0, -1), (0, 1, 4), (0,) * (MOST_DRAFTS + 1)])
def test_a_wrong_shape_is_refused(parents):
    with pytest.raises(InputError, match="tree"):
        Tree(parents)


def test_the_likeliest_tree_takes_the_likeliest_paths():
    ranks = (0.6, 0.25, 0.1)
    assert likeliest_tree(1, ranks, 4) == Tree((0,))
    # 0.6, 0.36, 0.25, 0.216, then 0.15 twice: (0, 1) before (1, 0).
    assert likeliest_tree(5, ranks, 4) == Tree((0, 0, 1, 1, 3))
    assert likeliest_tree(5, ranks, 1) == Tree((0, 0, 0)), "there are no more of that height"
    big = likeliest_tree(MOST_DRAFTS, ranks, 6)
    assert big.height == 6
    assert len(big.parents) == MOST_DRAFTS


def test_a_table_is_no_copy_from_the_host():
    traced = torch.fx.experimental.proxy_tensor.make_fx(lambda: table((3, 1, 4), torch.device("cpu")))()
    assert traced().tolist() == [3, 1, 4]
    assert not [n for n in traced.graph.nodes if n.op == "get_attr"]


# --- what a row sees --------------------------------------------------------------------------------------


def _case(sinks: bool = False, softcap: float | None = None) -> dict[str, Any]:
    """Return attend's arguments for two slots of a tree each, 5 and 9 committed rows, and a garbage row."""
    generator = torch.Generator().manual_seed(3)

    def noise(*size: int) -> Tensor:
        return torch.randn(size, generator=generator)

    bases = torch.tensor([4, 8])
    slot = torch.arange(2).repeat_interleave(BUSHY.nodes)
    index = torch.arange(BUSHY.nodes).repeat(2)
    cache_row = bases[slot] + index
    cache_row[7] = 24  # the scratch row, so that a row between the branches is not written either
    rows = len(slot)
    key_cache, value_cache = noise(2, 2, 25, 8), noise(2, 2, 25, 8)
    for cache in (key_cache, value_cache):
        cache[:, :, 19:] = float("nan")  # behind the trees
        cache[0, :, 11] = float("nan")  # the garbage row's place
    return {
        "query": noise(rows, 4, 8), "key": noise(rows, 2, 8), "value": noise(rows, 2, 8),
        "key_cache": key_cache, "value_cache": value_cache, "slot": slot, "cache_row": cache_row,
        "first": torch.tensor([0, 3])[slot], "last": bases[slot], "scale": 0.3, "softcap": softcap,
        "sinks": noise(4) if sinks else None, "path": table(BUSHY.paths, slot.device).repeat(2),
    }  # fmt: skip


@pytest.mark.parametrize("kernel", [ops.attend, _attend_device, attend_cpu], ids=["host", "device", "c++"])
@pytest.mark.parametrize("more", [{}, {"softcap": 2.0}, {"sinks": True}], ids=["plain", "softcap", "sinks"])
def test_a_tree_attends_as_each_of_its_paths_alone(kernel, more):
    """E4: verifying a tree equals verifying each path from the root separately."""
    case = _case(**more)
    out = kernel(**{n: t.clone() if isinstance(t, Tensor) else t for n, t in case.items()})
    for slot in range(2):
        for node in range(BUSHY.nodes):
            row = slot * BUSHY.nodes + node
            line = [0, *(i + 1 for i in range(BUSHY.nodes - 1) if BUSHY.paths[node] >> i & 1)]
            pick = [slot * BUSHY.nodes + n for n in line]
            base = int(case["last"][row])
            alone = {n: t.clone() if isinstance(t, Tensor) else t for n, t in case.items() if n != "path"}
            alone |= {n: alone[n][pick] for n in ("query", "key", "value", "slot", "first")}
            alone["cache_row"] = alone["last"] = base + torch.arange(len(line))
            want = ops.attend(**alone)[-1]
            if int(case["cache_row"][row]) == 24:
                want = torch.zeros_like(want)
            torch.testing.assert_close(out[row], want, rtol=1e-5, atol=1e-5)


def test_moved_rows_are_all_read_before_any_is_written():
    cache = torch.arange(10.0)[None, None, :, None].clone()
    ops.move_rows(cache, torch.zeros(3, dtype=torch.int64), torch.tensor([3, 4, 7]), torch.tensor([2, 3, 4]))
    assert cache.flatten().tolist() == [0, 1, 3, 4, 7, 5, 6, 7, 8, 9]


# --- settings ---------------------------------------------------------------------------------------------


def test_settings_see_the_history_of_a_nodes_path():
    generator = torch.Generator().manual_seed(1)
    length, vocab = torch.tensor([6, 4]), 12
    tokens = torch.randint(vocab, (2, 20), generator=generator)
    drafts = torch.randint(vocab, (2, BUSHY.nodes - 1), generator=generator)
    logits = torch.randn(2, BUSHY.nodes, vocab, generator=generator)
    families = ("repetition_penalty", "frequency_penalty", "no_repeat_ngram_size", "min_new_tokens")
    settings = {
        "repetition_penalty": torch.tensor([1.4, 1.0]), "frequency_penalty": torch.tensor([0.3, 1.1]),
        "no_repeat_ngram_size": torch.tensor([2, 1]), "min_new_tokens": torch.tensor([5, 0]),
    }  # fmt: skip
    eos, limit = torch.tensor([[3], [5]]), torch.tensor([18, 18])

    def context(slot: slice, text: Tensor, count: Tensor, draft: Tensor) -> SamplingContext:
        own = {name: value[slot] for name, value in settings.items()}
        return SamplingContext(text, count, torch.tensor([3, 2])[slot], draft, own, eos[slot], limit[slot])

    whole = context(slice(0, 2), tokens, length, drafts)
    found = process(logits.flatten(0, 1)[:, None], as_slots(whole, BUSHY), families).view_as(logits)
    for slot in range(2):
        for node in range(BUSHY.nodes):
            line = [drafts[slot, i] for i in range(BUSHY.nodes - 1) if BUSHY.paths[node] >> i & 1]
            text = torch.cat([tokens[slot, : length[slot]], torch.tensor(line, dtype=torch.int64)])
            one = slice(slot, slot + 1)
            alone = context(one, text[None], torch.tensor([len(text)]), drafts.new_empty(1, 0))
            assert torch.equal(
                found[slot, node], process(logits[one, node : node + 1], alone, families)[0, 0]
            )


# --- text -------------------------------------------------------------------------------------------------

PROMPTS = ((5, 9, 3, 7), (8, 4, 21, 30, 12, 9, 40), (11,))
COUNT = 24


@dataclass(frozen=True)
class KnownTree:
    """Drafts a tree around texts that are known: the right token stands among wrong ones, its rank always another.

    Every seventh length it has no right token at depth 2, so that paths are cut inside.
    """

    texts: tuple[tuple[int, ...], ...]
    shape: Tree
    name: str = "known_tree"
    default_block: int = 9
    needs_drafter: bool = False
    history: int = 0

    def reject(self, target: ModelInfo, drafter: DrafterInfo | None, block: int) -> tuple[str, ...]:
        return ()

    def blocks(self, drafter: DrafterInfo | None) -> int | None:
        return None

    def taps(self, target: ModelInfo, drafter: DrafterInfo | None) -> tuple[int, ...]:
        return ()

    def state(self, target: ModelInfo, drafter: Any, slots: int, capacity: int) -> Mapping[str, TensorSpec]:
        return {}

    def tree(self, block: int) -> Tree:
        assert block == len(self.shape.parents)
        return self.shape

    def draft(self, context: MethodContext) -> Draft:
        device, tree = context.tokens.device, context.tree
        assert tree is not None
        width = max(map(len, self.texts)) + tree.height + 1
        known = torch.stack([table([*t, *[0] * (width - len(t))], device) for t in self.texts])
        mine = table([t[0] for t in self.texts], device) == context.tokens[:, :1]
        text = (known * mine[..., None]).sum(1)
        drafts = []
        for node in range(1, tree.nodes):
            depth, siblings = tree.depths[node], tree.children[tree.parents[node - 1]]
            right = text.gather(1, (context.length - 1 + depth).clamp(max=width - 1)[:, None])[:, 0]
            place = (context.length * 5 + depth) % len(siblings)
            missed = (place != siblings.index(node)) | ((context.length % 7 == 0) & (depth == 2))
            drafts.append((right + missed * (1 + siblings.index(node))) % context.vocab)
        return Draft(torch.stack(drafts, 1))

    def observe(self, context: MethodContext, rows: Rows) -> None:
        return None


@functools.cache
def known(arch: str, shape: Tree = BUSHY, slots: int = 3) -> Rig:
    texts = own_text(arch, PROMPTS, COUNT + 4)
    whole = tuple((*p, *t) for p, t in zip(PROMPTS, texts, strict=True))
    return Rig(arch, KnownTree(whole, shape), slots=slots, capacity=80)


def stats(rig: Rig, block: int = 9, **settings: Any) -> Any:
    ids, mask = padded(PROMPTS)
    given = {"max_new_tokens": COUNT, "eos_token_id": None, "return_dict_in_generate": True, **settings}
    return rig.at(block).generate(ids, mask, **given)


ARCHES = ("llama", "gpt2", "gemma2", "gpt_oss", "deepseek_v3", "mixtral", "phi3")


@pytest.mark.parametrize("arch", ARCHES)
def test_text_is_the_targets_own(arch):
    """Windows, softcaps, sinks, latent K/V, experts, learned positions, rotary frequencies that switch."""
    rig = known(arch)
    expected = own_text(arch, PROMPTS, COUNT)
    assert generate(rig.at(9), PROMPTS, COUNT, eos_token_id=None) == expected
    counted = stats(rig).stats
    assert 1.8 < counted.mean_accepted_length < 3.5, counted.mean_accepted_length
    assert len(counted.acceptance_by_position) == 3
    assert min(counted.acceptance_by_position) > 0.05
    assert generate(rig.at(9).without_drafts(), PROMPTS, COUNT, eos_token_id=None) == expected


@pytest.mark.parametrize(
    "shape", [Tree((0,)), Tree((0, 1, 2, 3)), Tree((0, 0, 0, 0))], ids=["1", "chain", "star"]
)
def test_other_shapes(shape):
    rig = known("llama", shape)
    block = len(shape.parents)
    assert generate(rig.at(block), PROMPTS, COUNT, eos_token_id=None) == own_text("llama", PROMPTS, COUNT)
    assert stats(rig, block).stats.mean_accepted_length > 1 + 0.6 * shape.height


def test_a_slot_alone_and_in_a_batch():
    expected = own_text("llama", PROMPTS, COUNT)
    alone = known("llama", slots=1)
    assert [generate(alone.at(9), [p], COUNT, eos_token_id=None)[0] for p in PROMPTS] == expected


def test_text_ends_at_a_cap_a_stop_and_a_full_cache():
    rig = known("llama")
    expected = own_text("llama", PROMPTS, COUNT)
    for count in (1, 2, 3, 7):
        assert generate(rig.at(9), PROMPTS, count, eos_token_id=None) == [t[:count] for t in expected]
    ends = expected[0][6]
    cut = [t[: t.index(ends) + 1] if ends in t else t for t in expected]
    assert generate(rig.at(9), PROMPTS, COUNT, eos_token_id=ends) == cut
    texts = own_text("llama", PROMPTS, 32)
    whole = tuple((*p, *t) for p, t in zip(PROMPTS, texts, strict=True))
    full = Rig("llama", KnownTree(whole, BUSHY), slots=3, capacity=33)  # the longest prompt has 7 tokens
    assert generate(full.at(9), PROMPTS, 26, eos_token_id=None) == [t[:26] for t in texts]


SETTINGS: dict[str, dict[str, Any]] = {
    "penalties": {"repetition_penalty": 1.4, "no_repeat_ngram_size": 2, "frequency_penalty": 0.4},
    "sampled": {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20},
    "all": {
        "do_sample": True, "temperature": 0.5, "min_p": 0.02, "presence_penalty": 0.5, "bad_words_ids": [[7, 3], [4]],
        "min_new_tokens": 9, "begin_suppress_tokens": [3, 5],
    },
}  # fmt: skip


@pytest.mark.parametrize("name", SETTINGS)
def test_coupled_text_is_plain_decodings_under_every_setting(name):
    rig = known("llama")
    given = {"eos_token_id": 1, "seed": 5, **SETTINGS[name]}
    plain = generate(rig.at(9).without_drafts(), PROMPTS, COUNT, **given)
    assert plain != own_text("llama", PROMPTS, COUNT)
    assert generate(rig.at(9), PROMPTS, COUNT, **given) == plain
    assert stats(rig, **given).stats.accepted > 3


def test_equal_siblings_are_followed_in_all_their_branches():
    """Two branches begin alike and one goes on rightly: it is kept on the device and on the host."""

    @dataclass(frozen=True)
    class Twice(KnownTree):
        def draft(self, context: MethodContext) -> Draft:
            context = replace(context, tree=Tree((0, 1, 2)))
            right = KnownTree.draft(replace(self, shape=Tree((0, 1, 2))), context).tokens
            wrong = (right[:, 1:] + 1) % context.vocab
            return Draft(torch.cat([right[:, :1], wrong, right], 1))

    rig = known("llama", Tree((0, 1, 2, 0, 4, 5)))
    method = Twice(rig.method.texts, rig.method.shape)
    twice = Rig("llama", method, slots=3, capacity=80)
    expected = own_text("llama", PROMPTS, COUNT)
    for more in ({}, {"logits_processor": [lambda ids, scores: scores]}, {"repetition_penalty": 1.0001}):
        assert generate(twice.at(6), PROMPTS, COUNT, eos_token_id=None, **more) == expected
        assert stats(twice, 6, **more).stats.mean_accepted_length > 2.5


def test_ratio_text_does_not_depend_on_the_tree():
    """The target draws its own token at every node, by numbers of the position."""
    given = {
        "eos_token_id": None,
        "do_sample": True,
        "temperature": 0.8,
        "top_k": 30,
        "seed": 9,
        "accept": "ratio",
    }
    texts = []
    for shape in (BUSHY, Tree((0, 1, 2))):
        rig = known("llama", shape)
        texts.append(generate(rig.at(len(shape.parents)), PROMPTS, COUNT, **given))
    assert texts[0] == texts[1]
    assert texts[0] != own_text("llama", PROMPTS, COUNT)


def test_processors_of_a_users_own_see_the_accepted_path_alone():
    rig = known("llama")
    calls: dict[str, list[list[int]]] = {"plain": [], "tree": []}

    def processor(name: str) -> Any:
        def process_row(ids: Tensor, scores: Tensor) -> Tensor:
            calls[name].append(ids[0].tolist())
            out = scores.clone()
            out[0, int(ids.sum()) % VOCAB] += 2.0
            return out

        return process_row

    for hot in ({}, {"do_sample": True, "temperature": 0.7, "seed": 3}):
        plain = rig.at(9).without_drafts()
        texts = {}
        for run, one in (("plain", plain), ("tree", rig.at(9))):
            texts[run] = generate(
                one, PROMPTS[:1], COUNT, eos_token_id=None, logits_processor=[processor(run)], **hot
            )
        assert texts["tree"] == texts["plain"]
        assert calls["tree"] == calls["plain"]


class _EvenOnly:
    """A grammar of even ids that counts how far it was moved."""

    def __init__(self) -> None:
        self.taken: list[int] = []

    def mask(self) -> Tensor:
        return torch.arange(VOCAB) % 2 == 0

    def advance(self, token: int) -> None:
        self.taken.append(token)

    def rollback(self, count: int) -> None:
        del self.taken[-count:]


def test_a_constraint_follows_the_accepted_path():
    grammar = _EvenOnly()
    rig = known("llama")
    ids = torch.tensor([PROMPTS[0]])
    out = rig.at(9).generate(ids, max_new_tokens=12, eos_token_id=None, constraint=grammar)
    assert out[0, 4:].tolist() == grammar.taken
    assert all(token % 2 == 0 for token in grammar.taken)


def test_logits_scores_and_states_are_those_of_the_accepted_path():
    rig = known("llama")
    given = {
        "output_logits": True, "output_scores": True, "output_hidden_states": True, "repetition_penalty": 1.2,
    }  # fmt: skip
    tree = stats(rig, **given)
    ids, mask = padded(PROMPTS)
    more = {"max_new_tokens": COUNT, "eos_token_id": None, "return_dict_in_generate": True}
    plain = rig.at(9).without_drafts().generate(ids, mask, **more, **given)
    assert torch.equal(tree.sequences, plain.sequences)
    for name in ("logits", "scores"):
        for one, other in zip(getattr(tree, name), getattr(plain, name), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-4)
    ours, theirs = (torch.utils._pytree.tree_leaves(run.hidden_states) for run in (tree, plain))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-4)


# --- refusals ---------------------------------------------------------------------------------------------


def test_a_path_longer_than_a_window_is_refused():
    rig = known("gemma2")
    tall = KnownTree(((1,),), Tree(tuple(range(WINDOW))))
    with pytest.raises(UnsupportedError, match="sliding window of 8"):
        Rig("gemma2", tall).engine.builder.tree(WINDOW)
    assert rig.engine.builder.tree(0) is None
    with pytest.raises(UnsupportedError, match="sliding window of 8"):
        specc.compile(loaded("gemma2"), method=tall, block=WINDOW, backend="eager", max_length=40)
    report = specc.check(loaded("gemma2"), method=tall, block=WINDOW, probe=False)
    assert [f.subject for f in report.findings if f.effect == "stops"] == ["pair"]


@dataclass(frozen=True)
class Odd(KnownTree):
    """Declares a tree, or drafts, as a test says."""

    declared: Any = BUSHY
    drafted: Any = None

    def tree(self, block: int) -> Any:
        return self.declared

    def draft(self, context: MethodContext) -> Any:
        return super().draft(context) if self.drafted is None else self.drafted(context)


def compile_odd(**changes: Any) -> Any:
    return specc.compile(
        loaded(), method=Odd(((1,),), BUSHY, **changes), block=9, backend="eager", max_length=40
    )


@pytest.mark.parametrize(
    ("declared", "says"),
    [
        (Tree((0,) * 8), "8 drafts instead"),
        (Tree((0,) * 10), "10 drafts"),
        (None, "NoneType"),
        ((0, 0), "tuple"),
    ],
)
def test_a_tree_that_is_none_or_of_another_size_is_refused(declared, says):
    with pytest.raises(UnsupportedError, match=says):
        compile_odd(declared=declared)


@pytest.mark.parametrize(
    ("drafted", "says"),
    [
        (lambda c: Draft(c.length.new_zeros(1, 4)), r"\[1, 4\]"), (lambda c: Draft(torch.zeros(1, 9)), "float32"),
        (lambda c: Draft(c.length.new_zeros(9)), r"\[9\]"), (lambda c: c.length.new_zeros(1, 9), "no Draft but"),
        (lambda c: None, "NoneType"), (lambda c: Draft(c.length.new_zeros(1, 1)), r"\[1, 1\]"),
    ],
)  # fmt: skip
def test_drafts_of_another_shape_are_refused(drafted, says):
    with pytest.raises(UnsupportedError, match=says):
        compile_odd(drafted=drafted).inspect()


def test_what_a_tree_cannot_do_without_cannot_be_disabled():
    with pytest.raises(UnsupportedError, match="follow_tree"):
        specc.compile(
            loaded(), method=KnownTree(((1,),), BUSHY), block=9, backend="eager", max_length=40,
            disable_passes=["follow_tree"],
        )  # fmt: skip
    plain = specc.compile(
        loaded(), method="ngram", block=2, backend="eager", max_length=40, disable_passes=["follow_tree"]
    )
    assert plain.reach == 2
    with pytest.raises(UnsupportedError, match="bitwise"):
        specc.compile(loaded(), method=KnownTree(((1,),), BUSHY), block=9, backend="eager", exact="bitwise")


def test_a_missing_draft_takes_out_its_branch_on_the_device_and_on_the_host():
    def holed(context: MethodContext) -> Draft:
        drafts = KnownTree.draft(rig.method.inner, context).tokens
        return Draft(torch.cat([drafts[:, :1] * 0 - 1, drafts[:, 1:]], 1))

    @dataclass(frozen=True)
    class Holed(KnownTree):
        inner: Any = None

        def draft(self, context: MethodContext) -> Draft:
            return holed(context)

    inner = known("llama", Tree((0, 1, 0))).method
    rig = Rig("llama", Holed(inner.texts, inner.shape, inner=inner), slots=3, capacity=80)
    found = [stats(rig, 3, **more).stats for more in ({}, {"logits_processor": [lambda ids, scores: scores]})]
    assert found[0].drafted == found[1].drafted > 0
    assert found[0].drafted_at == found[1].drafted_at
    assert len(found[0].drafted_at) == 1, "the branch of two hangs on the missing draft"
