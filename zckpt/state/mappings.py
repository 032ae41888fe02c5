"""Mappings without some keys, without what says nothing, or of lists by key; and what several values are. Pure."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


def without(mapping: Mapping[Key, Value], *keys: object) -> dict[Key, Value]:
    """Return what a mapping has under other keys than these, in its order."""
    gone = {*keys}
    return {key: value for key, value in mapping.items() if key not in gone}


def by_key(pairs: Iterable[tuple[Key, Value]]) -> dict[Key, list[Value]]:
    """Return all that has the same key together; keys, and what they have, are in the order of the pairs."""
    found: dict[Key, list[Value]] = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return found


def stated(mapping: Mapping[Key, Value | None]) -> dict[Key, Value]:
    """Return what a mapping has but for None."""
    return {key: value for key, value in mapping.items() if value is not None}


def dict_of(node: object) -> dict[Any, Any]:
    """Return a node that is a dict as it is; of anything else an empty one."""
    return node if isinstance(node, dict) else {}


def inside(node: object) -> dict[Any, Any]:
    """Return a node that is a dict as it is; what a list or a tuple has, by its places; of anything else nothing."""
    return dict(enumerate(node)) if isinstance(node, (list, tuple)) else dict_of(node)


def list_of(node: object) -> list[Any]:
    """Return what a node that is a list or a tuple has; of anything else nothing."""
    return list(node) if isinstance(node, (list, tuple)) else []


def size_of(mapping: Mapping[Any, object], key: str) -> int | None:
    """Return how many of something a program says that there are, under a key; None where it does not."""
    value = mapping.get(key)
    return value if type(value) is int and value > 0 else None


def are_texts(values: Iterable[object]) -> bool:
    """Tell whether all are texts."""
    return all(isinstance(one, str) for one in values)


def are_sizes(values: Iterable[object]) -> bool:
    """Tell whether all are whole numbers from 0 on, as those of a shape."""
    return all(type(one) is int and one >= 0 for one in values)


def are_distinct(values: Sequence[Hashable]) -> bool:
    """Tell whether each is another one."""
    return len(set(values)) == len(values)


def differ(values: Sequence[object]) -> bool:
    """Tell whether not all are the same."""
    return any(one != values[0] for one in values)


def positions(values: Iterable[Key]) -> dict[Key, int]:
    """Return where each of some values is, counted from 0."""
    return {one: at for at, one in enumerate(values)}


def first_of(values: Iterable[Value | None]) -> Value | None:
    """Return the first that is not None; None: all are."""
    return next((one for one in values if one is not None), None)


class Sized(Protocol):
    """Something of so many bytes."""

    @property
    def nbytes(self) -> int:
        """How many there are."""


def nbytes_of(some: Iterable[Sized]) -> int:
    """Return how many bytes several things have together."""
    return sum(one.nbytes for one in some)
