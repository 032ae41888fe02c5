"""The optimizer's state of parameters that a program takes apart when it saves the model, taken apart alike.

torchtitan 0.3 has queries, keys and values of a layer in one parameter. Its model is saved as three tensors; the state
of its optimizer has the name and the arrangement of the one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from zckpt.naming.document import Map
from zckpt.naming.match import Fit, of_rule
from zckpt.naming.parts import Joined, both_arranged
from zckpt.naming.sizes import Sizes, Tensor
from zckpt.state import Checkpoint, Parameter


@dataclass(frozen=True, slots=True)
class Taken:
    """State of a tensor of the other side.

    Parameters
    ----------
    parameter : Parameter
        Under the other side's name, with the slots and state of the optimizer.
    source : str
        What of the optimizer it is a part of.
    """

    parameter: Parameter
    source: str


def taken_apart(checkpoint: Checkpoint, map_: Map, found: Fit, config: Mapping[str, int]) -> list[Taken]:
    """Return the state of tensors of the other side that an optimizer has in tensors which are none of its model.

    Parameters
    ----------
    checkpoint : Checkpoint
    map_ : Map
    found : Fit
        How the model's names follow it.
    config : mapping of str to int
        Numbers of the model.

    Raises
    ------
    UsageError
        Shapes do not fit, or the configuration lacks a number.
    UnsupportedError
        State that cannot be arranged.
    """
    shapes = {name: one.shape for name, one in checkpoint.unnamed.items()}
    taken = []
    for rule in map_.optimizer[found.source]:
        for instance in of_rule(rule, rule.sides[found.source], dict.fromkeys(shapes), shapes):
            sizes = Sizes(map_, rule, config, instance.sources)
            targets = [
                Tensor(one, instance.shared, one.name(instance.shared), sizes.shape(one))
                for one in rule.sides[found.target]
            ]
            sources, made, _ = both_arranged(map_.name, instance, targets, sizes)
            (source,) = (one.name for one in instance.sources)
            joined = Joined(checkpoint, map_.name, [checkpoint.unnamed[source]], sources)
            taken += [
                Taken(joined.parameter(one.name, arrangement), source)
                for one, arrangement in zip(targets, made, strict=True)
            ]
    return taken
