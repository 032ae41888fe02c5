"""What to say of something that no format recognises: what it seems to be, and where a checkpoint is near it.

Knows by names and first bytes what other programs leave, which zckpt does not read, and which directories of a run are
its checkpoints.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path

from zckpt.errors import SourceError, UnknownFormatError, listed
from zckpt.formats.format import TAG, Format, Found, NearMiss, Search
from zckpt.formats.registry import BUILT_IN, TRIED_LAST, BrokenPluginError, formats
from zckpt.formats.units import is_named, latest_of, numbered, units
from zckpt.storage.files import entries_of, is_file, leads_to_folder, read_head
from zckpt.storage.packed import PATCH, is_store

HEAD_NBYTES = 512

LFS = b"version https://git-lfs.github.com/spec/"

ARCHIVES, TAR_OFFSET = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"(\xb5/\xfd", b"7z\xbc\xaf", b"Rar!"), 257
"""First bytes of archives, and of what is compressed; and where a tar says what it is."""

_HUB = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")

SHOWN_NAMES = 6

MAXIMUM_FOLDERS = 1000
"""Folders that are looked into for a checkpoint: a run keeps few."""

BELOW = 2
"""Folders below a directory that are looked into for the checkpoint that may be meant."""

TO_HUGGING_FACE = "export it to safetensors or a torch state dict with the program that wrote it"

_FILES = (
    (b"GGUF", r"", "is a GGUF file of llama.cpp"),
    (b"\x89HDF\r\n\x1a\n", r"", "is an HDF5 file, as Keras writes it"),
    (b"\x93NUMPY", r"", "is an array of NumPy"),
    (b"PK\3\4", r".*\.npz", "is an archive of NumPy arrays"),
    (b"PK\3\4", r".*\.keras", "is a model of Keras"),
    (b"", r".*\.(data-[0-9]{5}-of-[0-9]{5}|ckpt[-.0-9]*\.(index|meta))", "is a part of a checkpoint of TensorFlow"),
    (b"", r"saved_model\.pb", "is a saved model of TensorFlow"),
    (b"", r".*\.msgpack", "is a file of Flax"),
    (b"", r".*\.(onnx|tflite)", "is a graph for inference, without training state"),
)
"""First bytes and name of a file of another program, and what it is, where no format claims it."""

_DIRECTORIES = (
    (r"_CHECKPOINT_METADATA|manifest\.ocdbt|_METADATA", "is a checkpoint of Orbax (JAX)"),
    (r"saved_model\.pb", "is a saved model of TensorFlow"),
    (r".+\.data-[0-9]{5}-of-[0-9]{5}", "is a checkpoint of TensorFlow"),
    (r"mp_rank_[0-9]{2}(_[0-9]{3})*/(model_rng|distrib_optim)\.pt", "is a checkpoint of Megatron-LM"),
    (r"(model/)?pp_[0-9]{2}", "is a checkpoint of fairseq2"),
    (r"rank_[0-9]+\.safetensors", "is a checkpoint of Fast-LLM"),
    (r"model-rank-[0-9]+-part-[0-9]+\.safetensors", "is a sharded state of vLLM's or SGLang's engine"),
    (r"class_and_ctor_args\.pkl", "is a checkpoint of RLlib"),
    (r"vocab/strings\.json", "is a pipeline of spaCy"),
    (r".+\.gguf", "holds GGUF files of llama.cpp"),
    (r".+\.npz", "holds archives of NumPy arrays"),
    (r"flax_model.*\.msgpack", "is a model of Flax"),
)
"""Names in a directory of another program, and what it is, where no format claims that."""


def settle(
    path: Path,
    misses: Sequence[NearMiss],
    broken: Sequence[BrokenPluginError],
    unsure: tuple[Format, Found] | None,
) -> tuple[Format, Found]:
    """Return the format that is to read a source of which none is sure, or raise the error for one that none reads.

    Parameters
    ----------
    path : Path
    misses : sequence of NearMiss
        What formats have seen in it.
    broken : sequence of BrokenPluginError
        Formats that could not be asked.
    unsure : (Format, Found) or None
        The format that would try; None: there is not even one.

    Raises
    ------
    SourceError
        No format reads it.
    """
    if path.is_dir():
        if unsure is not None:
            return unsure
        found = next(iter(misses), None) or _of_others(path)
    else:
        claimed = unsure is not None and unsure[0].name != TRIED_LAST
        found = pointer(path) or next(iter(misses), None) or (None if claimed else _of_other(path))
        if found is None and unsure is not None and not broken:
            return unsure
    error: SourceError = found.error(path) if found is not None else _unknown(path)
    if path.is_dir():
        error.advice = error.advice or _inside(path)
    if broken:
        error.advice = "; ".join([*([error.advice] if error.advice else []), *map(str, broken)])
    raise error


def explained(error: SourceError, search: Search, misses: Sequence[NearMiss], by: Format) -> SourceError:
    """Return the error that a format's `read` stopped at, or one that says better what the file is."""
    at = Path(error.path) if error.path is not None else None
    found = pointer(at) if at is not None and is_file(at) else None
    if found is not None and at is not None:
        return found.error(at)
    if at != search.path or at is None or at.is_dir():
        return error
    is_other = by.name == TRIED_LAST and (isinstance(error, UnknownFormatError) or is_archive(at))
    found = _of_other(at) if is_other else None
    if found is not None:
        return found.error(at)
    if misses:
        error.advice = f"it {misses[0].message}" + (f": {misses[0].advice}" if misses[0].advice else "")
    return error


