"""The native CPU kernel of the threshold family, called through ctypes.

:func:`forward` and :func:`backward` are the bare kernels, for tensors that hold their own memory. ``khot::threshold_forward`` and
``khot::threshold_backward`` are the same as operators of PyTorch, with shapes, derivatives and batching rules: what compilers and
tracing modes see.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from khot.kernels import register
from khot.registry import Number, readable

FAMILIES = {"sigmoid": 0, "euclidean": 1, "laplace": 2, "gaussian": 3}
DTYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}
VERSION = 1  # of the entry points


def _load() -> ctypes.CDLL | None:
    """The compiled kernel, or ``None`` if there is none that fits this version of the package."""
    try:
        lib = ctypes.CDLL(str(Path(__file__).with_name("_native.so")))
        if lib.khot_version() != VERSION:
            return None
    except (OSError, AttributeError):
        return None
    pointer, real, whole, index = ctypes.c_void_p, ctypes.c_double, ctypes.c_int, ctypes.c_int64
    lib.khot_isa.restype = ctypes.c_char_p
    lib.khot_threshold_forward.argtypes = [whole, whole, pointer, pointer, pointer, real, pointer, real, pointer, index, index, whole]
    lib.khot_threshold_backward.argtypes = [whole, whole, *8 * [pointer], real, index, index, whole]
    return lib


LIBRARY: Any = _load()


def name() -> str:
    """The instruction set in use, or an empty string without the library."""
    return LIBRARY.khot_isa().decode() if LIBRARY else ""


def forward(x: Tensor, k: Number, tau: Number, family: str, *, shift: bool = True) -> tuple[Tensor, Tensor | None]:
    """The mask, and the threshold of every row as a float64 column if asked for.

    Args:
        x: ``(..., n)``.
        k: a number or a ``(..., 1)`` column.
        tau: a number or a ``(..., 1)`` column.
        family: a key of :data:`FAMILIES`.
        shift: whether to return the thresholds.
    """
    x = x.detach().contiguous()
    y = torch.empty_like(x)
    n = x.shape[-1]
    t = x.new_empty((*x.shape[:-1], 1), dtype=torch.float64) if shift else None
    k_rows, k = _per_row(k, x)
    tau_rows, tau = _per_row(tau, x)
    LIBRARY.khot_threshold_forward(
        FAMILIES[family], DTYPES[x.dtype], x.data_ptr(), y.data_ptr(), _pointer(k_rows), k, _pointer(tau_rows), tau, _pointer(t),
        x.numel() // n if n else 0, n, torch.get_num_threads(),
    )  # fmt: skip
    return y, t


def backward(
    grad: Tensor, y: Tensor, tau: Number, family: str, x: Tensor | None = None, shift: Tensor | None = None, *, grad_k: bool = False
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The gradients in the scores and, as float64 columns, in ``k`` if asked for and in ``tau`` if given ``x`` and ``shift``.

    The slope is computed from ``y``: for the gaussian by way of the inverse of its distribution function.
    """
    y, grad = y.detach().contiguous(), grad.detach().to(y.dtype).contiguous()
    gx = torch.empty_like(y)
    n = y.shape[-1]
    rows = (*y.shape[:-1], 1)
    gk = y.new_empty(rows, dtype=torch.float64) if grad_k else None
    gtau = y.new_empty(rows, dtype=torch.float64) if x is not None else None
    x = x.detach().contiguous() if x is not None else None
    tau_rows, tau = _per_row(tau, y)
    LIBRARY.khot_threshold_backward(
        FAMILIES[family], DTYPES[y.dtype], y.data_ptr(), grad.data_ptr(), _pointer(x), _pointer(shift), gx.data_ptr(), _pointer(gk),
        _pointer(gtau), _pointer(tau_rows), tau, y.numel() // n if n else gx.new_empty(rows).numel(), n, torch.get_num_threads(),
    )  # fmt: skip
    return gx, gk, gtau


class Native(NamedTuple):
    """The two halves of an implementation of the threshold family."""

    forward: Callable[..., tuple[Tensor, Tensor | None]]
    backward: Callable[..., tuple[Tensor, Tensor | None, Tensor | None]]


