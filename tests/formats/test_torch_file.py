"""Files of torch.save, of any usual shape: the model's tensors, what the optimizer holds of each, and nothing run."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import zckpt
from tests import live
from tests.folders import nbytes_in
from tests.formats.holding import assert_goes_on, assert_holds, assert_state, converted
from tests.formats.some_tensors import Wrapped, assert_same
from tests.logical import assert_same_tree
from tests.pairwise import each
from tests.refusals import refusing
from zckpt.errors import DamagedFileError, SourceError, UnsupportedError, UsageError
from zckpt.formats.account import take_inventory
from zckpt.formats.torch_files.reader import read
from zckpt.operations.open import open as open_checkpoint
from zckpt.state import WEIGHT, Checkpoint, Scalar


def network() -> torch.nn.Module:
    """Return a model of which the parameters can be told apart by their shapes and order, with two buffers."""
    torch.manual_seed(0)
    layers = {"embed": torch.nn.Embedding(11, 5), "up": torch.nn.Linear(5, 7), "norm": torch.nn.LayerNorm(7)}
    model = torch.nn.Sequential(OrderedDict(layers, out=torch.nn.Linear(7, 2)))
    model.norm.register_buffer("scale", torch.randn(9))
    model.norm.register_buffer("steps", torch.tensor(3))
    return model


def trained(
    kind: type[torch.optim.Optimizer] = torch.optim.AdamW, *, named=False, steps=3, **options
) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Return a model and its optimizer after some steps."""
    model = network()
    optimizer = kind(model.named_parameters() if named else model.parameters(), lr=0.01, **options)
    for _ in range(steps):
        model(torch.tensor([1, 2, 3])).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def layers(count) -> torch.nn.Module:
    """Return a model of equal layers."""
    return torch.nn.Sequential(*[torch.nn.Linear(4, 4, bias=False) for _ in range(count)])


def assert_tensors(path, state) -> Checkpoint:
    """Assert that a file is read as this model, name by name and bit by bit, and no other tensor."""
    checkpoint = open_checkpoint(path)
    assert {p.name for p in checkpoint.tensors()} == state.keys()
    for name, tensor in state.items():
        assert_same(checkpoint.read(name, WEIGHT), tensor)
    return checkpoint


# --- a model by itself ------------------------------------------------------------------------------------------


def test_state_dict_by_itself(torch_file):
    state = network().state_dict()
    checkpoint = assert_tensors(torch_file(state), state)
    assert checkpoint.format == "torch"
    assert list(checkpoint.buffers) == ["norm.steps"]
    assert checkpoint.param_groups == []
    assert checkpoint.metadata == {}


BARE = network().state_dict()
BASE = torch.arange(48.0).reshape(6, 8)
MODELS: dict[str, tuple[dict[str, Any], dict[str, torch.Tensor]]] = {
    "wrapped": ({"model": {f"module.{key}": one for key, one in BARE.items()}}, BARE),
    "with what is no tensor": ({**BARE, "_extra_state": {"scale": 1}, "version": 3}, BARE),
    "views": (views := {
        "rows": BASE[2:4], "columns": BASE[:, 3], "turned": BASE.t(), "expanded": torch.ones(1).expand(5),
        "number": BASE[0, 0], "empty": torch.empty(0, 4),
    }, views),
    "parameter": ({"w": torch.nn.Parameter(torch.ones(2))}, {"w": torch.ones(2)}),
}  # fmt: skip


@pytest.mark.parametrize(("root", "state"), MODELS.values(), ids=MODELS)
def test_a_model_is_read_as_it_is_in_either_format_of_torch(root, state, torch_file):
    for is_zip in (True, False):
        assert_tensors(torch_file(root, _use_new_zipfile_serialization=is_zip), state)


@pytest.mark.parametrize("key", ["model", "module", "state_dict", "net", "something_else"])
def test_model_under_any_key(key, torch_file):
    state = network().state_dict()
    checkpoint = assert_tensors(torch_file({"epoch": 4, key: state, "note": "x"}), state)
    assert checkpoint.metadata == {"epoch": 4, "note": "x"}


@pytest.mark.parametrize(
    "dtype", ["float64", "float16", "bfloat16", "float8_e4m3fn", "complex64", "int8", "bool", "uint16"]
)
def test_any_element_type(dtype, torch_file):
    state = {"t": torch.ones(3, 2).to(getattr(torch, dtype))}
    assert_tensors(torch_file(state), state)


