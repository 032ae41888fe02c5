"""Megatron-Core's `torch_dist`: layers, experts and flattened slices are the tensors of the model, or it is refused."""

from __future__ import annotations

import itertools
import json
import shutil
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

import zckpt
from tests.engine.test_plan import each_once, hole_of, run
from tests.folders import names_in
from tests.formats.holding import converted
from tests.refusals import refusing
from tests.truth import Truth, assert_same
from zckpt.codes import OTHER_RUN, WEIGHT_MISMATCH
from zckpt.engine.plan import fill
from zckpt.errors import LayoutError, ShardError, UnknownFormatError, UnsupportedError, UsageError
from zckpt.formats.account import take_inventory
from zckpt.formats.megatron.cut import is_flattened, unflattened
from zckpt.formats.megatron.keys import stored
from zckpt.formats.megatron.names import in_order
from zckpt.state import Extent, Slot, Span

OTHER = Path(__file__).parents[2] / "fixtures" / "other"
NAMES = ["mcore013_bf16_model_dp2", "mcore_bf16_moe_freq", "mcore_bf16_plain_tp2"]
MARK = {"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch"}
FC1 = "decoder.layers.mlp.linear_fc1.weight"
FC2 = "decoder.layers.mlp.linear_fc2.weight"
EXPERTS = "decoder.layers.mlp.experts.experts.linear_fc2.weight"
GROUP = {"lr": 0.5, "wd_mult": 1.0, "is_expert_parallel": False}


def write(folder, tensors, **common) -> Path:
    """Write a directory as Megatron-Core does: the keys are flat."""
    planner = DefaultSavePlanner(flatten_state_dict=False)
    dcp.save(tensors, storage_writer=dcp.FileSystemWriter(folder), planner=planner, no_dist=True)
    (folder / "metadata.json").write_text(json.dumps(MARK))
    torch.save({"iteration": 7, **common}, folder / "common.pt")
    return folder


def optimizer(*groups, step=3.0) -> dict[str, Any]:
    return {"optimizer": {"param_groups": [{**one, "step": step} for one in groups]}, "param_state_sharding_type": "x"}


def counted(*shape) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


TRAINED = {FC2: counted(2, 3, 4), f"optimizer.state.exp_avg.{FC2}": counted(2, 3, 4)}


def read_all(checkpoint, slot="weight") -> dict[str, torch.Tensor]:
    return {one.name: checkpoint.read(one.name, slot) for one in checkpoint.tensors()}


# --- real checkpoints


@pytest.mark.parametrize("name", NAMES)
def test_a_real_checkpoint_says_what_its_program_knew(name):
    truth, checkpoint = Truth(OTHER / name), zckpt.open(OTHER / name / "ckpt")
    facts, spec = truth.facts, truth.facts["spec"]
    assert (checkpoint.format, checkpoint.step) == ("megatron", facts["step"])
    ranks = checkpoint.topology
    assert (ranks.tp, ranks.pp, ranks.ep, checkpoint.world_size) == (spec["tp"], spec["pp"], spec["ep"], spec["ws"])
    assert list(checkpoint.parameters) == facts["order_of_names"]
    assert [sorted(one.parameters) for one in checkpoint.param_groups] == [
        sorted(one["members"]) for one in facts["param_groups"]
    ]
    for group, its in zip(checkpoint.param_groups, facts["param_groups"], strict=True):
        assert group.hyperparameters["lr"] == its["lr"]
        assert getattr(group.state["step"], "value", group.state["step"]) == 4.0
    assert {"args", "opt_param_scheduler", "rng_state"} <= set(checkpoint.metadata)
    assert not any("_extra_state" in key for key in checkpoint.metadata)
    assert not checkpoint.warnings
    assert "default rule" in str(checkpoint.details["param groups"])


