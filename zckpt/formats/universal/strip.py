"""A universal checkpoint without slots: their files go from the folders of all parameters.

OUT/zero/NAME/fp32.pt       stays: from it DeepSpeed's loaders take masters and weights
OUT/zero/NAME/SLOT.pt       goes with the slot
OUT/zero/NAME/step.pt       goes with the last slot
OUT/zero/optimizer_state.pt keeps the param groups, and of the state that it holds no tensor of a slot that has gone

DeepSpeed's ZeRO-1 and 2 load what is there: an optimizer without slots starts afresh. Its ZeRO-3 wants both of Adam's
moments, or `load_module_only=True`, which leaves its optimizer as it is (DeepSpeed 0.19.8).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

from zckpt.formats.remainder import KEY
from zckpt.formats.stripping import Edit, Edited, Request, Stripping, completed, rewrite
from zckpt.formats.torch_files.strip import optimizer_edit, shaped_slots
from zckpt.formats.universal.directory import FOLDER, LATEST_NAME, MASTER_STEM, OPTIMIZER_NAME, STEP_STEM
from zckpt.state import Checkpoint, dict_of
from zckpt.torchfile import TorchFile, walk_tensors


def strip(checkpoint: Checkpoint, source: Path, request: Request) -> Stripping:
    """Return what becomes of the files of a universal checkpoint, or of the one that `latest_universal` names.

    Parameters
    ----------
    checkpoint : Checkpoint
        As read from `source`.
    source : Path
        The directory as the user named it.

    Raises
    ------
    SourceError
        A file cannot be read, or holds what cannot be written.
    """
    directory = Path(checkpoint.source)
    gone = _gone(checkpoint, request) if request.slots else {}
    own = []
    for path in map(Path, (file.path for file in checkpoint.files)):
        name = path.relative_to(directory).as_posix()
        if name == f"{FOLDER}/{OPTIMIZER_NAME}":
            edit = _optimizer_edit(checkpoint, request, gone)
        elif path.parent.parent == directory / FOLDER and path.stem in gone.get(path.parent.name, ()):
            edit = _goes
        else:
            edit = _stays
        own.append(rewrite(path, name, edit, unreferenced=request.unreferenced))
    notes = [_NOTE] if any(gone.values()) else []
    return completed(source, directory, own, pointer=LATEST_NAME, notes=[*notes, *request.notes])


_NOTE = (
    "the masters stay, from which DeepSpeed takes the weights; its ZeRO-1 and 2 start an optimizer without slots "
    "afresh, and its ZeRO-3 needs load_module_only=True"
)


def _gone(checkpoint: Checkpoint, request: Request) -> dict[str, frozenset[str]]:
    """Return the stems of the files that go from each parameter's folder."""
    shaped = set(shaped_slots(checkpoint))
    directory = Path(checkpoint.source) / FOLDER
    stems: dict[str, set[str]] = {}
    for path in map(Path, (file.path for file in checkpoint.files)):
        if path.parent.parent == directory:
            stems.setdefault(path.parent.name, set()).add(path.stem)
    found = {}
    for name in checkpoint.grouped:
        present = {stem for stem in stems[name] if stem in shaped}
        gone, whole = request.of(present)
        if whole:
            gone = stems[name] - {MASTER_STEM}
        found[name] = frozenset(gone)
    return found


def _goes(file: TorchFile) -> Edited:
    return Edited(None, [(Path(file.path).stem, tensor) for _, tensor in walk_tensors(file.root)])


def _stays(file: TorchFile) -> Edited:
    return Edited(file.root)


def _optimizer_edit(checkpoint: Checkpoint, request: Request, gone: Mapping[str, Collection[str]]) -> Edit:
    """Return the edit of the file that all parameters have in common: without single values of what has no slots."""
    known = optimizer_edit(request, shaped_slots(checkpoint))

    def edit(file: TorchFile) -> Edited:
        edited = known(file)
        values = dict_of(dict_of(dict_of(file.root).get(KEY)).get("values"))
        for name in [name for name in values if STEP_STEM in gone.get(str(name), ()) or request.optimizer]:
            del values[name]
            edited.changed = True
        return edited

    return edit
