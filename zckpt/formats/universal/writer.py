"""A checkpoint as the files of a universal checkpoint. Lays out; writes nothing.

The model files' form is that of `deepspeed.shards`. DeepSpeed loads no weight from them, only the values next to the
module; the whole weights are there for those who want the model by itself.

`zero/optimizer_state.pt` has what all parameters have in common:

{loss_scaler, dynamic_loss_scale, overflow, clip_grad, ...    what the optimizer keeps besides its state
 zero_stage, ds_version,
 param_groups: [{lr, ..., params: [number]}]                  ZeRO-1, 2 and BF16_Optimizer take them, each its own
 optimizer_state_dict: {state: {0: {step}}, param_groups: [{...}]}
                                                              ZeRO-3 gives this step and these to every group
 zckpt: {...}}                                                what DeepSpeed's files cannot hold, see `remainder`
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field

from zckpt.compare.logical import parameter_values
from zckpt.engine.targets import Lazily, TargetFile
from zckpt.errors import UnsupportedError
from zckpt.evidence import refuse_unnamed
from zckpt.formats.deepspeed.axes.auto_ep import expert_counts
from zckpt.formats.deepspeed.axes.experts import is_expert, of_auto_ep
from zckpt.formats.deepspeed.axes.gpt_model import arguments_in, unknown_order
from zckpt.formats.deepspeed.axes.tp_rules import INFO_KEY
from zckpt.formats.deepspeed.foreign import NONE_IF_ABSENT, VERSION
from zckpt.formats.deepspeed.nested import ordered
from zckpt.formats.deepspeed.shards import STRUCTURE_KEYS, section
from zckpt.formats.deepspeed.trees import shapes_of
from zckpt.formats.deepspeed.values import weight_or_master
from zckpt.formats.group_values import group_values, refuse_several, same
from zckpt.formats.remainder import KEY, remainder
from zckpt.formats.torch_files import writer as torch_writer
from zckpt.formats.torch_files.writer import SlotTensor, new_storage, value_node, view
from zckpt.formats.universal.directory import (
    FOLDER,
    MASTER_STEM,
    MODEL_NAME,
    OPTIMIZER_NAME,
    STEP_STEM,
    ZERO3_MODEL_NAME,
    parameter_file,
)
from zckpt.formats.universal.folders import Slices, Values, folders
from zckpt.immutable import mutable
from zckpt.state import WEIGHT, Checkpoint, Scalar, Slot, dict_of, without
from zckpt.state.partition import flat_partition_numel
from zckpt.torchfile import OrderedMapping, alike, node_of, plain

UNIVERSAL_VERSION = 0.2
"""Of `universal_checkpoint_info`, where the source has none: rules for equal slices, of which there are none."""

STRUCTURE = STRUCTURE_KEYS.union(["model", "ds_version", KEY])
"""Keys of a model file that are written for each checkpoint; metadata of the same name goes elsewhere."""

OWN_KEYS = frozenset({"param_groups", "optimizer_state_dict", "zero_stage", "ds_version", "state", KEY})
"""Keys of the file that are written here; metadata of the same name goes elsewhere."""

ZERO3_STEMS = (MASTER_STEM, "exp_avg", "exp_avg_sq")
"""What DeepSpeed's ZeRO-3 loads of a parameter, and all it loads."""


@mutable
class Whole:
    """What is to be known of all folders before they are written.

    `hindrance`: why DeepSpeed's ZeRO-3 could not load the state rightly; None if it can; `step`: that all param groups
    have, or have in all of their parameters; None: there is no such one; `filled` and `values`: of the folders that
    have any. Raises UnsupportedError: a name cannot be a file's.
    """

    step: object
    hindrance: str | None = None
    count: int = 0  # of files
    filled: dict[str, Sequence[str]] = field(default_factory=dict)
    values: dict[str, Values] = field(default_factory=dict)

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Whole:
        """Go through the folders of a checkpoint."""
        groups = [group for group in checkpoint.param_groups if group.parameters]
        steps = [group_values(checkpoint, group, {STEP_STEM}).get(STEP_STEM) for group in groups]
        found = cls(steps[0] if steps and all(one is not None and same(one, steps[0]) for one in steps) else None)
        trained = set[str]()
        for one in folders(checkpoint):
            found.count += len([parameter_file(one.name, stem) for stem in one.files])
            if checkpoint.parameters[one.name].group is not None:
                trained.update(one.files)
            found.filled |= {one.name: one.filled} if one.filled else {}
            found.values |= {one.name: one.values} if one.values else {}
        if trained - {STEP_STEM} != set(ZERO3_STEMS):
            slots = ", ".join(sorted(trained - {STEP_STEM, MASTER_STEM})) or "no state"
            found.hindrance = f"it loads exp_avg and exp_avg_sq, and the optimizer has {slots}"
        elif found.step is None:
            found.hindrance = "it has one step for all parameters, but here they differ, or there is none"
        return found


