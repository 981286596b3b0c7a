"""What every room needs to know of a tensor: numbers beside rows, dtypes, and whether values may be read here.

Every private name of torch that khot uses is looked up in this file. Where a torch release does not have it, the fallback is the
answer that is always safe: the plain PyTorch path is taken, which may be slower and is never wrong.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NoReturn, TypeAlias

import torch
from torch import Tensor, strided
from torch.autograd import forward_ad
from torch.compiler import is_compiling

Number: TypeAlias = float | Tensor  # an int counts as a float to a type checker

HALF = (torch.float16, torch.bfloat16)
_KINDS = (Tensor, torch.nn.Parameter)
is_exporting: Callable[[], bool] = getattr(torch.compiler, "is_exporting", lambda: False)  # public since torch 2.7


def _private(path: str, fallback: Any) -> Any:
    """The function at ``torch.<path>``, or ``fallback`` where this torch has none."""
    found: Any = torch
    for name in path.split("."):
        found = getattr(found, name, None)
    return fallback if found is None else found


def _no_groups(name: str) -> NoReturn:
    raise RuntimeError(f"this torch cannot find the process group {name!r} by its name; call the verb outside of torch.compile")


def _gamma(shape: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Standard gamma variables by public names: these take no generator, so that one gives the seed of a state of its own."""
    law = torch.distributions.Gamma(shape, torch.ones_like(shape), validate_args=False)
    if generator is None:
        return law.sample()
    seed = torch.randint(1 << 62, (), dtype=torch.long, device=generator.device, generator=generator)
    with torch.random.fork_rng([shape.device] if shape.is_cuda else []):
        torch.manual_seed(int(seed))
        return law.sample()


any_autocast: Callable[[], bool] = _private("_C._is_any_autocast_enabled", lambda: True)
num_modes: Callable[[], int] = _private("_C._len_torch_dispatch_stack", lambda: 1)
in_transform: Callable[[], bool] = _private("_C._are_functorch_transforms_active", lambda: True)
_is_wrapped: Callable[[Tensor], bool] = _private("_C._functorch.is_functorch_wrapped_tensor", lambda tensor: True)
_is_batched: Callable[[Tensor], bool] = _private("_C._functorch.is_legacy_batchedtensor", lambda tensor: True)
_jit_state: Callable[[], Any] = _private("_C._get_tracing_state", lambda: torch.jit.is_tracing() or None)
group_named: Callable[[str], Any] = _private("distributed.distributed_c10d._resolve_process_group", _no_groups)
standard_gamma: Callable[..., Tensor] = _private("_standard_gamma", _gamma)


def source(generator: torch.Generator | None) -> dict[str, Any]:
    """The argument ``generator=`` where there is one. Given as ``None``, it leads to an overload that takes no symbolic sizes."""
    return {} if generator is None else {"generator": generator}


_holders: Callable[[int], int] = _private("_C._storage_Use_Count", lambda storage: 0)


def is_alone(tensor: Tensor) -> bool:
    """Whether no other tensor, saved for a gradient or otherwise, and no array lies in the memory of this one."""
    return _holders(tensor.untyped_storage()._cdata) == 2  # this tensor, and the storage that is looked at


def in_forward_mode() -> bool:
    """Whether a level of forward-mode differentiation is open."""
    return getattr(forward_ad, "_current_level", 0) >= 0


def nests(jvp: Callable[..., Any]) -> Callable[..., Any]:
    """A Function's ``jvp`` that may itself be differentiated in forward mode.

    torch switches forward mode off while it runs a ``jvp``, so that the outer of two nested derivatives would silently be 0. Here it is
    on again, for saved inputs without the tangents of this level, which the rule has as arguments.
    """

    def nested(ctx: Any, *tangents: Any) -> Any:
        with _forward_grad(True):
            return jvp(ctx, *tangents)

    return nested


def without_tangent(value: Any) -> Any:
    """A saved tensor without its tangent at the innermost level of forward mode."""
    return forward_ad.unpack_dual(value).primal if isinstance(value, Tensor) and in_forward_mode() else value


def _refuse_forward(mode: bool) -> NoReturn:
    raise RuntimeError("this torch cannot differentiate a custom rule in forward mode; use torch.func.jacrev or backward()")


_forward_grad: Callable[..., Any] = _private("autograd.forward_ad._set_fwd_grad_enabled", _refuse_forward)


_entry_of: Callable[..., Any] | None = _private("_library.simple_registry.singleton.find", None)
_autograd_of: Callable[..., Any] | None = _private("_library.autograd.make_autograd_impl", None)
_batch: Callable[..., Any] | None = _private("_functorch.autograd_function.custom_function_call_vmap_helper", None)
_level: Callable[[], Any] | None = _private("_functorch.pyfunctorch.retrieve_current_functorch_interpreter", None)


