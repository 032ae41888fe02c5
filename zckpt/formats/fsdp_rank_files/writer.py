"""Lay out the files of FSDP's ranks, as verl's checkpoint manager writes and loads them.

DIR/model_world_size_W_rank_R.pt            DTensors, cut along the first dimension; buffers whole in every file
DIR/optim_world_size_W_rank_R.pt            FSDP2: the same; FSDP1: flat parameters of its units, cut into equal shards
DIR/extra_state_world_size_W_rank_R.pt      the scheduler, made where there is none; random states of the source's ranks
DIR/fsdp_config.json, huggingface/          the latter as the source has it
DIR/data.pt, data_R.pt, trainer_state.pt    as the source has them; the first and the last belong around a role's folder
DIR/zckpt.pt                                what these have no place for: see `kept`; no program looks at it

torch has changed several times what a pickled DTensor is, and loads no form but its own: see `FORMS`. It compares
meshes by their ranks, layout, device type and names, so these have to be those of the program that loads the files; the
rest is made again, or means nothing there.

The optimizer's state of FSDP1 is of its units, each cut into a shard for each rank. A parameter that no step has
reached has no state of its own; as part of a flat parameter its state is zero, as torch fills it in.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from zckpt.engine.targets import Lazily, TargetFile
from zckpt.errors import UnsupportedError, UsageError, listed
from zckpt.evidence import refuse_unnamed
from zckpt.formats.companions import copy_of, files_below
from zckpt.formats.consolidated.model import trained_tensors
from zckpt.formats.consolidated.optimizer import optimizer_tree
from zckpt.formats.format import Job, TargetFiles
from zckpt.formats.fsdp_rank_files.directory import (
    CONFIG_NAME,
    EXTRA,
    FORMAT,
    HUGGINGFACE,
    LORA_NAME,
    MODEL,
    OF_TRAINING,
    OPTIMIZER,
    rank_name,
)
from zckpt.formats.fsdp_rank_files.held import FORMS, REPLICATE, SHARD, Form, Mesh, Placement, box_of, versions_with
from zckpt.formats.fsdp_rank_files.kept import (
    ONE,
    extra_state,
    of_rank,
    of_single_ranks,
    one_group,
    own_tree,
    ranks_with_state,
    scheduler_of,
)
from zckpt.formats.fsdp_rank_files.readings import FLAT, WHOLE
from zckpt.formats.fsdp_rank_files.units import WRAPPED, Units, matching, members_of
from zckpt.formats.group_values import refuse_several
from zckpt.formats.remainder import of_modules
from zckpt.formats.suffixes import OWN_NAME
from zckpt.formats.torch_files import writer as torch_writer
from zckpt.formats.torch_files.tensors import refuse_trees
from zckpt.formats.torch_files.writer import SlotContent, SlotTensor, ValueTensor, new_storage, view
from zckpt.immutable import immutable
from zckpt.state import Checkpoint, Shape, Slot, dict_of, differ, itemsize, positions, without
from zckpt.state.boxes import row_major, torch_strides
from zckpt.state.partition import check_world_size
from zckpt.state.views import concat, narrow, pad, reshape, zeros
from zckpt.storage.files import is_file, opened
from zckpt.torchfile import Device, DType, Global, Layout, MetaTensor, Object, OrderedMapping, Size, Tensor

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


FSDP1, FSDP2 = 1, 2


def lay_out(job: Job) -> TargetFiles:
    """Return the files of all ranks.

    Raises UsageError: ranks that cannot be, or FSDP1 without the units that it wraps; UnsupportedError: state that
    these files have no place for.
    """
    checkpoint, options = job.checkpoint, job.options
    own = dict_of(checkpoint.details.get("fsdp_config")).get("FSDP_version") if checkpoint.format == FORMAT else None
    version: int = options.fsdp_version or (own if own in (FSDP1, FSDP2) else FSDP2)
    state = checkpoint.details.get("optimizer_state")
    refuse(checkpoint, idle=_idle(checkpoint) if version == FSDP2 and state == WHOLE and options.groups != ONE else ())
    target = _target(job)
    if version == FSDP1 and own == FSDP1 and checkpoint.param_groups and state != FLAT and not options.units:
        raise UnsupportedError(
            "cannot write the optimizer of FSDP1 with use_orig_params=True",
            expected="flat parameters, or FSDP2",
            advice="give --fsdp-version 2, or the units with --units",
        )
    said = [f"for meshes of {target.device} devices, in the form of torch {versions_with(target.form)}"]
    of_ranks, count = of_single_ranks(checkpoint), ranks_with_state(checkpoint)
    if of_ranks and target.world_size > count:
        said.append(f"{listed(of_ranks)}: ranks from {count} on have none, because the source has fewer ranks")
    if options.groups == ONE and checkpoint.param_groups:
        checkpoint, changed = one_group(checkpoint)
        said += changed
    if version == FSDP2 and options.units is not None:
        raise UsageError("--units only applies to FSDP1", expected="--fsdp-version 1")
    units = _units(job, target) if version == FSDP1 else None
    writer = Ranks(checkpoint, target, units, scheduler_of(checkpoint, said))
    facts = json.dumps({"FSDP_version": version, "world_size": target.world_size}, indent=4).encode()
    beside = _of_training(checkpoint, target.world_size, said)
    files = [
        TargetFile.of(CONFIG_NAME, facts),
        torch_writer.lay_out(OWN_NAME, own_tree(checkpoint, units)),
        *_copies(checkpoint),
        *beside,
    ]
    total = len(files) + target.world_size * (2 if writer.optimizer is None else 3)
    return TargetFiles(
        Lazily(lambda: chain(files, writer.files()), total),
        notes=said,
        copied={one.name for one in files if one.name.startswith(f"{HUGGINGFACE}/")} | {one.name for one in beside},
    )


def refuse(checkpoint: Checkpoint, *, idle: Collection[str] = ()) -> None:
    """Raise UnsupportedError for state that files of ranks have no place for.

    `idle`: numbers of parameters without names or state that keep their places.
    """
    refuse_trees(checkpoint, "these files", "--dequantize writes floats; or convert to zckpt or dcp")
    known = [replace(one, parameters=[x for x in one.parameters if x not in idle]) for one in checkpoint.param_groups]
    refuse_unnamed(replace(checkpoint, param_groups=known), "by which ranks number them as the model does")
    refuse_several(checkpoint, "these files have")


def _idle(checkpoint: Checkpoint) -> frozenset[str]:
    """Return numbers without state that are their places: a frozen model's, whose adapter was saved."""
    places = {name for at, name in enumerate(checkpoint.grouped) if name == str(at)}
    return frozenset(places - {*checkpoint.parameters, *checkpoint.unnamed})


