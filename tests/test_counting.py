"""Kth-Best by counting, its linear bounds, and certified top-k, against exhaustive or slow versions."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import gradcheck
from torch.testing import assert_close

import khot
from khot.linear_bounds import Lines
from khot.relaxations import counting

STEPS = ["sigmoid", "hat", "gaussian"]


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def slow_rank(scores: list[float], i: int, tau: float) -> float:
    return 0.5 + sum(1 / (1 + torch.exp(torch.tensor((scores[i] - s) / tau, dtype=torch.float64)).item()) for s in scores)


def test_ranks_and_mask_are_their_formulas() -> None:
    scores, tau = draw(7), 0.6
    ranks = torch.tensor([slow_rank(scores.tolist(), i, tau) for i in range(7)], dtype=torch.float64)
    assert_close(counting.soft_count(scores, tau, "sigmoid"), ranks)
    telescoped = khot.soft_topk(scores, 3, tau, method="counting", normalize=False)
    assert_close(telescoped, torch.sigmoid((3.5 - ranks) / tau))
    raw = khot.counting_matrix(scores, 3, tau, normalize=False)
    assert_close(raw.sum(-2), telescoped)
    assert_close(raw[1], torch.sigmoid((2.5 - ranks) / tau) - torch.sigmoid((1.5 - ranks) / tau))
    assert_close(khot.counting_matrix(scores, 3, tau), raw / raw.sum(-1, keepdim=True))


@pytest.mark.parametrize("h", STEPS)
@pytest.mark.parametrize("delta", STEPS)
def test_every_surrogate_becomes_the_kth_best(h: str, delta: str) -> None:
    scores = torch.tensor([[0.3, 2.0, -1.0, 1.1, 0.9], [5.0, 4.0, 3.0, 2.0, 1.0]], dtype=torch.float64)
    matrix = khot.counting_matrix(scores, 4, 1e-2, h=h, delta=delta)
    assert_close(matrix, khot.soft_topk_matrix(scores, 4, hard=True), rtol=0, atol=1e-8)
    assert_close(khot.counting_matrix(scores, 4, 0.3, h=h, delta=delta).sum(-1), torch.ones(2, 4, dtype=torch.float64))


@pytest.mark.parametrize("h", STEPS)
@pytest.mark.parametrize("delta", STEPS)
def test_ties_share_their_places(h: str, delta: str) -> None:
    """The published count gives (2, 2, 3) for (3, 3, 1): no item is the best, two are the second."""
    matrix = khot.counting_matrix(torch.tensor([3.0, 3.0, 1.0]), 3, 0.02, h=h, delta=delta)
    assert_close(matrix, torch.tensor([[0.5, 0.5, 0.0], [0.5, 0.5, 0.0], [0.0, 0.0, 1.0]]))
    equal = khot.counting_matrix(torch.ones(5), 3, 0.02, h=h, delta=delta)
    assert_close(equal, torch.full((3, 5), 0.2))


@pytest.mark.parametrize("h", ["sigmoid", "gaussian"])
@pytest.mark.parametrize("delta", ["sigmoid", "gaussian"])
def test_gradients(h: str, delta: str) -> None:
    scores, tau = draw(2, 5).requires_grad_(), torch.tensor([0.5, 0.9], dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda s, t: khot.counting_matrix(s, 3, t, h=h, delta=delta), (scores, tau), check_forward_ad=True)


@pytest.mark.parametrize("h", ["sigmoid", "hat", "gaussian"])
@pytest.mark.parametrize("delta", ["sigmoid", "hat", "gaussian"])
@pytest.mark.parametrize("normalize", [True, False])
def test_small_temperatures_are_the_limit_with_gradients(h: str, delta: str, normalize: bool) -> None:
    spaced, tied = torch.tensor([0.5, 3.0, -1.0, 2.0]), torch.tensor([2.0, 2.0, -torch.inf, 1.0, 2.0])
    for tau in (1e-46, 1e-30, 1e-20, 1e-12, 1e-6):
        heat = torch.tensor(tau, dtype=torch.float64, requires_grad=True)
        places = khot.counting_matrix(spaced, 3, tau, h=h, delta=delta, normalize=normalize)
        assert_close(places, khot.soft_topk_matrix(spaced, 3, hard=True))
        for temperature in (tau, heat):
            scores = tied.clone().requires_grad_()
            y = khot.counting_matrix(scores, 2, temperature, h=h, delta=delta, normalize=normalize)
            assert bool(y.isfinite().all())
            assert_close(y[:, 0], y[:, 1])  # ties share
            grads = torch.autograd.grad((y * torch.arange(5.0)).sum(), [scores, heat][: 1 + (temperature is heat)])
            assert all(bool(grad.isfinite().all()) for grad in grads), tau


def test_pieces_agree_with_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    scores = draw(3, 50).requires_grad_()
    whole = khot.soft_topk(scores, 5, 0.5, method="counting")
    (grad,) = torch.autograd.grad(whole.square().sum(), scores)
    monkeypatch.setattr(counting, "_PIECE", 3 * 50 * 7)
    pieces = khot.soft_topk(scores, 5, 0.5, method="counting")
    assert_close(pieces, whole)
    assert_close(torch.autograd.grad(pieces.square().sum(), scores)[0], grad)


def test_the_default_dtype_does_not_matter() -> None:
    scores = torch.tensor([1.0, 3.0, 2.0], dtype=torch.float32)
    expected = khot.soft_topk(scores, 2, method="counting")
    torch.set_default_dtype(torch.float64)
    try:
        assert_close(khot.soft_topk(scores, 2, method="counting"), expected)  # dtype included
        assert khot.counting_matrix(scores, 2, normalize=False).dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


def test_errors() -> None:
    with pytest.raises(ValueError, match="delta must be one of sigmoid, hat, gaussian"):
        khot.counting_matrix(torch.ones(3), 1, delta="box")
    with pytest.raises(ValueError, match="100000 x 100000 table of pairs"):
        khot.soft_topk(torch.zeros(100_000), 5, method="counting")
    with pytest.raises(ValueError, match="lower must not be above upper"):
        khot.certify_topk(torch.ones(3), torch.zeros(3), 1)
    with pytest.raises(ValueError, match="must be alike"):
        khot.linear_bounds.heaviside(torch.zeros(3), torch.zeros(2))
    with pytest.raises(ValueError, match="between 0 and n=3"):
        khot.certify_topk(torch.zeros(3), torch.ones(3), 4)


numbers = st.one_of(
    st.sampled_from([-2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0]),
    st.floats(-1e6, 1e6, allow_nan=False, width=32),
    st.floats(-1e-40, 1e-40, allow_nan=False),
)


def lines_at(lines: Lines, x: Tensor) -> tuple[Tensor, Tensor]:
    return lines.lower_slope * x + lines.lower_intercept, lines.upper_slope * x + lines.upper_intercept


@settings(max_examples=300, deadline=None)
@given(numbers, numbers, st.lists(st.floats(0, 1), max_size=8), st.sampled_from([torch.float32, torch.float64]))
def test_lines_enclose_the_steps(a: float, b: float, shares: list[float], dtype: torch.dtype) -> None:
    low, high = torch.tensor([min(a, b)], dtype=dtype), torch.tensor([max(a, b)], dtype=dtype)
    tiny = torch.finfo(dtype).tiny
    inside = [low + share * (high - low) for share in shares]
    points = torch.cat([low, high, torch.tensor([0.0, tiny, -tiny], dtype=dtype), *inside]).clamp(low, high)
    for bound, value in ((khot.linear_bounds.heaviside, points >= 0), (khot.linear_bounds.delta, points == 0)):
        below, above = lines_at(bound(low, high), points)
        assert bool((below <= value).all()) and bool((above >= value).all())


def test_lines_are_the_tightest_of_their_kind() -> None:
    low, high = torch.tensor([-1.0, -3.0, 1.0, -2.0, 0.0]), torch.tensor([3.0, 1.0, 2.0, -1.0, 0.0])
    lines = khot.linear_bounds.heaviside(low, high)
    assert_close(lines.lower_slope, torch.tensor([1 / 3, 0.0, 0.0, 0.0, 0.0]))
    assert_close(lines.upper_slope, torch.tensor([0.0, 1 / 3, 0.0, 0.0, 0.0]))
    assert_close(lines.lower_intercept, torch.tensor([0.0, 0.0, 1.0, 0.0, 1.0]), rtol=0, atol=1e-6)
    assert_close(lines.upper_intercept, torch.tensor([1.0, 1.0, 1.0, 0.0, 1.0]))
    spike = khot.linear_bounds.delta(low, high)
    assert_close(spike.upper_slope, torch.tensor([-1 / 3, 1 / 3, 0.0, 0.0, 0.0]))
    assert_close(spike.lower_intercept, torch.tensor([0.0, 0.0, 0.0, 0.0, 1.0]))


ends = st.one_of(st.sampled_from([-1.0, 0.0, 1.0, 2.0]), st.floats(-3, 3, width=16))
boxes = st.lists(st.tuples(ends, ends), min_size=1, max_size=6)


@settings(max_examples=300, deadline=None)
@given(boxes, st.integers(0, 6), st.randoms(use_true_random=False))
def test_certificates_hold_and_miss_nothing(box: list[tuple[float, float]], k: int, random: object) -> None:
    low = torch.tensor([min(pair) for pair in box])
    high = torch.tensor([max(pair) for pair in box])
    k = min(k, len(box))
    kept, dropped = khot.certify_topk(low, high, k)
    assert not bool((kept & dropped).any())
    ever, always = torch.zeros(len(box)), torch.ones(len(box))
    for corner in itertools.product(*zip(low.tolist(), high.tolist(), strict=True)):
        mask = khot.topk_mask(torch.tensor(corner), k)
        ever, always = torch.maximum(ever, mask), torch.minimum(always, mask)
    # An item's rank is worst at its lower end with all others at their upper ends, so that the corners decide: no more, no less.
    assert torch.equal(kept, always == 1)
    assert torch.equal(dropped, ever == 0)
    scores = low + torch.tensor([random.random() for _ in box]) * (high - low)  # type: ignore[attr-defined]
    mask = khot.topk_mask(scores.clamp(low, high), k)
    assert bool((mask[kept] == 1).all()) and bool((mask[dropped] == 0).all())


def test_certificates_for_batches_infinities_and_nan() -> None:
    low = torch.tensor([[-torch.inf, 0.0, 1.0], [torch.nan, 5.0, -torch.inf]])
    high = torch.tensor([[-torch.inf, 0.5, 1.5], [1.0, 6.0, 0.0]])
    kept, dropped = khot.certify_topk(low, high, torch.tensor([3, 1]))
    assert kept.tolist() == [[False, True, True], [False, True, False]]
    assert dropped.tolist() == [[True, False, False], [True, False, True]]
    swapped = khot.certify_topk(low.t(), high.t(), torch.tensor([3, 1]), dim=0)
    assert torch.equal(swapped.kept, kept.t()) and torch.equal(swapped.dropped, dropped.t())
