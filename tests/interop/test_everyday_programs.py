"""From any of the everyday programs to any other: DeepSpeed, the Trainer, Accelerate, verl, each as it saves and loads.

Accelerate alone and with FSDP1 and FSDP2, sharded and full; verl with both. All train one Llama on the same data, every
rank on all of it, with a scheduler that changes the rate at every step. What one saved is converted to what another
loads; that one holds the same bits, and goes on with the losses that the first would have had.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments, get_scheduler
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.trainer_pt_utils import get_parameter_names

import zckpt
from tests import gloo
from tests.deepspeed_engine.spec import plain_config
from tests.fsdp_training import training as verl
from tests.hf_training.training import Texts, build, reset_accelerate, same, shard_by_accelerate
from tests.logical import assert_same_tree
from tests.pairwise import some
from zckpt.errors import UnsupportedError, UsageError

pytestmark = pytest.mark.interop

SAVED, STEPS, BATCH = 3, 6, 2
LAST_BITS = 1e-5
"""Relative; float32 has 6e-8. FSDP sums in other orders, and three steps of AdamW let that grow a little."""

Found = dict[str, torch.Tensor]


@dataclass
class Run:
    """What was in memory when a program had saved or loaded, by `slot/name`, and the losses of the steps after."""

    found: Found = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)


def batch(step: int) -> dict[str, torch.Tensor]:
    every = [Texts()[BATCH * step + number] for number in range(BATCH)]
    return {key: torch.stack([one[key] for one in every]) for key in every[0]}


def step_of(model: nn.Module, optimizer: Any, scheduler: Any, number: int) -> float:
    loss = model(**batch(number)).loss
    loss.backward()
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    return float(loss.item())


def scheduler_of(optimizer: Any) -> Any:
    return get_scheduler("linear", optimizer, num_warmup_steps=2, num_training_steps=2 * STEPS)


def write_config(folder: Path) -> None:
    build("llama").config.save_pretrained(folder)  # type: ignore[operator, union-attr]


def held(model: nn.Module, optimizer: Any) -> Found:
    """What a model and its optimizer hold, whole, whatever has wrapped them."""
    found = verl.truth(model, getattr(optimizer, "optimizer", optimizer))
    return {key: one.detach() for key, one in found.items() if not key.startswith("step/")}


def goes_on(model: nn.Module, optimizer: Any, scheduler: Any) -> Run:
    """What is held after the step that is saved, and the losses of the steps that follow."""
    found = held(model, optimizer)
    return Run(found, [step_of(model, optimizer, scheduler, number) for number in range(SAVED, STEPS)])


def loaded_on_ranks(function: Callable[..., Run], ranks: int, *args: Any) -> Run:
    runs: list[Run] = gloo.run(function, ranks, *args)
    assert all(run.losses == runs[0].losses for run in runs)
    return runs[0]


# --- the Trainer


class Recorded(Trainer):
    """A Trainer that takes its data in their order, and keeps each step's loss as it is."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.losses: list[float] = []

    def _get_train_sampler(self, *_: Any) -> Any:
        return torch.utils.data.SequentialSampler(Texts())

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(*args, **kwargs)
        self.losses.append((loss[0] if isinstance(loss, tuple) else loss).item())
        return loss


@dataclass
class Look(TrainerCallback):
    """What the Trainer holds when it has loaded, or else when it saves; it ends after `STEPS` of a longer schedule."""

    resumes: bool
    found: Found = field(default_factory=dict)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.resumes:
            self.found = held(kwargs["model"], kwargs["optimizer"])

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not self.resumes and state.global_step == SAVED:
            self.found = held(kwargs["model"], kwargs["optimizer"])

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step == STEPS


def train(output: Path, *, resume: Path | None = None) -> Run:
    arguments = TrainingArguments(
        output_dir=str(output), max_steps=2 * STEPS, per_device_train_batch_size=BATCH, learning_rate=1e-2,
        weight_decay=0.0, warmup_steps=2, save_steps=SAVED, max_grad_norm=0.0, report_to=[], use_cpu=True,
        disable_tqdm=True, adam_epsilon=1e-8,
    )  # fmt: skip
    look = Look(resume is not None)
    model = build("llama", 9 if look.resumes else 0)
    trainer = Recorded(model=model, args=arguments, train_dataset=Texts(), callbacks=[look])
    trainer.remove_callback(transformers.PrinterCallback)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.train(resume_from_checkpoint=resume and str(resume))
    return Run(look.found, trainer.losses[SAVED - STEPS :])


def save_trainer(folder: Path) -> Run:
    run = train(folder)
    (folder / f"checkpoint-{SAVED}").rename(folder / "saved")
    return run


def load_trainer(source: Path, folder: Path, ranks: int) -> Run:
    target = folder / f"checkpoint-{SAVED}"
    zckpt.convert(source, target, to="transformers-trainer", train_batch_size=BATCH, verify=True)
    return train(folder, resume=target)


# --- Accelerate


