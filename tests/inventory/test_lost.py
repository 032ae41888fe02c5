"""What nothing reads is shown, found, refused, and dropped only by name; what programs keep beside is carried."""

from __future__ import annotations

import json
import shutil
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import zckpt
from tests import live
from tests.cli.console import FIXTURES, inspected, refused, run, succeeded
from tests.damage import copy, edit, flip, optimizer_file
from tests.folders import names_in
from tests.formats.holding import converted
from tests.inventory.sources import SOURCES
from tests.logical import assert_same_bits
from tests.pairwise import each
from tests.refusals import refusing
from tests.truth import Truth
from zckpt.errors import LeftOutError
from zckpt.formats.account import take_inventory
from zckpt.state.inventory import CARRIED, COPY, FOREIGN, Inventory

TARGETS = ["zckpt", "dcp", "consolidated", "zero-redundancy"]


def inventory(source) -> Inventory:
    return take_inventory(zckpt.open(source))


def lost(source) -> list[str]:
    return [item.name for item in inventory(source).left_out]


def codes(*arguments) -> tuple[int, set[str]]:
    """Exit status of `verify`, and the codes it found."""
    done = run("verify", "--json", *arguments)
    return done.returncode, {finding["code"] for finding in json.loads(done.stdout)["findings"]}


@pytest.fixture(scope="module")
def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    return live.trained(nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3)))


@pytest.fixture
def trainers(trained: tuple[nn.Module, torch.optim.Optimizer]) -> Path:
    """What Hugging Face's Trainer leaves without DeepSpeed, and a file that nothing reads."""
    model, optimizer = trained
    directory = Path("checkpoint-1")
    directory.mkdir()
    save_file(dict(model.state_dict()), directory / "model.safetensors", {"format": "pt"})
    torch.save(optimizer.state_dict(), directory / "optimizer_old.pt")
    torch.save({"last_epoch": 1, "_last_lr": [1e-3]}, directory / "scheduler.pt")
    torch.save({"cpu": torch.get_rng_state(), "python": (3, (1, 2), None)}, directory / "rng_state.pth")
    for name in ("config.json", "tokenizer.json", "trainer_state.json"):
        (directory / name).write_text("{}")
    (directory / "README.md").write_text("a model")
    return directory


# --- the Trainer's directory -----------------------------------------------------------------------------------------


def test_optimizer_beside_a_model_that_nothing_reads_is_an_error_and_shown(trainers):
    assert lost(trainers) == ["optimizer_old.pt"]
    assert [one["file"] for one in inspected(trainers)["left_out"]] == ["optimizer_old.pt"]
    assert "left out: optimizer_old.pt (nothing has read its 8 tensors)" in succeeded("inspect", trainers).stdout
    assert codes(trainers) == (1, {"ZC-130", "ZC-131"})  # a scheduler is there, and no optimizer


@pytest.mark.parametrize("to", TARGETS)
def test_convert_refuses_what_would_be_lost_and_writes_without_it_if_it_is_named(to, trainers):
    target = Path("target")
    line = refused(3, "convert", trainers, target, "--to", to, words=("optimizer_old.pt", "--drop 'optimizer_old.pt'"))
    assert str(trainers) in line
    assert not target.exists()
    done = succeeded("convert", trainers, target, "--to", to, "--drop", "optim*", "--json")
    assert json.loads(done.stdout)["dropped"] == ["optimizer_old.pt (nothing has read its 8 tensors)"]
    assert lost(target) == []


def test_consolidate_refuses_it_too_and_says_what_it_dropped(trainers):
    target = "m.safetensors"
    refused(3, "consolidate", trainers, target, words=("optimizer_old.pt",))
    done = succeeded("consolidate", trainers, target, "--drop", "optimizer_old.pt")
    assert "dropped optimizer_old.pt (nothing has read its 8 tensors)" in done.stderr
    assert load_file(target).keys() == load_file(trainers / "model.safetensors").keys()


