"""Native shrinkage by magnitude: the shares sum to k, against the reference, hostile rows, gradients."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import khot
from khot import kernels
from tests.kernels.rows import hostile

pytestmark = pytest.mark.skipif(not kernels.available(), reason="no native code is in use: not built, or KHOT_KERNELS=0")

POWERS = (4 / 3, 1.5, 2.0, 1.7, 3.0)


def finite_rows(n: int, dtype: torch.dtype) -> Tensor:
    """Rows of every finite kind, as far as the cube of their spread is a number."""
    return torch.stack([row for row in hostile(n).values() if bool(row.isfinite().all()) and row.abs().max() < 1e20]).to(dtype)


def shares(size: Tensor, t: Tensor, tau: float, m: float) -> Tensor:
    return torch.where(size > t, ((size - t).clamp(min=0) / tau) ** m / t, 0.0).clamp(max=1)


@pytest.mark.parametrize("p", POWERS)
@pytest.mark.parametrize("n", [1, 2, 7, 64, 513])
def test_shares_sum_to_k(p: float, n: int) -> None:
    from khot.kernels.magnitude import shrink

    x, m = finite_rows(n, torch.float64), 1 / (p - 1)
    for k in sorted({k for k in (0.3, 1.0, n / 3, n - 0.5) if 0 < k < n}):
        for tau in (0.1, 2.0):
            found = shrink(x, k, tau, m)
            assert found is not None
            y, t = found
            size, share = x.abs(), shares(x.abs(), t, tau, m)
            # The sum falls with t, and t is a number: to either side of it lie too many and too few.
            wanted, rounding = (size > 0).sum(-1).double().clamp(max=k), 4 * torch.finfo(t.dtype).eps
            assert bool((shares(size, t * (1 - rounding), tau, m).sum(-1) >= wanted * (1 - 1e-12)).all()), (k, tau)
            assert bool((shares(size, t * (1 + rounding), tau, m).sum(-1) <= wanted * (1 + 1e-12)).all()), (k, tau)
            assert_close(y.abs(), torch.where(share == 1, size, torch.where(size > t, size - t + share * t, 0.0)), rtol=1e-12, atol=0)
            assert bool((y * x >= 0).all())


@pytest.mark.parametrize("p", POWERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equals_the_reference(p: float, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(0)
    x, weight = (3 * torch.randn(6, 90, generator=g, dtype=torch.float64).to(dtype) for _ in range(2))
    out = []
    for block in (contextlib.nullcontext(), kernels.disabled()):
        leaves = [x.clone().requires_grad_(), torch.full((6,), 7.3, dtype=dtype), torch.full((6,), 0.6, dtype=dtype)]
        for leaf in leaves[1:]:
            leaf.requires_grad_()
        with block:
            y = khot.magnitude_topk(leaves[0], leaves[1], leaves[2], p=p)
            out.append([y, *torch.autograd.grad((y * weight).sum(), leaves)])
            with torch.no_grad():
                assert_close(khot.magnitude_topk(*leaves, p=p), y.detach(), rtol=1e-6, atol=0)
    digits = 1e-5 if dtype == torch.float32 else 1e-11
    for mine, theirs in zip(*out, strict=True):
        assert_close(mine, theirs, rtol=digits, atol=digits)


def test_edges() -> None:
    x = torch.tensor([[3.0, -2.0, 0.0, 1.0], [0.0, 0.0, 0.0, 0.0]])
    assert_close(khot.magnitude_topk(x, 0), torch.zeros_like(x))
    assert_close(khot.magnitude_topk(x, 4), x)
    assert khot.magnitude_topk(x[:, :0], 0).shape == (2, 0)
    assert khot.magnitude_topk(x[:0], 2).shape == (0, 4)
    learns = x[:0].requires_grad_()
    khot.magnitude_topk(learns, 2).sum().backward()
    with kernels.disabled():
        expected = khot.magnitude_topk(torch.tensor([torch.inf, 1.0, 2.0]), 2)
    assert_close(khot.magnitude_topk(torch.tensor([torch.inf, 1.0, 2.0]), 2), expected, equal_nan=True)  # not finite: the reference runs
