"""The native CPU kernel: against a slow truth and the reference, on every instruction set, in every dtype, from many threads."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from scipy import special
from torch import Tensor
from torch.testing import assert_close

import khot
from khot import kernels
from khot.kernels import cpu, library
from tests.kernels.rows import FAMILIES, counts, hostile, truth
from tests.oracles import CDFS

pytestmark = pytest.mark.skipif(not kernels.available(), reason="no native code is in use: not built, or KHOT_KERNELS=0")

EPS = {torch.float32: torch.finfo(torch.float32).eps, torch.float64: torch.finfo(torch.float64).eps}
ATOL = {torch.float32: 5e-7, torch.float64: 2e-13}


@pytest.fixture(params=library.instruction_sets())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every instruction set that the library and this machine both have, in turn."""
    with library.using(request.param):
        yield request.param


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
            results = {}
            for isa in library.instruction_sets():
                with library.using(isa):
                    results[isa] = cpu.forward(x, k, tau, family)[0].double().numpy()
            for i, (name, row) in enumerate(zip(names, x.double().numpy(), strict=True)):
                expected = truth(row, k, tau, family)
                for isa, y in results.items():
                    _check_row(y[i], expected, row, k, dtype, f"{name}, n={n}, k={k}, tau={tau}, {isa}")


def _check_row(result: np.ndarray, expected: np.ndarray, row: np.ndarray, k: float, dtype: torch.dtype, where: str) -> None:
    np.testing.assert_allclose(result, expected, rtol=0, atol=ATOL[dtype], err_msg=where)
    total = np.minimum(k, (row > -np.inf).sum())
    assert not abs(result.sum() - total) > 4 * EPS[dtype] * max(1, total), where
    if not np.isnan(row).any():
        assert (result[row == -np.inf] == 0).all() and (k < len(row) or (result[row > -np.inf] == 1).all()), where


@pytest.mark.parametrize("family", ["sigmoid", "laplace", "gaussian"])
@pytest.mark.parametrize("n", [64, 1024, 20000])
def test_small_weights_keep_their_digits(family: str, n: int, isa: str) -> None:
    x = torch.randn(4, n, generator=torch.Generator().manual_seed(n))
    for k in (1.0, n / 16, n / 2):
        for row, y in zip(x.double().numpy(), cpu.forward(x, k, 1.0, family)[0].double().numpy(), strict=True):
            expected = truth(row, k, 1.0, family)
            error = np.abs(y / expected - 1) / EPS[torch.float32]
            assert (error <= _most_error(expected, k, family))[expected > 1e-6].all(), f"k={k}"


def _most_error(y: np.ndarray, k: float, family: str) -> np.ndarray:
    """The largest relative error of ``y = F(u)`` in float32, in eps. Every operation rounds by half an eps. With ``s = F'(u) / F(u)``:

    - The argument is a difference, a product and a sum (or a fused pair, and the unit of the exponential rounded beforehand): three
      roundings of at most ``|u|`` each, 1.5 |u| s. In the exponential families they are taken of ``x - high``, which is u up to the
      steps since the start; normal rows start within 1 of their threshold: 1.5 s more.
    - The function. exp2: its polynomial 0.75, the last sums of it 1. sigmoid, laplace: the factor, a product, a sum, a quotient, each
      0.5, together 3.75. gaussian: its density is exp2 of w^2, rounded once, 0.25 u^2; the tail's polynomial 0.2, the sums of it 1,
      its argument 1, a sum, a quotient and two products 2; the last step adds once more, 0.5: together 6.5.
      Without fused operations the sums round twice: 0.5 more.
    - The threshold. The sum may miss k by 2 max(1, k) eps, which moves u by that over the sum of F'.
    - The last step of the gaussian is a series in d with an error of He_6(u) F'(u) d^7 / 7!, and d is at most 1.3 eps^(1/7).
    """
    eps = EPS[torch.float32]
    u = {"sigmoid": special.logit, "gaussian": special.ndtri, "laplace": _laplace_quantile}[family](y)
    slope = (CDFS[family](u + 1e-6) - CDFS[family](u - 1e-6)) / 2e-6
    threshold = 2 * max(1.0, k) / slope.sum()
    if family != "gaussian":
        return 4.25 + (1.5 * np.abs(u) + 1.5 + threshold) * slope / y
    series = np.abs(special.eval_hermitenorm(6, u)) * 1.3**7 * eps / 5040 / eps
    return 7.0 + 0.25 * u**2 + (1.5 * np.abs(u) + threshold + series) * slope / y


