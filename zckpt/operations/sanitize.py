"""Write a checkpoint again, in the format it has, without what pickles would make of classes that nobody knows.

What `scan` grades as data or known stays; an object of any other class goes:

    a value or key of a dict                        with its entry
    a member of a list or tuple, an attribute       None is there
    an argument of a call, a part of a tensor       with the object that it is an argument or a part of
    a tensor's class                                the tensor stays, of torch's own class
    bytes, and tensors, that hold such a pickle     as such an object
    an item of DCP's that has such an object        as a whole
    any other file                                  as a whole

A file of which nothing goes is copied, byte for byte.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from zckpt.engine.targets import TargetFile
from zckpt.errors import SourceError, UnknownFormatError, UnsupportedError, ZckptError
from zckpt.formats import open_checkpoint
from zckpt.formats.companions import copy_of, files_below
from zckpt.formats.dcp.directory import NAME
from zckpt.formats.dcp.metadata import read_metadata
from zckpt.formats.dcp.strip import without_items
from zckpt.formats.format import TargetFiles
from zckpt.formats.stripping import Request
from zckpt.formats.torch_files.writer import lay_out
from zckpt.immutable import immutable
from zckpt.operations.losses import check_nothing_lost
from zckpt.operations.open import Source, opened
from zckpt.operations.options import Place, ReadWritten, Unpack, shares
from zckpt.operations.proof import check_all_arrived
from zckpt.operations.scan import items_of, scan, scan_files
from zckpt.operations.target import How, Proof, Written, write_from
from zckpt.storage.files import FileRange
from zckpt.storage.files import opened as file_opened
from zckpt.torchfile import (
    PARTS,
    FromFile,
    Global,
    MetaTensor,
    NumpyArray,
    Object,
    Storage,
    Tensor,
    dump,
    read_pickle,
    read_source,
)
from zckpt.torchfile.grades import DANGEROUS, GRADES, UNKNOWN, grade
from zckpt.torchfile.scanning import InMemory, Scanner

BAD = (UNKNOWN, DANGEROUS)

NEEDED = {"parts", "tensor", "quantizer", "buffer", "sizes", "strides", "offsets", "data", "args"}
"""Fields without which a node is nothing."""


@immutable(kw_only=True)
class Sanitized(Written):
    """What `sanitize` wrote.

    Parameters
    ----------
    removed : list of dict
        What went: its `file`, `place` in it (empty: all of it), `grade`, and `what` it was, a class or what is odd.
    """

    removed: list[dict[str, str]]


@shares(ReadWritten)
def sanitize(source: Source, target: Place, **shared: Unpack[ReadWritten]) -> Sanitized:
    """Write the same checkpoint, file by file, with data and the classes of known frameworks only.

    Tensors stay bit for bit. What goes is listed.

    Parameters
    ----------
    source : path-like or Checkpoint
        A file, or a directory of any format, with all that is below it.
    target : path-like
        A file where the source is one, else a directory, that does not exist.
    **shared

    Raises
    ------
    SourceError
        The source cannot be read, or is no checkpoint without what would go.
    TargetError
        The target exists or cannot be written.
    """
    how = How.of("sanitize", shared)
    checkpoint = opened(source, **shared)
    origin, removed = Path(checkpoint.named), list[dict[str, str]]()
    found = {origin.name: origin} if origin.is_file() else {}
    for root in [] if found else [origin, *map(Path, checkpoint.roots)]:
        found = {**dict(files_below(root)), **found}
    files = list(_files(found, removed))
    dropped = check_nothing_lost([checkpoint], shared["drop"], copied=found, kept=found)
    laid = TargetFiles(files, is_file=not origin.is_dir(), copied=frozenset(found))

    def look(written: Path, *_: object) -> int:
        left = next((one for one in scan(written).findings if one["grade"] in BAD), None)
        if left is not None:
            what = f"{left['record'] or 'it'} still has {left['global'] or left['message']}"
            raise UnsupportedError(
                f"{left['file']} cannot be sanitized: {what}",
                path=checkpoint.source,
                advice="`zckpt convert` writes its state without other objects",
            )
        try:
            done = open_checkpoint(written, names=checkpoint.given_names, tag=shared["tag"])
        except SourceError as error:
            raise UnsupportedError(
                "is no checkpoint without what would go", path=checkpoint.source, found=error.message
            ) from error
        check_all_arrived(checkpoint, done)
        return 0

    return write_from(
        Sanitized, checkpoint, laid, Path(target), how, inside=[origin], proof=Proof(look), dropped=dropped,
        removed=removed,
    )  # fmt: skip


def _files(found: Mapping[str, Path], removed: list[dict[str, str]]) -> Iterator[TargetFile]:
    """Yield what becomes of each file."""
    scans = scan_files(found.values())
    bad = {name: bad_of(scanner) for name, (_, scanner) in zip(found, scans, strict=True)}
    fewer: dict[str, TargetFile | None] = {}
    for name, path in found.items():
        if path.name == NAME:
            fewer |= _fewer_items(name, path, bad, removed)
    for name, path in found.items():
        if name in fewer:
            file = fewer[name]
        elif not bad[name]:
            file = copy_of(path, name)
        else:
            told: list[dict[str, str]] = []
            file = _cleaned(name, path, told)
            removed += told
            for record, found_, what in bad[name]:
                if not any(one["what"] == what for one in told):
                    removed.append({"file": name, "place": record if file else "", "grade": found_, "what": what})
        if file is not None:
            yield file


def bad_of(scanner: Scanner) -> list[tuple[str, str, str]]:
    """Return record, grade and name of all that is to go from a file."""
    mentions = [(one.record, one.grade, f"{one.module}.{one.name}") for one in scanner.mentions]
    every = [*mentions, *((one.record, one.grade, one.message) for one in scanner.oddities)]
    return [one for one in every if one[1] in BAD]


def _fewer_items(
    index: str, path: Path, bad: Mapping[str, list[tuple[str, str, str]]], removed: list[dict[str, str]]
) -> dict[str, TargetFile | None]:
    """Return what becomes of the files of a directory of DCP from which items go; nothing where none does."""
    folder, gone = index.removesuffix(NAME), dict[str, str]()
    for place, ranges in items_of(path.parent).items():
        name = folder + Path(place).relative_to(path.parent).as_posix()
        for key in dict.fromkeys(key for _, _, key in ranges):
            for record, found, what in bad.get(name, ()):
                if record.startswith(f"{key}: ") or record == key:
                    gone[key] = "objects"
                    removed.append({"file": name, "place": key, "grade": found, "what": what})
    if not gone:
        return {}
    return {one.name: one.file for one in without_items(folder, read_metadata(path.parent), gone, Request())}


def _cleaned(name: str, path: Path, removed: list[dict[str, str]]) -> TargetFile | None:
    """Return a torch file, or a pickle, without what is to go; None: nothing is left of it, or it cannot be read."""
    with suppress(ZckptError):
        try:
            with file_opened(path) as whole:
                file = read_source(whole)
                root = _without_bad(file.root, name, whole, removed)
            return None if root is GONE else lay_out(name, FromFile.of(file, root))
        except UnknownFormatError:
            root = _without_bad(read_pickle(path).root, name, None, removed)
            return None if root is GONE else TargetFile.of(name, dump(root).data)
    return None


GONE = object()
"""In the place of what goes."""


def _without_bad(root: object, name: str, file: FileRange | None, removed: list[dict[str, str]]) -> object:
    """Return a tree without what is to go; what is shared is looked at once.

    It goes down as deep as trees are read: three calls for each level.
    """
    done: dict[int, tuple[object, object]] = {}  # keeps the nodes, so that ids stay their own

    def clean(node: object, place: tuple[object, ...]) -> object:
        """Return what a node becomes."""
        if id(node) not in done:
            done[id(node)] = node, node  # what leads back to it while it is open
            bad = _judged(node, name, file)
            if bad is not None:
                tell(bad, place)
            done[id(node)] = node, GONE if bad is not None else cleaned(node, place)
        return done[id(node)][1]

    def tell(bad: tuple[str, str], place: tuple[object, ...]) -> None:
        where = ".".join(map(str, place)) or "."
        removed.append({"file": name, "place": where, "grade": bad[0], "what": bad[1]})

    def cleaned(node: object, place: tuple[object, ...]) -> object:
        if isinstance(node, dict):
            for key, value in list(node.items()):
                kept = clean(value, (*place, key))
                if kept is GONE or clean(key, (*place, key)) is not key:
                    del node[key]
                else:
                    node[key] = kept
        elif isinstance(node, (list, tuple, set, frozenset)):
            every = [(one, clean(one, (*place, number))) for number, one in enumerate(node)]
            if any(now is not one for one, now in every):
                has_places = isinstance(node, (list, tuple))
                left = [None if now is GONE else now for _, now in every if has_places or now is not GONE]
                if isinstance(node, list):
                    node[:] = left
                else:
                    node = type(node)(left)
        if isinstance(node, Tensor) and node.subclass is not None and (bad := _worst([node.subclass])) is not None:
            tell(bad, place)
            node.subclass = None
        for field in PARTS.get(type(node), ()):
            part = getattr(node, field)
            if part is None or field == "cls":
                continue
            kept = clean(part, (*place, field))
            lacks = isinstance(part, tuple) and any(done[id(one)][1] is GONE for one in part)
            is_needed = field in NEEDED or (field == "state" and isinstance(node, Object))
            if is_needed and (kept is GONE or lacks):
                return GONE
            if kept is not part:
                setattr(node, field, None if kept is GONE else kept)
        return node

    return clean(root, ())


def _judged(node: object, name: str, file: FileRange | None) -> tuple[str, str] | None:
    """Return grade and name of what is to go; None: it stays."""
    names: list[Global] = []
    data: FileRange | None = None
    callee = node
    while isinstance(callee, Object):
        names += [one for one in callee.args if isinstance(one, Global)]
        callee = callee.cls
    match callee:
        case Global():
            names.append(callee)
        case MetaTensor(subclass=Global() as cls):
            names.append(cls)
        case NumpyArray(cls=cls):
            names += [cls] if cls is not None else []
            data = InMemory(callee.data, name)
        case bytes() | bytearray():
            data = InMemory(bytes(callee), name)
        case Tensor(storage=storage) | (Storage() as storage) if file is not None:
            data = FileRange(file.descriptor, file.path, storage.offset, storage.nbytes)
    worst = _worst(names)
    if worst is not None or data is None:
        return worst
    scanner = Scanner()
    scanner.look(data, is_data=True)
    return next(((found, what) for _, found, what in bad_of(scanner)), None)


def _worst(names: Sequence[Global]) -> tuple[str, str] | None:
    graded = [(grade(one.module, one.name)[0], one.qualified) for one in names]
    return max((one for one in graded if one[0] in BAD), key=lambda one: GRADES.index(one[0]), default=None)
