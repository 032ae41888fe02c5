"""A checkpoint of any format as the files that a live engine of DeepSpeed asks for, each by itself.

The engine says how it cuts its state and which parameters it has in which order (`Training`); `Served` is the
checkpoint cut so, by the writer's own `decide`, and lays out one file at a time. What the engine and the cut do not
agree on is refused before any file is laid out: a partition in another order would load without a word.

What a live engine of DeepSpeed is, to those who lay out files for it: data only.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import field, replace
from functools import cache
from pathlib import Path

from zckpt.engine.targets import TargetFile
from zckpt.errors import UnsupportedError, UsageError, listed
from zckpt.formats.deepspeed import foreign
from zckpt.formats.deepspeed.axes.stages import Layer, Stages, uses_of
from zckpt.formats.deepspeed.decide import decide, of_other_ranks
from zckpt.formats.deepspeed.directory import OPTIMIZER, PIPELINE_LAYER, Shard, classify
from zckpt.formats.deepspeed.hyperparameters import with_hyperparameters
from zckpt.formats.deepspeed.loss_scaling import HANDLED
from zckpt.formats.deepspeed.options import RecutOptions
from zckpt.formats.deepspeed.origin import origin_of
from zckpt.formats.deepspeed.rare.zenflow import DETAIL
from zckpt.formats.deepspeed.target import Target, Unpartitioned, rank_notes
from zckpt.formats.deepspeed.trees import form_of
from zckpt.formats.deepspeed.writer import documents
from zckpt.formats.torch_files import writer as torch_writer
from zckpt.formats.torch_files.attach import further_keys
from zckpt.immutable import immutable, mutable
from zckpt.state import MASTER, WEIGHT, Checkpoint, Parameter, ParamGroup, Shape, alias_of, first_of, without
from zckpt.state.names import as_filed


@mutable
class Served:
    """A checkpoint, cut as a live engine cuts its state."""

    target: Target
    training: Training
    notes: list[str] = field(default_factory=list)  # what of the checkpoint does not arrive as it was
    files: dict[tuple[object, ...], tuple[Shard, Callable[[], TargetFile]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Name the files, each of which is laid out once."""
        for one in documents(self.target):
            shard = classify(one.name, one.name)
            if shard is not None:
                self.files[shard.identity] = shard, cache(lambda one=one: torch_writer.lay_out(one.name, one.tree()))

    def file(self, path: str) -> TargetFile:
        """Return a file by its name. Raises UsageError: it is none of this checkpoint."""
        shard = classify(Path(path).name, path)
        if shard is None or shard.identity not in self.files:
            raise UsageError("the engine asks for a file that its checkpoint does not have", path=path)
        return self.files[shard.identity][1]()

    def of_rank(self, *, optimizer: bool) -> Iterator[TargetFile]:
        """Yield the files that this rank loads."""
        training, layers = self.training, () if self.training.pipeline is None else self.training.pipeline.layers
        for shard, laid_out in self.files.values():
            if shard.role == PIPELINE_LAYER:
                own = shard.layer in layers and (shard.mp_rank or 0) == training.mp_rank % training.tensor_parallel
            else:
                own = shard.mp_rank == training.mp_rank and shard.dp_rank in (None, training.rank)
            if own and (optimizer or shard.role != OPTIMIZER):
                yield laid_out()

    def complete(self, keys: Collection[str]) -> None:
        """Let param groups have the engine's own of some hyperparameters, before any file is laid out."""
        for mp in self.target.ranks:
            for number, (group, own) in enumerate(zip(mp.groups, self.training.hyperparameters, strict=False)):
                known = {**{key: own[key] for key in keys if key in own}, **group.values.hyperparameters}
                mp.groups[number] = replace(group, values=replace(group.values, hyperparameters=known))


