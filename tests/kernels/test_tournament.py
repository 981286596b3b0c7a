"""The tournament and the row sort: against plain Python, the reference in PyTorch, and each other."""

from __future__ import annotations

import contextlib
import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.testing import assert_close

import khot
from khot import kernels
from khot.kernels import tournament as native
from khot.kernels.order import order
from khot.primitives.collect import collect
from khot.primitives.order import descending_order, sort_descending
from khot.primitives.tournament import Rules, num_rounds, play

SIZES = [(1, 1), (2, 1), (3, 1), (5, 2), (6, 6), (7, 3), (9, 4), (16, 2), (31, 1), (33, 5), (64, 8), (100, 13), (257, 16), (1000, 7)]
BUILT = pytest.mark.skipif(not kernels.available(), reason="the native kernel is not built: python -m khot.kernels.build")
PATHS = [pytest.param(True, marks=BUILT, id="native"), pytest.param(False, id="reference")]


def path(on: bool):
    return contextlib.nullcontext() if on else kernels.disabled()


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def slow_weights(scores: list[float], k: int, tau: float, rules: Rules) -> list[dict[int, float]]:
    """The paper's algorithm on lists: each entrant is a score and what it is made of."""
    rounds = num_rounds(len(scores), k)
    field = [(value, {i: 1.0}) for i, value in enumerate(scores)]
    field += [(-math.inf, {})] * (k * 2**rounds - len(scores))
    for _ in range(rounds):
        field.sort(key=lambda entrant: -entrant[0])
        field = [_meet(field[i], field[-1 - i], tau, rules) for i in range(len(field) // 2)]
    return [made_of for _, made_of in (field if rounds else sorted(field, key=lambda entrant: -entrant[0]))]


def _meet(first: tuple[float, dict[int, float]], second: tuple[float, dict[int, float]], tau: float, rules: Rules):
    (a, of_a), (b, of_b) = first, second
    if a == b and math.isinf(a):
        share_a = share_b = 0.5 if a > 0 else 0.0
    elif math.isinf(a) or math.isinf(b):
        share_a, share_b = 1.0, 0.0
    else:
        lead = 20 ** (a / tau) - 20 ** (b / tau) if rules.power else (a - b) * rules.boost / tau
        share_a = 1 / (1 + math.exp(-lead))
        share_b = math.exp(-lead) * share_a
    value = a if math.isinf(a) or math.isinf(b) else share_a * a + share_b * b
    return value, {i: share_a * w for i, w in of_a.items()} | {i: share_b * w for i, w in of_b.items()}


def slow_matrix(scores: Tensor, k: int, tau: float, rules: Rules) -> Tensor:
    out = torch.zeros(k, len(scores), dtype=torch.float64)
    for row, made_of in zip(out, slow_weights(scores.tolist(), k, tau, rules), strict=True):
        for item, weight in made_of.items():
            row[item] = weight if scores[item] > -torch.inf else 0.0
    return out


def matrix(scores: Tensor, k: int, tau: float, rules: Rules) -> Tensor:
    items, weight = play(scores, k, tau, rules)
    return torch.zeros(*scores.shape[:-1], k, scores.shape[-1], dtype=scores.dtype).scatter_add(-1, items, weight)


@pytest.mark.parametrize("on", PATHS)
@pytest.mark.parametrize(("n", "k"), SIZES)
@pytest.mark.parametrize("rules", [Rules(1.0, False), Rules(50.0, False), Rules(50.0, True)], ids=str)
def test_plays_the_published_tournament(on: bool, n: int, k: int, rules: Rules) -> None:
    scores = draw(3, n)
    slow = torch.stack([slow_matrix(row, k, 0.7, rules) for row in scores])
    with path(on):
        assert_close(matrix(scores, k, 0.7, rules), slow, rtol=1e-9, atol=1e-12)


@BUILT
@pytest.mark.parametrize("rules", [Rules(50.0, False), Rules(50.0, True)], ids=str)
@pytest.mark.parametrize(("n", "k"), [(16, 8), (100, 13), (1000, 7), (5000, 300)])
def test_float32_is_float64_rounded(n: int, k: int, rules: Rules) -> None:
    """Scores on a grid so coarse that rounding cannot change who meets whom in the first round, and one round only."""
    k = max(k, (n + 1) // 2)
    scores = draw(4, n).argsort(-1).float() / 1024
    fine = matrix(scores.double(), k, 1.0, rules)
    eps = torch.finfo(torch.float32).eps
    assert_close(matrix(scores, k, 1.0, rules).double(), fine, rtol=200 * eps, atol=200 * eps)


@BUILT
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("n", "k"), SIZES)
@pytest.mark.parametrize("power", [False, True])
def test_weights_and_gradients_are_those_of_the_formula(dtype: torch.dtype, n: int, k: int, power: bool) -> None:
    """On the leaves that the native code found, so that nothing hangs on how a near tie was rounded."""
    from khot.primitives.tournament import _weigh, gradients

    rules = Rules(5.0, power)
    scores, tau = draw(3, n, dtype=dtype).requires_grad_(), torch.tensor([[0.7], [1.0], [1.3]], dtype=dtype, requires_grad=True)
    leaves, weight = native.play(scores, k, num_rounds(n, k), tau, *rules)
    assert torch.equal(leaves.flatten(-2).sort(-1).values.unique_consecutive(dim=-1), torch.arange(n).expand(3, n)) or n < leaves[0].numel()
    size = 1e-5 if dtype == torch.float32 else 1e-13
    assert_close(weight, _weigh(scores, leaves, tau, rules).detach(), rtol=20 * size, atol=size)
    grad = draw(*weight.shape, seed=1, dtype=dtype) - 0.5
    mine = native.play_backward(grad, scores, leaves, tau, *rules)
    theirs = gradients(grad, scores, leaves, tau, rules, (True, True))
    assert_close(mine[0], theirs[0], rtol=200 * size, atol=20 * size)
    assert_close(mine[1].to(dtype), theirs[1], rtol=200 * size, atol=200 * size)


@pytest.mark.parametrize("on", PATHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_infinite_scores_nan_and_ties(on: bool, dtype: torch.dtype) -> None:
    inf = torch.inf
    rows = [[inf, 1, -inf, 0, 2, 1, 1], [-inf, -inf, -inf, 3, -inf, 2, -inf], [inf, inf, inf, 0, 1, inf, -inf], [1, 1, 1, 1, 1, 1, 1]]
    scores = torch.tensor(rows, dtype=dtype).requires_grad_()
    for k in range(1, 8):
        slow = torch.stack([slow_matrix(row, k, 1.0, Rules(50.0, False)) for row in scores.detach().double()])
        with path(on):
            out = khot.halving_matrix(scores, k)
            (grad,) = torch.autograd.grad((out * draw(*out.shape, dtype=dtype)).sum(), scores)
        assert_close(out.detach().double(), slow, rtol=1e-5, atol=1e-6)
        assert bool(grad.isfinite().all())
    broken = torch.tensor([[1.0, torch.nan, 2.0, 0.0], [1.0, 3.0, 2.0, 0.0]], dtype=dtype)
    with path(on):
        out = khot.halving_matrix(broken, 2)
    assert bool(out[0].isnan().any(-1).all()) and bool(out[1].isfinite().all())


@pytest.mark.parametrize("on", PATHS)
def test_nothing_everything_and_no_rows(on: bool) -> None:
    with path(on):
        assert khot.halving_matrix(draw(2, 5), 0).shape == (2, 0, 5)
        assert khot.halving_matrix(draw(0, 5), 2).shape == (0, 2, 5)
        assert khot.halving_matrix(draw(2, 0, 5), 2).shape == (2, 0, 2, 5)
        assert khot.soft_topk(draw(3, 0), 0, method="halving").shape == (3, 0)
        assert_close(khot.halving_matrix(draw(1), 1), torch.ones(1, 1, dtype=torch.float64))
        assert_close(khot.soft_topk(draw(4, 6), 6, method="halving"), torch.ones(4, 6, dtype=torch.float64))


@BUILT
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n", [0, 1, 2, 31, 32, 33, 64, 65, 100, 128, 129, 700, 2047, 2048, 5000])
def test_order_is_that_of_a_stable_sort(dtype: torch.dtype, n: int) -> None:
    rows = torch.stack([draw(n), draw(n, seed=1).mul(7).round() - 3, torch.linspace(1, 0, n).double(), torch.linspace(0, 1, n).double()])
    values = torch.cat([rows, -rows, 1e30 * (rows - 0.5)]).to(dtype)
    if n > 30:
        values[0, 3], values[0, 5:9], values[1, ::3], values[2, 7] = torch.inf, -torch.inf, -0.0, torch.nan
        values[5, 1::4], values[6, 3::5] = torch.nan, -torch.nan
    expected = values.sort(dim=-1, descending=True, stable=True)
    assert torch.equal(order(values), expected.indices)
    assert torch.equal(descending_order(values), expected.indices)
    assert_close(sort_descending(values)[0], expected.values, equal_nan=True, rtol=0, atol=0)


@BUILT
def test_later_rounds_are_sorted_whatever_the_duels_leave() -> None:
    """A weak boost jumbles the scores that go on, so that hardly anything is in order any more."""
    scores = draw(2, 4000)
    with kernels.disabled():
        slow = matrix(scores, 5, 1.0, Rules(0.01, False))
    assert_close(matrix(scores, 5, 1.0, Rules(0.01, False)), slow)


@BUILT
@pytest.mark.parametrize("d", [0, 1, 7, 31, 32, 33, 70])
def test_bags(d: int) -> None:
    x, weight = draw(2, 20, d).requires_grad_(), draw(2, 5, 3, seed=1).requires_grad_()
    items = torch.stack([torch.randperm(20, generator=torch.Generator().manual_seed(i))[:15] for i in range(2)]).view(2, 5, 3)
    items[..., 1] = items[..., 0]
    grad = draw(2, 5, d, seed=2)
    mine = [collect(x, weight, items)]
    mine += torch.autograd.grad(mine[0], (x, weight), grad)
    dense = torch.zeros(2, 5, 20, dtype=torch.float64).scatter_add(-1, items, weight) @ x
    assert_close(mine, [dense, *torch.autograd.grad(dense, (x, weight), grad)])


@BUILT
def test_result_does_not_depend_on_threads() -> None:
    before, results = torch.get_num_threads(), []
    x, scores = draw(6, 3000, 8, dtype=torch.float32).requires_grad_(), draw(6, 3000, seed=1, dtype=torch.float32).requires_grad_()
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            out = khot.select_topk(x, scores, 70)
            results.append([out, *torch.autograd.grad(out.square().sum(), (x, scores))])
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


@BUILT
def test_eight_python_threads() -> None:
    x, scores = draw(8, 500, 4), draw(8, 500, seed=1)
    alone = [khot.select_topk(x[i], scores[i], 9) for i in range(8)]

    def work(i: int) -> bool:
        return all(torch.equal(khot.select_topk(x[i], scores[i], 9), alone[i]) for _ in range(40))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))


@BUILT
def test_odd_layouts_and_second_derivatives() -> None:
    base = draw(6, 10, 4)
    for scores in (base.transpose(0, 2), base[:, ::2], base[..., 1], base.expand(3, 6, 10, 4)):
        with kernels.disabled():
            expected = khot.halving_matrix(scores, 2)
        assert_close(khot.halving_matrix(scores, 2), expected)
    tau = torch.tensor([0.7, 1.2], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda s, t: khot.halving_matrix(s, 3, t, boost=3.0), (draw(2, 7, seed=1).requires_grad_(), tau))


def test_saturated_duels_keep_the_digits_of_their_gradient() -> None:
    """With leads between 10 and 17 the winner's share is 1 to a few roundings, and its slope must not be computed from it."""
    scores = torch.tensor([0.9, 0.6, 0.33, 0.1], dtype=torch.float32)
    grads = []
    with kernels.disabled():
        for dtype in (torch.float32, torch.float64):
            x = scores.to(dtype).requires_grad_()
            mask = khot.soft_topk(x, 2, method="halving")
            grads.append(torch.autograd.grad(mask[2:].sum(), x)[0].double())
    assert_close(grads[0], grads[1], rtol=1e-4, atol=0)


def test_batched_gradients() -> None:
    x, scores = draw(6, 2), draw(6, seed=1)
    for body in (lambda s: khot.soft_topk(s, 2, method="halving", boost=3.0), lambda s: khot.select_topk(x, s, 2, boost=3.0)):
        one, many = (torch.autograd.functional.jacobian(body, scores, vectorize=vectorize) for vectorize in (False, True))
        assert_close(many, one)


def test_a_dual_gradient_keeps_its_tangent() -> None:
    x, scores, tangent = draw(6, 2), draw(6, seed=1).requires_grad_(), draw(2, 2, seed=2)

    def pulled(grad: Tensor) -> Tensor:
        return torch.autograd.grad(khot.select_topk(x, scores, 2, boost=3.0), scores, grad)[0]

    out = khot.select_topk(x, scores, 2, boost=3.0)
    with forward_ad.dual_level():
        (found,) = torch.autograd.grad(out, scores, forward_ad.make_dual(draw(2, 2), tangent))
        moved = forward_ad.unpack_dual(found).tangent
    assert moved is not None
    assert_close(moved, pulled(tangent))
