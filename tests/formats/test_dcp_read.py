"""Directories of torch.distributed.checkpoint: every form that programs give them, bit by bit, and none that is wrong.

Those in `fixtures/other` were written by real runs of several ranks; others are written on the spot by the installed
torch, without a process group. What several ranks of the installed torch write is in `tests/interop`.
"""

from __future__ import annotations

import json
import pickle
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter, _version
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, get_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType, fully_shard

import zckpt
from tests import live
from tests.formats.holding import assert_goes_on, assert_holds, converted
from tests.formats.some_tensors import Wrapped
from tests.gloo import run
from tests.logical import assert_same_tree, opened
from tests.pairwise import each
from tests.refusals import refusing
from tests.truth import Truth, assert_same, bits
from zckpt.engine.plan import fill
from zckpt.engine.targets import Hole
from zckpt.errors import (
    DamagedFileError,
    LayoutError,
    PickleError,
    ShardError,
    SourceError,
    UnknownFormatError,
    UnsupportedError,
    UsageError,
    ZckptError,
)
from zckpt.formats import open_checkpoint
from zckpt.formats.account import take_inventory
from zckpt.formats.dcp import items
from zckpt.formats.dcp import reader as adapter
from zckpt.formats.dcp.directory import find
from zckpt.formats.dcp.metadata import read_metadata
from zckpt.formats.safetensors import file as safetensors_file
from zckpt.formats.safetensors import file as safetensors_shards
from zckpt.operations.inspect import inspect
from zckpt.operations.open import OpenedCheckpoint
from zckpt.optim.values import value_of
from zckpt.state import Extent, Scalar
from zckpt.torchfile import FromFile

OTHER = Path(__file__).parents[2] / "fixtures" / "other"
REAL = sorted(path.name for path in OTHER.iterdir() if path.name.startswith(("dcp_", "accel_fsdp", "lightning_fsdp")))
NUMBERED = ("dcp_from_torchsave", "dcp_fsdp2_dp2_raw")

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def read(path, names: list[str] | None = None) -> OpenedCheckpoint:
    return opened(adapter.read(find(path), names=names))


def source(name) -> Path:
    (only,) = [path for path in (OTHER / name).iterdir() if not path.name.startswith("truth.")]
    return only


def copied(name) -> Path:
    return Path(shutil.copytree(source(name), "ckpt"))


def assert_model_is(checkpoint, truth):
    assert {p.name for p in checkpoint.tensors()} == {*truth.weights, *truth.tied, *truth.buffers}
    for parameter, weight in truth.weights.items():
        assert_same(checkpoint.read(parameter, "weight"), weight, parameter)
    for buffer, content in truth.buffers.items():
        assert torch.equal(bits(checkpoint.read(buffer)), content), buffer
    assert checkpoint.world_size == truth.facts["world_size"]


# --- what real runs of several ranks wrote ------------------------------------------------------------------------


@pytest.mark.parametrize("name", REAL)
@pytest.mark.every(3)
def test_real_checkpoint_is_the_truth(name):
    truth = Truth(OTHER / name)
    groups = truth.facts["param_groups"]
    listed = [parameter for group in groups for parameter in group["params"]]
    checkpoint = read(source(name), listed if name in NUMBERED else None)
    assert_model_is(checkpoint, truth)
    for alias, owner in truth.tied.items():
        assert_same(checkpoint.read(alias), truth.weights[owner], alias)
    assert [name for name in checkpoint.parameters if name in truth.facts["shapes"]] == list(truth.facts["shapes"])
    expected = {key for key in truth.tensors if key.split("/")[0] in truth.slots}
    assert {f"{s}/{p.name}" for p in checkpoint.parameters.values() for s in p.slots if s != "weight"} == expected
    for key in expected:
        slot, parameter = key.split("/", 1)
        found = checkpoint.read(parameter, slot)
        assert_same(found.reshape(truth.tensors[key].shape) if slot == "step" else found, truth.tensors[key], key)
    assert [group.parameters for group in checkpoint.param_groups] == [group["params"] for group in groups]
    for mine, its in zip(checkpoint.param_groups, groups, strict=True):
        plain = {k: list(v) if isinstance(v, tuple) else v for k, v in mine.hyperparameters.items()}
        assert plain == {k: v for k, v in its.items() if k != "params"}
        assert mine.state == {"step": Scalar(5.0, "float32")}
    assert (checkpoint.format, checkpoint.step, checkpoint.unnamed) == ("dcp", 5, {})
    assert checkpoint.warnings == []


@pytest.mark.parametrize("name", REAL)
@pytest.mark.every(3, 1)
def test_real_checkpoint_is_recognised_and_its_files_are_described(name):
    assert find(source(name)) is not None
    checkpoint = open_checkpoint(source(name))
    on_disk = {path for path in source(name).rglob("*") if path.is_file()}
    assert {Path(file.path) for file in checkpoint.files} == on_disk
    assert all(file.nbytes == Path(file.path).stat().st_size for file in checkpoint.files)
    shards = [file for file in checkpoint.files if file.role == "shard"]
    stored = sum(slot.nbytes for p in checkpoint.tensors() for slot in p.slots.values())
    assert sum(file.tensor_nbytes for file in shards) == stored


@pytest.mark.parametrize("name", NUMBERED)
def test_parameters_without_names_are_told_where_only_one_reading_fits(name):
    checkpoint = read(source(name))
    truth = Truth(OTHER / name)
    assert checkpoint.unnamed == {}
    assert [g.parameters for g in checkpoint.param_groups] == [
        ["emb.weight", "fc1.weight", "fc2.weight", "3"],  # the last one has no state, which could tell its shape
        ["prime", "ln1.weight", "ln1.bias", "fc1.bias"],
        ["alpha"],
    ]
    for key in (key for key in truth.tensors if key.startswith("exp_avg")):
        slot, parameter = key.split("/", 1)
        assert_same(checkpoint.read(parameter, slot), truth.tensors[key], key)


def test_what_lies_beside_is_carried():
    lightning = read(source("lightning_fsdp2"))
    assert lightning.metadata["epoch"] == 0
    assert lightning.metadata["global_step"] == 5
    assert set(lightning.metadata) >= {"loops", "callbacks", "lr_schedulers", "pytorch-lightning_version"}
    accelerate = open_checkpoint(source("accel_fsdp2_dp2"))
    assert set(accelerate.metadata) == {"scheduler", "random_states_0", "random_states_1"}
    torchsave = read(source("dcp_from_torchsave"))
    assert torchsave.metadata == {"step": 5, "note": "x"}


def test_accelerates_folders_had_another_name_before_0_25():
    older, newer = copied("accel_fsdp2_dp2"), source("accel_fsdp2_dp2")
    (older / "pytorch_model_fsdp_0").rename(older / "pytorch_model_0")
    assert zckpt.diff(older, newer).equal
    assert not zckpt.open(older).unnamed


def test_file_that_is_not_named_is_told():
    path = copied("dcp_fsdp2_dp2")
    (path / "__6_0.distcp").touch()  # of a rank that had nothing to save, as where a lower one saves what all have
    assert (read(path).warnings, take_inventory(read(path)).left_out) == ([], [])
    shutil.copy(path / "__0_0.distcp", path / "__7_0.distcp")
    checkpoint = read(path)
    assert checkpoint.warnings == ["not part of the checkpoint, which does not name them: __7_0.distcp"]
    assert checkpoint.world_size == 2
    (path / "__8_0.distcp").symlink_to("nowhere")
    (path / "__9_0.distcp").mkdir()
    names = "__7_0.distcp, __8_0.distcp, __9_0.distcp"
    assert read(path).warnings == [f"not part of the checkpoint, which does not name them: {names}"]


