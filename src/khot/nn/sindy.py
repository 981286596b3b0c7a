from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, final

import torch
from torch import Tensor, nn

from khot.hard import topk_mask
from khot.nn._exchange import promising
from khot.nn._trajectories import Field, Pieces, check_trajectories, implicit_residual, pieces, rollout_residual, runge_kutta, slopes
from khot.nn.annealing import Annealed, Method, Range, check_method, cubic
from khot.nn.libraries import Library
from khot.soft import soft_topk

TRIED, ROUNDS = 3, 20  # exchanges of terms that are tried in a round, and the most rounds
SPACE = 3.0  # a rollout is held within so many times the largest value of the samples


@final
class SINDy(Annealed):
    r"""Equations of motion with ``k`` terms each, chosen from a library: :math:`\dot x = (m \odot C)\, \theta(x)`.

    The mask :math:`m` is a soft top-k of the coefficients' sizes, in units of what each term contributes. While ``progress`` is below
    ``until`` it is relaxed, begins with all terms and loses one after the other while its temperature falls; from there on, and in
    evaluation, it is hard: exactly ``k`` terms in each equation. A loss on integrated trajectories chooses the terms by its gradient, where
    samples are too far apart for derivatives; :meth:`fit` then exchanges terms as long as that loss falls.

    Args:
        library: candidate terms, e.g. :class:`khot.nn.PolynomialLibrary`.
        dim: how many variables.
        k: terms in each equation, a number or one for each.
        learn_k: learn the number of terms, from ``k`` on; add ``penalty()`` to the loss.
        tau: temperature, or where it starts and ends, in units of the strengths' spread.
        method: a name in :data:`khot.RELAXATIONS` or a callable ``(strengths, k, tau) -> mask``.
        until: the share of the training in which the choice is made.
        variables: their names; by default x, y, z or x0, x1, ...

    Example:
        >>> t = torch.linspace(0, 6, 200, dtype=torch.float64)
        >>> x = torch.stack([torch.cos(2 * t), -torch.sin(2 * t)], 1)
        >>> model = SINDy(khot.nn.PolynomialLibrary(2, degree=3), dim=2, k=1).fit(x, t, steps=0)
        >>> model.equations(digits=2)
        ["x' = 2 y", "y' = -2 x"]

    Brunton, Proctor & Kutz 2016; the gradient through the choice of terms is khot's.
    """

    unit: Tensor

    def __init__(
        self,
        library: Library,
        dim: int,
        k: int | Sequence[int],
        *,
        learn_k: bool = False,
        tau: Range = (1.0, 0.01),
        method: Method = "sigmoid",
        until: float = 0.7,
        variables: Sequence[str] | None = None,
    ) -> None:
        super().__init__(tau, until)
        check_method(method)
        self.variables = _check_variables(variables, dim)
        self.library, self.dim, self.method = library, dim, method
        self.num_terms = len(library.names(self.variables))
        ks = [k] * dim if isinstance(k, int) else list(k)
        if len(ks) != dim or not all(1 <= one <= self.num_terms for one in ks):
            raise ValueError(
                f"k must be between 1 and the library's {self.num_terms} terms, one number or one for each of {dim}, got {k!r}"
            )
        count = torch.tensor(ks, dtype=torch.float64)
        if learn_k:
            inside = (count - 0.5) / self.num_terms
            self.raw_k = nn.Parameter(torch.logit(inside.clamp(1e-3, 1 - 1e-3)))
        else:
            self.register_buffer("fixed_k", count)
        self.weight = nn.Parameter(torch.zeros((dim, self.num_terms), dtype=torch.float64))
        self.register_buffer("unit", torch.ones((dim, self.num_terms), dtype=torch.float64))

    @property
    def k(self) -> Tensor:
        """Terms in each equation, ``(dim,)``; learned: between 0.5 and the size of the library."""
        if "fixed_k" in self._buffers:
            return self.get_buffer("fixed_k")
        return 0.5 + (self.num_terms - 0.5) * torch.sigmoid(self.raw_k)

    def penalty(self) -> Tensor:
        """The sum of all ``k``: for a loss that learns them."""
        return self.k.sum()

    @property
    def coef(self) -> Tensor:
        """``(dim, p)``, of all terms. What is learned are the coefficients in units of what each term contributes to its equation."""
        return self.weight * self.unit

    @property
    def mask(self) -> Tensor:
        """``(dim, p)``: soft while the choice is made, hard afterwards and in evaluation."""
        strength = self.weight.abs()
        if not self.training or self.settled:
            return topk_mask(strength.detach(), self.k.detach().round().clamp(min=1))
        unit = strength.detach().std(1, correction=0)
        unit = torch.where(unit > 0, unit, 1.0)
        falling = self.k + (self.num_terms - self.k) * cubic((1.0, 0.0), self.progress / self.until)
        return soft_topk(strength / unit.unsqueeze(1), falling, self.tau.to(strength.dtype), method=self.method)

    def forward(self, x: Tensor) -> Tensor:
        """The derivative at ``(..., dim)``."""
        return self.library(x) @ (self.mask * self.coef).to(x.dtype).mT

    def fit(
        self,
        x: Tensor | Sequence[Tensor],
        t: Tensor | Sequence[Tensor],
        *,
        steps: int = 600,
        loss: Literal["rollout", "implicit"] = "rollout",
        horizon: int = 2,
        substeps: int = 4,
        rate: float = 0.03,
    ) -> SINDy:
        """Start from least squares on differences, as :class:`khot.sklearn.TopKRegressor` solves it, then train through the loss.

        Args:
            x: samples ``(n, dim)`` of a trajectory, or several of them.
            t: their times ``(n,)``, rising, at any distance; or several.
            steps: of training; 0 keeps the start.
            loss: ``"rollout"`` integrates from every sample over the next ``horizon`` ones; ``"implicit"`` compares the increment between
                neighbours with Simpson's rule on the model's slopes, which is faster and less accurate over long intervals.
            horizon: see ``loss``.
            substeps: Runge-Kutta steps between two samples.
            rate: learning rate of the strengths.
        """
        if loss not in ("rollout", "implicit"):
            raise ValueError(f"loss must be 'rollout' or 'implicit', got {loss!r}")
        samples = check_trajectories(x, t, self.dim)
        self._start(samples, hard=steps == 0)
        if steps:
            self._train(pieces(samples, max(1, horizon)), steps, loss, substeps, rate)
        self.anneal(1.0)
        return self.eval()

    @torch.no_grad()
    def _start(self, samples: list[tuple[Tensor, Tensor]], hard: bool) -> None:
        """Coefficients by least squares on differences: the best ``k`` terms, or to train from, all terms with a little ridge."""
        from khot.subset import best_subsets, make_problem

        values, slope = torch.cat([one for one, _ in samples]), torch.cat([slopes(*one) for one in samples])
        terms = self.library(values)
        size, speed = terms.square().mean(0).sqrt(), slope.square().mean(0).sqrt()
        self.unit.copy_(torch.where(speed > 0, speed, 1.0).unsqueeze(1) / torch.where(size > 0, size, 1.0))
        whole = self.k.round().clamp(min=1).int().tolist()
        sizes = sorted(set(whole))
        support = best_subsets(make_problem(terms[None], slope[None]), sizes).support  # (sizes, dim, p)
        chosen = torch.stack([support[sizes.index(one), equation] for equation, one in enumerate(whole)])
        self.weight.copy_(_least_squares(terms, slope, self.unit, chosen if hard else None))

    def _train(self, data: Pieces, steps: int, loss: str, substeps: int, rate: float) -> None:
        """All terms by a quasi-Newton method, Adam while the choice is made, then the chosen terms by the same method, and exchanges."""
        spread = torch.cat([data.start, data.later.flatten(0, 1)]).std(0).clamp(min=1e-12)
        bound = SPACE * data.later.abs().amax((0, 1)).clamp(min=1e-12)

        def away(field: Field) -> Tensor:
            found = rollout_residual(field, data, substeps, bound) if loss == "rollout" else implicit_residual(field, data)
            return found / spread / data.there.sum().sqrt()

        def total() -> Tensor:
            return away(self).square().sum()

        self.train()
        self.anneal(0.0)
        self._descend(total, 40)  # all terms
        choose = torch.optim.Adam(self.parameters(), lr=rate)
        for step in range(steps):
            self.anneal(self.until * step / steps)
            choose.zero_grad()
            total().backward()
            torch.nn.utils.clip_grad_norm_(self.parameters(), 1.0)
            choose.step()
        self.anneal(1.0)
        self._descend(total, 40)  # the chosen ones
        self._exchange(away, total)
        if not bool(self.weight.isfinite().all()):
            raise FloatingPointError("the training left the finite numbers; take a smaller rate, more substeps or a smaller library")

    def _exchange(self, away: Callable[[Field], Tensor], total: Callable[[], Tensor]) -> None:
        """Terms for other terms, as long as the loss falls: of those that its linearisation promises most of, the first that keeps it."""

        def residual(weight: Tensor) -> Tensor:
            return away(lambda x: self.library(x) @ (weight * self.unit).to(x.dtype).mT).flatten()

        for _ in range(ROUNDS):
            chosen, before, loss = self.mask.bool(), self.weight.detach().clone(), float(total().detach())
            if not loss < torch.inf:
                return
            for exchange in promising(residual, before * chosen, chosen, TRIED):
                self._put(exchange.weight)
                self._descend(total, 20)
                if float(total().detach()) < (1 - 1e-6) * loss:
                    break
                self._put(before)
            else:
                return

    @torch.no_grad()
    def _put(self, weight: Tensor) -> None:
        self.weight.copy_(weight)

    def _descend(self, total: Callable[[], Tensor], iterations: int) -> None:
        """A quasi-Newton method on the coefficients with the mask as it is."""
        optimizer = torch.optim.LBFGS([self.weight], max_iter=iterations, line_search_fn="strong_wolfe")

        def closure() -> Tensor:
            optimizer.zero_grad()
            value = total()
            value.backward()
            return value

        optimizer.step(closure)  # type: ignore[arg-type]

    @torch.no_grad()
    def simulate(self, start: Tensor, t: Tensor, *, substeps: int = 10) -> Tensor:
        """``(len(t), ..., dim)``: states at the times ``t`` from ``start`` ``(..., dim)`` at ``t[0]``, by Runge-Kutta steps."""
        if start.shape[-1:] != (self.dim,):
            raise ValueError(f"start must have shape (..., {self.dim}), got {tuple(start.shape)}")
        found = [start]
        for step in t.diff():
            found.append(runge_kutta(self, found[-1], step.to(start.dtype), substeps))
        return torch.stack(found)

    @torch.no_grad()
    def equations(self, *, digits: int = 3, latex: bool = False) -> list[str]:
        """One line for each variable, with the terms that are chosen."""
        names = (self.library.latex if latex else self.library.names)(self.variables)
        chosen = topk_mask(self.weight.abs(), self.k.round().clamp(min=1)).bool()
        left = "\\dot{{{}}}" if latex else "{}'"
        written = []
        for row, variable in enumerate(self.variables):
            kept = chosen[row].nonzero()[:, 0].tolist()
            terms = _sum(self.coef[row, kept].tolist(), [names[place] for place in kept], digits)
            written.append(f"{left.format(variable)} = {terms}")
        return written

    def extra_repr(self) -> str:
        return f"dim={self.dim}, terms={self.num_terms}, k={[round(one, 2) for one in self.k.tolist()]}"


