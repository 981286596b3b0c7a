"""Laws that every relaxation keeps, or says in its row that it cannot. A new row is tested by being there."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.testing import assert_close

import khot
from khot.registry import RELAXATIONS, Relaxation

ROWS = list(RELAXATIONS.values())
MATRICES = [row for row in ROWS if row.matrix is not None]
DETERMINISTIC = [row for row in ROWS if row.deterministic]
EPS = torch.finfo(torch.float64).eps


def rows_that(flag: str, rows: list[Relaxation] = ROWS) -> list[Relaxation]:
    return [row for row in rows if getattr(row, flag)]


def law(rows: list[Relaxation]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("op", rows, ids=str)


def make(*shape: int, scale: float = 1.0, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale).to(dtype)


def topk(op: Relaxation, scores: Tensor, k: float | Tensor, tau: float | Tensor = 1.0, **options: object) -> Tensor:
    torch.manual_seed(0)  # for the methods that draw
    return khot.soft_topk(scores, k, tau, method=op.name, **options)


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


@law(ROWS)
def test_empty_batch_and_single_item(op: Relaxation) -> None:
    assert topk(op, torch.empty(0, 5), 2).shape == (0, 5)
    assert topk(op, torch.empty(3, 0, 5), 2).shape == (3, 0, 5)
    assert topk(op, torch.tensor([0.3]), 1).shape == (1,)


def spaced(*shape: int) -> Tensor:
    """Scores far enough apart that a finite difference crosses no kink."""
    n = shape[-1]
    order = torch.stack([torch.randperm(n, generator=torch.Generator().manual_seed(i)) for i in range(torch.Size(shape[:-1]).numel())])
    return (order.double() * 0.37 + torch.arange(n) * 0.013).reshape(shape)


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
