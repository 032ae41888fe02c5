"""What killed runs have left in a directory of checkpoints, of whatever names: removed by the next that saves there.

`recover` puts right what was left of one target, when that is written again. Where each save has a name of its own, as
steps have, that may be never, and what is left be as large as any checkpoint.

Removed is a `.NAME.zckpt-partial` of this user's that no run holds, in which everything is the format's, and of which
no journal says that it can be gone on with. Where a file system has no locks, nobody can tell a run that is alive: then
nothing is removed.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from zckpt.errors import TargetError
from zckpt.storage.durable import recover
from zckpt.storage.journal import journal_name
from zckpt.storage.ownership import Owned, check_replaceable, is_abandoned, partial_name


def remove_leftovers(directory: Path, owned: Owned) -> None:
    """Remove what killed runs have left of directories; what cannot be removed stays.

    Parameters
    ----------
    directory : Path
        In which they were to be; it need not exist.
    owned : Owned
        What tells a finished one; of one that is not, names do.
    """
    unfinished = Owned(lambda name: owned.is_own(str(_target_of(Path(name)) or name)))
    with suppress(OSError, TargetError):
        for left in list(directory.iterdir()):
            target = _target_of(left)
            if target is None or os.path.lexists(journal_name(target)) or not is_abandoned(left):
                continue
            with suppress(OSError, TargetError):
                check_replaceable(left, unfinished)
                recover(target)


def _target_of(left: Path) -> Path | None:
    """Return what was to get the name of what has a temporary one; None: it has none."""
    name = left.name.removeprefix(".").removesuffix(".zckpt-partial")
    target = left.with_name(name) if name else left
    return target if partial_name(target) == left else None
