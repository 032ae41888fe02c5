"""Which parameters the Trainer decays: its first param group, and the others its second.

Not decayed are those whose names say that they are a bias or of a norm, and all of a `torch.nn.LayerNorm`
(`Trainer.get_decay_parameter_names`, transformers 4.47 and later; before, those of norms went by their class).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from zckpt.formats.transformers_trainer.architectures import Architecture

_UNDECAYED = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")

DECAYED, UNDECAYED = 0, 1
"""The param groups."""


def group_of(name: str, known: Architecture) -> int:
    """Return the Trainer's param group of a parameter."""
    module = name.rpartition(".")[0].rpartition(".")[2]
    return UNDECAYED if _UNDECAYED.search(name.lower()) or module in known.layer_norms else DECAYED


def may_be_layer_norms(shapes: Mapping[str, tuple[int, ...]], known: Architecture) -> list[str]:
    """Return the modules that may be a LayerNorm, as only their class could tell: a weight and a bias of one shape."""
    found = []
    for name, shape in shapes.items():
        module, _, last = name.rpartition(".")
        alike = last == "weight" and len(shape) == 1 and shapes.get(f"{module}.bias") == shape
        if alike and not known.siblings and group_of(name, known) == DECAYED:
            found.append(module)
    return found
