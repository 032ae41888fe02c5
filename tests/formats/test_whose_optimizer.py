"""Which model of a torch file an optimizer is of, and which parameters, where several or none could be meant."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import zckpt
from tests.formats.holding import assert_holds, converted
from tests.formats.test_state_dict_forms import body, trained
from tests.refusals import refusing
from zckpt.errors import UnsupportedError
from zckpt.optim.values import value_of


def one_of_all(*models, groups=None) -> torch.optim.Optimizer:
    """Return an optimizer of all parameters, after two steps."""
    every = [one for model in models for one in model.parameters()]
    optimizer = torch.optim.Adam(groups or every, 0.1)
    for _ in range(2):
        sum(one.square().sum() for one in every).backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def state_of(content):
    """Give dicts in the place of models and optimizers."""
    if hasattr(content, "state_dict"):
        return content.state_dict()
    if isinstance(content, dict):
        return {key: state_of(one) for key, one in content.items()}
    return type(content)(map(state_of, content)) if isinstance(content, (list, tuple)) else content


def saved(content) -> Path:
    torch.save(state_of(content), "c.pt")
    return Path("c.pt")


def in_dcp(content) -> Path:
    dcp.save(state_of(content), checkpoint_id="c")
    return Path("c")


def assert_nothing_is_named(path, numbers):
    """No parameter has state, and so many have it by their number."""
    opened = zckpt.open(path)
    assert len(opened.unnamed) == numbers
    assert all(list(one.slots) == ["weight"] for one in opened.parameters.values())


@pytest.fixture
def temperature():
    model = nn.ParameterList([torch.zeros(1)])
    return model[0], one_of_all(model)


@pytest.mark.parametrize("others", [(), ("actor",)])
def test_a_tensor_beside_the_models_has_its_own_optimizer(others, temperature):
    """Soft actor-critic's temperature has the shape of the critic's last bias, which got its moments."""
    beside = {"log_alpha": temperature[0], "alpha_optimizer": temperature[1]}
    path = saved({"critic": body(5, 4, 1), **{key: body(5, 4, 3) for key in others}, **beside})
    assert_nothing_is_named(path, 0)
    assert any("not read: alpha_optimizer" in one for one in zckpt.open(path).warnings)
    target = "zckpt"
    zckpt.convert(path, target, to="zckpt")
    assert "alpha_optimizer" in zckpt.open(target).metadata


@pytest.fixture
def pair():
    """Two models, and the optimizer of each."""
    (actor, of_actor), (critic, of_critic) = trained(5, 4, 3), trained(5, 4, 1)
    return nn.ModuleDict({"actor": actor, "critic": critic}), of_actor, of_critic


@pytest.mark.parametrize("first", ["alpha", "actor"])
def test_all_optimizers_are_read_but_one_of_something_else(first, pair, temperature):
    models, of_actor, of_critic = pair
    optimizers = {"actor": of_actor, "critic": of_critic, "alpha": temperature[1]}
    order = sorted(optimizers, key=lambda key: key != first)
    path = saved({**models, **{f"{key}_optimizer": optimizers[key] for key in order}})
    opened = assert_holds(path, models, {"actor_optimizer": of_actor, "critic_optimizer": of_critic})
    assert list(opened.metadata) == ["alpha_optimizer"]


@pytest.mark.parametrize("kind", [dict, list, tuple])
def test_an_optimizer_of_something_else_is_carried_from_among_others(kind, pair, temperature):
    models, of_actor, of_critic = pair
    several = {"0": of_actor, "1": temperature[1], "2": of_critic}
    path = saved({"model": models, "optimizers": several if kind is dict else kind(several.values())})
    opened = assert_holds(path, models, {"0": of_actor, "2": of_critic})
    assert list(opened.metadata) == ["optimizers"]
    converted(path, "zckpt", "zckpt")


def test_the_optimizer_that_a_file_has_the_models_of_is_read():
    """HiFi-GAN's second file has the generator's optimizer first, and discriminators in another order than theirs."""
    _, of_generator = trained(5, 9, 9, 9, 2)
    models = nn.ModuleDict({"mpd": body(5, 4, 2), "msd": body(5, 3, 3, 1)})
    both = one_of_all(models["msd"], models["mpd"])
    path = saved({**models, "optim_g": of_generator, "optim_d": both})
    assert list(assert_holds(path, models, both).metadata) == ["optim_g"]


def test_agents_that_have_an_optimizer_of_several_models_each():
    agents = nn.ModuleDict({
        key: nn.ModuleDict({"actor": body(5, 4, 2), "critic": body(5, 3, 1)}) for key in ("agent_0", "agent_1")
    })  # fmt: skip
    optimizers = {key: one_of_all(its["critic"], its["actor"]) for key, its in agents.items()}
    path = saved({key: {**its, "optimizer": optimizers[key]} for key, its in agents.items()})
    assert_holds(path, agents, optimizers)


def test_one_optimizer_of_two_models_alike_keeps_numbers():
    """It was said to have them in the order of the file, which nothing says."""
    first, second = body(5, 4, 1), body(5, 4, 1)
    path = saved({"q1": first, "q2": second, "optimizer": one_of_all(second, first)})
    assert_nothing_is_named(path, 8)


def test_statistics_beside_two_models_are_not_what_their_optimizer_has():
    models = nn.ModuleDict({"policy": body(5, 4, 4), "value": body(5, 4, 1)})
    optimizer = one_of_all(models)
    means = {
        "running_mean": torch.zeros(4, dtype=torch.float64),
        "running_variance": torch.ones(4, dtype=torch.float64),
    }
    ones = {key: one[:1].clone() for key, one in means.items()}
    path = saved({**models, "optimizer": optimizer, "state": means, "returns": ones})
    assert_holds(path, models, optimizer)


def test_optimizers_that_are_called_like_the_ends_of_names():
    """Gaussian splats have one optimizer each for means and scales, which have one shape."""
    model = nn.ModuleDict({"params": nn.ParameterDict({key: torch.ones(6, 3) for key in ("means", "scales", "quats")})})
    optimizers = each_its_own(model, lambda name: name.removeprefix("params."))
    path = saved({"step": 1, "pipeline": model, "optimizers": optimizers})
    assert_holds(path, model, optimizers)


def test_optimizers_that_are_called_by_names_of_which_one_ends_like_another():
    model = nn.ModuleDict({"x": nn.ParameterDict({"a": torch.ones(3), "b": torch.ones(3)})})
    model.a = nn.Parameter(torch.ones(3))
    optimizers = each_its_own(model, str)
    assert_holds(saved({"model": model, "optimizers": optimizers}), model, optimizers)


def each_its_own(model, call: Callable[[str], str]) -> dict[str | None, torch.optim.Optimizer]:
    """Return an optimizer of each parameter, after steps of their own, the last one first."""
    optimizers = {}
    for number, (name, one) in enumerate(reversed([*model.named_parameters()])):
        optimizers[call(name)] = torch.optim.Adam([one], 0.1)
        one.grad = torch.full_like(one, number)
        optimizers[call(name)].step()
    return optimizers


@pytest.mark.parametrize("way", [1, -1])
def test_a_group_for_each_parameter_has_names(way):
    """As mmengine makes them if weight decay depends on the module."""
    model = body(4, 4, 4, 4, 3)
    groups = [{"params": [one], "lr": 0.1 + number} for number, one in enumerate(model.parameters())]
    optimizer = one_of_all(model, groups=groups[::way])
    assert_holds(saved({"model": model, "optimizer": optimizer}), model, optimizer)


def test_few_groups_of_one_parameter_may_be_in_any_order():
    model = nn.ParameterDict({key: torch.ones(3) for key in "abc"} | {"d": torch.ones(2)})
    groups = [{"params": [model[key]]} for key in "bacd"]
    opened = zckpt.open(saved({"model": model, "optimizer": one_of_all(model, groups=groups)}))
    assert list(opened.unnamed) == ["0", "1", "2"]


@pytest.mark.parametrize("form", ["models", "one model", "one model, apart"])
def test_twins_are_told_apart_by_the_whole_of_their_names(form):
    twins = nn.ModuleDict({key: body(5, 4, 1) for key in ("critic1", "critic2")})
    optimizers = {key: one_of_all(twins[key]) for key in ("critic2", "critic1")}
    called = {f"{key}_optim": one for key, one in optimizers.items()}
    content = {**twins, **called} if form == "models" else {"model": twins, **called}
    if form == "one model":
        called, content = optimizers, {"model": twins, "optim": optimizers}
    assert_holds(saved(content), twins, called)


@pytest.mark.parametrize("save", [saved, in_dcp])
def test_a_place_in_a_list_is_no_name(save):
    """The second of a list was taken for the optimizer of `critic_1`, whichever it was of."""
    twins = {key: body(5, 4, 1) for key in ("critic_1", "critic_2")}
    assert_nothing_is_named(save({**twins, "optims": [*map(one_of_all, twins.values())]}), 8)


@pytest.mark.parametrize("key", ["ema", "model"])
def test_an_average_without_its_model_is_said(key):
    model, optimizer = trained(5, 4, 1)
    opened = assert_holds(saved({key: model, "optimizer": optimizer}), model, optimizer)
    assert any("the optimizer's state is of other weights" in one for one in opened.warnings) == (key == "ema")


def test_files_of_gpus_may_be_shares_as_files_of_ranks():
    """As insightface's, in which each has some of the classes."""
    for number in range(2):
        torch.save({"fc": {"weight": torch.full((5, 4), float(number))}}, f"checkpoint_gpu_{number}.pt")
    [warning] = zckpt.open("checkpoint_gpu_1.pt").warnings
    assert "it is one of 2 ranks' files, and may hold only a share of the model" in warning


