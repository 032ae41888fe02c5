"""A directory of zckpt's own format without slots: the same files, each with its part of what stays, a new document.

What a parameter or a group has besides slots, such as a step, goes with the last of its slots. Hyperparameters stay,
and so does what the optimizer keeps besides its state, such as a loss scale: `zckpt.load` gives an optimizer those, and
it starts afresh.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

from zckpt.formats.latest import LATEST
from zckpt.formats.native.files import RANK_ROLE, SECTIONS
from zckpt.formats.native.writer import lay_out_as_cut
from zckpt.formats.stripping import Request, Stripping, as_it_is, completed, replaced
from zckpt.formats.torch_files.optimizer import BESIDE
from zckpt.formats.torch_files.strip import shaped_slots
from zckpt.state import MASTER, WEIGHT, Checkpoint, Parameter, itemsize, without


def strip(checkpoint: Checkpoint, source: Path, request: Request) -> Stripping:
    """Return what becomes of the files of a directory, or of the one that a run's directory names.

    Parameters
    ----------
    checkpoint : Checkpoint
        As read from `source`.
    source : Path
        The directory as the user named it.
    """
    directory = Path(checkpoint.source)
    thin = _without(checkpoint, request) if request.slots else checkpoint
    before = {file.name: file for file in checkpoint.files}
    if thin == checkpoint:
        own = [as_it_is(Path(file.path), name) for name, file in before.items()]
    else:  # the document and the ranks' files, each with its part of what stays
        kinds = _dropped(checkpoint, thin)
        ranks = [file.path for file in checkpoint.files if file.role == RANK_ROLE]
        own = [
            replaced(file.name, before[file.name].nbytes, file, kinds.get(before[file.name].path, {}))
            for file in lay_out_as_cut(thin, ranks)
        ]
    return completed(source, directory, own, pointer=LATEST, notes=request.notes)


def _without(checkpoint: Checkpoint, request: Request) -> Checkpoint:
    """Return a checkpoint without the slots that go, and what goes with them."""
    shaped = set(shaped_slots(checkpoint))
    thin = replace(checkpoint)
    emptied: set[str] = set()
    for section in SECTIONS:
        every: dict[str, Parameter] = getattr(checkpoint, section)
        found: dict[str, Parameter] = {}
        for name, parameter in every.items():
            gone, state_goes = request.of({key for key in parameter.slots if key in shaped})
            kept = {
                key: slot
                for key, slot in parameter.slots.items()
                if key == WEIGHT
                or (key == MASTER and not (request.optimizer and parameter.weight))
                or (key != MASTER and not state_goes and key not in gone)
            }
            found[name] = replace(parameter, slots=kept, state={} if state_goes else parameter.state)
            if state_goes:
                emptied.add(name)
        setattr(thin, section, found)
    thin.param_groups = [
        replace(group, state={}) if request.optimizer or not emptied.isdisjoint(group.parameters) else group
        for group in checkpoint.param_groups
    ]
    if request.optimizer or emptied:
        thin.optimizer_metadata = without(checkpoint.optimizer_metadata, BESIDE)
    return thin


def _dropped(checkpoint: Checkpoint, thin: Checkpoint) -> dict[str, Counter[str]]:
    """Return the bytes of the slots that went, by file and slot."""
    found: dict[str, Counter[str]] = {}
    for section in SECTIONS:
        left = getattr(thin, section)
        for name, parameter in getattr(checkpoint, section).items():
            for key, slot in parameter.slots.items():
                for span in slot.spans if key not in left[name].slots else ():
                    found.setdefault(span.path, Counter())[key] += span.extent.numel * itemsize(slot.dtype)
    return found
