"""Directories of torch.distributed.checkpoint that zckpt writes: torch reads them, and finds its own form in them.

That FSDP2 trainings on several ranks go on from them is in `tests/interop`.
"""

from __future__ import annotations

import io
import pickle
import re
import zipfile
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

import zckpt
from tests import live
from tests.folders import contents, names_in, nbytes_in
from tests.logical import assert_same_state, assert_same_tree, opened
from tests.pairwise import each
from tests.plans import write_directory
from tests.refusals import refusing
from tests.truth import Truth, assert_same, bits
from zckpt.engine.plan import plan
from zckpt.errors import UnsupportedError, UsageError
from zckpt.formats import open_checkpoint
from zckpt.formats.dcp import writer
from zckpt.formats.dcp.directory import find, is_own
from zckpt.formats.dcp.reader import read
from zckpt.formats.torch_files import reader as torch_reader
from zckpt.operations.open import OpenedCheckpoint
from zckpt.operations.proof import prove
from zckpt.state import Checkpoint, Parameter
from zckpt.torchfile import Global, Object, read_torchfile

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

FIXTURES = Path(__file__).parents[2] / "fixtures"

DEEPSPEED = [
    "s1_fp32_dp2", "s1_bf16_dp2_bf16opt", "s1_bf16_dp2_elastic", "s1_fp32_dp4_sgdm", "s2_bf16_dp4", "s2_fp16_dp2",
    "s2_bf16_dp2_lion", "s2_bf16_dp2_adagrad1g", "s2_bf16_dp2_sgdm", "s1_bf16_dp2_empty", "s2_bf16_dp2_zerodim",
    "s2_bf16_dp2_rr", "s2_bf16_dp2_frozengroup", "s2_bf16_dp2_elastic_fused", "s2_bf16_dp2_client", "s3_bf16_dp3",
    "s3_fp32_dp2", "s3_bf16_dp2_sgdm", "s3_bf16_dp2_nofrozen", "hf_llama_s2_bf16_dp2", "moe_ep2_s2_bf16_dp2",
    "tp2_s1_bf16_dp2",
]  # fmt: skip


@pytest.fixture(params=[1, 3])
def world_size(request, monkeypatch):
    """Files to write; for several, all but the smallest tensors are cut, as only large ones are otherwise."""
    monkeypatch.setattr(writer, "CUT_NBYTES", 16)
    return request.param


def written(checkpoint, directory, *, world_size=1, **options) -> Path:
    write_directory(plan(writer.lay_out(checkpoint, world_size=world_size, **options)), directory)
    return Path(directory)


def written_of(name, directory, **options) -> Path:
    """What is written of a fixture."""
    return written(open_checkpoint(FIXTURES / name), directory, **options)


def metadata_of(directory):
    return pickle.loads(Path(directory, ".metadata").read_bytes())


def blank(directory) -> dict[str, Any]:
    """The state dict of a directory, as nested dicts and lists with wrong values, into which torch loads."""
    from torch.distributed.checkpoint._nested_dict import unflatten_state_dict

    metadata = metadata_of(directory)
    flat = {
        key: torch.full(about.size, 1, dtype=torch.float32).to(about.properties.dtype)
        if isinstance(about, TensorStorageMetadata)
        else "wrong"
        for key, about in metadata.state_dict_metadata.items()
    }
    return unflatten_state_dict(flat, metadata.planner_data)


def loaded(directory) -> dict[str, Any]:
    state = blank(directory)
    dcp.load(state, checkpoint_id=directory, no_dist=True)
    return state


def trained(*, seed=0, **options) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7), torch.nn.Linear(7, 3))
    decayed = [p for p in model.parameters() if p.dim() > 1]
    plain = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": decayed, "weight_decay": 0.1, **options}, {"params": plain, "weight_decay": 0.0}]
    return live.trained(model, torch.optim.AdamW(groups, lr=0.01), steps=2)


def of_torch(model, optimizer, path, **more) -> Checkpoint:
    """What zckpt reads of a file that a program saved."""
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), **more}, path)
    names = {p: name for name, p in model.named_parameters()}
    return torch_reader.read(path, names=[names[p] for group in optimizer.param_groups for p in group["params"]])


def of_model(tensors) -> Checkpoint:
    """What zckpt reads of a file with these tensors."""
    torch.save(tensors, "m")
    return torch_reader.read(Path("m"))


