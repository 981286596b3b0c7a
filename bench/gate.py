"""The gate: a method whose laws are red is not reported."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor


class LawsRed(RuntimeError):
    """A method breaks a law that its row promises."""


@functools.cache
def laws_green(method: str) -> None:
    """Hold a method to a compact part of its laws: shape, sum, bounds, the limit of small tau, the gradient.

    Only what the row of the registry promises is asked. The complete laws are in the tests; this keeps a benchmark from praising the
    speed of something wrong.

    Raises:
        LawsRed: with the law that is broken and by how much.
    """
    import khot

    row = khot.RELAXATIONS[method]
    for dtype in (torch.float32, torch.float64):
        for n, k in ((12, 5), (257, 16)):
            scores = torch.randn(3, n, dtype=dtype, generator=torch.Generator().manual_seed(n))
            mask = _run(row, scores, k)
            _shape(row, mask, scores)
            _sum(row, mask, k)
            _bounds(row, mask)
    _hard_limit(row)
    _gradient(row)


def _run(row: Any, scores: Tensor, k: int, tau: float = 1.0) -> Tensor:
    torch.manual_seed(0)  # for the methods that draw
    try:
        return row.topk(scores, k, tau)
    except Exception as error:
        raise LawsRed(f"{row.name} fails on a plain input of shape {tuple(scores.shape)}, k={k}: {error}") from error


def _require(holds: bool, row: Any, law: str, detail: str) -> None:
    if not holds:
        raise LawsRed(f"{row.name} breaks the law of {law}: {detail}")


def _shape(row: Any, mask: Tensor, scores: Tensor) -> None:
    same = mask.shape == scores.shape and mask.dtype == scores.dtype
    _require(same, row, "shape", f"{tuple(mask.shape)} {mask.dtype} for scores {tuple(scores.shape)} {scores.dtype}")
    _require(bool(mask.isfinite().all()), row, "shape", "not finite on normal scores")


def _sum(row: Any, mask: Tensor, k: int) -> None:
    if row.sums_to_k:
        off = (mask.double().sum(-1) - k).abs().max().item()
        room = 16 * torch.finfo(mask.dtype).eps * max(1, k)
        _require(off <= room, row, "sum", f"|sum - {k}| = {off:.2g} in {mask.dtype}, allowed {room:.2g}")


def _bounds(row: Any, mask: Tensor) -> None:
    if row.bounded:
        room = 16 * torch.finfo(mask.dtype).eps
        inside = mask.min().item() >= -room and mask.max().item() <= 1 + room
        _require(inside, row, "bounds", f"entries from {mask.min().item():.3g} to {mask.max().item():.3g}")


def _hard_limit(row: Any) -> None:
    import khot

    if row.hard_limit:
        scores = torch.randperm(12, generator=torch.Generator().manual_seed(1)).double()
        off = (_run(row, scores, 5, 1e-3) - khot.topk_mask(scores, 5)).abs().max().item()
        _require(off <= 1e-6, row, "the hard limit", f"distance {off:.2g} from the hard top-k at tau = 0.001")


def _gradient(row: Any) -> None:
    """Autograd against a central difference along a random direction; a method that draws only has to be finite."""
    generator = torch.Generator().manual_seed(2)
    scores, along, weight = (torch.randn(9, dtype=torch.float64, generator=generator) for _ in range(3))
    leaf = scores.clone().requires_grad_()
    (gradient,) = torch.autograd.grad((_run(row, leaf, 4) * weight).sum(), leaf)
    _require(bool(gradient.isfinite().all()), row, "gradient", "not finite on normal scores")
    if row.deterministic:
        step = 1e-6
        up, down = ((_run(row, scores + sign * step * along, 4) * weight).sum() for sign in (1, -1))
        slope, claimed = ((up - down) / (2 * step)).item(), (gradient * along).sum().item()
        close = abs(slope - claimed) <= 1e-5 + 1e-4 * abs(slope)
        _require(close, row, "gradient", f"autograd says {claimed:.6g}, the finite difference {slope:.6g}")
