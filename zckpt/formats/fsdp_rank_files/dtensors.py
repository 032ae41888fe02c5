"""What one rank gets: DTensors as torch pickles them, and of FSDP1 shards of flat parameters.

torch has changed several times what a pickled DTensor is, and loads no form but its own: see `FORMS`. It compares
meshes by their ranks, layout, device type and names, so these have to be those of the program that loads the files; the
rest is made again, or means nothing there.

The optimizer's state of FSDP1 is of its units, each cut into a shard for each rank. A parameter that no step has
reached has no state of its own; as part of a flat parameter its state is zero, as torch fills it in.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zckpt.errors import UnsupportedError, listed
from zckpt.formats.fsdp_rank_files.held import FORMS, REPLICATE, SHARD, Form, Mesh, Placement, box_of
from zckpt.formats.fsdp_rank_files.units import Units
from zckpt.formats.torch_files.writer import SlotContent, SlotTensor, ValueTensor, new_storage, view
from zckpt.immutable import immutable
from zckpt.state import Checkpoint, Shape, Slot, differ, itemsize, positions
from zckpt.state.boxes import row_major, torch_strides
from zckpt.state.views import concat, narrow, pad, reshape, zeros
from zckpt.storage.files import opened
from zckpt.torchfile import Device, DType, Global, Layout, MetaTensor, Object, Size, Tensor

_LAYOUTS = "torch.distributed._mesh_layout"

NEWEST = max(FORMS)

DEFAULT_GROUP = "0"
"""What torch calls the process group of all ranks."""


@immutable
class Target:
    """For which ranks files are written, and in which form.

    `fsdp_size`: ranks that together have everything once; where there are more, the mesh has a dimension of copies
    first; `device`: type of the devices of the mesh; `names`: of its dimensions, which torch compares; none: it has no
    names; None: they are those of verl and SkyRL.
    """

    world_size: int
    fsdp_size: int
    device: str
    names: tuple[str, ...] | None = None
    form: Form = NEWEST

    def mesh(self, rank: int) -> Mesh:
        """Return the mesh as a rank sees it."""
        sizes, coordinate = (self.world_size // self.fsdp_size, self.fsdp_size), divmod(rank, self.fsdp_size)
        first = int(sizes[0] == 1)  # without copies the mesh has one dimension
        names = ("ddp", "fsdp")[first:] if self.names is None else self.names
        return Mesh(sizes[first:], coordinate[first:], names, self.device)


class RankTensors:
    """Makes the tensors of one rank's file, which share a mesh."""

    def __init__(self, target: Target, rank: int) -> None:
        self.mesh = target.mesh(rank)
        self._form = target.form
        # Before 2.5 a spec and its placements were in one module.
        old = "torch.distributed._tensor.placement_types" if target.form < (2, 5) else ""
        self._about = old or "torch.distributed.tensor._dtensor_spec"
        self._cls = Global(*FORMS[(2, 3) if old else (2, 5)].rsplit(".", 1))
        copies = len(self.mesh.sizes) - 1
        self._placements = (*(Placement(REPLICATE) for _ in range(copies)), Placement(SHARD))
        self._mesh = _mesh_node(self.mesh, target.form, target.world_size, rank)
        self._nodes = tuple(
            _object(
                old or "torch.distributed.tensor.placement_types",
                one.kind,
                {} if one.kind == REPLICATE else {"dim": one.dim},
            )
            for one in self._placements
        )
        self._specs: dict[tuple[Shape, str], Object] = {}

    def dtensor(self, slot: Slot, dtype: str, label: str) -> MetaTensor:
        """Return this rank's rows of a slot, as a DTensor."""
        offsets, sizes = box_of(slot.shape, self._placements, self.mesh)
        row = slot.numel // slot.shape[0] if slot.shape[0] else 0
        extent = slot.flat(offsets[0] * row, sizes[0] * row)
        storage = new_storage(dtype, extent.numel, [SlotContent(0, slot, label, extent)])
        state = {"_local_tensor": view(storage, sizes), "_spec": self._spec(slot.shape, dtype)}
        strides, layout = torch_strides(slot.shape), Layout("torch.strided")
        return MetaTensor(dtype, slot.shape, strides, False, self._cls, 0, layout, Device("cpu"), None, (None, state))

    def shard(self, line: Slot, dtype: str, label: str) -> SlotTensor:
        """Return this rank's elements of a line that FSDP1 cuts; the last ones are followed by zeros."""
        (count,), (rank,) = self.mesh.sizes, self.mesh.coordinate
        width = -(-line.numel // count)
        return SlotTensor(narrow(pad(line, 0, 0, width * count - line.numel), 0, width * rank, width), dtype, label)

    def _spec(self, shape: Shape, dtype: str) -> Object:
        spec = self._specs.get((shape, dtype))
        if spec is None:
            strides = torch_strides(shape)  # not the tensor's own: a pickle tells what is one object
            about = Object(Global(self._about, "TensorMeta"), (Size(shape), tuple(strides), DType(dtype)), how="newobj")
            state: dict[object, object] = {"mesh": self._mesh, "placements": self._nodes, "tensor_meta": about}
            if self._form >= (2, 10):
                cuts = len(self.mesh.sizes) - 1
                order = Object(Global(self._about, "ShardOrderEntry"), (0, (cuts,)), how="newobj")
                state |= {"shard_order": (order,), "use_strided_shard_as_shard_order": False}
            spec = self._specs[shape, dtype] = _object(self._about, "DTensorSpec", {**state, "_hash": None})
        return spec


def _object(module: str, name: str, state: dict[object, object]) -> Object:
    return Object(Global(module, name), how="newobj", state=state, has_state=True)


def _mesh_node(mesh: Mesh, form: Form, world_size: int, rank: int) -> Object:
    ranks = tuple(range(world_size))
    numbers = b"".join(one.to_bytes(4, "little") for one in ranks)
    names, groups = mesh.names or None, [DEFAULT_GROUP] if len(mesh.sizes) == 1 else []
    state: dict[object, object] = {
        "device_type": mesh.device,
        "mesh": ValueTensor(numbers, "int32", mesh.sizes),
        "mesh_dim_names": names,
        "_flatten_mesh_list": ranks,
        "_parent_mesh": None,
        "_thread_id": None,
        "_dim_group_infos": [(f"ptd:{group}", list(ranks), group) for group in groups],
        "_dim_group_names": groups,
        "_coordinate_on_dim": list(mesh.coordinate),
        "_hash": 0,  # 2.3 takes it as it is, later versions make their own of it
    }
    if form >= (2, 10):
        strides = row_major(list(mesh.sizes))
        layout: dict[object, object] = {"shape": mesh.sizes, "stride": tuple(strides)}
        if form >= (2, 13):
            axes: list[dict[object, object]] = [
                {"shape": (), "stride": ()} if size == 1 else {"shape": (size,), "stride": (step,)}
                for size, step in zip(mesh.sizes, strides, strict=True)
            ]
            layout = {"axes": tuple(_object(_LAYOUTS, "_FlatLayout", axis) for axis in axes)}
        state = {
            "_device_type": mesh.device,
            "_layout": _object(_LAYOUTS, "_MeshLayout", layout),
            "_rank_map": ValueTensor(numbers, "int32", (world_size,)),
            "_mesh_dim_names": names,
            "_root_mesh": None,
            "_preserve_rank_order": False,
            "_flatten_rank_map": ranks,
            "_thread_id": None,
            "_flatten_mapping": {},
            "_dim_group_names": groups,
            "_rank": rank,
            "_coordinate_on_dim": mesh.coordinate,
        }
    return _object("torch.distributed.device_mesh", "DeviceMesh", state)


def plain_tensor(slot: Slot, dtype: str, label: str) -> Tensor:
    """Return the whole of a slot, as every rank has it of a buffer."""
    return view(new_storage(dtype, slot.numel, [SlotContent(0, slot, label)]), slot.shape)


def flat_state(checkpoint: Checkpoint, tree: dict[object, Any], units: Units) -> dict[int, dict[str, object]]:
    """Return the state of each unit: lines of its parameters, end to end, and values that all of them share.

    Raises UnsupportedError: members of a unit have other state than each other, or are of several param groups, or
    there is no state.
    """
    if len(checkpoint.param_groups) != 1:
        raise _refused("the optimizer has several param groups", f"{len(checkpoint.param_groups)}",
                       "give --groups=one, or --fsdp-version 2")  # fmt: skip
    numbers = positions(checkpoint.param_groups[0].parameters)
    found: dict[int, dict[str, object]] = {}
    for unit, members in enumerate(units):
        states = {name: tree["state"].get(numbers.get(name, -1)) for name in members}
        known = [state for state in states.values() if state]
        if not known:
            continue
        if differ([state.keys() for state in known]):
            raise _refused(f"parameters of the unit of {members[0]} have different state", members[0])
        its = found[unit] = {}
        for key, value in known[0].items():
            if isinstance(value, SlotTensor) and value.slot.shape:
                its[key] = _end_to_end(checkpoint, key, states)
                continue
            if len({_content(state[key]) for state in known}) > 1:
                raise _refused(f"parameters of the unit of {members[0]} have different values of {key}", key)
            its[key] = value
    if not any(isinstance(value, SlotTensor) and value.slot.shape for its in found.values() for value in its.values()):
        raise _refused("no parameter has state, by whose size a flat one is known", "none")
    return found


def _end_to_end(checkpoint: Checkpoint, key: str, states: Mapping[str, Mapping[str, object] | None]) -> SlotTensor:
    """Return one state of all parameters of a unit as a line; where no step has reached one, it is zero."""
    found: dict[str, Slot | None] = {}
    for name, state in states.items():
        value = state[key] if state else None
        found[name] = value.slot if isinstance(value, SlotTensor) else None
        if value is not None and getattr(found[name], "shape", None) != checkpoint.parameters[name].shape:
            raise _refused(f"{key} of {name} does not have one value per element", key)
    known = [slot for slot in found.values() if slot is not None]
    dtypes = {slot.dtype for slot in known}
    if len(dtypes) > 1:
        raise _refused(f"{key} of {next(iter(states))} and others has several types", listed(sorted(dtypes)))
    shapes = {name: (checkpoint.parameters[name].numel,) for name in found}
    line = concat([zeros(known[0], shapes[name]) if slot is None else reshape(slot, shapes[name])
                   for name, slot in found.items()], 0)  # fmt: skip
    return SlotTensor(line, line.dtype, f"{key} of the unit of {next(iter(states))}")


def _content(value: object) -> object:
    """Return what equal single values have in common."""
    if isinstance(value, ValueTensor):
        return value.dtype, value.data
    if not isinstance(value, SlotTensor):
        return repr(value)
    (span,) = value.slot.spans
    with opened(span.path) as file:
        return value.dtype, file.at(span.offset, itemsize(span.dtype))


def _refused(message: str, found: str, advice: str = "give --fsdp-version 2") -> UnsupportedError:
    return UnsupportedError(
        f"{message}, but FSDP1 has one state for a whole unit",
        found=found,
        advice=advice,
    )
