"""Frozen records of named values, without the code that ``dataclasses`` would write and compile for each while khot is imported."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

T = TypeVar("T")

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform
else:  # in typing since Python 3.11; says nothing to a running program

    def dataclass_transform(**_: bool) -> Callable[[T], T]:
        return lambda function: function


@dataclass_transform(kw_only_default=True, frozen_default=True, eq_default=False)
def record(cls: type[T]) -> type[T]:
    """A class whose annotated names are its values, given by keyword or taken from the class; none can be changed later."""
    names = tuple(cls.__annotations__)
    defaults = {name: vars(cls)[name] for name in names if name in vars(cls)}

    def create(self: Any, **given: Any) -> None:
        for name in names:
            if name in given:
                object.__setattr__(self, name, given.pop(name))
            elif name in defaults:
                object.__setattr__(self, name, defaults[name])  # not the class's, which would bind a function to the record
            else:
                raise TypeError(f"{cls.__name__} needs {name}=")
        if given:
            raise TypeError(f"{cls.__name__} has no {', '.join(given)}; it has {', '.join(names)}")

    def refuse(self: Any, name: str, value: Any = None) -> None:
        raise AttributeError(f"a {cls.__name__} cannot be changed: {name}")

    cls.__init__, cls.__setattr__, cls.__delattr__ = create, refuse, refuse
    return cls


def replace(row: T, **values: Any) -> T:
    """A record with some of its values changed."""
    return type(row)(**{**vars(row), **values})
