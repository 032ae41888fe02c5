"""torch-checkpointing: files that it wrote on two ranks are read, and written as it has them; and every damage."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import zckpt
from tests.formats.holding import converted
from tests.interop.test_fsdp_rank_files import assert_is
from tests.pairwise import some
from tests.refusals import refusing
from zckpt.errors import DamagedFileError, LayoutError, ShardError, UnknownFormatError, UnsupportedError
from zckpt.formats.account import take_inventory

SAVED = Path(__file__).with_name("torch_checkpointing")
INDEX = "metadata.pkl"


@pytest.fixture
def saved():
    return Path(shutil.copytree(SAVED / "ckpt", "saved"))


def test_items_of_two_ranks_are_one_checkpoint(saved):
    checkpoint = zckpt.open(saved)
    assert_is(checkpoint, load_file(SAVED / "truth.safetensors"))
    assert (checkpoint.format, checkpoint.world_size, checkpoint.step) == ("torch-checkpointing", 2, 2)
    assert checkpoint.metadata.keys() == {"lr_scheduler", "rng", "step", "extra_state_world_size_2_rank_1.rng"}
    assert not checkpoint.unnamed
    assert not take_inventory(checkpoint).left_out
    assert zckpt.verify(saved, deep=True).sound


@pytest.mark.parametrize("keys", some(["names"], ["numbers", "flat"]))
def test_what_is_written_is_what_it_writes(keys, saved):
    converted(saved, "ours", "torch-checkpointing", keys=keys, device="cpu")
    assert zckpt.verify("ours", deep=True).sound
    theirs, ours = (pickle.loads((folder / INDEX).read_bytes()) for folder in (saved, Path("ours")))
    if keys == "names":
        assert ours == theirs
        for item in ("model", "optimizer", "step"):
            a, b = (torch.load(folder / f"{item}_1.pt", weights_only=False) for folder in (saved, Path("ours")))
            assert shown(a) == shown(b)
    zckpt.convert("ours", "three", to="torch-checkpointing", world_size=3)
    Path("three/zckpt.pt").unlink()
    assert_is(zckpt.open("three"), load_file(SAVED / "truth.safetensors"))


def shown(node) -> object:
    """What a tree holds, as it can be compared."""
    if isinstance(node, dict):
        return {key: shown(one) for key, one in node.items()}
    if isinstance(node, torch.Tensor) and hasattr(node, "_local_tensor"):
        return node.shape, node.placements, node._local_tensor.tolist()
    return node.tolist() if isinstance(node, torch.Tensor) else [*map(shown, node)] if isinstance(node, list) else node


@pytest.mark.parametrize(("item", "rank"), [("model", 1), ("optimizer", 1), ("rng", 0)])
def test_a_lost_file_is_named(item, rank, saved):
    (saved / f"{item}_{rank}.pt").unlink()
    with refusing(ShardError, f"the {item} file of rank {rank} is missing: expected 2 files, found 1"):
        zckpt.open(saved)


def test_what_is_one_ranks_only_is_kept(saved):
    (saved / "rng_1.pt").unlink()
    torch.save({"seed": 5}, saved / "loader_0.pt")
    for rank in range(2):  # as torchtitan counts
        (saved / f"step_{rank}.pt").unlink()
        torch.save({"step": torch.tensor(9, dtype=torch.int32)}, saved / f"train_state_{rank}.pt")
    (saved / "rng_0.pt").unlink()
    checkpoint = zckpt.open(saved)
    assert checkpoint.step == 9
    assert checkpoint.metadata["loader"] == {"seed": 5}
    assert not take_inventory(checkpoint).left_out


def test_files_of_other_names_are_where_the_index_says(saved):
    (saved / "deep").mkdir()
    (saved / "model_1.pt").rename(saved / "deep" / "one.pt")
    layout = {"file_path": "deep/one.pt", "serialization_format": {"type": "TorchSerialization"}}
    tree = pickle.loads((saved / INDEX).read_bytes())
    tree["metadata"]["model"]["rank_to_layout_info"][1] = layout
    (saved / INDEX).write_bytes(pickle.dumps(tree))
    assert_is(zckpt.open(saved), load_file(SAVED / "truth.safetensors"))
    layout["file_path"] = "../one.pt"
    (saved / INDEX).write_bytes(pickle.dumps(tree))
    with refusing(DamagedFileError, "a file outside the directory"):
        zckpt.open(saved)
    layout["serialization_format"] = {"type": "SafetensorsSerialization"}
    (saved / INDEX).write_bytes(pickle.dumps(tree))
    with refusing(UnsupportedError, "model is saved in an unsupported way.* found SafetensorsSerialization"):
        zckpt.open(saved)


def test_an_index_that_says_otherwise_is_refused(saved):
    data = pickle.loads((saved / INDEX).read_bytes())
    path = '["norm.weight"]'
    tensors = data["metadata"]["model"]["nested_path_to_metadata"]

    def refused(kind, words, **changes):
        (saved / INDEX).write_bytes(pickle.dumps({**data, **changes}))
        with refusing(kind, words):
            zckpt.open(saved)

    tensors[path][0]["sharding_metadata"]["data"]["global_shape"] = [7]
    refused(LayoutError, r"norm\.weight differs from metadata\.pkl: expected \(7,\), found \(6,\)")
    for wrong in ({"global_shape": 7}, {}):
        tensors[path][0]["sharding_metadata"]["data"] = wrong
        refused(DamagedFileError, "unexpected content: found")
    tensors["["] = tensors.pop(path)
    refused(DamagedFileError, "unexpected content: found JSONDecodeError")
    del tensors["["]
    refused(ShardError, "rank 2 is missing: expected 3 files, found 2", world_size=3)
    refused(UnsupportedError, r"has an unsupported version: expected 2\.0", version="1.0")
    refused(DamagedFileError, "unexpected content: found KeyError", metadata={"model": {}})


def test_whole_tensors_without_an_index_are_ranks_only_if_there_is_one(saved):
    (saved / INDEX).unlink()
    assert_is(zckpt.open(saved), load_file(SAVED / "truth.safetensors"))
    whole = {name: torch.ones(3) for name in "ab"}
    Path("epochs").mkdir()
    torch.save(whole, "epochs/model_0.pt")
    assert zckpt.open("epochs").format == "torch-checkpointing"
    torch.save(whole, "epochs/model_1.pt")
    with refusing(UnknownFormatError, "not recognised as a checkpoint"):
        zckpt.open("epochs")


@pytest.mark.parametrize("keys", ["numbers", "names", "flat"])
def test_groups_of_equal_values_stay_two(keys, torch_file):
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    optimizer = torch.optim.AdamW([{"params": [*one.parameters()]} for one in model], lr=0.1)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    path = torch_file({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    zckpt.convert(path, "two", to="torch-checkpointing", world_size=2, keys=keys)
    assert zckpt.diff(path, "two").equal
