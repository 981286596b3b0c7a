"""Sampford's design."""

from __future__ import annotations

import math

import torch
from torch import Generator, Tensor

from khot._tensors import in_transform, is_recorded, readable
from khot.designs._common import largest, logit, uniform
from khot.primitives.draw import refuse_generator
from khot.primitives.fixed_point import spread
from khot.primitives.operators import define
from khot.registry import design

# The k-subset distribution is imported where it is used: not every program needs its six files and five operators.

_MANY = 64  # items to draw, and _SPREAD the variance, from which on the quadrature is cheaper than the tree
_SPREAD = 8.0
_LOG_EPS = 38.0  # - log of what may be neglected
_RUN = 8  # factors of at most e^48 that are multiplied before a logarithm is taken: no product overflows
_ROUNDS = 64  # of rejection; a row that is still left is drawn from the tree, which is exact too


def sampford_log_prob(probs: Tensor, sample: Tensor) -> Tensor:
    """``(..., n), (..., n) -> (...)`` in float64; -inf for a sample that cannot be drawn."""
    from khot.primitives.poisson_binomial import log_chance, marginals

    k = probs.sum(-1, keepdim=True, dtype=torch.float64).round().long()
    p = spread(probs, k)
    logits = torch.logit(p)
    slack = (sample * (1 - p)).sum(-1)
    expected = ((1 - p) * marginals(logits, k).probs).sum(-1)
    settled = (p >= 1).sum(-1) == k.squeeze(-1)  # nothing is random: one sample, and no slack to weigh it by
    return log_chance(logits, k, sample) + torch.where(settled, 0.0, slack.log() - expected.log())


@design(
    "sampford",
    cost="O(nk), O(n) for k >= 64",
    paper="Sampford 1967; Bondesson, Traat and Lundqvist 2006",
    exact=True,
    log_prob=sampford_log_prob,
)
def sampford(probs: Tensor, k: Tensor, *, generator: Generator | None = None) -> Tensor:
    r"""Closed probabilities with exact inclusion probabilities, no calibration needed.

    .. math:: p(s) \propto \prod_{i \in s} \frac{\pi_i}{1 - \pi_i} \cdot \sum_{i \in s} (1 - \pi_i)

    Small samples are drawn as a mixture: one member l with weight :math:`(1 - \pi_l) m_l`, with m the marginals of the k-subset
    distribution of the odds, the other k - 1 from the k-1-subset distribution without l. Large ones are Pareto samples, which
    have probabilities of the same form with :math:`c_i` in place of :math:`1 - \pi_i`; a sample is kept with the ratio of the two
    sums for its probability, which is nearly 1. Both are exact.

    Args:
        probs: ``(..., n)`` in [0, 1].
        k: ``(..., 1)`` whole numbers, the rows' sums.

    Returns:
        0/1 like ``probs``.

    Example:
        >>> sampford(torch.tensor([0.5, 0.5, 1.0, 0.0]), torch.tensor([2])).sum()
        tensor(2.)
    """
    if in_transform():
        return _by_tree(spread(probs, k), k, generator).to(probs.dtype)
    if is_recorded():  # one operator: its rounds depend on what is drawn
        refuse_generator(generator)
        return torch.ops.khot.sampford(probs, k)
    return _draw(probs, k, generator)


def _draw(probs: Tensor, k: Tensor, generator: Generator | None = None) -> Tensor:
    p = spread(probs, k).reshape(-1, probs.shape[-1])
    k = k.expand(*probs.shape[:-1], 1).reshape(-1, 1)
    few = torch.minimum(k, p.shape[-1] - k)
    large = ((few >= _MANY) & ((p * (1 - p)).sum(-1, keepdim=True) >= _SPREAD)).squeeze(-1)
    out = torch.empty_like(p)
    for rows, draw in ((large, by_rejection), (~large, _by_tree)):
        if readable(rows) and bool(rows.all()):
            out = draw(p, k, generator)
        elif bool(rows.any()):
            out[rows] = draw(p[rows], k[rows], generator)
    return out.reshape(probs.shape).to(probs.dtype)