def register_fake(library: torch.library.Library, name: str, fake: Callable[..., Any]) -> None:
    """``torch.library.register_fake``, without its search for the caller's lines of source, which takes longer than all the rest."""
    try:
        _entry_of(name).fake_impl.register(fake, __name__, library)  # pyright: ignore[reportOptionalCall]
    except (AttributeError, TypeError):  # another torch, where this is called otherwise
        torch.library.register_fake(name, fake, lib=library)


def autograd_kernel(name: str, backward: Callable[..., Any], setup_context: Callable[..., Any]) -> Callable[..., Any] | None:
    """What ``torch.library.register_autograd`` would register, made on the first call; ``None`` where this torch cannot make it alone."""
    make, made = _autograd_of, list[Callable[..., Any]]()
    if make is None:
        return None

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        if not made:
            rule = SimpleNamespace(_backward_fn=backward, _setup_context_fn=setup_context)
            made.append(make(_operator(name), rule))
        return made[0](keyset, *args, **kwargs)

    return kernel


def batching_kernel(name: str, batched: Callable[..., Any]) -> Callable[..., Any] | None:
    """What ``torch.library.register_vmap`` would register, which looks the operator up first; ``None`` where this torch lacks its parts."""
    batch, level = _batch, _level
    if batch is None or level is None:
        return None

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        return batch(level(), batched, _operator(name), *args, **kwargs)

    return kernel


def _operator(name: str) -> Any:
    namespace, operator = name.split("::")
    return getattr(getattr(torch.ops, namespace), operator).default


def is_recorded() -> bool:
    """Whether a compiler, a tracer or a dispatch mode records the calls that are made."""
    return is_compiling() or bool(num_modes()) or _jit_state() is not None


def is_traced() -> bool:
    """Whether calls are recorded or transformed."""
    return in_transform() or is_recorded()


def in_reach(tensor: Tensor) -> bool:
    """Whether native code may read the values where they lie: an ordinary dense CPU tensor, and nothing records or transforms the calls
    that are made on it. The one place that decides this; written out, as it is asked for every call."""
    return (
        type(tensor) in _KINDS
        and tensor.is_cpu
        and tensor.layout is strided
        and not (tensor.is_nested or is_compiling() or num_modes() or in_transform() or _is_wrapped(tensor) or _is_batched(tensor))
        and _jit_state() is None
    )


def readable(tensor: Tensor) -> bool:
    """Whether the values can be looked at here without waiting for a device or breaking a trace."""
    return not is_compiling() and not num_modes() and tensor.is_cpu and is_bare(tensor) and _jit_state() is None


def is_bare(tensor: Tensor) -> bool:
    """Whether this is a tensor itself: not a subclass, and not wrapped by a transform."""
    return type(tensor) in _KINDS and not _is_wrapped(tensor) and not _is_batched(tensor)


def is_dtensor(value: Any) -> bool:
    """Whether this is a DTensor. Whoever made one has imported its module, which takes seconds."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


_forms: dict[str, Callable[..., Any]] = {}


def files(verb: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """File the decorated function as the form of a verb for DTensors; it takes all arguments of the verb, without defaults."""

    def file(form: Callable[..., Any]) -> Callable[..., Any]:
        _forms[verb] = form
        return form

    return file


def form_for(verb: str, tensor: Any) -> Callable[..., Any] | None:
    """The form of a verb that takes this tensor, or ``None`` for the verb itself."""
    return _forms.get(verb) if is_dtensor(tensor) else None


def column(value: Number, scores: Tensor) -> Number:
    """A per-row ``k`` or ``tau`` as a ``(..., 1)`` column beside ``(..., n)`` scores, in float32 or better; plain numbers stay."""
    if not isinstance(value, Tensor):
        return float(value)
    return value.to(dtype=work_dtype(scores), device=scores.device).expand(scores.shape[:-1]).unsqueeze(-1)


def deeper(value: Number) -> Number:
    """A column beside one dimension more; plain numbers stay as they are."""
    return value.unsqueeze(-1) if isinstance(value, Tensor) else value


def work_dtype(values: Tensor) -> torch.dtype:
    """The dtype in which a row is computed: its own, but float32 for half precision."""
    return torch.promote_types(values.dtype, torch.float32)


def wide_dtype(values: Tensor) -> torch.dtype:
    """The dtype in which rows are summed: float64 where the device has it."""
    return torch.float64 if values.device.type != "mps" else torch.float32
