"""Entmax over its whole range: values below 1, above 2 and at 1, and every derivative in alpha."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import khot
from khot.primitives.threshold.tsallis import inverse, tsallis_family
from tests import oracles

ALPHAS = torch.tensor([0.1, 0.7, 1.0, 1.005, 1.5, 2.0, 3.4, 10.0], dtype=torch.float64)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def mask(scores: Tensor, k: Tensor, tau: Tensor, alpha: Tensor) -> Tensor:
    return khot.entmax_topk(scores, k, tau, alpha=alpha)


@pytest.mark.parametrize("alpha", [0.05, 0.5, 0.9, 0.999, 1.001, 4.0, 7.0, 10.0])
def test_values_equal_bisection(alpha: float) -> None:
    scores = randn(2, 15)
    truth = oracles.bisect(scores, 4.2, 0.6, oracles.entmax_cdf(alpha))
    assert_close(khot.entmax_topk(scores, 4.2, 0.6, alpha=alpha), truth, rtol=0, atol=2e-12)
    column = torch.tensor(alpha, dtype=torch.float64)
    assert_close(khot.entmax_topk(scores, 4.2, 0.6, alpha=column), truth, rtol=0, atol=2e-12)


@pytest.mark.parametrize("a", [-0.99, -0.3, -1e-9, 0.0, 1e-9, 0.0099, 0.01, 0.3, 0.75, 1.2, 2.5, 9.0])
def test_the_function_undoes_its_inverse(a: float) -> None:
    y = torch.tensor([1e-30, 1e-12, 1e-5, 0.01, 0.3, 0.5, 0.7, 0.99], dtype=torch.float64)
    family, column = tsallis_family(a), torch.tensor([[a]], dtype=torch.float64)
    assert_close(family.f(inverse(y, a)), y, rtol=1e-12, atol=0)
    assert_close(tsallis_family(column).f(inverse(y, column)), y.unsqueeze(0), rtol=1e-12, atol=0)
    ends = torch.tensor([-torch.inf, torch.inf], dtype=torch.float64)
    assert torch.equal(family.f(ends), torch.tensor([0.0, 1.0], dtype=torch.float64))


def test_a_row_of_alphas_at_every_scale() -> None:
    scores = torch.stack([randn(8, 9), 1e6 * randn(8, 9), 1e-30 * randn(8, 9), torch.ones(8, 9, dtype=torch.float64)])
    for dtype in (torch.float32, torch.float64):
        y = khot.entmax_topk(scores.to(dtype), 3, alpha=ALPHAS)
        assert_close(y.double().sum(-1), torch.full((4, 8), 3.0, dtype=torch.float64), rtol=0, atol=12 * torch.finfo(dtype).eps)
    infinite = torch.tensor([0.3, torch.inf, -torch.inf, 1.0, -1.0], dtype=torch.float64).expand(8, 5)
    y = khot.entmax_topk(infinite, 2, alpha=ALPHAS)
    assert bool((y[:, 1] == 1).all()) and bool((y[:, 2] == 0).all())
    assert_close(y.sum(-1), torch.full((8,), 2.0, dtype=torch.float64))


def test_alpha_one_as_a_tensor_is_the_sigmoid() -> None:
    scores, one = randn(3, 7), torch.tensor(1.0, dtype=torch.float64, requires_grad=True)
    y = khot.entmax_topk(scores, 2.5, 0.8, alpha=one)
    assert_close(y, khot.sigmoid_topk(scores, 2.5, 0.8))
    (grad,) = torch.autograd.grad((y * scores).sum(), one)
    up, down = (khot.entmax_topk(scores, 2.5, 0.8, alpha=1.0 + step) for step in (1e-5, -1e-5))
    assert_close(grad, ((up - down) * scores).sum() / 2e-5, rtol=1e-6, atol=1e-9)


def test_derivatives_in_all_variants() -> None:
    inputs = (
        randn(3, 3).requires_grad_(),
        torch.full((3,), 1.2, dtype=torch.float64, requires_grad=True),
        torch.tensor(2.5, dtype=torch.float64, requires_grad=True),
        torch.tensor([0.4, 1.0, 2.6], dtype=torch.float64, requires_grad=True),
    )
    modes = {"check_forward_ad": True, "check_batched_grad": True, "check_batched_forward_grad": True, "check_grad_dtypes": True}
    assert torch.autograd.gradcheck(mask, inputs, **modes)
    assert torch.autograd.gradgradcheck(mask, inputs, fast_mode=True)


def test_transforms() -> None:
    scores, k, tau = randn(5, 6), torch.full((5,), 2.0, dtype=torch.float64), torch.tensor(0.9, dtype=torch.float64)
    alphas = ALPHAS[:5]
    whole = mask(scores, k, tau, alphas)
    assert_close(torch.vmap(mask, in_dims=(0, 0, None, 0))(scores, k, tau, alphas), whole)
    same = torch.vmap(mask, in_dims=(None, None, None, 0))(scores[0], k[0], tau, alphas)
    assert_close(same, mask(scores[:1].expand(5, 6), k, tau, alphas))
    in_alpha = torch.func.jacfwd(mask, 3)(scores[1], k[1], tau, alphas[1])
    assert_close(in_alpha, torch.func.jacrev(mask, 3)(scores[1], k[1], tau, alphas[1]))
    second = torch.func.jacfwd(torch.func.jacrev(mask, 3), 3)(scores[1], k[1], tau, alphas[1])
    assert_close(second, torch.func.jacfwd(torch.func.jacfwd(mask, 3), 3)(scores[1], k[1], tau, alphas[1]))


def test_compiles_and_exports_with_a_tensor_alpha() -> None:
    torch._dynamo.reset()
    scores, alphas = randn(3, 6).requires_grad_(), ALPHAS[1:4].clone().requires_grad_()
    compiled = torch.compile(lambda x, a: khot.soft_topk(x, 2, 0.7, method="entmax", alpha=a), fullgraph=True, backend="aot_eager")
    for found, expected in zip(
        torch.autograd.grad(compiled(scores, alphas).square().sum(), (scores, alphas)),
        torch.autograd.grad(khot.soft_topk(scores, 2, 0.7, method="entmax", alpha=alphas).square().sum(), (scores, alphas)),
        strict=True,
    ):
        assert_close(found, expected)
    columns = torch.full((3, 1), 2.0, dtype=torch.float64)
    torch.library.opcheck(torch.ops.khot.entmax_per_row.default, (scores, columns, columns, (alphas - 1).detach().unsqueeze(-1)))
