"""The native CPU kernel: against a slow truth and the reference, on every instruction set, in every dtype, from many threads."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from scipy import special
from torch import Tensor
from torch.testing import assert_close

import khot
from khot import kernels
from khot.kernels import cpu
from tests.kernels.rows import FAMILIES, counts, hostile, truth
from tests.oracles import CDFS

pytestmark = pytest.mark.skipif(not cpu.LIBRARY, reason="the native kernel is not built: python -m khot.kernels.build")

EPS = {torch.float32: torch.finfo(torch.float32).eps, torch.float64: torch.finfo(torch.float64).eps}
ATOL = {torch.float32: 5e-7, torch.float64: 2e-13}


def stack(n: int, dtype: torch.dtype) -> tuple[list[str], Tensor]:
    rows = hostile(n)
    return list(rows), torch.stack(list(rows.values())).to(dtype)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n", [1, 2, 3, 8, 31, 33, 64, 100, 513, 5000, pytest.param(40000, marks=pytest.mark.slow)])
def test_hostile_rows(family: str, dtype: torch.dtype, n: int) -> None:
    names, x = stack(n, dtype)
    for k in counts(n):
        for tau in (1.0, 0.3):
            y = cpu.forward(x, k, tau, family)[0].double().numpy()
            for name, row, result in zip(names, x.double().numpy(), y, strict=True):
                expected = truth(row, k, tau, family)
                where = f"{name}, n={n}, k={k}, tau={tau}"
                np.testing.assert_allclose(result, expected, rtol=0, atol=ATOL[dtype], err_msg=where)
                total = np.minimum(k, (row > -np.inf).sum())
                assert not abs(result.sum() - total) > 4 * EPS[dtype] * max(1, total), where
                assert np.isnan(row).any() or ((result[row == -np.inf] == 0).all() and (k < n or (result[row > -np.inf] == 1).all())), where


@pytest.mark.parametrize("family", ["sigmoid", "laplace", "gaussian"])
@pytest.mark.parametrize("n", [64, 1024, 20000])
def test_small_weights_keep_their_digits(family: str, n: int) -> None:
    """An argument that is rounded once or twice moves log F by its size times the slope of log F, and no more is lost."""
    x = torch.randn(4, n, generator=torch.Generator().manual_seed(n))
    for k in (1.0, n / 16, n / 2):
        for row, y in zip(x.double().numpy(), cpu.forward(x, k, 1.0, family)[0].double().numpy(), strict=True):
            expected = truth(row, k, 1.0, family)
            u = {"sigmoid": special.logit, "gaussian": special.ndtri, "laplace": _laplace_quantile}[family](expected)
            relative_slope = (CDFS[family](u + 1e-6) - CDFS[family](u - 1e-6)) / 2e-6 / expected
            error = np.abs(y / expected - 1) / EPS[torch.float32]
            assert (error <= 4 + 2 * np.abs(u) * relative_slope)[expected > 1e-6].all(), f"k={k}"


def _laplace_quantile(p: np.ndarray) -> np.ndarray:
    return np.where(p < 0.5, np.log(2 * p), -np.log(2 - 2 * p))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", list(cpu.DTYPES))
@pytest.mark.parametrize("n", [5, 64, 700, 9000])
def test_equals_the_reference(family: str, dtype: torch.dtype, n: int) -> None:
    _, x = stack(n, dtype)
    g = torch.randn(x.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    k = torch.linspace(0.4, n - 0.4, len(x), dtype=torch.float64).to(dtype)
    tau = torch.linspace(0.5, 2, len(x), dtype=torch.float64).to(dtype)
    out = []
    for native in (True, False):
        leaves = [value.clone().requires_grad_() for value in (x, k, tau)]
        with reference(not native):
            y = khot.soft_topk(*leaves, method=family)
            out.append([y, *torch.autograd.grad((y * g).sum(), leaves)])
    finite = x.isfinite().all(-1)
    scale = {torch.float32: 1.0, torch.float64: 1e-6, torch.bfloat16: 3e4, torch.float16: 3e3}[dtype]
    for mine, theirs, size in zip(*out, (2e-6, 2e-5, 2e-5, 2e-4), strict=True):
        assert mine.dtype == theirs.dtype
        assert_close(mine[finite], theirs[finite], rtol=1e-4 * scale**0.5, atol=size * scale, equal_nan=True)


def reference(on: bool):
    return kernels.disabled() if on else contextlib.nullcontext()


@pytest.mark.parametrize("family", FAMILIES)
def test_half_precision_is_rounded_once(family: str) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        x = (3 * torch.randn(9, 77, generator=torch.Generator().manual_seed(0))).to(dtype)
        assert torch.equal(cpu.forward(x, 7.0, 1.0, family)[0], cpu.forward(x.float(), 7.0, 1.0, family)[0].to(dtype))
        special = torch.tensor([[torch.inf, -torch.inf, 0.0, 1e-7, -1e-7, 60000.0, 1.0]]).to(dtype)
        assert torch.equal(cpu.forward(special, 3.0, 1.0, family)[0], cpu.forward(special.float(), 3.0, 1.0, family)[0].to(dtype))


@pytest.mark.parametrize("family", FAMILIES)
def test_result_does_not_depend_on_threads(family: str) -> None:
    before = torch.get_num_threads()
    x = torch.randn(3, 70001, generator=torch.Generator().manual_seed(0))
    short = torch.randn(1000, 61, generator=torch.Generator().manual_seed(0))
    try:
        results = []
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            long_y, short_y = cpu.forward(x, 900.0, 1.0, family)[0], cpu.forward(short, 9.0, 1.0, family)[0]
            results.append((long_y, short_y, cpu.backward(x, long_y, 1.0, family)[0]))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_eight_python_threads() -> None:
    x = [torch.randn(40, 300 + 37 * i, generator=torch.Generator().manual_seed(i)) * (1 + 30 * (i % 2)) for i in range(8)]
    alone = [khot.soft_topk(value, 11, method=FAMILIES[i % 4]) for i, value in enumerate(x)]
    long = torch.randn(1, 200_000, generator=torch.Generator().manual_seed(0))
    long_alone = khot.soft_topk(long, 1000)

    def work(i: int) -> bool:
        same = all(torch.equal(khot.soft_topk(x[i], 11, method=FAMILIES[i % 4]), alone[i]) for _ in range(40))
        return same and torch.equal(khot.soft_topk(long, 1000), long_alone)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))


@pytest.mark.parametrize("isa", ["base", "avx2", "avx512"])
def test_each_instruction_set(isa: str) -> None:
    code = (
        "import sys; from khot.kernels import cpu; assert cpu.name() == sys.argv[1], cpu.name();"
        "import pytest; sys.exit(pytest.main(['-q', '-x', '-p', 'no:cacheprovider', 'tests/kernels/test_native.py', '-k',"
        " 'hostile_rows and (64 or 100 or 5000) or rounded_once or depend_on_threads']))"
    )
    env = os.environ | {"KHOT_ISA": isa}
    found = subprocess.run(
        [sys.executable, "-c", "from khot.kernels import cpu; print(cpu.name())"], env=env, capture_output=True, text=True
    )
    if found.stdout.strip() != isa:
        pytest.skip(f"this machine or compiler has no {isa}")
    done = subprocess.run([sys.executable, "-c", code, isa], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def test_odd_layouts() -> None:
    base = torch.randn(6, 10, 4, generator=torch.Generator().manual_seed(0))
    for x in (base.transpose(0, 2), base[:, ::2], base[..., 1], base[:0], base.expand(3, 6, 10, 4), base.movedim(0, -1)):
        with kernels.disabled():
            expected = khot.soft_topk(x, 2)
        assert_close(khot.soft_topk(x, 2), expected)
    empty = torch.zeros(3, 0)
    assert khot.soft_topk(empty, 0).shape == (3, 0)


def test_gradient_of_a_strange_gradient() -> None:
    x = torch.randn(5, 8, requires_grad=True)
    y = khot.soft_topk(x, 3)
    (expanded,) = torch.autograd.grad(y.sum(), x, retain_graph=True)  # the gradient of a sum is an expanded scalar
    assert_close(expanded, torch.zeros_like(x), rtol=0, atol=1e-6)
    nan_row = torch.cat([x.detach(), torch.full((1, 8), torch.nan)]).requires_grad_()
    (grad,) = torch.autograd.grad((khot.soft_topk(nan_row, 3) * torch.arange(8.0)).sum(), nan_row)
    assert bool(grad[:5].isfinite().all()) and bool(grad[5].isnan().all())


def test_keeps_only_the_output() -> None:
    kept: list[Tensor] = []
    x = torch.randn(4, 50, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = khot.soft_topk(x, 5)
    assert [t.data_ptr() for t in kept] == [y.data_ptr()]


def test_reference_on_request() -> None:
    assert kernels.available()
    with kernels.disabled():
        assert not kernels.available()
    probe = "import khot, torch; assert khot.kernels.available() == (); print(khot.soft_topk(torch.arange(4.0), 2).sum())"
    done = subprocess.run([sys.executable, "-c", probe], env=os.environ | {"KHOT_KERNELS": "0"}, capture_output=True, text=True)
    assert done.returncode == 0 and "2." in done.stdout, done.stderr
