from __future__ import annotations

import copy
from numbers import Integral
from typing import Any, Literal

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassifierMixin, MultiOutputMixin, RegressorMixin
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, column_or_1d, validate_data
from torch import Tensor, nn

from khot.nn import SoftKNN
from khot.nn.soft_knn import Metric
from khot.sklearn._judge import scale_of, scaled, shuffled
from khot.sklearn._search import nearest

ROWS = 4096  # rows that the network sees at once when nothing is learned


class _TopKNeighbors(BaseEstimator):
    """What both estimators share: the network is trained by :meth:`khot.nn.SoftKNN.loss`, the search is exact."""

    n_features_in_: int

    def __init__(
        self,
        estimator: nn.Module | None = None,
        k: int = 5,
        *,
        steps: int = 300,
        batch_size: int = 256,
        hidden: int = 128,
        embedding: int = 32,
        rate: float = 1e-3,
        tau: float = 0.1,
        metric: Metric = "euclidean",
        method: str = "sigmoid",
        search: Literal["auto", "faiss", "exact"] = "auto",
        random_state: Any = None,
    ) -> None:
        self.estimator = estimator
        self.k = k
        self.steps = steps
        self.batch_size = batch_size
        self.hidden = hidden
        self.embedding = embedding
        self.rate = rate
        self.tau = tau
        self.metric: Metric = metric
        self.method = method
        self.search = search
        self.random_state = random_state

    def embed(self, X: Any) -> np.ndarray:
        """What the network makes of the rows, ``(n_samples, embedding)``."""
        check_is_fitted(self)
        return self._embed(validate_data(self, X, dtype=np.float64, reset=False)).numpy()  # pyright: ignore[reportArgumentType]

    def kneighbors(self, X: Any, n_neighbors: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Distances and indices of the nearest rows of the training data in the embedding, nearest first."""
        check_is_fitted(self)
        k = self.k if n_neighbors is None else n_neighbors
        if not 1 <= k <= len(self.points_):
            raise ValueError(f"n_neighbors must be between 1 and n_samples={len(self.points_)}, got {k}")
        query = self._embed(validate_data(self, X, dtype=np.float64, reset=False))  # pyright: ignore[reportArgumentType]
        found = nearest(self.points_, query, k, search=self.search)
        return found.distances.clamp(min=0).sqrt().numpy(), found.indices.numpy()

    def _fit(self, X: np.ndarray, labels: Tensor) -> None:
        self._check(len(X))
        self._scale = scale_of(X)
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.network_ = self._train(scaled(X, *self._scale), labels)
        self.points_ = self._embed(X)

    def _train(self, x: Tensor, labels: Tensor) -> nn.Module:
        network = copy.deepcopy(self.estimator) if self.estimator is not None else self._default(x.shape[1])
        size = min(self.batch_size, len(x))
        knn = SoftKNN(min(self.k, size - 1), tau=self.tau, metric=self.metric, method=self.method)
        optimizer = torch.optim.Adam([*network.parameters(), *knn.parameters()], lr=self.rate)
        rows = shuffled(len(x), size)
        network.train()
        for _ in range(self.steps):
            index = next(rows)
            loss = knn.loss(network(x[index]), None, labels[index])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        self.tau_ = float(knn.tau.detach())
        return network.eval()

    def _default(self, features: int) -> nn.Module:
        return nn.Sequential(nn.Linear(features, self.hidden), nn.ReLU(), nn.Linear(self.hidden, self.embedding))

    @torch.no_grad()
    def _embed(self, X: np.ndarray) -> Tensor:
        z = torch.cat([self.network_(rows) for rows in scaled(X, *self._scale).split(ROWS)]).float()
        return nn.functional.normalize(z, dim=-1) if self.metric == "cosine" else z

    def _check(self, n: int) -> None:
        for name in ("k", "steps", "batch_size", "hidden", "embedding"):
            value, least = getattr(self, name), 0 if name == "steps" else 2 if name == "batch_size" else 1
            if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
                raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}")
        if self.k > n:
            raise ValueError(f"k must be at most n_samples={n}, got {self.k}")
        if self.search not in ("auto", "faiss", "exact"):
            raise ValueError(f"search must be 'auto', 'faiss' or 'exact', got {self.search!r}")
        if self.estimator is not None and not isinstance(self.estimator, nn.Module):
            raise TypeError(f"estimator must be a torch.nn.Module or None, got {type(self.estimator).__name__}")


class TopKNeighborsClassifier(ClassifierMixin, _TopKNeighbors):
    """The majority of the ``k`` nearest neighbours in an embedding that was learned for it.

    A network is trained so that the soft neighbours of each row have its label (:class:`khot.nn.SoftKNN`); then the search is the ordinary
    exact one. Columns are standardised first.

    Args:
        estimator: a ``torch.nn.Module`` from ``(B, n_features)`` to ``(B, dim)``; by default one hidden layer.
        k: how many neighbours.
        steps: gradient steps; few for small samples, where many fit the noise. 0 leaves the network as it is.
        batch_size: rows in a step; they are each other's neighbours, so there should be several of each class.
        hidden, embedding: widths of the default network.
        rate: learning rate.
        tau: temperature at the start, in units of the distances' spread; it is learned.
        metric: ``"euclidean"`` or ``"cosine"``.
        method: a name in :data:`khot.RELAXATIONS`.
        search: ``"faiss"`` (``pip install faiss-cpu``), ``"exact"`` (in PyTorch), or ``"auto"``: FAISS where it is installed. Either finds
            the true neighbours.
        random_state: seed, ``RandomState`` or None.

    Attributes:
        classes_: the labels.
        network_: the trained network.
        points_: the embedded training rows.
        tau_: the learned temperature.

    Example:
        >>> from sklearn.datasets import load_wine
        >>> X, y = load_wine(return_X_y=True)
        >>> model = TopKNeighborsClassifier(k=5, steps=100, random_state=0).fit(X[::2], y[::2])
        >>> model.score(X[1::2], y[1::2]) > 0.9
        True
    """

    def fit(self, X: Any, y: Any) -> TopKNeighborsClassifier:
        """Train the network and keep the embedded rows."""
        X, y = validate_data(self, X, y, dtype=np.float64, ensure_min_samples=2)
        check_classification_targets(y)
        self.classes_, codes = np.unique(column_or_1d(y, warn=True), return_inverse=True)
        self.labels_ = codes
        self._fit(X, torch.from_numpy(codes.astype(np.int64)))
        return self

    def predict_proba(self, X: Any) -> np.ndarray:
        """The share of each class among the neighbours, ``(n_samples, n_classes)``."""
        check_is_fitted(self)
        near = self.labels_[self.kneighbors(X)[1]]
        return (near[:, :, None] == np.arange(len(self.classes_))).mean(1)

    def predict(self, X: Any) -> np.ndarray:
        """The class of most neighbours; of equal ones the first."""
        check_is_fitted(self)
        return self.classes_[self.predict_proba(X).argmax(1)]


class TopKNeighborsRegressor(MultiOutputMixin, RegressorMixin, _TopKNeighbors):
    """The mean of the ``k`` nearest neighbours in an embedding that was learned for it.

    As :class:`TopKNeighborsClassifier`, for values: the network is trained on the squared error of the soft neighbours' mean. Arguments
    and attributes are the same, but for the classes. Several outputs are fitted together.

    Example:
        >>> from sklearn.datasets import load_diabetes
        >>> X, y = load_diabetes(return_X_y=True)
        >>> model = TopKNeighborsRegressor(k=20, steps=10, random_state=0).fit(X[::2], y[::2])
        >>> model.score(X[1::2], y[1::2]) > 0.4
        True
    """

    def fit(self, X: Any, y: Any) -> TopKNeighborsRegressor:
        """Train the network and keep the embedded rows."""
        X, y = validate_data(self, X, y, dtype=np.float64, multi_output=True, y_numeric=True, ensure_min_samples=2)
        self.values_ = np.asarray(y, dtype=np.float64)
        self._fit(X, scaled(self.values_, *scale_of(self.values_)))
        return self

    def predict(self, X: Any) -> np.ndarray:
        """The mean of the neighbours' values."""
        check_is_fitted(self)
        return self.values_[self.kneighbors(X)[1]].mean(1)
