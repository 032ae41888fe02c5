"""What a pickled DTensor is to each torch: read, kept when it is written again, and written as that torch does.

`rank_files/VERSION` is what `dtensors_saved` of `tests.fsdp_training.versions` saved with that version: on 2 ranks, and
in `copies` the file of rank 2 of 4. Whether these versions load what is written, `bench/compatibility.py` tries.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import zckpt
from tests.fsdp_training.versions import WHOLE, dtensors_saved
from tests.gloo import run
from tests.refusals import refusing
from zckpt.torchfile import MetaTensor, Object, Tensor, TorchFile, read_torchfile

SAVED = Path(__file__).parent / "rank_files"
FORMS = {"2.4.1": "2.3 to 2.4", "2.6.0": "2.5 to 2.9", "2.8.0": "2.5 to 2.9", "2.10.0": "2.10 to 2.12"}

OF_ITS_RUN = {"_hash", "_thread_id"}
GROUPS = {"_dim_group_infos", "_dim_group_names"}
"""Of meshes of several dimensions torch numbers them anew in every run; zckpt writes none."""


def about(path) -> dict[tuple[object, ...], object]:
    """Return what a file says of the tensor `a`, all but its elements: values by their place."""
    file = read_torchfile(path)
    node = file.root["a"]
    assert isinstance(node, MetaTensor)
    return leaves([node.subclass, node.dtype, node.shape, node.strides, node.get("_spec")], file, ())


def leaves(node, file: TorchFile, place: tuple[object, ...]) -> dict[tuple[object, ...], object]:
    if isinstance(node, Object):
        found = {place: node.qualified, **leaves(node.args, file, place)}
        return found | {at: one for key, value in (node.state or {}).items()
                        for at, one in leaves(value, file, (*place, key)).items()}  # fmt: skip
    if isinstance(node, (list, tuple)):
        each = [leaves(one, file, (*place, number)) for number, one in enumerate(node)]
        return {(*place, len): len(node)} | {at: one for some in each for at, one in some.items()}
    if isinstance(node, Tensor):
        data = Path(file.path).read_bytes()[node.storage.offset :][: node.storage.nbytes]
        return {place: (node.dtype, node.shape, node.storage_offset, data)}
    return {place: repr(node)}


def assert_written_as(theirs, ours, but: set[str]):
    """Compare a file with torch's own; it may say more, which that torch makes nothing of, but name no more."""
    expected, found = about(theirs), about(ours)
    for place, value in expected.items():
        assert but & {*place} or found[place] == value, place
    named = [{name for names in read_torchfile(path).globals.values() for name in names} for path in (ours, theirs)]
    assert {name for name in named[0] if ".distributed." in name} <= named[1]


def assert_whole(checkpoint):
    for name, whole in WHOLE.items():
        found = checkpoint.read(name, "weight")
        assert (found.dtype, found.shape) == (whole.dtype, whole.shape)
        assert torch.equal(found, whole)


@pytest.mark.parametrize(("version", "said"), FORMS.items())
def test_what_older_torch_saved_is_read_and_keeps_its_form(version, said):
    source = zckpt.open(SAVED / version)
    assert_whole(source)
    assert source.details["torch_version"] == said
    done = zckpt.convert(SAVED / version, "same", to="fsdp-rank-files")
    assert f"for meshes of cpu devices, in the form of torch {said}" in done.notes
    for rank in range(2):
        name = f"model_world_size_2_rank_{rank}.pt"
        assert_written_as(SAVED / version / name, Path(f"same/{name}"), OF_ITS_RUN)
    zckpt.convert("same", "more", to="fsdp-rank-files", world_size=3)
    assert_whole(zckpt.open("more"))
    assert zckpt.open("more").details["torch_version"] == said
    zckpt.convert("more", "new", to="fsdp-rank-files", torch_version="2.13")
    assert_whole(zckpt.open("new"))
    assert zckpt.open("new").details["torch_version"] == "2.13 and newer"


@pytest.mark.parametrize("version", FORMS)
def test_meshes_with_copies_are_written_as_older_torch_does(version, torch_file):
    options = {"to": "fsdp-rank-files", "device": "cpu", "world_size": 4, "fsdp_size": 2}
    zckpt.convert(torch_file(WHOLE), "ranks", torch_version=version, **options)
    name = "model_world_size_4_rank_2.pt"
    assert_written_as(SAVED / version / "copies" / name, Path(f"ranks/{name}"), OF_ITS_RUN | GROUPS)
    assert_whole(zckpt.open("ranks"))


@pytest.mark.parametrize("world_size", [2, 4])
def test_the_default_is_what_this_torch_writes(world_size, tmp_path):
    run(dtensors_saved, world_size, tmp_path / "run")
    zckpt.convert(tmp_path / "run", tmp_path / "ranks", to="fsdp-rank-files", fsdp_size=2)
    for rank in range(world_size):
        name = f"model_world_size_{world_size}_rank_{rank}.pt"
        but = OF_ITS_RUN | (GROUPS if world_size == 4 else set())
        assert_written_as(tmp_path / "run" / name, tmp_path / "ranks" / name, but)


@pytest.mark.parametrize(
    ("version", "said"),
    [("2.3.1", "2.3 to 2.4"), ("2.7.1+cu126", "2.5 to 2.9"), ("2.12", "2.10 to 2.12"), ("2.15.0", "2.13 and newer"),
     ("3.0", "2.13 and newer")],
)  # fmt: skip
def test_the_version_that_will_load_the_files_decides(version, said, torch_file):
    path = torch_file(WHOLE)
    done = zckpt.convert(path, "ranks", to="fsdp-rank-files", world_size=2, torch_version=version)
    assert done.notes == (f"for meshes of cuda devices, in the form of torch {said}",)
    assert zckpt.open("ranks").details["torch_version"] == said


@pytest.mark.parametrize("version", ["2.2.2", "2", "newest", "2.1300"])
def test_a_version_that_no_form_is_of_is_refused(version, torch_file):
    with refusing(zckpt.UsageError, f"unusable --torch-version: expected 2.3 or newer, found '?{version}"):
        zckpt.convert(torch_file(WHOLE), "ranks", to="fsdp-rank-files", torch_version=version)
    assert not Path("ranks").exists()
