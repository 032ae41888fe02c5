"""One adapter for each format on disk, and `open_checkpoint`, which tells them apart.

An adapter detects its format, reads its structure into a Checkpoint, and lays out target files. It never copies
tensor bytes.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from zckpt.errors import SourceError, UnknownFormatError, UsageError
from zckpt.formats import deepspeed, universal
from zckpt.state import Checkpoint
from zckpt.state.names import bare
from zckpt.storage.durable import interrupted

OWN_DOCUMENT = "checkpoint.json"
"""What tells zckpt's own format, whose modules are not loaded to look for it."""


def open_checkpoint(
    source: str | os.PathLike[str],
    *,
    roots: Sequence[str | os.PathLike[str]] = (),
    tag: str | None = None,
    names: Sequence[str] | None = None,
    tp_rules: str | os.PathLike[str] | None = None,
) -> Checkpoint:
    """Open a checkpoint of any format zckpt reads. Reads its structure only, and runs nothing of it.

    Tensors have the names of the bare model, without what wrappers put there; see `zckpt.state.names`.

    Parameters
    ----------
    source : path-like
        A file, or a directory: of a run, of one tag, or of a wrapper that contains one.
    roots : sequence of path-like
        The same directory on other nodes, where shards were left on the node that wrote them.
    tag : str, optional
        Which checkpoint of a run directory; by default the one that `latest` names.
    names : sequence of str, optional
        Names of the optimizer's parameters in its order, for files that only number them.
    tp_rules : path-like, optional
        A JSON file with the rules for DeepSpeed's tensor-parallel slices; by default the checkpoint's own.

    Returns
    -------
    Checkpoint

    Raises
    ------
    SourceError
        The source cannot be read, is damaged, or no adapter recognises it.
    """
    path = Path(source)
    checkpoint = bare(_open(path, roots=roots, tag=tag, names=names, tp_rules=tp_rules))
    checkpoint.opened, checkpoint.roots = str(path), tuple(map(str, roots))
    checkpoint.given_names = None if names is None else tuple(names)
    if path.is_dir() and checkpoint.format != "zckpt":  # of whose directory every file is listed
        from zckpt.formats.beside import read_beside

        read_beside(checkpoint, path)
    return checkpoint


def _open(
    path: Path,
    *,
    roots: Sequence[str | os.PathLike[str]],
    tag: str | None,
    names: Sequence[str] | None,
    tp_rules: str | os.PathLike[str] | None,
) -> Checkpoint:
    """Open a checkpoint under the names that its files have."""
    try:
        path.stat()
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", str(error))
        raise SourceError("cannot be opened", path=path, found=why, advice=interrupted(path)) from error
    return _read(path, roots, tag, names, tp_rules)


def is_checkpoint(path: Path) -> bool:
    """Tell by its names whether a directory holds a checkpoint of its own."""
    from zckpt.formats import consolidated, dcp, native, safetensors_file

    try:
        return (
            deepspeed.find(path) is not None
            or universal.find(path) is not None
            or native.is_native(path)
            or dcp.find(path) is not None
            or consolidated.find(path) is not None
            or safetensors_file.is_safetensors(path)
        )
    except SourceError:
        return True  # a damaged one


def _read(
    path: Path,
    roots: Sequence[str | os.PathLike[str]],
    tag: str | None,
    names: Sequence[str] | None,
    tp_rules: str | os.PathLike[str] | None,
) -> Checkpoint:
    only_deepspeed = bool(roots) or tag is not None or tp_rules is not None
    inside = _own_of_run(path, tag) if path.is_dir() and not roots and tp_rules is None else None
    if inside is not None:
        from zckpt.formats import native

        return native.read(inside, names=names)
    if path.is_dir():
        found = universal.find(path, tag=tag) if not roots else None
        if found is not None:  # it has a model file as a tag directory has, so it is asked for first
            return universal.read(found)
        directory = deepspeed.find(path, roots=[Path(root) for root in roots], tag=tag)
        if directory is not None:
            return deepspeed.read(directory, names=names, tp_rules=None if tp_rules is None else Path(tp_rules))
    if only_deepspeed:
        raise UsageError("is no DeepSpeed directory, so --root, --tag and --tp-rules do not apply", path=path)
    from zckpt.formats import safetensors_file, torch_file

    checkpoint = _open_directory(path, names) if path.is_dir() else None
    if checkpoint is not None:
        return checkpoint
    if safetensors_file.is_safetensors(path):
        return _warned(_read_safetensors(path), path)
    if path.is_dir():
        raise UnknownFormatError(
            "no checkpoint recognised",
            path=path,
            expected="a directory of DeepSpeed, torch DCP, ZeroRedundancyOptimizer, safetensors or zckpt",
            found=_content(path),
            advice=_advice(path),
        )
    return _warned(torch_file.read(path, names=names), path)


def _warned(checkpoint: Checkpoint, path: Path) -> Checkpoint:
    """Return a checkpoint with a warning if what is beside its file is not there yet."""
    told = interrupted(path)
    checkpoint.warnings += [told] if told else []
    return checkpoint


def _read_safetensors(path: Path) -> Checkpoint:
    """Read a file, or a directory and the optimizer that `consolidate` has put into it."""
    from zckpt.formats import safetensors_file
    from zckpt.formats.optimizer_file import IN_DIRECTORY, attach_optimizer

    checkpoint = safetensors_file.read(path)
    optimizer = path / IN_DIRECTORY
    if path.is_dir() and optimizer.is_file():
        attach_optimizer(checkpoint, optimizer)
    return checkpoint


def _open_directory(path: Path, names: Sequence[str] | None) -> Checkpoint | None:
    """Open a directory of a format that has marks of its own; None where there are none."""
    from zckpt.formats import consolidated, dcp, native, safetensors_shards, zero_redundancy

    if native.is_native(path):
        return native.read(path, names=names)
    if safetensors_shards.is_sharded(path):
        return safetensors_shards.read(path)
    readers = (
        (dcp.find, dcp.read),
        (consolidated.find, consolidated.read),
        (zero_redundancy.find, zero_redundancy.read),
    )
    return next((read(path, names=names) for find, read in readers if find(path) is not None), None)


def _own_of_run(path: Path, tag: str | None) -> Path | None:
    """Return the checkpoint of zckpt's own that a run's directory has under a name, by default the latest."""
    name = tag or deepspeed.latest_name(path) or ""
    try:
        is_own = name not in ("", ".", "..") and Path(name).name == name and (path / name / OWN_DOCUMENT).is_file()
    except OSError:  # a name too long to be one
        return None
    return path / name if is_own else None


def _content(path: Path) -> str:
    names = sorted(entry.name for entry in os.scandir(path))
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "") or "nothing"


def _advice(path: Path) -> str | None:
    """Name a checkpoint one level down, where a Trainer's output directory has them."""
    inside = sorted(
        (e.name for e in os.scandir(path) if e.is_dir() and (Path(e.path) / "latest").is_file()),
        key=lambda name: (len(name), name),
    )
    return f"did you mean {path / inside[-1]}?" if inside else None
