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

from zckpt.formats.zero_redundancy.directory import Directory, find, is_own
from zckpt.formats.zero_redundancy.reader import read
from zckpt.formats.zero_redundancy.writer import lay_out

__all__ = ["Directory", "find", "is_own", "lay_out", "read"]
