"""Which model of a torch file an optimizer is of, and which parameters, where several or none could be meant."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import zckpt
from tests.formats.test_state_dict_forms import assert_state, body, stepped
from tests.refusals import refusing
from zckpt.errors import UnsupportedError
from zckpt.optim.values import value_of


def trained(*sizes: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = body(*sizes)
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    stepped(model, optimizer)
    return model, optimizer


def one_of_all(*models: nn.Module, groups: Any = None) -> torch.optim.Optimizer:
    every = [one for model in models for one in model.parameters()]
    optimizer = torch.optim.Adam(groups or every, 0.1)
    for _ in range(2):
        sum(one.square().sum() for one in every).backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def saved(tmp_path: Path, content: dict[str, Any]) -> Path:
    torch.save(
        {key: one.state_dict() if hasattr(one, "state_dict") else one for key, one in content.items()},
        tmp_path / "c.pt",
    )
    return tmp_path / "c.pt"


@pytest.fixture
def temperature():
    value = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.Adam([value], 0.1)
    value.sum().backward()
    optimizer.step()
    return value, optimizer


@pytest.mark.parametrize("others", [(), ("actor",)])
def test_a_tensor_beside_the_models_has_its_own_optimizer(others, temperature, tmp_path):
    """Soft actor-critic's temperature has the shape of the critic's last bias, which got its moments."""
    critic, _ = trained(5, 4, 1)
    path = saved(
        tmp_path,
        {
            "critic": critic,
            **{key: body(5, 4, 3) for key in others},
            "log_alpha": temperature[0],
            "alpha_optimizer": temperature[1],
        },
    )
    opened = zckpt.open(path)
    assert all(list(one.slots) == ["weight"] for one in opened.parameters.values())
    assert any("not read: alpha_optimizer" in one for one in opened.warnings)
    target = tmp_path / "zckpt"
    zckpt.convert(path, target, to="zckpt")
    assert "alpha_optimizer" in zckpt.open(target).metadata


@pytest.mark.parametrize("first", ["alpha", "actor"])
def test_all_optimizers_are_read_but_one_of_something_else(first, temperature, tmp_path):
    (actor, of_actor), (critic, of_critic) = trained(5, 4, 3), trained(5, 4, 1)
    optimizers = {"actor": of_actor, "critic": of_critic, "alpha": temperature[1]}
    order = sorted(optimizers, key=lambda key: key != first)
    path = saved(tmp_path, {"actor": actor, "critic": critic, **{f"{key}_optimizer": optimizers[key] for key in order}})
    assert_state(path, actor, {"actor_optimizer": of_actor}, "actor.")
    opened = assert_state(path, critic, {"critic_optimizer": of_critic}, "critic.")
    assert list(opened.metadata) == ["alpha_optimizer"]


@pytest.mark.parametrize("kind", [dict, list, tuple])
def test_an_optimizer_of_something_else_is_carried_from_among_others(kind, temperature, tmp_path):
    (actor, of_actor), (critic, of_critic) = trained(5, 4, 3), trained(5, 4, 1)
    several = {"0": of_actor.state_dict(), "1": temperature[1].state_dict(), "2": of_critic.state_dict()}
    both = nn.ModuleDict({"actor": actor, "critic": critic})
    path = saved(tmp_path, {"model": both, "optimizers": several if kind is dict else kind(several.values())})
    assert_state(path, actor, {"0": of_actor}, "actor.")
    opened = assert_state(path, critic, {"2": of_critic}, "critic.")
    assert list(opened.metadata) == ["optimizers"]
    target = tmp_path / "zckpt"
    zckpt.convert(path, target, to="zckpt")
    assert zckpt.diff(path, target).equal


def test_the_optimizer_that_a_file_has_the_models_of_is_read(tmp_path):
    """HiFi-GAN's second file has the generator's optimizer first, and discriminators in another order than theirs."""
    _, of_generator = trained(5, 9, 9, 9, 2)
    first, second = body(5, 4, 2), body(5, 3, 3, 1)
    both = one_of_all(second, first)
    path = saved(tmp_path, {"mpd": first, "msd": second, "optim_g": of_generator, "optim_d": both})
    assert_state(path, first, {None: both}, "mpd.")
    assert list(assert_state(path, second, {None: both}, "msd.").metadata) == ["optim_g"]


def test_agents_that_have_an_optimizer_of_several_models_each(tmp_path):
    agents = {key: (body(5, 4, 2), body(5, 3, 1)) for key in ("agent_0", "agent_1")}
    optimizers = {key: one_of_all(*reversed(models)) for key, models in agents.items()}
    content = {
        key: {"actor": one.state_dict(), "critic": other.state_dict(), "optimizer": optimizers[key].state_dict()}
        for key, (one, other) in agents.items()
    }
    path = saved(tmp_path, content)
    for key, models in agents.items():
        for name, one in zip(("actor", "critic"), models, strict=True):
            assert_state(path, one, {key: optimizers[key]}, f"{key}.{name}.")


def test_one_optimizer_of_two_models_alike_keeps_numbers(tmp_path):
    """It was said to have them in the order of the file, which nothing says."""
    first, second = body(5, 4, 1), body(5, 4, 1)
    path = saved(tmp_path, {"q1": first, "q2": second, "optimizer": one_of_all(second, first)})
    opened = zckpt.open(path)
    assert len(opened.unnamed) == 8
    assert all(list(one.slots) == ["weight"] for one in opened.parameters.values())


def test_statistics_beside_two_models_are_not_what_their_optimizer_has(tmp_path):
    policy, value = body(5, 4, 4), body(5, 4, 1)
    optimizer = one_of_all(policy, value)
    means = {
        "running_mean": torch.zeros(4, dtype=torch.float64),
        "running_variance": torch.ones(4, dtype=torch.float64),
    }
    ones = {key: one[:1].clone() for key, one in means.items()}
    path = saved(tmp_path, {"policy": policy, "value": value, "optimizer": optimizer, "state": means, "returns": ones})
    assert_state(path, policy, {None: optimizer}, "policy.")
    assert_state(path, value, {None: optimizer}, "value.")


def test_optimizers_that_are_called_like_the_ends_of_names(tmp_path):
    """Gaussian splats have one optimizer each for means and scales, which have one shape."""
    model = nn.Module()
    model.params = nn.ParameterDict({key: torch.ones(6, 3) for key in ("means", "scales", "quats")})
    optimizers = {key: torch.optim.Adam([model.params[key]], 0.1) for key in ("scales", "quats", "means")}
    for number, (key, one) in enumerate(optimizers.items()):
        (model.params[key] * number).sum().backward()
        one.step()
    states = {key: one.state_dict() for key, one in optimizers.items()}
    path = saved(tmp_path, {"step": 1, "pipeline": model, "optimizers": states})
    opened = zckpt.open(path)
    for key, one in optimizers.items():
        moment = one.state[model.params[key]]["exp_avg"]
        assert torch.equal(opened.read(f"params.{key}", "exp_avg"), moment)


def test_optimizers_that_are_called_by_names_of_which_one_ends_like_another(tmp_path):
    model = nn.ParameterDict({"a": torch.ones(3), "b": torch.ones(3)})
    inner = nn.ModuleDict({"x": model})
    inner.a = nn.Parameter(torch.ones(3))
    every = dict(inner.named_parameters())
    optimizers = {}
    for number, (name, one) in enumerate(every.items()):
        optimizers[name] = torch.optim.Adam([one], 0.1)
        (one.sum() * (number + 1)).backward()
        optimizers[name].step()
    states = {name: optimizers[name].state_dict() for name in reversed(every)}
    opened = zckpt.open(saved(tmp_path, {"model": inner, "optimizers": states}))
    for name, one in every.items():
        assert torch.equal(opened.read(name, "exp_avg"), optimizers[name].state[one]["exp_avg"])


@pytest.mark.parametrize("way", [1, -1])
def test_a_group_for_each_parameter_has_names(way, tmp_path):
    """As mmengine makes them if weight decay depends on the module."""
    model = body(4, 4, 4, 4, 3)
    groups = [{"params": [one], "lr": 0.1 + number} for number, one in enumerate(model.parameters())]
    optimizer = one_of_all(model, groups=groups[::way])
    opened = assert_state(saved(tmp_path, {"model": model, "optimizer": optimizer}), model, {None: optimizer})
    assert [group.hyperparameters["lr"] for group in opened.param_groups] == [one["lr"] for one in groups[::way]]


def test_few_groups_of_one_parameter_may_be_in_any_order(tmp_path):
    model = nn.ParameterDict({key: torch.ones(3) for key in "abc"} | {"d": torch.ones(2)})
    groups = [{"params": [model[key]]} for key in "bacd"]
    opened = zckpt.open(saved(tmp_path, {"model": model, "optimizer": one_of_all(model, groups=groups)}))
    assert list(opened.unnamed) == ["0", "1", "2"]


@pytest.mark.parametrize("form", ["models", "one model", "one model, apart"])
def test_twins_are_told_apart_by_the_whole_of_their_names(form, tmp_path):
    twins = {key: body(5, 4, 1) for key in ("critic1", "critic2")}
    optimizers = {key: one_of_all(twins[key]) for key in ("critic2", "critic1")}
    of = {f"{key}_optim": one.state_dict() for key, one in optimizers.items()}
    content = twins | of if form == "models" else {"model": nn.ModuleDict(twins), **of}
    if form == "one model":
        content = {"model": content["model"], "optim": {key: one.state_dict() for key, one in optimizers.items()}}
    path = saved(tmp_path, content)
    for key, one in twins.items():
        called = key if form == "one model" else f"{key}_optim"
        assert_state(path, one, {called: optimizers[key]}, f"{key}.")


@pytest.mark.parametrize("is_dcp", [False, True])
def test_a_place_in_a_list_is_no_name(is_dcp, tmp_path):
    """The second of a list was taken for the optimizer of `critic_1`, whichever it was of."""
    twins = {key: body(5, 4, 1) for key in ("critic_1", "critic_2")}
    states = [one_of_all(twins[key]).state_dict() for key in ("critic_1", "critic_2")]
    content = {**twins, "optims": states}
    if is_dcp:
        dcp.save({**{key: one.state_dict() for key, one in twins.items()}, "optims": states}, checkpoint_id=tmp_path)
    opened = zckpt.open(tmp_path if is_dcp else saved(tmp_path, content))
    assert len(opened.unnamed) == 8
    assert all(list(one.slots) == ["weight"] for one in opened.parameters.values())


@pytest.mark.parametrize("key", ["ema", "model"])
def test_an_average_without_its_model_is_said(key, tmp_path):
    model, optimizer = trained(5, 4, 1)
    opened = assert_state(saved(tmp_path, {key: model, "optimizer": optimizer}), model, {None: optimizer})
    assert any("the optimizer's state is of other weights" in one for one in opened.warnings) == (key == "ema")


def test_files_of_gpus_may_be_shares_as_files_of_ranks(tmp_path):
    """As insightface's, in which each has some of the classes."""
    for number in range(2):
        torch.save({"fc": {"weight": torch.full((5, 4), float(number))}}, tmp_path / f"checkpoint_gpu_{number}.pt")
    [warning] = zckpt.open(tmp_path / "checkpoint_gpu_1.pt").warnings
    assert "it is one of 2 ranks' files, and may hold only a share of the model" in warning


