"""Dictionaries of 8 x 8 patches: a noisy photograph, and how well k atoms represent patches of a photograph that was not seen."""

from __future__ import annotations

import functools
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from bench.applications.atoms import ROWS, Coder, khot_codes, sklearn_codes
from bench.applications.cells import options, pivot, run
from bench.applications.data import photograph
from bench.common import Table, chosen, print_tables

SIDE, ATOMS, SIGMA = 8, 256, 25.0
KS = (2, 4, 6, 8, 10)
TRAINED_ON = ("aero", "ascent", "camera")
GAIN, WEIGHT = 1.15, 30.0  # error for each unit of noise, and the weight of the noisy picture (Elad & Aharon 2006)
COUNT = {"denoising": 40_000, "representation": 20_000}  # patches to learn from
HELD = 20_000  # patches to score on
SHOWN = (("PSNR", "psnr", 2), ("processor seconds of learning", "fit_seconds", 1), ("atoms a patch", "atoms_a_patch", 2),
         ("atoms in use", "used", 0))  # fmt: skip


def main(argv: list[str]) -> int:
    made = options("dictionary", __doc__)
    made.add_argument("--table", choices=["denoising", "representation"], help="one table only")
    made.add_argument("--picture", default="boat", help="the picture to denoise: boat, or for tuning aero, ascent, camera")
    given = made.parse_args(argv)
    rows = chosen(given.rows, ROWS, ["khot", "dct"] if given.quick else None)
    seeds = range(given.seeds or (1 if given.quick else 3))
    wanted = [given.table] if given.table else ["denoising", "representation"]
    cells = [
        {"table": table, "picture": given.picture, "row": row, "k": k, "seed": seed}
        for seed in seeds for table in wanted for k in ((0,) if table == "denoising" else KS[1:2] if given.quick else KS)
        for row in rows if row != "dct" or seed == 0 or table == "denoising"
    ]  # fmt: skip
    found = run("dictionary", given, cells, functools.partial(_cell, folder=given.data, few=given.quick))
    print_tables(tables(found))
    return 0


def _cell(table: str, picture: str, row: str, k: int, seed: int, folder: Path, few: bool) -> dict[str, Any]:
    work = _denoise if table == "denoising" else _represent
    return work(picture, row, k, seed, folder, few)


def _denoise(picture: str, row: str, k: int, seed: int, folder: Path, few: bool) -> dict[str, Any]:
    """Learn on patches of the noisy picture, code all of them up to the noise, and average what overlaps."""
    clean = torch.from_numpy(photograph(picture, folder))
    clean = clean[:96, :96] if few else clean
    noisy = clean + SIGMA * torch.randn(clean.shape, generator=torch.Generator().manual_seed(seed))
    patches, means = flat(noisy)
    rows = np.random.RandomState(seed).permutation(len(patches))[: COUNT["denoising"]]
    _warm(row, patches[rows].numpy(), GAIN * SIGMA)
    began = time.process_time()
    atoms = ROWS[row](patches[rows].numpy(), ATOMS, 1, GAIN * SIGMA, seed)
    fit = time.process_time() - began
    began = time.process_time()
    coder = sklearn_codes if row.startswith("sklearn") else khot_codes
    better, used = rebuilt(patches, atoms, coder, GAIN * SIGMA)
    picture_ = average(better + means, noisy)
    return {"psnr": psnr(picture_, clean), "noisy": psnr(noisy, clean), "fit_seconds": fit,
            "code_seconds": time.process_time() - began, "atoms_a_patch": used}  # fmt: skip


def _represent(picture: str, row: str, k: int, seed: int, folder: Path, few: bool) -> dict[str, Any]:
    """PSNR of k atoms on patches of one picture; the atoms were learned on others."""
    random = np.random.RandomState(seed)
    train = torch.cat([flat(torch.from_numpy(photograph(name, folder)))[0] for name in TRAINED_ON])
    held = flat(torch.from_numpy(photograph(picture, folder)))[0]
    count = COUNT["representation"] // (10 if few else 1)
    train = train[random.permutation(len(train))[:count]].numpy()
    held = held[random.permutation(len(held))[:HELD]].numpy()
    _warm(row, train, None)
    began = time.process_time()
    atoms = ROWS[row](train, ATOMS, k, None, seed)
    fit = time.process_time() - began
    codes = khot_codes(held, atoms, k, None)
    used = int((khot_codes(train, atoms, k, None) != 0).any(0).sum())
    return {"psnr": psnr(torch.from_numpy(codes @ atoms), torch.from_numpy(held)), "fit_seconds": fit, "used": used}


def _warm(row: str, patches: np.ndarray, error: float | None) -> None:
    """A small run before the timed one: imports are no part of it."""
    ROWS[row](patches[:600], 16, 1, error, 0)


def flat(picture: Tensor) -> tuple[Tensor, Tensor]:
    """All overlapping patches without their means ``(patches, 64)``, and the means."""
    patches = F.unfold(picture[None, None], SIDE)[0].T.contiguous()
    means = patches.mean(1, keepdim=True)
    return patches - means, means


def rebuilt(patches: Tensor, atoms: np.ndarray, coder: Coder, error: float) -> tuple[Tensor, float]:
    """The patches made of atoms, and how many atoms a patch took."""
    parts, used = [], 0
    for part in patches.split(20_000):
        codes = coder(part.numpy(), atoms, 1, error)
        used += int((codes != 0).sum())
        parts.append(torch.from_numpy(codes @ atoms.astype(np.float32)))
    return torch.cat(parts), used / len(patches)


def average(patches: Tensor, noisy: Tensor) -> Tensor:
    """The mean of all patches that cover a pixel, with a little of the noisy picture."""
    total = F.fold(patches.T[None], noisy.shape, SIDE)[0, 0]
    count = F.fold(torch.ones_like(patches).T[None], noisy.shape, SIDE)[0, 0]
    return (total + WEIGHT / SIGMA * noisy) / (count + WEIGHT / SIGMA)


def psnr(picture: Tensor, truth: Tensor) -> float:
    return float(20 * torch.log10(255 / (picture - truth).double().square().mean().sqrt()))


def tables(rows: list[dict[str, Any]]) -> list[Table]:
    made = []
    for picture in dict.fromkeys(row["picture"] for row in rows):
        noisy, held = ([row for row in rows if (row["table"], row["picture"]) == (name, picture)] for name in COUNT)
        for title, value, digits in SHOWN:
            made.append(pivot(f"{picture} with noise {SIGMA:g}: {title}", noisy, "row", "table", value, digits=digits))
            made.append(pivot(f"held-out patches of {picture}: {title}", held, "row", "k", value, digits=digits))
    return [table for table in made if any(cell != "-" for row in table.rows for cell in row[1:])]