def test_two_names_of_one_tensor_are_tied(torch_file):
    weight = torch.randn(4, 3)
    checkpoint = assert_tensors(
        torch_file({"wte": weight, "head": weight, "same values": weight.clone()}),
        {"wte": weight, "head": weight, "same values": weight},
    )
    assert [p.tied_to for p in checkpoint.parameters.values()] == [None, "wte", None]
    assert checkpoint.parameters["head"].slots == {}


def test_different_views_of_one_storage_are_not_tied(torch_file):
    fused = torch.randn(6, 4)
    state = {"q": fused[:3], "k": fused[3:], "all": fused, "turned": fused.t()}
    checkpoint = assert_tensors(torch_file(state), state)
    assert all(p.tied_to is None for p in checkpoint.parameters.values())


@pytest.mark.parametrize("under", [[], ["model"], ["state", "model"]])
def test_weights_that_a_class_wraps_are_read_as_in_dcp(under, torch_file):
    tensors = {"a": torch.randn(2, 3).bfloat16(), "b": torch.randn(3)}
    root = {name: Wrapped(one) for name, one in tensors.items()}
    for key in reversed(under):
        root = {key: root, "seed": 1}
    assert not take_inventory(assert_tensors(torch_file(root), tensors)).left_out


@pytest.mark.parametrize("program", ["Lightning", "mmengine"])
def test_an_average_that_a_program_saves_in_the_models_place_is_not_taken_for_it(program, torch_file):
    """Lightning's WeightAveraging and mmengine's EMAHook do, and swap both when they resume."""
    (model, optimizer), average = live.trained(layers(2)), layers(2)
    root = {"state_dict": average.state_dict(), "optimizer_states": [optimizer.state_dict()]}
    if program == "Lightning":
        root |= {"current_model_state": model.state_dict(), "averaging_state": {"n_averaged": torch.tensor(3)}}
    else:
        trained = {"steps": torch.tensor(3), **{f"module.{name}": one for name, one in model.state_dict().items()}}
        root |= {"meta": {"mmengine_version": "0.10.7"}, "ema_state_dict": trained}
    path = torch_file(root)
    checkpoint = assert_holds(path, model, optimizer)
    assert ["weights in training" in one for one in checkpoint.warnings] == [True]
    zckpt.convert(path, "dcp", to="dcp")
    for source in (path, "dcp"):
        assert_goes_on(source, model, optimizer, *live.trained(layers(2)))
    beside = "averaging_state" if program == "Lightning" else "ema_state_dict"
    assert {"state_dict", beside} <= checkpoint.metadata.keys()


def test_averaged_copy_beside_the_model_is_named_in_a_warning(torch_file):
    model = network().state_dict()
    ema = {name: tensor * 0 for name, tensor in model.items()}
    checkpoint = assert_tensors(torch_file({"ema": ema, "model": model}), model)
    assert checkpoint.warnings == ["there are several dicts of tensors (ema, model); 'model' is used as the model"]


# --- a model and its optimizer ----------------------------------------------------------------------------------


@pytest.mark.parametrize("named", [False, True], ids=["numbered", "named"])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.AdamW, {}),
        (torch.optim.AdamW, {"amsgrad": True}),
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.RMSprop, {"centered": True}),
        (torch.optim.Adagrad, {}),
        (torch.optim.NAdam, {}),
    ],
    ids=lambda value: getattr(value, "__name__", "-".join(value) if isinstance(value, dict) else None),
)
@pytest.mark.every(2)
def test_every_parameter_has_its_own_state(kind, options, named, torch_file):
    model, optimizer = trained(kind, named=named, **options)
    checkpoint = assert_holds(torch_file(live.both(model, optimizer)), model, optimizer)
    assert checkpoint.warnings == []
    assert {p.group for p in checkpoint.parameters.values() if len(p.slots) > 1} == {0}


class Listed:
    """As fastcore's lists are pickled."""

    def __init__(self, items: list[Any]):
        self.items = items


