"""A file that is like another gets its tree; one that is not, in anything that a reader looks at, is read by itself."""

from __future__ import annotations

import shutil
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from tests.pairwise import some
from tests.refusals import refusing
from zckpt.errors import DamagedFileError, SourceError
from zckpt.formats import alike_files
from zckpt.formats.alike_files import FEWEST_RECORDS, AlikeReader, glanced
from zckpt.torchfile import TorchFile, read_torchfile

NAMES = [f"layer.{i}.weight" for i in range(FEWEST_RECORDS)]


@pytest.fixture(autouse=True, params=["bytes", "pickles", "directories"])
def held(request, monkeypatch) -> Iterator[str]:
    """As bytes from the first file on; by its pickle and places of records, as small files are; by what is stated."""
    monkeypatch.setattr(alike_files, "ENOUGH_RECORDS", 1 << 30 if request.param == "pickles" else 0)
    with glanced() if request.param == "directories" else nullcontext():
        yield request.param


def save(
    path,
    *,
    step=3,
    value=1.0,
    shape: tuple[int, ...] = (0,),
    numel=50,
    many=False,
) -> Path:
    content = {"module": OrderedDict((name, torch.empty(shape)) for name in NAMES)}
    if many:  # names, more than are looked at
        content["shapes"] = OrderedDict((f"a parameter's long name, dim_{i}.weight", i) for i in reversed(range(400)))
    content["step"] = step
    content["own"] = torch.full((numel,), value)
    torch.save(content, path)
    return path


def same(one: TorchFile, other: TorchFile) -> bool:
    kept = ("path", "nbytes", "container", "byteorder", "storages", "globals", "protocol", "archive")
    return (
        all(getattr(one, name) == getattr(other, name) for name in kept)
        and list(one.records) == list(other.records)
        and repr(one.root) == repr(other.root)
    )


@pytest.mark.parametrize("name", ["zero_pp_rank_1_model.pt", "zero_pp_rank_2_model.pt", "zero_pp_rank_10_model.pt"])
@pytest.mark.parametrize("numel", [50, 5000])
def test_a_file_with_other_values_shares_the_tree(name, numel):
    reader = AlikeReader()
    first = reader.read(save(Path("zero_pp_rank_1_model.pt"), numel=numel))
    Path("b").mkdir()
    path = save(Path(f"b/{name}"), value=2.0, numel=numel)
    found = reader.read(path)
    assert found.root is first.root
    assert same(found, read_torchfile(path))
    assert found.records[-1] == list(found.records)[-1] == read_torchfile(path).records[-1]
    assert found.records[:2] == tuple(read_torchfile(path).records[:2])


@pytest.mark.parametrize("changes", [{"step": 4}, {"shape": (1,)}])
def test_a_file_with_another_pickle_is_read_by_itself(tmp_path, changes):
    reader = AlikeReader()
    first = reader.read(save(tmp_path / "rank_1.pt"))
    path = save(tmp_path / "rank_2.pt", **changes)
    found = reader.read(path)
    assert found.root is not first.root
    assert same(found, read_torchfile(path))


@pytest.mark.parametrize("step", some([3], [1]))
def test_each_byte_of_the_structure_matters_as_it_does_to_a_file_alone(step, held):
    """A file that differs in one byte of its structure is refused, or read, exactly as it is without the other."""
    reader = AlikeReader()
    pattern = save(Path("rank_1.pt"))
    reader.read(pattern)
    data = bytearray(save(Path("rank_2.pt")).read_bytes())
    records = read_torchfile("rank_2.pt").records
    tensors = {at for one in records[-3:-2] for at in range(one.offset, one.offset + one.nbytes)}
    changed = Path("rank_2.pt")
    directory = data.find(b"PK\1\2")
    local = data.find(b"PK\3\4", 5)
    places = [
        *range(0, 120),
        *(range(local, local + 110) if held != "directories" else ()),
        *range(directory, directory + 150),
        *range(records[0].offset, records[0].offset + 400, 7),
    ]
    for at in places[::step]:
        if at in tensors:
            continue
        broken = bytearray(data)
        broken[at] ^= 1 << at % 8 if step > 1 else 1
        changed.write_bytes(broken)
        assert outcome(lambda: reader.read(changed)) == outcome(lambda: read_torchfile(changed)), at


def outcome(read):
    try:
        found = read()
    except SourceError as error:
        return str(error)
    return repr(found.root), list(found.records), found.archive, found.byteorder


def test_a_glance_reads_no_more_than_a_files_beginning_and_its_directory(tmp_path, held):
    """A pickle with another CRC-32 is read; one that is damaged elsewhere is its like; without sums, all is."""
    reader = AlikeReader()
    first = reader.read(save(tmp_path / "rank_1.pt", many=True))
    path = save(tmp_path / "rank_2.pt", many=True)
    data = bytearray(path.read_bytes())
    data[data.find(b"dim_7.") + 4] ^= 1  # beyond what is looked at of the pickle
    path.write_bytes(data)
    if held == "directories":
        assert reader.read(path).root is first.root
    else:
        with refusing(DamagedFileError, r"data\.pkl"):
            reader.read(path)
    other = reader.read(save(tmp_path / "rank_3.pt", many=True, step=4))
    assert other.root is not first.root
    torch.serialization.set_crc32_options(False)
    try:
        assert same(reader.read(save(tmp_path / "rank_4.pt", many=True)), read_torchfile(tmp_path / "rank_4.pt"))
        path = save(tmp_path / "rank_5.pt", many=True)
    finally:
        torch.serialization.set_crc32_options(True)
    data = path.read_bytes().replace(b"dim_7.", b"dim_8.")
    path.write_bytes(data)
    assert same(reader.read(path), read_torchfile(path))


def test_an_entry_under_another_archives_name_is_not_taken_for_its_own(tmp_path):
    reader = AlikeReader()
    reader.read(save(tmp_path / "rank_1.pt"))
    path = save(tmp_path / "rank_2.pt")
    data = path.read_bytes()
    old, new = b"rank_2/data/5", b"rank_1/data/5"
    assert data.count(old) >= 2
    path.write_bytes(data.replace(old, new))
    assert outcome(lambda: reader.read(path)) == outcome(lambda: read_torchfile(path))


def test_a_copy_of_a_file_shares_its_tree():
    reader = AlikeReader()
    path = save(Path("rank_1.pt"))
    shutil.copy(path, "copy.pt")
    assert reader.read(Path("copy.pt")).root is reader.read(path).root
