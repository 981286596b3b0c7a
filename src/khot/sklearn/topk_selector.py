from __future__ import annotations

from collections.abc import Iterator, Sequence
from numbers import Integral, Real
from typing import Any, Literal

import numpy as np
import torch
from sklearn.base import BaseEstimator
from sklearn.feature_selection import SelectorMixin
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import nn

from khot.nn import FeatureSelector
from khot.sklearn._judge import Budget, Task, classify, default_network, learn_scores, regress, standardised


class TopKSelector(SelectorMixin, BaseEstimator):
    """Selects exactly ``k`` features, together and nonlinearly, by gradient: a network is trained behind a mask of ``k`` features.

    Each step shows the network one random set of ``k`` features whose probabilities are learned (:func:`khot.sample_topk`); the
    temperature falls until the set is certain. No feature is chosen twice, and there are always ``k`` of them.

    Args:
        k: how many features; a float below 1 is a share, None is half of them.
        estimator: a ``torch.nn.Module`` from ``(B, n_features)`` to logits or values, which judges the features; by default a network
            with one hidden layer.
        always: columns that must stay, by position or, for a DataFrame, by name. They count among the ``k``.
        task: ``"classification"``, ``"regression"``, or ``"auto"``: floating ``y`` is regressed, any other ``y`` classified. Without
            ``y`` the network reconstructs all of ``X``.
        steps: gradient steps in each run.
        batch_size: rows in each step.
        hidden: width of the default network; 0 judges by a linear model, which small samples can bear (with ``rate=1e-2``).
        rate: learning rate of the network.
        score_rate: learning rate of the scores.
        tau: temperature at the start and at the end.
        method: a name in :data:`khot.RELAXATIONS`.
        design: a name in :data:`khot.DESIGNS`, or None to train with the soft mask itself, which sees all features in every step: better
            where ``k`` is a few of hundreds and the judge is linear.
        bootstraps: for small samples: learn on that many bootstrap samples and cut the mean of their scores.
        n_iter_no_change: stop early once the choice is certain and has stayed for so many looks (of 20 in a run); None never stops.
        verbose: show a progress bar (needs tqdm).
        random_state: seed, ``RandomState`` or None.

    Attributes:
        scores_: ``(n_features,)``, the learned scores, +inf for ``always``.
        ranking_: ``(n_features,)``, 1 for the best feature, all different.
        n_features_in_, feature_names_in_: as everywhere in scikit-learn.

    Example:
        >>> from sklearn.datasets import load_digits
        >>> X, y = load_digits(return_X_y=True)
        >>> selector = TopKSelector(k=10, steps=200, random_state=0).fit(X, y)
        >>> selector.transform(X).shape
        (1797, 10)
    """

    n_features_in_: int

    def __init__(
        self,
        k: int | float | None = None,
        estimator: nn.Module | None = None,
        *,
        always: Sequence[int] | Sequence[str] = (),
        task: Literal["auto", "classification", "regression"] = "auto",
        steps: int = 1000,
        batch_size: int = 128,
        hidden: int = 128,
        rate: float = 3e-3,
        score_rate: float = 0.1,
        tau: tuple[float, float] = (3.0, 0.1),
        method: str = "sigmoid",
        design: str | None = "systematic",
        bootstraps: int = 0,
        n_iter_no_change: int | None = 3,
        verbose: bool = False,
        random_state: Any = None,
    ) -> None:
        self.k = k
        self.estimator = estimator
        self.always = always
        self.task = task
        self.steps = steps
        self.batch_size = batch_size
        self.hidden = hidden
        self.rate = rate
        self.score_rate = score_rate
        self.tau = tau
        self.method = method
        self.design = design
        self.bootstraps = bootstraps
        self.n_iter_no_change = n_iter_no_change
        self.verbose = verbose
        self.random_state = random_state

    def fit(self, X: Any, y: Any = None) -> TopKSelector:
        """Learn which features to keep.

        Args:
            X: ``(n_samples, n_features)``, dense and finite.
            y: labels ``(n_samples,)``, values ``(n_samples,)`` or ``(n_samples, outputs)``, or None.
        """
        x, task = self._validated(X, y)
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            runs = [self._run(x, task, rows) for rows in self._samples(len(x))]
        scores = torch.stack(runs).mean(0).double().numpy()
        scores[self._always()] = np.inf
        self.scores_ = scores
        self.ranking_ = np.empty(len(scores), dtype=np.int64)
        self.ranking_[np.argsort(-scores, kind="stable")] = np.arange(1, len(scores) + 1)
        self.n_selected_ = self._count()
        return self

    def path(self, ks: Sequence[int]) -> np.ndarray:
        """The choices at several ``k`` by the ranking, ``(len(ks), n_features)`` of bool; a smaller one lies in a larger one.

        To learn the best set of another size, fit again with that ``k``.
        """
        check_is_fitted(self)
        for k in ks:
            if not 1 <= k <= self.n_features_in_:
                raise ValueError(f"ks must lie between 1 and n_features={self.n_features_in_}, got {k}")
        return self.ranking_ <= np.asarray(ks).reshape(-1, 1)

    def _get_support_mask(self) -> np.ndarray:
        check_is_fitted(self)
        return self.ranking_ <= self.n_selected_

    def _validated(self, X: Any, y: Any) -> tuple[torch.Tensor, Task]:
        if y is None:
            X = validate_data(self, X, dtype=np.float64, ensure_min_samples=2)
            x = standardised(X)
            return x, Task(x, x.shape[1], nn.functional.mse_loss)
        X, y = validate_data(self, X, y, dtype=np.float64, multi_output=True, ensure_min_samples=2)
        return standardised(X), self._task(y)

    def _task(self, y: np.ndarray) -> Task:
        if self.task not in ("auto", "classification", "regression"):
            raise ValueError(f"task must be 'auto', 'classification' or 'regression', got {self.task!r}")
        if self.task == "regression" or self.task == "auto" and y.dtype.kind == "f":
            return regress(y.astype(np.float64))
        if y.ndim > 1 and y.shape[1] > 1:
            raise ValueError(f"labels must be of shape (n_samples,), got {y.shape}; several outputs can only be regressed")
        return classify(y.ravel())

    def _samples(self, n: int) -> Iterator[torch.Tensor]:
        """The rows to learn from in each run."""
        if self.bootstraps < 0:
            raise ValueError(f"bootstraps must be at least 0, got {self.bootstraps}")
        if self.bootstraps == 0:
            yield torch.arange(n)
        for _ in range(self.bootstraps):
            yield torch.randint(n, (n,))

    def _run(self, x: torch.Tensor, task: Task, rows: torch.Tensor) -> torch.Tensor:
        always = np.flatnonzero(self._always()).tolist()
        k = self._count()
        selector = FeatureSelector(x.shape[1], k, tau=self.tau, method=self.method, design=self.design, always=always, until=1.0)
        network = self.estimator if self.estimator is not None else default_network(x.shape[1], task.outputs, self.hidden)
        budget = Budget(self.steps, self.batch_size, self.rate, self.score_rate, self.n_iter_no_change, self._bar)
        part = Task(task.target[rows], task.outputs, task.loss)
        return learn_scores(x[rows], part, selector, network, budget)

    def _count(self) -> int:
        n = self.n_features_in_
        if self.k is None:
            return max(1, n // 2)
        if isinstance(self.k, Integral) and not isinstance(self.k, bool) and 1 <= self.k <= n:
            return int(self.k)
        if isinstance(self.k, Real) and not isinstance(self.k, Integral) and 0 < self.k < 1:
            return max(1, round(float(self.k) * n))
        raise ValueError(f"k must be a whole number between 1 and n_features={n}, a share in (0, 1), or None, got {self.k!r}")

    def _always(self) -> np.ndarray:
        """A mask of the columns that must stay."""
        n, names = self.n_features_in_, getattr(self, "feature_names_in_", None)
        mask = np.zeros(n, dtype=bool)
        for column in self.always:
            if isinstance(column, str):
                where = np.flatnonzero(names == column) if names is not None else np.empty(0, dtype=int)
            else:
                where = np.array([column]) if 0 <= column < n else np.empty(0, dtype=int)
            if not len(where):
                raise ValueError(
                    f"always must name columns of X by position (0 to {n - 1}) or by a DataFrame's column name, got {column!r}"
                )
            mask[where] = True
        return mask

    def _bar(self, steps: range) -> Iterator[int]:
        if not self.verbose:
            return iter(steps)
        from tqdm.auto import tqdm

        return iter(tqdm(steps, desc="TopKSelector", dynamic_ncols=True))
