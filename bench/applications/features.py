"""Feature selection: k pixels of MNIST and Fashion-MNIST, judged by a forest of extremely randomized trees."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from bench.applications.cells import Clock, options, pivot, run
from bench.applications.data import Images, images
from bench.applications.features_baselines import STEPPED, lassonet_package
from bench.common import Table, chosen, print_tables

Chooser = Callable[[np.ndarray, np.ndarray, int, int], np.ndarray]  # (x, y, k, seed) -> indices

# The small protocol: LassoNet's own loader takes the 10,000 test images and splits them 80/20.
# Published accuracies at k = 50 (Lemhadri et al., PMC9453696, table 2): printed beside our own runs, never mixed with them.
PUBLISHED = {"mnist": {"all": 0.941, "fisher": 0.818, "hsic-lasso": 0.869, "pfa": 0.879, "lassonet": 0.892},
             "fashion": {"all": 0.831, "fisher": 0.660, "hsic-lasso": 0.775, "pfa": 0.784, "lassonet": 0.794}}  # fmt: skip


STEPS = {"small": 1000, "full": 4000}  # gradient steps of a fit


def learned(**choices: Any) -> Chooser:
    """khot's selector with the steps of the protocol."""

    def choose(x: np.ndarray, y: np.ndarray, k: int, seed: int) -> np.ndarray:
        from khot.sklearn import TopKSelector

        return TopKSelector(k, steps=_steps(x), random_state=seed, **choices).fit(x, y).get_support(indices=True)

    return choose


def _steps(x: np.ndarray) -> int:
    return STEPS["small" if len(x) < 20_000 else "full"]


def everything(x: np.ndarray, y: np.ndarray, k: int, seed: int) -> np.ndarray:
    return np.arange(x.shape[1])


def variance(x: np.ndarray, y: np.ndarray, k: int, seed: int) -> np.ndarray:
    return np.argsort(-x.var(0))[:k]


def f_test(x: np.ndarray, y: np.ndarray, k: int, seed: int) -> np.ndarray:
    from sklearn.feature_selection import f_classif

    changing = np.flatnonzero(x.std(0) > 0)  # some pixels are always 0
    return changing[np.argsort(-f_classif(x[:, changing], y)[0])[:k]]


def information(x: np.ndarray, y: np.ndarray, k: int, seed: int) -> np.ndarray:
    from sklearn.feature_selection import mutual_info_classif

    return np.argsort(-mutual_info_classif(np.round(8 * x), y, discrete_features=True, random_state=seed))[:k]


def forest(x: np.ndarray, y: np.ndarray, k: int, seed: int) -> np.ndarray:
    from sklearn.ensemble import ExtraTreesClassifier
    from sklearn.feature_selection import RFE

    return RFE(ExtraTreesClassifier(50, random_state=seed), n_features_to_select=k, step=0.2).fit(x, y).get_support(indices=True)


def lasso(x: np.ndarray, y: np.ndarray, k: int, seed: int) -> np.ndarray:
    """The k largest rows of an L1-regularised linear classifier whose strength leaves about k pixels."""
    from sklearn.linear_model import SGDClassifier

    for alpha in np.geomspace(3e-2, 1e-4, 12):
        weights = SGDClassifier(loss="log_loss", penalty="l1", alpha=alpha, max_iter=20, tol=None, random_state=seed).fit(x, y).coef_
        strength = np.abs(weights).max(0)
        if (strength > 0).sum() >= k:
            break
    return np.argsort(-strength)[:k]


def stepped(name: str, **choices: Any) -> Chooser:
    """A row of the other file with the number of gradient steps of this one."""
    return lambda x, y, k, seed: STEPPED[name](x, y, k, seed, _steps(x), **choices)


ROWS: dict[str, Chooser] = {
    "khot": learned(), "khot-sharp": learned(tau=(1.0, 0.1)), "khot-soft": learned(design=None), "all": everything,
    "variance": variance, "f-test": f_test, "information": information,
    "rfe-forest": forest, "l1": lasso, "stg": stepped("stg"), "lassonet": stepped("lassonet"), "concrete": stepped("concrete"),
    "concrete-supervised": stepped("concrete", supervised=True), "lassonet-package": lassonet_package,
}  # fmt: skip


def main(argv: list[str]) -> int:
    made = options("features", __doc__)
    made.add_argument("--protocol", choices=["small", "full"], default="small")
    made.add_argument("--ks", default="50,25,10")
    made.add_argument("--validate", action="store_true", help="score on a validation part of the training rows: for tuning")
    given = made.parse_args(argv)
    ks = [50] if given.quick else [int(k) for k in given.ks.split(",")]
    splits = given.seeds or (1 if given.quick else 10 if given.protocol == "small" else 5)
    names = ["mnist"] if given.quick else ["mnist", "fashion"]
    rows = chosen(given.rows, ROWS, ["khot", "variance"] if given.quick else None)
    cells = [
        {"protocol": given.protocol, "data": data, "row": row, "k": k, "seed": seed, "part": "validation" if given.validate else "test"}
        for seed in range(splits) for k in ks for data in names for row in rows if row != "all" or k == ks[0]
    ]  # fmt: skip
    found = run("features", given, cells, functools.partial(_cell, folder=given.data))
    print_tables(tables(found))
    return 0


def _cell(protocol: str, data: str, row: str, k: int, seed: int, part: str, folder: Path) -> dict[str, Any]:
    from sklearn.ensemble import ExtraTreesClassifier

    train, test = split(protocol, data, seed, folder, part)
    clock = Clock()
    index = ROWS[row](train.x, train.y, k, seed)
    fit = clock.seconds("fit_")
    judge = ExtraTreesClassifier(50, random_state=seed).fit(train.x[:, index], train.y)
    return {"accuracy": judge.score(test.x[:, index], test.y), "features": len(set(index.tolist())), **fit}


def split(protocol: str, data: str, seed: int, folder: Path, part: str) -> tuple[Images, Images]:
    """Small: the 10,000 test images, 80/20. Full: the 60,000 and the 10,000. For tuning the last eighth of the training rows is scored."""
    test = images(data, "t10k", folder)
    order = np.random.RandomState(seed).permutation
    if protocol == "small":
        rows = order(len(test.x))
        fit, held = np.split(rows, [len(rows) * 4 // 5])
        train, test = Images(test.x[fit], test.y[fit]), Images(test.x[held], test.y[held])
    else:
        train = images(data, "train", folder)
        rows = order(len(train.x))
        train = Images(train.x[rows], train.y[rows])
    if part == "test":
        return train, test
    cut = len(train.x) * 7 // 8
    return Images(train.x[:cut], train.y[:cut]), Images(train.x[cut:], train.y[cut:])


def tables(rows: list[dict[str, Any]]) -> list[Table]:
    made = []
    for protocol, data, part in dict.fromkeys((row["protocol"], row["data"], row["part"]) for row in rows):
        mine = [row for row in rows if (row["protocol"], row["data"], row["part"]) == (protocol, data, part)]
        published = ", ".join(f"{name} {value:.3f}" for name, value in PUBLISHED[data].items())
        note = f"Published at k = 50, not rerun: {published}." if protocol == "small" else ""
        made.append(pivot(f"{data}, {protocol} protocol, {part} accuracy", mine, "row", "k", "accuracy", note=note))
        if any("fit_cpu_seconds" in row for row in mine):
            made.append(pivot(f"{data}, {protocol} protocol, processor seconds of a fit", mine, "row", "k", "fit_cpu_seconds", digits=1))
    return made
