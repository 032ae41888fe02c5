"""A file that is planned and never written reads as the file that would have been written."""

from __future__ import annotations

import io
import random
import shutil
from pathlib import Path

import pytest

from tests.cli.console import FIXTURES
from tests.refusals import refusing
from zckpt.engine.plan import plan
from zckpt.engine.read import VirtualFile, check_reads
from zckpt.engine.targets import TargetFile
from zckpt.engine.write import write
from zckpt.errors import DamagedFileError
from zckpt.formats import open_checkpoint
from zckpt.formats.deepspeed.decide import decide
from zckpt.formats.deepspeed.options import RecutOptions
from zckpt.formats.deepspeed.writer import target_files


def laid_out(source: Path, world_size: int, stage: int) -> list[TargetFile]:
    options = RecutOptions(world_size=world_size, stage=stage)
    return list(target_files(decide(open_checkpoint(source), options), ""))


def written(file: TargetFile) -> bytearray:
    """The bytes that a file has on disk, but for the checksums, which a file that is not written cannot have."""
    write(plan([file]), [Path("file")])
    data = bytearray(Path("file").read_bytes())
    for checksum in file.checksums:
        for offset in checksum.offsets:
            data[offset : offset + 4] = bytes(4)
    return data


@pytest.mark.parametrize(
    ("name", "world_size", "stage"),
    [("s2_bf16_dp4", 3, 2), ("s3_bf16_dp2", 3, 3), ("s1_fp32_dp3", 2, 3), ("s2_bf16_dp2_palign", 1, 1)],
)
def test_it_has_the_bytes_that_would_be_written(name, world_size, stage):
    dice = random.Random(name)
    for file in laid_out(FIXTURES / name, world_size, stage):
        expected = written(file)
        virtual = VirtualFile(file)
        check_reads(file.holes)
        assert virtual.read() == expected, file.name
        assert virtual.seek(0, io.SEEK_END) == len(expected)
        assert virtual.read(10) == b""
        for _ in range(20):  # from within elements and shares, too
            at, count = dice.randrange(len(expected) + 5), dice.randrange(200)
            assert virtual.seek(at) == virtual.tell() == at
            assert virtual.read(count) == expected[at : at + count], (file.name, at, count)


def test_what_it_reads_is_counted():
    file = laid_out(FIXTURES / "s2_bf16_dp4", 2, 2)[-1]
    virtual = VirtualFile(file)
    virtual.read()
    assert virtual.read_nbytes == sum(hole.nbytes for hole in file.holes) > 0


def test_file_that_is_too_short_is_found_before_anything_is_read():
    source = Path(shutil.copytree(FIXTURES / "s2_bf16_dp4", "run"))
    files = laid_out(source, 3, 2)
    (shard,) = source.glob("global_step5/*rank_3_mp*optim*")
    shard.write_bytes(shard.read_bytes()[:3000])
    with refusing(DamagedFileError, "rank_3"):
        check_reads(hole for file in files for hole in file.holes)
