"""nanochat's directories: each rank saves its own share of the state of `MuonAdamW`, for one number of ranks.

DIR/model_STEP.pt               the model's state dict
DIR/optim_STEP_rankR.pt         {state, param_groups}: AdamW's moments; of each Muon group one tensor for all
DIR/meta_STEP.json              step, configurations, where the data stands

AdamW's moments are cut into equal rows, but for parameters of fewer than 1024 elements, which each rank has whole. The
matrices of a Muon group lie in one stack, under the first one's number, each rank's part padded to equal length.

Source: nanochat from January 2026 (41bb2ea) to July 2026, `nanochat/optim.py`, `GPT.setup_optimizer`.
"""

from __future__ import annotations

from zckpt.formats.format import TAG, InFolder, Job, TargetFiles
from zckpt.formats.nanochat.directory import OWNED
from zckpt.formats.options import option
from zckpt.immutable import immutable


@immutable
class RecutOptions:
    """What `reshard` can be given."""

    world_size: int = option("Ranks of the training that will load TARGET.", 1, metavar="N")


class Nanochat(InFolder):
    """A model, and a file of each rank's optimizer."""

    name = "nanochat"
    title = "nanochat"
    reads = (("nanochat", "AdamW's rows and Muon's stacks of any number of ranks; resharded to any other"),)
    takes = frozenset({TAG})
    recut_options = RecutOptions
    owns = OWNED

    def recut(self, job: Job) -> TargetFiles:
        """Return the same step for other ranks."""
        files: TargetFiles = self.module("recut").recut(job)
        return files


FORMATS = (Nanochat(),)
