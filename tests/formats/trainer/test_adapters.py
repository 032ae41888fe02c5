"""Adapters of PEFT 0.21.2 that the Trainer of transformers 5.23 trained; `adapters/` holds what they wrote.

Of each, `truth.json` has the live names of the optimizer's groups, and `truth.safetensors` every tensor by
`slot|live name`. `lora` adds to attention and MLP, `modules` is DoRA with a head of its own, `embedding` has adapters
of an embedding, and a head and norms of its own. `config.json` is that of the model they are added to.
"""

from __future__ import annotations

import json
import re
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import zckpt
from tests.cli.console import inspected, refused
from tests.folders import names_in
from tests.formats.holding import converted
from tests.logical import assert_same_tree
from tests.pairwise import each
from tests.refusals import refusing
from zckpt.errors import UnknownFormatError, UnsupportedError
from zckpt.formats.account import take_inventory
from zckpt.formats.assets import is_adapter

ADAPTERS = Path(__file__).parent / "adapters"
KINDS = ["lora", "modules", "embedding"]


def filed(name) -> str:
    """Return the name that PEFT's files have for a live one."""
    name = name.replace("lora_magnitude_vector.default.weight", "lora_magnitude_vector")
    return name.replace(".modules_to_save.default", "").replace(".default", "")


def truth_of(kind) -> tuple[list[list[str]], dict[str, torch.Tensor]]:
    live = json.loads((ADAPTERS / kind / "truth.json").read_text())["groups"]
    tensors = {key: one for key, one in load_file(ADAPTERS / kind / "truth.safetensors").items()
               if "original_module" not in key}  # fmt: skip
    return live, tensors


def adapter(kind, directory, *, config) -> Path:
    """Copy an adapter, with the configuration of its model or without."""
    shutil.copytree(ADAPTERS / kind, directory, ignore=shutil.ignore_patterns("truth.*"))
    if config:
        shutil.copy(ADAPTERS / "config.json", directory)
    return Path(directory)


def assert_is_truth(directory, kind, names: list[str] | None = None):
    live, tensors = truth_of(kind)
    checkpoint = zckpt.open(directory, names=names)
    assert not checkpoint.unnamed
    assert [group.parameters for group in checkpoint.param_groups] == [[filed(n) for n in group] for group in live]
    for key, tensor in tensors.items():
        slot, _, name = key.partition("|")
        assert torch.equal(checkpoint.read(filed(name), slot), tensor), key
    assert not take_inventory(checkpoint).left_out


@pytest.mark.parametrize("kind", KINDS)
def test_optimizer_of_an_adapter_is_read_by_the_type_of_its_model(kind):
    assert_is_truth(adapter(kind, "a", config=True), kind)


def test_configuration_of_the_model_is_found_where_the_adapter_says():
    directory = adapter("lora", "a", config=False)
    Path("base").mkdir()
    shutil.copy(ADAPTERS / "config.json", "base")
    about = json.loads((directory / "adapter_config.json").read_text())
    (directory / "adapter_config.json").write_text(
        json.dumps({**about, "base_model_name_or_path": str(Path("base").absolute())})
    )
    assert_is_truth(directory, "lora")


def test_state_beside_several_adapters_may_be_of_any():
    """PEFT puts all but `default` into folders; alike ones are told apart by nothing in the files."""
    run = adapter("lora", "run", config=True)
    known = [name for group in zckpt.open(run).param_groups for name in group.parameters]
    adapter("lora", run / "second", config=False)
    checkpoint = zckpt.open(run)
    assert len(checkpoint.unnamed) == len(known)
    assert any("may be of an adapter in a folder" in one for one in checkpoint.warnings)
    assert_is_truth(run, "lora", known)
    (run / "optimizer.pt").unlink()
    [warning] = zckpt.open(run).warnings
    assert warning == "adapters in folders are not read: second; give each folder by itself"


@pytest.mark.parametrize("kind", KINDS)
def test_live_names_are_taken_too(kind):
    live, _ = truth_of(kind)
    directory = adapter(kind, "a", config=False)
    assert zckpt.open(directory).unnamed
    assert_is_truth(directory, kind, [name for group in live for name in group])


def test_what_shapes_tell_without_a_configuration_is_true():
    live, _ = truth_of("lora")
    checkpoint = zckpt.open(adapter("lora", "a", config=False))
    pairs = list(zip(checkpoint.param_groups[0].parameters, live[0], strict=True))
    assert [(ours, its) for ours, its in pairs if not ours.isdecimal() and ours != filed(its)] == []
    assert sum(not ours.isdecimal() for ours, _ in pairs) == 4  # those of `down_proj`, which no other is like
    assert any("config.json" in warning for warning in checkpoint.warnings)


