"""What a live engine of DeepSpeed is: its methods, how it cuts its state, and its parameters in their order."""

from __future__ import annotations

import importlib
import inspect
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

import torch

from zckpt.engine.tensors import dtype_name
from zckpt.errors import MissingPackageError, UnsupportedError, UsageError, about, listed
from zckpt.formats.deepspeed.in_place import Pipeline, Training
from zckpt.formats.deepspeed.target import Unpartitioned
from zckpt.formats.deepspeed.trees import PLAIN, form_of
from zckpt.optim.states.by_parameter import owner_of
from zckpt.optim.states.expected import check_keys
from zckpt.state import Checkpoint, by_key, without

ENGINE = "deepspeed.runtime.engine"

_MEMORY = "/dev/shm"  # noqa: S108  # folders in it get names of their own
"""A file system in memory, on Linux."""

_EXPERTS = "ep_size_"
"""How the name of a group of expert-parallel ranks begins; the rest is their number."""

_replaced: list[str] = []
"""Methods of single engines that are replaced now."""


@contextmanager
def replaced_method(
    engine: Any, name: str, run: Callable[[Any, Callable[..., Any], dict[str, Any]], Any]
) -> Iterator[None]:
    """Replace a method of an engine, or of all if it is None, as long as the context lasts.

    `run` is called with the engine, the method that was there, and all arguments by their names. Raises
    MissingPackageError: without an engine: DeepSpeed is not installed; UsageError: without an engine, within a context
    of one: its own method would hide this one.
    """
    if engine is None and _replaced:
        raise UsageError("an outer context was given an engine", advice="give both contexts the engine, or neither")
    try:
        holder: Any = importlib.import_module(ENGINE).DeepSpeedEngine if engine is None else engine
    except ImportError as error:
        raise MissingPackageError("without an engine argument, this needs DeepSpeed") from error
    was = vars(holder).get(name)
    original = getattr(holder, name)

    @wraps(original)  # so that one that replaces this one finds its arguments
    def method(*given: Any, **named: Any) -> Any:
        own = given[0] if engine is None else engine
        call = partial(original, own) if engine is None else original
        bound = inspect.signature(call).bind(*(given[1:] if engine is None else given), **named)
        bound.apply_defaults()
        return run(own, call, bound.arguments)

    setattr(holder, name, method)
    if engine is not None:
        _replaced.append(name)
    try:
        yield
    finally:
        if engine is not None:
            _replaced.remove(name)
        if was is None:
            delattr(holder, name)
        else:
            setattr(holder, name, was)


def names_folder() -> tempfile.TemporaryDirectory[str]:
    """Return an empty folder for names and little else, in memory where there is such a place."""
    return tempfile.TemporaryDirectory(prefix=f"zckpt-names-{os.getpid()}-", dir=in_memory())


def in_memory() -> str | None:
    """Return a directory in memory; None where there is none that can be written."""
    return _MEMORY if os.access(_MEMORY, os.W_OK | os.X_OK) else None


def has_cores() -> bool:
    """Tell whether each rank of this machine has more than one core."""
    local = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or ""
    ranks = int(local) if local.isdecimal() else torch.distributed.get_world_size()
    return (os.cpu_count() or 1) >= 2 * ranks


def experts_over(engine: Any) -> int | None:
    """Return over how many ranks an engine spreads experts; None where it has none, or their groups do not say.

    Source: DeepSpeed 0.14.5 to 0.19.8: `group_name` of experts' parameters, AutoEP's included.
    """
    names = {str(getattr(one, "group_name", "")) for one in engine.module.parameters()}
    sizes = [int(name.removeprefix(_EXPERTS)) for name in names if name.removeprefix(_EXPERTS).isdecimal()]
    return max(sizes, default=None)


