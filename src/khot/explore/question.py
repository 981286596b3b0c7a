"""What the page asks: the query of an address, read and checked.

The whole state is in the query, so that an address can be kept and sent. Nothing else is read, no body and no file: the length of the
query bounds the memory that a request takes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from khot.registry import Design, Relaxation, find_design, find_method

MAX_ITEMS = 64
MAX_QUERY = 4096  # bytes; 64 scores with all their digits are under 2000
MAX_SCORE = 1000.0
TAUS = (1e-3, 1e3)
DRAWS = 100  # of one request; the page asks again with the next seed and adds up
MAX_SEED = 2**31 - 1

EXAMPLE = {"x": "1,4,2,3", "k": "2", "tau": "0.5", "method": "sigmoid"}
_ASKED = ("x", "k", "tau", "method", "design", "seed")


@dataclass(frozen=True)
class Question:
    """A call of khot that the page wants to see."""

    scores: Tensor  # (n,) in float64
    k: int | float
    tau: float
    method: Relaxation
    seed: int = 0
    design: Design | None = None


def read(query: Mapping[str, str]) -> Question:
    """The question in a query; ``ValueError`` says what must hold and what came.

    Example:
        >>> read(EXAMPLE).scores
        tensor([1., 4., 2., 3.], dtype=torch.float64)
    """
    for name in query:
        if name not in _ASKED:
            raise ValueError(f"unknown parameter {_short(name)!r}; choose from {', '.join(_ASKED)}")
    design = query.get("design")
    return Question(
        scores=_scores(_given(query, "x")),
        k=_k(_given(query, "k")),
        tau=_within("tau", _given(query, "tau"), *TAUS),
        method=find_method(_short(_given(query, "method"))),
        seed=_seed(query.get("seed", "0")),
        design=None if design is None else find_design(_short(design)),
    )


def _given(query: Mapping[str, str], name: str) -> str:
    if name not in query:
        example = "&".join(f"{key}={value}" for key, value in EXAMPLE.items())
        raise ValueError(f"{name} is missing; ask for example with {example}")
    return query[name]


def _scores(text: str) -> Tensor:
    parts = text.split(",", MAX_ITEMS)
    if len(parts) > MAX_ITEMS:
        raise ValueError(f"x must hold at most {MAX_ITEMS} scores, got more")
    values = [_within(f"score {i}", part, -MAX_SCORE, MAX_SCORE) for i, part in enumerate(parts)]
    return torch.tensor(values, dtype=torch.float64, device="cpu")


def _k(text: str) -> int | float:
    value = _number("k", text)
    return int(value) if value.is_integer() else value


def _seed(text: str) -> int:
    value = _within("seed", text, 0, MAX_SEED)
    if not value.is_integer():
        raise ValueError(f"seed must be a whole number, got {value:g}")
    return int(value)


def _within(name: str, text: str, low: float, high: float) -> float:
    value = _number(name, text)
    if not low <= value <= high:
        raise ValueError(f"{name} must be between {low:g} and {high:g}, got {value:g}")
    return value


def _number(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ValueError(f"{name} must be a finite number, got {_short(text)!r}")
    return value


def _short(text: str) -> str:
    """What came, cut: an error need not repeat a whole page."""
    return text if len(text) <= 40 else text[:37] + "..."
