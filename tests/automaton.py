"""A target that counts around a circle of tokens, and a drafter per method that is right about it by construction.

The circle has 13 tokens; after element e comes e + 1. The target's residual stream has three parts: NAME says which
token a row read; CODE, written by the layers, is the element e + (LAYERS + 1 - j) after layer j, another one after
each layer; REST is what attention makes of the whole text before. The head reads CODE, and as much of REST as
`make_wander` says: without it the text is the circle, with it the text leaves the circle here and there, by all that
was read before.

The drafters know the circle alone, so they are right about the first text, and often about the second. Each gathers
evidence from every input it has: the anchor (or the newest token), the target's states, the token drafted before.
Each input names the right token and, a little louder, others; only all of them together single one out. So a drafter
that reads one input a row, a layer or a token off is wrong, whatever the other inputs say.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from specc.checkpoints.block_weights import describe
from specc.contracts import DrafterBundle, DrafterInfo
from specc.drafters.block import BlockConfig, BlockDrafter
from specc.drafters.convolution import ConvolutionConfig
from specc.drafters.eagle3 import Eagle3Config, Eagle3Drafter
from specc.drafters.layers import LayerConfig
from specc.drafters.markov import MarkovConfig
from specc.drafters.mtp import MtpConfig, MtpDrafter
from specc.drafters.selector import SelectorConfig
from specc.models.decoder_layer import final_norm, load_decoder_layer
from specc.models.load import LoadedModel, load_target
from tests.tiny import tiny_model

VOCAB, CIRCLE, LAYERS, HIDDEN = 16, 13, 3, 48
NAME, CODE, REST = slice(0, 16), slice(16, 32), slice(32, 48)
TAPS = (1, 2)
DRAFTS = 8  # what the block drafters are made for
MASK = 0
MARGIN = 4.0  # of the circle's next token over all others, in logits
A, B, C = 2, 6, 9  # how far from the right token the others that evidence names are; all distances differ
OTHERS = 1.1  # a little more weight than the right token has, which evidence of one input thus never finds

_CIRCLE = torch.randperm(CIRCLE, generator=torch.Generator().manual_seed(4)) + VOCAB - CIRCLE
_ELEMENT = torch.arange(VOCAB)  # tokens outside of the circle count as its first elements
_ELEMENT[_CIRCLE] = torch.arange(CIRCLE)


def move(*steps: int) -> Tensor:
    """Return the matrix [vocab, vocab] from a token to the tokens so many steps further on the circle."""
    matrix = torch.zeros(VOCAB, VOCAB)
    for step in steps:
        matrix[_CIRCLE[(_ELEMENT + step) % CIRCLE], torch.arange(VOCAB)] += 1
    return matrix


def evidence(step: int, *others: int) -> Tensor:
    """Return the matrix from a token to the one ``step`` further, and to others so much further than that."""
    return move(step) + OTHERS * move(*(step + other for other in others))


def circle(begin: int, count: int) -> list[int]:
    """Return ``count`` tokens of the circle from element ``begin`` on."""
    return [int(_CIRCLE[(begin + step) % CIRCLE]) for step in range(count)]


@functools.cache
def target() -> LoadedModel:
    """Return the target, its text the circle."""
    model = tiny_model(
        "llama", vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=VOCAB, num_hidden_layers=LAYERS
    )
    generator = torch.Generator().manual_seed(6)
    one = torch.eye(VOCAB)
    with torch.no_grad():
        model.model.norm.weight.fill_(1.0)
        embedding = model.model.embed_tokens.weight
        embedding.zero_()[:, NAME] = one
        for index, layer in enumerate(model.model.layers):
            for norm in (layer.input_layernorm, layer.post_attention_layernorm):
                norm.weight.fill_(1.0)
            for name in ("q_proj", "k_proj", "v_proj"):
                weight = getattr(layer.self_attn, name).weight
                weight.copy_(torch.randn(weight.shape, generator=generator) / 4)
                weight[:, CODE] = 0.0
            out = layer.self_attn.o_proj.weight
            out.zero_()[REST] = 0.003 * torch.randn(out[REST].shape, generator=generator)
            mlp = layer.mlp
            for linear in (mlp.gate_proj, mlp.up_proj):
                linear.weight.zero_()[:, NAME] = one
            hot = math.sqrt(HIDDEN / (2 if index else 1))  # NAME after the norm; REST is small
            size = 1 / (hot * hot / (1 + math.exp(-hot)))
            code = move(LAYERS - index) - (move(LAYERS + 1 - index) if index else 0)
            mlp.down_proj.weight.zero_()[CODE] = size * code
        head = model.lm_head.weight
        head.zero_()[:, CODE] = MARGIN / math.sqrt(HIDDEN / 2) * one
    return load_target(model)


def make_wander(spread: float) -> None:
    """Let the target's text depend on everything before: by logits of about this standard deviation."""
    head: Any = target().module.get_output_embeddings()
    with torch.no_grad():
        noise = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(12))
        head.weight[:, REST] = spread * noise