def test_adapter_by_itself_is_read_and_says_what_it_is():
    directory = adapter("lora", "a", config=False)
    for name in ("optimizer.pt", "trainer_state.json"):
        (directory / name).unlink()
    details = inspected(directory)["details"]
    assert (details["adapter"]["peft_type"], details["adapter"]["r"]) == ("LORA", 2)
    torch.save(load_file(directory / "adapter_model.safetensors"), directory / "adapter_model.bin")
    (directory / "adapter_model.safetensors").unlink()
    assert zckpt.open(directory).parameters.keys() == load_file(ADAPTERS / "lora" / "adapter_model.safetensors").keys()


@pytest.mark.parametrize("kind", KINDS)
def test_consolidated_adapter_is_what_peft_loads(kind):
    directory = adapter(kind, "a", config=True)
    zckpt.consolidate(directory, "model")
    assert names_in("model") == ["adapter_config.json", "adapter_model.safetensors", "config.json"]
    ours, its = (load_file(path / "adapter_model.safetensors") for path in (Path("model"), directory))
    assert_same_tree(ours, its)


@pytest.mark.parametrize(("kind", "through"), each(KINDS, [None, "zckpt", "dcp"]))
def test_the_trainers_adapter_comes_back_as_it_was(kind, through):
    directory = adapter(kind, "a", config=True)
    source = directory
    if through is not None:
        source = Path(through)
        zckpt.convert(directory, source, to=through)
        for name in ("adapter_config.json", "config.json"):
            shutil.copy(directory / name, source)
    target = Path("target")
    zckpt.convert(source, target, to="transformers-trainer", train_batch_size=2, verify=True)
    assert_is_truth(target, kind)
    assert (target / "adapter_model.safetensors").is_file()
    ours, its = (torch.load(path / "optimizer.pt") for path in (target, directory))
    assert [one["params"] for one in ours["param_groups"]] == [one["params"] for one in its["param_groups"]]
    assert_same_tree(ours["state"], its["state"])


@pytest.mark.parametrize("kind", ["lora", "modules"])
def test_an_adapter_in_memory_is_written_as_peft_loads_it(kind):
    """As DeepSpeed has it in what the Trainer saves; without its configuration the Trainer loads names in memory."""
    directory, live = adapter(kind, "a", config=True), truth_of(kind)[0]
    rename = [(f"^{re.escape(filed(name))}$", name) for group in live for name in group]
    zckpt.convert(directory, "live", to="dcp", rename=rename)
    convert = partial(zckpt.convert, to="transformers-trainer", train_batch_size=2, verify=True)
    convert("live", "bare")
    assert load_file("bare/model.safetensors").keys() == {name for group in live for name in group}
    for name in ("adapter_config.json", "config.json"):
        shutil.copy(directory / name, "live")
    convert("live", "target")
    assert_is_truth(Path("target"), kind)
    ours, its = (load_file(path / "adapter_model.safetensors") for path in (Path("target"), directory))
    assert_same_tree(ours, its)
    assert not Path("target/model.safetensors").exists()


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_without_its_configuration_is_not_written_as_a_model(kind):
    """The Trainer under FSDP saves no adapter_config.json, and loads a model of such names without a word: nothing."""
    trained = adapter(kind, "run", config=True)
    weights = load_file(trained / "adapter_model.safetensors")
    source = "dcp"  # which has no configuration
    zckpt.convert(trained, source, to="dcp")
    written = zckpt.convert(source, "trainer", to="transformers-trainer", train_batch_size=2)
    assert any("no adapter_config.json" in note for note in written.notes)
    zckpt.consolidate(source, "model")
    for folder in ("trainer", "model"):
        assert load_file(f"{folder}/adapter_model.safetensors").keys() == weights.keys()
        assert not Path(f"{folder}/model.safetensors").exists()
    with refusing(UnsupportedError, "is an adapter, but Accelerate loads the whole model"):
        zckpt.convert(source, "accelerate", to="accelerate")


@pytest.mark.parametrize(
    ("names", "told"),
    [
        (["q.lora_A.weight", "q.lora_B.weight", "norm.weight"], True),
        (["q.base_layer.lora_A.weight", "q.lora_A.weight"], True),  # two parameters of one module
        (["q.lora_A.mine.weight", "q.lora_B.mine.weight"], False),
        (["e.lora_embedding_A", "e.base_layer.weight"], True),  # which PEFT saves of an embedding
        (["q.weight", "norm.weight"], False),
        ([], False),
    ],
)
def test_names_tell_what_peft_has_in_files(names, told):
    assert is_adapter([f"base_model.model.{name}" for name in names], {}) == told