def meant(path: Path) -> str | None:
    """Say what may be meant by a path that is not there: something of a near name, or a model of a hub."""
    lost = next(filter(None, map(_lost, (path, *path.parents))), None)
    if lost is not None:
        return lost
    above = next((one for one in path.parents if one.is_dir()), None)
    if above == path.parent:
        near = get_close_matches(path.name, [entry.name for entry in _entries(above)], n=1)
        if near:
            return f"did you mean {above / near[0]}?"
    if _HUB.fullmatch(str(path)):
        return f"if it is a model of the Hugging Face Hub, download it first: hf download {path}"
    if above is None or above == path.parent or above == Path("/"):
        return None
    return f"{above} exists, but not {path.relative_to(above).parts[0]} in it"


def _lost(path: Path) -> str | None:
    """Tell a link to something that is not there."""
    is_lost = path.is_symlink() and not path.exists()
    return f"{path} is a link to {path.readlink()}, which is not there" if is_lost else None


def pointer(path: Path) -> NearMiss | None:
    """Tell a file in whose place git-lfs has left a pointer."""
    if _head(path).startswith(LFS):
        return NearMiss("is a git-lfs pointer, not the file itself", "run `git lfs pull`")
    return None


def _of_other(path: Path) -> NearMiss | None:
    """Tell a file of another program."""
    head = _head(path)
    if path.name in latest_of(path.parent):
        return NearMiss("only names the latest checkpoint", f"give its directory, {path.parent}")
    if is_archive(path):
        return NearMiss("is an archive", "unpack it, and give its contents")
    for first, name, what in _FILES:
        if head.startswith(first) and (not name or re.fullmatch(name, path.name)):
            return NearMiss(f"{what}, which zckpt does not read", TO_HUGGING_FACE, intact=True)
    return None


def is_archive(path: Path) -> bool:
    """Tell a file that others are packed in, by its first bytes; a zip, which torch writes too, by its name."""
    head = _head(path)
    return head.startswith(ARCHIVES) or head[TAR_OFFSET:].startswith(b"ustar") or (
        head.startswith(b"PK\3\4") and path.suffix.lower() == ".zip"
    )  # fmt: skip


def _of_others(path: Path) -> NearMiss | None:
    """Tell a patch, or a directory of another program, by the names of what is in it and in its folders."""
    if is_store(path, PATCH):
        return NearMiss(
            f"is a {PATCH}", f"`zckpt apply A {path.name} TARGET` makes a checkpoint of it and A", intact=True
        )
    names: list[str] = []  # of files, and of folders' files
    for entry in _entries(path):
        names.append(entry.name)
        if entry.is_dir(follow_symlinks=False):
            names += [f"{entry.name}/{one.name}" for one in _entries(Path(entry.path))]
    for name, what in _DIRECTORIES:
        if any(re.fullmatch(name, one) for one in names):
            return NearMiss(f"{what}, which zckpt does not read", TO_HUGGING_FACE, intact=True)
    pointers = [name for name in names if "/" not in name and pointer(path / name)]
    if pointers:
        return NearMiss(f"holds git-lfs pointers, such as {pointers[0]}, not the files", "run `git lfs pull`")
    lost = next(filter(None, (_lost(path / name) for name in names if "/" not in name)), None)
    if lost is not None:
        return NearMiss(f"is not whole: {lost}", "copy the files that links lead to, too, as `cp -rL` does")
    return None


def _entries(path: Path) -> list[os.DirEntry[str]]:
    return entries_of(path, lenient=True)[:MAXIMUM_FOLDERS]


def _unknown(path: Path) -> SourceError:
    if not path.is_dir():
        expected = "a file of torch.save or safetensors"
        return UnknownFormatError("not recognised as a checkpoint", path=path, expected=expected)
    names = [entry.name for entry in _entries(path)]
    return UnknownFormatError(
        "not recognised as a checkpoint",
        path=path,
        expected="one of the formats that `zckpt formats` lists",
        found=listed(names, most=SHOWN_NAMES) or "nothing",
    )


def _inside(path: Path) -> str | None:
    """Name the latest checkpoint below, as in a run's or a Trainer's output directory; else a file of torch's.

    What the file is said to be where it is given itself is more.
    """
    inside = [one for one in units(path, depth=BELOW, files=False) if one.opened != path]
    said = latest_of(path).values()
    named = [one for one in inside if any(is_named(one.path, path, text) for text in said)]
    latest = max(named or inside, key=lambda one: (one.number is not None, numbered(one.path.name)), default=None)
    if latest is not None:
        return f"did you mean {latest.opened}?"
    names = [one.name for one in _entries(path) if one.name.endswith((".pt", ".pth", ".bin", ".ckpt"))]
    files = (path / name for name in sorted(names, key=lambda name: "optim" in name))  # a model's, if there is one
    return next((f"give one of its files, such as {one}" for one in files if _head(one).startswith(b"PK\3\4")), None)


def tags_in(path: Path) -> list[str] | None:
    """Return the folders of a directory that a tag may name, whatever format they are of, as they were saved.

    None: it has none, and is no checkpoint of a format that has tags.
    """
    names = [entry.name for entry in _entries(path) if leads_to_folder(entry)]
    tags = sorted((name for name in names if _takes(Search(path, tag=name))), key=numbered)
    return tags if tags or _takes(Search(path)) else None


def _takes(search: Search) -> bool:
    """Tell whether a format that has tags recognises something."""
    takers = (one for one in formats() if one.name in BUILT_IN and TAG in one.takes)
    try:
        return any(isinstance(one.find(search), Found) for one in takers)
    except SourceError:
        return True


def _head(path: Path) -> bytes:
    try:
        return read_head(str(path), HEAD_NBYTES) if is_file(path) else b""
    except SourceError:
        return b""
