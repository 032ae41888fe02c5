"""Mappings: what may be one and what not, and those of which some keys, or what says nothing, are left out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


def without(mapping: Mapping[Key, Value], *keys: object) -> dict[Key, Value]:
    """Return what a mapping has under other keys than these, in its order."""
    gone = {*keys}
    return {key: value for key, value in mapping.items() if key not in gone}


def stated(mapping: Mapping[Key, Value | None]) -> dict[Key, Value]:
    """Return what a mapping has but for None."""
    return {key: value for key, value in mapping.items() if value is not None}


def grouped(pairs: Iterable[tuple[Key, Value]]) -> dict[Key, list[Value]]:
    """Return what pairs have under each key; keys, and what each has, come as they first do."""
    found: dict[Key, list[Value]] = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return found


def dict_of(node: object) -> dict[Any, Any]:
    """Return a node that is a dict as it is; of anything else an empty one."""
    return node if isinstance(node, dict) else {}


def list_of(node: object) -> list[Any]:
    """Return what a node that is a list or a tuple has; of anything else nothing."""
    return list(node) if isinstance(node, (list, tuple)) else []