def _least_squares(terms: Tensor, slope: Tensor, unit: Tensor, chosen: Tensor | None) -> Tensor:
    """Weights ``(dim, p)``: on the chosen terms, or on all of them with a ridge of a thousandth of the samples."""
    weight = torch.zeros(unit.shape, dtype=terms.dtype)
    ridge = 0.0 if chosen is not None else (1e-3 * len(terms)) ** 0.5
    for row in range(len(unit)):
        columns = torch.ones(terms.shape[1], dtype=torch.bool) if chosen is None else chosen[row]
        left = torch.cat([(terms * unit[row])[:, columns], ridge * torch.eye(int(columns.sum()), dtype=terms.dtype)])
        right = torch.cat([slope[:, row], torch.zeros(int(columns.sum()), dtype=slope.dtype)])
        weight[row, columns] = torch.linalg.lstsq(left, right.unsqueeze(1), driver="gelsd").solution[:, 0]
    return weight


def _check_variables(variables: Sequence[str] | None, dim: int) -> list[str]:
    if variables is None:
        return list("xyz"[:dim]) if dim <= 3 else [f"x{i}" for i in range(dim)]
    if len(variables) != dim:
        raise ValueError(f"variables must name all {dim} of them, got {list(variables)}")
    return list(variables)


def _sum(coefs: list[float], names: list[str], digits: int) -> str:
    """``-10 x + 28 y``."""
    written = ""
    for coef, name in zip(coefs, names, strict=True):
        size = f"{abs(coef):.{digits}g}"
        term = size if name == "1" else name if size == "1" else f"{size} {name}"
        written += (" - " if coef < 0 else " + ") + term if written else ("-" if coef < 0 else "") + term
    return written or "0"
