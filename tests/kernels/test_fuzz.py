"""The native kernel on rows that are hard on a solver: every sum is k, every value is that of a bisection in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import khot
from khot import kernels
from khot.kernels import cpu, library
from tests.kernels.rows import FAMILIES, KINDS, arguments, fuzzed, fuzzed_k, steps

pytestmark = pytest.mark.skipif(not kernels.available(), reason="no native code is in use: not built, or KHOT_KERNELS=0")

LIMIT = {torch.float16: 6e4}
SIZES = (1, 2, 3, 5, 10, 33, 64, 200, 600, 1500, 5000)


def wrong(x: Tensor, k: Tensor, tau: Tensor, family: str) -> Tensor:
    """Which rows, on any instruction set, miss their sum by more than 4 eps max(1, k), or have a value that is off by that and a little.

    All scores of a row move the same way with the threshold, so that none is further off than the sum is. Half precision is
    computed in float32 and rounded once, which is tested elsewhere: here the result before the rounding counts.
    """
    x = x if x.dtype is torch.float64 else x.float()
    bound = 4 * torch.finfo(x.dtype).eps * k.clamp(min=1)
    exact = steps(family, arguments(x.double(), k, tau, family))
    noise = 5e-7 if x.dtype is torch.float32 else 2e-13
    bad = torch.zeros_like(k, dtype=torch.bool)
    for isa in library.instruction_sets():
        with library.using(isa):
            y = cpu.forward(x, k[:, None], tau[:, None], family)[0].double()
        bad |= ~((y.sum(-1) - k).abs() <= bound) | ~((y - exact).abs().amax(-1) <= bound + noise)
    return bad


def fuzz(family: str, dtype: torch.dtype, scores: int, seed: int) -> int:
    """Tries every kind of row at every size, about ``scores`` scores of each; returns the number of rows."""
    generator = torch.Generator().manual_seed(seed)
    limit = LIMIT.get(dtype, 3e38)
    tried = 0
    for n in SIZES:
        count = max(1, scores // n)
        x = torch.cat([fuzzed(kind, count, n, generator) for kind in KINDS]).clamp(-limit, limit).to(dtype)
        k, tau = fuzzed_k(len(x), n, generator), 10.0 ** torch.randint(-3, 3, (len(x),), generator=generator).double()
        k[: len(x) // 2] = k[0]  # short rows with one k are solved side by side
        bad = wrong(x, k, tau, family).nonzero()[:, 0].tolist()
        cases = [f"{KINDS[row // count]}, n={n}, k={float(k[row])!r}, tau={float(tau[row])}" for row in bad]
        assert not cases, f"{len(cases)} of {len(x)} rows: {cases[:5]}"
        tried += len(x)
    return tried


@pytest.mark.parametrize("dtype", list(cpu.DTYPES), ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_no_sum_is_missed(family: str, dtype: torch.dtype) -> None:
    assert fuzz(family, dtype, scores=300, seed=0) > 5000


@pytest.mark.slow
@pytest.mark.parametrize("dtype", list(cpu.DTYPES), ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_no_sum_is_missed_in_many_rows(family: str, dtype: torch.dtype) -> None:
    assert sum(fuzz(family, dtype, scores=10_000, seed=seed) for seed in range(1, 5)) > 1_000_000


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_plateau_of_huge_scores(family: str, dtype: torch.dtype) -> None:
    for n, size, k in ((600, 1e17, 598), (600, 1e17, 599.5), (600, 1e30, 1e-3), (5000, 1e25, 4997), (48, 1e17, 45)):
        x = torch.full((2, n), size, dtype=dtype)
        x[:, -1] = 0
        y = khot.soft_topk(x, k, method=family)
        assert float((y.double().sum(-1) - k).abs().max()) <= 4 * torch.finfo(dtype).eps * max(1, k)


@pytest.mark.parametrize("n", [1, 2, 33])
@pytest.mark.parametrize("size", [2e14, 3e17])
def test_a_tiny_k_of_equal_scores(n: int, size: float) -> None:
    """Far out in the tail of the gaussian a position is too coarse for the sum, which is mended in the values."""
    k = torch.logspace(-36, -1, 3001, dtype=torch.float64).view(-1, 1)
    x = torch.full((len(k), n), size)
    for isa in library.instruction_sets():
        with library.using(isa):
            y = cpu.forward(x, k, 0.1, "gaussian")[0].double()
        assert bool(((y.sum(-1, keepdim=True) - k).abs() <= 8 * torch.finfo(torch.float32).eps * k + n * 1.2e-38).all())


def test_near_a_kink() -> None:
    x = torch.tensor([0.9999, 0.0, -3.0], requires_grad=True)
    y = khot.euclidean_topk(x, 1)
    torch.testing.assert_close(y, torch.tensor([0.99995, 0.00005, 0.0]), rtol=0, atol=1e-7)
    (grad,) = torch.autograd.grad(y[0], x)
    assert grad.tolist() == [0.5, -0.5, 0.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("n", "k"), [(2, 1), (3, 1), (10, 1), (10, 3), (33, 7.5), (64, 4), (600, 30)])
def test_the_active_set_decides(n: int, k: float, dtype: torch.dtype) -> None:
    """Where no score is at 0 or 1 to within rounding, the gradient has the active set of the exact solution."""
    generator = torch.Generator().manual_seed(n)
    count = 50_000 // n
    eps = torch.finfo(dtype).eps
    for scale in (1e-4, 1.0, 30.0):
        x = (scale * torch.randn(count, n, generator=generator, dtype=torch.float64)).to(dtype)
        rows = torch.full((count,), float(k), dtype=torch.float64)
        u = arguments(x.double(), rows, torch.ones_like(rows), "euclidean")
        active = (u.abs() < 0.5).double()
        grad = torch.randn(count, n, generator=generator, dtype=torch.float64).to(dtype)
        mean = (active * grad).sum(-1, keepdim=True) / active.sum(-1, keepdim=True).clamp(min=1)
        clear = ((u.abs() - 0.5).abs() > 8 * eps * (1 + scale)).all(-1)
        assert bool(clear.any())
        for isa in library.instruction_sets():
            with library.using(isa):
                y = cpu.forward(x, float(k), 1.0, "euclidean")[0]
                got = cpu.backward(grad, y, 1.0, "euclidean")[0].double()
            assert float((y.double().sum(-1) - k).abs().max()) <= 2 * eps * max(1, k)
            torch.testing.assert_close(got[clear], (active * (grad - mean))[clear], rtol=0, atol=32 * eps)
