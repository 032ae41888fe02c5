"""A checkpoint as the files of a DeepSpeed run directory. Lays out; writes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from zckpt.engine.plan import Literal, TargetFile
from zckpt.formats import torch_archive
from zckpt.formats.deepspeed.target import Target, TargetRank
from zckpt.formats.deepspeed.write_model import model_tree
from zckpt.formats.deepspeed.write_optimizer import optimizer_tree
from zckpt.torchfile import FromFile


def target_files(target: Target, *, run_directory: bool) -> list[TargetFile]:
    """Return the files of a target, as `decide` has decided on it.

    Parameters
    ----------
    target : Target
    run_directory : bool
        Whether they are a run directory, with `latest` and the tag's directory in it, or the latter alone.
    """
    tag = target.origin.directory.tag
    folder = f"{tag}/" if run_directory else ""
    files = []
    for mp in target.ranks:
        for rank, name in _models(target, mp):
            files.append(torch_archive.lay_out(f"{folder}{name}", model_tree(target, mp, rank)))
    for shard, file in target.origin.experts:
        # Named and numbered over all ranks, they are the same at any number of ranks.
        files.append(torch_archive.lay_out(f"{folder}{Path(shard.path).name}", FromFile.of(file, file.root)))
    of_experts = target.origin.expert_optimizers
    degree = max((len(group.experts) for mp in target.ranks for group in mp.groups), default=1)
    for rank in range(degree) if of_experts else ():
        shard, file = of_experts[min(rank, len(of_experts) - 1)]  # they hold nothing
        name = f"expp_rank_{rank}_mp_rank_{shard.mp_rank or 0:02d}_optim_states.pt"
        files.append(torch_archive.lay_out(f"{folder}{name}", FromFile.of(file, file.root)))
    for mp in target.ranks:
        for rank in range(target.world_size):
            name = f"{folder}{_prefix(target)}zero_pp_rank_{rank}_mp_rank_{mp.mp_rank:02d}_optim_states.pt"
            files.append(torch_archive.lay_out(name, optimizer_tree(target, mp, rank)))
    if run_directory:
        files.append(TargetFile("latest", len(tag.encode()), [Literal(0, tag.encode())]))
    return files


def _models(target: Target, mp: TargetRank) -> Iterator[tuple[int, str]]:
    """Yield the data-parallel rank and the name of each model file of a model-parallel rank."""
    if target.stage != 3:
        yield 0, f"mp_rank_{mp.mp_rank:02d}_model_states.pt"
        return
    for rank in range(target.world_size):
        yield rank, f"zero_pp_rank_{rank}_mp_rank_{mp.mp_rank:02d}_model_states.pt"


def _prefix(target: Target) -> str:
    """Return what the source's optimizer files begin with: `bf16_` for bf16 models."""
    name = Path(target.origin.members[0].path).name
    return name[: name.index("zero_pp_rank")]
