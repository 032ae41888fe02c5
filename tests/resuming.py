"""Real programs that save a small training, and that go on from whatever there is: what came back of it.

One Llama, fp32, AdamW and a scheduler, on gloo ranks, each with the same data. `save` makes a checkpoint of a kind with
the kind's own program, `resume` lets a program load any of them, and tells of each part whether it is as it was. Of
Megatron-Core the model is its own. verl is not installed: what its checkpoint manager does is `tests/fsdp_training`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import zckpt
from tests.deepspeed_engine.resume import held_against
from tests.deepspeed_engine.spec import plain_config
from tests.deepspeed_engine.universal import converted_by_deepspeed
from tests.fsdp_training import training as verl
from tests.fsdp_training.training import load_by_dcp, states
from tests.hf_training.training import Texts, build, reset_accelerate
from tests.live import whole

STEPS = 3
RATE = 0.01

KINDS = ("ZeRO-1", "ZeRO-2", "ZeRO-3", "universal", "DCP", "Trainer", "Trainer, DeepSpeed", "Accelerate", "zckpt",
         "weights", "Megatron", "verl", "Lightning")  # fmt: skip
ALONE = ("Trainer", "Lightning", "weights", "Megatron")
"""Kinds that one process saves; all others two."""

PLACES = {
    "ZeRO-1": "run", "ZeRO-2": "run", "ZeRO-3": "run", "universal": "run/universal", "DCP": "dcp",
    "Trainer": "out/checkpoint-3", "Trainer, DeepSpeed": "out/checkpoint-3", "Accelerate": "state", "zckpt": "saved",
    "weights": "model", "Megatron": "run/iter_0000002", "verl": "global_step_3/actor", "Lightning": "out/last.ckpt",
}  # fmt: skip
"""Where the checkpoint lies in the folder of its kind."""

MOMENTS = ("exp_avg", "exp_avg_sq")

Parts = dict[str, bool]
Outcome = Parts | str
"""What is as it was, by the names of resume-check; or what was raised."""


def loss_of(model: Any, number: int) -> torch.Tensor:
    loss: torch.Tensor = model(**{key: value[None] for key, value in Texts()[number].items()}).loss
    return loss


def scheduler_of(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))


def groups_of(model: Any) -> list[dict[str, Any]]:
    """The Trainer's param groups of a model: norms are not decayed."""
    named = list(model.named_parameters())
    return [{"params": [one for name, one in named if ("norm" in name) == norm]} for norm in (False, True)]


def engine_of(stage: int, seed: int, *, universal: bool = False, scheduler: bool = True, groups: bool = False) -> Any:
    import deepspeed

    model = build("llama", seed)
    trained = groups_of(model) if groups else model.parameters()
    optimizer = torch.optim.AdamW(trained, lr=RATE * (seed + 1))
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=plain_config(stage, checkpoint={"load_universal": universal}),
        dist_init_required=False, lr_scheduler=scheduler_of if scheduler else None,
    )  # fmt: skip
    return engine


def engine_steps(engine: Any) -> None:
    for number in range(STEPS):
        engine.backward(loss_of(engine, number))
        engine.step()


def read_back(place: Path) -> dict[str, torch.Tensor]:
    """What an engine has saved."""
    one = zckpt.open(place)
    slots = {"weight": None, **{slot: slot for slot in MOMENTS}}  # ZeRO-3's weights are its masters
    return {f"{key}/{name}": one.read(name, slot).reshape(-1) for key, slot in slots.items() for name in one.parameters}


def held(model: Any, optimizer: Any, front: str = "") -> dict[str, torch.Tensor]:
    """Whole tensors, by slot and name; FSDP2's are gathered."""
    found = {}
    for name, one in model.named_parameters():
        name = name.removeprefix("module.").removeprefix(front)  # noqa: PLW2901
        found[f"weight/{name}"] = whole(one).reshape(-1)
        state = {} if optimizer is None else optimizer.state.get(one, {})
        found |= {f"{slot}/{name}": whole(state[slot]).reshape(-1) for slot in MOMENTS if slot in state}
    return found


def trained(seed: int = 0, *, sharded: bool = False, steps: int = STEPS) -> tuple[Any, Any, Any]:
    """Return a model, its optimizer and scheduler after some steps."""
    model = build("llama", seed)
    if sharded:
        from torch.distributed.fsdp import fully_shard

        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE * (seed + 1))
    scheduler = scheduler_of(optimizer)
    for number in range(steps):
        loss_of(model, number).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return model, optimizer, scheduler


