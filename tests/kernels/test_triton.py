"""The Triton kernels, run by Triton's interpreter on CPU tensors. No speed is claimed."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CODE = """
import numpy as np, torch
from khot.kernels import cpu, triton
from khot.primitives.threshold.family import family_of
from khot.primitives.threshold.autograd import gradients
from tests.kernels.rows import counts, hostile, truth

triton.BLOCK = 16  # so that longer rows take several blocks
family, n = {family!r}, {n}
rows = hostile(n)
x = torch.stack(list(rows.values())).float()
for k in counts(n) if n > 7 else (0.0, 0.3, 2.0, n - 1.0, float(n)):
    for tau in (1.0, 0.3) if n > 7 else (0.6,):
        y, shift = triton.forward(x, k, tau, family)
        for name, row, mine in zip(rows, x.double().numpy(), y.double().numpy(), strict=True):
            np.testing.assert_allclose(mine, truth(row, k, tau, family), rtol=0, atol=1e-6, err_msg=f"{{name}}, k={{k}}, tau={{tau}}")
            total = min(k, (row > -np.inf).sum())
            assert not abs(mine.sum() - total) > 4 * np.finfo(np.float32).eps * max(1, total), (name, k, tau, mine.sum())
n = max(n, 20)
ordinary = torch.stack([hostile(n)[name] for name in ("normal", "few values", "sorted", "tied")]).float()
k, tau = torch.linspace(0.7, n - 0.7, 4).unsqueeze(-1), torch.linspace(0.5, 2, 4).unsqueeze(-1)
g = torch.randn(ordinary.shape, generator=torch.Generator().manual_seed(0))
for dtype, atol in ((torch.float32, 2e-5), (torch.bfloat16, 4e-2)):
    y, shift = triton.forward(ordinary.to(dtype), k, tau, family)
    torch.testing.assert_close(y.double().sum(-1, True), k.double(), rtol=0, atol=n * torch.finfo(dtype).eps)
    gx, gk, gtau = triton.backward(g.to(dtype), y, tau, family, ordinary.to(dtype), shift, grad_k=True)
    expected = gradients(g.to(dtype), y, ordinary.to(dtype), shift, tau, family_of(family, 0.0), True, True)
    for mine, theirs in zip((gx, gk, gtau), expected):
        torch.testing.assert_close(mine.double(), theirs.double(), rtol=2e-3, atol=atol)
"""

HARD = """
import torch, khot
from khot import kernels
from khot.kernels import triton
from tests.kernels.rows import hostile

triton.BLOCK = 16
n = {n}
x = torch.stack(list(hostile(n).values())).float()
torch.testing.assert_close(triton.mask(x, n // 3), khot.topk_mask(x, n // 3), rtol=0, atol=0, equal_nan=True)
each = torch.linspace(0, n, len(x)).round().unsqueeze(-1)  # from nothing to everything
narrow = x.bfloat16()
torch.testing.assert_close(triton.mask(narrow, each), khot.topk_mask(narrow, each.squeeze(-1)), rtol=0, atol=0, equal_nan=True)
some = x[[0, 5, 11, 12, 16]]  # normal, tied, -inf, +inf, nan
hard, soft, shift = triton.forward_and_mask(some, 0.45 * n, 0.7, "sigmoid")
torch.testing.assert_close(hard, khot.topk_mask(some, round(0.45 * n)), equal_nan=True)
alone, t = triton.forward(some, 0.45 * n, 0.7, "sigmoid")
assert torch.equal(soft.nan_to_num(-1), alone.nan_to_num(-1)) and torch.equal(shift, t)

# The straight-through rule on these kernels, as on a GPU: the value of the hard mask, the gradient of the soft one.
triton._takes_scores = lambda x, k=0: True
kernels._pairs["threshold"].insert(0, (lambda *_: True, triton.Native(triton.forward, triton.backward)))
from khot.primitives.threshold.autograd import solve_hard
from khot.relaxations.sigmoid import SIGMOID
leaf = torch.randn(3, n, generator=torch.Generator().manual_seed(0)).requires_grad_()
weight = torch.randn(3, n, generator=torch.Generator().manual_seed(1))
mine = solve_hard(leaf, n / 3, 0.7, SIGMOID)
(found,) = torch.autograd.grad((mine * weight).sum(), leaf)
with kernels.disabled():
    theirs = khot.soft_topk(leaf, n / 3, 0.7, hard=True)
    (expected,) = torch.autograd.grad((theirs * weight).sum(), leaf)
torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
"""


def interpret(code: str) -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1", "KHOT_KERNELS": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


def too_old() -> bool:
    return importlib.util.find_spec("triton") is not None and version("triton") < "3.3"


MISSING = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed; it has no build for this machine")
OLD = pytest.mark.skipif(too_old(), reason="the interpreter of triton before 3.3 cannot negate a boolean")


@MISSING
@OLD
@pytest.mark.parametrize("n", [7, pytest.param(40, marks=pytest.mark.slow)])
def test_hard_masks_in_the_interpreter(n: int) -> None:
    interpret(HARD.format(n=n))


@MISSING
@OLD
@pytest.mark.parametrize("family", ["sigmoid", "euclidean", "laplace", "gaussian"])
@pytest.mark.parametrize("n", [7, pytest.param(1, marks=pytest.mark.slow), pytest.param(40, marks=pytest.mark.slow)])
def test_in_the_interpreter(family: str, n: int) -> None:
    interpret(CODE.format(family=family, n=n))
