"""Stage 0 for other stages of a pipeline and other tensor-parallel ranks: each gets an optimizer of its own.

The form stays: parameters by number, with masters or without, or flat masters. What an optimizer keeps besides (the
loss scale, how it changes) is one for all ranks, and the first one's is carried.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from zckpt.engine.targets import TargetFile
from zckpt.errors import UnsupportedError, UsageError
from zckpt.evidence import NAMES_BY_STAGE_ADVICE
from zckpt.formats.deepspeed.experts import is_expert
from zckpt.formats.deepspeed.options import RecutOptions
from zckpt.formats.deepspeed.origin import Origin, RankFiles
from zckpt.formats.deepspeed.pipeline import layer_names
from zckpt.formats.deepspeed.restage import stage_states
from zckpt.formats.deepspeed.stage0 import STATE_KEYS, recorded_names
from zckpt.formats.deepspeed.stage0_ranks import with_tied_names
from zckpt.formats.deepspeed.stage_bounds import parse_layers
from zckpt.formats.deepspeed.target import Target, TargetGroup, TargetRank
from zckpt.formats.deepspeed.write_layers import layer_files
from zckpt.formats.deepspeed.write_model import model_tree
from zckpt.formats.deepspeed.write_rules import written_rules
from zckpt.formats.deepspeed.write_stage0 import Unpartitioned, form_of, stage0_tree
from zckpt.formats.torch_files import writer as torch_writer
from zckpt.formats.torch_files.tensors import holds_tensors
from zckpt.state import Checkpoint
from zckpt.torchfile import FromFile

_WITHOUT_ZERO = ("param_shapes", "shared_params", "frozen_param_shapes", "frozen_param_fragments")
"""Keys that a model file of ZeRO has, and one of stage 0 with None."""


def regroup(checkpoint: Checkpoint, origin: Origin, options: RecutOptions) -> Target:
    """Return the target, of which each rank numbers its own parameters.

    Raises
    ------
    UsageError
        The options cannot be.
    UnsupportedError
        The names of the source's optimizers are not known, or their state cannot be cut.
    """
    degree = checkpoint.topology.tp if options.tensor_parallel_size is None else options.tensor_parallel_size
    if degree < 1:
        raise UsageError("unusable tensor-parallel size", expected="at least 1", found=degree)
    if origin.experts or origin.expert_optimizers or any(is_expert(name) for name in checkpoint.parameters):
        raise UnsupportedError(
            "at stage 0 each expert rank's optimizer numbers the experts of one tensor-parallel rank and stage: how "
            "another would number them is not known",
            expected="the tensor-parallel ranks and stages of SOURCE",
            advice="`zckpt convert --to deepspeed --stage` makes one of ZeRO of it, which `zckpt reshard` cuts",
        )
    ranks = _ranks(checkpoint, origin, options)
    if degree != checkpoint.topology.tp:
        _check_slots(ranks)
    named = replace(origin, ranks=ranks, model=ranks[0].models[0])
    states, dealt = stage_states(checkpoint, named, degree, options)
    model = origin.model
    target = Target(
        checkpoint, named, options.world_size, 0, model.zero_option("elastic_checkpoint"),
        model.zero_option("round_robin_gradients"), model.zero_option("parameter_alignment"), False,
        written_rules(named, states, checkpoint), len(states), degree, dealt,
    )  # fmt: skip
    for number, files in enumerate(files for of_stage in states for files in of_stage):
        own = files.state
        groups = [
            TargetGroup(
                index, group, [[own.parameters[name] for name in group.parameters]], [0] * len(group.parameters), 1
            )
            for index, group in enumerate(own.groups)
        ]
        target.ranks.append(TargetRank(number, files.models, [], own.parameters, own.buffers, groups))
    return target


def _ranks(checkpoint: Checkpoint, origin: Origin, options: RecutOptions) -> Sequence[RankFiles]:
    """Return the source's ranks with the names that their optimizers' numbers stand for."""
    held = any(files.models[0].optimizer is not None for files in origin.ranks)
    if held and (checkpoint.unnamed or not checkpoint.param_groups):
        raise UnsupportedError(
            "which parameters the optimizer of each rank numbers is not certain, so that they cannot be regrouped",
            advice=NAMES_BY_STAGE_ADVICE,
        )
    layers = parse_layers(options.pipeline_layers) if options.pipeline_layers is not None else []
    keys = {number: layer.tied for number, layer in enumerate(layers) if layer.tied is not None}
    if len(origin.ranks) == 1:
        own = replace(origin.ranks[0].state, parameters=checkpoint.parameters, groups=checkpoint.param_groups)
        return with_tied_names([replace(origin.ranks[0], state=own)], keys)
    return with_tied_names(origin.ranks, keys)


def _check_slots(ranks: Sequence[RankFiles]) -> None:
    """Raise where an optimizer has state that is not one value for each element, nor one number."""
    for parameter in (p for files in ranks for p in files.state.parameters.values()):
        odd = [key for key, slot in parameter.slots.items() if slot.shape not in (parameter.shape, ())]
        odd += [key for key, value in parameter.state.items() if holds_tensors(value)]
        if odd:
            raise UnsupportedError(
                f"{odd[0]} of {parameter.name} is not one value for each element, and is not cut for other "
                f"tensor-parallel ranks",
            )


def regrouped_files(target: Target, folder: str) -> Iterator[TargetFile]:
    """Yield the files of such a target.

    Parameters
    ----------
    folder : str
        What their names begin with.
    """
    for mp in target.ranks:
        tree = model_tree(target, mp, 0)
        source = mp.model.content
        if isinstance(tree, dict):
            tree |= {key: FromFile.of(mp.model.file, source[key]) for key in _WITHOUT_ZERO if key in source}
        yield torch_writer.lay_out(
            f"{folder}mp_rank_{mp.mp_rank:02d}_model_states.pt", stage0_tree(tree, mp, _form(mp))
        )
    for name, content in layer_files(target):
        yield torch_writer.lay_out(f"{folder}{name}", content)


def names_in(target: Target) -> list[str]:
    """Return the names of what the optimizers number, stage by stage, as reading the target's files gives them."""
    first = {
        int(shard.layer or 0): layer_names(shard, file, [files.models[0] for files in target.origin.ranks])
        for shard, file in target.origin.layers
    }
    filed = {name: f"{layer}.{key}" for layer, names in first.items() for key, name in names.items()}
    ranks = target.ranks[:: target.tp]
    filed = {name: own for name, own in filed.items() if name not in target.checkpoint.parameters}
    return [filed.get(p.name, p.name) for mp in ranks for group in mp.groups for p in group.experts[0]]


def _form(mp: TargetRank) -> Unpartitioned | None:
    """Return how the source's optimizer holds its state; None where there is none."""
    held = mp.model.optimizer
    if held is None:
        return None
    kept = {str(key): FromFile.of(mp.model.file, value) for key, value in held.items() if key not in STATE_KEYS}
    names = [[p.name for p in group.experts[0]] for group in mp.groups]
    return Unpartitioned(form_of(held), names, kept, own_state=True, named=recorded_names(mp.model) is not None)
