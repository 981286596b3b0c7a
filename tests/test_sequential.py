"""Successive softmaxes: the fused rule against plain differentiation, ties, small temperatures."""

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

import khot
from khot.primitives import weights
from khot.primitives.successive import composed, successive_softmaxes, sum_of_softmaxes

F64 = torch.float64


def by_hand(x: torch.Tensor, k: int, tau: float) -> torch.Tensor:
    """One softmax after the other, in double precision and without care."""
    rows, a = [], x.double()
    for _ in range(k):
        p = torch.softmax(a / tau, -1)
        rows.append(p)
        a = a + torch.log1p(-p)
    return torch.stack(rows, -2)


@pytest.mark.parametrize("tau", [0.3, 1.0, 3.0])
def test_fused_rule_equals_plain_differentiation(tau):
    x = torch.randn(3, 7, dtype=F64).mul(2).requires_grad_()
    width = torch.tensor([[tau], [tau / 2], [2 * tau]], dtype=F64, requires_grad=True)
    way = torch.randn(3, 4, 7, dtype=F64)
    fused, plain = successive_softmaxes(x, width, 4), composed(x, width, 4)
    torch.testing.assert_close(fused, plain, rtol=1e-12, atol=1e-14)
    for a, b in zip(*(torch.autograd.grad((y * way).sum(), (x, width)) for y in (fused, plain))):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


def test_values_by_hand():
    x = torch.randn(4, 9)
    torch.testing.assert_close(khot.sequential_matrix(x, 5, 0.7).double(), by_hand(x, 5, 0.7), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(khot.soft_topk(x, 5, 0.7, method="sequential").double(), by_hand(x, 5, 0.7).sum(-2), rtol=1e-5, atol=1e-6)


def test_gradients_in_every_mode():
    x = torch.tensor([[0.3, 2.0, -1.0, 0.8], [4.0, 0.0, 0.1, -0.2]], dtype=F64, requires_grad=True)
    width = torch.tensor([[0.7], [0.5]], dtype=F64, requires_grad=True)
    f = lambda x, width: successive_softmaxes(x, width, 3)  # noqa: E731
    modes = {"check_batched_grad": True, "check_forward_ad": True, "check_batched_forward_grad": True, "check_grad_dtypes": True}
    assert gradcheck(f, (x, width), **modes)
    assert gradgradcheck(f, (x, width))


@pytest.mark.parametrize("tau", [1.0, 1e-1, 1e-2, 1e-4, 1e-8, 1e-20, 1e-37])
@pytest.mark.parametrize("dtype", [torch.float32, F64], ids=str)
def test_whole_scores_at_small_temperatures(tau, dtype):
    x = torch.randint(0, 4, (50, 8), generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()
    y = khot.soft_topk(x, 5, tau, method="sequential")
    (grad,) = torch.autograd.grad((y * torch.arange(8, dtype=dtype)).sum(), x)
    assert bool(y.isfinite().all()) and bool(grad.isfinite().all())
    torch.testing.assert_close(y.sum(-1), torch.full_like(y[:, 0], 5.0))
    x, y = x.detach(), y.detach()
    for score in range(4):
        same = torch.where(x == score, y, torch.nan)
        spread = same.nan_to_num(nan=-torch.inf).amax(-1) - same.nan_to_num(nan=torch.inf).amin(-1)
        assert float(spread[(x == score).any(-1)].max()) <= 16 * torch.finfo(dtype).eps


def test_sum_without_a_matrix():
    x = torch.randn(3, 20)
    torch.testing.assert_close(sum_of_softmaxes(x, 0.5, 6), successive_softmaxes(x, 0.5, 6).sum(-2))
    assert sum_of_softmaxes(x, 0.5, 0).tolist() == torch.zeros(3, 20).tolist()


@pytest.mark.parametrize("tau", [1.0, 0.5, 0.25])
@pytest.mark.parametrize("gap", [0.0, 30.0])
@pytest.mark.parametrize("dtype", [torch.float32, F64], ids=str)
def test_weights_equal_logarithms(tau, gap, dtype):
    """With a winner far ahead its 1 - p is the sum of the others; values, sums and gradients of both forms."""
    x = torch.randn(3, 40, dtype=F64, generator=torch.Generator().manual_seed(1))
    x[:, 5] += gap
    way = torch.randn(9, 3, 40, dtype=F64, generator=torch.Generator().manual_seed(2))
    x, exact = x.to(dtype).requires_grad_(), x.to(dtype).double().requires_grad_()
    assert weights.takes(x, tau, 9)
    eps = 64 * torch.finfo(dtype).eps
    truth = composed(exact, tau, 9)
    (slope,) = torch.autograd.grad((truth.movedim(-2, 0) * way).sum(), exact, retain_graph=True)
    rows = weights.Stacked.apply(x, tau, 9)
    torch.testing.assert_close(rows.movedim(0, -2).double(), truth, rtol=0, atol=eps)
    (found,) = torch.autograd.grad((rows * way.to(dtype)).sum(), x)
    torch.testing.assert_close(found.double(), slope, rtol=0, atol=eps * 4)
    total = weights.Summed.apply(x, tau, 9)
    torch.testing.assert_close(total.double(), truth.sum(-2), rtol=0, atol=eps)
    (slope,) = torch.autograd.grad((truth.sum(-2) * way[0]).sum(), exact)
    (found,) = torch.autograd.grad((total * way[0].to(dtype)).sum(), x)
    torch.testing.assert_close(found.double(), slope, rtol=0, atol=eps * 4)


def test_weights_leave_wide_logits_and_other_powers_alone():
    x = torch.tensor([[0.0, 100.0, 1.0]])
    assert not weights.takes(x, 0.5, 2) and not weights.takes(torch.randn(2, 5), 0.7, 2)
    assert not weights.takes(torch.tensor([[0.0, -torch.inf]]), 0.5, 2) and not weights.takes(torch.tensor([[0.0, torch.nan]]), 0.5, 2)


def test_weights_are_differentiated_twice_and_in_batches():
    x = torch.randn(2, 6, dtype=F64, generator=torch.Generator().manual_seed(3)).requires_grad_()
    for f in (lambda x: successive_softmaxes(x, 0.5, 4), lambda x: sum_of_softmaxes(x, 0.5, 4)):
        assert gradcheck(f, (x,), check_batched_grad=True, check_forward_ad=True)
        assert gradgradcheck(f, (x,))
