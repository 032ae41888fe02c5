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
from collections.abc import Mapping
from dataclasses import dataclass, field

from zckpt.errors import DamagedFileError, LayoutError, UnsupportedError, about, listed
from zckpt.formats.dcp.directory import NAME
from zckpt.formats.dcp.items import ObjectItem, TensorItem, read_items
from zckpt.formats.dcp.metadata import read_metadata
from zckpt.formats.dcp.reader import describe_files
from zckpt.formats.megatron.cut import end_to_end, is_flattened, unflattened
from zckpt.formats.megatron.directory import COMMON, FORMAT, MARK, TORCH_DIST, ZARR, Place
from zckpt.formats.megatron.flat import with_flat
from zckpt.formats.megatron.grouped import is_transposed
from zckpt.formats.megatron.keys import Stored, is_of_one_layer, stored
from zckpt.formats.megatron.names import BUFFERS, in_order
from zckpt.formats.megatron.objects import carry_objects, read_common, topology_of
from zckpt.formats.megatron.optimizer import attach, keep_common
from zckpt.formats.megatron.own import add_absent, read_own, restore_own
from zckpt.formats.megatron.zarr import read_arrays
from zckpt.formats.torch_files.tensors import describe
from zckpt.state import MASTER, WEIGHT, Checkpoint, Parameter, Slot
from zckpt.state.dtypes import is_floating
from zckpt.state.inventory import IMPLIED, Claim
from zckpt.state.names import bare_names
from zckpt.state.views import Shape, transpose, unstacked

MASTERS = frozenset({"param", "fp32_param"})
"""What the distributed optimizer, and the others, call the parameters that they step."""

_SLOT = re.compile(r"(?:chained_[0-9]+\.)?optimizer\.state\.([^.]+)\.(.+)")
_FLAT = re.compile(r"(?:chained_[0-9]+\.)?optimizer\.distributed\..+")
_NEMO = "model."
"""Before every key of NeMo 1."""


@dataclass(slots=True)
class Keys:
    """The tensors of a directory by what they are.

    Parameters
    ----------
    model : dict of str to TensorItem
        By key.
    slots : dict of (str, str) to TensorItem
        By slot and the model's key.
    flat : dict of str to TensorItem
        Buffers that hold all parameters of a rank, one after the other.
    """

    model: dict[str, TensorItem] = field(default_factory=dict)
    slots: dict[str, dict[str, TensorItem]] = field(default_factory=dict)
    flat: dict[str, TensorItem] = field(default_factory=dict)


def read(place: Place) -> Checkpoint:
    """Read the structure of a directory.

    Raises
    ------
    SourceError
        Files are missing or damaged, contradict each other, or hold what is not known.
    """
    path = place.path
    common = read_common(path / COMMON)
    checkpoint = Checkpoint(str(path), FORMAT, f"{place.kind} {place.version}")
    tensors, objects = _items(checkpoint, place)
    checkpoint.claims[str(path / MARK)] = Claim(IMPLIED, "which backend wrote it")
    if place.tracker is not None:
        checkpoint.claims[str(place.tracker)] = Claim(IMPLIED, "which checkpoint of the run is the newest")
    own = read_own(path)
    with about(path / NAME if place.kind == TORCH_DIST else path):
        keys = sorted_keys(tensors)
        add_tensors(checkpoint, keys, own.names if own is not None else {})
    carry_objects(checkpoint, objects)
    common = with_flat(checkpoint, keys.flat, objects, common)
    rules = attach(checkpoint, common, own.groups if own is not None else None)
    keep_common(checkpoint, common)
    checkpoint.files.append(describe(common.file, "metadata", rules=rules))
    checkpoint.topology, checkpoint.world_size = topology_of(common.arguments, checkpoint)
    checkpoint.step = common.step
    if own is not None:
        add_absent(checkpoint, own)
        restore_own(checkpoint, own)
    return checkpoint


def _items(checkpoint: Checkpoint, place: Place) -> tuple[dict[str, TensorItem], dict[str, ObjectItem]]:
    """Return the tensors and the objects by key; a checkpoint gets the files that hold them."""
    if place.kind == ZARR:
        return read_arrays(checkpoint, place.path)
    metadata = read_metadata(place.path)
    items = read_items(place.path, metadata)
    describe_files(checkpoint, place.path, metadata, items.files)
    return items.tensors, items.objects


def sorted_keys(tensors: Mapping[str, TensorItem]) -> Keys:
    """Return what each tensor is."""
    found = Keys()
    for key, item in tensors.items():
        slot = _SLOT.fullmatch(key)
        if slot is not None:
            of = found.slots.setdefault(MASTER if slot[1] in MASTERS else slot[1], {})
            if slot[2] in of:
                raise LayoutError(f"two optimizers have {slot[1]} of {slot[2]}", found=key)
            of[slot[2]] = item
        elif _FLAT.fullmatch(key):
            found.flat[key] = item
        else:
            found.model[key] = item
    return found