def _target(job: Job) -> Target:
    """Return for which ranks files are written, and in which form: by default those of the source."""
    checkpoint, options = job.checkpoint, job.options
    world_size = options.world_size or checkpoint.world_size
    check_world_size(world_size)
    fsdp_size = options.fsdp_size or world_size
    if fsdp_size < 1 or world_size % fsdp_size:
        raise UsageError("unusable --fsdp-size", expected=f"a divisor of the world size, {world_size}", found=fsdp_size)
    device = options.device or checkpoint.details.get("device") or "cuda"
    own = checkpoint.details if checkpoint.format == FORMAT else {}
    mesh = own.get("mesh")
    names = tuple(dict_of(mesh))
    is_alike = isinstance(mesh, (dict, list)) and len(mesh) == (1 if fsdp_size == world_size else 2)
    version = options.torch_version or own.get("torch_version")
    form = NEWEST
    if version:
        found = re.match(r"([0-9]{1,3})\.([0-9]{1,3})(?![0-9])", str(version))
        forms = [one for one in FORMS if found and one <= (int(found[1]), int(found[2]))]
        if not forms:
            raise UsageError("unusable --torch-version", expected="2.3 or newer", found=str(version))
        form = max(forms)
    return Target(world_size, fsdp_size, str(device), names if is_alike else None, form)


def _units(job: Job, target: Target) -> list[str]:
    """Return the names of the modules that FSDP1 wraps, in their order."""
    checkpoint = job.checkpoint
    if target.fsdp_size != target.world_size:
        raise UsageError("--fsdp-size only applies to FSDP2", expected="--fsdp-version 2")
    owners = [one.name for one in checkpoint.owners]
    known = checkpoint.details.get("fsdp_units")
    if job.options.units is not None:
        return matching(job.options.units.split(","), owners)
    if checkpoint.format != FORMAT or not isinstance(known, list):
        raise UsageError(
            "it is unknown which modules FSDP1 wraps",
            expected="--units PATTERN,... such as 'model.layers.*', or --fsdp-version 2",
        )
    return [str(unit) for unit in known]