def accelerated(seed: int, *, groups: int = 2, version: int | None = None, full: bool = False) -> tuple[Any, ...]:
    """A loop with Accelerate: accelerator, model, optimizer, scheduler.

    Parameters
    ----------
    groups : {1, 2}
        Two: parameters decayed or not, as in transformers' examples.
    version : {1, 2}, optional
        Of FSDP.
    """
    from accelerate import Accelerator

    reset_accelerate()
    accelerator = Accelerator(cpu=True, step_scheduler_with_optimizer=False)
    model = build("llama", seed)
    decayed = set(get_parameter_names(model, [nn.LayerNorm], ["bias", "norm"]))
    if version is not None:
        shard_by_accelerate(
            accelerator, version, state_dict_type="FULL_STATE_DICT" if full else "SHARDED_STATE_DICT",
            auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        )  # fmt: skip
    if version == 1:  # which wants the optimizer's parameters to be those of the wrapped model
        model = accelerator.prepare(model)
    named = {name.replace("_fsdp_wrapped_module.", ""): one for name, one in model.named_parameters()}
    wanted = [[p for n, p in named.items() if groups == 1 or (n in decayed) == one] for one in (True, False)[:groups]]
    optimizer = torch.optim.AdamW([{"params": one, "weight_decay": 0.0} for one in wanted], lr=1e-2)
    if version == 1:
        return accelerator, model, *accelerator.prepare(optimizer, scheduler_of(optimizer))
    return accelerator, *accelerator.prepare(model, optimizer, scheduler_of(optimizer))


def save_accelerate(rank, world_size, version: int | None, folder: Path) -> Run:
    accelerator, model, optimizer, scheduler = accelerated(0, version=version)
    for number in range(SAVED):
        step_of(model, optimizer, scheduler, number)
    accelerator.save_state(str(folder / "saved"))
    if accelerator.is_main_process:
        write_config(folder / "saved")
    return goes_on(model, optimizer, scheduler)


def resume_accelerate(rank, world_size, version: int | None, full: bool, target: Path) -> Run:
    accelerator, model, optimizer, scheduler = accelerated(9, groups=1, version=version, full=full)
    if version == 1 and not full:  # it looks for state of parameters that have some in memory (Accelerate 1.15)
        step_of(model, optimizer, scheduler, 0)
    accelerator.load_state(str(target))
    return goes_on(model, optimizer, scheduler)


def load_accelerate(source: Path, folder: Path, ranks: int) -> Run:
    zckpt.convert(source, folder / "state", to="accelerate", groups="one", verify=True)
    return resume_accelerate(0, 1, None, False, folder / "state")


def save_sharded(version: int, folder: Path) -> Run:
    run: Run = gloo.run(save_accelerate, 2, version, folder)[0]
    return run


def load_sharded(version: int, source: Path, folder: Path, ranks: int, *, full: bool = False) -> Run:
    form = {"fsdp": "full"} if full else {"fsdp": "sharded", "world_size": 2}
    zckpt.convert(source, folder / "state", to="accelerate", groups="one", verify=True, **form)
    return loaded_on_ranks(resume_accelerate, ranks, version, full, folder / "state")


# --- DeepSpeed, ZeRO-2


def save_deepspeed_rank(rank, world_size, folder: Path) -> list[float]:
    import deepspeed

    torch.set_num_threads(1)
    model = build("llama", 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    config = plain_config(2, train_micro_batch_size_per_gpu=BATCH, gradient_clipping=0.0)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config,
                                  lr_scheduler=scheduler_of(optimizer))[0]  # fmt: skip
    losses = []
    for number in range(STEPS):
        if number == SAVED:
            engine.save_checkpoint(str(folder / "saved"))
        loss = engine(**batch(number)).loss
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.item()))
    return losses[SAVED:]


def save_deepspeed(folder: Path) -> Run:
    """What was in memory is taken from the checkpoint, of which other tests hold every bit against the engine."""
    losses = gloo.run(save_deepspeed_rank, 2, folder, fresh=True)[0]
    write_config(folder / "saved")
    checkpoint = zckpt.open(folder / "saved")
    found = {f"weight/{name}": checkpoint.read(name) for name in [*checkpoint.parameters, *checkpoint.buffers]}
    for name, one in checkpoint.parameters.items():
        found |= {f"{key}/{name}": checkpoint.read(name, key) for key in one.slots if key.startswith("exp_")}
    return Run(found, losses)


# --- verl, of FSDP2 and of FSDP1


