"""Relaxed subset sampling, one draw after the other."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from khot._settle import Among
from khot._tensors import Number, column, readable, source
from khot.primitives.limits import check_size
from khot.primitives.slopes import over
from khot.primitives.successive import successive_softmaxes, sum_of_softmaxes
from khot.registry import relaxation


def gumbel_noise(scores: Tensor, generator: torch.Generator | None) -> Tensor:
    uniform = torch.rand(scores.shape, dtype=scores.dtype, device=scores.device, **source(generator))
    return -(-uniform.clamp(min=torch.finfo(scores.dtype).tiny).log()).log()


def _logits(scores: Tensor, tau: Number, noise: bool, generator: torch.Generator | None, among: Among | None) -> Tensor:
    keys = scores + gumbel_noise(scores, generator) if noise else scores
    if isinstance(tau, Tensor):
        keys = keys - keys.detach().amax(-1, keepdim=True)  # a shift changes nothing, and equal scores then have no part in tau's gradient
    logits = over(keys, tau)
    if not (readable(logits) and math.isfinite(logits.detach().abs().sum().item())):
        logits = _without_overflow(logits, keys)
    return logits if among is None else logits.masked_fill(~among.items, -torch.inf)


def _without_overflow(logits: Tensor, keys: Tensor) -> Tensor:
    """Logits of finite scores beyond the dtype become the largest there are, in the order of the scores; without gradient."""
    still, most = keys.detach().contiguous(), torch.finfo(keys.dtype).max / 4
    place = torch.searchsorted(still.sort(-1).values, still).to(keys.dtype) / keys.shape[-1]  # equal for equal scores
    beyond = logits.detach().abs() >= torch.finfo(keys.dtype).max
    return torch.where(beyond, torch.where(logits > 0, (1 + place) * most, (place - 2) * most), logits)


def _matrix(
    scores: Tensor,
    k: int,
    tau: Number = 1.0,
    *,
    noise: bool = False,
    generator: torch.Generator | None = None,
    among: Among | None = None,
) -> Tensor:
    check_size("sequential", *scores.shape[:-1], k, scores.shape[-1])
    width = column(tau, scores)
    return successive_softmaxes(_logits(scores, width, noise, generator, among), width, k)


def _mask(
    scores: Tensor,
    k: int,
    tau: Number = 1.0,
    *,
    noise: bool = False,
    generator: torch.Generator | None = None,
    among: Among | None = None,
) -> Tensor:
    if among is None:
        width = column(tau, scores)
        return sum_of_softmaxes(_logits(scores, width, noise, generator, None), width, k)
    matrix = _matrix(scores, k, tau, noise=noise, generator=generator, among=among)
    return torch.where(among.wanted(k), matrix, 0.0).sum(-2)


@relaxation(
    "sequential",
    kind="matrix",
    cost="O(nk)",
    paper="Xie, Ermon 2019; Ploetz, Roth 2018",
    mask=_mask,
    special=_matrix,
    smooth=False,
    bounded=False,
    monotone=False,
    complete=False,
    scale_free=False,
)
def sequential_matrix(
    scores: Tensor, k: int, tau: Number = 1.0, *, noise: bool = False, generator: torch.Generator | None = None
) -> Tensor:
    r"""Relaxed subset sampling: k softmaxes, each without what the ones before it have taken.

    .. math:: p^{(i)} = \mathrm{softmax}(a^{(i)} / \tau), \quad a^{(i+1)} = a^{(i)} + \log(1 - p^{(i)}), \quad a^{(1)} = x

    With Gumbel noise on the scores the hard limit is a draw of k items without replacement; without it, the top-k. The subtracted
    logarithm is not divided by the scale of the scores, so that at a temperature of 1 or more even large scores stay soft.

    Where the scores span hundreds of ``tau``, a step moves an item by ``1/tau`` times its lead over the next one. Below a temperature of 1
    such differences grow from row to row, rounding included: with normal scores of scale 100, n = 64 and ``tau = 0.3``, a change of
    the scores by a part in 10⁹ moves entries of later rows by up to 0.7, and float32 and float64 part as much.

    The rows depend on each other, so that there is nothing to do but k steps of n entries, one after the other: a sum, a quotient and
    ``1/tau`` products each where ``1/tau`` is 1, 2, 3 or 4 and the scores span less than ``70 tau``, else a softmax and a logarithm.
    The backward pass takes as long again; the mask keeps no ``(..., k, n)`` tensor in the first case.

    Args:
        scores: ``(..., n)``.
        k: how many rows.
        tau: temperature, a number or ``(...)``.
        noise: add Gumbel noise to the scores.
        generator: of that noise.

    Returns:
        ``(..., k, n)``, rows that sum to 1. The columns may sum to more than 1.

    Example:
        >>> sequential_matrix(torch.tensor([1.0, 3.0, 2.0]), k=2, tau=0.5)
        tensor([[0.0159, 0.8668, 0.1173],
                [0.1259, 0.1259, 0.7482]])
    """
    return _matrix(scores, k, tau, noise=noise, generator=generator)