def test_run_iteration_and_file_of_it():
    run = OTHER / "mcore_bf16_plain_tp2" / "ckpt"
    same = zckpt.fingerprint(run).text
    assert zckpt.fingerprint(run / "iter_0000004").text == same
    assert zckpt.open(run, tag="iter_0000004").source == zckpt.open(run).source
    with refusing(UnknownFormatError, "is one file of a Megatron-Core checkpoint"):
        zckpt.open(run / "iter_0000004" / ".metadata")
    shutil.copytree(run, "run")
    Path("run/iter_0000004").rename(Path("run/release"))
    Path("run/latest_checkpointed_iteration.txt").write_text("release")
    assert zckpt.fingerprint("run").text == same
    Path("run/release").rename(Path("run/iter_0000004"))
    Path("run/latest_checkpointed_iteration.txt").write_text("12")
    with refusing(UnknownFormatError, r"names no checkpoint.*iter_0000004"):
        zckpt.open("run")
    Path("run/latest_checkpointed_iteration.txt").write_text("longer than any name" * 100)
    with refusing(UnknownFormatError, r"names no checkpoint.*iter_0000004"):
        zckpt.open("run")


def test_the_model_that_ms_swift_exports_beside_it_is_foreign():
    """Under Hugging Face's names, as its configuration is, which is not written beside Megatron's names."""
    source = Path(shutil.copytree(OTHER / NAMES[0] / "ckpt", "checkpoint-2"))
    save_file({"lm_head.weight": torch.ones(2)}, source / "model-00001-of-00001.safetensors")
    where = {"weight_map": {"lm_head.weight": "model-00001-of-00001.safetensors"}}
    (source / "model.safetensors.index.json").write_text(json.dumps(where))
    (source / "config.json").write_text('{"model_type": "qwen3"}')
    assert not take_inventory(zckpt.open(source)).left_out
    converted(source, "zckpt", "zckpt")
    done = zckpt.consolidate(source, "model")
    assert names_in("model") == ["model.safetensors"]
    assert any("--map NAME gives transformers'" in note for note in done.notes)
    with refusing(UsageError, "has Megatron's names, .* give --map"):
        zckpt.consolidate(source, "other", config=source)


def test_nemo_keeps_it_in_a_folder_with_names_of_its_own():
    tensors = {f"module.{FC2}": counted(2, 3, 4), f"optimizer.state.exp_avg.module.{FC2}": counted(2, 3, 4) + 1,
               "module.embedding.word_embeddings.weight": counted(5, 2)}  # fmt: skip
    common = {"global_step": 9, "iteration": None, "optimizer": [optimizer(GROUP)], "lr_schedulers": [{"max_lr": 1}]}
    Path("model/context").mkdir(parents=True)
    Path("model/context/model.yaml").write_text("config: {num_layers: 2}")
    write(Path("model/weights"), tensors, **common)
    opened = zckpt.open("model")
    names = [f"decoder.layers.{i}.mlp.linear_fc2.weight" for i in range(2)]
    assert list(opened.parameters) == ["embedding.word_embeddings.weight", *names]
    assert opened.wrapped[names[0]] == f"module.{names[0]}"
    assert torch.equal(opened.read(names[1], "exp_avg"), counted(2, 3, 4)[1] + 1)
    assert (opened.step, opened.param_groups[0].parameters) == (9, names)
    assert opened.parameters["embedding.word_embeddings.weight"].frozen
    assert take_inventory(opened).left_out == []
    Path("model/weights").rename(Path("model/model_weights"))
    assert list(zckpt.open("model").parameters) == list(opened.parameters)
    Path("model/model_weights").rename(Path("model/weights"))
    Path("model/weights/metadata.json").unlink()
    with refusing(UnsupportedError, "model/weights: is Megatron-Core's .*, but metadata.json is missing"):
        zckpt.open("model")


@pytest.mark.parametrize(("step", "kept"), [(3.0, False), (4.0, True)])
def test_steps_of_parameters_that_their_groups_have_are_not_kept_twice(step, *, kept, tmp_path):
    state = {"param_state": {0: {"step": torch.tensor(step)}, 1: {"step": torch.tensor(3.0)}}}
    write(tmp_path, TRAINED, optimizer={**optimizer(GROUP), **state})
    checkpoint = zckpt.open(tmp_path)
    assert ("param_state" in checkpoint.optimizer_metadata) == kept
    assert take_inventory(checkpoint).left_out == []


