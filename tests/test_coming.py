"""The page on other libraries tells the truth: both sides of its rows agree, values and gradients, where the other library is installed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import khot
from bench.peers import lml_topk

Call = Callable[[Tensor], Tensor]
SCORES = torch.tensor([[1.2, -0.4, 2.1, 0.3, 1.7, 0.9], [0.1, 0.2, -3.0, 4.0, 1.0, 1.1]], dtype=torch.float64)
K = 2


def agree(theirs: Call, ours: Call, tolerance: float = 1e-6, dtype: torch.dtype = torch.float64) -> None:
    weight = torch.linspace(-1, 2, 6, dtype=dtype)
    found = []
    for call in (theirs, ours):
        x = SCORES.to(dtype, copy=True).requires_grad_()
        y = call(x)
        (gradient,) = torch.autograd.grad((y * weight).sum(), x)
        found.append((y.detach(), gradient))
    for there, here in zip(*found, strict=True):
        torch.testing.assert_close(here, there.to(here.dtype), rtol=tolerance, atol=tolerance)


def test_lml() -> None:
    agree(lambda x: lml_topk(x, K), lambda x: khot.sigmoid_topk(x, K), 1e-4)


@pytest.mark.parametrize("alpha", [1.3, 1.5, 1.8])
def test_entmax(alpha: float) -> None:
    entmax = pytest.importorskip("entmax")
    agree(lambda x: entmax.budget_bisect(x, budget=K), lambda x: khot.euclidean_topk(x, K))
    agree(entmax.sparsemax, lambda x: khot.euclidean_topk(x, 1))
    agree(lambda x: entmax.entmax_bisect(x, alpha), lambda x: khot.permutahedron_topk(x, 1, 1 / (alpha - 1), p=alpha))
    agree(entmax.entmax15, lambda x: khot.permutahedron_topk(x, 1, 2.0, p=1.5))


@pytest.mark.parametrize("strength", [0.3, 1.0, 3.0])
@pytest.mark.parametrize("regularization", ["l2", "kl"])
def test_torchsort(strength: float, regularization: str) -> None:
    torchsort = pytest.importorskip("torchsort")
    given = {"regularization": regularization, "regularization_strength": strength}
    agree(lambda x: torchsort.soft_rank(x, **given), lambda x: khot.soft_rank(x, strength, regularization=regularization))
    agree(lambda x: torchsort.soft_sort(x, **given), lambda x: khot.soft_sort(x, strength, regularization=regularization))


@pytest.mark.parametrize("tau", [0.5, 1.0, 2.0])
def test_difftopk(tau: float) -> None:
    """In float32: its NeuralSort takes nothing else. It has items as rows, and the smallest first."""
    difftopk = pytest.importorskip("difftopk")
    single = {"tolerance": 1e-4, "dtype": torch.float32}
    agree(lambda x: difftopk.SoftSort(tau=tau)(x)[:, :K], lambda x: khot.softsort_matrix(x, K, tau), **single)
    agree(lambda x: difftopk.NeuralSort(tau=tau)(x).mT.flip(-2)[:, :K], lambda x: khot.neuralsort_matrix(x, K, tau), **single)


@pytest.mark.parametrize("softness", [0.3, 1.0, 1.9])  # at 2 two ranks of these scores are about to part: a kink
def test_softtorch(softness: float) -> None:
    softtorch = pytest.importorskip("softtorch", reason="needs Python 3.12", exc_type=ImportError)
    given = {"softness": softness, "standardize": False}
    sort = given | {"method": "softsort"}
    fast = given | {"method": "fast_soft_sort", "mode": "c0"}
    few = SCORES.shape[-1] - 1
    agree(lambda x: softtorch.topk(x, K, **sort).indices, lambda x: khot.softsort_matrix(x, K, softness))
    agree(lambda x: softtorch.topk_st(x, K, **sort).indices, lambda x: khot.soft_topk_matrix(x, K, softness, method="softsort", hard=True))
    agree(lambda x: softtorch.rank(x, dim=-1, **fast), lambda x: khot.soft_rank(x, softness / few, descending=True))
    agree(lambda x: softtorch.sort(x, **fast).values, lambda x: khot.soft_sort(x, softness * few))


@pytest.mark.parametrize("softness", [0.3, 1.0, 2.0])
def test_softtorch_values(softness: float) -> None:
    softtorch = pytest.importorskip("softtorch", reason="needs Python 3.12", exc_type=ImportError)
    there = softtorch.topk(SCORES, K, softness=softness, standardize=False, method="softsort").values
    here = khot.select_topk(SCORES.unsqueeze(-1), SCORES, K, softness, method="softsort").squeeze(-1)
    torch.testing.assert_close(here, there)


@pytest.mark.parametrize("softness", [0.3, 1.0, 2.0])
def test_softtorch_transport(softness: float) -> None:
    """Values to its tolerance, and our gradient against differences of theirs: its own is off by up to 0.05 on the second row at 0.3."""
    softtorch = pytest.importorskip("softtorch", reason="needs Python 3.12", exc_type=ImportError)
    exact = {"sinkhorn_tol": 1e-12, "sinkhorn_max_iter": 50_000}
    weight = torch.linspace(-1, 2, 6, dtype=torch.float64)

    def theirs(x: Tensor) -> Tensor:
        return softtorch.topk(x, K, softness=softness, standardize=False, method="ot", ot_kwargs=exact).indices

    x = SCORES.clone().requires_grad_()
    ours = khot.sinkhorn_matrix(x, K, softness)
    torch.testing.assert_close(ours.detach(), theirs(SCORES), rtol=1e-8, atol=1e-8)
    (gradient,) = torch.autograd.grad((ours * weight).sum(), x)
    moves = 1e-5 * torch.eye(SCORES.numel(), dtype=torch.float64).view(-1, *SCORES.shape)
    slopes = torch.stack([((theirs(SCORES + move) - theirs(SCORES - move)) * weight).sum() / 2e-5 for move in moves])
    torch.testing.assert_close(gradient, slopes.view_as(SCORES), rtol=1e-5, atol=1e-5)