ALIKE = (5, 4, 4)


def named(path) -> set[str]:
    """What has state under its name, of optimizers that only number it."""
    return {one.name for one in zckpt.open(path).parameters.values() if "exp_avg" in one.slots}


@pytest.mark.parametrize("more", [False, True])
def test_places_in_lists_are_names_where_both_are_as_long(more):
    models, optimizers = zip(*(trained(*ALIKE) for _ in range(2)), strict=True)
    others = [body(*ALIKE)] * more  # an average, say
    path = saved({"models": [*models, *others], "optimizers": optimizers})
    if more:
        assert named(path) == set()
    else:
        its = dict(zip("01", optimizers, strict=True))
        assert_holds(path, nn.ModuleDict(dict(zip("01", models, strict=True))), its, "models.")


def test_a_place_is_no_number_of_a_model():
    (first, one), (second, two) = trained(*ALIKE), trained(*ALIKE)
    assert named(saved({"model_1": first, "module": second, "optimizers": [one, two]})) == set()
    assert named(saved({"": first, "a": second, "optimizers": [one]})) == set()


@pytest.mark.parametrize(("numbers", "is_named"), [((1, 2), False), (("", 1), True)])
def test_numbers_of_optimizers_are_those_of_models_if_all_are(numbers, is_named):
    pairs = [trained(*ALIKE) for _ in range(2)]
    models = nn.ModuleDict(dict(zip(("model", "model_1"), (model for model, _ in pairs), strict=True)))
    optimizers = {f"optimizer_{number}": optimizer for number, (_, optimizer) in zip(numbers, pairs, strict=True)}
    path = saved({**models, **optimizers})
    if is_named:
        assert_holds(path, models, optimizers)
    else:
        assert named(path) == set()


