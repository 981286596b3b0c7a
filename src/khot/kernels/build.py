"""Compile the native kernel: ``python -m khot.kernels.build``.

One shared library with plain C entry points, which needs neither the headers of PyTorch nor those of Python. The same source is
compiled once for every instruction set that the compiler knows; the library chooses when it is loaded. ``setup.py`` runs this file
at installation, where neither khot nor torch can be imported yet.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCE = Path(__file__).parent / "native"
LIBRARY = "_native.so"
PLACEHOLDER = "khot: "  # how a text begins that stands where the library would be
FLAGS = ["-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi"]
PER_VARIANT = ("kernel.cpp", "entmax.cpp", "select.cpp", "shard.cpp", "masked.cpp")  # compiled for each instruction set
VARIANTS = {
    "base": [],
    "avx2": ["-mavx2", "-mfma"],
    "avx512": ["-mavx512f", "-mavx512dq", "-mavx512bw", "-mavx512vl", "-mfma"],
}


class BuildError(RuntimeError):
    """There is no usable compiler, or it failed."""


def compiler() -> list[str]:
    """The command of the C++ compiler: ``$CXX``, or the first one found."""
    if os.environ.get("CXX"):
        return shlex.split(os.environ["CXX"])
    for name in ("g++", "clang++", "c++"):
        if shutil.which(name):
            return [name]
    raise BuildError("no C++ compiler found (tried $CXX, g++, clang++, c++)")


def variants(machine: str | None = None) -> list[str]:
    """The instruction sets that make sense on this kind of machine."""
    x86 = (machine or platform.machine()).lower() in ("x86_64", "amd64")
    return list(VARIANTS) if x86 else ["base"]


def once() -> list[str]:
    """The sources compiled once, for the baseline machine."""
    return sorted(path.name for path in SOURCE.glob("*.cpp") if path.name not in PER_VARIANT)


def build(target: Path, extra: list[str] | None = None, machine: str | None = None) -> Path:
    """Compile and link into ``target``; an instruction set that the compiler does not know is left out."""
    cxx, extra = compiler(), [*shlex.split(os.environ.get("KHOT_CXXFLAGS", "")), *(extra or [])]
    with tempfile.TemporaryDirectory() as scratch:
        names = variants(machine)
        # Where there are better copies, the baseline serves processors older than 2013: not worth much of the compiler's time.
        quick = {"base": ["-O2"]} if len(names) > 1 else {}
        jobs = {
            name: [
                _start(cxx, source, [f"-DKHOT_ISA={name}", *VARIANTS[name], *quick.get(name, []), *extra], scratch)
                for source in PER_VARIANT
            ]
            for name in names
        }
        done = {name: [_finish(job) for job in jobs[name]] for name in names}
        known = [name for name in names if all(done[name]) or name == "base"]  # all of a copy or nothing of it
        has = [f"-DKHOT_HAVE_{name.upper()}" for name in known if name != "base"]
        shared = [_start(cxx, source, [*has, *extra], scratch) for source in once()]
        objects = [job for name in known for job in jobs[name]] + shared
        for job in (*jobs["base"], *shared):
            if not _finish(job):
                raise BuildError(f"{' '.join(cxx)} could not compile the kernel:\n{job.errors.read_text()}")
        target.parent.mkdir(parents=True, exist_ok=True)
        unfinished = target.with_suffix(f".{os.getpid()}.tmp")  # a library in use must not change under its users
        done = subprocess.run(
            [*cxx, "-shared", *extra, "-o", str(unfinished), *(str(job.output) for job in objects), "-lpthread", *_dl()],
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise BuildError(f"{' '.join(cxx)} could not link the kernel:\n{done.stderr}")
        os.replace(unfinished, target)
    return target


def build_or_explain(target: Path, machine: str | None = None) -> bool:
    """:func:`build`; where that fails, a text in the library's place says why.

    The file is there in either case, so that pip knows it and removes it with the package, also after a later build. pip hides what a
    successful installation writes: ``khot info`` and the first call that misses the library show the text.
    """
    try:
        build(target, machine=machine)
    except (BuildError, OSError) as error:
        sys.stderr.write(f"khot: the native library was not built, plain PyTorch will be used. {error}\n")
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(f"{PLACEHOLDER}the native library was not built at installation: {str(error).splitlines()[0]}\n")
        return False
    return True


class _Job:
    def __init__(self, command: list[str], output: Path) -> None:
        self.output, self.errors = output, output.with_suffix(".log")
        with self.errors.open("w") as log:
            self.process = subprocess.Popen(command, stderr=log, stdout=log)


def _start(cxx: list[str], source: str, flags: list[str], scratch: str) -> _Job:
    output = Path(scratch) / f"{len(os.listdir(scratch))}-{source}.o"
    return _Job([*cxx, *FLAGS, *flags, "-c", str(SOURCE / source), "-o", str(output)], output)


def _finish(job: _Job) -> bool:
    return job.process.wait() == 0


def _dl() -> list[str]:
    return ["-ldl"] if sys.platform.startswith("linux") else []


def main() -> int:
    try:
        target = build(Path(__file__).parent / LIBRARY)
    except (BuildError, OSError) as error:
        sys.stderr.write(f"{error}\nkhot works without it, on plain PyTorch.\n")
        return 1
    sys.stdout.write(f"built {target}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
