"""The logarithm of the mask against the mask, and where the mask has none."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.testing import assert_close

import khot

METHODS = [name for name, row in khot.RELAXATIONS.items() if row.family is not None]
SMOOTH = ["sigmoid", "laplace", "gaussian"]


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize("method", METHODS)
def test_is_the_logarithm_of_the_mask(method: str) -> None:
    scores = randn(3, 4, 7)
    scores[0, 0, 2], scores[1, 1, 1] = -torch.inf, torch.inf
    for k in (0, 0.3, 1, 2, 3.5, 4):
        mask = khot.soft_topk(scores, k, 0.7, method=method, dim=1)
        assert_close(khot.log_soft_topk(scores, k, 0.7, method=method, dim=1), mask.log(), rtol=1e-9, atol=1e-12)


def test_exact_where_the_mask_underflows() -> None:
    for dtype, far in ((torch.float32, 400.0), (torch.float64, 4000.0)):
        scores = torch.tensor([[far, 0.0, -50.0], [0.0, far, far]], dtype=dtype)
        k = torch.tensor([1.0, 2.0], dtype=dtype)
        expected = torch.tensor([[0.0, -far / 2, -far / 2 - 50], [-far / 2, 0.0, 0.0]], dtype=dtype)
        # In the second row twice as many lack what one has: the threshold moves by log(2) / 2.
        expected[1, 0] += torch.tensor(2.0).log() / 2
        assert_close(khot.log_soft_topk(scores, k), expected)


@pytest.mark.parametrize("method", SMOOTH)
def test_gradients(method: str) -> None:
    scores = randn(2, 5).requires_grad_()
    k = torch.tensor([1.4, 3.0], dtype=torch.float64, requires_grad=True)
    tau = torch.tensor([0.6, 1.2], dtype=torch.float64, requires_grad=True)
    f = lambda s, k, t: khot.log_soft_topk(s, k, t, method=method)  # noqa: E731
    assert gradcheck(f, (scores, k, tau))
    assert gradgradcheck(f, (scores, k, tau))


def test_gradient_where_the_mask_underflows() -> None:
    scores = torch.tensor([400.0, 0.0], requires_grad=True)
    (grad,) = torch.autograd.grad(khot.log_soft_topk(scores, 1)[1], scores)
    assert_close(grad, torch.tensor([-0.5, 0.5]))


def test_half_precision_and_errors() -> None:
    scores = randn(2, 30).bfloat16()
    assert_close(khot.log_soft_topk(scores, 4).double(), khot.log_soft_topk(scores.double(), 4), rtol=0.01, atol=1e-4)
    with pytest.raises(ValueError, match="no threshold family"):
        khot.log_soft_topk(scores, 2, method="softsort")


@pytest.mark.parametrize("method", SMOOTH)
def test_hessians_in_every_order_of_modes(method: str) -> None:
    scores, weights = randn(5), torch.linspace(-1, 2, 5, dtype=torch.float64)
    own = lambda s: khot.log_soft_topk(s, 2, 1.7, method=method) @ weights  # noqa: E731
    plain = lambda s: khot.soft_topk(s, 2, 1.7, method=method).log() @ weights  # noqa: E731
    truth = torch.func.jacrev(torch.func.jacrev(plain))(scores)
    for outer in (torch.func.jacrev, torch.func.jacfwd):
        for inner in (torch.func.jacrev, torch.func.jacfwd):
            assert_close(outer(inner(own))(scores), truth)
    third = [torch.func.jacrev(torch.func.jacrev(torch.func.jacrev(f)))(scores) for f in (own, plain)]
    assert_close(third[0], third[1])


@pytest.mark.parametrize("method", SMOOTH)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("row", [[200.0, 0, -50], [1, 0, -1], [5, 5, 5], [torch.inf, 1, 0], [-torch.inf, 1, 0], [1e30, 0, -1e30]], ids=str)
def test_derivatives_are_finite(method: str, dtype: torch.dtype, row: list[float]) -> None:
    for k in (0.0, 1.0, 1.5, 2.0, 3.0):
        scores, count = torch.tensor(row, dtype=dtype, requires_grad=True), torch.tensor(k, dtype=dtype, requires_grad=True)
        logs = khot.log_soft_topk(scores, count, method=method)
        first = torch.autograd.grad(logs[logs.isfinite()].sum(), (scores, count), create_graph=True)
        (second,) = torch.autograd.grad(first[0].sum(), scores)
        assert all(bool(part.isfinite().all()) for part in (*first, second))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_gaussian_far_out(dtype: torch.dtype) -> None:
    """The slope of the logarithm is x + 1 / x - 2 / x^3 + ... at a distance of x; that of torch.special.log_ndtr is not."""
    for far in (1e3, 1e4, 1e5, 1e10):
        slope = far + 1 / far - 2 / far**3
        scores = torch.tensor([far, 0.0, -far], dtype=dtype, requires_grad=True)
        (grad,) = torch.autograd.grad(khot.log_soft_topk(scores, 1.5, method="gaussian")[2], scores)
        assert_close(grad, torch.tensor([0.0, -slope, slope], dtype=dtype), rtol=8 * torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize("method", SMOOTH)
@pytest.mark.parametrize("native", [True, False])
def test_gradient_of_equal_scores(method: str, native: bool) -> None:
    """Equal scores lie at the threshold itself, where each side of a family must have the slope of the other."""
    weights = torch.tensor([1.0, 2.0, 3.0, 5.0], dtype=torch.float64)
    for dtype in (torch.float32, torch.float64):
        scores = torch.zeros(4, dtype=dtype, requires_grad=True)
        with contextlib.nullcontext() if native else khot.kernels.disabled():
            (own,) = torch.autograd.grad(khot.log_soft_topk(scores, 2, 0.05, method=method) @ weights.to(dtype), scores)
            (plain,) = torch.autograd.grad(khot.soft_topk(scores, 2, 0.05, method=method).log() @ weights.to(dtype), scores)
        assert_close(own, plain)
        assert bool((own.sort()[0].diff() > 0).all())
