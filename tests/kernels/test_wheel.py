"""The wheel: its tag, what it says where there is no compiler, and that nothing stays behind when it is removed."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BUILD = "from setuptools import build_meta; print(build_meta.build_wheel('dist'))"
CALL = """
import warnings, torch, khot, khot.cli
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    for _ in range(2):
        khot.soft_topk(torch.arange(4.0), 2)
print(khot.__file__, *(str(warning.message) for warning in seen), sep="\\n")
khot.cli.main(["info"])
"""


def run(code: str, folder: Path, **environment: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, env=os.environ | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built without isolation from a copy of the source, on a machine without a compiler."""
    folder = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("*.so", "*.egg-info", "__pycache__"))
    out = run(BUILD, folder, CXX=str(folder / "no-such-compiler"))
    return folder / "dist" / out.splitlines()[-1]


@pytest.fixture
def site(wheel: Path, tmp_path: Path) -> Path:
    """The wheel as pip lays it out."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    return tmp_path


def test_one_wheel_for_every_python(wheel: Path) -> None:
    python, abi, platform = wheel.stem.split("-")[-3:]
    assert (python, abi) == ("py3", "none") and platform != "any"
    with zipfile.ZipFile(wheel) as archive:
        (description,) = [name for name in archive.namelist() if name.endswith(".dist-info/WHEEL")]
        assert f"Tag: py3-none-{platform}" in archive.read(description).decode()


def test_without_a_compiler_the_user_is_told_once(site: Path) -> None:
    file, warning, *info = run(CALL, site, PYTHONPATH=str(site), KHOT_KERNELS="1", KHOT_ISA="").splitlines()
    assert Path(file).is_relative_to(site)
    assert "not built at installation" in warning and "no-such-compiler" in warning and "python -m khot.kernels.build" in warning
    assert any(line.startswith("kernels") and "no-such-compiler" in line for line in info)
    assert not any("not built" in line for line in info if not line.startswith("kernels"))


def test_nothing_is_left_behind(site: Path) -> None:
    (site / "khot/kernels/_native.so").write_bytes(b"built later")
    (record,) = site.glob("*.dist-info")
    for file in importlib.metadata.Distribution.at(record).files or ():
        Path(str(file.locate())).unlink()
    assert not [path for path in site.rglob("*") if path.is_file()]
