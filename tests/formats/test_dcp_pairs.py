"""A model in safetensors, or an adapter, with its optimizer in DCP beside it; and steps with DCP in a folder."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

import zckpt
from tests.folders import contents, names_in
from tests.formats.holding import assert_goes_on, assert_holds, assert_state, converted
from tests.logical import assert_same_tree
from tests.pairwise import each
from tests.refusals import refusing
from zckpt.errors import UnknownFormatError
from zckpt.formats.account import take_inventory

NAMES = ("q", "k", "v", "o")  # which no file of safetensors has in this order


class Lora(nn.Module):
    """As a program has it that puts an adapter into a model itself."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4), requires_grad=False)
        self.lora_A, self.lora_B = nn.Linear(4, 2, bias=False), nn.Linear(2, 4, bias=False)
        self.lora_magnitude = nn.Parameter(torch.rand(4))


def trained(made=lambda: nn.Linear(4, 4, bias=False)) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.ModuleDict({name: made() for name in NAMES})
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=0.1)
    for group in optimizer.param_groups:
        for one in group["params"]:
            one.grad = torch.randn_like(one)
    optimizer.step()
    return model, optimizer


def save(run, file, tensors, optimizer) -> Path:
    dcp.save({"optim": optimizer, "sched": {"last_epoch": 1}}, checkpoint_id=run / "optim")
    (run / "model").mkdir()
    save_file(tensors, run / "model" / file)
    return run


@pytest.fixture
def run() -> Path:
    model, optimizer = trained()
    return save(Path("run"), "model.safetensors", model.state_dict(), get_optimizer_state_dict(model, optimizer))


def test_an_adapter_is_read_with_its_optimizer():
    model, optimizer = trained(Lora)
    live = {name: one for name, one in model.named_parameters() if one.requires_grad}
    filed = {name: f"base_model.model.{name.replace('magnitude', 'magnitude_vector')}" for name in live}
    tensors = {filed[name]: one.detach() for name, one in live.items()}
    run = save(Path("run"), "adapter_model.safetensors", tensors, get_optimizer_state_dict(model, optimizer))
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": list(NAMES)}
    (run / "model" / "adapter_config.json").write_text(json.dumps(config))

    checkpoint = zckpt.open(run)
    assert {*checkpoint.parameters} == {*tensors}
    for name, one in live.items():
        assert_state(checkpoint, filed[name], optimizer.state[one])
    assert not checkpoint.warnings
    assert not take_inventory(checkpoint).left_out
    assert zckpt.verify(run, deep=True).sound

    zckpt.consolidate(run, "adapter")
    assert {"adapter_config.json", "adapter_model.safetensors"} <= {*names_in("adapter")}
    again, its = trained(Lora)
    zckpt.load(run, model=again, optimizer=its, strict=False)
    for (name, one), other in zip(model.named_parameters(), again.parameters(), strict=True):
        assert not one.requires_grad or torch.equal(one, other), name
        assert_same_tree(dict(its.state.get(other, {})), dict(optimizer.state.get(one, {})), name)


def test_whole_files_beside_shards_in_the_models_folder_are_copies(run):
    whole = run / "model/model.safetensors"
    tensors = load_file(whole)
    dcp.save(tensors, storage_writer=dcp.HuggingFaceStorageWriter(str(whole.parent), save_distributed=True))
    assert zckpt.verify(run, deep=True).sound
    zckpt.convert(run, "out", to="zckpt")
    save_file({name: one + 1 for name, one in tensors.items()}, whole)
    assert {found.code for found in zckpt.verify(run, deep=True).findings} >= {"ZC-206"}
    assert zckpt.diff(run, "out").equal


def test_values_with_folders_of_their_own_are_carried():
    """As Cosmos has it: `model`, `optim`, `scheduler` and `trainer` by DCP, for each iteration."""
    model, optimizer = trained(lambda: nn.Linear(3, 2))
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    parts = {
        "model": model.state_dict(),
        "optim": get_optimizer_state_dict(model, optimizer, options=options),
        "scheduler": {"last_epoch": 7},
        "trainer": {"iteration": 7, "grad_scaler": {"scale": 2.0}, "rng": torch.arange(5)},
    }
    source = Path("checkpoints")
    for name, part in parts.items():
        dcp.save(part, checkpoint_id=source / "iter_000000007" / name)
    keep(source / "iter_000000007", "dataloader/rank_0.pkl", "dataloader/rank_1.pkl")
    (source / "latest_checkpoint.txt").write_text("iter_000000007")
    kept = {"scheduler", "trainer", "dataloader/rank_0", "dataloader/rank_1"}
    assert {*assert_holds(source, model, optimizer).metadata} == kept
    assert zckpt.verify(source, deep=True).sound
    converted(source, "dcp", "dcp")


