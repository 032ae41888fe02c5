"""Which files of a directory are of the step that is wanted: the last one, or that of the tag."""

from __future__ import annotations

import re
from pathlib import Path

from zckpt.errors import UnknownFormatError, listed
from zckpt.formats.format import Search
from zckpt.immutable import immutable
from zckpt.storage.files import files_in
from zckpt.storage.ownership import Owned, called

_NAMES = re.compile(r"(?:model|optim|meta)_([0-9]{6,18})(?:_rank([0-9]{1,5}))?\.(?:pt|json)")

OWNED = Owned(called(_NAMES.pattern))


@immutable
class Step:
    """The files of one step; `others` are those of other steps."""

    path: Path
    model: Path
    meta: Path
    ranks: tuple[Path, ...]
    others: tuple[Path, ...]


def rank_name(step: Step, rank: int) -> str:
    """Return the name of a rank's file."""
    return f"{step.model.stem.replace('model', 'optim')}_rank{rank}.pt"


def find(search: Search) -> Step | None:
    """Find a step that has a model and its metadata.

    Raises UnknownFormatError: the tag names none; ShardError: a rank's file is missing.
    """
    from zckpt.formats.lost import missing
    from zckpt.state.names import is_number

    path = search.path
    every = {name: match for name in (files_in(path) if path.is_dir() else ()) if (match := _NAMES.fullmatch(name))}
    steps = sorted({match[1] for match in every.values()}, key=int)
    whole = [step for step in steps if {f"model_{step}.pt", f"meta_{step}.json"} <= every.keys()]
    if not whole:
        return None
    tag = search.tag
    step = whole[-1] if tag is None else next((one for one in whole if is_number(tag) and int(one) == int(tag)), None)
    if step is None:
        raise UnknownFormatError("holds no such step", path=path, expected=listed(whole), found=tag)
    ranks = {int(match[2]): path / name for name, match in every.items() if match[2] and match[1] == step}
    if ranks and (error := missing(path, "optimizer file", ranks, max(ranks) + 1)) is not None:
        raise error
    others = tuple(path / name for name, match in every.items() if match[1] != step)
    own = tuple(ranks[rank] for rank in sorted(ranks))
    return Step(path, path / f"model_{step}.pt", path / f"meta_{step}.json", own, others)
