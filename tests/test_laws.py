"""Laws that every relaxation keeps, or says in its row that it cannot. A new row is tested by being there."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

import khot
from khot.registry import Relaxation
from tests.laws import DETERMINISTIC, EPS, MATRICES, ROWS, law, make, rows_that, spaced, topk


@law(ROWS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_keeps_shape_and_dtype(op: Relaxation, dtype: torch.dtype) -> None:
    scores = make(2, 3, 7, dtype=dtype)
    before = scores.clone()
    y = topk(op, scores, 3)
    assert y.shape == scores.shape
    assert y.dtype == dtype
    assert torch.equal(scores, before), "the input was changed"


@law(rows_that("bounded"))
@pytest.mark.parametrize("scale", [1e-3, 1.0, 100.0])
def test_entries_are_between_zero_and_one(op: Relaxation, scale: float) -> None:
    y = topk(op, make(16, 33, scale=scale, dtype=torch.float32), 5, 0.5)
    assert bool(((y >= 0) & (y <= 1 + 4 * torch.finfo(y.dtype).eps)).all())


@law(rows_that("sums_to_k"))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("scale", [1e-3, 1.0, 10.0, 100.0])
@pytest.mark.parametrize(("n", "k"), [(2, 1), (10, 3), (65, 64), (1000, 1), (1000, 500)])
def test_sums_to_k(op: Relaxation, dtype: torch.dtype, scale: float, n: int, k: int) -> None:
    y = topk(op, make(8, n, scale=scale, dtype=dtype), k)
    error = (y.double().sum(-1) - k).abs().max()
    assert error <= 4 * torch.finfo(dtype).eps * max(1, k)


@law(rows_that("monotone", DETERMINISTIC))
def test_larger_scores_never_weigh_less(op: Relaxation) -> None:
    scores = make(16, 12)
    sorted_mask = topk(op, scores, 4).gather(-1, scores.argsort(-1))
    assert bool((sorted_mask.diff(dim=-1) >= -100 * EPS).all())


@law(DETERMINISTIC)
def test_follows_a_permutation(op: Relaxation) -> None:
    scores = make(4, 9)
    order = torch.randperm(9, generator=torch.Generator().manual_seed(1))
    assert_close(topk(op, scores[:, order], 3), topk(op, scores, 3)[:, order], rtol=0, atol=1e3 * EPS)


@law(rows_that("shift_invariant", DETERMINISTIC))
def test_ignores_a_constant(op: Relaxation) -> None:
    scores = make(4, 9)
    assert_close(topk(op, scores + 8.0, 3), topk(op, scores, 3), rtol=0, atol=1e4 * EPS)


@law(rows_that("hard_limit"))
def test_becomes_hard_as_tau_vanishes(op: Relaxation) -> None:
    scores = torch.stack([torch.randperm(12, generator=torch.Generator().manual_seed(i)) for i in range(5)]).double() / 4
    for k in (1, 4, 11):
        assert_close(topk(op, scores, k, 1e-4), khot.topk_mask(scores, k), rtol=0, atol=1e-6)


@law(rows_that("complete"))
@pytest.mark.parametrize("n", [1, 6])
def test_none_and_all(op: Relaxation, n: int) -> None:
    scores = make(3, n)
    assert_close(topk(op, scores, 0), torch.zeros_like(scores), rtol=0, atol=0)
    assert_close(topk(op, scores, n), torch.ones_like(scores), rtol=0, atol=8 * n * EPS)


@law(DETERMINISTIC)
def test_batch_equals_loop(op: Relaxation) -> None:
    scores = make(3, 4, 8)
    looped = torch.stack([torch.stack([topk(op, row, 3) for row in block]) for block in scores])
    assert_close(topk(op, scores, 3), looped, rtol=0, atol=1e2 * EPS)


@law(DETERMINISTIC)
@pytest.mark.parametrize("dim", [0, 1, 2, -2])
def test_works_along_any_dim(op: Relaxation, dim: int) -> None:
    scores = make(5, 6, 7)
    assert_close(topk(op, scores, 2, dim=dim), topk(op, scores.movedim(dim, -1), 2).movedim(-1, dim), rtol=0, atol=1e2 * EPS)


@law(DETERMINISTIC)
def test_takes_strided_memory(op: Relaxation) -> None:
    scores = make(8, 6)
    for view in (scores.t(), scores[:, ::2], scores[::3], scores[:1].expand(4, 6)):
        assert_close(topk(op, view, 2), topk(op, view.contiguous(), 2), rtol=0, atol=1e2 * EPS)


@law(DETERMINISTIC)
def test_ties_are_finite(op: Relaxation) -> None:
    scores = torch.tensor([[1.0, 1.0, 1.0, 1.0], [2.0, 1.0, 1.0, 0.0]], requires_grad=True)
    y = topk(op, scores, 2, 0.3)
    (grad,) = torch.autograd.grad((y * torch.arange(4.0)).sum(), scores)
    assert bool(y.isfinite().all()) and bool(grad.isfinite().all())
    if op.ties_equal:
        assert_close(y[0], y[0, :1].expand(4))
        assert_close(y[1, 1], y[1, 2])


@law(rows_that("scale_free", DETERMINISTIC))
def test_only_the_ratio_to_tau_matters(op: Relaxation) -> None:
    assert_close(topk(op, 4 * make(4, 9), 3, 2.0), topk(op, make(4, 9), 3, 0.5), rtol=0, atol=1e3 * EPS)


@law(MATRICES)
def test_matrix_rows_sum_to_one_and_masks_sum_matrices(op: Relaxation) -> None:
    scores = make(3, 11)
    torch.manual_seed(0)
    matrix = khot.soft_topk_matrix(scores, 4, 0.5, method=op.name)
    assert matrix.shape == (3, 4, 11)
    assert bool((matrix >= 0).all())
    assert_close(matrix.sum(-1), torch.ones(3, 4, dtype=torch.float64))
    assert_close(matrix.sum(-2), topk(op, scores, 4, 0.5))


@law([row for row in MATRICES if row.hard_limit])
def test_matrix_rows_are_in_order(op: Relaxation) -> None:
    scores = spaced(3, 9)
    torch.manual_seed(0)
    matrix = khot.soft_topk_matrix(scores, 4, 1e-4, method=op.name)
    assert torch.equal(matrix.argmax(-1), scores.argsort(-1, descending=True)[:, :4])


@law(MATRICES)
def test_matrix_hard_is_a_permutation_with_soft_gradient(op: Relaxation) -> None:
    scores = spaced(2, 6).requires_grad_()
    torch.manual_seed(0)
    hard = khot.soft_topk_matrix(scores, 3, method=op.name, hard=True)
    assert torch.equal(hard.argmax(-1), scores.argsort(-1, descending=True)[:, :3])
    assert bool(((hard == 0) | (hard == 1)).all())
    (grad,) = torch.autograd.grad((hard * torch.arange(6.0)).sum(), scores)
    assert bool((grad != 0).any())
