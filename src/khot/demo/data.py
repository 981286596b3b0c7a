"""The digits, split once into what is learned from, what choices are made on, and what is looked at once at the end."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

SIDE = 8
NUM_PIXELS = SIDE * SIDE
NUM_CLASSES = 10
_NUM_TEST = 497
_NUM_VALIDATION = 300


class Part(NamedTuple):
    """Images ``(..., m, 64)`` in [0, 1] and labels ``(..., m)``."""

    images: Tensor
    labels: Tensor


class Split(NamedTuple):
    """Training and validation parts with a leading dimension of seeds; one test part for all."""

    train: Part
    validation: Part
    test: Part


def load(seeds: int) -> Split:
    """scikit-learn's 8x8 digits. The test part is the same for every seed; the rest is divided anew by each."""
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    whole = Part(torch.tensor(pixels, dtype=torch.float32, device="cpu") / 16, torch.tensor(labels, dtype=torch.long, device="cpu"))
    order = torch.randperm(len(whole.labels), dtype=torch.long, device="cpu", generator=torch.Generator().manual_seed(2024))
    test, rest = _take(whole, order[:_NUM_TEST]), _take(whole, order[_NUM_TEST:])
    orders = torch.stack(
        [
            torch.randperm(len(rest.labels), dtype=torch.long, device="cpu", generator=torch.Generator().manual_seed(seed))
            for seed in range(seeds)
        ]
    )
    return Split(_take(rest, orders[:, _NUM_VALIDATION:]), _take(rest, orders[:, :_NUM_VALIDATION]), test)


def _take(part: Part, index: Tensor) -> Part:
    return Part(part.images[index], part.labels[index])
