"""The files that programs put next to a checkpoint, in the directory that was opened: carried, or copies of weights.

DIR/scheduler.pt, rng_state_R.pth, training_args.bin     Hugging Face's Trainer
DIR/trainer_state.json                                   its own account: steps, epochs, what was logged
DIR/scheduler.bin, random_states_R.pkl, sampler.bin      Accelerate
DIR/recipe_state.pt, adapter_model.pt                    torchtune: its optimizer, and PEFT's adapter as it has that
DIR/model.safetensors, pytorch_model.bin                 the weights once more, next to a directory of DeepSpeed's
DIR/adapter_model.safetensors, adapter_model.bin          of these what PEFT has added to a model
DIR/sharded/shard-R-model-N-of-M.safetensors             the pieces that torch put together into the files above

Files of the first four kinds are kept whole in the metadata, under their names without the suffix. A model's file is a
copy as far as its names and shapes are those of what was read, of its types or rounded from them, and `verify --deep`
compares it with that. A tensor of another name is one if it has the elements of what no other is called as
(`rearranged`); any other has been read by no one.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from zckpt.engine.checking import crc_of
from zckpt.engine.targets import Hole, TargetFile
from zckpt.errors import SourceError
from zckpt.formats.torch_files.tensors import carried, describe, slot_of
from zckpt.state import (
    MASTER,
    WEIGHT,
    Checkpoint,
    Duplicate,
    Parameter,
    Slot,
    SourceFile,
    by_key,
    dict_of,
    list_of,
    stated,
    without,
)
from zckpt.state.boxes import Range
from zckpt.state.dtypes import itemsize
from zckpt.state.inventory import CARRIED as CARRIED_AS_IS
from zckpt.state.inventory import FOREIGN, IMPLIED, LEFT_OUT, Claim
from zckpt.storage.files import BESIDE_A_FILE, Sources, files_in, is_file, read_json, real_path
from zckpt.torchfile import Tensor, TorchFile, node_of, read_torchfile

CARRIED = re.compile(
    r"(?:scheduler|sampler|dl_state_dict|custom_checkpoint)(?:_[0-9]+)?\.(?:bin|pt|pkl)|scaler\.pt"
    r"|random_states_[0-9]+\.pkl|rng_state(?:_[0-9]+)?\.pth|training_args\.bin|recipe_state\.pt|adapter_model\.pt"
)

NUMBERED = re.compile(
    r"(random_states|rng_state|custom_checkpoint|optimizer|scheduler)(?:_([0-9]{1,9}))?\.(?:pkl|pth|bin|pt)"
)
"""Of ranks and objects that programs count from 0; a file without a number is the first."""

RECIPE = "recipe_state.pt"

MEGATRON = "megatron"
"""The format beside whose iteration ms-swift exports the model under other names."""

COPIED = re.compile(r"(?:pytorch_)?model(?:-[0-9]+-of-[0-9]+)?\.(?:safetensors|bin)")
ADAPTER = re.compile(r"adapter_model\.(?:safetensors|bin)")
TRAINER_STATE = "trainer_state.json"
MAXIMUM_JSON_NBYTES = 1 << 28
"""Of the Trainer's account: it grows with every step that is logged."""

INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
SHARDED, LEROBOTS = "sharded", "training_state"
ROUNDED = frozenset({"float64", "float32", "bfloat16", "float16"})
INTEGERS = frozenset({"bool", "uint8", "int8", "int16", "int32", "int64"})

METADATA_ROLE = "metadata"
"""Of files that hold neither a model nor an optimizer."""


