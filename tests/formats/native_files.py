"""Changes to the files of a zckpt directory."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

from tests.formats.holding import edit_json


def change_document(directory: Path, change: Callable[[Any], object]):
    """Change what `checkpoint.json` holds; it then has no checksum."""

    def without_checksum(document):
        del document["crc32"]
        change(document)

    edit_json(directory / "checkpoint.json", without_checksum)


def exchange_tensors(path) -> tuple[str, str]:
    """Let two tensors of a rank's file, of one type and shape, change places; the file alone stays sound."""
    data = bytearray(path.read_bytes())
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    names = sorted(header.keys() - {"__metadata__", "digests"})
    one, other = next(
        (a, b)
        for a, b in combinations(names, 2)
        if all(header[a][key] == header[b][key] for key in ("dtype", "shape")) and 0 not in header[a]["shape"]
    )
    (a, b), (c, d) = header[one]["data_offsets"], header[other]["data_offsets"]
    header[one]["data_offsets"], header[other]["data_offsets"] = [c, d], [a, b]
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    base = 8 + size
    data[8:base] = text + b" " * (size - len(text))
    data[base + a : base + b], data[base + c : base + d] = data[base + c : base + d], data[base + a : base + b]
    path.write_bytes(data)
    return one, other
