from __future__ import annotations

from torch import Tensor, nn

from khot._tensors import Number


def keep(module: nn.Module, **values: Number) -> None:
    """Set numbers as attributes of a module: a parameter stays one, any other tensor becomes a buffer, and so both are in its state."""
    for name, value in values.items():
        if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
            module.register_buffer(name, value)
        else:
            setattr(module, name, value)


def show(value: Number) -> str:
    """A number for ``extra_repr``: a tensor by its value if it is one number, by its shape otherwise."""
    if not isinstance(value, Tensor):
        return f"{value}"
    return f"{value.item():g}" if value.numel() == 1 else f"tensor{tuple(value.shape)}"
