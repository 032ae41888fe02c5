"""The order of parameters that zckpt knows of each type of model is that of the models at hand."""

from __future__ import annotations

import pytest
import torch
import transformers
from transformers import CONFIG_MAPPING, AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM

from zckpt.formats.transformers_trainer.architectures import architecture, architectures
from zckpt.formats.transformers_trainer.decay import group_of

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


@pytest.mark.parametrize("kind", USUAL)
def test_order_of_usual_models(kind: str) -> None:
    hold(kind)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", sorted(set(architectures()) - set(USUAL)))
def test_order_of_all_models(kind: str) -> None:
    if kind not in CONFIG_MAPPING:
        pytest.skip("not in this version")
    hold(kind)
