"""`consolidate --model` writes an average, or one of several models, as its program would have saved it by itself."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import zckpt
from tests.folders import names_in
from tests.live import trained
from tests.refusals import refusing
from tests.truth import assert_same
from zckpt.errors import UsageError

Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def states() -> tuple[Tensors, Tensors, list[torch.Tensor], dict[str, Any]]:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 4, bias=False)]
    model, optimizer = trained(torch.nn.Sequential(*layers))
    average = copy.deepcopy(model)
    for tensor in (*average.parameters(), average[1].running_mean):
        tensor.data = torch.randn_like(tensor)
    return model.state_dict(), average.state_dict(), [*average.parameters()], optimizer.state_dict()


def named(front: str, tensors: Tensors) -> Tensors:
    return {f"{front}{name}": one for name, one in tensors.items()}


FORMS = {
    "ema": lambda m, a, _: {"model": m, "ema": a},
    "swa": lambda m, a, _: {"model": m, "swa": {**named("module.", a), "n_averaged": torch.tensor(2)}},
    "ema.ema_model": lambda m, a, _: {"model": m, "ema": {**named("ema_model.", a), **named("online_model.", m)}},
    "ema.shadow": lambda m, a, _: {"model": named("_orig_mod.", m), "ema": {"shadow": a, "decay": 0.5}},
    "callbacks.EMA": lambda m, a, _: {"state_dict": named("net.", m), "callbacks": {"EMA": {"step": 2, "weights": a}}},
    "ema.params": lambda m, a, _: {"model": named("net.", m), "ema": {"params": named("module.", a), "n": 2}},
    "ema.same": lambda m, a, _: {"state_dict": named("net.", m), "ema": {"same": named("net.", a)}},
    "G_ema": lambda m, a, _: {"G": m, "D": {"weight": torch.ones(2, 3)}, "G_ema": a},
    "shadows": lambda m, _, every: {"model": m, "shadows": {"decay": 0.5, "shadow_params": every}},
}


@pytest.mark.parametrize("key", FORMS)
def test_an_average_is_written_under_the_models_names(key, states):
    model, average, every, optimizer = states
    content = FORMS[key](model, average, every)
    if key == "ema.params":  # of a part, which alone is trained
        content["model"] = {**named("unet.", content["model"]), "vae.weight": torch.ones(2)}
    torch.save({**content, "optimizer": optimizer} if "G" not in content else content, "ckpt.pt")
    zckpt.consolidate("ckpt.pt", "m.safetensors", model=key)
    found, front = load_file("m.safetensors"), "net." if "state_dict" in content else ""
    if key == "ema.params":
        assert_same(found.pop("vae.weight"), torch.ones(2), "vae.weight")
        front = "unet.net."
    assert found.keys() == named(front, average).keys()
    for name, one in average.items():
        of_model = key == "shadows" and name.startswith(("1.running", "1.num"))  # a list has parameters only
        assert_same(found[front + name], model[name] if of_model else one, name)


def test_an_average_whose_names_have_no_dots_is_the_models(states):
    """LitEma's, of Stable Diffusion, has parameters only, and a step beside them."""
    model, average, _, _ = states
    own = [name for name in model if not name.startswith(("1.running", "1.num"))]
    flat = {f"model_ema.{name.replace('.', '')}": average[name] for name in own}
    beside = {"model_ema.decay": torch.tensor(0.5), "model_ema.num_updates": torch.tensor(2), "vae.w": torch.ones(2)}
    torch.save({"state_dict": {**named("model.", model), **flat, **beside}}, "sd.ckpt")
    zckpt.consolidate("sd.ckpt", "m.safetensors", model="model_ema")
    found = load_file("m.safetensors")
    assert found.keys() == {*named("model.", model), "vae.w"}
    for name, one in model.items():
        assert_same(found[f"model.{name}"], average[name] if name in own else one, name)
    other = {**named("model.", model), **beside, "model_ema.0weight": torch.ones(3)}  # of another model
    torch.save({"state_dict": other}, "other.ckpt")
    zckpt.consolidate("other.ckpt", "other.safetensors", model="model_ema")
    assert load_file("other.safetensors").keys() == {"0weight", "decay", "num_updates"}


