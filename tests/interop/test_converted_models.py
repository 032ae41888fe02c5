"""Models that transformers 5 has in memory under other names, and in other tensors, than in its files."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from transformers import CONFIG_MAPPING, AutoModel

import zckpt
from zckpt.formats.transformers_trainer.architectures import is_converted

pytestmark = [
    pytest.mark.interop,
    pytest.mark.skipif(int(transformers.__version__.partition(".")[0]) < 5, reason="files have names as in memory"),
]

TINY = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}


def trained(config, directory):
    """Save a model and the Trainer's optimizer of it after a step; return its moments by name in memory."""
    torch.manual_seed(0)
    model = AutoModel.from_config(config)
    decayed = set(transformers.Trainer.get_decay_parameter_names(None, model))  # type: ignore[arg-type]
    every = dict(model.named_parameters())
    groups = [[p for name, p in every.items() if (name in decayed) == is_decayed] for is_decayed in (True, False)]
    optimizer = torch.optim.AdamW([{"params": groups[0], "weight_decay": 0.1}, {"params": groups[1]}], lr=1e-2)
    for one in every.values():
        one.grad = torch.randn_like(one)
    optimizer.step()
    model.save_pretrained(directory)
    torch.save(optimizer.state_dict(), directory / "optimizer.pt")
    return {name: (one.detach(), optimizer.state[one]["exp_avg"]) for name, one in every.items()}


@pytest.mark.parametrize("kind", ["vit", "beit", "deit"])
def test_no_number_gets_another_parameters_name(kind, tmp_path):
    """Of equal shapes in a layer, the file's names are in another order than those in memory."""
    truth = trained(CONFIG_MAPPING[kind](**TINY, image_size=8, patch_size=4), tmp_path)
    found = zckpt.open(tmp_path)
    for name, one in found.parameters.items():
        if "exp_avg" in one.slots:
            weight, moment = found.read(name, "weight"), found.read(name, "exp_avg")
            assert any(torch.equal(weight, w) and torch.equal(moment, m) for w, m in truth.values()), name
    assert found.unnamed
    assert any("--names" in warning for warning in found.warnings)


@pytest.mark.parametrize(
    ("kind", "version", "converted"),
    [("vit", "5.23.0", True), ("vit", "4.57.1", False), ("llama", "5.23.0", False), ("llama", "9.0", False),
     ("of_next_year", "9.0.0", True), ("of_next_year", "5.0.0", False), ("vit", None, False), ("vit", "?", False)],
)  # fmt: skip
def test_type_and_version_tell(kind, version, converted):
    config = {"model_type": kind, **({} if version is None else {"transformers_version": version})}
    assert is_converted(config) == converted
    parts = {"model_type": "of_mine", "vision_config": config, "transformers_version": version}
    assert is_converted(json.loads(json.dumps(parts))) == (converted or version in ("9.0", "9.0.0", "4.57.1"))