def kind_that_keeps(engine: Any) -> str | None:
    """Return what an engine has that keeps it from loading what was cut otherwise."""
    if getattr(engine, "pipeline_parallelism", False) and not engine.zero_optimization():
        return "a pipeline without ZeRO"
    if getattr(engine, "has_moe_layers", False):
        return "experts"
    if getattr(engine.optimizer, "swap_optimizer", False):
        return "an optimizer on NVMe"
    if type(engine.optimizer).__name__ == "MiCS_Optimizer":
        return "MiCS"
    if getattr(engine, "zenflow", False):  # which stores matrices as its version does
        return "ZenFlow"
    return None


def check_goes_on(engine: Any, checkpoint: Checkpoint) -> list[str]:
    """Raise if an engine's optimizer cannot go on with a checkpoint's state; return the settings that that lacks.

    Its param groups are in the engine's order. Raises UsageError: it is of another optimizer; UnsupportedError:
    DeepSpeed itself cannot load it.
    """
    optimizer, path, found = engine.basic_optimizer, checkpoint.named, dict[str, None]()
    if not isinstance(optimizer, torch.optim.Optimizer):
        return []
    stage = int(engine.zero_optimization_stage())
    if stage == 3 and isinstance(optimizer, torch.optim.Adagrad) and checkpoint.param_groups:
        raise UnsupportedError(  # it gives all partitions to one param group, and files have one for each
            "DeepSpeed's ZeRO-3 cannot load any state into Adagrad, not even its own",
            path=path,
            advice="load_checkpoint(..., load_optimizer_states=False) leaves the engine's optimizer unchanged",
        )
    flat = bool(stage) or hasattr(engine.optimizer, "fp32_groups_flat")
    for number, group in enumerate(checkpoint.param_groups):
        own = optimizer.param_groups[min(number, len(optimizer.param_groups) - 1)]
        of_ranks = {one.key: True for one in checkpoint.per_rank if one.group == number}
        stateful = False
        for name in group.parameters:
            one = owner_of(checkpoint, name)
            if one is not None and (one.optimizer_slots or one.state or of_ranks):
                stateful = True
                values = {**dict.fromkeys(sorted(one.optimizer_slots), True), **of_ranks, **group.state, **one.state}
                dim = 1 if flat else len(one.shape)
                with about(path):
                    check_keys(optimizer, {**own, **group.hyperparameters}, name, dim, values)
        lacking = _lacking(optimizer, group.hyperparameters) if group.hyperparameters else []
        if lacking and not stateful:
            raise UsageError(
                f"{type(optimizer).__name__} cannot continue from param group {number}",
                path=path,
                expected=listed(lacking),
                found=listed(list(group.hyperparameters)),
                advice="load_checkpoint(..., load_optimizer_states=False) leaves the engine's optimizer unchanged",
            )
        found |= dict.fromkeys(lacking)
    return list(found)


def _lacking(optimizer: torch.optim.Optimizer, given: Mapping[str, object]) -> list[str]:
    """Return the settings of an optimizer that a param group does not have, and loading does not give it."""
    cls, group = type(optimizer), {**given, "params": []}
    once: Any = type(cls.__name__, (cls,), {"__del__": lambda _: None})  # what holds it lets go of it once
    copy = object.__new__(once)
    copy.__dict__.update(optimizer.__dict__, defaults=dict(optimizer.defaults))
    copy.__setstate__({"state": {}, "param_groups": [group]})
    return [key for key in optimizer.defaults if key not in group]


