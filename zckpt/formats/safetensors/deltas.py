"""What slime publishes of a model's weights after each update: the bytes that changed. Read, made, and composed.

DIR/weight_v000003/model.safetensors.index.json    version, base_version, delta_encoding, compression_format,
                                                   checksum_format; in which file each tensor that changed is
DIR/weight_v000003/model-00000-of-00001.safetensors    of each, bytes in zstd; in the texts, its checksum after

xor         as many bytes as the tensor has: their exclusive-or is the new one
overwrite   4 bytes: how many bytes changed; 4 bytes each: where; a byte each: what is there now

A version may be a whole model instead, without these keys; version 0 is the model that inference began with.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash
import zstandard

from zckpt.codes import CHECKSUM
from zckpt.errors import DamagedFileError, MissingPackageError, SourceError, UnsupportedError
from zckpt.formats.safetensors.file import INDEX_NAME, MAXIMUM_INDEX_NBYTES, indexed_files, is_delta, read_header
from zckpt.immutable import immutable
from zckpt.state import Slot
from zckpt.storage.files import is_file, json_object, opened

XOR, OVERWRITE = "xor", "overwrite"
ENCODINGS = (XOR, OVERWRITE)

NAME = re.compile(r"weight_v([0-9]{6,18})")

STATE = Path(".weight_sync", "state.json")
"""Where an inference engine notes which version its copy of the model is."""

MOST_POSITIONS = 1 << 32

Bytes = npt.NDArray[np.uint8]


@immutable
class Delta:
    """What makes one version of another: of each tensor that changed, where its change lies, and its checksum after."""

    path: Path
    version: int
    base: int
    encoding: str
    algorithm: str
    changed: dict[str, Slot]
    sums: dict[str, str]

    def apply(self, name: str, data: Bytes) -> None:
        """Turn the bytes of a tensor into the new ones. Raises DamagedFileError: they are not what was published."""
        slot = self.changed[name]
        [span] = slot.spans
        with opened(span.path) as file:
            stored = file.read(span.offset, slot.nbytes)
        try:
            self._change(data, stored)
        except (ValueError, zstandard.ZstdError) as error:
            raise DamagedFileError(f"the change of {name} is unreadable", path=span.path, found=str(error)) from error
        if (found := checksum(self.algorithm)(data)) != self.sums[name]:
            raise DamagedFileError(
                f"version {self.version} of {name} differs from what was published", path=span.path,
                expected=f"{self.algorithm} {self.sums[name]}", found=found, code=CHECKSUM,
                advice=f"give the model at version {self.base}, or publish a whole one",
            )  # fmt: skip

    def _change(self, data: Bytes, stored: bytes) -> None:
        nbytes = zstandard.frame_content_size(stored)
        if nbytes != len(data) if self.encoding == XOR else not 4 <= nbytes <= 4 + 5 * len(data):
            raise ValueError("of another size")
        plain = np.frombuffer(zstandard.ZstdDecompressor().decompress(stored, max_output_size=nbytes), np.uint8)
        if self.encoding == XOR:
            data ^= plain
            return
        count = int(plain[:4].view("<u4")[0])
        if len(plain) != 4 + 5 * count:
            raise ValueError("of another size")
        where = plain[4 : 4 + 4 * count].view("<u4")
        if count and int(where.max()) >= len(data):
            raise ValueError("a position is outside the tensor")
        data[where] = plain[4 + 4 * count :]


def encode(old: Bytes, new: Bytes, encoding: str) -> bytes | None:
    """Return what is stored of a tensor that changed; None: it did not."""
    if np.array_equal(old, new):
        return None
    if encoding == XOR:
        plain = new ^ old
    else:
        if len(new) > MOST_POSITIONS:
            raise UnsupportedError("a tensor is too large for 4-byte positions", expected=f"--encoding={XOR}")
        where = np.flatnonzero(new != old).astype("<u4")
        plain = np.concatenate([np.array([len(where)], "<u4").view(np.uint8), where.view(np.uint8), new[where]])
    return zstandard.ZstdCompressor(level=1).compress(plain.data)


def checksum(algorithm: str) -> Callable[[Bytes], str]:
    """Return a checksum that slime knows. Raises UnsupportedError: it is none; MissingPackageError: of `blake3`."""
    if algorithm == "xxh3-128":
        return lambda data: xxhash.xxh3_128_hexdigest(data.data)
    if algorithm == "adler32":
        return lambda data: f"{zlib.adler32(data.data):08x}"
    if algorithm != "blake3":
        raise UnsupportedError("unknown checksums", expected="xxh3-128, adler32 or blake3", found=algorithm)
    try:
        blake3 = import_module("blake3").blake3
    except ImportError as error:
        raise MissingPackageError(
            "its checksums need blake3, which is not installed", advice="pip install blake3"
        ) from error
    return lambda data: str(blake3(data.data).hexdigest())


def read_delta(path: Path) -> Delta:
    """Read what a version consists of. Raises SourceError: it is damaged, or of a form that is not known."""
    index = path / INDEX_NAME
    about: Any = json_object(index, "index", most=MAXIMUM_INDEX_NBYTES).get("metadata")
    try:
        version, base = int(about["version"]), int(about["base_version"])
        encoding, compression, algorithm = (
            str(about[key]) for key in ("delta_encoding", "compression_format", "checksum_format")
        )
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedFileError(
            "unreadable index", path=index, expected="what slime publishes", found=repr(error)
        ) from error
    if base >= version:
        raise DamagedFileError("unreadable index", path=index, expected=f"a base before {version}", found=base)
    if encoding not in ENCODINGS or compression != "zstd":
        found = f"{encoding}, {compression}"
        raise UnsupportedError("has an unknown form", path=index, expected="xor or overwrite, in zstd", found=found)
    changed, sums = dict[str, Slot](), dict[str, str]()
    for file in indexed_files(index):
        slots, texts, _ = read_header(file)
        if again := changed.keys() & slots.keys():
            raise DamagedFileError(f"{min(again)} is in two files", path=file)
        changed |= slots
        sums |= {name: text for name, text in texts.items() if name in slots}
    for name, slot in changed.items():
        if name not in sums or slot.dtype != "uint8" or len(slot.spans) != 1:
            raise DamagedFileError(f"unreadable entry {name}", path=path, expected="bytes, and their checksum")
    return Delta(path, version, base, encoding, algorithm, changed, sums)


def version_of(model: Path) -> int:
    """Return which version a model is: as an engine noted, as its directory is called, or 0."""
    if is_file(model / STATE):
        try:
            return int(json_object(model / STATE, "state", most=1 << 16)["version"])
        except (KeyError, TypeError, ValueError) as error:
            raise DamagedFileError("unreadable state", path=model / STATE, expected="a version") from error
    match = NAME.fullmatch(model.name)
    return int(match[1]) if match else 0


def chain(model: Path, last: Path) -> list[Delta]:
    """Return the versions that make `last` of a model, in order. Raises SourceError: one is not there, or is whole."""
    found = [read_delta(last)]
    begin = version_of(model)
    while found[0].base > begin:
        path = last.parent / f"weight_v{found[0].base:06d}"
        if not is_delta(path):
            what = "a whole model" if path.is_dir() else "not there"
            raise SourceError(
                f"version {found[0].base} is {what}", path=path, expected=f"what changed since version {begin}",
                advice="give a later version of the model: a whole directory weight_vNNNNNN",
            )  # fmt: skip
        found.insert(0, read_delta(path))
        if found[0].version != found[1].base:
            raise DamagedFileError("is another version", path=path, expected=found[1].base, found=found[0].version)
    if found[0].base != begin:
        raise SourceError("is for another version of the model", path=last, expected=found[0].base, found=begin)
    return found
