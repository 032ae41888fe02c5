"""What zckpt writes is what torch and transformers load: optimizers as they are, models by `from_pretrained`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import zckpt
from tests.deepspeed_engine.catalogue import SPECS
from tests.deepspeed_engine.models import build_model, param_groups
from tests.deepspeed_engine.optimizers import Lion
from tests.live import save_both, trained
from tests.pairwise import some
from tests.truth import Truth, bits

FIXTURES = Path(__file__).parents[2] / "fixtures"
BETAS = (0.9, 0.95)
ADAMW = [
    "s2_bf16_dp2", "s2_bf16_dp2_rr", "s2_bf16_dp3", "s2_bf16_dp2_palign", "s2_fp16_dp2", "s1_fp32_dp3",
    "s1_bf16_dp2_bf16opt", "s3_bf16_dp2", "s3_bf16_dp3", "s3_bf16_dp2_subgroup", "s2_bf16_dp2_zerodim", "s0_fp32_dp2",
    "s2_bf16_dp2_cpuadam", "s1_bf16_dp3_fused", "s2_bf16_dp2_elastic",
]  # fmt: skip


def written(name: str, directory: Path, **options: Any) -> dict[str, Any]:
    """The state dict that zckpt writes as optimizer.pt."""
    zckpt.consolidate(FIXTURES / name, directory / "model.pt", slots="all", **options)
    state: dict[str, Any] = torch.load(directory / "model.optimizer.pt", weights_only=True)
    return state


def fresh(name: str) -> tuple[torch.nn.Module, list[dict[str, Any]]]:
    """The user's model in fp32 and the groups that a training program makes of it, with other hyperparameters."""
    model = build_model(SPECS[name], seed=99)
    groups = param_groups(SPECS[name], model)
    for group in groups:
        group.update(lr=0.5, weight_decay=0.5)
    return model, groups


