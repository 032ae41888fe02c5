"""State of a checkpoint on its way into an optimizer: what is wanted is known first, then read, then taken.

prepare     what can be known is checked, and memory is made
read        elements are read into that memory
take        the optimizer gets them: until here nothing has changed
share       ranks tell each other what follows from it
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.optim import Optimizer

from zckpt.operations.open import OpenedCheckpoint
from zckpt.optim.restoring.by_parameter import ByParameter
from zckpt.optim.restoring.flat import Flat
from zckpt.optim.restoring.restoring import Restoring
from zckpt.optim.zero.optimizer import ZeroOptimizer

__all__ = ["Restoring", "restoring_of"]


def restoring_of(
    checkpoint: OpenedCheckpoint,
    optimizer: Optimizer,
    names: Mapping[torch.Tensor, str],
    path: str,
    *,
    strict: bool = True,
) -> Restoring:
    """Find out what an optimizer needs of a checkpoint; nothing is read or changed yet.

    Raises
    ------
    UsageError
        The checkpoint has other parameters or param groups than the optimizer.
    UnsupportedError
        State that the optimizer has no way to keep.
    """
    made: Restoring
    if isinstance(optimizer, ZeroOptimizer):
        made = Flat(checkpoint, optimizer, names, path, strict)
    else:
        made = ByParameter(checkpoint, optimizer, names, path, strict)
    made.prepare()
    return made
