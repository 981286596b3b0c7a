from __future__ import annotations

from collections.abc import Iterable
from numbers import Integral, Real
from typing import Any, NamedTuple

import numpy as np
from sklearn.base import BaseEstimator, MultiOutputMixin, RegressorMixin
from sklearn.model_selection import ShuffleSplit, check_cv
from sklearn.utils import check_random_state
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data

from khot.checks import find
from khot.sklearn._criteria import CRITERIA, INFORMATION, elbow
from khot.sklearn._regression import Fits, Reduced, fit_sizes, reduce


class RegressionPath(NamedTuple):
    """The best models of every size (and ridge, if there are several); these are the first dimension."""

    k: np.ndarray  # (K,)
    coef: np.ndarray  # (K, outputs, n_features)
    intercept: np.ndarray  # (K, outputs)
    loss: np.ndarray  # (K, outputs), mean squared residual
    criterion: np.ndarray  # (K, outputs); the smallest is chosen
    alpha: np.ndarray  # (K,)


class TopKRegressor(MultiOutputMixin, RegressorMixin, BaseEstimator):
    r"""Least squares with exactly ``k`` non-zero coefficients for each output.

    .. math:: \min_{\beta, b} \sum_i w_i (y_i - x_i^T \beta - b)^2 + \alpha \|\beta\|^2 \quad \text{with} \quad \|\beta\|_0 = k

    Many sets of ``k`` columns are improved at once, for all outputs and sizes, by exchanging one column for another until no exchange
    helps; the best is finished in accurate arithmetic and solved by plain least squares, so that coefficients are not shrunk. ``certify``
    adds a proof by branch and bound.

    Args:
        k: how many columns; several, e.g. ``range(1, 6)``, are compared by ``criterion``, for each output by itself. None compares 1 to 10.
        alpha: ridge, on the scale of the columns as they are given, as in scikit-learn's ``Ridge``; several are compared by ``criterion``
            beside every ``k``, in one search.
        criterion: how to choose among several ``k``: ``"aic"``, ``"aicc"``, ``"bic"``, ``"elbow"`` (the largest ``k`` that still makes
            the error fall clearly; for data with little noise), ``"validation"`` (Akaike's criterion of the errors on the held-out parts of
            ``cv``, as Mangan et al. 2017 do) or ``"stability"`` (the largest ``k`` whose columns are found again
            on the training parts of ``cv``).
        fit_intercept: whether there is a constant beside the ``k`` columns.
        groups: ``(n_features,)`` labels; columns with the same label are taken in together, and ``k`` counts groups.
        shared: all outputs use the same columns.
        cv: splits for ``"validation"`` (default 5 folds) and ``"stability"`` (default 20 random halves): a number of folds, a splitter of
            scikit-learn, or pairs of indices.
        agreement: for ``"stability"``, the share of splits in which all columns must be found again.
        n_starts: random starts of the search for each ``k`` and output; None is a quarter of the columns, at least 32.
        certify: prove that the columns are the best ones, by branch and bound with at most ``max_nodes`` nodes for each ``k`` and output.
            Up to about 30 columns this usually succeeds; a better set, should one turn up, is taken.
        max_nodes: see ``certify``.
        random_state: seed, ``RandomState`` or None.

    Attributes:
        coef_: ``(n_features,)``, or ``(outputs, n_features)`` for a ``y`` with two dimensions.
        intercept_: a number, or ``(outputs,)``.
        support_: like ``coef_``, of bool: which columns are used. A chosen column may have the coefficient 0, e.g. where it is constant.
        k_, alpha_: the chosen ``k`` and ridge, a number or ``(outputs,)``.
        path_: a :class:`RegressionPath` over all given ``k``.
        certified_: with ``certify``, like ``path_.loss``: where optimality is proven.

    Example:
        >>> X = np.random.RandomState(0).normal(size=(50, 20))
        >>> y = 3 * X[:, 4] - 2 * X[:, 7] + 1
        >>> model = TopKRegressor(k=range(1, 6)).fit(X, y)
        >>> np.flatnonzero(model.support_), model.coef_[model.support_].round(2), model.k_
        (array([4, 7]), array([ 3., -2.]), 2)
    """

    n_features_in_: int

    def __init__(
        self,
        k: int | Iterable[int] | None = None,
        *,
        alpha: float | Iterable[float] = 0.0,
        criterion: str = "bic",
        fit_intercept: bool = True,
        groups: Any = None,
        shared: bool = False,
        cv: Any = None,
        agreement: float = 0.8,
        n_starts: int | None = None,
        certify: bool = False,
        max_nodes: int = 1_000_000,
        random_state: Any = None,
    ) -> None:
        self.k = k
        self.alpha = alpha
        self.criterion = criterion
        self.fit_intercept = fit_intercept
        self.groups = groups
        self.shared = shared
        self.cv = cv
        self.agreement = agreement
        self.n_starts = n_starts
        self.certify = certify
        self.max_nodes = max_nodes
        self.random_state = random_state

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> TopKRegressor:
        """Find the columns and their coefficients.

        Args:
            X: ``(n_samples, n_features)``, dense and finite. Constant and repeated columns are allowed.
            y: ``(n_samples,)`` or ``(n_samples, outputs)``.
            sample_weight: ``(n_samples,)``; an integer weight is the same as repeating the row.
        """
        X, y = validate_data(self, X, y, dtype=np.float64, multi_output=True, y_numeric=True)
        weight = _check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True)
        self._check()
        targets = y.reshape(len(y), -1).astype(np.float64)
        sizes, groups = self._sizes(), self._groups()
        random = check_random_state(self.random_state)
        seed = int(random.randint(2**31 - 1))
        whole = reduce(X, targets, weight, self.fit_intercept)
        fits = self._search([whole], sizes, groups, seed, self.max_nodes if self.certify else 0)[0]
        values = self._criterion(X, targets, weight, whole, fits, sizes, groups, random)
        self._keep(fits, values, sizes, single=y.ndim == 1)
        return self

    def predict(self, X: Any) -> np.ndarray:
        """``(n_samples,)`` or ``(n_samples, outputs)``."""
        check_is_fitted(self)
        X = validate_data(self, X, dtype=np.float64, reset=False)
        return X @ self.coef_.T + self.intercept_

    def _search(self, samples: list[Reduced], sizes: list[int], groups: list[np.ndarray] | None, seed: int, nodes: int = 0) -> list[Fits]:
        options: dict[str, Any] = {"shared": bool(self.shared), "starts": self._starts(), "seed": seed, "nodes": nodes}
        ridges = self._alphas()
        every = [(sample, alpha) for sample in samples for alpha in ridges]
        found = fit_sizes([each[0] for each in every], sizes, alphas=[each[1] for each in every], groups=groups, **options)
        apart = [found[place : place + len(ridges)] for place in range(0, len(found), len(ridges))]
        return [Fits(*(np.concatenate(parts) for parts in zip(*fits, strict=True))) for fits in apart]

    def _criterion(
        self,
        X: np.ndarray,
        y: np.ndarray,
        weight: np.ndarray,
        whole: Reduced,
        fits: Fits,
        sizes: list[int],
        groups: list[np.ndarray] | None,
        random: np.random.RandomState,
    ) -> np.ndarray:
        """``(sizes, outputs)``; the smallest is chosen."""
        if self.criterion in INFORMATION or len(fits.loss) == 1:
            return self._information(whole, fits)
        if self.criterion == "elbow":
            return self._elbow(whole, fits, sizes)
        default = 5 if self.criterion == "validation" else ShuffleSplit(20, train_size=0.5, random_state=random.randint(2**31 - 1))
        splits = list(check_cv(default if self.cv is None else self.cv).split(X, y))  # pyright: ignore[reportArgumentType, reportAttributeAccessIssue]
        inside = [np.isin(np.arange(len(X)), train) * weight for train, _ in splits]
        parts = self._search([reduce(X, y, part, self.fit_intercept) for part in inside], sizes, groups, int(random.randint(2**31 - 1)))
        if self.criterion == "validation":
            held = [self._held_out(part, X[rows], y[rows], weight[rows]) for part, (_, rows) in zip(parts, splits, strict=True)]
            return np.sum(held, axis=0)
        found = np.mean([(part.support == fits.support).all(2) for part in parts], axis=0)  # (sizes, outputs)
        rank = np.arange(len(sizes)).reshape(-1, 1)
        return np.where(found >= self.agreement, -rank - 1.0, 1 - found)

    def _information(self, whole: Reduced, fits: Fits) -> np.ndarray:
        name = self.criterion if self.criterion in INFORMATION else "bic"
        total = np.square(whole.y).sum(0) * whole.unit**2
        return self._joined(name, fits.loss * whole.samples, total, whole.samples, fits)

    def _elbow(self, whole: Reduced, fits: Fits, sizes: list[int]) -> np.ndarray:
        loss, total = fits.loss * whole.samples, np.square(whole.y).sum(0) * whole.unit**2
        if self.shared:
            loss, total = (np.broadcast_to(part.sum(-1, keepdims=True), part.shape) for part in (loss, total))
        return elbow(loss, total, np.asarray(sizes))

    def _held_out(self, fits: Fits, x: np.ndarray, y: np.ndarray, weight: np.ndarray) -> np.ndarray:
        """Akaike's criterion of every size on other rows, ``(sizes, outputs)``."""
        said = np.einsum("np,kmp->knm", x, fits.coef) + fits.intercept[:, None]
        loss, total = (np.einsum("...nm,n->...m", np.square(away), weight) for away in (said - y, y))
        return self._joined("aic", loss, total, float(weight.sum()), fits)

    def _joined(self, name: str, loss: np.ndarray, total: np.ndarray, samples: float, fits: Fits) -> np.ndarray:
        """A criterion for each output, or the same for all where they share their columns."""
        columns, outputs = fits.support.sum(2).astype(np.float64), loss.shape[1]
        if not self.shared:
            return INFORMATION[name](loss, total, samples, columns)
        joint = INFORMATION[name](loss.sum(1), total.sum(), samples * outputs, columns.sum(1))
        return np.repeat(joint[:, None], outputs, 1)

    def _keep(self, fits: Fits, values: np.ndarray, sizes: list[int], single: bool) -> None:
        best, outputs = values.argmin(0), np.arange(values.shape[1])
        coef, intercept, support = fits.coef[best, outputs], fits.intercept[best, outputs], fits.support[best, outputs]
        ridges = self._alphas()
        k, alpha = np.tile(sizes, len(ridges)), np.repeat(ridges, len(sizes))
        self.coef_, self.support_ = (coef[0], support[0]) if single else (coef, support)
        self.intercept_ = float(intercept[0]) if single else intercept
        self.k_, self.alpha_ = (int(k[best[0]]), float(alpha[best[0]])) if single else (k[best], alpha[best])
        self.path_ = RegressionPath(k, fits.coef, fits.intercept, fits.loss, values, alpha)
        if self.certify:
            self.certified_ = fits.proven

    def _check(self) -> None:
        find(dict.fromkeys(CRITERIA), self.criterion, "criterion")
        ridges = self._alphas()
        if not ridges or not all(isinstance(alpha, Real) and 0 <= float(alpha) < np.inf for alpha in ridges):
            raise ValueError(f"alpha must be a finite number of at least 0, or several of them, got {self.alpha!r}")
        if len(ridges) > 1 and self.criterion in ("elbow", "stability"):
            raise ValueError(
                f"criterion {self.criterion!r} compares sizes only; give one alpha, or choose 'validation', 'bic', 'aic', 'aicc'"
            )
        if self.n_starts is not None and not (isinstance(self.n_starts, Integral) and self.n_starts >= 0):
            raise ValueError(f"n_starts must be a whole number of at least 0, or None, got {self.n_starts!r}")
        if not 0 < self.agreement <= 1:
            raise ValueError(f"agreement must lie in (0, 1], got {self.agreement!r}")

    def _alphas(self) -> list[Any]:
        return list(self.alpha) if isinstance(self.alpha, Iterable) else [self.alpha]

    def _starts(self) -> int:
        return max(32, self.n_features_in_ // 4) if self.n_starts is None else int(self.n_starts)

    def _groups(self) -> list[np.ndarray] | None:
        """The columns of each group."""
        if self.groups is None:
            return None
        labels = np.asarray(self.groups)
        if labels.shape != (self.n_features_in_,):
            raise ValueError(f"groups must hold one label for each of the {self.n_features_in_} columns, got shape {labels.shape}")
        return [np.flatnonzero(labels == label) for label in dict.fromkeys(labels.tolist())]

    def _sizes(self) -> list[int]:
        groups = self._groups()
        n, what = (self.n_features_in_, "n_features") if groups is None else (len(groups), "the number of groups")
        if self.k is None:
            return list(range(1, min(n, 10) + 1))
        given: list[Any] = list(self.k) if isinstance(self.k, Iterable) else [self.k]
        whole = all(isinstance(k, (int, np.integer)) and not isinstance(k, bool) and 0 <= k <= n for k in given)
        if not given or not whole:
            raise ValueError(f"k must be a whole number from 0 to {what}={n}, several of them, or None, got {self.k!r}")
        return sorted({int(k) for k in given})