# --- Hugging Face's writer ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "below"), [("dcphf_sharded_dp3", ""), ("dcphf_consolidated_dp2", "sharded")])
def test_shards_without_an_index_are_put_together(name, below):
    truth, path = Truth(OTHER / name), source(name) / below
    assert safetensors_shards.is_sharded(path)
    checkpoint = opened(safetensors_shards.read_shards(path))
    assert_model_is(checkpoint, truth)
    assert checkpoint.warnings[0].startswith("the files do not say how many shards there were")


def test_whole_files_are_read_and_the_shards_below_them_are_not():
    path = source("dcphf_consolidated_dp2")
    assert not safetensors_shards.is_sharded(path)
    assert {Path(file.path).parent for file in safetensors_file.read(path).files} == {path}


def test_shards_are_the_model_and_whole_files_beside_them_are_copies():
    """As transformers reads them, whose `consolidate_distributed_checkpoint` puts them together in place."""
    path = copied("dcphf_consolidated_dp2")
    for one in (path / "sharded").iterdir():
        one.rename(path / one.name)
    assert_model_is(zckpt.open(path), Truth(OTHER / "dcphf_consolidated_dp2"))
    assert zckpt.verify(path, deep=True).sound
    whole = next(path.glob("model-*.safetensors"))
    whole.write_bytes(whole.read_bytes()[:-1] + b"?")
    assert {found.code for found in zckpt.verify(path, deep=True).findings} >= {"ZC-206"}
    assert_model_is(zckpt.open(path), Truth(OTHER / "dcphf_consolidated_dp2"))


def test_first_shard_that_is_damaged_beside_a_whole_model_is_left_out():
    path = copied("dcphf_consolidated_dp2")
    for one in (path / "sharded").iterdir():
        one.rename(path / one.name)
    first = min(path.glob("shard-*"))
    first.write_bytes(first.read_bytes()[:20])
    assert zckpt.diff(path, source("dcphf_consolidated_dp2")).equal
    assert first.name in {one.file for one in take_inventory(zckpt.open(path)).left_out}
    for one in path.glob("model*"):
        one.unlink()
    with refusing(DamagedFileError, "unreadable header"):
        zckpt.open(path)


@pytest.mark.parametrize("shard", [1, 2])
def test_shard_missing_before_the_last_is_refused(shard):
    path = copied("dcphf_sharded_dp3")
    (path / f"shard-0000{shard}-model-00001-of-00001.safetensors").unlink()
    with refusing(ShardError, f"do not cover it.*shard {shard} is missing"):
        safetensors_shards.read_shards(path)


def test_shard_that_is_there_twice_is_refused():
    path = copied("dcphf_sharded_dp3")
    name = "shard-0000{}-model-00001-of-00001.safetensors"
    shutil.copy(path / name.format(2), path / name.format(4))
    with refusing(LayoutError, "has two pieces at"):
        safetensors_shards.read_shards(path)


@pytest.mark.parametrize(
    "found", ['{"a": {"saved_offsets": [-1]}}', '{"a": {"saved_offsets": [0, 0]}}', "[]", "{}", "{", '{"a": 5}']
)
def test_shard_that_says_nonsense_of_its_pieces_is_refused(found, tmp_path):
    from safetensors.torch import save_file

    path = tmp_path / "shard-00001-model-00001-of-00001.safetensors"
    save_file({"a": torch.ones(3)}, path, metadata={"DCP_SHARDING_INFO": found})
    assert safetensors_shards.is_sharded(tmp_path)
    with refusing(DamagedFileError, "does not say which pieces"):
        safetensors_shards.read_shards(tmp_path)


# --- on the spot: the same state under whatever keys ---------------------------------------------------------------