def test_pattern_that_names_nothing_is_refused(trainers):
    refused(2, "convert", trainers, "t", "--to", "zckpt", "--drop", "*", "--drop", "scheduler.pt",
            words=("'scheduler.pt'", "names nothing"))  # fmt: skip
    assert not Path("t").exists()


@pytest.mark.parametrize("to", TARGETS)
def test_scheduler_and_random_states_beside_a_model_go_along(to, trainers):
    (trainers / "optimizer_old.pt").unlink()
    zckpt.convert(trainers, "target", to=to)
    found = zckpt.open("target")
    assert found.metadata["scheduler"] == {"last_epoch": 1, "_last_lr": [1e-3]}
    assert "rng_state" in found.metadata
    assert {item.about for item in inventory(trainers).of(CARRIED)} == {"scheduler", "rng_state", "trainer_state"}


def test_files_of_other_kinds_are_foreign_by_rules_with_names(trainers):
    about = {item.file: item.about for item in inventory(trainers).of(FOREIGN)}
    assert about == {
        "README.md": "notes",
        "config.json": "a configuration of the model",
        "tokenizer.json": "a tokenizer",
    }


def test_checkpoints_below_a_final_model_and_other_programs_models_are_foreign(trainers):
    final = trainers.parent / "final"
    shutil.copytree(trainers, final)
    (final / "optimizer_old.pt").unlink()
    shutil.copytree(trainers, final / "checkpoint-1")
    (final / "onnx").mkdir()
    (final / "onnx" / "model.onnx").write_bytes(b"another program's")
    about = {item.file: item.about for item in inventory(final).of(FOREIGN)}
    assert about["checkpoint-1/optimizer_old.pt"] == "another checkpoint"
    assert about["onnx/model.onnx"] == "a model for another program"
    assert lost(final) == []
    (final / "onnx" / "head.pt").write_bytes((trainers / "optimizer_old.pt").read_bytes())
    assert lost(final) == ["onnx/head.pt"]


def test_a_folder_of_the_optimizers_that_nothing_reads_is_no_other_checkpoint(trainers):
    """As `optimizer_0`, which Accelerate leaves beside what FSDP1 saves as LOCAL_STATE_DICT."""
    (trainers / "optimizer_old.pt").unlink()
    shutil.copytree(FIXTURES / "other/accel_fsdp2_dp2/state/optimizer_0", trainers / "optimizer")
    with refusing(LeftOutError, r"optimizer/__0_0.distcp \(nothing has read it\)"):
        zckpt.convert(trainers, "target", to="zckpt")
    zckpt.convert(trainers, "target", to="zckpt", drop=["optimizer/*"])
    shutil.rmtree(trainers / "optimizer")
    shutil.copytree(trainers, trainers / "optim")
    zckpt.convert(trainers, "again", to="zckpt")


# --- torch files -----------------------------------------------------------------------------------------------------


def test_second_optimizer_of_a_list_is_carried(trained):
    model, optimizer = trained
    other = torch.optim.SGD([nn.Parameter(torch.ones(3))], lr=0.1, momentum=0.9)
    other.param_groups[0]["params"][0].grad = torch.ones(3)
    other.step()
    source = "both.pt"
    torch.save({"model": model.state_dict(), "optimizer": [optimizer.state_dict(), other.state_dict()]}, source)
    assert not lost(source)
    assert any("not read: optimizer" in one for one in zckpt.open(source).warnings)
    there = converted(converted(source, "t", "dcp"), "z", "zckpt")
    assert zckpt.diff(source, there).equal
    assert "optimizer" in zckpt.open(there).metadata


