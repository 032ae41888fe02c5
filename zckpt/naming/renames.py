"""Names by regular expressions, globs and prefixes; each must find something, and no two names may become one. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable

from zckpt.errors import UsageError, listed
from zckpt.state import Checkpoint


def new_names(
    checkpoint: Checkpoint, idle: set[str] | None, *, strip_prefix: str | None, rename: Iterable[tuple[str, str]]
) -> dict[str, str]:
    """Return the new name of each tensor, by its old one.

    Regular expressions become what is beside them wherever they are in a name. With `*` in that, they are globs of
    whole names: each `*` there is what that of the glob finds, in turn. `idle` gets the options that find no name;
    without, they are refused. Raises UsageError: something finds no name, is no regular expression, or makes two names
    one.
    """
    names = {name: name for name in names_of(checkpoint)}
    options = [(f"--strip-prefix {strip_prefix}", rf"\A{re.escape(strip_prefix)}", "")] if strip_prefix else []
    for one in rename:
        match one:
            case (str(old), str(new)):  # of a text, which has no such case, two letters would be taken
                pattern, becomes = old, new
            case _:
                raise UsageError("unusable --rename", expected="pairs, [(OLD, NEW), ...]", found=repr(rename))
        if "*" in new:
            if old.count("*") != new.count("*"):
                raise UsageError("--rename needs as many `*` in OLD as in NEW", found=f"{old}={new}")
            pieces = new.replace("\\", r"\\").split("*")
            groups = [rf"\g<{number}>" for number in range(1, len(pieces))]
            pattern = rf"\A{'(.*?)'.join(map(re.escape, old.split('*')))}\Z"
            becomes = "".join(map("".join, zip(pieces, [*groups, ""], strict=True)))
        options.append((f"--rename {old}={new}", pattern, becomes))
    for option, old, new in options:
        try:
            compiled = re.compile(old)
            found = any(compiled.search(one) for one in names.values())
            after = {name: compiled.sub(new, one) for name, one in names.items()} if found else names
        except (re.error, IndexError) as error:
            said = option.removeprefix("--rename ")
            raise UsageError(
                "--rename has an invalid regular expression", expected="OLD=NEW", found=f"{said}: {error}"
            ) from None
        if found:
            check_different(after, option)
        elif idle is not None:
            idle.add(option)
        else:
            raise UsageError(
                f"{option} matches no name",
                path=checkpoint.named,
                found=listed(list(names.values())) or "no names",
            )
        names = after
    return names


def names_of(checkpoint: Checkpoint) -> list[str]:
    """Return the names of all tensors, and those by which an optimizer calls others; numbers are no names."""
    groups = checkpoint.grouped
    every = dict.fromkeys([*checkpoint.parameters, *checkpoint.buffers, *checkpoint.unnamed, *groups])
    return [name for name in every if not (name.isdecimal() and name not in checkpoint.parameters)]


def check_different(names: dict[str, str], option: str) -> None:
    """Raise UsageError if two tensors would have one name, or one would have none."""
    seen: dict[str, str] = {}
    for name, one in names.items():
        if not one:
            raise UsageError(f"{option} would make {name} empty", advice="make it more specific")
        if one in seen:
            raise UsageError(
                f"{option} would give {seen[one]} and {name} the same name", found=one, advice="make it more specific"
            )
        seen[one] = name


def parsed(texts: Iterable[str]) -> list[tuple[str, str]]:
    """Return what `OLD=NEW` texts say; the last equals sign counts, for a pattern may have some. Others: UsageError."""
    found = []
    for text in texts:
        old, mark, new = text.rpartition("=")
        if not old or not mark:
            raise UsageError("unusable --rename", expected="OLD=NEW", found=text)
        found.append((old, new))
    return found
