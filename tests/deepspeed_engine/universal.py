"""Let stock DeepSpeed load a universal checkpoint and compare what it then holds and trains with the truth.

DeepSpeed's universal loader restores what is trained, and neither frozen parameters nor buffers: a training brings
those along. Here it takes them from the model file of the checkpoint, so that they are compared, too.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from tests import gloo
from tests.deepspeed_engine import models
from tests.deepspeed_engine.resume import Verdict, _compare_groups, _compare_slots, _compare_steps, _same, _train_on
from tests.deepspeed_engine.spec import Spec


def resume_universal(directory: Path, spec: Spec, truth_folder: Path, *, own_steps: bool = False) -> Verdict:
    """Load the checkpoint that `latest_universal` in `directory` names into the engine of `spec`; train the next steps.

    `spec` is that of the saved run, with the world size or stage wanted now. The model starts from another seed. With
    `own_steps`, each (sub-)group gets a copy of the step, which ZeRO-3's loader gives to all.

    Raises
    ------
    gloo.WorkerError
        With the ranks' tracebacks.
    """
    wanted = spec.at(spec.world_size, config={**spec.config, "checkpoint": {"load_universal": True}})
    return gloo.run(_resume, spec.world_size, wanted, directory, truth_folder, own_steps)[0]


def steps_after_one_more(directory: Path, spec: Spec) -> list[Any]:
    """Load the checkpoint, train one step, and return the step that the optimizer has of each (sub-)group."""
    wanted = spec.at(spec.world_size, config={**spec.config, "checkpoint": {"load_universal": True}})
    return gloo.run(_steps_after_one_more, spec.world_size, wanted, directory)[0]


def _steps_after_one_more(rank: int, world_size: int, spec: Spec, directory: Path) -> list[Any]:
    from tests.deepspeed_engine.training import build_engine, train_step
    from tests.deepspeed_engine.truth import read_live

    engine = build_engine(spec)
    engine.load_checkpoint(str(directory))
    train_step(engine, spec, spec.steps + 1)
    return [scalars["step"]["value"] for scalars in read_live(engine, spec).scalars]


def _resume(rank: int, world_size: int, spec: Spec, directory: Path, folder: Path, own_steps: bool) -> Verdict:
    from safetensors.torch import load_file

    from tests.deepspeed_engine.training import build_engine
    from tests.deepspeed_engine.truth import read_live

    about = json.loads((folder / "truth.json").read_text())
    truth = load_file(folder / "truth.safetensors")
    engine = build_engine(spec, seed=models.MODEL_SEED + 1)
    path, _ = engine.load_checkpoint(str(directory))
    if path is None:
        raise FileNotFoundError(f"DeepSpeed found no checkpoint in {directory}")
    bring_untrained(engine, directory)
    for state in engine.optimizer.optimizer.state.values() if own_steps else ():
        state["step"] = state["step"].clone()
    live = read_live(engine, spec)
    wanted_steps = about["scalar_state_per_group"]
    verdict = Verdict(
        slots=_compare_slots(live.slots, truth),
        weights=[n for n, v in live.weights.items() if not _same(v, truth.get(f"module/{n}"))],
        hyperparameters=_compare_groups(engine.optimizer.param_groups, about["param_groups"]),
        steps=_compare_steps(live.scalars, wanted_steps),
    )
    _train_on(verdict, engine, spec, about["mean_losses_next"])
    return verdict


def bring_untrained(engine: Any, directory: Path) -> None:
    """Give an engine the frozen parameters and buffers of a universal checkpoint's model file; collective."""
    import deepspeed

    tag = (directory / "latest_universal").read_text()
    file = directory / tag / "mp_rank_00_model_states.pt"
    module = torch.load(file, weights_only=False)["module"]
    for name, parameter in engine.module.named_parameters():
        if parameter.requires_grad:
            continue
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
            if parameter.shape == module[name].shape:
                parameter.data.copy_(module[name])
    for name, buffer in engine.module.named_buffers():
        if name in module:
            buffer.data.copy_(module[name])
