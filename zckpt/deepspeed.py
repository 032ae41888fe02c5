"""Stock DeepSpeed resumes from any checkpoint, at any number of ranks and any stage, in place: nothing is converted.

    with zckpt.deepspeed.any_world_size(engine):
        engine.load_checkpoint("run")

    with zckpt.deepspeed.any_world_size():       # every engine: of Trainer, Accelerate, Lightning
        trainer.train(resume_from_checkpoint=True)

`load_checkpoint` is led to a folder of empty files with the names that the engine looks for, and a checkpoint engine that
gives it, for each of those names, a file that is planned and never written (`engine.virtual`): its own rank's, laid out
as `reshard` would write it. DeepSpeed loads that as it loads its own.
"""

from __future__ import annotations

import inspect
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from zckpt.errors import MissingPackageError, UnsupportedError, UsageError, require_torch

require_torch("zckpt.deepspeed")

import torch

from zckpt.engine.virtual import VirtualFile, check_readable
from zckpt.formats import open_checkpoint
from zckpt.formats.deepspeed.directory import MODEL, OPTIMIZER, Shard, classify
from zckpt.formats.deepspeed.in_place import Served, Training, is_as_it_is, scheduler_of, serve
from zckpt.formats.deepspeed.write_stage0 import FUSED, PLAIN, UNFUSED, Unpartitioned
from zckpt.operations.tensors import TensorRead, dtype_name, read_tensors
from zckpt.operations.target import check_nothing_lost
from zckpt.optim.ranks import Ranks
from zckpt.state import MASTER, WEIGHT, Checkpoint, Extent

__all__ = ["Loading", "any_world_size"]

_ENGINE = "deepspeed.runtime.engine"
_CONSOLIDATE = "get_fp32_state_dict_from_zero_checkpoint"
"""What a ZeRO-3 engine calls to load a model without its optimizer; it opens files of its own."""

_OWN_CLASSES = (
    ("deepspeed.runtime.fp16.loss_scaler", "LossScaler"),
    ("deepspeed.runtime.fp16.loss_scaler", "DynamicLossScaler"),
    ("deepspeed.runtime.zero.config", "ZeroStageEnum"),
    ("deepspeed.utils.tensor_fragment", "fragment_address"),
)
"""What files that are laid out for DeepSpeed mention, whatever they were laid out from."""


@dataclass(slots=True)
class Loading:
    """What was loaded in place, on this rank.

    Parameters
    ----------
    read_nbytes : int, bytes
        Of tensors.
    notes : list of str
        What of the checkpoints did not arrive as it was.
    in_place : list of str
        Checkpoints that were laid out for the engine; what it could load as it is, it did.
    """

    read_nbytes: int = 0
    notes: list[str] = field(default_factory=list)
    in_place: list[str] = field(default_factory=list)


@contextmanager
def any_world_size(engine: Any = None) -> Iterator[Loading]:
    """Let `load_checkpoint` take any checkpoint that zckpt reads, as long as the context lasts.

    Another world size, another stage of ZeRO, another tensor-parallel degree (where the checkpoint has rules), another
    format: state is found by the names of the engine's parameters. Each rank reads the bytes of its own part, and of the
    model what DeepSpeed gives every rank. What the engine can load as it is, it loads itself, without zckpt. All
    arguments of `load_checkpoint` mean what they mean; a directory that is not there is passed on to DeepSpeed.

    Client state of DeepSpeed's own checkpoints is unpickled, as DeepSpeed does it. Of other formats nothing is but plain
    data, tensors and DeepSpeed's own loss scalers.

    Parameters
    ----------
    engine : DeepSpeedEngine, optional
        By default every engine: for programs that make theirs in the call that loads.

    Yields
    ------
    Loading

    Raises
    ------
    UsageError
        From `load_checkpoint`, on all ranks: the checkpoint is of another model or other param groups.
    UnsupportedError
        The engine is of a kind that only loads what one like it saved (experts, pipelines, NVMe), or the checkpoint
        holds what DeepSpeed's files cannot.
    SourceError
        The checkpoint cannot be read.
    MissingPackageError
        Without an engine: DeepSpeed is not installed.
    """
    loading = Loading()
    holder = _engine_class() if engine is None else engine
    was = vars(holder).get("load_checkpoint")
    original = holder.load_checkpoint

    def load_checkpoint(*given: Any, **named: Any) -> Any:
        own = given[0] if engine is None else engine
        call = partial(original, own) if engine is None else original
        bound = inspect.signature(call).bind(*(given[1:] if engine is None else given), **named)
        bound.apply_defaults()
        return _load(own, call, bound.arguments, loading)

    holder.load_checkpoint = load_checkpoint
    try:
        yield loading
    finally:
        if was is None:
            del holder.load_checkpoint
        else:
            holder.load_checkpoint = was


