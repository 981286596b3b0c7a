"""What `make dist` rests on: old symbols where the header asks for them, a library for the machine that the wheel names."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from tools import dist

HEADER = dist.ROOT / "src/khot/kernels/native/glibc_2_28.h"
PROGRAM = """
#include <cmath>
#include <dlfcn.h>
#include <thread>
extern "C" double all_of_them(double x) {
  std::thread([&] { x = std::exp(x) + std::log(x) + std::pow(x, x) + std::exp2(x) + std::log2(x); }).join();
  return dlsym(RTLD_DEFAULT, "cos") ? x : 0;
}
"""


@pytest.mark.skipif(not (shutil.which("g++") and shutil.which("readelf")), reason="there is no compiler")
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc" or platform.machine() not in dist.COMPILERS, reason="wheels are made with glibc")
def test_the_header_keeps_new_symbols_out(tmp_path: Path) -> None:
    (tmp_path / "all.cpp").write_text(PROGRAM)
    newest = {}
    for name, flags in {"plain": [], "old": ["-include", str(HEADER), *dist.LINK]}.items():
        command = [
            "g++",
            "-shared",
            "-fPIC",
            "-fno-math-errno",
            *flags,
            str(tmp_path / "all.cpp"),
            "-o",
            str(tmp_path / name),
            "-lpthread",
            "-ldl",
        ]
        subprocess.run(command, check=True)
        newest[name] = max(dist.symbol_versions(tmp_path / name))
    assert newest["old"] <= dist.NEWEST
    if tuple(map(int, platform.libc_ver()[1].split("."))) >= (2, 34):
        assert newest["plain"] > dist.NEWEST  # else the header is not needed and the test shows nothing


def test_a_failing_command_tells_what_it_said() -> None:
    with pytest.raises(dist.Failed, match="no such thing"):
        dist.run("sh", "-c", "echo no such thing >&2; exit 3")
