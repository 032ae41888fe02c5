"""What is in a checkpoint, as one JSON-able document. Reads no tensor."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import datetime, timezone
from itertools import repeat
from pathlib import Path

from zckpt.errors import as_called
from zckpt.formats.account import take_inventory
from zckpt.formats.alike_files import glanced
from zckpt.formats.low_bit import described
from zckpt.formats.remainder import jsonable, jsonables
from zckpt.immutable import immutable
from zckpt.operations.open import Source, opened
from zckpt.operations.options import Salvaged, Unpack, shares
from zckpt.operations.salvage import missing_from
from zckpt.state import Checkpoint, Document, Padding, Parameter, Result, by_key, nbytes_of, values_of
from zckpt.storage.files import collector_paused
from zckpt.torchfile import FromFile, plain

FILE_FIELDS = ("path", "nbytes", "role", "dp_rank", "mp_rank", "tensor_nbytes", "unreferenced_nbytes")


@immutable
class Inspection(Result):
    """What is in a checkpoint. Lists and mappings are JSON-able.

    Parameters
    ----------
    source, format : str
    format_version : str or None
    zero_stage : int or None
    topology : dict of str to int
        Degrees: `dp`, `tp`, `pp`, `ep`.
    world_size : int
    step : int or None
    loss_scale : object
    saved : str or None
        Time of the last write to one of its files, as an ISO 8601 date in UTC; None if unknown.
    num_parameters, num_elements, num_trainable_elements, num_frozen : int
        Each parameter once, without tied names and buffers.
    num_tied, num_buffers : int
    slots : dict
        By name: `dtypes`, `num_parameters`, `num_elements`, `nbytes`.
    param_groups : list of dict
        Hyperparameters, `state`, and the names of the `parameters`.
    per_rank : list of dict
        Optimizer state that is of no use to other ranks.
    parameters, buffers, unnamed : list of dict
        `name`, `shape`, `dtype`, `slots`, `group`, `frozen`, `tied_to`.
    padding : dict
        `num_elements`, `nbytes`, and the same by rank in `ranks`.
    files : list of dict
    nbytes, unreferenced_nbytes : int, bytes
        Size of all files, and of storages in them that no tensor uses.
    details : object
        Facts of the format, by name.
    metadata : list of str
        Keys of everything else in the files.
    left_out : list of dict
        What zckpt did not read.
    missing : list of dict
        What lost files held: `name`, `slot`, `shape`, and its `ranges` if known.
    warnings : list of str
    inventory : dict or None
        Everything in the files, and what became of it, if requested.
    """

    source: str
    format: str
    format_version: str | None
    zero_stage: int | None
    topology: dict[str, int]
    world_size: int
    step: int | None
    saved: str | None
    loss_scale: object
    num_parameters: int
    num_elements: int
    num_trainable_elements: int
    num_frozen: int
    num_tied: int
    num_buffers: int
    slots: Document
    param_groups: list[Document]
    per_rank: list[Document]
    parameters: list[Document]
    buffers: list[Document]
    unnamed: list[Document]
    padding: Document
    files: list[Document]
    nbytes: int
    unreferenced_nbytes: int
    details: object
    metadata: list[str]
    left_out: list[Document]
    missing: list[Document]
    warnings: list[str]
    inventory: Document | None

    def as_dict(self) -> Document:
        """Return the result as JSON-able data, the document of `--json`."""
        document = Result.as_dict(self)
        if self.inventory is None:
            del document["inventory"]
        return document


@shares(Salvaged)
@collector_paused()
def inspect(
    source: Source,
    *,
    include_globals: bool = False,
    include_inventory: bool = False,
    **shared: Unpack[Salvaged],
) -> Inspection:
    """Describe a checkpoint. Reads no tensor.

    Parameters
    ----------
    source : path-like or Checkpoint
    include_globals : bool
        Also list the classes and functions that each pickle names.
    include_inventory : bool
        Also list everything in the files, and what became of it; what is left out is always listed.
    **shared

    Raises
    ------
    UsageError
        An option cannot be used.
    SourceError
        The source cannot be opened.
    """
    with glanced():
        checkpoint = opened(source, **shared)
    inventory = take_inventory(checkpoint)
    owners, groups = checkpoint.owners, checkpoint.param_groups
    hyperparameters = jsonables([group.hyperparameters for group in groups])
    states = jsonables([group.state for group in groups])
    times = []
    for file in checkpoint.files:
        with suppress(OSError):
            times.append(os.stat(file.path).st_mtime)  # noqa: PTH116  # of thousands; in a store, what that says
    saved = datetime.fromtimestamp(max(times), timezone.utc) if times else None
    return Inspection(
        **values_of(checkpoint, ("source", "format", "format_version", "zero_stage", "world_size", "step")),
        saved=None if saved is None else saved.isoformat(timespec="seconds"),
        topology=asdict(checkpoint.topology),
        loss_scale=jsonable(checkpoint.loss_scale),
        num_parameters=len(owners),
        num_elements=sum(p.numel for p in owners),
        num_trainable_elements=sum(p.numel for p in owners if not p.frozen),
        num_frozen=sum(p.frozen for p in owners),
        num_tied=len(checkpoint.parameters) - len(owners),
        num_buffers=len(checkpoint.buffers),
        slots=_slots(checkpoint),
        param_groups=[
            settings
            | ({} if group.optimizer is None else {"optimizer": group.optimizer})
            | {"state": state, "parameters": list(group.parameters)}
            for group, settings, state in zip(groups, hyperparameters, states, strict=True)
        ],
        per_rank=[
            {
                **values_of(one, ("key", "group", "part", "rank", "mp_rank")),
                "value": plain(one.value.node) if isinstance(one.value, FromFile) else jsonable(one.value),
            }
            for one in checkpoint.per_rank
        ],
        parameters=[_parameter(p) for p in checkpoint.parameters.values()],
        buffers=[_parameter(p) for p in checkpoint.buffers.values()],
        unnamed=[_parameter(p) for p in checkpoint.unnamed.values()],
        padding=_padding(checkpoint.padding),
        files=[
            values_of(one, FILE_FIELDS) | named
            for one, named in zip(
                checkpoint.files, _globals(checkpoint) if include_globals else repeat({}), strict=False
            )
        ],
        nbytes=nbytes_of(checkpoint.files),
        unreferenced_nbytes=sum(file.unreferenced_nbytes for file in checkpoint.files),
        details=jsonable(checkpoint.details | ({"quantised_weights": low} if (low := described(checkpoint)) else {})),
        metadata=sorted(checkpoint.metadata),
        left_out=[item.as_dict() for item in inventory.left_out],
        missing=list(missing_from(checkpoint)),
        warnings=[*map(as_called, checkpoint.warnings)],
        inventory=inventory.as_dict() if include_inventory else None,
    )


def _globals(checkpoint: Checkpoint) -> Iterator[Document]:
    """Yield the `globals` of each file: what each pickle of it names; those of its items, if it has some, together."""
    from zckpt.operations.scan import ITEMS, scan_files

    for path, scanner in scan_files(Path(one.path) for one in checkpoint.files):
        found = by_key(
            ("items" if path.suffix == ITEMS else one.record or "pickle", f"{one.module}.{one.name}")
            for one in scanner.mentions
        )
        yield {"globals": {record: sorted({*names}) for record, names in found.items()}}


def _slots(checkpoint: Checkpoint) -> Document:
    found = by_key(named for parameter in checkpoint.all_parameters for named in parameter.slots.items())
    return {
        name: {
            "dtypes": sorted({slot.dtype for slot in slots}),
            "num_parameters": len(slots),
            "num_elements": sum(slot.numel for slot in slots),
            "nbytes": nbytes_of(slots),
        }
        for name in checkpoint.slot_names()
        if (slots := found.get(name))
    }


def _parameter(parameter: Parameter) -> Document:
    listed = {"shape": list(parameter.shape), "dtype": parameter.dtype, "slots": list(parameter.slots)}
    return {"name": parameter.name, **listed, **values_of(parameter, ("group", "frozen", "tied_to"))}


def _padding(paddings: Iterable[Padding]) -> Document:
    def sums(some: Sequence[Padding]) -> Document:
        return {"num_elements": sum(one.numel for one in some), "nbytes": nbytes_of(some)}

    ranks = by_key((one.rank, one) for one in paddings)
    listed = [
        {"rank": rank, **sums(some), "groups": [one.numel for one in sorted(some, key=lambda one: one.group)]}
        for rank, some in sorted(ranks.items())
    ]
    return {**sums([one for some in ranks.values() for one in some]), "ranks": listed}