def accelerator_of() -> Any:
    import accelerate

    reset_accelerate()
    return accelerate.Accelerator(cpu=True, step_scheduler_with_optimizer=False)


class _EnoughError(Exception):
    """What is to be seen of a Trainer has been seen."""


def trainer_of(output: Path, *, seed: int, stage: int | None, seen: dict[str, Any] | None, path: Path = Path()) -> Any:
    """Return a Trainer that stops, when it would take its first step, after it has told what it holds."""
    import transformers
    from transformers import Trainer, TrainingArguments
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)  # of one before it
    unset_hf_deepspeed_config()
    reset_accelerate()
    config = None if stage is None else plain_config(stage, gradient_accumulation_steps=1)

    class Stopping(Trainer):
        def training_step(self, model: Any, *given: Any, **named: Any) -> torch.Tensor:
            if seen is not None:
                engine = hasattr(model, "load_checkpoint")
                optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
                seen.update({
                    **({"against": held_against(path, model)} if engine else {"tensors": held(model, optimizer)}),
                    "random": torch.get_rng_state(), "scheduler": self.lr_scheduler.last_epoch,
                    "data": self.state.global_step * dist.get_world_size(),
                    "rate": optimizer.param_groups[0]["initial_lr"],
                })  # fmt: skip
                raise _EnoughError
            return super().training_step(model, *given, **named)

    arguments = TrainingArguments(
        output_dir=str(output), per_device_train_batch_size=1, max_steps=STEPS + 2, save_steps=STEPS,
        learning_rate=RATE * (seed + 1), use_cpu=True, ddp_backend="gloo", report_to=[], seed=5 + seed,
        disable_tqdm=True, dataloader_pin_memory=False, deepspeed=config,
    )  # fmt: skip
    trainer = Stopping(model=build("llama", seed), args=arguments, train_dataset=Texts())
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


def module_of(seed: int, seen: dict[str, Any] | None) -> Any:
    from lightning import pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = build("llama", seed)

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            loss: torch.Tensor = self.net(**batch).loss
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=RATE * (seed + 1))
            return [optimizer], [{"scheduler": scheduler_of(optimizer), "interval": "step"}]

        def on_train_batch_start(self, batch: Any, index: int) -> None:
            if seen is not None:
                seen.update({
                    "tensors": held(self, self.trainer.optimizers[0], "net."), "data": self.trainer.global_step,
                    "scheduler": self.lr_schedulers().last_epoch,
                    "rate": self.trainer.optimizers[0].param_groups[0]["initial_lr"],
                })  # fmt: skip
                raise _EnoughError

    return Module()


def lightning_of(rank: int, world_size: int, strategy: Any, **options: Any) -> Any:
    """Return a Trainer of Lightning that has the ranks that there are, and prints nothing."""
    import logging
    import warnings

    from lightning.fabric.utilities import cloud_io
    from lightning.pytorch import Trainer

    cloud_io.module_available = lambda _: False  # it would import what others' clouds need, to tell them from a disk
    os.environ.update(
        TORCHELASTIC_RUN_ID="run", GROUP_RANK="0", MASTER_ADDR="localhost", MASTER_PORT="1", RANK=str(rank),
        LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size),
    )  # fmt: skip
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    return Trainer(
        accelerator="cpu", devices=world_size, strategy=strategy, logger=False, enable_progress_bar=False,
        enable_model_summary=False, **options,
    )  # fmt: skip


# What each program saves


