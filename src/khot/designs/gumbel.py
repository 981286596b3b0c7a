"""Gumbel top-k."""

from __future__ import annotations

from torch import Generator, Tensor

from khot.designs._common import largest, logit, uniform
from khot.registry import design


@design(
    "gumbel",
    cost="O(n + k log k)",
    paper="Yellott 1977; Kool et al. 2019",
    exact=False,
    note="not of prescribed inclusion probabilities: off by up to .1",
)
def gumbel(probs: Tensor, k: Tensor, *, generator: Generator | None = None) -> Tensor:
    r"""The ``k`` largest of the log-odds plus Gumbel noise: draws without replacement, in proportion to the odds.

    Its inclusion probabilities are **not** ``probs``; it is here because it is what most libraries offer.

    Args:
        probs: ``(..., n)`` in [0, 1].
        k: ``(..., 1)`` whole numbers.

    Returns:
        0/1 like ``probs``.

    Example:
        >>> gumbel(torch.tensor([0.5, 0.5, 1.0, 0.0]), torch.tensor([2])).sum()
        tensor(2.)
    """
    return largest(logit(probs) - (-uniform(probs, generator).log()).log(), k)