@pytest.mark.parametrize("form", ["tuple of groups", "tuple of optimizers", "fastai"])
def test_state_is_attached_in_other_programs_forms_too(form, torch_file):
    model, optimizer = live.trained(torch.nn.Linear(5, 3))
    state = optimizer.state_dict()
    groups = state["param_groups"]
    forms = {
        "tuple of groups": {**state, "param_groups": tuple(groups)},
        "tuple of optimizers": (state,),
        "fastai": {"state": list(state["state"].values()), "hypers": Listed([{"lr": groups[0]["lr"], "mom": 0.9}])},
    }
    path = torch_file({"model": model.state_dict(), "opt": forms[form]})
    found = assert_holds(path, model, optimizer if form != "fastai" else None)
    assert not found.unnamed
    assert found.param_groups[0].hyperparameters["lr"] == groups[0]["lr"]
    for name, parameter in model.named_parameters():
        assert_state(found, name, optimizer.state[parameter])
    zckpt.convert(path, "own", to="zckpt")


def test_flat_state_of_several_parameters_is_called_that(torch_file):
    model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Linear(4, 4)).half()
    flat = torch.nn.Parameter(torch.cat([one.detach().float().flatten() for one in model.parameters()]))
    optimizer = torch.optim.Adam([flat])
    flat.grad = torch.randn_like(flat)
    optimizer.step()
    state = {"model": model.state_dict(), "last_optimizer_state": {**optimizer.state_dict(), "loss_scale": 128.0}}
    [warning] = read(torch_file(state)).warnings
    assert "state of 0 has more elements than any of the model's tensors: it is of several parameters" in warning


def test_optimizer_without_state_has_its_group(torch_file):
    model, optimizer = trained(torch.optim.SGD)
    checkpoint = read(torch_file(live.both(model, optimizer)))
    assert len(checkpoint.param_groups[0].parameters) == 7
    assert all(list(p.slots) == [WEIGHT] for p in checkpoint.parameters.values())


def test_groups_keep_their_members_and_hyperparameters(torch_file):
    model = network()
    groups = [{"params": [p for p in model.parameters() if p.ndim == dims], "lr": dims} for dims in (2, 1)]
    names = [name for dims in (2, 1) for name, p in model.named_parameters() if p.ndim == dims]
    checkpoint = read(torch_file(live.both(model, torch.optim.AdamW(groups))), names=names)
    assert [group.hyperparameters["lr"] for group in checkpoint.param_groups] == [2, 1]
    assert checkpoint.param_groups[0].parameters == ["embed.weight", "up.weight", "out.weight"]
    assert checkpoint.parameters["up.bias"].group == 1


def test_step_is_that_of_the_optimizer_unless_the_file_has_one(torch_file):
    model, optimizer = trained(steps=4)
    path = torch_file(live.both(model, optimizer))
    checkpoint = read(path)
    assert checkpoint.param_groups[0].state == {"step": Scalar(4.0, "float32")}
    assert checkpoint.step == 4
    for key in ("step", "global_step", "iteration"):
        assert read(torch_file({**torch.load(path), key: 900})).step == 900
    root = torch.load(path)
    root["optimizer"]["param_groups"][0]["lr"] = torch.tensor(0.25)
    assert read(torch_file(root)).param_groups[0].hyperparameters["lr"] == Scalar(0.25, "float32")


@pytest.mark.parametrize("named", [False, True], ids=["numbered", "named"])
def test_optimizer_of_a_model_that_was_saved_wrapped(named, torch_file):
    """The optimizer was made of the bare model, the state dict comes from the wrapper: names differ by a prefix."""
    model, optimizer = trained(named=named)
    state = {f"module.{name}": tensor for name, tensor in model.state_dict().items()}
    assert_holds(torch_file({"model": state, "optimizer": optimizer.state_dict()}), model, optimizer)


def test_recorded_names_win_where_shapes_leave_doubt(torch_file):
    model = layers(3)
    _, optimizer = live.trained(model, torch.optim.AdamW(list(model.named_parameters())[::-1]))
    assert_holds(torch_file(live.both(model, optimizer)), model, optimizer)


def doubtful() -> dict[str, Any]:
    """A model of equal layers of which the optimizer has one, without saying which."""
    model = layers(3)
    return live.both(*live.trained(model, torch.optim.AdamW([model[1].weight])))


