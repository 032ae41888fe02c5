"""Where a universal checkpoint is, and the names of its files.

OUT/mp_rank_00_model_states.pt                   model, scheduler, client state; ZeRO-1 and 2 look here
OUT/zero_pp_rank_0_mp_rank_00_model_states.pt    the same without weights; ZeRO-3 looks here
OUT/zero/optimizer_state.pt                      param groups, loss scaler
OUT/zero/NAME/fp32.pt, SLOT.pt, step.pt          one parameter
OUT/../latest_universal                          names OUT
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from zckpt.codes import LATEST
from zckpt.errors import CONTROLS, UnknownFormatError, UnsupportedError
from zckpt.formats.deepspeed.directory import MODEL, classify
from zckpt.formats.latest import is_name, latest_name
from zckpt.storage.files import is_file

MODEL_NAME = "mp_rank_00_model_states.pt"
ZERO3_MODEL_NAME = "zero_pp_rank_0_mp_rank_00_model_states.pt"
FOLDER = "zero"
OPTIMIZER_NAME = "optimizer_state.pt"
LATEST_NAME = "latest_universal"

SUFFIX = ".pt"
MASTER_STEM = "fp32"
STEP_STEM = "step"

MAXIMUM_NAME_NBYTES = 255
"""What file systems allow for one name."""

_UNFIT = re.compile(f"[/\ud800-\udfff{''.join(map(chr, CONTROLS))}]")
"""Controls in the name of a folder would drive the terminal of everyone who lists it; surrogates are no text."""


def is_own(name: str) -> bool:
    """Tell whether a file, by its name within the directory, is one that a universal checkpoint has of its own."""
    folders = name.split("/")
    if len(folders) == 1:
        shard = classify(name, name)
        return shard is not None and shard.role == MODEL
    if folders[0] != FOLDER:
        return False
    return folders[1:] == [OPTIMIZER_NAME] or (len(folders) == 3 and folders[2].endswith(SUFFIX))


def parameter_file(parameter: str, stem: str) -> str:
    """Return the name, within the directory, of a file of a parameter.

    Raises UnsupportedError: the name of the parameter or slot cannot be a file's.
    """
    for what, name in (("parameter", parameter), ("slot", stem + SUFFIX)):
        nbytes = len(name.encode(errors="surrogatepass"))
        if name in ("", ".", "..", OPTIMIZER_NAME) or nbytes > MAXIMUM_NAME_NBYTES or _UNFIT.search(name):
            raise UnsupportedError(
                f"a universal checkpoint has a file for each slot, but the {what} {name[:80]!r} cannot be a file name",
                advice="`zckpt convert --to zckpt` or `--to=dcp` keeps it",
            )
    return f"{FOLDER}/{parameter}/{stem}{SUFFIX}"


def find(source: Path, *, tag: str | None = None) -> Path | None:
    """Return the directory of the universal checkpoint that `source` is or holds; None if it is or holds none.

    A run directory that also has `latest` is one of ordinary checkpoints, unless `tag` names a universal one in it.

    Raises UnknownFormatError: `latest_universal` names nothing.
    """
    if tag is not None:
        named = source / tag if is_name(tag) else None
        return named if named is not None and _is_universal(named) else None
    if _is_universal(source):
        return source
    name = latest_name(source, LATEST_NAME)
    if name is None or is_file(source / "latest"):
        return None
    if is_name(name) and _is_universal(source / name):
        return source / name
    raise UnknownFormatError(
        "names no universal checkpoint",
        path=source / LATEST_NAME,
        expected="the name of a directory next to it",
        found=repr(name[:80]),
        code=LATEST,
    )


def _is_universal(directory: Path) -> bool:
    """Tell whether a directory has a folder of parameters, or the optimizer's file that lies among them."""
    folder = directory / FOLDER
    try:
        if not folder.is_dir():
            return False
        if (folder / OPTIMIZER_NAME).is_file():
            return True
        with os.scandir(folder) as entries:
            return any(Path(entry.path, MASTER_STEM + SUFFIX).is_file() for entry in entries if entry.is_dir())
    except OSError:  # a name too long to be one, or one that may not be looked at
        return False
