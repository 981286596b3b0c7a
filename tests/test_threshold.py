"""The threshold family against slow oracles, and its solver's promises."""

from __future__ import annotations

import contextlib

import cvxpy
import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import jacrev
from torch.testing import assert_close

import khot
from khot._record import replace
from khot.primitives.threshold import bracket, rows, solve
from khot.relaxations.euclidean import EUCLIDEAN
from khot.relaxations.sigmoid import SIGMOID
from tests import oracles
from tests.oracles import randn

METHODS = sorted(oracles.CDFS)


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


@pytest.mark.parametrize("method", ["sigmoid", "gaussian", "laplace", "entmax"])
def test_solves_the_variational_problem(method: str) -> None:
    scores, k, tau = randn(6), 2.3, 0.7
    family = khot.loss.threshold_family(method, {})
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
        mask, shift = solve.solve_rows(x, k, 1.0, SIGMOID)
    assert mask.shape == shape and shift.shape == (*shape[:-1], 1)


def test_solver_is_one_graph() -> None:
    torch._dynamo.reset()
    scores, k = randn(2, 8).float(), torch.tensor([[2.0], [3.5]], dtype=torch.float64)
    compiled = torch.compile(lambda x, k: solve.solve_rows(x, k, 1.0, SIGMOID), fullgraph=True, backend="eager")
    mask, shift = compiled(scores, k)
    assert_close(mask.sum(-1, keepdim=True).double(), k, rtol=0, atol=1e-6)
    assert_close(torch.sigmoid(scores - shift), mask)


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


THRESHOLDS = [*((name, {}) for name in METHODS), ("permutahedron", {}), ("permutahedron", {"p": 1.1}), ("entmax", {"alpha": 1.9})]