def trained(kind: type[torch.optim.Optimizer] = torch.optim.AdamW, **options) -> tuple[torch.nn.Module, Any]:
    """A model with a batch norm and its optimizer after three steps."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7), torch.nn.Linear(7, 3))
    return live.trained(model, kind, steps=3, **{"lr": 0.1, **options})


def names_of(model) -> list[str]:
    return [name for name, _ in model.named_parameters()]


def saved(path, state, writer: Callable[[Path], FileSystemWriter] = FileSystemWriter) -> Path:
    dcp.save(state, storage_writer=writer(path), no_dist=True)
    return Path(path)


FLAT = StateDictOptions(flatten_optimizer_state_dict=True)

FORMS: dict[str, Callable[[Any, Any], dict[str, Any]]] = {
    "usual": lambda m, o: dict(zip(("model", "optimizer"), get_state_dict(m, o), strict=True)),
    "nested in a user's key": lambda m, o: {"app": dict(zip(("model", "optim"), get_state_dict(m, o), strict=True))},
    "other names": lambda m, o: {"my": {"net.0": m.state_dict(), "o": get_optimizer_state_dict(m, o)}},
    "flattened": lambda m, o: {"model": m.state_dict(), "optim": get_optimizer_state_dict(m, o, options=FLAT)},
    "model at the root": lambda m, o: {**m.state_dict(), "optimizer": get_optimizer_state_dict(m, o, options=FLAT)},
    "raw": lambda m, o: {"model": m.state_dict(), "optimizer": o.state_dict()},
    "raw with DDP": lambda m, o: {
        "model": {f"module.{k}": v for k, v in m.state_dict().items()},
        "optimizer": o.state_dict(),
    },
    "DDP's model only": lambda m, o: {
        "model": {f"module.{k}": v for k, v in m.state_dict().items()},
        "optimizer": get_optimizer_state_dict(m, o),
    },
    "list of optimizers": lambda m, o: {"model": m.state_dict(), "optimizers": [get_optimizer_state_dict(m, o)]},
}
OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"amsgrad": True}),
    "sgd": (torch.optim.SGD, {}),
    "sgdm": (torch.optim.SGD, {"momentum": 0.9}),
    "adagrad": (torch.optim.Adagrad, {}),
    "tensor lr": (torch.optim.AdamW, {"lr": torch.tensor(0.25), "foreach": False}),
    "adafactor": (torch.optim.Adafactor, {}),
}


@pytest.mark.parametrize(("kind", "form"), each(OPTIMIZERS, FORMS))
def test_same_state_under_any_keys(form, kind):
    model, optimizer = trained(OPTIMIZERS[kind][0], **OPTIMIZERS[kind][1])
    path = saved("ckpt", {**FORMS[form](model, optimizer), "step": 3, "more": {"rng": torch.get_rng_state()}})
    checkpoint = assert_holds(read(path, names_of(model) if form.startswith("raw") else None), model, optimizer)
    assert checkpoint.step == 3
    assert set(checkpoint.buffers) == {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
    assert (checkpoint.unnamed, checkpoint.warnings) == ({}, [])
    assert set(checkpoint.metadata) == {"step", "more"}


@pytest.mark.parametrize("form", ["usual", "nested in a user's key", "raw", "flattened"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.every(3)
def test_dicts_that_torch_2_3_did_not_take_apart(form, kind, monkeypatch):
    monkeypatch.setattr(_version, "_derived_version", "2_3")
    test_same_state_under_any_keys(form, kind)


WRITERS: dict[str, Callable[[Path], FileSystemWriter]] = {
    "several threads": lambda path: FileSystemWriter(path, thread_count=3),
    "a file for each item": lambda path: FileSystemWriter(path, single_file_per_rank=False),
    "safetensors": lambda path: FileSystemWriter(path, serialization_format=SerializationFormat.SAFETENSORS),
    "safetensors, several threads": lambda path: FileSystemWriter(
        path, thread_count=3, serialization_format=SerializationFormat.SAFETENSORS
    ),
    "safetensors, a file for each item": lambda path: FileSystemWriter(
        path, single_file_per_rank=False, serialization_format=SerializationFormat.SAFETENSORS
    ),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_writers_options(writer):
    model, optimizer = trained()
    path = saved("ckpt", {**FORMS["usual"](model, optimizer), "step": 3}, WRITERS[writer])
    checkpoint = assert_holds(read(path), model, optimizer)
    assert checkpoint.details["serialization"] == ("safetensors" if writer.startswith("safe") else "torch_save")
    assert not zckpt.verify(path, deep=True).findings


def test_a_class_around_a_tensor_is_looked_into():
    weights = {f"{number}.weight": torch.randn(3, 5) for number in range(3)}
    path = saved("run", {"model": {name: Wrapped(one) for name, one in weights.items()}})
    checkpoint = read(path)
    for name, one in weights.items():
        assert torch.equal(checkpoint.read(name, "weight"), one)
    assert not take_inventory(checkpoint).left_out
    assert zckpt.verify(path, deep=True).sound


def test_several_optimizers_of_one_model(tmp_path):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3))
    halves = [torch.optim.AdamW(model[0].parameters(), lr=0.1), torch.optim.SGD(model[1].parameters(), momentum=0.9)]
    for half in halves:
        live.trained(model, half)
    each = [get_optimizer_state_dict(model, half) for half in halves]
    joined = {"optim": get_optimizer_state_dict(model, halves)}
    named, numbered = ({f"{key}{i}": one for i, one in enumerate(each)} for key in ("opt", "optimizer_"))
    called = [["opt0", "opt1"], ["0", "1"], ["g.optim", "d.optim"], []]
    below = {key: {"optim": one} for key, one in zip("gd", each, strict=True)}
    for number, optimizers in enumerate((named, numbered, below, joined)):
        checkpoint = read(saved(tmp_path / str(number), {"model": model.state_dict(), **optimizers}))
        for name, half in zip(called[number] or [None, None], halves, strict=True):
            assert_holds(checkpoint, model, {name: half})
        assert [p.group for p in checkpoint.parameters.values()] == [0, 0, 1, 1]
        assert checkpoint.optimizers() == called[number]


def test_an_optimizer_under_each_parameters_name_has_that_parameters_state(tmp_path):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))  # no shape tells which is which
    optimizers = {name: torch.optim.AdamW([one], lr=0.1) for name, one in model.named_parameters()}
    for optimizer in optimizers.values():
        live.trained(model, optimizer)
    wrapped = {f"_orig_mod.{name}": one for name, one in model.state_dict().items()}
    state = {name: one.state_dict() for name, one in optimizers.items()}
    for number, weights in enumerate((model.state_dict(), wrapped)):
        path = saved(tmp_path / str(number), {"model": weights, "optimizer": state})
        checkpoint = assert_holds(read(path), model, optimizers)
        assert (checkpoint.unnamed, checkpoint.warnings) == ({}, [])


def test_several_models_with_an_optimizer_each_are_one_with_their_keys_before_the_names():
    (one, adamw), (other, sgd) = trained(), trained(torch.optim.SGD, momentum=0.9)
    other.add_module("more", torch.nn.Linear(2, 2))
    named = torch.nn.ModuleDict({"d": other})
    state = {
        "generator": {"model": one.state_dict(), "optimizer": get_optimizer_state_dict(one, adamw)},
        "discriminator": named.state_dict(),
        "d_optimizer": get_optimizer_state_dict(named, sgd),
    }
    checkpoint = read(saved("ckpt", state))
    assert checkpoint.warnings == [
        "generator.model and discriminator are read as one model; tensor names begin with these names"
    ]
    assert_holds(checkpoint, one, {"optimizer": adamw}, "generator.model.")
    assert_holds(checkpoint, named, {"d_optimizer": sgd}, "discriminator.")


@pytest.mark.parametrize("named", [True, False])
def test_models_of_the_same_names_are_told_apart_by_where_their_optimizers_are(named, tmp_path):
    (one, adamw), (other, sgd) = trained(), trained(torch.optim.SGD, momentum=0.9)
    weights = [one.state_dict(), other.state_dict()]
    states = [get_optimizer_state_dict(one, adamw), get_optimizer_state_dict(other, sgd)]
    states = states if named else [adamw.state_dict(), sgd.state_dict()]
    beside = {
        key: {"model": model, "optimizer": state}
        for key, model, state in zip(("disc", "gen"), weights, states, strict=True)
    }
    by_key = {"netD": weights[0], "netG": weights[1], "optG": states[1], "optD": states[0], "netG_ema": weights[1]}
    for state, keys, called in (
        (beside, ("disc.model.", "gen.model."), ("disc.optimizer", "gen.optimizer")),
        (by_key, ("netD.", "netG."), ("optD", "optG")),
    ):
        checkpoint = read(saved(tmp_path / keys[0], state))
        assert_holds(checkpoint, one, {called[0]: adamw}, keys[0])
        assert_holds(checkpoint, other, {called[1]: sgd}, keys[1])
    unclear = {"a": weights[0], "b": weights[1], "optimizer": states[0]}
    if not named:  # what is called as both are is not of either, where it has not their shapes
        beside = {"a": {"seen": torch.ones(3, 3)}, "b": {"seen": torch.ones(2)}}
        both = {"model": weights[0], **beside, "opt_a": states[0], "opt_b": states[0]}
        assert_holds(read(saved(tmp_path / "both", both)), one)
        return
    with refusing(UnsupportedError, r"could be the optimizer of several models.* found a and b"):
        read(saved(tmp_path / "unclear", unclear))


@pytest.mark.parametrize("cls", [torch.optim.AdamW, torch.optim.Adafactor])
def test_usual_key_says_nothing_where_numbered_optimizers_need_another_model_too(cls):
    models = {key: live.trained(torch.nn.Linear(3, wide), cls) for key, wide in (("model", 2), ("model_1", 4))}
    state = {key: one.state_dict() for key, (one, _) in models.items()} | {
        f"optimizer{key[5:]}": its.state_dict() for key, (_, its) in models.items()
    }
    state["model_ema"] = models["model"][0].state_dict()
    checkpoint = read(saved("ckpt", state))
    assert list(checkpoint.metadata) == ["model_ema"]
    for key, (model, optimizer) in models.items():
        assert_holds(checkpoint, model, {f"optimizer{key[5:]}": optimizer}, f"{key}.")


def test_models_without_an_optimizer_and_usual_keys_are_all_read():
    models = torch.nn.ModuleDict({"encoder": trained()[0], "decoder": trained(torch.optim.SGD)[0]})
    assert_holds(read(saved("ckpt", {key: one.state_dict() for key, one in models.items()})), models)


def test_averaged_weights_beside_the_model_are_carried_and_not_taken_for_it():
    (model, optimizer), (averaged, _) = trained(), trained(torch.optim.SGD)
    state = {
        "ema": averaged.state_dict(),
        "model": model.state_dict(),
        "optim": get_optimizer_state_dict(model, optimizer),
    }
    checkpoint = assert_holds(read(saved("ckpt", state)), model, optimizer)
    assert_same_tree(value_of(checkpoint.metadata["ema"]), dict(averaged.state_dict()))


def local_states(rank, world_size) -> None:
    """Save what FSDP1 calls a LOCAL_STATE_DICT, with its own parameters and without."""
    for orig in (True, False):
        model = FullyShardedDataParallel(nn.Linear(3, 5), device_id=torch.device("cpu"), use_orig_params=orig)
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
            dcp.save({"model": model.state_dict()}, checkpoint_id=f"orig{orig}")


def test_flat_parameters_and_pieces_beside_them_are_no_model():
    run(local_states, 2)
    for orig in (True, False):
        with refusing(UnsupportedError, "LOCAL_STATE_DICT.*_flat_param.*SHARDED_STATE_DICT"):
            zckpt.open(f"orig{orig}")


def test_model_or_optimizer_by_itself():
    model, optimizer = trained()
    alone = assert_holds(read(saved("model", model.state_dict())), model)
    assert (alone.param_groups, alone.step) == ([], None)
    for number, flat in enumerate((None, FLAT)):
        state = get_optimizer_state_dict(model, optimizer, options=flat)
        for key, root in (("root", state), ("key", {"optimizer": state})):
            checkpoint = read(saved(f"{key}{number}", root))
            assert checkpoint.parameters == {}
            assert list(checkpoint.unnamed) == checkpoint.param_groups[0].parameters == names_of(model)
            for name, parameter in model.named_parameters():
                assert_same(checkpoint.read(name, "exp_avg"), optimizer.state[parameter]["exp_avg"], name)
            assert (checkpoint.step, checkpoint.metadata) == (3, {})


def test_tensors_of_any_kind():
    tensors = {
        "transposed": torch.arange(12.0).reshape(3, 4).t(),
        "none": torch.empty(0, 3),
        "single": torch.tensor(1.5, dtype=torch.float64),
        "complex": torch.randn(3, dtype=torch.complex64),
        "slice": torch.arange(10.0)[3:7],
        "expanded": torch.ones(1, dtype=torch.bfloat16).expand(4),
        "with.dots.": torch.arange(3),
        "flag": torch.tensor([True, False]),
        "half": torch.randn(2, 3, 2).half().permute(2, 0, 1),
    }
    checkpoint = read(saved("ckpt", {"model": tensors}))
    assert {p.name for p in checkpoint.tensors()} == set(tensors)
    for name, tensor in tensors.items():
        assert_same(checkpoint.read(name), tensor, name)


def test_everything_else_is_carried():
    model, optimizer = trained()
    state = FORMS["nested in a user's key"](model, optimizer)
    loader = {"position": [1, {"shard": 2}], "sampler": torch.arange(4)}
    state["app"] |= {"epoch": 3, "loader": loader}
    state["app"]["model"]["_extra_state"] = {"scale": 0.5}
    state |= {"pair": (torch.ones(2), "x"), "train_state": {"step": torch.tensor(17), "seen": torch.tensor(2.5)}}
    checkpoint = read(saved("ckpt", state))
    assert checkpoint.step == 17
    found = {key: value_of(value) for key, value in checkpoint.metadata.items()}
    assert_same_tree(found, {
        "app.epoch": 3, "app.loader": loader, "app.model._extra_state": {"scale": 0.5}, "pair": state["pair"],
        "train_state": state["train_state"],
    })  # fmt: skip


def test_carried_parts_of_one_file_are_one_part_and_those_of_several_are_not():
    state = {"model": {"a": torch.ones(2)}, "more": {"x": torch.zeros(3), "y": [1, {"z": torch.ones(4)}]}}
    one = read(saved("one", state)).metadata["more"]
    assert isinstance(one, FromFile)
    several = read(saved("several", state, WRITERS["a file for each item"])).metadata["more"]
    assert isinstance(several, dict)
    for found in (one, several):
        assert_same_tree(value_of(found), state["more"])


def test_a_tensor_in_several_pieces_that_is_no_part_of_the_model_is_carried(small):
    def cut(metadata):
        metadata.state_dict_metadata.pop("model.b")
        twice = metadata.state_dict_metadata["model.a"]
        metadata.state_dict_metadata["ema.b"] = type(twice)(twice.properties, torch.Size([4, 3]), [
            ChunkStorageMetadata(torch.Size([row, 0]), torch.Size([2, 3])) for row in (0, 2)
        ])  # fmt: skip
        at = metadata.storage_data[index_of(metadata, "model.a")]
        metadata.storage_data |= {MetadataIndex("ema.b", torch.Size([row, 0])): at for row in (0, 2)}
        metadata.planner_data = {"model.a": ("model", "a"), "note.x": ("note", "x"), "ema.b": ("ema", "b")}

    checkpoint = read(changed(small, cut))
    assert list(checkpoint.parameters) == ["a"]
    assert checkpoint.warnings == []
    average = torch.cat([checkpoint.read("a", "weight")] * 2)
    assert torch.equal(value_of(checkpoint.metadata["ema"])["b"], average)
    for to in ("zckpt", "dcp"):
        zckpt.convert(checkpoint, small.parent / to, to=to)
        assert torch.equal(value_of(zckpt.open(small.parent / to).metadata["ema"])["b"], average)
    written = zckpt.convert(checkpoint, small.parent / "without", to="zckpt", drop=["e*"])
    assert written.dropped == ("ema (beside the model)",)
    assert zckpt.open(small.parent / "without").metadata.keys() == {"note"}
    zckpt.consolidate(checkpoint, small.parent / "model.safetensors")  # of which it is no part
    model = torch.nn.ParameterDict({"a": torch.zeros(2, 3)})
    restored = zckpt.load(small, model=model)  # on each rank it would be as large as the model
    assert torch.equal(model["a"], checkpoint.read("a", "weight"))
    assert restored.extra.keys() == {"note"}
    assert [note for note in restored.notes if "ema is not restored: ranks share its tensors" in note]


def test_names_are_given_for_numbers():
    model, optimizer = trained()
    path = saved("ckpt", FORMS["raw"](model, optimizer))
    names = names_of(model)
    with refusing(UsageError, "expected 6 different names, found 5"):
        read(path, names[:5])
    with refusing(UsageError, "the model has no parameter nobody"):
        read(path, [*names[:5], "nobody"])
    with refusing(UsageError, r"parameter 0 of the optimizer is not 0.bias"):
        read(path, [names[1], names[0], *names[2:]])
    usual = read(saved("usual", FORMS["usual"](model, optimizer)), names)
    assert usual.warnings == ["--names is ignored: the directory has the names of the parameters"]


@pytest.mark.parametrize("named", [False, True])
def test_numbers_that_several_tensors_fit_stay_numbers_unless_the_optimizer_was_made_with_names(named):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    optimizer = torch.optim.AdamW([("1.weight", model[1].weight)] if named else [model[1].weight])
    live.trained(model, optimizer)
    checkpoint = read(saved("ckpt", {"model": model.state_dict(), "optim": optimizer.state_dict()}))
    if named:
        assert_holds(checkpoint, model, optimizer)
    else:
        assert_same(checkpoint.read("0", "exp_avg"), optimizer.state[model[1].weight]["exp_avg"], "exp_avg")
        assert checkpoint.param_groups[0].parameters == list(checkpoint.unnamed) == ["0"]
        assert "several of the model's tensors fit 0: this state keeps its number" in checkpoint.warnings[0]


def test_different_steps_are_values_of_parameters():
    model, optimizer = trained()
    optimizer.state[model[0].weight]["step"] += 4
    checkpoint = assert_holds(read(saved("ckpt", FORMS["usual"](model, optimizer))), model, optimizer)
    assert checkpoint.param_groups[0].state == {}


def test_tied_names_are_two_parameters():
    model = torch.nn.Sequential(torch.nn.Embedding(5, 4), torch.nn.Linear(4, 5, bias=False))
    model[1].weight = model[0].weight
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.tensor([1, 2])).sum().backward()
    optimizer.step()
    checkpoint = assert_holds(read(saved("ckpt", FORMS["usual"](model, optimizer))), model, optimizer)
    one, other = checkpoint.parameters["0.weight"], checkpoint.parameters["1.weight"]
    assert (one.tied_to, other.tied_to, one.group, other.group, other.frozen) == (None, None, 0, None, False)


@pytest.mark.parametrize("frozen", [False, True])
def test_numbers_are_named_though_one_tensor_has_several_names(frozen):
    """As T5's embedding has, whose first names follow each other; what looks so, and is another's, stays open."""
    model = torch.nn.Sequential(
        *(torch.nn.Embedding(5, 4) for _ in range(2)), torch.nn.Linear(4, 5), torch.nn.Linear(5, 2)
    )
    model[1].weight = torch.nn.Parameter(model[0].weight.detach().clone()) if frozen else model[0].weight
    optimizer = torch.optim.AdamW([*model[0:1].parameters(), *model[2 + frozen :].parameters()], lr=0.0)
    for one in model.parameters():
        one.grad = torch.randn_like(one)
    optimizer.step()
    checkpoint = read(saved("ckpt", FORMS["raw"](model, optimizer)))
    if frozen:
        assert checkpoint.param_groups[0].parameters[0] == "0"
        return
    assert_holds(checkpoint, model, optimizer)
    assert not checkpoint.unnamed
    assert checkpoint.warnings == ["1.weight has the elements of 0.weight, and is taken for another name of it"]


@pytest.mark.parametrize("form", ["usual", "raw", "other names", "list of optimizers"])
def test_dicts_that_are_one_pickle_each_are_read(form):
    model, optimizer = trained()
    path = Path("ckpt")
    planner = DefaultSavePlanner(flatten_state_dict=False)
    dcp.save({**FORMS[form](model, optimizer), "step": 3}, checkpoint_id=path, planner=planner, no_dist=True)
    checkpoint = assert_holds(read(path, names_of(model) if form == "raw" else None), model, optimizer)
    assert (checkpoint.unnamed, checkpoint.warnings, checkpoint.step) == ({}, [], 3)
    if form != "raw":
        converted(path, "own", "zckpt")


def saved_by_ranks(rank, world_size, path) -> torch.Tensor:
    """Save two rows, of which a third rank has none, and what all ranks have, in every form; return the rows."""
    model = nn.Linear(4, 2)
    fully_shard(model, mesh=dist.init_device_mesh("cpu", (world_size,)))
    for form in SerializationFormat:
        writer = FileSystemWriter(path / form.value, serialization_format=form)
        dcp.save({"model": model.state_dict()}, storage_writer=writer)
        copies = FileSystemWriter(path / f"{form.value}-copies", serialization_format=form)
        dcp.save({"model": {"weight": torch.ones(2), "bias": torch.ones(3)}}, storage_writer=copies)
    planner = DefaultSavePlanner(flatten_state_dict=False)
    dcp.save({"model": model.state_dict()}, checkpoint_id=path / "pickle", planner=planner)
    return model.weight.full_tensor().detach()


def test_a_rank_without_elements_has_a_file_of_empty_chunks_in_either_form(tmp_path):
    weight = run(saved_by_ranks, 3, tmp_path)[0]
    for form in SerializationFormat:
        path = tmp_path / form.value
        assert torch.equal(zckpt.open(path).read("weight"), weight)
        assert zckpt.verify(path, deep=True).sound
        zckpt.convert(path, tmp_path / f"{form.value}-own", to="zckpt")
        assert not zckpt.verify(tmp_path / f"{form.value}-copies").findings  # a rank has a file with no chunk at all
    with refusing(UnsupportedError, r"model is one value.*the others are lost.*without flatten_state_dict=False"):
        read(tmp_path / "pickle")  # of one rank's shares


def test_items_of_a_known_kind_are_where_their_archives_say(monkeypatch):
    """The heads of items that were seen before are not parsed; that gives what parsing gives."""
    shapes = [(2, 8), (4, 4), (8, 2), (4, 4), (1, 16), (5000,), (5000,), (5000,), (16,), (8, 2), ()]
    tensors = {str(i): torch.randn(shapes[i % len(shapes)]) for i in range(60)}
    path = saved("ckpt", tensors)
    quick = items.read_items(read_metadata(path))
    parsed = []
    monkeypatch.setattr(items.Kinds, "known", lambda *_: parsed.append(1))
    slow = items.read_items(read_metadata(path))
    assert len(parsed) == 60
    assert {key: item.spans for key, item in quick.tensors.items()} == {k: i.spans for k, i in slow.tensors.items()}
    for one, other in zip(quick.files, slow.files, strict=True):
        assert (one.path, one.tensor_nbytes) == (other.path, other.tensor_nbytes)
        assert (one.unreferenced_nbytes, list(one.archives)) == (other.unreferenced_nbytes, list(other.archives))


# --- damaged and hostile directories -------------------------------------------------------------------------------


def changed(path, change: Callable[[Any], object]) -> Path:
    """Rewrite `.metadata` with a change made to it."""
    content = pickle.loads((path / ".metadata").read_bytes())
    change(content)
    (path / ".metadata").write_bytes(pickle.dumps(content))
    return path


def index_of(metadata, key):
    return next(index for index in metadata.storage_data if index.fqn == key)


@pytest.fixture
def small() -> Path:
    """A directory with a model of two tensors, an object, and the real torch's metadata."""
    model = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.arange(4)}
    return saved("small", {"model": model, "note": {"x": 1}})


