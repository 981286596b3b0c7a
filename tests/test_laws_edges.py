"""The laws at the edges: huge and infinite scores, nan, ties, extreme temperatures, nothing to select from."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch.testing import assert_close

import khot
from khot.registry import Relaxation
from tests.laws import DETERMINISTIC, MATRICES, ROWS, law, make, rows_that, spaced, topk


@law([row for row in rows_that("hard_limit", DETERMINISTIC) if row.scale_free])
def test_huge_scores_are_the_hard_topk(op: Relaxation) -> None:
    scores = make(4, 9, dtype=torch.float32) * 1e30
    assert_close(topk(op, scores, 3), khot.topk_mask(scores, 3))


@law(rows_that("excludes"))
def test_minus_infinity_excludes(op: Relaxation) -> None:
    scores = make(3, 8, dtype=torch.float32)
    scores[:, [1, 4]] = -torch.inf
    scores.requires_grad_()
    y = topk(op, scores, 3)
    assert bool((y[:, [1, 4]] == 0).all())
    (grad,) = torch.autograd.grad((y * torch.arange(8.0)).sum(), scores)
    assert bool(grad.isfinite().all())
    if op.deterministic:
        kept = scores.detach()[:, [0, 2, 3, 5, 6, 7]]
        assert_close(y.detach()[:, [0, 2, 3, 5, 6, 7]], topk(op, kept, 3), rtol=0, atol=1e-5)


@law([row for row in rows_that("excludes") if row.complete])
def test_too_few_left_are_all_taken(op: Relaxation) -> None:
    scores = torch.full((2, 5), -torch.inf)
    scores[0, :2] = torch.tensor([3.0, -1.0])
    assert_close(topk(op, scores, 3), torch.tensor([[1.0, 1, 0, 0, 0], [0, 0, 0, 0, 0]]), rtol=0, atol=0)


@law(rows_that("infinite"))
def test_plus_infinity_is_certain(op: Relaxation) -> None:
    scores = make(2, 6, dtype=torch.float32)
    scores[0, 2] = torch.inf
    scores[1, :4] = torch.inf
    scores.requires_grad_()
    y = topk(op, scores, 2)
    assert y[0, 2] == 1
    if op.sums_to_k:
        assert_close(y.sum(-1), torch.tensor([2.0, 2.0]))
    assert_close(y[1], torch.tensor([0.5, 0.5, 0.5, 0.5, 0.0, 0.0]), rtol=0, atol=0)
    (grad,) = torch.autograd.grad((y * torch.arange(6.0)).sum(), scores)
    assert bool(grad.isfinite().all())


@law(ROWS)
@pytest.mark.parametrize("others", [0.0, torch.inf, -torch.inf])
def test_nan_stays_in_its_row(op: Relaxation, others: float) -> None:
    """One rule for value and gradient: nan in the whole row, nothing in the others."""
    scores = make(3, 6, dtype=torch.float32)
    clean = topk(op, scores, 2)
    scores[1, 3], scores[1, 0] = torch.nan, others
    scores.requires_grad_()
    y = topk(op, scores, 2)
    assert bool(y[1].isnan().all())
    assert_close(y[[0, 2]], clean[[0, 2]])
    (grad,) = torch.autograd.grad((y * torch.arange(6.0)).sum(), scores)
    assert bool(grad[1].isnan().all())
    assert bool(grad[[0, 2]].isfinite().all())


@law(MATRICES)
def test_nan_stays_in_its_matrix(op: Relaxation) -> None:
    scores = make(3, 6, dtype=torch.float32)
    scores[1, 3] = torch.nan
    scores.requires_grad_()
    torch.manual_seed(0)
    matrix = khot.soft_topk_matrix(scores, 2, method=op.name)
    assert bool(matrix[1].isnan().all()) and bool(matrix[[0, 2]].isfinite().all())
    (grad,) = torch.autograd.grad((matrix * torch.arange(6.0)).sum(), scores)
    assert bool(grad[1].isnan().all()) and bool(grad[[0, 2]].isfinite().all())


@law(MATRICES)
def test_infinities_in_a_matrix(op: Relaxation) -> None:
    """+inf takes the first places in equal shares, -inf none, and the finite ones come behind as if they were alone."""
    finite, inf = [0.3, 1.4, -0.2, 0.9, 2.0], torch.inf
    scores = torch.tensor([inf, -inf, *finite, inf], dtype=torch.float64, requires_grad=True)
    torch.manual_seed(0)
    matrix = khot.soft_topk_matrix(scores, 4, 0.5, method=op.name)
    if op.infinite:
        share = torch.tensor([0.5, *[0.0] * 6, 0.5], dtype=torch.float64)
        assert_close(matrix[:2], share.expand(2, 8), rtol=0, atol=1e-12)
    assert bool((matrix[:, 1] == 0).all())
    assert_close(matrix.sum(-1), torch.ones(4, dtype=torch.float64))
    (grad,) = torch.autograd.grad((matrix * torch.arange(8.0)).sum(), scores)
    assert bool(grad.isfinite().all())


@law(ROWS)
@pytest.mark.parametrize(("n", "k"), [(6, 0), (6, 6), (1, 0), (1, 1), (0, 0)])
@pytest.mark.parametrize("matrix", [False, True])
def test_the_result_requires_a_gradient_where_the_scores_do(op: Relaxation, n: int, k: int, matrix: bool) -> None:
    scores = make(2, n).requires_grad_()
    if matrix and op.matrix is None:
        matrix = False
    torch.manual_seed(0)
    y = khot.soft_topk_matrix(scores, k, method=op.name) if matrix else topk(op, scores, k)
    (grad,) = torch.autograd.grad(y.sum(), scores)
    assert grad.shape == scores.shape
    assert bool(grad.isfinite().all())


@law(DETERMINISTIC)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
def test_extreme_temperatures_are_their_limits(op: Relaxation, dtype: torch.dtype) -> None:
    scores = spaced(3, 7).to(dtype).requires_grad_()
    for tau in (1e-300, 1e-46, 1e46, 1e300, float("inf"), *torch.tensor([1e-46, 1e300, torch.inf], dtype=torch.float64)):
        y = topk(op, scores, 3, tau)
        (grad,) = torch.autograd.grad((y * torch.arange(7.0)).sum(), scores)
        assert bool(y.isfinite().all()), tau
        if tau > 1 or op.hard_limit:  # without that limit the slope has none either
            assert bool(grad.isfinite().all()), tau
        if tau < 1 and op.hard_limit:
            assert_close(y, khot.topk_mask(scores, 3))
        if tau > 1 and op.flat_limit:
            assert_close(y, torch.full_like(y, 3 / 7))


@law(rows_that("hard_limit", DETERMINISTIC))
def test_a_tie_at_the_cut_is_finite_at_any_temperature(op: Relaxation) -> None:
    for tau in (1e-46, 1e-30, 1e-6) if op.scale_free else (1e-6,):  # the slope is 1 / tau, and 1 / tau^2 where tau counts twice
        scores = torch.tensor([[5.0, 2.0, 2.0, 2.0, -1.0]], requires_grad=True)
        y = topk(op, scores, 2, tau)
        (grad,) = torch.autograd.grad((y * torch.arange(5.0)).sum(), scores)
        assert bool(y.isfinite().all()) and bool(grad.isfinite().all())


@law(DETERMINISTIC)
@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
def test_ties_have_gradients_in_scores_and_tau_at_any_temperature(op: Relaxation, dtype: torch.dtype, native: bool) -> None:
    rows = torch.tensor([[1.0] * 5, [5, 2, 2, 2, -1], [3, 3, 1, 1, 0], [1e4, 1e4, 3, 3, -1e4], [3, 2, 2, 1, 0]])
    for tau in (1e-300, 1e-200, 1e-46, 1e-36, 1e-20, 1e30, torch.inf):
        scores, heat = rows.to(dtype).requires_grad_(), torch.full((5,), tau, dtype=torch.float64, requires_grad=True)
        with contextlib.nullcontext() if native else khot.kernels.disabled():
            y, again = topk(op, scores, 2, tau), topk(op, scores, 2, heat)
            (in_scores,) = torch.autograd.grad((y * torch.arange(5.0)).sum(), scores)
            in_both = torch.autograd.grad((again * torch.arange(5.0)).sum(), (scores, heat))
        assert bool(y.isfinite().all()) and bool(again.isfinite().all()), tau
        assert bool(in_both[1].isfinite().all()), tau
        for grad in (in_scores, in_both[0]):
            assert not bool(grad.isnan().any()), tau
            assert dtype == torch.float16 or bool(grad.isfinite().all()), tau  # a slope of 1 / tau is beyond float16


@law(ROWS)
def test_empty_batch_and_single_item(op: Relaxation) -> None:
    assert topk(op, torch.empty(0, 5), 2).shape == (0, 5)
    assert topk(op, torch.empty(3, 0, 5), 2).shape == (3, 0, 5)
    assert topk(op, torch.tensor([0.3]), 1).shape == (1,)
