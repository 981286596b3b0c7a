"""Every estimator in every mode of differentiation and under every transform, or a False in its row and an error that says so."""

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

import khot
from khot import kernels
from khot.estimators import ESTIMATORS

F64 = torch.float64
ROWS = list(ESTIMATORS.values())
W = torch.tensor([0.5, -1.0, 2.0, 0.3, 1.0], dtype=F64)


def that(flag: str, value: bool = True) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("row", [row for row in ROWS if getattr(row, flag) is value], ids=str)


def objective(z: torch.Tensor) -> torch.Tensor:
    return ((z * W.to(z.dtype)).sum(-1) - 1) ** 2


def loss(row, x, **options):
    torch.manual_seed(0)
    return row(objective, x, 2, 0.8, num_samples=3, **options)


def scores(*rows: int) -> torch.Tensor:
    return torch.randn(*rows, 5, dtype=F64, generator=torch.Generator().manual_seed(2))


def gradient(row, x):
    """What the estimator calls its gradient; the derivative of its own value only where that is smooth."""
    x = x.detach().requires_grad_()
    return torch.autograd.grad(loss(row, x).sum(), x, create_graph=row.double_backward)[0]


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_gradients_in_batches(row):
    x = scores().requires_grad_()
    y = loss(row, x)
    ways = torch.tensor([1.0, -2.0], dtype=F64)
    (batched,) = torch.autograd.grad(y, x, ways, is_grads_batched=True, retain_graph=True)
    torch.testing.assert_close(batched, torch.stack([torch.autograd.grad(y, x, way, retain_graph=True)[0] for way in ways]))
    assert batched.dtype == x.dtype


@that("forward_mode")
def test_forward_mode_agrees_with_reverse_mode(row):
    x, way = scores(), scores().flip(0)
    with kernels.disabled():  # native code draws other samples from the same seed, and transforms do not run it
        _, moved = torch.func.jvp(lambda x: loss(row, x), (x,), (way,))
        torch.testing.assert_close(moved, gradient(row, x).detach() @ way)


@that("forward_mode")
def test_forward_mode_in_batches(row):
    x, ways = scores(), torch.stack([scores().flip(0), scores() - 1])
    push = lambda way: torch.func.jvp(lambda x: loss(row, x), (x,), (way,))[1]  # noqa: E731
    torch.testing.assert_close(torch.vmap(push, randomness="same")(ways), torch.stack([push(way) for way in ways]))


@that("forward_mode", False)
def test_forward_mode_is_refused(row):
    with pytest.raises(RuntimeError, match=r"(?i)forward|jvp"):
        torch.func.jvp(lambda x: loss(row, x), (scores(),), (scores(),))


def test_relaxed_gumbel_is_the_derivative_of_its_value():
    row, x = ESTIMATORS["relaxed_gumbel"], scores().requires_grad_()
    modes = {"check_batched_grad": True, "check_forward_ad": True, "check_grad_dtypes": True}
    assert gradcheck(lambda x: loss(row, x), x, **modes, check_batched_forward_grad=False)  # that one draws inside its own vmap
    assert gradgradcheck(lambda x: loss(row, x), x)


@that("double_backward")
def test_second_derivatives(row):
    """Of an objective that is linear in the mask: then the gradient is a function of the scores alone, given the sample."""
    x = scores()

    def first(x):
        torch.manual_seed(0)
        value = row(lambda z: (z * W).sum(-1), x, 2, 0.8, num_samples=3)
        return torch.autograd.grad(value, x, create_graph=True)[0]

    h, way = 1e-5, scores().flip(0)
    up, down = (first((x + s * h * way).requires_grad_()) for s in (1, -1))
    point = x.clone().requires_grad_()
    (second,) = torch.autograd.grad(first(point) @ way, point)
    torch.testing.assert_close(second, (up - down) / (2 * h), rtol=1e-6, atol=1e-8)


@that("double_backward", False)
def test_second_derivatives_are_refused(row):
    x = scores().requires_grad_()
    (first,) = torch.autograd.grad(loss(row, x), x, create_graph=True)
    with pytest.raises(RuntimeError, match=f"{row.name} has no second derivative"):
        torch.autograd.grad((first + x).sum(), x)
    with pytest.raises(RuntimeError, match=f"{row.name} has no second derivative"):
        torch.func.jacrev(torch.func.grad(lambda x: loss(row, x)))(scores())