ALIKE = (5, 4, 4)


def named(path: Path) -> set[str]:
    """What has state under its name, of optimizers that only number it."""
    return {one.name for one in zckpt.open(path).parameters.values() if "exp_avg" in one.slots}


@pytest.mark.parametrize("more", [False, True])
def test_places_in_lists_are_names_where_both_are_as_long(more, tmp_path):
    pairs = [trained(*ALIKE) for _ in range(2)]
    models = [model.state_dict() for model, _ in pairs] + [body(*ALIKE).state_dict()] * more  # an average, say
    path = saved(tmp_path, {"models": models, "optimizers": [optimizer.state_dict() for _, optimizer in pairs]})
    if more:
        assert named(path) == set()
        return
    for at, (model, optimizer) in enumerate(pairs):
        assert_state(path, model, {str(at): optimizer}, f"models.{at}.")


def test_a_place_is_no_number_of_a_model(tmp_path):
    (first, one), (second, two) = trained(*ALIKE), trained(*ALIKE)
    optimizers = [one.state_dict(), two.state_dict()]
    assert named(saved(tmp_path, {"model_1": first, "module": second, "optimizers": optimizers})) == set()
    assert named(saved(tmp_path, {"": first, "a": second, "optimizers": optimizers[:1]})) == set()


@pytest.mark.parametrize(("numbers", "is_named"), [((1, 2), False), (("", 1), True)])
def test_numbers_of_optimizers_are_those_of_models_if_all_are(numbers, is_named, tmp_path):
    pairs = [trained(*ALIKE) for _ in range(2)]
    optimizers = {f"optimizer_{number}": optimizer for number, (_, optimizer) in zip(numbers, pairs, strict=True)}
    path = saved(tmp_path, {"model": pairs[0][0], "model_1": pairs[1][0], **optimizers})
    if not is_named:
        assert named(path) == set()
        return
    for key, (model, optimizer) in zip(("model", "model_1"), pairs, strict=True):
        assert_state(path, model, {f"optimizer_{key[6:]}": optimizer}, f"{key}.")


