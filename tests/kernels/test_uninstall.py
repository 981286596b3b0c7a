"""Installed by pip into an environment of its own, built there again, and removed: nothing stays behind."""

from __future__ import annotations

import os
import shutil
import subprocess
import venv
from pathlib import Path

import pytest
import torch

from tests.kernels.test_wheel import wheel as wheel  # a fixture

CHECK = "import khot, torch; print(khot.kernels.available()); khot.soft_topk(torch.arange(4.0), 2)"


@pytest.mark.slow
@pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++", "c++"))), reason="needs a C++ compiler")
def test_pip_uninstall_leaves_nothing(wheel: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env/bin/python"
    site = next((tmp_path / "env/lib").glob("python*")) / "site-packages"
    others = str(Path(torch.__file__).parents[1])  # torch itself is not installed again

    def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "CXX")}
        return subprocess.run([str(python), *arguments], cwd=tmp_path, env=clean | environment, capture_output=True, text=True)

    installed = run("-m", "pip", "install", "--no-deps", "--no-index", str(wheel))
    assert installed.returncode == 0, installed.stderr
    before = {path for path in site.rglob("*") if "khot" in str(path.relative_to(site))}
    assert before
    # The environment's own khot comes first: another one beside torch would be an editable installation, which adds its path at the end.
    built = run("-m", "khot.kernels.build", PYTHONPATH=os.pathsep.join([str(site), others]), KHOT_CXXFLAGS="-O0")
    assert built.returncode == 0 and str(site) in built.stdout, built.stderr
    used = run("-c", CHECK, PYTHONPATH=os.pathsep.join([str(site), others]), KHOT_KERNELS="1")
    assert used.returncode == 0 and "cpu" in used.stdout, used.stderr
    removed = run("-m", "pip", "uninstall", "-y", "khot")
    assert removed.returncode == 0, removed.stderr
    assert not [path for path in site.rglob("*") if "khot" in str(path.relative_to(site))]
    gone = run("-c", "import khot")
    assert gone.returncode != 0 and "ModuleNotFoundError" in gone.stderr