def read_companions(checkpoint: Checkpoint, directory: Path, roots: Sequence[Path]) -> None:
    """Add what a directory holds besides what was read; a file that cannot be read is not added.

    `directory`: the one that was opened; `roots`: the same on other nodes, which keep what is of their ranks only.
    """
    folders = dict[str, str]()
    known = {real_path(path, folders) for path in [*(file.path for file in checkpoint.files), *checkpoint.claims]}
    files = {name: directory / name for name in files_in(directory)}
    for path in (root / name for root in roots for name in files_in(root) if CARRIED.fullmatch(name)):
        kept = files.setdefault(path.name, path)
        if kept != path:
            note_other(checkpoint, path, kept)
    models = []
    for name, path in files.items():
        if real_path(str(path), folders) in known:
            continue
        if CARRIED.fullmatch(name):
            try:
                carry(checkpoint, path)
                if name == RECIPE and "optimizer" in dict_of(node_of(checkpoint.metadata["recipe_state"])):
                    checkpoint.warnings.append(
                        f"{RECIPE}: the optimizer's state is carried as it is, for torchtune, whose own model has "
                        "other names, and rows of some weights in another order"
                    )
            except SourceError as error:
                if path.parent != directory:  # below which the inventory finds it
                    checkpoint.files.append(SourceFile(str(path), path.stat().st_size, METADATA_ROLE))
                    checkpoint.claims[str(path)] = Claim(LEFT_OUT, f"it cannot be read: {error.message}")
        elif name == TRAINER_STATE:
            _carry_json(checkpoint, path)
        elif COPIED.fullmatch(name):
            models.append(path)
        elif ADAPTER.fullmatch(name):
            note_adapter(checkpoint, path)
    note_models(checkpoint, models, directory)
    if checkpoint.format == MEGATRON and directory != Path(checkpoint.source):
        exported = {str(path) for name, path in files.items() if COPIED.fullmatch(name) or ADAPTER.fullmatch(name)}
        exported -= {file.path for file in checkpoint.files}
        checkpoint.claims |= dict.fromkeys(exported, Claim(FOREIGN, "the model as exported for transformers"))
    if (directory / SHARDED).is_dir():
        _shards(checkpoint, directory / SHARDED)
    if (directory / LEROBOTS).is_dir():
        from zckpt.formats.lerobot import carry_beside

        carry_beside(checkpoint, directory)
    note_gaps(checkpoint, sorted(files))


def note_other(checkpoint: Checkpoint, path: Path, kept: Path) -> None:
    """Warn of a file of another node that has not the bytes of the one that is kept, as far as they can be read."""
    nbytes = kept.stat().st_size
    crcs: set[int] = set()
    with suppress(SourceError), Sources() as sources:
        crcs = {crc_of(str(one), 0, nbytes, (), sources) for one in (kept, path)}
    if len(crcs) != 1 or nbytes != path.stat().st_size:
        checkpoint.warnings.append(f"{path} differs from {kept}, which is kept")


def note_gaps(checkpoint: Checkpoint, names: Iterable[str], numbers: re.Pattern[str] = NUMBERED) -> None:
    """Warn of what the names of other files show to be gone; a program may have kept it elsewhere."""
    numbered: dict[str, dict[int, str]] = {}
    for name in names:
        if (match := numbers.fullmatch(name)) is not None:
            numbered.setdefault(match[1], {})[int(match[2] or 0)] = name
    for stem, found in numbered.items():
        if len(found) <= (last := max(found)):
            gone = next(number for number in range(last) if number not in found)
            checkpoint.warnings.append(f"{stem} number {gone} is missing, although {found[last]} exists: was it lost?")
    if "scheduler" in numbered and not checkpoint.param_groups:
        checkpoint.warnings.append("there is a scheduler's state but no optimizer state: was it lost?")


def carry(checkpoint: Checkpoint, path: Path) -> None:
    """Keep what a torch file holds. Raises SourceError: it cannot be read."""
    carry_file(checkpoint, read_torchfile(path), path.stem, path.name)


def carry_file(checkpoint: Checkpoint, file: TorchFile, *keys: str) -> None:
    """Keep what a torch file holds, under the first of some keys that is not taken."""
    checkpoint.files.append(describe(file, METADATA_ROLE))
    key = next((one for one in keys if one not in checkpoint.metadata), keys[-1])
    checkpoint.metadata.setdefault(key, carried(file, file.root))


def _carry_json(checkpoint: Checkpoint, path: Path) -> None:
    """Keep an object of JSON; one that is not is no account of the Trainer's."""
    found = read_json(path, most=MAXIMUM_JSON_NBYTES)
    if found is not None and path.stem not in checkpoint.metadata:
        checkpoint.metadata[path.stem] = found
        checkpoint.claims[str(path)] = Claim(CARRIED_AS_IS, path.stem)
        step = found.get("global_step")
        if checkpoint.step is None and type(step) is int:  # an optimizer need not count: Lion, schedule-free ones
            checkpoint.step = step


