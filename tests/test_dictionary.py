"""Pursuit against scikit-learn's, row by row, and what a dictionary promises."""

import numpy as np
import pytest
import torch
from sklearn.linear_model import orthogonal_mp
from torch import Tensor

import khot
from khot.nn import Dictionary
from khot.nn.dictionary import doubles


def made(dim: int = 20, atoms: int = 50, k: int = 5, dtype: torch.dtype = torch.float64) -> tuple[Dictionary, Tensor]:
    torch.manual_seed(0)
    return Dictionary(dim, atoms, k).to(dtype), torch.randn(60, dim, dtype=dtype)


def reference(dictionary: Dictionary, x: Tensor, **stop: float) -> Tensor:
    return torch.from_numpy(orthogonal_mp(dictionary.components.detach().numpy().T, x.numpy().T, **stop).T.copy())


@pytest.mark.parametrize("k", [1, 2, 5, 20])
def test_codes_are_those_of_scikit_learn(k: int) -> None:
    dictionary, x = made(k=k)
    codes = dictionary.encode(x).detach()
    torch.testing.assert_close(codes, reference(dictionary, x, n_nonzero_coefs=k))
    assert (codes.count_nonzero(-1) == k).all()


@pytest.mark.parametrize("error", [1.5, 0.6, 0.3, 0.02])
def test_an_error_gives_every_row_its_own_k(error: float) -> None:
    dictionary, x = made()
    codes = dictionary.encode(x, error=error).detach()
    small = x.square().mean(-1).sqrt() <= error  # scikit-learn takes one atom even where none is needed
    torch.testing.assert_close(codes, reference(dictionary, x, tol=20 * error**2) * ~small.unsqueeze(1))
    assert ((x - dictionary.decode(codes)).square().mean(-1).sqrt() <= error + 1e-12).all()


def test_errors_for_each_row_and_a_largest_k() -> None:
    dictionary, x = made()
    error = torch.rand(60, dtype=torch.float64) * 0.8
    mixed = dictionary.encode(x, error=error)
    for row in (0, 7, 59):
        torch.testing.assert_close(mixed[row], dictionary.encode(x[row], error=float(error[row])))
    assert dictionary.encode(x, error=1e-3, k=4).count_nonzero(-1).eq(4).all()


def test_the_error_left_is_perpendicular_to_the_chosen_atoms() -> None:
    dictionary, x = made(dtype=torch.float32)
    codes = dictionary.encode(x).detach()
    left = (x - dictionary.decode(codes)) @ dictionary.components.mT
    assert (left * (codes != 0)).abs().max() < 1e-5


def test_derivatives_in_atoms_and_input() -> None:
    dictionary, x = made(8, 14, 3)

    def code(atoms: Tensor, rows: Tensor) -> Tensor:
        return torch.func.functional_call(dictionary, {"atoms": atoms}, (rows,))

    inputs = (dictionary.atoms.detach().clone().requires_grad_(), x[:4, :8].clone().requires_grad_())
    assert torch.autograd.gradcheck(code, inputs)
    dictionary(x[:, :8]).square().sum().backward()
    assert (dictionary.atoms.grad * dictionary.components).sum(-1).abs().max() < 1e-10


def test_many_rows_are_coded_in_chunks_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    dictionary, x = made()
    whole, by_error = dictionary.encode(x), dictionary.encode(x, error=0.4)
    monkeypatch.setattr("khot.nn.dictionary.CHUNK", 50 * 7)
    torch.testing.assert_close(dictionary.encode(x), whole)
    torch.testing.assert_close(dictionary.encode(x, error=0.4), by_error)


def test_planted_atoms_are_found() -> None:
    generator = torch.Generator().manual_seed(0)
    true = torch.nn.functional.normalize(torch.randn(24, 16, generator=generator), dim=-1)
    codes = khot.topk_mask(torch.rand(3000, 24, generator=generator), 2) * torch.randn(3000, 24, generator=generator)
    x = codes @ true
    torch.manual_seed(1)
    dictionary = Dictionary(16, 24, 2)
    errors = [float(dictionary.learn(part, keep=0.8)) for _ in range(15) for part in x.split(600)]
    match = (true @ dictionary.components.detach().mT).abs().amax(1)
    assert errors[-1] < 0.1 * errors[0] and (match > 0.99).sum() >= 22


