"""Equations from samples: the terms of Lorenz' system from a noisy trajectory, and an oscillator's from few samples at unequal times.

    python examples/sindy.py [--quick] [--out sindy.png]

Needs: pip install khot[examples]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from scipy.integrate import solve_ivp
from scipy.signal import savgol_filter
from torch import Tensor

import khot
from khot.sklearn import TopKRegressor

OSCILLATOR = [{"y"}, {"x", "y", "x^2 y"}]


def lorenz(t: float, x: np.ndarray) -> list[float]:
    return [10 * (x[1] - x[0]), x[0] * (28 - x[2]) - x[1], x[0] * x[1] - 8 / 3 * x[2]]


def van_der_pol(t: float, x: np.ndarray) -> list[float]:
    return [x[1], (1 - x[0] ** 2) * x[1] - x[0]]


def dense() -> list[str]:
    """Many samples with noise: derivatives by smoothing, terms by best subset, their number by the elbow of the error."""
    random, times = np.random.RandomState(0), np.arange(0, 4, 0.002)
    x = solve_ivp(lorenz, (0, 4), [-8, 8, 27], t_eval=times, rtol=1e-10, atol=1e-10).y.T
    x += 0.002 * np.sqrt(np.square(x).mean()) * random.normal(size=x.shape)
    values, slope = (savgol_filter(x, 21, 4, deriv=d, delta=0.002, axis=0)[10:-10] for d in (0, 1))
    library = khot.nn.PolynomialLibrary(dim=3, degree=5)
    terms, names = library(torch.from_numpy(values)).numpy(), library.names("xyz")
    model = TopKRegressor(range(1, 8), criterion="elbow", fit_intercept=False, random_state=0).fit(terms, slope)
    written = []
    for variable, coef in zip("xyz", model.coef_, strict=True):
        parts = [f"{coef[place]:+.3g} {names[place]}" for place in np.flatnonzero(coef)]
        written.append(f"{variable}' = {' '.join(parts)}")
    return written


def sparse_samples(seed: int, gap: float = 1.0) -> tuple[list[Tensor], list[Tensor]]:
    """Four trajectories of 25 samples, about six in a period, at unequal times, with 1 % noise."""
    random, xs, ts = np.random.RandomState(seed), [], []
    for _ in range(4):
        t = np.cumsum(gap * random.uniform(0.3, 1.7, 25))
        x = solve_ivp(van_der_pol, (0, t[-1]), random.uniform(0.5, 2, 2), t_eval=t, rtol=1e-9, atol=1e-9).y.T
        xs.append(torch.from_numpy(x + 0.01 * x.std(0) * random.normal(size=x.shape)))
        ts.append(torch.from_numpy(t))
    return xs, ts


def fitted(seed: int, steps: int) -> khot.nn.SINDy:
    """steps=0: least squares on differences. More: terms chosen by the gradient of a rollout."""
    model = khot.nn.SINDy(khot.nn.PolynomialLibrary(dim=2, degree=3), dim=2, k=[1, 3])
    return model.fit(*sparse_samples(seed), steps=steps, substeps=3)


def is_right(model: khot.nn.SINDy) -> bool:
    names = model.library.names(model.variables)
    return [{name for name, on in zip(names, row, strict=True) if on} for row in model.mask] == OSCILLATOR


def main(argv: list[str] | None = None) -> dict[str, float]:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--quick", action="store_true", help="one seed instead of five")
    options.add_argument("--out", type=Path, default=Path("sindy.png"), help="the picture")
    given = options.parse_args(argv)
    print("Lorenz, 2000 samples, 0.2 % noise, 56 candidate terms:")
    equations = dense()
    print("\n".join(f"  {line}" for line in equations))
    print("Van der Pol, 4 x 25 samples at unequal times, 1 % noise, 10 candidate terms:")
    found: dict[str, float] = {"lorenz terms": float(sum(line.count("+") + line.count("-") for line in equations))}
    seeds, last = range(1) if given.quick else range(5), None
    for name, steps in (("differences", 0), ("rollout", 120)):
        models = [fitted(seed, steps) for seed in seeds]
        last = models[0]
        found[name] = sum(map(is_right, models)) / len(models)
        print(f"  {name:12} right terms in {found[name]:4.0%} of {len(models)};  first: {',  '.join(last.equations())}")
    assert last is not None
    draw(last, given.out)
    return found


def draw(model: khot.nn.SINDy, path: Path) -> None:
    """The samples of the first trajectory, and what the equations say between them."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    xs, ts = sparse_samples(0)
    times = torch.linspace(float(ts[0][0]), float(ts[0][-1]), 400, dtype=torch.float64)
    states = model.simulate(xs[0][0], times)
    figure, axis = plt.subplots(figsize=(8, 3))
    for variable, colour in enumerate(("tab:blue", "tab:orange")):
        axis.plot(times, states[:, variable], c=colour, label=f"{model.variables[variable]}, learned")
        axis.scatter(ts[0], xs[0][:, variable], c=colour, s=18)
    axis.set(xlabel="t", title=",   ".join(model.equations()))
    axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
