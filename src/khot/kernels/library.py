"""The compiled library: found, checked and loaded through ctypes; or the reason why there is none."""

import ctypes
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

VERSION = 6  # of the entry points
BUILD = "python -m khot.kernels.build"
PATH = Path(__file__).with_name("_native.so")

_pointer, _real, _whole, _index = ctypes.c_void_p, ctypes.c_double, ctypes.c_int, ctypes.c_int64


class Loaded(NamedTuple):
    """A library, or ``None`` and the reason."""

    library: Any
    reason: str


def load(path: Path = PATH) -> Loaded:
    """The compiled library, if there is one that fits this version of the package."""
    try:
        lib = ctypes.CDLL(str(path))
        version = lib.khot_version()
    except (OSError, AttributeError) as error:
        return Loaded(None, _why_not(path, error))
    if version != VERSION:
        return Loaded(None, f"the native library was built from other sources (version {version}, this khot wants {VERSION})")
    lib.khot_isa.restype = lib.khot_isa_at.restype = ctypes.c_char_p
    lib.khot_use_isa.argtypes = [ctypes.c_char_p]
    lib.khot_threshold_forward.argtypes = [
        _whole, _whole, _pointer, _pointer, _pointer, _real, _pointer, _real, _pointer, _index, _index, _whole, _pointer
    ]  # fmt: skip
    lib.khot_threshold_backward.argtypes = [_whole, _whole, *8 * [_pointer], _real, _index, _index, _whole, _pointer]
    return Loaded(lib, "")


def _why_not(path: Path, error: Exception) -> str:
    """An installation that could not compile leaves its reason where the library would be."""
    from khot.kernels.build import PLACEHOLDER  # rarely needed

    if not path.exists():
        return "the native library is not built"
    with path.open("rb") as file:
        text = file.read(2000).decode(errors="replace")
    return text.removeprefix(PLACEHOLDER).strip() if text.startswith(PLACEHOLDER) else f"the native library does not load: {error}"


LIBRARY, REASON = load()


def instruction_sets() -> tuple[str, ...]:
    """Those that the library and this machine both have, the fastest last; empty without the library."""
    names: list[str] = []
    while LIBRARY and (name := LIBRARY.khot_isa_at(len(names))):
        names.append(name.decode())
    return tuple(names)


def instruction_set() -> str:
    """The one in use, or an empty string without the library."""
    return LIBRARY.khot_isa().decode() if LIBRARY else ""


def use(name: str) -> None:
    """Take another instruction set from the next call on."""
    if LIBRARY and LIBRARY.khot_use_isa(name.encode()):
        have = ", ".join(instruction_sets())
        raise RuntimeError(f"KHOT_ISA names an instruction set that the library and this machine both have ({have}), got {name!r}")


@contextmanager
def using(name: str) -> Iterator[None]:
    """The instruction set for the length of a block, in all threads."""
    before = instruction_set()
    use(name)
    try:
        yield
    finally:
        use(before)


_told = False


def tell_once() -> None:
    """Warn, the first time, that the native code is missing. pip hides what a successful installation has to say."""
    global _told
    if not _told:
        _told = True
        warnings.warn(
            f"khot runs in plain PyTorch, which is several times slower: {REASON}. To build the native code: {BUILD}. "
            "KHOT_KERNELS=0 in the environment says that plain PyTorch is wanted.",
            RuntimeWarning,
            stacklevel=2,
        )


if os.environ.get("KHOT_ISA"):
    use(os.environ["KHOT_ISA"])
