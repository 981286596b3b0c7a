"""Brewer's draw-by-draw design."""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from khot._tensors import wide_dtype
from khot.designs._common import uniform
from khot.registry import design


@design("brewer", cost="O(nk)", paper="Brewer 1975; Tille 2006", exact=True)
def brewer(probs: Tensor, k: Tensor, *, generator: Generator | None = None) -> Tensor:
    r"""Items are drawn one at a time without replacement, with weights that keep the inclusion probabilities.

    .. math:: w_i = \frac{\pi_i (c - \pi_i)}{c - \pi_i m}, \quad c = \text{what is left of } k, \ m = \text{draws left}

    Args:
        probs: ``(..., n)`` in [0, 1].
        k: ``(..., 1)`` whole numbers, the rows' sums.

    Returns:
        0/1 like ``probs``.

    Example:
        >>> brewer(torch.tensor([0.5, 0.5, 1.0, 0.0]), torch.tensor([2])).sum()
        tensor(2.)
    """
    p = probs.to(wide_dtype(probs))
    out = (p >= 1).to(p.dtype)
    draws = k - out.sum(-1, keepdim=True)
    p = torch.where(p >= 1, 0.0, p)
    rest = p.sum(-1, keepdim=True)
    for _ in range(int(draws.max()) if draws.numel() else 0):
        weight = brewer_weights(p, rest, draws)
        # The first of independent exponential clocks: item i rings first with probability w_i / sum w.
        pick = (weight / -uniform(p, generator).log()).argmax(-1, keepdim=True)
        live = (draws > 0).to(p.dtype)
        out.scatter_add_(-1, pick, live)
        rest = rest - live * p.gather(-1, pick)
        p = p.scatter(-1, pick, p.gather(-1, pick) * (1 - live))
        draws = draws - live
    return out.to(probs.dtype)


def brewer_weights(p: Tensor, rest: Tensor, draws: Tensor) -> Tensor:
    """The odds of the next draw; ``p`` is 0 for items already drawn, ``rest`` its sum, ``draws`` how many are left."""
    tiny = torch.finfo(p.dtype).tiny
    return p * (rest - p).clamp(min=tiny) / (rest - p * draws).clamp(min=tiny)