def _per_row(value: Number, x: Tensor) -> tuple[Tensor | None, float]:
    """A column as contiguous float64, one for each row; or a plain number."""
    if not isinstance(value, Tensor):
        return None, value
    return value.detach().double().expand(*x.shape[:-1], 1).contiguous(), 0.0


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _takes(family: str, x: Tensor, k: Number, tau: Number) -> bool:
    """Whether the tensors lie in ordinary memory, with nobody watching the calls that are made on them."""
    return (
        family in FAMILIES
        and x.dtype in DTYPES
        and readable(x)
        and x.layout is torch.strided
        and (not isinstance(k, Tensor) or readable(k))
        and (not isinstance(tau, Tensor) or readable(tau))
        and not torch._C._len_torch_dispatch_stack()  # pyright: ignore[reportAttributeAccessIssue]
    )


def _traces(family: str, x: Tensor, k: Number, tau: Number) -> bool:
    """Whether a compiler or a tracing mode is watching, on CPU tensors."""
    if family not in FAMILIES or x.dtype not in DTYPES or x.device.type != "cpu" or forward_ad._current_level >= 0:
        return False
    return torch.compiler.is_compiling() or bool(torch._C._len_torch_dispatch_stack())  # pyright: ignore[reportAttributeAccessIssue]


# ---- as operators ----


def operator(x: Tensor, k: Number, tau: Number, family: str) -> Tensor:
    """The mask, differentiable, by way of the registered operator; ``k`` and ``tau`` as in :func:`forward`."""
    k_rows, k = (k, 0.0) if isinstance(k, Tensor) else (None, k)
    tau_rows, tau = (tau, 0.0) if isinstance(tau, Tensor) else (None, tau)
    return torch.ops.khot.threshold_forward(x, k_rows, k, tau_rows, tau, family)[0]


_SLOPES: dict[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": lambda y: y * (1 - y),
    "euclidean": lambda y: ((y > 0) & (y < 1)).to(y.dtype),
    "laplace": lambda y: torch.minimum(y, 1 - y),
    "gaussian": lambda y: torch.exp(-torch.special.ndtri(y).square() / 2) * (2 * torch.pi) ** -0.5,
}


def _define() -> None:
    """Register the operators, once."""
    lib = torch.library.Library("khot", "DEF")
    lib.define("threshold_forward(Tensor x, Tensor? k, float k_value, Tensor? tau, float tau_value, str family) -> (Tensor, Tensor)")
    lib.define(
        "threshold_backward(Tensor grad, Tensor y, Tensor x, Tensor shift, Tensor? tau, float tau_value, str family, bool learns_tau)"
        " -> (Tensor, Tensor, Tensor)"
    )
    lib.impl("threshold_forward", _forward_cpu, "CPU")
    lib.impl("threshold_backward", _backward_cpu, "CPU")
    forward_name, backward_name = "khot::threshold_forward", "khot::threshold_backward"
    torch.library.register_fake(forward_name, _forward_fake, lib=lib)
    torch.library.register_fake(backward_name, _backward_fake, lib=lib)
    torch.library.register_autograd(forward_name, _forward_derivative, setup_context=_forward_context, lib=lib)
    torch.library.register_autograd(backward_name, _backward_derivative, setup_context=_backward_context, lib=lib)
    torch.library.register_vmap(forward_name, _forward_vmap, lib=lib)
    torch.library.register_vmap(backward_name, _backward_vmap, lib=lib)
    _keep.append(lib)


_keep: list[Any] = []  # a Library takes its operators along when it goes


def _forward_cpu(x: Tensor, k: Tensor | None, k_value: float, tau: Tensor | None, tau_value: float, family: str) -> tuple[Tensor, Tensor]:
    y, shift = forward(x, k_value if k is None else k, tau_value if tau is None else tau, family)
    assert shift is not None
    return y, shift


def _forward_fake(x: Tensor, k: Tensor | None, k_value: float, tau: Tensor | None, tau_value: float, family: str) -> tuple[Tensor, Tensor]:
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    return y, x.new_empty((*x.shape[:-1], 1), dtype=torch.float64)


def _backward_cpu(
    grad: Tensor, y: Tensor, x: Tensor, shift: Tensor, tau: Tensor | None, tau_value: float, family: str, learns_tau: bool
) -> tuple[Tensor, Tensor, Tensor]:
    gx, gk, gtau = backward(
        grad, y, tau_value if tau is None else tau, family, x if learns_tau else None, shift.contiguous(), grad_k=True
    )
    assert gk is not None
    return gx, gk, torch.zeros_like(gk) if gtau is None else gtau


