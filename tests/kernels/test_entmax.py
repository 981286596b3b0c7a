"""Native entmax: against slow truths and the reference, the table of its tail, every instruction set and dtype."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import khot
from khot import kernels
from khot.kernels import cpu, library
from khot.primitives.threshold.tsallis import tsallis_family
from tests.kernels.rows import counts, hostile, truth
from tests.kernels.test_native import ATOL, EPS
from tests.oracles import entmax_cdf

pytestmark = pytest.mark.skipif(not kernels.available(), reason="no native code is in use: not built, or KHOT_KERNELS=0")

ALPHAS = (1.125, 1.25, 1.5, 1.75, 1.99, 2.01, 2.5, 3.0)


@pytest.fixture(params=library.instruction_sets())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    with library.using(request.param):
        yield request.param


def closed_form(alpha: float):
    """F with F(0) = 1/2, where it has a formula."""
    if alpha == 3.0:
        return lambda u: np.clip(4 * u + 0.5, 0, 1)
    assert alpha == 1.5

    def f(u: np.ndarray) -> np.ndarray:
        s = np.clip(-u * 0.5**0.5, -1, 1)
        tail = (1 - s * s) ** 2 / (2 + 2 * np.abs(s) * np.sqrt(2 - s * s))
        return np.where(s > 0, tail, 1 - tail)

    return f


def native(x: Tensor, k: float, tau: float, alpha: float) -> Tensor:
    family = tsallis_family(alpha - 1, alpha)
    return cpu.forward(x, k, tau, family.kernel, curve=family.curve)[0]


def test_the_closed_forms_are_the_family() -> None:
    u = np.linspace(-1.5, 1.5, 301)
    for alpha in (1.5, 3.0):
        np.testing.assert_allclose(closed_form(alpha)(u), entmax_cdf(alpha)(u), rtol=0, atol=1e-15)


@pytest.mark.parametrize("alpha", [1.5, 3.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n", [1, 8, 33, 64, 513, pytest.param(5000, marks=pytest.mark.slow)])
def test_hostile_rows(alpha: float, dtype: torch.dtype, n: int, isa: str) -> None:
    rows = hostile(n)
    x = torch.stack(list(rows.values())).to(dtype)
    for k in counts(n):
        y = native(x, k, 0.3, alpha).double().numpy()
        for name, row, result in zip(rows, x.double().numpy(), y, strict=True):
            where = f"{name}, k={k}"
            np.testing.assert_allclose(result, truth(row, k, 0.3, closed_form(alpha)), rtol=0, atol=ATOL[dtype], err_msg=where)
            total = np.minimum(k, (row > -np.inf).sum())
            assert not abs(result.sum() - total) > 4 * EPS[dtype] * max(1, total), where


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("dtype", list(cpu.DTYPES))
@pytest.mark.parametrize("n", [5, 64, 700, pytest.param(9000, marks=pytest.mark.slow)])
def test_equals_the_reference(alpha: float, dtype: torch.dtype, n: int) -> None:
    x = torch.stack(list(hostile(n).values())).to(dtype)
    k = torch.linspace(0.4, n - 0.7, len(x), dtype=torch.float64).to(dtype)
    tau = torch.linspace(0.5, 2, len(x), dtype=torch.float64).to(dtype)
    out = []
    for block in (contextlib.nullcontext(), kernels.disabled()):
        with block:
            out.append(khot.soft_topk(x, k, tau, method="entmax", alpha=alpha))
    size = {torch.float32: 2e-6, torch.float64: 2e-13, torch.bfloat16: 8e-3, torch.float16: 1e-3}[dtype]
    # Either sum may miss k by 2 eps k, and where the scores lie far apart all of that falls on one weight.
    assert_close(*out, rtol=0, atol=max(size, 4 * torch.finfo(out[0].dtype).eps * n * (dtype in EPS)), equal_nan=True)


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_equal_the_reference(alpha: float, dtype: torch.dtype, isa: str) -> None:
    """On normal scores: where a row has one weight between 0 and 1, or one at the end of the slope, k has no derivative."""
    g = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(7, 300, generator=g, dtype=torch.float64).to(dtype) for _ in range(2))
    out = []
    for block in (contextlib.nullcontext(), kernels.disabled()):
        leaves = [x.clone().requires_grad_(), torch.full((7,), 40.3, dtype=dtype, requires_grad=True), torch.full((7,), 0.8, dtype=dtype)]
        leaves[2].requires_grad_()
        with block:
            y = khot.soft_topk(leaves[0], leaves[1], leaves[2], method="entmax", alpha=alpha)
            out.append(torch.autograd.grad((y * weight).sum(), leaves))
    scale = 1.0 if dtype == torch.float32 else 1e-8
    for mine, theirs in zip(*out, strict=True):
        assert_close(mine, theirs, rtol=1e-4 * scale, atol=1e-4 * scale)


@pytest.mark.parametrize("alpha", [a for a in ALPHAS if a != 1.5])
def test_the_table_holds_the_tail(alpha: float, isa: str) -> None:
    """Two scores with k = 1 have y and 1 - y: every argument from the foot to the middle, down to the smallest."""
    family = tsallis_family(alpha - 1, alpha)
    for dtype, digits in ((torch.float32, 3e-5), (torch.float64, 3e-12)):
        u = torch.cat([torch.linspace(0, 1, 301, dtype=torch.float64), 2.0 ** -torch.arange(1, 60, dtype=torch.float64)])
        x = torch.stack([u - 1, 1 - u], -1).to(dtype) / ((alpha - 1) * 2 ** (alpha - 1))
        y = native(x, 1.0, 1.0, alpha)[:, 0].double()
        exact = family.f(u / ((alpha - 1) * 2 ** (alpha - 1)))
        error = (y - exact).abs()
        assert bool((error <= 4 * EPS[dtype] + digits * exact).all())


@pytest.mark.parametrize("alpha", [1.25, 1.5])
def test_half_precision_is_rounded_once(alpha: float, isa: str) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        x = (3 * torch.randn(9, 77, generator=torch.Generator().manual_seed(0))).to(dtype)
        assert torch.equal(native(x, 7.0, 1.0, alpha), native(x.float(), 7.0, 1.0, alpha).to(dtype))


@pytest.mark.parametrize("alpha", [1.25, 1.5])
def test_result_does_not_depend_on_threads(alpha: float) -> None:
    before = torch.get_num_threads()
    long, short = (torch.randn(shape, generator=torch.Generator().manual_seed(0)) for shape in ((2, 70001), (1000, 61)))
    results = []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append((native(long, 900.0, 1.0, alpha), native(short, 9.0, 1.0, alpha)))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


def test_near_the_sigmoid_the_reference_runs() -> None:
    assert kernels.pick("threshold", tsallis_family(0.1, 1.1).kernel, torch.randn(2, 3), 1.0, 1.0) is None
    assert kernels.pick("threshold", tsallis_family(0.125, 1.125).kernel, torch.randn(2, 3), 1.0, 1.0) is not None


def test_one_alpha_for_all_rows_as_a_tensor() -> None:
    x = torch.randn(6, 50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    weight = torch.randn(6, 50, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    out = []
    for block in (contextlib.nullcontext(), kernels.disabled()):
        alpha = torch.tensor(1.37, dtype=torch.float64, requires_grad=True)
        with block:
            y = khot.soft_topk(x, 7, method="entmax", alpha=alpha)
            out.append((y.detach(), *torch.autograd.grad((y * weight).sum(), alpha)))
    for mine, theirs in zip(*out, strict=True):
        assert_close(mine, theirs, rtol=1e-9, atol=1e-9)


def test_eight_python_threads_make_one_table() -> None:
    """The table of an alpha that nobody has asked for yet, by eight threads at once; shrinkage by magnitude beside it."""
    x = torch.randn(30, 200, generator=torch.Generator().manual_seed(0))

    def work(_: int) -> tuple[Tensor, Tensor]:
        return khot.soft_topk(x, 11, method="entmax", alpha=1.4321), khot.magnitude_topk(x, 11)

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(work, range(24)))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_after_a_fork() -> None:
    code = (
        "import os, torch, khot\n"
        "torch.set_num_threads(2)\n"
        "f = lambda: (khot.soft_topk(x, 9, method='entmax', alpha=1.3), khot.magnitude_topk(x, 9))\n"
        "x = torch.randn(64, 4096); before = f()\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    torch.set_num_threads(1)\n"
        "    os._exit(0 if all(torch.equal(a, b) for a, b in zip(f(), before)) else 1)\n"
        "raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0
