"""scikit-learn's contract, the search, and what learned neighbours promise beyond it."""

import importlib.util
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.datasets import load_digits
from sklearn.model_selection import cross_val_score
from sklearn.neighbors import KNeighborsClassifier, KNeighborsRegressor, NearestNeighbors
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks
from torch import nn

from khot.sklearn import TopKNeighborsClassifier, TopKNeighborsRegressor
from khot.sklearn._search import nearest

SEARCHES = ["exact", pytest.param("faiss", marks=pytest.mark.skipif(importlib.util.find_spec("faiss") is None, reason="no FAISS"))]


@parametrize_with_checks(
    [TopKNeighborsClassifier(steps=20, hidden=16, rate=5e-3), TopKNeighborsRegressor(k=3, steps=20, hidden=16, rate=5e-3)]
)
def test_scikit_learns_own_checks(estimator: Any, check: Any) -> None:
    check(estimator)


@pytest.mark.parametrize("search", SEARCHES)
def test_the_search_is_scikit_learns(search: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("khot.sklearn._search.MEMORY", 700)
    points, query = (torch.randn(n, 6) + 50 for n in (90, 40))
    found = nearest(points, query, 7, search=search)
    want, where = NearestNeighbors(n_neighbors=7).fit(points.double().numpy()).kneighbors(query.double().numpy())
    assert (found.indices.numpy() == where).all()
    np.testing.assert_allclose(found.distances.sqrt().numpy(), want, rtol=1e-3)
    assert nearest(points, query[:0], 7, search="exact").indices.shape == (0, 7)


def noisy(n: int = 500) -> tuple[np.ndarray, np.ndarray]:
    """Two columns decide; forty others are noise, of other units, one constant, one repeated."""
    random = np.random.RandomState(0)
    x = random.normal(size=(n, 42))
    y = (x[:, 0] * x[:, 1] > 0).astype(int)
    x[:, 5], x[:, 6] = 3.0, x[:, 7]
    return x * 10.0 ** np.linspace(-3, 3, 42), y


def test_learned_neighbours_see_through_noise() -> None:
    x, y = noisy(900)
    plain = make_pipeline(StandardScaler(), KNeighborsClassifier(9)).fit(x[:600], y[:600]).score(x[600:], y[600:])
    learned = (
        TopKNeighborsClassifier(k=9, steps=80, rate=5e-3, batch_size=128, random_state=0).fit(x[:600], y[:600]).score(x[600:], y[600:])
    )
    assert learned > plain + 0.08


def test_values_of_several_outputs() -> None:
    x, _ = noisy()
    z = x / 10.0 ** np.linspace(-3, 3, 42)
    y = np.stack([1e6 * z[:, 0], z[:, 1] - 30], 1)
    model = TopKNeighborsRegressor(k=5, steps=80, rate=5e-3, batch_size=128, random_state=0).fit(x[:400], y[:400])
    plain = make_pipeline(StandardScaler(), KNeighborsRegressor(5)).fit(x[:400], y[:400])
    assert model.predict(x[400:]).shape == (100, 2)
    assert model.score(x[400:], y[400:]) > plain.score(x[400:], y[400:]) + 0.2


def test_names_as_labels_shares_and_the_order_of_classes() -> None:
    x, y = load_digits(return_X_y=True)
    names = np.array(list("jihgfedcba"))[y]
    model = TopKNeighborsClassifier(k=3, steps=60, rate=5e-3, batch_size=128, random_state=0).fit(x[:800], names[:800])
    share = model.predict_proba(x[800:900])
    assert list(model.classes_) == sorted("abcdefghij") and np.allclose(share.sum(1), 1)
    assert (model.predict(x[800:900]) == model.classes_[share.argmax(1)]).all() and model.score(x[800:], names[800:]) > 0.85


@pytest.mark.parametrize("metric", ["euclidean", "cosine"])
def test_a_network_of_ones_own_is_copied(metric: Any) -> None:
    x, y = noisy(200)
    net = nn.Linear(42, 3)
    before = net.weight.detach().clone()
    model = TopKNeighborsClassifier(net, k=3, steps=10, metric=metric, random_state=0).fit(x, y)
    assert torch.equal(net.weight, before) and not torch.equal(model.network_.weight, before)
    z = model.embed(x[:20])
    assert z.shape == (20, 3) and (metric == "euclidean" or np.allclose(np.linalg.norm(z, axis=1), 1, atol=1e-5))
    distances, indices = model.kneighbors(x[:20], 4)
    assert (indices[:, 0] == np.arange(20)).all() and (np.diff(distances) >= -1e-6).all()


def test_seeded_fits_agree_pickle_and_cross_validation() -> None:
    x, y = noisy(200)
    state = torch.get_rng_state()
    one = TopKNeighborsClassifier(k=3, steps=10, random_state=0).fit(x, y)
    two = pickle.loads(pickle.dumps(clone(one).fit(x, y)))
    assert torch.equal(one.points_, two.points_) and torch.equal(state, torch.get_rng_state())
    assert len(cross_val_score(one, x, y, cv=3)) == 3


def test_one_class_few_rows_and_constant_columns() -> None:
    x, _ = noisy(12)
    assert (TopKNeighborsClassifier(k=3, steps=3).fit(x, np.full(12, 4)).predict(x) == 4).all()
    lone = TopKNeighborsClassifier(k=1, steps=3).fit(x, np.arange(12))  # no class twice
    assert (lone.predict(x) == np.arange(12)).all()
    assert TopKNeighborsRegressor(k=12, steps=3).fit(np.ones((12, 2)), np.arange(12.0)).predict(np.ones((1, 2))) == pytest.approx(5.5)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"k": 13}, ValueError, "at most n_samples=12, got 13"),
        ({"k": 0}, ValueError, "k must be"),
        ({"batch_size": 1}, ValueError, "at least 2"),
        ({"search": "tree"}, ValueError, "search must be"),
        ({"metric": "l1"}, ValueError, "metric must be"),
        ({"method": "sigmod"}, ValueError, "did you mean"),
        ({"estimator": "net"}, TypeError, "torch.nn.Module or None"),
    ],
)
def test_errors_say_what_must_hold(options: dict, error: type[Exception], message: str) -> None:
    x, y = noisy(12)
    with pytest.raises(error, match=message):
        TopKNeighborsClassifier(**{"k": 3, "steps": 2} | options).fit(x, y)


def test_labels_that_do_not_fit() -> None:
    x, y = noisy(30)
    with pytest.raises(ValueError, match="inconsistent numbers of samples"):
        TopKNeighborsClassifier(steps=2).fit(x, y[:-1])
    with pytest.raises(ValueError, match="Unknown label type"):
        TopKNeighborsClassifier(steps=2).fit(x, x[:, 0])
    with pytest.raises(ValueError, match="NaN"):
        TopKNeighborsRegressor(steps=2).fit(x, np.where(y > 0, np.nan, 1.0))
    model = TopKNeighborsClassifier(steps=2).fit(x, y)
    with pytest.raises(ValueError, match="n_neighbors must be between 1 and n_samples=30"):
        model.kneighbors(x, 31)
    with pytest.raises(ValueError, match="42 features"):
        model.predict(x[:, :3])
