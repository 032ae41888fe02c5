"""Damaged records are told with the tensors that have bytes in them, however many there are."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from zckpt.codes import CHECKSUM
from zckpt.engine.checking import Sum
from zckpt.operations.verify import verify
from zckpt.operations.verify.deep import records_of
from zckpt.state import Extent, Span
from zckpt.torchfile import read_torchfile


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 40), st.integers(0, 20)), max_size=12, unique=True),
       st.sampled_from("abc"), st.integers(0, 50), st.integers(1, 20))  # fmt: skip
def test_records_of_a_span_are_those_that_it_has_bytes_in(places, path, offset, nbytes):
    records = [Sum("record", *place, crc32=0) for place in places]
    span = Span(Extent.whole((nbytes,)), path, offset, "uint8")
    begin, end = span.reach
    expected = {one for one in records if one.path == path and begin < one.offset + one.nbytes and one.offset < end}
    found = list(records_of(records)(span))
    assert set(found) == expected
    assert len(found) == len(expected)


def test_each_of_many_damaged_records_names_its_tensor(tmp_path):
    file = tmp_path / "model.pt"
    torch.save({f"layers.{number}.weight": torch.randn(4) for number in range(300)}, file)
    records = [one for one in read_torchfile(file).records if "/data/" in one.name]
    data = bytearray(file.read_bytes())
    for one in records:
        data[one.offset] ^= 1
    file.write_bytes(data)
    found = [one for one in verify(file, deep=True).findings if one.code == CHECKSUM]
    assert sorted(one.parameters for one in found) == sorted((f"layers.{n}.weight",) for n in range(300))