def drafter(method: str) -> DrafterBundle:
    """Return a drafter that is right about the circle, whatever it is asked for up to `DRAFTS` tokens."""
    with torch.no_grad():
        made = {"eagle3": _eagle3, "mtp": _mtp}.get(method, functools.partial(_block, method))()
    made.module.eval().requires_grad_(requires_grad=False)
    return made


def scale(module: Any, factor: float, elements: Sequence[int] = range(CIRCLE)) -> None:
    """Scale a drafter's belief in some elements: little for those it shall not know; -1 and it says the opposite."""
    tokens = _CIRCLE[list(elements)]
    if isinstance(module, BlockDrafter):
        module.layers[-1].o_proj.weight[CODE.start + tokens] *= factor
        if module.config.markov is not None:
            module.markov_head.markov_w2.weight[tokens] *= factor
    else:
        module.lm_head.weight[tokens] *= factor


def _eagle3() -> DrafterBundle:
    """Evidence of the newest token and of the feature, both of which name the token after the feature's.

    The layer attends to its own row alone: turned by rope, constant queries and keys score highest at distance 0.
    """
    layer = LayerConfig(HIDDEN, 4, heads=1, kv_heads=1, head_dim=HIDDEN, attention_bias=True)
    config = Eagle3Config(
        layer=layer, target_hidden=HIDDEN, taps=len(TAPS), vocab=VOCAB, draft_vocab=VOCAB, norm_before_residual=True,
    )  # fmt: skip
    module = Eagle3Drafter(config)
    for name, parameter in module.named_parameters():
        parameter.fill_(float("norm" in name))
    for place, tap in enumerate(TAPS):
        code = slice(place * HIDDEN + CODE.start, place * HIDDEN + CODE.stop)
        module.fc.weight[NAME, code] = 0.5 * move(1 - (LAYERS + 1 - tap))
    attention: Any = module.layers[0].self_attn
    attention.q_proj.bias.fill_(40.0)
    attention.k_proj.bias.fill_(40.0)
    attention.o_proj.weight.copy_(torch.eye(HIDDEN))
    value = attention.v_proj.weight
    feature = slice(HIDDEN, HIDDEN + VOCAB)
    value[NAME, NAME] = move(1)  # what the next row reads as its feature
    value[NAME, feature] = -torch.eye(VOCAB)  # takes the residual away
    value[CODE, NAME] = evidence(1, A)
    value[CODE, feature] = evidence(1, B)
    module.lm_head.weight[:, CODE] = torch.eye(VOCAB)
    return DrafterBundle(_facts("eagle3", TAPS, config), module)


