"""What every rank's file has under the same key: the same as the first rank's, or something of its own.

The metadata have what the first file holds. What another one holds otherwise (a random state, a sampler's place) is
kept as well, under the file's stem and the key: `zero_pp_rank_1_mp_rank_00_model_states.rng`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from zckpt.formats.torch_files.tensors import carried
from zckpt.state.inventory import COPY, Rule
from zckpt.storage.files import opened, read_at
from zckpt.torchfile import FromFile, Mentioned, TorchFile, dump, walk_tensors

COMPARED_NBYTES = 1 << 20
"""Bytes of tensors of one key that are compared: random states are a few kilobytes."""

_PLAIN = frozenset({type(None), bool, int, float, str})

Content = tuple[TorchFile, Mapping[str, object]]
"""A file, and its keys."""


def keep_others(
    first: Content, others: Sequence[Content], keys: Sequence[str], place: Sequence[str] = ()
) -> tuple[dict[str, object], dict[str, tuple[Rule, ...]]]:
    """Return what other ranks' files hold otherwise than the first, and rules for what they hold as it does.

    Parameters
    ----------
    first : (TorchFile, mapping of str to object)
    others : sequence of the same
    keys : sequence of str
        Those that the metadata have of the first, and others of the same kind.
    place : sequence of str
        Where in the file's tree the mapping is.
    """
    metadata: dict[str, object] = {}
    rules: dict[str, tuple[Rule, ...]] = {}
    for file, content in others:
        copies = []
        for key in keys:
            if content.get(key) is None:
                continue
            own = FromFile.of(file, content[key])
            if first[1].get(key) is not None and is_same(FromFile.of(first[0], first[1][key]), own):
                copies.append(Rule((*place, key, "**"), COPY, f"as in {Path(first[0].path).name}", tensors=True))
            else:
                metadata[f"{Path(file.path).stem}.{key}"] = carried(file, content[key])
        rules[file.path] = tuple(copies)
    return metadata, rules


def is_same(one: FromFile, other: FromFile) -> bool:
    """Tell whether two parts of files would be written alike, as far as `COMPARED_NBYTES`."""
    if one.node is other.node and not any(True for _ in walk_tensors(one.node)):
        return True  # files that are alike share a tree
    if type(one.node) in _PLAIN and type(other.node) in _PLAIN and one.node == one.node:  # no NaN
        return type(one.node) is type(other.node) and repr(one.node) == repr(other.node)
    a, b = dump(one), dump(other)
    if a.data != b.data or [s.storage.nbytes for s in a.storages] != [s.storage.nbytes for s in b.storages]:
        return False
    return all(x == y for x, y in zip(_head(a.storages), _head(b.storages), strict=True))


def _head(storages: Sequence[Mentioned]) -> Iterator[bytes]:
    left = COMPARED_NBYTES
    for one in storages:
        count = min(left, one.storage.nbytes)
        left -= count
        if not count or one.path is None:
            yield b""
            continue
        with opened(one.path) as descriptor:
            yield read_at(descriptor, one.storage.offset, count, path=one.path)
