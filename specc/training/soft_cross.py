"""Cross-entropy of a frozen head with soft labels, without ever holding all its logits.

A head has ten times as many rows as a hidden state has numbers, so its logits, their exponentials and their
gradients are most of the memory a training step moves. Here a few rows at a time go through the head and give
their loss and their gradient at once, while they are in the cache: the head is not trained, so the gradient
with respect to the hidden state is all there is to keep.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

_ROWS = 64  # of logits held at once: 64 x 8192 in float32 is 2 MB


def soft_cross(hidden: Tensor, weight: Tensor, p: Tensor, place: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``-sum p log softmax(hidden @ weight.T) / sum p`` of each row, and what the logits say.

    Args:
        hidden: [rows, hidden]; the only argument that gets a gradient.
        weight: [vocabulary, hidden].
        p: [labels, vocabulary], not negative.
        place: int64 [rows], each row's label in ``p``.

    Returns:
        The cross-entropies [rows], of ``p``'s type; the likeliest token of each row, int64 [rows]; and the sum of
        min(q, p) [rows], zeros while gradients are on: a report's figure.
    """
    result: tuple[Tensor, Tensor, Tensor] = _SoftCross.apply(hidden, weight, p, place)  # type: ignore[no-untyped-call]
    return result


class _SoftCross(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any, hidden: Tensor, weight: Tensor, p: Tensor, place: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        half = torch.is_autocast_enabled(hidden.device.type)
        dtype = torch.get_autocast_dtype(hidden.device.type) if half else hidden.dtype
        narrow, head = hidden.to(dtype), weight.to(dtype)
        wanted = context.needs_input_grad[0]
        gradient = torch.empty_like(hidden) if wanted else None
        cross = torch.empty(len(hidden), dtype=p.dtype, device=hidden.device)
        likeliest = torch.empty(len(hidden), dtype=torch.int64, device=hidden.device)
        inside = torch.zeros(len(hidden), dtype=p.dtype, device=hidden.device)
        for begin in range(0, len(hidden), _ROWS):
            rows = slice(begin, begin + _ROWS)
            logits = functional.linear(narrow[rows], head).to(p.dtype)
            label = p[place[rows]]
            mass = label.sum(-1).clamp(min=1e-9)
            total = logits.logsumexp(-1)
            cross[rows] = total - torch.linalg.vecdot(label, logits) / mass
            likeliest[rows] = logits.argmax(-1)
            if gradient is None:
                inside[rows] = torch.minimum((logits - total[:, None]).exp_(), label).sum(-1)
                continue
            q = logits.sub_(total[:, None]).exp_()
            q.sub_(label.div_(mass[:, None]))
            gradient[rows] = (q.to(dtype) @ head).to(gradient.dtype)
        context.save_for_backward(gradient)
        context.mark_non_differentiable(likeliest, inside)
        return cross, likeliest, inside

    @staticmethod
    def backward(context: Any, *given: Tensor) -> tuple[Tensor | None, None, None, None]:
        (gradient,) = context.saved_tensors
        return gradient * given[0][:, None].to(gradient.dtype), None, None, None
