"""What is kept of a checkpoint's files so that the format can be written again. Data only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zckpt.formats.deepspeed.directory import TagDirectory
from zckpt.formats.deepspeed.shards import ModelShard, OptimizerShard


@dataclass(frozen=True, slots=True)
class Origin:
    """The directory, the first model file and the optimizer files of the first model-parallel rank."""

    directory: TagDirectory
    model: ModelShard
    members: Sequence[OptimizerShard]
