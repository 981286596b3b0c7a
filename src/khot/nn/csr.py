from __future__ import annotations

import warnings
from typing import final

import torch
from torch import Tensor, nn

from khot.nn.annealing import check_width


@final
class CSRLinear(nn.Module):
    """A linear layer with its weights in compressed sparse rows, for inference; made by :func:`to_csr`."""

    crow: Tensor
    col: Tensor
    values: Tensor
    bias: Tensor | None

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        sparse = _quietly(linear.weight.detach())
        self.register_buffer("crow", sparse.crow_indices().to(torch.int32))
        self.register_buffer("col", sparse.col_indices().to(torch.int32))
        self.register_buffer("values", sparse.values())
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        check_width(x, self.in_features)
        weight = torch.sparse_csr_tensor(self.crow, self.col, self.values, (self.out_features, self.in_features), check_invariants=False)
        out = (weight @ x.reshape(-1, self.in_features).T).T
        out = out if self.bias is None else out + self.bias
        return out.reshape(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, weights={self.values.numel()}"


def to_csr(model: nn.Module, *, below: float = 0.1) -> nn.Module:
    """Store the sparse linear layers of a trained model in compressed rows; the model is changed in place and returned.

    Args:
        model: any module, for inference: the layers that are replaced take no gradient.
        below: layers with at most this share of nonzero weights are replaced; denser ones are faster as they are.

    Example:
        >>> layer = torch.nn.Linear(50, 20)
        >>> _ = layer.weight.data.mul_(torch.rand(20, 50) < 0.05)
        >>> to_csr(torch.nn.Sequential(layer, torch.nn.ReLU()))
        Sequential(
          (0): CSRLinear(in_features=50, out_features=20, weights=...)
          (1): ReLU()
        )
    """
    if _is_sparse(model, below):
        return CSRLinear(model)  # pyright: ignore[reportArgumentType]
    for module in list(model.modules()):
        for name, child in module.named_children():
            if _is_sparse(child, below):
                setattr(module, name, CSRLinear(child))  # pyright: ignore[reportArgumentType]
    return model


def _is_sparse(module: nn.Module, below: float) -> bool:
    return type(module) is nn.Linear and int(module.weight.count_nonzero()) <= below * module.weight.numel()


def _quietly(dense: Tensor) -> Tensor:
    """torch warns at the first sparse tensor that the layout is in beta."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return dense.to_sparse_csr()