def by_name(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    return dict(model.named_parameters())


def load_masters(model: torch.nn.Module, directory: Path) -> None:
    missing, unexpected = model.load_state_dict(torch.load(directory / "model.pt", weights_only=True), strict=True)
    assert not missing
    assert not unexpected


@pytest.mark.parametrize("name", ADAMW)
@pytest.mark.every(3)
def test_optimizer_loads_into_adamw_as_it_is(name, tmp_path):
    truth = Truth(FIXTURES / name)
    (given := tmp_path / "groups.json").write_text(json.dumps(truth.facts["param_groups"]))
    state = written(name, tmp_path, **({"hyperparameters": given} if name.endswith("elastic") else {}))
    model, groups = fresh(name)
    optimizer = torch.optim.AdamW(groups, lr=1.0)
    optimizer.load_state_dict(state)
    for parameter, p in by_name(model).items():
        if parameter in truth.masters:
            own = optimizer.state[p]
            for slot in ("exp_avg", "exp_avg_sq"):
                assert own[slot].dtype == torch.float32
                assert torch.equal(bits(own[slot]), bits(truth.tensors[f"{slot}/{parameter}"])), parameter
            assert own["step"] == 5
        else:
            assert p not in optimizer.state
    for group, expected in zip(optimizer.param_groups, truth.facts["param_groups"], strict=True):
        assert group["lr"] == expected["lr"]
        assert group["weight_decay"] == expected["weight_decay"]
        assert tuple(group["betas"]) == tuple(expected["betas"])
        for p in group["params"]:
            p.grad = torch.ones_like(p)
    optimizer.step()


@pytest.mark.parametrize("name", ["s2_bf16_dp2", "s2_bf16_dp2_rr", "s3_bf16_dp3", "s1_fp32_dp3"])
@pytest.mark.every(2)
def test_next_step_is_that_of_the_state_itself(name, tmp_path):
    """A step from the loaded optimizer and one from state that was put in by hand have the same result."""
    truth = Truth(FIXTURES / name)
    state = written(name, tmp_path)
    stepped = []
    for by_hand in (False, True):
        model, groups = fresh(name)
        load_masters(model, tmp_path)
        parameters = by_name(model)
        for group, its in zip(groups, truth.facts["param_groups"], strict=True):
            group.update(lr=its["lr"] if by_hand else 0.5, weight_decay=its["weight_decay"] if by_hand else 0.5)
        optimizer = torch.optim.AdamW(groups, betas=BETAS)
        if by_hand:
            for parameter in truth.masters:
                optimizer.state[parameters[parameter]] = {
                    "step": torch.tensor(5.0),
                    "exp_avg": truth.tensors[f"exp_avg/{parameter}"].clone(),
                    "exp_avg_sq": truth.tensors[f"exp_avg_sq/{parameter}"].clone(),
                }
        else:
            optimizer.load_state_dict(state)
        generator = torch.Generator().manual_seed(7)
        for p in parameters.values():
            p.grad = torch.randn(p.shape, generator=generator) if p.requires_grad else None
        optimizer.step()
        stepped.append({parameter: parameters[parameter].detach().clone() for parameter in truth.masters})
    for parameter, value in stepped[0].items():
        assert torch.equal(bits(value), bits(stepped[1][parameter])), parameter
        assert not torch.equal(value, truth.masters[parameter]), parameter


@pytest.mark.parametrize(
    ("name", "kind", "slot"),
    [
        ("s2_bf16_dp2_sgdm", lambda g: torch.optim.SGD(g, lr=1.0, momentum=0.1), "momentum_buffer"),
        ("s3_bf16_dp2_sgdm", lambda g: torch.optim.SGD(g, lr=1.0, momentum=0.1), "momentum_buffer"),
        ("s2_bf16_dp2_lion", Lion, "exp_avg"),
        ("s2_bf16_dp2_adagrad1g", lambda g: torch.optim.Adagrad(g, lr=1.0), "sum"),
    ],
)
def test_other_optimizers_load_too(name, kind, slot, tmp_path):
    truth = Truth(FIXTURES / name)
    state = written(name, tmp_path)
    model, groups = fresh(name)
    optimizer = kind(groups)
    optimizer.load_state_dict(state)
    for parameter, p in by_name(model).items():
        if parameter in truth.masters:
            assert torch.equal(bits(optimizer.state[p][slot]), bits(truth.tensors[f"{slot}/{parameter}"])), parameter
    assert [g["lr"] for g in optimizer.param_groups] == [g["lr"] for g in truth.facts["param_groups"]]


def test_names_of_parameters_are_recorded_and_torch_accepts_them(tmp_path):
    state = written("s2_bf16_dp2", tmp_path)
    model, groups = fresh("s2_bf16_dp2")
    names = {id(p): parameter for parameter, p in by_name(model).items()}
    for group, expected in zip(state["param_groups"], groups, strict=True):
        assert group["param_names"] == [names[id(p)] for p in expected["params"]]


@pytest.mark.interop
@pytest.mark.parametrize(
    "options",
    some(
        [{"max_shard_size": 10**3}, {"max_shard_size": 10**9}, {"dtype": "bfloat16"}],
        [{"dtype": dtype, "tied": "drop"} for dtype in ("bfloat16", "keep")],
    ),
    ids=str,
)
def test_hugging_face_loads_the_directory(options, tmp_path):
    from transformers import LlamaForCausalLM

    name = "hf_llama_s2_bf16_dp2"
    truth = Truth(FIXTURES / name)
    zckpt.consolidate(FIXTURES / name, tmp_path / "model", **options)
    build_model(SPECS[name]).config.save_pretrained(tmp_path / "model")
    dtype, expected = (torch.bfloat16, truth.weights) if "dtype" in options else (torch.float32, truth.masters)
    model = LlamaForCausalLM.from_pretrained(tmp_path / "model", dtype=dtype, local_files_only=True)
    for parameter, p in by_name(model).items():
        assert torch.equal(bits(p), bits(expected[parameter])), parameter
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.interop
def test_hugging_face_loads_a_trainers_checkpoint_that_was_consolidated(tmp_path):
    from transformers import AutoModelForCausalLM

    directory = FIXTURES / "other" / "trainer_ds2_gpt2"
    truth = Truth(directory)
    zckpt.consolidate(directory / "checkpoint-4", tmp_path / "model")
    (tmp_path / "model" / "config.json").write_bytes((directory / "checkpoint-4" / "config.json").read_bytes())
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32, local_files_only=True)
    parameters = by_name(model)
    assert len(truth.masters) > 10
    for parameter, value in truth.masters.items():
        assert torch.equal(bits(parameters[parameter]), bits(value)), parameter


def test_an_optimizer_without_state_is_written_too(tmp_path):
    """SGD keeps nothing, but its param groups."""
    model = torch.nn.Linear(3, 2)
    _, sgd = trained(model, torch.optim.SGD(model.named_parameters(), lr=0.25))
    save_both(model, sgd, tmp_path / "x.pt")
    for target in ("model.pt", "model.safetensors", "model"):
        zckpt.consolidate(tmp_path / "x.pt", tmp_path / target, slots="all")
    again = torch.optim.SGD(model.parameters(), lr=1.0)
    again.load_state_dict(torch.load(tmp_path / "model.optimizer.pt", weights_only=True))
    assert again.param_groups[0]["lr"] == 0.25
    [group] = zckpt.open(tmp_path / "model").param_groups
    assert (group.hyperparameters["lr"], group.parameters) == (0.25, ["weight", "bias"])
    assert (tmp_path / "model.optimizer.safetensors").is_file()
    torch.save(model.state_dict(), tmp_path / "none.pt")
    with pytest.raises(zckpt.UsageError, match="expected a checkpoint that has an optimizer"):
        zckpt.consolidate(tmp_path / "none.pt", tmp_path / "n.pt", slots="all")
