"""Stock DeepSpeed resumes from any checkpoint, at any number of ranks and any stage, in place: nothing is converted.

    with zckpt.deepspeed.any_world_size(engine):
        engine.load_checkpoint("run")

    with zckpt.deepspeed.any_world_size():       # every engine: of Trainer, Accelerate, Lightning
        trainer.train(resume_from_checkpoint=True)

loading    `any_world_size`: what `load_checkpoint` is led to, and what it is given there
engine     how a live engine cuts its state, and which parameters it has
"""

from __future__ import annotations

from zckpt.errors import require_torch

require_torch("zckpt.deepspeed")

from zckpt.deepspeed.loading import Loading, any_world_size

__all__ = ["Loading", "any_world_size"]
