"""What is wrong with the files of a DeepSpeed checkpoint that cannot be opened, of each by itself and of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from zckpt.errors import SourceError
from zckpt.formats.deepspeed.directory import EXPERT, MODEL, OPTIMIZER, PIPELINE_LAYER, TagDirectory
from zckpt.formats.deepspeed.ranks import problems
from zckpt.formats.deepspeed.shards import ModelShard, OptimizerShard, read_model, read_optimizer
from zckpt.formats.survey import Survey
from zckpt.formats.torch_files.tensors import describe
from zckpt.state import SourceFile
from zckpt.torchfile import read_torchfile

Unread = list[tuple[str, int, int]]
"""Role, model- and data-parallel rank of files that are there and cannot be read."""


def survey(directory: TagDirectory) -> Survey:
    """Return the files that can be read, and an error for each other one and for what ranks disagree on."""
    files: list[SourceFile] = []
    errors: list[SourceError] = []
    models: list[ModelShard] = []
    shards: list[OptimizerShard] = []
    unread: Unread = []
    for shard in directory.shards:
        try:
            if shard.role == MODEL:
                models.append(read_model(shard))
                file = models[-1].file
            elif shard.role == OPTIMIZER:
                shards.append(read_optimizer(shard))
                file = shards[-1].file
            elif shard.role in (EXPERT, PIPELINE_LAYER):
                file = read_torchfile(shard.path)
            else:
                continue
            files.append(describe(file, shard.role, shard.dp_rank, shard.mp_rank))
        except SourceError as error:
            if not error.ranks and shard.dp_rank is not None:
                error.ranks = (shard.dp_rank,)
            unread.append((shard.role, shard.mp_rank or 0, shard.dp_rank or 0))
            errors.append(error)
    return Survey(files, [*errors, *_disagreements(directory, models, shards, unread)])


def _disagreements(
    directory: TagDirectory, models: Sequence[ModelShard], shards: Sequence[OptimizerShard], unread: Unread
) -> Iterator[SourceError]:
    for mp_rank in sorted({m.shard.mp_rank or 0 for m in models} | {s.shard.mp_rank or 0 for s in shards}):
        own = [m for m in models if (m.shard.mp_rank or 0) == mp_rank]
        its = [s for s in shards if (s.shard.mp_rank or 0) == mp_rank]
        there = [rank for role, mp, rank in unread if role == OPTIMIZER and mp == mp_rank]
        if own and (its or there):
            yield from problems(directory.path, own, its, mp_rank, there)
