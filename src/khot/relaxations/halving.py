"""Successive halving: a tournament of soft duels."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.compiler import is_compiling

from khot._tensors import Number, in_forward_mode
from khot.primitives.collect import collect
from khot.primitives.limits import check_size
from khot.primitives.tournament import Bracket, Rules, play
from khot.primitives.tournament_operator import Placed, placed
from khot.registry import relaxation


def _check(boost: float, mode: str) -> None:
    if not boost > 0:
        raise ValueError(f"boost must be positive, got {boost}; the larger, the harder each duel")
    if mode not in ("softmax", "power"):
        raise ValueError(f"mode must be 'softmax' or 'power', got {mode!r}")


def _bracket(scores: Tensor, k: int, tau: Number, boost: float, mode: str) -> Bracket:
    _check(boost, mode)
    return play(scores, k, tau, Rules(float(boost), mode == "power"))


def _is_traced(k: int) -> bool:
    """Whether a compiler is to see one operator, since the number of rounds depends on the shape."""
    return k > 0 and is_compiling() and not in_forward_mode()


def _placed(scores: Tensor, k: int, tau: Number, boost: float, mode: str) -> Placed:
    _check(boost, mode)
    return placed(scores, k, tau, Rules(float(boost), mode == "power"))


def _mask(scores: Tensor, k: int, tau: Number = 1.0, *, boost: float = 50.0, mode: str = "softmax") -> Tensor:
    if _is_traced(k):
        return _placed(scores, k, tau, boost, mode).weight
    items, weight = _bracket(scores, k, tau, boost, mode)
    return torch.zeros_like(scores).scatter_add(-1, items.flatten(-2), weight.flatten(-2))


def _select(x: Tensor, scores: Tensor, k: int, tau: Number = 1.0, *, boost: float = 50.0, mode: str = "softmax") -> Tensor:
    if _is_traced(k):
        place, weight = _placed(scores, k, tau, boost, mode)
        out = torch.zeros(*x.shape[:-2], k, x.shape[-1], dtype=x.dtype, device=x.device)
        return out.scatter_add(-2, place.unsqueeze(-1).expand(x.shape), weight.unsqueeze(-1) * x)
    items, weight = _bracket(scores, k, tau, boost, mode)
    return collect(x, weight, items) if k else x[..., :0, :]


def _matrix(scores: Tensor, k: int, tau: Number, boost: float, mode: str) -> Tensor:
    if _is_traced(k):
        place, weight = _placed(scores, k, tau, boost, mode)
        out = torch.zeros(*scores.shape[:-1], k, scores.shape[-1], dtype=scores.dtype, device=scores.device)
        return out.scatter(-2, place.unsqueeze(-2), weight.unsqueeze(-2))
    items, weight = _bracket(scores, k, tau, boost, mode)
    out = torch.zeros(*scores.shape[:-1], k, scores.shape[-1], dtype=scores.dtype, device=scores.device)
    return out.scatter_add(-1, items, weight)


@relaxation(
    "halving",
    kind="matrix",
    cost="O(n log n); matrix O(nk)",
    paper="Pietruszka, Borchmann, Gralinski 2020",
    mask=_mask,
    select=_select,
    smooth=False,
    monotone=False,
    flat_limit=False,
    ties_equal=False,
    infinite=False,
)
def halving_matrix(scores: Tensor, k: int, tau: Number = 1.0, *, boost: float = 50.0, mode: str = "softmax") -> Tensor:
    r"""Successive halving: in each round the best meets the worst, and each pair goes on as one.

    .. math:: w = \mathrm{softmax}(C v_i / \tau, C v_j / \tau), \quad v' = w_1 v_i + w_2 v_j, \quad E' = w_1 E_i + w_2 E_j

    over :math:`\lceil \log_2 (n/k) \rceil` rounds. Where n is not k times a power of two, the best seeds have a bye in the first.
    Every item ends in one row, so that the mask is that item's weight and a selection costs O(nd). The seeding is taken as constant:
    the gradient is that of the weights. More than k items at +inf meet as equals, and so do not weigh the same in the end.

    Args:
        scores: ``(..., n)``.
        k: how many rows.
        tau: temperature, a number or ``(...)``. What counts is ``tau / boost``: with the default boost, ``tau=1`` here is as sharp as
            ``tau=0.02`` is for a softmax or a sigmoid of two scores.
        boost: the constant C; 50 in the paper. With ``boost=1`` tau has the scale it has in the other methods.
        mode: ``"softmax"``, or ``"power"`` for the published code's softmax over ``20 ** (v / tau)``, which ignores ``boost``, is
            not invariant to a shift of the scores, and overflows float32 from ``v / tau = 30`` on.

    Returns:
        ``(..., k, n)``, rows that sum to 1, one entry in each column.

    Example:
        >>> halving_matrix(torch.tensor([0.1, 0.9, 0.5, 0.6]), k=2, boost=5.0)
        tensor([[0.0180, 0.9820, 0.0000, 0.0000],
                [0.0000, 0.0000, 0.3775, 0.6225]])
    """
    check_size("halving", *scores.shape[:-1], k, scores.shape[-1], fix="soft_topk and select_topk need no matrix")
    return _matrix(scores, k, tau, boost, mode)
