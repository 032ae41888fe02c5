"""Models in several files or folders of a training state, as programs around the Trainer and Accelerate leave them."""

import json
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import zckpt
from tests.formats.holding import assert_holds, assert_state, converted
from tests.refusals import refusing
from zckpt.errors import LeftOutError
from zckpt.formats.account import take_inventory

PEFT = "base_model.model."

REWARD = {"model": nn.Linear(4, 4), "v_head": nn.Linear(4, 1)}
ADAPTER = {"adapter_model.safetensors": ("model.", f"{PEFT}model.", "")}
KINDS = {
    "LLaMA-Factory's reward model": (
        REWARD, {"model.safetensors": ("model.", "model.", ""), "value_head.safetensors": ("v_head.", "v_head.", "")},
    ),
    "the same in torch files": (
        REWARD, {"pytorch_model.bin": ("model.", "model.", ""), "value_head.bin": ("v_head.", "v_head.", "")},
    ),
    "the same of an adapter": (REWARD, {**ADAPTER, "value_head.safetensors": ("v_head.", "v_head.", "")}),
    "ms-swift's vision tower, beside an adapter": (
        {"visual": nn.Linear(4, 3), "model": nn.Linear(4, 4)},
        {**ADAPTER, "vit.safetensors": ("visual.", f"{PEFT}visual.", "")},
    ),
    "sentence-transformers' layers, of the same shape": (
        {"0": nn.Linear(4, 4), "1": nn.Identity(), "2": nn.Linear(4, 4), "3": nn.Linear(4, 4)},
        {
            "model.safetensors": ("0.", "zz.", ""),
            "2_Dense/model.safetensors": ("2.", "linear.", "2."),
            "3_Dense/pytorch_model.bin": ("3.", "linear.", "3."),
        },
    ),
}  # fmt: skip
"""By who saves it: modules, and how names of each file begin in memory, in the file, and before that in zckpt."""


def trained(modules):
    model = nn.ModuleDict(deepcopy(modules))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for number, one in enumerate(model.parameters()):
        one.grad = torch.full_like(one, 0.1 * (number + 1))
    optimizer.step()
    return model, optimizer


def save(path, tensors):
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(tensors, path) if path.suffix == ".bin" else save_file(tensors, path)


def saved(folder, kind):
    """Save a model in its files; return it, its optimizer, and zckpt's name of each parameter."""
    modules, files = KINDS[kind]
    model, optimizer = trained(modules)
    names = {}
    for file, (own, in_file, front) in files.items():
        found = {n: n.replace(own, in_file, 1) for n, _ in model.named_parameters() if n.startswith(own)}
        save(folder / file, {in_file: model.get_parameter(n).detach().clone() for n, in_file in found.items()})
        names |= {n: f"{front}{in_file}" for n, in_file in found.items()}
    if any(name.startswith("adapter") for name in files):
        (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 1}))
    if "sentence" in kind:
        (folder / "modules.json").write_text(json.dumps([{"idx": 0, "path": ""}, {"idx": 2, "path": "2_Dense"}]))
    return model, optimizer, names


def save_state(folder, optimizer):
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    torch.save({"last_epoch": 1}, folder / "scheduler.pt")
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 1}))


@pytest.mark.parametrize("kind", KINDS)
def test_all_files_of_a_model_are_read_with_its_optimizer_or_without(kind):
    model, optimizer, names = saved(Path("c"), kind)
    zckpt.consolidate("c", "m.safetensors")
    save_state(Path("c"), optimizer)
    zckpt.convert("c", "z", to="zckpt")
    for source in (Path("m.safetensors"), Path("c"), Path("z")):
        checkpoint = zckpt.open(source)
        assert {*checkpoint.parameters} == {*names.values()}
        assert not checkpoint.unnamed
        for name, one in model.named_parameters():
            assert torch.equal(checkpoint.read(names[name], "weight"), one)
            assert_state(checkpoint, names[name], optimizer.state[one] if source.is_dir() else {})
    assert not take_inventory(zckpt.open("c")).left_out
    assert zckpt.verify("c", deep=True).sound