def _engine_class() -> Any:
    try:
        __import__(_ENGINE)
    except ImportError as error:
        raise MissingPackageError("any_world_size() without an engine needs DeepSpeed") from error
    return sys.modules[_ENGINE].DeepSpeedEngine


def _load(engine: Any, call: Callable[..., Any], arguments: dict[str, Any], loading: Loading) -> Any:
    """Load a checkpoint into an engine as it is, or in place."""
    directory, tag = arguments["load_dir"], arguments["tag"]
    path = Path(directory) if tag is None else Path(directory, str(tag))
    if engine.load_universal_checkpoint() or not path.exists():
        return call(**arguments)
    module_only = arguments["load_module_only"]
    wants_optimizer = arguments["load_optimizer_states"] and not module_only and engine.optimizer is not None
    ranks = Ranks()
    served = ranks.do(lambda: _served(engine, path, optimizer=wants_optimizer))
    if served is None:
        return call(**arguments)
    if wants_optimizer or not module_only:
        ranks.do(lambda: _check_scheduler(engine, served, arguments, path))
    loading.notes += served.notes
    loading.in_place.append(str(path))
    if ranks.rank == 0:
        for note in served.notes:
            warnings.warn(f"{path}: {note}", stacklevel=4)
    if module_only and served.training.stage == 3:
        arguments["load_optimizer_states"] = False  # else it takes weights from a file that has none
    stand_in = _CheckpointEngine(engine.checkpoint_engine, served)
    with _folder(engine, served) as (folder, name), _consolidating(engine, served, wants_optimizer):
        engine.checkpoint_engine = stand_in
        try:
            found, client_state = call(**{**arguments, "load_dir": folder, "tag": name})
        finally:
            engine.checkpoint_engine = stand_in.stock
            loading.read_nbytes += stand_in.read_nbytes
    return (None if found is None else str(path)), client_state


def _served(engine: Any, path: Path, *, optimizer: bool) -> Served | None:
    """Return a checkpoint cut for an engine; None where the engine can load it as it is."""
    checkpoint = open_checkpoint(path)
    kind = _kind_that_keeps(engine)
    if kind is not None:
        topology = checkpoint.topology
        if checkpoint.format == "deepspeed" and topology.dp == engine.dp_world_size and topology.pp == _stages(engine):
            return None
        raise UnsupportedError(
            f"an engine with {kind} loads only what one like it has saved",
            path=path,
            found=f"{checkpoint.format} of {topology.dp} data-parallel ranks",
            expected=f"DeepSpeed's, of {engine.dp_world_size}",
            advice="`zckpt reshard` or `zckpt convert` writes it for this engine, where that is possible",
        )
    training = _training(engine)
    if is_as_it_is(checkpoint, training):
        return None
    check_nothing_lost(checkpoint, ())
    served = serve(checkpoint, training, optimizer=optimizer)
    wanted = [Shard("model_states.pt", MODEL, training.rank, training.mp_rank)]
    if optimizer and training.stage:
        wanted.append(Shard("optim_states.pt", OPTIMIZER, training.rank, training.mp_rank))
    check_readable(served.file(shard) for shard in wanted)
    return served


