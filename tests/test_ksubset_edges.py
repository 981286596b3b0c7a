"""k-subsets at the edges: extreme logits, half precision, no items, bad input."""

import math

import mpmath
import pytest
import torch
from torch.distributions import kl_divergence

from khot.distributions import KSubset
from khot.primitives.poisson_binomial import log_partition

F64 = torch.float64


def column(k: int) -> torch.Tensor:
    return torch.tensor([k])


@pytest.mark.parametrize("spread", [1e-3, 1e2, 1e6])
def test_extreme_logits_against_many_digits(spread):
    torch.manual_seed(5)
    logits = torch.randn(12, dtype=F64) * spread
    with mpmath.workdps(60):
        row = [mpmath.mpf(1)] + [mpmath.mpf(0)] * 5
        for x in logits.tolist():
            w = mpmath.exp(mpmath.mpf(x))
            row = [row[0]] + [row[j] + w * row[j - 1] for j in range(1, 6)]
        exact = float(mpmath.log(row[5]))
    assert abs(log_partition(logits, column(5)).item() - exact) <= 1e-13 * max(1.0, abs(exact))


def test_large():
    torch.manual_seed(6)
    d = KSubset(k=1000, logits=torch.randn(10_000) * 3)
    z = d.sample()
    assert z.sum() == 1000
    assert abs(d.mean.double().sum().item() - 1000) < 1e-3
    assert torch.isfinite(d.log_prob(z))


def test_extremes_stay_finite():
    logits = torch.tensor([1e30, 1e30, 0.0, -1e30, 5.0], requires_grad=True)
    d = KSubset(k=3, logits=logits)
    torch.testing.assert_close(d.mean, torch.tensor([1.0, 1.0, 0.0067, 0.0, 0.9933]), rtol=0, atol=1e-4)
    d.mean[2].backward()
    assert bool(logits.grad.isfinite().all())
    sure = KSubset(k=2, logits=torch.tensor([torch.inf, 0.0, 1.0, -torch.inf]))
    torch.testing.assert_close(sure.mean, torch.tensor([1.0, 0.2689, 0.7311, 0.0]), rtol=0, atol=1e-4)
    torch.testing.assert_close(sure.log_prob(sure.enumerate_support()).exp().sum(), torch.tensor(1.0))
    assert bool((sure.sample((50,))[:, 0] == 1).all()) and bool((sure.sample((50,))[:, 3] == 0).all())


def test_a_common_constant_changes_nothing():
    """However large: log_prob, entropy and divergence come from differences to it."""
    x = torch.tensor([0.0, 1.0, -1.0, 0.5])
    d, far = KSubset(k=2, logits=torch.zeros(4)), KSubset(k=2, logits=torch.full((4,), 1e30))
    for part in (lambda d: d.log_prob(torch.tensor([1.0, 1.0, 0.0, 0.0])), lambda d: d.entropy(), lambda d: d.mean, lambda d: d.joint):
        torch.testing.assert_close(part(far), part(d))
    for a, b in ((d, far), (far, d)):
        assert abs(kl_divergence(a, b).item()) < 1e-6
        torch.testing.assert_close(kl_divergence(KSubset(k=2, logits=x), a), kl_divergence(KSubset(k=2, logits=x), b))
    assert abs(far.log_prob(torch.tensor([1.0, 1.0, 0.0, 0.0])).item() + math.log(6)) < 1e-6


def test_validate_args_can_be_turned_off():
    nan = torch.tensor([torch.nan, 0.0, 1.0])
    assert bool(KSubset(k=1, logits=nan, validate_args=False).mean.isnan().any())
    KSubset(k=2, logits=torch.tensor([-torch.inf, -torch.inf, 0.0]), validate_args=False)
    KSubset(k=2, probs=torch.tensor([0.5, 0.5, 0.5]), validate_args=False)
    d = KSubset(k=1, logits=torch.zeros(3), validate_args=False)
    assert d.log_prob(torch.tensor([1.0, 1.0, 0.0])) == -torch.inf
    with pytest.raises(ValueError, match="nan"):
        KSubset(k=1, logits=nan, validate_args=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision(dtype):
    """Sizes and sums beyond what half precision can count."""
    logits = torch.randn(700).to(dtype)
    d, wide = KSubset(k=257, logits=logits), KSubset(k=257, logits=logits.double())
    z = d.sample((2,))
    assert z.dtype == dtype and bool((z.double().sum(-1) == 257).all()) and bool(d.support.check(z).all())
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(d.mean.double(), wide.mean, rtol=eps, atol=eps)
    torch.testing.assert_close(d.log_prob(z).double(), wide.log_prob(z.double()), rtol=eps, atol=eps)
    torch.testing.assert_close(d.covariance.double(), wide.covariance, rtol=eps, atol=1e-6)
    assert bool((KSubset(k=257, probs=d.mean).sample().double().sum(-1) == 257).all())


def test_no_items_and_one():
    none = KSubset(k=0, logits=torch.zeros(2, 0))
    assert none.mean.shape == (2, 0) and none.sample((3,)).shape == (3, 2, 0) and none.joint.shape == (2, 0, 0)
    assert none.log_prob(torch.zeros(2, 0)).tolist() == [0.0, 0.0] and none.entropy().tolist() == [0.0, 0.0]
    one = KSubset(k=1, logits=torch.zeros(1))
    assert one.joint.tolist() == [[1.0]] and one.sample().tolist() == [1.0]
    assert KSubset(k=2, logits=torch.zeros(0, 5)).joint.shape == (0, 5, 5)


@pytest.fixture
def validated():
    """Validation is on: torch.compile turns torch's default off for the rest of the process."""
    before = torch.distributions.Distribution._validate_args
    torch.distributions.Distribution.set_default_validate_args(True)
    yield
    torch.distributions.Distribution.set_default_validate_args(before)


def test_errors(validated):
    x = torch.zeros(4)
    for make, match in [
        (lambda: KSubset(k=2), "exactly one"),
        (lambda: KSubset(k=2, probs=x, logits=x), "exactly one"),
        (lambda: KSubset(k=5, logits=x), "between 0 and n=4"),
        (lambda: KSubset(k=2, probs=torch.tensor([0.5, 0.5, 0.5])), "sum to k=2.*1.5"),
        (lambda: KSubset(k=1, probs=torch.tensor([1.5, -0.5])), r"\[0, 1\]"),
        (lambda: KSubset(k=1, logits=torch.tensor([torch.nan, 0.0])), "nan"),
        (lambda: KSubset(k=2, logits=torch.tensor([-torch.inf, -torch.inf, 0.0])), "no subset"),
        (lambda: KSubset(k=2, logits=x).log_prob(torch.tensor([1.0, 0.0, 0.0, 0.0])), "support"),
    ]:
        with pytest.raises(ValueError, match=match):
            make()