def keep(step: Path, *names: str):
    """Save values beside a model, by torch or by pickle alone."""
    for name in names:
        (step / name).parent.mkdir(parents=True, exist_ok=True)
        value = {"epoch": 3, "rng": torch.arange(9, dtype=torch.uint8)}
        if name.endswith((".pkl", "config.bin")):
            (step / name).write_bytes(pickle.dumps({**value, "rng": value["rng"].numpy(), "at": Path(name)}))
        else:
            torch.save(value, step / name)


STEPS = {
    "prime-rl": ("step_3", {"trainer": {"app": ("model", "optimizers")}},
                 ("trainer/dataloader/rank_0.pt", "orchestrator/progress.pt")),
    "XTuner": ("ckpt-step-3", {"weights": ("model", "optimizer")},
               ("dataloader", "lr_scheduler", "trainer_config.bin")),
    "FastVideo": ("checkpoint-3", {"distributed_checkpoint": ("model", "optimizer")}, ()),
    "FastVideo's new trainer": ("checkpoint-3", {"dcp": ("roles.student.transformer", "optimizers.student")},
                                ("rng_state_rank0.pt",)),
    "NeMo RL": ("step_3", {"policy/weights": ("model", None), "policy/optimizer": (None, "optim")},
                ("train_dataloader.pt",)),
    "lingua": ("0000000003", {"": ("model", "optim")}, ()),
    "VeOmni": ("global_step_3", {"": ("model", "optimizer")}, ("extra_state/extra_state_rank_0.pt",)),
    "steps as DeepSpeed calls them": ("global_step3", {"": ("model", "optimizer")}, ()),
}  # fmt: skip
"""By program: what a step is called, the folders with their keys, and what is kept beside them."""


@pytest.mark.parametrize(("program", "to"), each(STEPS, ["dcp", "zckpt", "consolidated"]))
def test_a_step_has_its_checkpoint_in_a_folder_and_what_the_program_keeps_around_it(program, to):
    step, parts, beside = STEPS[program]
    model, optimizer = trained(lambda: nn.Linear(3, 2))
    own = model.state_dict(), get_optimizer_state_dict(model, optimizer)
    run = Path("run")
    for folder, keys in parts.items():
        above, (first, second) = next(iter(keys.items())) if isinstance(keys, dict) else (None, keys)
        state = {key: one for key, one in zip((first, second), own, strict=True) if key}
        dcp.save({above: state} if above else state, checkpoint_id=run / step / folder)
    keep(run / step, *beside)
    (run / step / "train_state.json").write_text('{"cur_step": 3}')
    if step.isdigit():
        (run / step / "consolidated").mkdir()
        dcp_to_torch_save(run / step, run / step / "consolidated" / "consolidated.pth")
        assert_holds(run / step / "consolidated", model, optimizer)
    for source in (run / step, *([] if step == "checkpoint-3" else [run])):
        found = assert_holds(source, model, optimizer)
        assert Path(found.source) == run / step
        assert len(found.metadata) == len(beside)
        assert not found.warnings
    assert zckpt.verify(run / step, deep=True).sound
    assert [Path(one.path).name for one in zckpt.history(run).checkpoints] == [step]
    assert zckpt.open(converted(run / step, to, to)).metadata.keys() == found.metadata.keys()
    zckpt.strip(run / step, "stripped", optimizer=True)
    assert zckpt.open("stripped").slot_names() == ["weight"]
    again, its = trained(lambda: nn.Linear(3, 2))
    assert_goes_on(run / step, model, optimizer, again, its)


