"""Derivatives of the k-subset distribution in every mode, and every way PyTorch has to transform or record a call."""

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import gradcheck, gradgradcheck
from torch.distributions import kl_divergence
from torch.testing import assert_close

import khot
from khot.distributions import KSubset
from khot.primitives.calibrate import calibrate
from khot.primitives.covariance import solve_covariance
from tests.laws import assert_derivative_in_every_mode

F64 = torch.float64
Z = torch.tensor([1.0, 0.0, 1.0, 0.0], dtype=F64)
OTHER = KSubset(k=2, logits=torch.tensor([0.3, -1.0, 0.2, 0.9], dtype=F64))
MIX = torch.tensor([0.7, -1.1, 0.4, 0.9], dtype=F64)
PARTS = {
    "mean": lambda d: d.mean,
    "variance": lambda d: d.variance,
    "joint": lambda d: d.joint,
    "covariance": lambda d: d.covariance,
    "entropy": lambda d: d.entropy(),
    "log_prob": lambda d: d.log_prob(Z),
    "kl": lambda d: kl_divergence(d, OTHER),
    "kl_other": lambda d: kl_divergence(OTHER, d),
}


def by_logits(x: torch.Tensor) -> KSubset:
    return KSubset(k=2, logits=x, validate_args=False)


def by_probs(x: torch.Tensor) -> KSubset:
    """Probabilities that sum to 2 whatever x is."""
    return KSubset(k=2, probs=khot.soft_topk(x, 2), validate_args=False)


def scores(*rows: int) -> torch.Tensor:
    return torch.randn(*rows, 4, dtype=F64, generator=torch.Generator().manual_seed(1)).requires_grad_()


@pytest.mark.parametrize("make", [by_logits, by_probs])
@pytest.mark.parametrize("part", PARTS)
def test_gradients_in_every_mode(part, make):
    def f(x):
        y = PARTS[part](make(x))
        return y @ MIX if y.ndim == 2 else y  # a mixture of the columns of a matrix, as gradcheck takes one output after the other

    everything = {"check_batched_grad": True, "check_forward_ad": True, "check_batched_forward_grad": True, "check_grad_dtypes": True}
    assert gradcheck(f, scores(), **everything)
    if make is by_logits or part in ("entropy", "log_prob"):  # the others are made of the same pieces
        assert gradgradcheck(f, scores())


def test_derivatives_of_third_order():
    x = scores()
    f = lambda x: torch.func.grad(lambda y: by_logits(y).entropy())(x)  # noqa: E731
    assert gradgradcheck(f, x)


@pytest.mark.parametrize("make", [by_logits, by_probs])
def test_vectorized_jacobian(make):
    f = lambda x: PARTS["covariance"](make(x))  # noqa: E731
    x = scores(2)
    plain = torch.autograd.functional.jacobian(f, x)
    torch.testing.assert_close(torch.autograd.functional.jacobian(f, x, vectorize=True), plain)
    torch.testing.assert_close(torch.autograd.functional.jacobian(f, x, vectorize=True, strategy="forward-mode"), plain)


@pytest.mark.parametrize("make", [by_logits, by_probs])
@pytest.mark.parametrize("part", PARTS)
def test_function_transforms_agree(part, make):
    f, x = lambda x: PARTS[part](make(x)), scores(3).detach()
    torch.testing.assert_close(torch.func.vmap(f)(x), f(x))
    torch.testing.assert_close(torch.func.jacfwd(f)(x[0]), torch.func.jacrev(f)(x[0]))


@pytest.mark.parametrize("make", [by_logits, by_probs])
@pytest.mark.parametrize("randomness", ["different", "same"])
def test_samples_inside_vmap(make, randomness):
    x = scores().detach().expand(200, 4)
    z = torch.func.vmap(lambda x: make(x).sample((2,)), randomness=randomness)(x)
    assert z.shape == (200, 2, 4) and bool((z.sum(-1) == 2).all())
    assert bool((z == z[:1]).all()) == (randomness == "same")


