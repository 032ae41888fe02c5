"""Files of FSDP's ranks: where they are found, boxes of every mesh, names of flat parameters, and every damage.

What real trainings save is in `tests/interop`. Here DTensors are torch's own, of each rank in turn in one process, and
trained state is written by zckpt, as files that real ranks load, without what it keeps for itself.
"""

from __future__ import annotations

import shutil
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

import zckpt
from tests import live
from tests.damage import swap
from tests.formats.holding import converted
from tests.formats.some_tensors import Wrapped
from tests.logical import assert_same_slots
from tests.pairwise import some
from tests.refusals import refusing
from tests.truth import assert_same
from zckpt.errors import (
    DamagedFileError,
    LayoutError,
    LeftOutError,
    ShardError,
    SourceError,
    UnknownFormatError,
    UnsupportedError,
)
from zckpt.formats.account import take_inventory
from zckpt.formats.fsdp_rank_files.across import Across, RankFiles
from zckpt.formats.fsdp_rank_files.held import SHARDED, Held, read_mesh
from zckpt.formats.lost import tensor_of
from zckpt.optim.values import value_of
from zckpt.torchfile import Global, Object, Storage, Tensor

FIXTURES = Path(__file__).parents[2] / "fixtures"
LLAMA = "hf_llama_s2_bf16_dp2"


@contextmanager
def rank_of(rank, world_size) -> Iterator[None]:
    """Be one rank of a world whose other ranks are not there."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def save_cut(
    folder,
    sizes: tuple[int, ...],
    placements: list[Any],
    whole,
    kind: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.clone,
):
    """Save a tensor as every rank of a mesh has it, by torch's own account of who has what."""
    folder.mkdir(parents=True)
    count = int(torch.tensor(sizes).prod())
    for rank in range(count):
        with rank_of(rank, count):
            mesh = init_device_mesh("cpu", sizes, mesh_dim_names=tuple(f"d{at}" for at in range(len(sizes))))
            shape, offset = compute_local_shape_and_global_offset(whole.shape, mesh, placements)
            at = tuple(slice(low, low + n) for low, n in zip(offset, shape, strict=True))
            local = kind(whole[at]) if all(shape) else torch.empty(shape)
            one = DTensor.from_local(local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())
            torch.save({"w": one}, folder / f"model_world_size_{count}_rank_{rank}.pt")


@pytest.mark.parametrize(
    ("sizes", "placements", "shape"),
    [
        ((3,), [Shard(0)], (7, 5)),
        ((4,), [Shard(0)], (2, 3)),
        ((3,), [Shard(1)], (2, 7)),
        ((2, 2), [Replicate(), Shard(0)], (5, 3)),
        ((2, 2), [Shard(0), Replicate()], (5, 3)),
        ((2, 3), [Shard(0), Shard(1)], (5, 7)),
        ((2, 2), [Shard(0), Shard(0)], (9, 2)),
        ((2, 2), [Shard(1), Shard(0)], (5, 3)),
        ((2, 2), [_StridedShard(0, split_factor=2), Shard(0)], (8, 2)),
        ((2, 2, 2), [Replicate(), _StridedShard(0, split_factor=2), Shard(0)], (8, 2)),
        ((2, 2), [Replicate(), Replicate()], (3, 2)),
        ((1,), [Shard(0)], (3, 2)),
    ],
)
def test_boxes_are_where_torch_says(sizes, placements, shape):
    whole = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)
    save_cut(Path("run"), sizes, placements, whole)
    assert torch.equal(zckpt.open("run").read("w", "weight"), whole)
    assert_sound("run")
    zckpt.consolidate("run", "whole.pt")
    assert torch.equal(torch.load("whole.pt")["w"], whole)


def test_a_class_around_what_ranks_have_is_looked_into():
    whole = torch.randn(7, 5)
    save_cut(Path("run"), (2,), [Shard(0)], whole, kind=lambda its: Wrapped(its.clone()))
    assert torch.equal(zckpt.open("run").read("w", "weight"), whole)
    assert_sound("run")


def test_partial_sums_are_refused(tmp_path):
    with rank_of(0, 1):
        one = DTensor.from_local(torch.ones(2), init_device_mesh("cpu", (1,)), [Partial()], run_check=False)
        torch.save({"w": one}, tmp_path / "model_world_size_1_rank_0.pt")
    with refusing(UnsupportedError, "an unsupported placement: expected Shard or Replicate, found Partial"):
        zckpt.open(tmp_path)


