"""Names by regular expressions, globs and prefixes; each must find something, and no two names may become one. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from zckpt.errors import UsageError, listed
from zckpt.state import Checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Renaming:
    """What is done to names, in this order.

    Parameters
    ----------
    strip_prefix : str or None
        Taken off the names that have it.
    rename : tuple of (str, str)
        Regular expressions and what each becomes wherever it is found. With `*` in what it becomes, a glob of whole
        names instead: each `*` there is what that of the glob finds, in turn.
    add_prefix : str or None
        Put before all names.
    """

    strip_prefix: str | None = None
    rename: tuple[tuple[str, str], ...] = ()
    add_prefix: str | None = None

    def of(self, checkpoint: Checkpoint, idle: set[str] | None = None) -> dict[str, str]:
        """Return the new name of each tensor, by its old one.

        Parameters
        ----------
        checkpoint : Checkpoint
        idle : set of str, optional
            Gets the options that find no name; without, they are refused.

        Raises
        ------
        UsageError
            Something finds no name, is no regular expression, or makes two names one.
        """
        names = {name: name for name in names_of(checkpoint)}
        if self.strip_prefix:
            option = f"--strip-prefix {self.strip_prefix}"
            names = _found(names, _without(names, self.strip_prefix), option, checkpoint, idle)
        for old, new in self.rename:
            names = _found(names, _replaced(names, old, new), f"--rename {old}={new}", checkpoint, idle)
        if self.add_prefix:
            names = {name: f"{self.add_prefix}{one}" for name, one in names.items()}
        return names


def names_of(checkpoint: Checkpoint) -> list[str]:
    """Return the names of all tensors, and those by which an optimizer calls others; numbers are no names."""
    groups = (name for group in checkpoint.param_groups for name in group.parameters)
    every = dict.fromkeys([*checkpoint.parameters, *checkpoint.buffers, *checkpoint.unnamed, *groups])
    return [name for name in every if not (name.isdecimal() and name not in checkpoint.parameters)]


def _without(names: dict[str, str], prefix: str) -> dict[str, str] | None:
    if not any(one.startswith(prefix) for one in names.values()):
        return None
    return {name: one.removeprefix(prefix) for name, one in names.items()}


def _replaced(names: dict[str, str], old: str, new: str) -> dict[str, str] | None:
    if "*" in new:
        old, new = _of_glob(old, new)
    try:
        pattern = re.compile(old)
        if not any(pattern.search(one) for one in names.values()):
            return None
        return {name: pattern.sub(new, one) for name, one in names.items()}
    except (re.error, IndexError) as error:
        raise UsageError(
            "--rename is no regular expression", expected="OLD=NEW", found=f"{old}={new}: {error}"
        ) from None


def _of_glob(old: str, new: str) -> tuple[str, str]:
    """Return a glob of whole names, and names with as many `*`, as a regular expression and what it becomes."""
    if old.count("*") != new.count("*"):
        raise UsageError("--rename has `*` in NEW, which OLD must have as often", found=f"{old}={new}")
    pieces = new.replace("\\", r"\\").split("*")
    groups = [rf"\g<{number}>" for number in range(1, len(pieces))]
    pattern = "(.*?)".join(map(re.escape, old.split("*")))
    return rf"\A{pattern}\Z", "".join(map("".join, zip(pieces, [*groups, ""], strict=True)))


def _found(
    before: dict[str, str],
    after: dict[str, str] | None,
    option: str,
    checkpoint: Checkpoint,
    idle: set[str] | None,
) -> dict[str, str]:
    """Return names after an option was applied, if it found some and left them different."""
    if after is None:
        if idle is not None:
            idle.add(option)
            return before
        raise UsageError(
            f"{option} finds no name",
            path=checkpoint.opened or checkpoint.source,
            found=listed(list(before.values())) or "no names",
        )
    check_different(after, option)
    return after


def check_different(names: dict[str, str], option: str) -> None:
    """Raise UsageError if two tensors would have one name, or one would have none."""
    seen: dict[str, str] = {}
    for name, one in names.items():
        if not one:
            raise UsageError(f"{option} leaves nothing of {name}", advice="narrow it")
        if one in seen:
            raise UsageError(f"{option} makes {seen[one]} and {name} one", found=one, advice="narrow it")
        seen[one] = name


def parsed(texts: Iterable[str]) -> list[tuple[str, str]]:
    """Return what `OLD=NEW` texts say; the last equals sign counts, for a pattern may have some.

    Raises
    ------
    UsageError
        One is not of this form.
    """
    found = []
    for text in texts:
        old, mark, new = text.rpartition("=")
        if not old or not mark:
            raise UsageError("--rename cannot be used", expected="OLD=NEW", found=text)
        found.append((old, new))
    return found
