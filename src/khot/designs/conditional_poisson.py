"""Conditional Poisson sampling, calibrated."""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from khot.registry import design

# The k-subset distribution is imported where it is used: not every program needs its six files and five operators.


def conditional_poisson_log_prob(probs: Tensor, sample: Tensor) -> Tensor:
    """``(..., n), (..., n) -> (...)`` in float64; -inf for a sample that cannot be drawn."""
    from khot.primitives.calibrate import calibrate
    from khot.primitives.poisson_binomial import log_chance

    k = probs.sum(-1, keepdim=True, dtype=torch.float64).round().long()
    return log_chance(calibrate(probs, k), k, sample)


@design(
    "conditional_poisson",
    cost="O(nk) a step of calibration",
    paper="Hajek 1964; Chen, Dempster and Liu 1994",
    exact=True,
    note="maximum entropy",
    log_prob=conditional_poisson_log_prob,
)
def conditional_poisson(probs: Tensor, k: Tensor, *, generator: Generator | None = None, num_samples: int = 1) -> Tensor:
    r"""The design of maximum entropy: independent coins, given that ``k`` of them show heads.

    .. math:: p(s) \propto \exp \textstyle\sum_{i \in s} \lambda_i

    with the logits calibrated such that the inclusion probabilities are ``probs``. :class:`khot.distributions.KSubset` is the same
    with its logits given.

    Args:
        probs: ``(..., n)`` in [0, 1].
        k: ``(..., 1)`` whole numbers, the rows' sums.
        num_samples: how many masks of every row.

    Returns:
        0/1 of shape ``(num_samples, *probs.shape)``.

    Example:
        >>> conditional_poisson(torch.tensor([0.5, 0.5, 1.0, 0.0]), torch.tensor([2])).sum()
        tensor(2.)
    """
    from khot.primitives.calibrate import calibrate
    from khot.primitives.subsets import draw_subsets

    return draw_subsets(calibrate(probs, k), k, num_samples, generator).to(probs.dtype)
