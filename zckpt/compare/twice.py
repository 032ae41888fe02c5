"""One rank's file under two names: told from what ranks have alike by rule, without reading more than a sample.

names      torch calls an archive's folder as the file that it saves; of a copy it is called as a file beside it
samples    two files that hold different elements begin every tensor of theirs that is looked at with the same bytes

Zeros, ones, and whatever is one value over and over tell nothing. Nor do weights of different parameters: experts begin
as one, and so do layers of a model that was made deeper. What an optimizer has come to for them differs; and where it
does, so do the weights that it has stepped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import groupby, pairwise
from operator import itemgetter
from pathlib import Path

from zckpt.codes import TWICE, WRONG_RANK
from zckpt.errors import ShardError
from zckpt.state import MASTER, WEIGHT, ZEROS, Checkpoint, SourceFile, Span, by_key, itemsize
from zckpt.storage.files import Sources
from zckpt.storage.stand_ins import ahead

SAMPLED_NBYTES = 512
"""Of a tensor, at most."""

SAMPLES_PER_FILE = 16
"""Of its largest tensors."""

MOST_SPANS = 1 << 17
"""That are looked for samples among, those of the largest tensors first: every file has some of these."""

FEWEST_WORDS = 4
"""Different words of four bytes, or elements, in what two files have alike below which it may be chance."""

STEPPED = 3
"""Steps after which what was moved by different gradients is no longer equal: the rate of the first may be zero."""

EXPERT = "expert"
"""Role of files that hold nothing but experts, one of which may have been made of another."""

Samples = dict[object, tuple[str, str, bytes, int]]
"""By a place: the slot, the parameter, the data that begin there, and the bytes of an element of these."""

Held = tuple[Samples, Samples]
"""What is sampled of a file, by where it lies in it and by what it is of."""


def files_twice(checkpoint: Checkpoint) -> Iterator[ShardError]:
    """Yield an error for each file that is another rank's under its name. Raises SourceError: one cannot be read."""
    torch_files = [file for file in checkpoint.files if file.archive and file.role != EXPERT]
    by_stem = {Path(file.path).stem: file for file in torch_files}  # of one name in many folders, none is misnamed
    found: dict[str, ShardError] = {}  # of those that were saved under the name of another, in any of the roots
    swapped: set[str] = set()  # of two that were, one is told
    for file in torch_files:
        stem, partner = Path(file.path).stem, by_stem.get(file.archive)
        if file.archive == stem or partner is None or file.path in swapped:
            continue
        if partner.archive == stem:
            swapped.add(partner.path)
        code = TWICE if partner.archive == file.archive else WRONG_RANK
        what = "was saved under the name of another file beside it"
        found[file.path] = _error(file, partner, what, f"a file that was saved as {file.name}", code)
    yield from found.values()
    ranks = {file.path: file for file in checkpoint.files}
    for one, other in _same(checkpoint):
        if one not in found and other not in found and one in ranks and other in ranks:
            what = "holds the same as another file, of elements that are not the same"
            yield _error(ranks[other], ranks[one], what, "something that only this file has")


def check_files_apart(checkpoint: Checkpoint) -> None:
    """Raise ShardError where a file is another rank's under its name."""
    for error in files_twice(checkpoint):
        raise error


def _error(file: SourceFile, other: SourceFile, what: str, expected: str, code: str = TWICE) -> ShardError:
    ranks = [one.mp_rank if one.dp_rank is None else one.dp_rank for one in (file, other)]
    return ShardError(
        what,
        path=file.path,
        expected=expected,
        found=other.name,
        advice="copy it again from its origin; --no-weight-check (in a load, verify=False) accepts it",
        code=code,
        ranks=[rank for rank in ranks[: 1 if code == TWICE else 2] if rank is not None],
    )


def _same(checkpoint: Checkpoint) -> Iterator[tuple[str, str]]:
    """Yield pairs of files that hold different elements, and the same data."""
    held = _sampled(checkpoint)
    places = by_key(
        (place, (data, path))
        for path, of_file in held.items()
        for samples in of_file
        for place, (_, _, data, _) in samples.items()
    )
    candidates: dict[tuple[str, str], None] = {}  # that have the same in one place or of one tensor
    for found in places.values():
        least = min(len(data) for data, _ in found)
        begun = sorted((data[:least], path) for data, path in found if _varies(data))
        for _, some in groupby(begun, key=itemgetter(0)):
            candidates |= dict.fromkeys(pairwise(path for _, path in some))
    states = _states(checkpoint, held) if candidates else {}
    for one, other in candidates:
        if any(_are_same(mine, its, states) for mine, its in zip(held[one], held[other], strict=True)):
            yield one, other


