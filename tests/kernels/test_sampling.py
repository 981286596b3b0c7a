"""Native designs: the law of the draws against enumeration, exact sizes, seeds, threads, and what runs on the reference."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from scipy import stats
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import khot
from khot import kernels
from khot.kernels import library
from khot.kernels import sample as native
from khot.primitives.fixed_point import fixed_point
from tests.enumerations import enumerate_pivotal, enumerate_systematic, moments, over_orders
from tests.test_designs import HARD, PI, adversarial, hotelling

pytestmark = pytest.mark.skipif(not kernels.available(), reason="no native code is in use: not built, or KHOT_KERNELS=0")
DESIGNS = list(native.DESIGNS)


@pytest.mark.parametrize("pi", [PI, HARD], ids=["plain", "hard"])
def test_comb_at_every_start(pi: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """In fixed order all starts can be tried: the same masks as the reference, and so exact inclusion probabilities."""
    expected, lengths = enumerate_systematic(pi, monkeypatch)
    edges = torch.cat((torch.zeros(1, dtype=torch.float64), lengths.cumsum(0)))
    one = 1 << fixed_point(pi, pi.sum().round().long().view(1)).bits
    start = ((edges[1:] + edges[:-1]) / 2 * one).long().view(-1, 1)
    masks = native.draw("systematic", pi.expand(len(start), -1), float(pi.sum().round()), 0, shuffled=False, start=start)
    real = lengths > 1e-9  # two edges that are one but for rounding have nothing between them
    assert torch.equal(masks[real], expected[real])
    torch.testing.assert_close(moments(masks, lengths)[0], pi, rtol=0, atol=1e-10)


@pytest.mark.parametrize("design", DESIGNS)
@pytest.mark.parametrize("order", ["random", "fixed"])
def test_frequencies_of_subsets_match_the_enumeration(design: str, order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    enumerate_one = {"systematic": enumerate_systematic, "pivotal": enumerate_pivotal}[design]
    masks, weights = over_orders(enumerate_one, PI, monkeypatch) if order == "random" else enumerate_one(PI, monkeypatch)
    powers = 2.0 ** torch.arange(6, dtype=torch.float64)
    expected = torch.zeros(64, dtype=torch.float64).index_add_(0, (masks @ powers).long(), weights)
    draws = 200_000
    z = khot.sample(PI, design=design, order=order, num_samples=draws, generator=torch.Generator().manual_seed(3))
    counts = torch.bincount((z @ powers).long(), minlength=64)
    seen = expected > 1e-12
    assert counts[~seen].sum() == 0
    # A mask whose probability is off by a tenth of itself is told apart: noncentrality .01 * draws * p.
    assert stats.chisquare(counts[seen].numpy(), (expected[seen] / expected.sum() * draws).numpy()).pvalue > 1e-4


@pytest.mark.parametrize("design", DESIGNS)
@pytest.mark.parametrize("n", [300, 70_000])
def test_inclusion_probabilities_of_long_rows(design: str, n: int) -> None:
    """Hotelling's test on the sums over 12 groups of items; the longer row is shuffled in buckets."""
    pi = khot.soft_topk(torch.randn(n, dtype=torch.float64, generator=torch.Generator().manual_seed(n)), n // 5)
    draws = 4000 if n < 1000 else 150
    z = khot.sample(pi, design=design, num_samples=draws, generator=torch.Generator().manual_seed(4))
    assert bool((z.sum(-1) == n // 5).all())
    group = torch.arange(n) % 12
    sums = torch.zeros(draws, 12, dtype=torch.float64).index_add_(1, group, z)
    assert hotelling(sums, torch.zeros(12, dtype=torch.float64).index_add_(0, group, pi)) > 1e-4


@pytest.mark.parametrize("n", [4096, 70_000])
@pytest.mark.parametrize("away", [1, 2, 1024, 2048])
def test_random_order_keeps_no_pair_together(n: int, away: int) -> None:
    """Items of probability 1/2: in random order every pair is drawn together as often as any other, about a quarter of the time."""
    pi = torch.full((n,), 0.5, dtype=torch.float64)
    z = khot.sample(pi, num_samples=8, generator=torch.Generator().manual_seed(n + away))
    both = z[:, away:] * z[:, :-away]
    expected = (n / 2 - 1) / (2 * (n - 1))  # of two places out of n, in a comb that takes every second
    assert abs(both.mean() - expected) < 5 * (3 / 16 * 3 / both.numel()) ** 0.5  # neighbouring pairs share an item


@pytest.mark.parametrize("design", DESIGNS)
@pytest.mark.parametrize("order", ["random", "fixed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_size_zeros_and_ones(design: str, order: str, dtype: torch.dtype) -> None:
    odd = torch.tensor([1.0, 0.0, 1 - 2**-20, 2**-20 + 1e-6, 0.0, 1.0]).to(dtype)  # what lacks has to be spread over two items
    for pi in (*adversarial(dtype), odd, torch.full((5000,), 0.3, dtype=dtype), torch.full((68_000,), 1 / 17, dtype=dtype)):
        k = round(pi.double().sum().item())
        z = native.draw(design, pi.expand(100 if len(pi) < 10_000 else 10, -1), float(k), 1, shuffled=order == "random")
        assert bool((z.double().sum(-1) == k).all())
        assert bool((z[:, pi == 0] == 0).all()) and bool((z[:, pi == 1] == 1).all())
        assert bool(((z == 0) | (z == 1)).all())


def test_fractions_nan_and_missing_items() -> None:
    pi = khot.soft_topk(torch.randn(3, 50), torch.tensor([2.5, 7.0, 0.25]))
    pi[1, 4] = torch.nan
    z = native.draw("systematic", pi.expand(4000, 3, 50), torch.tensor([2.5, 7.0, 0.25]).view(3, 1).expand(4000, 3, 1), 9, shuffled=True)
    sizes = z.sum(-1)
    assert bool(z[:, 1].isnan().all()) and set(sizes[:, 0].tolist()) == {2.0, 3.0} and set(sizes[:, 2].tolist()) == {0.0, 1.0}
    assert abs(sizes[:, 0].mean() - 2.5) < 0.05 and abs(sizes[:, 2].mean() - 0.25) < 0.05
    few = torch.tensor([0.0, 1.0, 1.0, 0.0])  # k = 3, but two items take part
    assert native.draw("pivotal", few, 3.0, 1, shuffled=True).tolist() == few.tolist()


@pytest.mark.parametrize("design", DESIGNS)
def test_seeds_threads_and_rows(design: str) -> None:
    pi = khot.soft_topk(torch.randn(500, 60), 9)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append(khot.sample(pi, design=design, generator=torch.Generator().manual_seed(5)))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
    assert not torch.equal(results[0], khot.sample(pi, design=design, generator=torch.Generator().manual_seed(6)))
    torch.manual_seed(7)
    first = khot.sample(pi, design=design)
    torch.manual_seed(7)
    assert torch.equal(first, khot.sample(pi, design=design))
    assert not torch.equal(first, khot.sample(pi, design=design))
    same = khot.sample(pi[:1].expand(400, 60), design=design)
    assert len(same.unique(dim=0)) > 390  # draws of one row, told apart by their number

    with ThreadPoolExecutor(8) as pool:
        draws = list(pool.map(lambda _: khot.sample(pi, design=design, generator=torch.Generator().manual_seed(5)), range(8)))
    assert all(torch.equal(results[0], other) for other in draws)


@pytest.mark.parametrize("design", DESIGNS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n", [7, 300, 3000, 70000])
def test_a_draw_over_its_probabilities_is_the_same(design: str, dtype: torch.dtype, n: int) -> None:
    scores = torch.randn(3, n, dtype=dtype)
    scores[1, 2] = torch.nan
    for k in (3, n // 3 + 0.4, n - 2):
        for shuffled in (True, False):
            pi = khot.soft_topk(scores, k)
            apart = native.draw(design, pi.clone(), float(k), 5, shuffled=shuffled)
            over = native.draw(design, pi, float(k), 5, shuffled=shuffled, over=True)
            assert over is pi and torch.equal(over.nan_to_num(9), apart.nan_to_num(9))


@pytest.mark.parametrize("order", ["random", "fixed"])
def test_a_draw_is_the_same_with_and_without_a_gradient(order: str) -> None:
    scores = torch.randn(4, 2000)
    kept = scores.clone()

    def draw(x: Tensor) -> Tensor:
        return khot.sample_topk(x, 50, generator=torch.Generator().manual_seed(3), design_options={"order": order})

    without = draw(scores)
    assert torch.equal(scores, kept) and torch.equal(without, draw(scores.clone().requires_grad_()).detach())
    assert torch.equal(without.sum(-1), torch.full((4,), 50.0))


def test_each_instruction_set_draws_the_same() -> None:
    pi = (torch.arange(1024) % 16 / 32).double()  # sums and units are exact, whatever the order of the additions
    draws = []
    for isa in library.instruction_sets():
        with library.using(isa):
            draws += [
                khot.sample(pi, design=d, order=o, generator=torch.Generator().manual_seed(0)) for d in DESIGNS for o in ("random", "fixed")
            ]
    assert all(mask.sum() == 240 for mask in draws)
    assert all(torch.equal(mask, draws[i % 4]) for i, mask in enumerate(draws))


def test_transforms_compilers_and_modes_take_the_reference() -> None:
    x = torch.randn(4, 30)
    batched = torch.vmap(lambda row: khot.sample_topk(row, 5), randomness="different")(x)
    assert bool((batched.sum(-1) == 5).all())
    compiled = torch.compile(lambda x: khot.sample_topk(x, 5), fullgraph=True, backend="aot_eager")
    leaf = x.clone().requires_grad_()
    z = compiled(leaf)
    assert bool((z.sum(-1) == 5).all())
    (grad,) = torch.autograd.grad((z * torch.arange(30.0)).sum(), leaf)
    expected = torch.autograd.grad((khot.sample_topk(leaf, 5) * torch.arange(30.0)).sum(), leaf)[0]
    torch.testing.assert_close(grad, expected)
    with FakeTensorMode():
        assert khot.sample_topk(torch.empty(4, 9), 2).shape == (4, 9)
    _, tangent = torch.func.jvp(lambda x: khot.sample_topk(x, 5), (x,), (torch.ones_like(x),), strict=False)
    assert tangent.abs().max() < 1e-5
    with kernels.disabled():
        assert bool((khot.sample_topk(x, 5).sum(-1) == 5).all())