@pytest.mark.parametrize("others", [[{"lr_mult": 0.5}, {"wd_mult": 0}], [{"lr_mult": 0.1}], None])
def test_state_of_no_known_group_is_kept_or_refused(others):
    """Other groups than Megatron's rule makes: an override for some names, which no file has."""
    if others is None:  # where the groups lie beside buffers
        source = OTHER / "mcore_bf16_buckets_tp2_dp2" / "ckpt"
        [folder] = source.glob("iter_*")
        tensors = {}
        _load_state_dict(tensors, dcp.FileSystemReader(folder), planner=_EmptyStateDictLoadPlanner(), no_dist=True)
        for key in (one for one in tensors if ".optimizer/shard_" in one):
            tensors[key][0]["param_groups"] += [{**tensors[key][0]["param_groups"][0], "lr_mult": 0.5}]
        write(Path("run"), tensors, **torch.load(folder / "common.pt", weights_only=False))
    else:
        write(Path("run"), TRAINED, optimizer=optimizer(GROUP, *({**GROUP, **one} for one in others)))
    checkpoint = zckpt.open("run")
    assert (checkpoint.param_groups, take_inventory(checkpoint).left_out) == ([], [])
    assert "param_groups" in checkpoint.optimizer_metadata
    if others is not None:
        assert any("default rule tell" in one for one in checkpoint.warnings)
        assert len(checkpoint.optimizer_metadata["param_groups"]) == 1 + len(others)
    assert all(one.group is None for one in checkpoint.parameters.values())
    converted("run", "own", "zckpt", verify=True)
    zckpt.consolidate("run", "model.safetensors")
    for to in ("dcp", "consolidated", "universal", "accelerate", "fsdp-rank-files", "zero-redundancy", "megatron"):
        with refusing(UnsupportedError, "unknown which parameters each param group has.*`zckpt consolidate` writes"):
            zckpt.convert("run", to, to=to)
    with refusing(UnsupportedError, "unknown which parameters each param group has"):
        zckpt.consolidate("run", "all.safetensors", slots="all")


def test_difference_of_ranks_is_none():
    about = {"content_metadata": {"singleton_local_shards": False}, "optimizer": optimizer(GROUP)}
    write(Path("a"), TRAINED, args=Namespace(tensor_model_parallel_size=1, world_size=1, lr=1.0), **about)
    about["content_metadata"] = {"singleton_local_shards": True}
    apart = {"decoder.layers.0.mlp.linear_fc2.weight": counted(2, 3, 4)[0].clone(),
             "decoder.layers.1.mlp.linear_fc2.weight": counted(2, 3, 4)[1].clone()}  # fmt: skip
    apart |= {f"optimizer.state.exp_avg.{name}": value for name, value in apart.items()}
    write(Path("b"), apart, args=Namespace(tensor_model_parallel_size=2, world_size=4, lr=1.0), **about)
    assert zckpt.diff("a", "b").equal
    assert zckpt.fingerprint("a").text == zckpt.fingerprint("b").text
    write(Path("c"), TRAINED, args=Namespace(tensor_model_parallel_size=1, world_size=1, lr=2.0), **about)
    assert not zckpt.diff("a", "c").equal


# --- what is stored together, and apart


