"""Build what is published and check it: ``python -m tools.dist`` (``make dist``).

An sdist with the tests; from the unpacked sdist one wheel per architecture that serves every Python 3, because the native library is
loaded with ctypes. Each wheel is checked by auditwheel, by a look at the versions of glibc's symbols that its library asks for, and by
running: the x86_64 one in a new environment without a compiler, the library of the aarch64 one in an emulator.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
NEWEST = (2, 28)  # the glibc of the oldest system that the wheels serve
LIBRARY = "khot/kernels/_native.so"
LINK = ["-Wl,--no-as-needed", "-l:libdl.so.2", "-l:libpthread.so.0"]  # glibc 2.28 has dlsym and threads in these
COMPILERS = {"x86_64": "g++", "aarch64": "aarch64-linux-gnu-g++"}
SMOKE = """
import sys, torch, khot, khot.cli, khot.kernels
assert khot.__file__.startswith(sys.prefix), khot.__file__
assert khot.kernels.available(), khot.kernels.why_none()
scores = torch.randn(64, 1000, requires_grad=True)
for method in sorted(khot.RELAXATIONS):
    mask = khot.soft_topk(scores[:2, :32], 4, 0.5, method=method)
    mask.square().sum().backward()
mask = khot.soft_topk(scores, 10)
torch.testing.assert_close(mask.sum(-1), torch.full((64,), 10.0))
assert set(khot.sample_topk(scores, 10).sum(-1).tolist()) == {10.0}
from importlib.resources import files
assert (files("khot") / "explore/assets/index.html").is_file() and (files("khot") / "py.typed").is_file()
khot.cli.main(["info"])
"""


class Failed(SystemExit):
    """A check did not pass; the message says which."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.dist", description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument("--arch", nargs="+", choices=sorted(COMPILERS), default=["x86_64", "aarch64"])
    given = parser.parse_args(arguments)
    given.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        sdist = build_sdist(given.out)
        source = unpack(sdist, Path(scratch))
        for arch in given.arch:
            if not shutil.which(COMPILERS[arch]):
                print(f"{arch}: left out, there is no {COMPILERS[arch]}")
                continue
            wheel = build_wheel(source, arch, Path(scratch), given.out)
            check_wheel(wheel, arch, source, Path(scratch))
    return 0


def build_sdist(out: Path) -> Path:
    print("sdist")
    run(sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", out, ROOT)
    sdist = max(out.glob("khot-*.tar.gz"), key=lambda path: path.stat().st_mtime)
    with tarfile.open(sdist) as archive:
        names = {name.split("/", 1)[-1] for name in archive.getnames()}
    tracked = subprocess.run(["git", "ls-files", "tests", "src"], cwd=ROOT, capture_output=True, text=True).stdout.split()
    if missing := [name for name in tracked if name not in names]:
        raise Failed(f"the sdist lacks {', '.join(missing[:5])}; see MANIFEST.in")
    print(f"  {sdist.name}: {len(names)} files, tests among them")
    return sdist


def unpack(sdist: Path, scratch: Path) -> Path:
    with tarfile.open(sdist) as archive:
        archive.extractall(scratch, filter="data")
    return scratch / sdist.name.removesuffix(".tar.gz")


def build_wheel(source: Path, arch: str, scratch: Path, out: Path) -> Path:
    """From the sdist, linked for an older glibc."""
    print(f"wheel for {arch}")
    header = source / "src/khot/kernels/native/glibc_2_28.h"
    environment = {
        "CXX": COMPILERS[arch],
        "KHOT_CXXFLAGS": " ".join(["-include", str(header), *LINK]),
        "_PYTHON_HOST_PLATFORM": f"linux-{arch}",  # the name that Python's own cross builds use
    }
    tag, built = f"manylinux_{NEWEST[0]}_{NEWEST[1]}_{arch}", scratch / f"wheel-{arch}"
    shutil.rmtree(source / "build", ignore_errors=True)
    name = f"-C--build-option=--plat-name={tag}"
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", name, "--outdir", built, source, **environment)
    (done,) = built.glob(f"*-py3-none-{tag}.whl")
    wheel = Path(shutil.copy(done, out / done.name))
    print(f"  {wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB")
    return wheel


def check_wheel(wheel: Path, arch: str, source: Path, scratch: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        library = Path(archive.extract(LIBRARY, scratch / f"library-{arch}"))
    versions = symbol_versions(library)
    print(f"  glibc symbols up to {'.'.join(map(str, max(versions)))}")
    if max(versions) > NEWEST:
        raise Failed(f"{LIBRARY} asks for glibc {max(versions)}; add the function to kernels/native/glibc_2_28.h")
    audited = json.loads(run(sys.executable, "-m", "auditwheel", "show", "--json", wheel))["overall_tag"]
    print(f"  auditwheel: consistent with {audited}")
    policy = re.fullmatch(rf"manylinux_(\d+)_(\d+)_{arch}", audited)
    if policy is None or (int(policy[1]), int(policy[2])) > NEWEST:
        raise Failed(f"auditwheel finds {audited} for a wheel that says {wheel.stem.split('-')[-1]}")
    if arch == platform.machine():
        in_clean_environment(wheel, scratch)
    else:
        in_emulator(library, arch, source, scratch)


def symbol_versions(library: Path) -> set[tuple[int, ...]]:
    """The versions of glibc that a library asks for; readelf comes with every compiler and reads all architectures."""
    told = run("readelf", "--version-info", "--wide", library)
    return {tuple(map(int, version.split("."))) for version in re.findall(r"Name: GLIBC_([\d.]+)\s", told)}


def in_clean_environment(wheel: Path, scratch: Path) -> None:
    """A new environment whose only other packages are torch's, borrowed by path: its several hundred megabytes are not copied again.

    A folder that a .pth file names is searched, but its own .pth files are not read: an editable khot there stays invisible. ``PATH``
    holds no compiler.
    """
    home = scratch / "environment"
    venv.create(home, with_pip=True)
    python = home / "bin/python"
    site = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], capture_output=True, text=True, check=True
    )
    Path(site.stdout.strip(), "borrowed.pth").write_text(f"{sysconfig.get_path('purelib')}\n{sysconfig.get_path('platlib')}\n")
    plain = {"PATH": str(home / "bin"), "CXX": "/nonexistent", "PYTHONPATH": ""}
    run(python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--disable-pip-version-check", wheel, cwd=scratch, **plain)
    out = run(python, "-c", SMOKE, cwd=scratch, **plain)
    print("  smoke test in a clean environment without a compiler:", *(f"    {line}" for line in out.splitlines()), sep="\n")


def in_emulator(library: Path, arch: str, source: Path, scratch: Path) -> None:
    """The program of ``make neon``, linked to the library of the wheel."""
    emulator = shutil.which(f"qemu-{arch}")
    if emulator is None:
        print(f"  not run: there is no qemu-{arch}")
        return
    program = scratch / f"check-{arch}"
    flags = ["-std=c++17", "-O1", "-Wno-psabi", f"-Wl,-rpath,{library.parent}"]
    run(COMPILERS[arch], *flags, source / "tests/kernels/check.cpp", library, "-o", program, "-lpthread")
    out = run(emulator, "-L", f"/usr/{arch}-linux-gnu", program)
    print(f"  in the emulator: {out.strip().splitlines()[-1]}")


def run(*command: object, cwd: Path | None = None, **environment: str) -> str:
    """What a command prints; where it fails, everything that it said."""
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True)
    if done.returncode:
        raise Failed(f"{' '.join(words)} failed:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
