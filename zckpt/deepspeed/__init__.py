"""Stock DeepSpeed resumes from any checkpoint in place, at any number of ranks and stage, and saves with our writer.

    with zckpt.deepspeed.any_world_size(engine):
        engine.load_checkpoint("run")

    with zckpt.deepspeed.any_world_size():       # every engine: of Trainer, Accelerate, Lightning
        trainer.train(resume_from_checkpoint=True)

    with zckpt.deepspeed.durable_saves(engine, async_=True):
        for batch in batches:
            ...
            engine.save_checkpoint("run")        # returns when all is copied; appears whole or not at all

loading    `any_world_size`: what `load_checkpoint` is led to, and what it is given there
saving     `durable_saves`: what `save_checkpoint` gives away, live objects as torch files, and how these are written
native     the same in zckpt's own format, read from files that are in memory
engine     its methods, how a live engine cuts its state, and which parameters it has
"""

from __future__ import annotations

from zckpt.errors import require_torch

require_torch("zckpt.deepspeed")

from zckpt.deepspeed.loading import Loading, any_world_size
from zckpt.deepspeed.saving import Saves, durable_saves

__all__ = ["Loading", "Saves", "any_world_size", "durable_saves"]