def state_dict_of(model, optimizer) -> dict[str, Any]:
    return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))


# --- what torch reads -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "world_size"), each(DEEPSPEED, [1, 3]), indirect=["world_size"])
@pytest.mark.every(5)
def test_torch_loads_the_truth_into_plain_tensors_and_nothing_is_lost_on_the_way_back(name, world_size):
    checkpoint, truth = open_checkpoint(FIXTURES / name), Truth(FIXTURES / name)
    back = assert_comes_back(checkpoint, "dcp", world_size)
    assert back.loss_scale == checkpoint.loss_scale
    assert back.details["origin"]["zero_stage"] == checkpoint.zero_stage
    state = loaded("dcp")
    model, optimizer = state["model"], state["optimizer"]
    assert state["step"] == checkpoint.step
    assert not optimizer["state"].keys() & truth.tied.keys()
    exact = all(getattr(torch, checkpoint.owner(n).dtype) == value.dtype for n, value in truth.masters.items())
    for parameter in checkpoint.parameters.values():
        owner = checkpoint.owner(parameter.name).name
        expected = truth.weights.get(owner)
        if expected is None:
            expected = truth.masters[owner].to(getattr(torch, parameter.dtype))
        assert model[parameter.name].dtype == getattr(torch, parameter.dtype)
        assert_same(model[parameter.name].to(expected.dtype), expected, parameter.name)
    for buffer, value in truth.buffers.items():
        assert torch.equal(bits(model[buffer]), value), buffer
    for owner, value in truth.masters.items():
        assert_same(model[owner] if exact else optimizer["state"][owner]["master"], value, owner)
    for slot in truth.slots:
        for parameter, value in truth.kind(slot).items():
            assert_same(optimizer["state"][parameter][slot], value, f"{slot}/{parameter}")
    assert [g["params"] for g in optimizer["param_groups"]] == [g.parameters for g in checkpoint.param_groups]
    for group, expected in zip(optimizer["param_groups"], checkpoint.param_groups, strict=True):
        assert {k: v for k, v in group.items() if k != "params"} == expected.hyperparameters
        for parameter in expected.parameters:
            for key, scalar in expected.state.items():
                value = optimizer["state"][parameter][key]
                assert value == getattr(scalar, "value", scalar)
                assert isinstance(value, torch.Tensor) == hasattr(scalar, "dtype")


@pytest.mark.parametrize("name", ["s2_bf16_dp2_client", "s3_bf16_dp3", "s2_bf16_dp2_zerodim"])
@pytest.mark.every(2)
def test_torch_makes_one_file_of_a_directory(name, world_size):
    directory = written_of(name, "dcp", world_size=world_size)
    dcp_to_torch_save(directory, "one.pt")
    assert_same_tree(torch.load("one.pt", weights_only=False), loaded(directory))


def test_a_model_alone_is_loaded_from_a_whole_training_state():
    directory = written_of("s2_bf16_dp4", "dcp", world_size=2)
    expected = loaded(directory)["model"]
    model = {key: torch.zeros_like(value) for key, value in expected.items()}
    dcp.load({"model": model}, checkpoint_id=directory, no_dist=True)
    assert_same_tree(model, expected)


@pytest.mark.parametrize("dtype", ["bool", "int64", "uint16", "complex64", "float64", "float8_e4m3fn", "float8_e5m2"])
def test_tensors_of_every_type_arrive(dtype):
    value = (torch.rand(6, 3) * 100).to(getattr(torch, dtype))
    tensors = {"w": torch.rand(4, 2), "b": value, "t": value.T, "one": value[1, 1], "none": value[:0]}
    assert_same_tree(loaded(written(of_model(tensors), "dcp"))["model"], tensors)


def test_what_torch_loads_does_not_need_deepspeed():
    directory = written_of("s2_bf16_dp2_client", "dcp")
    assert b"deepspeed.runtime" in (directory / "zckpt.pt").read_bytes()
    assert not any(b"deepspeed.runtime" in path.read_bytes() for path in directory.glob("*.distcp"))


