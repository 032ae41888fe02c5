"""A pack moves, in one go, what one copy for each share of each parameter would."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.state.test_spans import flat_cut, shard_cut
from zckpt.engine import together
from zckpt.engine.plan import fill, plan
from zckpt.engine.read import VirtualFile
from zckpt.engine.targets import Hole, Lazily, TargetFile
from zckpt.engine.together import PackedSlot
from zckpt.engine.write import write
from zckpt.errors import LayoutError
from zckpt.state import CutFiles, CutSpans, Extent, Slot
from zckpt.state.cuts import Cuts
from zckpt.state.partition import flat_starts, shard_numel, shard_share

NUMELS = st.lists(st.integers(1, 30), min_size=1, max_size=9)
WORLDS = st.integers(1, 9)


def shards(numels: list[int], world: int) -> list[CutSpans]:
    """Where parameters lie that ZeRO-3 cuts, in files that need not be there."""
    return [rule for rule, _ in shard_cut([(n,) for n in numels], world)]


def source(directory: Path, numels: list[int], world: int, *, flat: bool) -> list[CutSpans]:
    """Write parameters as ZeRO-1/2 or 3 cuts them, each element another number; return where they lie."""
    made = (flat_cut if flat else shard_cut)([(n,) for n in numels], world, folder=directory)
    content = {path: np.full(sum(numels) + 250 * world, 2**32 - 1, np.uint32) for path in made[0][0].files.paths}
    for number, (_, spans) in enumerate(made, 1):
        for one in spans:
            at, start, count = one.offset // 4, one.extent.start, one.extent.numel
            content[one.path][at : at + count] = np.arange(start, start + count) + 1000 * number
    for path, data in content.items():
        data.tofile(path)
    return [rule for rule, _ in made]


def row(spans: list[CutSpans], world: int) -> PackedSlot:
    held = [shard_numel(one.numel, world) for one in spans]
    return PackedSlot("exp_avg", spans[0].files, Cuts(spans), flat_starts(held)[:-1], held)


@pytest.mark.parametrize("flat", [False, True])
@given(numels=NUMELS, old=WORLDS, new=WORLDS, most=st.sampled_from([0, 8, 1 << 14]), gap=st.sampled_from([0, 8, 999]))
def test_a_target_has_what_its_ranks_shares_are(tmp_path_factory, flat, numels, old, new, most, gap):
    directory = tmp_path_factory.mktemp("packs")
    spans = source(directory, numels, old, flat=flat)
    made = row(spans, new)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(together, "MOST_NBYTES", most)
        patch.setattr(together, "GAP_NBYTES", gap)

        def files(rank):
            one = made.pack(rank)
            return TargetFile(f"t{rank}", one.nbytes, packs=[one])

        planned = plan(Lazily(lambda: map(files, range(new)), new))
        paths = [directory / name for name in planned.names]
        write(planned, paths)
        for rank, path in enumerate(paths):  # in larger pieces, over memory that is not zero
            found = bytearray(b"\xff" * path.stat().st_size)
            assert VirtualFile(files(rank)).readinto(found) == len(found)
            assert found == path.read_bytes()
    assert planned.copy_nbytes == planned.read_nbytes == 4 * sum(numels)
    for rank, path in enumerate(paths):
        expected: list[int] = []
        for i, n in enumerate(numels):
            start, count = shard_share(n, new, rank)
            expected += [1000 * (i + 1) + e for e in range(start, start + count)]
            expected += [0] * (shard_numel(n, new) - count)
        assert np.frombuffer(path.read_bytes(), np.uint32).tolist() == expected


@given(numels=NUMELS, old=WORLDS, new=WORLDS)
def test_a_pack_names_the_files_that_copies_would_read(numels, old, new):
    spans = shards(numels, old)
    for rank in range(new):
        copies = []
        for one in spans:
            extent = Extent.flat(one.shape, *shard_share(one.numel, new, rank))
            copies += fill(Hole(0, "x", Slot("x", "float32", one.shape, one), extent, "float32"))
        pack = row(spans, new).pack(rank)
        assert pack.paths() >= {copy.sources[0].path for copy in copies}
        assert pack.moved_nbytes == sum(copy.nbytes for copy in copies)


def test_shares_are_sent_once_for_all_ranks():
    made = row(shards([*range(1, 1001)], 4), 300)
    some = [replace(made.pack(rank), start=8 * rank) for rank in range(300)]
    data = pickle.dumps(some)
    assert len(data) < 6 * 8 * 1000 + 300 * 100
    for one, again in zip(some, pickle.loads(data), strict=True):
        for name in ("offset", "low", "high", "moved_nbytes"):
            assert getattr(one, name) == getattr(again, name)
        assert one.paths() == again.paths()


@pytest.mark.parametrize("position", [[0, 5], [-1, 6]])  # over another, outside of the hole
def test_shares_that_do_not_fit_are_refused(position):
    files = CutFiles(("a",), (0,), "float32")
    cuts = Cuts([CutSpans(files, (6,), 0, 6), CutSpans(files, (4,), 0, 4, 6)])
    with pytest.raises(LayoutError):
        PackedSlot("x", files, cuts, position, [6, 4])
