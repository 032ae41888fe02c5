"""Lay out the files of FSDP's ranks, as verl's checkpoint manager writes and loads them.

DIR/model_world_size_W_rank_R.pt            DTensors, cut along the first dimension; buffers whole in every file
DIR/optim_world_size_W_rank_R.pt            FSDP2: the same; FSDP1: flat parameters of its units, cut into equal shards
DIR/extra_state_world_size_W_rank_R.pt      the scheduler, made where there is none; random states of the source's ranks
DIR/fsdp_config.json, huggingface/          the latter as the source has it
DIR/data.pt, data_R.pt, trainer_state.pt    as the source has them; the first and the last belong around a role's folder
DIR/zckpt.pt                                what these have no place for: see `own`; no program looks at it
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from zckpt.engine.targets import Lazily, TargetFile
from zckpt.errors import UnsupportedError, UsageError, listed
from zckpt.evidence import refuse_unnamed
from zckpt.formats.companions import copy_of, files_below
from zckpt.formats.consolidated.optimizer import optimizer_tree
from zckpt.formats.consolidated.tensors import trained_tensors
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
from zckpt.formats.fsdp_rank_files.dtensors import NEWEST, RankTensors, Target, flat_state, plain_tensor
from zckpt.formats.fsdp_rank_files.held import FORMS, versions_with
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
from zckpt.formats.fsdp_rank_files.readings import FLAT
from zckpt.formats.fsdp_rank_files.units import WRAPPED, matching, members_of
from zckpt.formats.group_values import refuse_several
from zckpt.formats.remainder import of_modules
from zckpt.formats.suffixes import OWN_NAME
from zckpt.formats.torch_files import writer as torch_writer
from zckpt.formats.torch_files.tensors import refuse_trees
from zckpt.formats.torch_files.writer import SlotTensor
from zckpt.state import Checkpoint, dict_of, without
from zckpt.state.partition import check_world_size
from zckpt.storage.files import is_file
from zckpt.torchfile import OrderedMapping

FSDP1, FSDP2 = 1, 2


def lay_out(job: Job) -> TargetFiles:
    """Return the files of all ranks.

    Raises UsageError: ranks that cannot be, or FSDP1 without the units that it wraps; UnsupportedError: state that
    these files have no place for.
    """
    checkpoint, options = job.checkpoint, job.options
    refuse(checkpoint)
    target = _target(job)
    own = dict_of(checkpoint.details.get("fsdp_config")).get("FSDP_version") if checkpoint.format == FORMAT else None
    version: int = options.fsdp_version or (own if own in (FSDP1, FSDP2) else FSDP2)
    state = checkpoint.details.get("optimizer_state")
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


def refuse(checkpoint: Checkpoint) -> None:
    """Raise UnsupportedError for state that files of ranks have no place for."""
    refuse_trees(checkpoint, "these files", "--dequantize writes floats; or convert to zckpt or dcp")
    refuse_unnamed(checkpoint, "by which ranks number them as the model does")
    refuse_several(checkpoint, "these files have")


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