@pytest.mark.parametrize(("roles", "flat"), each([["student"], ["student", "critic"]], [True, False]))
def test_an_optimizer_has_the_names_of_a_module_around_its_model(roles, flat):
    """As FastVideo's new trainer saves its roles."""
    pairs = {role: trained(lambda: nn.Linear(3, 2)) for role in roles}
    state, options = {}, StateDictOptions(flatten_optimizer_state_dict=flat)
    for role, (model, optimizer) in pairs.items():
        state[f"roles.{role}.transformer"] = model.state_dict()
        around = nn.ModuleDict({"transformer": model})
        state[f"optimizers.{role}"] = get_optimizer_state_dict(around, optimizer, options=options)
    dcp.save(state, checkpoint_id="checkpoint-3/dcp")
    for role, (model, optimizer) in pairs.items():
        called, prefix = (f"optimizers.{role}", f"roles.{role}.transformer.") if len(roles) > 1 else (None, "")
        assert_holds("checkpoint-3", model, {called: optimizer}, prefix)
    converted("checkpoint-3", "dcp", "dcp")
    zckpt.strip("checkpoint-3", "stripped", optimizer=True)
    assert zckpt.open("stripped").slot_names() == ["weight"]


def test_fastvideos_models_in_distillation_are_one_checkpoint():
    step = Path("checkpoint-3")
    pairs = {name: trained(lambda: nn.Linear(3, 2)) for name in ("generator", "critic")}
    for name, (model, optimizer) in pairs.items():
        state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
        dcp.save(state, checkpoint_id=step / "distributed_checkpoint" / name)
    dcp.save({"random_state": torch.get_rng_state()}, checkpoint_id=step / "distributed_checkpoint" / "shared")
    for name, (model, optimizer) in pairs.items():
        found = assert_holds(step, model, {f"{name}.optimizer": optimizer}, prefix=f"{name}.model.")
    assert {*found.metadata} == {"shared"}
    converted(step, "dcp", "dcp")