def test_layers_and_experts_are_parameters_of_their_own():
    weight, moment = counted(2, 3, 4, 5), -counted(2, 3, 4, 5)
    tensors = {EXPERTS: weight, f"chained_1.optimizer.state.exp_avg.{EXPERTS}": moment,
               "decoder.layers.mlp.router.expert_bias": counted(2, 3),
               "mtp.layers.0.hnorm.weight": counted(6)}  # fmt: skip
    groups = {0: optimizer(GROUP), 1: optimizer({**GROUP, "is_expert_parallel": True, "lr": 0.25})}
    opened = zckpt.open(write(Path("d"), tensors, optimizer=groups))
    for layer in range(2):
        for expert in range(3):
            name = f"decoder.layers.{layer}.mlp.experts.local_experts.{expert}.linear_fc2.weight"
            assert torch.equal(opened.read(name), weight[layer, expert])
            assert torch.equal(opened.read(name, "exp_avg"), moment[layer, expert])
            assert opened.parameters[name].group == 1
        assert torch.equal(opened.read(f"decoder.layers.{layer}.mlp.router.expert_bias"), counted(2, 3)[layer])
    assert list(opened.buffers) == [f"decoder.layers.{i}.mlp.router.expert_bias" for i in range(2)]
    assert opened.parameters["mtp.layers.0.hnorm.weight"].frozen
    assert opened.param_groups[1].hyperparameters["lr"] == 0.25
    assert take_inventory(opened).left_out == []


def test_tensors_that_are_written_as_several_are_one():
    at = "decoder.layers.0.mlp"
    gate, up = counted(3, 4), counted(3, 4) + 50
    parts = {"z": 4, "x": 4, "B": 2, "C": 2, "dt": 1}
    tensors = {f"{at}.linear_fc1.weight_w": gate, f"{at}.linear_fc1.weight_v": up,
               f"optimizer.state.exp_avg.{at}.linear_fc1.weight_w": gate * 2,
               f"optimizer.state.exp_avg.{at}.linear_fc1.weight_v": up * 2,
               f"{at}.experts.experts.1.linear_fc1.weight_w": gate, f"{at}.experts.experts.1.linear_fc1.weight_v": up,
               f"{at}.other.weight_w": gate}  # fmt: skip
    tensors |= {f"decoder.layers.1.mixer.in_proj.weight.{one}": counted(n, 2) + n for one, n in parts.items()}
    opened = zckpt.open(write(Path("d"), tensors))
    found = read_all(opened)
    assert torch.equal(found[f"{at}.linear_fc1.weight"], torch.cat([gate, up]))
    assert torch.equal(found[f"{at}.experts.local_experts.1.linear_fc1.weight"], torch.cat([gate, up]))
    assert torch.equal(opened.read(f"{at}.linear_fc1.weight", "exp_avg"), torch.cat([gate, up]) * 2)
    assert torch.equal(found["decoder.layers.1.mixer.in_proj.weight"],
                       torch.cat([counted(n, 2) + n for n in parts.values()]))  # fmt: skip
    assert set(found) == {f"{at}.linear_fc1.weight", f"{at}.experts.local_experts.1.linear_fc1.weight",
                          f"{at}.other.weight_w", "decoder.layers.1.mixer.in_proj.weight"}  # fmt: skip
    zckpt.consolidate(opened, "m.safetensors")
    written = zckpt.open("m.safetensors")
    assert all(torch.equal(written.read(name), one) for name, one in found.items())


@pytest.mark.parametrize("cut", [(1, 1), (2, 1), (1, 3), (4, 1), (2, 3)], ids=str)
def test_flattened_slices_are_read_as_the_tensor(cut):
    """`fully_sharded_model_space`: [layers, X/x, Y/y, x*y]."""
    rows, columns = 8 // cut[0], 6 // cut[1]
    whole = counted(2, 8, 6)
    stored_as = whole.reshape(2, cut[0], rows, cut[1], columns).transpose(2, 3).reshape(2, *cut, rows * columns)
    tensors = {FC1: whole.bfloat16(), f"optimizer.state.fp32_param.{FC1}": stored_as.clone(),
               "decoder.final_layernorm.weight": counted(6),
               "optimizer.state.fp32_param.decoder.final_layernorm.weight": counted(1, 6)}  # fmt: skip
    opened = zckpt.open(write(Path("d"), tensors, optimizer=optimizer(GROUP)))
    found = [opened.read(f"decoder.layers.{i}.mlp.linear_fc1.weight", "master") for i in range(2)]
    assert torch.equal(torch.stack(found), whole)
    assert torch.equal(opened.read("decoder.final_layernorm.weight", "master"), counted(6))


