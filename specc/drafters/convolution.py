"""DFlash 2's grouped dynamic causal convolution over the rows of a block (methods.md 6.1)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class ConvolutionConfig:
    """Channels that share a predicted kernel, and its length."""

    group: int
    kernel: int


class GroupedConvolution(nn.Module):
    """Mix each row with the rows before it in its block, by kernels that are partly predicted.

    One instance serves both sides of a sublayer: side 0 before it, side 1 after it, both with kernels
    predicted from the sublayer's input. It starts as the identity.
    """

    def __init__(self, hidden: int, config: ConvolutionConfig) -> None:
        super().__init__()
        self.group, self.taps, self.groups = config.group, config.kernel, hidden // config.group
        base = torch.zeros(2, config.kernel, hidden)
        base[:, 0] = 1.0
        self.base_kernel = nn.Parameter(base)
        self.kernel_projection = nn.Linear(hidden, 2 * config.kernel * self.groups, bias=False)
        nn.init.zeros_(self.kernel_projection.weight)

    def kernels(self, x: Tensor) -> Tensor:
        """Return the predicted part of both kernels, [.., rows, 2, taps, groups], of x [.., rows, hidden]."""
        return torch.unflatten(self.kernel_projection(x), -1, (2, self.taps, self.groups))

    def forward(self, x: Tensor, kernels: Tensor, side: int) -> Tensor:
        """Convolve [.., rows, hidden] along its rows, one block: nothing comes in from before it."""
        grouped = torch.unflatten(x, -1, (self.groups, self.group))
        base = torch.unflatten(self.base_kernel[side], -1, (self.groups, self.group))  # [taps, groups, group]
        mixed: Tensor = (base[0] + kernels[..., side, 0, :, None]) * grouped
        for tap in range(1, min(self.taps, x.shape[-2])):
            shifted = nn.functional.pad(grouped, (0, 0, 0, 0, tap, 0))[..., : x.shape[-2], :, :]
            mixed = mixed + (base[tap] + kernels[..., side, tap, :, None]) * shifted
        return mixed.flatten(-2)
