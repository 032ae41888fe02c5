"""The Trainer's own directories, without DeepSpeed: read bit for bit, and written so that it resumes from them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

import zckpt
from tests import gloo
from tests.cli.console import refused, succeeded
from tests.deepspeed_engine.spec import plain_config
from tests.hf_training.training import SAVED, STEPS, Run, Truth, build, same, train, unbroken
from tests.logical import assert_same_tree
from tests.pairwise import each, some
from zckpt.errors import UnsupportedError, UsageError
from zckpt.formats.account import take_inventory
from zckpt.formats.transformers_trainer.architectures import architecture
from zckpt.formats.transformers_trainer.readings import group_of

pytestmark = pytest.mark.interop

FIXTURES = Path(__file__).parents[2] / "fixtures"


def freeze_embeddings(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad = "embed_tokens" not in name


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Callable[..., Run]:
    """Runs of each kind, made when the first test asks for one."""
    made: dict[str, Run] = {}

    def get(kind: str) -> Run:
        if kind not in made:
            model, _, how = kind.partition(" ")
            options = {"optim": "adafactor"} if how == "adafactor" else {}
            change = freeze_embeddings if how == "frozen" else None
            made[kind] = unbroken(model, tmp_path_factory.mktemp("run"), change=change, **options)
        return made[kind]

    return get


@pytest.fixture
def unknown(run) -> tuple[Path, Truth]:
    """A directory that does not say of which type the model is, and the truth about it."""
    one = run("llama")
    directory = Path(shutil.copytree(one.directory, "unknown"))
    (directory / "config.json").unlink()
    return directory, one.truth


def assert_is_truth(checkpoint: zckpt.Checkpoint, truth: Truth, *, aliases: bool = False) -> None:
    """Hold a checkpoint against what was in memory: every slot of every parameter, and the groups."""
    opened = checkpoint
    assert not opened.unnamed
    assert [group.parameters for group in opened.param_groups] == truth.groups
    found = {f"{slot}/{name}" for name, one in opened.parameters.items() for slot in one.slots if slot != "step"}
    found |= {f"weight/{name}" for name in opened.buffers}
    missing = {key for key in truth.tensors if key not in found}
    assert missing <= {"weight/lm_head.weight", *({"weight/cls.predictions.decoder.weight",
                       "weight/cls.predictions.decoder.bias"})}, missing  # fmt: skip
    for key in found & truth.tensors.keys():
        slot, _, name = key.partition("/")
        assert same(opened.read(name, slot), truth.tensors[key]), key


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt2", "bert", "llama frozen", "llama adafactor"])
@pytest.mark.every(2)
def test_optimizer_is_read_under_its_parameters_names(kind, run):
    one = run(kind)
    checkpoint = zckpt.open(one.directory)
    assert (checkpoint.format, checkpoint.step) == ("transformers-trainer", SAVED)
    assert_is_truth(checkpoint, one.truth)
    assert {"scheduler", "rng_state", "training_args", "trainer_state"} <= checkpoint.metadata.keys()
    assert not take_inventory(checkpoint).left_out


@pytest.mark.parametrize(("size", "loaded"), each(["4KB", "8KB", "20KB"], [True, False]))
def test_shards_are_read_with_their_index(size, loaded, run):
    """A model that transformers had loaded is cut into shards by its sorted names, any other one in its own order."""
    one = run("llama")
    directory = Path(shutil.copytree(one.directory, "sharded"))
    (directory / "model.safetensors").unlink()
    model = AutoModelForCausalLM.from_pretrained(one.directory) if loaded else build("llama")
    model.load_state_dict(load_file(one.directory / "model.safetensors"))
    model.save_pretrained(directory, max_shard_size=size)
    assert (directory / "model.safetensors.index.json").is_file()
    assert_is_truth(zckpt.open(directory), one.truth)


def test_without_a_known_type_of_model_parameters_that_are_alike_keep_their_numbers(unknown):
    directory, truth = unknown
    checkpoint = zckpt.open(directory)
    assert checkpoint.unnamed
    known = [(n, m) for mine, its in zip(checkpoint.param_groups, truth.groups, strict=True)
             for n, m in zip(mine.parameters, its, strict=True) if not n.isdecimal()]  # fmt: skip
    assert all(name == own for name, own in known)
    assert "--names FILE" in " ".join(checkpoint.warnings)
    refused(5, "convert", directory, "t", "--to", "transformers-trainer", words=("--names FILE",))


@pytest.mark.parametrize("order", ["the optimizer's", "the model's"])
def test_names_are_taken_in_either_order(order, unknown):
    directory, truth = unknown
    names = list(dict(build("llama").named_parameters()))
    given = names if order == "the model's" else [name for group in truth.groups for name in group]
    assert_is_truth(zckpt.open(directory, names=given), truth)


def test_names_that_do_not_fit_are_refused(run):
    one = run("llama")
    names = list(dict(build("llama").named_parameters()))
    for wrong in (names[:-1], [*names[:-1], "other"], names[::-1]):
        with pytest.raises(UsageError, match="do not match the optimizer"):
            zckpt.open(one.directory, names=wrong)


def test_optimizer_of_another_model_gets_no_names(run):
    directory = Path(shutil.copytree(run("llama").directory, "mixed"))
    shutil.copy(run("qwen2").directory / "optimizer.pt", directory)
    checkpoint = zckpt.open(directory)
    assert not any(one.group is not None for one in checkpoint.parameters.values())
    assert checkpoint.unnamed


# --- written


@pytest.mark.parametrize(("kind", "through"), each(["llama", "qwen2"], [None, "zckpt", "dcp"]))
def test_the_trainer_resumes_with_the_losses_of_an_unbroken_run(kind, through, run, tmp_path):
    one = run(kind)
    source = one.directory
    if through is not None:
        source = tmp_path / through
        zckpt.convert(one.directory, source, to=through)
        shutil.copy(one.directory / "config.json", source)
    target = tmp_path / f"checkpoint-{SAVED}"
    done = zckpt.convert(source, target, to="transformers-trainer", verify=True)
    assert done.notes == ()
    assert_is_truth(zckpt.open(target), one.truth)
    losses, _ = train(build(kind, seed=9), tmp_path, resume=target)
    assert losses == one.losses


@pytest.mark.parametrize("through", some(["zckpt"], ["dcp", "fsdp-rank-files"]))
def test_a_trainer_with_an_optimizer_of_its_own_has_its_groups_back(through, tmp_path):
    def losses(output: Path, resume: Path | None = None) -> list[float]:
        model = build("llama", seed=0 if resume is None else 9)
        return train(model, output, resume=resume, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2))[0]

    expected, target = losses(tmp_path / "run"), tmp_path / f"checkpoint-{SAVED}"
    zckpt.convert(tmp_path / "run" / target.name, tmp_path / "between", to=through)
    zckpt.convert(tmp_path / "between", target, to="transformers-trainer")
    assert losses(tmp_path, target) == expected


def with_adapter(seed: int = 0) -> nn.Module:
    """Return a tiny model with an adapter; the Trainer's second param group, without weight decay, is empty."""
    torch.manual_seed(seed)
    return get_peft_model(build("llama"), LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))


