from __future__ import annotations

import math
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from khot._tensors import in_reach
from khot.hard import topk_mask
from khot.nn._sae_options import check
from khot.nn._sparse_code import combine, dense, entries, places
from khot.nn.annealing import Annealed, Method, Range, check_width, geometric, relaxed_mask
from khot.nn.learned_k import LearnedK
from khot.primitives.select import hard_mask, largest

Select: TypeAlias = Literal["topk", "batch_topk"]
STAIRS = 6  # k falls in so many steps: a compiled layer is compiled again for each
AUX = 1 / 32  # weight of the auxiliary loss (Gao et al. 2024)


class Coded(NamedTuple):
    """Reconstruction and latents."""

    recon: Tensor
    latents: Tensor


@final
class SparseAutoencoder(Annealed):
    r"""Sparse autoencoder whose latents are the ``k`` largest of its code.

    .. math:: z = \text{top-}k\big((x - b_\text{dec})\, W_\text{enc} + b_\text{enc}\big)_+, \qquad \hat x = z\, W_\text{dec} + b_\text{dec}

    The rows of the decoder are divided by their norms, so that its gradient is perpendicular to them. Parameters are named and shaped as
    in SAELens: ``W_enc (d_in, d_sae)``, ``W_dec (d_sae, d_in)``, ``b_enc``, ``b_dec``.

    Args:
        d_in: width of the input.
        d_sae: number of latents.
        k: latents of a token, or a :class:`khot.nn.LearnedK` of width ``d_in`` for a learned number for each token.
        select: ``"topk"`` for each token, or ``"batch_topk"``: ``k`` on average over a batch, and in evaluation every latent above one
            threshold, the mean of the smallest value that was selected in training (Bussmann et al. 2024). Each pass has its own; as long
            as ``k`` falls there is none, and evaluation takes the largest of its batch.
        method: None trains the selected latents only; a name in :data:`khot.RELAXATIONS` gives the selection its soft gradient.
        design: with a method, a name in :data:`khot.DESIGNS`: draw the latents at random in training.
        signed: select by magnitude and keep the sign.
        passes: 2 encodes what the first code leaves unexplained once more and selects again (one step of a pursuit), and so on.
        start: ``k`` falls from ``start * k`` to ``k`` until ``until``; 4 helps at small ``k``.
        aux: add the auxiliary loss on dead latents to :meth:`loss`.
        dead_after: a latent that was silent for so many tokens counts as dead; take 2 to 5 % of the training.
        tau: temperature of the method, or where it starts and ends, in units of the pre-activations' spread.
        until: the share of the training in which ``k`` and the temperature fall.

    Example:
        >>> sae = SparseAutoencoder(d_in=16, d_sae=64, k=4)
        >>> x = torch.randn(10, 16)
        >>> sae.center(x)
        >>> recon, latents = sae(x)
        >>> recon.shape, latents.count_nonzero(-1).max()
        (torch.Size([10, 16]), tensor(4))
        >>> sae.loss(x).backward()
    """

    threshold: Tensor
    silent: Tensor

    def __init__(
        self,
        d_in: int,
        d_sae: int,
        k: int | LearnedK,
        *,
        select: Select = "topk",
        method: Method | None = None,
        design: str | None = None,
        signed: bool = False,
        passes: int = 1,
        start: float = 1.0,
        aux: bool = False,
        dead_after: int = 100_000,
        tau: Range = (0.5, 0.05),
        until: float = 0.4,
    ) -> None:
        super().__init__(tau, until)
        if isinstance(k, LearnedK) and method is None:
            method = "sigmoid"  # which gives k its gradient
        k = check(d_in, d_sae, k, select, method, design, passes, start)
        self.d_in, self.d_sae, self.k, self.select = d_in, d_sae, k, select
        self.method, self.design, self.signed, self.passes, self.start = method, design, signed, passes, start
        self.aux, self.dead_after, self.stats = aux, dead_after, {}
        self.count = self._count()
        rows = F.normalize(torch.randn(d_sae, d_in), dim=-1)
        self.W_enc = nn.Parameter(rows.T.clone())
        self.b_enc = nn.Parameter(torch.zeros(d_sae))
        self.W_dec = nn.Parameter(rows)
        self.b_dec = nn.Parameter(torch.zeros(d_in))
        if passes > 1:
            self.rate = nn.Parameter(torch.full((passes - 1, d_sae), 0.5))
            self.b_refine = nn.Parameter(torch.zeros(passes - 1, d_sae))
        self.register_buffer("threshold", torch.full((passes,) if passes > 1 else (), math.nan) if select == "batch_topk" else None)
        self.register_buffer("silent", torch.zeros(d_sae, dtype=torch.long), persistent=False)

    def anneal(self, progress: float) -> None:
        super().anneal(progress)
        self.count = self._count()

    def forward(self, x: Tensor) -> Coded:
        """``(..., d_in)`` -> reconstruction ``(..., d_in)``, latents ``(..., d_sae)``."""
        recon, latents, _ = self._coded(x)
        return Coded(recon, latents)

    def encode(self, x: Tensor) -> Tensor:
        return self._code(x)[0]

    def decode(self, latents: Tensor) -> Tensor:
        return latents @ self.decoder + self.b_dec

    @property
    def decoder(self) -> Tensor:
        """``W_dec`` with rows of length 1."""
        return F.normalize(self.W_dec, dim=-1, eps=torch.finfo(self.W_dec.dtype).tiny)

    @torch.no_grad()
    def center(self, x: Tensor, *, num_iters: int = 50) -> None:
        """Set ``b_dec`` to the geometric median of a first batch, by Weiszfeld's iteration: without the mean, fewer latents die."""
        check_width(x, self.d_in)
        if not x.numel():
            raise ValueError("a batch without tokens has no centre")
        points = x.reshape(-1, self.d_in).to(self.b_dec.dtype)
        median = points.mean(0)
        for _ in range(num_iters):
            distance = (points - median).norm(dim=-1, keepdim=True)
            weight = 1 / distance.clamp(min=torch.finfo(points.dtype).eps * points.abs().amax().clamp(min=1))
            median = (weight * points).sum(0) / weight.sum()
        self.b_dec.copy_(median)

    def loss(self, x: Tensor) -> Tensor:
        """The fraction of variance unexplained, with the auxiliary loss and the penalty of a learned ``k`` where there are any.

        Of a batch without variance it is the squared error itself. Sets ``stats``: ``fvu``, ``l0`` (latents a token), ``dead`` (the share
        of latents that were silent for ``dead_after`` tokens).
        """
        recon, latents, pre = self._coded(x)
        total = (x - x.reshape(-1, self.d_in).mean(0)).square().sum().detach()
        fvu = (x - recon).square().sum() / torch.where(total > 0, total, 1.0)
        self._watch(latents)
        dead = self.silent > self.dead_after
        self.stats = {"fvu": fvu.detach(), "l0": (latents.detach() != 0).sum(-1).float().mean(), "dead": dead.float().mean()}
        loss = fvu
        if self.aux and self.training:
            loss = loss + AUX * self._aux_loss(x, x - recon.detach(), pre, dead)
        return loss + self.k.penalty(self.k(x - self.b_dec)) if isinstance(self.k, LearnedK) else loss

    def save(self, folder: str | Path, *, format: Literal["sae_lens", "khot"] = "sae_lens") -> None:
        """Write ``cfg.json`` and ``sae_weights.safetensors``; ``"sae_lens"`` opens in ``sae_lens.SAE.load_from_disk``."""
        from khot.nn import sae_files

        sae_files.save(self, Path(folder), format)

    @staticmethod
    def load(folder: str | Path) -> SparseAutoencoder:
        """Read what :meth:`save` or SAELens wrote (its ``topk`` and ``jumprelu`` architectures)."""
        from khot.nn import sae_files

        return sae_files.load(Path(folder))

    def _count(self) -> int:
        """``k`` now, on stairs from ``start * k`` down."""
        if isinstance(self.k, LearnedK):
            return 0
        part = math.floor(min(1.0, self.progress / self.until) * STAIRS) / STAIRS
        return min(self.d_sae, round(self.k * geometric((self.start, 1.0), part)))

    def _coded(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Reconstruction, latents, and what they were selected from."""
        check_width(x, self.d_in)
        if self._skips(x):
            return self._coded_sparsely(x)
        latents, pre = self._code(x)
        return self.decode(latents), latents, pre

    def _skips(self, x: Tensor) -> bool:
        """Whether a step may leave out the products with what is not selected, because nothing else has a gradient."""
        few = isinstance(self.k, int) and 8 * self.count <= self.d_sae and self.method is None and (not self.aux or self.passes == 1)
        plain = x.dtype == self.W_enc.dtype and x.dtype in (torch.float32, torch.float64) and not torch.is_autocast_enabled(x.device.type)
        return few and plain and x.numel() > 0 and self.training and torch.is_grad_enabled() and in_reach(x)

    def _coded_sparsely(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The same as the dense way: one product finds the selected latents, and only they are differentiated."""
        left = centred = (x - self.b_dec).reshape(-1, self.d_in)
        decoder, shape = self.decoder, (len(centred), self.d_sae)
        recon = latents = pre = torch.zeros(())
        for turn in range(self.passes):
            scale, shift = (None, self.b_enc) if turn == 0 else (self.rate[turn - 1], self.b_refine[turn - 1])
            with torch.no_grad():
                product = left @ self.W_enc
                pre = (product if scale is None else latents + scale * product) + shift
                at = places(self._positions(pre.abs() if self.signed else pre, turn), shape)
            values = entries(left, self.W_enc, product, at)
            if scale is not None:
                values = values * scale.index_select(0, at.columns) + latents.reshape(-1).index_select(0, at.flat)
            values = values + shift.index_select(0, at.columns)
            values = values if self.signed else values.relu()
            latents, recon = dense(values, at), combine(values, decoder, at)
            left = centred - recon
        return (recon + self.b_dec).view_as(x), latents.view(*x.shape[:-1], -1), pre

    def _positions(self, scores: Tensor, turn: int) -> Tensor:
        """Of the selected latents in the flat matrix."""
        if self.select == "batch_topk":
            return self._batch_mask(scores, turn).flatten().nonzero().squeeze(-1)
        starts = torch.arange(len(scores), device=scores.device).unsqueeze(-1) * self.d_sae
        return (largest(scores, self.count) + starts).flatten()

    def _code(self, x: Tensor) -> tuple[Tensor, Tensor]:
        check_width(x, self.d_in)
        centred = x - self.b_dec
        k = self.k(centred) if isinstance(self.k, LearnedK) else None
        pre = centred @ self.W_enc + self.b_enc
        latents = self._select(pre, k, 0)
        for turn in range(1, self.passes):
            left = (centred - latents @ self.decoder) @ self.W_enc
            pre = latents + self.rate[turn - 1] * left + self.b_refine[turn - 1]
            latents = self._select(pre, k, turn)
        return latents, pre

    def _select(self, pre: Tensor, k: Tensor | None, turn: int) -> Tensor:
        values = pre if self.signed else pre.relu()
        scores = pre.abs() if self.signed else pre
        if self.select == "batch_topk":
            return values * self._batch_mask(scores, turn)
        if k is not None or self.training and self.method is not None:
            return values * self._mask(scores, self.count if k is None else k)
        indices = largest(scores, self.count if self.training else self._fixed)
        return torch.zeros_like(values).scatter(-1, indices, values.gather(-1, indices))

    def _mask(self, scores: Tensor, k: int | Tensor) -> Tensor:
        # What is not positive is no candidate: zeros would tie and share the mask.
        positive = torch.where(scores > 0, scores, -torch.inf)
        if not self.training:
            return topk_mask(positive, k.round() if isinstance(k, Tensor) else k)
        assert self.method is not None
        return relaxed_mask(positive, k, self.tau, method=self.method, hard=True, design=self.design)

    def _batch_mask(self, scores: Tensor, turn: int) -> Tensor:
        """``k`` a row on average; in evaluation everything above the threshold of this pass, once there is one."""
        threshold = self.threshold[turn] if self.passes > 1 else self.threshold
        if not self.training and not bool(threshold.isnan()):
            return (scores > threshold).to(scores.dtype)
        flat = scores.flatten()
        rows = flat.numel() // self.d_sae
        count = min(flat.numel(), rows * (self.count if self.training else self._fixed))
        mask = self._mask(flat, count) if self.training and self.method is not None else hard_mask(flat, count)
        if self.training and self.count == self._fixed:
            _track(threshold, flat.detach(), mask.detach())
        return mask.view_as(scores)

    @property
    def _fixed(self) -> int:
        assert isinstance(self.k, int)
        return self.k

    @torch.no_grad()
    def _watch(self, latents: Tensor) -> None:
        """Count the tokens since each latent was last active."""
        if not self.training:
            return
        rows = latents.reshape(-1, self.d_sae)
        active = (rows != 0).any(0)
        self.silent.copy_(torch.where(active, 0, self.silent + rows.shape[0]))

    def _aux_loss(self, x: Tensor, left: Tensor, pre: Tensor, dead: Tensor) -> Tensor:
        """How well the dead latents alone would explain what is left, relative to its size; 0 where none is dead."""
        decoder = self.decoder
        if self._skips(x):  # what was left out is needed for the dead ones
            which = dead.nonzero().squeeze(-1)
            if not len(which):
                return left.new_zeros(())
            pre = (x - self.b_dec) @ self.W_enc.index_select(1, which) + self.b_enc.index_select(0, which)
            decoder, dead = decoder.index_select(0, which), dead[which]
        best = torch.where(dead, pre.relu(), -1.0).topk(min(pre.shape[-1], self.d_in // 2 or 1))
        code = torch.zeros_like(pre).scatter(-1, best.indices, best.values.relu())
        relative = (left - code @ decoder).square().sum() / left.square().sum()
        return torch.where(dead.any(), relative, 0.0)

    def extra_repr(self) -> str:
        k = self.k if isinstance(self.k, int) else "learned"
        return f"d_in={self.d_in}, d_sae={self.d_sae}, k={k}, select={self.select!r}, method={self.method!r}, passes={self.passes}"


@torch.no_grad()
def _track(threshold: Tensor, scores: Tensor, mask: Tensor) -> None:
    """Move the threshold to the smallest selected value, averaged over the last twenty batches or so."""
    chosen = (mask > 0) & (scores > 0)
    least = torch.where(chosen, scores, torch.inf).amin() if scores.numel() else scores.new_tensor(torch.inf)
    seen = torch.where(threshold.isnan(), least, threshold.lerp(least.to(threshold.dtype), 0.05))
    threshold.copy_(torch.where(least.isfinite(), seen, threshold))
