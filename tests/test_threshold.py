"""The threshold family against slow oracles, and its solver's promises."""

from __future__ import annotations

import cvxpy
import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing import assert_close

import khot
from khot.primitives.threshold import solve
from khot.relaxations.euclidean import EUCLIDEAN
from khot.relaxations.sigmoid import SIGMOID
from tests import oracles

METHODS = sorted(oracles.CDFS)


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_golden_values() -> None:
    x = torch.tensor([-4.0695, 10.8666, 13.0867, -7.1431, -14.7220], dtype=torch.float64)
    golden = torch.tensor([5.8747e-4, 0.9994456, 0.9999398, 2.71884e-5, 1.3897e-8], dtype=torch.float64)
    assert_close(khot.sigmoid_topk(x, 2), golden, rtol=1e-4, atol=1e-7)
    logits = torch.tensor([0.3, 0.6, 0.5, 0.2], dtype=torch.float64).logit()
    assert_close(khot.sigmoid_topk(logits, 2), torch.tensor([0.4031, 0.7027, 0.6117, 0.2826]).double(), rtol=0, atol=5e-5)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0])
@pytest.mark.parametrize("k", [0.25, 1, 7.5, 19.5])
def test_equals_bisection(method: str, scale: float, k: float) -> None:
    scores = randn(3, 20) * scale
    truth = oracles.bisect(scores, k, 0.8, oracles.CDFS[method])
    assert_close(khot.soft_topk(scores, k, 0.8, method=method), truth, rtol=0, atol=2e-13 * max(scale, 1))


def test_equals_many_digits() -> None:
    scores = [3.0, -50.0, 12.25, 700.0, 0.125, -2.0]
    truth = torch.tensor(oracles.bisect_exact(scores, 2.5), dtype=torch.float64)
    assert_close(khot.sigmoid_topk(torch.tensor(scores, dtype=torch.float64), 2.5), truth, rtol=1e-13, atol=0)


@pytest.mark.parametrize("alpha", [1.01, 1.2, 1.5, 1.75, 1.99])
def test_entmax_at_every_alpha(alpha: float) -> None:
    scores = randn(2, 15)
    truth = oracles.bisect(scores, 4.2, 0.6, oracles.entmax_cdf(alpha))
    assert_close(khot.entmax_topk(scores, 4.2, 0.6, alpha=alpha), truth, rtol=0, atol=1e-12)


def test_entmax_meets_both_ends() -> None:
    scores = randn(4, 9)
    assert_close(khot.entmax_topk(scores, 3, alpha=1), khot.sigmoid_topk(scores, 3))
    assert_close(khot.entmax_topk(scores, 3, alpha=2), khot.euclidean_topk(scores, 3))
    assert_close(khot.entmax_topk(scores, 3, alpha=1.001), khot.sigmoid_topk(scores, 3), rtol=0, atol=2e-3)
    assert_close(khot.entmax_topk(scores, 3, alpha=1.999), khot.euclidean_topk(scores, 3), rtol=0, atol=2e-3)


@pytest.mark.parametrize("method", ["sigmoid", "gaussian", "laplace", "entmax"])
def test_solves_the_variational_problem(method: str) -> None:
    scores, k, tau = randn(6), 2.3, 0.7
    family = khot.loss._FAMILIES[method]
    truth = oracles.variational(scores.numpy(), k, tau, lambda y: family.entropy(torch.from_numpy(y)).numpy())
    assert_close(khot.soft_topk(scores, k, tau, method=method), torch.from_numpy(truth), rtol=0, atol=2e-5)


def test_euclidean_is_the_projection() -> None:
    scores, k, tau = randn(8), 3.0, 0.7
    y = cvxpy.Variable(8)
    cvxpy.Problem(cvxpy.Minimize(cvxpy.sum_squares(y - scores.numpy() / tau)), [y >= 0, y <= 1, cvxpy.sum(y) == k]).solve(solver="CLARABEL")
    assert_close(khot.euclidean_topk(scores, k, tau), torch.from_numpy(np.asarray(y.value)), rtol=0, atol=1e-6)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("n", "k"), [(1000, 10), (10**6, 62500)])
def test_float32_is_close_to_the_truth(method: str, n: int, k: int) -> None:
    scores = randn(1, n).float()
    y = khot.soft_topk(scores, k, method=method)
    assert (y.double() - khot.soft_topk(scores.double(), k, method=method)).abs().max() <= 2e-6
    assert (y.double().sum() - k).abs() <= 4 * torch.finfo(torch.float32).eps * k


@pytest.mark.parametrize("method", METHODS)
def test_complement(method: str) -> None:
    scores = randn(5, 11)
    assert_close(khot.soft_topk(-scores, 11 - 3.5, method=method), 1 - khot.soft_topk(scores, 3.5, method=method))