def add_tensors(checkpoint: Checkpoint, keys: Keys, given: Mapping[str, str]) -> None:
    """Give a checkpoint its parameters and buffers with all of their slots."""
    if not keys.model:
        raise UnsupportedError("holds no model", found=listed(list(keys.flat) or list(keys.slots)) or "nothing")
    found: dict[str, Parameter] = {}
    filed: dict[str, str] = {}
    for one in stored(keys.model):
        slots = {slot: _of(one, its, slot) for slot, its in keys.slots.items()}

        def pieces(slot: str, turned: bool, one: Stored = one) -> dict[Shape, Slot]:
            items = keys.model if slot == WEIGHT else keys.slots[slot]
            return _pieces(one, slot, items, keys.model, turned=turned)

        weights = pieces(WEIGHT, False)
        turned = is_transposed(one.key, len(one.axes), keys.slots, keys.model, pieces)
        known = {slot: pieces(slot, turned) for slot, its in slots.items() if its}
        for index, weight in weights.items():
            name = one.name(index)
            if name in found:
                raise DamagedFileError(f"two tensors are {name}", found=f"{one.key} and {filed[name]}")
            filed[name] = one.key
            own = {WEIGHT: weight, **{slot: its[index] for slot, its in known.items()}}
            found[name] = Parameter(name, weight.shape, weight.dtype, own)
    _check_all_used(keys)
    names = bare_names(found)
    if all(name.startswith(_NEMO) for name in found):
        names = {name: name.removeprefix(_NEMO) for name in found}
    names |= {name: other for name, other in given.items() if name in found}
    if any(is_of_one_layer(key) for key in keys.model):
        checkpoint.details["layers"] = "apart"
    for name in in_order(found):
        parameter = found[name]
        parameter.name = names[name]
        is_buffer = not is_floating(parameter.dtype) or (bool(BUFFERS.fullmatch(name)) and len(parameter.slots) == 1)
        parameter.frozen = bool(keys.slots) and not is_buffer and len(parameter.slots) == 1
        (checkpoint.buffers if is_buffer else checkpoint.parameters)[parameter.name] = parameter
        if names[name] != name and name not in given:
            checkpoint.wrapped[names[name]] = name


def _of(one: Stored, items: Mapping[str, TensorItem], slot: str) -> dict[str, TensorItem]:
    """Return the parts of a slot of a tensor; none if it has no such slot."""
    its = {key: items[key] for key in one.parts if key in items}
    if its and len(its) != len(one.parts):
        missing = next(key for key in one.parts if key not in its)
        raise LayoutError(f"{slot} of {one.key} is not whole", expected=missing, found=listed(list(its)))
    return its


def _pieces(
    one: Stored, slot: str, items: Mapping[str, TensorItem], model: Mapping[str, TensorItem], *, turned: bool
) -> dict[Shape, Slot]:
    """Return every tensor of the model that is stored together, by its layer and expert."""
    axes = len(one.axes)
    if len({model[key].shape[:axes] for key in one.parts}) > 1:
        raise LayoutError(f"the tensors of {one.key} do not fit together",
                          found=[model[key].shape for key in one.parts])  # fmt: skip
    every = [_inner(items[key].slot(slot), key, items[key].key, model[key].shape, axes, turned=turned)
             for key in one.parts]  # fmt: skip
    return {index: end_to_end([its[index] for its in every], one.key) for index in every[0]}


def _inner(slot: Slot, key: str, own: str, shape: Shape, axes: int, *, turned: bool) -> dict[Shape, Slot]:
    if len(shape) < axes:
        raise LayoutError(f"{key} has no axis for each layer", found=shape)
    flat = slot.shape != shape
    inner = tuple(reversed(shape[axes:])) if flat and turned else shape[axes:]
    if flat and (slot.shape[:axes] != shape[:axes] or not is_flattened(slot.shape[axes:], inner)):
        raise LayoutError(f"{own} is not of the shape of its weight", expected=(*shape[:axes], *inner),
                          found=slot.shape)  # fmt: skip
    if axes and not slot.numel:
        raise UnsupportedError(f"{own} has no elements", found=slot.shape)
    found: dict[Shape, Slot] = unstacked(slot, axes) if axes else {(): slot}
    if flat:
        found = {index: unflattened(its, inner) for index, its in found.items()}
    return {index: transpose(its, (1, 0)) for index, its in found.items()} if flat and turned else found


def _check_all_used(keys: Keys) -> None:
    for slot, its in keys.slots.items():
        others = [key for key in its if key not in keys.model]
        if others:
            raise UnsupportedError(f"the optimizer has {slot} of what is no tensor of the model", found=listed(others))