def test_a_step_with_two_models_is_neither_of_them():
    """NeMo RL's PPO has a `value` beside its `policy`."""
    model, optimizer = trained()
    for name in ("policy", "value"):
        at = Path(f"step_3/{name}")
        dcp.save({"model": model.state_dict()}, checkpoint_id=at / "weights")
        dcp.save({"optim": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=at / "optimizer")
    with refusing(UnknownFormatError, "did you mean step_3/policy"):
        zckpt.open("step_3")


@pytest.mark.parametrize("inner", ["dcp", "weights"])
def test_what_lies_around_a_folder_with_a_checkpoint_is_not_that(inner):
    """A model of transformers, a step of OLMo-core or a run of such is what it was before somebody wrote into it."""
    dcp.save({"model": {"other": torch.ones(2)}}, checkpoint_id="made")
    for name in ("model", "run/step3", "run"):
        Path(name).mkdir(exist_ok=True, parents=True)
        shutil.copytree("made", f"{name}/{inner}")
    save_file({"own": torch.ones(3)}, "model/model.safetensors")
    assert zckpt.open("model").format == "safetensors"
    dcp.save({"model": {"own": torch.ones(3)}}, checkpoint_id="run/step3/model_and_optim")
    for name in ("run/step3", "run"):
        assert [*zckpt.open(name).names] == ["own"]


def test_a_step_in_a_folder_is_its_runs_and_all_that_is_damaged_in_it_is_found(tmp_path):
    model, optimizer = trained()
    state = {"weights": {"model": model.state_dict()}, "optimizer": {"optim": optimizer.state_dict()}}
    for name, one in state.items():
        dcp.save(one, checkpoint_id=tmp_path / "step_3" / "policy" / name)
    torch.save({"model": {"other": torch.ones(2)}}, tmp_path / "consolidated.pth")
    opened = zckpt.open(tmp_path)
    assert (opened.format, len(opened.param_groups)) == ("dcp", 1)
    for path in tmp_path.rglob("*.distcp"):
        path.write_bytes(path.read_bytes()[:-200])
    found = [one for one in zckpt.verify(tmp_path / "step_3").findings if one.severity == "error"]
    assert {Path(one.file).parent.name for one in found} == {"weights", "optimizer"}


def test_a_pickle_that_may_run_something_is_not_carried(run):
    (run / "evil.pkl").write_bytes(b"cposix\nsystem\n(S'true'\ntR.")
    (run / "large.pkl").write_bytes(pickle.dumps(bytes(1 << 21)))
    (run / "rank_0.pkl").write_bytes(pickle.dumps({"seen": 3}))
    left = {item.name for item in take_inventory(zckpt.open(run)).left_out}
    assert left == {"evil.pkl", "large.pkl"}


def test_iterations_of_megatron_are_not_those_of_cosmos():
    """Whose tracker is lost: which of them was saved last, it said."""
    dcp.save({"model": nn.Linear(3, 2).state_dict()}, checkpoint_id="run/iter_0000007")
    with refusing(UnknownFormatError, "iter_0000007"):
        zckpt.open("run")


@pytest.mark.parametrize(("made", "file"), [
    (lambda: nn.Linear(4, 4, bias=False), "model.safetensors"), (Lora, "adapter_model.safetensors"),
])  # fmt: skip
def test_the_order_of_safetensors_tells_no_numbers(made, file):
    model, optimizer = trained(made)
    names = [name for name, one in model.named_parameters() if one.requires_grad]
    weights = {name: one.detach() for name, one in model.named_parameters() if name in names}
    save(Path("run"), file, weights, optimizer.state_dict())

    checkpoint = zckpt.open("run")
    assert list(checkpoint.parameters) == sorted(names)
    assert not any("exp_avg" in one.slots for one in checkpoint.parameters.values())
    assert "keeps its number" in checkpoint.warnings[0]
    told = zckpt.open("run", names=names)
    for name in names:
        assert_state(told, name, optimizer.state[model.get_parameter(name)])


def test_a_shape_that_one_parameter_has_tells_its_number():
    model, optimizer = trained()
    model["o"] = nn.Linear(4, 5, bias=False)
    optimizer.add_param_group({"params": list(model["o"].parameters())})
    model["o"].weight.grad = torch.ones(5, 4)
    optimizer.step()
    checkpoint = zckpt.open(save(Path("run"), "model.safetensors", model.state_dict(), optimizer.state_dict()))
    assert_state(checkpoint, "o.weight", optimizer.state[model["o"].weight])
    assert [name for name, one in checkpoint.parameters.items() if "exp_avg" in one.slots] == ["o.weight"]


def test_a_damaged_model_beside_it_is_all_that_verify_finds(run):
    file = run / "model" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    assert [one.file for one in zckpt.verify(run).findings] == [str(file)]


def test_each_file_is_stripped_where_it_lies(run):
    (run / "optim").rename(run / "deep")
    (run / "optim").mkdir()
    (run / "deep").rename(run / "optim" / "deep")
    zckpt.strip(run, "model", optimizer=True)
    assert {*contents("model")} == {*contents(run)}
    found = zckpt.open("model")
    assert found.slot_names() == ["weight"]
    assert not take_inventory(found).left_out


def test_values_of_ranks_on_another_node_are_carried(run):
    keep(run, "data/rank_0.pt", "at.pt")
    keep(Path("node1"), "data/rank_1.pt", "at.pt")
    found = zckpt.open(run, roots=["node1"])
    assert {"at", "data/rank_0", "data/rank_1"} <= {*found.metadata}
    assert not found.warnings
    torch.save(1, "node1/at.pt")
    (run / "data" / "rank_0.pt").unlink()
    first, second = sorted(zckpt.open(run, roots=["node1"]).warnings)
    assert "differs from" in first
    assert "rank number 0 is missing" in second


def test_the_mark_of_another_program_is_no_part_of_it(run):
    (run / "COMPLETED").write_text("COMPLETED")
    assert not take_inventory(zckpt.open(run)).left_out


def test_parts_of_megatrons_are_not_a_pair():
    """verl 0.9 has `model/dist_ckpt`, `optimizer/dist_ckpt` and more, each as Megatron-Core saves it."""
    model, optimizer = trained()
    for name, state in (
        ("model", model.state_dict()),
        ("optimizer", {"optimizer": get_optimizer_state_dict(model, optimizer)}),
    ):
        dcp.save(state, checkpoint_id=f"run/{name}/dist_ckpt")
        torch.save({"iteration": 1}, f"run/{name}/dist_ckpt/common.pt")
    with refusing(UnknownFormatError, "did you mean .*/dist_ckpt"):
        zckpt.open("run")
