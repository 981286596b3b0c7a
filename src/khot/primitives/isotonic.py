r"""Isotonic regression of whole batches: the non-increasing sequence nearest to a given one.

.. math:: \min_{v_1 \ge \dots \ge v_n} \sum_i w_i (v_i - y_i)^2

Pool-adjacent-violators walks along the row. Here the row is halved instead: the fits of two neighbouring halves differ from the fit of
their union in one block at the seam only, made of the left values below a level :math:`t` and of the right values above it, where

.. math:: \sum_{\text{left}} w_i (t - v_i)_+ = \sum_{\text{right}} w_i (v_i - t)_+ .

Both halves are sorted, so one ``searchsorted`` finds every block of a round: :math:`\log_2 n` rounds, each on the whole batch, and
:math:`O(n \log^2 n)` work whatever the values. What comes out is a partition; fits and their derivatives are means over its blocks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from khot._tensors import wide_dtype

_FAR = 300.0  # exponents stay this side of overflow, far beyond anything that shares a block


def isotonic_l2(y: Tensor, weights: Tensor | None = None) -> Tensor:
    r"""The non-increasing fit in least squares.

    The derivative is that of a mean over each block of equal values, exact almost everywhere and differentiable again.

    Args:
        y: ``(..., n)``, finite.
        weights: positive, broadcast against ``y``; equal ones by default. They receive no gradient.

    Returns:
        Non-increasing along the last dimension, like ``y``.

    Example:
        >>> isotonic_l2(torch.tensor([4.0, 1.0, 3.0, 2.0, 2.0]))
        tensor([4., 2., 2., 2., 2.])
    """
    wide = y.to(wide_dtype(y))
    heavy = torch.ones_like(wide) if weights is None else weights.detach().to(wide.dtype).expand_as(wide)
    blocks = block_ids(_fit(wide.detach(), None if weights is None else heavy, log=False))
    return (block_sum(wide * heavy, blocks) / block_sum(heavy, blocks)).to(y.dtype)


def isotonic_kl(s: Tensor, w: Tensor) -> Tensor:
    r"""The non-increasing minimiser of :math:`\sum_i e^{s_i - v_i} + e^{w_i} v_i`.

    On a block it is the difference of the two log-sum-exps; the blocks are those of the weighted mean of :math:`e^{s - w}` with
    weights :math:`e^w`.

    Args:
        s: ``(..., n)``, finite.
        w: like ``s``.

    Returns:
        Non-increasing along the last dimension, like ``s``; differentiable in both.

    Example:
        >>> isotonic_kl(torch.tensor([2.0, 0.0, 1.0]), torch.zeros(3))
        tensor([2.0000, 0.6201, 0.6201])
    """
    s, w = torch.broadcast_tensors(s, w)
    wide, heavy = s.to(wide_dtype(s)), w.to(wide_dtype(w))
    scale = torch.exp(heavy.detach() - heavy.detach().amax(-1, keepdim=True))
    blocks = block_ids(_fit((wide - heavy).detach(), scale, log=True))
    return (block_logsumexp(wide, blocks) - block_logsumexp(heavy, blocks)).to(s.dtype)


def block_ids(fit: Tensor) -> Tensor:
    """Number the blocks of equal neighbours: ``(..., n)`` integers that start at 0."""
    fresh = fit[..., 1:] != fit[..., :-1]
    return torch.nn.functional.pad(fresh.long().cumsum(-1), (1, 0))


def block_sum(x: Tensor, blocks: Tensor) -> Tensor:
    """Every entry becomes the sum over its block."""
    return torch.zeros_like(x).scatter_add(-1, blocks, x).gather(-1, blocks)


def block_mean(x: Tensor, blocks: Tensor) -> Tensor:
    """Every entry becomes the mean over its block."""
    return block_sum(x, blocks) / block_sum(torch.ones_like(x), blocks)


def block_first(x: Tensor, blocks: Tensor) -> Tensor:
    """Every entry becomes the first of its block."""
    place = torch.arange(x.shape[-1], dtype=torch.long, device=x.device).expand(blocks.shape)
    fresh = torch.nn.functional.pad(blocks[..., 1:] != blocks[..., :-1], (1, 0), value=True)
    return x.gather(-1, torch.where(fresh, place, 0).cummax(-1).values)


def block_logsumexp(x: Tensor, blocks: Tensor) -> Tensor:
    """Every entry becomes the log-sum-exp over its block."""
    floor = torch.full_like(x, -torch.inf)
    top = floor.scatter_reduce(-1, blocks, x.detach(), "amax").gather(-1, blocks)
    return top + block_sum(torch.exp(x - top), blocks).log()


def l2_blocks(y: Tensor) -> Tensor:
    """The blocks of :func:`isotonic_l2`, without gradient."""
    return block_ids(_fit(y.detach(), None, log=False))


def kl_blocks(y: Tensor, weights: Tensor) -> Tensor:
    """The blocks of the weighted mean of ``exp(y)``, which are those of :func:`isotonic_kl` with ``y = s - w``."""
    return block_ids(_fit(y.detach(), weights.detach().expand_as(y), log=True))


def _fit(y: Tensor, weights: Tensor | None, *, log: bool) -> Tensor:
    """The fit of every row by merging halves; ``log``: a block's value is the logarithm of the mean of ``exp(y)``."""
    n = y.shape[-1]
    if n < 2:
        return y
    size = 1 << (n - 1).bit_length()
    below = (y.amin(-1, keepdim=True) - 1).expand(*y.shape[:-1], size - n)
    value = torch.cat([y, below], -1)  # what is added at the end lies below everything and is never pooled
    weight = torch.ones_like(value[..., :1]) if weights is None else torch.nn.functional.pad(weights, (0, size - n), value=1.0)
    weight = weight.expand_as(value)
    half = 1
    while half < size:
        pairs = (size // (2 * half), 2, half)
        value = _merge(value.unflatten(-1, pairs), weight.unflatten(-1, pairs), log).flatten(-3)
        half *= 2
    return value[..., :n]


def _merge(value: Tensor, weight: Tensor, log: bool) -> Tensor:
    """``(..., 2, m)`` two sorted fits to ``(..., 2, m)`` the fit of both."""
    m = value.shape[-1]
    base = value[..., 1, :1]  # the level lies within a factor of n below it, so that differences and exponentials are harmless
    away = value - base.unsqueeze(-1)
    left, right = (torch.exp(away.clamp(-_FAR, _FAR)) if log else away).unbind(-2)
    left_sum, left_weight = _suffix(weight[..., 0, :] * left), _suffix(weight[..., 0, :])
    right_sum, right_weight = _prefix(weight[..., 1, :] * right), _prefix(weight[..., 1, :])
    above = torch.searchsorted(-right.contiguous(), -left.contiguous())  # how many on the right exceed each on the left
    excess = left * (left_weight + right_weight.gather(-1, above)) - left_sum - right_sum.gather(-1, above)
    crossed = value[..., 0, -1:] < base
    num_left = _whole_blocks(left.flip(-1), torch.where(crossed, (excess < 0).sum(-1, keepdim=True), 0), falling=False)
    first = (m - num_left).clamp(max=m - 1)
    pool_sum, pool_weight = left_sum.gather(-1, first), left_weight.gather(-1, first)
    rise = right * (pool_weight + right_weight[..., :-1]) - pool_sum - right_sum[..., :-1]
    num_right = _whole_blocks(right, torch.where(num_left > 0, (rise > 0).sum(-1, keepdim=True), 0), falling=True)
    level = (pool_sum + right_sum.gather(-1, num_right)) / (pool_weight + right_weight.gather(-1, num_right))
    level = base + (level.log() if log else level)
    place = torch.arange(m, dtype=torch.long, device=value.device)
    pooled = torch.stack([place >= m - num_left, place < num_right], -2)
    # Rounding must not lift a block over its neighbours.
    ceiling = torch.where(pooled[..., :1, :], torch.inf, value[..., :1, :]).amin(-1, keepdim=True)
    floor = torch.where(pooled[..., 1:, :], -torch.inf, value[..., 1:, :]).amax(-1, keepdim=True)
    return torch.where(pooled, torch.maximum(torch.minimum(level.unsqueeze(-1), ceiling), floor), value)


def _whole_blocks(x: Tensor, count: Tensor, *, falling: bool) -> Tensor:
    """The first ``count`` of a sorted row, and those level with the last of them: rounding must not cut a block in two."""
    edge = x.gather(-1, (count - 1).clamp(min=0))
    return torch.where(count > 0, ((x >= edge) if falling else (x <= edge)).sum(-1, keepdim=True), 0)


def _suffix(x: Tensor) -> Tensor:
    return x.flip(-1).cumsum(-1).flip(-1)


def _prefix(x: Tensor) -> Tensor:
    return torch.nn.functional.pad(x.cumsum(-1), (1, 0))
