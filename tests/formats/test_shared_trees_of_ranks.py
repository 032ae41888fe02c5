"""Ranks whose files differ in the numbers of meshes share a tree: what is read is what each file by itself says."""

from __future__ import annotations

import os
import pickle
import shutil
import struct
import zlib
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import zckpt
from tests.damage import edit, patch
from tests.formats.test_fsdp_rank_files import FIXTURES, rank_of
from tests.pairwise import some
from zckpt.errors import SourceError
from zckpt.formats import alike_files, alike_patterns
from zckpt.formats.account import inventory, ranges, take_inventory
from zckpt.formats.alike_files import AlikeReader, glanced
from zckpt.formats.fsdp_rank_files import across
from zckpt.torchfile import Object, TorchFile, children, each, filled, plain, read_torchfile
from zckpt.torchfile.blanks import Blank, find_blanks, run_with_blanks

RANKS = 12
NAMES = [f"layer.{i}.weight" for i in range(12)]
ALONE = AlikeReader.read
"""Replaced where every file is to be read by itself."""


@pytest.fixture(params=["bytes", "pickles", "directories"])
def held(request, monkeypatch) -> Iterator[str]:
    """What files are held against each other by: see `test_alike_files`."""
    monkeypatch.setattr(alike_files, "FEWEST_RECORDS", 1)
    monkeypatch.setattr(alike_files, "ENOUGH_RECORDS", 1 << 30 if request.param == "pickles" else 0)
    with glanced() if request.param == "directories" else nullcontext():
        yield request.param


def save(path, rank, *, ranks=RANKS, sizes: tuple[int, ...] = (RANKS,), **changes) -> Path:
    """Save what a rank has of some matrices, of which the last ranks have fewer rows, as torch does."""
    cuts = [Replicate()] * (len(sizes) - 1) + [Shard(0)]
    content = {}
    with rank_of(rank, ranks):
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=tuple(f"d{at}" for at in range(len(sizes))))
        for number, name in enumerate(NAMES):
            whole = torch.arange(float((30 + number % 2) * 4)).reshape(-1, 4) + rank // sizes[-1] * 0
            at = rank % sizes[-1]
            local = (whole.chunk(sizes[-1])[at : at + 1] or (whole[:0],))[0].clone()
            content[name] = DTensor.from_local(local, mesh, cuts, run_check=False, shape=whole.shape, stride=(4, 1))
        torch.save({**content, **changes}, path)
    return path


OWN = ("_rank", "_coordinate_on_dim", "_dim_group_names")


def said(file: TorchFile) -> object:
    """Return all that a file is read as, with its own numbers in its tree."""
    meshes = [node for node in each(file.root, lambda node: (one for _, one in children(node)))
              if isinstance(node, Object) and node.qualified.endswith("DeviceMesh")]  # fmt: skip
    states = [node.state for node in meshes]
    for mesh in meshes:
        mesh.state = {key: filled(value, file.numbers) if key in OWN else value
                      for key, value in mesh.state.items()}  # type: ignore[union-attr]  # fmt: skip
    text = plain(file.root, limit=1 << 20)
    for mesh, state in zip(meshes, states, strict=True):
        mesh.state = state
    storages = list(file.storages.values())
    return text, storages, list(file.records), file.archive, file.byteorder, file.globals, file.nbytes


def outcome(read: Callable[[], TorchFile]) -> object:
    try:
        return said(read())
    except SourceError as error:
        return str(error)


@pytest.mark.parametrize("sizes", [(RANKS,), (3, 4)])
def test_a_file_of_another_rank_shares_the_tree_and_keeps_its_numbers(sizes, tmp_path, held):
    reader, trees = AlikeReader(blanks=True), []
    for rank in range(RANKS):
        path = save(tmp_path / f"model_world_size_{RANKS}_rank_{rank}.pt", rank, sizes=sizes)
        file = reader.read(path)
        assert said(file) == said(read_torchfile(path))
        trees.append(id(file.root))
        *groups, own, _, at = file.numbers if len(sizes) > 1 else (*file.numbers[:-1], 0, file.numbers[-1])
        assert (own, at) == (rank, rank % sizes[-1])
        assert all(isinstance(name, str) for name in groups)
    # 30 and 31 rows in twelve are three for each but the last two, in four eight for each but the last
    assert len(set(trees)) == (2 if len(sizes) > 1 else 3)


