"""Which of the Trainer's two groups a parameter is in: by its name, and in older versions by the class of its norm."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.optim import SGD
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, ReduceLROnPlateau, SequentialLR

import zckpt
from tests.formats.holding import converted
from tests.logical import assert_same_tree
from zckpt.errors import UnsupportedError
from zckpt.formats.transformers_trainer.states import scheduler
from zckpt.state import Checkpoint, ParamGroup

Shape = tuple[int, ...]
Moments = dict[str, torch.Tensor]

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


def saved(folder, shapes: dict[str, Shape], groups: list[dict[str, Any]], *, adapter=False) -> Moments:
    """A Trainer's directory after a step, with groups of so many names; returns each parameter's first moment."""
    folder.mkdir(exist_ok=True)
    model = {name: torch.nn.Parameter(torch.randn(shape)) for name, shape in shapes.items()}
    optimizer = torch.optim.AdamW([{**one, "params": [model[name] for name in one["params"]]} for one in groups])
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    for one in model.values():
        one.grad = torch.randn_like(one)
    optimizer.step()
    weights = {name: one.detach() for name, one in model.items()}
    save_file(weights, folder / f"{'adapter_' * adapter}model.safetensors", {"format": "pt"})
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    torch.save(schedule.state_dict(), folder / "scheduler.pt")
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 1, "train_batch_size": 2}))
    return {name: optimizer.state[one]["exp_avg"] for name, one in model.items()}


def trained(folder, undecayed: tuple[str, ...]) -> Moments:
    """What transformers saves of a Qwen2, whose second group has what is named so."""
    rest = [name for name in SHAPES if any(one in name for one in undecayed)]
    moments = saved(folder, SHAPES, [{"params": [name for name in SHAPES if name not in rest]}, {"params": rest}])
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return moments


def assert_same_optimizer(one, other):
    ours, theirs = (torch.load(folder / "optimizer.pt") for folder in (one, other))
    for key in ("params", "lr"):
        assert [group[key] for group in ours["param_groups"]] == [group[key] for group in theirs["param_groups"]]
    assert_same_tree(ours["state"], theirs["state"])


@pytest.mark.parametrize("undecayed", [("bias", "norm"), ("bias",)], ids=["by name", "norms of an unknown class"])
def test_state_is_of_the_parameter_whose_it_is(undecayed, tmp_path):
    truth = trained(tmp_path, undecayed)
    checkpoint = zckpt.open(tmp_path)
    assert checkpoint.unnamed == {}
    for name, moment in truth.items():
        assert torch.equal(checkpoint.read(name, "exp_avg"), moment), name


def test_an_older_trainers_groups_stay_as_they_are():
    trained(Path("run"), ("bias",))
    zckpt.convert("run", "again", to="transformers-trainer", train_batch_size=2)
    assert_same_optimizer(Path("again"), Path("run"))


@pytest.mark.parametrize(("halves", "rates"), [([""], [1e-3]), (["_A.", "_B.", None, None], [1e-3, 1e-2, 1e-2, 1e-6])])
def test_groups_of_a_program_with_others_stay_as_they_are(halves, rates):
    """ms-swift drops the empty one of an adapter's, LLaMA-Factory's LoRA+ has four, of which two are empty."""
    names = [f"base_model.model.model.layers.{n}.q_proj.lora_{one}.weight" for n in (0, 1) for one in "AB"]
    shapes = {name: (2, 16) if "_A." in name else (16, 2) for name in names}
    groups = [{"params": [name for name in names if half is not None and half in name], "lr": rate}
              for half, rate in zip(halves, rates, strict=True)]  # fmt: skip
    source = Path("run")
    saved(source, shapes, groups, adapter=True)
    about = {"peft_type": "LORA", "r": 2, "target_modules": ["q_proj"]}
    (source / "adapter_config.json").write_text(json.dumps(about))
    again = converted(source, "again", "transformers-trainer")
    assert_same_optimizer(again, source)
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
    rest = [name for name in shapes if name not in first]
    moments = saved(tmp_path, shapes, [{"params": [*first]}, {"params": rest}])
    opened = zckpt.open(tmp_path)
    for name in (one.name for one in opened.parameters.values() if "exp_avg" in one.slots):
        assert torch.equal(opened.read(name, "exp_avg"), moments[name]), name


def test_groups_that_cannot_be_one_say_what_their_steps_are(torch_file):
    names = ["first.weight", "second.weight"]
    weights = {name: torch.nn.Parameter(torch.ones(2, 2)) for name in names}
    optimizer = torch.optim.AdamW([{"params": [one]} for one in weights.values()])
    sum(one.sum() for one in weights.values()).backward()
    optimizer.step()
    state = optimizer.state_dict()
    state["state"][1]["step"] += 4
    path = torch_file({"model": weights, "optimizer": state, "step": 5})
    with pytest.raises(UnsupportedError, match=r"are one in the Trainer differ.* found step 1\.0 and 5\.0$"):
        zckpt.convert(path, "target", to="transformers-trainer", train_batch_size=2, names=names)


def test_a_schedule_of_any_kind_goes_on_in_as_many_groups_as_are_written():
    """DeepSpeed leaves out the group in which nothing is trained, as every LoRA has one; the Trainer has both."""
    rates = []
    for changed in (False, True):
        groups: list[Any] = [{"params": [torch.ones(1)]}, {"params": []}]
        schedule = ReduceLROnPlateau(SGD(groups[:1], lr=1.0), patience=2, min_lr=0.05)
        schedule.step(1.0)
        schedule.step(2.0)
        if changed:
            state: dict[str, object] = {"scheduler": schedule.state_dict()}
            checkpoint = Checkpoint(Path("x"), "", metadata=state, param_groups=[ParamGroup({"lr": 1.0}, [])] * 2)
            notes: list[str] = []
            schedule = ReduceLROnPlateau(SGD(groups, lr=1.0), patience=9, min_lr=0.05)
            schedule.load_state_dict(scheduler(checkpoint, notes))
            assert "the source's for these param groups" in notes[0]
        found = []
        for _ in range(6):
            schedule.step(2.0)
            found.append(schedule.get_last_lr()[0])
        rates.append(found)
    assert rates[0] == rates[1] == [1.0, 0.1, 0.1, 0.1, 0.05, 0.05]


@pytest.mark.parametrize("after", [1, 3])
def test_schedules_one_after_the_other_go_on_in_as_many_groups_as_are_written(after):
    def scheduled(groups: list[Any]) -> Any:
        optimizer = SGD(groups, lr=1.0)
        return SequentialLR(optimizer, [LinearLR(optimizer), CosineAnnealingLR(optimizer, 9, 0.1)], [2])

    unbroken = scheduled([{"params": [torch.ones(1)]}])
    for _ in range(after):
        unbroken.step()
    rates = {"lr": unbroken.get_last_lr()[0], "initial_lr": 1.0}
    state: dict[str, object] = {"scheduler": unbroken.state_dict()}
    written = scheduler(Checkpoint(Path("x"), "", metadata=state, param_groups=[ParamGroup(rates, [])] * 2), [])
    again = scheduled([{"params": [torch.ones(1)]}, {"params": []}])
    again.load_state_dict(written)
    for group in again.optimizer.param_groups:
        group.update(rates)
    for _ in range(5):
        unbroken.step()
        again.step()
        assert again.get_last_lr() == unbroken.get_last_lr() * 2
