"""Sparse top-k against the published vectors, against its programme, and against the isotonic regression that defines it."""

from __future__ import annotations

import cvxpy as cp
import numpy as np
import pytest
import torch
from scipy.optimize import brentq
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.testing import assert_close

import khot
from khot import kernels
from khot.primitives.isotonic import isotonic_l2

VALUES = torch.tensor([-5.0, -2.0, 3.0, 1.0])
SINGLE = 1e-4  # the published figures were computed by a cubic formula in float32: they carry its rounding


def make(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def khot_vector(n: int, k: int) -> Tensor:
    return torch.cat([torch.ones(k, dtype=torch.float64), torch.zeros(n - k, dtype=torch.float64)])


def test_published_mask() -> None:
    expected = torch.tensor([0.0, 0.0, 0.99999714, 0.99999714])
    assert_close(khot.permutahedron_topk(VALUES, 2, 1e-2), expected, rtol=0, atol=SINGLE)
    batch = torch.tensor([[5.0, 1, 4, 1], [0, 0, -5, 5]])
    assert_close(
        khot.permutahedron_topk(batch, 2, 1e-2), torch.tensor([[1.0000687, 0, 0.99999714, 0], [0.49999988, 0.49999988, 0, 1.0000687]]),
        rtol=0, atol=SINGLE,
    )  # fmt: skip


def test_published_magnitudes() -> None:
    assert_close(khot.magnitude_topk(VALUES, 2, 1e-2), torch.tensor([-5.000036, 0.0, 2.9999416, 0.0]), rtol=SINGLE, atol=0)
    batch = torch.tensor([[-11.0, 1, 4, -7], [7, -6, -8, -4], [0, 0, -5, 5]])
    expected = torch.tensor([[-10.999428, 0, 0, -7.0002456], [7.0002456, 0, -7.99995, 0], [0, 0, -5.000036, 5.000036]])
    assert_close(khot.magnitude_topk(batch, 2, 1e-2), expected, rtol=SINGLE, atol=0)


@pytest.mark.parametrize("p", [4 / 3, 1.5, 2.0, 3.0, 5.0])
@pytest.mark.parametrize("tau", [0.2, 2.0])
def test_mask_solves_its_programme(p: float, tau: float) -> None:
    x = make(8)
    y = cp.Variable(8)
    gain = x.numpy() @ y / tau - cp.sum(cp.power(y, p)) / p
    cp.Problem(cp.Maximize(gain), [y >= 0, y <= 1, cp.sum(y) == 3]).solve(solver=cp.CLARABEL)
    assert_close(khot.permutahedron_topk(x, 3, tau, p=p), torch.tensor(y.value), rtol=0, atol=1e-4)


@pytest.mark.parametrize("tau", [0.05, 0.5, 5.0])
def test_at_two_the_mask_is_the_isotonic_projection(tau: float) -> None:
    x = make(4, 30)
    s, order = x.sort(-1, descending=True)
    projected = (s - isotonic_l2(s - tau * khot_vector(30, 7))) / tau
    mask = khot.permutahedron_topk(x, 7, tau, p=2)
    assert_close(mask.gather(-1, order), projected)
    assert_close(mask, khot.euclidean_topk(x, 7, tau))


@pytest.mark.parametrize("tau", [0.05, 0.5, 5.0])
def test_at_two_the_magnitudes_are_the_isotonic_projection(tau: float) -> None:
    x = make(4, 30)
    s, order = x.abs().sort(-1, descending=True)
    w = khot_vector(30, 7)
    dual = isotonic_l2(s / (1 + tau * w), 1 + tau * w)  # minimises |s - v|^2 / (2 tau) + w v^2 / 2
    expected = (s - dual) / tau * (1 + tau)
    assert_close(khot.magnitude_topk(x, 7, tau, p=2).abs().gather(-1, order), expected)


def pool_adjacent_violators(s: np.ndarray, w: np.ndarray, tau: float, p: float) -> np.ndarray:
    """The textbook walk for the magnitude's isotonic problem with any p, each block by a root finder."""
    m = 1 / (p - 1)

    def level(block: list[int]) -> float:
        rows = np.array(block)
        if len(block) == 1 and w[block[0]] == 0:
            return float(s[block[0]])  # a root of high order, which the finder is slow on

        def slope(v: float) -> float:
            away = s[rows] - v
            return float(np.sum(w[rows] * v - np.sign(away) * np.abs(away / tau) ** m))

        return float(brentq(slope, -1.0, s[rows].max() + 1.0, xtol=1e-14))

    blocks: list[tuple[list[int], float]] = []
    for i in range(len(s)):
        blocks.append(([i], level([i])))
        while len(blocks) > 1 and blocks[-2][1] <= blocks[-1][1]:
            (head, _), (tail, _) = blocks[-2], blocks[-1]
            blocks[-2:] = [(head + tail, level(head + tail))]
    return np.concatenate([np.full(len(block), value) for block, value in blocks])


@pytest.mark.parametrize("p", [4 / 3, 1.7])
@pytest.mark.parametrize("tau", [0.1, 1.0])
def test_magnitudes_are_the_walk_over_blocks(p: float, tau: float) -> None:
    x, m = make(12), 1 / (p - 1)
    s, order = x.abs().sort(-1, descending=True)
    dual = torch.tensor(pool_adjacent_violators(s.numpy(), khot_vector(12, 4).numpy(), tau, p))
    away = (s - dual).clamp(min=0)
    assert_close(khot.magnitude_topk(x, 4, tau, p=p).abs().gather(-1, order), (away / tau) ** m + away, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("p", [4 / 3, 2.0])
def test_magnitude_edges(p: float) -> None:
    x = make(3, 9)
    assert_close(khot.magnitude_topk(x, 0, p=p), torch.zeros_like(x), rtol=0, atol=0)
    assert_close(khot.magnitude_topk(x, 9, p=p), x)
    assert_close(khot.magnitude_topk(x, 4, 1e-6, p=p), x * khot.topk_mask(x.abs(), 4))
    assert_close(khot.magnitude_topk(x.t(), 4, 0.3, p=p, dim=0), khot.magnitude_topk(x, 4, 0.3, p=p).t())
    assert bool((khot.magnitude_topk(torch.zeros(5), 2, p=p) == 0).all())
    with kernels.disabled():
        assert khot.magnitude_topk(x[:, :0], 0, p=p).shape == (len(x), 0)
    assert khot.magnitude_topk(x.bfloat16(), 4).dtype == torch.bfloat16


@pytest.mark.parametrize("p", [4 / 3, 2.0])
def test_magnitude_derivatives(p: float) -> None:
    x = make(2, 6).requires_grad_()
    tau = torch.tensor([0.6, 1.3], dtype=torch.float64, requires_grad=True)
    k = torch.tensor([2.3, 3.0], dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda x, tau, k: khot.magnitude_topk(x, k, tau, p=p), (x, tau, k), check_forward_ad=True)
    assert gradgradcheck(lambda x: khot.magnitude_topk(x, 2, 0.7, p=p), (x,))
    if p == 2:  # a multiple of the gradient of a function
        jacobian = torch.func.jacrev(lambda x: khot.magnitude_topk(x, 2, 0.7, p=p))(x[0].detach())
        assert_close(jacobian, jacobian.t())


def test_p_is_checked() -> None:
    for p in (1.0, float("inf")):
        with pytest.raises(ValueError, match="above 1 and finite"):
            khot.permutahedron_topk(VALUES, 2, p=p)
        with pytest.raises(ValueError, match="above 1 and finite"):
            khot.magnitude_topk(VALUES, 2, p=p)


def test_steep_regularisers_keep_sum_and_gradients() -> None:
    x = torch.cat([make(4, 50), make(4, 50).round(), 1e-3 * make(4, 50)]).float().requires_grad_()
    for p in (2.5, 4.0):
        y = khot.permutahedron_topk(x, 5, 0.1, p=p)
        assert_close(y.sum(-1), torch.full((12,), 5.0))
        (grad,) = torch.autograd.grad((y * torch.arange(50.0)).sum(), x)
        assert bool(grad.isfinite().all())
    x = make(2, 6).requires_grad_()
    assert gradcheck(lambda x: khot.permutahedron_topk(x, 2, 0.7, p=3.0), (x,), check_forward_ad=True)
