from __future__ import annotations

import math
from typing import Literal, TypeAlias, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from khot._tensors import readable, work_dtype
from khot.hard import topk_mask
from khot.log_soft import log_soft_topk
from khot.nn.annealing import Method, check_method, spread
from khot.registry import RELAXATIONS
from khot.soft import soft_topk

Metric: TypeAlias = Literal["euclidean", "cosine"]


@final
class SoftKNN(nn.Module):
    r"""Differentiable ``k`` nearest neighbours: a soft mask over the neighbours of each query that sums to ``k``.

    .. math:: m_{ij} = \text{soft top-}k_j\big(-\lVert q_i - x_j \rVert^2 / (s\,\tau)\big), \qquad \textstyle\sum_j m_{ij} = k

    ``s`` is the standard deviation of the distances in the call, so that ``tau`` means the same whatever the scale of the embedding,
    and the loss does not change with it; ``tau`` is learned. In evaluation the mask is the hard one.

    Args:
        k: how many neighbours.
        tau: temperature at the start, in units of the distances' spread.
        learn_tau: whether the logarithm of ``tau`` is a parameter.
        metric: ``"euclidean"`` (squared distance) or ``"cosine"`` (its rows are divided by their norms).
        method: a name in :data:`khot.RELAXATIONS` or a callable ``(scores, k, tau) -> mask``. The threshold methods give
            :meth:`loss` a gradient even where no right neighbour is near.

    Example:
        >>> knn = SoftKNN(k=2, tau=0.05).eval()
        >>> points = torch.tensor([[0.0], [1.0], [3.0], [9.0]])
        >>> knn(torch.tensor([[0.9]]), points)
        tensor([[1., 1., 0., 0.]])
        >>> knn(points)[0]  # without neighbors: the queries are each other's, and none is its own
        tensor([0., 1., 1., 0.])

    Grover et al., Stochastic Optimization of Sorting Networks via Continuous Relaxations, ICLR 2019, section 6.3.
    """

    def __init__(
        self,
        k: int,
        *,
        tau: float = 0.1,
        learn_tau: bool = True,
        metric: Metric = "euclidean",
        method: Method = "sigmoid",
    ) -> None:
        super().__init__()
        if isinstance(k, bool) or not isinstance(k, int) or k < 1:
            raise ValueError(f"k must be a whole number of at least 1, got {k!r}")
        if not tau > 0:
            raise ValueError(f"tau must be positive, got {tau}")
        if metric not in ("euclidean", "cosine"):
            raise ValueError(f"metric must be 'euclidean' or 'cosine', got {metric!r}")
        check_method(method)
        self.k, self.metric, self.method = k, metric, method
        self.log_tau = nn.Parameter(torch.tensor(math.log(tau)), requires_grad=learn_tau)

    @property
    def tau(self) -> Tensor:
        """The temperature, in units of the distances' spread."""
        return self.log_tau.exp()

    def forward(self, query: Tensor, neighbors: Tensor | None = None) -> Tensor:
        """Mask over the neighbours of every query.

        Args:
            query: ``(..., M, dim)``.
            neighbors: ``(..., N, dim)``; None takes the queries, and none is its own neighbour.

        Returns:
            ``(..., M, N)``, rows that sum to ``k``.
        """
        near = self._near(query, neighbors)
        if not self.training:
            return topk_mask(near, self.k).to(query.dtype)
        return soft_topk(near, self.k, self._width(near), method=self.method).to(query.dtype)

    def loss(self, query: Tensor, neighbors: Tensor | None, labels: Tensor, neighbor_labels: Tensor | None = None) -> Tensor:
        r"""How wrong the soft neighbours are.

        Whole numbers are classes: :math:`-\log \sum_j m_{ij} [y_i = y_j] / \min(k, c_i)`, where :math:`c_i` neighbours have the class of
        the query; a query whose class no neighbour has does not count. Floating numbers are values: the squared error of the
        neighbours' mean.

        Args:
            query: ``(..., M, dim)``.
            neighbors: ``(..., N, dim)``, or None for the queries.
            labels: of the queries, ``(..., M)``, or values ``(..., M, outputs)``.
            neighbor_labels: of the neighbours, ``(..., N)`` or ``(..., N, outputs)``; None without ``neighbors``.

        Returns:
            The mean over the queries.
        """
        if (neighbors is None) != (neighbor_labels is None):
            raise ValueError("neighbors and neighbor_labels belong together: give both, or neither for the queries themselves")
        near = self._near(query, neighbors)
        others = labels if neighbor_labels is None else neighbor_labels
        _check_labels(labels, others, near)
        if labels.is_floating_point():
            return self._value_loss(near, labels, others)
        return self._class_loss(near, labels.unsqueeze(-1) == others.unsqueeze(-2))

    def _value_loss(self, near: Tensor, values: Tensor, others: Tensor) -> Tensor:
        mask = soft_topk(near, self.k, self._width(near), method=self.method)
        single = values.ndim == near.ndim - 1
        others = (others.unsqueeze(-1) if single else others).to(mask.dtype)
        guess = mask @ others / self.k
        return F.mse_loss(guess.squeeze(-1) if single else guess, values.to(mask.dtype))

    def _class_loss(self, near: Tensor, right: Tensor) -> Tensor:
        right = right & (near > -torch.inf)
        count = right.sum(-1)
        most = count.clamp(1, self.k).to(near.dtype).log()
        counts = count > 0
        right = right | ~counts.unsqueeze(-1) & (near > -torch.inf)  # keeps the logarithm finite; these rows do not count
        loss = torch.where(counts, most - self._log_sum(near, right), 0.0)
        return loss.sum() / counts.sum().clamp(min=1)

    def _log_sum(self, near: Tensor, right: Tensor) -> Tensor:
        """The logarithm of the mask on the right neighbours, ``(..., M)``."""
        width = self._width(near)
        share = torch.where(right, soft_topk(near, self.k, width, method=self.method), 0.0).sum(-1)
        tiny = torch.finfo(share.dtype).tiny
        if readable(share) and bool((share > tiny**0.5).all()):
            return share.log()
        if isinstance(self.method, str) and RELAXATIONS[self.method].family is not None:
            mask = log_soft_topk(near, self.k, width, method=self.method)  # exact where the share underflows, and slower
            return torch.where(right, mask, -torch.inf).logsumexp(-1)
        return share.clamp(min=tiny).log()

    def _width(self, near: Tensor) -> Tensor:
        """The temperature in units of the distances: with their spread, so that the gradient leaves the scale of the embedding alone."""
        unit = spread(near)
        there = near > -torch.inf
        count = there.sum().clamp(min=1)
        scaled = torch.where(there, near / unit, 0.0)
        away = torch.where(there, scaled - scaled.sum() / count, 0.0)
        square = away.square().sum() / count  # 1, but for its gradient; 0 where all distances are equal
        return unit * torch.where(square > 0, square, 1.0).sqrt() * self.tau.to(near.dtype)

    def _near(self, query: Tensor, neighbors: Tensor | None) -> Tensor:
        """``(..., M, N)``: minus the squared distance, or the cosine; -inf for a query and itself."""
        own = neighbors is None
        neighbors = query if neighbors is None else neighbors
        _check_points(query, neighbors, self.k + own)
        with torch.autocast(query.device.type, enabled=False):
            near = _cosine(query, neighbors) if self.metric == "cosine" else _minus_distance(query, neighbors)
        return near.masked_fill(torch.eye(query.shape[-2], dtype=torch.bool, device=query.device), -torch.inf) if own else near

    def extra_repr(self) -> str:
        return f"k={self.k}, tau={self.log_tau.detach().exp().item():g}, metric={self.metric!r}, method={self.method!r}"


