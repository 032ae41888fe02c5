"""Let stock DeepSpeed load a universal checkpoint and compare what it then holds and trains with the truth.

DeepSpeed's universal loader restores what is trained, and neither frozen parameters nor buffers: a training brings
those along. Here it takes them from the model file of the checkpoint, so that they are compared, too.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.deepspeed_engine.resume import Verdict, resume
from tests.deepspeed_engine.spec import Spec


def resume_universal(directory: Path, spec: Spec, truth_folder: Path, *, own_steps: bool = False) -> Verdict:
    """Load the checkpoint that `latest_universal` in `directory` names into the engine of `spec`; train the next steps.

    `spec` is that of the saved run, with the world size or stage wanted now. With `own_steps`, each (sub-)group gets a
    copy of the step, which ZeRO-3's loader gives to all.
    """
    then = partial(_bring_the_rest, directory, own_steps=own_steps)
    return resume(directory, spec, truth_folder, universal=True, then=then)


def converted_by_deepspeed(source: Path, target: Path) -> Path:
    """Let DeepSpeed's own converter write a universal checkpoint."""
    from deepspeed.checkpoint import ds_to_universal

    ds_to_universal.main(
        argparse.Namespace(
            input_folder=str(source), output_folder=str(target), num_extract_workers=1, num_merge_workers=1,
            keep_temp_folder=False, strict=False, inject_missing_state=True,
        )
    )  # fmt: skip
    return target


def _bring_the_rest(directory: Path, engine: Any, *, own_steps: bool) -> None:
    """Give an engine the frozen parameters and buffers of a universal checkpoint's model file; collective."""
    import deepspeed

    tag = (directory / "latest_universal").read_text()
    module = torch.load(directory / tag / "mp_rank_00_model_states.pt", weights_only=False)["module"]
    for name, parameter in engine.module.named_parameters():
        if parameter.requires_grad:
            continue
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
            if parameter.shape == module[name].shape:
                parameter.data.copy_(module[name])
    for name, buffer in engine.module.named_buffers():
        if name in module:
            buffer.data.copy_(module[name])
    for state in engine.optimizer.optimizer.state.values() if own_steps else ():
        state["step"] = state["step"].clone()