def training_of(engine: Any) -> Training:
    """Describe an engine.

    Source: DeepSpeed 0.14.5 to 0.19.8: `_get_zero_param_shapes` of its engine, and the attributes of its optimizers.
    """
    bf16 = type(engine.optimizer).__name__ == "BF16_Optimizer"  # which cuts as ZeRO-1 does; to 0.18, at stage 0, too
    stage = 1 if bf16 else int(engine.zero_optimization_stage())
    names = by_key((one, name) for name, one in engine.module.named_parameters(remove_duplicate=False))
    optimizer, form = engine.optimizer, None
    stored: list[list[Any]] = []
    partitions: list[Any] = []
    if optimizer is None:
        groups = [[parameter for parameter in names if parameter.requires_grad]]
    elif bf16:
        groups = stored = optimizer.bf16_groups
        partitions = optimizer.fp32_groups_flat_partition
    elif stage in (1, 2):
        groups, stored = optimizer.bit16_groups, optimizer.round_robin_bit16_groups
        partitions = optimizer.single_partition_of_fp32_groups
    elif stage == 3:
        stored, partitions = optimizer.fp16_groups, optimizer.fp32_partitioned_groups_flat
        groups = [[] for _ in optimizer.param_groups]  # some of which nothing is trained
        for index, parameters in enumerate(stored):
            groups[optimizer.sub_group_to_group_id[index]] += parameters
    else:
        form, numbered, scaling = _unpartitioned(engine)
        groups = [[one for one in group if one.requires_grad] for group in numbered]
    known = {one: its[0] for one, its in names.items()}
    dtypes = {one.dtype for group in groups for one in group}
    shapes = [{known[one]: tuple(getattr(one, "ds_shape", one.shape)) for one in group} for group in stored]
    group = getattr(optimizer, "dp_process_group", None) if stage else None
    ranks = engine.seq_dp_world_size if hasattr(engine, "seq_dp_world_size") else engine.dp_world_size
    pipeline = None
    if getattr(engine, "pipeline_parallelism", False):
        tied = [getattr(layer, "key", None) if hasattr(layer, "tied_weight_attr") else None
                for layer in engine.module._layer_specs]  # fmt: skip
        pipeline = Pipeline(tuple(int(bound) for bound in engine.module.parts), tied, int(engine.stage_id))
    return Training(
        world_size=int(ranks),
        rank=torch.distributed.get_rank(group) if group is not None else 0,
        tensor_parallel=int(engine.mp_world_size) // (1 if pipeline is None else pipeline.stages),
        mp_rank=int(engine.mpu.get_model_parallel_rank()) if int(engine.mp_world_size) > 1 else 0,
        stage=stage,
        round_robin=stage in (1, 2) and bool(getattr(optimizer, "round_robin_gradients", False)),
        alignment=stage in (1, 2) and bool(getattr(engine, "zero_parameter_alignment", bool)()),
        bf16_optimizer=bf16,
        sub_group_size=int(engine.zero_sub_group_size() or 10**9) if stage == 3 else 10**9,
        dtype=dtype_name(dtypes.pop()) if len(dtypes) == 1 else "mixed",
        groups=[[known[one] for one in group] for group in groups],
        stored=shapes,
        partitions=[one.numel() for one in partitions],
        names=list(names.values()),
        unpartitioned=None if form is None else
        Unpartitioned(form, [[known[one] for one in group] for group in numbered], scaling),
        pipeline=pipeline,
        hyperparameters=[without(group, "params")
                         for group in getattr(optimizer, "param_groups", ())],
    )  # fmt: skip


def _unpartitioned(engine: Any) -> tuple[str, list[list[Any]], dict[str, object]]:
    """Return the form in which a stage-0 optimizer takes its state, its parameters, and its own loss scaling."""
    optimizer = engine.optimizer
    form, plain = form_of(vars(optimizer)), (bool, int, float, type(None))  # whose attributes are called as keys are
    if form != PLAIN:
        scaling: dict[str, object] = {k: v for k, v in optimizer.state_dict().items() if isinstance(v, plain)}
        return form, optimizer.fp16_groups, scaling
    if isinstance(optimizer, torch.optim.Optimizer):
        return form, [group["params"] for group in optimizer.param_groups], {}
    raise UnsupportedError(
        "a stage-0 engine with this optimizer is not supported",
        found=type(optimizer).__name__,
        expected="one of torch, FP16_Optimizer or FP16_UnfusedOptimizer",
    )
