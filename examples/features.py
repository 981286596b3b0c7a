"""Which pixels tell the digits apart? Learned selection against the usual filters, on scikit-learn's 8 x 8 digits.

    python examples/features.py [--quick] [--k 10] [--out features.png]

Needs: pip install khot[examples]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits
from sklearn.ensemble import ExtraTreesClassifier
from sklearn.feature_selection import f_classif, mutual_info_classif
from sklearn.model_selection import train_test_split

from khot.sklearn import TopKSelector


def learned(x: np.ndarray, y: np.ndarray, k: int, steps: int) -> np.ndarray:
    """k pixels chosen together: a network is trained behind a mask of k pixels."""
    return TopKSelector(k, steps=steps, random_state=0, verbose=True).fit(x, y).get_support(indices=True)


def by_information(x: np.ndarray, y: np.ndarray, k: int, steps: int) -> np.ndarray:
    return np.argsort(-mutual_info_classif(x, y, discrete_features=True))[:k]


def by_f_test(x: np.ndarray, y: np.ndarray, k: int, steps: int) -> np.ndarray:
    changing = np.flatnonzero(x.std(0) > 0)  # some pixels are always 0
    return changing[np.argsort(-f_classif(x[:, changing], y)[0])[:k]]


def by_variance(x: np.ndarray, y: np.ndarray, k: int, steps: int) -> np.ndarray:
    return np.argsort(-x.var(0))[:k]


def at_random(x: np.ndarray, y: np.ndarray, k: int, steps: int) -> np.ndarray:
    return np.random.RandomState(0).permutation(x.shape[1])[:k]


METHODS: dict[str, Callable[[np.ndarray, np.ndarray, int, int], np.ndarray]] = {
    "khot (learned)": learned,
    "mutual information": by_information,
    "F-test": by_f_test,
    "variance": by_variance,
    "random": at_random,
}


def main(argv: list[str] | None = None) -> dict[str, float]:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--quick", action="store_true", help="fewer steps")
    options.add_argument("--k", type=int, default=10, help="how many of the 64 pixels")
    options.add_argument("--out", type=Path, default=Path("features.png"), help="the picture")
    given = options.parse_args(argv)

    x, y = load_digits(return_X_y=True)
    train_x, test_x, train_y, test_y = train_test_split(x, y, test_size=0.4, random_state=0, stratify=y)
    accuracy, chosen = {}, {}
    for name, choose in METHODS.items():
        began = time.perf_counter()
        index = choose(train_x, train_y, given.k, 150 if given.quick else 1000)
        seconds = time.perf_counter() - began
        forest = ExtraTreesClassifier(100, random_state=0).fit(train_x[:, index], train_y)
        accuracy[name], chosen[name] = forest.score(test_x[:, index], test_y), index
        print(f"{name:20} {len(index)} pixels   accuracy {accuracy[name]:.3f}   {seconds:5.1f} s")
    full = ExtraTreesClassifier(100, random_state=0).fit(train_x, train_y).score(test_x, test_y)
    print(f"{'all':20} 64 pixels   accuracy {full:.3f}")
    draw(x, chosen, accuracy, given.out)
    return accuracy


def draw(x: np.ndarray, chosen: dict[str, np.ndarray], accuracy: dict[str, float], path: Path) -> None:
    """The mean digit, and the chosen pixels of each method on it."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(chosen), figsize=(2.4 * len(chosen), 2.8))
    for axis, (name, index) in zip(axes, chosen.items(), strict=True):
        axis.imshow(x.mean(0).reshape(8, 8), cmap="Greys", vmax=24)
        rows, columns = np.divmod(index, 8)
        axis.scatter(columns, rows, c="tab:red", s=60)
        axis.set(title=f"{name}\n{accuracy[name]:.3f}", xticks=[], yticks=[])
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
