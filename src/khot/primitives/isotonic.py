r"""Isotonic regression of whole batches: the non-increasing sequence nearest to a given one.

.. math:: \min_{v_1 \ge \dots \ge v_n} \sum_i w_i (v_i - y_i)^2

Pool-adjacent-violators walks along the row. Here the row is halved instead: the fits of two neighbouring halves differ from the fit of
their union in one block at the seam only, made of the left values below a level :math:`t` and of the right values above it, where

.. math:: \sum_{\text{left}} w_i (t - v_i)_+ = \sum_{\text{right}} w_i (v_i - t)_+ .

Both halves are sorted, so one ``searchsorted`` finds every block of a round: :math:`\log_2 n` rounds, each on the whole batch, and
:math:`O(n \log^2 n)` work whatever the values. What comes out is a partition; fits and their derivatives are means over its blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from khot import kernels
from khot._tensors import is_recorded, wide_dtype
from khot.primitives.operators import define_rows


class _Algebra(NamedTuple):
    """The four operations, on numbers or on their logarithms."""

    plus: Callable[[Tensor, Tensor], Tensor]
    minus: Callable[[Tensor, Tensor], Tensor]  # of a smaller from a larger
    times: Callable[[Tensor, Tensor], Tensor]
    over: Callable[[Tensor, Tensor], Tensor]
    running: Callable[[Tensor, int], Tensor]  # sums along a dimension
    zero: float
    one: float


def _log_minus(a: Tensor, b: Tensor) -> Tensor:
    less = torch.where(a > b, b - a, -1.0)
    return torch.where(a > b, a + torch.log(-torch.expm1(less)), -torch.inf)


_NUMBERS = _Algebra(torch.add, torch.sub, torch.mul, torch.div, torch.cumsum, 0.0, 1.0)
_LOGARITHMS = _Algebra(torch.logaddexp, _log_minus, torch.add, torch.sub, torch.logcumsumexp, -torch.inf, 0.0)


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
    blocks = find_blocks(wide, None if weights is None else heavy, logs=False)
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
    blocks = find_blocks(wide, heavy, logs=True)
    return (block_logsumexp(wide, blocks) - block_logsumexp(heavy, blocks)).to(s.dtype)


def block_ids(fit: Tensor) -> Tensor:
    """Number the blocks of equal neighbours: ``(..., n)`` integers that start at 0."""
    fresh = fit[..., 1:] != fit[..., :-1]
    return pad(fresh.long().cumsum(-1), (1, 0))


def block_sum(x: Tensor, blocks: Tensor) -> Tensor:
    """Every entry becomes the sum over its block."""
    return torch.zeros_like(x).scatter_add(-1, blocks, x).gather(-1, blocks)


def block_mean(x: Tensor, blocks: Tensor) -> Tensor:
    """Every entry becomes the mean over its block."""
    return block_sum(x, blocks) / block_sum(torch.ones_like(x), blocks)


def block_first(x: Tensor, blocks: Tensor) -> Tensor:
    """Every entry becomes the first of its block."""
    place = torch.arange(x.shape[-1], dtype=torch.long, device=x.device).expand(blocks.shape)
    fresh = pad(blocks[..., 1:] != blocks[..., :-1], (1, 0), value=True)
    return x.gather(-1, torch.where(fresh, place, 0).cummax(-1).values)


def block_logsumexp(x: Tensor, blocks: Tensor) -> Tensor:
    """Every entry becomes the log-sum-exp over its block."""
    floor = torch.full_like(x, -torch.inf)
    top = floor.scatter_reduce(-1, blocks, x.detach(), "amax").gather(-1, blocks)
    return top + block_sum(torch.exp(x - top), blocks).log()


def find_blocks(y: Tensor, weights: Tensor | None, logs: bool) -> Tensor:
    """Which neighbours share a value: ``(..., n)`` integers that start at 0, without gradient.

    Args:
        y: ``(..., n)``, in the dtype of :func:`khot._tensors.wide_dtype`.
        weights: positive, like ``y``; equal ones by default.
        logs: ``y`` and ``weights`` are the logarithms of the numerators and denominators of a ratio of sums, as in :func:`isotonic_kl`.

    Example:
        >>> find_blocks(torch.tensor([4.0, 1.0, 3.0, 2.0]), None, logs=False)
        tensor([0, 1, 1, 1])
    """
    y, weights = y.detach(), None if weights is None else weights.detach()
    native = kernels.pick("isotonic", y, weights, logs)
    if native is not None:
        return native(y, weights, logs)
    return torch.ops.khot.isotonic_blocks(y, weights, logs) if is_recorded() else merged_blocks(y, weights, logs)


def merged_blocks(y: Tensor, weights: Tensor | None, logs: bool) -> Tensor:
    """The same by merging halves: the reference."""
    return block_ids(_fit(y - weights if logs and weights is not None else y, weights, _LOGARITHMS if logs else _NUMBERS))


def _fit(y: Tensor, weights: Tensor | None, algebra: _Algebra) -> Tensor:
    """The fit of every row by merging halves."""
    n = y.shape[-1]
    if n < 2:
        return y
    size = 1 << (n - 1).bit_length()
    below = (y.amin(-1, keepdim=True) - 1).expand(*y.shape[:-1], size - n)
    value = torch.cat([y, below], -1)  # what is added at the end lies below everything and is never pooled
    weight = torch.full_like(value[..., :1], algebra.one) if weights is None else pad(weights, (0, size - n), value=algebra.one)
    weight = weight.expand_as(value)
    half = 1
    while half < size:
        pairs = (size // (2 * half), 2, half)
        value = _merge(value.unflatten(-1, pairs), weight.unflatten(-1, pairs), algebra).flatten(-3)
        half *= 2
    return value[..., :n]


def _merge(value: Tensor, weight: Tensor, algebra: _Algebra) -> Tensor:
    """``(..., 2, m)`` two sorted fits to ``(..., 2, m)`` the fit of both."""
    m = value.shape[-1]
    base = value[..., 1, :1]  # the level lies within a factor of n below it, so that differences are small
    left, right = (value - base.unsqueeze(-1)).unbind(-2)
    ends = _Sums(*(_suffix(x, algebra) for x in (algebra.times(weight[..., 0, :], left), weight[..., 0, :])))
    starts = _Sums(*(_prefix(x, algebra) for x in (algebra.times(weight[..., 1, :], right), weight[..., 1, :])))
    # A value on the left is pooled if what lies below it there weighs less than what lies above it on the right.
    below, above = ends.at(_count(left, left, right=True)), starts.at(_count(right, left))
    low = _distance(left, below, algebra) < _distance(left, above, algebra, above=True)
    crossed = value[..., 0, -1:] < base
    num_left = _whole_blocks(left.flip(-1), torch.where(crossed, low.sum(-1, keepdim=True), 0), falling=False)
    # And one on the right, if what lies above it there weighs less than what is pooled on the left.
    pool = ends.at(m - num_left)
    high = _distance(right, pool, algebra) > _distance(right, starts.at(_count(right, right)), algebra, above=True)
    num_right = _whole_blocks(right, torch.where(num_left > 0, high.sum(-1, keepdim=True), 0), falling=True)
    more = starts.at(num_right)
    level = algebra.over(algebra.plus(pool.value, more.value), algebra.plus(pool.weight, more.weight))
    return _pooled(value, base + level, num_left, num_right)


class _Sums(NamedTuple):
    """Sums from an end of the row: of weight times value, and of weights."""

    value: Tensor
    weight: Tensor

    def at(self, count: Tensor) -> _Sums:
        return _Sums(self.value.gather(-1, count), self.weight.gather(-1, count))


def _count(row: Tensor, of: Tensor, right: bool = False) -> Tensor:
    """How many of a falling row are above each value, or not below it."""
    return torch.searchsorted(-row.contiguous(), -of.contiguous(), right=right)


def _distance(x: Tensor, sums: _Sums, algebra: _Algebra, above: bool = False) -> Tensor:
    """The weighted sum of how far ``x`` lies above the values summed up, or below them. Nothing else is added, so that small weights
    are not lost beside large ones on the other side."""
    here = algebra.times(x, sums.weight)
    return algebra.minus(sums.value, here) if above else algebra.minus(here, sums.value)


def _pooled(value: Tensor, level: Tensor, num_left: Tensor, num_right: Tensor) -> Tensor:
    """``level`` for the last of the left half and the first of the right. Rounding must not lift it over its neighbours."""
    m = value.shape[-1]
    place = torch.arange(m, dtype=torch.long, device=value.device)
    pooled = torch.stack([place >= m - num_left, place < num_right], -2)
    ceiling = torch.where(pooled[..., :1, :], torch.inf, value[..., :1, :]).amin(-1, keepdim=True)
    floor = torch.where(pooled[..., 1:, :], -torch.inf, value[..., 1:, :]).amax(-1, keepdim=True)
    return torch.where(pooled, torch.maximum(torch.minimum(level.unsqueeze(-1), ceiling), floor), value)


def _whole_blocks(x: Tensor, count: Tensor, *, falling: bool) -> Tensor:
    """The first ``count`` of a sorted row, and those level with the last of them: rounding must not cut a block in two."""
    edge = x.gather(-1, (count - 1).clamp(min=0))
    return torch.where(count > 0, ((x >= edge) if falling else (x <= edge)).sum(-1, keepdim=True), 0)


def _suffix(x: Tensor, algebra: _Algebra) -> Tensor:
    """From each place to the end, which is empty."""
    return pad(algebra.running(x.flip(-1), -1).flip(-1), (0, 1), value=algebra.zero)


def _prefix(x: Tensor, algebra: _Algebra) -> Tensor:
    return pad(algebra.running(x, -1), (1, 0), value=algebra.zero)


def _shape(y: Tensor, weights: Tensor | None, logs: bool) -> Tensor:
    return torch.empty(y.shape, dtype=torch.long, device=y.device)


def _run(y: Tensor, weights: Tensor | None, logs: bool) -> Tensor:
    native = kernels.pick("isotonic", y, weights, logs)
    return (merged_blocks if native is None else native)(y, weights, logs)


# What compilers and tracing modes see in place of the rounds.
define_rows("isotonic_blocks(Tensor y, Tensor? weights, bool logs) -> Tensor", _run, _shape)