@pytest.mark.parametrize("key", ["q", "net"])
def test_an_optimizer_that_is_called_like_one_model_is_not_of_the_usual_one(key, tmp_path):
    model, optimizer = trained(*ALIKE)
    path = saved(tmp_path, {key: model, "module": body(*ALIKE), f"{key}_optim": optimizer})
    assert_state(path, model, {None: optimizer}, f"{key}.")


@pytest.mark.parametrize("is_average", [False, True])
def test_one_optimizer_of_models_alike_keeps_numbers_in_dcp(is_average, tmp_path):
    """Their order is not the dict's; an average beside a model is none that it has."""
    first, second = body(*ALIKE), body(*ALIKE)
    optimizer = one_of_all(*([first] if is_average else [second, first]))
    others = {"ema" if is_average else "msd": second.state_dict()}
    dcp.save({"gen": first.state_dict(), **others, "optimizer": optimizer.state_dict()}, checkpoint_id=tmp_path)
    assert named(tmp_path) == ({f"gen.{name}" for name in dict(first.named_parameters())} if is_average else set())
    if is_average:
        assert_state(tmp_path, first, {None: optimizer}, "gen.")


def test_not_all_optimizers_of_the_same_names_are_the_usual_models(tmp_path):
    """The first was read as that of `net`, and the state of the others was not read."""
    pairs = [trained(*ALIKE) for _ in range(2)]
    states = {f"optimizer_{at}": get_optimizer_state_dict(*pair) for at, pair in enumerate(pairs)}
    models = {key: model.state_dict() for key, (model, _) in zip(("backbone", "net"), pairs, strict=True)}
    dcp.save({**models, **states}, checkpoint_id=tmp_path)
    with refusing(UnsupportedError, "could be the optimizer of several models"):
        zckpt.open(tmp_path)


