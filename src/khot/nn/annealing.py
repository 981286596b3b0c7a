"""One schedule for every layer, and temperatures in units of the scores' spread."""

from __future__ import annotations

from collections.abc import Callable
from numbers import Integral
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from khot._tensors import Number, readable, work_dtype
from khot.checks import find
from khot.distributed.exchange import group_spread
from khot.registry import DESIGNS, RELAXATIONS
from khot.sampling import sample_topk
from khot.soft import soft_topk

_LEAST, _MOST = 1e-15, 1e15  # between these the squares of float32 deviations keep their digits

Method: TypeAlias = str | Callable[..., Tensor]
Range: TypeAlias = float | tuple[float, float]  # a constant, or where a schedule starts and where it ends


class Annealed(nn.Module):
    """Base of the layers that follow a schedule: what they do is a function of ``progress`` alone.

    The temperature is a buffer, so that a compiled layer is not compiled again when it changes, but no part of the ``state_dict``:
    a training loop that goes on from a checkpoint sets it in its first step.

    Args:
        tau: temperature, or where it starts and ends, in units of the scores' spread.
        until: the share of the training after which it stays at its end; the layer is ``settled`` then.
    """

    tau: Tensor

    def __init__(self, tau: Range, until: float) -> None:
        super().__init__()
        self.ends, self.until = check_range(tau, "tau"), check_share(until, "until")
        self.progress, self.settled = 0.0, False
        self.register_buffer("tau", torch.tensor(self.ends[0], dtype=torch.float32), persistent=False)

    def anneal(self, progress: float) -> None:
        """Set how much of the training is done, from 0 to 1."""
        self.progress = check_progress(progress)
        self.settled = self.progress >= self.until
        self.tau.fill_(geometric(self.ends, self.progress / self.until))


def anneal(model: nn.Module, progress: float) -> None:
    """Tell every khot layer of a model how much of the training is done.

    Temperature, ``k`` and density of each layer follow from it. Call it before each step; in evaluation every layer is hard and exact
    whatever the progress.

    Args:
        model: any module; layers of other libraries are left alone.
        progress: from 0 (soft, everything is explored) to 1 (hard, the choice is fixed).

    Example:
        >>> model = torch.nn.Sequential(khot.nn.FeatureSelector(64, k=8), torch.nn.Linear(64, 10))
        >>> anneal(model, 0.25)
        >>> model[0].progress
        0.25
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    check_progress(progress)
    for module in model.modules():
        if isinstance(module, Annealed):
            module.anneal(progress)


def check_progress(progress: float) -> float:
    if not 0 <= progress <= 1:
        raise ValueError(f"progress must be between 0 and 1, got {progress}; it is step / steps")
    return float(progress)


def check_range(value: Range, name: str) -> tuple[float, float]:
    """A constant or a pair as a pair of positive numbers."""
    pair = tuple(value) if isinstance(value, (tuple, list)) else (value, value)
    if len(pair) != 2 or not all(isinstance(end, (int, float)) and end > 0 for end in pair):
        raise ValueError(f"{name} must be a positive number or a pair (start, end) of them, got {value!r}")
    return float(pair[0]), float(pair[1])


def check_share(value: float, name: str) -> float:
    if not 0 < value <= 1:
        raise ValueError(f"{name} must lie in (0, 1], got {value}")
    return float(value)


def check_count(value: int, name: str, most: int | None = None, of: str = "") -> int:
    """A whole number from 1 on, up to ``most`` where there is one, which is called ``of``."""
    if not isinstance(value, Integral) or isinstance(value, bool) or value < 1 or most is not None and value > most:
        where = "from 1 on" if most is None else f"between 1 and {of}={most}"
        raise ValueError(f"{name} must be a whole number {where}, got {value!r}")
    return int(value)


def check_width(x: Tensor, width: int) -> None:
    if x.ndim == 0 or x.shape[-1] != width:
        raise ValueError(f"x must have {width} features in its last dimension, got shape {tuple(x.shape)}")


def share_of(total: int, share: float) -> int:
    """A share of ``total`` things as a whole number, at least 1."""
    return max(1, round(share * total))


def geometric(ends: tuple[float, float], part: float) -> float:
    """From the first to the second, the same factor in every step; ``part`` beyond 1 stays at the second."""
    return ends[0] * (ends[1] / ends[0]) ** min(part, 1.0)


def cubic(ends: tuple[float, float], part: float) -> float:
    """From the first to the second, quickly at first (Zhu & Gupta 2017)."""
    return ends[1] + (ends[0] - ends[1]) * (1 - min(part, 1.0)) ** 3


def spread(scores: Tensor, least: float = 0.0, group: Any = None) -> Tensor:
    """The standard deviation of the finite scores, a number without gradient; 1 where all of them are equal.

    Args:
        least: the smallest unit; scores that start equal and are learned apart need one.
        group: the processes whose scores count together; ``None`` for this one alone.
    """
    x = scores.detach().to(work_dtype(scores))
    if group is not None:
        width = group_spread(x, group).to(x.dtype)
        return torch.where(width > 0, width.clamp(min=least), least or 1.0)
    if readable(x) and x.numel() > 1:
        width = torch.linalg.vector_norm(x - x.mean()) / x.numel() ** 0.5  # a third of the time of std
        if _LEAST < float(width) < _MOST:
            return width.clamp(min=least)
    return _careful_spread(x, least)


def _careful_spread(x: Tensor, least: float) -> Tensor:
    """The same where scores may be infinite or their squares leave the range, and without reading a value."""
    there = x.isfinite()
    count = there.sum().clamp(min=1)
    x = torch.where(there, x, 0.0)
    away = torch.where(there, x - x.sum() / count, 0.0)
    largest = away.abs().amax() if away.numel() else away.sum()
    unit = torch.where(largest > 0, largest, 1.0)  # squares of huge or tiny scores would leave the range
    width = ((away / unit).square().sum() / count).sqrt() * unit
    return torch.where(width > 0, width.clamp(min=least), least or 1.0)


def check_method(method: Method, design: str | None = None) -> None:
    """Raise unless the method, and the design where there is one, are known."""
    if isinstance(method, str):
        find(RELAXATIONS, method)
    elif not callable(method):
        raise TypeError(f"method must be a name in khot.RELAXATIONS or a callable (scores, k, tau) -> mask, got {type(method).__name__}")
    if design is not None:
        find(DESIGNS, design, "design")
        if not isinstance(method, str):
            raise TypeError("a design samples the mask of a method with a name; give method a name in khot.RELAXATIONS")


def relaxed_mask(
    scores: Tensor,
    k: Number,
    tau: Tensor,
    *,
    method: Method,
    hard: bool = False,
    design: str | None = None,
    dim: int = -1,
    least: float = 0.0,
    group: Any = None,
) -> Tensor:
    """The mask that a layer trains with: soft, hard with the soft gradient, or sampled; ``tau`` in units of the scores' spread."""
    unit = spread(scores, least, group) * tau
    if design is not None:
        return sample_topk(scores, k, unit, method=str(method), design=design, dim=dim)
    return soft_topk(scores, k, unit, method=method, hard=hard, dim=dim)
