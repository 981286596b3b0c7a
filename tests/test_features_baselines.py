"""The other selectors by gradient find the columns that matter, and LassoNet's proximal step is the minimum that it claims to be."""

import numpy as np
import pytest
import torch

from bench.applications.features_baselines import STEPPED, concrete_autoencoder, hierarchical_prox


@pytest.fixture(scope="module")
def problem() -> tuple[np.ndarray, np.ndarray]:
    """Three of twelve columns decide; the others are noise."""
    generator = np.random.RandomState(0)
    x = generator.randn(600, 12)
    return x, (x[:, 2] + x[:, 7] - x[:, 9] > 0).astype(int)


@pytest.mark.parametrize("name", ["stg", "lassonet"])
def test_the_columns_that_matter(name: str, problem: tuple[np.ndarray, np.ndarray]) -> None:
    assert STEPPED[name](*problem, k=3, seed=0, steps=400).tolist() == [2, 7, 9]


def test_concrete_selectors(problem: tuple[np.ndarray, np.ndarray]) -> None:
    x, y = problem
    found = concrete_autoencoder(x, y, k=3, seed=0, steps=400, supervised=True)
    assert set(found) <= {2, 7, 9} and len(found) >= 2  # two selectors may choose the same column
    copies = np.concatenate([x[:, :3], x[:, :3], 0.01 * x[:, 3:]], axis=1)  # only the first six columns vary much
    assert set(concrete_autoencoder(copies, y, k=3, seed=0, steps=400)) <= set(range(6))


def test_hierarchical_prox_is_the_minimum() -> None:
    generator = torch.Generator().manual_seed(0)
    v, u = (torch.randn(20, width, generator=generator, dtype=torch.float64) for width in (3, 5))
    for amount, most in ((0.5, 1.0), (1.5, 0.3), (0.1, 10.0)):
        a, b = hierarchical_prox(v, u, amount, most)
        assert bool((b.abs() <= most * a.norm(dim=-1, keepdim=True) + 1e-12).all())
        # Along the direction of v only the length is free, and b follows from it: a fine grid of lengths bounds the minimum.
        length = torch.linspace(0, 30, 30_001, dtype=torch.float64)
        norm = v.norm(dim=-1, keepdim=True)
        grid = 0.5 * (length - norm).square() + amount * length
        grid = grid + 0.5 * (u.abs().unsqueeze(1) - most * length.unsqueeze(-1)).clamp(min=0).square().sum(-1)
        reached = 0.5 * (a - v).square().sum(-1) + 0.5 * (b - u).square().sum(-1) + amount * a.norm(dim=-1)
        torch.testing.assert_close(reached, grid.amin(-1), atol=1e-4, rtol=0)
        assert bool((reached <= grid.amin(-1) + 1e-9).all())


def test_a_large_penalty_removes_everything() -> None:
    a, b = hierarchical_prox(torch.zeros(2, 3), torch.randn(2, 4), 1e6, 10.0)
    assert not a.any() and not b.any()
    a, b = hierarchical_prox(torch.zeros(2, 3), torch.randn(2, 4), 0.0, 10.0)
    assert bool((b.abs() <= 10 * a.norm(dim=-1, keepdim=True) + 1e-5).all())
