"""torch's DCP over zckpt: `dcp.load` of any checkpoint that zckpt reads, and `dcp.save` in zckpt's own format.

    import torch.distributed.checkpoint as dcp
    import zckpt.dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(state, storage_reader=zckpt.dcp.Reader("run/global_step500"))
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])

    dcp.save(state, storage_writer=zckpt.dcp.Writer("run/step-600"))

reader    `Reader`
keys      what a key of a program's state dict stands for in a checkpoint
writer    `Writer`, and what a state dict holds: the model and the optimizer in it by name, and the rest
"""

from __future__ import annotations

from zckpt.errors import require_torch

require_torch("zckpt.dcp")

from zckpt.dcp.reader import Reader
from zckpt.dcp.writer import Writer

__all__ = ["Reader", "Writer"]
