"""A checkpoint of any format, as DeepSpeed would have kept it: what `writer` needs besides the logical state.

DeepSpeed's flat buffers hold float32 masters, one value of each kind (`step`) for a whole group, and state for every
element. What does not fit that is refused by name.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from zckpt.errors import UnsupportedError, listed
from zckpt.evidence import NAMES_ADVICE, in_order_or_sorted, refuse_unnamed
from zckpt.formats.deepspeed.axes.auto_ep import listed_entries
from zckpt.formats.deepspeed.axes.experts import (
    check_split,
    expert_degrees,
    experts_per_rank,
    numbers_of_experts,
    of_experts,
)
from zckpt.formats.deepspeed.axes.gpt_model import known_rules
from zckpt.formats.deepspeed.axes.pipeline import is_of_layer, tied_key
from zckpt.formats.deepspeed.directory import MODEL, OPTIMIZER, Shard, TagDirectory
from zckpt.formats.deepspeed.loss_scaling import scaling
from zckpt.formats.deepspeed.nested import ordered
from zckpt.formats.deepspeed.origin import Origin, Rank
from zckpt.formats.deepspeed.shards import MODEL_KEYS, ModelShard, OptimizerShard, model_of, section
from zckpt.formats.deepspeed.target import Target
from zckpt.formats.deepspeed.values import refuse_to_begin, weight_or_master
from zckpt.formats.group_values import group_values, refuse_several, same
from zckpt.formats.latest import is_name
from zckpt.formats.remainder import is_extra, of_modules, origin
from zckpt.formats.torch_files.writer import new_storage, view
from zckpt.state import MASTER, WEIGHT, Checkpoint, ParamGroup, Topology, without
from zckpt.state.dtypes import is_floating
from zckpt.torchfile import TorchFile, node_of

VERSION = "0.19.8"
"""The version of DeepSpeed whose form is written where the source says none."""

NONE_IF_ABSENT = ("lr_scheduler", "data_sampler", "random_ltd")
"""Keys of metadata that DeepSpeed's files always have: a None there is the same as nothing."""

KEPT_IF_KNOWN = ("global_samples", "sparse_tensor_module_names")
"""Keys that DeepSpeed does without: samples are counted from steps, and 0.19 has no modules of sparse gradients."""


_OF_RANK = re.compile(r"(?:zero_pp_rank_(\d{1,9})_)?mp_rank_(\d{2,9})_model_states\.(.+)")
"""Keys of metadata that a rank's model file has otherwise than the first's."""


def as_deepspeed(
    checkpoint: Checkpoint, *, stage: int, staged: bool = False, bf16: bool, dtype: str = "keep"
) -> Checkpoint:
    """Return the checkpoint with masters, group-wide values and an origin, so that it can be laid out.

    `stage`: {1, 2, 3}; `staged`: whether layers are to be dealt to stages of a pipeline; `bf16`: whether its optimizer
    is to be BF16_Optimizer, of stage 1; `dtype`: of the engine; "keep": as its configuration or its weights say, which
    may be masters, as the Trainer has them. Raises UnsupportedError: it has no optimizer, parameters without names, or
    state that a flat buffer cannot hold.
    """
    _refuse(checkpoint, staged=staged)
    layers = listed_entries(checkpoint)
    parameters = dict(checkpoint.parameters)
    groups: list[ParamGroup] = []
    totals = experts_per_rank(parameters)
    numbers = checkpoint.number_keys
    for index, group in enumerate(checkpoint.param_groups):
        values = group_values(checkpoint, group, numbers)
        members = [parameters[name] for name in group.parameters]
        held = {key for own in members for key in own.optimizer_slots}
        for own in members:
            slots = without(own.slots, *values)
            lost = {key for key, slot in slots.items() if key in numbers or slot.shape != own.shape}
            lost |= {key for key, one in own.state.items() if key not in values or not same(one, values[key])}
            if lost:
                raise UnsupportedError(
                    f"{listed(sorted(lost))} of {own.name} is neither the same for all of param group {index}, nor one "
                    "value per element",
                    advice="`zckpt convert --to universal`, dcp or zckpt keeps it for each parameter",
                )
            refuse_to_begin(own, held - slots.keys() - values.keys())
            if MASTER not in slots:
                slots[MASTER] = replace(weight_or_master(own), name=MASTER)
            parameters[own.name] = replace(own, slots=slots, state={})
        groups.append(ParamGroup(group.hyperparameters, of_experts(group, totals), values))
    check_split(groups)
    converted = replace(checkpoint, parameters=parameters, param_groups=groups, topology=Topology())
    parameters |= {one.name: replace(one, frozen=True) for one in converted.owners if one.group is None}
    # Files as DeepSpeed would have written them, of which the writer takes all but what is cut.
    tag = origin(converted).get("tag")
    tag = tag if isinstance(tag, str) and is_name(tag) else f"global_step{_steps(converted)}"
    model = _model(converted, layers)
    said = {model.dtype, dtype_of(converted)} if dtype == "keep" else {dtype}
    whole = Rank(
        converted.source, converted.format, parameters=parameters, buffers=converted.buffers, param_groups=groups,
        model_files=[model], members=[_optimizer(converted, stage, bf16=bf16, is_bf16="bfloat16" in said)],
    )  # fmt: skip
    whole.degrees.extend(expert_degrees(whole))
    rules = known_rules(model.content, {name: p.shape for name, p in parameters.items()}, model.path)
    converted.origin = Origin(TagDirectory(Path(converted.source), tag, ()), [whole], rules=rules)
    return converted


