"""Two names of one parameter, of which FSDP1 saves both, each in bytes of its own: whether they are, and that they are.

Equal bytes alone prove nothing: a program may have made two parameters equal. Something else has to say so too, the
sizes of the optimizer's state or the model's configuration.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from zckpt.formats.fsdp_rank_files.directory import HUGGINGFACE
from zckpt.formats.fsdp_rank_files.model import Model
from zckpt.formats.torch_files.tensors import identity_of
from zckpt.state import WEIGHT, Checkpoint, Duplicate
from zckpt.storage.files import opened, read_at, read_json
from zckpt.torchfile import Tensor

HEAD_NBYTES = 256
"""Of the first rank's, by which tensors are sorted that may be equal."""

READ_NBYTES = 1 << 20
"""Read at once, where bytes have to be compared."""

Ties = list[tuple[str, str]]
"""A name, and the one before it that is another name of the same parameter."""


def equal_names(model: Model, names: Sequence[str]) -> Ties:
    """Return names whose tensors equal that of a name before them, in every rank's file."""
    found: Ties = []
    seen: dict[object, list[str]] = {}
    for name in names:
        alike = seen.setdefault(_signature(model, name), [])
        owner = next((one for one in alike if is_same(model, name, one)), None)
        if owner is None:
            alike.append(name)
        else:
            found.append((name, owner))
    return found


def _signature(model: Model, name: str) -> tuple[object, ...]:
    held = model.held[name]
    for path, one in zip(model.files.paths, held, strict=True):
        for box in one.boxes:
            return (one.shape, one.dtype, _read(path, box.tensor, 0, HEAD_NBYTES))
    return held[0].shape, held[0].dtype, b""


def is_same(model: Model, name: str, other: str) -> bool:
    """Tell whether two names have the same bytes on every rank: by the checksums in the files, or else by reading."""
    ours, theirs = model.held[name], model.held[other]
    if (ours[0].shape, ours[0].dtype) != (theirs[0].shape, theirs[0].dtype):
        return False
    for path, sums, a, b in zip(model.files.paths, model.sums, ours, theirs, strict=True):
        if [(x.offsets, x.sizes) for x in a.boxes] != [(x.offsets, x.sizes) for x in b.boxes]:
            return False
        if not all(_is_equal(path, sums, x.tensor, y.tensor) for x, y in zip(a.boxes, b.boxes, strict=True)):
            return False
    return True


def _is_equal(path: str, sums: dict[int, tuple[int, int]], one: Tensor, other: Tensor) -> bool:
    if identity_of(one) == identity_of(other):
        return True
    if not (one.is_contiguous and other.is_contiguous):
        return False
    a, b = sums.get(one.offset), sums.get(other.offset)
    if a is not None and b is not None and a[0] == b[0] == one.nbytes:
        return a == b
    starts = range(0, one.nbytes, READ_NBYTES)
    return all(_read(path, one, at, READ_NBYTES) == _read(path, other, at, READ_NBYTES) for at in starts)


def _read(path: str, tensor: Tensor, at: int, nbytes: int) -> bytes:
    with opened(path) as descriptor:
        return read_at(descriptor, tensor.offset + at, min(nbytes, tensor.nbytes - at), path=path)


def tie(checkpoint: Checkpoint, alias: str, owner: str) -> None:
    """Make a parameter another name of one before it, of which the files have a copy of its own."""
    one, other = checkpoint.parameters[alias], checkpoint.parameters[owner]
    if one.tied_to is not None:
        return
    copy, original = one.slots.get(WEIGHT), other.slots[WEIGHT]
    if copy is not None:
        checkpoint.duplicates = [
            Duplicate("tied", alias, owner, two.slot, original, two.rank) if two.name == alias else two
            for two in checkpoint.duplicates
        ]
        checkpoint.duplicates.append(Duplicate("tied", alias, owner, copy, original))
    one.tied_to, one.slots = owner, {}


def tie_as_configured(checkpoint: Checkpoint, model: Model, directory: Path) -> None:
    """Tie the output's embedding to the input's where the model's configuration says that they are one.

    They are the two tensors of as many rows as the vocabulary has, and equal; where there are not just two such,
    nothing is tied.
    """
    config = read_json(directory / HUGGINGFACE / "config.json") or {}
    parts = [one for one in (config, config.get("text_config")) if isinstance(one, dict)]
    sizes = [one["vocab_size"] for one in parts if type(one.get("vocab_size")) is int
             and one.get("tie_word_embeddings", config.get("tie_word_embeddings")) is True]  # fmt: skip
    found = [
        one.name for one in checkpoint.parameters.values()
        if one.tied_to is None and len(one.shape) == 2 and one.shape[0] in sizes[:1]
    ]  # fmt: skip
    if len(found) == 2 and checkpoint.parameters[found[1]].group is None and is_same(model, *found):
        tie(checkpoint, found[1], found[0])
