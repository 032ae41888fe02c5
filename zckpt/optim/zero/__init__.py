"""ZeRO-1 and ZeRO-2 as a `torch.optim.Optimizer`: one flat buffer for each param group, cut in equal partitions.

flat              a group's buffer and this rank's masters; the local optimizer, and which optimizers cannot be one
reduction         gradients in buckets, averaged over ranks while backward makes them; what lies in `grad` then
backward          hooks, passes, windows, failures, and DistributedDataParallel's buckets
stepping          the loss scale, the norm of all gradients, clipping, and the step of a master
optimizer         the class: options, the step, whole tensors by name, state dicts, weights to all ranks
deepspeed_state   state in DeepSpeed's form
files             DeepSpeed's directories, and experts under their global numbers
"""

from __future__ import annotations

from zckpt.optim.zero.optimizer import ZeroOptimizer
from zckpt.optim.zero.stepping import DynamicLossScaler, LossScaler

__all__ = ["DynamicLossScaler", "LossScaler", "ZeroOptimizer"]
