from __future__ import annotations

from typing import final

from torch import Tensor, nn

from khot._tensors import Number
from khot.primitives.rank import Regularization
from khot.relaxations.softrank import Cuts, softrank_matrix


@final
class DifferentiableTopK(nn.Module):
    r"""Soft top-k weights from soft ranks: the selection of the TopK networks.

    .. math:: P_{ij} \propto \sigma((i + \tfrac12 - r_j)/\tau) - \sigma((i - \tfrac12 - r_j)/\tau), \qquad i = 1, \dots, k

    with :math:`r_j` the soft rank of item ``j``, 1 for the largest. The published snippet counts positions from 0 while ranks start at
    1, so that its first two rows both pick the largest item and the k-th is never picked; and it adds 1e-8 to the sum it divides by, so
    that a row vanishes at small ``tau``. Here positions start at 1, the first row is open below, and rows are divided in log space.

    Args:
        k: how many rows.
        regularization: of the ranks, ``"l2"`` or ``"kl"``.
        cuts: ``"fixed"`` as above, or ``"solved"`` for rows that never choose an item more than once (:func:`khot.softrank_matrix`).

    Example:
        >>> scores = torch.tensor([[3.0, 1.0, 2.0]])  # (B, N)
        >>> DifferentiableTopK(k=2)(scores, tau=0.2)  # (B, k, N)
        tensor([[[9.2363e-01, 5.5247e-04, 7.5816e-02],
                 [7.5389e-02, 7.5389e-02, 8.4922e-01]]])
    """

    def __init__(self, k: int, *, regularization: Regularization = "l2", cuts: Cuts = "fixed") -> None:
        super().__init__()
        self.k = k
        self.regularization: Regularization = regularization
        self.cuts: Cuts = cuts

    def forward(self, scores: Tensor, tau: Number = 1.0) -> Tensor:
        """``(..., N) -> (..., k, N)``, rows that sum to 1."""
        return softrank_matrix(scores, self.k, tau, regularization=self.regularization, cuts=self.cuts)

    def extra_repr(self) -> str:
        return f"k={self.k}, regularization={self.regularization!r}, cuts={self.cuts!r}"
