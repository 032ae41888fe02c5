"""Shards whose index was left behind: their names tell which they are, and that all are there.

DIR/model-00001-of-0000N.safetensors ...      or diffusion_pytorch_model-*; no model.safetensors.index.json
"""

from __future__ import annotations

import re
from pathlib import Path

from zckpt.errors import ShardError

_SHARD = re.compile(r"((?:diffusion_pytorch_)?model)-([0-9]{5})-of-([0-9]{5})\.safetensors")


def is_there(path: Path) -> bool:
    """Tell whether a directory has such a shard."""
    return any(_SHARD.fullmatch(one.name) for one in path.iterdir())


def shards(source: Path) -> list[Path]:
    """Return the shards in a directory, in their order. Raises ShardError: they are not all that their names count."""
    found = {match.groups(): one for one in sorted(source.iterdir()) if (match := _SHARD.fullmatch(one.name))}
    kinds = sorted({(stem, count) for stem, _, count in found})
    if len(kinds) != 1:
        several = ", ".join(f"{stem}-*-of-{count}" for stem, count in kinds)
        raise ShardError("shards of several models, and no index", path=source, expected="those of one", found=several)
    [(stem, count)] = kinds
    wanted = [f"{number:05d}" for number in range(1, int(count) + 1)]
    missing = [number for number in wanted if (stem, number, count) not in found]
    if missing or len(found) != len(wanted):
        raise ShardError(
            "without an index, all shards have to be there, and no others",
            path=source,
            expected=f"{len(wanted)} files {stem}-*-of-{count}.safetensors",
            found=f"{len(found)}" + (f", without {stem}-{missing[0]}-of-{count}.safetensors" if missing else ""),
        )
    return list(found.values())
