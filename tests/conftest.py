"""Settings of the whole test run."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("zckpt", deadline=None)  # how long an example takes is no property of the product
settings.load_profile("zckpt")
