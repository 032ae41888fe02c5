"""What is written of a checkpoint that is none of ZeRO: loss scaling, counters and state are carried, not made up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict

import zckpt
from tests import gloo, live
from tests.formats.deepspeed.contents import content_of, run_of, state_of, tag_of
from tests.formats.deepspeed.shards import copy, edit, model_file, optimizer_file, state_in
from tests.formats.native_files import change_document
from tests.refusals import refusing
from zckpt.compare.logical import parameter_values, single
from zckpt.errors import UnsupportedError
from zckpt.formats import open_checkpoint
from zckpt.formats.deepspeed.in_place import Training, serve
from zckpt.formats.deepspeed.writer import FOR_FLOAT32
from zckpt.optim import ZeroOptimizer, ZeroRedundancyOptimizer
from zckpt.torchfile import Object, plain

STAGE0 = {"cur_scale": 512.0, "cur_iter": 5, "last_overflow_iter": -1, "scale_factor": 2.0, "scale_window": 3}


def first_rank_of(source, target, stage) -> tuple[dict[str, Any], tuple[str, ...]]:
    """What the first rank's optimizer file holds of what was converted, and the notes."""
    done = zckpt.convert(source, target, to="deepspeed", world_size=3, stage=stage)
    return state_of(optimizer_file(target, 0)), done.notes


def loaded(target) -> dict[str, Any]:
    return torch.load(optimizer_file(target, 0), weights_only=False)


def values_of(scaler) -> dict[str, Any]:
    assert isinstance(scaler, Object)
    assert isinstance(scaler.state, dict)
    return {str(key): plain(value) for key, value in scaler.state.items()}


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_dynamic_loss_scale_of_stage_0_goes_on(stage):
    state, notes = first_rank_of(run_of("s0_fp16_dp2"), Path("out"), stage)
    found = values_of(state["loss_scaler"])
    assert {key: found[key] for key in STAGE0} == STAGE0
    # What stage 0 does not hold is that of its configuration.
    section = content_of(model_file(tag_of(run_of("s0_fp16_dp2"))))["ds_config"]["fp16"]
    assert (found["delayed_shift"], found["min_scale"]) == (section["hysteresis"], section["min_loss_scale"])
    stock = state_of(optimizer_file(run_of("s2_fp16_dp2"), 0))["loss_scaler"]
    assert list(found) == list(values_of(stock))
    assert state["dynamic_loss_scale"] is True
    assert zckpt.open("out").loss_scale == 512.0
    assert [note for note in notes if "hysteresis" in note]


def test_stage_0_keeps_its_loss_scaling_as_metadata():
    expected = {**STAGE0, "dynamic_loss_scale": True}
    assert zckpt.open(run_of("s0_fp16_dp2")).optimizer_metadata == expected
    zckpt.convert(run_of("s0_fp16_dp2"), "out", to="zckpt")
    assert zckpt.open("out").optimizer_metadata == expected


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_fixed_loss_scale_of_stage_0_goes_on(stage):
    tag = copy("s0_fp16_dp2")

    def fix(content):
        optimizer = content["optimizer"]
        for key in ("last_overflow_iter", "scale_factor", "scale_window"):
            del optimizer[key]
        optimizer.update(dynamic_loss_scale=False, cur_scale=128.0)

    edit(model_file(tag), fix)
    state, notes = first_rank_of(tag, Path("out"), stage)
    assert values_of(state["loss_scaler"]) == {"cur_scale": 128.0, "dynamic": False}
    assert state["dynamic_loss_scale"] is False
    assert any("cur_iter" in note for note in notes)


def model_and_optimizer(path, *, dtype=torch.float32, unused=False) -> Path:
    """A file of torch.save after a step, in which a layer may not have had a part."""
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(3, 5), "b": torch.nn.Linear(5, 2)}).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters())
    hidden = model["a"](torch.randn(4, 3, dtype=dtype))
    (hidden if unused else model["b"](hidden)).sum().backward()
    optimizer.step()
    return live.save_both(model, optimizer, path)


