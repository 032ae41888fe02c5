"""What becomes of a directory that a format has taken something out of: its other files, and the run that it lies in.

DIR/...                     whatever the format does not know is copied; a fingerprint goes if anything does
RUN/latest, RUN/DIR/...     given the run's directory, the target is one, too: of this checkpoint alone
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from zckpt.engine.targets import TargetFile
from zckpt.formats.companions import files_below
from zckpt.formats.stripping import STRUCTURE, Request, Rewritten, Stripping, as_it_is
from zckpt.formats.torch_files.strip import notes as format_notes
from zckpt.storage.files import is_file
from zckpt.storage.ownership import FINGERPRINT_NAME


def completed(
    source: Path,
    directory: Path,
    own: Sequence[Rewritten],
    request: Request,
    *,
    pointer: str | None = None,
    notes: Sequence[str] = (),
) -> Stripping:
    """Return what becomes of all files, given what becomes of those that the format knows.

    Parameters
    ----------
    source : Path
        The directory as the user named it: this one, or one that it is in.
    directory : Path
    own : sequence of Rewritten
        By their names within `directory`.
    request : Request
    pointer : str, optional
        The name of the file of a run's directory that names one of its checkpoints.
    notes : sequence of str
        What the format has to say.

    Raises
    ------
    SourceError
        Something in it is neither a file nor a directory.
    """
    inner = Path(os.path.relpath(os.path.realpath(directory), os.path.realpath(source))).as_posix()
    folder = "" if inner == os.curdir or inner.startswith(os.pardir) else f"{inner}/"
    done = {one.name for one in own}
    changed = any(one.file is None or one.saved for one in own)
    files = [*own]
    for name, path in files_below(directory):
        if name == FINGERPRINT_NAME and changed:
            nbytes = path.stat().st_size
            files.append(Rewritten(name, nbytes, None, {STRUCTURE: nbytes}))
        elif name not in done:
            files.append(as_it_is(path, name))
    said = [*notes, *format_notes(request)]
    if folder:
        files = [_below(folder, one) for one in files]
        said.append("of the run's directory only this checkpoint is written")
        if pointer is not None and is_file(source / pointer):
            data = inner.encode()
            files.append(Rewritten(pointer, len(data), TargetFile.of(pointer, data), {}))
    return Stripping(files, tuple(said))


def _below(folder: str, one: Rewritten) -> Rewritten:
    name = folder + one.name
    return replace(one, name=name, file=None if one.file is None else replace(one.file, name=name))
