r"""How many of independent coins show heads, and which: the sums over all k-subsets behind conditional Poisson sampling.

The weight of a subset is :math:`\exp \sum_{i \in s} \lambda_i`, and the sum over all subsets of size k is the elementary symmetric
polynomial :math:`e_k(\exp\lambda)`. Its terms span more than any floating-point format. A common shift of all :math:`\lambda_i`
changes the weights of all k-subsets alike, so take one at which the coins :math:`p_i = \sigma(\lambda_i - t)` expect about k heads:

.. math:: \log e_k(\exp \lambda) = k t + \sum_i \log(1 + e^{\lambda_i - t}) + \log \Pr[\textstyle\sum_i z_i = k] .

The mode of a sum of coins lies within 1 of its mean, at an integer mean it is the mean (Darroch 1964), so the last probability is
of the order of 1/n at least: nothing that matters can underflow. It comes from a tree of products of small polynomials (the
distribution of the number of heads in each half), truncated at degree k: O(nk) multiplications in log2(n) rounds, all of
non-negative numbers. Gradients go through the same tree, samples come down it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad, softplus

from khot._tensors import in_transform, readable, wide_dtype
from khot.primitives.polynomial import product


class Coins(NamedTuple):
    """The tilted coins of ``R`` rows."""

    tails_heads: Tensor  # (2, n, R)
    log_odds: Tensor  # (n, R)
    k: Tensor  # (R,) how many heads
    free_k: Tensor  # (R,) how many of them among the free
    shift: Tensor  # (R,)


def tilt(logits: Tensor, k: Tensor) -> Coins:
    """The coins of every row at the shift where they expect ``k`` heads; -inf never shows heads, +inf always.

    Args:
        logits: ``(..., n)``.
        k: ``(..., 1)`` whole numbers.
    """
    x = logits.reshape(-1, logits.shape[-1])
    rest = k = k.expand(*logits.shape[:-1], 1).reshape(-1, 1).to(x.device)
    free = x.isfinite()
    whole = readable(free) and bool(free.all())
    if not whole:
        rest = k - (x == torch.inf).sum(-1, keepdim=True)
    t, s = _shift(x.detach(), rest, None if whole else free, largest(k))
    wide = x.to(t.dtype)
    u = wide - t + s if whole else torch.where(free, wide - t + s, wide)
    u = u.T.contiguous()
    return Coins(torch.sigmoid(torch.stack((-u, u))), u, k.squeeze(-1), rest.squeeze(-1), (t - s).squeeze(-1))


def largest(k: Tensor) -> int:
    """The largest number in ``k``, 0 if there is none."""
    return int(k.max()) if k.numel() else 0


def _shift(x: Tensor, k: Tensor, free: Tensor | None, most: int) -> tuple[Tensor, Tensor]:
    """``t`` and ``s`` such that ``sum sigmoid(x - t + s)`` is so near to ``k`` that k is about the mode.

    ``t`` is the k-th largest, near which differences are exact however large the logits; ``s`` is then of the order of log n.
    """
    n = x.shape[-1]
    size = n if free is None else free.sum(-1, keepdim=True)
    x = x if free is None else torch.where(free, x, -torch.inf)
    top = x.topk(min(n, max(1, most))).values
    t = top.gather(-1, (k - 1).clamp(0, top.shape[-1] - 1))
    t = torch.where(t.isfinite(), t, 0.0)
    shift = _near_shift((x - t).float(), k.float(), n)
    # Where none or all of the free coins are heads it would be infinite; far away is as good.
    shift = torch.where(k <= 0, 40.0, torch.where(k >= size, -40.0, shift))
    return t.to(wide_dtype(x)), -shift.to(wide_dtype(x))


def _near_shift(x: Tensor, k: Tensor, n: int) -> Tensor:
    """Newton inside a bracket that holds when the k-th largest is 0, until k is within half a standard deviation or 1/4."""
    low, high = -(4 * k.clamp(min=1)).log() - 1, torch.full_like(k, math.log(n) + 1)
    shift = torch.zeros_like(k)
    for _ in range(40):
        p = torch.sigmoid(x - shift)
        total = p.sum(-1, keepdim=True)
        excess, variance = total - k, total - p.square_().sum(-1, keepdim=True)
        far = 4 * excess.square() > variance.clamp(min=0.25)
        if readable(far) and not bool(far.any()):
            break
        low, high = torch.where(excess > 0, shift, low), torch.where(excess > 0, high, shift)
        newton = shift + (total / k).log() * total / variance  # on the logarithm of the sum, which is nearly straight for k << n
        newton = torch.where((newton > low) & (newton < high), newton, (low + high) / 2)
        shift = torch.where(far, newton, shift)
    return shift


def levels_of(leaves: Tensor, size: int, nodes: int = 1, multiply: Callable[..., Tensor] = product) -> list[Tensor]:
    """The tree from the leaves up to a level of ``nodes``: level ``l`` holds ``(min(2**l, size) + 1, its nodes, R)``."""
    levels = [leaves]
    while levels[-1].shape[1] > nodes:
        a, b = halves(levels[-1])
        levels.append(multiply(a, b, 0, min(2 * (a.shape[0] - 1), size) + 1))
    return levels


def halves(nodes: Tensor) -> tuple[Tensor, Tensor]:
    """Any pairing of the nodes will do; an odd one meets the polynomial 1."""
    half = (nodes.shape[1] + 1) // 2
    left, right = nodes.split(half, 1)
    if right.shape[1] < half:
        one = torch.zeros_like(nodes[:, :1])
        one[0] = 1.0
        right = torch.cat((right, one), 1)
    return left, right


def fewer(tails_heads: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rows that want more than half heads count tails instead."""
    n = tails_heads.shape[1]
    many = 2 * k > n
    if not bool(many.any()):
        return tails_heads, k, many
    return torch.where(many, tails_heads.flip(0), tails_heads), torch.where(many, n - k, k), many


