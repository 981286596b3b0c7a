"""Top-k by entropic optimal transport."""

from __future__ import annotations

import torch
from torch import Tensor

from khot._settle import Among
from khot._tensors import Number
from khot.primitives.limits import check_size
from khot.primitives.threshold.autograd import solve_mask
from khot.primitives.transport import ordered_transport
from khot.registry import relaxation
from khot.relaxations.sigmoid import SIGMOID

_NUM_ARRAYS = 4  # of the size of the plan, two of them of twice its width


def _mask(scores: Tensor, k: int, tau: Number = 1.0, *, ordered: bool = True, among: Among | None = None) -> Tensor:
    """The sum of the matrix over its rows; where no more than ``k`` items are left, all of them."""
    if not ordered or k == 1:  # one anchor for all places
        return _together(scores, k, tau, among)
    if k in (0, scores.shape[-1]):
        return torch.full_like(scores, float(k > 0))
    mask = _plan(scores, k, tau, among).sum(-2)
    mask = mask - (mask.detach() - 1).clamp(min=0)  # rounding, without its gradient
    if among is None:
        return mask
    return torch.where(among.k >= among.items.sum(-1, keepdim=True), 1.0, mask)


def _matrix(scores: Tensor, k: int, tau: Number = 1.0, *, ordered: bool = True, among: Among | None = None) -> Tensor:
    if k == 0:
        return scores.unsqueeze(-2)[..., :0, :]
    if ordered and k > 1:
        return _plan(scores, k, tau, among)
    share = _together(scores, k, tau, among).unsqueeze(-2)
    share = share / (k if among is None else among.k.clamp(min=1).unsqueeze(-1))
    return share.expand(*scores.shape[:-1], k, scores.shape[-1])


def _together(scores: Tensor, k: int, tau: Number, among: Among | None) -> Tensor:
    """Two anchors only: sigmoid top-k."""
    if among is None:
        return solve_mask(scores, k, tau, SIGMOID)
    return solve_mask(torch.where(among.items, scores, -torch.inf), among.k.squeeze(-1), tau, SIGMOID)


def _plan(scores: Tensor, k: int, tau: Number, among: Among | None) -> Tensor:
    check_size("sinkhorn", _NUM_ARRAYS, *scores.shape, k + 1, what="set of plans", fix="use ordered=False, or split the batch")
    return ordered_transport(scores, k, tau, among)


@relaxation("sinkhorn", kind="matrix", cost="O(nk^2)", paper="Xie et al. 2020 (SOFT); Cuturi et al. 2019", mask=_mask, special=_matrix)
def sinkhorn_matrix(scores: Tensor, k: int, tau: Number = 1.0, *, ordered: bool = True) -> Tensor:
    r"""Items sent to the ``k`` first places and the rest by entropic optimal transport, solved to convergence.

    .. math:: \max_\Gamma \sum_{ij} x_i y_j \Gamma_{ij} - \tau \sum_{ij} \Gamma_{ij} \log \Gamma_{ij}, \qquad
              \sum_j \Gamma_{ij} = 1,\quad \sum_i \Gamma_{ij} = (1, \dots, 1, n - k)_j,\quad y = (k, \dots, 1, 0)

    The objective is that of the squared distance :math:`(x_i - y_j)^2 / 2` between scores and anchors. With ``ordered=False`` there are
    two anchors only, 1 for the top k and 0 for the rest. The mask is then :func:`sigmoid_topk`, and is computed so: SOFT with the cost
    :math:`(x_i - y_j)^2 / C_{\max}` and strength :math:`\epsilon` is ``sigmoid_topk(2 * x / (C_max * eps), k)`` at convergence, as is the
    LML layer. Gradients are implicit and exact, not unrolled.

    Args:
        scores: ``(..., n)``.
        k: how many rows; a ``k x k`` system is solved for each row of scores.
        tau: temperature; the limit 0 is the hard top-k.
        ordered: one anchor for each place; otherwise one for all ``k``, and all rows of the matrix are alike.

    Returns:
        ``(..., k, n)``, rows that sum to 1, columns that sum to at most 1.

    Example:
        >>> sinkhorn_matrix(torch.tensor([3.0, 1.0, 2.0]), k=2, tau=0.5)
        tensor([[0.7530, 0.0138, 0.2332],
                [0.2332, 0.2332, 0.5336]])
    """
    return _matrix(scores, k, tau, ordered=ordered)
