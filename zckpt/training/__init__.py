"""Save and load while training: any world size, any format that zckpt reads.

ranks            who saves or loads together, and how failures are shared
model_state      a model's tensors without its wrappers' names
optimizer_state  what this rank has of any optimizer
values           schedulers, random states and what the program adds, without a pickle
parts            what this rank writes
whole            what the first rank knows of all, and the document
saving           `save`, and saving while training goes on
workers          the same of parameters that live on RPC workers
loading          `load`
broadcasting     weights read once and sent around
checkpointer     a run's directory: when to save, what to keep, where to resume
"""

from __future__ import annotations

from zckpt.errors import require_torch

require_torch("training")

from zckpt.training.checkpointer import Checkpointer
from zckpt.training.loading import Restored, load
from zckpt.training.saving import Saving, save

__all__ = ["Checkpointer", "Restored", "Saving", "load", "save"]
