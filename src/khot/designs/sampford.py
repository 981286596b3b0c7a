"""Sampford's design, without rejection."""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from khot.designs._common import uniform
from khot.designs.conditional_poisson import subset_log_prob
from khot.primitives.fixed_point import spread
from khot.primitives.poisson_binomial import log_partition, marginals
from khot.primitives.subsets import draw_subsets
from khot.registry import design


def sampford_log_prob(probs: Tensor, sample: Tensor) -> Tensor:
    """``(..., n), (..., n) -> (...)`` in float64; -inf for a sample that cannot be drawn."""
    k = probs.sum(-1, keepdim=True, dtype=torch.float64).round().long()
    p = spread(probs, k)
    logits = torch.logit(p)
    slack = (sample * (1 - p)).sum(-1)
    total = log_partition(logits, k) + ((1 - p) * marginals(logits, k).probs).sum(-1).log()
    settled = (p >= 1).sum(-1) == k.squeeze(-1)  # nothing is random: one sample, and no slack to weigh it by
    return torch.where(settled, 0.0, slack.log() - total) + subset_log_prob(logits, k, sample, torch.zeros_like(slack))


@design(
    "sampford",
    cost="O(nk)",
    paper="Sampford 1967",
    exact=True,
    log_prob=True,
    extras={"log_prob": sampford_log_prob},
)
def sampford(probs: Tensor, k: Tensor, *, generator: Generator | None = None) -> Tensor:
    r"""Closed probabilities with exact inclusion probabilities, no calibration needed.

    .. math:: p(s) \propto \prod_{i \in s} \frac{\pi_i}{1 - \pi_i} \cdot \sum_{i \in s} (1 - \pi_i)

    Read as a mixture: one member l is drawn with weight :math:`(1 - \pi_l) m_l`, with m the marginals of the k-subset
    distribution of the odds, the other k - 1 from the k-1-subset distribution without l. Nothing is ever rejected.

    Args:
        probs: ``(..., n)`` in [0, 1].
        k: ``(..., 1)`` whole numbers, the rows' sums.

    Returns:
        0/1 like ``probs``.

    Example:
        >>> sampford(torch.tensor([0.5, 0.5, 1.0, 0.0]), torch.tensor([2])).sum()
        tensor(2.)
    """
    p = spread(probs, k)
    logits = torch.logit(p)
    weight = (1 - p) * marginals(logits, k).probs
    first = (weight / -uniform(p, generator).log()).argmax(-1, keepdim=True)
    live = weight.sum(-1, keepdim=True) > 0  # else nothing is random
    logits = torch.where(live, logits.scatter(-1, first, -torch.inf), logits)
    others = draw_subsets(logits, k - live.long(), 1, generator).squeeze(0)
    return others.scatter_add(-1, first, live.to(p.dtype)).to(probs.dtype)
