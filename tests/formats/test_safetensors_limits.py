"""Headers that were made to exhaust their reader."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.refusals import refusing
from zckpt.errors import DamagedFileError
from zckpt.formats.safetensors.file import MAXIMUM_DIMENSIONS, read_header


def written(path, header: dict[str, object], data=b"") -> Path:
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


@pytest.mark.parametrize(("size", "data"), [(1, b"\0" * 4), (0, b"")])
def test_dimensions_are_as_many_as_torch_has(size, data, tmp_path):
    entry = {"dtype": "F32", "data_offsets": [0, len(data)]}
    most = written(tmp_path / "a", {"w": {**entry, "shape": [size] * MAXIMUM_DIMENSIONS}}, data)
    assert read_header(most)[0]["w"].shape == (size,) * 64
    more = written(tmp_path / "b", {"w": {**entry, "shape": [size] * 65}}, data)
    with refusing(DamagedFileError, "w has too many dimensions: expected at most 64, found 65"):
        read_header(more)


def test_tensors_come_in_the_order_of_the_header():
    entry = {"dtype": "F32", "shape": [1]}
    header = {"b": {**entry, "data_offsets": [4, 8]}, "a": {**entry, "data_offsets": [0, 4]}}
    slots = read_header(written(Path("a"), header, b"\0" * 8))[0]
    assert list(slots) == ["b", "a"]
    assert [slot.spans[0].offset for slot in slots.values()] == [
        slots["a"].spans[0].offset + 4,
        slots["a"].spans[0].offset,
    ]
