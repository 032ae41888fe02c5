"""How an object with much in it shows itself: a line for each of its fields, and none longer than a terminal's."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sized
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

from zckpt.errors import shortened, without_controls

Value = TypeVar("Value")

Document = dict[str, object]
"""JSON-able data."""

MOST_LINES = 10
MOST_WIDTH = 100
SHOWN_NAMES = 6

MOST_ITEMS = 4
"""Of a tuple that is shown as it is."""


class Brief:
    """A class of fields that shows itself in at most ten lines."""

    __slots__ = ()

    def __repr__(self) -> str:
        """Return its class, and what each field is, or how much is in it."""
        lines = [f" {one.name}: {brief(getattr(self, one.name))}" for one in fields(self) if one.repr]  # type: ignore[arg-type]
        if len(lines) >= MOST_LINES:
            lines = [*lines[: MOST_LINES - 2], f" ... and {len(lines) - MOST_LINES + 2} more"]
        return "\n".join([f"<{type(self).__name__}", *lines]) + ">"


class Result(Brief):
    """What a verb returns; its document has its fields, where it does not say otherwise."""

    __slots__ = ()

    def as_dict(self) -> Document:
        """Return the result as JSON-able data, the document of `--json`."""
        return {one.name: document(getattr(self, one.name)) for one in fields(self)}  # type: ignore[arg-type]


def document(value: Any) -> Any:  # noqa: ANN401  # data of any kind
    """Return what a result holds as JSON-able data; what is a dict is that already."""
    if hasattr(value, "as_dict"):
        return value.as_dict()
    if is_dataclass(value):
        return {one.name: document(getattr(value, one.name)) for one in fields(value)}
    if isinstance(value, (list, tuple)):
        return [document(one) for one in value]
    if isinstance(value, os.PathLike):
        return str(value)
    return number(value) if isinstance(value, float) else value


def values_of(thing: object, names: Iterable[str]) -> dict[str, Any]:
    """Return some attributes of something by their names."""
    return {name: getattr(thing, name) for name in names}


def number(value: float | None) -> float | str | None:
    """Return a float as JSON can say it."""
    return str(value) if value is not None and not math.isfinite(value) else value


class Named(dict[str, Value]):
    """Things by name. It shows the first few; where a name is not there, the error says which names are near."""

    __slots__ = ()

    def __repr__(self) -> str:
        """Return how many there are, and the first of them, a line each."""
        shown = [f" {brief(one)}" for one in list(self.values())[:SHOWN_NAMES]]
        more = [f" ... and {len(self) - SHOWN_NAMES:,} more"] if len(self) > SHOWN_NAMES else []
        return "\n".join([f"<{len(self):,} by name", *shown, *more]) + ">"

    def __missing__(self, name: str) -> Value:
        """Raise KeyError, which says what is near."""
        raise KeyError(f"{name}{near(name, self)}")


def near(name: object, names: Iterable[str]) -> str:
    """Return names that are like one that is not there, for a message; empty: none is."""
    from difflib import get_close_matches

    every = list(names)
    found = get_close_matches(str(name), every, n=3) or [one for one in every if str(name) in one][:3]
    return f"; did you mean {' or '.join(found)}?" if found else ""


def brief(value: object) -> str:
    """Return a value as one line: a text, a number, or how much is in it."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{type(value).__name__} of {value.dtype}, {list(value.shape)}"
    is_short = isinstance(value, str) or (isinstance(value, tuple) and len(value) <= MOST_ITEMS)
    if isinstance(value, Sized) and not is_short:
        return f"{len(value):,} {'by name' if isinstance(value, Mapping) else 'in a ' + type(value).__name__}"
    return shortened(" ".join(without_controls(repr(value)).split()), MOST_WIDTH)