def _check_scheduler(engine: Any, served: Served, arguments: dict[str, Any], path: Path) -> None:
    if arguments["load_lr_scheduler_states"] and engine.lr_scheduler is not None and scheduler_of(served) is None:
        raise UsageError(
            "holds no state of a learning-rate scheduler, and the engine has one",
            path=path,
            advice="load_checkpoint(..., load_lr_scheduler_states=False) leaves the engine's as it is",
        )


class _CheckpointEngine:
    """Stands in for an engine's checkpoint engine while it loads; all but loading is the other's.

    A model file is asked for twice, first for one number in it: it is made once.
    """

    def __init__(self, stock: Any, served: Served) -> None:
        self.stock = stock
        self.read_nbytes = 0
        self._served = served
        self._trusted = served.target.checkpoint.format == "deepspeed"
        self._kept: dict[str, Any] = {}

    def load(self, path: str, map_location: Any = None) -> Any:
        """Return the content of a file that is not there."""
        if path in self._kept:
            return self._kept.pop(path)
        shard = classify(Path(path).name, path)
        if shard is None:
            raise UsageError("the engine asks for a file that is none of DeepSpeed's", path=path)
        file = VirtualFile(self._served.file(shard))
        if self._trusted:
            content = torch.load(file, map_location=map_location, weights_only=False)  # type: ignore[arg-type]
        else:
            with torch.serialization.safe_globals(_own_classes()):
                content = torch.load(file, map_location=map_location, weights_only=True)  # type: ignore[arg-type]
        self.read_nbytes += file.read_nbytes
        if shard.role == MODEL:
            self._kept[path] = content
        return content

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stock, name)


def _own_classes() -> list[Any]:
    return [getattr(__import__(module, fromlist=[name]), name) for module, name in _OWN_CLASSES]


@contextmanager
def _folder(engine: Any, served: Served) -> Iterator[tuple[str, str]]:
    """Make a run directory of empty files, under the names that the engine looks for; yield it, and the tag."""
    training = served.training
    prefix = "bf16_" if engine.bfloat16_enabled() else ""
    names = []
    for mp_rank in range(training.tensor_parallel):
        for rank in range(training.world_size):
            names.append(f"{prefix}zero_pp_rank_{rank}_mp_rank_{mp_rank:02d}_optim_states.pt")
            if training.stage == 3:
                names.append(f"zero_pp_rank_{rank}_mp_rank_{mp_rank:02d}_model_states.pt")
        if training.stage != 3:
            names.append(f"mp_rank_{mp_rank:02d}_model_states.pt")
    with tempfile.TemporaryDirectory(prefix="zckpt-names-") as folder:
        Path(folder, served.tag).mkdir()
        for name in names:
            Path(folder, served.tag, name).touch()
        yield folder, served.tag


@contextmanager
def _consolidating(engine: Any, served: Served, optimizer: bool) -> Iterator[None]:
    """Let a ZeRO-3 engine that loads a model alone have it from zckpt."""
    module = sys.modules.get(_ENGINE)
    if optimizer or served.training.stage != 3 or not hasattr(module, _CONSOLIDATE):
        yield
        return
    original = getattr(module, _CONSOLIDATE)
    setattr(module, _CONSOLIDATE, lambda *_, **__: _whole_model(served.target.checkpoint))
    try:
        yield
    finally:
        setattr(module, _CONSOLIDATE, original)