def test_samples_inside_vmap_have_the_frequencies():
    x = scores().detach()
    z = torch.func.vmap(lambda x: by_logits(x).sample(), randomness="different")(x.expand(20_000, 4))
    assert (z.mean(0) - by_logits(x).mean).abs().max() < 5 * 0.5 / 20_000**0.5


@pytest.mark.parametrize("make", [by_logits, by_probs])
def test_gradient_of_a_sample_by_torch_func(make):
    x, w = scores().detach(), torch.arange(4.0, dtype=F64)
    found = torch.func.grad(lambda x: make(x).rsample() @ w)(x)
    torch.testing.assert_close(found, torch.func.grad(lambda x: make(x).mean @ w)(x))


@pytest.mark.parametrize("make", [by_logits, by_probs])
def test_derivatives_of_a_sample_in_every_mode(make):
    """Those of the mean, which is held to gradcheck above."""
    x = scores().detach()
    truth = torch.autograd.functional.jacobian(lambda x: make(x).mean, x)
    assert_derivative_in_every_mode(lambda x: make(x).rsample(), x, truth)


@pytest.mark.parametrize("make", [by_logits, by_probs])
def test_compiles_as_one_graph(make):
    torch._dynamo.reset()

    def f(x):
        d = make(x)
        z = d.sample((3,))
        return d.log_prob(z).sum(0) + d.entropy() + d.joint.sum((-1, -2)), z, d.mean

    x = scores(2)
    value, z, mean = torch.compile(f, fullgraph=True, backend="aot_eager")(x)
    d = make(x)
    assert bool((z.sum(-1) == 2).all())
    plain = d.log_prob(z).sum(0) + d.entropy() + d.joint.sum((-1, -2))
    torch.testing.assert_close(value, plain)
    torch.testing.assert_close(mean, d.mean)
    for a, b in ((value, plain), (mean[..., 0], d.mean[..., 0])):
        torch.testing.assert_close(*(torch.autograd.grad(y.sum(), x, retain_graph=True)[0] for y in (a, b)))


@pytest.mark.parametrize("make", [by_logits, by_probs])
def test_fake_tensors(make):
    with FakeTensorMode():
        x = torch.empty(3, 4, dtype=F64)
        d = make(x)
        assert d.sample((2,)).shape == (2, 3, 4) and d.joint.shape == (3, 4, 4) and d.entropy().shape == (3,)
    with FakeTensorMode(), pytest.raises(ValueError, match="generator="):
        by_logits(torch.empty(3, 4)).sample(generator=torch.Generator())


def test_inference_mode():
    with torch.inference_mode():
        probs = khot.soft_topk(torch.randn(3, 30, dtype=F64) * 20, 5)
        d = KSubset(k=5, probs=probs)
        assert bool((d.sample((4,)).sum(-1) == 5).all()) and bool(d.entropy().isfinite().all())


def test_forward_mode_nests() -> None:
    """torch runs a Function's ``jvp`` with forward mode off, which made the outer derivative 0."""
    probs = torch.tensor([0.2, 0.7, 0.8, 0.5, 0.4, 0.4], dtype=torch.float64)
    weights = torch.tensor([1.0, -2.0, 0.5, 0.0, 1.5, -1.0], dtype=torch.float64)  # sums to 0: a common constant is not determined
    ways = torch.eye(6, dtype=torch.float64)[:, :3] - 1 / 6

    def by_probs(z: Tensor) -> Tensor:
        return calibrate(probs + ways @ z, 3) @ weights

    def by_logits(logits: Tensor) -> Tensor:
        return solve_covariance(logits, torch.tensor([3]), weights) @ weights

    for f, point in ((by_probs, torch.zeros(3, dtype=torch.float64)), (by_logits, torch.logit(probs))):
        truth = torch.func.jacrev(torch.func.jacrev(f))(point)
        assert_close(torch.func.jacfwd(torch.func.jacfwd(f))(point), truth, rtol=1e-9, atol=1e-9)
