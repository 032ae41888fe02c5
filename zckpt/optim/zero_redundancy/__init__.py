"""PyTorch's ZeroRedundancyOptimizer: whole parameters handed to ranks, each of which steps its own.

partitioned    which rank has which parameter, its part of the param groups, and its local optimizer
state_dicts    state dicts: a rank's own part, the whole, and what one that is loaded must be
sharded        state for torch.distributed.checkpoint
optimizer      the class: the step, alone or along with DDP
exchange       how updated parameters get from the rank that steps them to the others
consolidation  the whole state on one rank, tensor by tensor
overlap        which rank steps which part of which gradient bucket of DDP
hooks          communication hooks of DDP that step as gradients come in
files          a directory that each rank, or RPC worker, writes its part of
"""

from __future__ import annotations

from zckpt.optim.zero_redundancy.exchange import _broadcast_object as _broadcast_object
from zckpt.optim.zero_redundancy.exchange import _is_trainable as _is_trainable
from zckpt.optim.zero_redundancy.exchange import _recursive_copy_to_device as _recursive_copy_to_device
from zckpt.optim.zero_redundancy.optimizer import ZeroRedundancyOptimizer
from zckpt.optim.zero_redundancy.overlap import hook_with_zero_step, hook_with_zero_step_interleaved

__all__ = ["ZeroRedundancyOptimizer", "hook_with_zero_step", "hook_with_zero_step_interleaved"]
