"""Linear forms of the input, with a box beside them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from khot.bounds._rounding import WORK, room
from khot.bounds.box import Box
from khot.bounds.domain import Band, Map, Product


@final
@dataclass(frozen=True)
class Affine:
    """``centre + sum_j form[:, j] xi_j``, off by at most ``slack``, and inside ``box``.

    ``centre`` and ``slack`` are ``(B, ...)``, ``form`` is ``(B, m, ...)`` for m numbers of the input; ``reach`` is how far the value may
    be from the centre.

    Example:
        >>> x = Affine.around(torch.tensor([[1.0, 2.0]]), 0.5)
        >>> x.plus(x.linear(lambda t: -t, lambda t: t)).upper.max().item() < 1e-12  # x - x is 0, which intervals do not know
        True
    """

    centre: Tensor
    form: Tensor
    slack: Tensor
    reach: Tensor
    box: Box

    @staticmethod
    def around(x: Tensor, eps: float | Tensor) -> Affine:
        """All inputs within ``eps`` of ``x``, entry by entry: one unknown for each entry."""
        wide = x.detach().to(WORK)
        n = wide[0].numel()
        eye = torch.eye(n, dtype=WORK, device=x.device).view(1, n, *wide.shape[1:])
        return affine(wide, (eye * eps).expand(len(wide), n, *wide.shape[1:]), room(wide.abs() + eps), Box.around(x, eps))

    @property
    def shape(self) -> torch.Size:
        return self.centre.shape

    @property
    def lower(self) -> Tensor:
        return self.box.lower

    @property
    def upper(self) -> Tensor:
        return self.box.upper

    @property
    def middle(self) -> Tensor:
        return self.centre

    def ends(self, dtype: torch.dtype = WORK) -> tuple[Tensor, Tensor]:
        """``lower`` and ``upper``, rounded outward to ``dtype``."""
        return self.box.ends(dtype)

    def linear(self, f: Map, f_abs: Map | None = None, terms: int = 1) -> Affine:
        """A linear map; ``f_abs`` is the same with absolute coefficients, ``terms`` how many numbers an output adds up."""
        f_abs = f_abs or f
        size = f_abs(self.centre.abs() + self.reach)
        return affine(f(self.centre), f(self.form), f_abs(self.slack) + room(size, terms), self.box.linear(f, f_abs, terms))

    def view(self, f: Map) -> Affine:
        """Entries taken or moved, as indexing, transposing and reshaping do."""
        return Affine(f(self.centre), f(self.form), f(self.slack), f(self.reach), self.box.view(f))

    def scale(self, by: Tensor) -> Affine:
        """Times a constant, entry by entry, ``(B, ...)`` with as many dimensions."""
        size = by.abs() * (self.centre.abs() + self.reach)
        return affine(self.centre * by, self.form * by.unsqueeze(1), self.slack * by.abs() + room(size), self.box.scale(by))

    def shift(self, by: Tensor) -> Affine:
        centre = self.centre + by
        return affine(centre, self.form, self.slack + room(centre.abs() + by.abs()), self.box.shift(by))

    def plus(self, other: Affine) -> Affine:
        mine, its = _same_unknowns(self.form, other.form)
        slack = self.slack + other.slack + room(self.centre.abs() + self.reach + other.centre.abs() + other.reach)
        return affine(self.centre + other.centre, mine + its, slack, self.box.plus(other.box))

    def band(self, band: Band) -> Affine:
        """A function between two parallel lines: the lines are its linear form, half their distance is its slack."""
        slope = band.slope.unsqueeze(1)
        slack = band.slope.abs() * self.slack + band.slack
        size = band.slope.abs() * (self.centre.abs() + self.reach) + band.offset.abs()
        return affine(band.slope * self.centre + band.offset, slope * self.form, slack + room(size, 4), self.box.band(band))

    def bilinear(self, other: Affine, f: Product, terms: int = 1) -> Affine:
        """``f(x, y)``, linear in each; ``f`` itself must have coefficients 0 and 1 only, as a (matrix) product has."""
        # (a + dx)(b + dy) = ab + a dy + b dx + dx dy. The middle terms are linear forms, the last one is slack.
        a, b, dx, dy = self.centre, other.centre, self.reach, other.reach
        form = torch.add(*_same_unknowns(f(self.form, b.unsqueeze(1)), f(a.unsqueeze(1), other.form)))
        slack = f(a.abs(), other.slack) + f(self.slack, b.abs()) + f(dx, dy)
        size = f(a.abs() + dx, b.abs() + dy)
        return affine(f(a, b), form, slack + room(size, terms + 4), self.box.bilinear(other.box, f, terms))

    def square(self) -> Affine:
        # dx^2 lies between 0 and reach^2: its middle goes to the centre.
        half = self.reach.square() / 2
        size = (self.centre.abs() + self.reach).square()
        slack = 2 * self.centre.abs() * self.slack + half
        form = 2 * self.centre.unsqueeze(1) * self.form
        return affine(self.centre.square() + half, form, slack + room(size, 4), self.box.square())

    def meet(self, lower: Tensor | float, upper: Tensor | float) -> Affine:
        """What is left when the value is also known to lie between ``lower`` and ``upper``."""
        return Affine(self.centre, self.form, self.slack, self.reach, self.box.meet(lower, upper))

    def cap(self, limit: float) -> Affine:
        """Bounds of the value cut off at ``limit`` on both sides; an entry that reaches it is no linear form any more."""
        box = self.box.cap(limit)
        cut = ~((self.lower > -limit) & (self.upper < limit))  # nan is cut too
        if not bool(cut.any()):
            return self
        centre, slack = torch.where(cut, box.middle, self.centre), torch.where(cut, box.radius, self.slack)
        return affine(centre, self.form.masked_fill(cut.unsqueeze(1), 0.0), slack, box)

    def name_slack(self) -> Affine:
        """The slack of every entry as an unknown of its own, so that later steps can cancel it too.

        The new unknowns come after those that are there. Two bounds that were made from one bound and then both named their slack
        must not meet again: their new unknowns would be taken for the same ones. A chain of layers names the slack of its residual
        sum only, which everything that comes later is made of.
        """
        new = torch.diag_embed(self.slack.flatten(1)).unflatten(-1, self.shape[1:])
        return Affine(self.centre, torch.cat([self.form, new], 1), torch.zeros_like(self.slack), self.reach, self.box)

    def loosen(self, by: Tensor) -> Affine:
        """The value give or take ``by``."""
        more = by + room(by + self.reach)
        return Affine(self.centre, self.form, self.slack + more, self.reach + more, self.box.loosen(by))

    def constant(self, value: Tensor) -> Affine:
        """A tensor without uncertainty, ``(B, ...)``: its linear form is 0."""
        box = self.box.constant(value)
        form, zero = box.lower.new_zeros(self.shape[0], self.form.shape[1], *box.shape[1:]), torch.zeros_like(box.lower)
        return Affine(box.lower, form, zero, zero, box)

    def beside(self, others: Sequence[Affine], dim: int) -> Affine:
        """This bound and the others along ``dim``, counted from the last."""
        parts = [self, *others]
        centre, slack, reach = (torch.cat([getattr(part, name) for part in parts], dim) for name in ("centre", "slack", "reach"))
        form = torch.cat(_same_unknowns(*(part.form for part in parts)), dim)
        return Affine(centre, form, slack, reach, self.box.beside([other.box for other in others], dim))

    def or_else(self, others: Sequence[Affine]) -> Affine:
        """This bound or one of the others, the same one for all entries.

        With c the mean of the centres and z the choice, 1 for one of the bounds and 0 elsewhere, the centre is
        c + sum_i z_i (c_i - c) = c + sum_i e_i (c_i - c) / 2 for e = 2 z - 1, since the differences add up to 0. The e_i are new unknowns
        that all entries share, so that what the choice does to one entry stays tied to what it does to the next. The forms are replaced
        by their mean: what the chosen one differs by is slack.
        """
        parts = [self, *others]
        forms = _same_unknowns(*(part.form for part in parts))
        centre, form = torch.stack([part.centre for part in parts]).mean(0), torch.stack(forms).mean(0)
        choice = torch.stack([(part.centre - centre) / 2 for part in parts], 1)
        if len(parts) == 2:  # e_1 = -e_2
            choice = choice[:, :1] * 2
        away = [(its - form).abs().sum(1) + part.slack for its, part in zip(forms, parts, strict=True)]
        size = torch.stack([part.centre.abs() + part.reach for part in parts]).amax(0)
        slack = torch.stack(away).amax(0) + room(size, len(parts) + form.shape[1])
        return affine(centre, torch.cat([form, choice], 1), slack, self.box.or_else([other.box for other in others]))


def _same_unknowns(*forms: Tensor) -> list[Tensor]:
    """Forms of as many unknowns: the later ones do not touch what was made before them."""
    most = max(form.shape[1] for form in forms)
    return [
        form if form.shape[1] == most else torch.cat([form, form.new_zeros(form.shape[0], most - form.shape[1], *form.shape[2:])], 1)
        for form in forms
    ]


def affine(centre: Tensor, form: Tensor, slack: Tensor, box: Box) -> Affine:
    """An :class:`Affine` whose box is met with its own ends; entries whose form overflowed fall back to their box."""
    reach = form.abs().sum(1) + slack
    reach = reach + room(reach, form.shape[1])
    lost = ~(reach + centre.abs()).isfinite()
    if bool(lost.any()):
        centre, slack = torch.where(lost, box.middle, centre), torch.where(lost, box.radius, slack)
        form = form.masked_fill(lost.unsqueeze(1), 0.0)
        reach = torch.where(lost, slack, reach)
    far = reach + room(centre.abs())
    return Affine(centre, form, slack, reach, Box(torch.maximum(box.lower, centre - far), torch.minimum(box.upper, centre + far)))