def is_as_it_is(checkpoint: Checkpoint, training: Training) -> bool:
    """Tell whether a checkpoint is DeepSpeed's and cut as the engine cuts, so that it loads the files as they are."""
    origin, topology, pipeline = origin_of(checkpoint), checkpoint.topology, training.pipeline
    details = checkpoint.details
    axes = training.tensor_parallel, 1 if pipeline is None else pipeline.stages, pipeline is not None
    if origin is None or (topology.tp, topology.pp, bool(origin.layers)) != axes:
        return False
    if pipeline is not None:  # a rank finds the partitions of its stage in its own file
        own = origin.ranks[training.mp_rank]
        stored = sorted(name for one in training.stored for name in one)
        if training.rank >= len(own.members) or sorted(own.model.trained) != stored:
            return False
    if not origin.members:
        how, held = training.unpartitioned, origin.model.optimizer
        return training.stage == 0 and (how is None or (held is not None and form_of(held) == how.form))
    first, flat = origin.members[0], training.stage != 3
    found = (
        first.stage, topology.dp, first.elastic, bool(details.get(DETAIL)), first.bf16_optimizer,
        flat and bool(details.get("round_robin_gradients")), flat and origin.model.zero_option("parameter_alignment"),
    )  # fmt: skip
    wanted = (
        training.stage, training.world_size, False, False, training.bf16_optimizer, training.round_robin and flat,
        training.alignment and flat,
    )  # fmt: skip
    return found == wanted and (flat or [one.numel for one in first.masters] == list(training.partitions))


def serve(checkpoint: Checkpoint, training: Training, *, optimizer: bool) -> Served:
    """Cut a checkpoint as an engine does.

    Parameters
    ----------
    checkpoint : Checkpoint
        Of any format.
    training : Training
    optimizer : bool
        Whether the optimizer's state is asked for; else the model alone.

    Raises
    ------
    UsageError
        It is of another model, or of an optimizer with other parameters.
    UnsupportedError
        The checkpoint holds what such files cannot.
    """
    options = RecutOptions(
        world_size=training.world_size, stage=training.stage or 1, elastic=False, round_robin=training.round_robin,
        parameter_alignment=training.alignment, tensor_parallel_size=training.tensor_parallel,
    )  # fmt: skip
    notes: tuple[str, ...] = ()
    trained = {name for names in training.groups for name in names}
    filed = found = as_filed(replace(checkpoint))
    if training.pipeline is not None:
        options = _staged(checkpoint, training, training.pipeline, options)
    elif not (optimizer and _keeps_files(filed, training) and not checkpoint.is_bare):  # else a state alone
        if training.tensor_parallel > 1:
            what = (
                "a tensor-parallel engine can only load in place what ZeRO-1 to 3 saved with the same param groups "
                "and the optimizer, because these files say how to slice it"
            )
            raise _not_in_place(what, checkpoint, training)
        if checkpoint.per_rank and optimizer:
            raise of_other_ranks(checkpoint, f"{checkpoint.topology.dp} ranks", training)
        is_filed = len(trained & filed.parameters.keys()) > len(trained & checkpoint.parameters.keys())
        found = _like_the_engine(filed if is_filed else checkpoint, training, optimizer=optimizer)
        notes = foreign.notes(found, stage=options.stage or 1) if optimizer else ()
        if optimizer and found.is_bare:
            found = replace(found, param_groups=with_hyperparameters(found.param_groups, training.hyperparameters))
            notes += ("holds no hyperparameters, as DeepSpeed's elastic form does not: the engine's stay",)
        strange = further_keys(without(found.optimizer_metadata, *HANDLED)) if optimizer else []
        if strange:
            notes += (f"{listed(strange)}, which the optimizer keeps in addition to its state: the engine's stays",)
        found = foreign.as_deepspeed(found, stage=options.stage or 1, bf16=training.bf16_optimizer)
    target = decide(found, options, sub_group_size=training.sub_group_size)
    if target.origin.is_foreign:
        foreign.give_own(target)
    own = target.ranks[training.mp_rank].parameters
    frozen = [own.get(names[0]) for names in training.names if names[0] not in trained]
    target = replace(target, lists_frozen=all(one is not None and one.slots for one in frozen))
    if training.stage == 0:
        ranks = [replace(one, unpartitioned=training.unpartitioned) for one in target.ranks]
        target = replace(target, stage=0, ranks=ranks)
    served = Served(target, training, [*rank_notes(target), *notes])
    if optimizer and training.stage:
        _check(served)
    return served


def _staged(checkpoint: Checkpoint, training: Training, pipeline: Pipeline, options: RecutOptions) -> RecutOptions:
    """Return how to cut a checkpoint for an engine of a pipeline."""
    origin = origin_of(checkpoint)
    if (
        origin is None
        or not origin.layers
        or not origin.members
        or origin.members[0].bf16_optimizer != training.bf16_optimizer
    ):
        what = (
            "a pipeline engine can only load in place what pipelines under ZeRO-1 saved, with the same kind of "
            "optimizer"
        )
        raise _not_in_place(what, checkpoint, training)
    dealt = Stages(pipeline.bounds, uses_of(Layer("", key) for key in pipeline.tied))
    firsts = origin.ranks[:: checkpoint.topology.tp]
    same = len(firsts) == pipeline.stages and all(
        stage in dealt.of(name) for stage, files in enumerate(firsts) for name in files.model.trained
    )  # each stage of the source has trained parameters of the engine's layers of that stage alone
    return options if same else pipeline.options(options)


