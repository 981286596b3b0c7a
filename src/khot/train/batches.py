"""Batches whose content depends on (seed, epoch, index) alone: any step can be made again, by any number of workers or ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset, Sampler

from khot.train.sources import Source

_PRIME = 1_000_003
_NUM_DRAWS = 8
_GOLDEN = 0x9E3779B97F4A7C15


class Batch(NamedTuple):
    images: Tensor  # (B, C, H, W), normalised
    labels: Tensor  # (B,)
    indices: Tensor  # (B,), into the data set


class StepSampler(Sampler[tuple[int, Tensor]]):
    """One ``(epoch, indices)`` per step, from step ``start`` to the end of training.

    The order of an epoch is a permutation seeded by ``(seed, epoch)``. Rank r of w takes every w-th index of the global batch, so
    that all ranks together see the batch of one process. What does not fill a batch is left out.
    """

    def __init__(self, subset: Tensor, batch_size: int, epochs: int, *, seed: int, start: int = 0, rank: int = 0, world: int = 1) -> None:
        self.subset, self.batch_size, self.epochs, self.seed, self.start = subset, batch_size, epochs, seed, start
        self.rank, self.world, self.per_epoch = rank, world, len(subset) // batch_size
        if not self.per_epoch:
            raise ValueError(f"batch_size must be at most the {len(subset)} training images, got {batch_size}")

    def __len__(self) -> int:
        return self.per_epoch * self.epochs - self.start

    def __iter__(self) -> Iterator[tuple[int, Tensor]]:
        order, made_for = torch.empty(0), -1
        for step in range(self.start, self.per_epoch * self.epochs):
            epoch, place = divmod(step, self.per_epoch)
            if epoch != made_for:
                order, made_for = torch.randperm(len(self.subset), generator=_generator(self.seed * _PRIME + epoch)), epoch
            batch = order[place * self.batch_size : (place + 1) * self.batch_size]
            yield epoch, self.subset[batch[self.rank :: self.world]]


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Batches(Dataset[Batch]):
    """``(epoch, indices) -> Batch``, augmented by numbers drawn from (seed, epoch, index)."""

    def __init__(self, source: Source, *, seed: int, flip: bool = False, pad: int = 0, erase: float = 0.0, augment: bool = True) -> None:
        self.source, self.seed, self.flip, self.pad, self.erase, self.augment = source, seed, flip, pad, erase, augment

    def __getitem__(self, item: tuple[int, Tensor]) -> Batch:
        epoch, indices = item
        draws = uniform(self.seed, epoch, indices) if self.augment else None
        images = self.source.images(indices, draws)
        if draws is not None:
            images = _augment(images, draws, self.flip, self.pad)
        images = (images - self.source.mean[:, None, None]) / self.source.std[:, None, None]
        if draws is not None and self.erase:
            images = _erase(images, draws, self.erase)
        return Batch(images, self.source.labels[indices], indices)


def uniform(seed: int, epoch: int, indices: Tensor) -> Tensor:
    """Numbers in [0, 1) of shape ``(B, 8)``, a function of (seed, epoch, index): the finaliser of splitmix64 on a counter.

    Example:
        >>> whole = uniform(0, 1, torch.arange(10))
        >>> torch.equal(whole[3:4], uniform(0, 1, torch.tensor([3])))
        True
    """
    x = (indices[:, None] * _NUM_DRAWS + torch.arange(_NUM_DRAWS)) * _PRIME + epoch  # int64, and wraps around as it should
    x = (x + _wrap((seed + 1) * _GOLDEN)) * _wrap(_GOLDEN)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):  # the constants of splitmix64
        x = (x ^ _shift(x, shift)) * _wrap(factor)
    return _shift(x ^ _shift(x, 31), 40).float() / 2**24


def _wrap(value: int) -> int:
    """``value`` as a signed number of 64 bits."""
    return (value + 2**63) % 2**64 - 2**63


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical shift to the right: torch's keeps the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _augment(images: Tensor, draws: Tensor, flip: bool, pad: int) -> Tensor:
    if flip:
        images = torch.where((draws[:, 0] < 0.5)[:, None, None, None], images.flip(-1), images)
    if not pad:
        return images
    height, width = images.shape[-2:]
    padded = F.pad(images, (pad,) * 4)
    rows = (draws[:, 1] * (2 * pad + 1)).long()[:, None] + torch.arange(height)  # (B, H)
    columns = (draws[:, 2] * (2 * pad + 1)).long()[:, None] + torch.arange(width)
    return padded[torch.arange(len(images))[:, None, None], :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


def _erase(images: Tensor, draws: Tensor, rate: float) -> Tensor:
    """With probability ``rate`` a square of up to a third of the area becomes the mean colour (random erasing)."""
    height, width = images.shape[-2:]
    side = (0.02 + 0.31 * draws[:, 4:5]).sqrt()  # (B, 1), as a share of the image's
    inside = []
    for length, draw in ((height, draws[:, 5:6]), (width, draws[:, 6:7])):
        place = torch.arange(length) / length
        start = draw * (1 - side)
        inside.append((place >= start) & (place < start + side))
    hole = inside[0][:, None, :, None] & inside[1][:, None, None, :] & (draws[:, 3] < rate)[:, None, None, None]
    return images.masked_fill(hole, 0.0)


def mix(images: Tensor, targets: Tensor, mixup: float, cutmix: float) -> tuple[Tensor, Tensor]:
    """Blend every image and target with its mirror in the batch (mixup), or paste a box of it (cutmix); 0 turns one off.

    With both on, each is taken half of the time. Random numbers come from torch's default generator.
    """
    if not mixup and not cutmix:
        return images, targets
    paste = bool(cutmix) and (not mixup or float(torch.rand(())) < 0.5)
    alpha = cutmix if paste else mixup
    share = float(torch.distributions.Beta(alpha, alpha).sample())
    if paste:
        images, share = _paste(images, share)
    else:
        images = images * share + images.flip(0) * (1 - share)
    return images, targets * share + targets.flip(0) * (1 - share)


def _paste(images: Tensor, share: float) -> tuple[Tensor, float]:
    """Paste a box of area ``1 - share`` of the mirrored batch; returns the share that really stayed."""
    images, spans = images.clone(), []
    for length in images.shape[-2:]:
        half, middle = length * (1 - share) ** 0.5 / 2, float(torch.rand(())) * length
        spans.append((max(0, round(middle - half)), min(length, round(middle + half))))
    (top, bottom), (left, right) = spans
    images[:, :, top:bottom, left:right] = images.flip(0)[:, :, top:bottom, left:right]
    return images, 1 - (bottom - top) * (right - left) / (images.shape[-2] * images.shape[-1])
