"""Small data sets on disk and short runs for the tests of the training engine."""

import gzip
from pathlib import Path
from typing import Any

import pytest
import torch

for name in ("ignite", "jsonargparse", "safetensors", "PIL", "rich"):
    pytest.importorskip(name)

from khot.train.config import TrainConfig  # noqa: E402

SMALL = {"image_size": 8, "dim": 16, "depth": 1, "num_heads": 2}


def write_idx(path: Path, values: torch.Tensor) -> None:
    header = bytes([0, 0, 8, values.ndim]) + b"".join(size.to_bytes(4, "big") for size in values.shape)
    path.write_bytes((gzip.compress if path.suffix == ".gz" else bytes)(header + bytes(values.flatten().tolist())))


def write_data(folder: Path) -> Path:
    """Ten classes of 8 x 8 images that can be told apart: 200 to train on, 40 to test on."""
    generator = torch.Generator().manual_seed(0)
    means = torch.randint(0, 200, (10, 8, 8), generator=generator)
    for part, n in (("train", 200), ("t10k", 40)):
        labels = torch.arange(n) % 10
        noise = torch.randint(0, 56, (n, 8, 8), generator=generator)
        write_idx(folder / f"{part}-images-idx3-ubyte", (means[labels] + noise).to(torch.uint8))
        write_idx(folder / f"{part}-labels-idx1-ubyte.gz", labels.to(torch.uint8))
    return folder


def config(data: Path, out: Path, /, **changes: Any) -> TrainConfig:
    settings: dict[str, Any] = {
        "model_options": SMALL, "data": "mnist", "data_dir": data, "out": out, "validation": 20, "epochs": 3, "batch_size": 20,
        "save_every": 4, "log_every": 1, "progress": False, "lr": 5e-3, "pad": 1, "mixup": 0.2, "cutmix": 1.0, "erase": 0.3,
    }  # fmt: skip
    return TrainConfig(**settings | changes)


TOPK = {"model": "topk_attention", "model_options": SMALL | {"k": 2, "drop_path": 0.2}, "tau": (2.0, 0.5)}


HARD_CASE = TOPK | {"ema": 0.9, "accumulate": 2}