def _mtp() -> DrafterBundle:
    """The same evidence, through the module's projection; its layer adds nothing."""
    model: Any = target().module
    tensors = {name: value.clone() for name, value in model.model.layers[0].state_dict().items()}
    for name in ("self_attn.o_proj.weight", "mlp.down_proj.weight"):
        tensors[name].zero_()
    loaded = load_decoder_layer(target().info.config, tensors, torch.float32)
    config = MtpConfig(hidden=HIDDEN, vocab=VOCAB, own_head=True)
    norm_embed, norm_hidden, norm_out = (loaded.norm_of(torch.ones(HIDDEN)) for _ in range(3))
    module = MtpDrafter(config, loaded.layer, (norm_embed, norm_hidden, norm_out), None)
    weight, state = module.project.weight.zero_(), slice(HIDDEN + CODE.start, HIDDEN + CODE.stop)
    weight[CODE, NAME] = move(1)  # what the next row reads in place of a state
    weight[NAME, NAME] = evidence(1, A)
    weight[NAME, state] = math.sqrt(2) * evidence(1, B)  # a state has NAME beside CODE, and a norm shares out
    module.lm_head.weight.zero_()[:, NAME] = torch.eye(VOCAB)
    module.attach(final_norm(model))
    return DrafterBundle(_facts("mtp", (LAYERS,), config), module)


def _facts(method: str, taps: tuple[int, ...], config: object) -> DrafterInfo:
    return DrafterInfo("made", method, "made", HIDDEN, HIDDEN, VOCAB, VOCAB, taps, None, None, config=config)


def _block(method: str) -> DrafterBundle:
    """Evidence of the anchor and of the states before it, by heads that each look so many positions back.

    Head d sees the row d before its own. That is the anchor, a mask, which says nothing, or a state; nearer ones
    weigh more. Walks add evidence of the token drafted before.
    """
    from_anchor, walks = method == "dspark", method != "dflash"
    back = range(0 if from_anchor else 1, DRAFTS + (1 if from_anchor else 2))
    size = VOCAB
    config = BlockConfig(
        layer=LayerConfig(HIDDEN, 4, len(back), len(back), size, attention_bias=True),
        layers=1,
        target_hidden=HIDDEN,
        taps=TAPS,
        vocab=VOCAB,
        draft_vocab=VOCAB,
        mask_token=MASK,
        block=DRAFTS if from_anchor else DRAFTS + 1,
        causal=(False,),
        windows=(None,),
        sample_from_anchor=from_anchor,
        mask_embedding=True,
        markov=MarkovConfig("vanilla", VOCAB) if from_anchor else None,
        convolution=ConvolutionConfig(8, 2) if method == "dflash2" else None,
        selector=SelectorConfig(VOCAB, 6) if method == "dflash2" else None,
    )
    module = BlockDrafter(config)
    layer: Any = module.layers[0]
    for linear in (module.fc, module.key_value, layer.q_proj, layer.o_proj, layer.mlp.down_proj):
        linear.weight.zero_()
        if linear.bias is not None:
            linear.bias.zero_()
    for place, tap in enumerate(TAPS):
        code = slice(place * HIDDEN + CODE.start, place * HIDDEN + CODE.stop)
        module.fc.weight[CODE, code] = 0.5 * move(-(LAYERS + 1 - tap))
    width = len(back) * size
    half = module.rotary.inverse.shape[0]
    for head, distance in enumerate(back):
        rows = slice(head * size, (head + 1) * size)
        angle = distance * module.rotary.inverse  # a query turned back so far scores highest that far away
        layer.q_proj.bias[rows] = 12.0 * torch.cat([angle.cos(), -angle.sin()])
        module.key_value.bias[rows] = 12.0 * torch.cat([torch.ones(half), torch.zeros(half)])
        value = module.key_value.weight[width + rows.start : width + rows.stop]
        value[:, NAME] = evidence(0, A, B) if walks else evidence(0, A)
        value[:, CODE] = evidence(0, A, C) if walks else evidence(0, B)
        layer.o_proj.weight[CODE, rows] = 0.5**head * move(distance + int(from_anchor))
    edges = evidence(1, B, C)
    if from_anchor:
        module.markov_head.markov_w1.weight.copy_(torch.eye(VOCAB))
        module.markov_head.markov_w2.weight.copy_(1.8 * edges)
    if method == "dflash2":
        selector = module.candidate_selector
        selector.hidden_projection.weight.zero_()[:, CODE] = torch.eye(VOCAB)
        selector.predecessor_codebook.copy_(0.5 * edges.T)
        selector.successor_codebook.copy_(torch.eye(VOCAB))
    return DrafterBundle(describe("made", method, "made", config), module)
