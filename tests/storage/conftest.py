"""Whether what is written is a file or a directory: most of what is promised of targets is promised of both.

Tests here name files alone.
"""

from __future__ import annotations

import pytest


@pytest.fixture(params=[False, True], ids=["file", "directory"])
def directory(request) -> bool:
    """Whether the target is a directory."""
    return request.param