def setting(of: Callable[[Any], Any], **values) -> Callable[[Any], None]:
    """Set attributes of a part of the metadata."""

    def change(metadata):
        for key, value in values.items():
            setattr(of(metadata), key, value)

    return change


place = partial(setting, lambda metadata: metadata.storage_data[index_of(metadata, "model.a")])
entry = partial(setting, lambda metadata: metadata.state_dict_metadata["model.a"])
properties = partial(setting, lambda metadata: metadata.state_dict_metadata["model.a"].properties)


def at(key, path) -> Callable[[Any], None]:
    """Give a key another path in the saved dict."""
    return lambda metadata: metadata.planner_data.update({key: path})


def chunks(*pairs: tuple[tuple[int, ...], tuple[int, ...]]) -> Callable[[Any], None]:
    """Chunks (offsets, sizes) of the tensor, each with the place of its only one."""

    def change(metadata):
        where = metadata.storage_data[index_of(metadata, "model.a")]
        listed = [ChunkStorageMetadata(torch.Size(o), torch.Size(s)) for o, s in pairs]
        metadata.state_dict_metadata["model.a"].chunks = listed
        metadata.storage_data |= {MetadataIndex("model.a", torch.Size(o)): where for o, _ in pairs}

    return change


@pytest.mark.parametrize(
    "name",
    ["../small/__0_0.distcp", "/etc/passwd", "a/../../__0_0.distcp", "", "..", "C:\\x", "..\\x", "a\0b", None, 5],
)
def test_file_outside_of_the_directory_is_refused(name, small):
    with refusing(DamagedFileError, "lies outside of the directory"):
        read(changed(small, place(relative_path=name)))


