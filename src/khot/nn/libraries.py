"""Libraries of candidate terms for :class:`khot.nn.SINDy`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn


class Library(nn.Module):
    """Candidate terms: ``forward`` maps ``(..., d)`` to ``(..., p)``, ``names`` and ``latex`` write them; ``a + b`` joins two libraries."""

    def names(self, variables: Sequence[str]) -> list[str]:
        raise NotImplementedError

    def latex(self, variables: Sequence[str]) -> list[str]:
        return self.names(variables)

    def __add__(self, other: Library) -> Library:
        return _Joined(self, other)


class PolynomialLibrary(Library):
    """All products of powers up to a degree, the constant first.

    Args:
        dim: how many variables.
        degree: the largest sum of powers.

    Example:
        >>> library = PolynomialLibrary(dim=2, degree=2)
        >>> library.names(["x", "y"])
        ['1', 'x', 'y', 'x^2', 'x y', 'y^2']
        >>> library(torch.tensor([2.0, 3.0]))
        tensor([1., 2., 3., 4., 6., 9.])
    """

    powers: Tensor

    def __init__(self, dim: int, degree: int) -> None:
        super().__init__()
        if dim < 1 or degree < 0:
            raise ValueError(f"dim must be at least 1 and degree at least 0, got {dim} and {degree}")
        found = [power for power in itertools.product(range(degree + 1), repeat=dim) if sum(power) <= degree]
        found.sort(key=lambda power: (sum(power), [-e for e in power]))
        self.register_buffer("powers", torch.tensor(found, dtype=torch.int64), persistent=False)
        self.degree = degree

    def forward(self, x: Tensor) -> Tensor:
        by_degree = [torch.ones_like(x)]
        for _ in range(self.degree):
            by_degree.append(by_degree[-1] * x)  # products have a derivative at 0; powers with a tensor exponent do not
        every = torch.stack(by_degree, -1)  # (..., d, degree + 1)
        parts = [every[..., variable, self.powers[:, variable]] for variable in range(x.shape[-1])]
        return torch.stack(parts).prod(0) if len(parts) > 1 else parts[0]

    def names(self, variables: Sequence[str]) -> list[str]:
        return [_product(power, variables, "{}^{}") for power in self.powers.tolist()]

    def latex(self, variables: Sequence[str]) -> list[str]:
        return [_product(power, variables, "{}^{{{}}}") for power in self.powers.tolist()]


class FourierLibrary(Library):
    """Sines and cosines of each variable.

    Example:
        >>> FourierLibrary(dim=1, frequencies=[1, 2]).names(["x"])
        ['sin(x)', 'cos(x)', 'sin(2 x)', 'cos(2 x)']
    """

    def __init__(self, dim: int, frequencies: Sequence[float] = (1,)) -> None:
        super().__init__()
        if not frequencies:
            raise ValueError("frequencies must name at least one")
        self.dim, self.frequencies = dim, tuple(frequencies)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([wave(frequency * x) for frequency in self.frequencies for wave in (torch.sin, torch.cos)], -1)

    def names(self, variables: Sequence[str]) -> list[str]:
        return self._written(variables, "{}({})")

    def latex(self, variables: Sequence[str]) -> list[str]:
        return self._written(variables, "\\{}({})")

    def _written(self, variables: Sequence[str], shape: str) -> list[str]:
        waves = itertools.product(self.frequencies, ("sin", "cos"), variables)
        return [shape.format(wave, variable if frequency == 1 else f"{frequency:g} {variable}") for frequency, wave, variable in waves]


class FunctionLibrary(Library):
    """Any functions of the state, by name; each maps ``(..., d)`` to ``(...)``.

    Example:
        >>> FunctionLibrary({"x exp(-y)": lambda s: s[..., 0] * torch.exp(-s[..., 1])})(torch.tensor([2.0, 0.0]))
        tensor([2.])
    """

    def __init__(self, functions: Mapping[str, Callable[[Tensor], Tensor]]) -> None:
        super().__init__()
        if not functions:
            raise ValueError("functions must name at least one")
        self.functions = dict(functions)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([function(x) for function in self.functions.values()], -1)

    def names(self, variables: Sequence[str]) -> list[str]:
        return list(self.functions)


class _Joined(Library):
    def __init__(self, *parts: Library) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([part(x) for part in self.parts], -1)

    def names(self, variables: Sequence[str]) -> list[str]:
        return [name for part in self.parts for name in part.names(variables)]  # type: ignore[operator]

    def latex(self, variables: Sequence[str]) -> list[str]:
        return [name for part in self.parts for name in part.latex(variables)]  # type: ignore[operator]


def _product(power: Sequence[int], variables: Sequence[str], shape: str) -> str:
    written = [variable if e == 1 else shape.format(variable, e) for variable, e in zip(variables, power, strict=True) if e]
    return " ".join(written) or "1"