@pytest.mark.parametrize(
    "changes",
    [
        {NAMES[3]: torch.ones(3, 4)},
        {NAMES[3]: torch.ones(4, 3)},
        {"more": torch.ones(2)},
        {NAMES[0]: torch.ones(3, 4, dtype=torch.bfloat16)},
        {"step": 4},
    ],
)
def test_a_file_that_says_anything_else_is_read_by_itself(changes, tmp_path, held):
    reader = AlikeReader(blanks=True)
    first = reader.read(save(tmp_path / "model_world_size_12_rank_1.pt", 1, step=3))
    path = save(tmp_path / "model_world_size_12_rank_2.pt", 2, **{"step": 3, **changes})
    found = reader.read(path)
    assert found.root is not first.root
    assert said(found) == said(read_torchfile(path))


def with_pickle(data, change: Callable[[bytearray], None]) -> bytes:
    """Change the pickle of a file, whose headers then state its new CRC-32."""
    start = data.find(b"\x80\x02}")
    old = pickle_of(data)
    new = bytearray(old)
    change(new)
    assert len(new) == len(old)
    data[start : start + len(old)] = new
    before, after = (struct.pack("<L", zlib.crc32(one)) for one in (old, bytes(new)))
    return bytes(data).replace(before, after)


def pickle_of(data: bytes | bytearray) -> bytes:
    start = data.find(b"\x80\x02}")
    size = struct.unpack_from("<L", data, data.find(b"PK\1\2") + 24)[0]
    return bytes(data[start : start + size])


@pytest.mark.parametrize("step", some([4], [1]))
def test_each_byte_of_the_pickle_matters_as_it_does_to_a_file_alone(step, tmp_path, held):
    """A file whose pickle differs in any one byte is refused, or read, exactly as it is without the other."""
    path, reader = tmp_path / "model_world_size_12_rank_2.pt", AlikeReader(blanks=True)
    first = reader.read(save(tmp_path / "model_world_size_12_rank_1.pt", 1))
    data = save(path, 2).read_bytes()
    size = len(pickle_of(data))
    shared = 0
    places = find_blanks(pickle_of(data))
    own = {at for begin, _, end in places for at in range(begin, end)}
    assert own
    for at in {*own, *range(min(own) - 40, max(own) + 41, step), *range(0, size, 61 * step)}:
        for flip in (1, 0x80) if at in own or step == 1 else (1 << at % 8,):

            def change(new, at=at, flip=flip):
                new[at] ^= flip

            path.write_bytes(with_pickle(bytearray(data), change))
            assert outcome(lambda: reader.read(path)) == outcome(lambda: read_torchfile(path)), (at, flip)
            try:
                shared += reader.read(path).root is first.root
            except SourceError:
                continue
    # Only the numbers themselves, and names of groups that are text.
    assert shared == sum(2 if begin == at + 1 else 1 for at, begin, _ in places)


def test_a_pickle_with_other_numbers_has_to_have_its_own_checksum(tmp_path, held):
    path, reader = tmp_path / "model_world_size_12_rank_2.pt", AlikeReader(blanks=True)
    reader.read(save(tmp_path / "model_world_size_12_rank_1.pt", 1))
    data = bytearray(save(path, 2).read_bytes())
    low, high = next((at, end) for at, _, end in find_blanks(pickle_of(data)) if end == at + 2)
    start = data.find(b"\x80\x02}")
    assert data[start + low : start + high] == b"K\x02"
    data[start + high - 1] = 7
    path.write_bytes(data)
    assert "data.pkl is damaged" in str(outcome(lambda: reader.read(path)))


MESH = b"\x80\x02}(X\x01\0\0\0mctorch.distributed.device_mesh\nDeviceMesh\n)\x81}(%su%sbu."


RANK, AT = b"X\x05\0\0\0_rank", b"X\x12\0\0\0_coordinate_on_dim"


