"""The table of estimators, and the door through which their arguments pass."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, ParamSpec, TypeAlias

from torch import Tensor

from khot._tensors import Number, column, work_dtype
from khot.checks import check, check_options
from khot.distributions import KSubset

P = ParamSpec("P")
Objective: TypeAlias = Callable[[Tensor], Tensor]

_estimators: dict[str, Estimator] = {}
ESTIMATORS: Mapping[str, Estimator] = MappingProxyType(_estimators)


@dataclass(frozen=True, kw_only=True, eq=False)
class Estimator:
    """One row of the table; to call it is to call the function ``(objective, scores, k, tau, *, num_samples, generator, dim)``.

    Every flag is a law that the tests hold the estimator to. A ``False`` says that it cannot keep the law.
    """

    name: str
    estimate: Callable[..., Tensor]
    options: Mapping[str, Any]  # its own, name -> default
    paper: str
    draws: Literal["k_subset", "design", "gumbel"] = "k_subset"  # the law of the masks: KSubset, its own design, noisy scores
    fractional: bool = False  # k may be a fraction or a tensor
    double_backward: bool = True
    forward_mode: bool = True
    vmaps: bool = True
    compiles: bool = True  # torch.compile takes it as one graph, if it takes the objective

    def __call__(self, objective: Objective, scores: Tensor, k: Number, tau: Number = 1.0, **options: Any) -> Tensor:
        return self.estimate(objective, scores, k, tau, **options)

    def __str__(self) -> str:
        return self.name


_COMMON = ("num_samples", "generator", "dim")


def estimator(*, paper: str, **laws: Any) -> Callable[[Callable[P, Tensor]], Callable[P, Tensor]]:
    """File the decorated body under its own name, and return it behind the checks.

    The body works along the last dimension, in float32 or better, with a ``k`` that has been checked; its objective takes such masks
    and gives the user's one masks like the scores, in their dtype. Losses are averaged in float32 or better.
    """

    def file(body: Callable[P, Tensor]) -> Callable[P, Tensor]:
        name, fractional = body.__name__, laws.get("fractional", False)
        parameters = inspect.signature(body).parameters
        options = {p.name: p.default for p in parameters.values() if p.kind is inspect.Parameter.KEYWORD_ONLY}
        fewest = 2 if options["num_samples"] == 2 else 1

        @functools.wraps(body)
        def entered(objective: Objective, scores: Tensor, k: Number, tau: Number = 1.0, *, dim: int = -1, **given: Any) -> Tensor:
            check(scores, k, tau, dim=dim, fractional=fractional)
            check_options(name, given, options, "estimator")
            num_samples = given.get("num_samples", fewest)
            if num_samples < fewest:
                why = " for a baseline from the other samples" if fewest > 1 else ""
                raise ValueError(f"num_samples must be at least {fewest}{why}, got {num_samples}")
            x = scores.movedim(dim, -1).to(work_dtype(scores))
            return body(_seen_by(objective, scores, dim), x, k if fractional else int(k), tau, **given)  # pyright: ignore[reportCallIssue]

        own = {key: value for key, value in options.items() if key not in _COMMON}
        _estimators[name] = Estimator(name=name, estimate=entered, options=own, paper=paper, **laws)
        return entered  # pyright: ignore[reportReturnType]

    return file


def _seen_by(objective: Objective, scores: Tensor, dim: int) -> Objective:
    def losses(masks: Tensor) -> Tensor:
        found = objective(masks.movedim(-1, dim % scores.ndim - scores.ndim).to(scores.dtype))
        return found.to(work_dtype(found))

    return losses


def k_subset(scores: Tensor, k: int, tau: Number) -> KSubset:
    """The k-subset distribution with logits ``scores / tau``; the scores have been checked."""
    return KSubset(k=k, logits=scores / column(tau, scores))
