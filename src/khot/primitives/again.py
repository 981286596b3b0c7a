"""Backward passes written in place, and what stands in for them where their steps must be visible."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from khot._tensors import in_forward_mode, is_traced, readable


def must_show(grad: Tensor) -> bool:
    """Whether a gradient will be differentiated itself, or a mode or transform is active on the way back."""
    return torch.is_grad_enabled() or is_traced() or in_forward_mode() or not readable(grad)


def vjp_of(function: Callable[[Tensor], Tensor], x: Tensor, grad: Tensor) -> Tensor:
    """The gradient of ``function`` at ``x``, by torch's own rules, so that it can be differentiated or batched."""
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        x = x if x.requires_grad else x.detach().requires_grad_()
        return torch.autograd.grad(function(x), x, grad, create_graph=again)[0]