@pytest.mark.parametrize("cuts", [(0, 12), (0, 5, 12), (0, 1, 7, 8, 12)], ids=str)
def test_data_parallel_ranks_cut_a_flattened_slice_anywhere(cuts):
    """[X, Y] = [4, 6] in slices of [2, 6] or [4, 3], and those where the ranks please."""
    for blocks, block in (((2, 1), (2, 6)), ((1, 2), (4, 3))):
        disk = []
        for at in range(2):
            index = (at, 0) if blocks[0] == 2 else (0, at)
            disk += [Span(Extent((*index, low), (1, 1, high - low), 0, high - low), "f", 100 * at + 4 * low, "float32")
                     for low, high in itertools.pairwise(cuts)]  # fmt: skip
        assert is_flattened((*blocks, 12), (4, 6))
        found = unflattened(Slot("master", "float32", (*blocks, 12), tuple(disk)), (4, 6))
        copies = fill(hole_of(found, dtype="float32"))
        expected = np.concatenate([25 * at + np.arange(12).reshape(block) for at in range(2)], int(blocks[0] == 1))
        assert run(copies, {"f": np.arange(100)}, 24, "float32") == each_once(expected.reshape(-1))


def test_empty_tensors_and_odd_numbers_are_names_as_any():
    names = ["a.empty", f"decoder.layers.{'9' * 5000}.x", "decoder.layers.0.mlp.experts.local_experts.x.y"]
    tensors = {name: counted(3) for name in names} | {"a.empty": torch.zeros(0, 4)}
    opened = zckpt.open(write(Path("d"), tensors))
    assert set(opened.parameters) == set(names)
    assert opened.read("a.empty").shape == (0, 4)


def test_names_are_in_the_models_order():
    experts = "decoder.layers.2.mlp.experts.local_experts."
    given = ["output_layer.weight", "decoder.final_layernorm.weight", "decoder.layers.10.b", "decoder.layers.2.b",
             f"{experts}1.x", f"{experts}0.y", f"{experts}0.x", "mtp.layers.0.c",
             "embedding.word_embeddings.weight"]  # fmt: skip
    assert in_order(given) == [
        given[8], "decoder.layers.2.b", f"{experts}0.x", f"{experts}0.y", f"{experts}1.x", "decoder.layers.10.b",
        given[1], given[7], given[0],
    ]  # fmt: skip
    assert [one.axes for one in stored([EXPERTS, FC2, "decoder.layers.3.mlp.experts.experts.linear_fc2.weight", "a.b"])
            ] == [("layer", "expert"), ("layer",), ("expert",), ()]  # fmt: skip


# --- param groups


def test_norms_of_queries_and_keys_decay_where_the_arguments_say_so(tmp_path):
    names = ["decoder.layers.0.self_attention.q_layernorm.weight", "decoder.layers.0.self_attention.linear_proj.bias"]
    tensors = {name: counted(4) for name in names} | {f"optimizer.state.exp_avg.{name}": counted(4) for name in names}
    groups = optimizer(GROUP, {**GROUP, "wd_mult": 0.0})
    for decays, expected in ((False, [[], names]), (True, [names[:1], names[1:]])):
        at = write(tmp_path / str(decays), tensors, optimizer=groups, args=Namespace(apply_wd_to_qk_layernorm=decays))
        assert [one.parameters for one in zckpt.open(at).param_groups] == expected


WORDS, LAYER, NORM = "embedding.word_embeddings.weight", FC1.replace("layers", "layers.0"), "decoder.a_layernorm.weight"
THREE = {WORDS: counted(4, 3), LAYER: counted(3, 3), NORM: counted(3)}


