"""A directory of zckpt's own format as a Checkpoint. Reads the document and the headers, no tensor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from zckpt.errors import DamagedFileError, SourceError
from zckpt.formats.native.document import FORMAT, VERSION, read_document
from zckpt.formats.native.leaves import wrong
from zckpt.formats.native.names import DOCUMENT_NAME, rank_name
from zckpt.formats.native.node_kinds import Json
from zckpt.formats.native.node_reader import NodeReader
from zckpt.formats.native.pieces import Layouts
from zckpt.formats.native.rank_file import RankFile, open_rank_file, storage_key
from zckpt.formats.native.schema import Members
from zckpt.state import Checkpoint, Parameter, ParamGroup, Slot, SourceFile, Topology
from zckpt.state.dtypes import itemsize
from zckpt.torchfile import Storage

NAMES = ("format", "version", "id", "files", "step", "loss_scale", "zero_stage", "world_size", "topology", "origin",
         "param_groups", "parameters", "buffers", "unnamed", "layouts", "metadata", "optimizer_metadata", "objects",
         "storages", "crc32")  # fmt: skip


def read(path: Path, *, names: Sequence[str] | None = None) -> Checkpoint:
    """Read the structure of a directory.

    Parameters
    ----------
    path : Path
    names : sequence of str, optional
        Not needed: the directory has names where any were known.

    Raises
    ------
    ShardError
        A rank's file is missing, or belongs to another checkpoint.
    DamagedFileError
        A file is malformed, the files contradict each other, or the save did not finish.
    UnsupportedError
        It is of a later version of the format.
    """
    found, nbytes = read_document(path)
    try:
        checkpoint = _Reading(path, Members(found, "document", NAMES), nbytes).checkpoint()
    except SourceError as error:
        if error.path is None:
            error.path = str(path / DOCUMENT_NAME)
        raise
    except RecursionError:
        raise DamagedFileError("values are nested too deep", path=path / DOCUMENT_NAME) from None
    if names is not None:
        checkpoint.warnings.append("--names is not used: the checkpoint has the names that were known when it was made")
    return checkpoint


class _Reading:
    """Reads one directory."""

    def __init__(self, path: Path, document: Members, nbytes: int) -> None:
        self.path = path
        self.document = document
        self.nbytes = nbytes
        self.files = self._files()
        self.nodes = NodeReader(document.list("objects", lambda one: one), self._storages(), self.files[0].path, nbytes)
        self.layouts = Layouts(document.list("layouts", lambda one: one), self.files)

    def checkpoint(self) -> Checkpoint:
        """Return the checkpoint."""
        document, nodes = self.document, self.nodes
        checkpoint = Checkpoint(str(self.path), FORMAT, str(VERSION))
        checkpoint.param_groups = document.list("param_groups", self._group)
        for section in ("parameters", "buffers", "unnamed"):
            found = document.list(section, self._parameter)
            setattr(checkpoint, section, {parameter.name: parameter for parameter in found})
            if len(getattr(checkpoint, section)) != len(found):
                raise wrong(section, "every name once", f"{len(found)} entries")
        checkpoint.metadata = nodes.mapping(document.value("metadata"))
        checkpoint.optimizer_metadata = nodes.mapping(document.value("optimizer_metadata"))
        checkpoint.details = {"origin": nodes.mapping(document.value("origin"))}
        checkpoint.step = document.optional_integer("step")
        checkpoint.zero_stage = document.optional_integer("zero_stage")
        checkpoint.world_size = document.integer("world_size", least=1)
        checkpoint.topology = _topology(document.value("topology"))
        scale = nodes.read(document.value("loss_scale"))
        if scale is not None and type(scale) not in (int, float):
            raise wrong("loss_scale", "a number", scale)
        checkpoint.loss_scale = scale  # type: ignore[assignment]  # a number
        _check(checkpoint)
        checkpoint.files = list(self._sources())
        return checkpoint

    def _files(self) -> list[RankFile]:
        identity = self.document.text("id")
        listed = self.document.list("files", lambda one: Members(one, "file", ("name", "nbytes")))
        if not listed:
            raise wrong("files", "at least one", listed)
        names = [one.text("name") for one in listed]
        if names != [rank_name(rank, len(names)) for rank in range(len(names))]:
            raise wrong("files", f"{rank_name(0, len(names))} and so on", names)
        return [
            open_rank_file(self.path / name, identity=identity, nbytes=one.integer("nbytes"))
            for name, one in zip(names, listed, strict=True)
        ]

    def _storages(self) -> list[Storage]:
        found = []
        rows = self.document.list("storages", lambda one: Members(one, "storage", ("dtype", "nbytes", "location")))
        for number, one in enumerate(rows):
            dtype, nbytes = one.dtype("dtype"), one.integer("nbytes")
            if nbytes % itemsize(dtype):
                raise wrong(f"nbytes of storage {number}", f"whole elements of {dtype}", nbytes)
            offset = self.files[0].take(storage_key(number), "uint8", (nbytes,))
            found.append(Storage(str(number), dtype, nbytes, one.text("location"), offset))
        return found

    def _group(self, found: Json) -> ParamGroup:
        one = Members(found, "param group", ("parameters", "hyperparameters", "state", "optimizer"))
        names = one.list("parameters", lambda name: name)
        if not all(type(name) is str for name in names) or len(set(names)) != len(names):
            raise wrong("parameters of a param group", "names, each once", names)
        optimizer = one.text("optimizer") if one.has("optimizer") else None
        values = (self.nodes.mapping(one.value(key)) for key in ("hyperparameters", "state"))
        return ParamGroup(next(values), names, next(values), optimizer)

    def _parameter(self, found: Json) -> Parameter:
        one = Members(found, "parameter", ("name", "shape", "dtype", "slots", "group", "frozen", "tied_to", "state"))
        name, shape = one.text("name"), one.shape("shape")
        slots = one.list("slots", lambda slot: self._slot(slot, name, shape))
        by_name = {slot.name: slot for slot in slots}
        if len(by_name) != len(slots):
            raise wrong(f"slots of {name}", "every slot once", [slot.name for slot in slots])
        state = self.nodes.mapping(one.value("state", {}))
        tied_to = one.text("tied_to") if one.has("tied_to") else None
        group = one.optional_integer("group")
        return Parameter(name, shape, one.dtype("dtype"), by_name, group, one.flag("frozen"), tied_to, state)

    def _slot(self, found: Json, parameter: str, shape: tuple[int, ...]) -> Slot:
        one = Members(found, f"slot of {parameter}", ("name", "dtype", "shape", "key", "layout"))
        name, dtype = one.text("name"), one.dtype("dtype")
        shape = one.shape("shape") if one.has("shape") else shape
        key = one.text("key") if one.has("key") else f"{name}/{parameter}"
        return Slot(name, dtype, shape, self.layouts.spans(one.integer("layout"), key, dtype, shape))

    def _sources(self) -> Iterator[SourceFile]:
        """Yield what was read; a tensor that nothing has taken is not for this program to leave out."""
        for rank, file in enumerate(self.files):
            others = sorted(file.tensors.keys() - file.taken)
            if others:
                raise DamagedFileError(
                    f"holds tensors that {DOCUMENT_NAME} does not mention", path=file.path, found=", ".join(others[:4])
                )
            used = sum(slot.nbytes for slot in file.tensors.values())
            yield SourceFile(file.path, file.nbytes, "rank", rank, tensor_nbytes=used)
        yield SourceFile(str(self.path / DOCUMENT_NAME), self.nbytes, "document")


def _topology(found: Json) -> Topology:
    one = Members(found, "topology", ("dp", "tp", "pp", "ep"))
    return Topology(*(one.integer(name, least=1) for name in ("dp", "tp", "pp", "ep")))


def _check(checkpoint: Checkpoint) -> None:
    """Hold param groups, tied names and sections against each other.

    Raises
    ------
    DamagedFileError
        They disagree.
    """
    members = [set(group.parameters) for group in checkpoint.param_groups]
    for parameter in [*checkpoint.tensors(), *checkpoint.unnamed.values()]:
        group, owner = parameter.group, parameter.tied_to
        if group is not None and (group >= len(members) or parameter.name not in members[group]):
            raise wrong(f"group of {parameter.name}", "the param group that lists it", group)
        if owner is not None and (
            parameter.slots or owner not in checkpoint.parameters or checkpoint.parameters[owner].tied_to is not None
        ):
            raise wrong(f"tied_to of {parameter.name}", "a parameter that is not tied itself", owner)
    both = checkpoint.parameters.keys() & checkpoint.buffers.keys()
    if both:
        raise wrong("buffers", "no names of parameters", sorted(both))
