"""Selecting rows: tournaments, iterated softmax and SoftSort against slow loops, and the verb over the whole registry."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck
from torch.testing import assert_close

import khot
from khot.primitives.collect import collect
from khot.primitives.order import descending_order
from khot.registry import RELAXATIONS, Relaxation

SIZES = [(1, 1), (2, 1), (5, 2), (7, 3), (8, 8), (9, 4), (16, 2), (33, 5), (100, 13)]


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def slow_halving(x: Tensor, scores: Tensor, k: int, boost: float, base: float | None = None) -> Tensor:
    """One tournament, item by item, on lists."""
    field = [(float(v), row) for v, row in zip(scores, x, strict=True)]
    rounds = math.ceil(math.log2(len(field) / k))
    field += [(-math.inf, torch.zeros_like(x[0]))] * (k * 2**rounds - len(field))
    for _ in range(rounds):
        field.sort(key=lambda pair: -pair[0])
        after = []
        for i in range(len(field) // 2):
            (a, row_a), (b, row_b) = field[i], field[-1 - i]
            if b == -math.inf:
                after.append((a, row_a))
                continue
            ea, eb = (boost * a, boost * b) if base is None else (base**a, base**b)
            w = 1 / (1 + math.exp(eb - ea))
            after.append((w * a + (1 - w) * b, w * row_a + (1 - w) * row_b))
        field = after
    if rounds == 0:
        field.sort(key=lambda pair: -pair[0])
    return torch.stack([row for _, row in field])


def slow_iterative(x: Tensor, scores: Tensor, k: int, alpha: float) -> Tensor:
    left, out = scores.clone(), []
    for _ in range(k):
        weights = torch.softmax(-alpha * (left - left.max()).square(), -1)
        out.append(weights @ x)
        left[left.argmax()] = -1e30
    return torch.stack(out)


def slow_softsort(scores: Tensor, k: int, tau: float) -> Tensor:
    ordered = scores.sort(descending=True).values[:k]
    return torch.stack([torch.softmax(-(scores - value).abs() / tau, -1) for value in ordered])


@pytest.mark.parametrize(("n", "k"), SIZES)
@pytest.mark.parametrize("boost", [1.0, 7.0, 50.0])
def test_halving_is_the_tournament(n: int, k: int, boost: float) -> None:
    x, scores = draw(3, n, 4), draw(3, n, seed=1)
    slow = torch.stack([slow_halving(a, b, k, boost) for a, b in zip(x, scores, strict=True)])
    assert_close(khot.select_topk(x, scores, k, boost=boost), slow)
    assert_close(khot.halving_matrix(scores, k, boost=boost) @ x, slow)
    assert_close(khot.select_topk(x, scores, k, 0.5, boost=boost / 2), slow)


@pytest.mark.parametrize(("n", "k"), SIZES)
def test_halving_power_is_the_published_base(n: int, k: int) -> None:
    x, scores = draw(n, 4), draw(n, seed=1)
    assert_close(khot.select_topk(x, scores, k, mode="power"), slow_halving(x, scores, k, 1.0, base=20.0))


@pytest.mark.parametrize(("n", "k"), SIZES)
@pytest.mark.parametrize("alpha", [2.0, 1e4])
def test_iterative_is_the_loop(n: int, k: int, alpha: float) -> None:
    x, scores = draw(3, n, 4), draw(3, n, seed=1)
    slow = torch.stack([slow_iterative(a, b, k, alpha) for a, b in zip(x, scores, strict=True)])
    assert_close(khot.select_topk(x, scores, k, method="iterative", alpha=alpha), slow)
    assert_close(khot.iterative_matrix(scores, k, alpha=alpha) @ x, slow)


@pytest.mark.parametrize(("n", "k"), SIZES)
@pytest.mark.parametrize("tau", [0.01, 0.3, 10.0])
def test_softsort_needs_no_matrix(n: int, k: int, tau: float) -> None:
    x, scores = draw(n, 4), draw(n, seed=1)
    slow = slow_softsort(scores, k, tau)
    assert_close(khot.softsort_matrix(scores, k, tau), slow)
    assert_close(khot.soft_topk(scores, k, tau, method="softsort"), slow.sum(-2))
    assert_close(khot.select_topk(x, scores, k, tau, method="softsort"), slow @ x)


def test_large_rows_need_no_square_matrix() -> None:
    scores = draw(100_000, seed=2).float().requires_grad_()
    for method in ("softsort", "halving"):
        mask = khot.soft_topk(scores, 5000, 1e-3, method=method)
        assert_close(mask.double().sum(), torch.tensor(5000.0, dtype=torch.float64), rtol=1e-6, atol=0)
        (grad,) = torch.autograd.grad(mask @ scores.detach(), scores)
        assert bool(grad.isfinite().all()) and bool((grad != 0).any())


@pytest.mark.parametrize("method", ["halving", "iterative", "softsort"])
def test_minus_infinity_is_a_shorter_row(method: str) -> None:
    x, scores = draw(4, 11, 3), draw(4, 11, seed=1)
    lengths = [11, 7, 5, 3]
    padded = scores.clone()
    for row, length in zip(padded, lengths, strict=True):
        row[length:] = -torch.inf
    padded.requires_grad_()
    out = khot.select_topk(x, padded, 3, 0.1, method=method)
    for i, length in enumerate(lengths):
        assert_close(out[i], khot.select_topk(x[i, :length], scores[i, :length], 3, 0.1, method=method))
    (grad,) = torch.autograd.grad(out.square().sum(), padded)
    assert bool(grad.isfinite().all())


@pytest.mark.parametrize("method", list(RELAXATIONS))
@pytest.mark.parametrize("hard", [False, True])
def test_places_without_an_item_are_zero(method: str, hard: bool) -> None:
    row = RELAXATIONS[method]
    if not row.excludes:
        return
    scores = torch.tensor([-torch.inf, 2.0, -torch.inf, 1.0, -torch.inf])
    out = khot.select_topk(torch.ones(5, 2), scores, 3, 0.1, method=method, hard=hard)
    assert_close(out[2], torch.zeros(2))


@pytest.mark.parametrize(("method", "options"), [("halving", {"boost": 3.0}), ("iterative", {}), ("softsort", {})], ids=str)
def test_gradients(method: str, options: dict[str, Any]) -> None:
    x, scores = draw(2, 7, 3).requires_grad_(), draw(2, 7, seed=1).requires_grad_()
    tau = torch.tensor([0.7, 1.2], dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda *a: khot.select_topk(a[0], a[1], 3, a[2], method=method, **options), (x, scores, tau), check_forward_ad=True)
    assert gradcheck(lambda s, t: khot.soft_topk_matrix(s, 3, t, method=method, **options), (scores, tau), check_forward_ad=True)


@pytest.mark.parametrize("op", RELAXATIONS.values(), ids=str)
def test_select_is_the_matrix_or_the_mask(op: Relaxation) -> None:
    x, scores = draw(2, 9, 4), draw(2, 9, seed=1)
    torch.manual_seed(0)
    out = khot.select_topk(x, scores, 3, 0.5, method=op.name)
    torch.manual_seed(0)
    if op.matrix is not None:
        expected = op.matrix(scores, 3, 0.5) @ x
    else:
        index = scores.argsort(-1, descending=True)[:, :3]
        expected = torch.stack([op.topk(s, 3, 0.5)[i, None] * a[i] for a, s, i in zip(x, scores, index, strict=True)])
    if op.deterministic:
        assert_close(out, expected)


@pytest.mark.parametrize("op", RELAXATIONS.values(), ids=str)
def test_hard_selects_the_rows_and_keeps_the_soft_gradient(op: Relaxation) -> None:
    x, scores = draw(2, 9, 4).requires_grad_(), draw(2, 9, seed=1).requires_grad_()
    weights = draw(2, 3, 4, seed=2)
    torch.manual_seed(0)
    out = khot.select_topk(x, scores, 3, method=op.name, hard=True)
    index = scores.argsort(-1, descending=True)[:, :3]
    assert torch.equal(out, torch.stack([a[i] for a, i in zip(x, index, strict=True)]))
    hard = torch.autograd.grad((out * weights).sum(), (x, scores))
    torch.manual_seed(0)
    soft = torch.autograd.grad((khot.select_topk(x, scores, 3, method=op.name) * weights).sum(), (x, scores))
    assert_close(hard, soft)


def test_hard_matrix_at_the_edges() -> None:
    scores = torch.tensor([[1.0, 2.0, 2.0, -torch.inf], [-torch.inf, -torch.inf, 0.0, -torch.inf], [0.0, torch.nan, 1.0, 2.0]])
    matrix = khot.soft_topk_matrix(scores, 2, hard=True)
    assert_close(matrix[0], torch.tensor([[0.0, 1, 0, 0], [0, 0, 1, 0]]))
    assert_close(matrix[1], torch.tensor([[0.0, 0, 1, 0], [0, 0, 0, 0]]))
    assert bool(matrix[2].isnan().all())
    assert khot.soft_topk_matrix(scores, 0, hard=True).shape == (3, 0, 4)


@pytest.mark.parametrize("method", ["halving", "iterative", "softsort"])
def test_nothing_everything_and_no_rows(method: str) -> None:
    x, scores = draw(2, 5, 3), draw(2, 5, seed=1)
    assert khot.select_topk(x, scores, 0, method=method).shape == (2, 0, 3)
    assert khot.select_topk(x[:0], scores[:0], 2, method=method).shape == (0, 2, 3)
    assert khot.soft_topk_matrix(scores, 0, method=method).shape == (2, 0, 5)
    half = khot.select_topk(x.half(), scores.half(), 5, method=method)
    assert half.dtype == torch.float16
    ordered = torch.stack([a[i] for a, i in zip(x, scores.argsort(-1, descending=True), strict=True)])
    assert_close(khot.select_topk(x, scores, 5, 1e-4, method=method), ordered)


def test_errors_at_the_door() -> None:
    x, scores = draw(2, 5, 3), draw(2, 5)
    with pytest.raises(ValueError, match="one row of features for each score"):
        khot.select_topk(x[:, :4], scores, 2)
    with pytest.raises(TypeError, match="floating dtype"):
        khot.select_topk(x.long(), scores, 2)
    with pytest.raises(TypeError, match="no option 'bost'"):
        khot.select_topk(x, scores, 2, bost=3.0)
    with pytest.raises(ValueError, match="between 0 and n=5"):
        khot.select_topk(x, scores, 6)
    with pytest.raises(ValueError, match="did you mean 'halving'"):
        khot.select_topk(x, scores, 2, method="halvin")
    with pytest.raises(ValueError, match="boost must be positive"):
        khot.select_topk(x, scores, 2, boost=0.0)
    with pytest.raises(ValueError, match="mode must be"):
        khot.select_topk(x, scores, 2, mode="base")
    with pytest.raises(ValueError, match="alpha must be positive"):
        khot.select_topk(x, scores, 2, method="iterative", alpha=-1.0)
    with pytest.raises(ValueError, match="would build a 100000 x 1000000 matrix"):
        khot.softsort_matrix(torch.zeros(1_000_000), 100_000)


def test_order_of_many_rows_is_that_of_sort() -> None:
    values = draw(50, 700).float().mul(7).round() - 3
    values[3, 5], values[4, :9], values[5, 2], values[6, 3:8] = torch.inf, -torch.inf, torch.nan, -0.0
    order = descending_order(values)
    assert torch.equal(order, values.sort(dim=-1, descending=True, stable=True).indices)


def test_collecting_bags_is_a_sum() -> None:
    x, weight = draw(2, 3, 20, 4).requires_grad_(), draw(2, 3, 5, 4, seed=1).requires_grad_()
    items = torch.stack([torch.randperm(20, generator=torch.Generator().manual_seed(i)) for i in range(6)]).view(2, 3, 5, 4)
    items[..., 1] = items[..., 0]  # the same item twice in a bag
    out = collect(x, weight, items)
    matrix = torch.zeros(2, 3, 5, 20, dtype=torch.float64).scatter_add(-1, items, weight)
    assert_close(out, matrix @ x)
    probe = draw(2, 3, 5, 4, seed=3)
    fast = torch.autograd.grad(out, (x, weight), probe, create_graph=True)
    slow = torch.autograd.grad(matrix @ x, (x, weight), probe, create_graph=True)
    assert_close(fast, slow)
    twice = [torch.autograd.grad(sum(g.square().sum() for g in grads), (x, weight)) for grads in (fast, slow)]
    assert_close(*twice)
    assert_close(torch.vmap(collect)(x, weight, items), out)


def cosine_similarity_of_rows(n: int, k: int, **options: Any) -> float:
    """nCCS: the mean over the true rows of the best cosine among the approximate rows, in the published setting."""
    x, scores = 2 * draw(64, n, 32, seed=n).float() - 1, draw(64, n, seed=k).float()
    true = torch.nn.functional.normalize(khot.select_topk(x, scores, k, hard=True), dim=-1)
    soft = torch.nn.functional.normalize(khot.select_topk(x, scores, k, **options), dim=-1)
    return float((true @ soft.mT).amax(-1).mean())


@pytest.mark.parametrize(
    ("n", "k", "halving", "iterative"),
    [(16, 2, 0.968, 0.374), (64, 8, 0.976, 0.217), (256, 32, 0.979, 0.137), (1024, 8, 0.844, 0.059), (4096, 8, 0.556, 0.031)],
)
def test_published_similarity_is_reproduced(n: int, k: int, halving: float, iterative: float) -> None:
    assert abs(cosine_similarity_of_rows(n, k, method="halving", mode="power") - halving) < 0.02
    assert abs(cosine_similarity_of_rows(n, k, method="iterative", alpha=2.0) - iterative) < 0.04
    assert cosine_similarity_of_rows(n, k, method="halving", boost=400.0) > halving


@pytest.mark.parametrize("method", ["halving", "softsort", "sigmoid"])
@pytest.mark.parametrize("hard", [False, True])
def test_items_may_be_shared(method: str, hard: bool) -> None:
    g = torch.Generator().manual_seed(0)
    x, scores = torch.randn(7, 3, generator=g, requires_grad=True), torch.randn(2, 4, 7, generator=g)
    shared = khot.select_topk(x, scores, 3, method=method, hard=hard)
    own = khot.select_topk(x.expand(2, 4, 7, 3), scores, 3, method=method, hard=hard)
    torch.testing.assert_close(shared, own)
    weights = torch.randn(shared.shape, generator=g)
    torch.testing.assert_close(*(torch.autograd.grad((out * weights).sum(), x)[0] for out in (shared, own)))
    middle = torch.randn(4, 7, 3, generator=g)
    torch.testing.assert_close(khot.select_topk(middle, scores, 3)[1], khot.select_topk(middle, scores[1], 3))


@pytest.mark.parametrize("method", ["halving", "softsort", "sigmoid"])
def test_values_with_their_indices(method: str) -> None:
    g = torch.Generator().manual_seed(0)
    x, scores = torch.randn(2, 7, 3, generator=g), torch.randn(2, 7, generator=g)
    for largest in (True, False):
        values, indices = khot.select_topk_with_indices(x, scores, 3, method=method, largest=largest)
        torch.testing.assert_close(values, khot.select_topk(x, scores, 3, method=method, largest=largest))
        assert torch.equal(indices, scores.argsort(-1, descending=largest)[:, :3])
    hard = khot.select_topk_with_indices(x, scores, 3, method=method, hard=True, largest=False)
    assert torch.equal(hard.values, x.gather(1, hard.indices.unsqueeze(-1).expand(-1, -1, 3)))


def test_items_that_do_not_fit() -> None:
    for shape in ((6, 3), (2, 7, 3), (7,), (2, 4, 7, 3)):
        with pytest.raises(ValueError, match="broadcasts"):
            khot.select_topk(torch.ones(shape), torch.ones(4, 7), 2)
