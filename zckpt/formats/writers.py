"""The formats that a checkpoint can be written in, what each needs to be told, and the files it comes to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path

from zckpt.engine.plan import TargetFile
from zckpt.errors import UnsupportedError, UsageError
from zckpt.formats.suffixes import SAFETENSORS, TORCH, kind_of_model
from zckpt.state import Checkpoint
from zckpt.state.names import as_filed
from zckpt.state.partition import check_world_size
from zckpt.state.rank_values import listed
from zckpt.storage.ownership import Owned

DTYPES = ("float32", "bfloat16", "float16", "keep")


@dataclass(frozen=True, slots=True)
class Wanted:
    """How a target is to be, where its format leaves a choice; None: as the source is, or the format's default.

    Parameters
    ----------
    world_size : int or None
        Ranks that the target is cut for.
    stage : int or None
        ZeRO stage.
    elastic, round_robin, parameter_alignment : bool or None
        As a DeepSpeed training is configured.
    dtype : str or None
        Of trained parameters in a whole model.
    """

    world_size: int | None = None
    stage: int | None = None
    elastic: bool | None = None
    round_robin: bool | None = None
    parameter_alignment: bool | None = None
    dtype: str | None = None


@dataclass(frozen=True, slots=True)
class Made:
    """The files of a target.

    Parameters
    ----------
    files : list of TargetFile
        In the target directory; the only one is the target itself where `is_file`.
    owned : Owned
        Directories of this format, which may be replaced.
    beside : list of TargetFile
        Small ones of literals only that go into the target's parent, replacing what is there.
    is_file : bool
    notes : tuple of str
        What to know of the target.
    restated : frozenset of str
        Keys of the source's metadata that the target says in another form, or of which the notes tell.
    """

    files: list[TargetFile]
    owned: Owned
    beside: list[TargetFile] = field(default_factory=list)
    is_file: bool = False
    notes: tuple[str, ...] = ()
    restated: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Job:
    """What is to be written.

    Parameters
    ----------
    checkpoint : Checkpoint
    source, target : Path
        As the user named them.
    wanted : Wanted
    """

    checkpoint: Checkpoint
    source: Path
    target: Path
    wanted: Wanted


Writer = Callable[[Job], Made]

_OF_ENGINES = {"deepspeed", "universal"}
"""Formats of an engine that looks for the names that its model has, wrapped or not."""


def lay_out(checkpoint: Checkpoint, source: Path, target: Path, to: str, wanted: Wanted) -> Made:
    """Return the files of a checkpoint in another format.

    Raises
    ------
    UsageError
        An unknown format, or a wish that does not apply to it.
    UnsupportedError
        The format cannot hold the checkpoint.
    """
    if to not in _WRITERS:
        raise UsageError("unknown format", expected=", ".join(FORMATS), found=repr(to))
    applicable, writer = _WRITERS[to]
    for one in fields(wanted):
        if getattr(wanted, one.name) is not None and one.name not in applicable:
            raise UsageError(f"{one.name.replace('_', '-')} does not apply to {to}")
    if wanted.world_size is not None:
        check_world_size(wanted.world_size)
    if {to, checkpoint.format} <= _OF_ENGINES:
        checkpoint = as_filed(checkpoint)
    if checkpoint.per_rank and to != checkpoint.format:  # its own format knows when it can go along
        raise UnsupportedError(
            f"{listed(checkpoint.per_rank)}: each rank has its own, of the elements that it holds, and no other format "
            f"has a place for that",
            path=checkpoint.source,
            expected=f"--to {checkpoint.format} at {checkpoint.topology.dp} ranks",
            advice="`zckpt consolidate` writes the model by itself",
        )
    return writer(Job(checkpoint, source, target, wanted))


def _deepspeed(job: Job) -> Made:
    from zckpt.formats import remainder
    from zckpt.formats.deepspeed import carried, foreign, loss_scaling, names, writer
    from zckpt.formats.deepspeed.decide import decide
    from zckpt.formats.deepspeed.origin import Origin
    from zckpt.formats.deepspeed.other_files import files_beside
    from zckpt.formats.deepspeed.target import Options

    checkpoint, wanted = job.checkpoint, job.wanted
    origin = checkpoint.origin
    notes: tuple[str, ...] = ()
    own = isinstance(origin, Origin) and bool(origin.members)
    world_size = wanted.world_size if wanted.world_size is not None or not own else checkpoint.topology.dp
    stage = wanted.stage
    if not own:
        known = checkpoint.zero_stage or remainder.origin(checkpoint).get("zero_stage")
        stage = stage if stage is not None else (known if known in (1, 2, 3) and type(known) is int else None)
        if world_size is None or stage is None:
            raise UsageError(
                f"{'--world-size' if world_size is None else '--stage'} is needed to write a DeepSpeed checkpoint "
                f"from this source",
                path=checkpoint.source,
                found=checkpoint.format,
            )
        if stage not in (1, 2, 3):
            raise UsageError("unknown ZeRO stage", expected="1, 2 or 3", found=stage)
        adopted = foreign.adopt(checkpoint, stage=stage)
        notes, checkpoint = foreign.notes(checkpoint, stage=stage), adopted
        restated = set(loss_scaling.HANDLED)
        strange = sorted(job.checkpoint.optimizer_metadata.keys() - restated)
        if strange:
            raise UnsupportedError(
                f"DeepSpeed's files have no place for {', '.join(strange[:4])}, which the optimizer keeps beside its "
                f"state",
                path=checkpoint.source,
                advice="convert to zckpt or dcp",
            )
    else:
        stems = tuple(f"{Path(file.path).stem}." for file in checkpoint.files)
        restated = {key for key in (*checkpoint.metadata, *checkpoint.optimizer_metadata) if key.startswith(stems)}
    run_directory = not own or job.source.resolve() != Path(checkpoint.source).resolve()
    options = Options(world_size or 1, stage, wanted.elastic, wanted.round_robin, wanted.parameter_alignment)
    target = decide(checkpoint, options)
    beside, told = files_beside(checkpoint, job.source, target) if own and run_directory else ([], [])
    copied = {one.name for one in beside}
    ranks = carried.notes(target) if own else []
    if target.stage == 3 and "clip_grad" in job.checkpoint.optimizer_metadata:
        restated.add("clip_grad")
        told.append("clip_grad is not kept by ZeRO-3, which clips as the training's configuration says")
    return Made(
        [*writer.target_files(target, run_directory=run_directory), *beside],
        Owned(lambda name: names.is_own(name.rpartition("/")[2]) or name in copied),
        notes=(*notes, *ranks, *told),
        restated=frozenset(restated),
    )


def _dtype(job: Job) -> str:
    dtype = job.wanted.dtype or "keep"
    if dtype not in DTYPES:
        raise UsageError("unusable dtype", expected=" or ".join(DTYPES), found=repr(dtype))
    return dtype


def _universal(job: Job) -> Made:
    from zckpt.formats import universal

    return Made(
        universal.lay_out(job.checkpoint),
        Owned(universal.is_own),
        beside=[universal.latest_universal(job.target.name)],
        notes=universal.notes(job.checkpoint),
    )


def _consolidated(job: Job) -> Made:
    from zckpt.formats import consolidated

    target, dtype = job.target, _dtype(job)
    kind = kind_of_model(target)
    if kind == TORCH:
        file = consolidated.lay_out_file(target.name, job.checkpoint, dtype=dtype)
        return Made([file], Owned(lambda _: False), is_file=True)
    if kind == SAFETENSORS:
        raise UsageError(
            "one safetensors file holds a model only",
            path=target,
            expected="a directory or a .pt file",
            advice="use `zckpt consolidate` for the model by itself",
        )
    return Made(consolidated.lay_out(job.checkpoint, dtype=dtype), Owned(consolidated.is_own))


def _native(job: Job) -> Made:
    from zckpt.formats import native

    return Made(native.lay_out(job.checkpoint, world_size=job.wanted.world_size or 1), native.OWNED)


def _dcp(job: Job) -> Made:
    from zckpt.formats.dcp import writer

    files = writer.lay_out(job.checkpoint, world_size=job.wanted.world_size or 1, dtype=_dtype(job))
    return Made(files, Owned(writer.is_own))


def _zero_redundancy(job: Job) -> Made:
    from zckpt.formats import zero_redundancy

    per_rank = job.wanted.world_size is not None
    files = zero_redundancy.lay_out(
        job.checkpoint, world_size=job.wanted.world_size or 1, per_rank=per_rank, dtype=_dtype(job)
    )
    return Made(files, Owned(zero_redundancy.is_own))


_WRITERS: Mapping[str, tuple[tuple[str, ...], Writer]] = {
    "deepspeed": (("world_size", "stage", "elastic", "round_robin", "parameter_alignment"), _deepspeed),
    "universal": ((), _universal),
    "consolidated": (("dtype",), _consolidated),
    "zckpt": (("world_size",), _native),
    "dcp": (("world_size", "dtype"), _dcp),
    "zero-redundancy": (("world_size", "dtype"), _zero_redundancy),
}

FORMATS = tuple(_WRITERS)
