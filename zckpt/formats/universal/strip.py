"""A universal checkpoint without slots: their files go from the folders of all parameters.

OUT/zero/NAME/fp32.pt       stays: from it DeepSpeed's loaders take masters and weights
OUT/zero/NAME/SLOT.pt       goes with the slot
OUT/zero/NAME/step.pt       goes with the last slot
OUT/zero/optimizer_state.pt keeps the param groups, and of the state that it holds no tensor of a slot that has gone

DeepSpeed's ZeRO-1 and 2 load what is there: an optimizer without slots starts afresh. Its ZeRO-3 wants both of Adam's
moments, or `load_module_only=True`, which leaves its optimizer as it is (DeepSpeed 0.19.8).
"""

from __future__ import annotations

from pathlib import Path

from zckpt.formats.remainder import KEY
from zckpt.formats.stripping import Edited, Request, Stripping, completed, rewrite
from zckpt.formats.torch_files.strip import optimizer_edit, shaped_slots
from zckpt.formats.universal.directory import FOLDER, LATEST_NAME, MASTER_STEM, OPTIMIZER_NAME, STEP_STEM
from zckpt.state import Checkpoint, by_key, dict_of
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
    directory, shaped = Path(checkpoint.source), shaped_slots(checkpoint)
    paths = [Path(file.path) for file in checkpoint.files]
    stems = by_key((path.parent.name, path.stem) for path in paths if path.parent.parent == directory / FOLDER)
    gone: dict[str, set[str]] = {}  # of these those that go
    for name in checkpoint.grouped if request.slots else ():
        slots, whole = request.of({*stems[name]}.intersection(shaped))
        gone[name] = {*stems[name]} - {MASTER_STEM} if whole else slots

    def edit(file: TorchFile) -> Edited:
        path = Path(file.path)
        if path.parent.parent == directory / FOLDER and path.stem in gone.get(path.parent.name, ()):
            return Edited(None, [(path.stem, tensor) for _, tensor in walk_tensors(file.root)])
        if path != directory / FOLDER / OPTIMIZER_NAME:
            return Edited(file.root)
        edited = optimizer_edit(request, shaped)(file)
        values = dict_of(dict_of(dict_of(file.root).get(KEY)).get("values"))  # of what may have no slots any more
        for name in [name for name in values if STEP_STEM in gone.get(str(name), ()) or request.optimizer]:
            del values[name]
            edited.changed = True
        return edited

    own = [
        rewrite(path, path.relative_to(directory).as_posix(), edit, unreferenced=request.unreferenced) for path in paths
    ]
    notes = [_NOTE] if any(gone.values()) else []
    return completed(source, directory, own, pointer=LATEST_NAME, notes=[*notes, *request.notes])


_NOTE = (
    "the masters stay, from which DeepSpeed takes the weights; its ZeRO-1 and 2 start an optimizer without slots "
    "afresh, and its ZeRO-3 needs load_module_only=True"
)
