"""Tests here name files alone."""

from tests.folders import in_an_empty_directory

__all__ = ["in_an_empty_directory"]
