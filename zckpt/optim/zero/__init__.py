"""ZeRO-1 and ZeRO-2 as a `torch.optim.Optimizer`: one flat buffer for each param group, cut in equal partitions.

flat_group        one group's buffer, this rank's masters, which parameter lies where, weights to all ranks
flat              the param groups, the local optimizer of this rank's masters, and which optimizers cannot be one
buckets           which gradients are reduced together, and where each lies in what is sent
reduction         gradients averaged over ranks while backward makes them, and accumulated here or on the host
gradients         hooks that hand gradients on
backward          passes, windows, and failures
sharded_gradient  what lies in `grad` once a gradient has been reduced
ddp               DistributedDataParallel's buckets
stateful          whole tensors by name; masters against weights; state given away and taken in
stepping          the norm of all gradients, clipping, and the step of a master
loss_scale        static and dynamic
optimizer         the class: the step, and what ranks without inputs do
deepspeed_state   state in DeepSpeed's form
experts           experts under their global numbers, parts of models
files             DeepSpeed's directories written
"""

from __future__ import annotations

from zckpt.optim.zero.optimizer import ZeroOptimizer
from zckpt.optim.zero.stepping import DynamicLossScaler, LossScaler

__all__ = ["DynamicLossScaler", "LossScaler", "ZeroOptimizer"]