def _states(checkpoint: Checkpoint, held: Mapping[str, Held]) -> dict[str, dict[str, bytes]]:
    """Return by parameter what an optimizer has that has stepped float32 weights for a while; none where it may not."""
    rates = [group.hyperparameters.get("lr") for group in checkpoint.param_groups]
    coarse = any(one.master and one.master.dtype != "float32" for one in checkpoint.parameters.values())
    if coarse or (checkpoint.step or 0) < STEPPED or not all(isinstance(one, float) and one > 0 for one in rates):
        return {}
    found: dict[str, dict[str, bytes]] = {}
    for _, by_tensor in held.values():
        for key, name, data, _ in by_tensor.values():
            if key not in (WEIGHT, MASTER) and _varies(data):
                found.setdefault(name, {})[key] = data
    return found


def _sampled(checkpoint: Checkpoint) -> dict[str, Held]:
    """Return what each file begins its largest tensors with, of elements that no other file has."""
    chosen: dict[str, list[tuple[Span, int, str, str]]] = {}
    slots = [(slot, p.name) for p in checkpoint.all_parameters
             for slot in p.slots.values()]  # fmt: skip
    looked_at = 0
    for slot, name in sorted(slots, key=lambda one: -one[0].nbytes):
        for span in (one for one in slot.spans if one.path != ZEROS):
            looked_at += 1
            of_file = chosen.setdefault(span.path, [])
            if len(of_file) < SAMPLES_PER_FILE and span.extent.numel and span.is_contiguous:
                nbytes = min(span.extent.numel * itemsize(span.dtype), SAMPLED_NBYTES)
                of_file.append((span, nbytes, slot.name, name))
        if looked_at > MOST_SPANS:
            break
    if len(chosen) < 2:
        return {}
    held: dict[str, Held] = {path: ({}, {}) for path in chosen}
    every = [one for some in chosen.values() for one in some]
    with Sources() as sources, ahead((span.path, span.offset, nbytes) for span, nbytes, _, _ in every):
        for span, nbytes, key, name in every:
            data = bytearray(nbytes)
            sources.read(span.path, span.offset, memoryview(data))
            sample, (by_offset, by_tensor) = (key, name, bytes(data), itemsize(span.dtype)), held[span.path]
            by_offset.setdefault((span.offset, key), sample)
            by_tensor.setdefault((name, key), sample)
    return held


def _are_same(mine: Samples, its: Samples, states: Mapping[str, Mapping[str, bytes]]) -> bool:
    """Tell whether two files have the same in every place that both are sampled at, and in enough to tell."""
    words, weights, is_state = 0, set[str](), False
    for place in mine.keys() & its.keys():
        (key, name, data, size), (_, other, found, _) = mine[place], its[place]
        nbytes = min(len(data), len(found))
        if data[:nbytes] != found[:nbytes]:
            return False
        further = max(min(_words(data[:nbytes]), _words(data[:nbytes], size)) - 1, 0)
        a, b = states.get(name, {}), states.get(other, {})
        stepped_apart = key == MASTER and any(a[one] != b[one] for one in a.keys() & b.keys())
        if key not in (WEIGHT, MASTER) or (name != other and stepped_apart):
            words, is_state = words + further, is_state or further > 0
        elif name == other:
            words += further
            weights.add(name)
    return words >= FEWEST_WORDS and (is_state or len(weights) > 1)


def _words(data: bytes, nbytes: int = 4) -> int:
    """Return how many different words of so many bytes there are in data."""
    return len({data[at : at + nbytes] for at in range(0, len(data) - nbytes + 1, nbytes)})


def _varies(data: bytes) -> bool:
    """Tell whether there is more than one, without looking at each."""
    whole = len(data) // 4 * 4
    return data[4:whole] != data[: max(whole - 4, 0)]
