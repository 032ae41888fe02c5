"""One case of a checkpoint that is cut for other ranks, from which stock DeepSpeed then goes on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zckpt
from tests.deepspeed_engine import Spec, resume

TOLERANCE = {"fp32": 2e-5, "bf16": 3e-2, "fp16": 3e-2}
"""Of losses near 4: another number of ranks adds up the same gradients in another order. In 16 bits these are summed in
16 bits, and the early steps of Adam, which divide by a moment that is still small, make much of the difference."""

TRAINED = {
    "tensor_parallel_size": "tensor_parallel", "pipeline_parallel_size": "pipeline_parallel",
    "expert_parallel_size": "expert_parallel", "partition_method": "partition_method", "stage": "stage",
    "round_robin": "round_robin", "parameter_alignment": "parameter_alignment",
}  # fmt: skip
"""What options of `reshard` are called in the description of a training."""


def spec(name: str, **changes: Any) -> Spec:
    return Spec(name, **{"world_size": 4, "steps": 2, "steps_after": 2, **changes})


def small(name: str, **changes: Any) -> Spec:
    """For what does not depend on how many ranks there are, as long as their number changes."""
    return spec(name, **{"world_size": 3, "groups": 2, **changes})


@dataclass(frozen=True)
class Cut:
    """A source, the options of `reshard`, what else the training that goes on has otherwise, and a format between."""

    source: Spec
    options: Mapping[str, Any]
    training: Mapping[str, Any] = field(default_factory=dict)
    through: str = ""

    def __str__(self) -> str:
        ranks, *others = self.options.items()
        through = [self.through] if self.through else []
        names = [f"{self.source.name}-to-{ranks[1]}", *through, *(f"{key}={value}" for key, value in others)]
        return "-".join(names)[:90]

    @property
    def resumed(self) -> Spec:
        """The training that goes on."""
        same = {TRAINED[key]: value for key, value in self.options.items() if key in TRAINED}
        its = self.source.at(0, **same, **self.training)
        return its.at(self.options["world_size"] * its.tensor_parallel * its.pipeline_parallel)

    def assert_goes_on(self, folder: Path, target: Path, within: float | None = None, **options: Any) -> None:
        """Write the target, and hold all that DeepSpeed loads of it and the next losses against the truth."""
        options = {**self.options, **options}
        if self.through:
            between = target.with_name("between")
            zckpt.convert(folder, between, to=self.through)
            zckpt.convert(between, target, to="deepspeed", **{"stage": self.source.stage, **options})
        else:
            zckpt.reshard(folder, target, **options)
        verdict = resume(target, self.resumed, folder)
        verdict.assert_goes_on(TOLERANCE[self.source.dtype] if within is None else within)
        assert len(verdict.losses) == self.source.steps_after


def cut(
    source: Spec, world_size: int, training: Mapping[str, Any] | None = None, *, through: str = "", **options: Any
) -> Cut:
    return Cut(source, {"world_size": world_size, **options}, training or {}, through)