KINDS_IN_MEMORY = {
    "prompt": {"prompt_encoder.default.embedding.weight": (4, 8)},
    "vera": {**{f"base_model.model.l.{n}.vera_lambda_{one}.default": (4,) for n in (0, 1) for one in "bd"},
             "base_model.vera_A.default": (4, 8)},
    "hra": {f"base_model.model.l.{n}.hra_u.default": (8, 2) for n in (0, 1)},
    "layer norms": {f"base_model.model.l.{n}.ln_tuning_layers.default.weight": (8,) for n in (0, 1)},
    "psoft": {f"base_model.model.l.0.psoft_R.default.{one}": (4,) for one in ("vector_a", "vector_b")},
}  # fmt: skip
"""What some of PEFT's kinds have in memory. In its files a prompt is `prompt_embeddings`, and `default` is left out."""


class Nested(torch.nn.Module):
    """A frozen base, and parameters by their dotted names."""

    def __init__(self, shapes):
        super().__init__()
        for name, shape in {"base_model.model.base": (3,), **shapes}.items():
            module, *steps = self, *name.split(".")
            for step in steps[:-1]:
                if step not in module._modules:
                    module.add_module(step, torch.nn.Module())
                module = module._modules[step]
            is_trained = "base" not in name.rpartition(".")[2] and "vera_A" not in name
            module.register_parameter(steps[-1], torch.nn.Parameter(torch.randn(shape), requires_grad=is_trained))


@pytest.mark.parametrize(("kind", "through"), each(KINDS_IN_MEMORY, [None, "zckpt", "dcp"]))
def test_every_kind_of_adapter_is_loaded_into_the_model_in_memory(kind, through, tmp_path):
    """Numbers too, where several of the file's tensors have a shape."""

    def made():
        model = Nested(KINDS_IN_MEMORY[kind])
        return model, torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-3)

    model, optimizer = made()
    sum((one * torch.randn_like(one)).sum() for one in model.parameters()).backward()
    optimizer.step()
    source = tmp_path / "run"
    source.mkdir()
    tensors = {"prompt_embeddings" if "prompt" in name else name.replace(".default", ""): one.detach().clone()
               for name, one in model.named_parameters() if "base_model.model.base" not in name}  # fmt: skip
    save_file(tensors, source / "adapter_model.safetensors")
    (source / "adapter_config.json").write_text(json.dumps({"peft_type": kind}))
    torch.save(optimizer.state_dict(), source / "optimizer.pt")
    (source / "trainer_state.json").write_text(json.dumps({"global_step": 1, "train_batch_size": 2}))
    zckpt.consolidate(source, tmp_path / "whole")
    assert (tmp_path / "whole" / "adapter_model.safetensors").is_file()
    if through is not None:
        zckpt.convert(source, tmp_path / through, to=through)  # which has no configuration
        zckpt.consolidate(tmp_path / through, tmp_path / "by names")
        assert (tmp_path / "by names" / "adapter_model.safetensors").is_file() or kind in ("prompt", "psoft")
    again, its = made()
    zckpt.load(tmp_path / (through or "run"), model=again, optimizer=its, strict=False)
    for (name, one), other in zip(model.named_parameters(), again.parameters(), strict=True):
        assert not one.requires_grad or torch.equal(one, other), name
        assert_same_tree(dict(its.state.get(other, {})), dict(optimizer.state.get(one, {})), name)


def test_several_adapters_name_what_to_give_and_a_pipeline_is_its_models():
    adapter("lora", "two/one", config=False)
    adapter("lora", "two/other", config=False)
    with refusing(UnknownFormatError, "holds PEFT adapters in folders: one, other.*two/one"):
        zckpt.open("two")
    pipeline = Path("pipeline")
    for name in ("unet", "vae"):
        (pipeline / name).mkdir(parents=True)
        weights = load_file(ADAPTERS / "lora" / "adapter_model.safetensors")
        plain = {key.removeprefix("base_model.model."): value for key, value in weights.items()}
        save_file(plain, pipeline / name / "diffusion_pytorch_model.safetensors")
    (pipeline / "model_index.json").write_text("{}")
    known = zckpt.open(pipeline / "unet").parameters
    assert list(zckpt.open(pipeline).parameters) == [f"{part}.{name}" for part in ("unet", "vae") for name in known]
    assert zckpt.open(pipeline / "unet").format == "transformers-trainer"
    (pipeline / "unet" / "config.json").write_text('{"_class_name": "UNet2DModel", "_diffusers_version": "0.42.1"}')
    zckpt.consolidate(pipeline / "unet", "unet")
    assert names_in("unet") == ["config.json", "diffusion_pytorch_model.safetensors"]