def save(rank: int, world_size: int, kind: str, folder: Path) -> None:
    """Save a training of a kind at its place in a folder, and what it held in `truth.pt` there."""
    torch.set_num_threads(1)
    place = folder / PLACES[kind]
    if rank == 0:
        place.parent.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    samples = STEPS * world_size if kind.startswith("Trainer") else STEPS
    truth: dict[str, Any] = {"rate": RATE, "scheduler": STEPS, "data": samples}
    if kind.startswith("ZeRO") or kind == "universal":
        engine = engine_of(2 if kind == "universal" else int(kind[-1]), 0)
        engine_steps(engine)
        engine.save_checkpoint(str(folder / "run"))
        if kind == "universal" and rank == 0:
            converted_by_deepspeed(folder / "run" / "global_step3", place)
        tensors = read_back(place) if rank == 0 else {}
    elif kind.startswith("Trainer"):
        seen: dict[str, Any] = {}
        trainer = trainer_of(folder / "out", seed=0, stage=2 if "DeepSpeed" in kind else None, seen=None)
        _watch_save(trainer, seen)
        trainer.train()
        tensors = seen.get("tensors") or (read_back(place) if rank == 0 else {})
    elif kind == "Megatron":
        from tests.megatron_core import Live, Spec

        live = Live(Spec(dp=world_size, bf16=False))
        live.train_at_random(2)
        live.save(folder / "run")
        tensors = {key: one.reshape(-1) for key, one in live.tensors().items()}
    elif kind == "Lightning":
        module = module_of(0, None)
        trainer = lightning_of(
            rank, world_size, "ddp", enable_checkpointing=False, max_steps=STEPS, default_root_dir=folder
        )
        trainer.fit(module, torch.utils.data.DataLoader(Texts()))
        trainer.save_checkpoint(place)
        tensors = held(module, trainer.optimizers[0], "net.")
    else:
        model, optimizer, scheduler = trained(sharded=kind in ("DCP", "verl"))
        tensors = held(model, optimizer)
        if kind == "DCP":
            dcp.save(states(model, optimizer), checkpoint_id=place)
        elif kind == "Accelerate":
            accelerator = accelerator_of()
            accelerator.prepare(model, optimizer, scheduler)
            accelerator.save_state(str(place))
        elif kind == "zckpt":
            zckpt.save(place, model=model, optimizer=optimizer, scheduler=scheduler, step=STEPS)
        elif kind == "weights":
            model.save_pretrained(place)
        else:
            verl.save(model, optimizer, scheduler, place, rank, world_size)
    if rank == 0:
        torch.save(truth | {"tensors": tensors}, folder / "truth.pt")
    dist.barrier()


