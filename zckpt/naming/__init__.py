"""Other names for the tensors of a checkpoint, and maps: two ways to name and arrange the same weights.

It knows nothing of files and of no program but by the documents in `shipped/`. A checkpoint comes in under the names of
its source and goes out under others; elements stay where they lie, and the planner copies them from there.

    renames     regular expressions, globs and prefixes
    document    a map, as JSON says it
    axes        how the elements of a tensor are arranged: "(heads half two) in"; which rows and layers are taken
    traced      the map of what the installed transformers does to a model's tensors when it saves them
    sizes       what the letters are, from the tensors' shapes and a configuration
    installed   the same from a process of its own, and names for an optimizer that numbers what was in memory
    apply       which rules of a map names follow, and in which direction; a checkpoint under the other names
    inside      names in what a checkpoint carries along
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import replace

from zckpt.errors import UsageError, about
from zckpt.immutable import immutable
from zckpt.naming.renames import names_of, new_names
from zckpt.state import Checkpoint
from zckpt.state.names import renamed

TRANSFORMERS = "transformers"
"""The name of the map of the installed one."""

MapSource = str | os.PathLike[str] | Mapping[str, object]
"""The name of a shipped map, `transformers` for that of the installed one, a JSON file, or what such a file holds."""

Config = str | os.PathLike[str] | Mapping[str, object]
"""A JSON file with the numbers of a model (`config.json`, `params.json`), a directory of such, or what it holds."""


@immutable
class Mapped:
    """What new names, or a map, make of a checkpoint."""

    checkpoint: Checkpoint
    notes: list[str]  # what to know of it
    side: int | None  # of the map, whose names it has
    names: dict[str, str]  # the new names of tensors that have nothing but another name, by their old ones


@immutable(kw_only=True)
class Naming:
    """What the user wants a checkpoint's tensors to be called, and how they are to be arranged.

    It is applied in this order: `strip_prefix`, `rename`, `map`, `add_prefix`.
    """

    rename: Sequence[tuple[str, str]] = ()
    """Regular expressions and what each becomes wherever it is found in a name, with groups; or, with `*` in both,
    globs of whole names.
    """
    strip_prefix: str | None = None  # taken off the names that have it; put before all
    add_prefix: str | None = None
    map: MapSource | None = None
    """A shipped map by its name, `transformers`, or a file. It goes in the direction that fits the names."""
    map_config: Config | None = None
    """Numbers that shapes do not tell (heads, groups of them); by default the source's own configuration."""

    def __post_init__(self) -> None:
        for flag, prefix in (("--strip-prefix", self.strip_prefix), ("--add-prefix", self.add_prefix)):
            if not isinstance(prefix, str | None):
                raise UsageError(f"unusable {flag}", expected="a text", found=repr(prefix))
        if not isinstance(self.rename, Sequence | Set | Iterator):
            raise UsageError("unusable --rename", expected="pairs, [(OLD, NEW), ...]", found=repr(self.rename))

    @property
    def changes(self) -> bool:
        """Whether it changes anything."""
        return bool(self.rename or self.strip_prefix or self.add_prefix or self.map is not None)

    def of(self, checkpoint: Checkpoint) -> tuple[Checkpoint, tuple[str, ...]]:
        """Return a checkpoint under its new names, and what to know about them.

        Parameters
        ----------
        checkpoint : Checkpoint
            Stays as it is, but for warnings that a map answers. Its inventory speaks of its own names: it is to be
            taken before.

        Raises
        ------
        UsageError
            A pattern finds nothing, or two tensors would have one name; or a map does not fit.
        UnsupportedError
            State that a map cannot arrange.
        SourceError
            Parts of one tensor have state that contradicts itself.
        """
        found = self.traced(checkpoint)
        return found.checkpoint, tuple(found.notes)

    def of_all(self, checkpoints: Sequence[Checkpoint]) -> tuple[list[Checkpoint], tuple[str, ...]]:
        """Return checkpoints of one model under the same names, where some may have them already.

        Each pattern must find something in one of them. The map goes in the direction that fits the first.

        `checkpoints`: stay as they are. Raises UsageError, UnsupportedError, SourceError: as for `of`.
        """
        made: list[Mapped] = []
        idles: list[set[str]] = []
        for checkpoint in checkpoints:
            idles.append(set())
            made.append(self.traced(checkpoint, idles[-1], made[-1].side if made else None))
        for option in sorted(set.intersection(*idles)) if idles else ():
            raise UsageError(
                f"{option} matches no name", path=checkpoints[0].named,
                expected="a name in any of the sources",
            )  # fmt: skip
        return [one.checkpoint for one in made], tuple(dict.fromkeys(note for one in made for note in one.notes))

    def traced(self, checkpoint: Checkpoint, idle: set[str] | None = None, side: int | None = None) -> Mapped:
        """Return what `of` does, and which tensors have nothing but another name; errors are its.

        `idle`: as for `new_names`; `side`: of the map, whose names are wanted.
        """
        if not self.changes:
            return Mapped(checkpoint, [], side, {name: name for name in checkpoint.names})
        changed = replace(checkpoint)
        names = new_names(changed, idle, strip_prefix=self.strip_prefix, rename=self.rename)
        renamed(changed, names)
        found = Mapped(changed, [], side, {name: name for name in names.values()})
        if self.map is not None:
            from zckpt.naming.apply import mapped
            from zckpt.naming.document import read_map
            from zckpt.naming.installed import by_transformers, transformers_map
            from zckpt.naming.sizes import arguments_of, check_settings, numbers_of, read_config

            config, where = read_config(self.map_config, changed)
            with about(changed.named):
                if self.map == TRANSFORMERS:
                    found = by_transformers(changed, transformers_map(config), side)
                else:
                    given, numbers = read_map(self.map), numbers_of(config)
                    for said in (config, arguments_of(changed)):
                        check_settings(given, said)
                    found = mapped(changed, given.numbered(numbers), numbers, side)
                    if where is not None and given.sizes and found.notes:
                        found.notes.append(f"the model's sizes are from {where}")
            changed = found.checkpoint
        last = {name: f"{self.add_prefix or ''}{name}" for name in names_of(changed)}
        renamed(changed, last)
        changed.origin, changed.wrapped = None, {}  # of names that are no longer so
        kept = {old: found.names[new] for old, new in names.items() if new in found.names}
        return replace(found, names={old: last[new] for old, new in kept.items() if new in last})


AS_IT_IS = Naming()
"""Changes nothing."""
