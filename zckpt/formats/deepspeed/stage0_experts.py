"""Experts without ZeRO in several model-parallel ranks: each has optimizer files of its own.

A rank's optimizers number the parameters of its stage and its slices, dense ones and those of its experts, as those of
a checkpoint of one rank do. See `experts`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from zckpt.evidence import NAMES_BY_STAGE_ADVICE
from zckpt.formats.deepspeed.expert_optimizers import attach_experts
from zckpt.formats.deepspeed.experts import Files
from zckpt.formats.deepspeed.origin import RankFiles
from zckpt.formats.deepspeed.stage0 import has_all_names
from zckpt.formats.deepspeed.stage0_ranks import names_by_stage
from zckpt.state import Checkpoint


def attach_experts_to_ranks(
    source: str, ranks: Sequence[RankFiles], files: Files, tp: int, names: Sequence[str] | None
) -> list[str]:
    """Give each model-parallel rank the optimizers of its expert ranks, before slices and stages are put together.

    Parameters
    ----------
    files : sequence of (Shard, TorchFile)
        By model-parallel rank, and then by expert rank.
    tp : int
        Tensor-parallel ranks.
    names : sequence of str, optional
        Stage by stage, those of a rank's parameters in its optimizer's order, experts under their local numbers.

    Returns
    -------
    list of str
        Why none has an optimizer; empty where all have.

    Raises
    ------
    ShardError, UnsupportedError
        As `attach_experts`.
    """
    if any(one.state.lanes > 1 for one in ranks):
        return ["without ZeRO, the experts of several tensor-parallel ranks are numbered by each rank's own; the "
                "optimizer's state is left out"]  # fmt: skip
    given = names_by_stage(names, ranks[::tp], source)
    found: list[Checkpoint] = []
    for number, one in enumerate(ranks):
        own = Checkpoint(source, "deepspeed")
        own.parameters = {
            name: replace(p, slots=dict(p.slots), frozen=False) for name, p in one.state.parameters.items()
        }
        its = [(shard, file) for shard, file in files if (shard.mp_rank or 0) == one.state.mp_rank]
        if not its:
            return [f"{source}: no optimizer files of experts of mp_rank {one.state.mp_rank}; none is read"]
        attach_experts(own, its, one.models[0], given[number // tp])
        if not has_all_names(own):
            return [
                f"{its[0][1].path}: which parameters the optimizer numbers is not certain; its state is left out "
                f"({NAMES_BY_STAGE_ADVICE})"
            ]
        found.append(own)
    for one, own in zip(ranks, found, strict=True):
        one.state.parameters, one.state.groups[:] = own.parameters, own.param_groups
        one.state.duplicates += own.duplicates
        one.state.expert_parallel = own.topology.ep
        one.state.warnings += own.warnings
    return []
