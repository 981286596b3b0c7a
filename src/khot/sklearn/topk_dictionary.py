from __future__ import annotations

from numbers import Integral, Real
from typing import Any

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor

from khot.nn import Dictionary

MEMORY = 10  # batches that partial_fit remembers


class TopKDictionary(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):
    """Dictionary learning with codes of at most ``k`` atoms: the learning itself uses the codes that :meth:`transform` gives.

    Batches of rows are coded by orthogonal matching pursuit and every atom is fitted to the codes (:meth:`khot.nn.Dictionary.learn`).
    It starts from rows of the data. Atoms that no row uses, and all but one of those that are nearly the same, are replaced by rows
    that are coded badly.

    Args:
        n_components: how many atoms; by default as many as there are features.
        k: how many atoms a row may use; by default a tenth of the features.
        error: the root mean square error that a row may have: each row uses as many atoms as that needs, and ``k`` is not used.
        max_iter: how often :meth:`fit` goes over the data.
        batch_size: rows in a step.
        random_state: seed, ``RandomState`` or None.

    Attributes:
        components_: ``(n_components, n_features)``, the atoms, of length 1.
        dictionary_: the :class:`khot.nn.Dictionary`.
        errors_: mean squared error of the batches of each pass, before they were learned.
        n_iter_: passes over the data of :meth:`fit`.
        n_steps_: batches that were learned.
        n_features_in_, feature_names_in_: as everywhere in scikit-learn.

    Example:
        >>> from sklearn.datasets import load_digits
        >>> X = load_digits().data
        >>> model = TopKDictionary(n_components=100, k=4, max_iter=3, random_state=0).fit(X)
        >>> codes = model.transform(X)
        >>> codes.shape, (codes != 0).sum(1).max()
        ((1797, 100), np.int64(4))
        >>> bool(((model.inverse_transform(codes) - X) ** 2).mean() < 0.2 * X.var())
        True
    """

    n_features_in_: int

    def __init__(
        self,
        n_components: int | None = None,
        k: int | None = None,
        *,
        error: float | None = None,
        max_iter: int = 10,
        batch_size: int = 1024,
        random_state: Any = None,
    ) -> None:
        self.n_components = n_components
        self.k = k
        self.error = error
        self.max_iter = max_iter
        self.batch_size = batch_size
        self.random_state = random_state

    def fit(self, X: Any, y: Any = None) -> TopKDictionary:
        """Learn the atoms from the rows of ``X``, ``(n_samples, n_features)``."""
        x, random = self._start(X, reset=True)
        for _ in range(self.max_iter):
            parts = torch.from_numpy(random.permutation(len(x))).split(self.batch_size)
            keep = 1 - 1 / len(parts)  # about one pass is remembered
            losses = [self._learn(x[rows], keep) for rows in parts]
            self.errors_.append(float(np.mean(losses)))
        self.n_iter_ = self.max_iter
        if bool((self.dictionary_.used < 1).any()):  # in about the last pass
            self.dictionary_.renew(x, error=self.error)
        return self

    def partial_fit(self, X: Any, y: Any = None) -> TopKDictionary:
        """Learn from one more batch; the first one sets the start."""
        first = not hasattr(self, "dictionary_")
        x, random = self._start(X, reset=first)
        for rows in torch.from_numpy(random.permutation(len(x))).split(self.batch_size):
            self.errors_.append(self._learn(x[rows], 1 - 1 / MEMORY))
        return self

    def transform(self, X: Any) -> np.ndarray:
        """Codes with at most ``k`` non-zero entries in a row, ``(n_samples, n_components)``."""
        check_is_fitted(self)
        X = validate_data(self, X, dtype=[np.float64, np.float32], reset=False)
        with torch.no_grad():
            return self.dictionary_.encode(self._rows(X), error=self.error).numpy().astype(X.dtype, copy=False)

    def inverse_transform(self, codes: Any) -> np.ndarray:
        """Rows from their codes, ``(n_samples, n_features)``."""
        check_is_fitted(self)
        return np.asarray(codes) @ self.components_

    @property
    def components_(self) -> np.ndarray:
        return self.dictionary_.components.detach().numpy()

    @property
    def _n_features_out(self) -> int:
        return self.dictionary_.num_atoms

    def _learn(self, rows: Tensor, keep: float) -> float:
        self.n_steps_ += 1
        return float(self.dictionary_.learn(rows, error=self.error, keep=min(keep, 1 - 1 / self.n_steps_)))

    def _start(self, X: Any, *, reset: bool) -> tuple[Tensor, np.random.RandomState]:
        """Checked rows; the first time also atoms."""
        X = validate_data(self, X, dtype=[np.float64, np.float32], reset=reset)
        self._check()
        if not reset:
            return self._rows(X), self._random
        self._random = check_random_state(self.random_state)
        x = torch.from_numpy(np.array(X, order="C"))
        self.dictionary_ = self._first(x, self._random)
        self.errors_: list[float] = []
        self.n_steps_ = 0
        return x, self._random

    def _first(self, x: Tensor, random: np.random.RandomState) -> Dictionary:
        """Atoms that are different rows of the data; random ones where there are not enough rows."""
        n = x.shape[1] if self.n_components is None else int(self.n_components)
        k = min(n, max(1, x.shape[1] // 10)) if self.k is None else int(self.k)
        if k > min(n, x.shape[1]):
            raise ValueError(f"k must be at most min(n_components, n_features)={min(n, x.shape[1])}, got {k}")
        with torch.random.fork_rng(devices=[]):
            dictionary = Dictionary(x.shape[1], n, k).to(x.dtype)
        atoms = random.normal(size=(n, x.shape[1]))
        order = random.permutation(len(x))
        rows = x.numpy()[order]
        rows = rows[np.abs(rows).max(1) > 0][:n]
        atoms[: len(rows)] = rows / np.abs(rows).max(1, keepdims=True)
        dictionary.atoms.data = torch.nn.functional.normalize(torch.from_numpy(atoms), dim=1).to(x.dtype)
        return dictionary

    def _rows(self, X: np.ndarray) -> Tensor:
        return torch.from_numpy(np.array(X, order="C")).to(self.dictionary_.atoms.dtype)

    def _check(self) -> None:
        for name, value in (("n_components", self.n_components), ("k", self.k)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, Integral) or value < 1):
                raise ValueError(f"{name} must be a whole number of at least 1 or None, got {value!r}")
        for name, value in (("max_iter", self.max_iter), ("batch_size", self.batch_size)):
            if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
                raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
        if self.error is not None and not (isinstance(self.error, Real) and self.error >= 0):
            raise ValueError(f"error must be a number of at least 0 or None, got {self.error!r}")
