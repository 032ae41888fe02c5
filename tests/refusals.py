"""What is refused says so as the house's errors do: in one line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from zckpt.errors import ZckptError

Kinds = type[ZckptError] | tuple[type[ZckptError], ...]


@contextmanager
def refusing(kind: Kinds, words: str) -> Iterator[pytest.ExceptionInfo[ZckptError]]:
    """Hold what is done within to end in an error of that kind, of one line that matches a regular expression."""
    with pytest.raises(kind, match=words) as caught:
        yield caught
    assert len(str(caught.value).splitlines()) == 1
