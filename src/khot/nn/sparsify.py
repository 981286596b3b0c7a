"""Sparse networks: one budget over all weights of a model, learned while it trains."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, final

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn.utils import parametrize

from khot._tensors import Number, readable
from khot.hard import topk_mask
from khot.nn._masked import Room, multiply
from khot.nn.annealing import Annealed, Method, Range, check_method, check_share, cubic, relaxed_mask, share_of

Scores: TypeAlias = Literal["magnitude", "learned"]
Scope: TypeAlias = Literal["global", "layer"]
KINDS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


class Kept(NamedTuple):
    """Weights that are left in a layer, and how many it has."""

    kept: int
    total: int


@final
class WeightMask(Annealed):
    """The parametrization of one weight: it is multiplied by its part of the shared mask."""

    mask: Tensor
    budget: Tensor

    def __init__(self, group: Sparsifier, weight: Tensor, scores: Scores) -> None:
        super().__init__(group.tau, group.until)
        self.group = group
        self.scores = nn.Parameter(torch.ones_like(weight)) if scores == "learned" else None
        self.register_buffer("mask", torch.ones_like(weight, dtype=torch.bool))  # what is left once the choice is frozen
        # The number of weights that may pass, for a compiled model: a number that changes would have it compiled again.
        self.register_buffer("budget", torch.tensor(weight.numel()), persistent=False)
        self.numbers: tuple[Tensor, int, Tensor] | None = None  # a mask, its version, and what it is in the weight's dtype

    def forward(self, weight: Tensor) -> Tensor:
        return weight * self._frozen(weight) if self.settled else self.group.product(self, weight)

    def _frozen(self, weight: Tensor) -> Tensor:
        """The mask as numbers, with which a product takes a tenth of the time; made again when the mask has changed."""
        if not readable(self.mask) or self.mask.is_inference():
            return self.mask
        known = self.numbers
        if known is None or known[0] is not self.mask or known[1] != self.mask._version or known[2].dtype != weight.dtype:
            known = self.numbers = self.mask, self.mask._version, self.mask.to(weight.dtype)
        return known[2]

    def score(self, weight: Tensor) -> Tensor:
        return weight.abs() if self.scores is None else self.scores

    def anneal(self, progress: float) -> None:
        super().anneal(progress)
        self.group.follow(self)


@final
class Sparsifier:
    """Handle of a model whose weights share one budget; made by :func:`sparsify`."""

    def __init__(self, density: float, method: Method, scope: Scope, hard: bool, tau: Range, until: float, every: int = 1) -> None:
        self.target, self.method, self.scope, self.hard, self.tau, self.until = density, method, scope, hard, tau, until
        self.every, self.turn = every, 0
        self.density = 1.0
        self.modules: list[nn.Module] = []
        self.names: list[str] = []
        self.masks: list[WeightMask] = []
        self.current: list[Tensor] = []  # the weights times their masks, in the forward pass that is running
        self.last: list[Tensor] = []  # the masks of the last one that solved for them
        self.room = Room()
        self.frozen = False

    def anneal(self, progress: float) -> None:
        """Set how much of the training is done; :func:`khot.nn.anneal` on the model does the same."""
        for mask in self.masks:
            mask.anneal(progress)

    def parameters(self) -> Iterator[nn.Parameter]:
        """The learned scores, for a learning rate of their own; nothing where the magnitudes are the scores."""
        return (mask.scores for mask in self.masks if mask.scores is not None)

    def report(self) -> dict[str, Kept]:
        """How many weights each layer would keep in evaluation, smallest share first."""
        kept = {name: Kept(int(mask.sum()), mask.numel()) for name, mask in zip(self.names, self._hard(), strict=True)}
        return dict(sorted(kept.items(), key=lambda item: item[1].kept / max(1, item[1].total)))

    def harden(self) -> None:
        """Make the layers plain again, with exact zeros and the ``state_dict`` names that they had before."""
        if not self.handles:
            return  # they are plain already
        for module, mask in zip(self.modules, self._hard(), strict=True):
            _original(module).data.mul_(mask)
            # Without its parametrization the weight is the product that was computed last: multiplied by the frozen mask.
            found = _mask(module)
            found.mask.copy_(mask.bool())
            found.settled = True
            parametrize.remove_parametrizations(module, "weight")
            bias = module.get_parameter("bias") if module.bias is not None else None
            del module.bias  # so that it comes after the weight again, as optimizers count parameters
            module.register_parameter("bias", bias)
        self._warn(self._counts_of_plain())
        for handle in self.handles:
            handle.remove()
        self.handles = ()

    # What the layers call.

    handles: tuple[Any, ...] = ()

    def follow(self, mask: WeightMask) -> None:
        """Density from 1 down to the target; at ``until`` the choice is frozen. Every mask calls it, the first one speaks for all."""
        self.density = cubic((1.0, self.target), mask.progress / mask.until)
        mask.budget.fill_(share_of(mask.mask.numel() if self.scope == "layer" else self.total, self.density))
        if mask is self.masks[0]:
            if mask.settled and not self.frozen:
                self._freeze()
            elif self.frozen and not mask.settled:
                for other in self.masks:
                    other.mask.fill_(True)  # the choice is open again
            self.frozen = mask.settled

    @property
    def total(self) -> int:
        """The number of all weights."""
        return sum(mask.mask.numel() for mask in self.masks)

    def product(self, mask: WeightMask, weight: Tensor) -> Tensor:
        """The weight times its part of the mask, within the model's forward pass or, of a layer that is called by itself, outside of it."""
        index = next(i for i, other in enumerate(self.masks) if other is mask)
        return self.current[index] if self.current else weight * self._masks()[index]

    def begin(self, *_: Any) -> None:
        """Before the model's forward: one mask over all weights, for all layers."""
        if self.frozen:
            return
        weights = [_original(module) for module in self.modules]
        old = self.every > 1 and self.masks[0].training and self.turn % self.every and not is_compiling()
        self.turn += self.masks[0].training
        if old:
            self.current = [weight * mask for weight, mask in zip(weights, self.last, strict=True)]
        else:
            self.current = self._products(weights)

    def end(self, *_: Any) -> None:
        self.current = []

    def _products(self, weights: list[Tensor]) -> list[Tensor]:
        """All weights times a mask that is solved for now, at once where that is possible; with ``every`` the mask is kept."""
        first, parts = self.masks[0], [[weight] for weight in weights] if self.scope == "layer" else [weights]
        found = None
        if first.training and first.scores is None and not self.hard:
            ks = [share_of(sum(weight.numel() for weight in part), self.density) for part in parts]
            found = multiply(self.room, self.method, parts, ks, first.tau, keep=self.every > 1)
        if found is None:
            masks = self._masks()
            found = [weight * mask for weight, mask in zip(weights, masks, strict=True)], masks
        self.last = [mask.detach() for mask in found[1]] if self.every > 1 else []
        return found[0]

    def _masks(self) -> list[Tensor]:
        if not self.masks[0].training:
            return self._hard()
        tau = self.masks[0].tau
        return self._each(lambda scores, k: relaxed_mask(scores, k, tau, method=self.method, hard=self.hard), None)

    @torch.no_grad()
    def _hard(self) -> list[Tensor]:
        if self.frozen:
            return [mask.mask.to(_original(module).dtype) for mask, module in zip(self.masks, self.modules, strict=True)]
        return self._each(lambda scores, k: topk_mask(scores, k), self.target)

    def _each(self, select: Callable[[Tensor, Number], Tensor], density: float | None) -> list[Tensor]:
        """One call over all scores, or one for each layer; at the present density where none is given."""
        scores = [mask.score(_original(module)) for mask, module in zip(self.masks, self.modules, strict=True)]
        if self.scope == "layer":
            pairs = zip(scores, self.masks, strict=True)
            return [select(part.flatten(), self._count(mask, part.numel(), density)).view_as(part) for part, mask in pairs]
        flat = torch.cat([part.flatten() for part in scores])
        parts = select(flat, self._count(self.masks[0], flat.numel(), density)).split([part.numel() for part in scores])
        return [part.view_as(like) for part, like in zip(parts, scores, strict=True)]

    def _count(self, mask: WeightMask, total: int, density: float | None) -> Number:
        if density is None and is_compiling():
            return mask.budget
        return share_of(total, self.density if density is None else density)

    def _freeze(self) -> None:
        """Fix the choice, unless masks that were frozen before have been loaded."""
        if not all(bool(mask.mask.all()) for mask in self.masks):
            return
        for mask, kept in zip(self.masks, self._hard(), strict=True):
            mask.mask.copy_(kept.bool())
        self.room.clear()
        self._warn([int(mask.mask.sum()) for mask in self.masks])

    def _counts_of_plain(self) -> list[int]:
        return [int(module.get_parameter("weight").count_nonzero()) for module in self.modules]

    def _warn(self, counts: list[int]) -> None:
        for name, kept in zip(self.names, counts, strict=True):
            if kept == 0:
                hint = "raise density, exclude the layer, or use scope='layer'"
                warnings.warn(f"layer {name!r} has no weight left: nothing passes through it; {hint}", stacklevel=4)


