"""Designs against enumeration: inclusion and joint probabilities, sizes, and what is expected to fail."""

import pytest
import torch
from scipy import integrate, stats

import khot
from khot.designs import brewer as brewer_design
from khot.designs.brewer import brewer_weights
from khot.designs.sampford import by_rejection, pareto_weights
from tests.enumerations import (
    ENUMERATORS,
    by_log_prob,
    entropy,
    enumerate_pivotal,
    enumerate_systematic,
    enumerated,
    moments,
    over_orders,
    sen_yates_grundy,
)

PI = torch.tensor([0.2, 0.7, 0.8, 0.5, 0.4, 0.4], dtype=torch.float64)
HARD = torch.tensor([1.0, 0.0, 1e-6, 1 - 1e-6, 0.35, 0.65, 0.25, 0.75], dtype=torch.float64)
ROWS = list(khot.DESIGNS.values())
EXACT = [row for row in ROWS if row.exact]
FIXED = [row for row in ROWS if row.fixed_size]


LISTED = [row for row in EXACT if row.log_prob or row.name in ENUMERATORS]


@pytest.mark.parametrize("pi", [PI, HARD], ids=["plain", "hard"])
@pytest.mark.parametrize("row", LISTED, ids=str)
def test_inclusion_probabilities_are_exact(row, pi, monkeypatch):
    first, joint = moments(*enumerated(row.name, pi, monkeypatch))
    torch.testing.assert_close(first, pi, rtol=0, atol=1e-10)
    if row.fixed_size:
        torch.testing.assert_close(joint.sum(-1), pi.sum() * pi, rtol=0, atol=1e-9)


TABLE = {  # smallest joint probability and entropy, theory of the designs for PI
    "conditional_poisson": (0.0475, 2.5730),
    "sampford": (0.0464, 2.5729),
    "brewer": (0.0466, 2.5730),
}


@pytest.mark.parametrize("name", TABLE)
def test_joint_probabilities_as_tabulated(name, monkeypatch):
    masks, weights = enumerated(name, PI, monkeypatch)
    _, joint = moments(masks, weights)
    smallest = joint[~torch.eye(6, dtype=torch.bool)].min().item()
    assert (round(smallest, 4), round(entropy(masks, weights), 4)) == TABLE[name]
    assert sen_yates_grundy(joint)


def test_systematic_in_random_order_as_tabulated(monkeypatch):
    masks, weights = over_orders(enumerate_systematic, PI, monkeypatch)
    first, joint = moments(masks, weights)
    torch.testing.assert_close(first, PI, rtol=0, atol=1e-10)
    assert round(joint[~torch.eye(6, dtype=torch.bool)].min().item(), 4) == 0.0567
    assert round(entropy(masks, weights), 4) == 2.5552
    assert sen_yates_grundy(joint)


def test_systematic_in_fixed_order_breaks_sen_yates_grundy(monkeypatch):
    masks, weights = enumerate_systematic(PI, monkeypatch)
    _, joint = moments(masks, weights)
    assert joint.min() == 0.0
    assert round(entropy(masks, weights), 4) == 1.4708
    assert not sen_yates_grundy(joint)


def test_pivotal_in_random_order(monkeypatch):
    masks, weights = over_orders(enumerate_pivotal, PI, monkeypatch)
    first, joint = moments(masks, weights)
    torch.testing.assert_close(first, PI, rtol=0, atol=1e-10)
    # The tree's own figures; duels one after the other, as mostly published, have .0500 and 2.5713.
    assert round(joint[~torch.eye(6, dtype=torch.bool)].min().item(), 4) == 0.0562
    assert round(entropy(masks, weights), 4) == 2.5658
    assert sen_yates_grundy(joint)


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_positive_joint_probabilities_where_claimed(row):
    torch.manual_seed(0)
    pi = torch.tensor([0.1, 0.1, 0.6, 0.6, 0.6])
    z = khot.sample(pi, design=row.name, num_samples=20_000)
    smallest = (z.T @ z).fill_diagonal_(torch.inf).min()
    assert (smallest > 0) == row.positive_joint