# --- the form is torch's own ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [{}, {"lr": torch.tensor(0.03)}, {"tags": ["a", 1], "more": {"x": {"y": (1, 2.5)}, "z": [{"k": None}, [3]]}}],
)
def test_metadata_is_what_torch_makes_of_the_same_state(options):
    model, optimizer = trained(**options)
    directory = written(of_torch(model, optimizer, Path("plain.pt")), "dcp")
    same = {**state_dict_of(model, optimizer), "step": 2}
    dcp.save(same, checkpoint_id="torch", no_dist=True)
    found, expected = metadata_of(directory), metadata_of("torch")
    for entry in expected.state_dict_metadata.values():
        if isinstance(entry, TensorStorageMetadata):
            entry.properties.strides = None  # torch notes them since 2.15, and loads without
    assert found.state_dict_metadata == expected.state_dict_metadata
    assert found.planner_data == expected.planner_data
    assert found.version == expected.version
    assert found.storage_data.keys() == expected.storage_data.keys()
    for index in found.storage_data:
        same = next(other for other in expected.storage_data if other == index)
        assert (type(index.offset), index.index) == (type(same.offset), same.index)
        assert vars(found.storage_data[index]).keys() == vars(expected.storage_data[same]).keys()
    assert_same_tree(loaded(directory), loaded("torch"))


@pytest.mark.parametrize("named", [False, True])
def test_param_names_are_where_the_source_has_them(named):
    model, _ = trained()
    rows = [(name, p) if named else p for name, p in model.named_parameters()]
    groups = [{"params": rows[at::3]} for at in range(3)]
    dcp.save(state_dict_of(model, torch.optim.AdamW(groups)), checkpoint_id="torch", no_dist=True)
    directory = written(open_checkpoint(Path("torch")), "dcp")
    for group in loaded(directory)["optimizer"]["param_groups"]:
        assert group.get("param_names") == (group["params"] if named else None)
    flat = metadata_of(written(open_checkpoint(Path("torch")), "flat", keys="flat")).state_dict_metadata
    assert not any("param_names" in key for key in flat)


def test_another_order_than_the_models_is_known_behind_another_format():
    model, _ = trained()
    dcp.save(state_dict_of(model, torch.optim.AdamW([*model.parameters()][::-1])), checkpoint_id="torch", no_dist=True)
    assert "not in the model's order" in str(zckpt.convert("torch", "whole", to="consolidated").notes)
    for source in ("torch", "whole"):
        with refusing(zckpt.UnsupportedError, "in another order than the model"):
            zckpt.convert(source, "state", to="accelerate")


def test_metadata_names_only_classes_that_torch_has_had_since_2_3(monkeypatch):
    """2.3 has no StorageMeta, and no torch before 2.15 takes tensor properties of six members."""
    directory = written_of("s2_bf16_dp4", "dcp")
    named = set(re.findall(rb"c(torch[a-z_.]*)\n(\w+)\n", (directory / ".metadata").read_bytes()))
    metadata, dtypes = b"torch.distributed.checkpoint.metadata", {b"bfloat16", b"float32", b"int64", b"bool"}
    assert named == {
        *((b"torch", dtype) for dtype in dtypes),
        (b"torch", b"Size"),
        (b"torch.serialization", b"_get_layout"),
        (b"torch.distributed.checkpoint.filesystem", b"_StorageInfo"),
        *((metadata, name) for name in (b"Metadata", b"MetadataIndex", b"TensorStorageMetadata", b"TensorProperties")),
        *((metadata, name) for name in (b"BytesStorageMetadata", b"ChunkStorageMetadata", b"_MEM_FORMAT_ENCODING")),
    }
    states = []
    monkeypatch.setattr(TensorProperties, "__setstate__", lambda _, state: states.append(state))
    metadata_of(directory)
    assert {len(state) for state in states} == {5}


def test_every_item_is_a_sound_archive_of_its_own(world_size):
    directory = written_of("s2_bf16_dp2_client", "dcp", world_size=world_size)
    places = metadata_of(directory).storage_data.values()
    assert {place.relative_path for place in places} == {f"__{rank}_0.distcp" for rank in range(world_size)}
    ends = dict.fromkeys({place.relative_path for place in places}, 0)
    for place in sorted(places, key=lambda place: (place.relative_path, place.offset)):
        assert place.offset == ends[place.relative_path] + -ends[place.relative_path] % 64
        ends[place.relative_path] = place.offset + place.length
        data = (directory / place.relative_path).read_bytes()[place.offset : place.offset + place.length]
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            assert archive.testzip() is None
            assert "archive/data.pkl" in archive.namelist()