@pytest.mark.parametrize("stage", [1, 2])
def test_no_loss_scaler_and_no_clipping_where_the_source_has_none(stage):
    state, notes = first_rank_of(model_and_optimizer("m.pt"), Path("out"), stage)
    assert not {"loss_scaler", "dynamic_loss_scale", "overflow", "clip_grad"} & state.keys()
    assert notes == (FOR_FLOAT32,)
    assert zckpt.open("out").optimizer_metadata == {}
    content = content_of(model_file(tag_of("out")))
    assert "global_samples" not in content
    assert content["global_steps"] == 1  # as many as the optimizer has taken


@pytest.mark.parametrize(
    ("dtype", "words"), [(torch.float32, "scales by 1"), (torch.float16, "starts as in DeepSpeed")]
)
def test_zero3_says_what_it_had_to_make_up(dtype, words):
    state, notes = first_rank_of(model_and_optimizer("m.pt", dtype=dtype), Path("out"), 3)
    assert isinstance(state["loss_scaler"], Object)
    assert any(words in note for note in notes)
    assert any("masters" in note for note in notes) == (dtype == torch.float16)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_parameters_without_state_are_named(stage):
    _, notes = first_rank_of(model_and_optimizer("m.pt", unused=True), Path("out"), stage)
    assert any("b.weight, b.bias of param group 0 have no optimizer state" in note for note in notes)


@pytest.mark.parametrize(
    "how", [{"to": "universal"}, *({"to": "deepspeed", "world_size": 2, "stage": n} for n in (1, 3))]
)
def test_state_that_does_not_begin_at_zero_is_not_written_as_zeros(how):
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(3, 5), "b": torch.nn.Linear(5, 2)})
    model.nothing = torch.nn.Parameter(torch.ones(0))  # which has no gradient, and begins with nothing
    optimizer = torch.optim.Rprop(model.parameters(), lr=0.1)
    model["a"](torch.randn(4, 3)).sum().backward()
    optimizer.step()
    live.save_both(model, optimizer, "m.pt")
    with refusing(UnsupportedError, "step_size of b.weight is missing.* does not begin at zero"):
        zckpt.convert("m.pt", "out", **how)
    optimizer = torch.optim.Rprop(model.parameters(), lr=0.1)
    model["b"](model["a"](torch.randn(4, 3))).sum().backward()
    optimizer.step()
    live.save_both(model, optimizer, "m.pt")
    zckpt.convert("m.pt", "out", **how)


@pytest.mark.parametrize(("to", "stage"), [("deepspeed", 2), ("deepspeed", 3), ("universal", None)])
def test_groups_in_which_nothing_is_trained_are_kept_for_zero3_alone(to, stage):
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(3, 5), "b": torch.nn.Linear(5, 2).requires_grad_(False)})
    optimizer = torch.optim.AdamW([{"params": one.parameters()} for one in (model["a"], model["b"], torch.nn.Tanh())])
    model["b"](model["a"](torch.randn(4, 3))).sum().backward()
    optimizer.step()
    zckpt.save("saved", model=model, optimizer=optimizer)
    more = {} if stage is None else {"stage": stage, "world_size": 2}
    done = zckpt.convert("saved", "out", to=to, **more)
    left_out = "param groups in which nothing is trained are left out (1): DeepSpeed's ZeRO-1 and 2 cannot have any"
    assert (left_out in done.notes) == (stage != 3)
    trained = ["a.weight", "a.bias"]
    expected = [trained, []] if stage == 3 else [trained]  # DeepSpeed itself takes out those without parameters
    assert [group.parameters for group in zckpt.open("out").param_groups] == expected


