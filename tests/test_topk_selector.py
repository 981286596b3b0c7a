"""scikit-learn's contract, and what the selector promises beyond it."""

import pickle
import sys
from typing import Any

import numpy as np
import pandas as pd
import pytest
import scipy.sparse
import torch
from sklearn.base import clone
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.utils.estimator_checks import parametrize_with_checks
from torch import nn

from khot.sklearn import TopKSelector


@parametrize_with_checks([TopKSelector(steps=20)])
def test_scikit_learns_own_checks(estimator: Any, check: Any) -> None:
    check(estimator)


def table(n: int = 300, features: int = 15) -> tuple[np.ndarray, np.ndarray]:
    x = np.random.RandomState(0).normal(size=(n, features)) * 10.0 ** np.arange(-7, features - 7)
    z = x / 10.0 ** np.arange(-7, features - 7)
    return x, z[:, 2] * z[:, 5] + z[:, 9]


def fast(**options: Any) -> TopKSelector:
    return TopKSelector(**{"k": 3, "steps": 400, "hidden": 32, "random_state": 0, "score_rate": 0.1} | options)


def test_regression_finds_a_product_whatever_the_units() -> None:
    selector = fast().fit(*table())
    assert selector.get_support(indices=True).tolist() == [2, 5, 9]
    assert sorted(selector.ranking_) == list(range(1, 16)) and set(selector.ranking_[[2, 5, 9]]) == {1, 2, 3}
    assert (np.argsort(-selector.scores_, kind="stable")[:3] == np.argsort(selector.ranking_)[:3]).all()


def test_classification_beats_chance_and_needs_no_numbers() -> None:
    x, y = load_digits(return_X_y=True)
    labels = np.array(list("abcdefghij"))[y]
    pipe = make_pipeline(TopKSelector(k=12, steps=300, random_state=0), LogisticRegression(max_iter=3000)).fit(x[:1200], labels[:1200])
    assert pipe.score(x[1200:], labels[1200:]) > 0.75


def test_without_y_all_columns_are_reconstructed_from_k() -> None:
    base = np.random.RandomState(0).normal(size=(200, 3))
    x = np.concatenate([base[:, :1]] * 5 + [base[:, 1:2]] * 3 + [base[:, 2:]] * 2, axis=1)  # three groups of equal columns
    chosen = fast(rate=1e-2).fit(x).get_support(indices=True)
    assert len({0 if c < 5 else 1 if c < 8 else 2 for c in chosen}) == 3


def test_names_of_a_data_frame() -> None:
    x, y = table()
    frame = pd.DataFrame(x, columns=[f"c{i}" for i in range(15)])
    selector = fast(always=["c14"], steps=50).fit(frame, y).set_output(transform="pandas")
    assert "c14" in selector.get_feature_names_out() and len(selector.get_feature_names_out()) == 3
    assert list(selector.transform(frame).columns) == list(selector.get_feature_names_out())
    assert np.isinf(selector.scores_[14]) and selector.ranking_[14] == 1


def test_path_is_nested_and_counts() -> None:
    selector = fast(steps=60).fit(*table())
    path = selector.path([1, 4, 15])
    assert path.sum(1).tolist() == [1, 4, 15] and (path[0] <= path[1]).all() and (path[1] <= path[2]).all()
    with pytest.raises(ValueError, match="between 1 and n_features=15"):
        selector.path([16])


def test_seeded_fits_agree_and_leave_the_global_generator_alone() -> None:
    x, y = table()
    state = torch.get_rng_state()
    one, two = fast(steps=60).fit(x, y), pickle.loads(pickle.dumps(fast(steps=60).fit(x, y)))
    assert (one.scores_ == two.scores_).all() and torch.equal(state, torch.get_rng_state())
    assert (clone(one).fit(x, y).scores_ == one.scores_).all()


def test_grid_search() -> None:
    x, y = table()
    pipe = make_pipeline(fast(steps=40), LogisticRegression())
    grid = GridSearchCV(pipe, {"topkselector__k": [1, 3]}, cv=2).fit(x, y > 0)
    assert grid.best_params_["topkselector__k"] in (1, 3)


def test_a_module_of_ones_own_judges_and_is_not_changed() -> None:
    x, _ = table()
    judge = nn.Linear(15, 1)
    before = judge.weight.detach().clone()
    linear = x[:, 1] * 1e6 - x[:, 3] * 1e4
    selector = fast(k=2, estimator=judge, rate=1e-2).fit(x, linear)
    assert selector.get_support(indices=True).tolist() == [1, 3] and torch.equal(judge.weight, before)


def test_a_linear_judge_finds_the_linear_part_of_a_small_sample() -> None:
    generator = np.random.RandomState(0)
    x = generator.normal(size=(120, 200))
    y = x[:, 7] + x[:, 70] - x[:, 170] > 0
    chosen = fast(hidden=0, rate=1e-2, design=None).fit(x, y).get_support(indices=True)
    assert chosen.tolist() == [7, 70, 170]


def test_bootstraps_average_runs() -> None:
    x, y = table(60)
    single, mean = fast(steps=100).fit(x, y), fast(steps=100, bootstraps=3).fit(x, y)
    assert mean.scores_.shape == single.scores_.shape and not np.allclose(mean.scores_, single.scores_)


def test_stops_early_once_the_choice_is_certain(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def bar(self: TopKSelector, steps: range) -> Any:
        for step in steps:
            seen.append(step)
            yield step

    monkeypatch.setattr(TopKSelector, "_bar", bar)
    x, y = table()
    fast(steps=600).fit(x, y)
    early = len(seen)
    seen.clear()
    fast(steps=600, n_iter_no_change=None).fit(x, y)
    assert early < len(seen) == 600


def test_silent_unless_verbose(capsys: pytest.CaptureFixture[str]) -> None:
    fast(steps=20).fit(*table())
    assert capsys.readouterr() == ("", "")
    fast(steps=20, verbose=True).fit(*table())
    assert "TopKSelector" in capsys.readouterr().err and "tqdm" in sys.modules


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"k": 16}, "between 1 and n_features=15"),
        ({"k": 0}, "k must be"),
        ({"k": 1.5}, "share"),
        ({"always": ["a"]}, "always must name"),
        ({"always": [20]}, "always must name"),
        ({"task": "guess"}, "task must be"),
        ({"bootstraps": -1}, "bootstraps"),
        ({"method": "sigmod"}, "did you mean"),
    ],
)
def test_errors_say_what_must_hold(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fast(**options).fit(*table())


def test_sparse_input_nan_and_matrices_of_labels_are_refused() -> None:
    x, y = table()
    with pytest.raises(TypeError, match=r"[Ss]parse"):
        fast().fit(scipy.sparse.csr_matrix(x), y)
    with pytest.raises(ValueError, match="NaN"):
        fast().fit(np.where(x > 1e5, np.nan, x), y)
    with pytest.raises(ValueError, match="can only be regressed"):
        fast().fit(x, np.stack([y > 0, y > 1], 1))


@pytest.mark.parametrize(("k", "count"), [(None, 7), (0.2, 3), (np.int64(4), 4)])
def test_k_as_share_half_or_numpy(k: Any, count: int) -> None:
    assert fast(k=k, steps=5).fit(*table()).get_support().sum() == count