def _not_in_place(what: str, checkpoint: Checkpoint, training: Training) -> UnsupportedError:
    return UnsupportedError(
        what,
        expected=f"DeepSpeed's, for {training}",
        found=f"{checkpoint.format}, ZeRO stage {checkpoint.zero_stage}",
        advice="`zckpt reshard` or `zckpt convert` writes it for this engine, if possible",
    )


def _keeps_files(filed: Checkpoint, training: Training) -> bool:
    """Tell whether files of DeepSpeed have all names and groups of the engine, so that only the cut is another."""
    origin = origin_of(filed)
    if origin is None or not origin.members or origin.members[0].bf16_optimizer != training.bf16_optimizer:
        return False
    if training.stage == 0 and (training.tensor_parallel > 1 or filed.per_rank):
        return False
    owners = {p.name: p.tied_to or p.name for p in filed.parameters.values()}
    wanted = [[owners.get(name) for name in names] for names in training.groups]
    in_files = {name for one in origin.ranks for name in one.model.module}
    return (
        [group.parameters for group in filed.param_groups] == wanted
        and all(name in owners for names in training.names for name in names)
        and all(name == owner or name in in_files for name, owner in owners.items())
        and not any(_is_too_narrow(p, training.dtype) for p in filed.parameters.values())
    )


def _is_too_narrow(parameter: Parameter, dtype: str) -> bool:
    """Tell whether a weight has lost what the engine's could have: it is float32, and the weight's master is."""
    return parameter.master is not None and dtype == parameter.master.dtype == "float32" != parameter.dtype


def _like_the_engine(checkpoint: Checkpoint, training: Training, *, optimizer: bool) -> Checkpoint:
    """Return a checkpoint with the names, the param groups and the aliases that the engine has."""
    wanted = {name for names in training.groups for name in names}
    parameters = dict(checkpoint.parameters)
    for names in training.names:
        known = first_of(parameters.get(name) for name in names)
        if known is None:
            continue
        for name in names:
            if name not in parameters:
                parameters[name] = alias_of(parameters[known.tied_to or known.name], name)
        first = parameters[names[0]]
        if first.tied_to is not None and first.name not in wanted:  # DeepSpeed lists frozen ones so
            owner = first.tied_to
            parameters |= {n: replace(p, tied_to=first.name) for n, p in parameters.items() if p.tied_to == owner}
            parameters[first.name] = replace(parameters[owner], name=first.name)
            parameters[owner] = replace(first, name=owner, tied_to=first.name)
    owned = [[parameters[n].tied_to or n for n in names if n in parameters] for names in training.groups]
    trained = [name for names in owned for name in names]
    if not optimizer:
        groups = [ParamGroup({"lr": 0.0}, trained)]
    else:
        absent = sorted(wanted - parameters.keys())
        if absent:
            raise _other_model(f"has no parameters {listed(absent)}")
        groups = []
        for at, names in enumerate(owned):
            if names:
                groups.append(_group_of(names, checkpoint, set(trained)))
            else:  # files need not have one in which nothing is trained
                own = training.hyperparameters[at] if at < len(training.hyperparameters) else {}
                groups.append(ParamGroup(dict(own), []))
    made = replace(checkpoint, parameters=parameters, per_rank=[]).regrouped(groups)
    for one in made.parameters.values():
        one.frozen = one.tied_to is None and (one.frozen or one.group is None)
        if _is_too_narrow(one, training.dtype):
            one.dtype, one.slots = "float32", {**one.slots, WEIGHT: replace(one.slots[MASTER], name=WEIGHT)}
    return made


def _group_of(names: Sequence[str], checkpoint: Checkpoint, trained: Collection[str]) -> ParamGroup:
    """Return the checkpoint's param group of these parameters, in this order."""
    known = checkpoint.parameters
    for group in checkpoint.param_groups:
        members = {
            n for n in group.parameters
            if n in trained or n not in known or (known[n].optimizer_slots and known[n].numel)
        }  # fmt: skip
        if members == set(names):
            return replace(group, parameters=list(names))
    raise _other_model(
        "has no param group of the parameters of one of the engine's",
        expected=listed(names),
        found=" | ".join(listed(group.parameters) for group in checkpoint.param_groups) or "no optimizer",
    )


