"""scikit-learn's contract, and what a learned dictionary promises beyond it."""

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.datasets import load_digits
from sklearn.decomposition import PCA
from sklearn.utils.estimator_checks import parametrize_with_checks

from khot.sklearn import TopKDictionary


@parametrize_with_checks([TopKDictionary(max_iter=2)])
def test_scikit_learns_own_checks(estimator: Any, check: Any) -> None:
    check(estimator)


def made(**options: Any) -> TopKDictionary:
    return TopKDictionary(**{"n_components": 80, "k": 4, "max_iter": 4, "batch_size": 300, "random_state": 0} | options)


X = load_digits().data - load_digits().data.mean(0)


def error(model: Any, x: np.ndarray) -> float:
    return float(((model.inverse_transform(model.transform(x)) - x) ** 2).mean())


def test_better_than_principal_components_of_the_same_size() -> None:
    model = made().fit(X[:1200])
    codes = model.transform(X[1200:])
    assert ((codes != 0).sum(1) == 4).all()
    assert error(model, X[1200:]) < 0.85 * error(PCA(4).fit(X[:1200]), X[1200:])
    assert model.errors_[-1] < model.errors_[0] and len(model.errors_) == 4


def test_every_atom_has_length_one_and_is_used() -> None:
    model = made().fit(X)
    np.testing.assert_allclose(np.linalg.norm(model.components_, axis=1), 1)
    assert ((model.transform(X) != 0).sum(0) > 0).all()


def test_partial_fit_learns_and_remembers() -> None:
    model = made()
    for _ in range(4):
        for rows in np.array_split(X, 6):
            model.partial_fit(rows)
    assert model.n_steps_ == 24 and error(model, X) < 1.1 * error(made().fit(X), X)
    whole, two = made().partial_fit(X[:300]), made().partial_fit(X[:300])
    two = pickle.loads(pickle.dumps(two))
    np.testing.assert_array_equal(whole.partial_fit(X[300:600]).components_, two.partial_fit(X[300:600]).components_)


def test_an_error_decides_how_many() -> None:
    model = made(k=None, error=1.0).fit(X)
    codes = model.transform(X)
    counts = (codes != 0).sum(1)
    assert counts.min() < counts.max()
    assert (np.sqrt(((model.inverse_transform(codes) - X) ** 2).mean(1)) <= 1.0 + 1e-6).all()


def test_seeded_fits_agree_and_leave_the_global_generators_alone() -> None:
    state = torch.get_rng_state()
    one = made(max_iter=1).fit(X[:400])
    two = clone(one).fit(X[:400])
    np.testing.assert_array_equal(one.components_, two.components_)
    assert torch.equal(state, torch.get_rng_state())


def test_float32_stays() -> None:
    model = made(max_iter=1).fit(X[:400].astype(np.float32))
    assert model.components_.dtype == np.float32 and model.transform(X[:5].astype(np.float32)).dtype == np.float32


def test_constant_and_repeated_columns_one_row_and_few_rows() -> None:
    x = np.column_stack([X[:300, 20:30], X[:300, 20:30], np.full(300, 7.0), np.zeros(300)])
    model = made(n_components=30, k=3).fit(x)
    assert np.isfinite(model.components_).all() and np.isfinite(model.transform(x)).all()
    one = made(n_components=6, k=2, max_iter=2).fit(X[:1])
    np.testing.assert_allclose(one.inverse_transform(one.transform(X[:1])), X[:1], atol=1e-8)
    zeros = made(n_components=6, k=2).fit(np.zeros((5, 4)))
    assert not zeros.transform(np.zeros((5, 4))).any() and np.isfinite(zeros.components_).all()


def test_names_of_the_codes() -> None:
    model = made(n_components=5, k=2, max_iter=1).fit(X)
    assert list(model.get_feature_names_out())[:2] == ["topkdictionary0", "topkdictionary1"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"k": 65}, r"min\(n_components, n_features\)=64, got 65"),
        ({"k": 3, "n_components": 2}, "=2, got 3"),
        ({"k": 0}, "k must be"),
        ({"n_components": 1.5}, "n_components must be"),
        ({"max_iter": 0}, "max_iter"),
        ({"batch_size": -1}, "batch_size"),
        ({"error": -1.0}, "error must be"),
    ],
)
def test_errors_say_what_must_hold(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        made(**options).fit(X)


def test_nan_is_refused() -> None:
    with pytest.raises(ValueError, match="NaN"):
        made().fit(np.where(X > 9, np.nan, X))