def test_the_model_beside_an_optimizer_is_its_in_dcp(tmp_path):
    model, optimizer = trained(*ALIKE)
    pair = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.save({"D": {"model": body(*ALIKE).state_dict()}, "G": pair}, checkpoint_id=tmp_path)
    assert_state(tmp_path, model, {None: optimizer}, "G.model.")


def accelerates(folder: Path, models: Any, optimizers: Any) -> Path:
    """As Accelerate saves several."""
    folder.mkdir()
    for at, model in enumerate(models):
        torch.save(model.state_dict(), folder / f"pytorch_model{f'_{at}' * (at > 0)}.bin")
    for at, optimizer in enumerate(optimizers):
        torch.save(optimizer.state_dict(), folder / f"optimizer{f'_{at}' * (at > 0)}.bin")
    torch.save({"step": 2}, folder / "random_states_0.pkl")
    return folder


def test_optimizers_of_accelerates_models_are_theirs_that_can_be(tmp_path):
    """Prepared in another order than the models, or of some of them only; shapes tell, and of twins they do not."""
    pairs = [trained(5, 4, 3), trained(5, 6, 3)]
    models, optimizers = [model for model, _ in pairs], [optimizer for _, optimizer in pairs]
    for case, (others, its) in {"turned": ([], [1, 0]), "fewer": ([body(5, 7, 3)], [0, 1])}.items():
        path = accelerates(tmp_path / case, [*models, *others], [optimizers[at] for at in its])
        for at, (model, optimizer) in enumerate(pairs):
            number = its.index(at)
            name = f"optimizer{f'_{number}' * (number > 0)}"
            assert_state(path, model, {name: optimizer}, f"pytorch_model{f'_{at}' * (at > 0)}.")
    twins = [body(*ALIKE), body(*ALIKE)]
    assert named(accelerates(tmp_path / "twins", twins, [one_of_all(*twins[::-1])])) == set()


@pytest.mark.parametrize("deep", [(), ("state",)])
@pytest.mark.parametrize("more", [("ema", "reference"), ("reference",), ("frozen",)])
def test_a_model_with_its_optimizer_further_in_comes_before_tensors_without_one(more, deep, tmp_path):
    model, optimizer = trained(5, 4, 1)
    one = {name: torch.randn_like(tensor) for name, tensor in model.state_dict().items()}
    others = {key: {"net": one, "at": torch.ones(4)} if key == "reference" and len(more) > 1 else one for key in more}
    app = {"model": model.state_dict(), "optim": optimizer.state_dict(), "note": 7}
    for key in deep:
        app = {key: app, "note": 8}
    checkpoint = assert_state(saved(tmp_path, {**others, "app": app}), model, {None: optimizer})
    path = saved(tmp_path, {"mine": one, "best": {"model": model.state_dict(), "optim": optimizer.state_dict()}})
    assert torch.equal(zckpt.open(path).read("0.weight"), one["0.weight"])  # and not the best so far
    assert checkpoint.metadata.keys() == {*more, "app"}
    assert value_of(checkpoint.metadata["app"]) == ({"state": {"note": 7}, "note": 8} if deep else {"note": 7})