def _backward_fake(
    grad: Tensor, y: Tensor, x: Tensor, shift: Tensor, tau: Tensor | None, tau_value: float, family: str, learns_tau: bool
) -> tuple[Tensor, Tensor, Tensor]:
    column = y.new_empty((*y.shape[:-1], 1), dtype=torch.float64)
    return torch.empty_like(y, memory_format=torch.contiguous_format), column, torch.empty_like(column)


def _forward_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, k, _, tau, ctx.tau_value, ctx.family = inputs
    y, shift = output
    ctx.mark_non_differentiable(shift)
    ctx.learns_k, ctx.learns_tau = k is not None, tau is not None
    # The scores are kept for the gradient in tau alone.
    ctx.save_for_backward(y, shift, x if ctx.learns_tau else y, *(value for value in (k, tau) if value is not None))


def _forward_derivative(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    y, shift, x, *rest = ctx.saved_tensors
    k, tau = (rest.pop(0) if ctx.learns_k else None), (rest.pop(0) if ctx.learns_tau else None)
    gx, gk, gtau = torch.ops.khot.threshold_backward(grad, y, x, shift, tau, ctx.tau_value, ctx.family, ctx.learns_tau)
    return gx, _like(gk, k), None, _like(gtau, tau), None, None


def _like(grad: Tensor, value: Tensor | None) -> Tensor | None:
    return None if value is None else grad.sum_to_size(value.shape).to(value.dtype)


def _backward_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    grad, y, x, shift, tau, ctx.tau_value, ctx.family, ctx.learns_tau = inputs
    ctx.save_for_backward(grad, y, x, shift, *(() if tau is None else (tau,)))


def _backward_derivative(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    """Twice differentiable: the formula of the derivative, written in plain PyTorch and differentiated."""
    grad, y, x, shift, *tau = ctx.saved_tensors
    inputs = [value.detach().requires_grad_() for value in (grad, y, x, *tau)]
    with torch.enable_grad():
        outputs = _formula(*inputs[:3], shift, inputs[3] if tau else ctx.tau_value, ctx.family, ctx.learns_tau)
        used = [(out, g) for out, g in zip(outputs, grads, strict=True) if out.requires_grad and g is not None]
        found = torch.autograd.grad([out for out, _ in used], inputs, [g for _, g in used], allow_unused=True)
    return found[0], found[1], found[2], None, found[3] if tau else None, None, None, None


def _formula(
    grad: Tensor, y: Tensor, x: Tensor, shift: Tensor, tau: Number, family: str, learns_tau: bool
) -> tuple[Tensor, Tensor, Tensor]:
    v = _SLOPES[family](y.to(torch.promote_types(y.dtype, torch.float32)))
    total = v.sum(-1, keepdim=True)
    mean = (v * grad).sum(-1, keepdim=True) / torch.where(total == 0, 1.0, total)
    gx = v * (grad - mean) / tau
    away = torch.where(x.isfinite(), (x - shift) / tau, 0.0) if learns_tau else torch.zeros_like(v)
    return gx.to(y.dtype), mean.double(), -(gx * away).sum(-1, keepdim=True).double()


def _forward_vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> Any:
    return torch.ops.khot.threshold_forward(*_batched(info, in_dims, inputs, required=1)), (0, 0)


def _backward_vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> Any:
    return torch.ops.khot.threshold_backward(*_batched(info, in_dims, inputs, required=4)), (0, 0, 0)


def _batched(info: Any, in_dims: tuple[int | None, ...], inputs: tuple[Any, ...], required: int) -> list[Any]:
    """The batch as one more leading dimension of rows; the first ``required`` tensors all get it."""
    out = []
    for i, (value, dim) in enumerate(zip(inputs, in_dims, strict=True)):
        if isinstance(value, Tensor) and dim is not None:
            value = value.movedim(dim, 0)
        elif isinstance(value, Tensor) and i < required:
            value = value.expand(info.batch_size, *value.shape)
        out.append(value)
    return out


if LIBRARY:
    register("threshold", _takes, Native(forward, backward))
    register("threshold_operator", _traces, operator)
    _define()
