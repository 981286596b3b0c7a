r"""The layers of a transformer, made from the operations of the two domains."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from khot.bounds._rounding import WORK, room
from khot.bounds.domain import Bound, Domain
from khot.bounds.elementwise import exp, reciprocal, rsqrt

_MOST = 700.0


def linear(x: Bound, weight: Tensor, bias: Tensor | None = None) -> Bound:
    """``x W^T + b`` over the last dimension: the map for centre and form, ``|W|`` for what is not linear."""
    w = weight.detach().to(WORK)
    out = x.linear(lambda t: t @ w.mT, lambda t: t @ w.abs().mT, w.shape[-1])
    return out if bias is None else out.shift(bias.detach().to(WORK))


def patches(x: Bound, weight: Tensor, bias: Tensor | None, size: int) -> Bound:
    """A convolution whose stride is its size, as a linear map of the pixels of each patch: ``(B, C, H, W) -> (B, N, D)``."""

    def cut(t: Tensor) -> Tensor:
        t = t.unflatten(-1, (-1, size)).unflatten(-3, (-1, size))  # (..., C, rows, size, columns, size)
        t = t.movedim((-4, -2, -5, -3, -1), (-5, -4, -3, -2, -1))  # (..., rows, columns, C, size, size)
        return t.flatten(-3).flatten(-3, -2)  # (..., N, C size^2)

    return linear(x.view(cut), weight.flatten(1), bias)


def layer_norm(x: Bound, weight: Tensor | None, bias: Tensor | None, eps: float) -> Bound:
    r"""``(x - mean) / sqrt(var + eps) * w + b`` over the last dimension.

    Taking the mean off is linear. The variance is the mean of squares, :math:`(\mathrm{var} + \epsilon)^{-1/2}` is convex, and the
    last step is a product. A normalised entry is at most :math:`\sqrt{n - 1}` in size, with equality where the others are equal.
    """
    n = x.shape[-1]
    centred = x.linear(lambda t: t - t.mean(-1, keepdim=True), lambda t: t * (1 - 2 / n) + t.mean(-1, keepdim=True), n)
    variance = centred.square().linear(lambda t: t.mean(-1, keepdim=True), terms=n).meet(0.0, torch.inf)
    scale = rsqrt(variance.shift(torch.tensor(eps, dtype=WORK, device=x.lower.device)).meet(eps * (1 - 1e-9), torch.inf))
    limit = max(n - 1, 1) ** 0.5 * (1 + 1e-9)
    out = centred.bilinear(scale, torch.mul, 1).meet(-limit, limit)
    if weight is not None:
        w = weight.detach().to(WORK)
        out = out.linear(lambda t: t * w, lambda t: t * w.abs())
    return out if bias is None else out.shift(bias.detach().to(WORK))


def matmul(x: Bound, y: Bound) -> Bound:
    """``x @ y`` of two bounds."""
    return x.bilinear(y, torch.matmul, x.shape[-1])


def cat(parts: Sequence[Bound], dim: int) -> Bound:
    """Bounds side by side along ``dim``, counted from the last."""
    return parts[0].beside(parts[1:], dim)


def gather(x: Bound, index: Tensor) -> Bound:
    """Rows ``index`` ``(B, M)`` of ``(B, N, d)``: a linear map with one 1 in each row."""

    def take(t: Tensor) -> Tensor:
        spread = index.view(index.shape[0], *[1] * (t.ndim - 3), index.shape[1], 1)
        return t.gather(-2, spread.expand(*t.shape[:-2], index.shape[1], t.shape[-1]))

    return x.view(take)


def softmax(x: Bound, members: Tensor | None = None, rest: Tensor | None = None) -> Bound:
    r"""Softmax over the last dimension, from differences: :math:`p_i = 1 / \sum_j e^{x_j - x_i}`.

    What all logits have in common cancels in the differences, in an :class:`Affine` for every input. Each :math:`e^{x_j - x_i}` and the
    reciprocal are convex.

    Some items may be uncertain: ``members`` (broadcastable to x) is 1 for an item that takes part, 0 for one that does not, and
    a half for one that may; exactly ``rest`` ``(B,)`` of the latter do. The sum over those, :math:`\sum_j z_j e_j`, lies around
    :math:`\rho \sum_j e_j` with :math:`\rho` = rest / number. With :math:`l_j \le e_j \le u_j` it is off by at most what the ``rest``
    items of largest :math:`(1 - \rho) u_j + \rho l_j` and of smallest :math:`(1 - \rho) l_j + \rho u_j` give.
    """
    n = x.shape[-1]
    other = 1 - torch.eye(n, dtype=WORK, device=x.lower.device)
    apart = x.linear(lambda t: t.unsqueeze(-2) - t.unsqueeze(-1), lambda t: (t.unsqueeze(-2) + t.unsqueeze(-1)) * other, 2)
    # Beyond e^700 a float64 overflows. A power that is cut off there leaves an upper bound of p; its lower bound is 0 then.
    powers = exp(apart.cap(_MOST))  # [..., i, j] = exp(x_j - x_i)
    far = (apart.upper >= _MOST).any(-1)
    if members is None or rest is None:
        return _at_least_zero(reciprocal(_total(powers).meet(1.0, torch.inf)).meet(0.0, 1.0), far)
    sure, maybe = (members == 1).to(WORK), (members == 0.5).to(WORK)
    sums = _total(powers.scale(sure.unsqueeze(-2)))
    own = 1 - sure  # an item that may take part counts itself when it is asked about
    sums = sums.plus(_uncertain(powers, maybe, rest, other))
    share = reciprocal(sums.shift(own).meet(1.0, torch.inf)).meet(0.0, 1.0)
    # z_i p_i = p_i / 2 + (z_i - 1/2) p_i, and the last term is at most half of the largest p_i.
    half = maybe * share.upper / 2
    kept = share.scale(sure + maybe / 2)
    return _at_least_zero(kept.loosen(half).meet(0.0, 1.0), far)


def attend(weights: Bound, values: Bound, members: Tensor | None = None) -> Bound:
    r"""``weights @ values`` for weights that sum to 1.

    As a linear form it is ``v + weights @ (values - v)`` for any constant v, here the mean value. As a box, the largest
    :math:`\sum_j p_j v_j` with :math:`l_j \le p_j \le u_j` and :math:`\sum_j p_j = 1` gives every item its :math:`l_j` and fills up
    the largest values first, each to its :math:`u_j`.
    """
    middle = values.middle
    there = torch.ones_like(middle[..., :1]) if members is None else members.unsqueeze(-1).expand(*middle.shape[:-1], 1)
    mean = (middle * there).sum(-2, keepdim=True) / there.sum(-2, keepdim=True)
    out = matmul(weights, values.shift(-mean)).shift(mean)
    least, most = -_fill_up(weights, -values.lower), _fill_up(weights, values.upper)
    size = room(torch.maximum(values.lower.abs(), values.upper.abs()).amax(-2, keepdim=True), 4 * weights.shape[-1])
    return out.meet(least - size, most + size)


def _fill_up(weights: Domain, values: Tensor) -> Tensor:
    """The largest mean of ``values`` ``(..., T, d)`` under weights ``(..., Q, T)`` between their ends that sum to 1."""
    ordered, order = values.sort(dim=-2, descending=True)
    low, free = weights.lower, weights.upper - weights.lower
    spread = order.unsqueeze(-3).expand(*free.shape[:-1], *order.shape[-2:])  # (..., Q, T, d)
    free = free.unsqueeze(-1).expand(spread.shape).gather(-2, spread)
    left = (1 - low.sum(-1))[..., None, None] - (free.cumsum(-2) - free)
    return low @ values + (torch.minimum(free, left.clamp(min=0)) * ordered.unsqueeze(-3)).sum(-2)


def _at_least_zero(weights: Bound, where: Tensor) -> Bound:
    """The lower end at 0 where that is all that is known: the value, at most e^-700, is within the slack of any form."""
    low = torch.where(where, 0.0, weights.lower)
    return weights.loosen(torch.where(where, weights.lower.clamp(min=0), 0.0)).meet(low, weights.upper)


def _total(x: Bound) -> Bound:
    return x.linear(lambda t: t.sum(-1), terms=x.shape[-1])


def _uncertain(powers: Bound, maybe: Tensor, rest: Tensor, other: Tensor) -> Bound:
    """The sum over those of the uncertain items that take part; an item does not count itself, and then one fewer is left."""
    among = maybe.unsqueeze(-2) * other  # (..., i, j)
    count = among.sum(-1)
    left = rest.to(WORK).view(-1, *[1] * (count.ndim - 1)) - maybe  # where i is uncertain itself, it is one of them
    share = (left / count.clamp(min=1)).clamp(0, 1)
    rho = share.unsqueeze(-1) * among
    mean = _total(powers.scale(rho))
    low, high = powers.lower, powers.upper
    most = _largest((1 - share).unsqueeze(-1) * high + share.unsqueeze(-1) * low, among, left) - (rho * low).sum(-1)
    least = -_largest(-((1 - share).unsqueeze(-1) * low + share.unsqueeze(-1) * high), among, left) - (rho * high).sum(-1)
    size = room((high * among).sum(-1), powers.shape[-1])
    middle, radius = (most + least) / 2, (most - least) / 2 + size
    box_low, box_high = -_largest(-low, among, left), _largest(high, among, left)
    return mean.shift(middle).loosen(radius).meet(box_low - size, box_high + size)


def _largest(values: Tensor, among: Tensor, count: Tensor) -> Tensor:
    """The sum of the ``count`` largest values of those that are ``among``."""
    ordered = values.masked_fill(among == 0, -torch.inf).sort(dim=-1, descending=True).values
    place = torch.arange(values.shape[-1], dtype=WORK, device=values.device)
    return torch.where((place < count.unsqueeze(-1)) & ordered.isfinite(), ordered, 0.0).sum(-1)