def sharded(version: int, world_size: int, seed: int) -> tuple[nn.Module, Any, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    torch.set_num_threads(1)
    model = build("llama", seed)
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("fsdp",))
    if version == 2:
        for layer in model.model.layers:  # type: ignore[union-attr]
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    else:
        units = ModuleWrapPolicy({LlamaDecoderLayer})
        model = FullyShardedDataParallel(model, auto_wrap_policy=units, device_mesh=mesh, device_id=torch.device("cpu"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    return model, optimizer, scheduler_of(optimizer)


def save_rank(rank, world_size, version: int, folder: Path) -> Run:
    model, optimizer, scheduler = sharded(version, world_size, 0)
    for number in range(SAVED):
        step_of(model, optimizer, scheduler, number)
    verl.save(model, optimizer, scheduler, folder, rank, world_size)
    if not rank:
        write_config(folder / "huggingface")
    return goes_on(model, optimizer, scheduler)


def load_rank(rank, world_size, version: int, folder: Path) -> Run:
    model, optimizer, scheduler = sharded(version, world_size, 9)
    verl.load(model, optimizer, scheduler, folder, rank, world_size)
    return goes_on(model, optimizer, scheduler)


def save_verl(version: int, folder: Path) -> Run:
    target = folder / f"global_step_{SAVED}" / "actor"
    run: Run = gloo.run(save_rank, 2, version, target)[0]
    (folder / "saved").symlink_to(target)
    return run


def load_verl(version: int, source: Path, folder: Path, ranks: int) -> Run:
    units = {"units": "model.layers.*"} if version == 1 else {}
    zckpt.convert(source, folder / "target", to="fsdp-rank-files", world_size=ranks, fsdp_version=version,
                  groups="one", device="cpu", verify=True, **units)  # fmt: skip
    return loaded_on_ranks(load_rank, ranks, version, folder / "target")


SAVES: dict[str, Callable[[Path], Run]] = {
    "deepspeed": save_deepspeed,
    "trainer": save_trainer,
    "accelerate": lambda folder: save_accelerate(0, 1, None, folder),
    "accelerate-fsdp1": lambda folder: save_sharded(1, folder),
    "accelerate-fsdp2": lambda folder: save_sharded(2, folder),
    "verl": lambda folder: save_verl(2, folder),
    "fsdp1": lambda folder: save_verl(1, folder),
}
LOADS: dict[str, Callable[[Path, Path, int], Run]] = {
    "trainer": load_trainer,
    "accelerate": load_accelerate,
    "accelerate-fsdp1": lambda *args: load_sharded(1, *args),
    "accelerate-fsdp2": lambda *args: load_sharded(2, *args),
    "accelerate-fsdp1-full": lambda *args: load_sharded(1, *args, full=True),
    "accelerate-fsdp2-full": lambda *args: load_sharded(2, *args, full=True),
    "verl": lambda *args: load_verl(2, *args),
    "fsdp1": lambda *args: load_verl(1, *args),
}
ALONE = ("trainer", "accelerate")
KEPT = [("deepspeed", "accelerate-fsdp2", 3), ("accelerate-fsdp1", "accelerate", 1)]
EVERY = [(one, other, 1 if other in ALONE else 3) for one, other in itertools.product(SAVES, LOADS)]
EVERY += [(one, other, 2) for one, other in itertools.product(SAVES, LOADS) if other not in ALONE]
"""Every program to every other and itself, at the ranks that it was saved at, too."""


@pytest.mark.parametrize(("one", "other", "ranks"), some(KEPT, [one for one in EVERY if one not in KEPT]))
def test_one_program_goes_on_where_another_left_off(one, other, ranks, shared, tmp_path):
    def make(folder: Path) -> tuple[Path, Run]:
        return folder / "saved", SAVES[one](folder)

    source, saved = shared(f"everyday-{one}", make)
    resumed = LOADS[other](source, tmp_path, ranks)
    assert_same_tree(resumed.found, saved.found)
    assert len(saved.losses) == STEPS - SAVED
    assert resumed.losses == pytest.approx(saved.losses, rel=LAST_BITS)


def test_sorted_names_in_several_groups_are_not_taken_for_the_models_order(tmp_path):
    model = nn.ModuleDict({"up": nn.Linear(4, 4, bias=False), "norm": nn.RMSNorm(4)})
    optimizer = torch.optim.AdamW([{"params": [model["up"].weight]}, {"params": [model["norm"].weight]}])
    (model["up"].weight.sum() + model["norm"].weight.sum()).backward()
    optimizer.step()
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.bin")
    with pytest.raises(UnsupportedError, match="sorted by name, in several groups"):
        zckpt.convert(tmp_path, tmp_path / "target", to="fsdp-rank-files", world_size=1, groups="one")

    # --names says the order: of the model in the Trainer's directory, and of what was consolidated from it
    order = ["up.weight", "norm.weight"]
    with pytest.raises(UnsupportedError, match="sorted by name, in several groups"):  # the optimizer's order it may be
        zckpt.convert(tmp_path, tmp_path / "t", to="fsdp-rank-files", world_size=1, groups="one", names=order)
    named = zckpt.open(tmp_path, names=order)
    zckpt.consolidate(named, tmp_path / "whole", slots="all")
    zckpt.convert(tmp_path / "whole", tmp_path / "t", to="fsdp-rank-files", world_size=1, groups="one", names=order)
    found = torch.load(tmp_path / "t" / "optim_world_size_1_rank_0.pt", weights_only=False)
    for number, name in enumerate(order):
        own = optimizer.state[model.get_parameter(name)]["exp_avg"]
        assert same(found["state"][number]["exp_avg"].to_local(), own), name
    assert len(found["param_groups"]) == 1
    for wrong in (order[:1], [*order, "other"], [*order, order[0]]):
        with pytest.raises(UsageError, match="not match the model's parameters"):
            zckpt.open(tmp_path / "whole", names=wrong)
