"""What is copied is held against the checksums of its source: in parts, in any order, before a target has its name."""

from __future__ import annotations

import random
import shutil
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from zlib import crc32

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import zckpt
from tests.cli.console import FIXTURES, printed, refused, succeeded
from tests.damage import flip
from tests.folders import contents, names_in
from tests.pairwise import each, some
from tests.plans import file_of, hole_of, in_file, slot_of
from tests.refusals import refusing
from zckpt.codes import CHECKSUM
from zckpt.engine.checking import REST_NBYTES, Checks, Seen, Sum, WatchedSources
from zckpt.engine.plan import plan
from zckpt.engine.read import read_all
from zckpt.engine.workers import running_on
from zckpt.errors import DamagedFileError, ZckptError
from zckpt.formats import open_checkpoint
from zckpt.formats.survey import source_checks
from zckpt.operations.target import write_target
from zckpt.operations.verify import verify
from zckpt.state import WEIGHT, Checkpoint
from zckpt.torchfile import read_torchfile

SOURCES = ["s2_bf16_dp2_client", "s3_bf16_dp2", "other/plain_adamw/ckpt.pt", "other/dcp_fsdp2_dp2/ckpt", "native"]


@st.composite
def parts_of(draw: st.DrawFn) -> tuple[bytes, list[tuple[int, int, bool]], int]:
    """Draw the bytes of a record, ranges of it that are read, summed or not, and the byte that is flipped, if any."""
    data = draw(st.binary(min_size=1, max_size=60))
    places = st.integers(0, len(data)).flatmap(lambda at: st.tuples(st.just(at), st.integers(at, len(data))))
    ranges = draw(st.lists(st.tuples(places, st.booleans()), max_size=12))
    return data, [(low, high, summed) for (low, high), summed in ranges], draw(st.integers(-1, len(data) - 1))


@given(drawn=parts_of())
def test_parts_in_any_order_that_may_overlap_are_put_together(drawn, tmp_path_factory):
    data, ranges, flipped = drawn
    there = bytes(byte ^ (at == flipped) for at, byte in enumerate(data))
    path = tmp_path_factory.mktemp("record") / "x"
    path.write_bytes(b"before" + there + b"after")
    checks = Checks([Sum("record", str(path), 6, len(data), crc32(data)), Sum("next", str(path), 60000, 5, 1)])
    for low, high, summed in ranges:
        checks.add([Seen(str(path), 6 + low, high - low, crc32(there[low:high]) if summed else None)])
    if not any(high > low for low, high, _ in ranges):
        assert checks.finish().records == 0
    elif flipped >= 0:
        with refusing(DamagedFileError, "record") as caught:
            checks.finish()
        assert caught.value.code == CHECKSUM
    else:
        checked = checks.finish()
        assert (checked.records, checked.nbytes) == (1, len(data))


def test_what_was_seen_end_to_end_is_kept_as_one():
    data = bytes(range(200)) * 3
    checks = Checks([Sum("record", "x", 0, 700, 0)])
    for at in (*range(0, 600, 12), *range(6, 600, 12)):
        checks.add([Seen("x", at, 6, crc32(data[at : at + 6]))] * 2)
    ((_, seen),) = checks.hand_over()
    assert len(seen) < 80
    checks.add(seen)
    checks.add(Seen("x", at, 6, crc32(data[at : at + 6])) for at in range(0, 600, 6))
    ((_, seen),) = checks.hand_over()
    assert seen[0] == Seen("x", 0, 600, crc32(data))


def big(path: Path, *, pad: int = 0) -> Path:
    """Write a file of three records, of which one is strided in its tensor and one has `pad` elements of no tensor."""
    torch.manual_seed(0)
    tensors = {"w": torch.randn(700, 1000), "t": torch.randn(512, 600).t(), "p": torch.randn(300_000 + pad)[:300_000]}
    torch.save(tensors, path)
    return path