def _by_tree(p: Tensor, k: Tensor, generator: Generator | None) -> Tensor:
    from khot.primitives.poisson_binomial import marginals
    from khot.primitives.subsets import draw_subsets

    logits = torch.logit(p)
    weight = (1 - p) * marginals(logits, k).probs
    first = (weight / -uniform(p, generator).log()).argmax(-1, keepdim=True)
    live = weight.sum(-1, keepdim=True) > 0  # else nothing is random
    logits = torch.where(live, logits.scatter(-1, first, -torch.inf), logits)
    others = draw_subsets(logits, k - live.long(), 1, generator).squeeze(0)
    return others.scatter_add(-1, first, live.to(p.dtype))


def by_rejection(p: Tensor, k: Tensor, generator: Generator | None) -> Tensor:
    """Pareto samples of the rows ``(R, n)``, kept or drawn again; every row must have something random."""
    slack, weight = 1 - p, pareto_weights(p, k)
    ratio = torch.where(weight > 0, slack / weight, 0.0).amax(-1)  # no sample has a larger one
    odds, out = logit(p), torch.empty_like(p)
    left = torch.arange(p.shape[0], dtype=torch.long, device=p.device)
    for _ in range(_ROUNDS):
        z = largest(odds[left] - logit(uniform(p[left], generator)), k[left])
        keep = (z * slack[left]).sum(-1) / ((z * weight[left]).sum(-1) * ratio[left])
        kept = torch.rand(keep.shape, dtype=p.dtype, device=p.device, generator=generator) < keep
        out[left[kept]] = z[kept]
        left = left[~kept]
        if not left.numel():
            return out
    out[left] = _by_tree(p[left], k[left], generator)
    return out


def pareto_weights(p: Tensor, k: Tensor) -> Tensor:
    r"""``c`` such that a Pareto sample s has a probability in proportion to the product of its odds times the sum of its ``c``.

    .. math:: c_i = \int e^{g(u)} \frac{1 - \pi_i}{1 - \pi_i + \pi_i e^u} du, \quad
        g(u) = k u - \textstyle\sum_j \log(1 - \pi_j + \pi_j e^u)

    by integrating over the largest rank in the sample, with :math:`e^u` for that rank. g is concave with its top at 0 and
    :math:`-g(u) \ge d (e^{-|u|} + |u| - 1)`, d the variance, so that the trapezoidal rule converges geometrically: a step of .7
    standard deviations, and at most 1/2 as the integrand is analytic in a strip of width :math:`2 \pi`, leaves rounding only.

    Args:
        p: ``(R, n)`` in float64, with a variance of 1 at least.
        k: ``(R, 1)`` the rows' sums.
    """
    variance = (p * (1 - p)).sum(-1, keepdim=True)
    step = (0.7 / variance.sqrt()).clamp(max=0.5)
    y = _LOG_EPS / variance
    num_steps = math.ceil(float(((y + 1.2 * (2 * y).sqrt()) / step).max()))  # e^-L + L - 1 > y for that L
    p = p.detach()
    total, away = torch.zeros_like(p), torch.empty_like(p)
    for m in range(-num_steps, num_steps + 1):
        u = step * m
        torch.mul(p, torch.expm1(u), out=away).add_(1)
        total.addcdiv_((k * u - _log_product(away)).exp_(), away)
    return total.mul_(1 - p).mul_(step)


def _log_product(values: Tensor) -> Tensor:
    """The logarithm of the product of each row, ``(R, 1)``: a logarithm takes as long as eight products."""
    even = values.shape[-1] // _RUN * _RUN
    first, rest = values.split([even, values.shape[-1] - even], -1)
    return first.unflatten(-1, (_RUN, even // _RUN)).prod(-2).log_().sum(-1, keepdim=True) + rest.log().sum(-1, keepdim=True)


def _fake(probs: Tensor, k: Tensor) -> Tensor:
    return torch.empty_like(probs, memory_format=torch.contiguous_format)


define("sampford(Tensor probs, Tensor k) -> Tensor", _draw, _fake, random=True)
