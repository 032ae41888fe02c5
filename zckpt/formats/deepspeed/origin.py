"""What is kept of a checkpoint's files so that the format can be written again. Data only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import TYPE_CHECKING, Any

from zckpt.formats.deepspeed.axes.tp_rules import Rules
from zckpt.formats.deepspeed.directory import TagDirectory
from zckpt.formats.deepspeed.shards import Files, ModelShard, OptimizerShard
from zckpt.immutable import immutable, mutable
from zckpt.state import Checkpoint, Topology

if TYPE_CHECKING:
    from zckpt.formats.deepspeed.axes.auto_ep import AutoLayer
    from zckpt.formats.deepspeed.target import TargetGroup, Unpartitioned


@mutable
class Rank(Checkpoint):
    """One model-parallel rank: its files, and what they hold before slices and stages are put together.

    Shapes are those of this rank, with the padding rows of a vocabulary.
    """

    mp_rank: int = 0
    model_files: Sequence[ModelShard] = ()
    """One; for ZeRO-3 one for each data-parallel rank, in order. Of a target those of the source from which the rest is
    carried: a rank that is not there takes from the first.
    """
    members: Sequence[OptimizerShard] = ()  # one for each data-parallel rank, in order; of a target as `model_files`
    degrees: list[int | None] = field(default_factory=list)
    """Over how many expert ranks each group is spread; None for a dense one. Empty where nothing says."""
    lanes: int = 1  # tensor-parallel ranks over which experts are spread, see `expert_ranks`
    whole: frozenset[str] = frozenset()
    """Parameters that are whole and the same on all tensor-parallel ranks, whatever the rules say: experts that are
    spread over them.
    """
    tied: frozenset[str] = frozenset()
    """Parameters of layers that other stages of a pipeline use, too, where their names do not say so."""
    transposed: bool = False  # whether its files hold matrices transposed, see `zenflow`
    auto: Mapping[str, AutoLayer] = field(default_factory=dict)
    """Of a target, by the names of AutoEP's tensors, which are rows of one tensor; DeepSpeed's experts are parameters
    of their own.
    """
    groups: list[TargetGroup] = field(default_factory=list)  # of a target: the param groups as it cuts them
    unpartitioned: Unpartitioned | None = None
    """Of a target: how its optimizer is held at stage 0; None where there is none."""

    @property
    def model(self) -> ModelShard:
        """The first of its model files."""
        return self.model_files[0]

    def emptied(self, **fields: Any) -> Rank:  # noqa: ANN401  # fields of this class
        """Return a rank of the same files of which nothing else is known yet."""
        return Rank(self.source, self.format, model_files=self.model_files, members=self.members, **fields)


def gathered(ranks: Sequence[Rank], **fields: Any) -> Rank:  # noqa: ANN401  # fields of `Rank`
    """Return a rank with what each of several has of its own: no parameters, buffers and groups yet."""
    first, topology = ranks[0], Topology(ep=max(one.topology.ep for one in ranks))
    found = first.emptied(topology=topology, unnamed=first.unnamed, loss_scale=first.loss_scale,
                          optimizer_metadata=first.optimizer_metadata, **fields)  # fmt: skip
    found.is_numbered = first.is_numbered and len(ranks) == 1
    for one in ranks:
        found.padding += one.padding
        found.padding_spans += one.padding_spans
        found.per_rank += one.per_rank
        found.duplicates += one.duplicates
        found.warnings += one.warnings
    return found


def by_stage(ranks: Sequence[Rank], tp: int) -> list[Sequence[Rank]]:
    """Return the tensor-parallel ranks of each stage of a pipeline; where there is none, of the one."""
    return [ranks[first : first + tp] for first in range(0, len(ranks), tp)]


@immutable
class Origin:
    """The files of a checkpoint, or what takes their place in one of another format."""

    directory: TagDirectory
    ranks: Sequence[Rank]  # by model-parallel rank; of another format one, which is the whole of it
    experts: Files = ()  # files of experts' weights
    expert_optimizers: Files = ()  # files for the optimizer of experts, which under ZeRO hold nothing
    rules: Mapping[str, object] | None = None
    """How tensor-parallel slices make up parameters: the content of `universal_checkpoint_info`, or what a user gave.
    """
    rules_path: str | None = None  # the file that a user gave them in
    layers: Files = ()  # files of a pipeline's layers

    @property
    def model(self) -> ModelShard:
        """The first model file."""
        return self.ranks[0].model

    @property
    def members(self) -> Sequence[OptimizerShard]:
        """The optimizer files of the first model-parallel rank that has some."""
        return next((rank.members for rank in self.ranks if rank.members), ())

    @property
    def every_member(self) -> list[OptimizerShard]:
        """The optimizer files of all ranks."""
        return [member for rank in self.ranks for member in rank.members]

    @property
    def slicing(self) -> Rules:
        """How its slices make up parameters. Raises UnsupportedError: rules that cannot be followed."""
        return Rules(self.rules or {}, self.rules_path or self.model.path)

    @property
    def is_foreign(self) -> bool:
        """Whether there are no files, for the checkpoint is of another format."""
        return not self.model.file.path


def origin_of(checkpoint: Checkpoint) -> Origin | None:
    """Return what is kept of the files; None for a checkpoint that was not read from DeepSpeed's."""
    return checkpoint.origin if isinstance(checkpoint.origin, Origin) else None
