"""What a run will take is known before it: files, reads, memory; what cannot fit is refused, and nothing is written."""

from __future__ import annotations

import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import zckpt
import zckpt.engine.plan as plans
import zckpt.formats.deepspeed.writer as documents
from tests.cli.console import FIXTURES, environment, printed, refused, succeeded
from tests.folders import names_in, snapshot
from tests.refusals import refusing
from zckpt.engine.plan import Copy, FilePlan, Fill, Strided
from zckpt.engine.targets import Hole, TargetFile
from zckpt.operations.foresight import Reads, directories, note_reads
from zckpt.state import ZEROS, Extent, Slot
from zckpt.storage import room as rooms
from zckpt.storage.room import Room

SOURCE = FIXTURES / "s2_bf16_dp2"
ADAPTER = Path(__file__).parent / "adapters/of_s2_bf16_dp2"
FIXTURE = "fixtures/s2_bf16_dp2"
VERBS = [
    f"consolidate {FIXTURE} out.safetensors",
    f"consolidate {FIXTURE} out.pt --slots all",
    f"consolidate {FIXTURE} out --max-shard-size 2kB",
    f"reshard {FIXTURE} out --world-size 3",
    f"convert {FIXTURE} out --to universal",
    f"convert {FIXTURE} out --to zckpt",
    f"convert {FIXTURE} out --to dcp",
    f"strip {FIXTURE} out --padding",
    f"average {FIXTURE} {FIXTURE} --target out.safetensors",
    f"merge-adapter {FIXTURE} {ADAPTER} out.safetensors",
]


def foreseen(command: str) -> dict[str, Any]:
    found = printed(command, "--dry-run")["foresight"]
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize("command", VERBS, ids=lambda command: command.partition(" ")[0])
def test_a_dry_run_says_what_the_run_makes(command):
    said = foreseen(command)
    assert names_in() == []
    done = printed(command, "-q")
    assert done["foresight"] is None
    made = snapshot()
    assert said["num_files"] == sum(one is not None for one in made.values())
    assert said["num_directories"] == sum(one is None for one in made.values())
    assert said["requested_nbytes"] > 0
    assert said["read_requests"] >= len(said["reads"]) > 0
    assert all(Path(path).is_file() for path in said["reads"])
    assert min(said["seconds"], said["read_nbytes_per_second"], said["write_nbytes_per_second"]) > 0
    assert 0 < said["buffers_nbytes"] <= done["memory_nbytes"]


def test_a_dry_run_tells_a_person():
    said = succeeded(f"reshard {FIXTURE} out --world-size 3 --dry-run").stdout
    for words in ("makes 5 files and 2 directories; ", " are free", "byte ranges of 3 files", "buffers may take 64 MB"):
        assert words in said
    assert "takes about " in said


def test_a_directory_that_is_to_be_made_has_the_room_of_the_one_that_it_is_made_in():
    said = foreseen(f"consolidate {FIXTURE} nowhere/further/m.safetensors")
    assert said["seconds"] > 0
    assert said["free_nbytes"] > 0
    assert names_in() == []


def test_where_a_file_system_does_not_say_no_time_is_told(monkeypatch):
    def silent(_: Path) -> Room:
        raise OSError

    monkeypatch.setattr(rooms, "room", silent)
    monkeypatch.setattr("zckpt.operations.foresight.room", silent)
    said = foreseen(f"consolidate {FIXTURE} m.safetensors")
    assert (said["seconds"], said["free_nbytes"], said["write_nbytes_per_second"]) == (None, None, None)


@pytest.mark.parametrize("options", ["", "--dry-run"])
def test_what_cannot_fit_is_refused(options, monkeypatch):
    command = f"convert {FIXTURE} out --to universal {options}"
    monkeypatch.setattr(rooms, "room", lambda _: Room(1 << 40, 20))
    refused(4, command, words=("no space for that many files: expected ", "inodes free, found 20"))
    monkeypatch.setattr(rooms, "room", lambda _: Room(20, None))
    refused(4, command, words=("not enough space: expected ", "bytes free, found 20; free some or write elsewhere"))
    assert names_in() == []


def test_a_target_that_is_replaced_needs_room_beside_it(monkeypatch):
    target = Path("m.safetensors")
    zckpt.consolidate(SOURCE, target)
    before = target.read_bytes()
    monkeypatch.setattr(rooms, "room", lambda _: Room(20, None))
    with refusing(zckpt.TargetError, "so both need space"):
        zckpt.consolidate(SOURCE, target, overwrite=True)
    assert target.read_bytes() == before


def test_directories_are_those_between_a_target_and_its_files():
    target = Path("/x/out")
    names = [target / "a", target / "b/c/d", target / "b/e", target / "f/g"]
    assert directories(names, target) == 4  # out, b, b/c, f


