"""The laws of derivatives, transforms and precision."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.testing import assert_close

import khot
from khot.registry import Relaxation
from tests.laws import DETERMINISTIC, EPS, ROWS, law, make, rows_that, spaced, topk


@law(DETERMINISTIC)
def test_gradient_in_scores(op: Relaxation) -> None:
    scores = spaced(2, 5).requires_grad_()
    assert gradcheck(lambda s: topk(op, s, 2, 0.7), (scores,), check_forward_ad=op.forward_mode)


@law(rows_that("grad_k", DETERMINISTIC))
def test_gradient_in_k(op: Relaxation) -> None:
    k = torch.tensor([1.4, 2.0, 3.3], dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda k: topk(op, spaced(3, 5), k, 0.7), (k,), check_forward_ad=op.forward_mode)


@law(rows_that("grad_k", DETERMINISTIC))
def test_k_may_be_a_fraction_and_differ_per_row(op: Relaxation) -> None:
    k = torch.tensor([0.0, 0.5, 2.5, 6.0], dtype=torch.float64)
    y = topk(op, make(4, 6), k)
    assert_close(y.sum(-1), k)
    assert_close(y[2], topk(op, make(4, 6)[2], 2.5))


@law(rows_that("grad_tau", DETERMINISTIC))
def test_gradient_in_tau(op: Relaxation) -> None:
    tau = torch.tensor([0.5, 0.8, 1.3], dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda tau: topk(op, spaced(3, 5), 2, tau), (tau,), check_forward_ad=op.forward_mode)


@law(rows_that("double_backward", DETERMINISTIC))
def test_gradient_of_the_gradient(op: Relaxation) -> None:
    scores = spaced(2, 4).requires_grad_()
    assert gradgradcheck(lambda s: topk(op, s, 2, 0.7), (scores,))


@law(rows_that("forward_mode", DETERMINISTIC))
def test_forward_and_reverse_jacobians_agree(op: Relaxation) -> None:
    scores = spaced(6)
    reverse = torch.func.jacrev(lambda s: topk(op, s, 2, 0.7))(scores)
    forward = torch.func.jacfwd(lambda s: topk(op, s, 2, 0.7))(scores)
    assert_close(forward, reverse)
    if op.shift_invariant:
        assert_close(reverse.sum(-1), torch.zeros(6, dtype=torch.float64), rtol=0, atol=1e5 * EPS)
    if op.sums_to_k:
        assert_close(reverse.sum(-2), torch.zeros(6, dtype=torch.float64), rtol=0, atol=1e5 * EPS)


@law(DETERMINISTIC)
def test_vmap_equals_batch(op: Relaxation) -> None:
    scores = make(4, 6)
    assert_close(torch.vmap(lambda s: topk(op, s, 2))(scores), topk(op, scores, 2), rtol=0, atol=1e3 * EPS)
    if op.grad_k:
        k = torch.tensor([1.0, 2.0, 3.0, 4.5], dtype=torch.float64)
        assert_close(torch.vmap(lambda s, k: topk(op, s, k))(scores, k), topk(op, scores, k))
        assert_close(torch.vmap(lambda k: topk(op, scores[0], k))(k), topk(op, scores[:1].expand(4, 6), k))


@law(rows_that("compiles", DETERMINISTIC))
def test_compiles_as_one_graph(op: Relaxation) -> None:
    torch._dynamo.reset()
    scores = make(3, 6, dtype=torch.float32).requires_grad_()

    def loss(s: Tensor) -> Tensor:
        return (khot.soft_topk(s, 2, 0.7, method=op.name) * torch.arange(6.0)).sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    (grad,) = torch.autograd.grad(compiled(scores), scores)
    (plain,) = torch.autograd.grad(loss(scores), scores)
    assert_close(grad, plain)


@law(DETERMINISTIC)
def test_autocast_changes_nothing(op: Relaxation) -> None:
    scores = make(3, 40, dtype=torch.float32)
    plain = topk(op, scores, 5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_close(topk(op, scores, 5), plain)


@law(DETERMINISTIC)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_rounds_once(op: Relaxation, dtype: torch.dtype) -> None:
    scores = make(4, 30, dtype=dtype)
    assert_close(topk(op, scores, 6).double(), topk(op, scores.double(), 6), rtol=torch.finfo(dtype).eps, atol=1e-5)


@law(ROWS)
def test_hard_is_khot_with_the_soft_gradient(op: Relaxation) -> None:
    scores = spaced(2, 6).requires_grad_()
    weights = torch.arange(6.0, dtype=torch.float64)
    hard = topk(op, scores, 2, hard=True)
    assert torch.equal(hard, khot.topk_mask(scores, 2))
    (through,) = torch.autograd.grad((hard * weights).sum(), scores)
    (soft,) = torch.autograd.grad((topk(op, scores, 2) * weights).sum(), scores)
    assert_close(through, soft)


@law(ROWS)
def test_backward_twice_gives_the_same(op: Relaxation) -> None:
    scores = make(2, 6).requires_grad_()
    loss = (topk(op, scores, 2) * torch.arange(6.0)).sum()
    (first,) = torch.autograd.grad(loss, scores, retain_graph=True)
    (second,) = torch.autograd.grad(loss, scores)
    assert torch.equal(first, second)
    assert bool((first != 0).any()), "nothing learns"
