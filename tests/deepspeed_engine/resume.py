"""Let stock DeepSpeed load a run directory and compare what it then holds and trains with the truth."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests import gloo
from tests.deepspeed_engine import models
from tests.deepspeed_engine.spec import Spec
from tests.deepspeed_engine.training import build_engine, train_step
from tests.deepspeed_engine.truth import machine, read_live

# Where bits cannot be expected: another world size reduces in another order, another machine or torch has
# other kernels. Losses are near 3.6 (measured: 1e-6 in fp32, 6e-4 in 16 bits).
LOSS_TOLERANCE = {"fp32": 2e-5, "bf16": 3e-3, "fp16": 3e-3}
HYPERPARAMETERS = ("lr", "weight_decay", "betas", "momentum", "eps")


@dataclass
class Verdict:
    """What differs between a resumed run and the truth; empty lists are good news."""

    slots: list[str] = field(default_factory=list)  # not bit-equal, or absent
    weights: list[str] = field(default_factory=list)
    hyperparameters: list[str] = field(default_factory=list)
    steps: list[str] = field(default_factory=list)
    held: list[str] = field(default_factory=list)  # what zckpt.assert_restored says of it
    losses: list[float] = field(default_factory=list)
    loss_difference: float = 0.0
    loss_tolerance: float = 0.0

    @property
    def differences(self) -> list[str]:
        return [*self.slots, *self.weights, *self.hyperparameters, *self.steps, *self.held]

    @property
    def ok(self) -> bool:
        return not self.differences and self.loss_difference <= self.loss_tolerance

    def assert_goes_on(self, within: float | None = None) -> None:
        """Assert that all that was loaded is right, and that losses are this near, or as near as bits let them be."""
        assert not self.differences, self.differences
        assert self.loss_difference <= (self.loss_tolerance if within is None else within), self.losses


def resume(
    run_directory: str | Path,
    spec: Spec,
    truth_folder: str | Path,
    *,
    universal: bool = False,
    in_place: bool = False,
    then: Callable[[Any], None] | None = None,
) -> Verdict:
    """Load `run_directory` into the engine of `spec` and train the next steps.

    `spec` is that of the saved run, with the world size (`spec.at(6)`) or stage wanted now. The model starts
    from another seed than the saved one, so that nothing is right by accident. With `in_place`, zckpt serves it the
    checkpoint, which may be of any format. `then` is what the program does with the engine once it has loaded.
    """
    if universal:
        spec = spec.at(spec.world_size, config={**spec.config, "checkpoint": {"load_universal": True}})
    paths = Path(run_directory).absolute(), Path(truth_folder).absolute()  # ranks are elsewhere
    return gloo.run(_resume, spec.world_size, spec, *paths, in_place, then)[0]


def _resume(
    rank: int, world_size: int, spec: Spec, run: Path, folder: Path, in_place: bool, then: Callable[[Any], None] | None
) -> Verdict:
    from safetensors.torch import load_file

    from zckpt.deepspeed import any_world_size

    about = json.loads((folder / "truth.json").read_text())
    engine = build_engine(spec, seed=models.MODEL_SEED + 1)
    with any_world_size(engine) if in_place else nullcontext():
        path, _ = engine.load_checkpoint(str(run))
    if path is None:
        raise FileNotFoundError(f"DeepSpeed found no checkpoint in {run}")
    if then is not None:
        then(engine)
    live = read_live(engine, spec)
    held = [] if _is_cut_otherwise(spec) else held_against(run, engine)
    verdict = Verdict()
    if rank == 0:  # whose verdict counts
        truth = load_file(folder / "truth.safetensors")
        verdict = Verdict(
            slots=_compare_slots(live.slots, truth),
            weights=[n for n, v in live.weights.items() if not _same(v, truth.get(f"module/{n}"))],
            hyperparameters=_compare_groups(*_alike(engine.optimizer.param_groups, about["param_groups"])),
            steps=_compare_steps(*_alike(live.scalars, about["scalar_state_per_group"])),
            held=held,
        )
    for step, _ in enumerate(about["mean_losses_next"], spec.steps + 1):
        per_rank = train_step(engine, spec, step)
        verdict.losses.append(sum(per_rank) / len(per_rank))
    pairs = zip(verdict.losses, about["mean_losses_next"], strict=True)
    verdict.loss_difference = max((abs(a - b) for a, b in pairs), default=0.0)
    if (spec.data_parallel, machine()) != (about["dp_world_size"], about.get("machine")):
        verdict.loss_tolerance = LOSS_TOLERANCE[spec.dtype]
    return verdict


def _is_cut_otherwise(spec: Spec) -> bool:
    """Tell whether names and values do not say which part of a parameter a rank has, or what DeepSpeed adds to it."""
    return (
        spec.is_pipeline or spec.auto_tp or spec.tensor_parallel > 1 or "moe" in spec.model
        or "expert_parallel" in spec.config or "zenflow" in repr(spec) or "megatron" in spec.model
        or "load_universal" in repr(spec.config)
    )  # fmt: skip


def held_against(run: Path, engine: Any) -> list[str]:
    """Tell what an engine holds otherwise than a checkpoint, which all ranks have to ask."""
    import zckpt

    try:
        zckpt.assert_restored(run, model=engine, optimizer=engine.optimizer)
    except zckpt.NotRestoredError as error:
        return list(error.differences)
    except zckpt.UnsupportedError:  # what each rank has by itself
        pass
    return []


def _same(value: torch.Tensor, wanted: torch.Tensor | None) -> bool:
    return wanted is not None and torch.equal(value.reshape(-1), wanted.reshape(-1))


def _compare_slots(slots: dict[str, dict[str, torch.Tensor]], truth: dict[str, torch.Tensor]) -> list[str]:
    have = {f"{slot}/{name}": value for name, its in slots.items() for slot, value in its.items()}
    wanted = {key for key in truth if key.split("/")[0] not in ("module", "buffer")}
    different = [key for key, value in have.items() if not _same(value, truth.get(key))]
    return different + [f"absent: {key}" for key in sorted(wanted - have.keys())]


def _alike(groups: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> tuple[list[Any], list[Any]]:
    """Return both; where experts have been joined to fewer groups, each without what is the same as before it."""
    if len(groups) == len(wanted):
        return groups, wanted
    keys = {key for one in wanted for key in one} & {*HYPERPARAMETERS, "step"}

    def distinct(all_of_them: list[dict[str, Any]]) -> list[Any]:
        values = [[list(v) if isinstance(v := one.get(key), tuple) else v for key in keys] for one in all_of_them]
        return [one for i, one in enumerate(all_of_them) if i == 0 or values[i] != values[i - 1]]

    return distinct(groups), distinct(wanted)


def _compare_groups(groups: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> list[str]:
    differences = []
    for i, (group, its) in enumerate(zip(groups, wanted, strict=True)):
        for key in its.keys() & set(HYPERPARAMETERS):
            have = list(group[key]) if isinstance(group.get(key), tuple) else group.get(key)
            if have != its[key]:
                differences.append(f"group {i}: {key} is {have}, not {its[key]}")
    return differences


def _compare_steps(scalars: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> list[str]:
    have, want = ([s.get("step", {}).get("value") for s in each] for each in (scalars, wanted))
    return [] if have == want else [f"steps are {have}, not {want}"]