@pytest.mark.parametrize(
    "odd",
    [
        pytest.param(lambda: torch.eye(3).to_sparse(), id="sparse"),
        pytest.param(lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), id="quantised"),
        pytest.param(lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), id="nested"),
    ],
)
@pytest.mark.parametrize("key", ["model", None])
@pytest.mark.filterwarnings("ignore")
def test_tensor_of_another_kind_in_a_state_dict_is_not_lost_in_silence(odd, key):
    state = {"dense": torch.ones(2), "other": torch.zeros(4), "odd": odd()}
    source = Path("m.pt")
    torch.save(state if key is None else {key: state}, source)
    try:
        kept = [item.place for item in inventory(source).items if item.fate == CARRIED]
    except zckpt.UnsupportedError as refusal:
        assert "odd" in str(refusal) or "state dict" in str(refusal)  # noqa: PT017  # either is a word about it
        return
    assert lost(source) or any("odd" in place for place in kept)
    if lost(source):
        refused(3, "consolidate", source, "m.safetensors", words=("odd",))
        assert codes(source)[0] == 1


def test_record_that_no_torch_file_has_is_left_out():
    source = Path("m.pt")
    torch.save({"w": torch.ones(3)}, source)
    with zipfile.ZipFile(source, "a", zipfile.ZIP_STORED) as archive:
        archive.writestr("m/smuggled", b"more")
    assert lost(source) == ["m.pt:smuggled"]
    assert codes(source) == (0, {"ZC-132"})


# --- what a crash or a full disk leaves -------------------------------------------------------------------------------

NAMES = [
    "scheduler.pt", "rng_state_1.pth", "training_args.bin", "trainer_state.json", "config.json", "model.safetensors",
]  # fmt: skip


@pytest.fixture
def trainers_own() -> Path:
    """A copy of what the Trainer left with DeepSpeed."""
    return Path(shutil.copytree(SOURCES["other/trainer_ds2_gpt2"], "s"))


