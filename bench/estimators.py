"""Bias, spread and cosine of every gradient estimator against the exact gradient by enumeration."""

from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import permutations
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench.common import Table, chosen, parser, print_tables, progress, recorder, same

F64 = torch.float64
SAMPLES = 4  # masks behind one estimate
Objective = Callable[[Tensor], Tensor]


class Case(NamedTuple):
    """An estimator, and the distribution over subsets whose expected objective it differentiates."""

    estimate: Callable[..., Tensor]
    target: Callable[[Tensor, Tensor], Tensor]  # (scores, subsets) -> probabilities


def k_subset(scores: Tensor, subsets: Tensor) -> Tensor:
    return torch.softmax(subsets @ scores, 0)


def sampford(scores: Tensor, subsets: Tensor) -> Tensor:
    import khot

    probs = khot.soft_topk(scores, int(subsets[0].sum()))
    return khot.DESIGNS["sampford"].log_prob(probs.expand_as(subsets), subsets).exp()


def successive(odds: Tensor, subsets: Tensor) -> Tensor:
    """Draws one after the other in proportion to the odds, summed over the orders: what Gumbel top-k does."""
    members = torch.stack([mask.nonzero().squeeze(-1) for mask in subsets])
    total = torch.zeros(len(subsets), dtype=odds.dtype)
    for order in permutations(range(members.shape[1])):
        taken = odds[members[:, order]]
        left = odds.sum() - torch.cat((torch.zeros_like(taken[:, :1]), taken.cumsum(-1)[:, :-1]), -1)
        total = total + (taken / left).prod(-1)
    return total


def successive_scores(scores: Tensor, subsets: Tensor) -> Tensor:
    return successive(scores.exp(), subsets)


def successive_soft(scores: Tensor, subsets: Tensor) -> Tensor:
    import khot

    probs = khot.soft_topk(scores, int(subsets[0].sum()))
    return successive(probs / (1 - probs), subsets)


LAWS = {"k_subset": k_subset, "design": sampford, "gumbel": successive_scores}  # of the masks, by the estimator's row


def cases() -> dict[str, Case]:
    """Every estimator at its defaults, and some with options."""
    from khot.estimators import ESTIMATORS as table

    fixed = {"design": {"design": "sampford"}}  # the one design whose probabilities are known in closed form
    plain = {row.name: Case(functools.partial(row, **fixed.get(row.draws, {})), LAWS[row.draws]) for row in table.values()}
    return plain | {
        "straight_through, Gumbel top-k": Case(functools.partial(table["straight_through"], design="gumbel"), successive_soft),
        "perturb_and_map, strength 10": Case(functools.partial(table["perturb_and_map"], strength=10.0), k_subset),
        "relaxed_gumbel, hard": Case(functools.partial(table["relaxed_gumbel"], hard=True), successive_scores),
    }


def objectives(n: int, seed: int) -> dict[str, Objective]:
    generator = torch.Generator().manual_seed(seed)
    w, a, b, c = (torch.randn(*size, generator=generator, dtype=F64) for size in ((n,), (n, n), (n, 16), (16,)))
    return {
        "affine": lambda z: z @ w,
        "quadratic": lambda z: ((z @ a) * z).sum(-1) + z @ w,
        "neural": lambda z: torch.tanh(z @ b) @ c,
    }


def main(argv: list[str]) -> int:
    given = parser("estimators", __doc__).parse_args(argv)
    torch.set_num_threads(1)
    record = recorder("estimators", given)
    n, k, problems, estimates = (8, 3, 2, 1000) if given.quick else (12, 4, 6, 8000)
    table = cases()
    for name in progress(chosen(given.methods, table), "estimators"):
        for problem in range(problems):
            torch.manual_seed(given.seed + problem)
            scores = torch.randn(n, dtype=F64)
            for kind, objective in objectives(n, given.seed + 100 + problem).items():
                found = measure(table[name], objective, scores, k, estimates)
                record.add(what=name, objective=kind, problem=problem, n=n, k=k, samples=SAMPLES, estimates=estimates, **found)
    print_tables(tables(record.rows))
    return 0


def measure(case: Case, objective: Objective, scores: Tensor, k: int, estimates: int) -> dict[str, float]:
    """Relative to the norm of the exact gradient: bias with its standard error, spread of one estimate; two cosines."""
    exact = exact_gradient(case, objective, scores, k)
    rows = scores.expand(estimates, -1).clone().requires_grad_()
    loss = case.estimate(lambda z: objective(z), rows, k, num_samples=SAMPLES)
    grads = torch.autograd.grad(loss.sum(), rows)[0]
    mean, norm = grads.mean(0), exact.norm()
    spread = (grads - mean).square().sum(-1).mean().sqrt()
    one = torch.cosine_similarity(grads, exact.expand_as(grads), dim=-1)
    return {
        "bias": ((mean - exact).norm() / norm).item(),
        "bias_error": (spread / norm / estimates**0.5).item(),
        "spread": (spread / norm).item(),
        "cosine": torch.cosine_similarity(mean, exact, dim=0).item(),
        "cosine_one": one.mean().item(),
    }


def exact_gradient(case: Case, objective: Objective, scores: Tensor, k: int) -> Tensor:
    from khot.distributions import KSubset

    leaf = scores.clone().requires_grad_()
    subsets = KSubset(k=k, logits=scores).enumerate_support()
    probs = case.target(leaf, subsets)
    torch.testing.assert_close(probs.sum(), torch.ones((), dtype=F64), rtol=1e-9, atol=0)
    return torch.autograd.grad((probs * objective(subsets)).sum(), leaf)[0]


def tables(rows: list[dict[str, Any]]) -> list[Table]:
    """Means over the problems."""
    return [_table(rows, kind) for kind in dict.fromkeys(row["objective"] for row in rows)]


def _table(rows: list[dict[str, Any]], kind: str) -> Table:
    keys = ("bias", "bias_error", "spread", "cosine", "cosine_one")
    names = dict.fromkeys(row["what"] for row in rows)
    lines = [
        [name, *(f"{_mean([row[key] for row in rows if same(row, what=name, objective=kind)]):.3f}" for key in keys)] for name in names
    ]
    first = rows[0]
    title = f"{kind} objective, n = {first['n']}, k = {first['k']}, {first['samples']} masks an estimate; relative to the exact gradient"
    return Table(title, ["", "bias", "its standard error", "spread", "cosine of the mean", "cosine of one"], lines)


def _mean(values: list[float]) -> float:
    return sum(values) / max(1, len(values))
