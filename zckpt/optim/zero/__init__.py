"""ZeRO-1 and ZeRO-2 as a `torch.optim.Optimizer`: one flat buffer for each param group, cut in equal partitions.

flat_group         one group's buffer, this rank's masters, which parameter lies where
flat               the param groups, and the local optimizer of this rank's masters
buckets            which gradients are reduced together, and where each lies in what is sent
reduction          gradients averaged over ranks while backward makes them
offload            gradients on their way to the host
gradients          hooks that hand gradients on
backward           passes, windows, and failures
norms              the norm of all gradients, and clipping
loss_scale         static and dynamic
gather             weights to all ranks
stand_in           what lies in `grad` once a gradient has been reduced
beside_ddp         DistributedDataParallel's buckets
per_tensor         which optimizers look at whole tensors
stateful           masters against weights; state given away and taken in
optimizer          the class: the step, and what ranks without inputs do
full_state         whole tensors by name
state_dicts        state in DeepSpeed's form
deepspeed_objects  the objects in it under DeepSpeed's names
parts              experts under their global numbers, parts of models
files              DeepSpeed's directories written, any checkpoint loaded
"""

from __future__ import annotations

from zckpt.optim.zero.loss_scale import DynamicLossScaler, LossScaler
from zckpt.optim.zero.optimizer import ZeroOptimizer

__all__ = ["DynamicLossScaler", "LossScaler", "ZeroOptimizer"]
