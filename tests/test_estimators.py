"""Gradient estimators against the exact gradient, by enumeration where it can be, by Monte Carlo with its error elsewhere."""

from itertools import combinations, permutations

import pytest
import torch

import khot
from khot import estimators
from khot.distributions import KSubset
from khot.estimators import ESTIMATORS

F64 = torch.float64
N, K = 5, 2


def objectives():
    torch.manual_seed(0)
    w, a = torch.randn(N, dtype=F64), torch.randn(N, N, dtype=F64)
    b, c = torch.randn(N, 8, dtype=F64), torch.randn(8, dtype=F64)
    return {
        "affine": lambda z: z @ w + 1.0,
        "quadratic": lambda z: ((z @ a) * z).sum(-1) + z @ w,
        "neural": lambda z: torch.tanh(z @ b) @ c,
    }


OBJECTIVES = objectives()


def scores() -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(N, dtype=F64, requires_grad=True)


def subsets() -> torch.Tensor:
    masks = torch.zeros(len(list(combinations(range(N), K))), N, dtype=F64)
    for row, chosen in zip(masks, combinations(range(N), K)):
        row[list(chosen)] = 1.0
    return masks


def exact(objective, x: torch.Tensor) -> torch.Tensor:
    masks = subsets()
    (grad,) = torch.autograd.grad((KSubset(k=K, logits=x).log_prob(masks).exp() * objective(masks)).sum(), x)
    return grad


def expected(estimator, objective, x: torch.Tensor, monkeypatch) -> torch.Tensor:
    """The mean of an estimator over all samples, each once with its probability as a weight."""
    masks = subsets()
    weights = KSubset(k=K, logits=x.detach()).log_prob(masks).exp()
    monkeypatch.setattr(KSubset, "sample", lambda *_: masks)
    loss = estimator(lambda z: objective(z) * weights * len(masks), x, K, num_samples=len(masks))
    monkeypatch.undo()
    (grad,) = torch.autograd.grad(loss, x)
    return grad


def error(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a - b).norm() / b.norm()).item()


def test_first_order_is_exact_for_affine_objectives(monkeypatch):
    x = scores()
    assert error(expected(estimators.marginal, OBJECTIVES["affine"], x, monkeypatch), exact(OBJECTIVES["affine"], x)) < 1e-12
    assert error(expected(estimators.marginal, OBJECTIVES["quadratic"], x, monkeypatch), exact(OBJECTIVES["quadratic"], x)) > 1e-3


def test_second_order_is_exact_for_quadratic_objectives(monkeypatch):
    x = scores()
    for name in ("affine", "quadratic"):
        assert error(expected(estimators.second_order, OBJECTIVES[name], x, monkeypatch), exact(OBJECTIVES[name], x)) < 1e-12
    first, second = (
        error(expected(e, OBJECTIVES["neural"], x, monkeypatch), exact(OBJECTIVES["neural"], x))
        for e in (estimators.marginal, estimators.second_order)
    )
    assert 1e-6 < second < first


@pytest.mark.parametrize("name", OBJECTIVES)
def test_score_function_is_unbiased(name):
    torch.manual_seed(2)
    x = scores()
    rows = x.detach().expand(100_000, -1).clone().requires_grad_()
    loss = estimators.score_function(OBJECTIVES[name], rows, K, num_samples=4)
    (grads,) = torch.autograd.grad(loss.sum(), rows)
    away = (grads.mean(0) - exact(OBJECTIVES[name], x)) / (grads.std(0) / len(rows) ** 0.5)
    assert away.abs().max() < 5


def design_gradient(design: str, objective, x: torch.Tensor) -> torch.Tensor:
    """The exact gradient of the expected objective under a design at the soft top-k of the scores, by its own probabilities."""
    masks, pi = subsets(), khot.soft_topk(x, K)
    if design == "gumbel":
        odds = pi / (1 - pi)
        probs = torch.stack([sum(_order(odds, o) for o in permutations(m.nonzero().flatten().tolist())) for m in masks])
    else:
        probs = khot.DESIGNS[design].log_prob(pi.expand_as(masks), masks).exp()
    (grad,) = torch.autograd.grad((probs * objective(masks)).sum(), x)
    return grad


