"""A checkpoint as the files of a DeepSpeed run directory. Lays out; writes nothing."""

from __future__ import annotations

from pathlib import Path

from zckpt.formats import torch_archive
from zckpt.formats.deepspeed.target import Options, Target, decide
from zckpt.formats.deepspeed.write_model import model_tree
from zckpt.formats.deepspeed.write_optimizer import optimizer_tree
from zckpt.plan import Literal, TargetFile
from zckpt.state import Checkpoint


def lay_out(checkpoint: Checkpoint, options: Options, *, run_directory: bool) -> list[TargetFile]:
    """Return the files of a checkpoint cut anew.

    Parameters
    ----------
    checkpoint : Checkpoint
        Read from DeepSpeed's files.
    options : Options
    run_directory : bool
        Whether the target is a run directory, with `latest` and the tag's directory in it, or the latter alone.

    Raises
    ------
    UsageError, UnsupportedError
        As `decide`.
    """
    target = decide(checkpoint, options)
    tag = target.origin.directory.tag
    folder = f"{tag}/" if run_directory else ""
    files = [torch_archive.lay_out(f"{folder}{name}", model_tree(target, rank)) for rank, name in _models(target)]
    for rank in range(target.world_size):
        name = f"{folder}{_prefix(target)}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        files.append(torch_archive.lay_out(name, optimizer_tree(target, rank)))
    if run_directory:
        files.append(TargetFile("latest", len(tag.encode()), [Literal(0, tag.encode())]))
    return files


def _models(target: Target) -> list[tuple[int, str]]:
    if target.stage != 3:
        return [(0, "mp_rank_00_model_states.pt")]
    return [(rank, f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt") for rank in range(target.world_size)]


def _prefix(target: Target) -> str:
    """Return what the source's optimizer files begin with: `bf16_` for bf16 models."""
    name = Path(target.origin.members[0].path).name
    return name[: name.index("zero_pp_rank")]
