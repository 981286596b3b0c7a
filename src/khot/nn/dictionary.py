from __future__ import annotations

from typing import final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from khot._tensors import Number, readable, wide_dtype, work_dtype
from khot.checks import check_per_row, check_scores
from khot.primitives.pursuit import START, least_squares, matching_pursuit

CHUNK = 1 << 21  # numbers that the pursuit of one chunk of rows keeps: about the cache


@final
class Dictionary(nn.Module):
    r"""Dictionary of atoms: every input becomes a combination of at most ``k`` of them.

    .. math:: z = \arg\min_{\lVert z \rVert_0 \le k} \lVert x - z D \rVert^2 \text{ by orthogonal matching pursuit}, \qquad \hat x = z D

    The atoms are chosen greedily for all rows at once; the coefficients are the least squares on the chosen atoms and are
    differentiable in the atoms and the input, exactly as long as the choice stays. Atoms are divided by their norms, so that their
    gradient is perpendicular to them.

    Args:
        dim: size of the input's last dimension.
        num_atoms: how many atoms.
        k: how many of them a row may use, at most ``dim``.

    Example:
        >>> dictionary = Dictionary(dim=16, num_atoms=40, k=3)
        >>> x = torch.randn(100, 16)
        >>> dictionary.encode(x).count_nonzero(-1).max()
        tensor(3)
        >>> for _ in range(5):
        ...     error = dictionary.learn(x)  # in closed form; or train (x - dictionary(x)).square() with any optimizer
        >>> dictionary.encode(x, error=0.2).count_nonzero(-1).max() <= 16  # as many as the error needs
        tensor(True)

    Pati et al. 1993; Aharon, Elad, Bruckstein: K-SVD, 2006; Mairal et al.: Online Dictionary Learning for Sparse Coding, 2009.
    """

    moments: Tensor
    cross: Tensor
    used: Tensor

    def __init__(self, dim: int, num_atoms: int, k: int) -> None:
        super().__init__()
        if dim < 1 or num_atoms < 1:
            raise ValueError(f"dim and num_atoms must be at least 1, got {dim} and {num_atoms}")
        if not 1 <= k <= min(dim, num_atoms):
            raise ValueError(f"k must be between 1 and min(dim, num_atoms)={min(dim, num_atoms)}, got {k}")
        self.dim, self.num_atoms, self.k = dim, num_atoms, k
        self.atoms = nn.Parameter(F.normalize(torch.randn(num_atoms, dim), dim=-1))
        self.register_buffer("moments", torch.zeros(num_atoms, num_atoms))
        self.register_buffer("cross", torch.zeros(num_atoms, dim))
        self.register_buffer("used", torch.zeros(num_atoms))

    @property
    def components(self) -> Tensor:
        """``(num_atoms, dim)``: the atoms with length 1."""
        return F.normalize(self.atoms, dim=-1, eps=torch.finfo(self.atoms.dtype).tiny)

    def forward(self, x: Tensor) -> Tensor:
        """The input made of ``k`` atoms, ``(..., dim)``."""
        return self.decode(self.encode(x))

    def decode(self, codes: Tensor) -> Tensor:
        """``(..., num_atoms)`` -> ``(..., dim)``."""
        with torch.autocast(codes.device.type, enabled=False):
            return codes @ self.components.to(codes.dtype)

    def encode(self, x: Tensor, *, k: int | None = None, error: Number | None = None) -> Tensor:
        """Sparse codes.

        Args:
            x: ``(..., dim)``.
            k: at most so many atoms in a row; by default that of the layer, and with ``error`` as many as are needed.
            error: the root mean square error that a row may have, a number or one for each row, ``(...)``.

        Returns:
            ``(..., num_atoms)`` with at most ``k`` non-zero entries in a row; fewer only where nothing is left to explain.
        """
        _check_rows(x, self.dim)
        k = self._places(k, error)
        limit = self._limit(x, error)
        with torch.autocast(x.device.type, enabled=False):
            rows = x.reshape(-1, self.dim).to(work_dtype(x))
            unit = self.components.to(rows.dtype)
            wide = unit.to(wide_dtype(rows))
            gram = wide @ wide.mT
            size = max(1, CHUNK // (self.num_atoms * (k if error is None else min(k, START))))
            parts = [_code(part, unit, gram, k, bound) for part, bound in _chunks(rows, limit, size)]
        return torch.cat(parts).view(*x.shape[:-1], self.num_atoms).to(x.dtype)

    @torch.no_grad()
    def learn(self, x: Tensor, *, error: Number | None = None, keep: float = 0.0, sweeps: int = 1) -> Tensor:
        r"""One step of learning in closed form: code the rows, then fit each atom to them, one after the other.

        Args:
            x: ``(..., dim)``.
            error: as for :meth:`encode`.
            keep: the share of what earlier calls have learned that is kept, from 0 (only these rows count) to 1 (all rows count alike).
            sweeps: how often each atom is fitted.

        Returns:
            The mean squared error before the step.
        """
        if not 0 <= keep <= 1:
            raise ValueError(f"keep must be between 0 and 1, got {keep}")
        x = x.reshape(-1, self.dim).to(self.atoms.dtype)
        if not len(x):
            return x.new_zeros(())
        codes, atoms = self.encode(x, error=error), self.components
        coded = codes.any(1).nonzero().squeeze(1)  # with an error many rows need no atom
        codes, rows = codes[coded], x[coded]
        left = x.index_copy(0, coded, rows - codes @ atoms)
        self.moments.mul_(keep).addmm_(codes.mT, codes)
        self.cross.mul_(keep).addmm_(codes.mT, rows)
        self.used.mul_(keep).add_(codes.count_nonzero(0))
        for _ in range(sweeps):
            _fit_atoms(atoms, self.moments, self.cross)
        self.atoms.copy_(atoms)
        self._replace(x, left.square().sum(-1))
        return left.square().mean()

    @torch.no_grad()
    def renew(self, x: Tensor, *, error: Number | None = None) -> int:
        """Replace atoms that no row of ``x`` uses, and all but one of those that are nearly the same, by the rows that are coded worst.

        Returns:
            How many were replaced.
        """
        x = x.reshape(-1, self.dim).to(self.atoms.dtype)
        codes = self.encode(x, error=error)
        self.used.copy_((codes != 0).sum(0).to(self.used.dtype))
        return self._replace(x, (x - codes @ self.components).square().sum(-1))

    def _replace(self, x: Tensor, left: Tensor) -> int:
        atoms = self.components
        idle = (self.used < 0.5) | doubles(atoms, self.used)
        worst = left.argsort(descending=True)
        worst = worst[left[worst] > 0][: int(idle.sum())]  # a row without error teaches nothing
        where = idle.nonzero().squeeze(1)[: len(worst)]
        atoms[where] = F.normalize(x[worst], dim=-1)
        self.atoms.copy_(atoms)
        self.moments[where], self.moments[:, where], self.cross[where] = 0.0, 0.0, 0.0
        self.used[where] = 1.0  # time to be used
        return len(where)

    def _places(self, k: int | None, error: Number | None) -> int:
        most = min(self.dim, self.num_atoms)
        k = k if k is not None else self.k if error is None else most
        if not 1 <= k <= most:
            raise ValueError(f"k must be between 1 and min(dim, num_atoms)={most}, got {k}")
        return k

    def _limit(self, x: Tensor, error: Number | None) -> Tensor | None:
        """The length of the error that each row may have, ``(rows,)``."""
        if error is None:
            return None
        bound = torch.as_tensor(error, dtype=work_dtype(x), device=x.device)
        check_per_row("error", bound, x)
        if readable(bound) and not bool((bound >= 0).all()):
            raise ValueError(f"error must be at least 0, got {bound.min().item():g}")
        return bound.expand(x.shape[:-1]).reshape(-1) * self.dim**0.5

    def extra_repr(self) -> str:
        return f"dim={self.dim}, num_atoms={self.num_atoms}, k={self.k}"


def _check_rows(x: Tensor, dim: int) -> None:
    check_scores(x, name="x")
    if x.shape[-1] != dim:
        raise ValueError(f"x must have {dim} features in its last dimension, got shape {tuple(x.shape)}")
    if readable(x) and not bool(x.isfinite().all()):
        raise ValueError("x must be finite, got nan or inf; drop or fill these rows first")


def _chunks(rows: Tensor, limit: Tensor | None, size: int) -> list[tuple[Tensor, Tensor | None]]:
    parts = rows.split(size)
    return list(zip(parts, [None] * len(parts) if limit is None else limit.split(size), strict=True))


def _code(x: Tensor, unit: Tensor, gram: Tensor, k: int, limit: Tensor | None) -> Tensor:
    scale = x.detach().abs().amax(-1, keepdim=True)
    scale = torch.where(scale > 0, scale, 1.0)  # squares of huge or tiny rows would leave the range
    x = x / scale
    energy = x.detach().square().sum(-1)
    if limit is None:
        return scale * _pursue(x, unit, gram, energy, k, None)
    bound = (limit / scale.squeeze(-1)).square()
    need = (energy > bound).nonzero().squeeze(1)
    codes = _pursue(x[need], unit, gram, energy[need], k, bound[need])
    return scale * x.new_zeros(len(x), len(unit)).index_copy(0, need, codes)


def _pursue(x: Tensor, unit: Tensor, gram: Tensor, energy: Tensor, k: int, limit: Tensor | None) -> Tensor:
    correlation = x @ unit.mT
    support = matching_pursuit(correlation.detach(), gram.detach().to(x.dtype), energy, k, limit)
    return torch.zeros_like(correlation).scatter_add(1, support.indices, least_squares(correlation, gram, support))


def doubles(atoms: Tensor, used: Tensor, most: float = 0.99) -> Tensor:
    """A mask of the atoms that are nearly the same as another one that is used more often (of equals, the first stays)."""
    order = used.argsort(descending=True, stable=True)
    cosine = (atoms[order] @ atoms[order].mT).abs().tril(-1)  # with those that are used more often
    mask = torch.zeros_like(used, dtype=torch.bool)
    mask[order] = (cosine > most).any(1)
    return mask


def _fit_atoms(atoms: Tensor, moments: Tensor, cross: Tensor) -> None:
    """Block coordinate descent in place: every atom the best one for the codes, given the others."""
    there = (moments.diagonal() > 0).tolist()
    tiny = torch.finfo(atoms.dtype).tiny
    others = (moments - moments.diagonal().diag()).unbind()  # the atom's own part only sets the length
    for atom, weights, target, used in zip(atoms.unbind(), others, cross.unbind(), there, strict=True):
        if used:
            better = torch.addmv(target, atoms.mT, weights, alpha=-1)
            torch.div(better, torch.linalg.vector_norm(better).clamp(min=tiny), out=atom)