HUGE = 1 << 62


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (place(offset=10**9), DamagedFileError, "ends before model.a does"),
        (place(offset=HUGE, length=HUGE), DamagedFileError, "ends before model.a does"),
        (place(offset=-1), DamagedFileError, "non-negative"),
        (place(length=-5), DamagedFileError, "non-negative"),
        (place(length=True), DamagedFileError, "non-negative"),
        (place(length=50), SourceError, "model.a: "),
        (place(offset=7), SourceError, "model.a: "),
        (place(relative_path="__5_0.distcp"), ShardError, "file __5_0.distcp is missing"),
        (place(transform_descriptors=["zstd"]), UnsupportedError, "model.a was transformed.*zstd"),
        (entry(size=torch.Size([4, 3])), ShardError, "not the whole of it: expected 12 elements, found 6"),
        (entry(size=(HUGE, 4)), DamagedFileError, "size and chunks"),
        (entry(size=(2, -3)), DamagedFileError, "size of model.a"),
        (entry(size=None), DamagedFileError, "size of model.a"),
        (entry(chunks=5), DamagedFileError, "chunks"),
        (entry(chunks=[5]), DamagedFileError, "ChunkStorageMetadata"),
        (entry(properties=None), DamagedFileError, "TensorProperties"),
        (chunks(), ShardError, "not the whole of it"),
        (chunks(((0, 0), (1, 3))), ShardError, "not the whole of it: expected 6 elements, found 3"),
        (chunks(((0, 0), (1, 3)), ((0, 0), (2, 3))), LayoutError, "two chunks of model.a begin at"),
        (chunks(((0, 0), (2, 3)), ((1, 0), (1, 3))), LayoutError, "not the whole of it"),
        (chunks(((0, 0), (1, 3)), ((1, 0), (1, 3))), LayoutError, "differs from `.metadata`"),
        (chunks(((0, 0), (3, 2))), DamagedFileError, "lies outside the tensor"),
        (chunks(((0,), (6,))), DamagedFileError, "lies outside the tensor"),
        (chunks(((0, HUGE), (2, 3))), DamagedFileError, "lies outside the tensor"),
        (lambda m: m.storage_data.pop(index_of(m, "model.a")), ShardError, "where the chunk of model.a"),
        (lambda m: m.storage_data.pop(index_of(m, "note.x")), DamagedFileError, "where note.x is"),
        (lambda m: m.state_dict_metadata.update({"model.a": BytesStorageMetadata()}), DamagedFileError, "where model"),
        (lambda m: m.state_dict_metadata.update({"model.a": None}), DamagedFileError, "unexpected content"),
        (lambda m: m.state_dict_metadata.update({5: None}), DamagedFileError, "unexpected content"),
        (lambda m: setattr(m, "state_dict_metadata", None), DamagedFileError, "a dict in state_dict_metadata"),
        (lambda m: setattr(m, "storage_data", [1]), DamagedFileError, "a dict in storage_data"),
        (lambda m: m.storage_data.update({"x": 1}), DamagedFileError, "MetadataIndex"),
        *((at("model.a", path), DamagedFileError, "the path of model.a")
          for path in ("model.a", (), ("x",) * 100, ("model", -1))),
        (at("model.a", ("model", "b")), DamagedFileError, "has the path of another"),
        (at("model.a", ("note", "x", "y")), DamagedFileError, "another item"),
        (at("note.x", ("l", 10**12)), DamagedFileError, "most elements of a list are missing"),
        (properties(dtype=torch.float64), LayoutError, "differs from `.metadata`"),
        (properties(layout=torch.sparse_coo), UnsupportedError, "not a dense tensor"),
    ],
)  # fmt: skip
def test_metadata_that_is_wrong_is_refused(change, error, message, small):
    with pytest.raises(error, match=message):
        read(changed(small, change))