def _minus_distance(query: Tensor, neighbors: Tensor) -> Tensor:
    dtype = work_dtype(query)
    query, neighbors = query.to(dtype), neighbors.to(dtype)
    middle = neighbors.detach().mean(-2, keepdim=True)  # far from the origin the squares would cancel
    query, neighbors = query - middle, neighbors - middle
    own, other = query.square().sum(-1, keepdim=True), neighbors.square().sum(-1).unsqueeze(-2)
    return 2 * query @ neighbors.mT - own - other


def _cosine(query: Tensor, neighbors: Tensor) -> Tensor:
    dtype = work_dtype(query)
    tiny = torch.finfo(dtype).tiny
    return F.normalize(query.to(dtype), dim=-1, eps=tiny) @ F.normalize(neighbors.to(dtype), dim=-1, eps=tiny).mT


def _check_points(query: Tensor, neighbors: Tensor, least: int) -> None:
    for name, points in (("query", query), ("neighbors", neighbors)):
        if not isinstance(points, Tensor) or not points.is_floating_point() or points.ndim < 2:
            came = f"{points.dtype} of shape {tuple(points.shape)}" if isinstance(points, Tensor) else type(points).__name__
            raise TypeError(f"{name} must be a floating tensor of shape (..., points, dim), got {came}")
        if readable(points) and not bool(points.isfinite().all()):
            raise ValueError(f"{name} must be finite, got nan or inf; the network that made them may have diverged")
    if query.shape[-1] != neighbors.shape[-1]:
        raise ValueError(f"query and neighbors must have the same last dimension, got {query.shape[-1]} and {neighbors.shape[-1]}")
    if neighbors.shape[-2] < least:
        own = "; a query is not its own neighbour" if query is neighbors else ""
        raise ValueError(f"k neighbours need at least {least} points, got {neighbors.shape[-2]}{own}")


def _check_labels(labels: Tensor, others: Tensor, near: Tensor) -> None:
    """Raise unless there is a label for every query and every neighbour, of one kind."""
    if labels.is_floating_point() != others.is_floating_point():
        raise TypeError(f"labels must be whole numbers (classes) or floating (values) on both sides, got {labels.dtype} and {others.dtype}")
    for name, given, size in (("labels", labels, near.shape[-2]), ("neighbor_labels", others, near.shape[-1])):
        want = (*near.shape[:-2], size)
        fits = given.shape == want or labels.is_floating_point() and given.shape[:-1] == want
        if not fits:
            raise ValueError(f"{name} must be of shape {want}, one for each point, got {tuple(given.shape)}")
    if labels.ndim != others.ndim or labels.ndim == near.ndim and labels.shape[-1] != others.shape[-1]:
        raise ValueError(f"labels and neighbor_labels must have the same outputs, got {tuple(labels.shape)} and {tuple(others.shape)}")