def with_weights_as(checkpoint: Checkpoint, dtype: str) -> Checkpoint:
    """Return a checkpoint whose trained weights have another type, rounded from the masters, which it keeps or gets."""
    parameters = dict(checkpoint.parameters)
    for one in checkpoint.owners:
        master = one.master or one.weight
        if one.group is not None and master is not None and is_floating(master.dtype):
            slots = {MASTER: replace(master, name=MASTER), WEIGHT: replace(master, name=WEIGHT, dtype=dtype)}
            parameters[one.name] = replace(one, dtype=dtype, slots={**one.slots, **slots})
    return replace(checkpoint, parameters=parameters)


def as_engines_group(checkpoint: Checkpoint, stage: int | None = None, known: object = None) -> Checkpoint:
    """Return it with the param groups that DeepSpeed's engines make of an optimizer's.

    They leave out what is frozen, in ZeRO's files also what has no elements, and groups without parameters. Only ZeRO-3
    can have groups in which all is frozen; it files them without parameters. `stage`: None of universal files; `known`:
    the stage that it was saved at.
    """

    def is_trained(name: str) -> bool:
        one = checkpoint.find(name)
        if one is None or not (one.numel or stage is None):
            return one is None
        return not one.frozen or bool(one.master or one.state or one.optimizer_slots)  # frozen while it was trained

    filled = [group for group in checkpoint.param_groups if group.parameters or known == 3]
    trained = [replace(group, parameters=[*filter(is_trained, group.parameters)]) for group in filled]
    some = [group for group in trained if group.parameters]
    groups = trained if stage == 3 else some
    return checkpoint.regrouped(groups) if some and groups != checkpoint.param_groups else checkpoint


def groups_left_out(source: Checkpoint, made: Checkpoint) -> list[str]:
    """Say how many param groups with parameters `as_engines_group` has left out."""
    count = sum(bool(group.parameters) for group in source.param_groups) - len(made.param_groups)
    said = f"param groups in which nothing is trained are left out ({count}): DeepSpeed's ZeRO-1 and 2 cannot have any"
    return [said] if count > 0 else []


