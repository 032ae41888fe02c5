"""A file that is like another gets its tree; one that is not, in anything that a reader looks at, is read by itself."""

from __future__ import annotations

import shutil
from collections import OrderedDict
from pathlib import Path

import pytest
import torch

from zckpt.errors import SourceError
from zckpt.formats import alike_files
from zckpt.formats.alike_files import FEWEST_RECORDS, AlikeReader
from zckpt.torchfile import TorchFile, read_torchfile

NAMES = [f"layer.{i}.weight" for i in range(FEWEST_RECORDS)]


@pytest.fixture(autouse=True, params=[0, 1 << 30], ids=["bytes", "pickles"])
def _held_against(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """As bytes from the first file on; and by its pickle and places of records, as small files are."""
    monkeypatch.setattr(alike_files, "ENOUGH_RECORDS", request.param)


def save(path: Path, *, step: int = 3, value: float = 1.0, shape: tuple[int, ...] = (0,), numel: int = 50) -> Path:
    content = {"module": OrderedDict((name, torch.empty(shape)) for name in NAMES), "step": step}
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
def test_a_file_with_other_values_shares_the_tree(tmp_path: Path, name: str, numel: int) -> None:
    reader = AlikeReader()
    first = reader.read(save(tmp_path / "zero_pp_rank_1_model.pt", numel=numel))
    (tmp_path / "b").mkdir()
    path = save(tmp_path / "b" / name, value=2.0, numel=numel)
    found = reader.read(path)
    assert found.root is first.root
    assert same(found, read_torchfile(path))
    assert found.records[-1] == list(found.records)[-1] == read_torchfile(path).records[-1]
    assert found.records[:2] == tuple(read_torchfile(path).records[:2])


@pytest.mark.parametrize("changes", [{"step": 4}, {"shape": (1,)}])
def test_a_file_with_another_pickle_is_read_by_itself(tmp_path: Path, changes: dict[str, int]) -> None:
    reader = AlikeReader()
    first = reader.read(save(tmp_path / "rank_1.pt"))
    path = save(tmp_path / "rank_2.pt", **changes)  # type: ignore[arg-type]
    found = reader.read(path)
    assert found.root is not first.root
    assert same(found, read_torchfile(path))


def test_each_byte_of_the_structure_matters_as_it_does_to_a_file_alone(tmp_path: Path) -> None:
    """A file that differs in one byte of its structure is refused, or read, exactly as it is without the other."""
    reader = AlikeReader()
    pattern = save(tmp_path / "rank_1.pt")
    reader.read(pattern)
    data = bytearray(save(tmp_path / "rank_2.pt").read_bytes())
    records = read_torchfile(tmp_path / "rank_2.pt").records
    tensors = {at for one in records[-3:-2] for at in range(one.offset, one.offset + one.nbytes)}
    changed = tmp_path / "rank_2.pt"
    directory = data.find(b"PK\1\2")
    local = data.find(b"PK\3\4", 5)
    places = [
        *range(0, 120),
        *range(local, local + 110),
        *range(directory, directory + 150),
        *range(records[0].offset, records[0].offset + 400, 7),
    ]
    for at in places:
        if at in tensors:
            continue
        broken = bytearray(data)
        broken[at] ^= 1
        changed.write_bytes(broken)
        assert outcome(lambda: reader.read(changed)) == outcome(lambda: read_torchfile(changed)), at


def outcome(read):  # type: ignore[no-untyped-def]
    try:
        found = read()
    except SourceError as error:
        return str(error)
    return repr(found.root), list(found.records), found.archive, found.byteorder


def test_an_entry_under_another_archives_name_is_not_taken_for_its_own(tmp_path: Path) -> None:
    reader = AlikeReader()
    reader.read(save(tmp_path / "rank_1.pt"))
    path = save(tmp_path / "rank_2.pt")
    data = path.read_bytes()
    old, new = b"rank_2/data/5", b"rank_1/data/5"
    assert data.count(old) >= 2
    path.write_bytes(data.replace(old, new))
    assert outcome(lambda: reader.read(path)) == outcome(lambda: read_torchfile(path))


def test_a_copy_of_a_file_shares_its_tree(tmp_path: Path) -> None:
    reader = AlikeReader()
    path = save(tmp_path / "rank_1.pt")
    shutil.copy(path, tmp_path / "copy.pt")
    assert reader.read(tmp_path / "copy.pt").root is reader.read(path).root