def in_record(path: Path, key: str) -> int:
    """Return a byte in the middle of a storage."""
    storage = read_torchfile(path).storages[key]
    return storage.offset + storage.nbytes // 2


@pytest.mark.parametrize(("dtype", "key", "memory"), each(["keep", "bfloat16"], ["0", "1", "2"], [64_000_000, 1]))
def test_damage_is_found_in_any_copy(dtype, key, memory):
    """Bytes are summed as they are stored, whether they are moved as they are, cast or put into another order."""
    source, target = big("x.pt"), Path("model.safetensors")
    done = zckpt.consolidate(source, target, dtype=dtype, memory=memory)
    assert done.checksummed > 4 * 1_300_000
    flip(source, in_record(source, key), 6)
    target.unlink()
    with refusing(DamagedFileError, f"data/{key}: changed since it was written: expected CRC-32 ") as caught:
        zckpt.consolidate(source, target, dtype=dtype, memory=memory)
    assert caught.value.path == str(source)
    assert names_in() == ["x.pt"]
    zckpt.consolidate(source, target, dtype=dtype, memory=memory, checksums=False)
    assert target.is_file()


@pytest.mark.parametrize("pad", [1000, REST_NBYTES // 2])
def test_a_record_that_is_copied_in_part_is_checked_if_the_rest_is_small(pad):
    source = big("x.pt", pad=pad)
    is_small = pad * 4 <= REST_NBYTES
    storage = read_torchfile(source).storages["2"]
    flip(source, storage.offset + storage.nbytes - 2)  # of no tensor
    if is_small:
        with refusing(DamagedFileError, "data/2"):
            zckpt.consolidate(source, "model.safetensors")
    else:
        done = zckpt.consolidate(source, "model.safetensors")
        assert done.checksummed < done.read_nbytes


def test_copies_by_other_processes_are_checked():
    source = big("x.pt")
    slot = open_checkpoint(source).parameters["w"].slots[WEIGHT]
    made = plan([file_of(hole_of(slot), name="out")])
    with ProcessPoolExecutor(2) as pool:
        checks = source_checks(open_checkpoint(source), made)
        with running_on(pool):
            assert write_target(made, "out", checks=checks).nbytes >= slot.nbytes
        flip(source, in_record(source, "0"))
        checks = source_checks(open_checkpoint(source), made)
        with running_on(pool), pytest.raises(DamagedFileError):
            write_target(made, "other", checks=checks)
    assert not Path("other").exists()


def test_reads_into_memory_can_be_checked():
    source = big("x.pt")
    checkpoint = open_checkpoint(source)
    slots = [checkpoint.parameters[name].slots[WEIGHT] for name in ("w", "t")]
    reads = [(hole_of(slot), memoryview(bytearray(slot.nbytes))) for slot in slots]
    for damaged in (False, True):
        checks = source_checks(checkpoint)
        read_all(reads, checks=checks)
        if damaged:
            with refusing(DamagedFileError, "data/1"):
                checks.finish()
        else:
            assert checks.finish().nbytes >= sum(hole.nbytes for hole, _ in reads)
        flip(source, in_record(source, "1"))


def test_files_that_are_copied_as_they_are_are_checked():
    """A copy of a whole file runs over its records."""
    source = big("x.pt")
    made = plan([file_of(hole_of(slot_of(in_file(source, (Path(source).stat().st_size,), "uint8"))))])
    write_target(made, "copy.pt", checks=source_checks(Checkpoint("", "torch"), made))
    assert Path("copy.pt").read_bytes() == Path(source).read_bytes()
    flip(source, in_record(source, "1"))
    with refusing(DamagedFileError, "data/1"):
        write_target(made, "other.pt", checks=source_checks(Checkpoint("", "torch"), made))


def test_sources_that_are_not_watched_keep_nothing():
    Path("x").write_bytes(b"abc")
    with WatchedSources(frozenset()) as sources:
        sources.read("x", 0, memoryview(bytearray(3)))
        assert sources.seen == []


def test_the_pickle_is_checked_whenever_a_file_is_opened():
    source = Path("x.pt")
    torch.save({"weight": torch.ones(3)}, source)
    flip(source, source.read_bytes().index(b"weight"))
    with refusing(DamagedFileError, r"data\.pkl is damaged") as caught:
        zckpt.open(source)
    assert caught.value.code == CHECKSUM
    assert not verify(source).sound


def test_a_file_that_torch_wrote_without_checksums_is_sound():
    torch.serialization.set_crc32_options(False)
    try:
        big("x.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    assert verify("x.pt", deep=True).sound
    assert zckpt.consolidate("x.pt", "model.safetensors").checksummed == 0


def test_data_that_were_written_where_torch_left_room_are_sound():
    """It states no checksum of them, and those of everything else."""
    tensors = {"a": torch.rand(100), "b": torch.rand(7)}
    with torch.serialization.skip_data():
        torch.save(tensors, "x.pt")
    opened = zckpt.open("x.pt")
    with Path("x.pt").open("r+b") as file:
        for name, one in tensors.items():
            file.seek(opened.parameters[name].slots["weight"].spans[0].offset)
            file.write(one.numpy().tobytes())
    assert verify("x.pt", deep=True).findings == []
    zckpt.consolidate("x.pt", "model.safetensors")
    assert all(torch.equal(opened.read(name), one) for name, one in tensors.items())
    flip("x.pt", Path("x.pt").read_bytes().index(b"little"))
    assert not verify("x.pt", deep=True).sound


def test_the_command_says_what_was_checked_and_can_salvage():
    source, target = big("x.pt"), Path("model.safetensors")
    assert "of the source agree with the checksums in its files" in succeeded("consolidate", source, target).stderr
    flip(source, in_record(source, "0"))
    refused(3, "consolidate", source, target, "--overwrite", words=("--no-checksums",))
    assert printed("consolidate", source, target, "--overwrite", "--no-checksums")["checksummed_nbytes"] == 0


@pytest.mark.parametrize("flips", some([10], [200]))
def test_no_single_flipped_bit_gives_a_wrong_target(flips, tmp_path):
    """A flip is refused, or it is in bytes that the target does not depend on."""
    zckpt.convert(FIXTURES / "s2_bf16_dp3", "native", to="zckpt", world_size=2)
    verbs = {
        "consolidate": lambda source, target: zckpt.consolidate(source, target / "model.safetensors", slots="all"),
        "zckpt": lambda source, target: zckpt.convert(source, target / "t", to="zckpt"),
        "consolidated": lambda source, target: zckpt.convert(source, target / "t", to="consolidated"),
    }
    chance = random.Random(20)
    noticed = 0
    for number in range(flips):
        name, verb = SOURCES[number % len(SOURCES)], chance.choice(list(verbs))
        source = tmp_path / "source" / Path(name).name
        if not source.exists():
            origin = Path(name) if name == "native" else FIXTURES / name
            copy = shutil.copytree if origin.is_dir() else shutil.copyfile
            source.parent.mkdir(exist_ok=True)
            copy(origin, source)
        clean = Path(f"{source.name}-{verb}")
        if not clean.exists():
            clean.mkdir()
            verbs[verb](source, clean)
        files = [path for path in [source, *source.rglob("*")] if path.is_file() and path.name != ".metadata"]
        path = chance.choices(files, [path.stat().st_size for path in files])[0]
        at, bit = chance.randrange(path.stat().st_size), chance.randrange(8)
        target = Path("target")
        target.mkdir()
        flip(path, at, bit)
        try:
            verbs[verb](source, target)
            assert contents(target) == contents(clean), (path, at, bit)
        except ZckptError:
            noticed += 1
        flip(path, at, bit)
        shutil.rmtree(target)
    assert noticed > flips // 3