@pytest.mark.parametrize("key", ["q", "net"])
def test_an_optimizer_that_is_called_like_one_model_is_not_of_the_usual_one(key):
    model, optimizer = trained(*ALIKE)
    path = saved({key: model, "module": body(*ALIKE), f"{key}_optim": optimizer})
    assert_holds(path, model, optimizer, f"{key}.")


@pytest.mark.parametrize("is_average", [False, True])
def test_one_optimizer_of_models_alike_keeps_numbers_in_dcp(is_average):
    """Their order is not the dict's; an average beside a model is none that it has."""
    first, second = body(*ALIKE), body(*ALIKE)
    optimizer = one_of_all(*([first] if is_average else [second, first]))
    path = in_dcp({"gen": first, "ema" if is_average else "msd": second, "optimizer": optimizer})
    if is_average:
        assert_holds(path, first, optimizer, "gen.")
    else:
        assert named(path) == set()


def test_not_all_optimizers_of_the_same_names_are_the_usual_models():
    """The first was read as that of `net`, and the state of the others was not read."""
    pairs = {key: trained(*ALIKE) for key in ("backbone", "net")}
    states = {f"optimizer_{at}": get_optimizer_state_dict(*pair) for at, pair in enumerate(pairs.values())}
    path = in_dcp({**{key: model for key, (model, _) in pairs.items()}, **states})
    with refusing(UnsupportedError, "could be the optimizer of several models"):
        zckpt.open(path)