def test_sigmoid_of_two_is_softmax_of_half() -> None:
    scores = randn(6, 2)
    assert_close(khot.sigmoid_topk(scores, 1), torch.softmax(scores / 2, -1))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("kind", ["cauchy", "ties", "two levels", "one far", "wide", "tiny", "offset"])
def test_hostile_rows_sum_to_k(method: str, dtype: torch.dtype, kind: str) -> None:
    base = randn(4, 257)
    scores = {
        "cauchy": (torch.pi * (torch.special.ndtr(base) - 0.5)).tan() * 100,
        "ties": (base * 2).round(),
        "two levels": (base > 0) * 1e4,
        "one far": torch.cat([base[:, :-1], torch.full((4, 1), 1e8)], -1),
        "wide": base.sign() * 10 ** (base * 8),
        "tiny": base * 1e-30,
        "offset": base + 4096,
    }[kind].to(dtype)
    for k in (0.1, 1, 2.5, 128, 255.5, 256):
        y = khot.soft_topk(scores, k, method=method)
        assert (y.double().sum(-1) - k).abs().max() <= 4 * torch.finfo(dtype).eps * max(1, k), f"k = {k}"


@pytest.mark.parametrize("shape", [(40,), (2, 1 << 16)])
def test_solver_never_looks_at_values(shape: tuple[int, ...]) -> None:
    """A fake tensor has no values: a solver that asks for one raises."""
    with FakeTensorMode():
        x, k = torch.empty(shape), torch.empty(*shape[:-1], 1, dtype=torch.float64)
        t, s = solve.solve_shift(x, k, 1.0, SIGMOID)
    assert t.shape == s.shape == (*shape[:-1], 1)


@pytest.mark.parametrize("family", [SIGMOID, EUCLIDEAN], ids=lambda f: f.name)
def test_solver_without_looking_finds_the_same(family, monkeypatch: pytest.MonkeyPatch) -> None:
    scores = torch.cat([randn(3, 50), randn(3, 50) * 1e3, randn(3, 50).round()])
    k = torch.linspace(0.5, 49.5, 9, dtype=torch.float64).unsqueeze(-1)
    looked = solve.solve_shift(scores, k, 1.0, family)
    monkeypatch.setattr(solve, "readable", lambda tensor: False)
    blind = solve.solve_shift(scores, k, 1.0, family)

    def total(shift: solve.Threshold) -> torch.Tensor:
        return family.f((scores - shift.t) + shift.s).sum(-1, keepdim=True)

    assert_close(total(looked), k, rtol=1e-9, atol=1e-9)
    assert_close(total(blind), k, rtol=1e-9, atol=1e-9)


def test_solver_is_one_graph() -> None:
    torch._dynamo.reset()
    scores, k = randn(2, 8).float(), torch.tensor([[2.0], [3.5]], dtype=torch.float64)
    compiled = torch.compile(lambda x, k: solve.solve_shift(x, k, 1.0, SIGMOID), fullgraph=True, backend="eager")
    t, s = compiled(scores, k)
    assert_close(torch.sigmoid(scores - t + s).sum(-1, keepdim=True).double(), k, rtol=0, atol=1e-5)


@pytest.mark.parametrize("method", METHODS)
def test_saturated_rows_have_zero_gradient(method: str) -> None:
    scores = torch.tensor([1e6, -1e6, 1e6], requires_grad=True)
    (grad,) = torch.autograd.grad(khot.soft_topk(scores, 2, method=method)[0], scores)
    assert torch.equal(grad, torch.zeros(3))


def test_sigmoid_jacobian_is_the_closed_form() -> None:
    scores = randn(6)
    y = khot.sigmoid_topk(scores, 2.5, 0.5)
    v = y * (1 - y)
    closed = (torch.diag(v) - torch.outer(v, v) / v.sum()) / 0.5
    assert_close(torch.func.jacrev(lambda s: khot.sigmoid_topk(s, 2.5, 0.5))(scores), closed)


def test_hessian_by_both_orders() -> None:
    scores = randn(5)

    def energy(s: torch.Tensor) -> torch.Tensor:
        return (khot.sigmoid_topk(s, 2) ** 3).sum()

    assert_close(torch.func.jacfwd(torch.func.jacrev(energy))(scores), torch.func.jacrev(torch.func.jacrev(energy))(scores))


def test_rows_of_length_zero_on_the_reference() -> None:
    with khot.kernels.disabled():
        x = torch.empty(3, 0, requires_grad=True)
        y = khot.soft_topk(x, 0)
        y.sum().backward()
    assert y.shape == (3, 0) and x.grad is not None and x.grad.shape == (3, 0)