def under_deepspeed(rank: int, world_size: int, kind: str, output: Path, source: Path) -> list[float]:
    """Go on with a Trainer that uses DeepSpeed; return the losses of all steps."""
    config = plain_config(2, train_micro_batch_size_per_gpu="auto")
    model = with_adapter(9) if kind == "adapter" else build(kind, seed=9)
    return train(model, output, resume=source, batch=2 // world_size, ddp_backend="gloo", deepspeed=config)[0]


@pytest.mark.parametrize(("kind", "world_size", "names"), [("llama", 1, None), ("qwen2", 2, "transformers")])
def test_the_trainer_goes_on_under_deepspeed(kind, world_size, names, run, tmp_path):
    """What it keeps besides the model and the optimizer goes along."""
    one, target = run(kind), tmp_path / f"checkpoint-{SAVED}"
    zckpt.convert(one.directory, target, to="deepspeed", world_size=world_size, stage=2, map=names)
    assert_is_truth(zckpt.open(target), one.truth)
    assert not list(target.glob("model*"))
    losses = gloo.run(under_deepspeed, world_size, kind, tmp_path / "run", target)[0]
    assert losses == pytest.approx(one.losses, rel=1e-3)
    assert losses[:SAVED] == one.losses[:SAVED]


def test_an_adapter_goes_on_under_deepspeed(tmp_path):
    """Under the names that it has in memory; DeepSpeed has no param group without parameters."""
    losses, _ = train(with_adapter(), tmp_path / "run")
    source, target = tmp_path / "run" / f"checkpoint-{SAVED}", tmp_path / f"checkpoint-{SAVED}"
    names = [name for name, one in with_adapter().named_parameters() if one.requires_grad]
    done = zckpt.convert(source, tmp_path / "dcp", to="dcp", names=names)
    assert any("lora_[AB]" in note for note in done.notes)
    [command] = zckpt.resume_check(source, program="deepspeed", names=names).commands
    rename = (r"(lora_[AB])\.weight$", r"\1.default.weight")
    assert "=".join(rename) in command
    done = zckpt.convert(source, target, to="deepspeed", world_size=1, stage=2, names=names, rename=[rename])
    assert not any("lora_[AB]" in note for note in done.notes)
    assert {len(group.parameters) for group in zckpt.open(target).param_groups} == {len(names)}
    assert gloo.run(under_deepspeed, 1, "adapter", tmp_path / "on", target)[0] == pytest.approx(losses, rel=1e-6)
    zckpt.convert(source, tmp_path / "universal", to="universal", names=names)
    assert len(zckpt.open(tmp_path / "universal").param_groups) == 1


@pytest.mark.parametrize("kind", some(["qwen2"], ["gpt2"]))
def test_a_tied_output_layer_gets_its_name_for_programs_that_look_for_it(kind, run):
    """No file of transformers has it; torch's DCP, as most programs, wants all names of a model."""
    one = run(kind)
    without = zckpt.convert(one.directory, "without", to="dcp")
    assert any("--map=transformers adds the name" in note for note in without.notes)
    assert "lm_head.weight" not in zckpt.open("without").parameters
    done = zckpt.convert(one.directory, "dcp", to="dcp", map="transformers")
    assert any("files lack lm_head.weight" in note for note in done.notes)
    state = {"model": build(kind, seed=9).state_dict()}
    dcp.load(state, checkpoint_id="dcp", no_dist=True)
    assert_same_tree(state["model"], {key: one.truth.tensors[f"weight/{key}"] for key in state["model"]})
    for program in ("deepspeed", "fsdp2"):
        [command] = zckpt.resume_check(one.directory, program=program).commands
        assert command.endswith("--map transformers")
    assert "--map" not in zckpt.resume_check("dcp", program="trainer").commands[0]
    checked = [zckpt.resume_check(name, program="fsdp2", model=one.directory / "config.json")
               for name in ("dcp", "without")]  # fmt: skip
    assert [found.verdict == "no" for found in checked] == [False, True]
    assert any("lacks: lm_head.weight" in why for why in checked[1].why)


def test_what_a_source_has_not_is_written_by_rule(run, tmp_path):
    one = run("llama")
    source = shutil.copytree(one.directory, tmp_path / "source")
    for name in ("scheduler.pt", "rng_state.pth", "trainer_state.json", "training_args.bin"):
        (source / name).unlink()
    target = tmp_path / f"checkpoint-{SAVED}"
    with pytest.raises(UsageError, match="batch size"):
        zckpt.convert(source, target, to="transformers-trainer")
    done = zckpt.convert(source, target, to="transformers-trainer", train_batch_size=2)
    assert len(done.notes) == 3
    account = json.loads((target / "trainer_state.json").read_text())
    assert (account["global_step"], account["train_batch_size"]) == (SAVED, 2)
    torch.manual_seed(0)
    train(build("llama", seed=9), tmp_path, resume=target)  # no dropout: random states make no difference
    ended, unbroken = (load_file(path / f"checkpoint-{STEPS}" / "model.safetensors")
                       for path in (tmp_path, one.directory.parent))  # fmt: skip
    assert all(same(ended[name], tensor) for name, tensor in unbroken.items())


@pytest.mark.parametrize(("fixture", "kind"), [("hf_llama_s2_bf16_dp2", "llama"), ("hf_gpt2_s1_fp32_dp2", "gpt2")])
def test_what_deepspeed_saved_is_numbered_as_the_trainer_does(fixture, kind):
    """The Trainer's own optimizer of a model with these parameters takes each one's state."""
    source = FIXTURES / fixture
    done = zckpt.convert(source, "target", to="transformers-trainer", train_batch_size=2, verify=True)
    assert any("LambdaLR after 5 steps" in note for note in done.notes)
    truth = load_file(source / "truth.safetensors")
    names = [one["param_names"] for one in torch.load("target/optimizer.pt")["param_groups"]]
    known = architecture(kind)
    model = list(zckpt.open(source).parameters)
    trained = {name for group in names for name in group}
    assert names == [[n for n in model if n in trained and group_of(n, known) == at] for at in (0, 1)]
    state = torch.load("target/optimizer.pt")["state"]
    for number, name in enumerate(name for group in names for name in group):
        assert torch.equal(state[number]["exp_avg_sq"], truth[f"exp_avg_sq/{name}"]), name
    weights = load_file("target/model.safetensors")
    assert all(torch.equal(weights[name], truth[f"fp32/{name}"]) for name in trained)


def test_one_param_group_becomes_the_trainers_two_and_unlike_ones_are_refused(run):
    one = run("llama")
    model = build("llama")
    model.load_state_dict(load_file(one.directory / "model.safetensors"))
    every = list(model.named_parameters())
    optimizer = torch.optim.AdamW([p for _, p in every], lr=1e-2, weight_decay=0.1)
    sum(p.square().sum() for _, p in every).backward()  # type: ignore[union-attr]
    optimizer.step()
    whole = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 1}
    torch.save(whole, "one.pt")
    done = zckpt.convert("one.pt", "target", to="transformers-trainer", train_batch_size=2)
    assert any("became the Trainer's two" in note for note in done.notes)
    assert [group.parameters for group in zckpt.open("target").param_groups] == one.truth.groups
    halves = [{"params": [p for _, p in every[:9]]}, {"params": [p for _, p in every[9:]], "lr": 1e-3}]
    other = torch.optim.AdamW(halves, lr=1e-2)
    sum(p.square().sum() for _, p in every).backward()  # type: ignore[union-attr]
    other.step()
    torch.save({**whole, "optimizer": other.state_dict()}, "two.pt")
    with pytest.raises(UnsupportedError, match="that are one in the Trainer differ"):
        zckpt.convert("two.pt", "none", to="transformers-trainer", train_batch_size=2,
                      names=[name for name, _ in every])  # fmt: skip


