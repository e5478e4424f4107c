"""DFlash 2's convolutions and selector: methods.md 6.1, 6.2 and 6.5."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from specc.drafters.block import BlockDrafter
from specc.drafters.convolution import ConvolutionConfig, GroupedConvolution
from specc.drafters.selector import SelectorConfig
from specc.methods.dflash import DFlash
from specc.methods.dflash2 import DFlash2
from tests.methods.block_reference import block_config, convolve, random_drafter
from tests.methods.harness import Driver, GreedyDraw, Text
from tests.tiny import VOCAB, tiny_model


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("llama")


class _Naming(GreedyDraw):
    """Keeps the candidates' ids too."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: list[Tensor] = []

    def __call__(self, logits: Tensor, index: int, ids: Tensor | None = None) -> Tensor:
        if ids is not None:
            self.ids.append(ids)
        return super().__call__(logits, index, ids)


def _driver(model: Any, drafter: BlockDrafter, method: Any) -> Driver:
    driver = Driver(method, drafter, model, slots=2, capacity=64, block=drafter.config.drafts)
    for slot, prompt in enumerate((5, 11)):
        generator = torch.Generator().manual_seed(slot)
        ids = torch.randint(3, VOCAB - 1, (40,), generator=generator)
        driver.prefill(slot, Text(ids, prompt, torch.randn(40, 64, generator=generator)))
    return driver


def test_identity_convolutions_and_no_edges_are_dflash(model: Any) -> None:
    """F1."""
    drafter = random_drafter(block_config("dflash2"))
    for layer in drafter.layers:
        for convolution in (layer.attention_conv, layer.mlp_conv):
            convolution.load_state_dict(GroupedConvolution(32, ConvolutionConfig(8, 2)).state_dict())
    drafter.candidate_selector.successor_codebook.zero_()
    plain = BlockDrafter(block_config("dflash"))
    weights = {name: value for name, value in drafter.state_dict().items() if name in plain.state_dict()}
    plain.load_state_dict(weights)
    two, one = _driver(model, drafter, DFlash2()), _driver(model, plain, DFlash())
    assert torch.equal(two.draft().tokens, one.draft().tokens)
    for scores, logits in zip(two.draw.logits, one.draw.logits, strict=True):
        assert torch.equal(scores, logits.topk(5).values)


@pytest.mark.parametrize(("multiplier", "softcap"), [(1.0, None), (0.3, 2.0)])
def test_equals_a_walk_by_the_formulas(model: Any, multiplier: float, softcap: float | None) -> None:
    """F3, F4."""
    config = block_config("dflash2", selector=SelectorConfig(8, 5, multiplier, softcap))
    drafter = random_drafter(config)
    driver = _driver(model, drafter, DFlash2())
    outputs: list[Tensor] = []
    drafter.register_forward_hook(lambda _module, _inputs, output: outputs.append(output))
    draw = _Naming()
    context = driver.context()
    object.__setattr__(context, "draw", draw)
    draft = driver.method.draft(context)
    selector, moved = drafter.candidate_selector, False
    for slot in range(2):
        previous = int(driver.tokens[slot, driver.length[slot] - 1])
        for index in range(5):
            h = outputs[0][slot, 1 + index]
            raw, ids = (model.get_output_embeddings().weight @ h).topk(5)
            unary = raw * multiplier if softcap is None else softcap * torch.tanh(raw * multiplier / softcap)
            edge = selector.predecessor_codebook[previous] * (selector.hidden_projection.weight @ h)
            scores = unary + selector.successor_codebook[ids] @ edge
            torch.testing.assert_close(draw.logits[index][slot], scores, atol=1e-4, rtol=0)
            assert draw.ids[index][slot].tolist() == ids.tolist()
            moved |= int(scores.argmax()) != 0
            previous = int(ids[scores.argmax()])
            assert int(draft.tokens[slot, index]) == previous
    assert moved  # else the edges decided nothing


def test_convolution_stays_inside_its_block() -> None:
    convolution = GroupedConvolution(16, ConvolutionConfig(4, 3))
    generator = torch.Generator().manual_seed(0)
    for value in convolution.parameters():
        value.data.copy_(torch.randn(value.shape, generator=generator))
    x = torch.randn(2, 5, 16, generator=generator)
    kernels = convolution.kernels(x)
    mixed = convolution(x, kernels, 1)
    for block in range(2):
        alone = convolution(x[block], kernels[block], 1)
        assert torch.equal(mixed[block], alone)
        torch.testing.assert_close(alone, convolve(convolution, x[block], x[block], 1), atol=1e-5, rtol=0)
    first = convolution.base_kernel[1, 0] + kernels[:, 0, 1, 0].repeat_interleave(4, dim=-1)
    torch.testing.assert_close(mixed[:, 0], first * x[:, 0])
    late = x.clone()
    late[:, 3] += 1
    assert torch.equal(convolution(late, kernels, 1)[:, :3], mixed[:, :3])