def reads_of(*copies: Copy) -> dict[str, Reads]:
    extent = Extent.whole((4,))
    hole = Hole(0, "x", Slot("x", "float32", (4,), ()), extent, "float32")
    found: defaultdict[str, Reads] = defaultdict(Reads)
    note_reads(found, FilePlan(TargetFile("t", 0), (Fill(hole, copies),)))
    return found


def copy(path: str, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> Copy:
    return Copy(shape, (Strided(path, offset, strides),), "float32", "float32", "little", 0, (4,) * len(shape))


def test_ranges_that_lie_end_to_end_are_one_request():
    found = reads_of(copy("a", 0, (10,), (4,)), copy("b", 0, (1,), (4,)), copy("a", 40, (5,), (4,)))
    assert {path: (one.requests, one.nbytes) for path, one in found.items()} == {"a": (1, 60), "b": (1, 4)}


def test_ranges_that_lie_far_apart_are_several():
    found = reads_of(copy("a", 1 << 30, (1,), (4,)), copy("a", 0, (1,), (4,)))["a"]
    assert (found.requests, found.nbytes, found.low, found.high) == (2, 8, 0, (1 << 30) + 4)


def test_rows_that_are_read_with_their_gaps_are_one_request_and_others_one_each():
    near, far = copy("a", 0, (8, 4), (24, 4)), copy("b", 0, (8, 4), (1 << 20, 4))
    found = reads_of(near, far)
    assert (found["a"].requests, found["a"].nbytes) == (1, 7 * 24 + 16)
    assert (found["b"].requests, found["b"].nbytes) == (8, 8 * 16)


def test_zeros_are_read_from_nowhere():
    assert reads_of(copy(ZEROS, 0, (8,), (0,))) == {}


@pytest.mark.parametrize("stage", [2, 3])
def test_a_dry_run_lays_each_file_out_once(monkeypatch, stage):
    laid: list[str] = []
    lazily = documents.Lazily

    def counted(lay_out, count):
        def noted():
            for file in lay_out():
                laid.append(file.name)
                yield file

        return lazily(noted, count)

    monkeypatch.setattr(documents, "Lazily", counted)
    monkeypatch.setattr(plans, "KEPT_NBYTES", 0)  # as of files that are too many to be kept
    done = zckpt.reshard(SOURCE, "out", world_size=3, stage=stage, dry_run=True)
    assert laid
    assert len(laid) == len(set(laid))
    assert done.foresight is not None
    assert done.foresight.reads


def test_what_overlaps_is_counted_once():
    one = Reads()
    one.add(0, 100)
    one.add(50, 20)
    one.add(90, 20)
    assert (one.requests, one.nbytes) == (1, 110)


LIMITED = """
import os, resource, sys
import ml_dtypes, numpy, xxhash, isal.isal_zlib
import zckpt.operations.convert, zckpt.operations.average, zckpt.operations.diff, zckpt.operations.verify
from zckpt.cli import main

os.cpu_count = lambda: 64
room, source = int(sys.argv[1]) << 20, sys.argv[2]
for command in (
    f"consolidate {source} half.safetensors --dtype bfloat16",
    f"convert {source} dcp --to dcp --verify",
    f"average {source} {source} --target mean.safetensors",
    f"diff {source} dcp",
    f"fingerprint {source}",
    f"verify {source} --deep",
):
    child = os.fork()
    if child == 0:
        mapped = int(open("/proc/self/statm").read().split()[0]) * os.sysconf("SC_PAGE_SIZE") + room
        resource.setrlimit(resource.RLIMIT_AS, (mapped, mapped))
        sys.argv = ["zckpt", *command.split()]
        main()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status:
        sys.exit(status)
"""
"""Runs verbs, on as many threads as there may be, with some megabytes of address space more than their libraries."""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """48 MB in tensors of 8 MB."""
    path = tmp_path_factory.mktemp("limited") / "model.safetensors"
    some = np.random.default_rng(0)
    save_file({f"layers.{n}.weight": some.random((2048, 1024), np.float32) for n in range(6)}, path)
    return path


def limited(mebibytes: int, source: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", LIMITED, str(mebibytes), source]
    return subprocess.run(command, capture_output=True, text=True, env=environment(), check=False)


@pytest.mark.skipif(sys.platform != "linux", reason="of Linux")
def test_verbs_live_with_less_address_space_than_the_budget_of_buffers(source):
    done = limited(48, source)
    assert done.returncode == 0, done.stderr
    zckpt.consolidate(source, "free.safetensors", dtype="bfloat16")
    assert Path("half.safetensors").read_bytes() == Path("free.safetensors").read_bytes()
    assert zckpt.diff(source, "mean.safetensors").equal


@pytest.mark.skipif(sys.platform != "linux", reason="of Linux")
def test_too_little_memory_is_one_line_and_nothing_is_written(source):
    done = limited(16, source)
    assert done.returncode == 2, done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert "not enough memory under RLIMIT_AS (ulimit -v): expected 26214400 free bytes" in done.stderr
    assert names_in() == []
