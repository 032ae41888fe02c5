"""What zckpt writes as a torch file, torch loads: restricted to weights, mapped, and bit for bit."""

from __future__ import annotations

import shutil
import struct
import subprocess
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import zckpt
from tests.formats.some_tensors import assert_same, random_tensor, stored
from zckpt.engine.plan import plan
from zckpt.formats.torch_files.writer import SlotTensor, ValueTensor, lay_out
from zckpt.operations.target import write_target
from zckpt.state import WEIGHT, Slot
from zckpt.state.dtypes import DTYPES
from zckpt.torchfile import (
    ALIGNMENT,
    Device,
    DType,
    NewRecord,
    OrderedMapping,
    Size,
    lay_out_archive,
    read_torchfile,
    walk_tensors,
)
from zckpt.torchfile.archive import ArchiveLayout

WRITABLE = [name for name in DTYPES if not name.startswith(("q", "complex32")) and hasattr(torch, name)]
GIBIBYTE = 1 << 30
LIMIT = (1 << 32) - 1
"""A number that a zip file's 32 bits cannot hold: all ones say that it is in the zip64 field."""


def written(path, root) -> Path:
    write_target(plan([lay_out(path.name, root)]), path)
    return path


def load(path, *, mmap=False) -> object:
    return torch.load(path, weights_only=True, mmap=mmap)


def tensor_of(path, tensor) -> SlotTensor:
    slot = stored(path, tensor)
    return SlotTensor(slot, slot.dtype, path.name)


# --- tensors ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mmap", [False, True])
@pytest.mark.parametrize("dtype", WRITABLE)
def test_every_element_type_is_loaded_bit_for_bit_and_tied_tensors_share_their_storage(dtype, mmap, tmp_path):
    tensor = random_tensor(dtype, (5, 7))
    one, other = tensor_of(tmp_path / "a", tensor), tensor_of(tmp_path / "b", tensor)
    found = load(written(tmp_path / "m.pt", {"t": one, "tied": one, "other": other}), mmap=mmap)
    assert_same(found["t"], tensor)
    assert found["t"].data_ptr() == found["tied"].data_ptr() != found["other"].data_ptr()


@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0, 2), (1, 1, 1), (13,), (2, 3, 4, 5)], ids=str)
def test_every_shape_is_loaded_as_a_contiguous_tensor(shape, tmp_path):
    tensor = random_tensor("float32", shape)
    found = load(written(tmp_path / "m.pt", [tensor_of(tmp_path / "s", tensor)]))
    assert_same(found[0], tensor)
    assert found[0].is_contiguous()
    assert found[0].stride() == tensor.contiguous().stride()


def test_tensors_are_mapped_where_they_are_aligned(tmp_path):
    tensors = {str(i): tensor_of(tmp_path / str(i), random_tensor("uint8", (i,))) for i in range(1, 70)}
    path = written(tmp_path / "m.pt", tensors)
    places = [tensor.offset for _, tensor in walk_tensors(read_torchfile(path).root)]
    assert len(places) == 69
    assert all(place % ALIGNMENT == 0 for place in places)


# --- everything else --------------------------------------------------------------------------------------------

plain_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.sampled_from([255, 256, 65535, 65536, 2**31 - 1, 2**31, 2**63, 2**2038, -(2**31), -(2**31) - 1])
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text(max_size=5) | st.integers(), inner, max_size=4)
    ),
    max_leaves=20,
)


@given(plain_values)
def test_plain_data_is_loaded_as_it_was(value):
    with TemporaryDirectory() as folder:
        found = load(written(Path(folder) / "m.pt", {"value": value}))["value"]
    assert repr(found) == repr(value)


def test_torchs_own_values_are_loaded():
    root = OrderedMapping()
    root |= {"shape": Size((2, 3)), "dtype": DType("bfloat16"), "cpu": Device("cpu"), "cuda": Device("cuda", 1)}
    found = load(written(Path("m.pt"), root))
    assert type(found).__name__ == "OrderedDict"
    assert list(found) == list(root)
    assert found["shape"] == torch.Size([2, 3])
    assert isinstance(found["shape"], torch.Size)
    assert found["dtype"] is torch.bfloat16
    assert (found["cpu"], found["cuda"]) == (torch.device("cpu"), torch.device("cuda", 1))


# --- the archive ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "root"),
    [("m.pt", "m"), ("a.b.pt", "a.b"), ("below/m.pt", "m"), ("m", "m"), ("名前.pt", "名前"), (".pt", "archive")],
)
def test_root_of_the_archive_is_the_stem_of_its_name(name, root, tmp_path):
    path = tmp_path / "file"
    write_target(plan([lay_out(name, {"t": tensor_of(tmp_path / "s", torch.ones(2))})]), path)
    assert {entry.split("/")[0] for entry in zipfile.ZipFile(path).namelist()} == {root}
    assert torch.equal(load(path)["t"], torch.ones(2))