def test_state_that_fits_several_tensors_stays_under_its_number(torch_file):
    checkpoint = read(torch_file(doubtful()))
    assert list(checkpoint.unnamed) == ["0"]
    assert checkpoint.unnamed["0"].slots.keys() == {"step", "exp_avg", "exp_avg_sq"}
    assert all(list(p.slots) == [WEIGHT] for p in checkpoint.parameters.values())
    assert "several of the model's tensors fit 0: this state keeps its number" in checkpoint.warnings[0]


def test_names_from_the_user_settle_it_or_are_refused(torch_file):
    path = torch_file(doubtful())
    checkpoint = read(path, names=["1.weight"])
    assert checkpoint.unnamed == {}
    assert checkpoint.parameters["1.weight"].slots.keys() == {WEIGHT, "step", "exp_avg", "exp_avg_sq"}
    for names in ([], ["1.weight", "2.weight"], ["no such"]):
        with pytest.raises(UsageError):
            read(path, names=names)


def test_two_names_of_one_tied_parameter_are_refused(torch_file):
    model, optimizer = live.trained(layers(2))
    model[1].weight = model[0].weight
    with refusing(UsageError, "two of the names belong to one tied parameter"):
        read(torch_file(live.both(model, optimizer)), names=["0.weight", "1.weight"])


def test_factors_of_adafactor_tell_a_shape(torch_file):
    shapes = {"a": (4, 6), "b": (6, 4), "c": (4, 6, 2)}
    state = {
        number: {
            "step": 1,
            "exp_avg_sq_row": torch.ones(shape[:-1]),
            "exp_avg_sq_col": torch.ones(shape[:-2] + shape[-1:]),
        }
        for number, shape in enumerate([shapes["c"], shapes["b"]])
    }
    optimizer = {"state": state, "param_groups": [{"lr": 0.1, "params": [0]}, {"lr": 0.1, "params": [1]}]}
    model = {name: torch.ones(shape) for name, shape in shapes.items()}
    checkpoint = read(torch_file({"model": model, "optimizer": optimizer}))
    assert [group.parameters for group in checkpoint.param_groups] == [["c"], ["b"]]


def named_state(**changes) -> dict[str, Any]:
    """A model of three parameters, and an optimizer that keeps a vector and factors beside a moment, by name."""
    model = {"a": torch.ones(3), "b": torch.ones(2), "c": torch.ones(4, 6)}
    state = {name: {"moment": torch.ones_like(p), "window": torch.arange(3.0)} for name, p in model.items()}
    state["c"] = {**state["c"], "left": torch.ones(4, 4), "moment": changes.get("moment", state["c"]["moment"])}
    return {"model": model, "optimizer": {"state": state, "param_groups": [{"lr": 0.1, "params": [*model]}]}}


def test_state_of_any_shape_is_read_where_the_file_names_parameters(torch_file):
    path = torch_file(named_state())
    assert zckpt.open(path).read("b", "window").tolist() == [0, 1, 2]
    assert zckpt.open(path).read("c", "left").shape == (4, 4)
    assert zckpt.verify(path, deep=True).sound
    zckpt.convert(path, "dcp", to="dcp", verify=True)
    with refusing(DamagedFileError, "the optimizer's state of c does not match the model's parameter"):
        read(torch_file(named_state(moment=torch.ones(4, 5))))


def test_tensors_of_a_param_group_go_along(torch_file):
    """D-Adaptation keeps one of one element there."""
    content = named_state()
    content["optimizer"]["param_groups"][0]["weighted"] = torch.tensor([0.5])
    content["optimizer"]["state"] = {name: {"moment": torch.ones_like(p)} for name, p in content["model"].items()}
    path = torch_file(content)
    for to in ("zckpt", "dcp", "consolidated"):
        converted(path, to, to, verify=True)


def test_a_moment_of_adafactor_does_not_make_factors_missing(torch_file):
    """With a first moment, matrices have that and factors, and vectors that and the second moment."""
    content = named_state()
    for name, state in content["optimizer"]["state"].items():
        own = {"row": torch.ones(4), "column": torch.ones(6)} if name == "c" else {"second": 2 * state["moment"]}
        content["optimizer"]["state"][name] = {"moment": state["moment"], **own}
    assert zckpt.verify(torch_file(content), deep=True).findings == []


