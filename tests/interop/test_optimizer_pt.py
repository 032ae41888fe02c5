"""What zckpt writes is what torch and transformers load: optimizers as they are, models by `from_pretrained`."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import zckpt
from tests.deepspeed_engine.catalogue import SPECS
from tests.deepspeed_engine.models import build_model, param_groups
from tests.deepspeed_engine.optimizers import Lion
from tests.live import save_both, trained
from tests.logical import assert_same_tree
from tests.pairwise import some
from tests.truth import Truth, bits

FIXTURES = Path(__file__).parents[2] / "fixtures"
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


SGD = partial(torch.optim.SGD, lr=1.0, momentum=0.1)
OTHERS: list[tuple[str, Any, tuple[str, ...]]] = [
    ("s2_bf16_dp2_sgdm", SGD, ("momentum_buffer",)),
    ("s3_bf16_dp2_sgdm", SGD, ("momentum_buffer",)),
    ("s2_bf16_dp2_lion", Lion, ("exp_avg",)),
    ("s2_bf16_dp2_adagrad1g", partial(torch.optim.Adagrad, lr=1.0), ("sum", "step")),
]
ADAMWS = [(name, partial(torch.optim.AdamW, lr=1.0), ("exp_avg", "exp_avg_sq", "step")) for name in ADAMW]


@pytest.mark.parametrize(
    ("name", "kind", "slots"),
    some(ADAMWS[::3] + OTHERS, [one for number, one in enumerate(ADAMWS) if number % 3]),
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_optimizer_loads_into_torchs_as_it_is(name, kind, slots, tmp_path):
    truth = Truth(FIXTURES / name)
    (given := tmp_path / "groups.json").write_text(json.dumps(truth.facts["param_groups"]))
    model, groups = fresh(name)
    optimizer = kind(groups)
    names = {p: parameter for parameter, p in by_name(model).items()}
    options: dict[str, Any] = {"hyperparameters": given} if name.endswith("elastic") else {}
    if name.startswith("s0"):  # torch's optimizer alone, of whose parameters two have the same shape
        options["names"] = [names[p] for group in optimizer.param_groups for p in group["params"]]
    state = written(name, tmp_path, **options)
    optimizer.load_state_dict(state)
    model.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True), strict=True)
    for parameter, p in by_name(model).items():
        if parameter not in truth.masters:
            assert p not in optimizer.state
            continue
        assert torch.equal(bits(p), bits(truth.masters[parameter])), parameter
        own = dict(optimizer.state[p])
        assert own.keys() == set(slots)
        assert own.pop("step", 5) == 5
        assert_same_tree(own, {slot: truth.tensors[f"{slot}/{parameter}"] for slot in own}, parameter)
    for group, saved, expected in zip(
        optimizer.param_groups, state["param_groups"], truth.facts["param_groups"], strict=True
    ):
        assert saved["param_names"] == [names[p] for p in group["params"]]
        for key in group.keys() & expected.keys() - {"params"}:
            assert (list(group[key]) if key == "betas" else group[key]) == expected[key], key
        for p in group["params"]:
            p.grad = torch.ones_like(p)
    optimizer.step()


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