def notes(checkpoint: Checkpoint, *, stage: int) -> tuple[str, ...]:
    """Say what DeepSpeed's form holds that the source does not, and what of the source it has no place for.

    `checkpoint`: the source; `stage`: {1, 2, 3}.
    """
    _, found = scaling(checkpoint, _config(checkpoint), stage=stage, dtype=dtype_of(checkpoint))
    without_master: list[str] = []
    for index, group in enumerate(checkpoint.param_groups):
        members = [checkpoint.parameters[name] for name in group.parameters]
        rest = [p.name for p in members if not (p.state or p.optimizer_slots)]
        if 0 < len(rest) < len(members):
            found.append(
                f"{listed(rest)} of param group {index} {('has' if len(rest) == 1 else 'have')} no optimizer state: "
                "ZeRO keeps one state for the whole group, in which theirs is zero, with the others' step; DeepSpeed "
                "loads none of it where the training has frozen them"
            )
        without_master += [p.name for p in members if not p.master and p.dtype != "float32"]
    if without_master:
        found.append(f"masters of {listed(without_master)} are copied from the weights: the source has none")
    every = checkpoint.parameters.values()
    unsure = [p.name for p in every if p.group is None and p.numel and not (p.frozen or p.tied_to)]
    if stage == 3 and unsure:
        found.append(
            f"{listed(unsure)}, which the optimizer does not have, {('is' if len(unsure) == 1 else 'are')} written "
            "as frozen parameters: DeepSpeed stops if the training has buffers with these names (ZeRO-1 and 2 load "
            "both)"
        )
    return tuple(found)


def _refuse(checkpoint: Checkpoint, *, staged: bool) -> None:
    if not checkpoint.param_groups:
        raise UnsupportedError(
            "holds no optimizer, which a ZeRO checkpoint needs",
            advice="`zckpt consolidate` writes only the model",
        )
    refuse_several(checkpoint, "a checkpoint of ZeRO has")
    refuse_unnamed(checkpoint, "by which a checkpoint of ZeRO has them")
    every = checkpoint.grouped
    if (
        checkpoint.is_numbered
        and not any(own.master or own.optimizer_slots or own.state for own in map(checkpoint.owner, every))
        and len({tuple(order) for order in in_order_or_sorted(0, every)}) > 1
    ):
        raise UnsupportedError(
            "the optimizer only numbers its parameters, and has no state that could tell their order, in which a "
            "checkpoint of ZeRO has masters",
            advice=NAMES_ADVICE,
        )
    if checkpoint.is_bare:
        raise UnsupportedError(
            "holds no hyperparameters, which a ZeRO checkpoint needs",
            expected="a source that is not elastic, or --hyperparameters FILE and --rigid",
            advice="`zckpt convert --to zckpt` or `--to=dcp` keeps everything else",
        )
    layers = [name for name in checkpoint.parameters if is_of_layer(name)]
    if ((checkpoint.topology.pp > 1 and layers) or any(map(tied_key, layers))) and not staged:
        raise UnsupportedError(
            "a pipeline's layers, but no stages to write them for",
            found=f"pp={checkpoint.topology.pp}, {listed(layers, most=4)}",
            advice="give --pipeline-parallel-size and --pipeline-layers; or --rename or --map for one model",
        )


def _steps(checkpoint: Checkpoint) -> int:
    """Return the steps of the run: as the source says, else as many as its optimizer has taken."""
    return checkpoint.step if checkpoint.step is not None else checkpoint.most_steps or 0


def _file(root: object) -> TorchFile:
    return TorchFile("", 0, "zip", "little", root, {}, {}, 2)


def _model(checkpoint: Checkpoint, layers: Sequence[object]) -> ModelShard:
    """Return a model file of which the keys are those of DeepSpeed and then the client's own."""
    metadata = checkpoint.metadata
    step, (modules, of_modules_alone) = _steps(checkpoint), of_modules(checkpoint)
    content: dict[str, object] = {
        "module": ordered(modules.items()),
        "buffer_names": list(checkpoint.buffers),
        "optimizer": None,
        "param_shapes": None,
        "frozen_param_shapes": None,
        "shared_params": checkpoint.aliases,
        "frozen_param_fragments": None,
        **{key: metadata.get(key) for key in NONE_IF_ABSENT},
        "skipped_steps": metadata.get("skipped_steps", 0),
        "global_steps": metadata.get("global_steps", step),
        **{key: metadata[key] for key in KEPT_IF_KNOWN if key in metadata},
        "dp_world_size": 1,
        "mp_world_size": 1,
        "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
        "ds_config": _config(checkpoint),
        "ds_version": VERSION,
    }
    experts = numbers_of_experts(checkpoint.parameters)
    if layers:
        content |= {"num_experts": metadata.get("num_experts"), "ds_autoep_layers": layers}
    elif experts:
        content |= {"num_experts": experts, "ds_autoep_layers": None}
    own = {*MODEL_KEYS, *of_modules_alone}
    content |= {key: value for key, value in metadata.items() if key not in own and not is_counted(key)}
    shard = Shard(checkpoint.source, MODEL, mp_rank=0)
    return model_of(shard, _file(content))


