"""A `torch_dist` or `zarr` directory as a Checkpoint: the tensors that it lists, as the model has them on one rank.

DIR/.metadata, __R_N.distcp     what is where, as torch's DCP writes it; keys are flat, `planner_data` says nothing
DIR/<key>/                      the same in arrays: see `zarr`
DIR/common.pt                   what is not sharded: iteration, arguments, scheduler, hyperparameters

<model key>                                        a weight; `names` says of which layers and experts
[chained_N.]optimizer.state.<slot>.<model key>     what the optimizer has of it, in the same shape or flattened
optimizer.distributed....                          state of flat buffers, without names
<key>/shard_<offset>_<shape>                       an object: `_extra_state` of a module, random states

Source: megatron-core 0.13, 0.15 and 0.16, and checkpoints that they wrote.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from zckpt.errors import DamagedFileError, LayoutError, UnsupportedError, about, listed
from zckpt.formats.dcp.directory import NAME
from zckpt.formats.dcp.items import Items, read_items
from zckpt.formats.dcp.metadata import read_metadata
from zckpt.formats.dcp.reader import describe_files
from zckpt.formats.megatron.buckets import unproven
from zckpt.formats.megatron.cut import end_to_end, is_flattened, unflattened
from zckpt.formats.megatron.directory import COMMON, FORMAT, MARK, TORCH_DIST, Place
from zckpt.formats.megatron.flat import with_flat
from zckpt.formats.megatron.keys import Stored, is_of_one_layer, stored
from zckpt.formats.megatron.names import in_order
from zckpt.formats.megatron.objects import FLAT, Common, carry_objects, read_own, restore_own, settle, topology_of
from zckpt.formats.megatron.optimizer import attach, keep_common
from zckpt.formats.megatron.remainders import REMAINDER, whole
from zckpt.formats.torch_files.tensors import TensorItem, as_mapping, by_name, describe
from zckpt.state import MASTER, WEIGHT, Checkpoint, Parameter, Shape, Slot, without
from zckpt.state.inventory import IMPLIED, REST, Claim, Rule
from zckpt.state.names import bare_names
from zckpt.state.views import transpose, unstacked
from zckpt.torchfile import read_torchfile

MASTERS = frozenset({"param", "fp32_param"})
"""What the distributed optimizer, and the others, call the parameters that they step."""

_SLOT = re.compile(r"(?:chained_[0-9]+\.)?optimizer\.state\.([^.]+)\.(.+)")
_NEMO = "model."
"""Before every key of NeMo 1."""

Slots = dict[str, dict[str, TensorItem]]
"""The tensors of a directory by slot, and the key of the weight."""


def _items(checkpoint: Checkpoint, path: Path) -> Items:
    metadata = read_metadata(path)
    items = read_items(metadata)
    describe_files(checkpoint, metadata, items.files)
    return items


def read(place: Place, items_of: Callable[[Checkpoint, Path], Items] = _items) -> Checkpoint:
    """Read the structure of a directory.

    `items_of`: returns its tensors and objects, and adds the files that they are in to a checkpoint's. Raises
    SourceError: files are missing or damaged, contradict each other, or hold what is not known.
    """
    path = place.path
    file = read_torchfile(path / COMMON)
    common = Common(file, by_name(as_mapping(file.root, file.path), file.path))
    checkpoint = Checkpoint(str(path), FORMAT, f"{place.kind} 1")
    items = items_of(checkpoint, path)
    checkpoint.claims[str(path / MARK)] = Claim(IMPLIED, "which backend wrote it")
    own = read_own(path)
    with about(path / NAME if place.kind == TORCH_DIST else path):
        slots, flat = _by_slot(items.tensors)
        _add_tensors(checkpoint, slots, own.names)
    carry_objects(checkpoint, items.objects)
    common = with_flat(checkpoint, flat, items.objects, common)
    rules = attach(checkpoint, common, own.groups)
    keep_common(checkpoint, common)
    checkpoint.files.append(describe(common.file, "metadata", rules=rules))
    checkpoint.topology, checkpoint.world_size = topology_of(common.arguments, checkpoint)
    checkpoint.step = common.step
    restore_own(checkpoint, own)
    return checkpoint


def _by_slot(tensors: Mapping[str, TensorItem]) -> tuple[Slots, dict[str, TensorItem]]:
    """Return what each tensor is, and those that are flat buffers."""
    flat = {key: item for key, item in tensors.items() if FLAT.fullmatch(key)}
    found: Slots = {WEIGHT: {}}
    for key, item in without(tensors, *flat).items():
        match = _SLOT.fullmatch(key)
        slot, of = (WEIGHT, key) if match is None else (MASTER if match[1] in MASTERS else match[1], match[2])
        if of in found.setdefault(slot, {}):
            raise LayoutError(f"two optimizers have {slot} for {of}", found=key)
        found[slot][of] = item
    if not found[WEIGHT]:
        raise UnsupportedError("holds no model", found=listed(list(tensors)) or "nothing")
    for slot, its in found.items():
        others = list(without(its, *found[WEIGHT]))
        if others:
            raise UnsupportedError(
                f"the optimizer has {slot} for something that is not a model tensor", found=listed(others)
            )
    return found, flat


def _add_tensors(checkpoint: Checkpoint, slots: Slots, given: Mapping[str, str]) -> None:
    """Give a checkpoint its parameters and buffers with all of their slots."""
    found: dict[str, Parameter] = {}
    filed: dict[str, str] = {}
    for one in stored(slots[WEIGHT]):
        its = {slot: [key for key in one.parts if key in items] for slot, items in slots.items()}
        for slot, keys in its.items():
            if keys and len(keys) != len(one.parts):
                missing = next(key for key in one.parts if key not in keys)
                raise LayoutError(f"{slot} of {one.key} is not whole", expected=missing, found=listed(keys))
        read_as = partial(_pieces, one, slots)
        is_turned = is_transposed(one, slots, read_as)
        pieces = {slot: read_as(slot, is_turned) for slot, keys in its.items() if keys}
        if any(its.dtype == REMAINDER for its in pieces.get(MASTER, {}).values()):
            pieces[MASTER] = {at: whole(its, pieces[WEIGHT][at]) for at, its in pieces[MASTER].items()}
            halves = "lower halves of masters, whose upper ones are the weights"
            rules = [Rule((slots[MASTER][key].key, REST), IMPLIED, halves, tensors=True) for key in its[MASTER]]
            for file in checkpoint.files:
                file.rules = (*file.rules, *rules)
        for index, weight in pieces[WEIGHT].items():
            name = one.name(index)
            if name in found:
                raise DamagedFileError(f"two tensors are named {name}", found=f"{one.key} and {filed[name]}")
            filed[name] = one.key
            found[name] = Parameter(name, weight.shape, weight.dtype, {slot: of[index] for slot, of in pieces.items()})
    names = bare_names(found)
    if all(name.startswith(_NEMO) for name in found):
        names = {name: name.removeprefix(_NEMO) for name in found}
    names |= {name: other for name, other in given.items() if name in found}
    if any(map(is_of_one_layer, slots[WEIGHT])):
        checkpoint.details["layers"] = "apart"
    for name in in_order(found):
        found[name].name = names[name]
        checkpoint.parameters[names[name]] = found[name]
        if names[name] != name and name not in given:
            checkpoint.wrapped[names[name]] = name
    settle(checkpoint)


def _pieces(one: Stored, slots: Slots, slot: str, turned: bool) -> dict[Shape, Slot]:
    """Return every tensor of the model that is stored together, by its layer and expert.

    `turned`: whether what is flattened is of transposed ones.
    """
    axes = len(one.axes)
    shapes = [slots[WEIGHT][key].shape for key in one.parts]
    if len({shape[:axes] for shape in shapes}) > 1:
        raise LayoutError(f"the tensors of {one.key} do not fit together", found=shapes)
    every = []
    for key, shape in zip(one.parts, shapes, strict=True):
        item = slots[slot][key]
        if len(shape) < axes:
            raise LayoutError(f"{key} has no layer axis", found=shape)
        is_flat = item.shape != shape
        inner = shape[axes:][::-1] if is_flat and turned else shape[axes:]
        if is_flat and (item.shape[:axes] != shape[:axes] or not is_flattened(item.shape[axes:], inner)):
            raise LayoutError(f"{item.key} does not have the shape of its weight", expected=(*shape[:axes], *inner),
                              found=item.shape)  # fmt: skip
        whole = item.slot(slot)
        if axes and not whole.numel:
            raise UnsupportedError(f"{item.key} has no elements", found=item.shape)
        found: dict[Shape, Slot] = unstacked(whole, axes) if axes else {(): whole}
        if is_flat:
            found = {index: unflattened(its, inner) for index, its in found.items()}
        every.append({index: transpose(its, (1, 0)) for index, its in found.items()} if is_flat and turned else found)
    return {index: end_to_end([its[index] for its in every], one.key) for index in every[0]}


_EXPERTS = re.compile(r"(.*\.experts\.(?:experts|local_experts)\.(?:[0-9]+\.)?)linear_fc([12])\.weight")

Pieces = Callable[[str, bool], dict[Shape, Slot]]
"""A slot by layer and expert; whether it is read as transposed."""


def is_transposed(one: Stored, slots: Mapping[str, Mapping[str, TensorItem]], pieces: Pieces) -> bool:
    """Tell whether the flattened state of experts' weights is of the transposed ones, as `GroupedMLP` has it.

    Its weights are written as those of experts one by one, and its flattened state is not.

                          one by one                       grouped
    weight, fc1           [L, E, F, H]                     the same: it is transposed when it is written
    state, flattened      [L, E, t, 1, F/t * H]            [L, E, 1, t, H * F/t]: of [H, F]
    weight, fc2           [L, E, H, F]                     the same
    state, flattened      [L, E, 1, t, H * F/t]            [L, E, t, 1, F/t * H]: of [F, H]

    t is the number of tensor-parallel ranks, times two where a layer is gated. Where it is one, only values tell the
    two apart: masters, rounded, are weights in one of them.

    Source: `GroupedMLP.sharded_state_dict` of megatron-core 0.8 to 0.13.

    `slots`: the tensors of each by the weights' keys. Raises UnsupportedError: neither shapes nor values tell;
    LayoutError: the layers of an expert are not of one kind.
    """
    match, axes, model = _EXPERTS.fullmatch(one.key), len(one.axes), slots[WEIGHT]

    def flattened(key: str) -> list[Shape]:
        every = [its[key].shape for its in slots.values() if key in its and key in model]
        return [shape for shape in every if len(shape) == len(model[key].shape) + 1]

    if match is None:
        return False
    said = {
        shape[axes + across] > 1
        for number, across in (("1", 1), ("2", 0))
        for shape in flattened(f"{match[1]}linear_fc{number}.weight")
        if max(shape[axes : axes + 2]) > 1
    }
    if len(said) > 1:
        raise LayoutError(f"the state of {match[1]}* is cut in two ways", path=model[one.parts[0]].path)
    if said or not flattened(one.key):
        return said == {True}
    fitting = []
    for turned in (False, True) if one.key in slots.get(MASTER, {}) else ():
        weights, masters = pieces(WEIGHT, False), pieces(MASTER, turned)
        if unproven({str(at): its for at, its in masters.items()}, {str(at): weights[at] for at in masters}) is None:
            fitting.append(turned)
    if len(fitting) != 1:
        raise UnsupportedError(
            f"it is uncertain whether the state of {one.key} is GroupedMLP's, transposed",
            path=model[one.key].path,
            expected="masters that round to their weights",
            found="in both ways" if fitting else "in none",
        )
    return fitting[0]
