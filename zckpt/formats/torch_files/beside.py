"""Files of ranks beside a file of `torch.save`: each may have a share of a model, and say nothing of it.

What pipeline stages hold, slices of tensor parallelism and FSDP's local tensors look like any state dict.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from math import prod
from pathlib import Path

from zckpt.errors import SourceError
from zckpt.formats.torch_files.content import content_of
from zckpt.formats.torch_files.tensors import by_name
from zckpt.state import Shape, dict_of
from zckpt.storage.files import files_in
from zckpt.torchfile import Tensor, read_torchfile

OF_A_RANK = re.compile(r"(?i)((?:rank|shard|gpu|(?<![a-z])(?:sdp|tp|mp|pp|dp))[-_.=]?)[0-9]+(?=[^0-9]*$)")
"""Where the name of a file or a folder says of which rank it is."""


def unlike(path: Path, others: Iterable[Path]) -> str | None:
    """Say how the model of a file differs from that of another; None where they have most of their elements alike.

    Where each rank has the whole model, buffers may still be its own.
    """
    mine = _tensors(path)
    for other in others if mine else ():
        its = _tensors(other)
        if its and (lone := sorted(mine.keys() ^ its.keys())):
            return f"only {(path if lone[0] in mine else other).name} has {lone[0]}"
        changed = [name for name in its if mine[name] != its[name]]
        for name in changed:
            if mine[name][0] != its[name][0]:
                return f"{name} has shape {mine[name][0]}, and {its[name][0]} in {other.name}"
        if 2 * sum(prod(mine[name][0]) for name in changed) > sum(prod(shape) for shape, _ in mine.values()):
            return f"{changed[0]} has other values in {other.name}"
    return None


def share_among_ranks(path: Path) -> str | None:
    """Return a warning if a file is called one rank's, and beside it another's has a model unlike its own."""
    found = OF_A_RANK.search(path.name)
    if found is None:
        return None
    alike = re.compile(f"{re.escape(path.name[: found.end(1)])}[0-9]+{re.escape(path.name[found.end() :])}")
    names = list(filter(alike.fullmatch, files_in(path.parent)))
    try:
        why = unlike(path, [path.with_name(name) for name in names if name != path.name][:1])
    except SourceError:  # the other cannot be read
        return None
    return why and (
        f"it is one of {len(names)} ranks' files, and may hold only a share of the model: {why} (save the model whole, "
        "or with torch.distributed.checkpoint, in its own program)"
    )


def _tensors(path: Path) -> dict[str, tuple[Shape, int | None]]:
    """Return the shape of each tensor of a file's model, and the CRC-32 of its storage where the file states one."""
    file = read_torchfile(path)
    sums = {record.offset: record.crc32 for record in file.records}
    model = by_name(content_of(dict_of(file.root), path).tensors, file.path)
    tensors = {name: one for name, one in model.items() if isinstance(one, Tensor)}
    return {name: (one.shape, sums.get(one.storage.offset)) for name, one in tensors.items()}
