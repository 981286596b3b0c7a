"""Transport to ordered places against POT, and the methods that are sigmoid top-k under another name."""

from __future__ import annotations

import numpy as np
import ot
import pytest
import torch
from scipy.optimize import linprog
from torch import Tensor
from torch.autograd import gradcheck
from torch.testing import assert_close

import khot
from khot.primitives.transport import ordered_transport

EPS = torch.finfo(torch.float64).eps


def make(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def pot_plan(x: Tensor, anchors: np.ndarray, masses: np.ndarray, strength: float, scale: float = 1.0) -> Tensor:
    """The plan of the squared distance to the anchors, every item weighing 1."""
    cost = (x.numpy()[:, None] - anchors) ** 2 / scale
    plan = ot.bregman.sinkhorn_log(np.ones(len(x)), masses, cost, strength, numItermax=200_000, stopThr=1e-13)
    return torch.tensor(plan.T)


@pytest.mark.parametrize("tau", [0.2, 1.0, 6.0])
@pytest.mark.parametrize(("n", "k"), [(6, 1), (8, 3), (7, 6)])
def test_ordered_plan_is_pots(n: int, k: int, tau: float) -> None:
    x = make(n)
    anchors, masses = np.arange(k, -1.0, -1.0), np.append(np.ones(k), n - k)
    expected = pot_plan(x, anchors, masses, 2 * tau)[:k]  # half the squared distance at tau is the whole at 2 tau
    assert_close(khot.sinkhorn_matrix(x, k, tau), expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize(("n", "k"), [(10, 3), (9, 8)])
@pytest.mark.parametrize("eps", [0.05, 0.5])
def test_soft_at_convergence_is_sigmoid_topk(n: int, k: int, eps: float) -> None:
    x = make(n)
    largest = float(torch.maximum(x**2, (x - 1) ** 2).max())
    soft = pot_plan(x, np.array([0.0, 1.0]), np.array([n - k, float(k)]), eps, largest)[1]
    assert_close(soft, khot.sigmoid_topk(2 * x / (largest * eps), k), rtol=0, atol=1e-9)
    assert_close(khot.soft_topk(x, k, largest * eps / 2, method="sinkhorn", ordered=False), soft, rtol=0, atol=1e-9)


def test_lml_is_sigmoid_topk() -> None:
    """The LML layer is the maximiser of <x, y> + H(y) on the capped simplex: logit(y) - x is one constant, and y sums to k."""
    x = make(4, 12)
    y = khot.sigmoid_topk(x, 5)
    constant = torch.logit(y) - x
    assert_close(constant, constant[:, :1].expand_as(constant))
    assert_close(y.sum(-1), torch.full((4,), 5.0, dtype=torch.float64))


def test_unordered_rows_are_alike() -> None:
    x = make(3, 9)
    matrix = khot.sinkhorn_matrix(x, 4, 0.5, ordered=False)
    assert matrix.shape == (3, 4, 9)
    assert_close(matrix.sum(-2), khot.sigmoid_topk(x, 4, 0.5))
    assert_close(matrix.sum(-1), torch.ones(3, 4, dtype=torch.float64))


@pytest.mark.parametrize("k", [1, 5, 19, 20])
@pytest.mark.parametrize("tau", [1e-3, 0.1, 1.0, 50.0])
@pytest.mark.parametrize("kind", ["normal", "ties", "cauchy", "outlier"])
def test_marginals_hold(kind: str, tau: float, k: int) -> None:
    x = make(6, 20)
    x = {"normal": x, "ties": x.round(), "cauchy": x / x.roll(1, 0), "outlier": torch.cat([x[:, 1:] / 100, x[:, :1] + 100], 1)}[kind]
    plan = khot.sinkhorn_matrix(x, k, tau)
    assert_close(plan.sum(-1), torch.ones(6, k, dtype=torch.float64), rtol=0, atol=8 * EPS)
    assert bool((plan.sum(-2) <= 1 + 1e-9).all())
    if k == 20:
        assert_close(plan.sum(-2), torch.ones(6, 20, dtype=torch.float64), rtol=0, atol=1e-9)


def test_small_tau_is_the_unregularised_transport() -> None:
    x, k = make(7), 3
    gain = np.outer(x.numpy(), np.arange(k, -1.0, -1.0))
    columns = np.kron(np.ones((1, 7)), np.eye(k + 1))
    rows = np.kron(np.eye(7), np.ones((1, k + 1)))
    masses = np.concatenate([np.ones(7), np.ones(k), [7 - k]])
    best = linprog(-gain.ravel(), A_eq=np.vstack([rows, columns]), b_eq=masses).x.reshape(7, k + 1)
    assert_close(khot.sinkhorn_matrix(x, k, 1e-4), torch.tensor(best.T[:k].copy()), rtol=0, atol=1e-8)


def test_excluded_and_certain_items() -> None:
    inf = torch.inf
    x = torch.tensor([[0.3, -inf, 1.0, inf, 0.1], [-inf, 2.0, -inf, -inf, 1.0]], requires_grad=True)
    plan = khot.sinkhorn_matrix(x, 3)
    assert bool((plan[0, :, 1] == 0).all())
    assert plan[0, 0, 3] == 1
    assert_close(plan[1].sum(-1), torch.tensor([1.0, 1.0, 0.0]))  # two items for three places
    (grad,) = torch.autograd.grad((plan * torch.arange(5.0)).sum(), x)
    assert bool(grad.isfinite().all())
    assert_close(plan[0][:, [0, 2, 3, 4]], khot.sinkhorn_matrix(x[:1, [0, 2, 3, 4]], 3)[0])


@pytest.mark.parametrize("k", [1, 3, 5])
def test_matrix_derivatives(k: int) -> None:
    x = make(2, 5).requires_grad_()
    tau = torch.tensor([0.5, 1.4], dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda x, tau: khot.sinkhorn_matrix(x, k, tau), (x, tau), check_forward_ad=True)


def test_gradient_is_that_of_the_transport_value() -> None:
    """By the envelope theorem the derivative of the optimum in the scores is the expected anchor."""
    x, k, tau = make(8).requires_grad_(), 3, 0.6
    plan = ordered_transport(x, k, tau)
    anchors = torch.arange(k, 0, -1.0, dtype=torch.float64)
    rest = 1 - plan.sum(-2)
    value = (plan * anchors.unsqueeze(-1) * x).sum() + tau * (torch.special.entr(plan).sum() + torch.special.entr(rest).sum())
    (grad,) = torch.autograd.grad(value, x)
    assert_close(grad, (plan * anchors.unsqueeze(-1)).sum(-2).detach())


def test_too_large_a_plan_is_refused() -> None:
    with pytest.raises(ValueError, match="limit"):
        khot.sinkhorn_matrix(torch.zeros(1).expand(1 << 20), 1 << 12)


def test_a_first_step_that_gains_little_is_not_the_last() -> None:
    """Newton's first step may only halve an error of 1e-3; that is not rounding yet."""
    scores = torch.randn(3, 100, generator=torch.Generator().manual_seed(154543641), dtype=torch.float64).round()
    mask = khot.soft_topk(scores, 99, 25.6, method="sinkhorn")
    assert_close(mask.sum(-1), torch.full((3,), 99.0, dtype=torch.float64))
