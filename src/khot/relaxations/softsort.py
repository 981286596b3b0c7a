"""SoftSort."""

from typing import NamedTuple

import torch
from torch import Tensor

from khot._settle import Among
from khot._tensors import Number, column, deeper
from khot.primitives.limits import check_size
from khot.primitives.scan import decayed_cumsum
from khot.primitives.slopes import over
from khot.registry import relaxation


class _Kernel(NamedTuple):
    """The exponentials of a row, seen from its ``k`` largest scores, all without a ``(k, n)`` matrix."""

    index: Tensor  # (..., k), where the largest are
    step: Tensor  # (..., k, 1), from each of them to the one before
    here: Tensor  # (..., k, 1), 1 where there is an item
    wanted: Tensor  # (..., k, 1), 1 where the place is to be filled
    rest: Tensor  # (..., n), from the k-th to all the others, 0 at the k largest themselves


def _kernel(scores: Tensor, k: int, tau: Number, among: Among | None) -> _Kernel:
    index = (scores.detach() if among is None else among.hide(scores)).topk(k).indices
    top = scores.gather(-1, index)
    step = torch.cat([torch.zeros_like(top[..., :1]), _near(top[..., :-1], top[..., 1:], tau)], -1).unsqueeze(-1)
    rest = _near(top[..., -1:], scores, tau).scatter(-1, index, 0.0)
    every = torch.ones_like(step)
    if among is None:
        return _Kernel(index, step, every, every, rest)
    here = among.items.gather(-1, index).to(step.dtype).unsqueeze(-1)
    return _Kernel(index, step * here, here, among.wanted(k).to(step.dtype), torch.where(among.items, rest, 0.0))


def _near(high: Tensor, low: Tensor, tau: Number) -> Tensor:
    return torch.exp(-over((high - low).clamp(min=0), tau))


def _both_ways(values: Tensor, kernel: _Kernel, beyond: Tensor | float) -> Tensor:
    """Sum ``values`` over the ``k`` largest weighed by nearness, and what lies ``beyond`` the last of them."""
    back = torch.cat([kernel.step[..., 1:, :], torch.zeros_like(kernel.step[..., :1, :])], -2).flip(-2)
    seed = torch.cat([values[..., :-1, :], values[..., -1:, :] + beyond], -2)
    return decayed_cumsum(values, kernel.step) + decayed_cumsum(seed.flip(-2), back).flip(-2) - values


def _inverse_norms(kernel: _Kernel) -> Tensor:
    norms = _both_ways(kernel.here, kernel, kernel.rest.sum(-1, keepdim=True).unsqueeze(-1))
    return kernel.wanted / torch.where(kernel.wanted > 0, norms, 1.0)


def _mask(scores: Tensor, k: int, tau: Number = 1.0, *, among: Among | None = None) -> Tensor:
    if k == 0:
        return torch.zeros_like(scores)
    kernel = _kernel(scores, k, column(tau, scores), among)
    shares = _inverse_norms(kernel)
    inside = _both_ways(shares, kernel, 0.0).squeeze(-1)
    mask = (kernel.rest * decayed_cumsum(shares, kernel.step)[..., -1, :]).scatter(-1, kernel.index, inside)
    # The sums were taken in different orders; their ratio is 1 but for rounding.
    return mask * (kernel.wanted.sum((-1, -2)).unsqueeze(-1) / mask.detach().sum(-1, keepdim=True).clamp(min=1e-9))


def _select(x: Tensor, scores: Tensor, k: int, tau: Number = 1.0, *, among: Among | None = None) -> Tensor:
    if k == 0:
        return x[..., :0, :]
    kernel = _kernel(scores, k, column(tau, scores), among)
    largest = x.gather(-2, kernel.index.unsqueeze(-1).expand(*kernel.index.shape, x.shape[-1])) * kernel.here
    return _inverse_norms(kernel) * _both_ways(largest, kernel, kernel.rest.unsqueeze(-2) @ x)


def _matrix(scores: Tensor, k: int, tau: Number = 1.0, *, among: Among | None = None) -> Tensor:
    check_size("softsort", *scores.shape[:-1], k, scores.shape[-1], fix="soft_topk and select_topk need no matrix")
    top = scores.gather(-1, (scores.detach() if among is None else among.hide(scores)).topk(k).indices)
    logits = -over((top.unsqueeze(-1) - scores.unsqueeze(-2)).abs(), deeper(column(tau, scores)))
    return torch.softmax(logits if among is None else logits.masked_fill(~among.items.unsqueeze(-2), -torch.inf), -1)


@relaxation(
    "softsort",
    kind="matrix",
    cost="O(n + k log k); matrix O(nk)",
    paper="Prillo, Eisenschlos 2020",
    mask=_mask,
    select=_select,
    special=_matrix,
    smooth=False,
    bounded=False,
    monotone=False,
    complete=False,
)
def softsort_matrix(scores: Tensor, k: int, tau: Number = 1.0) -> Tensor:
    r"""SoftSort: every place in the order looks for the scores near its own.

    .. math:: P_{ij} = \frac{\exp(-|x_{(i)} - x_j| / \tau)}{\sum_l \exp(-|x_{(i)} - x_l| / \tau)}, \quad i = 1 \dots k

    with :math:`x_{(i)}` the i-th largest. As the exponential of a distance on the line factors through every point between, the mask
    and the selection need the k largest scores, one pass over the others, and a running sum: no ``(k, n)`` matrix.

    Args:
        scores: ``(..., n)``.
        k: how many rows.
        tau: temperature, a number or ``(...)``.

    Returns:
        ``(..., k, n)``, rows that sum to 1. The columns may sum to more than 1.

    Example:
        >>> softsort_matrix(torch.tensor([1.0, 3.0, 2.0]), k=2, tau=0.5)
        tensor([[0.0159, 0.8668, 0.1173],
                [0.1065, 0.1065, 0.7870]])
    """
    return _matrix(scores, k, tau)
