"""Torch files and pickles beside a checkpoint: values that a program keeps of its training, or an average of its model.

Where it is in its data, random states, counters: files of any name, which no format has to know.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

from zckpt.errors import SourceError, UnknownFormatError
from zckpt.formats.account.inventory import NEVER_EMPTY, below
from zckpt.formats.companions import carry_file, note_gaps, note_other
from zckpt.formats.torch_files.content import content_of, is_averages, shapes_of
from zckpt.state import Checkpoint, dict_of
from zckpt.state.dtypes import is_floating
from zckpt.state.inventory import CARRIED, Claim
from zckpt.state.names import aligned
from zckpt.storage.files import files_in, is_file, read_whole, real_path
from zckpt.torchfile import Tensor, TorchFile, is_tensor, read_pickle, read_torchfile, walk_tensors
from zckpt.torchfile.grades import DATA, grade
from zckpt.torchfile.trees import each, inner

RANKED = re.compile(r"((?:.*_)?rank)_?([0-9]{1,9})\.[a-z]+")
"""Names of files that each rank has one of."""

MOST_NBYTES = 1 << 24
"""Of such a file."""

MOST_OF_PICKLE = 1 << 20
"""Of one that torch has not made: it is read into memory, arrays of NumPy too, and may make nothing but data."""

MOST_OF_NUMBER = 64
"""Bytes of a text that is one."""

MOST_TENSOR_NBYTES = 1 << 16
"""Of integers: random states have some thousands."""


def carry_values(checkpoint: Checkpoint) -> None:
    """Carry what such files in the checkpoint's own directory hold, and in folders of it without a checkpoint.

    On other nodes, too, what is of their ranks only.
    """
    own = Path(checkpoint.source)
    if not own.is_dir():
        return
    folders = dict[str, str]()
    known = {*(file.path for file in checkpoint.files), *checkpoint.claims, *checkpoint.leftovers}
    read = {real_path(path, folders) for path in known}
    of_ranks = set[tuple[Path, str, str]]()  # folder, stem and suffix of files of ranks that are carried
    others = (Path(root, os.path.relpath(own, checkpoint.opened)) for root in checkpoint.roots)
    nodes = [own, *(node for node in others if os.path.realpath(node) != os.path.realpath(own))]
    every = [(node, *one) for node in nodes for one in sorted(below(node, read, os.path.realpath(node)))]
    for node, path, _, about in every:
        inside = path.relative_to(node)
        may_be_torchs = not path.suffix or path.name.endswith(NEVER_EMPTY)
        if about is not None or not may_be_torchs or real_path(str(path), folders) in read:
            continue
        if (number := _number_in(path)) is not None and path.stem not in checkpoint.metadata:
            checkpoint.metadata[path.stem] = number
            checkpoint.claims[str(path)] = Claim(CARRIED, path.stem)
        elif (file := _of_values(path) or _average(path, checkpoint)) is not None:
            if node != own and is_file(own / inside):
                note_other(checkpoint, path, own / inside)
                continue
            short = [] if path.name.startswith("rank") else [path.stem]  # which says nothing without its folder
            carry_file(checkpoint, file, *short, inside.with_suffix("").as_posix(), inside.as_posix())
            if (match := RANKED.fullmatch(path.name)) is not None:
                of_ranks.add((inside.parent, match[1], path.suffix))
    for folder, stem, suffix in sorted(of_ranks):
        there = [one / folder for one in nodes if (one / folder).is_dir()]
        names = [name for one in there for name in files_in(one, lenient=True) if name.endswith(suffix)]
        alike = [name for name in names if (match := RANKED.fullmatch(name)) is not None and match[1] == stem]
        note_gaps(checkpoint, alike, RANKED)


def _number_in(path: Path) -> int | float | None:
    """Return the number that is all of a file's text (SpeechBrain's counter); None of any other file."""
    try:
        text = read_whole(str(path), most=MOST_OF_NUMBER) if 0 < path.stat().st_size <= MOST_OF_NUMBER else b""
        found = json.loads(text)
    except (OSError, SourceError, ValueError):
        return None
    return found if type(found) in (int, float) else None


def _average(path: Path, checkpoint: Checkpoint) -> TorchFile | None:
    """Read a torch file that is called an average and has all parameters of the model; None of any other."""
    if not is_averages(path.stem):
        return None
    try:
        file = read_torchfile(path)
        shapes = shapes_of(content_of(dict_of(file.root), path).tensors)
    except SourceError:
        return None
    names = {ours: its for its, ours in aligned(checkpoint.parameters, shapes).items()}
    every = [(one, shapes.get(names.get(one.name, ""))) for one in checkpoint.owners]
    return file if every and all(one.shape == shape for one, shape in every) else None


def _makes_data(file: TorchFile) -> bool:
    """Tell whether a pickle makes nothing but data, for whoever unpickles it in the file that it is carried into."""
    return all(grade(*name.rpartition(".")[::2])[0] == DATA for names in file.globals.values() for name in names)


def _of_values(path: Path) -> TorchFile | None:
    """Read a small file without other tensors than single numbers, and a few integers; None of any other."""
    try:
        if not 0 < path.stat().st_size <= MOST_NBYTES:
            return None
        try:
            file = read_torchfile(path)
        except UnknownFormatError:
            if path.stat().st_size > MOST_OF_PICKLE or not _makes_data(file := read_pickle(path)):
                return None
    except (OSError, SourceError):
        return None
    if any(is_tensor(node) and type(node) is not Tensor for node in each(file.root, inner)):
        return None
    are_values = all(
        one.numel <= 1 or (not is_floating(one.dtype) and one.numel * one.itemsize <= MOST_TENSOR_NBYTES)
        for _, one in walk_tensors(file.root)
    )
    return file if are_values else None
