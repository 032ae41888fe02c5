"""DeepSpeed's universal checkpoints: one folder for each parameter, loaded at any number of ranks.

What DeepSpeed 0.19's loaders take of one (`"checkpoint": {"load_universal": true}`), and what they cannot, whatever is
in the files:

- Frozen parameters and buffers are not loaded at all; the training has to bring them. The model file has them.
- ZeRO-1 and 2 load every slot, and every param group's hyperparameters. A rank that holds nothing of a param group
  stops with an IndexError. All parameters of a group must have the same step. With `round_robin_gradients` they take
  parameters for one another, unless `parameter_alignment` is on, too.
- ZeRO-3 loads `exp_avg` and `exp_avg_sq` and no other slot, one step for all groups, and gives every group the
  hyperparameters of the first. So that no group gets wrong ones, only those that all groups have in common are
  written where it looks; the others stay as the training has set them. Its groups share one step: where that is a
  tensor (`torch.optim`), every group counts it up. What it would load wrongly is written so that it stops instead.
"""

from zckpt.formats.universal.directory import find
from zckpt.formats.universal.names import is_own, latest_universal
from zckpt.formats.universal.reader import read
from zckpt.formats.universal.writer import lay_out, notes

__all__ = ["find", "is_own", "latest_universal", "lay_out", "notes", "read"]
