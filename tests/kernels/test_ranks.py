"""Native soft ranks, soft sorting and isotonic regression against the reference, over hostile rows."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import khot
from khot import kernels
from khot.primitives.isotonic import block_ids, find_blocks, isotonic_kl, isotonic_l2, merged_blocks
from tests.kernels.rows import hostile

pytestmark = pytest.mark.skipif(not kernels.available(), reason="the native kernel is not built: python -m khot.kernels.build")

INFINITE = {"excluded", "certain", "both", "all certain", "all excluded", "nan"}
KINDS = ["normal", "wide", "cauchy", "far", "huge", "tied", "few values", "outlier", "two clusters", "sorted", "tiny", *sorted(INFINITE)]
LAWS = [(verb, law) for verb in (khot.soft_rank, khot.soft_sort) for law in ("l2", "kl")]
laws = pytest.mark.parametrize(("verb", "law"), LAWS, ids=[f"{verb.__name__}-{law}" for verb, law in LAWS])


def results(verb, x: Tensor, tau: Tensor, law: str, **options: bool) -> list[Tensor]:
    x, tau = x.clone().requires_grad_(), tau.clone().requires_grad_()
    out = verb(x, tau, regularization=law, **options)
    weights = torch.linspace(1, -1, x.shape[-1], dtype=torch.float32).to(x.dtype)
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), (x, tau))]


@laws
@pytest.mark.parametrize("kind", KINDS)
def test_native_is_the_reference(verb, law: str, kind: str) -> None:
    if verb is khot.soft_sort and kind in INFINITE - {"nan"}:
        pytest.skip("sorted values are defined for finite ones")
    for n in (1, 2, 7, 64, 65, 300):
        x = torch.stack([hostile(n, seed)[kind] for seed in range(3)])
        tau = torch.tensor([0.1, 1.0, 30.0], dtype=torch.float64)
        for descending in (False, True):
            native = results(verb, x, tau, law, descending=descending)
            with kernels.disabled():
                reference = results(verb, x, tau, law, descending=descending)
            scale = 1 if verb is khot.soft_rank else float(x.nan_to_num().abs().max() + n / 0.1)
            eps = 1e3 * torch.finfo(torch.float64).eps
            assert_close(native[0], reference[0], rtol=n * eps, atol=n * eps * scale, equal_nan=True)
            assert_close(native[1:], reference[1:], rtol=1e-8, atol=n * eps * (scale if n * scale > 1e12 else 1), equal_nan=True)


@laws
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in INFINITE])
def test_single_precision_is_that_of_its_rounding(verb, law: str, kind: str) -> None:
    x = torch.stack([hostile(200, seed)[kind] for seed in range(2)])
    tau = torch.tensor([0.5, 2.0], dtype=torch.float64)
    exact = results(verb, x, tau, law)
    single = results(verb, x.float(), tau.float(), law)
    assert all(value.dtype is torch.float32 for value in single)
    eps = torch.finfo(torch.float32).eps
    for a, b in zip(single, exact, strict=True):
        assert_close(a.double(), b, rtol=4 * eps, atol=64 * eps * max(1.0, float(b.abs().max())))


@pytest.mark.parametrize("logs", [False, True])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in INFINITE and kind != "huge" and kind != "outlier"])
def test_isotonic_fits_are_the_reference(logs: bool, kind: str) -> None:
    for n in (1, 2, 9, 130):
        y, w = hostile(n)[kind], hostile(n, seed=1)["normal"]
        fit = (lambda: isotonic_kl(y, w)) if logs else (lambda: isotonic_l2(y, w.exp()))
        native = fit()
        with kernels.disabled():
            reference = fit()
        assert bool((native.diff() <= 0).all())
        assert_close(native, reference, rtol=1e-12, atol=1e-12 * float(1 + y.abs().max()))


def test_blocks_are_numbered_from_zero() -> None:
    y = torch.tensor([[4.0, 1.0, 3.0, 2.0], [1.0, 2.0, 3.0, 4.0]], dtype=torch.float64)
    expected = torch.tensor([[0, 1, 1, 1], [0, 0, 0, 0]])
    assert torch.equal(find_blocks(y, None, logs=False), expected)
    assert torch.equal(merged_blocks(y, None, logs=False), expected)
    assert torch.equal(block_ids(isotonic_l2(y)), expected)


def test_result_does_not_depend_on_threads() -> None:
    before, found = torch.get_num_threads(), []
    x, tau = torch.randn(40, 700, generator=torch.Generator().manual_seed(0)), torch.ones(40)
    try:
        for threads in (1, 3, 8):
            torch.set_num_threads(threads)
            found.append([value for verb, law in LAWS for value in results(verb, x, tau, law)])
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


def test_eight_python_threads() -> None:
    x = torch.randn(8, 500, generator=torch.Generator().manual_seed(0))
    alone = [khot.soft_rank(row) for row in x]
    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(lambda i: all(torch.equal(khot.soft_rank(x[i]), alone[i]) for _ in range(20)), range(8)))


def _child(x: Tensor, expected: Tensor, found) -> None:
    torch.set_num_threads(1)
    found.value = torch.equal(khot.soft_rank(x), expected)


def test_fork_after_use() -> None:
    x = torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
    expected = khot.soft_rank(x)
    context = multiprocessing.get_context("fork")
    found = context.Value("b", False)
    child = context.Process(target=_child, args=(x, expected, found))
    child.start()
    child.join(60)
    assert found.value
