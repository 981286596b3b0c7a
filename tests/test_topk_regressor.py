"""Least squares with exactly k columns: scikit-learn's contract, brute force, and what cannot be solved plainly."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.linear_model import LinearRegression, Ridge
from sklearn.model_selection import KFold
from sklearn.utils.estimator_checks import parametrize_with_checks

from khot.sklearn import TopKRegressor
from khot.subset import make_problem
from khot.subset.branch import prove


@parametrize_with_checks([TopKRegressor(k=1, n_starts=2), TopKRegressor(alpha=0.1, criterion="aicc", shared=True, n_starts=1)])
def test_scikit_learns_own_checks(estimator: Any, check: Any) -> None:
    check(estimator)


def problem(seed: int, most: int = 20) -> tuple[np.ndarray, np.ndarray]:
    """Random columns, every second time far from orthogonal; a sparse truth, with noise in two of three."""
    random = np.random.RandomState(seed)
    p = random.randint(4, most + 1)
    n = random.randint(p + 2, 60)
    mix = random.normal(size=(p, p)) if seed % 2 else np.eye(p)
    x = random.normal(size=(n, p)) @ mix
    return x, x @ (random.normal(size=p) * (random.uniform(size=p) < 0.4)) + seed % 3 * random.normal(size=n)


def best_loss(x: np.ndarray, y: np.ndarray, k: int) -> float:
    """Brute force with an intercept: the least mean squared residual over all sets of ``k`` columns."""
    x, y = x - x.mean(0), y - y.mean()
    sets = torch.tensor(list(itertools.combinations(range(x.shape[1]), k)))
    gram, moment = torch.from_numpy(x.T @ x), torch.from_numpy(x.T @ y)
    own = moment[sets]
    weights = torch.linalg.solve(gram[sets.unsqueeze(2), sets.unsqueeze(1)], own)
    best = sets[(own * weights).sum(1).argmax()].numpy()
    return float(np.square(y - x[:, best] @ np.linalg.lstsq(x[:, best], y, rcond=None)[0]).mean())


@pytest.mark.parametrize("block", range(10))
def test_equals_brute_force(block: int) -> None:
    """200 problems of at most 20 columns; sizes 1 to 4."""
    for seed in range(20 * block, 20 * block + 20):
        x, y = problem(seed)
        model = TopKRegressor(k=range(1, 5), random_state=0).fit(x, y)
        want = [best_loss(x, y, k) for k in range(1, 5)]
        np.testing.assert_allclose(model.path_.loss[:, 0], want, rtol=1e-8, atol=1e-12 * y.var())


def test_pairs_of_many_columns_are_the_best_ones() -> None:
    """Without random starts: all pairs are looked at, so that the best two columns of 200 are found, repeated columns or not."""
    for seed in range(5):
        random = np.random.RandomState(seed)
        x = random.normal(size=(60, 200)) + 3 * random.normal(size=(60, 1))  # strongly correlated
        x[:, 7] = x[:, 3]
        y = x[:, 10] - x[:, 20] + 0.5 * x[:, 30] + random.normal(size=60)
        model = TopKRegressor(k=2, n_starts=0).fit(x, y)
        x = np.delete(x, 7, axis=1)  # a singular pair has no solution in the oracle
        np.testing.assert_allclose(model.path_.loss[0, 0], best_loss(x, y, 2), rtol=1e-8)


@pytest.mark.parametrize("block", range(4))
def test_branch_and_bound_finds_the_best_set_from_a_bad_one(block: int) -> None:
    for seed in range(5 * block, 5 * block + 5):
        x, y = problem(seed, most=14)
        x, y = x - x.mean(0), y - y.mean()
        made = make_problem(torch.from_numpy(x)[None], torch.from_numpy(y)[None, :, None])
        for k in range(1, 5):
            start = torch.arange(x.shape[1]) < k
            best, proven = prove(made, 0, start, nodes=100_000)
            columns = x[:, best.numpy()]
            loss = np.square(y - columns @ np.linalg.lstsq(columns, y, rcond=None)[0]).mean()
            assert proven and loss == pytest.approx(best_loss(x, y, k), rel=1e-7, abs=1e-10 * y.var())


def test_several_ridges_are_those_of_each() -> None:
    x, y = problem(3)
    ridges = (0.0, 0.1, 10.0)
    whole = TopKRegressor(k=range(1, 4), alpha=ridges, random_state=0).fit(x, y)
    apart = [TopKRegressor(k=range(1, 4), alpha=alpha, random_state=0).fit(x, y).path_ for alpha in ridges]
    np.testing.assert_allclose(whole.path_.coef, np.concatenate([path.coef for path in apart]), rtol=1e-9, atol=1e-12)
    np.testing.assert_array_equal(whole.path_.k, [1, 2, 3] * 3)
    np.testing.assert_array_equal(whole.path_.alpha, np.repeat(ridges, 3))
    best = int(whole.path_.criterion[:, 0].argmin())
    assert whole.alpha_ == whole.path_.alpha[best] and whole.k_ == whole.path_.k[best]
    held = TopKRegressor(k=[1, 3], alpha=[0.0, 1e6], criterion="validation", random_state=0).fit(x, np.stack([y, -y], 1))
    np.testing.assert_array_equal(held.alpha_, [0.0, 0.0])
    for alpha, criterion in (([0.0, 1.0], "elbow"), ([], "bic"), ([1.0, -1.0], "bic"), ("a", "bic")):
        with pytest.raises(ValueError, match="alpha"):
            TopKRegressor(alpha=alpha, criterion=criterion).fit(x, y)  # pyright: ignore[reportArgumentType]


def test_certificates() -> None:
    random = np.random.RandomState(0)
    x = random.normal(size=(60, 30))
    y = x[:, :6] @ random.normal(size=(6, 2)) + random.normal(size=(60, 2))
    model = TopKRegressor(k=[3, 6], certify=True, random_state=0).fit(x, y)
    assert model.certified_.shape == (2, 2) and model.certified_.all()
    assert not TopKRegressor(k=6, certify=True, max_nodes=2, random_state=0).fit(x, y).certified_.any()
    assert TopKRegressor(k=2, groups=np.arange(30) // 3, shared=True, certify=True, random_state=0).fit(x, y).certified_.all()
    twice = np.concatenate([x[:, :8], x[:, :8]], 1)  # every column two times
    again = TopKRegressor(k=3, certify=True, random_state=0).fit(twice, y[:, 0])
    assert again.certified_.all() and again.path_.loss[0, 0] == pytest.approx(best_loss(x[:, :8], y[:, 0], 3))


def test_sizes_and_coefficients_are_what_they_say() -> None:
    x, y = problem(5)
    targets = np.stack([y, -2 * x[:, 1] + x[:, 2] + 3], 1)
    model = TopKRegressor(k=range(4), random_state=0).fit(x, targets)
    assert (np.count_nonzero(model.path_.coef, axis=2) == np.arange(4).reshape(-1, 1)).all()
    assert model.k_[1] == 2 and model.support_[1].nonzero()[0].tolist() == [1, 2] and model.intercept_[1] == pytest.approx(3)
    plain = LinearRegression().fit(x[:, model.support_[0]], y)
    np.testing.assert_allclose(model.coef_[0][model.support_[0]], plain.coef_)
    np.testing.assert_allclose(model.predict(x)[:, 0], plain.predict(x[:, model.support_[0]]))


def test_ridge_and_weights_are_scikit_learns() -> None:
    x, y = problem(7)
    weight = np.random.RandomState(0).uniform(0.1, 2, size=len(x))
    model = TopKRegressor(k=3, alpha=2.5, random_state=0).fit(x, y, weight)
    plain = Ridge(2.5).fit(x[:, model.support_], y, weight)
    np.testing.assert_allclose(model.coef_[model.support_], plain.coef_)
    assert model.intercept_ == pytest.approx(plain.intercept_)


def test_outputs_may_share_their_columns() -> None:
    random = np.random.RandomState(0)
    x = random.normal(size=(200, 30))
    y = x[:, [3, 8]] @ random.normal(size=(2, 5)) + 2 * random.normal(size=(200, 5))
    model = TopKRegressor(k=range(1, 6), shared=True, random_state=0).fit(x, y)
    assert (model.support_ == model.support_[0]).all() and model.support_[0].nonzero()[0].tolist() == [3, 8]


def test_groups_enter_together() -> None:
    random = np.random.RandomState(0)
    x = random.normal(size=(100, 12))
    groups = [0, 0, 0, 1, 2, 2, 3, 3, 3, 4, 5, 5]
    y = x[:, 4] - 2 * x[:, 5] + 3 * x[:, 9] + 0.1 * random.normal(size=100)
    model = TopKRegressor(k=2, groups=groups, random_state=0).fit(x, y)
    assert model.support_.nonzero()[0].tolist() == [4, 5, 9]
    losses = []
    for pair in itertools.combinations(range(6), 2):
        chosen = np.isin(groups, pair)
        losses.append(np.square(y - LinearRegression().fit(x[:, chosen], y).predict(x[:, chosen])).mean())
    assert model.path_.loss[0, 0] == pytest.approx(min(losses))
    with pytest.raises(ValueError, match="groups must hold one label for each of the 12 columns"):
        TopKRegressor(k=2, groups=[1, 2]).fit(x, y)
    with pytest.raises(ValueError, match="number of groups=6"):
        TopKRegressor(k=7, groups=groups).fit(x, y)


@pytest.mark.parametrize("criterion", ["aic", "aicc", "bic", "elbow", "validation", "stability"])
def test_criteria_find_the_size(criterion: str) -> None:
    random = np.random.RandomState(1)
    x = random.normal(size=(300, 15))
    y = np.stack([x[:, 2] - x[:, 3] + x[:, 4], 2 * x[:, 5]], 1) + 0.5 * random.normal(size=(300, 2))
    model = TopKRegressor(k=range(1, 7), criterion=criterion, random_state=0).fit(x, y)
    assert model.support_[0, 2:5].all() and model.support_[1, 5]
    if criterion in ("bic", "elbow", "stability"):
        assert model.k_.tolist() == [3, 1]
    assert (model.path_.criterion.argmin(0) == model.k_ - 1).all()


def test_splits_are_the_users() -> None:
    x, y = problem(4)
    model = TopKRegressor(k=range(1, 5), criterion="validation", cv=KFold(3), random_state=0).fit(x, y)
    want = np.zeros(4)
    for train, test in KFold(3).split(x):
        part = TopKRegressor(k=range(1, 5), random_state=0).fit(x[train], y[train]).path_
        errors = np.array([np.square(x[test] @ part.coef[i, 0] + part.intercept[i, 0] - y[test]).mean() for i in range(4)])
        want += len(test) * np.log(errors) + 2 * np.arange(1, 5)
    np.testing.assert_allclose(model.path_.criterion[:, 0], want)


def test_columns_that_cannot_help_are_handled() -> None:
    random = np.random.RandomState(0)
    x = random.normal(size=(40, 4))
    wide = np.concatenate([x, x[:, :2], np.full((40, 1), 7.3), 1e-30 * x[:, 2:3], 1e30 * x[:, 3:]], 1)
    y = x @ [1.0, 2, 3, 4]
    model = TopKRegressor(k=4, random_state=0).fit(wide, y)
    assert model.score(wide, y) == pytest.approx(1) and model.support_.sum() == 4
    everything = TopKRegressor(k=9, random_state=0).fit(wide, y)  # more columns than the rank
    assert np.isfinite(everything.coef_).all() and everything.score(wide, y) == pytest.approx(1)
    constant = TopKRegressor(k=1, random_state=0).fit(np.ones((5, 2)), np.arange(5.0))
    assert constant.predict(np.ones((1, 2))) == pytest.approx(2) and np.isfinite(constant.coef_).all()


def test_one_sample_and_more_columns_than_rows() -> None:
    one = TopKRegressor(k=1, random_state=0).fit([[1.0, 2.0]], [3.0])
    assert one.predict([[1.0, 2.0]]) == pytest.approx(3)
    random = np.random.RandomState(0)
    x = random.normal(size=(25, 100))
    model = TopKRegressor(k=range(1, 5), random_state=0).fit(x, 5 * x[:, 17] - 3 * x[:, 60])
    assert model.support_.nonzero()[0].tolist() == [17, 60]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"k": 5}, "k must be a whole number from 0 to n_features=4"),
        ({"k": 1.5}, "k must be a whole number"),
        ({"k": []}, "k must be a whole number"),
        ({"k": "two"}, "k must be a whole number"),
        ({"k": True}, "k must be a whole number"),
        ({"k": 1, "alpha": -1.0}, "alpha must be a finite number of at least 0"),
        ({"k": 1, "criterion": "bix"}, "did you mean 'bic'"),
        ({"k": 1, "n_starts": -1}, "n_starts"),
        ({"k": 1, "agreement": 0.0}, "agreement"),
    ],
)
def test_bad_input_is_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        TopKRegressor(**options).fit(np.eye(4), np.arange(4.0))


def test_seeded_fits_agree_and_leave_the_generators_alone() -> None:
    x, y = problem(3)
    state = torch.get_rng_state()
    one, two = (TopKRegressor(k=3, random_state=1).fit(x, y) for _ in range(2))
    assert (one.coef_ == two.coef_).all() and torch.equal(state, torch.get_rng_state())


def test_inside_pysindy() -> None:
    pysindy = pytest.importorskip("pysindy")
    t = np.linspace(0, 6, 1200)
    x = np.stack([np.exp(-0.1 * t) * np.cos(2 * t), -np.exp(-0.1 * t) * np.sin(2 * t)], 1)  # x' = -0.1 x + 2 y, y' = -2 x - 0.1 y
    optimizer = pysindy.WrappedOptimizer(TopKRegressor(k=2, fit_intercept=False, random_state=0))
    model = pysindy.SINDy(optimizer=optimizer, feature_library=pysindy.PolynomialLibrary(3)).fit(x, t=t)
    found = model.coefficients()
    assert (np.flatnonzero(found[0]).tolist(), np.flatnonzero(found[1]).tolist()) == ([1, 2], [1, 2])
    np.testing.assert_allclose(found[:, 1:3], [[-0.1, 2], [-2, -0.1]], atol=2e-3)