@pytest.mark.parametrize(("name", "left"), each(NAMES, ["nothing", "half", "zeros"]))
def test_a_companion_that_cannot_be_read_is_found_and_refused_unless_it_is_named(name, left, trainers_own):
    path = trainers_own / name
    data = path.read_bytes()
    path.write_bytes({"nothing": b"", "half": data[: len(data) // 2], "zeros": bytes(len(data))}[left])
    for deep in ([], ["--deep"]):
        status, found = codes(trainers_own, *deep)
        assert status == 1
        assert found <= {"ZC-102", "ZC-103"}
    convert = ("convert", trainers_own, Path("t"), "--to")
    for to in ("zckpt", "accelerate"):
        refused(3, *convert, to, words=(name, "cannot be read", f"--drop '{name}'"))
    succeeded(*convert, "zckpt", "--drop", name)


@pytest.mark.parametrize("verb", [("reshard", "--world-size", 3), ("strip", "--unreferenced")])
def test_a_companion_that_cannot_be_read_is_not_copied_as_it_is(verb, trainers_own):
    for name in ("scheduler.pt", "config.json"):
        (trainers_own / name).write_bytes((trainers_own / name).read_bytes()[:40])
    asked = (verb[0], trainers_own, Path("t"), *verb[1:])
    refused(3, *asked, words=("config.json", "scheduler.pt", "--drop"))
    succeeded(*asked, "--drop", "scheduler.pt", "--drop", "config.json")
    there = {*names_in("t")}
    assert "trainer_state.json" in there
    assert not there & {"scheduler.pt", "config.json"}
    assert codes(Path("t"), "--deep")[0] == 0


def test_a_flipped_bit_of_a_companion_is_found_and_refused(trainers_own):
    path = trainers_own / "training_args.bin"
    flip(path, path.read_bytes().index(b"label_names"))
    assert codes(trainers_own, "--deep")[0] == 1
    refused(3, "convert", trainers_own, "t", "--to", "zckpt", words=("training_args.bin",))


def test_a_gap_in_what_programs_count_is_noted(trainers_own):
    assert zckpt.open(trainers_own).warnings == []
    (trainers_own / "rng_state_0.pth").rename(trainers_own / "rng_state_10.pth")
    said = "rng_state number 0 is missing, although rng_state_10.pth exists: was it lost?"
    assert said in " ".join(succeeded("verify", trainers_own).stdout.split())
    assert said in succeeded("convert", trainers_own, "t", "--to", "zckpt").stderr


def test_a_scheduler_without_an_optimizer_is_noted(trainers):
    (trainers / "optimizer_old.pt").rename(trainers / "optimizer.pt")
    said = "there is a scheduler's state but no optimizer state: was it lost?"
    assert said not in zckpt.open(trainers).warnings
    (trainers / "optimizer.pt").unlink()
    assert said in zckpt.open(trainers).warnings


def test_files_that_may_be_empty_mean_nothing(trainers):
    (trainers / "optimizer_old.pt").unlink()
    for name in ("README.md", "train.log", "requirements.txt", "__init__.py", "COMPLETE", "mark"):
        (trainers / name).write_bytes(b"")
    for name in ("settings.json", "ds_config.json"):
        (trainers / name).write_text("{}  // the user's own, with a comment")
    assert lost(trainers) == []


def test_the_end_of_a_long_text_is_looked_at(trainers):
    (trainers / "optimizer_old.pt").unlink()
    text = json.dumps({"vocab": list(range(200_000))})
    (trainers / "tokenizer.json").write_text(text + "\n")
    assert lost(trainers) == []
    (trainers / "tokenizer.json").write_text(text[:-5])
    assert lost(trainers) == ["tokenizer.json"]


# --- DeepSpeed -------------------------------------------------------------------------------------------------------


def add_tensor(content):
    content["optimizer_state_dict"]["preconditioner"] = torch.ones(5)


@pytest.mark.parametrize(
    "verb",
    [("reshard", "--world-size", 3), ("convert", "--to", "zckpt"), ("consolidate",), ("strip", "--unreferenced")],
)
def test_unknown_tensor_in_a_ranks_file_is_refused_by_every_verb(verb):
    source = copy("s2_bf16_dp2")
    edit(optimizer_file(source, 1), add_tensor)
    place = "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt:optimizer_state_dict/preconditioner"
    assert lost(source) == [f"global_step5/{place}"]
    refused(3, verb[0], source, "t", *verb[1:], words=(place,))
    assert not Path("t").exists()
    succeeded(verb[0], source, "t", *verb[1:], "--drop", "*preconditioner")


def ranks_file(source, rank) -> Path:
    return source / "global_step5" / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"


def test_what_each_rank_has_of_its_own_is_carried():
    source = copy("s3_bf16_dp2")
    for rank in (0, 1):
        edit(ranks_file(source, rank), lambda content: content.update(rng=torch.full((9,), rank), epoch=4))  # noqa: B023
    found = zckpt.open(source).metadata
    assert {"rng", "epoch", "zero_pp_rank_1_mp_rank_00_model_states.rng"} <= found.keys()
    assert "zero_pp_rank_1_mp_rank_00_model_states.epoch" not in found, "it is the first rank's"
    assert lost(source) == []
    zckpt.convert(source, "t", to="zckpt")
    assert zckpt.open("t").metadata.keys() == found.keys()


def test_state_of_modules_that_is_no_tensor_is_carried_of_each_rank():
    source = copy("s3_bf16_dp2")
    for rank in (0, 1):
        more = {"a._extra_state": {"amax": torch.full((2,), rank)},
                "b._extra_state": {"amax": torch.ones(3), "recipe": "delayed"}}  # fmt: skip
        edit(ranks_file(source, rank), lambda content: content["module"].update(more))  # noqa: B023
    found = zckpt.open(source).metadata
    assert "module_extra_state" in found
    assert "zero_pp_rank_1_mp_rank_00_model_states.a._extra_state" in found
    assert "zero_pp_rank_1_mp_rank_00_model_states.b._extra_state" not in found, "it is the first rank's"
    assert lost(source) == []
    zckpt.reshard(source, "t", world_size=3)
    for rank in (0, 1):
        module = torch.load(ranks_file(Path("t"), rank), weights_only=False)["module"]
        assert module["a._extra_state"]["amax"].tolist() == [rank, rank]
        assert module["b._extra_state"]["amax"].tolist() == [1, 1, 1]


def test_random_states_of_a_directory_of_accelerate_go_along_with_reshard():
    source = SOURCES["other/accel_ds2_bf16"]
    done = zckpt.reshard(source, "t", world_size=3)
    names = {path.name for path in Path("t").iterdir()}
    assert {"random_states_0.pkl", "random_states_1.pkl", "scheduler.bin"} <= names
    for name in ("random_states_1.pkl", "scheduler.bin"):
        assert Path(f"t/{name}").read_bytes() == (source / name).read_bytes()
    assert any("2 processes" in note for note in done.notes)


# --- copies ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "dtype"), [("s2_bf16_dp2", torch.float32), ("s3_bf16_dp2", torch.bfloat16)])
def test_model_gathered_beside_a_checkpoint_in_another_type_is_a_copy(name, dtype):
    """What zero_to_fp32 wrote into the run's directory, and `stage3_gather_16bit_weights_on_model_save`."""
    source, truth = copy(name), Truth(SOURCES[name])
    held = truth.weights | (truth.masters if dtype == torch.float32 else {})
    held |= {alias: held[owner] for alias, owner in truth.tied.items()}
    model = {key: value.to(dtype) for key, value in held.items()}
    model |= {"counter": zckpt.open(source).read("counter", "weight").float()}  # as versions before 0.16 wrote it
    torch.save(model, source / "pytorch_model.bin")
    assert lost(source) == []
    assert codes(source, "--deep")[0] == 0
    zckpt.consolidate(source, "out.safetensors")
    model["fc1.weight"][3, 2] += 0.5
    torch.save(model, source / "pytorch_model.bin")
    status, found = codes(source, "--deep")
    assert status == 1
    assert found == {"ZC-206"}


def test_model_with_more_digits_than_all_else_is_no_copy():
    """Where the optimizer's files are gone, float32 weights beside 16-bit ones may be all that is left of masters."""
    source = copy("s2_bf16_dp2")
    for path in source.rglob("*optim_states.pt"):
        path.unlink()
    for path in source.rglob("*model_states.pt"):
        edit(path, lambda content: content.update(optimizer=None, param_shapes=None))
    torch.save({"fc1.weight": Truth(SOURCES["s2_bf16_dp2"]).masters["fc1.weight"]}, source / "pytorch_model.bin")
    assert lost(source) == ["pytorch_model.bin"]
    with refusing(LeftOutError, r"pytorch_model\.bin"):
        zckpt.consolidate(source, "out.safetensors")


def renamed(node, names: dict[str, str]):
    """A tree with other names in it, be they keys or values."""
    if isinstance(node, dict):
        return type(node)((names.get(key, key), renamed(value, names)) for key, value in node.items())
    if isinstance(node, (list, set)):
        return type(node)(renamed(one, names) for one in node)
    return names.get(node, node) if isinstance(node, str) else node


def test_adapter_that_peft_saved_beside_it_is_a_copy():
    source = copy("s2_bf16_dp2")
    front = "base_model.model."
    names = {"fc1.weight": f"{front}q_proj.lora_A.default.weight", "prime": f"{front}e.lora_embedding_A.default",
             "fc2.weight": f"{front}head.modules_to_save.default.weight"}  # fmt: skip
    for path in source.rglob("*.pt"):
        torch.save(renamed(torch.load(path, weights_only=False), names), path)
    held, weights = zckpt.open(source), Truth(SOURCES["s2_bf16_dp2"]).weights
    assert set(names.values()) <= held.parameters.keys()
    saved = {"fc1.weight": f"{front}q_proj.lora_A.weight", "prime": f"{front}e.lora_embedding_A",
             "fc2.weight": f"{front}head.weight"}  # fmt: skip
    save_file({name: weights[key] for key, name in saved.items()}, source / "adapter_model.safetensors")
    assert lost(source) == []
    assert codes(source, "--deep")[0] == 0
    assert "adapter_model.safetensors" in {item.file for item in inventory(source).of(COPY)}


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        ("other/trainer_ds2_gpt2", "model.safetensors"),
        ("other/dcphf_consolidated_dp2", "sharded/shard-00002-model-00001-of-00002.safetensors"),
        ("universal/s2_bf16_dp4", "zero/frozen_odd/fp32.pt"),
    ],
)
def test_copy_that_differs_is_found_by_verify_deep(name, pattern):
    source = Path(shutil.copytree(SOURCES[name], "s"))
    assert codes(source, "--deep")[0] == 0
    items = [item for item in inventory(source).of(COPY) if item.file == pattern and item.kind == "tensor"]
    assert items
    path = source / pattern
    if path.suffix == ".pt":
        edit(path, lambda content: content["param"].view(-1)[0].add_(1))
    else:
        flip(path, path.stat().st_size - 1, 6)
    status, found = codes(source, "--deep")
    assert status == 1
    assert found & {"ZC-204", "ZC-206", "ZC-207"}


def test_truncated_files_beside_a_model_are_unsound(tmp_path):
    model, whole = tmp_path / "model", tmp_path / "s"
    zckpt.consolidate(FIXTURES / "s2_bf16_dp2", model, slots="all")
    shutil.copytree(SOURCES["other/dcphf_consolidated_dp2"], whole)
    for source, file in ((model, model / "optimizer.safetensors"), (whole, min((whole / "sharded").iterdir()))):
        assert codes(source, "--deep")[0] == 0
        file.write_bytes(file.read_bytes()[:-8])
        status, found = codes(source, "--deep")
        assert (status, "ZC-102" in found) == (1, True)


def test_optimizer_in_a_models_directory_is_read_with_it():
    source = FIXTURES / "s2_bf16_dp4"
    zckpt.consolidate(source, "model", slots="all")
    there, here = zckpt.open(source), zckpt.open("model")
    assert [group.parameters for group in here.param_groups] == [group.parameters for group in there.param_groups]
    assert here.step == there.step
    for name in here.param_groups[0].parameters:
        assert_same_bits(here, there, name, "exp_avg_sq")


def test_page_names_what_is_left_out(trainers):
    succeeded("inspect", trainers, "--html", "page.html")
    assert "Left out: optimizer_old.pt (nothing has read its 8 tensors)" in Path("page.html").read_text()


# --- the whole list ---------------------------------------------------------------------------------------------------


def test_files_lists_everything_and_what_became_of_it():
    done = succeeded("inspect", FIXTURES / "s2_bf16_dp2_multitag", "--files").stdout
    assert "another checkpoint" in done
    assert "which checkpoint of the run is the newest" in done
    document = inspected(FIXTURES / "s2_bf16_dp2_multitag", "--files")
    fates = {item["fate"] for item in document["inventory"]["items"]}
    assert {"state", "carried", "implied", "foreign"} <= fates
    for name, shares in document["inventory"]["nbytes"].items():
        assert sum(shares.values()) == (FIXTURES / "s2_bf16_dp2_multitag" / name).stat().st_size
    assert "inventory" not in inspected(FIXTURES / "s2_bf16_dp2_multitag")


@pytest.mark.parametrize("target", ["nowhere", "scheduler.pt"])
@pytest.mark.parametrize("fixture", ["s2_bf16_dp2", "other/dcp_fsdp2_dp2/ckpt", "other/trainer_ds2_gpt2/checkpoint-4"])
def test_links_to_nothing_and_to_themselves_are_left_out(fixture, target):
    source = Path(shutil.copytree(FIXTURES / fixture, "source"))
    (source / "scheduler.pt").unlink(missing_ok=True)
    before = lost(source)
    (source / "scheduler.pt").symlink_to(target)
    assert lost(source) == [*before, "scheduler.pt"]
