"""Which of the Trainer's two groups a parameter is in: by its name, and in older versions by the class of its norm."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import zckpt

CONFIG = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "tie_word_embeddings": True}
LAYER = {
    **{f"self_attn.{one}_proj.{kind}": (n, 16) if kind == "weight" else (n,)
       for one, n in (("q", 16), ("k", 8), ("v", 8)) for kind in ("weight", "bias")},
    "self_attn.o_proj.weight": (16, 16), "mlp.gate_proj.weight": (24, 16), "mlp.up_proj.weight": (24, 16),
    "mlp.down_proj.weight": (16, 24), "input_layernorm.weight": (16,), "post_attention_layernorm.weight": (16,),
}  # fmt: skip
SHAPES = {
    "model.embed_tokens.weight": (64, 16),
    **{f"model.layers.{layer}.{name}": shape for layer in (0, 1) for name, shape in LAYER.items()},
    "model.norm.weight": (16,),
}
"""Of a model of Qwen2, in its order; transformers 4.48.3 trained one, whose groups are those below."""


def trained(folder: Path, undecayed: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """A Trainer's directory, whose second group has what is named so; returns each parameter's first moment."""
    torch.manual_seed(0)
    model = {name: torch.nn.Parameter(torch.randn(shape)) for name, shape in SHAPES.items()}
    rest = [name for name in model if any(one in name for one in undecayed)]
    groups = [[name for name in model if name not in rest], rest]
    optimizer = torch.optim.AdamW([{"params": [model[name] for name in one]} for one in groups])
    sum((one * torch.randn_like(one)).sum() for one in model.values()).backward()
    optimizer.step()
    save_file({name: one.detach() for name, one in model.items()}, folder / "model.safetensors", {"format": "pt"})
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 1}))
    return {name: optimizer.state[one]["exp_avg"] for name, one in model.items()}


@pytest.mark.parametrize("undecayed", [("bias", "norm"), ("bias",)], ids=["by name", "norms of an unknown class"])
def test_state_is_of_the_parameter_whose_it_is(undecayed, tmp_path):
    truth = trained(tmp_path, undecayed)
    checkpoint = zckpt.open(tmp_path)
    assert checkpoint.unnamed == {}
    for name, moment in truth.items():
        assert torch.equal(checkpoint.read(name, "exp_avg"), moment), name


def test_an_older_trainers_groups_stay_as_they_are(tmp_path):
    source, again = tmp_path / "run", tmp_path / "again"
    source.mkdir()
    trained(source, ("bias",))
    zckpt.convert(source, again, to="transformers-trainer", train_batch_size=2)
    ours, theirs = (torch.load(one / "optimizer.pt") for one in (again, source))
    assert [one["params"] for one in ours["param_groups"]] == [one["params"] for one in theirs["param_groups"]]
    for number, state in theirs["state"].items():
        assert torch.equal(ours["state"][number]["exp_avg"], state["exp_avg"])


def test_groups_of_a_program_with_others_stay_as_they_are(tmp_path):
    """ms-swift drops the empty one of an adapter's, LLaMA-Factory's LoRA+ has four, of which two are empty."""
    names = [f"base_model.model.model.layers.{n}.q_proj.lora_{one}.weight" for n in (0, 1) for one in "AB"]
    model = {name: torch.nn.Parameter(torch.randn((2, 16) if "_A." in name else (16, 2))) for name in names}
    halves = [[model[name] for name in names if half in name] for half in ("_A.", "_B.")]
    for case, rates in {"one": [1e-3], "four": [1e-3, 1e-2, 1e-2, 1e-6]}.items():
        parts = [list(model.values())] if case == "one" else [*halves, [], []]
        groups = [{"params": part, "lr": rate} for part, rate in zip(parts, rates, strict=True)]
        optimizer = torch.optim.AdamW(groups)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
        sum((one * torch.randn_like(one)).sum() for one in model.values()).backward()
        optimizer.step()
        source, again = tmp_path / case, tmp_path / f"{case}_again"
        source.mkdir()
        save_file({name: one.detach() for name, one in model.items()}, source / "adapter_model.safetensors")
        (source / "adapter_config.json").write_text(
            json.dumps({"peft_type": "LORA", "r": 2, "target_modules": ["q_proj"]})
        )
        (source / "trainer_state.json").write_text(json.dumps({"global_step": 1, "train_batch_size": 2}))
        torch.save(optimizer.state_dict(), source / "optimizer.pt")
        torch.save(schedule.state_dict(), source / "scheduler.pt")
        zckpt.convert(source, again, to="transformers-trainer")
        ours, theirs = (torch.load(one / "optimizer.pt") for one in (again, source))
        assert [one["params"] for one in ours["param_groups"]] == [one["params"] for one in theirs["param_groups"]]
        assert [one["lr"] for one in ours["param_groups"]] == rates
        assert zckpt.diff(source, again).equal
        assert torch.load(again / "scheduler.pt")["base_lrs"] == rates


def test_other_groups_keep_their_numbers(tmp_path):
    trained(tmp_path, ("bias", "model.norm"))
    assert zckpt.open(tmp_path).unnamed


def test_groups_of_another_rule_are_not_read_by_the_trainers(tmp_path):
    """The first has as many parameters of one axis as the rule gives it, and no matrix, as it would have."""
    block = {"norm.weight": (4,), "norm.bias": (4,), "q.weight": (4, 4), "q.bias": (4,), "fc.weight": (6, 4),
             "fc.bias": (6,), "out.weight": (4, 6), "out.bias": (4,)}  # fmt: skip
    first = {"norm.weight": (4,), "norm.bias": (4,)}
    shapes = {**first, "emb.weight": (9, 4), **{f"layers.0.{name}": shape for name, shape in block.items()}}
    model = {name: torch.nn.Parameter(torch.randn(shape)) for name, shape in shapes.items()}
    parts = [[name for name in model if (name in first) is is_first] for is_first in (True, False)]
    optimizer = torch.optim.AdamW([{"params": [model[name] for name in part]} for part in parts])
    sum((one * torch.randn_like(one)).sum() for one in model.values()).backward()
    optimizer.step()
    save_file({name: one.detach() for name, one in model.items()}, tmp_path / "model.safetensors")
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    opened = zckpt.open(tmp_path)
    for name in (one.name for one in opened.parameters.values() if "exp_avg" in one.slots):
        assert torch.equal(opened.read(name, "exp_avg"), optimizer.state[model[name]]["exp_avg"]), name
