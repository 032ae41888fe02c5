"""Classes of fields, equal if their fields are: as dataclasses with slots, but made in a tenth of the time.

A command defines two hundred of them, and makes objects of a third: what takes long is left to the first object.
"""

from __future__ import annotations

from dataclasses import MISSING, FrozenInstanceError, dataclass, field, fields
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import dataclass_transform
else:

    def dataclass_transform(**_: object) -> Callable[[Any], Any]:
        """Say something to checkers, and nothing here."""
        return lambda function: function


@dataclass_transform(field_specifiers=(field,))
def mutable(cls: Any = None, /, **how: Any) -> Any:
    """Make a class of a class's fields. Parameters are those of `dataclasses.dataclass`: `eq`, `repr` and `kw_only`.

    Without `repr`, one that is derived from what shows itself in some way shows itself in that way.
    """
    return partial(_made, **how) if cls is None else _made(cls, **how)


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def immutable(cls: Any = None, /, **how: Any) -> Any:
    """Make a class of a class's fields, none of which can be set anew. Parameters are those of `mutable`."""
    return mutable(cls, **how, is_frozen=True)


def _made(
    cls: Any,
    *,
    eq: bool = True,
    repr: bool | None = None,  # noqa: A002
    kw_only: bool = False,
    is_frozen: bool = False,
) -> Any:
    own = cls.__dict__
    cls.__doc__ = cls.__doc__ or cls.__name__  # else `dataclass` makes one of a signature that is not there yet
    made = dataclass(init=False, repr=False, eq=False, slots=True, kw_only=kw_only)(cls)
    methods: dict[str, Any] = {"__init__": _at_first(made, "__init__", partial(_init_of, is_frozen=is_frozen))}
    if repr or (repr is None and cls.__repr__ is object.__repr__):  # else it shows itself as what it is derived from
        methods["__repr__"] = _described
    if eq:
        methods |= {"__eq__": _at_first(made, "__eq__", _equal_of), "__hash__": None}
    if is_frozen:
        methods |= {"__setattr__": _refuse, "__delattr__": _refuse, "__getstate__": _state, "__setstate__": _set_state}
        methods |= {"__hash__": _at_first(made, "__hash__", _hash_of)} if eq else {}
    for name, method in methods.items():
        if own.get(name) is None:
            setattr(made, name, method)
    return made


def _at_first(cls: Any, name: str, source_of: Callable[[Any], tuple[str, str, dict[str, Any]]]) -> Callable[..., Any]:
    """Return a method that is compiled, and takes the place of this one, when it is called for the first time."""

    def first(self: object, *arguments: object, **named: object) -> Any:
        parameters, body, known = source_of(cls)
        exec(f"def {name}(self{parameters}):\n {body}", known)  # noqa: S102
        known[name].__qualname__ = f"{cls.__qualname__}.{name}"  # which a TypeError names
        setattr(cls, name, known[name])
        return known[name](self, *arguments, **named)

    return first


def _init_of(cls: Any, *, is_frozen: bool) -> tuple[str, str, dict[str, Any]]:
    """Return a parameter for each field, and what fills its slot; other names are such as no field has."""
    known: dict[str, Any] = {"__absent": MISSING}
    positional, keywords, steps = [""], ["*"], []
    for one in fields(cls):
        name, given = one.name, one.name
        known |= {f"__set_{name}": getattr(cls, name).__set__, f"__make_{name}": one.default_factory}
        known[f"__default_{name}"] = one.default
        if one.default_factory is not MISSING:
            given = f"__make_{name}() if {name} is __absent else {name}"
        is_needed = one.default is MISSING and one.default_factory is MISSING
        (keywords if one.kw_only else positional).append(name if is_needed else f"{name}=__default_{name}")
        steps.append(f"__set_{name}(self, {given})" if is_frozen else f"self.{name} = {given}")
    if hasattr(cls, "__post_init__"):
        steps.append("self.__post_init__()")
    parameters = ", ".join([*positional, *(keywords if len(keywords) > 1 else [])])
    return parameters, "\n ".join(steps or ["pass"]), known


def _equal_of(cls: Any) -> tuple[str, str, dict[str, Any]]:
    mine, others = _compared(cls, "self"), _compared(cls, "other")
    return ", other", f"return {mine} == {others} if other.__class__ is self.__class__ else NotImplemented", {}


def _hash_of(cls: Any) -> tuple[str, str, dict[str, Any]]:
    return "", f"return hash({_compared(cls, 'self')})", {}


def _compared(cls: Any, whose: str) -> str:
    return f"({''.join(f'{whose}.{one.name}, ' for one in fields(cls) if one.compare)})"


def _described(self: Any) -> str:
    shown = (f"{one.name}={getattr(self, one.name)!r}" for one in fields(self) if one.repr)
    return f"{type(self).__qualname__}({', '.join(shown)})"


def _refuse(self: object, name: str, *_: object) -> None:
    raise FrozenInstanceError(f"cannot assign to field {name!r} of a {type(self).__name__}")


def _state(self: Any) -> list[object]:
    return [getattr(self, one.name) for one in fields(self)]


def _set_state(self: Any, state: list[object]) -> None:
    for one, value in zip(fields(self), state, strict=True):
        object.__setattr__(self, one.name, value)
