"""Every sample that a design can draw, with its probability: slow, for a few items."""

from fractions import Fraction
from itertools import combinations, permutations, product

import pytest
import torch
from scipy import stats

import khot
from khot import kernels
from khot.designs.brewer import brewer_weights
from khot.primitives.fixed_point import fixed_point


def subsets(n: int, k: int) -> torch.Tensor:
    masks = torch.zeros(len(list(combinations(range(n), k))), n, dtype=torch.float64)
    for row, chosen in zip(masks, combinations(range(n), k)):
        row[list(chosen)] = 1.0
    return masks


def moments(masks: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    torch.testing.assert_close(weights.sum(), torch.tensor(1.0, dtype=weights.dtype), rtol=1e-10, atol=0)
    return weights @ masks, masks.T @ (weights.unsqueeze(-1) * masks)


def entropy(masks: torch.Tensor, weights: torch.Tensor) -> float:
    total: dict[tuple, float] = {}
    for mask, weight in zip(masks.tolist(), weights.tolist()):
        total[tuple(mask)] = total.get(tuple(mask), 0.0) + weight
    return float(stats.entropy(list(total.values())))


def sen_yates_grundy(joint: torch.Tensor) -> bool:
    pi = joint.diagonal()
    off = ~torch.eye(len(pi), dtype=torch.bool)
    return bool((torch.outer(pi, pi) - joint)[off].min() >= -1e-12)


def enumerate_systematic(pi: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> tuple[torch.Tensor, torch.Tensor]:
    """The sampler itself, run at the middle of every interval of starts between which nothing changes."""
    edges = torch.cat(((-pi.cumsum(-1)).remainder(1.0), torch.tensor([0.0, 1.0]))).sort().values.unique()
    middles, lengths = (edges[1:] + edges[:-1]) / 2, edges.diff()
    monkeypatch.setattr(torch, "randint", lambda high, size, **_: (middles * high).long().view(size))
    with kernels.disabled():  # native code draws its own random numbers: tests/kernels/test_sampling.py
        masks = khot.sample(pi, design="systematic", order="fixed", num_samples=len(middles))
    monkeypatch.undo()
    return masks, lengths


def enumerate_pivotal(pi: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> tuple[torch.Tensor, torch.Tensor]:
    """The sampler itself on every pattern of won and lost duels, weighted by the odds of the textbook."""
    n = len(pi)
    wins = torch.tensor(list(product([True, False], repeat=n - 1)))
    used = 0

    def rand(size, **_):
        nonlocal used
        used += size[-1]
        return torch.where(wins[:, used - size[-1] : used], 1e-300, 1 - 2.0**-52).double()

    monkeypatch.setattr(torch, "rand", rand)
    with kernels.disabled():
        masks = khot.sample(pi, design="pivotal", order="fixed", num_samples=len(wins))
    monkeypatch.undo()
    units, bits = fixed_point(pi, pi.sum().round().long().view(1))
    return masks, torch.tensor([_path(units.tolist(), pattern, 1 << bits) for pattern in wins.tolist()], dtype=torch.float64)


def _path(values: list[int], wins: list[bool], one: int) -> float:
    """The probability of one pattern, in exact arithmetic."""
    weight = Fraction(1)
    while len(values) > 1:
        fresh = []
        for a, b in zip(values[0::2], values[1::2]):
            if a + b <= one:
                chance = Fraction(a, a + b) if a + b else Fraction(0)
            else:
                chance = Fraction(one - b, 2 * one - a - b) if a + b < 2 * one else Fraction(0)
            weight *= chance if wins.pop(0) else 1 - chance
            fresh.append(a + b if a + b <= one else a + b - one)
        values = fresh + values[len(fresh) * 2 :]
    return float(weight)


def enumerate_brewer(pi: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Every sequence of draws with the sampler's own weights."""
    weights: dict[tuple, float] = {}

    def go(p: torch.Tensor, chosen: tuple, weight: float, left: int) -> None:
        if left == 0:
            weights[tuple(sorted(chosen))] = weights.get(tuple(sorted(chosen)), 0.0) + weight
            return
        odds = brewer_weights(p, p.sum(), torch.tensor(float(left)))
        for i in p.nonzero().flatten().tolist():
            go(p.scatter(0, torch.tensor(i), 0.0), (*chosen, i), weight * float(odds[i] / odds.sum()), left - 1)

    certain = tuple((pi >= 1).nonzero().flatten().tolist())
    go(torch.where(pi >= 1, 0.0, pi), certain, 1.0, round(float(pi.sum())) - len(certain))
    masks = torch.zeros(len(weights), len(pi), dtype=torch.float64)
    for row, chosen in zip(masks, weights):
        row[list(chosen)] = 1.0
    return masks, torch.tensor(list(weights.values()), dtype=torch.float64)


def by_log_prob(name: str, pi: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    masks = subsets(len(pi), round(float(pi.sum())))
    return masks, khot.DESIGNS[name].log_prob(pi.expand_as(masks), masks).exp()


def over_orders(enumerate_one, pi: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> tuple[torch.Tensor, torch.Tensor]:
    masks, weights = [], []
    orders = list(permutations(range(len(pi))))
    for order in orders:
        place = torch.tensor(order)
        mask, weight = enumerate_one(pi[place], monkeypatch)
        masks.append(mask[:, place.argsort()])
        weights.append(weight / len(orders))
    return torch.cat(masks), torch.cat(weights)


def enumerated(name: str, pi: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> tuple[torch.Tensor, torch.Tensor]:
    if name in ENUMERATORS:
        return ENUMERATORS[name](pi, monkeypatch)
    if name == "poisson":
        masks = torch.tensor(list(product([0.0, 1.0], repeat=len(pi))), dtype=torch.float64)
        return masks, khot.DESIGNS[name].log_prob(pi.expand_as(masks), masks).exp()
    return by_log_prob(name, pi)


# Designs without a closed form whose samples can be listed all the same. One that has neither is held to its frequencies below.
ENUMERATORS = {"systematic": enumerate_systematic, "pivotal": enumerate_pivotal, "brewer": lambda pi, _: enumerate_brewer(pi)}
