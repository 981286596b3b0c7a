"""The protocol of the published experiment, and the search for each method's best setting."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

BATCH, WIDTH = 16, 32
PAIRS = [(2**i, 2**j) for i in range(4, 15) for j in range(1, 12) if j < i]
QUICK = [(n, k) for n, k in PAIRS if n in (16, 64, 256, 1024) and k in (2, 8, 32, 128, 512)]
PUBLISHED: dict[str, dict[str, Any]] = {"halving": {"mode": "power"}, "iterative": {"alpha": 2.0}}
SWEEP: dict[str, list[dict[str, Any]]] = {
    "halving": [{"boost": c} for c in (25.0, 50.0, 100.0, 200.0, 400.0, 800.0, 1600.0, 6400.0, 25600.0, 102400.0)],
    "iterative": [{"alpha": a} for a in (2.0, 1e2, 1e3, 1e4, 1e5, 1e6, 1e7, 1e8, 1e9, 1e10, 1e11, 1e12)],
}
TAUS = [{"tau": tau} for tau in (1.0, 0.1, 0.01, 1e-3, 1e-4)]
Select = Callable[[Tensor, Tensor], Tensor]


def nccs(true: Tensor, found: Tensor) -> Tensor:
    """Mean over the true rows of the best cosine among the found rows: ``(..., k, d), (..., k, d) -> (...)``."""
    unit = torch.nn.functional.normalize
    return (unit(true, dim=-1) @ unit(found, dim=-1).mT).amax(-1).mean(-1)


def draw(n: int, batch: int, seed: int) -> tuple[Tensor, Tensor]:
    """Items from U[-1, 1] and scores from U[0, 1]."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(batch, n, WIDTH, generator=generator) * 2 - 1
    return x, torch.rand(batch, n, generator=generator)


def true_rows(x: Tensor, v: Tensor, k: int) -> Tensor:
    index = v.topk(k).indices
    return x.gather(-2, index.unsqueeze(-1).expand(*index.shape, x.shape[-1]))


def selector(method: str, k: int, options: Mapping[str, Any]) -> Select:
    import khot

    return lambda x, v: khot.select_topk(x, v, k, method=method, **options)


def best_setting(method: str, n: int, k: int, settings: list[dict[str, Any]], seed: int) -> dict[str, Any]:
    """The setting with the best nCCS on a small batch of its own among those that still have a gradient.

    Without the second condition the sharpest would always win: every method is the hard top-k in the limit.
    """
    x, v = draw(n, max(1, min(BATCH, 2**22 // (n * k))), seed)
    true = true_rows(x, v, k)
    scored = []
    for options in settings:
        select = selector(method, k, options)
        if not scored or _alive(select, x[:4], v[:4]):
            scored.append((nccs(true, select(x, v)).mean().item(), len(scored), options))
    return max(scored)[2]


def _alive(select: Select, x: Tensor, v: Tensor, least: float = 1e-3) -> bool:
    """Whether a random linear function of the selection moves with the scores, on average over the items."""
    leaf = v.clone().requires_grad_()
    out = select(x, leaf)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(0))
    (gradient,) = torch.autograd.grad((out * weight).sum(), leaf)
    return gradient.norm(dim=-1).mean().item() > least