def test_it_goes_through_every_format_and_into_other_names_and_types(states):
    model, average, _, optimizer = states
    torch.save({"model": model, "ema": average, "optimizer": optimizer}, "ckpt.pt")
    for to, options in {"dcp": {"world_size": 2}, "deepspeed": {"world_size": 3, "stage": 3}, "zckpt": {}}.items():
        zckpt.convert("ckpt.pt", to, to=to, **options)
        target = f"{to}.safetensors"
        zckpt.consolidate(to, target, model="ema", dtype="bfloat16", add_prefix="x.")
        for name, one in load_file(target).items():
            expected = average[name.removeprefix("x.")]
            is_buffer = name.startswith(("x.1.running", "x.1.num"))
            assert_same(one, expected if is_buffer else expected.bfloat16(), name)


def test_a_part_of_a_model_has_its_own_names_and_not_the_models_configuration(states):
    model, average, _, _ = states
    torch.save({"model": {**named("a.net.", model), **named("b.", average)}}, "model.pt")
    Path("config.json").write_text("{}")
    norm = {name.removeprefix("1."): one for name, one in average.items() if name.startswith("1.")}
    for key, expected in {"a": named("net.", model), "a.net": model, "b": average, "b.1": norm}.items():
        written = zckpt.consolidate("model.pt", key, model=key, dtype="float16")
        assert names_in(key) == ["model.safetensors"]
        assert any("no config.json was found" in note for note in written.notes)
        found = load_file(f"{key}/model.safetensors")
        assert found.keys() == expected.keys()
        for name, one in expected.items():
            is_buffer = "running" in name or "num_batches" in name
            assert_same(found[name], one if is_buffer else one.half(), name)
    zckpt.consolidate("model.pt", "whole")
    assert Path("whole/config.json").exists()


def test_what_is_no_model_is_refused(states):
    model, average, every, optimizer = states
    two = {**named("ema_model.", average), **named("online_model.", model)}
    torch.save({"model": model, "ema": two, "more": {"0.weight": every[0]}, "optimizer": optimizer}, "m.pt")
    for key, words in {
        "ema": "no model under the key ema: .*found ema.ema_model, ema.online_model",
        "more": "no model under the key more: expected all of the model's parameters",
        "average": "no model under the key average: expected ema, more, found nothing there",
    }.items():
        with refusing(UsageError, words):
            zckpt.consolidate("m.pt", "t.safetensors", model=key)
    with refusing(UsageError, "--model writes no optimizer"):
        zckpt.consolidate("m.pt", "t.safetensors", model="ema.ema_model", slots="all")


@pytest.mark.parametrize("model_file", ["pytorch_model.bin", "model.safetensors"])
def test_a_list_of_weights_beside_safetensors_which_have_no_order_is_refused(model_file, states):
    """As Accelerate saves an average that is registered for checkpointing."""
    model, average, every, optimizer = states
    folder = Path("state")
    folder.mkdir()
    (save_file if model_file.endswith(".safetensors") else torch.save)(model, folder / model_file)
    torch.save(optimizer, folder / "optimizer.bin")
    torch.save({"shadow_params": every, "decay": 0.5}, folder / "custom_checkpoint_0.pkl")
    torch.save({"step": 1}, folder / "random_states_0.pkl")
    options: dict[str, Any] = {"model": "custom_checkpoint_0", "dtype": "keep"}
    if model_file.endswith(".safetensors"):
        with refusing(
            UsageError, "no model under the key custom_checkpoint_0: .*found shadow_params.0, shadow_params.1"
        ):
            zckpt.consolidate(folder, "t.safetensors", **options)
        return
    zckpt.consolidate(folder, "t.safetensors", **options)
    assert_same(load_file("t.safetensors")["0.weight"], average["0.weight"], "0.weight")
