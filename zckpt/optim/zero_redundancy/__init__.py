"""PyTorch's ZeroRedundancyOptimizer: whole parameters handed to ranks, each of which steps its own.

partitioned    which rank has which parameter, and its local optimizer
state_dicts    giving state away and taking it in
optimizer      the class: the step, alone or along with DDP
exchange       how updated parameters get from the rank that steps them to the others
consolidation  the whole state on one rank, tensor by tensor
groups         param groups, and the part of each that a rank has
overlap        which rank steps which part of which gradient bucket of DDP
hooks          communication hooks of DDP that step as gradients come in
state          state dicts: a rank's own part, the whole, and what one that is loaded must be
sharded        state for torch.distributed.checkpoint
torch_names    private names of torch's module that its own tests import
"""

from __future__ import annotations

from zckpt.optim.zero_redundancy.hooks import hook_with_zero_step, hook_with_zero_step_interleaved
from zckpt.optim.zero_redundancy.optimizer import ZeroRedundancyOptimizer
from zckpt.optim.zero_redundancy.torch_names import _broadcast_object as _broadcast_object
from zckpt.optim.zero_redundancy.torch_names import _is_trainable as _is_trainable
from zckpt.optim.zero_redundancy.torch_names import _recursive_copy_to_device as _recursive_copy_to_device

__all__ = ["ZeroRedundancyOptimizer", "hook_with_zero_step", "hook_with_zero_step_interleaved"]