def test_chunks_that_overlap_are_refused_when_they_are_planned():
    path = saved("ckpt", {"a": torch.arange(2.0), "b": torch.arange(6.0)})

    def overlap(metadata):
        at = metadata.storage_data[index_of(metadata, "a")]
        metadata.state_dict_metadata.pop("a")
        listed = [ChunkStorageMetadata(torch.Size([o]), torch.Size([2])) for o in (0, 1, 4)]
        metadata.state_dict_metadata["b"].chunks = listed
        metadata.storage_data |= {MetadataIndex("b", torch.Size([o])): at for o in (0, 1, 4)}

    slot = read(changed(path, overlap)).parameters["b"].slots["weight"]
    with refusing(LayoutError, "more than once"):
        fill(Hole(0, "b", slot, Extent.whole(slot.shape), slot.dtype))


def test_rank_whose_chunks_are_all_empty_has_a_file_too(small):
    def add(metadata):
        at = metadata.storage_data[index_of(metadata, "model.a")]
        metadata.state_dict_metadata["model.a"].chunks.append(
            ChunkStorageMetadata(torch.Size([2, 0]), torch.Size([0, 3]))
        )
        metadata.storage_data[MetadataIndex("model.a", torch.Size([2, 0]))] = type(at)("__1_0.distcp", 0, 0)

    changed(small, add)
    with refusing(ShardError, r"file __1_0.distcp is missing"):
        read(small)
    (small / "__1_0.distcp").write_bytes(b"")
    checkpoint = read(small)
    assert (checkpoint.world_size, checkpoint.warnings) == (2, [])
    assert torch.equal(checkpoint.read("a"), torch.arange(6.0).reshape(2, 3))


def test_replica_that_is_listed_twice_is_one(small):
    def twice(metadata):
        metadata.state_dict_metadata["model.a"].chunks *= 2

    assert torch.equal(read(changed(small, twice)).read("a"), torch.arange(6.0).reshape(2, 3))


def test_key_of_which_nothing_was_saved_is_told(small):
    checkpoint = read(changed(small, at("model.lost", ("model", "lost"))))
    assert checkpoint.warnings == ["no rank saved any part of model.lost"]


def test_keys_without_paths_are_a_flat_dict(small):
    checkpoint = read(changed(small, lambda m: setattr(m, "planner_data", None)))
    assert list(checkpoint.parameters) == ["model.a"]
    assert checkpoint.metadata == {"note.x": 1}


@pytest.mark.parametrize("name", ["dcp_fsdp2_dp3", "dcp_fsdp2_dp2_stformat"])
@pytest.mark.parametrize("keep", [0, 10, 1500, 0.3, 0.9, -1])
@pytest.mark.parametrize("which", ["__0_0.distcp", "__1_0.distcp", ".metadata"])
@pytest.mark.every(3)
def test_file_that_is_cut_short_is_refused(name, keep, which):
    path = copied(name)
    data = (path / which).read_bytes()
    (path / which).write_bytes(data[: int(len(data) * keep)] if 0 < keep < 1 else data[:keep])
    with refusing(DamagedFileError, which):
        read(path)