def test_the_model_beside_an_optimizer_is_its_in_dcp():
    model, optimizer = trained(*ALIKE)
    path = in_dcp({"D": {"model": body(*ALIKE)}, "G": {"model": model, "optimizer": optimizer}})
    assert_holds(path, model, optimizer, "G.model.")


def accelerates(folder, **objects) -> Path:
    """As Accelerate saves several."""
    folder.mkdir()
    for kind, its in objects.items():
        for at, one in enumerate(its):
            torch.save(one.state_dict(), folder / f"{kind}{f'_{at}' * (at > 0)}.bin")
    torch.save({"step": 2}, folder / "random_states_0.pkl")
    return folder


def test_optimizers_of_accelerates_models_are_theirs_that_can_be(tmp_path):
    """Prepared in another order than the models, or of some of them only; shapes tell, and of twins they do not."""
    models, optimizers = zip(trained(5, 4, 3), trained(5, 6, 3), strict=True)
    both = nn.ModuleDict(dict(zip(("pytorch_model", "pytorch_model_1"), models, strict=True)))
    for case, (others, its) in {"turned": ([], optimizers[::-1]), "fewer": ([body(5, 7, 3)], optimizers)}.items():
        path = accelerates(tmp_path / case, pytorch_model=[*models, *others], optimizer=its)
        assert_holds(path, both, dict(zip(("optimizer", "optimizer_1"), its, strict=True)))
    twins = [body(*ALIKE), body(*ALIKE)]
    path = accelerates(tmp_path / "twins", pytorch_model=twins, optimizer=[one_of_all(*twins[::-1])])
    assert named(path) == set()


@pytest.mark.parametrize("deep", [(), ("state",)])
@pytest.mark.parametrize("more", [("ema", "reference"), ("reference",), ("frozen",)])
def test_a_model_with_its_optimizer_further_in_comes_before_tensors_without_one(more, deep):
    model, optimizer = trained(5, 4, 1)
    other = body(5, 4, 1)
    others = {key: {"net": other, "at": torch.ones(4)} if key == "reference" and len(more) > 1 else other
              for key in more}  # fmt: skip
    app = {"model": model, "optim": optimizer, "note": 7}
    for key in deep:
        app = {key: app, "note": 8}
    checkpoint = assert_holds(saved({**others, "app": app}), model, optimizer)
    assert checkpoint.metadata.keys() == {*more, "app"}
    assert value_of(checkpoint.metadata["app"]) == ({"state": {"note": 7}, "note": 8} if deep else {"note": 7})
    path = saved({"mine": other, "best": {"model": model, "optim": optimizer}})
    assert_holds(path, other)  # and not the best so far
