"""CONTRIBUTING's recipes work as written: one file and one line, and laws, tables, commands and benchmarks pick the addition up."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
STEP = re.compile(r"`(src/khot/[\w/]+\.py)`:\n\n```python\n(.*?)```", re.DOTALL)


def steps() -> list[tuple[str, str]]:
    """File and text of every recipe, in order: a new file, then the line that exports it."""
    return STEP.findall((ROOT / "CONTRIBUTING.md").read_text())


def test_every_recipe_is_one_file_and_one_line() -> None:
    found = steps()
    files, lines = found[0::2], found[1::2]
    assert len(files) == len(lines) == 5
    for (path, _), (export, text) in zip(files, lines, strict=True):
        assert not (ROOT / path).exists()
        assert (ROOT / export).exists()
        assert len(text.strip().splitlines()) == 1


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The repository with all recipes followed."""
    root = tmp_path_factory.mktemp("copy")
    for name in ("src", "tests", "bench", "docs"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__", "*.svg", "*.jsonl"))
    for name in ("conftest.py", "pyproject.toml", "README.md", "CONTRIBUTING.md"):
        shutil.copy(ROOT / name, root / name)
    for path, text in steps():
        target = root / path
        if not target.exists():
            target.write_text(text)
        else:
            body, _, rest = target.read_text().partition("from khot")  # among the other exports; isort puts it in its place
            target.write_text(f"{body}{text}from khot{rest}")
    return root


def run(copy: Path, *words: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(copy / "src"), "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, *words], cwd=copy, env=env, capture_output=True, text=True, timeout=600)


def test_the_laws_hold_for_what_was_added(copy: Path) -> None:
    laws = ["tests/test_laws.py", "tests/test_laws_edges.py", "tests/test_laws_calculus.py"]
    files = [*laws, "tests/test_errors.py", "tests/test_designs.py", "tests/test_loss.py", "tests/test_modules.py"]
    new = "mine or cosine or uniform or soft_only"
    done = run(copy, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow", *files, "-k", f"({new}) and not compiles")
    assert done.returncode == 0, done.stdout[-3000:]
    assert int(re.findall(r"(\d+) passed", done.stdout)[-1]) > 100
    imports = run(copy, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/test_imports.py")
    assert imports.returncode == 0, imports.stdout[-3000:]


def test_doctests_of_what_was_added_run(copy: Path) -> None:
    new = [path for path, _ in steps()[0::2]]
    done = run(copy, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--doctest-modules", *new)
    assert done.returncode == 0, done.stdout[-3000:]
    assert "4 passed" in done.stdout


def test_tables_commands_and_benchmarks_know_what_was_added(copy: Path) -> None:
    assert run(copy, "-m", "khot.tables", "README.md", "docs").returncode == 0
    readme = (copy / "README.md").read_text()
    assert "`mine`" in readme and "`cosine`" in readme and "`uniform`" in readme
    listed = run(copy, "-m", "khot", "methods").stdout
    assert "mine" in listed and "cosine" in listed
    probe = (
        "import khot, torch; from bench.speed import _methods; from bench.speed_cells import options_parser;"
        "names = _methods(options_parser('').parse_args([]));"
        "assert {'mine', 'cosine'} <= set(names);"
        "assert 'soft_only' in khot.estimators.ESTIMATORS and 'uniform' in khot.DESIGNS and khot.nn.KeepTopK(1);"
        "x = torch.randn(3, 9); assert torch.allclose(khot.soft_topk(x, 2.5, method='cosine').sum(-1), torch.tensor(2.5));"
        "khot.topk_loss(x, khot.topk_mask(x, 2), method='cosine')"
    )
    done = run(copy, "-c", probe)
    assert done.returncode == 0, done.stderr[-2000:]
