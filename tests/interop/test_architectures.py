"""The order of parameters that zckpt knows of each type of model is that of the models at hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from transformers import CONFIG_MAPPING, AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM

from tests.pairwise import some
from zckpt.formats.torch_files.optimizer import OptimizerState
from zckpt.formats.transformers_trainer.architectures import Architecture, architecture, architectures
from zckpt.formats.transformers_trainer.readings import Weights, group_of, read_names

pytestmark = pytest.mark.interop

SHORT = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "encoder_layers", "decoder_layers",
         "num_decoder_layers")  # fmt: skip
USUAL = ["llama", "mistral", "qwen2", "qwen3", "gemma", "gpt2", "gpt_neox", "opt", "phi", "bert", "distilbert", "t5"]


def models(kind: str) -> list[torch.nn.Module]:
    """Return a model of each class, without memory and with two layers."""
    found = []
    for factory in (AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM):
        config = CONFIG_MAPPING[kind]()
        for name in SHORT:
            if isinstance(getattr(config, name, None), int):
                setattr(config, name, 2)
        try:
            with torch.device("meta"):
                found.append(factory.from_config(config))
        except (ValueError, KeyError):  # there is none of this type
            continue
    return found


def hold(kind: str) -> None:
    known = architecture(kind)
    for model in models(kind):
        names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
        by_module: dict[str, list[str]] = {}
        for name in names:
            steps = name.split(".")
            for at, step in enumerate(steps):
                if not step.isdecimal():
                    siblings = by_module.setdefault(".".join(steps[:at]), [])
                    siblings += [] if step in siblings else [step]
        for path, siblings in by_module.items():
            template = ".".join("*" if step.isdecimal() else step for step in path.split(".") if step)
            order = known.order(template, siblings)
            said = [one for one in order if one in siblings]
            assert said == [one for one in siblings if one in said], (kind, type(model).__name__, path)
        if hasattr(transformers.Trainer, "get_decay_parameter_names"):
            decayed = transformers.Trainer.get_decay_parameter_names(None, model)  # type: ignore[arg-type]
            for name in names:
                assert (group_of(name, known) == 0) == (name in decayed), (kind, name)


class OfShapes(OptimizerState):
    """An optimizer whose state is nothing but shapes."""

    def shape(self, number: int, slots: object = ()) -> tuple[int, ...] | None:
        return self.state[number]["shape"]  # type: ignore[return-value]

    def tensors(self, number: int) -> dict[str, Any]:
        return {"exp_avg": SimpleNamespace(shape=self.state[number]["shape"])}


def read_back(model: torch.nn.Module, kind: str) -> None:
    """Give all parameters the Trainer's numbers, and find their names again from sorted ones and shapes."""
    shapes = {name: tuple(one.shape) for name, one in model.named_parameters()}
    decayed = set(transformers.Trainer.get_decay_parameter_names(None, model))  # type: ignore[arg-type]
    order = sorted(shapes, key=lambda name: name not in decayed)  # stable
    counts = sum(name in decayed for name in order)
    groups = [{"params": list(range(counts))}, {"params": list(range(counts, len(order)))}]
    optimizer = OfShapes({number: {"shape": shapes[name]} for number, name in enumerate(order)}, groups)
    for known in (architecture(kind), Architecture()):
        found = read_names(optimizer, Weights(dict(sorted(shapes.items())), known=known))
        assert all(order[number] == name for number, name in found.items())
        assert len(found) == len(order) or not known.siblings, kind


@pytest.mark.parametrize("kind", some(USUAL[::2], USUAL[1::2]))
@pytest.mark.every(2)
def test_numbers_of_the_trainer_become_names_again_and_never_wrong_ones(kind):
    for model in models(kind):
        read_back(model, kind)


@pytest.mark.parametrize("kind", some(USUAL[::2], sorted({*architectures(), *USUAL} - {*USUAL[::2]})))
def test_order_of_models(kind):
    if kind not in CONFIG_MAPPING:
        pytest.skip("not in this version")
    hold(kind)