class Ranks:
    """Lays out the files of one rank after the other."""

    def __init__(
        self, checkpoint: Checkpoint, target: Target, units: list[str] | None, scheduler: object = None
    ) -> None:
        self.checkpoint, self.target, self.units, self.scheduler = checkpoint, target, units, scheduler
        self.tensors = trained_tensors(checkpoint)  # 16-bit masters, too, as they are
        self.modules, _ = of_modules(checkpoint)
        self.whole = units is not None and target.world_size == 1  # FSDP1 of one rank cuts nothing
        self.optimizer = self._optimizer() if checkpoint.param_groups else None

    def files(self) -> Iterator[TargetFile]:
        """Yield the files of all ranks."""
        size = self.target.world_size
        for rank in range(size):
            for kind, tree in self.trees(rank).items():
                yield torch_writer.lay_out(rank_name(kind, size, rank), tree)

    def trees(self, rank: int) -> dict[str, Any]:
        """Return what each file of a rank holds."""
        tensors = RankTensors(self.target, rank)
        root = OrderedMapping()
        known: dict[int, object] = {}
        for name, (slot, dtype) in self.tensors.items():
            if id(slot) not in known:
                cut = bool(slot.shape) and name in self.checkpoint.parameters and not self.whole
                known[id(slot)] = (tensors.dtensor if cut else plain_tensor)(slot, dtype, name)
            root[name] = known[id(slot)]
        for name, value in self.modules.items():  # a rank's own, or else the first one's
            root[name] = self.checkpoint.metadata.get(of_rank(MODEL, self.checkpoint.world_size, rank, name), value)
        if self.units is not None:
            root.state = {"_metadata": {module: {"version": 1} for module in _modules(self.units)}}
        found: dict[str, Any] = {MODEL: root}
        if self.optimizer is not None:
            part = tensors.dtensor if self.units is None else tensors.shard

            def own(value: object) -> object:
                if not isinstance(value, SlotTensor):
                    return value
                return (part if value.slot.shape else plain_tensor)(value.slot, value.dtype, value.label)

            states = {
                number: {key: own(value) for key, value in state.items()}
                for number, state in self.optimizer["state"].items()
            }
            found[OPTIMIZER] = {**self.optimizer, "state": states}
        found[EXTRA] = extra_state(self.checkpoint, rank, self.target.world_size, self.scheduler)
        return found

    def _optimizer(self) -> dict[str, Any]:
        """Return what each rank has a part of; without names, which these programs' optimizers have not."""
        checkpoint = self.checkpoint
        slots = checkpoint.optimizer_slot_names()
        # Without what is no parameter's, which `zckpt.pt` keeps; there are no pieces: see `refuse`.
        tree: dict[Any, Any] = optimizer_tree(checkpoint, slots, in_pieces=True)
        groups = [without(one, "param_names") for one in tree["param_groups"]]
        if self.units is not None:
            owners = [one.name for one in checkpoint.owners]
            members = members_of(self.units, owners)
            groups[0]["params"] = list(range(len(members)))
            return {"state": flat_state(checkpoint, tree, members), "param_groups": groups}
        names = checkpoint.grouped
        for number, state in tree["state"].items():
            shape = checkpoint.parameters[names[number]].shape
            for value in state.values():
                if isinstance(value, SlotTensor) and value.slot.shape not in ((), shape):
                    raise UnsupportedError(
                        f"{value.label} has another shape than its parameter, which FSDP's rank files cannot hold",
                        path=checkpoint.source,
                        expected=shape,
                        found=value.slot.shape,
                        advice="convert to zckpt or consolidated",
                    )
        return {"state": tree["state"], "param_groups": groups}


def _modules(units: Sequence[str]) -> Iterator[str]:
    """Yield the names that FSDP1 gives to what it has wrapped, as `state_dict` sets them on its result."""
    known = set(units)
    for unit in units:
        path, bare = [WRAPPED] if "" in known else [], ""
        for part in unit.split(".") if unit else ():
            bare = f"{bare}.{part}" if bare else part
            path += [part, WRAPPED] if bare in known else [part]
        yield ".".join(path)


def _copies(checkpoint: Checkpoint) -> list[TargetFile]:
    """Return copies of what programs keep beside the files of ranks."""
    if checkpoint.format != FORMAT:
        return []
    source = Path(checkpoint.source)
    found = [(LORA_NAME, source / LORA_NAME)] if is_file(source / LORA_NAME) else []
    if (source / HUGGINGFACE).is_dir():
        found += [(f"{HUGGINGFACE}/{name}", path) for name, path in files_below(source / HUGGINGFACE)]
    return [copy_of(path, name) for name, path in found]


def _of_training(checkpoint: Checkpoint, world_size: int, notes: list[str]) -> list[TargetFile]:
    """Return copies of what programs keep of all of the training, but of ranks that there are not, and note these."""
    if checkpoint.format != FORMAT:
        return []
    every = map(Path, sorted({*(file.path for file in checkpoint.files), *checkpoint.claims}))
    found = [(path, int(match[1] or 0)) for path in every if (match := OF_TRAINING.fullmatch(path.name)) is not None]
    kept = {path.name: path for path, rank in found if rank < world_size}
    gone = [path.name for path, rank in found if rank >= world_size]
    around = [name for name, path in kept.items() if path.parent != Path(checkpoint.source)]
    notes += [f"{listed(gone)}: left out, of ranks that there are not"] if gone else []
    belongs = "verl and SkyRL look for it in the folder of the step, around that of these files"
    notes += [f"{listed(around)}: {belongs}"] if around else []
    return [copy_of(path, name) for name, path in kept.items()]
