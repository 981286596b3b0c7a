"""Taking the noise out of a photograph with a dictionary that is learned from the noisy photograph itself.

    python examples/dictionary.py [--quick] [--sigma 25] [--out dictionary.png]

Every 8 x 8 patch is written with as few atoms as bring its error down to the noise; the patches overlap and are averaged
(Elad & Aharon 2006). Compared: cosines that are not learned, and scikit-learn's dictionary, which is learned with an L1 penalty.

Needs: pip install khot[examples]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_sample_image
from sklearn.decomposition import MiniBatchDictionaryLearning
from torch import Tensor
from torch.nn import functional as F

import khot
from khot.sklearn import TopKDictionary

SIDE, GAIN = 8, 1.15  # pixels of a patch; its error for each unit of noise
Learner = Callable[[np.ndarray, int, float, int], np.ndarray]  # (patches, atoms, error, passes) -> atoms


def learned(patches: np.ndarray, count: int, error: float, passes: int) -> np.ndarray:
    """Atoms that are fitted to codes by matching pursuit, the same codes that take out the noise."""
    return TopKDictionary(count, error=error, max_iter=passes, random_state=0).fit(patches).components_


def by_lasso(patches: np.ndarray, count: int, error: float, passes: int) -> np.ndarray:
    model = MiniBatchDictionaryLearning(count, alpha=1.0, max_iter=passes, batch_size=256, random_state=0)
    return model.fit(patches / patches.std()).components_


def cosines(patches: np.ndarray, count: int, error: float, passes: int) -> np.ndarray:
    waves = round(count**0.5)
    lines = np.cos(np.pi * np.outer(np.arange(SIDE) + 0.5, np.arange(waves)) / waves)
    lines[:, 1:] -= lines[:, 1:].mean(0)
    return np.einsum("aw,bv->wvab", lines, lines).reshape(waves**2, -1)


METHODS: dict[str, Learner] = {"khot (learned)": learned, "scikit-learn (L1)": by_lasso, "cosines": cosines}


def photograph(size: int) -> Tensor:
    """A grey piece of scikit-learn's photograph of a temple."""
    colours = load_sample_image("china.jpg").astype(np.float32)
    return torch.from_numpy(colours.mean(-1)[150 : 150 + size, 100 : 100 + size].copy())


def cut(picture: Tensor) -> tuple[Tensor, Tensor]:
    """All overlapping patches without their means, and the means."""
    patches = F.unfold(picture[None, None], SIDE)[0].T.contiguous()
    means = patches.mean(1, keepdim=True)
    return patches - means, means


def denoise(noisy: Tensor, atoms: np.ndarray, sigma: float) -> tuple[Tensor, float]:
    """The picture without noise, and how many atoms a patch took."""
    dictionary = khot.nn.Dictionary(SIDE**2, len(atoms), k=1)
    dictionary.atoms.data = torch.from_numpy(atoms).float()
    patches, means = cut(noisy)
    with torch.no_grad():
        codes = dictionary.encode(patches, error=GAIN * sigma)  # each patch takes as many atoms as it needs
        better = dictionary.decode(codes) + means
    total = F.fold(better.T[None], noisy.shape, SIDE)[0, 0]
    cover = F.fold(torch.ones_like(better).T[None], noisy.shape, SIDE)[0, 0]
    weight = 30 / sigma
    return (total + weight * noisy) / (cover + weight), float((codes != 0).sum(1).float().mean())


def psnr(picture: Tensor, truth: Tensor) -> float:
    return float(20 * torch.log10(255 / (picture - truth).square().mean().sqrt()))


def main(argv: list[str] | None = None) -> dict[str, float]:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--quick", action="store_true", help="a smaller piece, fewer atoms and passes")
    options.add_argument("--sigma", type=float, default=25.0, help="standard deviation of the noise, in grey values")
    options.add_argument("--out", type=Path, default=Path("dictionary.png"), help="the picture")
    given = options.parse_args(argv)
    size, count, passes = (80, 100, 5) if given.quick else (256, 256, 10)

    clean = photograph(size)
    noisy = clean + given.sigma * torch.randn(clean.shape, generator=torch.Generator().manual_seed(0))
    patches = cut(noisy)[0].numpy()
    quality, pictures, dictionaries = {"noisy": psnr(noisy, clean)}, {"noisy": noisy}, {}
    print(f"{'noisy':20} {quality['noisy']:.2f} dB")
    for name, learn in METHODS.items():
        if given.quick and learn is by_lasso:
            continue  # about a minute
        began = time.perf_counter()
        atoms = learn(patches, count, GAIN * given.sigma, passes)
        seconds = time.perf_counter() - began
        better, used = denoise(noisy, atoms, given.sigma)
        quality[name], pictures[name], dictionaries[name] = psnr(better, clean), better, atoms
        print(f"{name:20} {quality[name]:.2f} dB   {used:.2f} atoms a patch   learned in {seconds:.1f} s")
    draw({"clean": clean, **pictures}, quality, dictionaries["khot (learned)"], given.out)
    return quality


def draw(pictures: dict[str, Tensor], quality: dict[str, float], atoms: np.ndarray, path: Path) -> None:
    """The pictures, and the learned atoms, the ones of most contrast first."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(pictures) + 1, figsize=(3 * (len(pictures) + 1), 3.3))
    for axis, (name, picture) in zip(axes, pictures.items(), strict=False):
        axis.imshow(picture, cmap="gray", vmin=0, vmax=255)
        axis.set(title=f"{name} {quality[name]:.2f} dB" if name in quality else name, xticks=[], yticks=[])
    axes[-1].imshow(mosaic(atoms), cmap="gray")
    axes[-1].set(title=f"{len(atoms)} learned atoms", xticks=[], yticks=[])
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    print(f"wrote {path}")


def mosaic(atoms: np.ndarray) -> np.ndarray:
    """The atoms side by side with a white line between them."""
    side = round(len(atoms) ** 0.5)
    tiles = atoms[: side**2].reshape(-1, SIDE, SIDE)
    tiles = tiles / np.abs(tiles).max((1, 2), keepdims=True)
    tiles = np.pad(tiles, ((0, 0), (0, 1), (0, 1)), constant_values=1.0)
    return tiles.reshape(side, side, SIDE + 1, SIDE + 1).swapaxes(1, 2).reshape(side * (SIDE + 1), -1)


if __name__ == "__main__":
    main()
