"""The gradient buckets that DistributedDataParallel gives to a communication hook, and what a hook has made of one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from zckpt.optim.memory import shaped

Future = torch.futures.Future

GradBucket = Any
"""DDP's own class has no type information, and DDP compares what a hook is annotated with to the class itself."""

Hook = Callable[[Any, GradBucket], "Future[torch.Tensor]"]
"""Takes a state and a bucket, and returns the bucket's average over ranks."""


def reduced_gradients(bucket: GradBucket, future: Future[torch.Tensor]) -> list[torch.Tensor]:
    """Wait for a bucket's reduction and return its gradients, wherever the hook has put them.

    In a bucket, a gradient lies as its parameter does. `bucket.gradients()` takes them all to be row-major.
    """
    result = future.wait()
    reduced = result[0] if isinstance(result, (list, tuple)) else result
    found, at = [], 0
    for parameter in bucket.parameters():
        found.append(shaped(reduced[at : at + parameter.numel()], parameter).to(parameter.dtype))
        at += parameter.numel()
    return found