def test_records_are_those_that_torch_writes():
    torch.save({"t": torch.ones(2)}, "theirs.pt")
    written(Path("ours.pt"), {"t": tensor_of(Path("s"), torch.ones(2))})
    theirs, ours = (
        {name.split("/", 1)[1] for name in zipfile.ZipFile(f"{which}.pt").namelist()} for which in ("theirs", "ours")
    )
    assert ours == theirs - {".format_version", ".storage_alignment"}  # by which torch would compute offsets


def sparse(path, layout: ArchiveLayout) -> Path:
    """Write all of an archive but the data of its tensors."""
    with path.open("wb") as file:
        file.truncate(layout.nbytes)
        for offset, data in layout.literals:
            file.seek(offset)
            file.write(data)
    return path


def assert_sound(layout: ArchiveLayout, path):
    """Hold the archive that another program reads against what was laid out."""
    with zipfile.ZipFile(path) as archive, path.open("rb") as file:
        assert [info.filename for info in archive.infolist()] == [placed.record.name for placed in layout.placed]
        for info, placed in zip(archive.infolist(), layout.placed, strict=True):
            assert info.compress_type == zipfile.ZIP_STORED
            assert info.file_size == info.compress_size == placed.record.nbytes
            assert placed.offset % ALIGNMENT == 0
            assert (placed.record.nbytes >= LIMIT or info.header_offset >= LIMIT) == info.extra.startswith(b"\x01\x00")
            file.seek(info.header_offset)
            signature, *_, name, extra = struct.unpack("<IHHHHHIIIHH", file.read(30))
            assert signature == 0x04034B50
            assert info.header_offset + 30 + name + extra == placed.offset
            fields = file.read(name + extra)[name:]
            assert (placed.record.nbytes >= LIMIT) == fields.startswith(b"\x01\x00")
            for at in placed.checksum_offsets:
                file.seek(at)
                assert int.from_bytes(file.read(4), "little") == info.CRC


def records(*sizes) -> list[NewRecord]:
    data = [NewRecord(f"m/data/{i}", None, size) for i, size in enumerate(sizes)]
    return [NewRecord("m/data.pkl", b"pickle", 6), *data, NewRecord("m/version", b"3\n", 2)]


@given(st.lists(st.integers(0, 200), max_size=8), st.lists(st.text("añ/名", min_size=1, max_size=80), max_size=4))
def test_layout_of_any_records_is_sound(sizes, names):
    layout = lay_out_archive(records(*sizes) + [NewRecord(f"{i}{name}", b"x" * i, i) for i, name in enumerate(names)])
    with TemporaryDirectory() as folder:
        assert_sound(layout, sparse(Path(folder) / "m", layout))


@pytest.mark.parametrize(
    "sizes",
    [
        [LIMIT - 1, 10],
        [LIMIT, 10],
        [LIMIT + 1, 10],
        [5 * GIBIBYTE, 1],
        [3 * GIBIBYTE, 3 * GIBIBYTE, 5],
        [1, 6 * GIBIBYTE],
    ],
    ids=str,
)
def test_records_beyond_four_gibibytes_are_sound(sizes):
    layout = lay_out_archive(records(*sizes))
    assert_sound(layout, sparse(Path("m.pt"), layout))


def test_more_records_than_a_plain_zip_file_can_count(tmp_path):
    layout = lay_out_archive(records(*[1] * 70_000))
    path = sparse(tmp_path / "m.pt", layout)
    assert_sound(layout, path)
    if shutil.which("unzip"):
        listing = subprocess.run(["unzip", "-Z1", path], capture_output=True, text=True, check=True).stdout
        assert len(listing.splitlines()) == 70_002


def test_a_file_beyond_four_gibibytes_is_mapped_by_torch_and_read_back_by_zckpt():
    big, small = Slot(WEIGHT, "uint8", (5 * GIBIBYTE,), ()), ValueTensor(b"\x07\x00\x00\x00", "int32", (1,))
    file = lay_out("m.pt", {"big": SlotTensor(big, "uint8", "big"), "small": small})
    literals = [(literal.offset, literal.data) for literal in file.literals]
    path = sparse(Path("m.pt"), ArchiveLayout(file.nbytes, literals, []))
    found = load(path, mmap=True)
    assert found["small"].item() == 7
    assert found["big"].shape == (5 * GIBIBYTE,)
    assert found["big"][-1] == 0
    root = read_torchfile(path).root
    assert root["big"].offset == file.holes[0].offset
    assert root["big"].nbytes == 5 * GIBIBYTE
    assert root["small"].offset > 5 * GIBIBYTE


def test_where_torch_takes_records_to_begin_they_do(torch_file):
    tensors = {f"t{number}": torch.arange(number + 3.0) for number in range(6)}
    zckpt.consolidate(torch_file(tensors), "t.pt", dtype="keep")
    data = Path("t.pt").read_bytes()
    for name, one in torch.load("t.pt", map_location="meta").items():
        start = one.untyped_storage()._checkpoint_offset  # by which readers of parts of tensors read them
        assert data[start : start + one.nbytes] == tensors[name].numpy().tobytes()
