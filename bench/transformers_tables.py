"""Write the table of model types that the installed transformers saves under other names than it trains them with.

    python bench/transformers_tables.py        writes zckpt/formats/transformers_trainer/conversions.json

`converted`: types of which some class has conversions of its own, unless all parameters are in the same tree in the
file and in memory: each under one name, and names of a module one after the other in the model's order.
`plain`: all other types, so that one that a later version has is told from them.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path

import torch
import transformers
from transformers import CONFIG_MAPPING, AutoModel, AutoModelForCausalLM, PreTrainedModel, models
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import revert_weight_conversion

from zckpt.formats.transformers_trainer.architectures import architectures

TABLE = Path(__file__).parents[1] / "zckpt/formats/transformers_trainer/conversions.json"


def classes() -> Iterator[type[PreTrainedModel]]:
    """Yield all classes of models."""
    for one in pkgutil.walk_packages(models.__path__, "transformers.models."):
        if ".modeling_" not in one.name:
            continue
        try:
            module = importlib.import_module(one.name)
        except ImportError as error:
            print(f"left out {one.name}: {error}")
            continue
        for found in vars(module).values():
            if isinstance(found, type) and issubclass(found, PreTrainedModel) and found.__module__ == one.name:
                yield found


def has_same_tree(kind: str) -> bool:
    """Tell whether the file's names of a type are those of the same tree, in an order that is known as theirs."""
    for factory in (AutoModel, AutoModelForCausalLM):
        config = CONFIG_MAPPING[kind](num_hidden_layers=2)
        if type(config) not in factory._model_mapping:  # there is none of this type
            continue
        with torch.device("meta"):
            model = factory.from_config(config)
        live = dict(model.named_parameters())
        saved = {id(one): name for name, one in revert_weight_conversion(model, live).items()}
        if saved.keys() != {id(one) for one in live.values()}:
            return False
        last: dict[str, int] = {}
        siblings: dict[str, dict[str, None]] = {}
        for at, one in enumerate(live.values()):
            steps = saved[id(one)].split(".")
            for count, step in enumerate(steps):
                module = ".".join(steps[:count])
                if last.get(module, at - 1) != at - 1:
                    return False
                last[module] = at
                if not step.isdecimal():
                    siblings.setdefault(re.sub(r"\b[0-9]+\b", "*", module), {})[step] = None
        for module, own in siblings.items():
            order = [step for step in architectures()[kind].order(module, [*own]) if step in own]
            if order != [step for step in own if step in order]:
                return False
    return True


def table() -> dict[str, object]:
    """Return the table."""
    every, converted = set(CONFIG_MAPPING), set()
    for one in classes():
        kind = getattr(one.config_class, "model_type", None)
        if kind:
            every.add(kind)
            if any(get_checkpoint_conversion_mapping(name) is not None for name in (one.__name__, kind)):
                converted.add(kind)
    converted |= {kind for kind in every if get_checkpoint_conversion_mapping(kind) is not None}
    converted -= {kind for kind in converted & architectures().keys() if has_same_tree(kind)}
    return {
        "transformers": transformers.__version__,
        "converted": sorted(converted),
        "plain": sorted(every - converted),
    }


if __name__ == "__main__":
    TABLE.write_text(json.dumps(table(), indent=0) + "\n", encoding="utf-8")
