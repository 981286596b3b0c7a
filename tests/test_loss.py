"""The potential, the inverse and the loss of the threshold family."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.testing import assert_close

import khot

METHODS = [name for name, row in khot.RELAXATIONS.items() if row.family is not None]


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("method", METHODS)
def test_gradient_of_the_value_is_the_mask_and_the_threshold(method: str) -> None:
    scores, k = randn(3, 7).requires_grad_(), torch.tensor([1.5, 3.0, 5.2], dtype=torch.float64, requires_grad=True)
    value = khot.topk_value(scores, k, 0.7, method=method)
    grad, grad_k = torch.autograd.grad(value.sum(), (scores, k))
    mask = khot.soft_topk(scores, k, 0.7, method=method)
    assert_close(grad, mask)
    inside = mask.detach().clamp(1e-9, 1 - 1e-9)
    where = ((mask > 1e-6) & (mask < 1 - 1e-6)).double()
    # Inside the box, score - tau F^-1(mask) is the same for all: the threshold, in the scores' own place.
    level = scores.detach() - khot.topk_inverse(inside, 0.7, method=method)
    mean = (level * where).sum(-1) / where.sum(-1)
    assert_close((level * where), mean.unsqueeze(-1) * where, rtol=0, atol=1e-6)
    assert_close(grad_k - grad_k[0], mean - mean[0], rtol=0, atol=1e-6)


@pytest.mark.parametrize("method", METHODS)
def test_value_is_the_maximum(method: str) -> None:
    scores, k = randn(6), 2.0
    family = khot.loss.threshold_family(method, {})
    best = khot.topk_value(scores, k, 0.5, method=method)
    for seed in range(200):
        y = khot.sigmoid_topk(randn(6, seed=seed) * 2, k)
        assert (scores @ y + 0.5 * family.entropy(y).sum()) <= best + 1e-12


@pytest.mark.parametrize("method", METHODS)
def test_value_and_loss_differentiate(method: str) -> None:
    scores, tau = randn(2, 5).requires_grad_(), torch.tensor([0.6, 1.1], dtype=torch.float64, requires_grad=True)
    target = khot.topk_mask(randn(2, 5, seed=1), 2)
    assert gradcheck(lambda s, t: khot.topk_value(s, 2, t, method=method), (scores, tau))
    assert gradcheck(lambda s: khot.topk_loss(s, target, method=method, reduction="none"), (scores,))
    assert gradgradcheck(lambda s: khot.topk_loss(s, target, method=method), (scores,))


@pytest.mark.parametrize("method", METHODS)
def test_loss_is_fenchel_young(method: str) -> None:
    scores = randn(4, 6).requires_grad_()
    target = khot.topk_mask(randn(4, 6, seed=1), 3)
    loss = khot.topk_loss(scores, target, 0.8, method=method, reduction="none")
    assert bool((loss >= 0).all())
    (grad,) = torch.autograd.grad(loss.sum(), scores)
    assert_close(grad, khot.soft_topk(scores, 3, 0.8, method=method) - target)
    perfect = khot.soft_topk(scores.detach(), 2.5, 0.8, method=method)
    assert_close(khot.topk_loss(scores, perfect, 0.8, method=method), torch.tensor(0.0, dtype=torch.float64), rtol=0, atol=1e-12)


def test_sigmoid_value_is_softplus_minus_shift() -> None:
    scores, k = randn(9), 3.5
    y = khot.sigmoid_topk(scores, k)
    c = (torch.logit(y) - scores)[0]
    assert_close(khot.topk_value(scores, k), torch.nn.functional.softplus(scores + c).sum() - k * c)


@pytest.mark.parametrize("method", METHODS)
def test_inverse(method: str) -> None:
    mask = khot.soft_topk(randn(4, 6) * 0.3, 2.5, 2.0, method=method)
    back = khot.topk_inverse(mask, 2.0, method=method)
    assert_close(khot.soft_topk(back, 2.5, 2.0, method=method), mask, rtol=0, atol=1e-9)
    assert_close(khot.topk_inverse(mask, 2.0), 2.0 * torch.logit(mask))


@pytest.mark.parametrize("method", ["sigmoid", "laplace", "gaussian"])
def test_the_inverse_has_its_slope_at_one_half(method: str) -> None:
    halves = torch.full((2,), 0.5, dtype=torch.float64, requires_grad=True)
    near = torch.tensor([0.5 - 1e-6, 0.5 + 1e-6], dtype=torch.float64)
    (grad,) = torch.autograd.grad(khot.topk_inverse(halves, method=method).sum(), halves)
    rise = khot.topk_inverse(near, method=method).diff() / 2e-6
    assert_close(grad, rise.expand(2), rtol=1e-5, atol=0)


def test_padding_does_not_spoil_the_loss() -> None:
    scores = torch.tensor([2.0, -1.0, 0.5, -torch.inf], requires_grad=True)
    target = torch.tensor([1.0, 0.0, 0.0, 0.0])
    loss = khot.topk_loss(scores, target)
    (grad,) = torch.autograd.grad(loss, scores)
    assert_close(loss, khot.topk_loss(scores[:3], target[:3]))
    assert bool(grad.isfinite().all())


def test_loss_trains_a_k_hot_classifier() -> None:
    """Scores fitted to k-hot targets by gradient descent end in the right top-k."""
    target = khot.topk_mask(randn(8, 10, seed=3), 3)
    scores = torch.zeros(8, 10, dtype=torch.float64, requires_grad=True)
    module = khot.nn.TopKLoss(reduction="sum")
    for _ in range(100):
        (grad,) = torch.autograd.grad(module(scores, target), scores)
        scores = (scores - grad).detach().requires_grad_()
    assert torch.equal(khot.topk_mask(scores, 3), target)


def test_targets_as_masks_and_as_indices() -> None:
    scores = randn(4, 6)
    mask = khot.topk_mask(randn(4, 6, seed=1), 2)
    expected = khot.topk_loss(scores, mask, reduction="none")
    for target in (mask.bool(), mask.long(), mask.float(), mask.topk(2).indices):
        assert_close(khot.topk_loss(scores, target, reduction="none"), expected)
        assert_close(khot.topk_loss(scores.t(), target.t(), dim=0, reduction="none"), expected)
    label = torch.tensor([3, 0, 5, 1])
    one_hot = torch.nn.functional.one_hot(label, 6)
    assert_close(khot.topk_loss(scores, label), khot.topk_loss(scores, one_hot))
    with pytest.raises(ValueError, match="between 0 and n-1=5"):
        khot.topk_loss(scores, label + 1)
    with pytest.raises(ValueError, match="must have the scores' shape"):
        khot.topk_loss(scores, label.double())
    with pytest.raises(ValueError, match="must differ within a row"):
        khot.topk_loss(scores, torch.tensor([[0, 1], [2, 2], [3, 4], [5, 0]]))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_rounds_the_result_alone(method: str, dtype: torch.dtype) -> None:
    scores = randn(2, 1000).to(dtype)
    target = khot.topk_mask(scores, 257)
    for mine, truth in (
        (khot.topk_value(scores, 257, method=method), khot.topk_value(scores.double(), 257, method=method)),
        (khot.topk_loss(scores, target, method=method), khot.topk_loss(scores.double(), target.double(), method=method)),
        (khot.topk_inverse(target * 0.5 + 0.25, method=method), khot.topk_inverse(target.double() * 0.5 + 0.25, method=method)),
    ):
        assert mine.dtype == dtype
        assert_close(mine.double(), truth, rtol=torch.finfo(dtype).eps, atol=1e-5)


def test_options_reach_the_family() -> None:
    scores = randn(3, 6).requires_grad_()
    for method, options in (("permutahedron", {"p": 1.6}), ("entmax", {"alpha": 1.2})):
        (grad,) = torch.autograd.grad(khot.topk_value(scores, 2, 0.7, method=method, **options).sum(), scores)
        assert_close(grad, khot.soft_topk(scores, 2, 0.7, method=method, **options).detach())
    with pytest.raises(ValueError, match="no threshold family"):
        khot.topk_value(scores, 2, method="softsort")
    with pytest.raises(TypeError, match="no option"):
        khot.topk_value(scores, 2, alpha=1.2)


@pytest.mark.parametrize("native", [True, False], ids=["native", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("method", ["sigmoid", "laplace", "gaussian"])
def test_the_gradient_is_the_mask_where_weights_vanish(method: str, dtype: torch.dtype, native: bool) -> None:
    """At weights around and below the smallest number."""
    least = -torch.tensor(torch.finfo(dtype).tiny, dtype=torch.float64).log().item()
    lead = torch.linspace(0.5, 1.5, 400, dtype=torch.float64) * ((2 * least) ** 0.5 if method == "gaussian" else least)
    base = torch.stack([lead, torch.zeros_like(lead), -lead.sqrt()], -1).to(dtype)
    target = torch.tensor([1.0, 0.0, 0.0], dtype=dtype).expand_as(base)
    for gap in (1.0, 2.0):
        with nullcontext() if native else khot.kernels.disabled():
            x = (gap * base).requires_grad_()
            y = khot.soft_topk(x, 1, method=method)
            (value,) = torch.autograd.grad(khot.topk_value(x, 1, method=method).sum(), x)
            (loss,) = torch.autograd.grad(khot.topk_loss(x, target, method=method, reduction="sum"), x)
        room = 8 * torch.finfo(dtype).eps
        torch.testing.assert_close(value, y, rtol=room, atol=room)
        torch.testing.assert_close(loss, y - target, rtol=room, atol=room)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_second_derivatives_where_gaussian_weights_underflow(dtype: torch.dtype) -> None:
    tau = 0.05
    x = torch.tensor([[3.0, 2.9, 2.5]], dtype=dtype).repeat(2000, 1)
    x[:, 2] -= torch.linspace(0, 2, 2000, dtype=dtype)
    x.requires_grad_()
    mask = khot.soft_topk(x, 1, tau, method="gaussian")
    assert bool(((mask > 0) & (mask < torch.finfo(dtype).tiny)).any())  # there are weights below the smallest normal number
    for value in (mask @ torch.tensor([1.0, 2.0, 4.0], dtype=dtype), khot.topk_value(x, 1, tau, method="gaussian")):
        (grad,) = torch.autograd.grad(value.sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(grad[:, 0].sum(), x, retain_graph=True)
        assert bool(second.isfinite().all())
