"""Bad input is refused at the door, in words that say what must hold, what came, and what to do."""

from __future__ import annotations

import pytest
import torch

import khot
from khot.registry import RELAXATIONS, Relaxation

X = torch.arange(7.0)
ROWS = [pytest.param(row, id=row.name) for row in RELAXATIONS.values()]


@pytest.mark.parametrize("op", ROWS)
@pytest.mark.parametrize(
    ("scores", "k", "tau", "error", "message"),
    [
        (X, -1, 1.0, ValueError, r"k must be between 0 and n=7 along dim=-1, got -1"),
        (X, 8, 1.0, ValueError, r"k must be between 0 and n=7 along dim=-1, got 8"),
        (X, "2", 1.0, TypeError, r"k must be an int, a float or a tensor, got str"),
        (X, True, 1.0, TypeError, r"k must be an int"),
        (X, 2, 0.0, ValueError, r"tau must be positive, got 0"),
        (X, 2, -1.0, ValueError, r"tau must be positive, got -1"),
        (X, 2, float("nan"), ValueError, r"tau must be positive, got nan"),
        (X, 2, "1", TypeError, r"tau must be a float or a tensor, got str"),
        (X, 2, torch.tensor(-0.5), ValueError, r"tau must be positive"),
        (X, 2, torch.ones(3), ValueError, r"tau must be a scalar or of shape \(\)"),
        (torch.tensor(1.0), 1, 1.0, ValueError, r"at least one dimension"),
        (torch.arange(7), 2, 1.0, TypeError, r"floating dtype, got torch.int64; convert with scores.float\(\)"),
        ([1.0, 2.0], 1, 1.0, TypeError, r"must be a torch.Tensor, got list"),
    ],
)
def test_refuses(op: Relaxation, scores, k, tau, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        op.topk(scores, k, tau)


@pytest.mark.parametrize("op", ROWS)
def test_refuses_a_nan_k(op: Relaxation) -> None:
    with pytest.raises((ValueError, TypeError), match="k must be"):
        op.topk(X, float("nan"))


@pytest.mark.parametrize("op", [p for p in ROWS if p.values[0].grad_k])
def test_refuses_bad_k_tensors(op: Relaxation) -> None:
    with pytest.raises(ValueError, match=r"values from 2 to 9"):
        op.topk(X.expand(2, 7), torch.tensor([2.0, 9.0]))
    with pytest.raises(ValueError, match=r"k must be between"):
        op.topk(X, torch.tensor(float("nan")))
    with pytest.raises(ValueError, match=r"k must be a scalar or of shape \(2,\).*got \(3,\)"):
        op.topk(X.expand(2, 7), torch.ones(3))
    with pytest.raises(TypeError, match="k must be real"):
        op.topk(X, torch.tensor(True))


@pytest.mark.parametrize("op", [p for p in ROWS if not p.values[0].grad_k])
def test_refuses_a_fractional_k_where_it_means_nothing(op: Relaxation) -> None:
    with pytest.raises(ValueError, match=r"whole number for this method, got 2.5"):
        op.topk(X, 2.5)
    with pytest.raises(TypeError, match="must be an int for this method"):
        op.topk(X, torch.tensor(2.0))


@pytest.mark.parametrize("op", ROWS)
def test_refuses_unknown_options_and_dims(op: Relaxation) -> None:
    with pytest.raises(TypeError, match=rf"method '{op.name}' has no option 'sharpness'; its options: "):
        khot.soft_topk(X, 2, method=op.name, sharpness=3)
    with pytest.raises(ValueError, match=r"dim must be between -1 and 0 .* got 1"):
        op.topk(X, 2, dim=1)


def test_unknown_method_lists_the_choices() -> None:
    with pytest.raises(ValueError, match=r"unknown method 'sigmod' \(did you mean 'sigmoid'\?\); choose from .*entmax.*sigmoid"):
        khot.soft_topk(X, 2, method="sigmod")
    with pytest.raises(ValueError, match="unknown matrix method 'sigmoid'"):
        khot.soft_topk_matrix(X, 2, method="sigmoid")
    with pytest.raises(ValueError, match="unknown method"):
        khot.nn.SoftTopK(2, method="nope")


def test_hard_masks_need_whole_k() -> None:
    with pytest.raises(ValueError, match="whole number for a hard mask"):
        khot.topk_mask(X, 2.5)


def test_a_matrix_takes_no_function() -> None:
    for method in (lambda scores, k, tau: scores, khot.softsort_matrix, None, 3):
        with pytest.raises(TypeError, match=r"must be the name of a matrix method, got .*softsort.*soft_topk takes one"):
            khot.soft_topk_matrix(X, 2, method=method)


def test_entmax_needs_alpha_above_zero_and_at_most_ten() -> None:
    for alpha in (0.0, -0.5, 10.1, "1.5", float("nan"), torch.tensor(0.0), torch.tensor(11.0), torch.tensor(float("nan"))):
        with pytest.raises(ValueError, match="alpha must be above 0 and at most 10"):
            khot.entmax_topk(X, 2, alpha=alpha)
    with pytest.raises(ValueError, match="alpha must be a scalar or of shape"):
        khot.entmax_topk(X, 2, alpha=torch.full((3,), 1.5))
    with pytest.raises(TypeError, match="alpha must be a number here"):
        khot.topk_value(X, 2, method="entmax", alpha=torch.tensor(1.5))


def test_gather_says_which_shape_it_wants() -> None:
    with pytest.raises(ValueError, match=r"mask must have shape \(4, 5\)"):
        khot.gather_topk(torch.zeros(4, 5, 3), torch.zeros(4, 6), 2)
    with pytest.raises(ValueError, match="k must be between 0 and n=5"):
        khot.gather_topk(torch.zeros(4, 5, 3), torch.zeros(4, 5), 6)


def test_loss_says_what_is_wrong() -> None:
    with pytest.raises(ValueError, match="target must have the scores' shape"):
        khot.topk_loss(X, X[:3])
    with pytest.raises(ValueError, match="reduction must be"):
        khot.topk_loss(X, torch.zeros(7), reduction="avg")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"target must be between 0 and 1, got values from 0 to 6"):
        khot.topk_loss(X, X)
