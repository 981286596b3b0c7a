"""Perturbed top-k: the mean of hard choices under noise."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from khot._settle import Among
from khot._tensors import Number, column, deeper
from khot.primitives.limits import check_size
from khot.registry import relaxation


class _Mean(Function):
    r"""The mean of the hard choices, with :math:`\partial_x E[f(x + \sigma z)] = E[f(x + \sigma z) z] / \sigma` for its gradient.

    ``f`` at the scores themselves is subtracted first: that changes no expectation, as the noise has mean 0, and much variance.
    """

    @staticmethod
    def forward(ctx: Any, scores: Tensor, sigma: Number, noise: Tensor, k: int, ordered: bool, among: Among | None) -> Tensor:
        clean = scores if among is None else among.hide(scores)
        index = (clean.unsqueeze(-2) + deeper(sigma) * noise).topk(k).indices  # (..., samples, k)
        ctx.save_for_backward(noise, index, clean.topk(k).indices)
        ctx.spread, ctx.ordered = sigma, ordered
        return _counts(index, scores, ordered) / noise.shape[-2]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        noise, index, still = ctx.saved_tensors
        gains = _gain(grad, index, ctx.ordered) - _gain(grad, still.unsqueeze(-2), ctx.ordered)  # (..., samples)
        slope = (gains.unsqueeze(-2) @ noise).squeeze(-2) / (noise.shape[-2] * ctx.spread)
        return slope, None, None, None, None, None


def _counts(index: Tensor, scores: Tensor, ordered: bool) -> Tensor:
    """How often each item was chosen, ``(..., n)``, or for each place, ``(..., k, n)``."""
    where = index.mT if ordered else index.flatten(-2)
    zeros = torch.zeros(*where.shape[:-1], scores.shape[-1], dtype=scores.dtype, device=scores.device)
    return zeros.scatter_add(-1, where, torch.ones_like(where, dtype=scores.dtype))


def _gain(grad: Tensor, index: Tensor, ordered: bool) -> Tensor:
    """The inner product of ``grad`` with each hard choice."""
    if ordered:
        return grad.gather(-1, index.mT).sum(-2)
    return grad.unsqueeze(-2).expand(*index.shape[:-1], grad.shape[-1]).gather(-1, index).sum(-1)


def _mean(
    scores: Tensor, k: int, tau: Number, num_samples: int, generator: torch.Generator | None, ordered: bool, among: Among | None
) -> Tensor:
    if num_samples < 1:
        raise ValueError(f"num_samples must be at least 1, got {num_samples}")
    shape = (*scores.shape[:-1], num_samples, scores.shape[-1])
    check_size("perturbed", *shape, what="noise", fix="lower num_samples or split the batch")
    noise = torch.randn(shape, generator=generator, dtype=scores.dtype, device=scores.device)
    return _Mean.apply(scores, column(tau, scores), noise, k, ordered, among)


def _mask(
    scores: Tensor,
    k: int,
    tau: Number = 1.0,
    *,
    num_samples: int = 500,
    generator: torch.Generator | None = None,
    among: Among | None = None,
) -> Tensor:
    if among is None:
        return _mean(scores, k, tau, num_samples, generator, ordered=False, among=None)
    matrix = _mean(scores, k, tau, num_samples, generator, ordered=True, among=among)
    return torch.where(among.wanted(k), matrix, 0.0).sum(-2)


def _matrix(
    scores: Tensor,
    k: int,
    tau: Number = 1.0,
    *,
    num_samples: int = 500,
    generator: torch.Generator | None = None,
    among: Among | None = None,
) -> Tensor:
    return _mean(scores, k, tau, num_samples, generator, ordered=True, among=among)


@relaxation(
    "perturbed",
    kind="matrix",
    cost="O(n s) for s samples",
    paper="Berthet et al. 2020; Cordonnier et al. 2021",
    mask=_mask,
    special=_matrix,
    deterministic=False,
    grad_tau=False,
    double_backward=False,
    forward_mode=False,
    compiles=False,
)
def perturbed_matrix(
    scores: Tensor, k: int, tau: Number = 1.0, *, num_samples: int = 500, generator: torch.Generator | None = None
) -> Tensor:
    r"""Perturbed top-k: how often each item is the i-th largest when the scores are seen through noise.

    .. math:: P = E_z[\mathrm{topk}(x + \tau z)], \quad z \sim N(0, I)

    estimated from ``num_samples`` draws, as is its gradient, :math:`E_z[\langle g, \mathrm{topk}(x + \tau z) \rangle z] / \tau`. Both
    estimates are unbiased.

    Args:
        scores: ``(..., n)``.
        k: how many rows.
        tau: the standard deviation of the noise, a number or ``(...)``.
        num_samples: how many draws.
        generator: of the draws.

    Returns:
        ``(..., k, n)``, rows that sum to 1.

    Example:
        >>> perturbed_matrix(torch.tensor([1.0, 3.0, 2.0]), k=2, tau=0.1)
        tensor([[0., 1., 0.],
                [0., 0., 1.]])
    """
    return _matrix(scores, k, tau, num_samples=num_samples, generator=generator)
