"""Checkpoints of DeepSpeed: ZeRO-0, 1, 2, 3 and BF16_Optimizer, rigid and elastic, dense, MoE and tensor-parallel.

files       directory (their names), shards (what they hold; nested: other names), ranks (which belong together), values
layouts/    layout (what all have in common), flat (ZeRO-1, 2), per_parameter (ZeRO-3), stage0*, without_zero
axes/       tensor_parallel (tp_rules, gpt_model), pipeline (stage*, restage), experts (expert_*, auto_ep*)
read        reader: all ranks of all axes to a Checkpoint, whose files origin keeps
recut       decide: a Checkpoint and options to a target; foreign gives one of another format an origin
write       trees; writer: all files of a directory; in_place: an engine; strip
rare/       zenflow, muon, one_bit, unsaved, aliases, quantised state (quantised, requantised)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zckpt.errors import about
from zckpt.formats.deepspeed.directory import classify, find, is_own
from zckpt.formats.deepspeed.options import ConvertOptions, RecutOptions
from zckpt.formats.format import ROOTS, TAG, TP_RULES, Found, Job, NearMiss, Search, Strippable, Survey, TargetFiles
from zckpt.storage.ownership import Owned

if TYPE_CHECKING:
    from zckpt.state import Checkpoint


class DeepSpeed(Strippable):
    """Run and tag directories of DeepSpeed."""

    name = "deepspeed"
    title = "DeepSpeed"
    reads = (
        ("DeepSpeed ZeRO-1, ZeRO-2", "rigid and elastic state, round robin, parameter alignment, several param groups, "
         "padding across ranks, more ranks than elements; fp16, bf16, fp32, 16-bit masters"),
        ("DeepSpeed ZeRO-3", "sub-groups, frozen shards, uninitialised padding"),
        ("DeepSpeed BF16_Optimizer, stage 0", "even if the file names no parameters"),
        ("mixture of experts", "expert groups with their own partition counts, expert files, with tensor "
         "parallelism, in pipelines, without ZeRO; AutoEP"),
        ("other optimizers under ZeRO", "8-bit Adam is resharded in whole blocks, requantised (`--requantize`), or "
         "written as floats (`--dequantize`); LAMB and Adafactor if each rank keeps its elements, or without what "
         "`--drop` names; Muon for any number of ranks; quantised frozen layers"),
        ("tensor and pipeline parallel", "by the rules, or AutoTP's maps, in `universal_checkpoint_info`; "
         "layer files, tied layers; Megatron-DeepSpeed's models"),
    )  # fmt: skip
    writes = "a run directory that stock DeepSpeed loads"
    takes = frozenset({ROOTS, TAG, TP_RULES})
    options = ConvertOptions
    recut_options = RecutOptions
    owns = Owned(lambda name: is_own(name.rpartition("/")[2]))
    family = "deepspeed"
    keeps_ranks = True
    every_name = True
    own_metadata = frozenset({"lr_scheduler"})

    def find(self, search: Search) -> Found | NearMiss | None:
        """Find a tag directory: the path itself, what `latest` names, or the only one there."""
        path = search.path
        shard = classify(path.name, str(path)) if path.is_file() else None
        if shard is not None:
            return NearMiss(f"is the {shard.role} file of one DeepSpeed rank", f"give its directory, {path.parent}")
        directory = find(path, roots=search.roots, tag=search.tag) if path.is_dir() else None
        return Found(directory) if directory is not None else None

    def read(self, found: Found, search: Search) -> Checkpoint:
        """Read the structure of every rank's files."""
        from zckpt.formats.deepspeed.reader import read

        with about(found.place.path):
            return read(found.place, names=search.names, tp_rules=search.tp_rules)

    def renames(self, checkpoint: Checkpoint) -> bool:
        """Tell whether a checkpoint is a pipeline's, whose layers get the names of one model."""
        from zckpt.formats.deepspeed.axes.pipeline import is_of_layer

        return any(map(is_of_layer, checkpoint.parameters))

    def recut(self, job: Job) -> TargetFiles:
        """Return a run or a tag directory, as the source is one."""
        from zckpt.formats.deepspeed.writer import recut

        return recut(job)

    def survey(self, search: Search, found: Found | None) -> Survey:  # noqa: ARG002
        """Read every rank's files, and hold those that can be read against each other."""
        if found is None:
            return Survey()
        from zckpt.formats.deepspeed.ranks import survey

        return survey(found.place)

    def follows(self, key: str, values: tuple[object, object], sides: tuple[Checkpoint, Checkpoint]) -> bool:
        """Tell what follows from ranks and stage, and what DeepSpeed keeps for itself."""
        from zckpt.formats.deepspeed.following import follows

        return follows(key, values, sides)


FORMATS = (DeepSpeed(),)
