r"""How many of independent coins show heads, and which: the sums over all k-subsets behind conditional Poisson sampling.

The weight of a subset is :math:`\exp \sum_{i \in s} \lambda_i`, and the sum over all subsets of size k is the elementary symmetric
polynomial :math:`e_k(\exp\lambda)`. Its terms span more than any floating-point format. A common shift of all :math:`\lambda_i`
changes the weights of all k-subsets alike, so take one at which the coins :math:`p_i = \sigma(\lambda_i - t)` expect about k heads:

.. math:: \log e_k(\exp \lambda) = k t + \sum_i \log(1 + e^{\lambda_i - t}) + \log \Pr[\textstyle\sum_i z_i = k] .

The mode of a sum of coins lies within 1 of its mean, at an integer mean it is the mean (Darroch 1964), so the last probability is
of the order of 1/n at least: nothing that matters can underflow. It comes from a tree of products of small polynomials (the
distribution of the number of heads in each half), truncated at degree k: O(nk) multiplications in log2(n) rounds, all of
non-negative numbers. The marginals come down the same tree, by products again, so that every derivative of both is a derivative
of products: reverse and forward mode, any order, in batches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Size, Tensor
from torch.nn.functional import softplus

from khot.primitives.polynomial import product
from khot.primitives.tilt import Coins, tilt


def levels_of(coins: Coins, nodes: int = 1, multiply: Callable[..., Tensor] = product) -> list[Tensor]:
    """The tree from the leaves up to a level of ``nodes``: level ``l`` holds ``(min(2**l, size) + 1, its nodes, R)``.

    It counts the rarer side of the coins, ``coins.few`` of them.
    """
    leaves = _sides(coins.tails_heads, coins.many)
    levels = [leaves]
    while levels[-1].shape[1] > nodes:
        a, b = halves(levels[-1])
        levels.append(multiply(a, b, 0, min(2 * (a.shape[0] - 1), coins.size) + 1))
    return levels


def _sides(tails_heads: Tensor, many: Tensor | None) -> Tensor:
    """Tails and heads change places in the rows ``many``."""
    return tails_heads if many is None else torch.where(many, tails_heads.flip(0), tails_heads)


def halves(nodes: Tensor) -> tuple[Tensor, Tensor]:
    """Any pairing of the nodes will do; an odd one is multiplied by the polynomial 1."""
    half = (nodes.shape[1] + 1) // 2
    left, right = nodes[:, :half], nodes[:, half:]
    if right.shape[1] < half:
        right = torch.cat((right, _one(nodes)), 1)
    return left, right


def _one(nodes: Tensor) -> Tensor:
    shape = (1, 1, nodes.shape[2])
    one, zero = (torch.full(shape, value, dtype=nodes.dtype, device=nodes.device) for value in (1.0, 0.0))
    return torch.cat((one, zero.expand(nodes.shape[0] - 1, 1, -1)))


def _chance(coins: Coins) -> tuple[list[Tensor], Tensor, Tensor]:
    """The tree, ``Pr[k heads]`` of each row, and which coefficient of the root that is, ``(size + 1, 1, R)``."""
    levels = levels_of(coins)
    if not levels[-1].shape[1]:
        levels = [_one(coins.tails_heads)]  # no coin shows no heads
    root = levels[-1]
    place = torch.arange(root.shape[0], dtype=torch.long, device=root.device).view(-1, 1, 1)
    chosen = (place == coins.few).to(root.dtype)
    return levels, (root * chosen).sum((0, 1)), chosen


def log_partition(logits: Tensor, k: Tensor | int) -> Tensor:
    r""":math:`\log e_k(\exp\lambda)`, the log of the sum over all k-subsets, differentiable any number of times.

    Args:
        logits: ``(..., n)``; -inf excludes an item, +inf makes it certain (and adds nothing to the sum).
        k: a whole number, or ``(..., 1)`` whole numbers.

    Returns:
        ``(...)`` in float64.

    Example:
        >>> log_partition(torch.tensor([1.0, 2.0, 3.0]).log(), 2).exp().float()  # 1*2 + 1*3 + 2*3
        tensor(11.)
    """
    coins = tilt(logits, k)
    free = torch.where(coins.log_odds == torch.inf, -torch.inf, coins.log_odds)  # certain coins weigh nothing
    total = coins.free_k * coins.shift + softplus(free, threshold=40).sum(0) + _chance(coins)[1].log()
    return total.reshape(logits.shape[:-1])


class Tilted(NamedTuple):
    """A k-subset distribution as coins, in float64."""

    log_odds: Tensor  # (..., n) of each coin by itself: the logits less a common shift
    log_chance: Tensor  # (...) log Pr[k heads]

    def surprise(self, mean: Tensor, rest: Tensor) -> Tensor:
        """The expectation of ``-log p(z)``, ``(...)``, over k-subsets that hold an item with probability ``mean``, and not with ``rest``.

        Each coin gives its own part. The sum of the weights and the log of the total are not taken apart: next to logits of 1e30 both
        would lose the small ones. Coins that are certain give nothing.
        """
        free = self.log_odds.isfinite()
        odds = torch.where(free, self.log_odds, 0.0)
        parts = torch.where(odds > 0, softplus(-odds) + rest * odds, softplus(odds) - mean * odds)  # the same, twice
        return torch.where(free, parts, 0.0).sum(-1) + self.log_chance


def tilted(logits: Tensor, k: Tensor | int) -> Tilted:
    """The coins of ``logits``."""
    coins = tilt(logits, k)
    return _tilted(coins, _chance(coins)[1], logits.shape)


def _tilted(coins: Coins, chance: Tensor, shape: Size) -> Tilted:
    return Tilted(coins.log_odds.T.reshape(shape), chance.log().reshape(shape[:-1]))


def log_chance(logits: Tensor, k: Tensor | int, sample: Tensor) -> Tensor:
    """The log of a subset's share of all weights, ``(..., n), (..., n) -> (...)`` in float64; -inf for what is no k-subset."""
    coins = tilted(logits, k)
    z = sample.to(coins.log_odds.dtype)
    wrong = ((logits == torch.inf) & (z == 0) | (logits == -torch.inf) & (z != 0)).any(-1)
    wrong = wrong | (z.sum(-1) != (k.squeeze(-1) if isinstance(k, Tensor) else k))
    return (-coins.surprise(z, 1 - z)).masked_fill(wrong, -torch.inf)


