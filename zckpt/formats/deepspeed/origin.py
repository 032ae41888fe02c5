"""What is kept of a checkpoint's files so that the format can be written again. Data only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from zckpt.formats.deepspeed.directory import TagDirectory
from zckpt.formats.deepspeed.shards import Files, ModelShard, OptimizerShard
from zckpt.state import Checkpoint, Duplicate, Padding, PaddingSpan, Parameter, ParamGroup
from zckpt.state.checkpoint import RankValue


@dataclass(slots=True)
class RankState:
    """Parameters, buffers and groups of one model-parallel rank; shapes are those of this rank.

    Parameters
    ----------
    degrees : list of int or None
        Over how many expert ranks each group is spread; None for a dense one. Empty where nothing says.
    lanes : int
        Tensor-parallel ranks over which experts are spread, see `expert_ranks`.
    whole : frozenset of str
        Parameters that are whole and the same on all tensor-parallel ranks, whatever the rules say: experts that are
        spread over them.
    tied : frozenset of str
        Parameters of layers that other stages of a pipeline use, too, where their names do not say so.
    transposed : bool
        Whether its files hold matrices transposed, see `zenflow`.
    """

    mp_rank: int
    parameters: dict[str, Parameter] = field(default_factory=dict)
    buffers: dict[str, Parameter] = field(default_factory=dict)
    groups: list[ParamGroup] = field(default_factory=list)
    padding: list[Padding] = field(default_factory=list)
    padding_spans: list[Iterable[PaddingSpan]] = field(default_factory=list)
    per_rank: list[RankValue] = field(default_factory=list)
    duplicates: list[Duplicate] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    expert_parallel: int = 1
    degrees: list[int | None] = field(default_factory=list)
    lanes: int = 1
    whole: frozenset[str] = frozenset()
    tied: frozenset[str] = frozenset()
    transposed: bool = False

    @classmethod
    def gathered(cls, states: Sequence[RankState]) -> RankState:
        """Return one with what each of several ranks has of its own: no parameters, buffers and groups yet."""
        found = cls(0, expert_parallel=max(state.expert_parallel for state in states))
        for state in states:
            found.padding += state.padding
            found.padding_spans += state.padding_spans
            found.per_rank += state.per_rank
            found.duplicates += state.duplicates
            found.warnings += state.warnings
        return found


@dataclass(frozen=True, slots=True)
class RankFiles:
    """The files of one model-parallel rank, and the state they describe, before slices are put together.

    Parameters
    ----------
    models : sequence of ModelShard
        One; for ZeRO-3 one for each data-parallel rank, in order.
    members : sequence of OptimizerShard
        One for each data-parallel rank, in order.
    state : RankState
        With the padding rows of a vocabulary.
    """

    models: Sequence[ModelShard]
    members: Sequence[OptimizerShard]
    state: RankState


@dataclass(frozen=True, slots=True)
class Origin:
    """The files of a checkpoint.

    Parameters
    ----------
    model : ModelShard
        The first one.
    members : sequence of OptimizerShard
        Of the first model-parallel rank.
    ranks : sequence of RankFiles
        By model-parallel rank; empty where there are no files and the checkpoint itself is the state.
    experts : sequence of (Shard, TorchFile)
        Files of experts' weights.
    expert_optimizers : sequence of (Shard, TorchFile)
        Files for the optimizer of experts, which under ZeRO hold nothing.
    layers : sequence of (Shard, TorchFile)
        Files of a pipeline's layers.
    rules : mapping or None
        How tensor-parallel slices make up parameters: the content of `universal_checkpoint_info`, or what a user gave.
    rules_path : str or None
        The file that a user gave them in.
    """

    directory: TagDirectory
    model: ModelShard
    members: Sequence[OptimizerShard]
    ranks: Sequence[RankFiles] = ()
    experts: Files = ()
    expert_optimizers: Files = ()
    rules: Mapping[str, object] | None = None
    rules_path: str | None = None
    layers: Files = ()

    @property
    def is_plain(self) -> bool:
        """Whether torch's optimizer steps by itself: stage 0 in float32, where it may have nothing in a stage."""
        held = [files.models[0].optimizer or {} for files in self.ranks]
        return not self.members and bool(held) and all("param_groups" in one for one in held)


def origin_of(checkpoint: Checkpoint) -> Origin | None:
    """Return what is kept of the files; None for a checkpoint that was not read from DeepSpeed's."""
    return checkpoint.origin if isinstance(checkpoint.origin, Origin) else None
