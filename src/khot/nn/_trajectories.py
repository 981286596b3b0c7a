"""Samples of trajectories, cut into intervals; integration; what a model of the derivative says of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

Field = Callable[[Tensor], Tensor]


class Pieces(NamedTuple):
    """``N`` samples, each with the ``H`` that follow it; shorter trajectories end in intervals of length 0."""

    start: Tensor  # (N, d)
    steps: Tensor  # (N, H), the time to each next sample
    later: Tensor  # (N, H, d)
    there: Tensor  # (N, H) of bool


def check_trajectories(x: Tensor | Sequence[Tensor], t: Tensor | Sequence[Tensor], dim: int) -> list[tuple[Tensor, Tensor]]:
    """Pairs of values ``(n, d)`` and rising times ``(n,)``, in float64."""
    xs: list[Tensor] = [x] if isinstance(x, Tensor) else list(x)
    ts: list[Tensor] = [t] if isinstance(t, Tensor) else list(t)
    if len(xs) != len(ts) or not xs:
        raise ValueError(f"x and t must hold the same number of trajectories, at least one, got {len(xs)} and {len(ts)}")
    for values, times in zip(xs, ts, strict=True):
        if values.ndim != 2 or values.shape[1] != dim or times.shape != values.shape[:1] or len(times) < 3:
            raise ValueError(
                f"a trajectory must have values of shape (n, {dim}) and times of shape (n,) with n of at least 3,"
                f" got {tuple(values.shape)} and {tuple(times.shape)}"
            )
        if not bool(values.isfinite().all() & times.isfinite().all()):
            raise ValueError("x and t must be finite; drop the samples that are not")
        if not bool((times.diff() > 0).all()):
            raise ValueError("t must rise from sample to sample; sort the samples and drop repeated times")
    return [(values.detach().double(), times.detach().double()) for values, times in zip(xs, ts, strict=True)]


def slopes(x: Tensor, t: Tensor) -> Tensor:
    """Differences of second order at unequal times, ``(n, d)``."""
    return torch.gradient(x, spacing=(t,), dim=0, edge_order=2 if len(t) > 2 else 1)[0]


def pieces(trajectories: Sequence[tuple[Tensor, Tensor]], horizon: int) -> Pieces:
    found = [_pieces(x, t, horizon) for x, t in trajectories]
    return Pieces(*(torch.cat(parts) for parts in zip(*found, strict=True)))


def _pieces(x: Tensor, t: Tensor, horizon: int) -> Pieces:
    n = len(t) - 1
    place = torch.arange(n).unsqueeze(1) + torch.arange(1, horizon + 1)  # (n, H)
    there, place = place <= n, place.clamp(max=n)
    before = torch.cat([torch.arange(n).unsqueeze(1), place[:, :-1]], 1)
    return Pieces(x[:-1], t[place] - t[before], x[place], there)


def runge_kutta(field: Field, x: Tensor, step: Tensor, substeps: int) -> Tensor:
    """Fourth order over ``step`` ``(..., 1)``, in equal parts."""
    h = step / substeps
    for _ in range(substeps):
        a = field(x)
        b = field(x + h / 2 * a)
        c = field(x + h / 2 * b)
        x = x + h / 6 * (a + 2 * b + 2 * c + field(x + h * c))
    return x


def rollout_residual(field: Field, data: Pieces, substeps: int, bound: Tensor) -> Tensor:
    """The integrated states without the samples, ``(N, H, d)``.

    States are held within ``bound`` of 0: a wrong model may leave any range, and its error must stay a number.
    """

    def held(x: Tensor) -> Tensor:
        return field(x.clamp(-bound, bound))

    x, found = data.start, []
    for place in range(data.steps.shape[1]):
        x = runge_kutta(held, x, data.steps[:, place : place + 1], substeps).clamp(-bound, bound)
        found.append((x - data.later[:, place]) * data.there[:, place : place + 1])
    return torch.stack(found, 1)


def implicit_residual(field: Field, data: Pieces) -> Tensor:
    """Residuals of Hermite-Simpson collocation over each interval, ``(N, 1, d)``: nothing is integrated.

    The midpoint is that of the cubic through both samples with the model's slopes; the increment is Simpson's rule.
    """
    left, right, h = data.start, data.later[:, 0], data.steps[:, :1]
    a, c = field(left), field(right)
    b = field((left + right) / 2 + h / 8 * (a - c))
    return (right - left - h / 6 * (a + 4 * b + c)).unsqueeze(1)
