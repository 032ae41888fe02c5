"""A directory of zckpt's own format as a Checkpoint. Reads the document, and looks at the ranks' files; no tensor.

Where tensors are follows from the document, if the headers that it implies have the checksums that it lists, and those
of the files have, too. Otherwise (version 1, or a document that was changed) every header is read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from zckpt.codes import LAYOUT
from zckpt.errors import DamagedFileError, ShardError, SourceError, about
from zckpt.formats.lost import is_lost, stand_in
from zckpt.formats.native.document import FORMAT, Form, Json, read_document, record, wrong
from zckpt.formats.native.files import DOCUMENT_NAME, SECTIONS, SHARE, headers_shared, rank_name
from zckpt.formats.native.nodes import NodeReader
from zckpt.formats.native.rank_file import (
    Cut,
    Layouts,
    Listed,
    Offsets,
    RankFile,
    Table,
    is_as_listed,
    listed_header,
    mismatches,
    offsets_in,
    open_rank_file,
    spans_of,
    storage_key,
    summed,
)
from zckpt.state import (
    Checkpoint,
    Extent,
    GivenNames,
    Parameter,
    ParamGroup,
    Slot,
    SourceFile,
    Topology,
    are_distinct,
    itemsize,
    nbytes_of,
)
from zckpt.storage.files import collector_paused
from zckpt.torchfile import Storage

LISTS = dict.fromkeys(("files", *SECTIONS, "param_groups", "layouts", "objects", "storages"), Form.LIST)
VALUES = dict.fromkeys(("origin", "metadata", "optimizer_metadata", "loss_scale", "topology"), Form.JSON)
DOCUMENT = {
    "format": Form.TEXT,
    "version": Form.INTEGER,
    "id": Form.TEXT,
    "world_size": Form.POSITIVE,
    **LISTS,
    **VALUES,
}
MAY_HAVE = {"step": Form.INTEGER, "zero_stage": Form.INTEGER, "crc32": Form.TEXT}
FILE = {"name": Form.TEXT, "nbytes": Form.INTEGER}
HEADER = {"header_nbytes": Form.INTEGER, "header_crc32": Form.TEXT}
STORAGE = {"dtype": Form.DTYPE, "nbytes": Form.INTEGER, "location": Form.TEXT}
GROUP = {"parameters": Form.LIST, "hyperparameters": Form.JSON, "state": Form.JSON}
PARAMETER = {"name": Form.TEXT, "shape": Form.SIZES, "dtype": Form.DTYPE, "slots": Form.LIST}
PARAMETER_MAY_HAVE = {"group": Form.INTEGER, "frozen": Form.FLAG, "tied_to": Form.TEXT, "state": Form.JSON}
SLOT = {"name": Form.TEXT, "dtype": Form.DTYPE, "layout": Form.INTEGER}
SLOT_MAY_HAVE = {"shape": Form.SIZES, "key": Form.TEXT}

_CRC32 = re.compile("[0-9a-f]{8}")

LARGE = 1 << 16
"""Pieces that are summed up one by one, and whose headers are held against the document."""


def read(path: Path, *, names: GivenNames = None) -> Checkpoint:
    """Read the structure of a directory.

    `names`: not needed: the directory has names where any were known. Raises ShardError: a rank's file is missing, or
    belongs to another checkpoint; DamagedFileError: a file is malformed, the files contradict each other, or the save
    did not finish; UnsupportedError: it is of a later version of the format.
    """
    with collector_paused(), _located(path):
        document, nbytes = read_document(path)
        checkpoint = Reading(path, document, nbytes, headers=False).checkpoint()
    if names is not None:
        checkpoint.warnings.append("--names is ignored: the checkpoint already has names")
    return checkpoint


def check_digests(path: Path, *, rank: int = 0, world_size: int = 1) -> list[DamagedFileError]:
    """Return the tensors of a directory that are damaged; the document's own checksum is checked as it is read.

    `rank`, `world_size`: of those who check it together: each reads some of the files, and some of the headers. Raises
    SourceError: the document or a file's header is damaged, or a file is missing.
    """
    found: list[DamagedFileError] = []
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
        reading = Reading(path, document, nbytes, headers=True)
        if reading.version == 1:
            return
        found = summed(reading.listed, reading.identity, reading.cuts)
    if found is None:
        yield DamagedFileError(
            "what it says about the rank files does not follow from its parameters",
            path=path / DOCUMENT_NAME,
            expected="header_nbytes and header_crc32 of such files' headers",
            advice="it was changed after it was written; zckpt reads the headers instead",
            code=LAYOUT,
        )
        return
    for rank, one in enumerate(reading.listed):
        try:
            listed_header(path / one.name, one)
        except SourceError as error:
            error.ranks = (rank,)
            yield error


@contextmanager
def _located(path: Path) -> Iterator[None]:
    """Name the document in errors that name no file."""
    with about(path / DOCUMENT_NAME):
        try:
            yield
        except RecursionError:
            raise DamagedFileError("values are nested too deeply") from None


class Reading:
    """Reads one directory.

    `nbytes`: of the document; `headers`: read all headers, whether or not the document is enough.
    """

    def __init__(self, path: Path, document: Json, nbytes: int, *, headers: bool) -> None:
        self.path = path
        self.document = document = record(document, "document", DOCUMENT, MAY_HAVE)
        self.nbytes = nbytes
        self.version, self.identity = document["version"], document["id"]
        members = FILE if self.version == 1 else {**FILE, **HEADER}
        files = [record(one, "file", members) for one in document["files"]]
        names = [one["name"] for one in files]
        if not names or names != [rank_name(rank, len(names)) for rank in range(len(names))]:
            raise wrong("files", f"{rank_name(0, len(names))} and so on", names)
        for one in files if self.version > 1 else ():
            if not _CRC32.fullmatch(one["header_crc32"]):
                raise wrong("header_crc32 of file", "eight hexadecimal digits", one["header_crc32"])
            one["header_crc32"] = int(one["header_crc32"], 16)
        self.listed = [Listed(**one) for one in files]
        self.layouts = Layouts(document["layouts"], len(self.listed))
        stored = [record(one, "storage", STORAGE) for one in document["storages"]]
        self.described = {section: [self._described(one) for one in document[section]] for section in SECTIONS}
        self.cuts: list[Cut] = []  # of storages, of which the first file has all bytes; then of slots
        for number, one in enumerate(stored):
            if one["nbytes"] % itemsize(one["dtype"]):
                raise wrong(f"nbytes of storage {number}", f"whole elements of {one['dtype']}", one["nbytes"])
            shape = (one["nbytes"],)
            self.cuts.append(Cut("storage", storage_key(number), "uint8", shape, [(0, Extent.whole(shape))]))
        self.cuts += [cut for every in self.described.values() for _, cuts in every for cut in cuts]
        self.files: list[RankFile] = []
        self.paths = [str(path / one.name) for one in self.listed]
        where = None if headers else self._where()
        if where is None:
            self.files = [
                open_rank_file(path / one.name, identity=self.identity, nbytes=one.nbytes) for one in self.listed
            ]
            where = offsets_in(self.files, self.cuts)
        self.where = where
        storages = [
            Storage(str(number), one["dtype"], one["nbytes"], one["location"], where[storage_key(number)][0])
            for number, one in enumerate(stored)
        ]
        self.nodes = NodeReader(document["objects"], storages, self.paths[0], nbytes)

    def checkpoint(self) -> Checkpoint:
        """Return the checkpoint."""
        document, nodes = self.document, self.nodes
        checkpoint = Checkpoint(str(self.path), FORMAT, str(self.version))
        for found in document["param_groups"]:
            one = record(found, "param group", GROUP, {"optimizer": Form.TEXT})
            names = one["parameters"]
            if not all(type(name) is str for name in names) or not are_distinct(names):
                raise wrong("parameters of a param group", "names, each once", names)
            hyperparameters, state = (nodes.mapping(one[key]) for key in ("hyperparameters", "state"))
            checkpoint.param_groups.append(ParamGroup(hyperparameters, names, state, one["optimizer"]))
        for section, every in self.described.items():
            found = {one["name"]: self._parameter(one, cuts) for one, cuts in every}
            setattr(checkpoint, section, found)
            if len(found) != len(every):
                raise wrong(section, "every name once", f"{len(every)} entries")
        checkpoint.metadata = nodes.mapping(document["metadata"])
        checkpoint.optimizer_metadata = nodes.mapping(document["optimizer_metadata"])
        checkpoint.details = {"origin": nodes.mapping(document["origin"])}
        for name in ("step", "zero_stage", "world_size"):
            setattr(checkpoint, name, document[name])
        degrees = dict.fromkeys(("dp", "tp", "pp", "ep"), Form.POSITIVE)
        checkpoint.topology = Topology(**record(document["topology"], "topology", degrees))
        checkpoint.loss_scale = nodes.read(document["loss_scale"])  # type: ignore[assignment]  # a number
        if type(checkpoint.loss_scale) not in (int, float, type(None)):
            raise wrong("loss_scale", "a number", checkpoint.loss_scale)
        # Groups, ties and sections have to agree.
        members = [set(group.parameters) for group in checkpoint.param_groups]
        for parameter in checkpoint.holders():
            group, owner = parameter.group, parameter.tied_to
            if group is not None and (group >= len(members) or parameter.name not in members[group]):
                raise wrong(f"group of {parameter.name}", "the param group that lists it", group)
            if owner is not None and (
                parameter.slots
                or owner not in checkpoint.parameters
                or checkpoint.parameters[owner].tied_to is not None
            ):
                raise wrong(f"tied_to of {parameter.name}", "a parameter that is not tied itself", owner)
        both = checkpoint.parameters.keys() & checkpoint.buffers.keys()
        if both:
            raise wrong("buffers", "no names of parameters", sorted(both))
        checkpoint.files = list(self._sources())
        return checkpoint

    def _where(self) -> Offsets | Table | None:
        """Return where tensors are as it follows from the document, if that is sure, and the files are as it lists."""
        if self.version == 1:
            return None
        is_as_written = self.document["crc32"] is not None
        count = sum(len(cut.pieces) for cut in self.cuts)
        where: Offsets | Table | None
        if is_as_written and count > LARGE and count > 4 * (len(self.cuts) + len(self.listed)):
            table = Table(self.listed, self.cuts)  # its product goes unproven: the document has a checksum of its own
            where = table if table.is_proven else None
        else:
            where = summed(self.listed, self.identity, self.cuts)
        if where is None:
            return None
        rank, world_size = share = SHARE.get() or (0, 1)
        for number, one in list(enumerate(self.listed))[rank::world_size]:
            path = self.path / one.name
            if not is_as_listed(path, one):
                if share == (0, 1) and (path.exists() or (number == 0 and self.document["storages"])):
                    return None
                try:
                    open_rank_file(path, identity=self.identity, nbytes=one.nbytes)
                    listed_header(path, one)
                except ShardError as error:
                    if share != (0, 1):
                        raise
                    self.paths[number] = stand_in(error, path)
        return where

    def _described(self, found: Json) -> tuple[dict[str, Json], list[Cut]]:
        """Return a parameter as the document has it, and its slots."""
        parameter = record(found, "parameter", PARAMETER, PARAMETER_MAY_HAVE)
        cuts = []
        for slot in parameter["slots"]:
            one = record(slot, f"slot of {parameter['name']}", SLOT, SLOT_MAY_HAVE)
            shape = parameter["shape"] if one["shape"] is None else one["shape"]
            key = one["key"] or f"{one['name']}/{parameter['name']}"
            cuts.append(Cut(one["name"], key, one["dtype"], shape, self.layouts.pieces(one["layout"], key, shape)))
        names = [cut.name for cut in cuts]
        if not are_distinct(names):
            raise wrong(f"slots of {parameter['name']}", "every slot once", names)
        return parameter, cuts

    def _parameter(self, one: dict[str, Json], cuts: Sequence[Cut]) -> Parameter:
        slots = {cut.name: Slot(cut.name, cut.dtype, cut.shape, spans_of(cut, self.where, self.paths)) for cut in cuts}
        state = {} if one["state"] is None else self.nodes.mapping(one["state"])
        about = one["group"], bool(one["frozen"]), one["tied_to"]
        return Parameter(one["name"], one["shape"], one["dtype"], slots, *about, state)

    def _sources(self) -> Iterator[SourceFile]:
        """Yield what was read; a tensor that nothing has taken is not for this program to leave out."""
        for file in self.files:
            others = sorted(file.tensors.keys() - file.taken)
            if others:
                raise DamagedFileError(
                    f"holds tensors that {DOCUMENT_NAME} does not mention", path=file.path, found=", ".join(others[:4])
                )
        for rank, one in enumerate(self.listed):
            if is_lost(self.paths[rank]):
                continue
            used = one.nbytes - one.header_nbytes
            if self.files:
                used = nbytes_of(self.files[rank].tensors.values())
            header = None if self.files else (one.header_nbytes, one.header_crc32)
            yield SourceFile(self.paths[rank], one.nbytes, "rank", rank, tensor_nbytes=used, header=header)
        yield SourceFile(str(self.path / DOCUMENT_NAME), self.nbytes, "document")
