"""Entmax over alpha: its values, its gradient in alpha, and both of its ends."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.testing import assert_close

import khot
from tests import oracles
from tests.oracles import randn


@pytest.mark.parametrize("alpha", [1.01, 1.2, 1.5, 1.75, 1.99, 2.01, 2.5, 3.0])
def test_entmax_at_every_alpha(alpha: float) -> None:
    scores = randn(2, 15)
    truth = oracles.bisect(scores, 4.2, 0.6, oracles.entmax_cdf(alpha))
    assert_close(khot.entmax_topk(scores, 4.2, 0.6, alpha=alpha), truth, rtol=0, atol=1e-12)


def test_entmax_with_an_alpha_per_row() -> None:
    scores, alphas = randn(5, 12), torch.tensor([1.01, 1.3, 1.5, 2.0, 3.0], dtype=torch.float64)
    each = torch.stack([khot.entmax_topk(row, 4.2, 0.6, alpha=float(alpha)) for row, alpha in zip(scores, alphas, strict=True)])
    assert_close(khot.entmax_topk(scores, 4.2, 0.6, alpha=alphas), each, rtol=0, atol=1e-12)
    assert_close(khot.soft_topk(scores.mT, 4.2, 0.6, method="entmax", alpha=alphas, dim=0), each.mT, rtol=0, atol=1e-12)
    half = khot.entmax_topk(scores.bfloat16(), 4, 0.6, alpha=alphas)
    assert half.dtype == torch.bfloat16
    assert_close(half, khot.entmax_topk(scores.bfloat16().float(), 4, 0.6, alpha=alphas).bfloat16())
    assert khot.entmax_topk(scores[:, :0], 0, alpha=alphas).shape == (5, 0)
    assert khot.entmax_topk(scores[:0], 2, alpha=alphas[:0]).shape == (0, 12)
    wide = torch.stack([randn(9), 1e6 * randn(9), torch.ones(9, dtype=torch.float64)])
    assert_close(khot.entmax_topk(wide, 3, alpha=alphas[1:4]).sum(-1), torch.full((3,), 3.0, dtype=torch.float64))


def test_entmax_has_a_gradient_in_alpha() -> None:
    scores, alphas = randn(2, 4).requires_grad_(), torch.tensor([1.2, 2.6], dtype=torch.float64, requires_grad=True)
    k, tau = torch.full((2,), 1.7, dtype=torch.float64, requires_grad=True), torch.tensor(2.5, dtype=torch.float64, requires_grad=True)

    def mask(scores: torch.Tensor, k: torch.Tensor, tau: torch.Tensor, alphas: torch.Tensor) -> torch.Tensor:
        return khot.entmax_topk(scores, k, tau, alpha=alphas)

    assert torch.autograd.gradcheck(mask, (scores, k, tau, alphas))
    assert torch.autograd.gradgradcheck(mask, (scores, k, tau, alphas), fast_mode=True)
    (grad,) = torch.autograd.grad(khot.entmax_topk(1e3 * scores.detach(), 2, alpha=alphas).square().sum(), alphas)
    assert_close(grad, torch.zeros_like(alphas))  # a hard mask does not move


def test_entmax_meets_both_ends() -> None:
    scores = randn(4, 9)
    assert_close(khot.entmax_topk(scores, 3, alpha=1), khot.sigmoid_topk(scores, 3))
    assert_close(khot.entmax_topk(scores, 3, alpha=2), khot.euclidean_topk(scores, 3))
    assert_close(khot.entmax_topk(scores, 3, alpha=1.001), khot.sigmoid_topk(scores, 3), rtol=0, atol=2e-3)
    assert_close(khot.entmax_topk(scores, 3, alpha=1.999), khot.euclidean_topk(scores, 3), rtol=0, atol=2e-3)


def test_compiles_without_a_warning() -> None:
    """Dynamo warns of a cache that it looks into."""
    torch._dynamo.reset()
    x = torch.randn(3, 7)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        y = torch.compile(lambda s: khot.entmax_topk(s, 2), fullgraph=True, backend="eager")(x)
    torch.testing.assert_close(y, khot.entmax_topk(x, 2))
