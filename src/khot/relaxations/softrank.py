"""Top-k by soft ranks."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from khot._tensors import Number, column
from khot.primitives.limits import check_size
from khot.primitives.rank import Regularization, check_regularization, heights, ranks
from khot.primitives.slopes import not_less, over, shortened
from khot.primitives.telescope import telescope
from khot.primitives.threshold.autograd import solve_mask
from khot.registry import relaxation
from khot.relaxations.sigmoid import SIGMOID

Cuts = Literal["solved", "fixed"]


def _mask(scores: Tensor, k: int, tau: Number = 1.0, *, regularization: Regularization = "l2", cuts: Cuts = "solved") -> Tensor:
    """The sum of the matrix over its rows: with solved cuts it telescopes, and nothing of size ``(k, n)`` is formed."""
    _check(regularization, cuts)
    if cuts == "fixed":
        check_size("softrank", *scores.shape, k, fix="use cuts='solved', whose mask needs no matrix")
        return _fixed(scores, _wide_heights(scores, tau, regularization), k, tau).sum(-2).to(scores.dtype)
    above = shortened(heights(scores, k, tau, regularization), column(tau, scores), scores.dtype)
    return solve_mask(above, k, not_less(tau, scores.dtype), SIGMOID)


@relaxation(
    "softrank",
    kind="matrix",
    cost="O(n log^2 n) mask, O(nk) matrix",
    paper="Blondel et al. 2020; TopK Networks",
    mask=_mask,
    smooth=False,
    scale_free=False,
)
def softrank_matrix(scores: Tensor, k: int, tau: Number = 1.0, *, regularization: Regularization = "l2", cuts: Cuts = "solved") -> Tensor:
    r"""Soft ranks told apart by a smooth indicator: row ``i`` weighs the items whose rank is about ``i``.

    .. math:: P_{ij} = \sigma((b_i - r_j)/\tau) - \sigma((b_{i-1} - r_j)/\tau), \qquad b_0 = -\infty

    with :math:`r` the descending soft ranks (:func:`khot.soft_rank`). With ``cuts="solved"`` the cuts :math:`b_i` are those for which
    :math:`\sum_j \sigma((b_i - r_j)/\tau) = i`: rows sum to 1, no item is chosen more than once over all rows, and the mask is the last
    term alone, ``sigmoid_topk(-rank, k, tau)``. With ``cuts="fixed"`` they are :math:`b_i = i + 1/2` and each row is divided by its sum,
    in log space: an item may then be chosen by several rows, e.g. where ``tau`` is large against the scores and all ranks are alike.

    Args:
        scores: ``(..., n)``; differences count in units of ``tau``, so softmax outputs must be standardised first, or their logits used.
        k: how many rows.
        tau: temperature of ranks and indicator; the limit 0 is the hard top-k.
        regularization: of the ranks, ``"l2"`` or ``"kl"``.
        cuts: ``"solved"`` or ``"fixed"``.

    Returns:
        ``(..., k, n)``, rows that sum to 1.

    Example:
        >>> softrank_matrix(torch.tensor([3.0, 1.0, 2.0]), k=2, tau=0.2)
        tensor([[9.2387e-01, 5.5061e-04, 7.5583e-02],
                [7.5583e-02, 7.5583e-02, 8.4883e-01]])
    """
    _check(regularization, cuts)
    check_size("softrank", *scores.shape, k)
    above = _wide_heights(scores, tau, regularization)
    return (_solved if cuts == "solved" else _fixed)(scores, above, k, tau).to(scores.dtype)


def _check(regularization: str, cuts: str) -> None:
    check_regularization(regularization)
    if cuts not in ("solved", "fixed"):
        raise ValueError(f"cuts must be 'solved' or 'fixed', got {cuts!r}")


def _wide_heights(scores: Tensor, tau: Number, regularization: Regularization) -> Tensor:
    return -shortened(ranks(scores, tau, regularization, descending=True, wide=True), column(tau, scores), scores.dtype)


def _tops(heights: Tensor, k: int) -> Tensor:
    return heights.detach().topk(k).values if k > 0 else torch.zeros_like(heights[..., :1])


def _solved(scores: Tensor, heights: Tensor, k: int, tau: Number) -> Tensor:
    """Rows are differences of long sums: they are taken before rounding. The certain and the excluded stay infinite."""
    ends = torch.where(scores.isinf(), scores.detach().to(heights.dtype), heights)
    return telescope(ends, _tops(heights, k)[..., :k], column(not_less(tau, scores.dtype), heights), SIGMOID, scores.dtype)


def _stacked(tau: Number, like: Tensor, rows: tuple[int, ...]) -> Number:
    """A temperature per row, repeated for the ``k`` rows of the matrix."""
    wide: Any = column(tau, like)
    return wide.unsqueeze(-2).expand(rows) if isinstance(wide, Tensor) else wide


def _fixed(scores: Tensor, heights: Tensor, k: int, tau: Number) -> Tensor:
    """The difference of two sigmoids one place apart is, up to a factor without the rank, the product of their two tails."""
    places = torch.arange(1, k + 1, dtype=heights.dtype, device=heights.device).unsqueeze(-1)
    tau = _stacked(not_less(tau, scores.dtype), heights, (*scores.shape[:-1], k, 1))
    away = places + heights.unsqueeze(-2)  # place minus rank
    lower = torch.where(places > 1, logsigmoid(over(0.5 - away, tau)), 0.0)  # the first row is open below
    excluded = (scores == -torch.inf).unsqueeze(-2)
    logits = (logsigmoid(over(away + 0.5, tau)) + lower).masked_fill(excluded, torch.finfo(heights.dtype).min)
    return torch.softmax(logits, -1).masked_fill(excluded, 0.0)
