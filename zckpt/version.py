"""Which zckpt this is; apart from the package's face, so that what is below that can say it."""

from __future__ import annotations

__version__ = "0.2.0"