def test_large_tensors_are_cut_as_fsdp2_cuts_them_and_files_are_of_one_size():
    model = torch.nn.ModuleDict({"a": torch.nn.Embedding(1001, 64), "b": torch.nn.Linear(640, 300)})
    model["c"] = torch.nn.Embedding(3, 60000)
    directory = written(of_model(model.state_dict()), "dcp", world_size=4)
    metadata = metadata_of(directory)
    for name, parameter in model.named_parameters():
        chunks = metadata.state_dict_metadata[f"model.{name}"].chunks
        pieces = parameter.chunk(4) if parameter.nbytes > writer.CUT_NBYTES else [parameter]
        assert [chunk.sizes for chunk in chunks] == [piece.shape for piece in pieces]
        for rank, chunk in enumerate(chunks if len(chunks) > 1 else []):
            index = dcp.metadata.MetadataIndex(f"model.{name}", chunk.offsets)
            assert metadata.storage_data[index].relative_path == f"__{rank}_0.distcp"
    assert_same_tree(loaded(directory)["model"], dict(model.state_dict()))


def test_small_items_are_dealt_to_the_file_with_the_least():
    items = of_model({f"w{number}": torch.rand(50 + 37 * number) for number in range(40)})
    directory = written(items, "dcp", world_size=4)
    sizes = [(directory / f"__{rank}_0.distcp").stat().st_size for rank in range(4)]
    assert max(sizes) - min(sizes) < 2000


def test_more_ranks_than_items_leave_no_empty_files():
    directory = written(of_model({"w": torch.rand(3)}), "dcp", world_size=9)
    assert names_in(directory) == [".metadata", "__0_0.distcp", "zckpt.pt"]


def test_tensors_of_one_kind_share_the_bytes_around_them():
    """A hundred thousand small tensors take no memory for as many archives."""
    file, *_ = writer.lay_out(of_model({f"w{number}": torch.rand(4, 5) for number in range(50)}))
    assert len(file.holes) == 50
    assert len({id(literal.data) for literal in file.literals}) == 2


def test_the_same_state_gives_the_same_bytes():
    checkpoint = open_checkpoint(FIXTURES / "s2_bf16_dp2_client")
    one, two = (contents(written(checkpoint, name, world_size=2)) for name in ("one", "two"))
    assert one == two


# --- what lies beside the model and the optimizer -------------------------------------------------------------------


def test_what_torch_can_read_by_itself_is_in_the_state_dict():
    model, optimizer = trained()
    more = {
        "lr_scheduler": {"last_epoch": 2, "base_lrs": [0.01, 0.02], "_last_lr": (0.1,)},
        "ema": {"w": torch.rand(7, 2).T, "list": [torch.arange(3), {"x": 1.5}]},
        "rng": torch.get_rng_state(),
    }
    state = loaded(written(of_torch(model, optimizer, Path("plain.pt"), **more), "dcp"))
    assert_same_tree({key: state[key] for key in more}, more)


def test_what_only_others_can_read_is_beside_it():
    """Foreign classes, what torch cannot tell apart once it is flat, and trees that are none or have no end."""
    loop = []
    loop.append(loop)
    laughs = ["ha"]
    for _ in range(30):
        laughs = [laughs] * 10
    deep = [{}]
    for _ in range(100):
        deep = [deep, {}]
    foreign = Object(Global("some.library", "Thing"))
    odd = {"loop": loop, "laughs": laughs, "deep": deep, "foreign": {"x": [foreign]}, "twice": {1: 0, "1": 0}}
    checkpoint = open_checkpoint(FIXTURES / "s2_bf16_dp4")
    checkpoint.metadata |= {**odd, "model": "another", "model.emb.weight": 3, "fine": {"a": 1}}
    directory = written(checkpoint, "dcp")
    state = loaded(directory)
    assert state["fine"] == {"a": 1}
    assert not {*odd, "model.emb.weight"} & state.keys()
    assert isinstance(state["model"], dict)
    rest = read_torchfile(directory / "zckpt.pt").root
    assert {*odd, "model", "model.emb.weight", "fine"} <= rest["metadata"].keys()
    assert rest["metadata"]["loop"][0] is rest["metadata"]["loop"]


# --- and back -------------------------------------------------------------------------------------------------------