class Marginals(NamedTuple):
    """The inclusion probabilities of a k-subset distribution, in float64."""

    probs: Tensor  # (..., n) inclusion probabilities
    rest: Tensor  # (..., n) 1 - probs, with its own digits
    log_odds: Tensor  # (..., n) of them
    coins: Tilted


def marginals(logits: Tensor, k: Tensor | int) -> Marginals:
    r"""The inclusion probabilities :math:`\pi_i = \partial \log e_k / \partial \lambda_i`, each right to a few units in its last place.

    ``Pr[k heads]`` is linear in each coin, :math:`p_i A_i + (1 - p_i) B_i`, so that :math:`\pi_i = p_i A_i / \Pr` comes without
    subtraction.

    Args:
        logits: ``(..., n)``.
        k: a whole number, or ``(..., 1)`` whole numbers.

    Example:
        >>> marginals(torch.logit(torch.tensor([0.3, 0.6, 0.5, 0.2])), 2).probs.float()
        tensor([0.3568, 0.7622, 0.6595, 0.2216])
    """
    shape = logits.shape
    coins = tilt(logits, k)
    slopes, chance = _slopes(coins)
    rest, probs = (coins.tails_heads * slopes).clamp(0, 1)
    log_odds = coins.log_odds + slopes[1].log() - slopes[0].log()
    probs, rest, log_odds = (value.T.reshape(shape) for value in (probs, rest, log_odds))
    return Marginals(probs, rest, log_odds, _tilted(coins, chance, shape))


def _slopes(coins: Coins) -> tuple[Tensor, Tensor]:
    """The derivative of ``log Pr[k heads]`` in all the chances of tails and heads, and that probability: from the root down."""
    levels, chance, chosen = _chance(coins)
    slopes = chosen / chance
    for nodes in reversed(levels[:-1]):
        a, b = halves(nodes)
        to_a = product(slopes, b.flip(0), b.shape[0] - 1, a.shape[0])
        to_b = product(slopes, a.flip(0), a.shape[0] - 1, b.shape[0])
        slopes = torch.cat((to_a, to_b), 1)[:, : nodes.shape[1]]
    return _sides(slopes[:, : coins.tails_heads.shape[1]], coins.many), chance
