"""khot: differentiable top-k for PyTorch."""

from importlib import import_module as _import_module
from types import ModuleType as _ModuleType
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from khot import designs as designs
from khot import kernels as kernels
from khot.hard import gather_topk as gather_topk
from khot.hard import straight_through as straight_through
from khot.hard import topk_mask as topk_mask
from khot.log_soft import log_soft_topk as log_soft_topk
from khot.loss import topk_inverse as topk_inverse
from khot.loss import topk_loss as topk_loss
from khot.loss import topk_value as topk_value
from khot.ranks import soft_rank as soft_rank
from khot.ranks import soft_sort as soft_sort
from khot.registry import DESIGNS as DESIGNS
from khot.registry import RELAXATIONS as RELAXATIONS
from khot.relaxations.counting import counting_matrix as counting_matrix
from khot.relaxations.entmax import entmax_topk as entmax_topk
from khot.relaxations.euclidean import euclidean_topk as euclidean_topk
from khot.relaxations.gaussian import gaussian_topk as gaussian_topk
from khot.relaxations.halving import halving_matrix as halving_matrix
from khot.relaxations.iterative import iterative_matrix as iterative_matrix
from khot.relaxations.laplace import laplace_topk as laplace_topk
from khot.relaxations.magnitude import magnitude_topk as magnitude_topk
from khot.relaxations.network import network_matrix as network_matrix
from khot.relaxations.neuralsort import neuralsort_matrix as neuralsort_matrix
from khot.relaxations.permutahedron import permutahedron_topk as permutahedron_topk
from khot.relaxations.perturbed import perturbed_matrix as perturbed_matrix
from khot.relaxations.scaled import scaled_topk as scaled_topk
from khot.relaxations.sequential import sequential_matrix as sequential_matrix
from khot.relaxations.sigmoid import sigmoid_topk as sigmoid_topk
from khot.relaxations.sinkhorn import sinkhorn_matrix as sinkhorn_matrix
from khot.relaxations.softrank import softrank_matrix as softrank_matrix
from khot.relaxations.softsort import softsort_matrix as softsort_matrix
from khot.relaxations.threshold import threshold_topk as threshold_topk
from khot.sampling import sample as sample
from khot.sampling import sample_topk as sample_topk
from khot.select import select_topk as select_topk
from khot.select import select_topk_with_indices as select_topk_with_indices
from khot.soft import soft_topk as soft_topk
from khot.soft import soft_topk_matrix as soft_topk_matrix

__version__ = "0.1.0"

if _TYPE_CHECKING:
    from khot import bounds as bounds
    from khot import distributed as distributed
    from khot import distributions as distributions
    from khot import estimators as estimators
    from khot import linear_bounds as linear_bounds
    from khot import models as models
    from khot import nn as nn
    from khot.beams import beam_search as beam_search
    from khot.linear_bounds import certify_topk as certify_topk
    from khot.models.reduction import reduce_tokens as reduce_tokens
    from khot.models.reduction import restore_tokens as restore_tokens

# Rooms that not every program needs are imported when they are first asked for: the name, and where it stands.
_LATER = {name: f"khot.{name}" for name in ("bounds", "distributed", "distributions", "estimators", "linear_bounds", "models", "nn")}
_LATER |= {
    "beam_search": "khot.beams",
    "certify_topk": "khot.linear_bounds",
    "reduce_tokens": "khot.models.reduction",
    "restore_tokens": "khot.models.reduction",
}


if not _TYPE_CHECKING:  # else a type checker would take any name

    def __getattr__(name: str) -> _Any:
        if name not in _LATER:
            raise AttributeError(f"module 'khot' has no attribute '{name}'")
        module = _import_module(_LATER[name])
        globals()[name] = found = module if module.__name__ == f"khot.{name}" else getattr(module, name)
        return found


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


# What the lines above name: functions, tables, and the modules that are imported as themselves.
_MODULES = ("designs", "kernels")
__all__ = sorted(  # pyright: ignore[reportUnsupportedDunderAll]
    {name for name, value in vars().copy().items() if not name.startswith("_") and (not isinstance(value, _ModuleType) or name in _MODULES)}
    | set(_LATER)
)