def assert_comes_back(checkpoint, directory, world_size) -> OpenedCheckpoint:
    back = opened(read(find(written(checkpoint, directory, world_size=world_size))))
    prove(checkpoint, back)
    assert_same_state(back, opened(checkpoint))
    return back


@pytest.mark.parametrize("name", ["plain_adamw", "plain_mixed", "zro_dp2_adamw/ckpt/zero_rank0.pt"])
def test_parameters_without_names_keep_their_numbers(name):
    path = FIXTURES / "other" / name
    checkpoint = open_checkpoint(path if path.is_file() else path / "ckpt.pt")
    back = assert_comes_back(checkpoint, "dcp", 2)
    assert {label: p.slots.keys() for label, p in back.unnamed.items()} == {
        label: p.slots.keys() for label, p in checkpoint.unnamed.items()
    }


def test_parameters_and_hyperparameters_that_torch_has_no_place_for_come_back():
    odd = {"empty": {}, "numbered": {1: "a"}, "mixed": [{}, {"x": []}, 3], "pair": (1, {"y": 2})}
    checkpoint = of_torch(*trained(**odd), Path("plain.pt"))
    checkpoint.parameters["absent"] = Parameter("absent", (3, 4), "float16", frozen=True)
    back = assert_comes_back(checkpoint, "dcp", 2)
    assert {key: back.param_groups[0].hyperparameters[key] for key in odd} == odd


# --- refusals -------------------------------------------------------------------------------------------------------


def test_two_leaves_with_one_key_are_refused():
    model, optimizer = trained(**{"a": {"b": 1}, "a.b": 2})
    with refusing(UnsupportedError, r"optimizer\.param_groups\.0\.a\.b"):
        writer.lay_out(of_torch(model, optimizer, Path("plain.pt")))


def test_hyperparameters_without_end_are_refused():
    checkpoint = open_checkpoint(FIXTURES / "s2_bf16_dp4")
    endless = {}
    checkpoint.param_groups[0].hyperparameters["endless"] = endless | {"x": endless}
    endless["x"] = endless
    with refusing(UnsupportedError, r"nested too deeply|too many"):
        writer.lay_out(checkpoint)


def test_a_world_without_ranks_is_refused():
    with refusing(UsageError, "world size"):
        writer.lay_out(open_checkpoint(FIXTURES / "s2_bf16_dp4"), world_size=0)


def test_own_names():
    directory = written_of("s2_bf16_dp4", "dcp", world_size=3)
    assert all(is_own(path.name) for path in directory.iterdir())
    for name in ("model.pt", "__x_0.distcp", "sub/.metadata", "__00_0.distcp", ".metadata.txt", "meta.pt"):
        assert not is_own(name), name


@pytest.mark.parametrize("world_size", [1, 3])
def test_tensors_beside_the_model_are_there_once(world_size, torch_file):
    """Where torch finds them, and nowhere else; zckpt has them back as they were."""
    shared = torch.randn(100)
    beside = {
        "ema": {"w": torch.randn(300_000), "n": 3, "deep": {"v": torch.randn(5).half()}},
        "list": [torch.randn(50_000), 1, [torch.ones(2), "x"]],
        "tuple": (torch.randn(50_000), None),
        "alone": torch.arange(60_000),
        "sharing": {"a": shared, "b": shared[10:]},  # not to be had from its items
        "note": "text",
    }
    path = torch_file({"model": {"w": torch.randn(200_000)}, **beside})
    zckpt.convert(path, "dcp", to="dcp", world_size=world_size)
    assert nbytes_in("dcp") < 1.05 * (path).stat().st_size
    assert Path("dcp/zckpt.pt").stat().st_size < 10_000
    found = loaded("dcp")
    assert_same_tree({key: found[key] for key in ("ema", "alone")}, {key: beside[key] for key in ("ema", "alone")})
    zckpt.convert("dcp", "back.pt", to="consolidated")
    back = torch.load("back.pt")["zckpt"]["metadata"]
    assert_same_tree(back, beside)
    assert back["sharing"]["a"].data_ptr() + 40 == back["sharing"]["b"].data_ptr()


# --- flat keys ------------------------------------------------------------------------------------------------------


FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def flat_state_dict_of(model, optimizer) -> dict[str, Any]:
    """What torchtitan saves: the model's names at the top, the optimizer's flattened."""
    model_state, optimizer_state = get_state_dict(model, optimizer, options=FLAT)
    return {**model_state, "optimizer": optimizer_state}


@pytest.mark.parametrize("ranks", [1, 3])
def test_flat_keys_are_those_that_torch_saves_and_it_goes_on_from_them(ranks, monkeypatch):
    monkeypatch.setattr(writer, "CUT_NBYTES", 16)
    model, optimizer = trained()
    written(of_torch(model, optimizer, Path("one.pt")), "flat", world_size=ranks, keys="flat")
    dcp.save(flat_state_dict_of(model, optimizer), checkpoint_id="theirs", no_dist=True)
    ours, theirs = metadata_of("flat"), metadata_of("theirs")
    steps = {key for key in ours.state_dict_metadata if key.partition(".")[0] == "step"}
    assert ours.state_dict_metadata.keys() - steps == theirs.state_dict_metadata.keys()
    assert {key: ours.planner_data[key] for key in theirs.planner_data} == theirs.planner_data

    other, resumed = trained(seed=1)
    state = flat_state_dict_of(other, resumed)
    dcp.load(state, checkpoint_id="flat", no_dist=True)
    set_state_dict(other, resumed, model_state_dict={name: state[name] for name in other.state_dict()},
                   optim_state_dict=state["optimizer"], options=FLAT)  # fmt: skip
    assert_same_tree(state_dict_of(other, resumed), state_dict_of(model, optimizer))


@pytest.mark.parametrize("name", ["s2_bf16_dp4", "s2_bf16_dp2_frozengroup", "s3_bf16_dp2_sgdm", "s2_bf16_dp2_client"])
@pytest.mark.every(4)
def test_flat_keys_come_back_with_their_groups(name, world_size):
    checkpoint = open_checkpoint(FIXTURES / name)
    path = written(checkpoint, "dcp", world_size=world_size, keys="flat")
    assert_same_state(opened(read(find(path))), opened(checkpoint))


def test_groups_of_equal_values_stay_two():
    model, optimizer = trained()
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.1
    saved = of_torch(model, optimizer, Path("one.pt"))
    found = read(find(written(saved, "flat", keys="flat")))
    assert [group.parameters for group in found.param_groups] == [group.parameters for group in saved.param_groups]


def test_a_model_without_an_optimizer_has_flat_keys(torch_file):
    expected = torch.nn.Linear(2, 3).state_dict()
    zckpt.convert(torch_file(expected), "flat", to="dcp", keys="flat")
    assert_same_tree(loaded("flat"), dict(expected))