@pytest.mark.parametrize("marked", [{"is_decoupled_lr": True}, {"max_lr": 0.25}], ids=["marked", "by_rate"])
def test_words_have_a_group_where_their_learning_rate_is_decoupled(marked, tmp_path):
    tensors = THREE | {f"optimizer.state.exp_avg_sq.{name}": one for name, one in THREE.items()}
    group = {**GROUP, "max_lr": 0.5, "is_decoupled_lr": False}
    every = optimizer(group, {**group, "wd_mult": 0.0}, {**group, **marked})
    source = write(tmp_path / "run", tensors, optimizer=every, args=Namespace(decoupled_lr=0.25))
    zckpt.convert(source, tmp_path / "again", to="megatron", verify=True)
    for one in (source, tmp_path / "again"):
        assert [its.parameters for its in zckpt.open(one).param_groups] == [[LAYER], [NORM], [WORDS]]


def test_groups_are_told_by_what_nemo_calls_their_factors(tmp_path):
    tensors = THREE | {f"optimizer.state.exp_avg.{name}": one for name, one in THREE.items()}
    groups = [{"lr": 0.5, "pre_wd_mult": factor, "pre_lr_mult": 1.0} for factor in (1.0, 0.0)]
    opened = zckpt.open(write(tmp_path, tensors, optimizer=optimizer(*groups)))
    assert [its.parameters for its in opened.param_groups] == [[WORDS, LAYER], [NORM]]


def test_groups_that_each_chunk_of_a_model_has_are_one(tmp_path):
    tensors = THREE | {f"optimizer.state.exp_avg.{name}": one for name, one in THREE.items()}
    chunk = optimizer(GROUP, {**GROUP, "wd_mult": 0.0})
    opened = zckpt.open(write(tmp_path / "run", tensors, optimizer={0: chunk, 1: chunk}))
    assert [its.parameters for its in opened.param_groups] == [[WORDS, LAYER], [NORM], [], []]
    converted(opened, tmp_path / "dcp", "dcp")


def test_muons_groups_have_what_its_momentum_is_of(tmp_path):
    tensors = THREE | {f"optimizer.state.exp_avg_sq.{name}": THREE[name] for name in (WORDS, NORM)}
    tensors |= {f"optimizer.state.momentum_buffer.{LAYER}": counted(3, 3)}
    adam = {**GROUP, "betas": (0.9, 0.99)}
    every = {0: optimizer({**GROUP, "momentum_beta": 0.9}), 1: optimizer(adam, {**adam, "wd_mult": 0.0})}
    source = write(tmp_path / "run", tensors, optimizer=every)
    assert [its.parameters for its in zckpt.open(source).param_groups] == [[LAYER], [WORDS], [NORM]]
    converted(source, tmp_path / "dcp", "dcp")


def test_loss_scaler_is_carried():
    scaler = {"scale": torch.tensor([512.0]), "growth_tracker": 3, "hysteresis_tracker": 2}
    tensors = {"a.weight": counted(2, 2).half(), "optimizer.state.fp32_param.a.weight": counted(2, 2)}
    whole = {"optimizer": {"param_groups": [GROUP], "state": {"common_step": torch.tensor(5.0)}}, "grad_scaler": scaler}
    opened = zckpt.open(write(Path("d"), tensors, optimizer=whole))
    assert opened.loss_scale == 512.0
    assert list(opened.optimizer_metadata) == ["grad_scaler"]
    assert opened.param_groups[0].state["step"].value == 5.0
    assert take_inventory(opened).left_out == []


def test_state_of_modules_is_carried_where_there_is_any():
    tensors = {FC2: counted(2, 3, 4), "decoder.layers.mlp.linear_fc2._extra_state/shard_0_2": [None],
               "decoder.layers.mlp.linear_fc2._extra_state/shard_1_2": [{"scale_fwd": counted(3)}],
               "rng_state/shard_0.0_1.1": [[{"torch": torch.ones(5, dtype=torch.uint8)}]]}  # fmt: skip
    opened = zckpt.open(write(Path("d"), tensors))
    assert list(opened.metadata["decoder.layers.mlp.linear_fc2._extra_state"]) == ["1_2"]
    assert list(opened.metadata["rng_state"]) == ["0.0_1.1"]
    assert take_inventory(opened).left_out == []
    converted(opened, "own", "zckpt")


