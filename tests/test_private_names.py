"""Every private name of torch has a fallback that is safe: slower perhaps, never wrong."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import khot
from khot import _tensors

ROOT = Path(__file__).parents[1]


def private_names(path: Path) -> list[str]:
    """What a file takes from torch by a name that begins with an underscore."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            base = ast.unparse(node.value)
            if base == "torch" or base.startswith("torch."):
                found.append(f"{path.name}:{node.lineno} {ast.unparse(node)}")
    return found


def test_private_names_are_looked_up_in_one_file() -> None:
    source = Path(khot.__file__).parent
    assert not [name for path in source.rglob("*.py") if path.name != "_tensors.py" for name in private_names(path)]


def test_laws_hold_without_them() -> None:
    chosen = ["tests/test_laws.py", "-k", "sums and (sigmoid or halving)"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "tests.without_private_names", "-p", "no:cacheprovider", *chosen],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]


CODE = """
import tests.without_private_names, torch, khot
from khot import _tensors
from khot.estimators import ESTIMATORS
assert _tensors.num_modes() and _tensors.in_transform() and _tensors.in_forward_mode() and not _tensors.is_bare(torch.zeros(1))
scores = torch.tensor([0.3, -1.0, 2.0, 0.7], dtype=torch.float64, requires_grad=True)
for call in (
    lambda s: khot.soft_topk(s, 2), lambda s: khot.soft_topk(s, 2, method="halving"), lambda s: khot.soft_topk_matrix(s, 2).sum(-2),
    lambda s: khot.sample_topk(s, 2, generator=torch.Generator().manual_seed(0)), lambda s: khot.distributions.KSubset(2, logits=s).mean,
    lambda s: khot.topk_loss(s, torch.tensor([1.0, 0, 1, 0])), lambda s: khot.soft_rank(s),
):
    (grad,) = torch.autograd.grad(call(scores).square().sum(), scores)
    assert bool(grad.isfinite().all())
torch.testing.assert_close(khot.soft_topk(scores, 2).sum(), torch.tensor(2.0, dtype=torch.float64))
batched = torch.autograd.functional.jacobian(lambda s: khot.soft_topk(s, 2), scores.detach(), vectorize=True)
torch.testing.assert_close(batched, torch.autograd.functional.jacobian(lambda s: khot.soft_topk(s, 2), scores.detach()))
operator = lambda s: torch.ops.khot.threshold_forward(s, None, 2.0, None, 1.0, "sigmoid", 0.0)[0]
torch.testing.assert_close(torch.vmap(operator)(scores.detach().expand(3, 4)), khot.soft_topk(scores.detach(), 2).expand(3, 4))
draw = lambda: ESTIMATORS["perturb_and_map"](lambda z: z @ scores.detach(), scores, 2, generator=torch.Generator().manual_seed(5))
assert torch.equal(draw(), draw())
"""


def test_every_verb_runs_without_them() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("shape", [0.3, 1.0, 7.0])
def test_gamma_variables_by_public_names(shape: float) -> None:
    """Same law, same draw for the same generator, another draw afterwards, and the global state untouched."""
    shapes = torch.full((20000,), shape, dtype=torch.float64)
    generator, before = torch.Generator().manual_seed(3), torch.get_rng_state()
    first, second = _tensors._gamma(shapes, generator), _tensors._gamma(shapes, generator)
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(first, second)
    assert torch.equal(first, _tensors._gamma(shapes, torch.Generator().manual_seed(3)))
    assert abs(first.mean() - shape) < 5 * (shape / 20000) ** 0.5
    assert bool((_tensors._gamma(shapes) > 0).all())
