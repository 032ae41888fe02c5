"""Reads and writes past the page cache: the same bytes, whatever begins where, and where a file system has none."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import zlib
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import zckpt
from tests.cli.console import FIXTURES
from tests.plans import hole_of, in_file, slot_of, write_directory
from tests.refusals import refusing
from zckpt.engine.checking import Checks, Sum
from zckpt.engine.plan import Plan, plan
from zckpt.engine.targets import Checksum, Literal, TargetFile
from zckpt.engine.workers import running_on
from zckpt.errors import DamagedFileError
from zckpt.state import Extent, Span
from zckpt.storage import files as storage_files
from zckpt.storage.disk import OpenTarget
from zckpt.storage.files import LEAST_DIRECT_NBYTES, PAGE_NBYTES, Sources, aligned

NBYTES = 3 << 20

DIRECT = bool(getattr(os, "O_DIRECT", 0))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("direct") / "s"
    path.write_bytes(np.random.default_rng(1).bytes(NBYTES + 77))
    return path


@given(offset=st.integers(0, NBYTES), nbytes=st.integers(1, 1 << 18))
def test_a_window_has_the_bytes_of_its_place(source, offset, nbytes):
    with Sources(1 << 18) as reads:
        if offset + nbytes > NBYTES + 77:
            with refusing(DamagedFileError, "ends too early"):
                reads.window(str(source), offset, memoryview(bytearray(NBYTES + LEAST_DIRECT_NBYTES)))
            return
        buffer = memoryview(bytearray(nbytes))
        found, phase = reads.window(str(source), offset, buffer)
        assert found == source.read_bytes()[offset : offset + nbytes]
        assert phase in ((None,) if nbytes < LEAST_DIRECT_NBYTES else (None, offset % PAGE_NBYTES))


@given(offset=st.integers(0, 3 * PAGE_NBYTES), nbytes=st.integers(1, 1 << 19), phase=st.none() | st.integers(0, 4095))
def test_what_is_written_directly_is_written_there_and_nowhere_else(tmp_path_factory, offset, nbytes, phase):
    path = tmp_path_factory.mktemp("t") / "t"
    path.write_bytes(b"\xaa" * (1 << 20))
    data = np.random.default_rng(nbytes).bytes(nbytes)
    memory = aligned(nbytes + PAGE_NBYTES)[phase or 0 :][:nbytes]
    memory[:] = data
    with path.open("r+b") as file:
        target = OpenTarget(file.fileno(), str(path), 1 << 17, is_direct=True)
        target.write(memory, offset, phase)
        target.close()
    assert path.read_bytes() == b"\xaa" * offset + data + b"\xaa" * ((1 << 20) - offset - nbytes)


@pytest.fixture(scope="module")
def made(source) -> Plan:
    """What stays as it is, at good and bad offsets; what is cast; small tensors; slices; and checksums of it."""
    first, shifted = (slot_of(in_file(source, (NBYTES // 8,), at=at)) for at in (64, 68))
    slices = [Span(Extent((0, 4 * i), (8192, 4), 0, 32768), str(source), 131072 * i, "float32") for i in range(4)]
    small = [slot_of(in_file(source, (900,), at=3600 * i)) for i in range(9)]
    holes, at = [], 4160
    for slot, dtype in [(first, None), (shifted, None), (first, "bfloat16"), (slot_of(*slices, shape=(8192, 16)), None),
                        *((one, None) for one in small)]:  # fmt: skip
        holes.append(hole_of(slot, at, dtype))
        at += holes[-1].nbytes + 4
    checksums = [Checksum(holes[0].offset, holes[1].offset + holes[1].nbytes, (0,))]
    return plan([TargetFile("x", at, [Literal(4, b"head")], holes, checksums)])


@pytest.fixture(scope="module")
def expected(made, tmp_path_factory) -> bytes:
    """What is written through the page cache."""
    folder = tmp_path_factory.mktemp("expected")
    write_directory(made, folder / "t")
    return (folder / "t/x").read_bytes()


def test_targets_are_the_same_bit_by_bit(source, made, expected):
    sums = [Sum("s", str(source), 64, NBYTES // 2, zlib.crc32(source.read_bytes()[64 : 64 + NBYTES // 2]))]
    for memory in (1, 300_000, 64 << 20):
        checked = write_directory(made, "b", direct=True, memory=memory, overwrite=True, checks=Checks(sums))
        assert checked.nbytes == NBYTES // 2
        assert Path("b/x").read_bytes() == expected


def test_a_file_system_without_it_is_read_and_written_as_ever_and_named(made, expected, tmp_path, monkeypatch):
    usual = os.open

    def refused(path, flags, *rest, **more):
        if flags & storage_files._O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return usual(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", refused)
    write_directory(made, "b", direct=True)
    assert Path("b/x").read_bytes() == expected
    done = zckpt.consolidate(FIXTURES / "s2_bf16_dp2", tmp_path / "m.safetensors", direct=True)
    said = [note for note in done.notes if "page cache" in note]
    assert len(said) == 2
    assert "is read through" in said[0]
    assert f"{tmp_path} is written through" in said[1]


@pytest.mark.skipif(not DIRECT, reason="a system without O_DIRECT")
def test_reads_and_writes_that_are_refused_later_go_on_through_the_cache(made, expected, monkeypatch):
    def unless_direct(function):
        def call(descriptor, *rest):
            if is_direct(descriptor):
                raise OSError(errno.EINVAL, "Invalid argument")
            return function(descriptor, *rest)

        return call

    for name in ("preadv", "pwrite"):
        monkeypatch.setattr(os, name, unless_direct(getattr(os, name)))
    write_directory(made, "b", direct=True)
    assert Path("b/x").read_bytes() == expected


def is_direct(descriptor: int) -> bool:
    return bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two models, one element of which differs; their tensors lie a few bytes behind pages."""
    folder, w = tmp_path_factory.mktemp("pair"), torch.randn(311, 1031, generator=torch.Generator().manual_seed(3))
    paths = [folder / name for name in ("a.pt", "b.pt")]
    for path in paths:
        torch.save({"w": w, "half": w.bfloat16(), "tiny": torch.ones(1)}, path)
        w[300, 1000] += 1
    return paths


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes that were read past the page cache, one number for each read."""
    found: list[int] = []
    usual = os.preadv

    def call(descriptor, *rest):
        count = usual(descriptor, *rest)
        found.extend([count] if is_direct(descriptor) else [])
        return count

    monkeypatch.setattr(os, "preadv", call)
    return found


@pytest.mark.skipif(not DIRECT, reason="a system without O_DIRECT")
@pytest.mark.parametrize("memory", [1, 256 << 20])  # of blocks of one size: sums of floats are of blocks
def test_verbs_that_read_find_the_same(pair, counted, memory):
    a, b = pair
    cut = FIXTURES / "s2_bf16_dp4"
    digests = Path("digests")
    digests.write_text(json.dumps(zckpt.fingerprint(a).as_dict()))
    verbs = [
        lambda **how: zckpt.fingerprint(a, **how).as_dict(),
        lambda **how: zckpt.diff(a, b, **how).as_dict(),
        lambda **how: zckpt.series([a, b], **how).as_dict(),
        lambda **how: zckpt.verify(a, deep=True, **how).as_dict(),
        lambda **how: zckpt.verify(b, against=digests, **how).as_dict(),
        lambda **how: (zckpt.verify(cut, deep=True, **how).as_dict(), zckpt.fingerprint(cut, **how).as_dict()),
    ]
    for verb in verbs:
        usual, before = verb(memory=memory), len(counted)
        assert verb(memory=memory, direct=True) == usual
        assert memory == 1 or verb is verbs[-1] or len(counted) > before  # less than 64 KB at once goes through it


def test_what_is_no_sample_is_needed_for_it(pair):
    with refusing(zckpt.UsageError, "--direct does not apply to a sample"):
        zckpt.verify(pair[0], direct=True)


@pytest.mark.skipif(not DIRECT, reason="a system without O_DIRECT")
def test_a_file_that_ends_early_is_named(pair, tmp_path, counted):
    short = Path(shutil.copy(pair[0], tmp_path))
    found = zckpt.open(short)
    os.truncate(short, short.stat().st_size // 2)
    with refusing(DamagedFileError, "ends too early"):
        zckpt.fingerprint(found, direct=True)
    assert counted


@pytest.mark.nightly
def test_other_processes_do_it_too(made, expected):
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool, running_on(pool):
        write_directory(made, "b", direct=True)
    assert Path("b/x").read_bytes() == expected