@pytest.mark.parametrize(
    ("state", "after", "shares"),
    [
        (RANK + b"K\7" + AT + b"K\7\x85", b"", True),
        (RANK + b"q\1M\7\7" + AT + b"q\2](K\0K\7e", b"", True),
        (RANK + b"K\7" + AT + b"K\7\x85q\3X\1\0\0\0sh\3", b"", False),  # again, as a shape
        (RANK + b"K\7q\3" + AT + b"K\7\x85X\1\0\0\0sh\3", b"", False),
        (RANK + b"K\0072\x86" + AT + b"K\7\x85", b"", False),  # doubled
        (RANK + b"K\7\x85" + AT + b"K\7\x85", b"", False),  # in a tuple
        (RANK + b"K\0070N" + AT + b"K\7\x85", b"", False),  # thrown away
        # an argument
        (RANK + b"K\7" + AT + b"K\7\x85", b"X\1\0\0\0sccollections\nOrderedDict\n}X\x05\0\0\0_rankK\7s\x85R", False),
        (RANK + b"K\7" + AT + b"K\7\x85q\3", b"X\1\0\0\0sctorch\nSize\nh\3\x85R", False),  # the shape of something else
        (AT + b"K\7cbuiltins\nlist\n)R\x86", b"", False),
    ],
)
def test_a_number_that_comes_to_lie_anywhere_but_in_a_mesh_is_none_to_leave_open(state, after, shares):
    data = MESH % (state, after)
    places = find_blanks(data)
    assert places
    found = run_with_blanks(data, places, "little", lambda _: None)
    assert (found is not None) is shares


def test_a_mesh_under_another_class_shares_nothing():
    data = (MESH % (RANK + b"K\7" + AT + b"K\7\x85", b"")).replace(b"DeviceMesh", b"SomethingE")
    assert run_with_blanks(data, find_blanks(data), "little", lambda _: None) is None


def test_nothing_takes_a_blank_for_a_number():
    for use in (bool, int, lambda one: one == 3, lambda one: {one}, lambda one: [0][one], pickle.dumps):
        with pytest.raises((SourceError, TypeError, pickle.PicklingError)):
            use(Blank(0))


def content(folder) -> object:
    """Return all that a directory is read as, or why it is not."""
    try:
        checkpoint = zckpt.open(folder)
        if checkpoint is not None:
            slots = {
                (kind, name): (one.shape, one.dtype, one.tied_to, one.group, one.state,
                               {key: list(slot.spans) for key, slot in one.slots.items()})
                for kind in ("parameters", "buffers", "unnamed") for name, one in getattr(checkpoint, kind).items()
            }  # fmt: skip
            copies = [(one.kind, one.name, one.rank, list(one.slot.spans)) for one in checkpoint.duplicates]
            items = take_inventory(checkpoint).as_dict()
            rest = checkpoint.param_groups, checkpoint.details, checkpoint.warnings, checkpoint.topology
            files = [(one.path, one.nbytes, one.role, one.dp_rank, one.tensor_nbytes, list(one.records))
                     for one in checkpoint.files]  # fmt: skip
            return slots, copies, items, files, repr(rest), zckpt.inspect(folder).as_dict()
    except SourceError as error:
        return str(error)


@cache
def alone(folder) -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AlikeReader, "read", lambda _, path: read_torchfile(path))
        return content(folder)


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Callable[..., Path]:
    base = tmp_path_factory.mktemp("shared")

    def make(**options) -> Path:
        folder = base / "-".join(f"{key}{value}" for key, value in options.items()).replace("*", "")
        if not folder.exists():
            zckpt.convert(FIXTURES / "hf_llama_s2_bf16_dp2", folder, to="fsdp-rank-files", device="cpu", **options)
            (folder / "zckpt.pt").unlink()
        return folder

    return make


FORMS: list[dict[str, Any]] = [
    {"world_size": 8},
    {"world_size": 8, "fsdp_size": 4},
    {"world_size": 7, "fsdp_version": 1, "units": "model.layers.*", "groups": "one"},
]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.every(4)
def test_a_checkpoint_is_the_same_as_with_a_tree_for_each_file(form, written, held):
    folder = written(**form)
    found = content(folder)
    assert not isinstance(found, str)
    assert found == alone(folder)
    checkpoint = zckpt.open(folder)
    assert len({id(one.tree) for one in checkpoint.files}) < len(checkpoint.files)