def test_without_a_step_it_is_refused(run, tmp_path):
    shutil.copy(run("llama").directory / "model.safetensors", tmp_path)
    with pytest.raises(UnsupportedError, match="does not state its step"):
        zckpt.convert(tmp_path / "model.safetensors", tmp_path / "target", to="transformers-trainer")


# --- ready to use


def assert_loads(model: Path, truth: Truth) -> None:
    """Let `from_pretrained` load a model, and hold its weights against the truth."""
    loaded = {f"weight/{name}": one for name, one in AutoModelForCausalLM.from_pretrained(model).state_dict().items()}
    assert_same_tree(loaded, {key: value for key, value in truth.tensors.items() if key.startswith("weight/")})


def test_consolidated_model_loads_from_pretrained(run):
    one = run("qwen2")
    target = Path("model")
    (one.directory / "tokenizer_config.json").write_text("{}")
    zckpt.consolidate(one.directory, target)
    names = {path.name for path in target.iterdir()}
    assert names == {"model.safetensors", "config.json", "generation_config.json", "tokenizer_config.json"}
    assert_loads(target, one.truth)
    zckpt.consolidate(one.directory, target, overwrite=True)


@pytest.mark.parametrize("kind", ["zckpt", "dcp", "fsdp-rank-files", "consolidated", "universal"])
@pytest.mark.every(2)
def test_configuration_goes_along_from_where_each_kind_of_source_keeps_it(kind, run):
    one = run("qwen2")
    source = Path(kind)
    zckpt.convert(one.directory, source, to=kind)
    home = source / "huggingface" if kind == "fsdp-rank-files" else source
    home.mkdir(exist_ok=True)
    shutil.copy(one.directory / "config.json", home)
    zckpt.consolidate(source, "model")
    assert_loads(Path("model"), one.truth)


def test_configuration_can_be_anywhere_else(run):
    one = run("llama")
    model, configs = Path("model"), Path("configs")
    configs.mkdir()
    Path("source").mkdir()
    shutil.copy(one.directory / "model.safetensors", "source")
    refused(2, "consolidate", "source", model, "--config", configs, words=("no model config", "config.json"))
    shutil.copy(one.directory / "config.json", configs)
    succeeded("consolidate", "source", model, "--config", configs, "--max-shard-size", "4KB")
    assert AutoModelForCausalLM.from_pretrained(model).num_parameters() == build("llama").num_parameters()  # type: ignore[operator]
    refused(2, "consolidate", one.directory, "m.pt", "--config", configs, words=("a directory",))