@pytest.mark.parametrize("form", ["file", "trainer", "dcp"])
def test_larger_tensors_beside_a_moment_do_not_hide_the_shape(form, torch_file, tmp_path):
    """Shampoo's kind keeps square matrices, others the same few values of each parameter, as many as one of these has;
    the moments tell which parameter is which, and which it is not.
    """
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 3))
    state = {}
    for number, one in enumerate(model.parameters()):
        squares = {f"square{side}": torch.rand(n, n) for side, n in enumerate(one.shape)} if one.dim() == 2 else {}
        beside = {"few": torch.rand(6), **squares}
        state[number] = {"step": torch.tensor(3.0), "moment": torch.rand_like(one), **beside}
    optimizer = {"state": state, "param_groups": [{"lr": 0.1, "params": [0, 1, 2, 3]}]}
    path, both = tmp_path / "c.pt", {"model": model.state_dict(), "optimizer": optimizer}
    if form == "trainer":
        (path := tmp_path / "checkpoint-3").mkdir()
        torch.save(model.state_dict(), path / "pytorch_model.bin")
        torch.save(optimizer, path / "optimizer.pt")
    elif form == "dcp":
        dcp.save(both, checkpoint_id=path)
    else:
        torch_file(both)
    names = [name for name, _ in model.named_parameters()]
    for given in (None, names):
        checkpoint = zckpt.open(path, names=given)
        assert (checkpoint.unnamed, checkpoint.param_groups[0].parameters) == ({}, names)
        for number, name in enumerate(names):
            assert_state(checkpoint, name, state[number])
    with pytest.raises(UsageError):
        zckpt.open(path, names=[names[2], names[1], names[0], names[3]])


def test_an_optimizer_for_each_parameter_is_of_the_one_that_it_is_called_by(torch_file):
    """As torchtune and others save those that step in the backward pass; shapes alone tell nothing here."""
    model = layers(3)
    optimizers = {name: torch.optim.AdamW([one]) for name, one in model.named_parameters()}
    for number, optimizer in enumerate(optimizers.values()):
        live.trained(model, optimizer, steps=number + 1)
    its = {name: one.state_dict() for name, one in reversed(optimizers.items())}
    path = torch_file({"model": model.state_dict(), "optimizer": its})
    checkpoint = assert_holds(path, model, optimizers)
    assert (checkpoint.unnamed, checkpoint.warnings) == ({}, [])
    converted(path, "dcp", "dcp", verify=True)


def test_state_of_torchs_adafactor_has_names(torch_file):
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 4), torch.nn.Conv1d(4, 6, 2))
    optimizer = torch.optim.Adafactor(model.parameters())
    for number, one in enumerate(model.parameters()):
        one.grad = torch.full_like(one, 0.1 * (number + 1))
    optimizer.step()
    assert not assert_holds(torch_file(live.both(model, optimizer)), model, optimizer).unnamed


def test_tied_parameter_has_its_state_under_the_owners_name(torch_file):
    model = torch.nn.Sequential(OrderedDict(wte=torch.nn.Embedding(5, 3), head=torch.nn.Linear(3, 5, bias=False)))
    model.head.weight = model.wte.weight
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.tensor([1])).sum().backward()
    optimizer.step()
    checkpoint = assert_holds(torch_file(live.both(model, optimizer)), model, optimizer)
    assert checkpoint.parameters["head.weight"].tied_to == "wte.weight"


def test_statistics_of_batch_norm_get_nothing_of_its_parameters(torch_file):
    """Four tensors of one shape, of which the optimizer has two; a file does not say which are buffers."""
    model, optimizer = live.trained(torch.nn.Sequential(torch.nn.Linear(3, 7), torch.nn.BatchNorm1d(7)))
    checkpoint = open_checkpoint(torch_file(live.both(model, optimizer)))
    of = dict(model.named_parameters())
    for name, parameter in checkpoint.parameters.items():
        for slot in parameter.slots.keys() - {WEIGHT}:
            assert_same(checkpoint.read(name, slot), optimizer.state[of[name]][slot])
    assert {"exp_avg"} <= checkpoint.parameters["0.weight"].slots.keys()


# --- optimizers by themselves, and several ----------------------------------------------------------------------