def _watch_save(trainer: Any, seen: dict[str, Any]) -> None:
    from transformers import TrainerCallback

    class Watching(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            if state.global_step == STEPS:
                model = trainer.model_wrapped
                if not hasattr(model, "load_checkpoint"):
                    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
                    seen["tensors"] = held(model, optimizer)

    trainer.add_callback(Watching())


# What each program does with any of them


def resume(rank: int, world_size: int, program: str, folders: dict[str, Path]) -> dict[str, Outcome]:
    """Let a program go on from the checkpoint of each kind, in a model of another seed."""
    torch.set_num_threads(1)
    found: dict[str, Outcome] = {}
    for kind, folder in folders.items():
        truth = torch.load(folder / "truth.pt", weights_only=False)
        try:
            got = PROGRAMS[program](rank, world_size, kind, folder / PLACES[kind])
            found[kind] = compared(got, truth)
        except BaseException as error:  # whatever a program says; DCP's is no Exception
            found[kind] = f"{type(error).__name__}: {error}"[:300]
    return found


def compared(got: dict[str, Any], truth: dict[str, Any]) -> Parts:
    """Tell of each part that can be seen whether it is as it was saved."""
    tensors, wanted = got.get("tensors", {}), truth["tensors"]

    def same(front: str) -> bool:
        if "against" in got:
            kinds = ("weight", "master") if front == "weight/" else (front.removesuffix("/"),)
            return not [one for one in got["against"] if one.startswith(kinds)]
        keys = [key for key in wanted if key.startswith(front)]
        return bool(keys) and all(key in tensors and torch.equal(tensors[key], wanted[key]) for key in keys)

    found = {"weights": same("weight/"), "optimizer state": all(same(f"{slot}/") for slot in MOMENTS)}
    for part, key in (("param groups", "rate"), ("scheduler", "scheduler"), ("data position", "data")):
        if key in got:
            found[part] = got[key] == truth[key]
    if "random" in got:
        found["random states"] = torch.equal(got["random"], got["random saved"])
    return found


def _deepspeed(rank: int, world_size: int, kind: str, path: Path) -> dict[str, Any]:
    stage = int(kind[-1]) if kind.startswith("ZeRO") else 2
    own = kind.startswith("ZeRO") or kind == "universal"
    engine = engine_of(stage, 1, universal=kind == "universal", scheduler=own, groups=kind.startswith("Trainer"))
    inner = kind.startswith(("ZeRO", "Trainer"))
    loaded, _ = engine.load_checkpoint(str(path if inner else path.parent), tag=None if inner else path.name)
    if loaded is None:
        raise FileNotFoundError("engine.load_checkpoint returns None")
    scheduler = {} if engine.lr_scheduler is None else {"scheduler": engine.lr_scheduler.last_epoch}
    return {"against": held_against(path, engine), "rate": _rate(engine.optimizer), **scheduler}


def _rate(optimizer: Any) -> float:
    group = optimizer.param_groups[0]
    rate: float = group.get("initial_lr", group["lr"])
    return rate


def _told(model: Any, optimizer: Any, scheduler: Any = None, front: str = "") -> dict[str, Any]:
    """What a program has loaded."""
    of_scheduler = {} if scheduler is None else {"scheduler": scheduler.last_epoch}
    return {"tensors": held(model, optimizer, front), "rate": _rate(optimizer), **of_scheduler}


def _trainer(rank: int, world_size: int, kind: str, path: Path) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    stage = int(kind[-1]) if kind.startswith("ZeRO") else 2 if "DeepSpeed" in kind else None
    trainer = trainer_of(path.parent / f"again{rank}", seed=1, stage=stage, seen=seen, path=path)
    with suppress(_EnoughError):
        trainer.train(resume_from_checkpoint=str(path))
    file = path / ("rng_state.pth" if world_size == 1 else f"rng_state_{rank}.pth")
    saved = torch.load(file, weights_only=False)["cpu"] if file.is_file() else torch.zeros(1)
    return seen | {"random saved": saved}


def _accelerate(rank: int, world_size: int, kind: str, path: Path) -> dict[str, Any]:
    accelerator = accelerator_of()
    model, optimizer, scheduler = trained(1, steps=0)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    accelerator.load_state(str(path))
    file = path / f"random_states_{rank}.pkl"
    saved = torch.load(file, weights_only=False)["torch_manual_seed"] if file.is_file() else torch.zeros(1)
    told = _told(model, optimizer.optimizer, scheduler.scheduler)
    return told | {"random": torch.get_rng_state(), "random saved": saved}


def _fsdp2(rank: int, world_size: int, kind: str, path: Path) -> dict[str, Any]:
    model, optimizer, _ = trained(1, sharded=True, steps=0)
    load_by_dcp(model, optimizer, checkpoint_id=path)
    return _told(model, optimizer)


def _megatron(rank: int, world_size: int, kind: str, path: Path) -> dict[str, Any]:
    from tests.megatron_core import Live, Spec, filed

    live = Live(Spec(dp=world_size, bf16=False))
    live.load(path)
    mine = [(f"weight/{filed(name)}", 0, one.detach()) for name, one in live.model.named_parameters() if rank == 0]
    for optimizer in getattr(live.optimizer, "chained_optimizers", [live.optimizer]):
        for name, one in live.model.named_parameters():
            with suppress(KeyError):  # another rank has it
                state = optimizer._get_main_param_and_optimizer_states(one)
                start = optimizer._get_model_param_range_map(one)["param"].start
                mine += [(f"{slot}/{filed(name)}", start, state[slot]) for slot in MOMENTS]
    every: list[Any] = [None] * world_size
    dist.all_gather_object(every, mine)
    pieces: dict[str, list[torch.Tensor]] = {}
    for key, _, value in sorted((one for some in every for one in some), key=lambda one: one[:2]):
        pieces.setdefault(key, []).append(value.reshape(-1))
    return {"tensors": {key: torch.cat(some) for key, some in pieces.items()}}


def _verl(rank: int, world_size: int, kind: str, path: Path) -> dict[str, Any]:
    model, optimizer, scheduler = trained(1, sharded=True, steps=0)
    verl.load(model, optimizer, scheduler, path, rank, world_size)
    return _told(model, optimizer, scheduler)


def _lightning(rank: int, world_size: int, kind: str, path: Path) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    trainer = lightning_of(
        rank,
        world_size,
        "ddp",
        enable_checkpointing=False,
        max_steps=STEPS + 2,
        default_root_dir=path.parent / f"again{rank}",
    )
    with suppress(_EnoughError):
        trainer.fit(module_of(1, seen), torch.utils.data.DataLoader(Texts()), ckpt_path=str(path))
    return seen


class Holder(torch.nn.Module):
    """Tensors of given names and shapes, as the model of another program has them."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            at: torch.nn.Module = self
            *above, last = name.split(".")
            for one in above:
                if not hasattr(at, one):
                    at.add_module(one, torch.nn.Module())
                at = getattr(at, one)
            at.register_parameter(last, torch.nn.Parameter(torch.zeros(shape)))


def weights_by(rank: int, world_size: int, loads: list[tuple[str, Path]], shapes: dict[str, tuple[int, ...]],
               groups: list[list[str]]) -> list[dict[str, torch.Tensor]]:  # fmt: skip
    """Return the float32 weights that an FSDP2 training has after each load: by stock DCP, zckpt's reader or load."""
    from torch.distributed.fsdp import fully_shard

    found = []
    for how, path in loads:
        model = Holder(shapes)
        fully_shard(model)
        live = dict(model.named_parameters())
        optimizer = torch.optim.AdamW([{"params": [live[name] for name in names]} for names in groups], lr=1.0)
        if how == "load":
            zckpt.load(path, model=model, optimizer=optimizer, strict=False)
        elif how == "reader":
            load_by_dcp(model, optimizer, storage_reader=zckpt.dcp.Reader(path))
        else:
            load_by_dcp(model, optimizer, checkpoint_id=path)
        found.append({name: one.full_tensor().detach().clone() for name, one in model.named_parameters()})
    return found


def trained_vit(rank: int, world_size: int, folder: Path, paths: list[Path]) -> list[dict[str, torch.Tensor]]:
    """Train a ViT with the Trainer, or go on from paths; return its weights when it saves, or would take a step."""
    from transformers import Trainer, TrainerCallback, TrainingArguments, ViTConfig, ViTForImageClassification

    class Watching(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **given: Any) -> None:
            if state.global_step == STEPS:
                found.append({name: one.detach().clone() for name, one in model.named_parameters()})

    class Pictures(Texts):
        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            made = torch.Generator().manual_seed(index)
            return {"pixel_values": torch.randn(3, 8, 8, generator=made), "labels": torch.tensor(index % 2)}

    found: list[dict[str, torch.Tensor]] = []
    for seed, path in enumerate([None, *paths]):
        torch.manual_seed(seed)
        config = ViTConfig(
            hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, image_size=8, patch_size=4
        )
        arguments = TrainingArguments(
            output_dir=str(folder / f"out{seed}"), per_device_train_batch_size=1, max_steps=STEPS + 1,
            save_steps=STEPS, use_cpu=True, report_to=[], disable_tqdm=True, dataloader_pin_memory=False,
        )  # fmt: skip
        trainer = Trainer(
            ViTForImageClassification(config), arguments, train_dataset=Pictures(), callbacks=[Watching()]
        )
        trainer.train(resume_from_checkpoint=None if path is None else str(path))
    return found


def _zckpt(rank: int, world_size: int, kind: str, path: Path) -> dict[str, Any]:
    model, optimizer, _ = trained(1, steps=0)
    front = ""
    if kind == "Megatron":
        shapes = {one.name: tuple(one.shape) for one in zckpt.open(path).parameters.values()}
        model = Holder(shapes)
        decayed = [one for one in model.parameters() if one.ndim > 1]
        rest = [one for one in model.parameters() if one.ndim == 1]
        optimizer = torch.optim.AdamW([{"params": decayed}, {"params": rest}], lr=1.0)
    elif kind == "Lightning":
        model = module_of(1, None)
        optimizer, front = torch.optim.AdamW(model.parameters(), lr=1.0), "net."
    elif kind.startswith("Trainer"):
        optimizer = torch.optim.AdamW(groups_of(model), lr=1.0)
    scheduler = None if kind == "Megatron" else scheduler_of(optimizer)
    zckpt.load(path, model=model, optimizer=optimizer, scheduler=scheduler)
    return _told(model, optimizer, scheduler, front)


PROGRAMS: dict[str, Callable[[int, int, str, Path], dict[str, Any]]] = {
    "deepspeed": _deepspeed, "trainer": _trainer, "accelerate": _accelerate, "fsdp2": _fsdp2, "megatron": _megatron,
    "verl": _verl, "lightning": _lightning, "zckpt": _zckpt,
}  # fmt: skip
