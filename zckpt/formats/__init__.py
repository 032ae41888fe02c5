"""One adapter for each format on disk, and `open_checkpoint`, which asks them whose a path is.

An adapter implements `format.Format`: it finds its checkpoints, reads their structure into a Checkpoint, and lays out
target files. It never copies tensor bytes. `registry` lists them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from zckpt.codes import MISSING_FILE
from zckpt.errors import SourceError, UnknownFormatError, UsageError, about, listed
from zckpt.formats.format import Format, Found, NearMiss, Search
from zckpt.formats.registry import TRIED_LAST, BrokenPluginError, formats
from zckpt.storage.files import by_name, collector_paused
from zckpt.storage.nodes import on_nodes

if TYPE_CHECKING:
    from zckpt.state import Checkpoint

SHOWN = 8
"""Of the tags of a run in a message."""

UNSALVAGED = (
    "--salvage does not do without it, as it does without files of ZeRO's and FSDP's ranks, of DCP, of a universal "
    "checkpoint's parameters, of zckpt's own ranks, and shards of safetensors"
)

__all__ = ["is_checkpoint", "open_checkpoint", "recognise"]


@collector_paused()
def open_checkpoint(
    source: str | os.PathLike[str],
    *,
    roots: Sequence[str | os.PathLike[str]] = (),
    tag: str | None = None,
    names: Sequence[str] | None = None,
    tp_rules: str | os.PathLike[str] | None = None,
    salvage: bool = False,
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
        Names of the optimizer's parameters in its order, for files that only number them; of safetensors, those of the
        model's parameters in its order, which the files do not have.
    tp_rules : path-like, optional
        A JSON file with the rules for DeepSpeed's tensor-parallel slices; by default the checkpoint's own.
    salvage : bool
        Open what is left where files are lost: `Checkpoint.lost`, `Slot.lost`.

    Returns
    -------
    Checkpoint

    Raises
    ------
    SourceError
        The source cannot be read, is damaged, or no format recognises it.
    """
    from zckpt.formats.lost import salvaging, settle
    from zckpt.state.names import aligned, bare

    path = by_name(source)
    if isinstance(names, str):
        raise UsageError("names is a text", expected="a list of names", advice="give the lines of its file")
    if names is not None:
        names = [*names] if isinstance(names, Iterable) else [names]
        if not all(isinstance(one, str) for one in names):
            raise UsageError("unusable --names", expected="a list of names", found=repr(names))
    if isinstance(roots, str | os.PathLike):
        roots = [roots]
    rules = None if tp_rules is None else Path(tp_rules)
    search = Search(path, tuple(Path(root) for root in roots), tag, rules, names)
    try:
        path.stat()
    except (OSError, ValueError) as error:
        from zckpt.formats.near import meant
        from zckpt.storage.durable import interrupted

        why, advice = getattr(error, "strerror", str(error)), interrupted(path) or meant(path)
        raise SourceError("cannot be opened", path=path, found=why, advice=advice) from error
    misses: list[NearMiss] = []
    with salvaging(wanted=salvage) as lost, on_nodes(path, search.roots):
        found_by, found = recognise(search, misses)
        place = found.place if isinstance(found.place, Path) else getattr(found.place, "path", path)
        try:
            with about(place):
                checkpoint = bare(found_by.read(found, search))
        except SourceError as error:
            from zckpt.formats.near import explained

            if salvage and error.code == MISSING_FILE:
                error.advice = UNSALVAGED
            raise explained(error, search, misses, found_by) from error.__cause__
    settle(checkpoint, lost)
    checkpoint.opened, checkpoint.roots = str(path), tuple(map(str, roots))
    checkpoint.given_names = None if names is None else tuple(names)
    if names is not None and not (checkpoint.is_numbered or checkpoint.unnamed):
        from zckpt.evidence import note_not_used

        is_said = any("--names" in one for one in checkpoint.warnings)
        if not is_said and len(aligned([*checkpoint.names, *checkpoint.grouped], names)) < len({*names}):
            note_not_used(checkpoint, names, "the files have")
    if path.is_dir() and not found_by.lists_files:
        from zckpt.formats.account.values import carry_values
        from zckpt.formats.companions import read_companions

        read_companions(checkpoint, path, search.roots)
        carry_values(checkpoint)
    return checkpoint


def recognise(search: Search, misses: list[NearMiss]) -> tuple[Format, Found]:
    """Return the format that a source is of, and what it found."""
    unsure: tuple[Format, Found] | None = None
    broken: list[BrokenPluginError] = []
    for one in formats(broken):
        if not search.given <= one.takes:
            continue
        answer = one.find(search)
        if isinstance(answer, NearMiss):
            misses.append(answer)
        elif answer is not None and answer.sure:
            return one, answer
        elif answer is not None and (unsure is None or unsure[0].name == TRIED_LAST):
            unsure = one, answer
    from zckpt.formats.near import settle, tags_in

    if search.tag is not None and (tags := tags_in(search.path)) is not None:
        found_tags = listed(tags, most=SHOWN) or "one checkpoint, which has no tags"
        expected = f"a directory {search.tag}"
        raise UnknownFormatError("no such tag", path=search.path, expected=expected, found=found_tags)
    if search.given:
        takers = [one.title for one in formats() if search.given <= one.takes]
        given = ", ".join(f"--{'root' if name == 'roots' else name.replace('_', '-')}" for name in sorted(search.given))
        raise UsageError(f"{given}: only applies to a directory of {' or '.join(takers)}", path=search.path)
    return settle(search.path, misses, broken, unsure)


def is_checkpoint(path: Path) -> bool:
    """Tell by its names whether a directory holds a checkpoint of its own, be it a damaged one."""
    return any(one.is_checkpoint(path) for one in formats())
