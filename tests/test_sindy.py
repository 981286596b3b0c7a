"""Equations of motion: libraries, the start by least squares, training through rollouts."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import khot
from khot.nn import FourierLibrary, FunctionLibrary, PolynomialLibrary, SINDy
from khot.nn._exchange import promising
from khot.nn._trajectories import runge_kutta


def van_der_pol(x: Tensor) -> Tensor:
    return torch.stack([x[..., 1], (1 - x[..., 0] ** 2) * x[..., 1] - x[..., 0]], -1)


def lotka_volterra(x: Tensor) -> Tensor:
    both = x[..., 0] * x[..., 1]
    return torch.stack([x[..., 0] - both, both - x[..., 1]], -1)


def sampled(field: Any, start: list[float], times: Tensor) -> Tensor:
    found = [torch.tensor(start, dtype=torch.float64)]
    for step in times.diff():
        found.append(runge_kutta(field, found[-1], step, max(1, int(step / 0.02))))
    return torch.stack(found)


def irregular(seed: int, count: int, gap: float) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (gap * (0.3 + 1.4 * torch.rand(count, dtype=torch.float64, generator=generator))).cumsum(0)


def right(model: SINDy, terms: list[set[str]]) -> bool:
    names = model.library.names(model.variables)
    return [{name for name, on in zip(names, row, strict=True) if on} for row in model.mask] == terms


def test_dense_samples_need_no_training() -> None:
    t = torch.linspace(0, 8, 800, dtype=torch.float64)
    model = SINDy(PolynomialLibrary(2, 3), dim=2, k=[1, 3]).fit(sampled(van_der_pol, [1.0, 0.5], t), t, steps=0)
    assert model.equations(digits=2) == ["x' = y", "y' = -x + y - x^2 y"]
    assert model.equations(digits=2, latex=True)[1] == "\\dot{y} = -x + y - x^{2} y"
    torch.testing.assert_close(
        model(torch.tensor([0.3, -0.7], dtype=torch.float64)), torch.tensor([-0.7, -0.937]).double(), atol=5e-3, rtol=0
    )
    again = model.simulate(torch.tensor([1.0, 0.5], dtype=torch.float64), t[:200])
    torch.testing.assert_close(again, sampled(van_der_pol, [1.0, 0.5], t[:200]), atol=0.02, rtol=0)


@pytest.mark.slow
def test_a_rollout_finds_the_terms_where_differences_do_not() -> None:
    xs, ts = [], []
    for seed in range(4):
        t = irregular(seed, 25, gap=1.0)
        xs.append(sampled(van_der_pol, [0.5 + 0.4 * seed, 1.5 - 0.3 * seed], t))
        ts.append(t)
    truth = [{"y"}, {"x", "y", "x^2 y"}]
    plain = SINDy(PolynomialLibrary(2, 3), dim=2, k=[1, 3]).fit(xs, ts, steps=0)
    learned = SINDy(PolynomialLibrary(2, 3), dim=2, k=[1, 3]).fit(xs, ts, steps=120, substeps=3)
    assert not right(plain, truth) and right(learned, truth)
    torch.testing.assert_close(learned.coef[learned.mask.bool()].detach(), torch.tensor([1.0, -1, 1, -1]).double(), atol=0.02, rtol=0)


def test_the_promised_exchange_of_a_linear_loss_is_the_best_of_all() -> None:
    generator = torch.Generator().manual_seed(0)
    design, target = (torch.randn(30, *shape, generator=generator, dtype=torch.float64) for shape in ((2, 5), ()))
    chosen = torch.tensor([[1, 0, 1, 0, 0], [0, 0, 0, 1, 0]], dtype=torch.bool)

    def residual(weight: Tensor) -> Tensor:
        return (design * weight).sum((1, 2)) - target

    def least(keep: Tensor) -> float:
        columns = design.flatten(1)[:, keep.flatten()]
        return float((columns @ torch.linalg.lstsq(columns, target.unsqueeze(1)).solution - target.unsqueeze(1)).square().sum())

    neighbours = []
    for row, out, into in itertools.product(range(2), range(5), range(5)):
        if chosen[row, out] and not chosen[row, into]:
            other = chosen.clone()
            other[row, out], other[row, into] = False, True
            neighbours.append(least(other))
    found = promising(residual, torch.zeros(2, 5, dtype=torch.float64), chosen, 3)
    assert [one.promised for one in found] == pytest.approx(sorted(neighbours)[:3])
    for one in found:
        assert float(residual(one.weight).square().sum()) == pytest.approx(one.promised)
        assert (one.weight != 0).sum(1).tolist() == [2, 1]
    assert promising(residual, torch.zeros(2, 5, dtype=torch.float64), torch.ones(2, 5, dtype=torch.bool), 3) == []


def test_a_rollout_exchanges_terms_that_were_chosen_wrongly(monkeypatch: pytest.MonkeyPatch) -> None:
    generator, ts = torch.Generator().manual_seed(2), [irregular(20 + i, 25, gap=1.0) for i in range(4)]
    xs = [sampled(lotka_volterra, [0.8 + 0.4 * i, 1.5 - 0.2 * i], t) for i, t in enumerate(ts)]
    xs = [x + 0.01 * x.std(0) * torch.randn(x.shape, generator=generator, dtype=x.dtype) for x in xs]

    def found() -> bool:  # one step of training chooses next to nothing
        model = SINDy(PolynomialLibrary(2, 3), dim=2, k=2).fit(xs, ts, steps=1, substeps=3)
        return right(model, [{"x", "x y"}, {"y", "x y"}])

    assert found()
    monkeypatch.setattr("khot.nn.sindy.ROUNDS", 0)
    assert not found()


def test_the_implicit_loss_and_a_learned_k_have_gradients() -> None:
    t = irregular(0, 30, gap=0.2)
    x = sampled(van_der_pol, [1.0, 0.5], t)
    model = SINDy(PolynomialLibrary(2, 2), dim=2, k=2).fit(x, t, steps=20, loss="implicit")
    assert not model.training and model.mask.sum(1).tolist() == [2, 2]
    free = SINDy(PolynomialLibrary(2, 2), dim=2, k=2, learn_k=True)
    torch.nn.init.normal_(free.weight)
    (free(x).square().mean() + 0.1 * free.penalty()).backward()
    assert free.raw_k.grad is not None and (free.raw_k.grad != 0).all() and (free.weight.grad != 0).all()  # type: ignore[union-attr]
    khot.nn.anneal(free, 1.0)
    assert set(free.mask.unique().tolist()) <= {0.0, 1.0}


def test_libraries_join_and_name_their_terms() -> None:
    own = FunctionLibrary({"x exp(-y)": lambda s: s[..., 0] * torch.exp(-s[..., 1])})
    library = PolynomialLibrary(2, 1) + FourierLibrary(2, [1, 2]) + own
    names = library.names(["x", "y"])
    assert names[:3] == ["1", "x", "y"] and names[-1] == "x exp(-y)" and len(names) == 12
    x = torch.randn(5, 4, 2)
    assert library(x).shape == (5, 4, 12)
    torch.testing.assert_close(library(x)[..., names.index("cos(2 y)")], torch.cos(2 * x[..., 1]))
    assert library.latex(["x", "y"])[3] == "\\sin(x)"
    model = SINDy(library, dim=2, k=3)
    again = SINDy(library, dim=2, k=3)
    again.load_state_dict(model.state_dict())


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"k": 11}, "k must be between 1 and the library's 10 terms"),
        ({"k": [1]}, "one for each of 2"),
        ({"k": 2, "variables": ["x"]}, "variables must name all 2"),
    ],
)
def test_bad_models_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        SINDy(PolynomialLibrary(2, 3), dim=2, **options)


@pytest.mark.parametrize(
    ("x", "t", "says"),
    [
        (torch.zeros(5, 3), torch.arange(5.0), r"values of shape \(n, 2\)"),
        (torch.zeros(5, 2), torch.arange(4.0), "times of shape"),
        (torch.zeros(1, 2), torch.zeros(1), "n of at least 3"),
        (torch.full((5, 2), torch.nan), torch.arange(5.0), "must be finite"),
        (torch.zeros(5, 2), torch.tensor([0.0, 1, 1, 2, 3]), "t must rise"),
        ([torch.zeros(5, 2)], [], "same number of trajectories"),
    ],
)
def test_bad_samples_are_refused(x: Any, t: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        SINDy(PolynomialLibrary(2, 3), dim=2, k=2).fit(x, t)


def test_samples_that_stand_still_are_handled() -> None:
    model = SINDy(PolynomialLibrary(2, 2), dim=2, k=2).fit(torch.ones(6, 2), torch.arange(6.0), steps=3)
    assert model.coef.isfinite().all()
    with pytest.raises(ValueError, match="start must have shape"):
        model.simulate(torch.zeros(3), torch.arange(3.0))
    with pytest.raises(ValueError, match="loss must be"):
        model.fit(torch.ones(6, 2), torch.arange(6.0), loss="weak")  # type: ignore[arg-type]
