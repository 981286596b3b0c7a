"""Isotonic regression against scikit-learn, against its optimality conditions, and on the inputs that are worst for it."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from sklearn.isotonic import isotonic_regression
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.testing import assert_close

from khot.primitives.isotonic import block_first, block_ids, block_logsumexp, block_mean, isotonic_kl, isotonic_l2

EPS = torch.finfo(torch.float64).eps


def rows(kind: str, n: int, seed: int = 0) -> Tensor:
    rng = np.random.default_rng(seed)
    made = {
        "normal": lambda: rng.normal(size=n),
        "rising": lambda: np.arange(n, dtype=float),
        "falling": lambda: -np.arange(n, dtype=float),
        "ties": lambda: rng.integers(0, 4, n).astype(float),
        "constant": lambda: np.full(n, 0.1),
        "walk": lambda: np.cumsum(rng.normal(size=n)),
        "cauchy": lambda: rng.standard_cauchy(n),
        "sawtooth": lambda: np.arange(n) % 7 - 0.01 * np.arange(n),
        "convex": lambda: (np.arange(n) / n - 0.5) ** 2,  # falling, then one block that swallows the rest piece by piece
        "cascade": lambda: np.concatenate([-np.arange(n - 1, dtype=float), [float(n) ** 2]]),  # the last value pools the whole row
    }
    return torch.tensor(made[kind]())


def oracle(y: Tensor, weights: Tensor | None = None) -> Tensor:
    fit = isotonic_regression(y.numpy(), sample_weight=None if weights is None else weights.numpy(), increasing=False)
    return torch.tensor(fit.copy())


KINDS = ["normal", "rising", "falling", "ties", "constant", "walk", "cauchy", "sawtooth", "convex", "cascade"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [1, 2, 3, 7, 64, 65, 1000])
def test_least_squares_is_scikit_learns(kind: str, n: int) -> None:
    for seed in range(3):
        y = rows(kind, n, seed)
        weights = torch.tensor(np.random.default_rng(seed).uniform(0.1, 5.0, n))
        tolerance = 64 * EPS * float(1 + y.abs().max())
        for w in (None, weights):
            assert_close(isotonic_l2(y, w), oracle(y, w), rtol=0, atol=tolerance * (1 if n < 100 else 10))


def test_batch_equals_rows() -> None:
    y = torch.stack([rows(kind, 50) for kind in KINDS]).reshape(2, 5, 50)
    looped = torch.stack([torch.stack([isotonic_l2(row) for row in block]) for block in y])
    assert torch.equal(isotonic_l2(y), looped)


@pytest.mark.parametrize("seed", range(4))
def test_kl_is_the_minimiser(seed: int) -> None:
    rng = np.random.default_rng(seed)
    s, w = rng.normal(size=6) * 2, rng.normal(size=6)
    steps = [{"type": "ineq", "fun": lambda v, i=i: v[i] - v[i + 1]} for i in range(5)]

    def objective(v: np.ndarray) -> float:
        return float(np.sum(np.exp(s - v) + np.exp(w) * v))

    best = minimize(objective, np.zeros(6), constraints=steps, method="SLSQP", options={"ftol": 1e-14, "maxiter": 1000})
    fit = isotonic_kl(torch.tensor(s), torch.tensor(w))
    assert bool((fit.diff() <= 0).all())
    assert objective(fit.numpy()) <= best.fun + abs(best.fun) * 1e-11  # SLSQP may overstep a constraint by a rounding error
    assert_close(fit, torch.tensor(best.x), rtol=0, atol=1e-4)


def test_kl_survives_exponents_beyond_range() -> None:
    s = torch.tensor([-2000.0, 3000.0, 0.0, 1.0, -4000.0, -3999.0], dtype=torch.float64)
    fit = isotonic_kl(s, torch.zeros(6, dtype=torch.float64))
    expected = torch.tensor([3000 - np.log(2)] * 2 + [np.logaddexp(0, 1) - np.log(2)] * 2 + [np.logaddexp(0, 1) - 4000 - np.log(2)] * 2)
    assert_close(fit, expected)


def test_derivatives_are_exact() -> None:
    y = torch.tensor([[3.0, 1.0, 2.2, 2.0, -1.0], [0.3, 1.0, 2.1, 2.0, 4.0]], dtype=torch.float64, requires_grad=True)
    w = torch.tensor([0.1, 0.5, -0.3, 0.2, 1.0], dtype=torch.float64, requires_grad=True)
    for fit in (isotonic_l2, lambda y: isotonic_kl(y, w)):
        assert gradcheck(fit, (y,), check_forward_ad=True, check_batched_grad=True)
        assert gradgradcheck(fit, (y,))
    assert gradcheck(lambda w: isotonic_kl(y.detach(), w), (w,))


def test_vmap_and_jacobian() -> None:
    y = torch.stack([rows("normal", 9, seed) for seed in range(4)])
    assert_close(torch.vmap(isotonic_l2)(y), isotonic_l2(y))
    jacobian = torch.func.jacrev(isotonic_l2)(y[0])
    assert_close(jacobian, jacobian.t())  # a projection onto the blocks
    assert_close(jacobian @ jacobian, jacobian)
    assert_close(torch.func.jacfwd(isotonic_l2)(y[0]), jacobian)


def test_reductions_over_blocks() -> None:
    blocks = block_ids(torch.tensor([3.0, 3.0, 1.0, 0.0, 0.0]))
    x = torch.tensor([1.0, 2.0, 3.0, 4.0, 8.0])
    assert blocks.tolist() == [0, 0, 1, 2, 2]
    assert block_mean(x, blocks).tolist() == [1.5, 1.5, 3.0, 6.0, 6.0]
    assert block_first(x, blocks).tolist() == [1.0, 1.0, 3.0, 4.0, 4.0]
    assert_close(block_logsumexp(x, blocks)[:2], torch.logsumexp(x[:2], 0).expand(2))


@pytest.mark.parametrize("kind", ["rising", "cascade", "convex", "normal"])
def test_long_rows_take_seconds_whatever_they_hold(kind: str) -> None:
    y = rows(kind, 100_000)
    start = time.perf_counter()
    fit = isotonic_l2(y)
    assert time.perf_counter() - start < 10
    assert_close(fit, oracle(y), rtol=1e-9, atol=1e-9 * float(y.abs().max()))
