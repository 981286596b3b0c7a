"""The k-subset distribution against sums over all subsets, and the sums against each other."""

import math

import pytest
import torch
from scipy import stats
from torch.autograd import gradcheck, gradgradcheck
from torch.distributions import OneHotCategorical, kl_divergence

from khot.distributions import KSubset, k_hot
from khot.primitives.calibrate import calibrate
from khot.primitives.poisson_binomial import log_partition, marginals
from khot.primitives.subsets import draw_subsets
from khot.soft import soft_topk

F64 = torch.float64


def column(k: int) -> torch.Tensor:
    return torch.tensor([k])


def brute(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """All subsets and their probabilities."""
    masks = KSubset(k=k, logits=logits).enumerate_support()
    return masks, torch.softmax((masks * logits).sum(-1), 0)


def log_partition_recursion(logits: torch.Tensor, k: int) -> torch.Tensor:
    """The textbook recursion in the log domain, one item at a time: log e_j grows by logit + log e_{j-1}."""
    row = torch.full((*logits.shape[:-1], k + 1), -torch.inf, dtype=logits.dtype)
    row[..., 0] = 0.0
    for logit in logits.unbind(-1):
        row = torch.cat((row[..., :1], torch.logaddexp(row[..., 1:], row[..., :-1] + logit.unsqueeze(-1))), -1)
    return row[..., k]


CASES = [(1, 0), (1, 1), (5, 0), (5, 1), (5, 4), (5, 5), (7, 3), (8, 4)]


@pytest.mark.parametrize("n, k", CASES)
@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_everything_by_enumeration(n, k, scale):
    torch.manual_seed(n * 10 + k)
    logits = torch.randn(n, dtype=F64) * scale
    d = KSubset(k=k, logits=logits)
    masks, weights = brute(logits, k)
    assert masks.shape[0] == math.comb(n, k)
    torch.testing.assert_close(d.log_prob(masks).exp(), weights, rtol=1e-11, atol=1e-13)
    torch.testing.assert_close(d.log_prob(masks).exp().sum(), torch.tensor(1.0, dtype=F64), rtol=1e-11, atol=0)
    torch.testing.assert_close(d.mean, weights @ masks, rtol=1e-10, atol=1e-14)
    torch.testing.assert_close(d.entropy(), -torch.special.xlogy(weights, weights).sum(), rtol=1e-10, atol=1e-11)
    joint = masks.T @ (weights.unsqueeze(-1) * masks)
    torch.testing.assert_close(d.joint, joint, rtol=1e-10, atol=1e-14)
    torch.testing.assert_close(d.covariance, joint - torch.outer(d.mean, d.mean), rtol=1e-8, atol=1e-13)
    torch.testing.assert_close(d.variance, d.covariance.diagonal(), rtol=1e-8, atol=1e-13)


def test_golden_marginals():
    d = KSubset(k=2, logits=torch.logit(torch.tensor([0.3, 0.6, 0.5, 0.2], dtype=F64)))
    assert [round(p, 4) for p in d.mean.tolist()] == [0.3568, 0.7622, 0.6595, 0.2216]


def test_divergence_by_enumeration():
    torch.manual_seed(0)
    a, b = torch.randn(2, 3, 6, dtype=F64)
    p, q = KSubset(k=3, logits=a), KSubset(k=3, logits=b)
    masks = p.enumerate_support()
    lp, lq = p.log_prob(masks), q.log_prob(masks)
    torch.testing.assert_close(kl_divergence(p, q), (lp.exp() * (lp - lq)).sum(0))
    torch.testing.assert_close(kl_divergence(p, p), torch.zeros(3, dtype=F64), rtol=0, atol=1e-13)
    excluded = KSubset(k=3, logits=b.index_fill(-1, torch.tensor(0), -torch.inf))
    assert bool((kl_divergence(p, excluded) == torch.inf).all())
    with pytest.raises(ValueError, match="same size"):
        kl_divergence(p, KSubset(k=2, logits=b))


def test_gradients():
    torch.manual_seed(1)
    logits = torch.randn(2, 5, dtype=F64, requires_grad=True)
    z = KSubset(k=2, logits=logits.detach()).sample()
    for k in (1, 2, 4):
        assert gradcheck(lambda x: KSubset(k=k, logits=x).entropy(), logits)
        assert gradcheck(lambda x: KSubset(k=k, logits=x).mean, logits)
    assert gradcheck(lambda x: KSubset(k=2, logits=x).log_prob(z), logits)
    assert gradgradcheck(lambda x: KSubset(k=2, logits=x).log_prob(z), logits)
    assert gradcheck(lambda x: KSubset(k=2, logits=x).joint, logits)


def test_score_is_the_sample_less_the_mean():
    logits = torch.randn(6, dtype=F64, requires_grad=True)
    d = KSubset(k=3, logits=logits)
    z = d.sample()
    (grad,) = torch.autograd.grad(d.log_prob(z), logits)
    torch.testing.assert_close(grad, z - d.mean.detach())


def test_gradient_in_the_probabilities():
    """Through the calibration, along directions that keep the sum."""
    torch.manual_seed(2)
    probs = soft_topk(torch.randn(5, dtype=F64), 2).requires_grad_()
    z = torch.tensor([1.0, 0.0, 1.0, 0.0, 0.0], dtype=F64)
    way = torch.randn(5, dtype=F64)
    way = way - way.mean()
    (grad,) = torch.autograd.grad(KSubset(k=2, probs=probs).log_prob(z), probs)
    h = 1e-4
    up, down = (KSubset(k=2, probs=probs.detach() + sign * h * way).log_prob(z) for sign in (1, -1))
    torch.testing.assert_close(grad @ way, (up - down) / (2 * h), rtol=1e-6, atol=1e-8)


def test_one_is_the_one_hot_categorical():
    torch.manual_seed(3)
    logits, other = torch.randn(2, 4, 7, dtype=F64)
    d, ref = KSubset(k=1, logits=logits), OneHotCategorical(logits=logits)
    z = ref.sample()
    torch.testing.assert_close(d.log_prob(z), ref.log_prob(z))
    torch.testing.assert_close(d.mean, ref.mean)
    torch.testing.assert_close(d.variance, ref.variance)
    torch.testing.assert_close(d.entropy(), ref.entropy())
    torch.testing.assert_close(kl_divergence(d, KSubset(k=1, logits=other)), kl_divergence(ref, OneHotCategorical(logits=other)))
    by_probs = KSubset(k=1, probs=ref.probs)
    torch.testing.assert_close(by_probs.log_prob(z), ref.log_prob(z), rtol=1e-9, atol=1e-9)
    assert bool((d.mode == ref.mode).all())


@pytest.mark.parametrize("k", [1, 5, 499, 500, 999])
def test_tree_equals_the_recursion(k):
    torch.manual_seed(4)
    logits = torch.randn(2, 1000, dtype=F64) * 10
    torch.testing.assert_close(log_partition(logits, column(k)), log_partition_recursion(logits, k), rtol=1e-13, atol=1e-9)


def test_support_has_a_name():
    assert repr(KSubset(k=2, logits=torch.zeros(3)).support) == "k_hot(k=2)"


@pytest.mark.parametrize("scale", [0.0, 1.0, 10.0, 100.0])
@pytest.mark.parametrize("k", [1, 60, 150, 299])
def test_pairs_of_many_items(k, scale):
    """Rows of the joint probabilities sum to k times the mean, and given an item the others are a smaller subset."""
    logits = torch.randn(300, dtype=F64) * scale
    d = KSubset(k=k, logits=logits)
    torch.testing.assert_close(d.joint.sum(-1), k * d.mean, rtol=1e-11, atol=1e-13)
    i = int(logits.argsort()[-k])
    others = KSubset(k=k - 1, logits=logits.index_fill(0, torch.tensor(i), -torch.inf)).mean
    others = (d.mean[i] * others).index_put((torch.tensor(i),), d.mean[i])
    torch.testing.assert_close(d.joint[i], others, rtol=0, atol=300 * torch.finfo(F64).eps)  # a product of 300 factors


def test_samples_have_the_frequencies():
    torch.manual_seed(7)
    logits = torch.randn(6, dtype=F64) * 1.5
    masks, weights = brute(logits, 3)
    z = KSubset(k=3, logits=logits).sample((40_000,))
    counts = (z @ masks.T == 3).sum(0)
    assert stats.chisquare(counts.numpy(), (weights * 40_000).numpy()).pvalue > 1e-4


def test_rows_of_different_size():
    torch.manual_seed(8)
    logits, k = torch.randn(5, 9), torch.tensor([[0], [2], [5], [8], [9]])
    assert bool((draw_subsets(logits, k, 30).sum(-1) == k.squeeze(-1)).all())
    torch.testing.assert_close(marginals(logits, k).probs.sum(-1), k.squeeze(-1).double())


@pytest.mark.parametrize("scale", [0.1, 1.0, 5.0, 20.0, 60.0])
@pytest.mark.parametrize("n, k", [(2, 1), (5, 2), (8, 4), (8, 7), (30, 3), (100, 10)])
def test_calibration_converges(n, k, scale):
    torch.manual_seed(9)
    probs = soft_topk(torch.randn(3, n, dtype=F64) * scale, k)
    torch.testing.assert_close(marginals(calibrate(probs, column(k)), column(k)).probs, probs, rtol=0, atol=1e-13)


def test_shapes_expand_and_gradient_of_rsample():
    logits = torch.randn(3, 1, 5, requires_grad=True)
    d = KSubset(k=2, logits=logits)
    wide = d.expand((3, 4))
    assert (d.batch_shape, d.event_shape, wide.batch_shape) == ((3, 1), (5,), (3, 4))
    assert wide.sample((2,)).shape == (2, 3, 4, 5)
    assert wide.log_prob(wide.sample()).shape == (3, 4)
    assert bool(d.support.check(d.sample()).all()) and not bool(k_hot(2).check(torch.tensor([0.5, 0.5, 1.0])))
    z = d.rsample()
    (grad,) = torch.autograd.grad((z * torch.arange(5.0)).sum(), logits)
    (expected,) = torch.autograd.grad((d.mean * torch.arange(5.0)).sum(), logits)
    torch.testing.assert_close(grad, expected)
    same = [d.sample((4,), generator=torch.Generator().manual_seed(1)) for _ in range(2)]
    assert torch.equal(*same)


def test_function_transforms():
    torch.manual_seed(10)
    logits = torch.randn(3, 5, dtype=F64)
    d = KSubset(k=2, logits=logits)
    mean = lambda x: KSubset(k=2, logits=x).mean  # noqa: E731
    torch.testing.assert_close(torch.func.vmap(mean)(logits), d.mean)
    torch.testing.assert_close(torch.func.jacrev(mean)(logits[0]), d.covariance[0])
    torch.testing.assert_close(torch.func.hessian(lambda x: KSubset(k=2, logits=x).log_total)(logits[0]), d.covariance[0])
