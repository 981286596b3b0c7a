"""Ways to learn a dictionary, by their definitions: each is a function (patches, number of atoms, k, error, seed) -> atoms."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

Coder = Callable[[np.ndarray, np.ndarray, int, float | None], np.ndarray]  # (x, atoms, k, error) -> codes
Learner = Callable[[np.ndarray, int, int, float | None, int], np.ndarray]

# Over the patches. K-SVD's are the published ones; khot's, and its batches, were chosen on the pictures ascent and camera as what a fifth
# of K-SVD's time allows; scikit-learn's lasso takes milliseconds for each patch.
PASSES = {"khot": 8, "ksvd": 10, "sklearn": 1}
BATCH = 4000
TUNED = 2.0  # the penalty of scikit-learn's learning: best of 0.5, 1, 2, 4 on the noisy picture ascent


def khot_codes(x: np.ndarray, atoms: np.ndarray, k: int, error: float | None) -> np.ndarray:
    from khot.nn import Dictionary

    dictionary = Dictionary(x.shape[1], len(atoms), k)
    dictionary.atoms.data = torch.from_numpy(atoms).float()
    with torch.no_grad():
        return dictionary.encode(torch.from_numpy(x).float(), error=error).numpy()


def sklearn_codes(x: np.ndarray, atoms: np.ndarray, k: int, error: float | None) -> np.ndarray:
    """scikit-learn's orthogonal matching pursuit on the Gram matrix. It always takes one atom: rows that need none are left out."""
    from sklearn.linear_model import orthogonal_mp_gram

    atoms, energy = atoms.astype(np.float64), np.square(x, dtype=np.float64).sum(1)
    limit = None if error is None else x.shape[1] * error**2
    need = energy > (0.0 if limit is None else limit)
    codes = np.zeros((len(x), len(atoms)), np.float32)
    if need.any():
        stop = {"n_nonzero_coefs": k} if limit is None else {"tol": limit, "norms_squared": energy[need]}
        codes[need] = np.atleast_2d(orthogonal_mp_gram(atoms @ atoms.T, atoms @ x[need].T, copy_Gram=False, **stop).T)
    return codes


def khot(x: np.ndarray, n: int, k: int, error: float | None, seed: int) -> np.ndarray:
    from khot.sklearn import TopKDictionary

    model = TopKDictionary(n, k, error=error, max_iter=PASSES["khot"], batch_size=BATCH, random_state=seed)
    return model.fit(x).components_


def ksvd(x: np.ndarray, n: int, k: int, error: float | None, seed: int, coder: Coder = sklearn_codes) -> np.ndarray:
    """K-SVD (Aharon, Elad, Bruckstein 2006): code all rows, then for each atom the best rank one of what its rows leave to it.

    An atom that no row uses becomes the row that is coded worst.
    """
    atoms = start(x, n, seed)
    for _ in range(PASSES["ksvd"]):
        codes = coder(x, atoms, k, error)
        left = x - codes @ atoms
        for atom in range(n):
            users = np.flatnonzero(codes[:, atom])
            if not len(users):
                worst = x[np.square(left).sum(1).argmax()]
                atoms[atom] = worst / np.linalg.norm(worst)
                continue
            part = left[users] + np.outer(codes[users, atom], atoms[atom])
            u, s, v = np.linalg.svd(part, full_matrices=False)
            atoms[atom], codes[users, atom] = v[0], u[:, 0] * s[0]
            left[users] = part - np.outer(codes[users, atom], atoms[atom])
    return atoms


def ksvd_fast(x: np.ndarray, n: int, k: int, error: float | None, seed: int) -> np.ndarray:
    """K-SVD with khot's coder: what is left of its time is the singular value decompositions."""
    return ksvd(x, n, k, error, seed, khot_codes)


def sklearn(x: np.ndarray, n: int, k: int, error: float | None, seed: int, alpha: float = 1.0) -> np.ndarray:
    """scikit-learn's online learning, whose coder is the lasso, with its default penalty for patches of variance 1."""
    from sklearn.decomposition import MiniBatchDictionaryLearning

    model = MiniBatchDictionaryLearning(
        n, alpha=alpha, batch_size=256, max_iter=PASSES["sklearn"], transform_algorithm="omp", random_state=seed
    )
    atoms = model.fit(x / x.std()).components_
    norm = np.linalg.norm(atoms, axis=1, keepdims=True)
    return (atoms / np.where(norm > 0, norm, 1.0)).astype(np.float32)


def sklearn_tuned(x: np.ndarray, n: int, k: int, error: float | None, seed: int) -> np.ndarray:
    return sklearn(x, n, k, error, seed, TUNED)


def dct(x: np.ndarray, n: int, k: int, error: float | None, seed: int) -> np.ndarray:
    """The overcomplete cosine transform: products of ``sqrt(n)`` cosines in each direction, without mean but for the first."""
    side, waves = round(x.shape[1] ** 0.5), round(n**0.5)
    cosines = np.cos(np.pi * np.outer(np.arange(side) + 0.5, np.arange(waves)) / waves)  # (pixels, waves)
    cosines[:, 1:] -= cosines[:, 1:].mean(0)
    atoms = np.einsum("aw,bv->wvab", cosines, cosines).reshape(waves**2, -1)
    return (atoms / np.linalg.norm(atoms, axis=1, keepdims=True)).astype(np.float32)


def start(x: np.ndarray, n: int, seed: int) -> np.ndarray:
    """Different patches that are not flat."""
    order = np.random.RandomState(seed).permutation(len(x))
    rows = x[order]
    rows = rows[np.linalg.norm(rows, axis=1) > 1][:n]
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


ROWS: dict[str, Learner] = {
    "khot": khot,
    "ksvd": ksvd,
    "ksvd-fast": ksvd_fast,
    "sklearn": sklearn,
    "sklearn-tuned": sklearn_tuned,
    "dct": dct,
}
