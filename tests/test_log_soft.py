"""The logarithm of the mask against the mask, and where the mask has none."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import gradcheck
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
    assert gradcheck(lambda s, k, t: khot.log_soft_topk(s, k, t, method=method), (scores, k, tau))


def test_gradient_where_the_mask_underflows() -> None:
    scores = torch.tensor([400.0, 0.0], requires_grad=True)
    (grad,) = torch.autograd.grad(khot.log_soft_topk(scores, 1)[1], scores)
    assert_close(grad, torch.tensor([-0.5, 0.5]))


def test_half_precision_and_errors() -> None:
    scores = randn(2, 30).bfloat16()
    assert_close(khot.log_soft_topk(scores, 4).double(), khot.log_soft_topk(scores.double(), 4), rtol=0.01, atol=1e-4)
    with pytest.raises(ValueError, match="no threshold family"):
        khot.log_soft_topk(scores, 2, method="softsort")


def test_a_second_derivative_is_refused_not_wrong() -> None:
    scores = torch.randn(5, dtype=torch.float64, requires_grad=True)
    (first,) = torch.autograd.grad(khot.log_soft_topk(scores, 2)[0], scores, create_graph=True)
    with pytest.raises(RuntimeError, match="log_soft_topk has no second derivative"):
        first.sum().backward()