def part_of(shape, rank):
    """Rows that are marked as torch 2.15's `CheckpointableTensor` marks them."""
    part = torch.nn.Parameter(torch.full((shape[0] // 2, *shape[1:]), float(rank)))
    part.global_shape, part.global_offsets = shape, ((part.shape[0] * rank, 0),)
    part.local_offsets, part.local_sizes = ((0, 0),), (tuple(part.shape),)
    return part


def test_parts_that_only_attributes_mark_are_refused_in_files_and_in_memory(tmp_path):
    for rank in range(2):
        torch.save({"w": part_of((4, 2), rank)}, tmp_path / f"model_world_size_2_rank_{rank}.pt")
    with refusing(UnsupportedError, "w.*is marked as a part of another"):
        zckpt.open(tmp_path)
    model = torch.nn.Linear(2, 4, bias=False)
    model.weight = part_of((4, 2), 0)
    with refusing(UnsupportedError, "weight is marked as a part"):
        zckpt.save(tmp_path / "no", model=model)


def test_another_order_of_strided_shards_is_refused(tmp_path):
    with rank_of(0, 4):
        mesh = init_device_mesh("cpu", (2, 2))
        one = DTensor.from_local(torch.ones(2, 2), mesh, [_StridedShard(0, split_factor=4), Shard(0)], run_check=False)
        for rank in range(4):
            torch.save({"w": one}, tmp_path / f"model_world_size_4_rank_{rank}.pt")
    with refusing(UnsupportedError, "strided shards in an unsupported order"):
        zckpt.open(tmp_path)


def test_copies_that_differ_are_found():
    save_cut(Path("run"), (2, 2), [Replicate(), Shard(0)], torch.arange(6.0))
    path = Path("run/model_world_size_4_rank_2.pt")
    data = path.read_bytes()
    path.write_bytes(data.replace(torch.arange(3.0).numpy().tobytes(), torch.arange(3.0, 6.0).numpy().tobytes()))
    found = zckpt.verify("run", deep=True)
    assert not found.sound
    assert any("ZC-2" in one.code or "ZC-3" in one.code or "ZC-1" in one.code for one in found.findings)


def mesh_of(**state) -> Object:
    return Object(Global("torch.distributed.device_mesh", "DeviceMesh"), how="newobj", state=state, has_state=True)


def layout_of(**state) -> Object:
    return Object(Global("torch.distributed._mesh_layout", "_MeshLayout"), how="newobj", state=state, has_state=True)


def test_names_of_other_dimensions_than_a_mesh_has_are_none():
    mesh = Object(Global("torch.distributed.device_mesh", "DeviceMesh"))
    mesh.state = {"mesh": tensor_of("int32", (2,)), "_coordinate_on_dim": [1], "mesh_dim_names": ("dp", "tp")}
    assert read_mesh(mesh).names == ()
    mesh.state["mesh_dim_names"] = ("dp",)
    assert read_mesh(mesh).names == ("dp",)


def test_meshes_of_older_torch_are_read():
    ranks = Tensor(Storage("0", "int32", 16, "cpu", 0), "int32", (2, 2), (2, 1), 0, "little")
    old = mesh_of(device_type="cuda", mesh=ranks, mesh_dim_names=("ddp", "fsdp"), _flatten_mesh_list=(0, 1, 2, 3),
                  _coordinate_on_dim=[1, 0])  # fmt: skip
    found = read_mesh(old)
    assert (found.sizes, found.coordinate, found.names, found.device, found.rank) == (
        (2, 2), (1, 0), ("ddp", "fsdp"), "cuda", 2)  # fmt: skip
    later = mesh_of(_layout=layout_of(shape=(2, (2, 3)), stride=(6, (3, 1))), _coordinate_on_dim=[1, 4])
    assert read_mesh(later).sizes == (2, 6)
    for strange in (mesh_of(_coordinate_on_dim=[0]), mesh_of(mesh=ranks), mesh_of(mesh=ranks, _coordinate_on_dim=None)):
        with refusing(UnsupportedError, "does not state the rank's coordinate"):
            read_mesh(strange)
    with refusing(DamagedFileError, "a rank outside its mesh"):
        read_mesh(mesh_of(mesh=ranks, _coordinate_on_dim=[0, 2]))


def in_ranks(source, target, **options) -> zckpt.Written:
    """Convert to files of two ranks, or more."""
    return zckpt.convert(source, target, to="fsdp-rank-files", **{"world_size": 2, **options})


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Callable[..., Path]:
    """Files of two ranks, or more, as a training leaves them: what zckpt writes, without `zckpt.pt`."""
    base = tmp_path_factory.mktemp("ranks")

    def make(name=LLAMA, **options) -> Path:
        folder = base / "-".join([name, *(f"{key}{value}" for key, value in options.items())]).replace("*", "")
        if not folder.exists():
            in_ranks(FIXTURES / name, folder, device="cpu", **options)
            (folder / "zckpt.pt").unlink()
        return folder

    return make


def copied(source, target) -> Path:
    return Path(shutil.copytree(source, target))


def resaved(folder, change: Callable[[Any, int], Any], kind=""):
    """Change what every rank's file holds, or those of a kind; torch loads and saves it."""
    for path in folder.glob(f"{kind}*rank*.pt"):
        torch.save(change(torch.load(path, weights_only=False), int(path.stem[-1])), path)


def assert_same_parameters(found: Path | zckpt.OpenedCheckpoint, expected):
    """Every parameter has the same slots, and nothing is left out."""
    found = zckpt.open(found) if isinstance(found, Path) else found
    for name in expected.parameters:
        assert_same_slots(found, expected, name)
    assert not take_inventory(found).left_out


def assert_sound(path):
    """Nothing is left out, and nothing is wrong."""
    assert not take_inventory(zckpt.open(path)).left_out
    assert zckpt.verify(path, deep=True).sound


@pytest.fixture
def run(written) -> Path:
    """Files of two ranks, to be changed."""
    return copied(written(), "run")


def test_a_run_is_opened_at_its_last_step(written, tmp_path):
    source = written()
    for step in (2, 4):
        copied(source, tmp_path / f"global_step_{step}" / "actor")
    with refusing(UnknownFormatError, r"several steps.*global_step_2, global_step_4.*--tag=global_step_4"):
        zckpt.open(tmp_path)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
    torch.save({"position": 5}, tmp_path / "global_step_2" / "data.pt")
    checkpoint = zckpt.open(tmp_path)
    assert (checkpoint.step, checkpoint.metadata["data"]) == (2, {"position": 5})
    assert not take_inventory(checkpoint).left_out
    assert zckpt.open(tmp_path, tag="global_step_4").step == 4
    assert zckpt.open(tmp_path / "global_step_4").step == 4
    copied(source, tmp_path / "global_step_2" / "critic")
    with refusing(UnknownFormatError, r"several models: actor, critic.*actor, or --tag=actor"):
        zckpt.open(tmp_path)
    assert zckpt.open(tmp_path, tag="global_step_2/critic").step == 2
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("3")
    with refusing(UnknownFormatError, r"names no checkpoint.*global_step_2, global_step_4, found '3'"):
        zckpt.open(tmp_path)


def test_a_step_may_have_no_roles(written, tmp_path):
    for step in (2, 4):
        copied(written(), tmp_path / f"global_step_{step}")
        torch.save({"position": step}, tmp_path / f"global_step_{step}" / "data.pt")
    with refusing(UnknownFormatError, "several steps"):
        zckpt.open(tmp_path)
    (tmp_path / "latest_ckpt_global_step.txt").write_text("4\n")
    assert (zckpt.open(tmp_path).step, zckpt.open(tmp_path).metadata["data"]) == (4, {"position": 4})
    assert not take_inventory(zckpt.open(tmp_path)).left_out


@pytest.mark.parametrize(
    ("names", "ranks", "kept"),
    some([(["data_0.pt", "data_1.pt"], 1, ["data_0.pt"]),
          (["data.pt", "trainer_state.pt"], 3, ["data.pt", "trainer_state.pt"])],
         [(["data_0.pt", "data_1.pt"], 3, ["data_0.pt", "data_1.pt"])]),
)  # fmt: skip
def test_where_a_training_is_in_its_data_goes_along(names, ranks, kept, written):
    """verl's SFT trainer keeps it beside the files of ranks, for each; others in the folder around the actor's."""
    is_around = names[0] == "data.pt"
    source = copied(written(), Path("global_step_4", "actor" if is_around else ""))
    for number, name in enumerate(names):
        torch.save({"position": number}, f"global_step_4/{name}")
    before = zckpt.open("global_step_4")
    assert {Path(name).stem for name in names} <= before.metadata.keys()
    assert not take_inventory(before).left_out
    done = in_ranks("global_step_4", "t", world_size=ranks)
    assert sorted(path.name for path in Path("t").iterdir() if "data" in path.name or "state.pt" in path.name
                  ) == kept  # fmt: skip
    for name in kept:
        assert Path(f"t/{name}").read_bytes() == Path(f"global_step_4/{name}").read_bytes()
    said = " ".join(done.notes)
    assert ("data_1.pt: left out" in said, "data.pt, trainer_state.pt: verl" in said) == (ranks == 1, is_around)
    after = zckpt.open("t")
    assert not take_inventory(after).left_out
    assert zckpt.diff(source.parent if is_around else source, "t").equal
    zckpt.convert("t", "dcp", to="dcp")
    in_ranks("dcp", "t", overwrite=True)
    assert zckpt.open("dcp").metadata.keys() >= {Path(name).stem for name in names}


@pytest.mark.parametrize("groups", ["keep", "one"])
def test_a_schedule_goes_on_at_the_step_of_a_source_without_one(groups):
    """SkyRL gives its scheduler whatever is in the file, and verl, too, if that is not None."""
    source = FIXTURES / "s2_bf16_dp2"
    done = in_ranks(source, "t", groups=groups)
    assert any("lr_scheduler was generated: a LambdaLR after 5 steps" in note for note in done.notes)
    checkpoint = zckpt.open("t")
    count = 1 if groups == "one" else len(zckpt.open(source).param_groups)
    optimizer = torch.optim.SGD([{"params": [torch.ones(1)], "lr": 8.0} for _ in range(count)])
    for rank in range(2):
        state = torch.load(f"t/extra_state_world_size_2_rank_{rank}.pt")["lr_scheduler"]
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 2.0**-step)
        schedule.load_state_dict(state)
        optimizer.step()
        schedule.step()
        assert (schedule.last_epoch, schedule.get_last_lr()) == (checkpoint.step + 1, [8 / 2**6] * count)
    assert not take_inventory(checkpoint).left_out
    assert zckpt.diff(source, "t").equal == (groups == "keep")


def test_resume_check_knows_a_run_of_skyrl(written, tmp_path):
    """As SkyRL 0.3: its trainer is given another option, and reads its own state beside the policy's folder."""
    copied(written(), tmp_path / "global_step_5" / "policy")
    torch.save({"position": 5}, tmp_path / "global_step_5" / "data.pt")
    torch.save({"global_step": 5, "config": {}}, tmp_path / "global_step_5" / "trainer_state.pt")
    found = zckpt.resume_check(tmp_path, program="verl")
    assert found.call == f'trainer.resume_mode=from_path trainer.resume_path="{tmp_path / "global_step_5"}"'
    assert "SkyRL" in (found.given or "")
    assert "data position" in {one["part"] for one in found.comes_back}
    assert "data position" not in {one["part"] for one in found.not_back}
    assert zckpt.resume_check(tmp_path, program="verl", world_size=3).verdict == "no"


@pytest.mark.parametrize("place", ["global_step_4", "global_step_4/actor", "elsewhere"])
@pytest.mark.parametrize("data", [None, "data.pt", "data_0.pt"])
def test_resume_check_says_how_verl_is_called_and_whether_it_finds_the_data(place, data, written, tmp_path):
    """As verl 0.9.1: the step is what follows `global_step_` in the path, and the data's place is in that folder."""
    folder = copied(written(), tmp_path / place)
    step = tmp_path / place.partition("/")[0]
    if data is not None:
        torch.save({"position": 5}, (step if data == "data.pt" else folder) / data)
    found = zckpt.resume_check(step, program="verl")
    path = (found.call or "").split('resume_from_path="')[1].strip('"')
    assert int(path.split("global_step_")[-1]) == zckpt.open(step).step
    is_placed = place != "elsewhere"
    assert (path == str(step), "these files in RUN/global_step_5/actor" in (found.given or "")) == (
        is_placed, not is_placed)  # fmt: skip
    assert "torch 2." in (found.given or "")
    gone = [one["why"] for one in found.not_back if one["part"] == "data position"]
    assert ("data.pt is not in the folder" in "".join(gone)) == (data == "data.pt" and not is_placed)


def test_a_missing_rank_and_other_world_sizes_are_found(run, written):
    for path in written(world_size=3).glob("*_world_size_3_*"):
        shutil.copy(path, run)
    checkpoint = zckpt.open(run)
    assert (checkpoint.world_size, len(checkpoint.leftovers)) == (2, 9)
    assert not take_inventory(checkpoint).left_out
    (run / "fsdp_config.json").unlink()
    with refusing(ShardError, "several world sizes: expected files of one save, found 2, 3"):
        zckpt.open(run)
    for path in run.glob("*_world_size_3_*"):
        path.unlink()
    (run / "optim_world_size_2_rank_0.pt").unlink()
    with refusing(ShardError, "the optim file of rank 0 is missing"):
        zckpt.open(run)
    with refusing(SourceError, "is one rank's file of an FSDP checkpoint: give its directory"):
        zckpt.open(run / "model_world_size_2_rank_1.pt")
    for path in run.glob("model_*"):
        path.unlink()
    (run / "optim_world_size_2_rank_1.pt").rename(run / "optim_world_size_2_rank_0.pt")
    with refusing(UnsupportedError, "rank files of an optimizer without the model's"):
        zckpt.open(run)


@pytest.mark.parametrize(
    ("kind", "change", "error", "words"),
    [
        ("optim", lambda tree, rank: tree["param_groups"][0].update(lr=rank), LayoutError,
         "param group 0 has another lr than rank 0's"),
        ("optim", lambda tree, rank: tree["state"][0].update(step=torch.tensor(rank)), LayoutError,
         "state step of the optimizer's parameter 0 differs from the first rank's"),
        ("optim", lambda tree, rank: rank and tree.pop("state"), DamagedFileError,
         "expected an optimizer's state dict"),
        ("model", lambda tree, rank: rank and tree.pop("model.norm.weight"), LayoutError,
         "has other tensors than rank 0's file"),
        *(("model", lambda tree, rank, of=sizes: tree.update(w=torch.ones(of[rank])), UnsupportedError,
           "w is in one-dimensional pieces.*save it as SHARDED_STATE_DICT") for sizes in ((3, 0), (2, 1))),
    ],
)  # fmt: skip
def test_ranks_that_contradict_each_other_are_refused(kind, change, error, words, run):
    """And pieces of which no file says where they belong."""
    resaved(run, lambda tree, rank: (change(tree, rank), tree)[1], kind)
    with refusing(error, words):
        zckpt.open(run)


def test_ranks_that_changed_places_are_refused(run):
    swap(run / "model_world_size_2_rank_0.pt", run / "model_world_size_2_rank_1.pt")
    with refusing(ShardError, "is another rank's file: expected rank 0, found rank 1"):
        zckpt.open(run)


def test_a_configuration_that_cannot_be_read_is_found(run):
    (run / "huggingface").mkdir()
    (run / "huggingface/config.json").write_text('{"model_type": "llama"}')
    for name in ("fsdp_config.json", "huggingface/config.json"):
        assert take_inventory(zckpt.open(run)).left_out == []
        text = (run / name).read_text()
        (run / name).write_text(text[: len(text) // 2])
        assert [item.file for item in take_inventory(zckpt.open(run)).left_out] == [name]
        (run / name).write_text(text)


@pytest.mark.parametrize("kind", ["model", "optim"])
def test_a_file_under_the_name_of_another_rank_is_named(kind, written):
    """Rank 2 has nothing of what has one row: copied over rank 0's file, it leaves no element of that."""
    folder = copied(written("s2_bf16_dp2", world_size=3), "f")
    shutil.copy(folder / f"{kind}_world_size_3_rank_2.pt", folder / f"{kind}_world_size_3_rank_0.pt")
    with refusing(ShardError, f"{kind}_world_size_3_rank_0.pt: is another rank's file: .* found rank 2"):
        zckpt.open(folder)


def test_a_tensor_of_which_no_rank_has_any_element_is_not_covered():
    with refusing(LayoutError, r"expected 3 elements of shape \(3,\), found 0"):
        files = RankFiles(["a", "b"])
        files.joined("weight", "w", Across(files, dict.fromkeys((0, 1), Held(SHARDED, (3,), "float32", ()))))


@pytest.mark.parametrize(
    "holds", ["model", "optimizer", "both", "whole model", "model by itself", "optimizer by itself"]
)
def test_a_file_of_one_rank_is_refused_under_any_name(holds, written, tmp_path):
    folder = written()
    model, optimizer = (
        torch.load(folder / f"{kind}_world_size_2_rank_1.pt", weights_only=False) for kind in ("model", "optim")
    )
    trees = {
        "model": {"model": model, "step": 3},
        "optimizer": {"optimizer": optimizer},
        "both": {"model": model, "optimizer": optimizer, "step": 3, "args": {"lr": 0.1}},
        "whole model": {"model": {name: torch.zeros(one.shape) for name, one in model.items()}, "optimizer": optimizer},
        "model by itself": model,
        "optimizer by itself": optimizer,
    }
    for name in ("checkpoint-500.pt", "pytorch_model.bin", "ckpt_rank1.pt"):
        torch.save(trees[holds], tmp_path / name)
        with refusing(UnsupportedError, "holds one rank's part of a sharded checkpoint: .* is a DTensor.* rank 1 of 2"):
            zckpt.open(tmp_path / name)
    shutil.copy(tmp_path / "ckpt_rank1.pt", tmp_path / "ckpt_rank0.pt")
    for name in ("checkpoint-500.pt", "pytorch_model.bin"):
        (tmp_path / name).unlink()
    with refusing(SourceError, r"several files of rank 1|save it with torch.distributed.checkpoint|without their"):
        zckpt.open(tmp_path)


@pytest.fixture
def free(written) -> Path:
    """The same files under names of a program's own, model and optimizer in one, with more beside them."""
    folder = Path("free")
    folder.mkdir()
    for rank in range(3):
        tree = {"step": 5, "args": {"lr": 0.1}, "rng": torch.tensor([rank])}
        for kind, key in (("model", "model"), ("optim", "optimizer")):
            path = written(world_size=3) / f"{kind}_world_size_3_rank_{rank}.pt"
            tree[key] = torch.load(path, weights_only=False)
        torch.save(tree, folder / f"checkpoint-500.rank{rank}.pt")
    return folder


def test_files_of_ranks_are_one_checkpoint_under_any_name(free, written):
    found, expected = zckpt.open(free), zckpt.open(written(world_size=3))
    assert_same_parameters(found, expected)
    assert [one.parameters for one in found.param_groups] == [one.parameters for one in expected.param_groups]
    assert (found.metadata["step"], found.metadata["args"]) == (5, {"lr": 0.1})
    assert [key for key in found.metadata if key.endswith(".rng")] == [
        f"extra_state_world_size_3_rank_{rank}.rng" for rank in (1, 2)
    ]
    assert zckpt.verify(free, deep=True).sound
    node = Path("node")
    node.mkdir()
    (free / "checkpoint-500.rank2.pt").rename(node / "checkpoint-500.rank0.pt")
    nodes = zckpt.open(free, roots=[node])
    assert_same_parameters(nodes, expected)
    assert nodes.metadata.keys() == found.metadata.keys()
    with refusing(zckpt.UsageError, "--root: only applies to a directory"):
        zckpt.open(node / "checkpoint-500.rank0.pt", roots=[node])
    with refusing(ShardError, "the model file of rank 2 is missing: expected 3 files, found 2"):
        zckpt.open(free)


def test_each_rank_may_have_a_folder(free, written):
    for rank in range(3):
        (free / f"rank_{rank}").mkdir()
        (free / f"checkpoint-500.rank{rank}.pt").rename(free / f"rank_{rank}" / "state.pt")
    assert_same_parameters(free, zckpt.open(written(world_size=3)))
    (free / "rank_1").rename(free / "old_1")
    with refusing(ShardError, "the model file of rank 1 is missing: expected 3 files, found 2"):
        zckpt.open(free)


def test_free_names_of_several_steps_and_several_optimizers_are_refused(free):
    path = free / "checkpoint-500.rank1.pt"
    shutil.copy(path, free / "checkpoint-600.rank1.pt")
    with refusing(ShardError, r"several files of rank 1.* found checkpoint-500\.rank1\.pt, checkpoint-600\.rank1\.pt"):
        zckpt.open(free)
    (free / "checkpoint-600.rank1.pt").write_bytes(path.read_bytes()[:3000])
    with refusing(DamagedFileError, "checkpoint-600"):
        zckpt.open(free)
    (free / "checkpoint-600.rank1.pt").unlink()
    resaved(free, lambda tree, _: {**tree, "ema": dict(tree["model"]), "optimizer": [tree["optimizer"]] * 2})
    with refusing(LeftOutError, "would be lost: .*optimizer"):  # the first has all parameters
        zckpt.convert(free, "dcp", to="dcp")

    def halves(tree, _):
        one = tree["optimizer"][0]
        group = one["param_groups"][0]
        count = len(group["params"]) // 2
        return {**tree, "optimizer": [
            {"state": {at: one["state"][number] for at, number in enumerate(its)},
             "param_groups": [{**group, "params": list(range(len(its)))}]}
            for its in (range(count), range(count, 2 * count))
        ]}  # fmt: skip

    resaved(free, halves)
    with refusing(UnsupportedError, r"not exactly one model and one optimizer.* optimizers \('optimizer', 0\)"):
        zckpt.open(free)


def test_composers_files_of_ranks_are_the_last_step_and_one_leads_to_all(free):
    run = Path("run")
    run.mkdir()
    for batch in (2, 10):
        for rank, path in enumerate(sorted(free.iterdir())):
            tree = torch.load(path, weights_only=False)
            state = {"model": tree["model"], "optimizers": {"AdamW": tree["optimizer"]}, "run_name": "a",
                     "timestamp": {"Timestamp": {"batch": batch}}}  # fmt: skip
            torch.save({"state": state, "rng": [tree["rng"]]}, run / f"ep0-ba{batch}-rank{rank}.pt")
    (run / "latest-rank0.pt").symlink_to("ep0-ba10-rank0.pt")
    found, expected = zckpt.open(run), zckpt.open(free)
    for name in expected.parameters:
        assert_same_slots(found, expected, name)
    assert (found.step, found.metadata["run_name"], found.world_size) == (10, "a", 3)
    assert not [one for one in take_inventory(found).left_out if "ba10" in one.file]
    with refusing(UnsupportedError, r"found rank 1 of 3; give its directory, .*run, which has all 3 files"):
        zckpt.open(run / "ep0-ba10-rank1.pt")
    (run / "ep0-ba10-rank2.pt").unlink()
    with refusing(ShardError, "the model file of rank 2 is missing"):
        zckpt.open(run)
    with refusing(UnsupportedError, "with the files of all ranks: there, the model file of rank 2 is missing"):
        zckpt.open(run / "ep0-ba10-rank1.pt")


def test_what_ranks_share_beside_the_model_is_carried_whole(free):
    expected = zckpt.open(copied(free, "without"))

    def averages(tree, rank):
        loop = [dict(tree["model"])]
        loop.append(loop)
        more = {"shadow": [dict(tree["model"]), rank], "decay": 0.5}
        return {**tree, "ema": dict(tree["model"]), "more": more, "loop": loop}

    resaved(free, averages)
    source = zckpt.open(free)
    assert not source.warnings
    others = [key for key in source.metadata if key.endswith("more")]
    assert len(others) == len([*free.iterdir()])  # each rank has its own number there
    for to in (None, "zckpt", "dcp", "fsdp-rank-files"):
        if to:
            zckpt.convert(source, to, to=to)
        found = zckpt.open(to) if to else source
        values = {key: value_of(found.metadata[key]) for key in ("ema", "more", "loop")}
        assert values["loop"][1] is values["loop"]
        assert (values["more"]["decay"], values["more"]["shadow"][1]) == (0.5, 0)
        for name in expected.parameters:
            assert_same_slots(found, expected, name)
            for average in (values["ema"], values["more"]["shadow"][0], values["loop"][0]):
                assert_same(average[name], expected.read(name, "weight"), name)


def test_copies_of_what_ranks_share_beside_the_model_are_held_against_the_first(written):
    source, folder = written(world_size=4, fsdp_size=2), Path("ranks")
    folder.mkdir()
    for rank in range(4):
        model, average = (
            torch.load(source / f"model_world_size_4_rank_{rank}.pt", weights_only=False) for _ in range(2)
        )
        if rank == 2:
            average["model.norm.weight"]._local_tensor.data += 1
        torch.save({"model": model, "ema": average}, folder / f"rank{rank}.pt")
    done = zckpt.convert(folder, "to", to="zckpt")
    assert [note for note in done.notes if "ranks' copies of ema.model.norm.weight differ" in note]
    found = zckpt.verify(folder, deep=True)
    assert [one.code for one in found.findings if one.severity == "error"] == ["ZC-206"]
    first = zckpt.open(source).read("model.norm.weight", "weight")
    assert_same(value_of(zckpt.open("to").metadata["ema"])["model.norm.weight"], first, "ema")


def test_what_a_lost_rank_shared_beside_the_model_is_left_out(free):
    resaved(free, lambda tree, _: {**tree, "ema": dict(tree["model"])})
    whole = copied(free, "whole")
    (free / "checkpoint-500.rank1.pt").unlink()
    options = {"salvage": True, "fill_from": whole, "fill_masters": True}
    done = zckpt.convert(free, "to", to="zckpt", **options)
    assert "ema is incomplete, and left out" in done.warnings
    found, expected = zckpt.open("to"), zckpt.open(whole)
    assert "ema" in expected.metadata.keys() - found.metadata.keys()
    assert_same_parameters(found, expected)


def test_what_ranks_share_otherwise_is_left_out_and_said_to_be(free):
    resaved(free, lambda tree, rank: {**tree, "ema": dict(list(tree["model"].items())[rank:])})
    assert "ema is not read: " in str(zckpt.open(free).warnings)
    with refusing(LeftOutError, r"would be lost: .*ema"):
        zckpt.convert(free, "dcp", to="dcp")
    zckpt.convert(free, "dcp", to="dcp", drop=["*:ema/*", "*:ema/**"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.every(2)
def test_the_model_that_verl_saves_once_more_is_a_copy(dtype, run):
    checkpoint, path = zckpt.open(run), run / "huggingface" / "model.safetensors"
    whole = {name: checkpoint.read(name, "weight").to(dtype).clone() for name in checkpoint.parameters}
    path.parent.mkdir()
    save_file(whole, path)
    assert_sound(run)
    whole["model.norm.weight"] += 1
    save_file(whole, path)
    assert not zckpt.verify(run, deep=True).sound
    save_file({"other": whole["model.norm.weight"]}, path)
    assert zckpt.open(run).duplicates == checkpoint.duplicates


FLAT = {"fsdp_version": 1, "groups": "one", "units": "model.layers.*"}


def assert_holds_llama(folder, names: list[str] | None = None, *, ties=True):
    """Hold what the optimizer has against the fixture of which all files of ranks here are made."""
    found, expected = zckpt.open(folder, names=names), zckpt.open(FIXTURES / LLAMA)
    for parameter in expected.parameters.values():
        for slot in ("exp_avg", "exp_avg_sq"):
            if slot in parameter.slots:
                assert torch.equal(found.read(parameter.name, slot), expected.read(parameter.name, slot))
        assert not ties or found.parameters[parameter.name].tied_to == parameter.tied_to
    assert not found.unnamed


@pytest.mark.parametrize(("place", "name"), some([("huggingface", "{}"), ("", "adam_rank{}.pt")], [("", "{}")]))
def test_a_whole_model_is_that_of_ranks_optimizers(place, name, written):
    source = written(groups="one")
    folder, expected = copied(source, "run"), zckpt.open(source)
    (folder / place).mkdir(exist_ok=True)
    zckpt.consolidate(folder, folder / place / "model.safetensors")
    for path in folder.glob("model_world_*"):
        path.unlink()
    for rank, path in enumerate(sorted(folder.glob("optim_world_*"))):
        path.rename(folder / name.format(path.name if name == "{}" else rank))
    checkpoint = zckpt.open(folder)
    assert any("give --names FILE" in warning for warning in checkpoint.warnings)  # safetensors have no order
    assert_holds_llama(folder, expected.param_groups[0].parameters, ties=False)
    (folder / place / "config.json").write_text('{"model_type": "llama", "transformers_version": "4.57.6"}')
    assert_holds_llama(folder, ties=False)
    checkpoint = zckpt.open(folder)
    assert checkpoint.step == expected.step
    assert all(torch.equal(checkpoint.read(n, "weight"), expected.read(n, "weight")) for n in expected.parameters)
    assert_sound(folder)
    in_ranks(folder, "three", world_size=3)
    assert_holds_llama("three", ties=False)


def test_a_loops_whole_model_says_the_order(written):
    source = written(groups="one")
    folder, expected = Path("run"), zckpt.open(source)
    folder.mkdir()
    for rank in (0, 1):
        shutil.copyfile(source / f"optim_world_size_2_rank_{rank}.pt", folder / f"optimizer_rank{rank}.pt")
    torch.save(
        {name: expected.read(name, "weight") for name in expected.param_groups[0].parameters}, folder / "model.pt"
    )
    assert_holds_llama(folder, ties=False)


def test_pieces_of_fsdp1_beside_a_whole_model_are_refused(written):
    folder = copied(written(world_size=3, **FLAT), "run")
    zckpt.consolidate(folder, folder / "model.safetensors")
    for path in folder.glob("model_world_*"):
        path.unlink()
    with refusing(UnsupportedError, "beside a whole model, .*: expected DTensors, or the model's files of ranks"):
        zckpt.open(folder)


def test_what_is_not_certain_keeps_its_number(run):
    def only_three(tree, _):
        group = {**tree["param_groups"][0], "params": [0, 1, 2]}
        return {"state": {number: tree["state"][number] for number in range(3)}, "param_groups": [group]}

    resaved(run, only_three, "optim")
    checkpoint = zckpt.open(run)
    assert checkpoint.unnamed
    assert any("give --names FILE" in warning for warning in checkpoint.warnings)
    zckpt.consolidate(run, "model.safetensors")
    with refusing(UnsupportedError, "the names of some of the optimizer's parameters are unknown"):
        in_ranks(run, "other")
    names = zckpt.open(FIXTURES / LLAMA).param_groups[0].parameters[:3]
    assert zckpt.open(run, names=names).param_groups[0].parameters == names


@pytest.mark.parametrize("world_size", [1, 3])
def test_units_of_flat_parameters_are_found_without_names_of_modules(world_size, written):
    folder = copied(written(world_size=world_size, **FLAT), "run")
    assert_holds_llama(folder)
    resaved(folder, lambda tree, _: dict(tree), "model")
    assert_holds_llama(folder)


def test_names_say_what_is_in_flat_parameters_of_other_units(written):
    units = "model.layers.*.mlp,model.layers.1"
    folder = copied(written(world_size=3, fsdp_version=1, groups="one", units=units), "run")
    assert_holds_llama(folder)
    resaved(folder, lambda tree, _: dict(tree), "model")
    words = "do not say which parameters the optimizer's numbers stand for.*give --names FILE"
    with refusing(UnsupportedError, words):
        zckpt.open(folder)
    every = [one.name for one in zckpt.open(FIXTURES / LLAMA).owners]
    inner = [[n for n in every if n.startswith(f"model.layers.{layer}.mlp")] for layer in range(2)]
    layer = [n for n in every if n.startswith("model.layers.1.") and n not in inner[1]]
    root = [n for n in every if n not in {*layer, *inner[0], *inner[1]}]
    assert_holds_llama(folder, names=[*root, *inner[0], *layer, *inner[1]])
    with refusing(zckpt.UsageError, "the names do not match the optimizer's state"):
        zckpt.open(folder, names=every)


def test_what_is_written_is_what_is_read(written):
    source = written()
    in_ranks(source, "again", world_size=3, fsdp_size=3)
    found = zckpt.open("again")
    assert_same_parameters(found, zckpt.open(source))
    assert found.details["device"] == "cpu"
    in_ranks("again", "back")
    converted(source, "back", "fsdp-rank-files", world_size=2, overwrite=True)


@pytest.mark.parametrize("to", ["zckpt", "dcp"])
def test_what_ranks_had_of_their_own_is_theirs_again_after_another_format(to, run):
    resaved(run, lambda tree, rank: tree | {"rng": {"cpu": torch.full((5,), rank)}, "read": rank + 1000}, "extra_state")
    zckpt.convert(run, "between", to=to)
    in_ranks("between", "back")
    found = [torch.load(f"back/extra_state_world_size_2_rank_{rank}.pt") for rank in range(2)]
    assert [(one["rng"]["cpu"].tolist(), one["read"]) for one in found] == [([0] * 5, 1000), ([1] * 5, 1001)]


@pytest.mark.parametrize("options", [{}, {"world_size": 4, "fsdp_size": 2}])
@pytest.mark.parametrize("kind", ["model", "optim"])
def test_what_tensors_of_a_file_share_is_one_object_once_it_is_loaded(kind, options, written, tmp_path):
    """A file has one mesh, and one spec for each shape and type; torch saves again what it has loaded, as it was."""
    folder = written(**options)
    for path in sorted(folder.glob(f"{kind}_world_size_*.pt")):
        again = tmp_path / path.name
        torch.save(torch.load(path, weights_only=False), again)
        shared = [[*sharing(torch.load(one, weights_only=False))] for one in (path, again)]
        assert shared[0] == shared[1]
        alike = {one[:2] for one in shared[0]}
        assert len({one[2] for one in shared[0]}) == 1
        assert len({one[3] for one in shared[0]}) == len(alike)
        assert len({one[4] for one in shared[0]}) == len(shared[0]) - (kind == "model")  # which has a tied one


def sharing(root) -> Iterator[tuple[Any, ...]]:
    """Yield of each DTensor its shape and type, and which mesh, spec and storage it has, as numbers in their order."""
    waiting, seen = [root], dict[int, int]()
    while waiting:
        one = waiting.pop()
        if isinstance(one, DTensor):
            spec, storage = one._spec, one._local_tensor.untyped_storage()
            parts = (id(spec.mesh), id(spec), storage._cdata)
            yield tuple(one.shape), one.dtype, *(seen.setdefault(part, len(seen)) for part in parts)
        elif isinstance(one, dict):
            waiting += one.values()


def test_every_rank_keeps_its_random_state(run):

    def with_own(tree, rank):
        return {**tree, "rng": {"cpu": torch.tensor([rank])}, "rank": rank, "world_size": 2}

    resaved(run, with_own, "extra_state")
    done = in_ranks(run, "more", world_size=3)
    assert "rng: ranks from 2 on have none, because the source has fewer ranks" in done.notes
    in_ranks("more", "one", world_size=1)
    in_ranks("one", "back")
    for name, ranks in (("more", 3), ("one", 1), ("back", 2)):
        for rank in range(ranks):
            found = torch.load(f"{name}/extra_state_world_size_{ranks}_rank_{rank}.pt")
            assert (found["rank"], found["world_size"]) == (rank, ranks)
            assert ("rng" in found) == (rank < 2)
            assert rank > 1 or found["rng"]["cpu"].tolist() == [rank]


def test_what_modules_keep_besides_tensors_is_of_all_ranks_or_of_one(written):
    """Any value that has a tensor, as `get_extra_state` returns it; torch refuses a model's file without it."""
    folder = copied(written(world_size=3), "run")
    same, own = "model.layers.0.mlp._extra_state", "model.layers.1.mlp._extra_state"

    def with_extra_state(tree, rank):
        return {**tree, same: {"scale": torch.ones(3)}, own: {"n": 2, "amax": torch.full((2,), rank // 2)}}

    resaved(folder, with_extra_state, "model")
    assert zckpt.verify(folder, deep=True).findings == []
    assert zckpt.open(folder).metadata.keys() > {same, own, f"model_world_size_3_rank_2.{own}"}
    for source, target, size in (("run", "again", 3), ("again", "more", 4), ("run", "zckpt", 0)):
        how = {"to": "fsdp-rank-files", "world_size": size} if size else {"to": "zckpt"}
        zckpt.convert(source, target, **how)
        assert f"model_world_size_3_rank_2.{own}" in zckpt.open(target).metadata
        for rank in range(size):
            found = torch.load(f"{target}/model_world_size_{size}_rank_{rank}.pt", weights_only=False)
            assert found[same]["scale"].tolist() == [1, 1, 1]
            assert found[own]["amax"].tolist() == [int(rank == 2)] * 2


def test_state_that_is_no_dtensor_does_not_hide_the_shape(run):
    """Beside moments, a few values of each parameter that every rank has whole; more than the smallest parameter."""

    def with_few(tree, _):
        return {**tree, "state": {n: {**one, "few": torch.ones(9, 9, 9)} for n, one in tree["state"].items()}}

    resaved(run, with_few, "optim")
    assert_holds_llama(run)
    assert_holds_llama(run, names=zckpt.open(FIXTURES / LLAMA).grouped)


def test_parameters_that_a_program_kept_out_of_fsdp_have_names_beside_a_buffer(run):
    """Under tensor parallelism norms are no DTensors and look as buffers do; of these the optimizer has none."""

    def left_alone(tree, _):
        return {
            "scale": torch.ones(5),
            **{name: one if one.dim() > 1 else torch.ones(one.shape, dtype=one.dtype) for name, one in tree.items()},
        }

    resaved(run, left_alone, "model")
    found = zckpt.open(run)
    assert (found.unnamed, [*found.buffers]) == ({}, ["scale"])
    assert found.grouped == zckpt.open(FIXTURES / LLAMA).grouped


def test_what_cannot_be_written_is_said(torch_file):
    target = Path("out")
    for options, said in (
        ({"fsdp_size": 3, "world_size": 4}, "unusable --fsdp-size: expected a divisor of the world size, 4, found 3"),
        ({"fsdp_version": 1}, "unknown which modules FSDP1 wraps"),
        ({"fsdp_version": 1, "units": "layers.*"}, "--units matches no module"),
        ({"fsdp_version": 1, "units": "model.layers.*", "fsdp_size": 1}, "--fsdp-size only applies to FSDP2"),
        ({"fsdp_version": 3}, "unusable --fsdp-version: expected 1 or 2"),
        ({"units": "model.layers.*"}, "--units only applies to FSDP1: expected --fsdp-version 1"),
    ):
        with refusing(zckpt.UsageError, said):
            in_ranks(FIXTURES / LLAMA, target, **options)
    with refusing(UnsupportedError, "several param groups, but FSDP1 has one state"):
        in_ranks(FIXTURES / "s2_bf16_dp2", target, fsdp_version=1, units="big.*")
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1)
    with refusing(UnsupportedError, "no parameter has state, by whose size a flat one is known"):
        in_ranks(torch_file(live.both(model, optimizer)), target, fsdp_version=1, units="*")
    assert not target.exists()


def test_one_group_has_every_parameter_in_the_models_order():
    done = in_ranks(FIXTURES / LLAMA, "one", groups="one")
    assert any("weight_decay of all parameters is" in note for note in done.notes)
    Path("one/zckpt.pt").unlink()
    found, expected = zckpt.open("one"), zckpt.open(FIXTURES / LLAMA)
    (group,) = found.param_groups
    assert group.parameters == [one.name for one in expected.parameters.values() if one.tied_to is None]
    assert group.state["step"] == expected.param_groups[0].state["step"]
    assert_holds_llama("one")
    expected.parameters = dict(sorted(expected.parameters.items()))
    with refusing(UnsupportedError, "the order of the model's parameters is unknown"):
        in_ranks(expected, "two", groups="one")


def test_one_group_says_which_of_its_parameters_may_be_buffers(torch_file):
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 2))
    model[1].register_buffer("scale", torch.ones(2))
    live.trained(model, optimizer := torch.optim.AdamW(model.named_parameters()))
    done = in_ranks(torch_file(live.both(model, optimizer)), "one", groups="one")
    assert [note for note in done.notes if note.startswith("1.scale, which the source's optimizer does not have, is ")]


def test_lost_metadata_of_a_state_dict_is_no_loss(run):
    resaved(run, lambda tree, _: OrderedDict(tree), "model")
    assert_holds_llama(run)


def test_equal_tensors_that_are_not_said_to_be_tied_stay_two():
    source = FIXTURES / "other" / "dcp_fsdp2_dp2" / "ckpt"  # DCP has both names of a tied parameter, as two
    ranks = converted(source, "ranks", "fsdp-rank-files", world_size=2, verify=True)
    assert zckpt.open(ranks).parameters["head.weight"].tied_to is None


def test_a_training_without_a_scheduler_goes_on_under_deepspeed(written):
    source = written()  # verl writes None then
    converted(source, "deepspeed", "deepspeed", world_size=3, stage=2)


@pytest.mark.parametrize("form", ["fsdp-rank-files", "torch-checkpointing"])
def test_moments_of_a_zero_dimensional_parameter_in_a_group_of_its_own_are_no_values_of_the_group(form, torch_file):
    model = torch.nn.ParameterDict({"gain": torch.tensor(0.5), "rest": torch.arange(3.0)})
    optimizer = torch.optim.AdamW([{"params": [one]} for one in model.values()])
    (model["gain"] * model["rest"].sum()).backward()
    optimizer.step()
    source = torch_file(live.both(model, optimizer))
    zckpt.convert(source, "ranks", to=form, world_size=2, verify=True)
    assert list(zckpt.open("ranks").param_groups[0].state) == ["step"]
    zckpt.convert("ranks", "deepspeed", to="deepspeed", stage=1, world_size=2, verify=True)
    for slot in ("exp_avg", "exp_avg_sq"):
        assert zckpt.open("deepspeed").read("gain", slot) == optimizer.state[model["gain"]][slot]


@pytest.mark.parametrize("form", ["fsdp-rank-files", "torch-checkpointing"])
def test_what_an_optimizer_keeps_of_no_parameter_goes_along(form, torch_file):
    """In `Optimizer.state`, under a text: torch allows it, and the files of ranks have no place for it."""
    model, optimizer = live.trained(torch.nn.Linear(4, 4))
    optimizer.state["shared"] = {"count": 3}
    source = torch_file(live.both(model, optimizer))
    kept = zckpt.open(converted(source, "ranks", form, world_size=2, verify=True)).optimizer_metadata
    assert kept["beside_state"]["rest"]["state"]["shared"] == {"count": 3}


def test_rows_and_columns_of_state_are_of_a_matrix_and_of_no_bias(tmp_path):
    """A bias has as many elements as its matrix has rows; the optimizer has the last of four layers."""
    block = {"norm.weight": (4,), "norm.bias": (4,), "q.weight": (4, 4), "q.bias": (4,), "k.weight": (4, 4),
             "k.bias": (4,), "fc.weight": (8, 4), "fc.bias": (8,), "out.weight": (4, 8), "out.bias": (4,)}  # fmt: skip
    shapes = {"emb.weight": (4, 4), **{f"layers.{at}.{key}": shape for at in range(4) for key, shape in block.items()}}
    model = {name: torch.rand(shape) for name, shape in {**shapes, "norm.weight": (4,), "norm.bias": (4,)}.items()}
    trained = [name for name in model if name.startswith(("layers.3.", "norm."))]
    moments = {name: {"exp_avg_sq_row": torch.rand(one.shape[0]), "exp_avg_sq_col": torch.rand(one.shape[1])}
               if one.dim() > 1 else {"exp_avg_sq": torch.rand(one.shape)} for name, one in model.items()}  # fmt: skip
    groups = [{"lr": 0.1, "params": list(range(len(trained)))}]
    state = {number: moments[name] for number, name in enumerate(trained)}
    torch.save(model, tmp_path / "model_world_size_1_rank_0.pt")
    torch.save({"state": state, "param_groups": groups}, tmp_path / "optim_world_size_1_rank_0.pt")
    opened = zckpt.open(tmp_path)
    for name, one in opened.parameters.items():
        assert {*one.optimizer_slots} <= moments[name].keys(), name