def log_heads(tails_heads: Tensor, k: Tensor) -> Tensor:
    """``log Pr[k heads]`` of each row, ``(2, n, R), (R,) -> (R,)``; a function of its first argument of any 2 n numbers >= 0."""
    leaves, k, _ = fewer(tails_heads, k)
    most = largest(k)
    root = levels_of(leaves, most)[-1].squeeze(1)
    root = pad(root, (0, 0, 0, max(0, most + 1 - root.shape[0])))
    return root.gather(0, k.unsqueeze(0)).squeeze(0).log()


def log_partition(logits: Tensor, k: Tensor) -> Tensor:
    r""":math:`\log e_k(\exp\lambda)`, the log of the sum over all k-subsets, differentiable any number of times.

    Args:
        logits: ``(..., n)``; -inf excludes an item, +inf makes it certain (and adds nothing to the sum).
        k: ``(..., 1)`` whole numbers.

    Returns:
        ``(...)`` in float64.

    Example:
        >>> log_partition(torch.tensor([1.0, 2.0, 3.0]).log(), torch.tensor([2])).exp().float()  # 1*2 + 1*3 + 2*3
        tensor(11.)
    """
    coins = tilt(logits, k)
    return (_log_scale(coins) + log_heads(coins.tails_heads, coins.k)).reshape(logits.shape[:-1])


def _log_scale(coins: Coins) -> Tensor:
    """The log of the sum over all subsets, less ``log Pr[k heads]``; certain coins weigh nothing."""
    free = torch.where(coins.log_odds == torch.inf, -torch.inf, coins.log_odds)
    return coins.free_k * coins.shift + softplus(free, threshold=40).sum(0)


class Marginals(NamedTuple):
    """Inclusion probabilities and their log-odds, both ``(..., n)``, and the log partition ``(...)``, all in float64."""

    probs: Tensor
    log_odds: Tensor
    log_total: Tensor


def marginals(logits: Tensor, k: Tensor) -> Marginals:
    r"""The inclusion probabilities :math:`\pi_i = \partial \log e_k / \partial \lambda_i`, each right to a few units in its last place.

    ``Pr[k heads]`` is linear in each coin, :math:`p_i A_i + (1 - p_i) B_i`, so that :math:`\pi_i = p_i A_i / \Pr` comes without
    subtraction.

    Args:
        logits: ``(..., n)``.
        k: ``(..., 1)`` whole numbers.

    Example:
        >>> marginals(torch.logit(torch.tensor([0.3, 0.6, 0.5, 0.2])), torch.tensor([2])).probs.float()
        tensor([0.3568, 0.7622, 0.6595, 0.2216])
    """
    coins = tilt(logits, k)
    slopes, log_heads = _slopes(coins)
    probs = (coins.tails_heads[1] * slopes[1]).clamp(0, 1)
    log_odds = coins.log_odds + slopes[1].log() - slopes[0].log()
    log_total = (_log_scale(coins) + log_heads).reshape(logits.shape[:-1])
    return Marginals(probs.T.reshape(logits.shape), log_odds.T.reshape(logits.shape), log_total)


def _slopes(coins: Coins) -> tuple[Tensor, Tensor]:
    """The derivative of ``log Pr[k heads]`` in all the chances of tails and heads, and that logarithm."""
    if in_transform():  # inside vmap and jacrev

        def total(leaves: Tensor) -> tuple[Tensor, Tensor]:
            value = log_heads(leaves, coins.k)
            return value.sum(), value

        return torch.func.grad(total, has_aux=True)(coins.tails_heads)
    further = torch.is_grad_enabled() and coins.tails_heads.requires_grad
    with torch.enable_grad():  # several times faster than the line above for ordinary tensors
        leaves = coins.tails_heads if further else coins.tails_heads.detach().requires_grad_()
        value = log_heads(leaves, coins.k)
        slopes = torch.autograd.grad(value.sum(), leaves, create_graph=further)[0]
    return slopes, value if further else value.detach()


def log_partition_recursion(logits: Tensor, k: int) -> Tensor:
    r""":func:`log_partition` by the textbook recursion in the log domain, one item at a time: slow, simple, the oracle.

    .. math:: \log e_j(x_1 .. x_i) = \operatorname{logaddexp}(\log e_j(x_1 .. x_{i-1}),\ \lambda_i + \log e_{j-1}(x_1 .. x_{i-1}))
    """
    row = torch.full((*logits.shape[:-1], k + 1), -torch.inf, dtype=logits.dtype, device=logits.device)
    row[..., 0] = 0.0
    for logit in logits.unbind(-1):
        row = torch.cat((row[..., :1], torch.logaddexp(row[..., 1:], row[..., :-1] + logit.unsqueeze(-1))), -1)
    return row[..., k]
