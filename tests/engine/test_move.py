"""Pieces on their way into a file: many small ones at once, long ones cloned where the file system can."""

from __future__ import annotations

import os
import random
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from tests.pairwise import each
from tests.plans import file_of, hole_of, in_file, slot_of
from tests.refusals import refusing
from zckpt.engine import move
from zckpt.engine.cast import cast
from zckpt.engine.checking import Checks, Sum
from zckpt.engine.plan import plan
from zckpt.engine.targets import Checksum, Hole, Literal, TargetFile
from zckpt.engine.write import write
from zckpt.errors import DamagedFileError
from zckpt.storage.crc32 import crc32
from zckpt.storage.disk import BLOCK_NBYTES, LEAST_NBYTES, clone, cloneable

RECORD_NBYTES = 40_000
SOURCE_NBYTES = 10 * RECORD_NBYTES


def bytes_of(path: Path, offset: int, nbytes: int, *, at: int = 0) -> Hole:
    return hole_of(slot_of(in_file(path, (nbytes,), "uint8", offset)), at)


def scattered(seed: int) -> tuple[TargetFile, bytes, list[Sum]]:
    """Return a file of small tensors from anywhere in three, its bytes, and the checksums of the three."""
    chosen, noise = random.Random(seed), np.random.default_rng(seed)
    content, sums, next_one = {}, [], {}
    for name in "abc":
        path = Path(name)
        content[path] = noise.standard_normal(SOURCE_NBYTES // 4).astype("<f4").tobytes()
        path.write_bytes(content[path])
        next_one[path] = 0
        records = ((at, content[path][at : at + RECORD_NBYTES]) for at in range(0, SOURCE_NBYTES, RECORD_NBYTES))
        sums += [Sum("r", str(path), at, RECORD_NBYTES, crc32(data)) for at, data in records]
    file, expected = TargetFile("t", 0), b""
    while len(file.holes) < 700:
        path, numel = chosen.choice([*content]), chosen.choice([1, 7, 100, 300, 900, 9_000])
        dtype, target, order = chosen.choice([
            ("float32", "float32", "little"), ("float32", "bfloat16", "little"), ("float32", "float32", "big"),
            ("uint8", "uint8", "little"),
        ])  # fmt: skip
        nbytes = numel * np.dtype(dtype).itemsize
        offset = next_one[path] if chosen.random() < 0.8 else 4 * chosen.randrange(SOURCE_NBYTES // 4)
        offset += chosen.choice([0, 0, 0, 4, 64, 20_000])
        if offset + nbytes > SOURCE_NBYTES or offset % RECORD_NBYTES + nbytes > RECORD_NBYTES:
            next_one[path] = (offset // RECORD_NBYTES + 1) * RECORD_NBYTES % SOURCE_NBYTES
            continue
        next_one[path] = offset + nbytes
        if chosen.random() < 0.2:
            literal = bytes(chosen.randrange(1, 9))
            file.literals.append(Literal(len(expected), literal))
            expected += literal
        slot = slot_of(in_file(path, (numel,), dtype, offset, byteorder=order))
        file.holes.append(hole_of(slot, len(expected), target))
        data = np.frombuffer(content[path][offset : offset + nbytes], dtype)
        values = cast(data.byteswap() if order == "big" else data, target).tobytes()
        start = len(expected)
        expected += values
        crc = crc32(values).to_bytes(4, "little")
        file.checksums.append(Checksum(start, len(expected), (len(expected),)))
        expected += crc
    file.nbytes = len(expected)
    return file, expected, sums


@pytest.mark.parametrize(("seed", "memory"), each(range(4), [1, 1 << 20, 64 << 20]))
def test_small_pieces_from_anywhere_arrive(seed, memory):
    file, expected, sums = scattered(seed)
    checked = write(plan([file]), [Path("t")], memory=memory, checks=Checks(sums))
    assert Path("t").read_bytes() == expected
    assert checked.records > 0


def test_small_piece_of_a_damaged_record_is_refused():
    file, _, sums = scattered(0)
    data = bytearray(Path("b").read_bytes())
    data[RECORD_NBYTES + 50] ^= 1
    Path("b").write_bytes(data)
    with refusing(DamagedFileError, "changed since it was written"):
        write(plan([file]), [Path("t")], checks=Checks(sums))


def neighbours(path: str, count: int, numel: int, *, target: str = "float32") -> TargetFile:
    """Return a file of tensors that lie end to end in another, and in it."""
    data = np.random.default_rng(0).standard_normal(count * numel).astype("<f4")
    Path(path).write_bytes(data.tobytes())
    size = 2 if target == "bfloat16" else 4
    slots = [slot_of(in_file(path, (numel,), at=4 * numel * i)) for i in range(count)]
    return file_of(*(hole_of(slot, size * numel * i, target) for i, slot in enumerate(slots)))


@pytest.mark.parametrize("target", ["float32", "bfloat16"])
def test_neighbours_are_read_and_written_in_few_calls(target):
    file = neighbours("s", 2000, 100, target=target)
    with ExitStack() as stack:
        read, *written = (
            stack.enter_context(mock.patch.object(os, name, wraps=getattr(os, name)))
            for name in ("preadv", "pwritev", "pwrite")
        )
        write(plan([file]), [Path("t")])
    found = np.frombuffer(Path("t").read_bytes(), f"u{2 if target == 'bfloat16' else 4}")
    values = cast(np.frombuffer(Path("s").read_bytes(), "<f4"), target)
    assert np.array_equal(found, values.view(found.dtype))
    assert read.call_count < 20
    assert sum(one.call_count for one in written) < 20


def test_disk_that_takes_a_part_of_a_write_gets_the_rest(monkeypatch):
    file = neighbours("s", 500, 100)
    monkeypatch.setattr(os, "pwritev", lambda target, views, offset: os.pwrite(target, b"".join(views)[:777], offset))
    write(plan([file]), [Path("t")])
    assert Path("t").read_bytes() == Path("s").read_bytes()


# --- cloned


@pytest.mark.parametrize("offset", [0, 4, 4096, 5000])
@pytest.mark.parametrize("nbytes", [0, 4095, LEAST_NBYTES, LEAST_NBYTES + 4096, 10**6 + 1])
def test_what_is_cloned_are_blocks_of_both_files(offset, nbytes):
    for target in (offset, offset + 3 * BLOCK_NBYTES, offset + 64):
        low, high = cloneable(offset, target, nbytes)
        if (target - offset) % BLOCK_NBYTES:
            assert low == high
        if low < high:
            assert low < BLOCK_NBYTES
            assert nbytes - high < BLOCK_NBYTES
            assert {(one + at) % BLOCK_NBYTES for one in (low, high) for at in (offset, target)} == {0}


def as_if(source: int, offset: int, target: int, target_offset: int, nbytes: int) -> tuple[int, int]:
    """Do what a file system that clones does, as far as others can see: whole blocks arrive, unread by the process."""
    low, high = cloneable(offset, target_offset, nbytes)
    os.pwrite(target, os.pread(source, high - low, offset + low), target_offset + low)
    return low, high


@pytest.mark.parametrize("system", ["this one", "one that clones"])
@pytest.mark.parametrize("shift", [0, 64])
@pytest.mark.parametrize("sums", [False, True])
def test_cloned_and_copied_bytes_are_the_same(sums, shift, system, monkeypatch):
    if system == "one that clones":
        monkeypatch.setattr(move, "clone", as_if)
    before, nbytes = 5000, 6_000_000
    data = bytes([7]) * before + np.random.default_rng(0).integers(0, 256, nbytes, np.uint8).tobytes()
    Path("s").write_bytes(data)
    start = before % BLOCK_NBYTES + shift
    file = TargetFile("t", start + nbytes + 4, [Literal(0, bytes(start))])
    file.holes.append(bytes_of("s", before, nbytes, at=start))
    if sums:
        file.checksums.append(Checksum(start, start + nbytes, (start + nbytes,)))
    write(plan([file]), [Path("t")])
    crc = crc32(data[before:]).to_bytes(4, "little") if sums else bytes(4)
    assert Path("t").read_bytes() == bytes(start) + data[before:] + crc


def test_damage_of_what_would_be_cloned_is_seen(monkeypatch):
    monkeypatch.setattr(move, "clone", as_if)
    Path("s").write_bytes(bytes(1 << 20))
    made = plan([file_of(bytes_of("s", 0, 1 << 20))])
    with pytest.raises(DamagedFileError):
        write(made, [Path("t")], checks=Checks([Sum("r", "s", 0, 1 << 20, 1)]))


def test_file_system_clones_or_leaves_the_target_alone():
    data = os.urandom(5 * LEAST_NBYTES)
    Path("s").write_bytes(data)
    Path("t").write_bytes(bytes(len(data)))
    with Path("s").open("rb") as source, Path("t").open("r+b") as target:
        low, high = clone(source.fileno(), 100, target.fileno(), 100, len(data) - 100)
    expected = bytes(100 + low) + data[100 + low : 100 + high]
    assert Path("t").read_bytes() == expected + bytes(len(data) - len(expected))