def hotelling(z: torch.Tensor, pi: torch.Tensor) -> float:
    """p-value of the mean of z being pi, in the metric of its own covariance (chi-square with n - 1 degrees of freedom)."""
    z = z.double()
    miss = z.mean(0) - pi
    statistic = len(z) * miss @ torch.linalg.pinv(torch.cov(z.T), rtol=1e-9, hermitian=True) @ miss
    return float(stats.chi2.sf(statistic.item(), len(pi) - 1))


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_monte_carlo_at_larger_n(row):
    torch.manual_seed(1)
    n, k, rows = 24, 9, 60_000
    pi = khot.soft_topk(torch.randn(n, dtype=torch.float64), k)
    p_value = hotelling(khot.sample(pi, design=row.name, num_samples=rows), pi)
    # Power: an item off by .02 is told apart with probability > .95 at this level.
    level = 1e-4
    shift = rows * 0.02**2 / 0.25
    assert stats.ncx2.sf(stats.chi2.isf(level, n - 1), n - 1, shift) > 0.95
    assert (p_value > level) == (row.name != "gumbel")  # Pareto's error is below what this many rows can show


@pytest.mark.parametrize("name", TABLE)
def test_frequencies_of_subsets_match_the_probabilities(name, monkeypatch):
    torch.manual_seed(2)
    masks, weights = enumerated(name, PI, monkeypatch)
    z = khot.sample(PI, design=name, num_samples=20_000)
    counts = (z @ masks.T == 3).sum(0)
    assert counts.sum() == 20_000
    assert stats.chisquare(counts.numpy(), (weights / weights.sum() * 20_000).numpy()).pvalue > 1e-4


