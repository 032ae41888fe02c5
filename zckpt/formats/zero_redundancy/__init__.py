"""Checkpoints of PyTorch's `ZeroRedundancyOptimizer`: each rank has whole parameters, assigned largest first.

What zckpt writes:

DIR/model.pt                the model's state dict
DIR/optimizer.pt            consolidated {state, param_groups} by global number: `optimizer.load_state_dict`
DIR/optimizer_rank_R.pt     or per rank, by local number: `optimizer.optim.load_state_dict` on rank R
DIR/metadata.pt             everything else, and the order of the optimizer's parameters

torch copies the hyperparameters of `optimizer.param_groups` over the local ones before each step, so that whoever
loads ranks' files copies them the other way first. It also writes into the dict that `load_state_dict` is given.

What it reads: that; and what programs write, one file for each rank under any name with the rank in it, the model
in a file next to them or in each of them. A consolidated file by itself is any file of `torch.save`.
"""

from __future__ import annotations

from pathlib import Path

from zckpt.formats.options import dtype_option, option
from zckpt.formats.torch_files import TorchDirectory
from zckpt.formats.zero_redundancy.directory import OWNED
from zckpt.immutable import immutable


@immutable
class Options:
    """What `convert --to zero-redundancy` can be given."""

    world_size: int | None = option(
        "Also write a file for each of N ranks. Default: only the consolidated state.", metavar="N"
    )
    dtype: str = dtype_option()


class ZeroRedundancy(TorchDirectory):
    """PyTorch's ZeroRedundancyOptimizer."""

    name = "zero-redundancy"
    title = "ZeroRedundancyOptimizer"
    reads = (("ZeroRedundancyOptimizer", "consolidated, or one file per rank; fairscale's OSS, too"),)
    writes = "PyTorch's ZeroRedundancyOptimizer; with --world-size, also each rank's file"
    options = Options
    owns = OWNED
    every_name = True

    def is_checkpoint(self, directory: Path) -> bool:  # noqa: ARG002
        """Tell none: names alone do not tell such a directory."""
        return False


FORMATS = (ZeroRedundancy(),)
