"""What killed runs have left in a directory of checkpoints, of whatever names: removed by the next that saves there.

`recover` puts right what was left of one target, when that is written again. Where each save has a name of its own, as
steps have, that may be never, and what is left be as large as any checkpoint.

Removed is a `.NAME.zckpt-partial` of this user's that no run holds, in which everything is the format's, and of which
no journal says that it can be gone on with. Where a file system has no locks, nobody can tell a run that is alive: then
nothing is removed. NFS and Lustre have locks of files that all nodes see, and of directories such that one node sees:
what somebody wrote into within `QUIET_S` stays, too.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

from zckpt.errors import TargetError
from zckpt.storage.durable import recover
from zckpt.storage.journal import journal_name
from zckpt.storage.ownership import Owned, check_unfinished, is_abandoned, partial_name

QUIET_S = 3600.0
"""Longer than a save writes nothing, and than clocks of nodes and of a server of files differ."""


def remove_leftovers(directory: Path, owned: Owned) -> None:
    """Remove what killed runs have left of directories; what cannot be removed stays.

    `directory`: in which they were to be; it need not exist; `owned`: what tells a finished one; of one that is not,
    names do.
    """
    with suppress(OSError, TargetError):
        for left in list(directory.iterdir()):
            name = left.name.removeprefix(".").removesuffix(".zckpt-partial")
            target = left.with_name(name) if name else left
            if partial_name(target) != left or os.path.lexists(journal_name(target)):
                continue
            with suppress(OSError, TargetError):
                every = [left, *left.rglob("*")] if left.is_dir() and not left.is_symlink() else [left]
                if max(path.lstat().st_mtime for path in every) < time.time() - QUIET_S and is_abandoned(left):
                    check_unfinished(left, owned)
                    recover(target, owned)
