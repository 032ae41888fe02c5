"""Save and load while training: any world size, any format that zckpt reads.

It alone knows which rank of a training writes and reads what, and what a program keeps besides model and optimizer.

live          what is trained, as this rank has it; models of which ranks have different parts
slices        tensor-parallel slices, as parts of whole parameters
directory     what this rank writes, and what all ranks, or all RPC workers, write together
saving        `save`, and saving while training goes on
loading       `load`
restored      `assert_restored`: what is live against a checkpoint
other_state   schedulers, random states and the program's own values
checkpointer  a run's directory: when to save, what to keep, where to resume
ending        SIGTERM, and the step in which all ranks end
spare         what is kept in memory between saves, for workers that are killed
run_directory which checkpoints a Checkpointer wrote
"""

from __future__ import annotations

from zckpt.errors import require_torch

require_torch("training")