def lay_out(checkpoint: Checkpoint, version: str | None = None) -> tuple[Lazily[TargetFile], list[str]]:
    """Return the files of a universal checkpoint, and what DeepSpeed's own loader will not take of them.

    Parameters
    ----------
    checkpoint : Checkpoint
        Of any format.
    version : str, optional
        Of the DeepSpeed that wrote it; by default the one whose form this is.

    Raises
    ------
    UnsupportedError
        It has no param groups, state of parameters without names, or names that cannot be files'.
    """
    refuse_unnamed(checkpoint, "by which a universal checkpoint has a folder for each")
    refuse_several(checkpoint, "a universal checkpoint has")
    if not checkpoint.param_groups:
        raise UnsupportedError(
            "has no optimizer; without its param groups, DeepSpeed cannot load a universal checkpoint",
            advice="`zckpt consolidate` writes only the model",
        )
    whole = Whole.of(checkpoint)

    def one_by_one() -> Iterator[TargetFile]:
        yield torch_writer.lay_out(MODEL_NAME, model_tree(checkpoint, version, parameterwise=False))
        yield torch_writer.lay_out(ZERO3_MODEL_NAME, model_tree(checkpoint, version, parameterwise=True))
        yield torch_writer.lay_out(f"{FOLDER}/{OPTIMIZER_NAME}", optimizer_tree(checkpoint, version, whole))
        for one in folders(checkpoint):
            for stem, tree in one.files.items():
                yield torch_writer.lay_out(parameter_file(one.name, stem), tree)

    return Lazily(one_by_one, 3 + whole.count), list(_notes(checkpoint, whole))


def _notes(checkpoint: Checkpoint, whole: Whole) -> Iterator[str]:
    """Say what DeepSpeed's own loader will not take of the files, where that depends on the checkpoint."""
    single, unread = _not_loaded(checkpoint)
    if single:
        yield (
            f"DeepSpeed's universal loader stops at {', '.join(single)}, with one value per parameter: it expects "
            "one per element; `zckpt reshard` and `convert --to deepspeed` write what it loads"
        )
    elif whole.hindrance is not None:
        yield f"DeepSpeed loads this at ZeRO-1 and 2; its ZeRO-3 loader stops: {whole.hindrance}"
    elif isinstance(whole.step, Scalar):
        yield (
            "DeepSpeed's universal loader at ZeRO-3 lets all sub-groups count up one step that is a tensor: give each "
            "a copy of it after loading (docs/formats.md), or use `zckpt convert --to deepspeed --stage 3`"
        )
    if unread:
        yield (
            f"DeepSpeed's universal loader does not load {', '.join(unread)}, which are no tensors; "
            "`zckpt reshard` and `convert --to deepspeed` write what it loads"
        )
    groups = [[checkpoint.parameters[name] for name in group.parameters] for group in checkpoint.param_groups]
    ranks, numels = checkpoint.topology.dp, [sum(one.numel for one in group) for group in groups]
    starved = [i for i, n in enumerate(numels) if (ranks - 1) * flat_partition_numel(n, ranks) >= n > 0]
    if starved:
        numbers = ", ".join(map(str, starved))
        yield (
            f"at {ranks} ranks some hold nothing of param group {numbers}, and DeepSpeed's universal "
            f"loader at ZeRO-1 and 2 then stops with an IndexError"
        )
    untrained = [p for p in checkpoint.tensors() if p.group is None and p.tied_to is None]
    if untrained:
        yield f"DeepSpeed's universal loader does not load the {len(untrained)} frozen parameters and buffers"
    if any(map(is_expert, checkpoint.parameters)):
        yield (
            "DeepSpeed's universal loader looks experts up by their local numbers: if they are spread over several "
            "ranks, all ranks get the first rank's; load it with ep_size=1, or use `zckpt convert --to deepspeed "
            "--expert-parallel-size E`"
        )
    shared = unknown_order(checkpoint.metadata, Slices(checkpoint).info, checkpoint.parameters, checkpoint.source)
    if shared is not None and arguments_in(checkpoint.metadata) is not None:
        yield (
            f"DeepSpeed's universal loader cuts {shared} as one block of rows, which is only right for one "
            "tensor-parallel rank: its rules cannot say where keys begin that several heads share"
        )
    if of_auto_ep(checkpoint) and not expert_counts(checkpoint):
        yield (
            "AutoEP's experts are whole, without the marks by which DeepSpeed's universal loader gives each rank its "
            "own: their layers are not listed under these names"
        )
    config = plain(node_of(checkpoint.metadata.get("ds_config")))
    zero = section(dict_of(config), "zero_optimization")
    if zero.get("round_robin_gradients") and zero.get("stage") != 3:
        yield (
            "with round_robin_gradients DeepSpeed's universal loader takes parameters for one another, except in param "
            "groups that parameter_alignment pads; switch it off"
        )