def test_file_of_another_rank_is_refused():
    path = copied("dcp_fsdp2_dp3")
    shutil.copy(path / "__0_0.distcp", path / "__1_0.distcp")
    with refusing(SourceError, "__1_0"):
        read(path)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"model.alpha"', b'"model.alphb"'),
        (b'"data_offsets":[8,12]', b'"data_offsets":[8,13]'),
        (b'"shape":[1]', b'"shape":[2]'),
        (b'{"__metadata__"', b'["__metadata__"'),
        (b'{\\"saved_offsets\\": [0]}', b'{\\"saved_offsets\\": [9]}'),
    ],
)
def test_blob_that_is_not_what_it_should_be_is_refused(old, new):
    path = copied("dcp_fsdp2_dp2_stformat")
    data = (path / "__0_0.distcp").read_bytes()
    assert old in data
    (path / "__0_0.distcp").write_bytes(data.replace(old, new, 1))
    with refusing(SourceError, "__0_0"):
        read(path)


class Payload:
    """Runs code when it is unpickled."""

    def __reduce__(self):
        return exec, ("import sys; sys.zckpt_was_here = True",)


def test_nothing_of_a_file_is_run(small):
    read(changed(small, lambda m: setattr(m, "storage_meta", Payload())))
    checkpoint = read(saved("object", {"model": {"a": torch.ones(2)}, "bad": Payload()}))
    assert isinstance(checkpoint.metadata["bad"], FromFile)
    files = inspect(Path("object"), include_globals=True).files
    mentioned = {name for file in files for names in file["globals"].values() for name in names}
    assert mentioned & {"builtins.exec", "__builtin__.exec"}
    again = saved("again", {"model": {"a": torch.ones(2)}})
    with refusing(DamagedFileError, "unexpected content"):
        read(changed(again, lambda m: setattr(m, "storage_data", Payload())))
    (small / ".metadata").write_bytes(pickle.dumps(Payload()))
    with refusing(DamagedFileError, "Metadata"):
        read(small)
    assert not hasattr(sys, "zckpt_was_here")


@pytest.mark.parametrize("content", [b"", b"\x80\x04N.", b"{}", b"\x80\x04}q\0.", b"\0" * 100])
def test_metadata_that_is_none_is_refused(content, small):
    (small / ".metadata").write_bytes(content)
    with pytest.raises((DamagedFileError, PickleError)):
        read(small)


def test_names_of_one_optimizer_stay_certain_beside_numbers_of_another():
    """In whatever order the first has them; names that are given are those of the second."""
    model = {name: torch.ones(size) for name, size in (("a", 2), ("b", 3), ("c", 4), ("d", 4))}
    first = {"state": {n: {"m": model[n] * 2} for n in "ab"}, "param_groups": [{"lr": 1.0, "params": ["b", "a"]}]}
    second = {"state": {0: {"m": model["d"] * 3}}, "param_groups": [{"lr": 2.0, "params": [0]}]}
    path = saved("ckpt", {"model": model, "one": first, "two": second})
    checkpoint = read(path)
    assert [group.parameters for group in checkpoint.param_groups] == [["b", "a"], ["0"]]
    assert all("m" in checkpoint.parameters[name].slots for name in "ab")
    given = read(path, names=["d"])
    assert [group.parameters for group in given.param_groups] == [["b", "a"], ["d"]]
    assert "m" in given.parameters["d"].slots


def test_object_that_contains_itself(small):
    loop = [1]
    loop.append({"again": loop, "too": (loop,)})
    checkpoint = read(saved("ckpt", {"model": {"a": torch.ones(2)}, "loop": (loop,)}))
    assert isinstance(checkpoint.metadata["loop"], FromFile)


def test_object_that_is_no_torch_file_is_refused(small):
    metadata = pickle.loads((small / ".metadata").read_bytes())
    where = metadata.storage_data[index_of(metadata, "note.x")]
    data = bytearray((small / where.relative_path).read_bytes())
    data[where.offset : where.offset + where.length] = b"x" * where.length
    (small / where.relative_path).write_bytes(data)
    with refusing(UnknownFormatError, r"note.x: is not a torch file"):
        read(small)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda o: o["param_groups"][0].update(params=[0, "a"]), "names and numbers"),
        (lambda o: o["param_groups"][0].update(params=["a", "a"]), "a parameter twice"),
        (lambda o: o["param_groups"].append({"params": [0]}), "a parameter twice, or mix names and numbers"),
        (lambda o: o["state"].update(a=5), "a dict by slot"),
        (lambda o: o["param_groups"].append({"params": ["zz"]}) or o["state"].update(b={"m": torch.ones(4)}),
         "state of parameters that are in no param group: b"),
    ],
)  # fmt: skip
def test_optimizer_that_contradicts_itself_is_refused(change, message):
    optimizer = {"state": {"a": {"m": torch.ones(2)}}, "param_groups": [{"lr": 1.0, "params": ["a"]}]}
    change(optimizer)
    model = {"a": torch.ones(2), "b": torch.ones(4)}
    with refusing(ZckptError, message):
        read(saved("ckpt", {"model": model, "optim": optimizer}))


def test_state_that_no_list_names_goes_into_the_only_group():
    """Pipeline stages save their lists under one key, and torch keeps one of them."""
    optimizer = {"state": {n: {"m": torch.ones(2)} for n in "ab"}, "param_groups": [{"lr": 1.0, "params": ["a"]}]}
    model = {"a": torch.ones(2), "b": torch.ones(2)}
    checkpoint = read(saved("ckpt", {"model": model, "optim": optimizer}))
    assert checkpoint.param_groups[0].parameters == ["a", "b"]
    assert checkpoint.warnings == ["no param group lists b, which have state; they are added to the only group"]


def test_other_directories_are_not_taken_for_one(tmp_path):
    assert find(tmp_path) is None
    (tmp_path / "step-100").mkdir()
    (tmp_path / "step-100" / ".metadata").write_bytes(b"")
    assert find(tmp_path) is None
    assert not safetensors_shards.is_sharded(tmp_path)
    with refusing(UnsupportedError, "neither a model nor an optimizer"):
        read(saved(tmp_path / "x", {"a": 1}))


def test_directory_of_megatron_core_without_its_mark_is_refused_by_name():
    """Its optimizer's slots would be taken for weights: `optimizer.state.exp_avg.NAME`, `...fp32_param...`."""
    directory = copied("dcp_fsdp2_dp2")
    (directory / "common.pt").write_bytes(b"anything")
    with refusing(UnsupportedError, "Megatron-Core's torch_dist"):
        open_checkpoint(directory)


def test_other_notes_in_json_beside_a_checkpoint_are_none_of_megatrons():
    directory = copied("dcp_fsdp2_dp2")
    (directory / "metadata.json").write_text('{"who": "me"}')
    assert open_checkpoint(directory).format == "dcp"


