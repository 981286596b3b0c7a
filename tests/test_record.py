"""Records: frozen, given by keyword, complete."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest

from khot._record import record, replace


def twice(x: int) -> int:
    return 2 * x


@record
class Row:
    name: str
    f: Callable[[int], int] = twice
    size: int = 1

    def __str__(self) -> str:
        return self.name


def test_values_come_from_the_call_or_the_class() -> None:
    row, other = Row(name="a"), Row(name="b", f=abs, size=3)
    assert (str(row), row.f(4), row.size) == ("a", 8, 1)  # a function in a class would take the record as its argument
    assert (other.name, other.f(-4), other.size) == ("b", 4, 3)
    assert row != Row(name="a") and len({row, other, row}) == 2


def test_nothing_can_be_changed() -> None:
    row = Row(name="a", size=2)
    assert vars(replace(row, name="b")) == {"name": "b", "f": twice, "size": 2} and row.name == "a"
    with pytest.raises(AttributeError, match="a Row cannot be changed: size"):
        row.size = 2  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(AttributeError, match="a Row cannot be changed: name"):
        del row.name


def test_errors_name_what_is_missing_or_unknown() -> None:
    with pytest.raises(TypeError, match="Row needs name="):
        Row(size=2)  # pyright: ignore[reportCallIssue]
    with pytest.raises(TypeError, match="Row has no sise; it has name, f, size"):
        Row(name="a", sise=2)  # pyright: ignore[reportCallIssue]


def test_copies_hold_the_same() -> None:
    for twin in (copy.copy(Row(name="a", size=2)), copy.deepcopy(Row(name="a", size=2)), pickle.loads(pickle.dumps(Row(name="a", size=2)))):
        assert vars(twin) == {"name": "a", "f": twice, "size": 2}