def test_optimizer_by_itself_keeps_its_numbers_or_the_names_that_it_records(torch_file):
    model, optimizer = trained()
    checkpoint = read(torch_file(optimizer.state_dict()))
    assert list(checkpoint.unnamed) == [str(number) for number in range(7)]
    assert checkpoint.parameters == {}
    assert checkpoint.step == 3
    _, optimizer = trained(named=True)
    checkpoint = read(torch_file(optimizer.state_dict()))
    assert list(checkpoint.unnamed) == [name for name, _ in model.named_parameters()]
    assert checkpoint.warnings == []


def test_usual_key_decides_among_several_optimizers(torch_file):
    model, optimizer = trained()
    critic = torch.optim.SGD([torch.nn.Parameter(torch.ones(3))], lr=9.0)
    root = {"model": model.state_dict(), "critic": critic.state_dict(), "optimizer": optimizer.state_dict()}
    checkpoint = assert_holds(torch_file(root), model, optimizer)
    assert list(checkpoint.metadata) == ["critic"]


@pytest.mark.parametrize("count", [1, 2])
def test_lightning_keeps_its_optimizers_in_a_list_and_a_second_one_is_named_in_a_warning(count, torch_file):
    model, optimizer = trained()
    root = {"state_dict": model.state_dict(), "optimizer_states": [optimizer.state_dict()] * count, "epoch": 1}
    checkpoint = assert_holds(torch_file(root), model, optimizer)
    second = "more models or optimizers are carried as they are, and not read: optimizer_states"
    assert checkpoint.warnings == [second] * (count - 1)


def test_scheduler_and_random_states_are_kept_beside(torch_file):
    model, optimizer = trained()
    path = torch_file(live.both(model, optimizer))
    beside = {"scheduler": {"last_epoch": 2}, "rng": torch.get_rng_state(), "args": {"seed": 7}}
    checkpoint = assert_holds(torch_file({**torch.load(path), **beside}), model, optimizer)
    assert checkpoint.metadata.keys() == beside.keys()
    assert checkpoint.metadata["args"] == {"seed": 7}


# --- files that hold no state dict ------------------------------------------------------------------------------