def trainer_account(directory: Path) -> tuple[dict[str, object], str | None]:
    """Return what a Trainer has logged at a checkpoint's step, and which checkpoint it names as the best."""
    found = read_json(directory / TRAINER_STATE, most=MAXIMUM_JSON_NBYTES) or {}
    best, entries = found.get("best_model_checkpoint"), map(dict_of, list_of(found.get("log_history")))
    at_step = [e for e in entries if e.get("step") == found.get("global_step")]
    return {key: value for e in at_step for key, value in e.items()}, best if isinstance(best, str) else None


def note_models(checkpoint: Checkpoint, paths: Iterable[Path], directory: Path) -> None:
    """Note what files of a model in a directory hold of it as copies; indexes say which of them, and no more."""
    if _note_copies(checkpoint, paths):
        indexes = [str(directory / name) for name in INDEXES if is_file(directory / name)]
        checkpoint.claims |= dict.fromkeys(indexes, Claim(IMPLIED, "which file each tensor is in"))


def note_adapter(checkpoint: Checkpoint, path: Path) -> None:
    """Note what PEFT's `save_pretrained` has written as copies: its names leave out how the adapter is called."""
    found: dict[str, str] = {}
    for name in checkpoint.names:
        for called in (".modules_to_save.default.", ".default."):
            if called in name:
                found.setdefault(name.replace(called, "."), name)
        found.setdefault(name.removesuffix(".default"), name)
    _note_copies(checkpoint, [path], found)


def _tensors(path: Path) -> tuple[SourceFile, dict[str, Slot]] | None:
    """Return a file with what it holds of a model by name; None where it is none, or cannot be read."""
    from zckpt.formats.safetensors import file as safetensors_file

    try:
        if path.suffix == ".safetensors":
            slots, texts, nbytes = safetensors_file.read_header(path)
            rules = safetensors_file.rules_of(texts, slots)
            return safetensors_file.source_file(path, slots, texts, nbytes, rules), slots
        found = read_torchfile(path)
        if not isinstance(found.root, dict):
            return None
        tensors = {str(name): t for name, t in found.root.items() if isinstance(t, Tensor)}
        slots = {name: slot_of(WEIGHT, tensor, found.path) for name, tensor in tensors.items()}
        return describe(found, "model"), slots
    except SourceError:
        return None


def _note_copies(
    checkpoint: Checkpoint, paths: Iterable[Path], names: Mapping[str, str] = MappingProxyType({})
) -> bool:
    """Note what files hold of the model, whose names for theirs are given; tell whether they are any of it.

    Those with the same suffix together are the model once more; one that cannot be read is no copy.
    """
    found = by_key((path.suffix, one) for path in paths if (one := _tensors(path)) is not None)
    noted = False
    for files in found.values():
        slots = {names.get(name, name): slot for _, its in files for name, slot in its.items()}
        copies = list(_duplicates(checkpoint, slots))
        named = {one.name for one in copies}
        copies += _under_other_names(checkpoint, without(slots, *named), named)
        held = {span.path for one in copies for span in one.slot.spans}
        checkpoint.files += [file for file, _ in files if file.path in held]
        checkpoint.duplicates += copies
        noted = noted or bool(copies)
    return noted


def _under_other_names(checkpoint: Checkpoint, slots: Mapping[str, Slot], named: Collection[str]) -> list[Duplicate]:
    """Return the copies that tensors of no parameter's name are, as their values say."""
    from zckpt.formats.rearranged import rearranged

    masters = checkpoint.has_masters
    lacking = [one for one in checkpoint.tensors() if one.tied_to is None and one.name not in named]
    copies = []
    for dtype in sorted({slot.dtype for slot in slots.values()}) if lacking else ():
        held = {one.name: _original(one, Slot(WEIGHT, dtype, one.shape, ()), widens=masters) for one in lacking}
        originals = stated(held)
        some = {name: slot for name, slot in slots.items() if slot.dtype == dtype}
        with suppress(SourceError):  # what cannot be read is a copy of nothing
            for name, slot in rearranged(some, originals):
                kind = "buffer" if name in checkpoint.buffers else "parameter"
                copies.append(Duplicate(kind, name, name, slot, originals[name]))
    return copies