def _laplace_quantile(p: np.ndarray) -> np.ndarray:
    return np.where(p < 0.5, np.log(2 * p), -np.log(2 - 2 * p))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", list(cpu.DTYPES))
@pytest.mark.parametrize("n", [5, 64, 700, 9000])
def test_equals_the_reference(family: str, dtype: torch.dtype, n: int) -> None:
    _, x = stack(n, dtype)
    g = torch.randn(x.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    # No k is n/2: the row of two clusters would then lie on a kink, where the derivative in k is not unique.
    k = torch.linspace(0.4, n - 0.7, len(x), dtype=torch.float64).to(dtype)
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
def test_half_precision_is_rounded_once(family: str, isa: str) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        x = (3 * torch.randn(9, 77, generator=torch.Generator().manual_seed(0))).to(dtype)
        assert torch.equal(cpu.forward(x, 7.0, 1.0, family)[0], cpu.forward(x.float(), 7.0, 1.0, family)[0].to(dtype))
        special = torch.tensor([[torch.inf, -torch.inf, 0.0, 1e-7, -1e-7, 60000.0, 1.0]]).to(dtype)
        assert torch.equal(cpu.forward(special, 3.0, 1.0, family)[0], cpu.forward(special.float(), 3.0, 1.0, family)[0].to(dtype))


@pytest.mark.parametrize("family", FAMILIES)
def test_result_does_not_depend_on_threads(family: str, isa: str) -> None:
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


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], env=os.environ | environment, capture_output=True, text=True)


def test_the_environment_chooses_the_instruction_set(isa: str) -> None:
    done = run("import khot; print(khot.kernels.available())", KHOT_ISA=isa)
    assert done.stdout.strip() == f"('cpu-{isa}',)", done.stderr


def test_an_instruction_set_that_is_not_there() -> None:
    done = run("import khot", KHOT_ISA="abacus")
    have = ", ".join(library.instruction_sets())
    assert f"the library and this machine both have ({have}), got 'abacus'" in done.stderr


def test_entry_points_check_what_they_are_given() -> None:
    x, numbers = torch.randn(3, 5), torch.zeros(3, dtype=torch.float64)
    forward, backward = cpu.LIBRARY.khot_threshold_forward, cpu.LIBRARY.khot_threshold_backward
    p, column = x.data_ptr(), numbers.data_ptr()

    def forward_code(family=0, dtype=0, x=p, y=p, rows=3, n=5) -> int:
        return forward(family, dtype, x, y, None, 2.0, None, 1.0, None, rows, n, 1, None)

    def backward_code(family=0, dtype=0, y=p, gx=p, x=p, shift=column, rows=3, n=5) -> int:
        return backward(family, dtype, y, p, x, shift, gx, None, column, None, 1.0, rows, n, 1, None)

    for code in (forward_code, backward_code):
        assert code(family=9) == 1 and code(dtype=9) == 2 and code(rows=-1) == 3 and code(n=-1) == 3 and code(n=2**62) == 3
        assert code(y=None) == 4 and code(rows=0, y=None) == 0 and code(family=5) == 4  # which wants a table
    assert forward_code(x=None) == 4 and backward_code(gx=None) == 4 and backward_code(x=None) == 4 and backward_code(shift=None) == 4
    assert forward_code() == 0 and backward_code() == 0


def test_return_codes_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cpu.FAMILIES, "sigmoid", 9)
    x = torch.randn(3, 5)
    with pytest.raises(RuntimeError, match="family is unknown"):
        cpu.forward(x, 2.0, 1.0, "sigmoid")
    with pytest.raises(RuntimeError, match="family is unknown"):
        cpu.backward(x, x, 1.0, "sigmoid")


def test_rows_without_scores_have_a_threshold() -> None:
    stale = torch.full((1000, 1), torch.nan, dtype=torch.float64)
    del stale  # its memory is what the next allocation of this size may find
    y, t = torch.ops.khot.threshold_forward(torch.zeros(1000, 0), None, 0.0, None, 1.0, "sigmoid", 0.0)
    assert y.shape == (1000, 0) and torch.equal(t, torch.zeros(1000, 1, dtype=torch.float64))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tau_without_end(family: str, dtype: torch.dtype) -> None:
    for n in (4, 700, 5000):
        x = torch.randn(2, n, generator=torch.Generator().manual_seed(0), dtype=dtype) * 1e30
        for tau in (1e60, 1e300, float("inf")):
            assert_close(cpu.forward(x, n / 4, tau, family)[0], torch.full_like(x, 0.25))


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
    done = run(probe, KHOT_KERNELS="0")
    assert done.returncode == 0 and "2." in done.stdout, done.stderr
