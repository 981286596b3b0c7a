"""The native passes over a part of a row against plain PyTorch, and what they return where there is nothing to do."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from khot import kernels
from khot.kernels import shard
from khot.loss import threshold_family

pytestmark = pytest.mark.skipif(not shard._HAS, reason="the native library is not built, or from before these passes")

DTYPES = [torch.float32, torch.float64]


def draw(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 7), (2, 40_001), (1, 1), (2, 2, 64)])
@pytest.mark.parametrize("family", shard.FAMILIES)
def test_passes(family: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    law, x, rows = threshold_family(family, {}), draw(*shape, dtype=dtype), (*shape[:-1], 1)
    t, s, tau = draw(*rows, dtype=dtype, seed=1), draw(*rows, dtype=dtype, seed=2), draw(*rows, dtype=dtype, seed=3).abs() + 0.5
    eps = torch.finfo(dtype).eps
    u = (x.double() - t.double()) / tau.double() + s.double()
    y = law.f(u)
    slope = law.slope(y)
    close = {"rtol": 32 * eps, "atol": 32 * eps * shape[-1] ** 0.5}
    for found, expected in zip(shard.measure(x, t, s, tau, family), (y, slope), strict=True):
        assert_close(found, expected.sum(-1, keepdim=True), **close)
    mask, total = shard.mask(x, t, s, tau, family)
    assert mask.dtype == dtype
    assert_close(mask.double(), y, rtol=32 * eps, atol=4 * eps)
    # Four vectors of float32 are added before they go on in float64: a few roundings, which cancel over the row.
    assert_close(total, mask.sum(-1, keepdim=True, dtype=torch.float64), rtol=max(eps / 8, 1e-15) if shape[-1] > 100 else 2 * eps, atol=0)
    grad = draw(*shape, dtype=dtype, seed=4)
    weighted, slopes, out = shard.weigh(grad, mask, family)
    v = law.slope(mask.double())
    assert_close(slopes, v.sum(-1, keepdim=True), **close)
    assert_close(weighted, (v * grad).sum(-1, keepdim=True), **close)
    mean = weighted / slopes.clamp(min=1e-9)
    gradient = shard.gradient(grad, mask, mean, tau, family, out)
    assert_close(gradient.double(), v * (grad - mean) / tau, rtol=64 * eps, atol=64 * eps)


@pytest.mark.parametrize("dtype", DTYPES)
def test_moments(dtype: torch.dtype) -> None:
    x = draw(3, 50_000, dtype=dtype) + 2
    total, square = shard.moments(x)
    assert_close(total, x.double().sum(-1, keepdim=True), rtol=1e-3, atol=1)
    assert_close(square, x.double().square().sum(-1, keepdim=True), rtol=1e-3, atol=1)
    assert not shard.moments(torch.tensor([1.0, -torch.inf], dtype=dtype))[0].isfinite()


def test_nothing_to_do_and_what_is_not_taken() -> None:
    for shape in ((0, 5), (3, 0), (2, 0, 4)):
        x = torch.zeros(shape)
        column = torch.zeros(*shape[:-1], 1)
        assert all(not value.any() for value in shard.measure(x, column, None, 1.0, "sigmoid"))
        assert shard.mask(x, column, column, 1.0, "sigmoid")[0].shape == shape
    assert kernels.pick("shard", "entmax", torch.zeros(2)) is None
    assert kernels.pick("shard", "sigmoid", torch.zeros(2, dtype=torch.float16)) is None
    with kernels.disabled():
        assert kernels.pick("shard", "sigmoid", torch.zeros(2)) is None
    with pytest.raises(RuntimeError, match="has no memory"):
        shard._run(shard._MEASURE, "sigmoid", torch.zeros(2), tau=1.0)