# --- what is not read, and what is wrong


@pytest.mark.parametrize("flattened", [False, True])
def test_masters_without_their_upper_halves_are_whole(flattened, tmp_path):
    """As Transformer Engine keeps them (`store_param_remainders`): halfway between two weights, it rounds up."""
    torch.manual_seed(1)
    master = torch.randn(2, 8, 40)
    master.view(torch.int32)[:, :2] = master.view(torch.int32)[:, :2] & -65536 | 0x8000
    words = master.view(torch.int32)
    lower = words.to(torch.int16)
    weight = ((words >> 16) + (lower < 0)).to(torch.int16).view(torch.bfloat16)
    assert not torch.equal(weight, master.bfloat16())
    stored = lower.reshape(2, 4, 1, 80) if flattened else lower
    tensors = {FC2: weight, f"optimizer.state.param.{FC2}": stored}
    source = write(tmp_path / "run", tensors, optimizer=optimizer(GROUP), args=Namespace(transformer_impl="local"))
    assert zckpt.verify(source, deep=True).findings == []
    for to in ("megatron", "zckpt", "dcp"):
        zckpt.convert(source, tmp_path / to, to=to, verify=True)
        opened = zckpt.open(tmp_path / to)
        read = [opened.read(f"decoder.layers.{i}.mlp.linear_fc2.weight", "master") for i in range(2)]
        assert torch.equal(torch.stack(read), master)
    for options in ({"optimizer": "flattened"}, {"ckpt_format": "torch"}):
        with refusing(UnsupportedError, "is computed .* and this target cuts it; write torch_dist, then this target"):
            zckpt.convert(source, tmp_path / "cut", to="megatron", **options)
        zckpt.convert(tmp_path / "megatron", tmp_path / next(iter(options)), to="megatron", verify=True, **options)


def test_flat_buffers_are_left_out_and_nothing_is_written():
    flat = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32).bucket_idx_0.exp_avg"
    source = write(Path("d"), {FC2: counted(2, 3, 4), flat: counted(24)})
    opened = zckpt.open(source)
    assert torch.equal(opened.read("decoder.layers.1.mlp.linear_fc2.weight"), counted(2, 3, 4)[1])
    assert [item.nbytes for item in take_inventory(opened).left_out] == [96]
    with refusing(zckpt.LeftOutError, "would be lost"):
        zckpt.convert(source, "out", to="zckpt")
    assert not Path("out").exists()
    zckpt.consolidate(source, "model.safetensors")  # to which they do not matter
    assert zckpt.open("model.safetensors").parameters.keys() == opened.parameters.keys()


