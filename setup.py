"""Builds the native kernel if there is a compiler; everything else is in pyproject.toml."""

import runpy
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

HERE = Path(__file__).parent
kernel = runpy.run_path(str(HERE / "src/khot/kernels/build.py"))


class BuildKernel(build_ext):
    """A library that ctypes loads: no Python headers, no name that ties it to a Python version, and no harm done if it fails."""

    def build_extension(self, ext: Extension) -> None:
        try:
            kernel["build"](Path(self.get_ext_fullpath(ext.name)))
        except (kernel["BuildError"], OSError) as error:
            sys.stderr.write(f"khot: the native kernel was not built, plain PyTorch will be used. {error}\n")

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split(".")[:-1], kernel["LIBRARY"]))


setup(
    ext_modules=[Extension("khot.kernels._native", sources=[], optional=True)],
    cmdclass={"build_ext": BuildKernel},
)
