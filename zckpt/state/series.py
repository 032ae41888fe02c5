"""What several values are: all texts, all sizes, each another one, or not all the same."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence


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
