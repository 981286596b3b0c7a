"""The laws again on shapes, scales, k and dtypes that nobody chose."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

import khot

FAMILY = ["sigmoid", "euclidean", "laplace", "gaussian", "entmax"]
finite = st.floats(-(2.0**100), 2.0**100, width=32)  # about 1e30
special = st.one_of(finite, st.sampled_from([float("inf"), float("-inf"), 0.0, 1.0, 1.0]))


@st.composite
def problems(draw, elements=finite):
    n = draw(st.integers(1, 40))
    scores = torch.tensor(draw(st.lists(elements, min_size=n, max_size=n)))
    k = draw(st.one_of(st.integers(0, n), st.floats(0, n)))
    return scores.to(draw(st.sampled_from([torch.float32, torch.float64]))), k


@settings(max_examples=300, deadline=None)
@given(problems(), st.sampled_from(FAMILY), st.floats(1e-3, 1e3))
def test_any_finite_row_sums_to_k(problem, method: str, tau: float) -> None:
    scores, k = problem
    y = khot.soft_topk(scores, k, tau, method=method)
    assert bool(((y >= 0) & (y <= 1)).all())
    assert abs(y.double().sum().item() - k) <= 4 * torch.finfo(scores.dtype).eps * max(1, k)
    assert bool((y.gather(-1, scores.argsort(-1)).diff() >= -4 * torch.finfo(scores.dtype).eps).all())


@settings(max_examples=200, deadline=None)
@given(problems(special), st.sampled_from(FAMILY))
def test_infinities_are_settled_first(problem, method: str) -> None:
    scores, k = problem
    scores.requires_grad_()
    y = khot.soft_topk(scores, k, method=method)
    certain, excluded = (scores == torch.inf), (scores == -torch.inf)
    room = min(k, (~excluded).sum().item())
    assert abs(y.double().sum().item() - room) <= 4 * torch.finfo(scores.dtype).eps * max(1, k)
    assert bool((y[excluded] == 0).all())
    if certain.any():
        share = min(1.0, k / certain.sum().item())
        assert_close(y[certain], torch.full_like(y[certain], share))
    (grad,) = torch.autograd.grad((y * torch.linspace(-1, 1, len(y), dtype=y.dtype)).sum(), scores)
    assert bool(grad.isfinite().all())


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=3), st.integers(1, 12), st.integers(0, 2), st.sampled_from(FAMILY), st.data())
def test_any_shape_and_dim(batch: list[int], n: int, at: int, method: str, data) -> None:
    shape = [*batch]
    dim = min(at, len(shape))
    shape.insert(dim, n)
    scores = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    k = torch.tensor(data.draw(st.lists(st.floats(0, n), min_size=1, max_size=1)), dtype=torch.float64).expand(batch)
    y = khot.soft_topk(scores, k, method=method, dim=dim)
    assert y.shape == scores.shape
    assert_close(y.sum(dim), k, rtol=1e-12, atol=1e-12)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 64), st.sampled_from([torch.float16, torch.bfloat16]), st.sampled_from(FAMILY), st.floats(0.1, 10), st.data())
def test_half_precision_is_the_rounded_truth(n: int, dtype: torch.dtype, method: str, scale: float, data) -> None:
    k = data.draw(st.floats(0, n))
    scores = (torch.randn(n, generator=torch.Generator().manual_seed(n)) * scale).to(dtype)
    truth = khot.soft_topk(scores.double(), k, method=method)
    assert_close(khot.soft_topk(scores, k, method=method).double(), truth, rtol=torch.finfo(dtype).eps, atol=1e-5)
