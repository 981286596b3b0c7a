"""Native selection against the reference: hostile rows, ties, every dtype, instruction set and layout, many threads, after a fork."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing import assert_close

import khot
from khot import kernels
from khot.kernels import cpu, library
from khot.primitives.select import ends, hard_mask, kth_largest, largest
from tests.kernels.rows import hostile

pytestmark = pytest.mark.skipif(not kernels.available(), reason="no native code is in use: not built, or KHOT_KERNELS=0")


def rows_of(n: int, dtype: torch.dtype) -> Tensor:
    g = torch.Generator().manual_seed(n)
    zeros = torch.where(torch.arange(n) % 2 == 0, 0.0, -0.0)
    denormal = torch.randn(n, generator=g, dtype=torch.float64) * 1e-40
    steps = torch.rand(n, generator=g).round()
    periodic = (torch.arange(n) % 7).double()
    return torch.stack([*hostile(n).values(), *(row.double() for row in (zeros, denormal, steps, periodic))]).to(dtype)


def everything(x: Tensor, k: Tensor | int) -> list[Tensor]:
    around = ends(x, k) if isinstance(k, int) and 0 < k < x.shape[-1] else ()
    return [hard_mask(x, k), kth_largest(x, k), *around, *([largest(x, k)] if isinstance(k, int) else [])]


def agree(x: Tensor, k: Tensor | int) -> None:
    found = everything(x, k)
    with kernels.disabled():
        expected = everything(x, k)
    for mine, theirs in zip(found, expected, strict=True):
        assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", list(cpu.DTYPES), ids=str)
@pytest.mark.parametrize("n", [1, 2, 3, 8, 31, 32, 33, 64, 100, 257, 1000, 2049, 4097, 20000])
def test_equals_the_reference(dtype: torch.dtype, n: int) -> None:
    x = rows_of(n, dtype)
    for k in sorted({0, 1, n // 16, n // 2, n - 1, n}):
        agree(x, k)
    agree(x, torch.linspace(0, n, len(x)).round().unsqueeze(-1))


def test_a_row_of_a_million() -> None:
    x = torch.randn(1, 1_000_000, generator=torch.Generator().manual_seed(0))
    for k in (1, 62_500, 999_999):
        agree(x, k)
    agree(x.sort().values, 500_000)
    agree(x.round(), 250_000)


def test_layouts_and_ends() -> None:
    base = torch.randn(6, 10, 4, generator=torch.Generator().manual_seed(0))
    for x in (base.transpose(0, 2), base[:, ::2], base[..., 1], base[:0], base.expand(3, 6, 10, 4), base.movedim(0, -1)):
        agree(x, 2)
    agree(torch.zeros(3, 0), 0)
    agree(torch.zeros(0, 5), 3)
    agree(torch.zeros(3, 0), torch.zeros(3, 1))
    with kernels.disabled():
        expected = khot.topk_mask(base, 3, dim=1)
    assert torch.equal(khot.topk_mask(base, 3, dim=1), expected)


def test_does_not_depend_on_threads() -> None:
    before = torch.get_num_threads()
    many, long = torch.randn(3000, 61), torch.randn(3, 70_001)
    try:
        results = []
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append([*everything(many, 9), *everything(long, 900)])
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_eight_python_threads() -> None:
    x = [torch.randn(40, 300 + 700 * i, generator=torch.Generator().manual_seed(i)) for i in range(8)]
    alone = [everything(row, 11) for row in x]

    def work(i: int) -> bool:
        return all(all(torch.equal(a, b) for a, b in zip(everything(x[i], 11), alone[i], strict=True)) for _ in range(10))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))


def test_after_a_fork() -> None:
    code = (
        "import os, torch, khot\n"
        "torch.set_num_threads(2)\n"
        "x = torch.randn(64, 4096); mask = khot.topk_mask(x, 9)\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    torch.set_num_threads(1)\n"
        "    os._exit(0 if torch.equal(khot.topk_mask(x, 9), mask) else 1)\n"
        "raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0


@pytest.mark.parametrize("isa", library.instruction_sets())
def test_each_instruction_set(isa: str) -> None:
    code = (
        "import sys, pytest; sys.exit(pytest.main(['-q', '-x', '-p', 'no:cacheprovider', 'tests/kernels/test_selection.py', '-k',"
        " 'reference and (31 or 100 or 4097) or threads']))"
    )
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | {"KHOT_ISA": isa}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


METHODS = ["sigmoid", "entmax", "softsort"]


@pytest.mark.parametrize("method", METHODS)
def test_hard_mask_keeps_every_derivative(method: str) -> None:
    x = torch.randn(3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    weights = torch.arange(6.0, dtype=torch.float64)

    def hard(row: Tensor) -> Tensor:
        return khot.soft_topk(row, 2, method=method, hard=True)

    def soft(row: Tensor) -> Tensor:
        return khot.soft_topk(row, 2, method=method)

    def second(mask) -> Tensor:
        leaf = x.clone().requires_grad_()
        (first,) = torch.autograd.grad((mask(leaf) * weights).sum(), leaf, create_graph=True)
        return torch.autograd.grad(first.square().sum(), leaf)[0]

    assert torch.equal(torch.vmap(hard)(x), hard(x))
    assert_close(second(hard), second(soft))
    value, tangent = torch.func.jvp(hard, (x,), (weights.expand(3, 6),))
    assert torch.equal(value, hard(x))
    assert_close(tangent, torch.func.jvp(soft, (x,), (weights.expand(3, 6),))[1])
    assert_close(torch.func.jacrev(hard)(x[0]), torch.func.jacrev(soft)(x[0]))
    leaf = x.clone().requires_grad_()
    basis = torch.eye(18, dtype=torch.float64).view(18, 3, 6)
    batched = torch.autograd.grad(hard(leaf), leaf, basis, is_grads_batched=True, retain_graph=False)[0]
    assert_close(batched, torch.autograd.grad(soft(leaf), leaf, basis, is_grads_batched=True)[0])


def test_hard_mask_under_compilers_and_modes() -> None:
    x = torch.randn(3, 7, requires_grad=True)

    def loss(x: Tensor) -> Tensor:
        return (khot.soft_topk(x, 2, hard=True) * torch.arange(7.0)).sum() + khot.topk_mask(x, 3).sum()

    expected = torch.autograd.grad(loss(x), x)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    assert_close(compiled(x), loss(x))
    assert_close(torch.autograd.grad(compiled(x), x), expected)
    with FakeTensorMode():
        assert khot.soft_topk(torch.empty(4, 9), 2, hard=True).shape == (4, 9)
        assert khot.gather_topk(torch.empty(4, 9, 3), torch.empty(4, 9), 2).values.shape == (4, 2, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(khot.soft_topk(x, 2, hard=True), khot.topk_mask(x, 2))


def test_the_hard_mask_is_written_once() -> None:
    kept: list[Tensor] = []
    x = torch.randn(4, 50, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        mask = khot.soft_topk(x, 5, hard=True)
    assert len(kept) == 1 and kept[0].data_ptr() != mask.data_ptr()  # the soft mask alone