@pytest.mark.parametrize("make", [torch.optim.NAdam, torch.optim.ASGD])
def test_numbers_of_parameters_that_are_single_numbers_are_those_of_their_group(make, torch_file):
    model = torch.nn.Module()
    model.scale = torch.nn.Parameter(torch.tensor(2.0))
    optimizer = make(model.parameters())
    model.scale.square().backward()
    optimizer.step()
    zckpt.convert(torch_file(live.both(model, optimizer)), "out", to="deepspeed", world_size=1, stage=2)
    found = loaded(Path("out"))["optimizer_state_dict"]["base_optimizer_state"]["state"][0]
    for key, value in optimizer.state[model.scale].items():
        assert found[key].shape == (torch.Size([2]) if key in {"exp_avg", "exp_avg_sq", "ax"} else ())
        assert found[key].flatten()[0] == value


def test_state_of_each_element_may_be_called_as_other_optimizers_call_a_number():
    def change(content):
        for one in content["optimizer"]["state"].values():
            one["mu"] = one.pop("exp_avg")

    edit(model_and_optimizer("m.pt"), change)
    zckpt.convert("m.pt", "out", to="deepspeed", world_size=2, stage=1, verify=True)
    assert "mu" in zckpt.open("out").slot_names()


@pytest.mark.parametrize("stage", [2, 3])
def test_zero3_says_of_which_tensors_it_is_not_known_whether_they_are_buffers(stage):
    edit(model_and_optimizer("m.pt"), lambda content: content["model"].update(table=torch.ones(4)))
    _, notes = first_rank_of("m.pt", Path("out"), stage)
    assert any(note.startswith("table, which the optimizer does not have") for note in notes) == (stage == 3)


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("dtypes", ["float16 float32", "float16 bfloat16", "float32 float64"])
def test_group_of_several_types_rounds_nothing(stage, dtypes, torch_file):
    torch.manual_seed(0)
    model = torch.nn.ParameterDict({f"of {name}": torch.rand(3, 5).to(getattr(torch, name)) for name in dtypes.split()})
    optimizer = torch.optim.AdamW(model.parameters())
    for one in model.values():
        one.grad = torch.rand_like(one)
    optimizer.step()
    source = torch_file(live.both(model, optimizer))
    zckpt.convert(source, "out", to="deepspeed", world_size=2, stage=stage, names=list(model))
    found = zckpt.open("out")
    for name, one in model.items():
        for slot, expected in {"master": one.data, **optimizer.state[one]}.items():
            if slot != "step":
                assert torch.equal(found.read(name, slot).to(torch.float64), expected.to(torch.float64)), (name, slot)


def test_a_complex_parameter_beside_real_ones_is_refused():
    parameters = {"z": torch.nn.Parameter(torch.rand(3, dtype=torch.complex64)), "w": torch.nn.Parameter(torch.rand(3))}
    optimizer = torch.optim.Adam(parameters.items())
    content = {"model": {key: one.data for key, one in parameters.items()}, "optimizer": optimizer.state_dict()}
    torch.save(content, "m.pt")
    with refusing(zckpt.UnsupportedError, "m.pt: z: complex, beside real parameters in a param group"):
        zckpt.convert("m.pt", "out", to="deepspeed", world_size=2, stage=1)


def test_group_of_which_nothing_has_state_gets_none(torch_file):
    model = torch.nn.Linear(3, 5)
    optimizer = torch.optim.AdamW([{"params": [model.weight]}, {"params": [model.bias], "lr": 0.1}])
    model.weight.grad = torch.randn(5, 3)
    optimizer.step()
    path = torch_file(live.both(model, optimizer))
    state, notes = first_rank_of(path, Path("out"), 2)
    assert list(state["base_optimizer_state"]["state"]) == [0]
    assert notes == (FOR_FLOAT32,)
    assert zckpt.fingerprint("out").text == zckpt.fingerprint(path).text