def give_own(target: Target) -> None:
    """Let ranks that had state of their own, the client's or what a module keeps, have it again, if they are there.

    That is where the target has files of the same kind: one for each data-parallel rank, or for all of them.
    Model-parallel ranks that the source did not have get what the first one's have.
    """
    model, last = target.origin.model, 0
    common = dict(model.content)
    own: dict[tuple[int, int], dict[str, object]] = {}
    for key in model.content:
        match = _OF_RANK.fullmatch(key)
        rank, mp_rank = (int(match[1] or 0), int(match[2])) if match is not None else (0, 0)
        is_there = mp_rank < len(target.ranks) and rank < target.world_size and not is_counted(key)
        last = max(last, mp_rank)
        if match is not None and (match[1] is not None) == (target.stage == 3) and is_there:
            own.setdefault((mp_rank, rank), {})[match[3]] = common.pop(key)
    for mp in target.ranks:
        mp.model_files = []
        for rank in range(max([rank for _, rank in own], default=0) + 1):
            its = own.get((mp.mp_rank if mp.mp_rank <= last else 0, rank), {})
            extra = {key: value for key, value in its.items() if is_extra(key)}
            module = ordered([*section(common, "module").items(), *extra.items()])
            mp.model_files.append(model_of(model.shard, _file({**common, **without(its, *extra), "module": module})))


def is_counted(key: str) -> bool:
    """Tell whether metadata are the numbers of experts of a stage, which the target's own stages count."""
    return re.fullmatch(r"mp_rank_\d+_model_states\.num_experts", key) is not None


def _config(checkpoint: Checkpoint) -> dict[object, object]:
    node = node_of(checkpoint.metadata.get("ds_config"))
    if not isinstance(node, dict):
        kind = {"bfloat16": "bf16", "float16": "fp16"}.get(dtype_of(checkpoint))
        node = {kind: {"enabled": True}} if kind else {}
    return {"zero_optimization": {}, **node}


def dtype_of(checkpoint: Checkpoint) -> str:
    """Return the type of most of the trained elements."""
    numels: Counter[str] = Counter()
    for parameter in checkpoint.parameters.values():
        if parameter.group is not None:
            numels[parameter.dtype] += parameter.numel
    return max(numels, key=numels.__getitem__, default="float32")


def _optimizer(checkpoint: Checkpoint, stage: int, *, bf16: bool, is_bf16: bool) -> OptimizerShard:
    """Return an optimizer file with the keys of a stage; those that depend on the cut come from the writer.

    `is_bf16`: whether an engine with bf16 looks for it.
    """
    content, _ = scaling(checkpoint, _config(checkpoint), stage=stage, dtype=dtype_of(checkpoint))
    if stage != 3 and (clipping := checkpoint.optimizer_metadata.get("clip_grad")) is not None:
        content["clip_grad"] = clipping
    if bf16:
        content["ds_version"] = VERSION
    shard = Shard(f"{'bf16_' * is_bf16}zero_pp_rank_0_mp_rank_00_optim_states.pt", OPTIMIZER, 0, 0)
    root: dict[str, object] = {"optimizer_state_dict": content, "ds_config": None, "ds_version": VERSION}
    return OptimizerShard(
        shard,
        _file(root),
        stage,
        elastic=False,
        bf16_optimizer=bf16,
        masters=[view(new_storage("float32", 0), (0,)) for _ in checkpoint.param_groups],
        tensors=[],
        scalars=[],
        groups=[],
        partition_count=[1] * len(checkpoint.param_groups),
        alignment_paddings=[],
        content=content,
        version=VERSION,
    )
