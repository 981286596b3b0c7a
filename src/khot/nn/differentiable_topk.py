from __future__ import annotations

from typing import final

from torch import Tensor, nn

from khot._tensors import Number
from khot.primitives.rank import Regularization
from khot.relaxations.softrank import Cuts, softrank_matrix


@final
class DifferentiableTopK(nn.Module):
    r"""Soft top-k weights from soft ranks: the selection of the TopK networks.

    .. math:: P_{ij} = \sigma((b_i - r_j)/\tau) - \sigma((b_{i-1} - r_j)/\tau), \qquad i = 1, \dots, k

    with :math:`r_j` the soft rank of item ``j``, 1 for the largest, and the cuts :math:`b_i` such that every row sums to 1
    (:func:`khot.softrank_matrix`). The published snippet has fixed cuts :math:`i \pm \tfrac12` and divides by the sum. It counts
    positions from 0 while ranks start at 1, so that its first two rows both pick the largest item and the k-th is never picked; and it
    adds 1e-8 to the sum it divides by, so that a row vanishes at small ``tau``. ``cuts="fixed"`` is that formula with positions from 1,
    the first row open below, and rows divided in log space. Solved cuts are the default here and in ``softrank_matrix``: no item is
    chosen more than once over all rows, whatever ``tau``, and the rows sum to the mask of ``soft_topk(method="softrank")``.

    Args:
        k: how many rows.
        regularization: of the ranks, ``"l2"`` or ``"kl"``.
        cuts: ``"solved"`` or ``"fixed"``, as above.

    Example:
        >>> scores = torch.tensor([[3.0, 1.0, 2.0]])  # (B, N)
        >>> DifferentiableTopK(k=2)(scores, tau=0.2)  # (B, k, N)
        tensor([[[9.2387e-01, 5.5061e-04, 7.5583e-02],
                 [7.5583e-02, 7.5583e-02, 8.4883e-01]]])
    """

    def __init__(self, k: int, *, regularization: Regularization = "l2", cuts: Cuts = "solved") -> None:
        super().__init__()
        self.k = k
        self.regularization: Regularization = regularization
        self.cuts: Cuts = cuts

    def forward(self, scores: Tensor, tau: Number = 1.0) -> Tensor:
        """``(..., N) -> (..., k, N)``, rows that sum to 1."""
        return softrank_matrix(scores, self.k, tau, regularization=self.regularization, cuts=self.cuts)

    def extra_repr(self) -> str:
        return f"k={self.k}, regularization={self.regularization!r}, cuts={self.cuts!r}"