def test_order_of_parameters_without_any_state_is_not_guessed(torch_file):
    """Masters lie in it, and DeepSpeed looks at no names: it would load others' without a word."""
    model = torch.nn.Linear(3, 5)
    path = torch_file(live.both(model, torch.optim.SGD([model.bias, model.weight])))  # the model has the weight first
    with refusing(zckpt.UnsupportedError, "no state that could tell their order.*--names FILE"):
        first_rank_of(path, Path("out"), 2)
    names = ["bias", "weight"]
    zckpt.convert(path, "out", to="deepspeed", world_size=1, stage=2, names=names)
    flat = loaded(Path("out"))["optimizer_state_dict"]["single_partition_of_fp32_groups"][0]
    assert torch.equal(flat[:20], torch.cat([model.bias, model.weight.flatten()]))


def nadam(form, *, late=False) -> Path:
    """A checkpoint of NAdam, which has two numbers for each parameter; a parameter is a number itself."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 2))
    model.scale = torch.nn.Parameter(torch.tensor(0.5))
    optimizer = torch.optim.NAdam(model.parameters())
    for step in range(3):
        loss = model(torch.randn(4, 3)).sum() * (1 if late and not step else model.scale)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if form == "zckpt":
        zckpt.save("c", model=model, optimizer=optimizer, step=3)
        return Path("c")
    if form == "dcp":
        weights, state = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": state}, checkpoint_id="c")
        return Path("c")
    live.save_both(model, optimizer, "c.pt")
    return Path("c.pt")


@pytest.mark.parametrize("form", ["torch", "dcp", "zckpt"])
def test_numbers_that_all_parameters_of_a_group_have_alike_are_the_groups(form):
    source = nadam(form)
    for stage in (2, 3):
        zckpt.convert(source, f"{stage}", to="deepspeed", world_size=2, stage=stage)
        state = state_in(loaded(Path(f"{stage}")))[0]
        assert set(state) == {"step", "mu_product", "exp_avg", "exp_avg_sq"}
        assert (state["mu_product"].shape, state["exp_avg"].dim()) == ((), 1)
        (mu,) = {float(one["mu_product"]) for one in states_of(source)}
        assert float(state["mu_product"]) == mu
        assert zckpt.diff(source, f"{stage}").as_dict()["different"] == []


def nadam_of_ranks(rank, world_size, folder) -> float:
    """Save from an optimizer of which a rank has a parameter that is a number, and no other; load into flat ones."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2, bias=False)
    model.scale = torch.nn.Parameter(torch.tensor(0.5))
    groups = [{"params": [("scale", model.scale)]}, {"params": [("weight", model.weight)]}]
    optimizer = ZeroRedundancyOptimizer(groups, torch.optim.NAdam)
    (model(torch.ones(4, 3)).sum() * model.scale).backward()
    optimizer.step()
    zckpt.save(folder / "c", model=model, optimizer=optimizer, step=1)
    zckpt.convert(folder / "c", folder / "a", to="accelerate") if rank == 0 else None
    torch.distributed.barrier()
    flat = ZeroOptimizer(groups, torch.optim.NAdam)
    zckpt.load(folder / "a", model=model, optimizer=flat)
    return flat.optim.state[flat.optim.param_groups[0]["params"][0]]["mu_product"].item()


def test_a_number_of_a_parameter_that_is_one_is_a_number(tmp_path):
    numbers = gloo.run(nadam_of_ranks, 2, tmp_path)
    (mu,) = {float(one["mu_product"]) for one in states_of(tmp_path / "c")}
    assert numbers == [mu, mu]
    zckpt.convert(tmp_path / "c", tmp_path / "z", to="deepspeed", world_size=2, stage=2)
    assert zckpt.diff(tmp_path / "c", tmp_path / "z").as_dict()["different"] == []


def test_none_that_all_parameters_have_is_one_for_a_group():
    """SGD without momentum keeps one."""
    path = model_and_optimizer("x.pt")

    def forget(content):
        for state in content["optimizer"]["state"].values():
            state["momentum_buffer"] = None

    edit(path, forget)
    zckpt.convert(path, "out", to="deepspeed", world_size=2, stage=2, verify=True)
    assert state_in(loaded(Path("out")))[0]["momentum_buffer"] is None