@pytest.mark.parametrize("is_whole", [False, True])
def test_mistrals_own_files_are_a_model(is_whole):
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 3, bias=False))
    held = model.state_dict()
    where = {
        name: "consolidated.safetensors" if is_whole else f"consolidated-{n}.safetensors" for n, name in enumerate(held)
    }
    for file in {*where.values()}:
        save_file({name: one for name, one in held.items() if where[name] == file}, file)
    if not is_whole:
        Path("consolidated.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    Path("params.json").write_text('{"dim": 4}')
    assert_holds(".", model)
    if is_whole:
        save_file({"lora_A.weight": torch.ones(2, 2)}, "adapter_model.safetensors")
        assert [*zckpt.open(".").parameters] == ["lora_A.weight"]


def test_sentence_transformers_modules_are_written_into_their_folders():
    model, optimizer, names = saved(Path("c"), next(kind for kind in KINDS if "sentence" in kind))
    save_state(Path("c"), optimizer)
    texts = [
        "config.json",
        "config_sentence_transformers.json",
        "1_Pooling/config.json",
        "2_Dense/config.json",
        "3_Dense/config.json",
    ]
    for name in texts:
        Path("c", name).parent.mkdir(exist_ok=True)
        Path("c", name).write_text(json.dumps({"of": name}))
    zckpt.consolidate("c", "model")
    zckpt.average(["c", "c"], "mean", max_shard_size=70)
    zckpt.convert("c", "again", to="transformers-trainer", train_batch_size=1)
    zckpt.convert("c", "again", to="transformers-trainer", train_batch_size=1, overwrite=True)
    for folder in (Path("model"), Path("mean"), Path("again")):
        for name in (*texts, "modules.json"):
            assert (folder / name).read_bytes() == Path("c", name).read_bytes()
        for front in ("2", "3"):
            found = load_file(folder / f"{front}_Dense" / "model.safetensors")
            assert {*found} == {"linear.weight", "linear.bias"}
            assert torch.equal(found["linear.weight"], model[front].weight)
        assert {*zckpt.open(folder).parameters} == {*names.values()}
    again = zckpt.open("again")
    for name, one in model.named_parameters():
        assert_state(again, names[name], optimizer.state[one])


def test_a_head_that_the_models_own_file_has_too_is_not_read_twice(tmp_path):
    save(tmp_path / "model.safetensors", {"a.weight": torch.ones(2, 2), "v_head.weight": torch.ones(2)})
    save(tmp_path / "value_head.safetensors", {"v_head.weight": torch.zeros(2)})
    assert torch.equal(zckpt.open(tmp_path).read("v_head.weight", "weight"), torch.ones(2))
    with refusing(LeftOutError, "value_head.safetensors"):
        zckpt.consolidate(tmp_path, tmp_path / "m.safetensors")


def test_the_trainer_does_not_read_a_head_from_its_own_file():
    _, optimizer, _ = saved(Path("c"), "LLaMA-Factory's reward model")
    save_state(Path("c"), optimizer)
    answer = zckpt.resume_check("c", program="trainer")
    assert answer.verdict == "partly"
    assert "value_head.safetensors" in str(answer.not_back)


@pytest.mark.parametrize("has_average", [False, True])
@pytest.mark.parametrize("is_several", [False, True])
def test_diffusers_folders_are_models_beside_their_optimizer(has_average, is_several):
    """Of several trained together the optimizer has them in an order of its own, here not that of their names."""
    model, optimizer = trained({"unet": nn.Linear(4, 3), **({"text_encoder": nn.Linear(5, 2)} if is_several else {})})
    for folder, own in model.items():
        stem = "model" if folder == "text_encoder" else "diffusion_pytorch_model"
        save(Path(f"c/{folder}/{stem}.safetensors"), own.state_dict())
    if has_average:
        average = {name: one.detach() / 2 for name, one in model["unet"].named_parameters()}
        save(Path("c/unet_ema/diffusion_pytorch_model.safetensors"), average)
    torch.save(optimizer.state_dict(), "c/optimizer.bin")
    torch.save({"step": 1}, "c/random_states_0.pkl")
    checkpoint = assert_holds("c", model if has_average or is_several else model["unet"], optimizer)
    assert not checkpoint.unnamed
    if has_average:
        assert torch.equal(checkpoint.read("unet_ema.weight", "weight"), average["weight"])
        assert {*checkpoint.parameters["unet_ema.weight"].slots} == {"weight"}
    if has_average and not is_several:  # names as a program with the model prints them
        named = zckpt.open("c", names=["weight", "bias"])
        assert torch.equal(named.read("unet.bias", "exp_avg"), optimizer.state[model["unet"].bias]["exp_avg"])
    assert zckpt.verify("c", deep=True).sound
    converted("c", "z", "zckpt")


def test_a_lora_of_diffusers_is_a_model_beside_its_optimizer(tmp_path):
    model, optimizer = trained({"lora": nn.Sequential(nn.Linear(4, 2, bias=False), nn.Linear(2, 3, bias=False))})
    save(tmp_path / "pytorch_lora_weights.safetensors", model.state_dict())
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.bin")
    assert_holds(tmp_path, model, optimizer)


@pytest.mark.parametrize(("apart", "name"), [("vit", f"{PEFT}visual.weight"), ("value_head", "v_head.weight")])
def test_what_lies_beside_an_adapter_is_merged_or_told_of(apart, name):
    """What ms-swift trains whole takes the place of the base's own; a head is of no tensor of it."""
    save(Path("base/model.safetensors"), {"visual.weight": torch.zeros(2, 2), "q.weight": torch.zeros(2, 2)})
    factors = {f"{PEFT}q.lora_A.weight": torch.ones(1, 2), f"{PEFT}q.lora_B.weight": torch.ones(2, 1)}
    save(Path("a/adapter_model.safetensors"), factors)
    save(Path(f"a/{apart}.safetensors"), {name: torch.full((2, 2), 7.0)})
    config = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": ["q"]}
    Path("a/adapter_config.json").write_text(json.dumps(config))
    done = zckpt.merge_adapter("base", "a", "m.safetensors")
    merged = zckpt.open("m.safetensors").state_dict()
    assert {*merged} == {"visual.weight", "q.weight"}
    assert torch.equal(merged["q.weight"], torch.ones(2, 2))
    assert torch.equal(merged["visual.weight"], torch.full((2, 2), 7.0 if apart == "vit" else 0.0))
    assert any("value_head.safetensors" in one for one in done.warnings) == (apart == "value_head")