def test_a_whole_model_beside_its_adapter_does_not_get_the_adapters_configuration():
    """As torchtune has them in one directory; `from_pretrained` would look for the adapter."""
    folder = adapter("lora", "epoch_0", config=True)
    (folder / "optimizer.pt").unlink()
    save_file({"model.norm.weight": torch.ones(2)}, folder / "model.safetensors")
    zckpt.consolidate(folder, "model", drop=["adapter_model.*"])
    assert names_in("model") == ["config.json", "model.safetensors"]
    (folder / "model.safetensors").unlink()
    torch.save({"another's name": torch.ones(2)}, folder / "adapter_model.pt")
    zckpt.consolidate(folder, "adapter")
    assert Path("adapter/adapter_config.json").is_file()


@pytest.mark.parametrize("shards", [["model-00001-of-00001"], ["ft-model-00001-of-00002", "ft-model-00002-of-00002"]])
def test_what_torchtune_saves_is_carried_beside_its_model(shards, tmp_path):
    """Its optimizer numbers what its own model has; and shards may come without their index."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 2))
    tensors = model.state_dict()
    for at, shard in enumerate(shards):
        own = dict(list(tensors.items())[at :: len(shards)])
        torch.save(own, tmp_path / f"{shard}.bin")
    recipe = {"epochs_run": 1, "optimizer": torch.optim.AdamW(model.parameters()).state_dict()}
    torch.save(recipe, tmp_path / "recipe_state.pt")
    torch.save({"layers.0.q_proj.lora_a.weight": torch.ones(2)}, tmp_path / "adapter_model.pt")
    found = zckpt.open(tmp_path)
    assert {*found.parameters} == {*tensors}
    assert {*found.metadata} == {"recipe_state", "adapter_model"}
    assert any("recipe_state.pt: the optimizer's state is carried as it is" in warning for warning in found.warnings)
    assert zckpt.verify(tmp_path, deep=True).sound
    assert not zckpt.inspect(tmp_path, include_inventory=True).left_out
    torch.save({}, tmp_path / "model-00002-of-00003.bin")
    with pytest.raises(zckpt.SourceError, match=r"exactly all shards|shards of several models"):
        zckpt.open(tmp_path)


def test_a_pipeline_is_one_checkpoint_of_several_models():
    """As diffusers lays it out: large models in shards with an index, each with a config of its own."""
    pipeline = Path("pipeline")
    tensors = {
        "text_encoder": {"norm.weight": torch.rand(3), "position_ids": torch.arange(4)},
        "unet": {"norm.weight": torch.rand(5).half(), "conv.weight": torch.rand(4, 3, 2, 2).half()},
        "vae": {"norm.weight": torch.rand(7)},
    }
    for name in (*tensors, "scheduler", "tokenizer"):
        (pipeline / name).mkdir(parents=True)
        about = {"_class_name": name, "_diffusers_version": "0.42.0"} if name != "text_encoder" else {"model_type": "x"}
        (pipeline / name / ("scheduler_config.json" if name == "scheduler" else "config.json")).write_text(
            json.dumps(about)
        )
    save_file(tensors["text_encoder"], pipeline / "text_encoder" / "model.safetensors")
    torch.save(tensors["vae"], pipeline / "vae" / "diffusion_pytorch_model.bin")
    where = {}
    for number, (name, tensor) in enumerate(tensors["unet"].items(), 1):
        where[name] = f"diffusion_pytorch_model-0000{number}-of-00002.safetensors"
        save_file({name: tensor}, pipeline / "unet" / where[name])
    (pipeline / "unet" / "diffusion_pytorch_model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": 1}, "weight_map": where})
    )
    (pipeline / "model_index.json").write_text(json.dumps({name: ["diffusers", name] for name in tensors}))
    opened = zckpt.open(pipeline)
    assert opened.models() == sorted(tensors)
    assert not take_inventory(opened).left_out
    for model, its in tensors.items():
        assert all(torch.equal(opened.read(f"{model}.{name}"), tensor) for name, tensor in its.items())
    zckpt.consolidate(pipeline, "one.safetensors", dtype="keep")
    assert torch.equal(load_file("one.safetensors")["unet.conv.weight"], tensors["unet"]["conv.weight"])
    converted(pipeline, "kept", "zckpt", verify=True)
    assert zckpt.verify(pipeline, deep=True).sound
    (pipeline / "unet" / where["conv.weight"]).unlink()
    refused(3, "inspect", pipeline, words=(where["conv.weight"],))


def test_optimizer_without_its_model_says_what_is_missing():
    directory = adapter("lora", "a", config=False)
    (directory / "adapter_model.safetensors").unlink()
    refused(3, "inspect", directory, words=("without the model's files", "model.safetensors"))