def states_of(source) -> list[dict[str, Any]]:
    found = zckpt.open(source)
    return [{key: single(v) for key, v in parameter_values(found, one).items()} for one in found.parameters.values()]


def test_numbers_that_differ_are_refused():
    with refusing(zckpt.UnsupportedError, r"mu_product, step of scale is neither the same for all"):
        zckpt.convert(nadam("torch", late=True), "out", to="deepspeed", world_size=1, stage=1)


def test_a_number_that_is_another_than_its_groups_is_refused():
    found = zckpt.open(run_of("s2_bf16_dp2"))
    found.parameters[found.param_groups[0].parameters[0]].state["step"] = 99.0
    zckpt.convert(found, "own", to="zckpt")
    with refusing(zckpt.UnsupportedError, "step of .* is neither the same for all of param group 0"):
        zckpt.convert("own", "out", to="deepspeed", world_size=1, stage=1)


def test_a_step_that_each_parameter_has_by_itself_is_one_for_zero_3():
    path = model_and_optimizer("x.pt")
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(3, 5), "b": torch.nn.Linear(5, 2)})
    optimizer = torch.optim.AdamW(model.parameters())
    zckpt.load(path, model=model, optimizer=optimizer)
    zckpt.save("c", model=model, optimizer=optimizer, step=1)
    done = zckpt.convert("c", "u", to="universal", verify=True)
    assert not [note for note in done.notes if "ZeRO-3 loader stops" in note]
    tree = torch.load("u/zero/optimizer_state.pt", weights_only=False)["optimizer_state_dict"]
    assert tree["state"] == {0: {"step": torch.tensor(1.0)}}


@pytest.mark.parametrize("tag", ["a\0b", "a/b", "..", ""])
def test_tag_that_is_no_name_of_a_directory_is_not_taken(tag):
    """Another format's files say what the source's tag was, whoever wrote them."""
    zckpt.convert(run_of("s2_fp16_dp2"), "own", to="zckpt")
    change_document(Path("own"), lambda document: document["origin"].update(tag=tag))
    zckpt.convert("own", "out", to="deepspeed", world_size=1, stage=1)
    assert tag_of("out").name == f"global_step{zckpt.open('own').step}"


def served(checkpoint, *names: str):
    """What an engine of these parameters is given: a head of 12 elements, and a body of 16."""
    head, body = names
    training = Training(
        world_size=1, rank=0, tensor_parallel=1, mp_rank=0, stage=1, round_robin=False, alignment=False,
        bf16_optimizer=False, sub_group_size=1, dtype="float32", groups=[[head, body]],
        stored=[{head: (3, 4), body: (4, 4)}], partitions=[28], names=[[head, "head.weight"], [body]],
        hyperparameters=[{"lr": 0.1}],
    )  # fmt: skip
    return serve(checkpoint, training, optimizer=True)


def trained(momentum, path, **further):
    """A file of a model after a step, and what its optimizer keeps further."""
    model = torch.nn.ModuleDict({"head": torch.nn.Linear(4, 3, bias=False), "body": torch.nn.Linear(4, 4, bias=False)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
    model["body"](model["head"].weight).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": {**optimizer.state_dict(), **further}}, path)
    return open_checkpoint(path, names=["head.weight", "body.weight"])


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_an_engine_finds_a_tied_parameter_that_a_checkpoint_has_under_its_other_name(momentum):
    given = served(trained(momentum, "checkpoint.pt"), "embedding.weight", "body.weight")
    assert given.target.parts(given.target.ranks[0])[0].numel == 28
    assert [p.name for p in given.target.ranks[0].groups[0].experts[0]] == ["head.weight", "body.weight"]
    assert given.notes == []


def test_an_engine_is_told_what_an_optimizer_keeps_that_does_not_arrive():
    checkpoint = trained(0.9, "checkpoint.pt", average_gradient=3.5)
    (note,) = served(checkpoint, "head.weight", "body.weight").notes
    assert "average_gradient" in note