@that("vmaps")
@pytest.mark.parametrize("randomness", ["different", "same"])
def test_vmap_over_the_gradient(row, randomness):
    x = scores().expand(40, 5)
    f = lambda x: row(objective, x, 2, 0.8, num_samples=3)  # noqa: E731
    value, grads = torch.vmap(lambda x: (f(x), torch.func.grad(f)(x)), randomness=randomness)(x)
    assert value.shape == (40,) and grads.shape == (40, 5) and bool(grads.isfinite().all())
    assert bool((value == value[0]).all()) == (randomness == "same")


@that("compiles")
def test_compiles_as_one_graph(row):
    torch._dynamo.reset()
    x = scores(2).requires_grad_()
    f = torch.compile(lambda x: row.estimate(objective, x, 2, 0.8, num_samples=3), fullgraph=True, backend="aot_eager")
    (grad,) = torch.autograd.grad(f(x).sum(), x)
    assert grad.shape == x.shape and bool(grad.isfinite().all()) and bool((grad != 0).any())


@that("compiles", False)
def test_compilation_is_refused(row):
    torch._dynamo.reset()
    with pytest.raises(Exception, match=r"does not compile|Observed exception"):  # torch 2.6 says the latter
        torch.compile(lambda x: row.estimate(objective, x, 2), fullgraph=True, backend="eager")(scores())


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_any_dim(row):
    x = scores(3)
    by_rows, by_columns = x.clone().requires_grad_(), x.T.clone().requires_grad_()
    torch.manual_seed(0)
    a = row(objective, by_rows, 2, num_samples=4)
    torch.manual_seed(0)
    b = row(lambda z: objective(z.mT), by_columns, 2, num_samples=4, dim=0)
    torch.testing.assert_close(a, b)
    (ga,) = torch.autograd.grad(a.sum(), by_rows)
    (gb,) = torch.autograd.grad(b.sum(), by_columns)
    torch.testing.assert_close(ga, gb.T)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_half_precision_counts_beyond_its_digits(row, dtype):
    """257 is no number of bfloat16, and sums of 2 ** 11 ones are none of float16."""
    x = torch.randn(3000, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()
    seen = []

    def count(z):
        seen.append(z)
        return z.float().sum(-1)

    y = row(count, x, 2101, num_samples=2)
    assert seen[0].dtype == dtype and y.dtype == torch.float32
    assert abs(y.item() - 2101) < (2.0 if row.name == "relaxed_gumbel" else 1e-3)  # soft masks are rounded entry by entry
    (grad,) = torch.autograd.grad(y, x)
    assert grad.dtype == dtype and bool(grad.isfinite().all())


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_the_door(row):
    x = torch.randn(4)
    assert row(lambda z: z.sum(-1), x, 2.0, num_samples=2).item() == pytest.approx(2.0)
    for call, error, match in [
        (lambda: row(objective, x, 5), ValueError, "between 0 and n=4"),
        (lambda: row(objective, x, 2, -1.0), ValueError, "tau must be positive"),
        (lambda: row(objective, x.long(), 2), TypeError, "floating dtype"),
        (lambda: row(objective, x, 2, dim=1), ValueError, "dim must be between"),
        (lambda: row(objective, x, 2, num_samples=0), ValueError, "num_samples must be at least"),
        (lambda: row(objective, x, 2, sharpness=1), TypeError, f"estimator '{row.name}' has no option 'sharpness'"),
    ]:
        with pytest.raises(error, match=match):
            call()


def test_relaxed_gumbel_is_the_sequential_relaxation():
    x = scores()
    seen = []
    generator = torch.Generator().manual_seed(3)
    ESTIMATORS["relaxed_gumbel"](lambda z: (seen.append(z), z.sum(-1))[1], x, 2, generator=generator, softness=0.3)
    generator = torch.Generator().manual_seed(3)
    drawn = khot.soft_topk(x.expand(1, 5), 2, 0.3, method="sequential", noise=True, generator=generator)
    torch.testing.assert_close(seen[0], drawn)
