"""A directory of zckpt's own format as a Checkpoint. Reads the document, and looks at the ranks' files; no tensor.

Where tensors are follows from the document, if the headers that it implies have the checksums that it lists, and those
of the files have, too. Otherwise (version 1, or a document that was changed) every header is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from zckpt.codes import LAYOUT
from zckpt.errors import DamagedFileError, SourceError
from zckpt.formats.native.document import FORMAT, Members, read_document, wrong
from zckpt.formats.native.files import DOCUMENT_NAME, SHARE, headers_shared, rank_name
from zckpt.formats.native.layouts import Cut, Headers, Layouts, Offsets, Order, Pieces, Table, order_of
from zckpt.formats.native.node_kinds import Json
from zckpt.formats.native.node_reader import NodeReader
from zckpt.formats.native.rank_file import (
    Listed,
    Mismatch,
    RankFile,
    check_header,
    is_as_listed,
    mismatches,
    open_rank_file,
    storage_key,
)
from zckpt.state import Checkpoint, Extent, Parameter, ParamGroup, Slot, SourceFile, Topology
from zckpt.state.dtypes import itemsize
from zckpt.storage.files import collector_paused
from zckpt.torchfile import Storage

NAMES = ("format", "version", "id", "files", "step", "loss_scale", "zero_stage", "world_size", "topology", "origin",
         "param_groups", "parameters", "buffers", "unnamed", "layouts", "metadata", "optimizer_metadata", "objects",
         "storages", "crc32")  # fmt: skip


SECTIONS = ("parameters", "buffers", "unnamed")


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
    checkpoint = _read(path, headers=False)
    if names is not None:
        checkpoint.warnings.append("--names is not used: the checkpoint has the names that were known when it was made")
    return checkpoint


def check_digests(path: Path, *, rank: int = 0, world_size: int = 1) -> list[Mismatch]:
    """Return the tensors of a directory that are damaged; the document's own checksum is checked as it is read.

    Parameters
    ----------
    path : Path
    rank, world_size : int
        Of those who check it together: each reads some of the files, and some of the headers.

    Raises
    ------
    SourceError
        The document or a file's header is damaged, or a file is missing.
    """
    found: list[Mismatch] = []
    with headers_shared(rank, world_size):
        files = [file for file in read(path).files if file.role == "rank"]
    for file in files[rank::world_size]:
        found.extend(mismatches(file.path))
    return found


def contradictions(path: Path) -> Iterator[SourceError]:
    """Yield what the ranks' files say otherwise than the document, of a directory that can be read.

    Raises SourceError: it cannot be read.
    """
    document, nbytes = read_document(path)
    with _located(path):
        reading = Reading(path, Members(document, "document", NAMES), nbytes, headers=True)
        if reading.version == 1:
            return
        proven = Order(reading.listed, reading.identity, reading.cuts).is_proven
    if not proven:
        yield DamagedFileError(
            "what it says of the ranks' files is not what follows from its parameters",
            path=path / DOCUMENT_NAME,
            expected="header_nbytes and header_crc32 of the headers of such files",
            advice="it was changed after it was written; nothing relies on it: headers are read instead",
            code=LAYOUT,
        )
        return
    for rank, one in enumerate(reading.listed):
        try:
            check_header(path / one.name, one)
        except SourceError as error:
            error.ranks = (rank,)
            yield error


def _read(path: Path, *, headers: bool) -> Checkpoint:
    with collector_paused(), _located(path):
        found, nbytes = read_document(path)
        return Reading(path, Members(found, "document", NAMES), nbytes, headers=headers).checkpoint()


@contextmanager
def _located(path: Path) -> Iterator[None]:
    """Name the document in errors that name no file."""
    try:
        yield
    except SourceError as error:
        if error.path is None:
            error.path = str(path / DOCUMENT_NAME)
        raise
    except RecursionError:
        raise DamagedFileError("values are nested too deep", path=path / DOCUMENT_NAME) from None


@dataclass(frozen=True, slots=True)
class _Described:
    """A parameter as the document has it, and its slots."""

    found: Members
    name: str
    shape: tuple[int, ...]
    cuts: list[tuple[Cut, Pieces]]


class Reading:
    """Reads one directory.

    `nbytes`: of the document; `headers`: read all headers, whether or not the document is enough.
    """

    def __init__(self, path: Path, document: Members, nbytes: int, *, headers: bool) -> None:
        self.path = path
        self.document = document
        self.nbytes = nbytes
        self.version = document.integer("version")
        self.identity = document.text("id")
        self.listed = self._listed()
        self.layouts = Layouts(document.list("layouts", lambda one: one), len(self.listed))
        self.storages = document.list("storages", lambda one: Members(one, "storage", ("dtype", "nbytes", "location")))
        self.described = {section: document.list(section, self._describe) for section in SECTIONS}
        self.cuts: list[tuple[Cut, Pieces]] = []  # of storages, of which the first file has all bytes; then of slots
        for number, one in enumerate(self.storages):
            shape = (one.integer("nbytes"),)
            self.cuts.append((Cut("storage", storage_key(number), "uint8", shape, 0), [(0, Extent.whole(shape))]))
        self.cuts += [cut for every in self.described.values() for one in every for cut in one.cuts]
        self.files: list[RankFile] = []
        order = None if headers else self._order()
        if order is None:
            self.files = [
                open_rank_file(path / one.name, identity=self.identity, nbytes=one.nbytes) for one in self.listed
            ]
        self.offsets: Offsets = order or Headers(self.files)
        self.paths = [str(path / one.name) for one in self.listed]
        self.nodes = NodeReader(document.list("objects", lambda one: one), self._storages(), self.paths[0], nbytes)

    def checkpoint(self) -> Checkpoint:
        """Return the checkpoint."""
        document, nodes = self.document, self.nodes
        checkpoint = Checkpoint(str(self.path), FORMAT, str(self.version))
        checkpoint.param_groups = document.list("param_groups", self._group)
        for section, every in self.described.items():
            found = [self._parameter(one) for one in every]
            setattr(checkpoint, section, {parameter.name: parameter for parameter in found})
            if len(getattr(checkpoint, section)) != len(found):
                raise wrong(section, "every name once", f"{len(found)} entries")
        checkpoint.metadata = nodes.mapping(document.value("metadata"))
        checkpoint.optimizer_metadata = nodes.mapping(document.value("optimizer_metadata"))
        checkpoint.details = {"origin": nodes.mapping(document.value("origin"))}
        checkpoint.step = document.optional_integer("step")
        checkpoint.zero_stage = document.optional_integer("zero_stage")
        checkpoint.world_size = document.integer("world_size", least=1)
        degrees = ("dp", "tp", "pp", "ep")
        topology = Members(document.value("topology"), "topology", degrees)
        checkpoint.topology = Topology(*(topology.integer(name, least=1) for name in degrees))
        scale = nodes.read(document.value("loss_scale"))
        if scale is not None and type(scale) not in (int, float):
            raise wrong("loss_scale", "a number", scale)
        checkpoint.loss_scale = scale  # type: ignore[assignment]  # a number
        _check(checkpoint)
        checkpoint.files = list(self._sources())
        return checkpoint

    def _listed(self) -> list[Listed]:
        members = ("name", "nbytes", "header_nbytes", "header_crc32")[: 2 if self.version == 1 else 4]
        files = self.document.list("files", lambda one: Members(one, "file", members))
        if not files:
            raise wrong("files", "at least one", files)
        names = [one.text("name") for one in files]
        if names != [rank_name(rank, len(names)) for rank in range(len(names))]:
            raise wrong("files", f"{rank_name(0, len(names))} and so on", names)
        if self.version == 1:
            return [Listed(name, one.integer("nbytes")) for name, one in zip(names, files, strict=True)]
        return [
            Listed(name, one.integer("nbytes"), one.integer("header_nbytes"), one.checksum("header_crc32"))
            for name, one in zip(names, files, strict=True)
        ]

    def _order(self) -> Order | Table | None:
        """Return where tensors are as it follows from the document, if that is sure, and the files are as it lists."""
        if self.version == 1:
            return None
        order = order_of(self.listed, self.identity, self.cuts, is_as_written=self.document.has("crc32"))
        if not order.is_proven:
            return None
        rank, world_size = share = SHARE.get() or (0, 1)
        for one in self.listed[rank::world_size]:
            path = self.path / one.name
            if not is_as_listed(path, one):
                if share == (0, 1):
                    return None
                open_rank_file(path, identity=self.identity, nbytes=one.nbytes)
                check_header(path, one)
        return order

    def _storages(self) -> list[Storage]:
        found = []
        for number, (one, (cut, pieces)) in enumerate(zip(self.storages, self.cuts, strict=False)):
            dtype, nbytes = one.dtype("dtype"), one.integer("nbytes")
            if nbytes % itemsize(dtype):
                raise wrong(f"nbytes of storage {number}", f"whole elements of {dtype}", nbytes)
            (offset,) = self.offsets.offsets(cut, pieces)
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

    def _describe(self, found: Json) -> _Described:
        one = Members(found, "parameter", ("name", "shape", "dtype", "slots", "group", "frozen", "tied_to", "state"))
        name, shape = one.text("name"), one.shape("shape")
        cuts = one.list("slots", lambda slot: self._cut(slot, name, shape))
        if len({cut.name for cut in cuts}) != len(cuts):
            raise wrong(f"slots of {name}", "every slot once", [cut.name for cut in cuts])
        return _Described(one, name, shape, [(cut, self.layouts.pieces(cut)) for cut in cuts])

    def _cut(self, found: Json, parameter: str, shape: tuple[int, ...]) -> Cut:
        one = Members(found, f"slot of {parameter}", ("name", "dtype", "shape", "key", "layout"))
        name, dtype = one.text("name"), one.dtype("dtype")
        shape = one.shape("shape") if one.has("shape") else shape
        key = one.text("key") if one.has("key") else f"{name}/{parameter}"
        return Cut(name, key, dtype, shape, one.integer("layout"))

    def _parameter(self, described: _Described) -> Parameter:
        one, name, shape = described.found, described.name, described.shape
        slots = {
            cut.name: Slot(cut.name, cut.dtype, cut.shape, self.offsets.spans(cut, pieces, self.paths))
            for cut, pieces in described.cuts
        }
        state = self.nodes.mapping(one.value("state", {}))
        tied_to = one.text("tied_to") if one.has("tied_to") else None
        group = one.optional_integer("group")
        return Parameter(name, shape, one.dtype("dtype"), slots, group, one.flag("frozen"), tied_to, state)

    def _sources(self) -> Iterator[SourceFile]:
        """Yield what was read; a tensor that nothing has taken is not for this program to leave out."""
        for file in self.files:
            others = sorted(file.tensors.keys() - file.taken)
            if others:
                raise DamagedFileError(
                    f"holds tensors that {DOCUMENT_NAME} does not mention", path=file.path, found=", ".join(others[:4])
                )
        for rank, one in enumerate(self.listed):
            used = sum(slot.nbytes for slot in self.files[rank].tensors.values()) if self.files else one.data_nbytes
            header = None if self.files else (one.header_nbytes, one.header_crc32)
            yield SourceFile(self.paths[rank], one.nbytes, "rank", rank, tensor_nbytes=used, header=header)
        yield SourceFile(str(self.path / DOCUMENT_NAME), self.nbytes, "document")


def _check(checkpoint: Checkpoint) -> None:
    """Hold param groups, tied names and sections against each other."""
    members = [set(group.parameters) for group in checkpoint.param_groups]
    for parameter in checkpoint.holders():
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