def sparsify(
    model: nn.Module,
    density: float,
    *,
    method: Method = "sigmoid",
    scores: Scores = "magnitude",
    scope: Scope = "global",
    hard: bool = False,
    exclude: Collection[str] = (),
    tau: Range = (0.5, 0.05),
    until: float = 2 / 3,
    every: int = 1,
) -> Sparsifier:
    """Give the Linear and Conv weights of a model one budget, and learn which of them to keep.

    The weights are multiplied by a mask over all of them. The density falls from 1 to ``density`` along a cubic while the mask gets
    sharper; at ``until`` the mask is frozen, and the rest of the training is that of a sparse network. The model is changed in place.

    Args:
        model: any module; called as a whole, it solves one mask in each forward pass.
        density: the share of the weights that is left, in (0, 1]. Biases and other parameters do not count and are left alone.
        method: a name in :data:`khot.RELAXATIONS` or a callable ``(scores, k, tau) -> mask``.
        scores: ``"magnitude"`` scores a weight by its absolute value, ``"learned"`` by a parameter of its own.
        scope: one budget over all weights, or the same density in each ``"layer"``.
        hard: train with the hard mask and the gradient of the soft one.
        exclude: names of modules to leave alone, as in ``model.named_modules()``.
        tau: temperature, or where it starts and ends, in units of the scores' spread.
        until: the share of the training in which the choice is made.
        every: solve for the mask in every so many forward passes of the training and keep it, without its gradient, between them.

    Returns:
        A handle with ``anneal(progress)``, ``report()``, ``parameters()`` and ``harden()``.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.ReLU(), torch.nn.Linear(30, 5))
        >>> sparse = sparsify(model, density=0.1, scope="layer")
        >>> sparse.anneal(0.5)  # in the training loop: step / steps
        >>> sparse.harden()
        >>> model[0].weight.count_nonzero(), model[2].weight.count_nonzero()  # 10 % of 600 and of 150
        (tensor(60), tensor(15))
    """
    check_method(method)
    check_share(density, "density")
    _check_choice(scores, ("magnitude", "learned"), "scores")
    _check_choice(scope, ("global", "layer"), "scope")
    if every < 1:
        raise ValueError(f"every must be at least 1, got {every}; 1 solves for the mask in each forward pass")
    group = Sparsifier(density, method, scope, hard, tau, until, every)
    for name, module in _targets(model, exclude):
        mask = WeightMask(group, module.get_parameter("weight"), scores)
        group.masks.append(mask)
        group.modules.append(module)
        group.names.append(name)
        mask.train(module.training)
        # unsafe: torch would call it once to see that it keeps the shape, before all masks are there.
        parametrize.register_parametrization(module, "weight", mask, unsafe=True)
    group.handles = (model.register_forward_pre_hook(group.begin), model.register_forward_hook(group.end, always_call=True))
    return group


def _targets(model: nn.Module, exclude: Collection[str]) -> Sequence[tuple[str, nn.Module]]:
    names = dict(model.named_modules())
    if unknown := [name for name in exclude if name not in names]:
        raise ValueError(f"exclude must name modules of the model, got {', '.join(map(repr, unknown))}; see model.named_modules()")
    found = [(name, module) for name, module in names.items() if isinstance(module, KINDS) and name not in exclude]
    if taken := [name for name, module in found if parametrize.is_parametrized(module, "weight")]:
        raise ValueError(f"the weights of {', '.join(taken)} are parametrized already; harden or exclude them first")
    if not found:
        raise ValueError("the model has no Linear or Conv layer to make sparse")
    return found


def _check_choice(value: str, choices: tuple[str, str], name: str) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be {choices[0]!r} or {choices[1]!r}, got {value!r}")


def _original(module: nn.Module) -> Tensor:
    return module.get_submodule("parametrizations.weight").original  # pyright: ignore[reportReturnType]  any tensor, under functional_call


def _mask(module: nn.Module) -> WeightMask:
    found = module.get_submodule("parametrizations.weight.0")
    assert isinstance(found, WeightMask)
    return found
