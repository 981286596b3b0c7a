"""The hard verbs: masks, straight-through, gathering."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

import khot


def slow_mask(row: list[float], k: int) -> list[float]:
    order = sorted(range(len(row)), key=lambda i: (-row[i], i))
    chosen = {i for i in order[:k] if row[i] > float("-inf")}
    return [float(i in chosen) for i in range(len(row))]


@pytest.mark.parametrize("k", range(9))
def test_mask_equals_a_slow_sort(k: int) -> None:
    scores = torch.randint(-2, 3, (50, 8), generator=torch.Generator().manual_seed(0)).float()
    scores[scores == -2] = -torch.inf
    truth = torch.tensor([slow_mask(row, k) for row in scores.tolist()])
    assert torch.equal(khot.topk_mask(scores, k), truth)
    assert torch.equal(khot.topk_mask(scores, torch.full((50,), k)), truth)
    assert torch.equal(khot.topk_mask(scores.t(), k, dim=0), truth.t())


def test_mask_with_k_per_row_and_nan() -> None:
    scores = torch.tensor([[1.0, 3.0, 2.0], [1.0, 3.0, 2.0], [1.0, torch.nan, 2.0]])
    mask = khot.topk_mask(scores, torch.tensor([0, 2, 1]))
    assert torch.equal(mask[:2], torch.tensor([[0.0, 0, 0], [0, 1, 1]]))
    assert bool(mask[2].isnan().all())
    assert not khot.topk_mask(scores.requires_grad_(), 1).requires_grad


def test_straight_through_is_exact_for_finite_values() -> None:
    soft = (torch.randn(100) * 1e20).requires_grad_()
    hard = (torch.rand(100) > 0.5).float()
    out = khot.straight_through(hard, soft)
    assert torch.equal(out, hard)
    (grad,) = torch.autograd.grad((out * torch.arange(100.0)).sum(), soft)
    assert torch.equal(grad, torch.arange(100.0))


def test_hard_rounds_a_learned_k() -> None:
    k = torch.tensor(2.3, requires_grad=True)
    mask = khot.soft_topk(torch.arange(6.0), k, hard=True)
    assert torch.equal(mask, torch.tensor([0.0, 0, 0, 0, 1, 1]))
    (grad,) = torch.autograd.grad(mask.sum(), k)
    assert_close(grad, torch.tensor(1.0))


@pytest.mark.parametrize("dim", [-2, 1])
def test_gather_keeps_rows_and_their_order(dim: int) -> None:
    x = torch.randn(4, 9, 3, generator=torch.Generator().manual_seed(0))
    mask = torch.rand(4, 9, generator=torch.Generator().manual_seed(1))
    values, indices = khot.gather_topk(x, mask, 5, dim=dim)
    assert torch.equal(indices, mask.argsort(-1, descending=True)[:, :5])
    for b in range(4):
        assert torch.equal(values[b], x[b, indices[b]])


def test_gather_along_the_last_dim_and_through_more_dims() -> None:
    x = torch.randn(2, 6, generator=torch.Generator().manual_seed(0))
    assert torch.equal(khot.gather_topk(x, x, 3, dim=-1).values, x.sort(-1, descending=True).values[:, :3])
    images = torch.randn(2, 6, 4, 5)
    values, indices = khot.gather_topk(images, x, 2, dim=1)
    assert torch.equal(values[1, 0], images[1, indices[1, 0]])


def test_gather_passes_gradients_to_items_and_mask() -> None:
    x = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    mask = torch.rand(5, dtype=torch.float64, requires_grad=True)
    values, indices = khot.gather_topk(x, mask, 2)
    assert torch.equal(values, x[indices])
    grad_x, grad_mask = torch.autograd.grad(values.sum(), (x, mask))
    assert torch.equal(grad_x.sum(-1) > 0, khot.topk_mask(mask, 2).bool())
    assert_close(grad_mask[indices], x[indices].sum(-1))


def test_the_smallest() -> None:
    scores = torch.tensor([[1.0, 3.0, 1.0, torch.inf], [torch.inf, torch.inf, -torch.inf, 0.0]])
    assert torch.equal(khot.topk_mask(scores, 1, largest=False), torch.tensor([[1.0, 0, 0, 0], [0, 0, 1, 0]]))
    assert torch.equal(khot.topk_mask(scores, 3, largest=False), torch.tensor([[1.0, 1, 1, 0], [0, 0, 1, 1]]))
    assert torch.equal(khot.topk_mask(scores.t(), 2, largest=False, dim=0), khot.topk_mask(-scores, 2).t())


def test_straight_through_leaves_its_arguments_alone() -> None:
    hard, soft = torch.ones(3), torch.rand(3, requires_grad=True)
    out = khot.straight_through(hard, soft)
    out.data.zero_()
    assert torch.equal(hard, torch.ones(3))
    wide = khot.straight_through(torch.ones(4, 3), soft)  # samples in front
    assert_close(torch.autograd.grad(wide.sum(), soft)[0], torch.full((3,), 4.0))


@pytest.mark.parametrize("scores", [torch.arange(4), torch.zeros(3, dtype=torch.bool)], ids=str)
def test_integers_are_refused_with_the_way_out(scores: torch.Tensor) -> None:
    for call in (lambda: khot.topk_mask(scores, 1), lambda: khot.gather_topk(torch.ones(len(scores), 1), scores, 1)):
        with pytest.raises(TypeError, match=r"floating dtype.*\.float\(\)"):
            call()