class Whole(torch.nn.Module):
    """Tied weights, a layer under two names, a part that is None, buffers of both kinds, a tensor that is neither."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = torch.nn.Embedding(7, 4), torch.nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.blocks = torch.nn.ModuleList([torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))] * 2)
        self.none = None
        self.register_module("nobody", None)
        self.register_buffer("angles", torch.ones(9), persistent=False)
        self.register_buffer("scale", torch.rand(3))
        self.stride = torch.ones(3)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.mark.parametrize(("place", "is_whole"), [((), False), (("model",), False), (("ema",), True)])
def test_a_module_that_was_saved_whole_is_its_state_dict(place, is_whole, torch_file, monkeypatch):
    """Its class need not be there, and is not looked for; an optimizer may be whole, too."""
    torch.manual_seed(0)
    model, optimizer = live.trained(Whole())
    its = optimizer if is_whole else optimizer.state_dict()
    root = {place[0]: model, "optimizer": its, "epoch": 3} if place else model
    path = torch_file(root)
    monkeypatch.setattr(Whole, "__setstate__", lambda *_: pytest.fail("the module was made"))
    checkpoint = zckpt.open(path)
    state = model.state_dict()
    average = "the only model is called 'ema', as averages are: the optimizer's state is of other weights"
    assert checkpoint.warnings == [
        "holds a module or an optimizer as an object, of which its state dict is read and no more",
        *([average] if place == ("ema",) else []),
    ]
    assert {one.name for one in checkpoint.tensors()} == state.keys()
    assert_holds(checkpoint, model, optimizer if place else None)
    assert checkpoint.aliases == {"head.weight": "embedding.weight", **{
        f"blocks.1.{name}": f"blocks.0.{name}" for name, _ in model.blocks[0].named_parameters()}}  # fmt: skip
    if place:
        assert checkpoint.metadata == {"epoch": 3}
    assert zckpt.verify(path, deep=True).sound
    items = [item for item in take_inventory(checkpoint).items if item.kind == "tensor"]
    weights = sum(one.nbytes for one in dict(model.named_parameters()).values())
    assert sum(item.nbytes for item in items if item.fate == "state") >= weights, "the rest is implied"
    zckpt.consolidate(path, "m2.pt")
    assert_same_tree(torch.load("m2.pt"), dict(state))


@pytest.mark.parametrize("kind", ["itself", "twice"])
def test_modules_that_hold_each_other_without_end_are_refused(kind, torch_file):
    top = torch.nn.Module()
    if kind == "itself":
        top._modules["x"] = top
    for _ in range(60 if kind == "twice" else 0):
        above = torch.nn.Module()
        above._modules |= {"a": top, "b": top}
        top = above
    with refusing(UnsupportedError, "holds modules that hold each other without end"):
        read(torch_file({"model": top, "w": torch.ones(2)}))


def test_another_object_is_refused_with_advice(torch_file):
    optimizer = torch.optim.AdamW(network().parameters())
    with refusing(UnsupportedError, r"holds an object of .*AdamW, not a state dict; save model.state_dict\(\)"):
        read(torch_file(optimizer))


@pytest.mark.parametrize(
    "root",
    [{}, [], [torch.ones(1)], torch.ones(1), 5, "text", None, {"a": 1, "b": "c"}, {"a": [torch.ones(1)]}],
    ids=repr,
)
def test_what_holds_no_state_dict_is_refused(root, torch_file):
    with refusing(UnsupportedError, "holds no state dict"):
        read(torch_file(root))


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (torch.eye(2).to_sparse(), "b, of layout torch.sparse_coo"),
        (torch.ones(2, device="meta"), "b, of the meta device"),
    ],
)
def test_tensors_that_are_not_plain_are_named(tensor, words, torch_file):
    for root in ({"b": tensor}, {"model": {"b": tensor}}):
        with refusing(UnsupportedError, words):
            read(torch_file(root))


@pytest.mark.parametrize(
    "optimizer",
    [
        {"state": {}, "param_groups": [5]},
        {"state": {}, "param_groups": [{}]},
        {"state": {}, "param_groups": [{"params": 5}]},
        {"state": {}, "param_groups": [{"params": [0, 0]}]},
        {"state": {}, "param_groups": [{"params": [0]}, {"params": [0]}]},
        {"state": {7: {}}, "param_groups": [{"params": [0]}]},
        {"state": {0: 5}, "param_groups": [{"params": [0]}]},
        {"state": {}, "param_groups": [{"params": [True]}]},
    ],
    ids=repr,
)
def test_optimizer_that_contradicts_itself_is_refused(optimizer, torch_file):
    with pytest.raises(SourceError):
        read(torch_file({"model": {"a": torch.ones(2)}, "optimizer": optimizer}))


def test_numbers_that_became_text_are_numbers(torch_file):
    """As `torch.distributed.checkpoint.format_utils.dcp_to_torch_save` leaves them."""
    state = {"0": {"exp_avg": torch.ones(2, 3)}}
    groups = [{"lr": 0.1, "params": [0], "param_names": ["weight"]}]
    path = torch_file({"model": {"weight": torch.zeros(2, 3)}, "optimizer": {"state": state, "param_groups": groups}})
    assert torch.equal(open_checkpoint(path).read("weight", "exp_avg"), torch.ones(2, 3))


EXTRA = {
    "beside the tensors": lambda tensors: {**tensors, "_extra_state": None},
    "of another name": lambda tensors: {**tensors, "note": "text"},
    "below a key": lambda tensors: {"model": {**tensors, "up._extra_state": "text"}, "epoch": 3},
    "as many as tensors": lambda tensors: {**tensors, **{f"{name}._extra_state": None for name in tensors}},
}


@pytest.mark.parametrize(("kind", "to"), each(EXTRA, ["zckpt", "dcp", "consolidated", "zero-redundancy"]))
def test_a_state_dict_with_an_entry_that_is_no_tensor_is_carried_once(kind, to, torch_file):
    """As TransformerEngine's: each tensor is state, and what is none is carried by itself."""
    tensors = {"w": torch.randn(60_000), "v": torch.randn(40_000)}
    root = EXTRA[kind](tensors)
    source = torch_file(root)
    checkpoint = assert_tensors(source, tensors)
    model = root.get("model", root)
    extra = {key: value for key, value in model.items() if key not in tensors}
    assert checkpoint.metadata == ({"model": extra, "epoch": 3} if "model" in root else extra)
    zckpt.convert(source, "target", to=to, verify=True)
    assert nbytes_in("target") < 1.05 * source.stat().st_size
    found = assert_tensors(Path("target"), tensors).metadata
    assert found.keys() == checkpoint.metadata.keys()
