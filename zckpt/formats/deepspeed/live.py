"""What a live engine of DeepSpeed is, to those who lay out files for it: data only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from zckpt.formats.deepspeed.options import RecutOptions
from zckpt.formats.deepspeed.write_stage0 import Unpartitioned


@dataclass(frozen=True, slots=True)
class Pipeline:
    """How the layers of a live pipeline are dealt.

    Parameters
    ----------
    bounds : tuple of int
        The first layer of each stage and, last, how many there are.
    tied : list of (str or None)
        Of each layer, the key under which it is tied with others.
    stage : int
        Which stage this rank is of.
    """

    bounds: tuple[int, ...]
    tied: Sequence[str | None]
    stage: int

    @property
    def stages(self) -> int:
        """How many there are."""
        return len(self.bounds) - 1

    @property
    def layers(self) -> range:
        """Those of this rank's stage."""
        return range(self.bounds[self.stage], self.bounds[self.stage + 1])

    def options(self, options: RecutOptions) -> RecutOptions:
        """Return options with these stages."""
        listed = ",".join("layer" if key is None else f"layer={key}" for key in self.tied)
        bounds = ",".join(map(str, self.bounds))
        return replace(options, pipeline_parallel_size=self.stages, stage_bounds=bounds, pipeline_layers=listed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """How a live engine cuts its state, and what it has. Names are those of its module.

    Parameters
    ----------
    world_size, rank : int
        Data-parallel ranks over which it cuts, and which of them this is.
    tensor_parallel, mp_rank : int
        Model-parallel ranks, and which of them this is.
    stage : {0, 1, 2, 3}
    round_robin, alignment, bf16_optimizer : bool
    sub_group_size : int, elements
        Of ZeRO-3.
    dtype : str
        Of the trained parameters.
    groups : list of list of str
        The trained parameters of each param group, in the optimizer's order.
    stored : list of dict of str to shape
        Those of each partition (a group; of ZeRO-3 a sub-group) in the order in which they lie in it.
    partitions : list of int, elements
        The size of each, on this rank.
    names : list of list of str
        All names of each parameter of the module, trained or not: several where it is tied.
    unpartitioned : Unpartitioned or None
        At stage 0: the form in which the optimizer takes its state; None where there is no optimizer.
    pipeline : Pipeline or None
        All else is then of this rank's stage.
    hyperparameters : list of dict
        Those of each param group, as they are now.
    """

    world_size: int
    rank: int
    tensor_parallel: int
    mp_rank: int
    stage: int
    round_robin: bool
    alignment: bool
    bf16_optimizer: bool
    sub_group_size: int
    dtype: str
    groups: Sequence[Sequence[str]]
    stored: Sequence[Mapping[str, tuple[int, ...]]]
    partitions: Sequence[int]
    names: Sequence[Sequence[str]]
    unpartitioned: Unpartitioned | None = None
    pipeline: Pipeline | None = None
    hyperparameters: Sequence[Mapping[str, object]] = ()

    @property
    def numbered(self) -> Sequence[Sequence[str]]:
        """The parameters of each param group as the optimizer that the user gave numbers them."""
        return self.groups if self.unpartitioned is None else self.unpartitioned.numbered

    def __str__(self) -> str:
        """Say it as a message does."""
        sliced = f" x {self.tensor_parallel} tensor-parallel" if self.tensor_parallel > 1 else ""
        sliced += "" if self.pipeline is None else f" x {self.pipeline.stages} pipeline-parallel"
        return f"{self.world_size}{sliced} ranks of {f'ZeRO-{self.stage}' if self.stage else 'stage 0'}"
