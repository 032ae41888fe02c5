"""Train on one rank: the engine of a description, its steps, its checkpoint and the truth about it.

Runs inside the ranks that `gloo` starts; `produce` is what the caller sees.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests import gloo
from tests.deepspeed_engine import gpt_pipe, models, optimizers, tensor_parallel
from tests.deepspeed_engine.offloaded import without_extension
from tests.deepspeed_engine.spec import Spec, ds_config
from tests.deepspeed_engine.truth import describe, read_live, write_truth


def produce(specs: Iterable[Spec], directory: str | Path) -> dict[str, Path]:
    """Make `directory/<name>/` for each description: a run directory, `truth.safetensors`, `truth.json`.

    Raises
    ------
    gloo.WorkerError
        With the ranks' tracebacks.
    """
    made = {}
    for spec in specs:
        folder = Path(directory) / spec.name
        folder.mkdir(parents=True, exist_ok=True)
        gloo.run(_produce, spec.world_size, spec, folder)
        made[spec.name] = folder
    return made


def train(spec: Spec, directory: str | Path) -> Path:
    """Make one checkpoint as `produce` does and return its folder."""
    return produce([spec], directory)[spec.name]


def _produce(rank: int, world_size: int, spec: Spec, folder: Path) -> None:
    engine = build_engine(spec)
    losses = {}
    for step in range(1, spec.steps + 1):
        losses[step] = train_step(engine, spec, step)
        if step == spec.extra_tag_step:
            save(engine, spec, folder, tag=f"global_step{step}")
    save(engine, spec, folder, tag=spec.tag)
    live = read_live(engine, spec)
    about = describe(engine, spec, live) | _losses("losses", losses)
    after = range(spec.steps + 1, spec.steps + spec.steps_after + 1)
    about |= _losses("losses_next", {step: train_step(engine, spec, step) for step in after})
    if rank == 0:
        write_truth(folder, live)
        (folder / "truth.json").write_text(json.dumps(about, default=repr))


def build_engine(spec: Spec, seed: int = models.MODEL_SEED) -> Any:
    """Build the DeepSpeed engine of `spec` on this rank; collective."""
    import deepspeed

    mpu = tensor_parallel.use_grid(spec) if "megatron" in spec.model else None
    if spec.is_pipeline:
        mpu = None  # the pipeline brings its own
    model = models.build_model(spec, seed)
    own = spec.optimizer not in optimizers.BY_CONFIGURATION
    optimizer = optimizers.KINDS[spec.optimizer](_groups(spec, model)) if own else None
    trained = None if own else [p for p in model.parameters() if p.requires_grad]
    if "expert_parallel" in spec.config:  # DeepSpeed replaces layers, and makes groups of what it then has
        optimizer, trained = _of_experts(spec), list(model.parameters())
    with without_extension() if spec.optimizer == "adamw_offloaded" else nullcontext():
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=ds_config(spec), mpu=mpu, dist_init_required=False,
            model_parameters=trained,
            lr_scheduler=_warmup if spec.scheduler else None,
        )  # fmt: skip
    if spec.is_pipeline:
        engine._take_model_step = torch.no_grad()(engine._take_model_step)  # as the steps of `train_step`
    return engine


def _groups(spec: Spec, model: Any) -> list[dict[str, Any]]:
    groups = models.param_groups(spec, model)
    names = {p: name for name, p in model.named_parameters()} if spec.named else {}
    return [{**one, "params": [(names[p], p) for p in one["params"]]} for one in groups] if names else groups


def _of_experts(spec: Spec) -> Any:
    """Return what makes the optimizer of the parameters that the engine gives it, experts in groups of their own."""
    from deepspeed.moe.utils import configure_moe_param_groups

    return lambda parameters: optimizers.KINDS[spec.optimizer](configure_moe_param_groups(list(parameters)))


def _warmup(optimizer: Any) -> Any:
    from deepspeed.runtime.lr_schedules import WarmupDecayLR

    return WarmupDecayLR(optimizer, total_num_steps=40, warmup_min_lr=0.001, warmup_max_lr=0.02, warmup_num_steps=4)


def batch(spec: Spec, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this rank's (ids, labels) of step `step`, each (batch / data parallel, sequence)."""
    hugging_face = spec.model in models.HUGGING_FACE
    vocabulary = models.HUGGING_FACE_VOCABULARY if hugging_face else models.VOCABULARY
    generator = torch.Generator().manual_seed(1000 + step)
    ids = torch.randint(0, vocabulary, (spec.batch, models.SEQUENCE), generator=generator)
    labels = torch.randint(0, vocabulary, (spec.batch, models.SEQUENCE), generator=generator)
    size = spec.batch // spec.data_parallel
    start = dist.get_rank() // spec.tensor_parallel % spec.data_parallel * size
    return ids[start : start + size], labels[start : start + size]


def train_step(engine: Any, spec: Spec, step: int) -> list[float]:
    """Train on the data of `step` and return every rank's loss; collective."""
    ids, labels = batch(spec, step)
    if spec.is_pipeline:
        loss = engine.train_batch(iter([(ids, labels)]))
    else:
        if spec.model in models.HUGGING_FACE:
            loss = engine(input_ids=ids, labels=labels).loss
        else:
            loss = engine(ids, labels)
        engine.backward(loss)
        with torch.no_grad():  # with it, 0.18 raises in gloo's all_gather_into_tensor
            engine.step()
    mine = loss.detach().double().reshape(1)
    losses = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(losses, mine)
    return [one.item() for one in losses]


def save(engine: Any, spec: Spec, folder: Path, *, tag: str | None) -> None:
    """Save as a user of DeepSpeed does; collective."""
    client_state = dict(spec.client_state)
    if spec.model.startswith("pipeline_megatron_"):
        client_state = gpt_pipe.client_state(spec) | client_state
    elif spec.universal_info:
        info = tensor_parallel.universal_info(spec) if "megatron" in spec.model else UNIVERSAL_INFO
        client_state |= {"universal_checkpoint_info": info, "iteration": spec.steps}
    engine.save_checkpoint(
        str(folder / spec.run_folder), tag=tag, client_state=client_state,
        exclude_frozen_parameters=spec.exclude_frozen,
    )  # fmt: skip


UNIVERSAL_INFO = {
    "universal_checkpoint_version": 0.2, "vocabulary_parameter_patterns": [], "original_vocab_size": models.VOCABULARY,
}  # fmt: skip


def _losses(key: str, per_rank: dict[int, list[float]]) -> dict[str, Any]:
    return {key: per_rank, f"mean_{key}": [sum(x) / len(x) for x in per_rank.values()]}
