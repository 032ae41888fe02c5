"""Checksums of pieces put together are the checksum of the whole, as zlib computes it."""

from __future__ import annotations

import zlib
from functools import reduce

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.strategies import byte_strings
from zckpt.storage.crc32 import combine, combined

either = pytest.mark.parametrize("combine", [combine, combined], ids=["isal", "where there is no isal"])


@either
@given(st.lists(byte_strings, max_size=20))
def test_many_pieces_from_left_to_right(combine, pieces):
    crc = reduce(lambda whole, piece: combine(whole, zlib.crc32(piece), len(piece)), pieces, 0)
    assert crc == zlib.crc32(b"".join(pieces))


@either
@given(byte_strings, byte_strings, byte_strings)
def test_grouping_does_not_matter(combine, a, b, c):
    x, y, z = map(zlib.crc32, (a, b, c))
    left = combine(combine(x, y, len(b)), z, len(c))
    right = combine(x, combine(y, z, len(c)), len(b) + len(c))
    assert left == right == zlib.crc32(a + b + c)


@either
@given(byte_strings, st.integers(0, 22))
def test_piece_of_zeros_of_any_size(combine, first, power):
    zeros = bytes(1 << power)
    assert combine(zlib.crc32(first), zlib.crc32(zeros), len(zeros)) == zlib.crc32(first + zeros)


@either
@given(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**34), st.integers(0, 2**34))
def test_pieces_beyond_four_gibibytes_shift_by_their_sum(combine, first, last, one, other):
    zeros = combine(combine(first, 0, one), 0, other)
    assert combine(zeros, last, 0) == combine(first, 0, one + other) ^ last
