"""Pareto sampling."""

from __future__ import annotations

from torch import Generator, Tensor

from khot.designs._common import largest, logit, uniform
from khot.primitives.threshold.rows import LOCAL, Rows
from khot.registry import design


@design(
    "pareto",
    cost="O(n + k log k)",
    paper="Rosen 1997; Lundqvist 2007 (adjustment)",
    exact=False,
    note="approximate: inclusion probabilities off by about 1e-3 for small k",
)
def pareto(probs: Tensor, k: Tensor, *, generator: Generator | None = None, adjusted: bool = True) -> Tensor:
    r"""The ``k`` smallest of independent random ranks. Fast, and only approximately of the prescribed probabilities.

    .. math:: q_i = \operatorname{logit} u_i - \operatorname{logit} \pi_i + \frac{\pi_i (1 - \pi_i)(\pi_i - 1/2)}{d^2},
        \quad d = \max(1, \textstyle\sum_i \pi_i (1 - \pi_i))

    Args:
        probs: ``(..., n)`` in [0, 1].
        k: ``(..., 1)`` whole numbers, the rows' sums.
        adjusted: add the last term, which takes most of the error away.

    Returns:
        0/1 like ``probs``.

    Example:
        >>> pareto(torch.tensor([0.5, 0.5, 1.0, 0.0]), torch.tensor([2])).sum()
        tensor(2.)
    """
    return largest(pareto_keys(probs, generator, adjusted), k)


def pareto_keys(probs: Tensor, generator: Generator | None, adjusted: bool, rows: Rows = LOCAL) -> Tensor:
    """What :func:`pareto` takes the largest of: the ranks with their sign turned."""
    keys = logit(probs) - logit(uniform(probs, generator))
    if not adjusted:
        return keys
    spread = probs * (1 - probs)
    # The term is an expansion in 1/d; below 1 it would overrule the probabilities.
    return keys - spread * (probs - 0.5) / rows.rough(spread)[0].square().clamp(min=1.0)
