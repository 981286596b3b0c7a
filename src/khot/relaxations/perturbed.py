"""Perturbed top-k: the mean of hard choices under noise."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function

from khot._settle import Among
from khot._tensors import Number, column, in_reach, source
from khot.primitives.limits import check_size
from khot.primitives.refuse import no_second_derivative
from khot.primitives.select import largest
from khot.registry import relaxation

_GROUP = 16  # rows that share their noise, each turned by some places and with signs of its own


class _Mean(Function):
    r"""The mean of the hard choices, with :math:`\partial_x E[f(x + \sigma z)] = E[f(x + \sigma z) z] / \sigma` for its gradient.

    ``f`` at the scores themselves is subtracted first: that changes no expectation, as the noise has mean 0, and much variance.
    Also returns the choices, ``(..., samples, k)``, and the one without noise, ``(..., 1, k)``.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        scores: Tensor, sigma: Number, noise: Tensor, signs: Tensor, items: Tensor | None, k: int, ordered: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        clean = scores if items is None else scores.masked_fill(~items, -torch.inf)
        index = _choices(clean, sigma * signs, noise, k)
        return _counts(index, scores, ordered) / noise.shape[-2], index, largest(clean, k).unsqueeze(-2)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        scores, sigma, noise, signs, _, _, ctx.ordered = inputs
        _, index, still = output
        ctx.mark_non_differentiable(index, still)
        ctx.sigma = None if isinstance(sigma, Tensor) else sigma
        ctx.save_for_backward(scores, noise, signs, index, still, *((sigma,) if isinstance(sigma, Tensor) else ()))

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        scores, noise, signs, index, still, *rest = ctx.saved_tensors
        with torch.no_grad():
            gains = _gain(grad, index, ctx.ordered) - _gain(grad, still, ctx.ordered)  # (..., samples)
            slope = _times_noise(gains, noise, scores) * signs / (noise.shape[-2] * (rest[0] if rest else ctx.sigma))
        return no_second_derivative(slope, "perturbed", scores, grad), None, None, None, None, None, None


def _choices(scores: Tensor, scale: Tensor, noise: Tensor, k: int) -> Tensor:
    """The ``k`` largest of each row under each draw, a group of rows at a time: all of the noisy scores never exist at once."""
    n, turn = scores.shape[-1], _turn(scores)
    rows, scales = (value.reshape(-1, n).gather(-1, turn).unsqueeze(-2) for value in (scores, scale.expand(scores.shape)))
    groups = zip(rows.split(_GROUP), scales.split(_GROUP), turn.split(_GROUP), noise.unbind(0), strict=True)
    # One buffer for the noisy scores of all groups: fresh memory would cost as much as the arithmetic in it.
    free = scores.new_empty((min(_GROUP, len(rows)), noise.shape[-2], n)) if in_reach(scores) and in_reach(noise) else None
    parts = [
        _turned_back(largest(torch.addcmul(x, s, z, out=None if free is None else free[: len(x)]), k), items) for x, s, items, z in groups
    ]
    return torch.cat(parts).reshape(*scores.shape[:-1], noise.shape[-2], k)


def _turn(scores: Tensor) -> Tensor:
    """Which item of each row, ``(rows, n)``, sees the noise at a place: each row of a group begins further on than the one before."""
    n, rows = scores.shape[-1], math.prod(scores.shape[:-1])
    row = torch.arange(rows, dtype=torch.long, device=scores.device).remainder(_GROUP).unsqueeze(-1)
    return (torch.arange(n, dtype=torch.long, device=scores.device) - row * max(1, n // _GROUP)).remainder(n)


def _turned_back(index: Tensor, turn: Tensor) -> Tensor:
    """Places in turned rows, ``(rows, samples, k)``, as items."""
    return turn.gather(-1, index.flatten(-2)).view(index.shape)


def _times_noise(gains: Tensor, noise: Tensor, scores: Tensor) -> Tensor:
    """The sums over all draws of ``gains`` ``(..., samples)`` times the noise of the row, ``(..., n)``."""
    groups = zip(gains.reshape(-1, gains.shape[-1]).split(_GROUP), noise.unbind(0), strict=True)
    sums = torch.cat([g @ z for g, z in groups])  # (rows, n), by places
    return torch.zeros_like(sums).scatter(-1, _turn(scores), sums).reshape(scores.shape)


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
    fix = "lower num_samples or split the batch"
    check_size("perturbed", *scores.shape[:-1], num_samples, max(1, k), what="table of choices", fix=fix)
    shape = (max(1, -(-math.prod(scores.shape[:-1]) // _GROUP)), num_samples, scores.shape[-1])
    noise = torch.randn(shape, dtype=scores.dtype, device=scores.device, **source(generator))
    signs = torch.randint(2, scores.shape, dtype=scores.dtype, device=scores.device, **source(generator)) * 2 - 1
    return _Mean.apply(scores, column(tau, scores), noise, signs, None if among is None else among.items, k, ordered)[0]


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
    estimates are unbiased. Sixteen rows share their random numbers: each turns them by some items and gives them signs of its own, so
    that the noise of every row is independent and normal, and the same item of two rows sees different numbers.

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