def test_unused_and_double_atoms_are_replaced_by_what_is_coded_worst() -> None:
    dictionary, x = made()
    with torch.no_grad():
        dictionary.atoms[3] = dictionary.atoms[8] * -2 + 1e-5
        dictionary.atoms[5] = 0.0
    before = dictionary.components.detach().clone()
    left = (x - dictionary(x)).square().sum(-1).detach()
    count = dictionary.renew(x)
    changed = (dictionary.components.detach() - before).abs().amax(-1) > 1e-6
    assert count == changed.sum() >= 2 and changed[5] and changed[3] != changed[8]
    worst = torch.nn.functional.normalize(x[left.argmax()], dim=-1)
    assert (dictionary.components @ worst).max() > 1 - 1e-9
    assert not doubles(dictionary.components.detach(), dictionary.used).any()


def test_atoms_have_length_one_whatever_an_optimizer_does() -> None:
    dictionary, x = made()
    optimizer = torch.optim.SGD(dictionary.parameters(), lr=0.5)
    first = (x - dictionary(x)).square().mean()
    for _ in range(20):
        loss = (x - dictionary(x)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    torch.testing.assert_close(dictionary.components.norm(dim=-1), torch.ones(50, dtype=torch.float64))
    assert loss < first


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_degenerate_rows_and_atoms(dtype: torch.dtype) -> None:
    dictionary, x = made(dtype=dtype)
    with torch.no_grad():
        dictionary.atoms[10:30] = dictionary.atoms[3]  # twenty equal atoms
        dictionary.atoms[41] = 0.0
    zero = dictionary.encode(torch.zeros(2, 20, dtype=dtype))
    assert zero.count_nonzero() == 0
    one = dictionary.encode(3 * dictionary.components[7:8].detach())
    assert one.count_nonzero() == 1 and one[0, 7].isclose(torch.tensor(3.0, dtype=dtype))
    codes = dictionary.encode(torch.cat([x, 1e30 * x[:1], 1e-18 * x[:1]]), k=20).detach()
    assert codes.isfinite().all() and (codes[:, 10:30].count_nonzero(-1) <= 1).all() and (codes[:, 41] == 0).all()
    torch.testing.assert_close(dictionary.decode(codes)[:60], x, rtol=1e-3, atol=1e-3)


def test_empty_one_row_and_half_precision() -> None:
    dictionary, x = made(dtype=torch.float32)
    assert dictionary.encode(x[:0]).shape == (0, 50) and dictionary.learn(x[:0]) == 0 and dictionary.renew(x[:0]) == 0
    assert dictionary.encode(x[0]).shape == (50,) and dictionary.encode(x.view(3, 20, 20)).shape == (3, 20, 50)
    assert dictionary.encode(x.bfloat16()).dtype == torch.bfloat16
    torch.testing.assert_close(dictionary.encode(x.T.contiguous().T), dictionary.encode(x))


def test_learning_keeps_every_atom_in_use() -> None:
    dictionary, _ = made(16, 40, 3, torch.float32)
    x = torch.randn(2000, 16)
    for _ in range(10):
        dictionary.learn(x)
    assert (dictionary.encode(x) != 0).any(0).all() and dictionary.components.isfinite().all()


def test_state_is_saved_and_learning_goes_on_from_it() -> None:
    one, x = made()
    one.learn(x[:30], keep=0.5)
    two = Dictionary(20, 50, 5).double()
    two.load_state_dict(one.state_dict())
    assert one.learn(x[30:], keep=0.5) == two.learn(x[30:], keep=0.5) and torch.equal(one.atoms, two.atoms)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Dictionary(4, 9, 5), r"min\(dim, num_atoms\)=4, got 5"),
        (lambda: Dictionary(4, 9, 0), "k must be"),
        (lambda: Dictionary(0, 9, 1), "dim and num_atoms"),
        (lambda: made()[0].encode(torch.zeros(2, 19)), "20 features"),
        (lambda: made()[0].encode(torch.zeros(2, 20), k=21), "got 21"),
        (lambda: made()[0].encode(torch.zeros(2, 20), error=-1.0), "error must be at least 0"),
        (lambda: made()[0].learn(torch.zeros(2, 20), keep=1.5), "keep must be"),
        (lambda: made()[0].encode(torch.full((2, 20), torch.nan)), "finite"),
        (lambda: made()[0].encode(torch.zeros(3, 20), error=torch.ones(2)), r"error must be a scalar or of shape \(3,\)"),
    ],
)
def test_errors_say_what_must_hold(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_numpy_is_refused_in_words() -> None:
    with pytest.raises(TypeError, match=r"torch\.Tensor"):
        made()[0].encode(np.zeros((2, 20)))  # type: ignore[arg-type]
