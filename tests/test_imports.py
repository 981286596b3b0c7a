"""Imports point down only, and importing khot is cheap and silent."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import khot

ROOT = Path(khot.__file__).parent
LAYERS = {
    "_record": -4,
    "_tensors": -3,
    "_settle": -2,
    "checks": -1,
    "registry": 0,
    "kernels": 1,
    "primitives": 2,
    "relaxations": 3,
    "designs": 3,
}
VERBS = 4  # soft, sample, select, loss and whatever else stands beside them
PACKAGE = 6
LAYERS |= {
    "nn": 5,
    "models": 5,
    "bounds": 5,
    "distributed": 5,
    "sklearn": 7,
    "train": 7,
    "tables": 7,
    "demo": 7,
    "explore": 7,
    "cli": 8,
    "__main__": 9,
}
HEAVY = ("sklearn", "scipy", "matplotlib", "triton", "rich", "tqdm", "torchvision", "torch._dynamo", "torch._inductor")
HEAVY += ("timm", "transformers", "ignite", "jsonargparse", "safetensors", "PIL", "pandas", "starlette", "uvicorn")

MODULES = sorted(path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py")


def layer(module: str) -> int:
    """``khot.relaxations.sigmoid`` -> 3; the package itself stands above what it exports."""
    parts = module.split(".")
    return LAYERS.get(parts[1], VERBS) if len(parts) > 1 else PACKAGE


def name_of(path: Path) -> str:
    parts = ["khot", *path.relative_to(ROOT).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(path: Path) -> Iterator[str]:
    """The modules of ours that a file imports, at the top or inside a function."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "khot")
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: write imports in full"
            if node.module == "khot":
                yield from (f"khot.{alias.name}" for alias in node.names)
            elif (node.module or "").startswith("khot."):
                yield str(node.module)


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_point_down(path: Path) -> None:
    own = layer(name_of(path))
    upward = [target for target in imported(path) if layer(target) > own]
    assert not upward, f"{name_of(path)} (layer {own}) imports {upward}"


def test_the_ground_floor_imports_nothing_of_ours() -> None:
    assert not list(imported(ROOT / "_record.py"))
    assert not list(imported(ROOT / "_tensors.py"))
    assert set(imported(ROOT / "_settle.py")) == {"khot._tensors"}
    assert set(imported(ROOT / "checks.py")) == {"khot._tensors"}
    assert set(imported(ROOT / "registry.py")) == {"khot._record", "khot._tensors", "khot._settle", "khot.checks"}


def test_the_check_can_fail(tmp_path: Path) -> None:
    bad = tmp_path / "bad.py"
    bad.write_text("def f():\n    from khot.nn import SoftTopK\n    import khot\n")
    assert [layer(target) for target in imported(bad)] == [5, PACKAGE]


def test_import_is_light_and_silent() -> None:
    probe = (
        "import sys, torch; before = set(sys.modules); state = torch.get_rng_state();"
        "import khot; new = set(sys.modules) - before;"
        f"heavy = [m for m in {HEAVY!r} if any(n == m or n.startswith(m + '.') for n in new)];"
        "assert not heavy, heavy; assert torch.equal(state, torch.get_rng_state())"
    )
    done = subprocess.run([sys.executable, "-W", "error::UserWarning:khot", "-c", probe], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