def _duplicates(checkpoint: Checkpoint, slots: Mapping[str, Slot]) -> Iterator[Duplicate]:
    masters = checkpoint.has_masters
    for name, slot in slots.items():
        one = checkpoint.parameters.get(name) or checkpoint.buffers.get(name)
        original = _original(checkpoint.owner(name), slot, widens=masters) if one is not None else None
        if one is not None and original is not None:
            kind = "buffer" if name in checkpoint.buffers else "tied" if one.tied_to else "parameter"
            yield Duplicate(kind, name, one.tied_to or name, replace(slot, name=WEIGHT), original)


def _original(parameter: Parameter, copy: Slot, *, widens: bool) -> Slot | None:
    """Return what a copy was made of: what has its type, else what has most digits; None if that is not known.

    `zero_to_fp32` writes masters, and what is frozen as float32 (before 0.16 integers, too); ZeRO-3 gathers 16-bit
    weights of which its ranks have masters only.
    """
    held = [slot for key in (MASTER, WEIGHT) if (slot := parameter.slots.get(key)) and slot.shape == copy.shape]
    alike = [slot for slot in held if slot.dtype == copy.dtype]
    if alike or not held:
        return alike[-1] if alike else None
    if not widens and itemsize(copy.dtype) > itemsize(held[0].dtype):
        return None
    widened = copy.dtype == "float32" and held[0].dtype in INTEGERS
    return held[0] if widened or {copy.dtype, held[0].dtype} <= ROUNDED else None


def _shards(checkpoint: Checkpoint, directory: Path) -> None:
    """Note the pieces of a model, where they lie below the files that they were put together into."""
    from zckpt.formats.safetensors import file as safetensors_shards

    try:
        if not safetensors_shards.is_sharded(directory):
            return
        pieces = safetensors_shards.read_shards(directory)
    except SourceError:
        return
    slots = {one.name: one.slots[WEIGHT] for one in pieces.tensors()}
    copies = list(_duplicates(checkpoint, slots))
    if copies:
        checkpoint.files += pieces.files
        checkpoint.duplicates += copies


def files_below(root: Path, *, without: Collection[str] = ()) -> Iterator[tuple[str, Path]]:
    """Yield the name within `root` and the path of every file below it, sorted, as `files_in` has them.

    `without`: names within `root` of directories that are left out. Raises SourceError: something is neither a file nor
    a directory, or cannot be read.
    """
    for at, folders, names in os.walk(root, onerror=unreadable):
        here = Path(at)
        folders[:] = sorted(name for name in folders if (here / name).relative_to(root).as_posix() not in without)
        for name in folders:
            if (here / name).is_symlink():
                raise SourceError(
                    "is a link to a directory, which zckpt does not follow",
                    path=here / name,
                    advice="put the directory itself there",
                )
        for name in sorted(name for name in names if not name.startswith(BESIDE_A_FILE)):
            path = here / name
            if not path.is_file():
                raise SourceError("is not a regular file", path=path, advice="remove it")
            yield path.relative_to(root).as_posix(), path


def copy_of(path: Path, name: str, ranges: Sequence[Range] | None = None) -> TargetFile:
    """Return a file that has the bytes of another, or some ranges of them. `name`: within the target."""
    file = TargetFile(name, 0)
    for low, high in [(0, path.stat().st_size)] if ranges is None else ranges:
        slot = Slot.at(str(path), low, "uint8", (high - low,), "file")
        file.holes += [Hole(file.nbytes, name, slot, slot.whole, "uint8")] if high > low else []
        file.nbytes += high - low
    return file


def unreadable(error: OSError) -> None:
    """Raise SourceError for what `os.walk` cannot list."""
    raise SourceError("cannot be read", path=error.filename, found=error.strerror) from error


def warned(checkpoint: Checkpoint, path: Path) -> Checkpoint:
    """Return a checkpoint with a warning if what is to go with its file is not there yet."""
    from zckpt.storage.durable import interrupted

    unfinished = interrupted(path)
    checkpoint.warnings += [unfinished] if unfinished else []
    return checkpoint
