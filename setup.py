"""Builds the native library if there is a compiler; everything else is in pyproject.toml."""

import runpy
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

kernel = runpy.run_path(str(Path(__file__).parent / "src/khot/kernels/build.py"))


class BuildKernel(build_ext):
    """A library that ctypes loads: no Python headers, no name that ties it to a Python version, and no harm done if it fails."""

    def build_extension(self, ext: Extension) -> None:
        machine = self.plat_name.rsplit("-", 1)[-1]  # of the wheel, which may be another than this one
        kernel["build_or_explain"](Path(self.get_ext_fullpath(ext.name)), machine)

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split(".")[:-1], kernel["LIBRARY"]))


class AnyPython(bdist_wheel):
    """One wheel serves every Python 3 of a platform."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(
    ext_modules=[Extension("khot.kernels._native", sources=[], optional=True)],
    cmdclass={"build_ext": BuildKernel, "bdist_wheel": AnyPython},
)