def _whole_model(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """Return the model: masters of what is trained, all else as it is."""
    found: dict[str, torch.Tensor] = {}
    reads = []
    for one in checkpoint.tensors():
        if one.tied_to is not None:
            continue
        slot = one.slots.get(MASTER, one.slots.get(WEIGHT))
        if slot is None:
            raise UnsupportedError(f"no file holds the values of {one.name}", path=checkpoint.source)
        tensor = torch.empty(one.shape, dtype=getattr(torch, slot.dtype))
        found[one.name] = tensor
        reads.append(TensorRead(slot, Extent.whole(slot.shape), tensor))
    read_tensors(reads)
    for one in checkpoint.parameters.values():
        if one.tied_to is not None:
            found[one.name] = found[one.tied_to]
    return found


# --- what a live engine is


def _stages(engine: Any) -> int:
    return int(getattr(engine, "num_stages", 1))


def _kind_that_keeps(engine: Any) -> str | None:
    """Return what an engine has that keeps it from loading what was cut otherwise."""
    if getattr(engine, "pipeline_parallelism", False) or _stages(engine) > 1:
        return "a pipeline"
    if getattr(engine, "has_moe_layers", False):
        return "experts"
    if engine.zero_nvme_offload_optimizer():
        return "an optimizer on NVMe"
    if type(engine.optimizer).__name__ == "MiCS_Optimizer":
        return "MiCS"
    return None


def _training(engine: Any) -> Training:
    """Describe an engine.

    Notes
    -----
    Source: DeepSpeed 0.14.5 to 0.19.8: `_get_zero_param_shapes` of its engine, and the attributes of its optimizers.
    """
    stage = int(engine.zero_optimization_stage())
    names: dict[Any, list[str]] = {}
    for name, parameter in engine.module.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    optimizer, form = engine.optimizer, None
    bf16 = type(optimizer).__name__ == "BF16_Optimizer"
    stored: list[list[Any]] = []
    partitions: list[Any] = []
    if optimizer is None:
        groups = [[parameter for parameter in names if parameter.requires_grad]]
    elif bf16 and stage == 1:
        groups = stored = optimizer.bf16_groups
        partitions = optimizer.fp32_groups_flat_partition
    elif stage in (1, 2):
        groups, stored = optimizer.bit16_groups, optimizer.round_robin_bit16_groups
        partitions = optimizer.single_partition_of_fp32_groups
    elif stage == 3:
        stored, partitions = optimizer.fp16_groups, optimizer.fp32_partitioned_groups_flat
        groups = [[] for _ in set(optimizer.sub_group_to_group_id.values())]
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
    return Training(
        world_size=int(ranks),
        rank=torch.distributed.get_rank(group) if group is not None else 0,
        tensor_parallel=int(engine.mp_world_size),
        mp_rank=int(getattr(engine, "checkpoint_mp_rank", 0)),
        stage=stage,
        round_robin=stage in (1, 2) and bool(getattr(optimizer, "round_robin_gradients", False)),
        alignment=stage in (1, 2) and bool(getattr(engine, "zero_parameter_alignment", bool)()),
        bf16_optimizer=bf16 and stage == 1,
        sub_group_size=int(engine.zero_sub_group_size() or 10**9) if stage == 3 else 10**9,
        dtype=dtype_name(dtypes.pop()) if len(dtypes) == 1 else "mixed",
        groups=[[known[one] for one in group] for group in groups],
        stored=shapes,
        partitions=[one.numel() for one in partitions],
        names=list(names.values()),
        unpartitioned=None if form is None else
        Unpartitioned(form, [[known[one] for one in group] for group in numbered], scaling),
    )  # fmt: skip


def _unpartitioned(engine: Any) -> tuple[str, list[list[Any]], dict[str, object]]:
    """Return the form in which a stage-0 optimizer takes its state, its parameters, and its own loss scaling."""
    optimizer = engine.optimizer
    if hasattr(optimizer, "fp32_groups_flat"):
        form, numbered = FUSED, optimizer.fp16_groups
    elif hasattr(optimizer, "fp32_groups"):
        form, numbered = UNFUSED, optimizer.fp16_groups
    elif isinstance(optimizer, torch.optim.Optimizer):
        return PLAIN, [group["params"] for group in optimizer.param_groups], {}
    else:
        raise UnsupportedError(
            "an engine of stage 0 with this optimizer is not known",
            found=type(optimizer).__name__,
            expected="one of torch, FP16_Optimizer or FP16_UnfusedOptimizer",
        )
    plain = (bool, int, float, type(None))
    return form, numbered, {key: value for key, value in optimizer.state_dict().items() if isinstance(value, plain)}