def _not_loaded(checkpoint: Checkpoint) -> tuple[list[str], list[str]]:
    """Return keys of which a file would hold one value for several elements, and those of what is no tensor."""
    single, plain_values = dict[str, None](), dict[str, None]()
    for parameter in (checkpoint.parameters[name] for name in checkpoint.grouped):
        for key, value in parameter_values(checkpoint, parameter).items():
            if key == STEP_STEM or value is None:
                continue
            if not isinstance(value, (Slot, Scalar)):
                plain_values[key] = None
            elif (value.numel if isinstance(value, Slot) else 1) != parameter.numel:
                single[key] = None
    return list(single), list(plain_values)


def filled_in(checkpoint: Checkpoint) -> Values:
    """Return what DeepSpeed's loaders look for and the source does not have."""
    needed: Values = {
        **dict.fromkeys(NONE_IF_ABSENT),
        "skipped_steps": 0,
        "global_steps": checkpoint.step or 0,
        "ds_config": {},
        INFO_KEY: {"universal_checkpoint_version": UNIVERSAL_VERSION},
    }
    return without(needed, *checkpoint.metadata)


def model_tree(checkpoint: Checkpoint, version: str | None, *, parameterwise: bool) -> Values:
    """Return the content of a model file: with whole weights, or under ZeRO-3 without any."""
    module = OrderedMapping()
    tensors: Values = {}  # names of one parameter share its storage
    for parameter in checkpoint.parameters.values():
        owner = checkpoint.owner(parameter.name)
        if owner.name not in tensors:
            empty = view(new_storage(owner.dtype, 0), (0,))
            whole = empty if parameterwise else SlotTensor(weight_or_master(owner), owner.dtype, owner.name)
            tensors[owner.name] = whole
        module[parameter.name] = tensors[owner.name]
    for buffer in checkpoint.buffers.values():
        slot = buffer.slots[WEIGHT]
        module[buffer.name] = SlotTensor(slot, slot.dtype, buffer.name)
    frozen = [p for p in checkpoint.owners if p.frozen]
    groups = [[checkpoint.parameters[name] for name in group.parameters] for group in checkpoint.param_groups]
    return {
        "module": module,
        "buffer_names": list(checkpoint.buffers),
        "optimizer": None,
        "param_shapes": list(map(shapes_of, groups)),
        "frozen_param_shapes": None if parameterwise else shapes_of(frozen),
        "shared_params": checkpoint.aliases,
        "frozen_param_fragments": None if parameterwise else ordered((one.name, module[one.name]) for one in frozen),
        **filled_in(checkpoint),
        **without(checkpoint.metadata, *STRUCTURE),
        "dp_world_size": checkpoint.topology.dp,
        "mp_world_size": 1,
        "ds_version": version or VERSION,
    }


def optimizer_tree(checkpoint: Checkpoint, version: str | None, whole: Whole) -> Values:
    """Return the content of the file."""
    groups = checkpoint.param_groups
    tree: Values = without(checkpoint.optimizer_metadata, *OWN_KEYS)
    if checkpoint.zero_stage is not None:
        tree["zero_stage"] = checkpoint.zero_stage
    tree["ds_version"] = version or VERSION
    tree["param_groups"] = [_group(group.hyperparameters, [number]) for number, group in enumerate(groups)]
    if whole.hindrance is None:
        tree["optimizer_state_dict"] = {
            "state": {0: {STEP_STEM: value_node(whole.step)}},
            "param_groups": [_group(shared([group.hyperparameters for group in groups]), [])],
        }
    tree[KEY] = {  # what neither the folders nor the rest of DeepSpeed's files can hold
        **remainder(checkpoint),
        "metadata": {key: value for key, value in checkpoint.metadata.items() if key in STRUCTURE},
        "optimizer_metadata": {key: v for key, v in checkpoint.optimizer_metadata.items() if key in OWN_KEYS},
        "masters": False,
        "without_master": [p.name for p in checkpoint.parameters.values() if p.group is not None and not p.master],
        "groups": [list(group.parameters) for group in groups],
        "filled_in": list(filled_in(checkpoint)),
        "made": whole.filled,
        "values": whole.values,
    }
    return tree


def shared(several: Sequence[Mapping[str, object]]) -> Values:
    """Return the values that are the same in all of several."""
    return {k: v for k, v in several[0].items() if all(k in one and alike(one[k], v) for one in several[1:])}


def _group(hyperparameters: Mapping[str, object], params: list[int]) -> Values:
    return {**{key: value_node(value) for key, value in hyperparameters.items()}, "params": params}
