"""Soft ranks against the convex programmes that define them, and the selection of the TopK networks against its published snippet."""

from __future__ import annotations

import contextlib
import math
import warnings

import cvxpy as cp
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.testing import assert_close

import khot
from khot import kernels
from khot.nn import DifferentiableTopK

EPS = torch.finfo(torch.float64).eps


def make(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def project(z: np.ndarray, vertex: np.ndarray, regularization: str) -> np.ndarray:
    """Onto the convex hull of the orders of ``vertex``, which are its images under doubly stochastic matrices."""
    n = len(z)
    mixing = cp.Variable((n, n), nonneg=True)
    point = mixing @ vertex
    loss = cp.sum_squares(point - z) if regularization == "l2" else cp.sum(cp.kl_div(point, np.exp(z)))
    cp.Problem(cp.Minimize(loss), [cp.sum(mixing, axis=0) == 1, cp.sum(mixing, axis=1) == 1]).solve(solver=cp.CLARABEL)
    return np.asarray(point.value)


@pytest.mark.parametrize("regularization", ["l2", "kl"])
@pytest.mark.parametrize("tau", [0.1, 0.5, 3.0])
@pytest.mark.parametrize("seed", [0, 1])
def test_ranks_solve_their_programme(regularization: str, tau: float, seed: int) -> None:
    x = make(7, seed=seed)
    expected = project(x.numpy() / tau, np.arange(7, 0, -1.0), regularization)
    assert_close(khot.soft_rank(x, tau, regularization=regularization), torch.tensor(expected), rtol=0, atol=1e-3)


@pytest.mark.parametrize("tau", [0.1, 1.0, 5.0])
def test_sorted_values_solve_their_programme(tau: float) -> None:
    x = make(7)
    places = np.arange(7, 0, -1.0) / tau
    expected = torch.tensor(project(places, x.numpy(), "l2"))
    assert_close(khot.soft_sort(x, tau, descending=True), expected, rtol=0, atol=2e-4)
    if tau < 1:
        return  # exp(10 n) is beyond the solver of the entropic programme
    entropic = torch.tensor(np.log(project(places - places.max(), np.exp(x.numpy()), "kl")))
    assert_close(khot.soft_sort(x, tau, descending=True, regularization="kl"), entropic, rtol=0, atol=1e-3)


def test_published_vectors() -> None:
    x = torch.tensor([[8.0, 0, 5, 3, 2, 1, 6, 7, 9]])
    assert_close(khot.soft_sort(x, 1.0), torch.arange(9.0).unsqueeze(0) + 5 / 9)
    assert_close(khot.soft_sort(x, 0.1), x.sort().values)
    assert_close(khot.soft_rank(x), torch.tensor([[8.0, 1, 5, 4, 3, 2, 6, 7, 9]]))
    assert_close(khot.soft_rank(torch.tensor([[5.0, 1, 2], [2, 1, 5]]), 2.0), torch.tensor([[3.0, 1.25, 1.75], [1.75, 1.25, 3.0]]))


@pytest.mark.parametrize("regularization", ["l2", "kl"])
def test_the_limit_is_the_hard_sort(regularization: str) -> None:
    x = make(3, 5, 40)
    order = x.argsort(-1, descending=True).argsort(-1) + 1.0
    assert_close(khot.soft_rank(x, 1e-6, descending=True, regularization=regularization), order.double())
    assert_close(khot.soft_sort(x, 1e-6, regularization=regularization), x.sort().values)
    assert_close(khot.soft_sort(x, 1e-6, dim=1, descending=True), x.sort(1, descending=True).values)


@pytest.mark.parametrize("regularization", ["l2", "kl"])
def test_ranks_sum_and_stay_in_range(regularization: str) -> None:
    for scale in (1e-8, 1.0, 30.0, 1e6, 1e30, 1e300):
        ranks = khot.soft_rank(make(4, 33) * scale, regularization=regularization)
        assert_close(ranks.sum(-1), torch.full((4,), 33 * 17.0, dtype=torch.float64))
        assert bool(((ranks >= 1 - 1e-9) & (ranks <= 33 + 1e-9)).all())


def test_infinities_ties_and_nans() -> None:
    inf = torch.inf
    x = torch.tensor([[1.0, inf, -inf, 1.0, inf], [0.0, 1.0, torch.nan, 2.0, 3.0]], requires_grad=True)
    ranks = khot.soft_rank(x, 0.1)
    assert_close(ranks[0], torch.tensor([2.5, 4.5, 1.0, 2.5, 4.5]))
    assert bool(ranks[1].isnan().all())
    (grad,) = torch.autograd.grad((ranks[0] * torch.arange(5.0)).sum(), x)
    assert bool(grad[0].isfinite().all())


@pytest.mark.parametrize("regularization", ["l2", "kl"])
def test_derivatives(regularization: str) -> None:
    x = make(2, 6).requires_grad_()
    tau = torch.tensor([0.6, 1.3], dtype=torch.float64, requires_grad=True)
    for verb in (khot.soft_rank, khot.soft_sort):
        assert gradcheck(lambda x, t, verb=verb: verb(x, t, regularization=regularization), (x, tau), check_forward_ad=True)
        assert gradgradcheck(lambda x, verb=verb: verb(x, 0.7, regularization=regularization), (x,))


PATHS = pytest.mark.parametrize("path", [contextlib.nullcontext, kernels.disabled], ids=["native", "reference"])
LAWS = pytest.mark.parametrize("law", ["l2", "kl"])
VERBS = pytest.mark.parametrize("verb", [khot.soft_rank, khot.soft_sort])


@PATHS
def test_values_far_apart_share_a_block_of_the_entropic_sort(path) -> None:
    x = torch.tensor([0.0, 800.0, 801.0])
    with path():
        found = khot.soft_sort(x, regularization="kl")
    # One block: the sorted -x become 3, 2, 1 plus a constant with which the exponentials have the same sum as those of -x, which is 1.
    constant = -math.log(math.exp(3) + math.exp(2) + math.exp(1))
    assert_close(found, -torch.tensor([3 + constant, 2 + constant, 1 + constant]))


@PATHS
@VERBS
@LAWS
def test_rows_without_items(path, verb, law: str) -> None:
    x = torch.zeros(3, 0, requires_grad=True)
    with path():
        out = verb(x, regularization=law)
        out.sum().backward()
    assert out.shape == (3, 0)
    assert verb(torch.zeros(0, 4), regularization=law).shape == (0, 4)


@PATHS
@VERBS
@LAWS
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_any_dim_and_autocast(path, verb, law: str, dtype: torch.dtype) -> None:
    x = make(4, 6, 3).to(dtype)
    with path(), torch.autocast("cpu", dtype=torch.bfloat16):
        found = verb(x, torch.full((4, 3), 0.5), dim=1, regularization=law)
    assert found.dtype is dtype
    exact = verb(x.double().movedim(1, -1), 0.5, regularization=law).movedim(-1, 1)
    assert_close(found, exact.to(dtype), rtol=2 * torch.finfo(dtype).eps, atol=1e-6)


@VERBS
@LAWS
def test_a_dual_gradient_keeps_its_tangent(verb, law: str) -> None:
    x, grad, tangent = make(2, 6).requires_grad_(), make(2, 6, seed=1), make(2, 6, seed=2)
    out = verb(x, 0.7, regularization=law)
    with forward_ad.dual_level():
        (found,) = torch.autograd.grad(out, x, forward_ad.make_dual(grad, tangent))
        _, moved = forward_ad.unpack_dual(found)
    assert moved is not None
    out = verb(x, 0.7, regularization=law)
    (expected,) = torch.autograd.grad(out, x, tangent)
    assert_close(moved, expected)


@VERBS
@LAWS
def test_batched_gradients(verb, law: str) -> None:
    x = make(5)
    one, many = (torch.autograd.functional.jacobian(lambda x: verb(x, 0.7, regularization=law), x, vectorize=v) for v in (False, True))
    assert_close(many, one)


@PATHS
@pytest.mark.parametrize("method", ["softrank", "halving", "softsort", "neuralsort"])
def test_what_is_traced_runs(path, method: str) -> None:
    def body(scores: Tensor) -> Tensor:
        return khot.soft_topk(scores, 2, 0.5, method=method)

    with path(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the tracer warns of every shape that becomes a constant
        traced = torch.jit.trace(body, (make(3, 7),))
    other = make(3, 7, seed=5)
    assert_close(traced(other), body(other))


def test_verbs_say_what_is_wrong() -> None:
    with pytest.raises(ValueError, match="'l2' or 'kl'"):
        khot.soft_rank(make(3), regularization="l1")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="tau must be positive"):
        khot.soft_sort(make(3), 0.0)
    with pytest.raises(ValueError, match="'solved' or 'fixed'"):
        khot.softrank_matrix(make(3), 1, cuts="open")
    with pytest.raises(TypeError, match="floating"):
        khot.soft_rank(torch.arange(3))


def published_snippet(scores: Tensor, k: int, tau: float) -> Tensor:
    """The formula as published: ranks from 1, positions from 0."""
    ranks = khot.soft_rank(-scores, tau).unsqueeze(-1)
    positions = torch.arange(k, dtype=scores.dtype)
    indicator = torch.sigmoid((positions + 0.5 - ranks) / tau) - torch.sigmoid((positions - 0.5 - ranks) / tau)
    weights = indicator.transpose(1, 2)
    return weights / (weights.sum(-1, keepdim=True) + 1e-8)


def test_the_published_snippet_picks_the_first_twice_and_ours_does_not() -> None:
    scores = torch.stack([torch.randperm(8, generator=torch.Generator().manual_seed(i)) for i in range(5)]).double()
    order = scores.argsort(-1, descending=True)
    theirs = published_snippet(scores, 4, 0.1).argmax(-1)
    assert torch.equal(theirs, order[:, [0, 0, 1, 2]])  # the first twice, the fourth never
    for cuts in ("fixed", "solved"):
        ours = DifferentiableTopK(4, cuts=cuts)(scores, 0.1)
        assert ours.shape == (5, 4, 8)
        assert torch.equal(ours.argmax(-1), order[:, :4])
        assert_close(ours, khot.soft.topk_matrix(scores, 4), rtol=0, atol=0.05)


def test_rows_do_not_vanish_at_small_tau() -> None:
    scores = torch.tensor([[0.4, 0.1, 0.3, 0.2]])
    assert published_snippet(scores, 3, 0.01)[0, 0].sum() < 1e-3  # its first row sits half a place below the first rank
    rows = DifferentiableTopK(3)(scores, 0.01).sum(-1)
    assert_close(rows, torch.ones(1, 3))


def test_fixed_rows_are_the_differences_of_sigmoids() -> None:
    scores, tau = make(3, 9) * 3, 0.4
    ranks = khot.soft_rank(scores, tau, descending=True).unsqueeze(-2)
    cuts = torch.arange(1.0, 5.0, dtype=torch.float64).unsqueeze(-1)
    upper, lower = torch.sigmoid((cuts + 0.5 - ranks) / tau), torch.sigmoid((cuts - 0.5 - ranks) / tau)
    rows = torch.cat([upper[:, :1], (upper - lower)[:, 1:]], 1)
    assert_close(khot.softrank_matrix(scores, 4, tau, cuts="fixed"), rows / rows.sum(-1, keepdim=True))


def test_mask_is_the_sigmoid_of_the_ranks() -> None:
    scores = make(3, 20)
    ranks = khot.soft_rank(scores, 0.3, descending=True)
    assert_close(khot.soft_topk(scores, 5, 0.3, method="softrank"), khot.sigmoid_topk(-ranks, 5, 0.3))
    assert_close(
        khot.soft_topk(scores, 5, 0.3, method="softrank", cuts="fixed"), khot.softrank_matrix(scores, 5, 0.3, cuts="fixed").sum(-2)
    )


def test_solved_rows_share_each_item_at_most_once() -> None:
    scores = torch.softmax(make(2, 196), -1)
    assert bool(((khot.soft_rank(scores) - 98.5).abs() < 0.1).all())  # at tau = 1 such scores are all alike
    solved = khot.softrank_matrix(scores, 96)
    assert bool((solved.sum(-2) <= 1 + 1e3 * EPS).all())
    assert_close(solved.sum(-1), torch.ones(2, 96, dtype=torch.float64))


def test_rows_of_a_long_matrix_sum_to_one_in_single_precision() -> None:
    rows = khot.softrank_matrix(make(4096).float(), 256).double().sum(-1)
    assert_close(rows, torch.ones(256, dtype=torch.float64), rtol=0, atol=4 * torch.finfo(torch.float32).eps)


def test_too_large_a_matrix_is_refused() -> None:
    with pytest.raises(ValueError, match="limit"):
        khot.softrank_matrix(torch.zeros(1).expand(1 << 20), 1 << 12)


def test_the_module_and_the_function_have_the_same_defaults() -> None:
    scores = make(2, 9)
    assert torch.equal(DifferentiableTopK(3)(scores, 0.4), khot.softrank_matrix(scores, 3, 0.4))


def test_module_learns_through_tau() -> None:
    layer, tau = DifferentiableTopK(2), torch.tensor(0.5, requires_grad=True)
    weights = layer(torch.tensor([[3.0, 1.0, 2.0]]), tau)
    (grad,) = torch.autograd.grad(weights[0, 0, 0], tau)
    assert grad < 0
    assert "k=2" in repr(layer)


def test_neuralsort_keeps_its_digits() -> None:
    scores = make(4, 200).float()
    error = khot.neuralsort_matrix(scores, 200, 0.05).double() - khot.neuralsort_matrix(scores.double(), 200, 0.05)
    assert error.abs().max() < 8 * torch.finfo(torch.float32).eps  # 1e-6; logits of thousands, rounded, were wrong by 1.5e-3


def test_long_rows_fit_in_memory() -> None:
    scores = (make(100_000) * 50).float().requires_grad_()
    mask = khot.soft_topk(scores, 6250, method="softrank")
    matrix = khot.soft_topk_matrix(scores, 8, method="softrank")
    (grad,) = torch.autograd.grad((mask * torch.linspace(0, 1, 100_000)).sum() + matrix[0].max(), scores)
    assert bool(grad.isfinite().all())
    assert_close(mask.double().sum(), torch.tensor(6250.0, dtype=torch.float64))


@pytest.mark.parametrize(("shape", "k"), [((7, 12), 12), ((3, 700), 650), ((700, 30), 25), ((2, 3, 9), 8)])
def test_the_matrix_in_pieces_is_the_matrix_as_a_whole(shape: tuple[int, ...], k: int) -> None:
    """Over several pieces of places and of the batch, with infinite scores whose cuts do not exist, and a row of nan."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    x.view(-1)[:4] = torch.tensor([torch.inf, torch.inf, -torch.inf, 1e30])
    x.view(-1)[-1] = torch.nan
    grad = torch.randn((*shape[:-1], k, shape[-1]), generator=torch.Generator().manual_seed(1))
    found = {}
    for name, scope in {"native": contextlib.nullcontext(), "reference": kernels.disabled()}.items():
        with scope:
            scores = x.clone().requires_grad_()
            matrix = khot.softrank_matrix(scores, k, 0.5)
            found[name] = matrix, *torch.autograd.grad(matrix, scores, grad)
    for ours, theirs in zip(*found.values(), strict=True):
        assert_close(ours, theirs, rtol=1e-5, atol=1e-6, equal_nan=True)


def test_the_matrix_in_pieces_is_differentiated_twice() -> None:
    assert gradgradcheck(lambda x: khot.softrank_matrix(x, 4, 0.7), make(2, 6).requires_grad_())