def test_an_adapters_optimizer_gets_the_names_of_its_file(tmp_path):
    """Accelerate saves of a PEFT model what PEFT gives, without the adapter's name, and the optimizer with it."""
    q, tokens = "base_model.model.model.layers.0.self_attn.q_proj", "base_model.model.model.embed_tokens.token_adapter"
    shapes = {
        f"{q}.lora_A.weight": (f"{q}.lora_A.default.weight", (4, 6)),
        f"{q}.lora_B.weight": (f"{q}.lora_B.default.weight", (6, 4)),
        f"{q}.lora_magnitude_vector": (f"{q}.lora_magnitude_vector.default.weight", (6,)),
        f"{tokens}.trainable_tokens_delta": (f"{tokens}.trainable_tokens_delta.default", (3, 6)),
        "base_model.model.lm_head.weight": ("base_model.model.lm_head.modules_to_save.default.weight", (9, 6)),
    }
    weights = {name: torch.randn(shape) for name, (_, shape) in shapes.items()}
    state = {called: {"step": torch.tensor(3.0), "exp_avg": torch.randn(shape)} for called, shape in shapes.values()}
    optimizer = {"state": state, "param_groups": [{"params": list(state), "lr": 0.1}]}
    dcp.save({"model": weights}, checkpoint_id=tmp_path / "pytorch_model_fsdp_0", no_dist=True)
    dcp.save({"optimizer": optimizer}, checkpoint_id=tmp_path / "optimizer_0", no_dist=True)
    checkpoint = opened(open_checkpoint(tmp_path))
    assert not checkpoint.warnings
    assert not checkpoint.unnamed
    assert [group.parameters for group in checkpoint.param_groups] == [list(shapes)]
    for name, (called, _) in shapes.items():
        assert torch.equal(checkpoint.read(name, "weight"), weights[name])
        assert torch.equal(checkpoint.read(name, "exp_avg"), state[called]["exp_avg"])


@pytest.mark.parametrize("counted", [3, None])
def test_the_trainers_step_is_known_where_its_optimizer_counts_none(counted, tmp_path):
    """As Lion's, and schedule-free ones'."""
    optimizer = {"state": {"a.weight": {"exp_avg": torch.ones(2)}}, "param_groups": [{"params": ["a.weight"]}]}
    dcp.save({"model": {"a.weight": torch.ones(2)}}, checkpoint_id=tmp_path / "pytorch_model_fsdp_0", no_dist=True)
    dcp.save({"optimizer": optimizer}, checkpoint_id=tmp_path / "optimizer_0", no_dist=True)
    (tmp_path / "trainer_state.json").write_text(json.dumps({"global_step": counted}))
    assert open_checkpoint(tmp_path).step == counted


def test_a_run_of_olmo_core_is_its_last_step_with_what_its_ranks_keep(tmp_path):
    """One of its files has only a rank's chunks without elements."""
    for step in (3, 10):
        shutil.copytree(source("olmo3_fsdp2_dp2"), tmp_path / f"step{step}")
    found = open_checkpoint(tmp_path)
    assert (Path(found.source).name, found.step, found.world_size) == ("step10", 3, 2)
    assert set(found.metadata) == {"train/rank0", "train/rank1"}
    truth = Truth(OTHER / "olmo3_fsdp2_dp2")
    for key, tensor in truth.tensors.items():
        slot, name = key.split("/")
        assert_same(opened(found).read(name, slot).reshape(tensor.shape), tensor, key)
    assert {f"{s}/{p.name}" for p in found.parameters.values() for s in p.slots} == set(truth.tensors)
    assert zckpt.verify(tmp_path, deep=True).sound
    zckpt.strip(tmp_path / "step3", tmp_path / "stripped", optimizer=True)
    assert zckpt.open(tmp_path / "stripped").slot_names() == ["weight"]
    assert {one.parent.name for one in (tmp_path / "stripped").rglob("*.distcp")} == {"model_and_optim"}
    shutil.copytree(tmp_path / "step3/model_and_optim", tmp_path / "step-4")
    with refusing(UnknownFormatError, "holds steps of two programs: step-4, step10"):
        open_checkpoint(tmp_path)


def test_a_damaged_run_of_olmo_core_is_told():
    step = Path("step3")
    shutil.copytree(source("olmo3_fsdp2_dp2"), step)
    Path("node/train").mkdir(parents=True)
    (step / "train/rank0.pt").rename(Path("node/train/rank0.pt"))
    assert not zckpt.open(step, roots=["node"]).warnings
    assert any("rank number 0 is missing" in one for one in open_checkpoint(step).warnings)
    (step / ".metadata.json").write_bytes(b"")
    assert not zckpt.verify(step, deep=True).sound
    cut = step / "model_and_optim/__1_5.distcp"  # whose second half are chunks without elements
    cut.write_bytes(cut.read_bytes()[: cut.stat().st_size // 2])
    with refusing(DamagedFileError, "the file ends before"):
        open_checkpoint(step)


def test_joined_keys_of_an_optimizer_among_those_of_its_model_are_its_own():
    model, optimizer = live.trained(nn.Linear(3, 2), lr=0.1)
    own, flat = get_state_dict(model, optimizer, options=FLAT)
    dcp.save({**own, **flat}, checkpoint_id="c")
    assert set(assert_holds("c", model, optimizer).parameters) == {"weight", "bias"}
    assert zckpt.verify("c", deep=True).sound
    again, its = live.trained(nn.Linear(3, 2))
    assert_goes_on(converted("c", "own", "zckpt"), model, optimizer, again, its)
    assert zckpt.load("own", model=again, optimizer=its).notes == []


def test_an_optimizer_without_groups_is_known_by_its_names(tmp_path):
    """As torchrec 1.8 saves it: a row-wise sum, for each shard of columns, beside a dense model's moments."""
    model = {"t0.weight": torch.randn(6, 8), "t1.weight": torch.randn(4, 8), "over.weight": torch.randn(2, 8)}
    rows = {"t0.weight": torch.rand(6), "t1.weight": torch.rand(12)}
    state = {name: {f"{name[:2]}.momentum1": one} for name, one in rows.items()}
    moments = {"step": torch.tensor(3.0), "exp_avg": torch.rand(2, 8), "exp_avg_sq": torch.rand(2, 8)}
    dcp.save({"model": model, "optimizer": {"state": {**state, "over.weight": moments}}}, checkpoint_id=tmp_path / "c")
    targets = ("zckpt", "dcp", "consolidated", "zero-redundancy", "accelerate")
    for to in targets:
        zckpt.convert(tmp_path / "c", tmp_path / to, to=to, **({"groups": "one"} if to == "accelerate" else {}))
    for path in map(tmp_path.joinpath, ("c", *targets)):
        found = zckpt.open(path)
        assert set(found.parameters) == set(model)
        for name, one in rows.items():
            assert torch.equal(found.read(name, f"{name[:2]}.momentum1"), one)
        assert torch.equal(found.read("over.weight", "exp_avg"), moments["exp_avg"])
    again = {"state": {**{name: {f"{name[:2]}.momentum1": torch.zeros_like(one)} for name, one in rows.items()}}}
    dcp.load({"optimizer": again}, checkpoint_id=tmp_path / "dcp")
    assert torch.equal(again["state"]["t1.weight"]["t1.momentum1"], rows["t1.weight"])


def test_a_dict_called_state_of_other_names_is_no_optimizer(tmp_path):
    state = {"state": {"queue": {"weight": torch.ones(3)}}}
    dcp.save({"model": {"weight": torch.ones(2)}, "memory": state}, checkpoint_id=tmp_path)
    assert zckpt.open(tmp_path).param_groups == []