@pytest.mark.parametrize("form", FORMS)
def test_an_inventory_is_the_same_where_there_are_too_many_spans_to_list(form, written, monkeypatch):
    found = alone(written(**form))
    monkeypatch.setattr(ranges, "FEWEST_COLUMNS", 0)
    monkeypatch.setattr(inventory, "MANY", 0)
    assert content(written(**form)) == found
    monkeypatch.setattr(across, "Chosen", lambda which, values: tuple(values[at] for at in which))
    assert content(written(**form)) == found


def saved_again(change: Callable[[Any], object]) -> Callable[[Path], None]:
    return lambda path: edit(path, change)


def other(path):
    shutil.copy(path.with_name(path.name.replace("rank_5", "rank_6")), path)


def one_step(path):
    """Change the value of one step: nothing in the file but four bytes of elements."""
    steps = list(torch.load(path, weights_only=False)["state"].values())
    data = path.read_bytes()
    old = steps[3]["step"].numpy().tobytes()
    storages = read_torchfile(path).storages.values()
    at = next(one.offset for one in storages if one.nbytes == 4 and data[one.offset :][:4] == old)
    patch(path, at, struct.pack("<f", 99.0))


def first_dtensor(tree):
    return next(one for one in tree.values() if isinstance(one, DTensor))


CHANGES: dict[str, tuple[str, Callable[[Path], None]]] = {
    "lr": ("optim", saved_again(lambda tree: tree["param_groups"][0].update(lr=9.0))),
    "step": ("optim", saved_again(lambda tree: tree["state"][0].update(step=torch.tensor(9.0)))),
    "step in place": ("optim", one_step),
    "no step": ("optim", saved_again(lambda tree: tree["state"][0].pop("step"))),
    "no slot": ("optim", saved_again(lambda tree: tree["state"][0].pop("exp_avg"))),
    "no name": ("model", saved_again(lambda tree: tree.pop("model.norm.weight"))),
    "dtype": ("model", saved_again(lambda tree: tree.update({"model.norm.weight": torch.ones(3)}))),
    "another rank's model": ("model", other),
    "another rank's optimizer": ("optim", other),
    "mesh's rank": ("model", saved_again(lambda tree: setattr(first_dtensor(tree).device_mesh, "_rank", 7))),
    "coordinate": (
        "model",
        saved_again(lambda tree: setattr(first_dtensor(tree).device_mesh, "_coordinate_on_dim", (7,))),
    ),
}


@pytest.mark.parametrize("what", CHANGES)
@pytest.mark.every(3)
def test_one_rank_that_differs_is_read_or_refused_as_before(what, written, tmp_path, held):
    kind, change = CHANGES[what]
    folder = Path(shutil.copytree(written(world_size=8), tmp_path / "run"))
    change(folder / f"{kind}_world_size_8_rank_5.pt")
    found = content(folder)
    assert found == alone(folder)
    if what not in ("no slot", "no step"):
        assert isinstance(found, str), what
        assert os.fspath(folder) in found


def test_a_name_of_another_file_is_noticed_in_each_way(written, tmp_path, held):
    folder = Path(shutil.copytree(written(world_size=8), tmp_path / "run"))
    shutil.copy(folder / "model_world_size_8_rank_3.pt", folder / "model_world_size_8_rank_4.pt")
    assert "is another rank's file: expected rank 4, found rank 3" in str(content(folder))


def test_checksums_are_those_of_each_file(written, tmp_path, held, monkeypatch):
    """Read again from its directory where there are many."""
    monkeypatch.setattr(alike_patterns, "FEW", 0)
    folder = Path(shutil.copytree(written(world_size=8), tmp_path / "run"))
    assert zckpt.verify(folder, deep=True).sound
    path = folder / "model_world_size_8_rank_5.pt"
    record = next(one for one in read_torchfile(path).records if "/data/" in one.name and one.nbytes)
    patch(path, record.offset, b"\xff")
    found = zckpt.verify(folder, deep=True)
    assert not found.sound
    assert any(path.name in str(one) and record.name in str(one) for one in found.findings)
