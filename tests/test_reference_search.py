"""The in-place search of the reference: what it leaves to the bracket, what it shares between calls, what it may read."""

from __future__ import annotations

import threading

import pytest
import torch
from torch.testing import assert_close

import khot
from khot.primitives.threshold import solve, start
from khot.relaxations.euclidean import EUCLIDEAN
from khot.relaxations.gaussian import GAUSSIAN
from khot.relaxations.laplace import LAPLACE
from khot.relaxations.sigmoid import SIGMOID

FAMILIES = [SIGMOID, EUCLIDEAN, LAPLACE, GAUSSIAN]


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_passes_in_place_are_the_family(family, dtype: torch.dtype) -> None:
    u = torch.cat([torch.linspace(-12, 12, 1001), torch.tensor([-torch.inf, -1e-30, 1e30])]).to(dtype).view(1, -1)
    y, v = family.f(u), family.slope_at(u, family.f(u))
    given, out, slope = u.clone(), torch.empty_like(u), torch.empty_like(u)
    assert_close(family.write(given, out), y, rtol=4 * torch.finfo(dtype).eps, atol=0)
    assert_close(family.write_slope(given, out, slope), v, rtol=1e-5, atol=1e-7)
    total, rise = family.measure(u.clone(), torch.empty_like(u))
    assert_close(total, y.sum(-1, keepdim=True), rtol=1e-5, atol=0)
    assert_close(rise, v.sum(-1, keepdim=True), rtol=1e-5, atol=0)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.name)
@pytest.mark.parametrize(("shape", "k"), [((400, 64), 2), ((8, 1024), 32), ((2, 16384), 1024), ((1, 200_000), 12_500)])
@pytest.mark.parametrize("tau", [1.0, 0.1])
def test_few_ordinary_rows_need_the_bracket(family, shape, k, tau, monkeypatch: pytest.MonkeyPatch) -> None:
    rest = 0

    def counted(x: torch.Tensor, *arguments) -> solve.Solved:
        nonlocal rest
        rest += len(x)
        return bracket(x, *arguments)

    bracket = solve.solve_bracket
    monkeypatch.setattr(solve, "solve_bracket", counted)
    mask, _ = solve.solve_rows(draw(*shape), float(k), tau, family)
    # A guard against getting worse, not a derived bound: of 400 rows at tau = 0.1 gaussian leaves 16, laplace 6, sigmoid 4.
    assert rest <= shape[0] // 20, f"{rest} of {shape[0]} rows"
    assert float((mask.double().sum(-1) - k).abs().max()) <= 2 * torch.finfo(torch.float32).eps * k


def test_start_is_the_place_of_a_normal_law() -> None:
    x = draw(4, 16384) * 3 + 5
    for family in FAMILIES:
        t = start.guess(x, 1024.0, 16384.0, 2.0, family, solve.LOCAL)
        truth = solve.solve_rows(x, 1024.0, 2.0, family).shift
        assert float((t - truth).abs().max()) < 0.1, family.name


def test_buffers_survive_inference_mode_and_threads() -> None:
    x, found = draw(64, 200), {}
    truth = khot.sigmoid_topk(x.double(), 9).float()
    with khot.kernels.disabled():
        with torch.inference_mode():
            assert_close(khot.sigmoid_topk(x, 9), truth)
        assert_close(khot.sigmoid_topk(x, 9), truth)

        def work(seed: int) -> None:
            mine = draw(64, 200, seed=seed)
            found[seed] = all(torch.equal(khot.sigmoid_topk(mine, 9), khot.sigmoid_topk(mine, 9)) for _ in range(20)), mine

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
    assert all(same for same, _ in found.values()) and len(found) == 4


def test_rows_with_k_and_tau_of_their_own_in_many_pieces() -> None:
    x, k, tau = draw(3000, 70), torch.linspace(0.5, 69, 3000), torch.linspace(0.05, 3, 3000)
    with khot.kernels.disabled():
        y = khot.soft_topk(x, k, tau)
    assert_close(y, khot.soft_topk(x.double(), k.double(), tau.double()).float(), rtol=0, atol=1e-5)
