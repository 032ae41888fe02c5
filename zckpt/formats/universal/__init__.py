"""DeepSpeed's universal checkpoints: one folder for each parameter, loaded at any number of ranks.

What DeepSpeed 0.19's loaders take of one (`"checkpoint": {"load_universal": true}`), and what they cannot, whatever is
in the files:

- Frozen parameters and buffers are not loaded at all; the training has to bring them. The model file has them.
- ZeRO-1 and 2 load every slot, and every param group's hyperparameters. A rank that holds nothing of a param group
  stops with an IndexError. All parameters of a group must have the same step. With `round_robin_gradients` they take
  parameters for one another, except in param groups that `parameter_alignment` pads.
- Experts are looked up by their numbers on a rank: where they are spread over several, all get those of the first.
  AutoEP's are one tensor, marked as such, of which each takes its own.
- ZeRO-3 loads `exp_avg` and `exp_avg_sq` and no other slot, one step for all groups, and gives every group the
  hyperparameters of the first. So that no group gets wrong ones, only those that all groups have in common are
  written where it looks; the others stay as the training has set them. Its groups share one step: where that is a
  tensor (`torch.optim`), every group counts it up. What it would load wrongly is written so that it stops instead.
"""

from __future__ import annotations

from pathlib import Path

from zckpt.formats.format import TAG, TP_RULES, Found, Job, NearMiss, Search, Strippable, Survey, TargetFiles
from zckpt.formats.universal.directory import FOLDER, LATEST_NAME, find, is_own
from zckpt.storage.ownership import Owned


class Universal(Strippable):
    """DeepSpeed's universal checkpoints."""

    name = "universal"
    title = "DeepSpeed universal"
    reads = (("DeepSpeed universal", "DeepSpeed's own form for Adam; zckpt's form for any optimizer"),)
    writes = "DeepSpeed's universal checkpoint, for any optimizer"
    takes = frozenset({TAG, TP_RULES})  # it has no slices, so that rules for them change nothing
    owns = Owned(is_own)
    family = "deepspeed"
    every_name = True

    def find(self, search: Search) -> Found | NearMiss | None:
        """Find its directory, or the one that `latest_universal` names."""
        directory = find(search.path, tag=search.tag) if search.path.is_dir() else None
        return Found(directory) if directory is not None else None

    def lay_out(self, job: Job) -> TargetFiles:
        """Return a folder for each parameter, the model, and the file next to the directory, which names it."""
        from zckpt.engine.targets import TargetFile
        from zckpt.formats.deepspeed.foreign import as_engines_group, groups_left_out
        from zckpt.formats.registry import find_format
        from zckpt.formats.universal.writer import lay_out

        checkpoint = as_engines_group(job.checkpoint)
        own = find_format(job.checkpoint.format)
        version = job.checkpoint.format_version if own is not None and own.family == self.family else None
        files, notes = lay_out(checkpoint, version)
        outside = [TargetFile.of(LATEST_NAME, job.target.name.encode())]
        return TargetFiles(files, outside=outside, notes=[*groups_left_out(job.checkpoint, checkpoint), *notes])

    def survey(self, search: Search, found: Found | None) -> Survey:
        """Read every file; an error about one in a folder is about the parameter of that name."""
        from zckpt.formats.survey import survey_files

        surveyed = survey_files(search.path) if found is not None else Survey()
        for error in surveyed.errors:
            path = Path(error.path or "")
            if path.parent.parent.name == FOLDER:
                error.parameters = (path.parent.name,)
        return surveyed


FORMATS = (Universal(),)
