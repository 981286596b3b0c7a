"""NeuralSort, sorting networks, perturbed, sequential and scaled top-k against their definitions, written slowly."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck
from torch.testing import assert_close

import khot
from khot.relaxations.network import SWAPS


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def slow_neuralsort(scores: Tensor, k: int, tau: float) -> Tensor:
    n = len(scores)
    spread = (scores[:, None] - scores[None, :]).abs().sum(-1)
    return torch.stack([torch.softmax(((n + 1 - 2 * i) * scores - spread) / tau, -1) for i in range(1, k + 1)])


def slow_network(scores: Tensor, pairs: list[tuple[int, int]], tau: float, squash: str = "logistic") -> Tensor:
    """The whole n x n matrix, one comparator after the other."""
    values, matrix = scores.clone(), torch.eye(len(scores), dtype=scores.dtype)
    for i, j in pairs:
        gap = (values[i] - values[j]) / tau
        stay = slow_swap(gap, squash)
        comparator = torch.eye(len(scores), dtype=scores.dtype)
        comparator[[i, i, j, j], [i, j, i, j]] = torch.stack([stay, 1 - stay, 1 - stay, stay])
        values, matrix = comparator @ values, comparator @ matrix
    return matrix


def slow_swap(gap: Tensor, squash: str) -> Tensor:
    x = gap.item()
    optimal = x + 0.5 if abs(x) <= 0.25 else (1 if x > 0 else 0) - 1 / (16 * x)
    phi = math.copysign(abs(x) ** 0.75, x)
    values = {
        "logistic": 1 / (1 + math.exp(-x)),
        "logistic_phi": 1 / (1 + math.exp(-phi)),
        "gaussian": 0.5 * (1 + math.erf(x / math.sqrt(2))),
        "cauchy": math.atan(x) / math.pi + 0.5,
        "reciprocal": 0.5 * (2 * x / (1 + 2 * abs(x)) + 1),
        "optimal": optimal,
    }
    return torch.tensor(values[squash], dtype=gap.dtype)


def slow_sequential(scores: Tensor, k: int, tau: float) -> Tensor:
    a, rows = scores.clone(), []
    for _ in range(k):
        rows.append(torch.softmax(a / tau, -1))
        a = a + torch.log(1 - rows[-1])
    return torch.stack(rows)


BITONIC_4 = [(0, 1), (2, 3), (0, 3), (1, 2), (0, 1), (2, 3)]
ODD_EVEN_4 = [(0, 1), (2, 3), (1, 2), (0, 1), (2, 3), (1, 2)]
ODD_EVEN_3 = [(0, 1), (1, 2), (0, 1)]


@pytest.mark.parametrize(("n", "k"), [(1, 1), (2, 1), (5, 5), (9, 4), (40, 7)])
@pytest.mark.parametrize("tau", [0.1, 1.0, 30.0])
def test_neuralsort_is_its_formula(n: int, k: int, tau: float) -> None:
    scores = draw(3, n)
    slow = torch.stack([slow_neuralsort(row, k, tau) for row in scores])
    assert_close(khot.neuralsort_matrix(scores, k, tau), slow)
    assert_close(khot.soft_topk(scores, k, tau, method="neuralsort"), slow.sum(-2))


@pytest.mark.parametrize(
    ("n", "network", "pairs"), [(4, "bitonic", BITONIC_4), (4, "odd_even", ODD_EVEN_4), (3, "odd_even", ODD_EVEN_3)], ids=str
)
@pytest.mark.parametrize("swap", SWAPS)
def test_network_is_the_product_of_its_comparators(n: int, network: str, pairs: list[tuple[int, int]], swap: str) -> None:
    scores = draw(n)
    slow = slow_network(scores, pairs, 0.7, swap)
    options = {"network": network, "swap": swap, "presort": False}
    assert_close(khot.network_matrix(scores, n - 1, 0.7, **options), slow[:-1])
    assert_close(khot.soft_topk(scores, n - 1, 0.7, method="network", **options), slow[:-1].sum(0))
    x = draw(n, 5, seed=1)
    assert_close(khot.select_topk(x, scores, n - 1, 0.7, method="network", **options), slow[:-1] @ x)


@pytest.mark.parametrize("network", ["bitonic", "odd_even"])
@pytest.mark.parametrize("presort", [False, True])
@pytest.mark.parametrize("n", [1, 2, 5, 8, 13, 33])
def test_network_sorts_in_the_limit(network: str, presort: bool, n: int) -> None:
    scores = torch.randperm(n, generator=torch.Generator().manual_seed(n)).double().requires_grad_()
    options = {"network": network, "presort": presort}
    matrix = khot.network_matrix(scores, n, 1e-3, **options)
    assert_close(matrix @ scores, scores.sort(descending=True).values)
    soft = khot.network_matrix(scores, n, 1.0, **options)
    assert_close(soft.sum(-2), torch.ones(n, dtype=torch.float64))
    x = draw(n, 3)
    assert_close(khot.select_topk(x, scores, n, 1.0, method="network", **options), soft @ x)


@pytest.mark.parametrize("presort", [False, True])
@pytest.mark.parametrize("n", [1, 3, 5, 6, 7, 9, 13, 21])
def test_network_of_any_size_is_that_of_the_next_power_of_two(n: int, presort: bool) -> None:
    """Wires behind the last one would hold items at -inf, which never move."""
    scores, full = draw(2, n), 1 << (n - 1).bit_length()
    padded = torch.nn.functional.pad(scores, (0, full - n), value=-torch.inf)
    matrix = khot.network_matrix(scores, n, 0.7, presort=presort)
    assert_close(khot.network_matrix(padded, n, 0.7, presort=presort)[..., :n], matrix)
    assert_close(khot.soft_topk(padded, (n + 1) // 2, 0.7, method="network", presort=presort)[..., :n], matrix[:, : (n + 1) // 2].sum(-2))


@pytest.mark.parametrize("swap", SWAPS)
def test_swap_laws_are_distribution_functions_with_finite_slopes(swap: str) -> None:
    gap = torch.cat([torch.linspace(-3, 3, 241, dtype=torch.float64), torch.tensor([-1e30, -1e-20, 1e-20, 1e30], dtype=torch.float64)])
    gap = gap.sort().values.requires_grad_()
    share = SWAPS[swap](gap)
    assert bool((share.diff() >= -1e-15).all()) and bool(((share >= 0) & (share <= 1)).all())
    assert_close(share + SWAPS[swap](-gap), torch.ones_like(share))
    (slope,) = torch.autograd.grad(share.sum(), gap)
    assert bool(slope.isfinite().all()) and bool((slope >= 0).all())


def test_network_gradients() -> None:
    scores, x = draw(2, 6).requires_grad_(), draw(2, 6, 2, seed=1).requires_grad_()
    for network in ("bitonic", "odd_even"):
        assert gradcheck(lambda s, n=network: khot.network_matrix(s, 3, 0.8, network=n, presort=False), (scores,), check_forward_ad=True)
    assert gradcheck(lambda x, s: khot.select_topk(x, s, 3, 0.8, method="network"), (x, scores))


@pytest.mark.parametrize("method", ["neuralsort", "softsort", "network"])
def test_sorting_in_the_limit(method: str) -> None:
    scores = draw(3, 20)
    sorted_scores = (khot.soft_topk_matrix(scores, 20, 1e-4, method=method) @ scores.unsqueeze(-1)).squeeze(-1)
    assert_close(sorted_scores, scores.sort(descending=True).values)


@pytest.mark.parametrize(("n", "k"), [(1, 1), (4, 2), (9, 5)])
@pytest.mark.parametrize("tau", [0.3, 1.0, 5.0])
def test_sequential_is_the_loop(n: int, k: int, tau: float) -> None:
    scores = draw(3, n)
    if k == n:
        tau = max(tau, 1.0)
    slow = torch.stack([slow_sequential(row, k, tau) for row in scores])
    assert_close(khot.sequential_matrix(scores, k, tau), slow, rtol=1e-6, atol=1e-9)


def test_sequential_with_noise_draws_without_replacement() -> None:
    scores = torch.tensor([1.0, 0.0, -1.0]).expand(20_000, 3)
    matrix = khot.sequential_matrix(scores, 2, 1e-3, noise=True, generator=torch.Generator().manual_seed(0))
    first = torch.softmax(scores[0], -1)
    assert_close(matrix[:, 0].mean(0), first, rtol=0, atol=5 * 0.5 / 20_000**0.5)
    p = first.double()
    both = p[0] * p[1] / (1 - p[0]) + p[1] * p[0] / (1 - p[1])  # the chance that the first two are drawn
    seen = ((matrix.sum(1)[:, :2] > 0.5).all(-1)).double().mean()
    assert_close(seen, both, rtol=0, atol=5 * 0.5 / 20_000**0.5)


def test_perturbed_is_unbiased() -> None:
    """For two items the mean of the choice is a normal distribution function, with a known slope."""
    scores = torch.tensor([0.4, -0.1], dtype=torch.float64, requires_grad=True)
    tau, samples = 0.8, 200_000
    mask = khot.soft_topk(scores, 1, tau, method="perturbed", num_samples=samples, generator=torch.Generator().manual_seed(0))
    gap = torch.tensor(0.5 / (tau * 2**0.5), dtype=torch.float64)
    assert_close(mask[0], torch.special.ndtr(gap), rtol=0, atol=5 * 0.5 / samples**0.5)
    (grad,) = torch.autograd.grad(mask[0], scores)
    slope = torch.exp(-gap.square() / 2) / (2 * math.pi) ** 0.5 / (tau * 2**0.5)
    assert_close(grad, torch.stack([slope, -slope]), rtol=0, atol=5 / tau / samples**0.5)


def test_perturbed_matrix_counts_the_places() -> None:
    scores = draw(2, 5).requires_grad_()
    matrix = khot.perturbed_matrix(scores, 3, 0.5, num_samples=50, generator=torch.Generator().manual_seed(3))
    generator = torch.Generator().manual_seed(3)
    drawn = torch.randn(1, 50, 5, generator=generator, dtype=torch.float64)[0]
    signs = torch.randint(2, (2, 5), generator=generator, dtype=torch.float64) * 2 - 1
    noise = torch.stack((drawn, drawn.roll(-1, -1))) * signs.unsqueeze(1)  # the second row begins one place further on
    seen = (scores.detach().unsqueeze(1) + 0.5 * noise).argsort(-1, descending=True)[..., :3]
    slow = torch.nn.functional.one_hot(seen, 5).double()
    assert_close(matrix, slow.mean(1))
    probe = draw(2, 3, 5, seed=1)
    (grad,) = torch.autograd.grad(matrix, scores, probe)
    hard = torch.nn.functional.one_hot(scores.argsort(-1, descending=True)[:, :3], 5).double()
    gains = (slow * probe.unsqueeze(1)).sum((-1, -2)) - (hard * probe).sum((-1, -2)).unsqueeze(-1)
    assert_close(grad, (gains.unsqueeze(-1) * noise).mean(1) / 0.5)


@pytest.mark.parametrize("k", [1, 3, 6.5])
def test_scaled_is_its_formula(k: float) -> None:
    scores = draw(5, 8) + 0.5
    for row, mask in zip(scores, khot.scaled_topk(scores, k, 0.7), strict=True):
        p = torch.sigmoid(row / 0.7)
        slow = p * k / p.sum() if p.sum() >= k else 1 - (8 - k) / (8 - p.sum()) * (1 - p)
        assert_close(mask, slow)


def test_scaled_has_a_gradient_where_all_sigmoids_are_saturated() -> None:
    for level in (50.0, -50.0, 1e30, -1e30):
        scores = torch.full((2, 5), level, requires_grad=True)
        y = khot.scaled_topk(scores, torch.tensor([2.0, 4.5]))
        assert_close(y, torch.tensor([[0.4], [0.9]]).expand(2, 5))
        (grad,) = torch.autograd.grad((y * torch.arange(5.0)).sum(), scores)
        assert bool(grad.isfinite().all())


def test_threshold_lies_in_the_gap() -> None:
    scores = draw(4, 9)
    ordered = scores.sort(descending=True).values
    cut = (ordered[:, 2:3] + ordered[:, 3:4]) / 2
    assert_close(khot.threshold_topk(scores, 3, 0.4), torch.sigmoid((scores - cut) / 0.4))


def test_options_are_checked() -> None:
    scores = draw(5)
    with pytest.raises(ValueError, match="network must be one of bitonic, odd_even"):
        khot.network_matrix(scores, 2, network="bubble")
    with pytest.raises(ValueError, match="swap must be one of"):
        khot.network_matrix(scores, 2, swap="linear")
    with pytest.raises(ValueError, match="num_samples must be at least 1"):
        khot.perturbed_matrix(scores, 2, num_samples=0)
