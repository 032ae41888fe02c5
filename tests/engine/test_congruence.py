"""Files that are padded so that a file system that clones has nothing to copy: still what their programs read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

import zckpt
from tests.plans import hole_of, in_file, slot_of
from zckpt.engine import congruence
from zckpt.engine.congruence import residue
from zckpt.formats.safetensors.file import read_header
from zckpt.state import WEIGHT, Checkpoint
from zckpt.storage.disk import BLOCK_NBYTES, LEAST_NBYTES, cloneable, may_clone

MIB = 1 << 20


@pytest.fixture
def clones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(congruence, "may_clone", lambda path: True)


def saved(path: str) -> dict[str, torch.Tensor]:
    """Write tensors, the last of which is too small to be padded for."""
    torch.manual_seed(0)
    shapes = {"a": (MIB,), "b": (700, 1001), "c": (3, MIB // 2), "d": (10,)}
    tensors = {name: torch.randn(shape) for name, shape in shapes.items()}
    (torch.save if path.endswith(".pt") else save_file)(tensors, path)
    return tensors


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def cloned(source: Checkpoint, target: Checkpoint) -> dict[str, int]:
    """Return how many bytes of each weight could be clones of the source's."""
    found = {}
    for name, parameter in source.parameters.items():
        (one,), (other,) = parameter.slots[WEIGHT].spans, target.parameters[name].slots[WEIGHT].spans
        low, high = cloneable(one.offset, other.offset, parameter.slots[WEIGHT].nbytes)
        found[name] = high - low
    return found


def assert_cloned(source: Path, target: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Each large tensor of the target can be a clone of the source's."""
    found = cloned(zckpt.open(source), zckpt.open(target))
    for name in "abc":
        assert found[name] > tensors[name].nbytes - 2 * BLOCK_NBYTES


@pytest.mark.usefixtures("clones")
@pytest.mark.parametrize("source", ["m.safetensors", "m.pt"])
def test_every_large_record_of_a_torch_file_can_be_a_clone(source):
    tensors = saved(source)
    target = Path("t.pt")
    zckpt.consolidate(source, target)
    assert_cloned(source, target, tensors)
    for mapped in (False, True):
        assert_equal(torch.load(target, weights_only=True, mmap=mapped), tensors)
    assert zckpt.verify(target, deep=True).sound
    config = pytest.importorskip("torch.utils.serialization").config
    if hasattr(config.load, "calculate_storage_offsets"):  # those of padded records are looked up
        with config.patch("load.calculate_storage_offsets", True):
            assert_equal(torch.load(target, weights_only=True, mmap=True), tensors)


@pytest.mark.usefixtures("clones")
def test_header_of_safetensors_is_padded_for_most_of_its_bytes():
    tensors = saved("s.pt")
    target = Path("t.safetensors")
    zckpt.consolidate("s.pt", target)
    found = cloned(zckpt.open("s.pt"), zckpt.open(target))
    assert max(found.values()) >= tensors["c"].nbytes - 2 * BLOCK_NBYTES
    assert_equal(load_file(target), tensors)
    zckpt.consolidate(target, "again.safetensors")
    found = cloned(zckpt.open(target), zckpt.open("again.safetensors"))
    assert sum(found.values()) > 0.99 * sum(t.nbytes for t in tensors.values() if t.nbytes > LEAST_NBYTES)


def test_files_elsewhere_are_padded_as_ever():
    if may_clone("s"):
        pytest.skip("this file system clones")
    saved("s.safetensors")
    zckpt.consolidate("s.safetensors", "t.safetensors")
    slots, _, nbytes = read_header("t.safetensors")
    first = min(slot.spans[0].offset for slot in slots.values())
    assert first + sum(slot.nbytes for slot in slots.values()) == nbytes
    assert b"   " not in Path("t.safetensors").read_bytes()[first - 8 : first].strip()
    assert first < 1000


@pytest.mark.usefixtures("clones")
def test_residue_is_that_of_most_bytes_and_a_multiple_of_the_step():
    def hole(at, offset, numel, dtype="uint8"):
        return hole_of(slot_of(in_file("s", (numel,), "uint8", offset)), at, dtype)

    assert residue([hole(0, 100, MIB)], 1) == 100
    assert residue([hole(0, 100, MIB), hole(MIB, 200, 2 * MIB)], 1) == 200
    assert residue([hole(8, 100, MIB)], 1) == 92
    assert residue([hole(0, 100, MIB)], 64) is None
    assert residue([hole(0, 100, MIB - 1)], 1) is None
    assert residue([hole(0, 100, MIB, "float32")], 1) is None
    assert residue([], 8) is None


@pytest.mark.usefixtures("clones")
@pytest.mark.parametrize("source", ["m.safetensors", "m.pt"])
def test_every_large_item_of_a_dcp_directory_can_be_a_clone(source):
    tensors = saved(source)
    zckpt.convert(source, "dcp", to="dcp")
    assert_cloned(source, "dcp", tensors)
    zckpt.convert(source, "of3", to="dcp", world_size=3)
    for directory in ("dcp", "of3"):
        assert zckpt.verify(directory, deep=True).sound
        loaded = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
        dcp.load({"model": loaded}, checkpoint_id=directory, no_dist=True)
        assert_equal(loaded, tensors)


@pytest.mark.usefixtures("clones")
def test_a_file_of_our_own_is_padded_for_most_of_its_bytes_and_is_still_what_the_document_says(monkeypatch):
    tensors = saved("s.safetensors")
    zckpt.convert("s.safetensors", "own", to="zckpt")
    found = cloned(zckpt.open("s.safetensors"), zckpt.open("own"))
    large = [tensor.nbytes for tensor in tensors.values() if tensor.nbytes > LEAST_NBYTES]
    assert sum(found.values()) >= sum(large) - 2 * BLOCK_NBYTES * len(large)
    assert zckpt.verify("own", deep=True).sound
    loaded = load_file("own/rank-00000-of-00001.safetensors")
    assert all(torch.equal(loaded[f"weight/{name}"], tensor) for name, tensor in tensors.items())
    monkeypatch.setattr("zckpt.formats.native.reader.open_rank_file", None)  # no header is read to know where all is
    assert zckpt.fingerprint("own").text == zckpt.fingerprint("s.safetensors").text
