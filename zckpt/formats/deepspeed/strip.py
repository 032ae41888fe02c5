"""What can go from a DeepSpeed checkpoint, such that DeepSpeed still loads what stays.

optimizer state   ZeRO-1, 2: the optimizer's files, for the weights are in the model's. DeepSpeed then starts an
                  optimizer from the weights, as it does under `load_optimizer_states=False`. Not under pipeline
                  parallelism, where only what goes with these files tells the names of tied layers.
                  ZeRO-3: the weights are the masters, so these stay, and the slots go.
slots by name     out of every file; the masters stay.
padding           ZeRO-1, 2: the masters' always. The slots' where DeepSpeed takes the lean form, see `lean`.

The rules are those of DeepSpeed 0.19.8, `_load_legacy_checkpoint`.
"""

from __future__ import annotations

from pathlib import Path

from zckpt.engine.plan import Literal, TargetFile
from zckpt.formats.companions import files_below
from zckpt.formats.deepspeed import lean
from zckpt.formats.deepspeed.names import MODEL, OPTIMIZER, PIPELINE_LAYER, Shard
from zckpt.formats.deepspeed.origin import Origin
from zckpt.formats.deepspeed.other_files import LATEST, other_files
from zckpt.formats.latest import LATEST_NBYTES
from zckpt.formats.stripping import Edit, Edited, Request, Rewritten, Stripping, as_it_is, rewrite
from zckpt.formats.torch_files.strip import drop_slots, optimizer_edit
from zckpt.state import MASTER, WEIGHT, Checkpoint
from zckpt.storage.files import read_head
from zckpt.torchfile import TorchFile, walk_tensors


def strip(checkpoint: Checkpoint, source: Path, request: Request) -> Stripping:
    """Return what becomes of the files of a run or tag directory.

    Files that are no shards of the checkpoint are copied. Other checkpoints of a run directory are left out.

    Parameters
    ----------
    checkpoint : Checkpoint
        As read from `source`.
    source : Path
        The directory as the user named it.
    request : Request

    Raises
    ------
    SourceError
        A file cannot be read, or holds what cannot be written.
    """
    origin = checkpoint.origin
    if not isinstance(origin, Origin):
        raise TypeError("not a checkpoint that was read from DeepSpeed's files")
    directory = origin.directory
    whole = source.resolve() != directory.path.resolve()
    folder = f"{directory.tag}/" if whole else ""
    work = _Work(checkpoint, origin, request)
    files = [work.shard(shard, folder + Path(shard.path).name) for shard in directory.shards]
    done = {one.name for one in files}
    others, left_out = other_files(source, directory.path) if whole else (list(files_below(directory.path)), [])
    for name, path in others:
        if whole and name == LATEST:
            files.append(_latest(path, directory.tag))
        elif name not in done:
            files.append(as_it_is(path, name))
    notes = list(work.notes)
    if left_out:
        notes.append(f"other checkpoints of the run are left out: {', '.join(left_out)}")
    return Stripping(files, tuple(notes))


class _Work:
    """Knows for each shard what to do with it."""

    def __init__(self, checkpoint: Checkpoint, origin: Origin, request: Request) -> None:
        self.request = request
        self.slots = [name for name in checkpoint.slot_names() if name not in (WEIGHT, MASTER)]
        members = [member for one in origin.ranks for member in one.members]
        flat = any(member.stage != 3 for member in members)
        named = not origin.directory.of(PIPELINE_LAYER)  # there, `param_shapes` alone has the names of tied layers
        self.without_files = request.optimizer and flat and named and _has_all_weights(checkpoint)
        self.layouts: dict[str, lean.Layout] = {}
        self.notes: list[str] = []
        if request.padding and not self.without_files:
            self.layouts, note = lean.decide(origin)
            self.notes += [note] if note else []
        if self.without_files:
            self.notes.append(
                "the optimizer's files are gone, masters included: load this with load_optimizer_states=False, and "
                "DeepSpeed starts from the weights (--keep-slots master leaves what loads without that)"
            )
        elif request.slots and members:
            self.notes.append(_about_slots(checkpoint, request))

    def shard(self, shard: Shard, name: str) -> Rewritten:
        """Return what becomes of one shard."""
        return rewrite(Path(shard.path), name, self._edit(shard), unreferenced=self.request.unreferenced)

    def _edit(self, shard: Shard) -> Edit:
        if shard.role == MODEL and self.without_files:
            return _model_alone
        if shard.role != OPTIMIZER:
            return optimizer_edit(self.request, self.slots)  # stage 0 has it in the model's file
        if self.without_files:
            return _gone

        def edit(file: TorchFile) -> Edited:
            edited = optimizer_edit(self.request, self.slots)(file)
            _drop_from_list(file, self.request, self.slots, edited)
            if shard.path in self.layouts:
                lean.edit(file, self.layouts[shard.path], self.slots, edited)
            return edited

        return edit


def _has_all_weights(checkpoint: Checkpoint) -> bool:
    return all(WEIGHT in p.slots for p in checkpoint.parameters.values() if p.tied_to is None)


def _about_slots(checkpoint: Checkpoint, request: Request) -> str:
    kept = [name for name in checkpoint.slot_names() if name not in (WEIGHT, MASTER) and not request.drops(name)]
    if not kept:
        return "the masters stay; without slots the optimizer starts anew"
    return (
        f"an optimizer that needs more than {', '.join(kept)} loads this and then fails to step; "
        f"load_optimizer_states=False lets it start anew"
    )


def _model_alone(file: TorchFile) -> Edited:
    """Take from a model file what announces the optimizer's files."""
    root = file.root
    if isinstance(root, dict) and root.get("param_shapes") is not None:
        root["param_shapes"] = None  # as DeepSpeed writes it where there are none
        return Edited(root, changed=True)
    return Edited(root)


def _gone(file: TorchFile) -> Edited:
    """Give up an optimizer file, saying of what kind its tensors were."""
    edited = Edited(None)
    for path, tensor in walk_tensors(file.root):
        state = "base_optimizer_state" in path
        edited.dropped.append((str(path[-1]) if state else MASTER, tensor))
    return edited


def _drop_from_list(file: TorchFile, request: Request, slots: list[str], edited: Edited) -> None:
    """Take slots out of the elastic form, a list of states."""
    content = lean.content(file)
    states = content.get("base_optimizer_state")
    if request.slots and isinstance(states, list):
        drop_slots(states, request, slots, edited)


def _latest(path: Path, tag: str) -> Rewritten:
    """Return the file that names the checkpoint: the one that is there, whichever it named."""
    data = tag.encode()
    named = read_head(str(path), LATEST_NBYTES).strip()
    if named == data:
        return as_it_is(path, LATEST)
    return Rewritten(LATEST, len(data), TargetFile(LATEST, len(data), [Literal(0, data)]), {})