def _other_model(message: str, *, expected: str | None = None, found: str | None = None) -> UsageError:
    return UsageError(
        message,
        expected=expected,
        found=found,
        advice="load_checkpoint(..., load_module_only=True) loads only the weights",
    )


def _check(served: Served) -> None:
    """Raise unless partitions hold what the engine's do, in the same order and size."""
    target, training = served.target, served.training
    mp = target.ranks[training.mp_rank]
    parts = target.parts(mp, training.rank)
    found = [[(mp.owner(p.name).name, tuple(p.shape)) for p in part.parameters] for part in parts]
    expected = [
        [(mp.owner(name).name if name in mp.parameters else name, tuple(shape)) for name, shape in one.items()]
        for one in training.stored
    ]
    for index, (mine, its) in enumerate(zip(found, expected, strict=False)):
        for one, other in zip(mine, its, strict=False):
            if one != other:
                raise _other_model(
                    f"parameters of partition {index} are not those of the engine",
                    expected=f"{other[0]} {list(other[1])}", found=f"{one[0]} {list(one[1])}",
                )  # fmt: skip
    counts = [len(one) for one in expected], [len(one) for one in found]
    for theirs, ours in (counts, (list(training.partitions), [part.numel for part in parts])):
        if theirs != ours:
            raise _other_model("would be cut otherwise than the engine's state is",
                               expected=f"partitions of {listed(theirs)}",
                               found=listed(ours))  # fmt: skip


@immutable
class Pipeline:
    """How the layers of a live pipeline are dealt."""

    bounds: Shape  # the first layer of each stage and, last, how many there are
    tied: Sequence[str | None]  # of each layer, the key under which it is tied with others
    stage: int  # which stage this rank is of

    @property
    def stages(self) -> int:
        """How many there are."""
        return len(self.bounds) - 1

    @property
    def layers(self) -> range:
        """Those of this rank's stage."""
        return range(self.bounds[self.stage], self.bounds[self.stage + 1])

    def options(self, options: RecutOptions) -> RecutOptions:
        """Return options with these stages."""
        listed = ",".join("layer" if key is None else f"layer={key}" for key in self.tied)
        bounds = ",".join(map(str, self.bounds))
        return replace(options, pipeline_parallel_size=self.stages, stage_bounds=bounds, pipeline_layers=listed)


@immutable(kw_only=True)
class Training:
    """How a live engine cuts its state, and what it has. Names are those of its module."""

    world_size: int  # data-parallel ranks over which it cuts, and which of them this is
    rank: int
    tensor_parallel: int  # model-parallel ranks, and which of them this is
    mp_rank: int
    stage: int  # {0, 1, 2, 3}
    round_robin: bool
    alignment: bool
    bf16_optimizer: bool
    sub_group_size: int  # elements; of ZeRO-3
    dtype: str  # of the trained parameters
    groups: Sequence[Sequence[str]]  # the trained parameters of each param group, in the optimizer's order
    stored: Sequence[Mapping[str, Shape]]
    """Those of each partition (a group; of ZeRO-3 a sub-group) in the order in which they lie in it."""
    partitions: Sequence[int]  # elements; the size of each, on this rank
    names: Sequence[Sequence[str]]
    """All names of each parameter of the module, trained or not: several where it is tied."""
    unpartitioned: Unpartitioned | None = None
    """At stage 0: the form in which the optimizer takes its state; None where there is no optimizer."""
    pipeline: Pipeline | None = None  # all else is then of this rank's stage
    hyperparameters: Sequence[Mapping[str, object]] = ()  # those of each param group, as they are now

    @property
    def numbered(self) -> Sequence[Sequence[str]]:
        """The parameters of each param group as the optimizer that the user gave numbers them."""
        return self.groups if self.unpartitioned is None else self.unpartitioned.numbered

    def __str__(self) -> str:
        """Say it as a message does."""
        sliced = f" x {self.tensor_parallel} tensor-parallel" if self.tensor_parallel > 1 else ""
        sliced += "" if self.pipeline is None else f" x {self.pipeline.stages} pipeline-parallel"
        return f"{self.world_size}{sliced} ranks of {f'ZeRO-{self.stage}' if self.stage else 'stage 0'}"
