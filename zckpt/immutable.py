"""Classes of what does not change once it is made."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform

    Class = TypeVar("Class")

    @dataclass_transform(frozen_default=True, field_specifiers=(field,))
    def immutable(cls: type[Class], /) -> type[Class]:
        """Make a class of a class's fields: it is equal to another one with the same, and none can be set anew."""

else:
    immutable = dataclass(frozen=True, slots=True)