def cruel(n: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows that have misled solvers: every scale, ties, plateaus, heavy tails."""
    normal, uniform = randn(n), torch.rand(n, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    rows = [
        normal,
        normal * 1e30,
        normal * 1e-30,
        100 * normal,
        1e6 + normal,
        torch.exp(6 * normal),
        torch.tan(torch.pi * (uniform - 0.5)),
        (2 * normal).round(),
        7.3 * (3 * normal).round(),
        normal.sign() * 2.0 ** -(40 * uniform).round(),
        torch.where(uniform > 0.5, -1000.0, 1000.0) + normal,
        torch.full_like(normal, 1e17),
        torch.cat([torch.full_like(normal[1:], 1e17), torch.zeros(1, dtype=torch.float64)]),
        torch.cat([normal[1:], torch.tensor([1e8], dtype=torch.float64)]),
    ]
    return torch.stack(rows).to(dtype)


@pytest.mark.parametrize("native", [True, False], ids=["native", "reference"])
@pytest.mark.parametrize(("method", "options"), THRESHOLDS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_no_row_misses_k(native: bool, method: str, options: dict, dtype: torch.dtype) -> None:
    for n in (130,) if options else (3, 130):
        scores = cruel(n, dtype).requires_grad_()
        for tau in (1.0, 1e-3):
            for k in (1e-9, 0.3, 1, n // 2, n - 1, n - 0.25):
                with contextlib.nullcontext() if native else khot.kernels.disabled():
                    y = khot.soft_topk(scores, k, tau, method=method, **options)
                    (grad,) = torch.autograd.grad((y * torch.linspace(-1, 1, n)).sum(), scores)
                # A half-precision mask is rounded entry by entry after it was made.
                allowed = 4 * torch.finfo(dtype).eps * k
                error = (y.double().sum(-1) - k).abs().max()
                assert error <= allowed, f"n = {n}, k = {k}, tau = {tau}: off by {error}"
                assert bool(grad.isfinite().all())


def test_reported_misses() -> None:
    """Plateaus, on which a Newton step says nothing about the distance to the root."""
    y = khot.soft_topk(torch.tensor([2000.0, 900.0, 0.5]), 1.5, method="permutahedron")
    assert_close(y, torch.tensor([1.0, 0.5, 0.0]))
    y = khot.soft_topk(torch.tensor([1.0, 7, 6, 7, 8, 5, 8, 0, 9, 9]), 5, 1e-3, method="permutahedron")
    assert_close(y, torch.tensor([0, 0.5, 0, 0.5, 1, 0, 1, 0, 1, 1]))
    steps = torch.randn(6, 40000, generator=torch.Generator().manual_seed(40000)).round()
    assert_close(khot.soft_topk(steps, 1, 1e-3, method="entmax").sum(-1), torch.ones(6))
    with khot.kernels.disabled():
        y = khot.soft_topk(torch.exp(6 * randn(400, 256).float()), 16, method="euclidean")
        assert_close(y.sum(-1), torch.full((400,), 16.0))
        y = khot.soft_topk(torch.cat([torch.full((599,), 1e17), torch.zeros(1)]), 598, method="laplace")
        assert_close(y.sum(), torch.tensor(598.0))
        y = khot.euclidean_topk(torch.tensor([0.9999, 0.0, -3.0]), 1)
        assert_close(y, torch.tensor([0.99995, 0.00005, 0.0]), rtol=0, atol=1e-7)


@pytest.mark.parametrize("family", [SIGMOID, EUCLIDEAN], ids=lambda f: f.name)
def test_blind_search_is_exact_within_sixteen_passes(family, monkeypatch: pytest.MonkeyPatch) -> None:
    scores = torch.stack([cruel(130, torch.float32)] * 6)
    k = torch.tensor([1e-9, 0.3, 1, 65, 129, 129.75], dtype=torch.float64).view(6, 1, 1).expand(6, 14, 1)
    seen, _ = solve.solve_rows(scores, k, 1.0, family)
    passes = 0

    def counted(u: torch.Tensor) -> torch.Tensor:
        nonlocal passes
        passes += 1
        return family.f(u)

    for room in (solve, bracket):
        monkeypatch.setattr(room, "readable", lambda tensor: False)
    mask, _ = solve.solve_rows(scores, k, 1.0, replace(family, f=counted))
    assert passes <= 16
    assert bool(((mask.double().sum(-1, keepdim=True) - k).abs() <= torch.finfo(torch.float32).eps * k).all())
    assert_close(mask, seen, rtol=0, atol=2e-5)


def test_rows_by_sums_alone_find_the_same() -> None:
    """A row spread over processes has sums and nothing else; here two halves stand for two processes."""
    calls = 0

    def sums(*values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        nonlocal calls
        calls += 1
        return tuple(value[..., :65].double().sum(-1, keepdim=True) + value[..., 65:].double().sum(-1, keepdim=True) for value in values)

    scores, k = cruel(130, torch.float32), torch.full((14, 1), 7.5, dtype=torch.float64)
    for family in (SIGMOID, EUCLIDEAN):
        mask, _ = solve.solve_rows(scores, k, 1.0, family, rows.Rows(sums=sums))
        assert_close(mask, solve.solve_rows(scores, k, 1.0, family).mask, rtol=0, atol=1e-6)
    calls = 0
    solve.solve_rows(scores[:1], k[:1], 1.0, SIGMOID, rows.Rows(sums=sums))
    assert calls <= 8, "an ordinary row: size, mean, variance, a few rounds, the mask, its test"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_counting_finds_the_kth_largest(dtype: torch.dtype) -> None:
    scores = torch.cat([cruel(130, dtype), torch.full((1, 130), -torch.inf, dtype=dtype)])
    for rank in (1, 65, 130):
        ranks = torch.full((15, 1), float(rank), dtype=torch.float64)
        assert torch.equal(rows.count_kth(scores, ranks, rows.LOCAL.sums), scores.sort(-1, descending=True).values[:, rank - 1 : rank])


@pytest.mark.parametrize("method", METHODS)
def test_extreme_temperatures_on_the_reference(method: str) -> None:
    scores = torch.tensor([1.0, 2.0, 2.0, 3.0], dtype=torch.float64)
    with khot.kernels.disabled():
        for tau in (1e-320, 1e-200):
            assert_close(khot.soft_topk(scores, 2, tau, method=method), torch.tensor([0, 0.5, 0.5, 1]).double(), rtol=0, atol=1e-15)
        for tau in (1e200, float("inf")):
            assert_close(khot.soft_topk(scores, 2, tau, method=method), torch.full((4,), 0.5).double())


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_second_derivatives_of_rows_that_are_saturated(method: str, dtype: torch.dtype) -> None:
    """The sum of the slopes is below the smallest normal number in some of them, and its inverse above the largest."""
    twice = jacrev(jacrev(lambda x: khot.soft_topk(x, 2.0, method=method)))
    for scores in (300.0 if dtype == torch.float32 else 1000.0) * randn(200, 6).to(dtype):
        assert bool(twice(scores).isfinite().all())