def test_a_tensor_with_the_optimizers_key_is_refused():
    model = torch.nn.Module()
    model.optimizer = torch.nn.Parameter(torch.rand(3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    saved = of_torch(model, optimizer, Path("one.pt"))
    with refusing(UnsupportedError, "the optimizer's key"):
        writer.lay_out(saved, keys="flat")


def test_a_group_without_parameters_is_refused():
    saved = of_torch(*trained(), Path("one.pt"))
    saved.param_groups.append(replace(saved.param_groups[0], parameters=[]))
    with refusing(UnsupportedError, "without parameters"):
        writer.lay_out(saved, keys="flat")


def test_values_of_one_dict_that_lie_in_several_files_are_written():
    """As torchtitan's `train_state`, whose values the ranks share among them."""
    train_state = {"step": torch.tensor(3), "seen": torch.tensor([7]), "state": b"any"}
    state = {"model": {"w": torch.ones(2)}, "train_state": train_state}
    spread = dcp.FileSystemWriter(Path("source"), single_file_per_rank=False)
    dcp.save(state, storage_writer=spread, no_dist=True)
    assert len(list(Path("source").glob("*.distcp"))) > 1
    zckpt.convert("source", "target", to="dcp")
    loaded = {"train_state": {"step": torch.tensor(0), "seen": torch.tensor([0]), "state": b""}}
    dcp.load(loaded, checkpoint_id="target", no_dist=True)
    assert loaded == {"train_state": train_state}


# --- what modules keep besides tensors


class Counting(torch.nn.Linear):
    kept: Any = 0

    def get_extra_state(self):
        return self.kept

    def set_extra_state(self, state):
        self.kept = state


class Bare(torch.nn.Identity):
    """Without a tensor of its own, as what computes attention in Transformer Engine."""

    get_extra_state, set_extra_state = Counting.get_extra_state, Counting.set_extra_state


def counting(kept) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Sequential(Counting(3, 4), torch.nn.Sequential(Counting(4, 2), Bare()))
    model[1][1].kept = model[0].kept = model[1][0].kept = kept
    return live.trained(model)


@pytest.mark.parametrize(
    ("source", "by_way", "keys"),
    each(
        ["torch", "nested", "flat", "torch beside a mean", "nested beside a mean"],
        [[], ["deepspeed"], ["fsdp-rank-files", "deepspeed"], ["dcp", "dcp"]],
        ["nested", "flat"],
    ),
)
def test_what_modules_keep_besides_tensors_is_in_the_model_wherever_it_comes_from(source, by_way, keys):
    kept = {"count": 5, "amax": torch.arange(3.0)}
    model, optimizer = counting(kept)
    state, its = get_state_dict(model, optimizer)
    path = Path("source")
    mean = {"ema": counting({"count": 9, "amax": torch.ones(3)})[0].state_dict()} if "mean" in source else {}
    if source.startswith("torch"):
        torch.save({**mean, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    else:
        whole = {**state, "optimizer": its} if source == "flat" else {**mean, "model": state, "optimizer": its}
        dcp.save(whole, checkpoint_id=path, no_dist=True)
    options = {"dcp": {}, "fsdp-rank-files": {"world_size": 2}, "deepspeed": {"world_size": 2, "stage": 3}}
    for number, to in enumerate(by_way):
        zckpt.convert(path, f"{number}", to=to, **options[to])
        path = Path(f"{number}")
    zckpt.convert(path, "target", to="dcp", keys=keys)
    other, _ = counting({"count": 0, "amax": torch.zeros(3)})
    found = other.state_dict()
    dcp.load({"model": found} if keys == "nested" else found, checkpoint_id="target", no_dist=True)
    other.load_state_dict(found)
    for module in (other[0], *other[1]):
        assert module.kept["count"] == 5
        assert torch.equal(module.kept["amax"], kept["amax"])
    assert torch.equal(other[0].weight, model[0].weight)
    assert zckpt.verify("target", deep=True).sound


@pytest.mark.parametrize(("to", "options", "path"), [
    ("consolidated", {}, ""), ("zero-redundancy", {"world_size": 2}, "model.pt"),
    ("accelerate", {"fsdp": "full"}, "pytorch_model_fsdp.bin"),
    ("accelerate", {"fsdp": "sharded", "world_size": 2}, "pytorch_model_fsdp_0"), (None, {}, "")])  # fmt: skip
@pytest.mark.parametrize("kept", [{"count": 5, "amax": torch.arange(3.0)}, Fraction(1, 3)], ids=["plain", "a class"])
@pytest.mark.every(2)
def test_every_model_that_torch_files_hold_has_what_modules_keep(kept, to, options, path):
    """As strict loading wants it; but nothing that a reader may not be able to load."""
    model, optimizer = counting(kept)
    source, target = "source.pt", Path(f"target{'' if path else '.pt'}")
    live.save_both(model, optimizer, source)
    if to is None:
        zckpt.consolidate(source, target)
    else:
        zckpt.convert(source, target, to=to, verify=True, **options)
        assert zckpt.verify(target, deep=True).findings == []
        zckpt.convert(target, "again", to="zckpt", verify=True)
        assert "model" in zckpt.open("again").metadata
    other, _ = counting({"count": 0, "amax": torch.zeros(3)})
    found = other.state_dict()
    if isinstance(kept, Fraction):
        found = {name: one for name, one in found.items() if not name.endswith("_extra_state")}
    if path == "pytorch_model_fsdp_0":
        dcp.load({"model": found}, checkpoint_id=target / path, no_dist=True)
    else:
        saved = torch.load(target / path, weights_only=not isinstance(kept, Fraction) or to != "consolidated")
        found = saved.get("model", saved)
    other.load_state_dict(found, strict=not isinstance(kept, Fraction))
    assert torch.equal(other[0].weight, model[0].weight)
    if not isinstance(kept, Fraction):
        assert [module.kept["count"] for module in (other[0], *other[1])] == [5, 5, 5]
        assert torch.equal(other[1][1].kept["amax"], kept["amax"])
