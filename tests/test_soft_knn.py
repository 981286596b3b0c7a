"""Soft neighbours: rows that sum to k, losses against their definitions, and what is refused."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import khot
from khot.nn import SoftKNN


def points(seed: int = 0, m: int = 9, n: int = 14) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q, x = (torch.randn(size, 5, dtype=torch.float64, generator=generator) for size in (m, n))
    return q, x, torch.randint(3, (m,), generator=generator), torch.randint(3, (n,), generator=generator)


def distances(q: Tensor, x: Tensor) -> Tensor:
    return (q.unsqueeze(-2) - x.unsqueeze(-3)).square().sum(-1)


@pytest.mark.parametrize("method", khot.RELAXATIONS)
def test_rows_sum_to_k_for_every_method(method: str) -> None:
    q, x, _, _ = points()
    mask = SoftKNN(3, tau=0.3, method=method).double()(q, x)
    assert mask.shape == (9, 14) and mask.isfinite().all()
    if khot.RELAXATIONS[method].sums_to_k:
        torch.testing.assert_close(mask.sum(-1), torch.full((9,), 3.0, dtype=torch.float64), rtol=1e-4, atol=1e-4)


def test_the_mask_is_the_soft_top_k_of_the_distances() -> None:
    q, x, _, _ = points()
    far = distances(q, x)
    torch.testing.assert_close(SoftKNN(4, tau=0.2).double()(q, x), khot.soft_topk(-far, 4, 0.2 * far.std(correction=0)))
    cosine = torch.nn.functional.cosine_similarity(q.unsqueeze(1), x.unsqueeze(0), dim=-1)
    made = SoftKNN(4, tau=0.2, metric="cosine").double()
    torch.testing.assert_close(made(q, x), khot.soft_topk(cosine, 4, 0.2 * cosine.std(correction=0)))


def test_evaluation_is_the_hard_choice() -> None:
    q, x, _, _ = points()
    mask = SoftKNN(4).double().eval()(q, x)
    torch.testing.assert_close(mask, khot.topk_mask(-distances(q, x), 4))


def test_nobody_is_its_own_neighbour() -> None:
    q, _, y, _ = points()
    knn = SoftKNN(3, tau=0.1).double()
    mask = knn(q)
    assert (mask.diagonal() == 0).all() and torch.allclose(mask.sum(-1), torch.full((9,), 3.0, dtype=torch.float64))
    away = distances(q, q)
    torch.testing.assert_close(knn(q), khot.soft_topk(-away.fill_diagonal_(torch.inf), 3, 0.1 * away[away < torch.inf].std(correction=0)))
    assert (knn.eval()(q).diagonal() == 0).all() and knn.train().loss(q, None, y).isfinite()


@pytest.mark.parametrize("method", ["sigmoid", "softsort", "euclidean"])
def test_class_loss_by_its_definition(method: str) -> None:
    q, x, y, z = points()
    knn = SoftKNN(3, tau=1.0, method=method).double()
    right = y.unsqueeze(1) == z
    share = (knn(q, x) * right).sum(-1) / right.sum(-1).clamp(max=3)
    torch.testing.assert_close(knn.loss(q, x, y, z), -share.log().mean())


def test_value_loss_by_its_definition() -> None:
    q, x, _, _ = points()
    knn = SoftKNN(3, tau=1.0).double()
    y, z = q.sum(-1), x.sum(-1)
    torch.testing.assert_close(knn.loss(q, x, y, z), (knn(q, x) @ z / 3 - y).square().mean())
    torch.testing.assert_close(knn.loss(q, x, q[:, :2], x[:, :2]), (knn(q, x) @ x[:, :2] / 3 - q[:, :2]).square().mean())


def test_derivatives() -> None:
    q, x, y, z = points()
    knn = SoftKNN(3, tau=0.7).double()

    def loss(query: Tensor, neighbors: Tensor, log_tau: Tensor) -> Tensor:
        far = distances(query, neighbors)
        mask = khot.soft_topk(-far, 3, far.std(correction=0) * log_tau.exp())
        right = y.unsqueeze(1) == z
        return -((mask * right).sum(-1) / right.sum(-1).clamp(max=3)).log().mean()

    inputs = (q.requires_grad_(), x.requires_grad_(), knn.log_tau)
    grads = torch.autograd.grad(knn.loss(q, x, y, z), inputs)
    torch.testing.assert_close(grads, torch.autograd.grad(loss(*inputs), inputs))
    assert all(grad.abs().sum() > 0 for grad in grads)


@pytest.mark.parametrize("metric", ["euclidean", "cosine"])
@pytest.mark.parametrize("tau", [0.02, 0.3, 3.0])
def test_the_gradient_does_not_change_the_scale(metric: Any, tau: float) -> None:
    """A step along a gradient that shrinks or grows the embedding would be repeated without end: the loss stays the same."""
    z, _, y, _ = points(m=30)
    z.requires_grad_()
    knn = SoftKNN(3, tau=tau, metric=metric).double()
    for labels in (y, y.double()):
        (grad,) = torch.autograd.grad(knn.loss(z, None, labels), z)
        assert grad.norm() > 0
        torch.testing.assert_close((grad * z).sum() / (grad.norm() * z.norm()), z.new_zeros(()), rtol=0, atol=1e-10)
        torch.testing.assert_close(knn.loss(100 * z, None, labels), knn.loss(z, None, labels))


def test_a_gradient_where_every_near_neighbour_is_wrong() -> None:
    q = torch.tensor([[0.0]], requires_grad=True)
    x, y, z = torch.tensor([[0.1], [0.2], [90.0], [-1.0]]), torch.tensor([1]), torch.tensor([0, 0, 1, 0])
    loss = SoftKNN(2, tau=1e-3).loss(q, x, y, z)
    loss.backward()
    assert loss.isfinite() and loss > 100 and q.grad is not None and q.grad.item() < 0  # towards 90


def test_queries_without_their_class_do_not_count() -> None:
    q, x, y, z = points()
    knn = SoftKNN(3, tau=0.1).double()
    some = torch.cat([y, torch.tensor([7])])
    torch.testing.assert_close(knn.loss(torch.cat([q, q[:1]]), x, some, z), knn.loss(q, x, y, z), rtol=0.05, atol=0.05)
    q.requires_grad_()
    none = knn.loss(q, x, torch.full((9,), 7), z)
    none.backward()
    assert none == 0 and (q.grad == 0).all()


def test_training_pulls_classes_together() -> None:
    torch.manual_seed(0)
    x = torch.randn(300, 10)
    y = (x[:, 0] > 0).long()
    net, knn = torch.nn.Linear(10, 2), SoftKNN(5)
    optimizer = torch.optim.Adam([*net.parameters(), *knn.parameters()], lr=3e-2)
    losses = []
    for _ in range(60):
        loss = knn.loss(net(x), None, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0] and not math.isclose(knn.tau.item(), 0.02)


def test_batches_far_origins_half_precision_and_empty() -> None:
    q, x, _, _ = points()
    knn = SoftKNN(3, tau=0.1).double()
    both = knn(torch.stack([q, q + 1]), torch.stack([x, x + 1]))
    torch.testing.assert_close(both[0], both[1])
    single = SoftKNN(3, tau=0.1)
    torch.testing.assert_close(single(q.float() + 1000, x.float() + 1000), knn(q, x).float(), rtol=0, atol=0.02)
    assert single(q.bfloat16(), x.bfloat16()).dtype == torch.bfloat16
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.allclose(single(q.float(), x.float()), knn(q, x).float(), atol=1e-4)
    assert single(q.float()[:0], x.float()).shape == (0, 14)
    same = single(torch.zeros(6, 3))
    torch.testing.assert_close(same, 0.6 * (1 - torch.eye(6)))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda q, x, y, z: SoftKNN(0), ValueError, "k must be a whole number"),
        (lambda q, x, y, z: SoftKNN(2, tau=0.0), ValueError, "tau must be positive"),
        (lambda q, x, y, z: SoftKNN(2, metric="l1"), ValueError, "metric must be"),
        (lambda q, x, y, z: SoftKNN(2, method="sigmod"), ValueError, "did you mean"),
        (lambda q, x, y, z: SoftKNN(15)(q, x), ValueError, "at least 15 points, got 14"),
        (lambda q, x, y, z: SoftKNN(9)(q), ValueError, "not its own neighbour"),
        (lambda q, x, y, z: SoftKNN(2)(q, x[:, :3]), ValueError, "same last dimension, got 5 and 3"),
        (lambda q, x, y, z: SoftKNN(2)(q.long(), x), TypeError, "floating tensor"),
        (lambda q, x, y, z: SoftKNN(2).loss(q, x, y), ValueError, "belong together"),
        (lambda q, x, y, z: SoftKNN(2).loss(q, x, y[:-1], z), ValueError, r"labels must be of shape \(9,\)"),
        (lambda q, x, y, z: SoftKNN(2).loss(q, x, y, z[:-1]), ValueError, r"neighbor_labels must be of shape \(14,\)"),
        (lambda q, x, y, z: SoftKNN(2).loss(q, x, y.double(), z), TypeError, "on both sides"),
        (lambda q, x, y, z: SoftKNN(2).loss(q, x, q[:, :2], x), ValueError, "same outputs"),
        (lambda q, x, y, z: SoftKNN(2)(torch.full_like(q, torch.nan), x), ValueError, "finite"),
    ],
)
def test_errors_say_what_must_hold(call, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call(*points())
