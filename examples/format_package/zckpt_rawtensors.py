"""A format that a package of its own adds to zckpt: the tensors of a model, one after the other, and a list of them.

DIR/tensors.json    {"rawtensors": 1, "tensors": {name: {"dtype": "float32", "shape": [2, 3], "offset": 0}}}
DIR/tensors.raw     their elements, each tensor at a multiple of `alignment` bytes

It holds a model and nothing else, and refuses what has more.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass

from zckpt.engine.targets import Hole, Literal, TargetFile
from zckpt.errors import DamagedFileError, UnsupportedError
from zckpt.formats.format import Format, Found, Job, NearMiss, Search, TargetFiles
from zckpt.formats.options import option
from zckpt.state import WEIGHT, Checkpoint, Extent, Parameter, Slot, SourceFile, Span
from zckpt.state.dtypes import is_floating, itemsize
from zckpt.state.inventory import IMPLIED, Claim
from zckpt.storage.files import is_file, read_head, read_whole
from zckpt.storage.ownership import Owned

LIST_NAME, RAW_NAME = "tensors.json", "tensors.raw"
MARK = b'{"rawtensors": 1,'
MAXIMUM_NBYTES = 1 << 28


@dataclass(frozen=True, slots=True)
class Options:
    """What `convert --to rawtensors` can be given."""

    alignment: int = option("Bytes; each tensor begins at a multiple of it.", 64, choices=(1, 64, 4096))


class RawTensors(Format):
    """A directory of raw tensors."""

    name = "rawtensors"
    title = "raw tensors"
    reads = (("raw tensors", "a model, one tensor after the other"),)
    writes = "the tensors of a model, one after the other, and a list of them"
    options = Options
    owns = Owned(lambda name: name in (LIST_NAME, RAW_NAME))

    def find(self, search: Search) -> Found | NearMiss | None:
        """Tell a directory by what its list begins with."""
        if search.path.name == RAW_NAME and is_file(search.path):
            return NearMiss("is the elements of raw tensors without their list", f"give {search.path.parent}")
        listed = search.path / LIST_NAME
        return Found(search.path) if is_file(listed) and read_head(str(listed), len(MARK)) == MARK else None

    def read(self, found: Found, search: Search) -> Checkpoint:  # noqa: ARG002
        """Read the list; every tensor is one span of the other file."""
        directory = found.place
        raw, listed = directory / RAW_NAME, directory / LIST_NAME
        checkpoint = Checkpoint(str(directory), self.name, "1")
        nbytes = raw.stat().st_size if is_file(raw) else 0
        try:
            tensors = json.loads(read_whole(str(listed), most=MAXIMUM_NBYTES))["tensors"]
            for name, about in tensors.items():
                shape, dtype, offset = tuple(map(int, about["shape"])), str(about["dtype"]), int(about["offset"])
                end = offset + math.prod(shape) * itemsize(dtype)
                if min(shape, default=0) < 0 or not 0 <= offset <= end <= nbytes:
                    raise DamagedFileError(
                        f"{name} is not in the file", path=raw, expected=f"{end} bytes", found=nbytes
                    )
                extent = Extent.whole(shape)
                spans = (Span(extent, str(raw), offset, dtype),) if end > offset else ()
                slot = Slot(WEIGHT, dtype, shape, spans)
                known = checkpoint.parameters if is_floating(dtype) else checkpoint.buffers
                known[name] = Parameter(name, shape, dtype, {WEIGHT: slot})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, DamagedFileError):
                raise
            raise DamagedFileError("unreadable list", path=listed, found=f"{type(error).__name__}: {error}") from error
        slots = {one.name: one.slots[WEIGHT] for one in checkpoint.tensors()}
        used = sum(slot.nbytes for slot in slots.values())
        checkpoint.files.append(SourceFile(str(raw), nbytes, "model", tensor_nbytes=used, tree=slots))
        checkpoint.claims[str(listed)] = Claim(IMPLIED, "where each tensor is")
        return checkpoint

    def lay_out(self, job: Job) -> TargetFiles:
        """Return the two files: one of holes, which the engine fills, and one of a literal."""
        checkpoint = job.checkpoint
        more = [*checkpoint.param_groups, *checkpoint.unnamed, *checkpoint.metadata, *checkpoint.optimizer_metadata]
        if (
            more
            or checkpoint.step is not None
            or any(checkpoint.owner(one.name).slots.keys() != {WEIGHT} for one in checkpoint.tensors())
        ):
            raise UnsupportedError(
                "raw tensors are a model only, and this is a training's state",
                path=checkpoint.source,
                advice="write the model with `zckpt consolidate`, then convert that",
            )
        at, listed, holes = 0, {}, []
        for one in checkpoint.tensors():
            slot = checkpoint.owner(one.name).slots[WEIGHT]
            at += -at % job.options.alignment
            listed[one.name] = {"dtype": slot.dtype, "shape": list(slot.shape), "offset": at}
            if slot.numel:
                holes.append(Hole(at, one.name, slot, Extent.whole(slot.shape), slot.dtype))
            at += slot.nbytes
        text = json.dumps({"rawtensors": 1, "tensors": listed}).encode()
        gaps = _gaps(holes, at)
        return TargetFiles(
            [TargetFile(RAW_NAME, at, gaps, holes), TargetFile(LIST_NAME, len(text), [Literal(0, text)])],
            notes=["which names were tied is not kept"] if any(one.tied_to for one in checkpoint.tensors()) else (),
        )


def _gaps(holes: list[Hole], nbytes: int) -> list[Literal]:
    """Return zeros for the bytes between tensors."""
    starts = [hole.offset for hole in holes] + [nbytes]
    ends = [0, *(hole.offset + hole.nbytes for hole in holes)]
    return [Literal(end, bytes(start - end)) for end, start in zip(ends, starts, strict=True) if start > end]


FORMAT = RawTensors()