def _order(odds: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    weight, rest = 1.0, odds.sum()
    for i in order:
        weight, rest = weight * odds[i] / rest, rest - odds[i]
    return weight


def test_straight_through_is_exact_for_affine_objectives_and_exact_designs_only():
    x = scores()
    (estimate,) = torch.autograd.grad(estimators.straight_through(OBJECTIVES["affine"], x, K), x)
    assert error(estimate, design_gradient("sampford", OBJECTIVES["affine"], x)) < 1e-8
    assert error(estimate, design_gradient("conditional_poisson", OBJECTIVES["affine"], x)) < 1e-6
    assert error(estimate, design_gradient("gumbel", OBJECTIVES["affine"], x)) > 0.02


@pytest.mark.parametrize("design", [name for name, row in khot.DESIGNS.items() if row.exact and row.fixed_size and row.log_prob is None])
def test_straight_through_by_monte_carlo(design):
    """Along a path of scores, the mean objective changes by what the gradients add up to."""
    torch.manual_seed(3)
    w = torch.tensor([-3.0, -1.0, 0.0, 1.0, 3.0], dtype=F64)
    start, end, rows = -2 * w, 2 * w, 600_000
    change = torch.zeros((), dtype=F64)
    knots, weights = _gauss()
    for t, weight in zip(knots, weights):
        x = (start + t * (end - start)).requires_grad_()
        (grad,) = torch.autograd.grad(estimators.straight_through(lambda z: z @ w, x, K, design=design), x)
        change += weight * (grad @ (end - start))
    low, high = (khot.sample_topk(x, K, design=design, num_samples=rows) @ w for x in (start, end))
    measured, sigma = high.mean() - low.mean(), ((high.var() + low.var()) / rows).sqrt()
    assert 4 * sigma / change.abs() < 1e-3
    assert (measured - change).abs() < 4 * sigma


def _gauss() -> tuple[list[float], list[float]]:
    import numpy

    knots, weights = numpy.polynomial.legendre.leggauss(40)
    return ((knots + 1) / 2).tolist(), (weights / 2).tolist()


@pytest.mark.parametrize("name", ESTIMATORS)
def test_one_line_in_a_training_loop(name):
    """Every estimator finds the two items that cost least."""
    torch.manual_seed(4)
    cost = torch.tensor([3.0, 1.0, 2.0, 0.0, 2.5])
    x = torch.zeros(5, requires_grad=True)
    optimizer = torch.optim.Adam([x], lr=0.1)
    for _ in range(150):
        optimizer.zero_grad()
        ESTIMATORS[name](lambda z: z @ cost, x, 2, num_samples=4).backward()
        optimizer.step()
    assert khot.topk_mask(x, 2).tolist() == [0.0, 1.0, 0.0, 1.0, 0.0]


@pytest.mark.parametrize("name", ESTIMATORS)
def test_batches_generators_and_parameters(name):
    x = torch.randn(3, 4, 6, requires_grad=True)
    scale = torch.tensor(2.0, requires_grad=True)
    losses = [
        ESTIMATORS[name](lambda z: scale * z.square().sum(-1), x, 2, 0.7, num_samples=3, generator=torch.Generator().manual_seed(5))
        for _ in range(2)
    ]
    torch.testing.assert_close(*losses, rtol=0, atol=0)
    assert losses[0].shape == (3, 4)
    grads = torch.autograd.grad(losses[0].sum(), (x, scale))
    assert grads[0].shape == x.shape and grads[1] > 0


def test_errors():
    with pytest.raises(ValueError, match="at least 2"):
        estimators.score_function(lambda z: z.sum(-1), torch.zeros(4), 2, num_samples=1)
    with pytest.raises(ValueError, match="whole number"):
        estimators.marginal(lambda z: z.sum(-1), torch.zeros(4), 1.5)