def adversarial(dtype: torch.dtype) -> list[torch.Tensor]:
    torch.manual_seed(3)
    n = 40
    soft = khot.soft_topk(torch.randn(n) * 3, 7).to(dtype)
    ends = torch.cat((torch.zeros(20), torch.ones(5), torch.full((10,), 0.1))).to(dtype)
    thirds = torch.full((30,), 1 / 3).to(dtype)
    edge = torch.full((8,), 1 / 8).to(dtype)
    near = torch.cat((torch.full((9,), 1.0).to(dtype) - torch.finfo(dtype).eps / 2, torch.zeros(3, dtype=dtype)))
    return [soft, ends, thirds, edge, 1 - edge, near, torch.zeros(5, dtype=dtype), torch.ones(5, dtype=dtype), torch.ones(1, dtype=dtype)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("row", FIXED, ids=str)
def test_size_is_exactly_k(row, dtype):
    for pi in adversarial(dtype):
        k = round(pi.double().sum().item())
        z = khot.sample(pi, design=row.name, num_samples=500, k=k)
        assert z.dtype == dtype
        assert bool((z.double().sum(-1) == k).all())
        assert bool(((z == 0) | (z == 1)).all())
        assert bool((z[:, pi == 0] == 0).all()) and bool((z[:, pi == 1] == 1).all())


@pytest.mark.parametrize("name", ["systematic", "pivotal", "pareto", "gumbel"])
def test_size_at_a_million(name):
    torch.manual_seed(4)
    scores = torch.randn(1_000_000) * 2
    scores[:1000], scores[-1000:] = -torch.inf, torch.inf
    z = khot.sample_topk(scores, 62_500, design=name)
    assert z.double().sum() == 62_500
    assert z[:1000].sum() == 0 and z[-1000:].sum() == 1000


@pytest.mark.slow
@pytest.mark.parametrize("row", FIXED, ids=str)
def test_size_in_ten_million_rows(row):
    """``pytest -m slow -k ten_million``: at least 10^7 rows over all designs, dtypes and adversarial probabilities."""
    rows = {"systematic": 5000, "pivotal": 5000, "pareto": 5000, "gumbel": 5000}.get(row.name, 500) * 20
    for dtype in (torch.float64, torch.float32, torch.float16):
        for pi in adversarial(dtype):
            k = round(pi.double().sum().item())
            for _ in range(10):
                z = khot.sample(pi, design=row.name, num_samples=rows // 10, k=k)
                assert bool((z.double().sum(-1) == k).all())


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_reproducible_and_rows_independent(row):
    pi = khot.soft_topk(torch.randn(3, 4, 9), 3)
    draws = [khot.sample(pi, design=row.name, generator=torch.Generator().manual_seed(5), num_samples=2) for _ in range(2)]
    torch.testing.assert_close(*draws, rtol=0, atol=0)
    z = khot.sample(torch.full((2, 4), 0.5), design=row.name, num_samples=4000)
    same = (z[:, 0] == z[:, 1]).all(-1).float().mean()
    assert same < 0.3  # 1/6 of the pairs of samples of size 2 agree, for independent rows


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_sizes_may_differ_between_rows(row):
    pi = torch.tensor([[0.5, 0.5, 0.0, 0.0], [1.0, 1.0, 1.0, 0.0], [0.75, 0.75, 0.75, 0.75], [0.0, 0.0, 0.0, 0.0]])
    z = khot.sample(pi, design=row.name, num_samples=50)
    if row.fixed_size:
        assert bool((z.sum(-1) == torch.tensor([1.0, 3.0, 3.0, 0.0])).all())


def test_brewer_weights_of_a_last_draw_are_the_probabilities():
    p = torch.tensor([0.2, 0.3, 0.5])
    weights = brewer_weights(p, p.sum(), torch.tensor(1.0))
    torch.testing.assert_close(weights / weights.sum(), p)
    assert brewer_design(p, torch.tensor([1])).sum() == 1


@pytest.mark.parametrize("adjusted, error", [(True, 0.0011), (False, 0.0065)])
def test_pareto_is_off_by_what_is_said(adjusted, error):
    torch.manual_seed(6)
    z = khot.sample(PI, design="pareto", adjusted=adjusted, num_samples=400_000)
    assert abs((z.mean(0) - PI).abs().max().item() - error) < 4 * (0.25 / 400_000) ** 0.5


def test_large_sampford_samples_are_accepted_with_the_right_probabilities():
    """The weights of Pareto samples against an integral by scipy, and what is accepted against the enumeration."""
    k = PI.sum().round().long().view(1, 1)
    odds = PI / (1 - PI)
    weights = pareto_weights(PI.unsqueeze(0), k)[0]
    for i in range(6):

        def integrand(t: float, i: int = i) -> float:
            return t ** (int(k) - 1) / (1 + odds[i].item() * t) / float((1 + odds * t).prod())

        exact = integrate.quad(integrand, 0, torch.inf, epsabs=0, epsrel=1e-12)[0] / float((1 - PI).prod())
        assert abs(weights[i].item() / exact - 1) < 1e-11
    masks, probs = by_log_prob("sampford", PI)
    z = by_rejection(PI.expand(40_000, 6), k.expand(40_000, 1), torch.Generator().manual_seed(0))
    counts = (z @ masks.T == int(k)).sum(0)
    assert stats.chisquare(counts.numpy(), (probs * 40_000).numpy()).pvalue > 1e-4


def test_large_sampford_rows_beside_small_ones():
    torch.manual_seed(0)
    probs = khot.soft_topk(torch.randn(3, 1000), torch.tensor([2.0, 100.0, 900.0]))
    z = khot.sample(probs, design="sampford", num_samples=300)
    assert bool((z.sum(-1) == torch.tensor([2.0, 100.0, 900.0])).all())
    assert (z.mean(0) - probs).abs().max() < 6 * 0.5 / 300**0.5
