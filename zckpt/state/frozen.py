"""Data that does not change: what one step hands to the next."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, TypeVar, overload

Class = TypeVar("Class", bound=type)

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform

    @overload
    def frozen(cls: Class, /) -> Class: ...
    @overload
    def frozen(*, kw_only: bool = ..., repr: bool = ..., eq: bool = ...) -> Callable[[Class], Class]: ...
    @dataclass_transform(frozen_default=True, field_specifiers=(field,))
    def frozen(cls: Class | None = None, /, **how: bool) -> Class | Callable[[Class], Class]:
        """Make a class a frozen dataclass with slots; further options are those of `dataclass`."""
else:
    frozen = partial(dataclass, frozen=True, slots=True)
