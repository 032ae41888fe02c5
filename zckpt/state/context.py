"""Variables of a context, which have a value as long as it lasts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

Value = TypeVar("Value")


@contextmanager
def during(variable: ContextVar[Value], value: Value) -> Iterator[None]:
    """Let a variable have a value as long as the context lasts."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)