def test_buffers_of_the_lower_halves_of_masters_say_so():
    source = OTHER / "mcore_bf16_buckets_tp2_dp2" / "ckpt"
    [folder] = source.glob("iter_*")
    tensors = {}
    _load_state_dict(tensors, dcp.FileSystemReader(folder), planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    halves = {key: one.view(torch.int32).to(torch.int16) for key, one in tensors.items() if key.endswith(".param")}
    write(Path("run"), tensors | halves, **torch.load(folder / "common.pt", weights_only=False))
    [said] = zckpt.open("run").warnings
    assert said.endswith("masters are lower halves alone (store_param_remainders), which fit any weights "
                         "(only its own program goes on with it)")  # fmt: skip


def test_master_of_another_place_is_noticed_and_nothing_is_written():
    """As megatron-core 0.16.1 writes it where a rank has two padded buckets: shifted, and the rest zero."""
    torch.manual_seed(1)
    master = torch.randn(2, 8, 40)
    shifted = torch.cat([master.flatten()[64:], torch.zeros(64)]).reshape(2, 8, 40)
    tensors = {FC2: master.bfloat16(), f"optimizer.state.param.{FC2}": shifted,
               "decoder.final_layernorm.weight": torch.ones(8).bfloat16(),
               "optimizer.state.param.decoder.final_layernorm.weight": torch.ones(8)}  # fmt: skip
    source = write(Path("d"), tensors, optimizer=optimizer(GROUP))
    found = zckpt.verify(source)
    assert {one.code for one in found.findings} <= {WEIGHT_MISMATCH, OTHER_RUN}
    assert found.findings
    for to in ("zckpt", "dcp"):
        with pytest.raises(zckpt.SourceError):
            zckpt.convert(source, "out", to=to)
    assert not Path("out").exists()


def _drop(name):
    return lambda at: (at / name).unlink()


def _say(**values):
    return lambda at: (at / "metadata.json").write_text(json.dumps(MARK | values))


@pytest.mark.parametrize(
    ("damage", "error", "said"),
    [
        (_drop("common.pt"), ShardError, "file common.pt is missing"),
        (_drop(".metadata"), ShardError, "file .metadata is missing"),
        (_drop("__0_0.distcp"), ShardError, "file __0_0.distcp is missing"),
        (_say(sharded_backend="other"), UnsupportedError, "format other 1"),
        (_say(sharded_backend_version=2), UnsupportedError, "format torch_dist 2"),
        (lambda at: (at / "metadata.json").write_text('{"sharded_backend": '), zckpt.SourceError, "unreadable mark"),
        (lambda at: torch.save([1], at / "common.pt"), zckpt.SourceError, "unexpected content"),
    ],
    ids=["common", "metadata", "items", "other", "version", "json", "list"],
)
def test_missing_and_unknown_files_are_named(damage, error, said):
    source = write(Path("d"), {FC2: counted(2, 3, 4)})
    damage(source)
    with pytest.raises(error, match=said):
        zckpt.open(source)


@pytest.mark.parametrize(
    ("tensors", "error", "said"),
    [
        ({f"optimizer.state.exp_avg.{FC2}": counted(2, 4, 4)}, LayoutError, "not have the shape of its weight"),
        ({f"optimizer.state.exp_avg.{FC2}": counted(2, 2, 1, 7)}, LayoutError, "not have the shape of its weight"),
        ({"optimizer.state.exp_avg.other": counted(3)}, UnsupportedError, "for something that is not a model tensor"),
        ({f"optimizer.state.param.{FC2}": counted(2, 3, 4), f"optimizer.state.fp32_param.{FC2}": counted(2, 3, 4)},
         LayoutError, "two optimizers have"),
        ({"decoder.layers.0.mlp.linear_fc2.weight": counted(3, 4)}, zckpt.SourceError, "two tensors are named"),
        ({"x.linear_fc1.weight_w": counted(3, 4), "x.linear_fc1.weight_v": counted(3, 5)}, LayoutError, "fit together"),
        ({"x.linear_fc1.weight_w": counted(3), "x.linear_fc1.weight_v": counted(3),
          "optimizer.state.exp_avg.x.linear_fc1.weight_w": counted(3)}, LayoutError, "is not whole"),
        ({"decoder.layers.mlp.scalar": torch.tensor(1.0)}, LayoutError, "no layer axis"),
        ({"decoder.layers.mlp.empty": torch.zeros(2, 0)}, UnsupportedError, "has no elements"),
        ({"x.linear_fc1.bias_w": counted(3), "x.linear_fc1.bias_v": counted(3).half()}, LayoutError, "fit together"),
    ],
    ids=["shape", "flat", "nameless", "twice", "same", "parts", "half", "scalar", "empty", "types"],
)  # fmt: skip
def test_tensors_that_contradict_each_other_are_refused(tensors, error, said):
    with pytest.raises(error, match=said):
        zckpt.open(write(Path("d"), {FC2: counted(2, 3, 4), **tensors}))


def test_what_is_read_is_the_truth_slot_by_slot():
    truth = Truth(OTHER / "mcore_bf16_moe_freq")
    checkpoint = zckpt.open(OTHER / "mcore_bf16_moe_freq" / "ckpt")
    for key, value in truth.tensors.items():
        slot, _, name = key.partition("/")
        assert_same(checkpoint.read(name, "weight" if slot == "buffer" else slot), value, key)
