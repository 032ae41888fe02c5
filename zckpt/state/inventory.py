"""What became of everything that a checkpoint's files hold: the terms of the account, data only.

A file is a tree: of objects in a torch file, of named tensors in a safetensors file or a DCP item. Every file below the
directory that was opened, every record of an archive and every leaf of each tree has exactly one fate:

    state      of the logical state: elements of a slot, or a value of a parameter or a param group
    carried    goes along as it is, under a key of the checkpoint's metadata
    copy       a further copy of something that is read, which `verify --deep` holds against it
    implied    follows from the rest, or means nothing by itself: padding, indexes, slice mappings, checksums
    foreign    not of the checkpoint, by a rule that has a name: a tokenizer, notes, another checkpoint
    left out   none of these: no one has said what it is

An adapter says what it knows with `Rule` and `Claim`; who takes the inventory crosses that off, see `formats.account`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import field
from fnmatch import fnmatchcase

from zckpt.errors import SourceError
from zckpt.immutable import immutable, mutable
from zckpt.state.brief import values_of

STATE = "state"
CARRIED = "carried"
COPY = "copy"
IMPLIED = "implied"
FOREIGN = "foreign"
LEFT_OUT = "left out"
UNNAMED_STATE = "of which parameter it is the optimizer's state is uncertain"
"""Why what is no part of the model is left out as a whole; the model is known without it."""

FATES = (STATE, CARRIED, COPY, IMPLIED, FOREIGN, LEFT_OUT)

FILE, RECORD, TENSOR, VALUE = "file", "record", "tensor", "value"
KINDS = (FILE, RECORD, TENSOR, VALUE)

ANY = "*"
NUMBER = "#"
REST = "**"

EXACTLY = "\0"
"""What a step of a rule begins with that is a key which looks like one of these."""


def exactly(key: object) -> str:
    """Return a key of a file as the step of a rule, whatever it looks like."""
    step = str(key)
    return EXACTLY + step if step in (ANY, NUMBER, REST) or step.startswith(EXACTLY) else step


@immutable
class Rule:
    """What the values at some steps of a file's tree are. It never speaks for tensors with elements: their bytes do.

    Parameters
    ----------
    pattern : tuple of str
        Steps from the root, keys and indices as text; `*` is any step, `#` any number, a last `**` everything from
        there on.
    fate : {"state", "carried", "copy", "implied"}
        Of a value that is said to be state the last step has to be a key of some parameter or param group.
    about : str
        What it is, in a few words.
    tensors : bool
        Whether it speaks for tensors, too: copies of what another rank's file has, found equal.

    Examples
    --------
    Of a file `{"version": 2, "layout": {...}, "state": {0: {"step": 3, "exp_avg": tensor}}}`, whose `exp_avg` is a slot
    and whose `step` is in `Parameter.state`:

    >>> Rule(("version",), "implied", "the version of the layout"), Rule(("layout", "**"), "implied", "offsets")
    >>> Rule(("state", "#", "*"), "state", "single values of a parameter")
    """

    pattern: tuple[str, ...]
    fate: str
    about: str
    tensors: bool = False


@immutable
class Claim:
    """What a file as a whole is, where no tree of it is looked through."""

    fate: str  # {"state", "copy", "implied", "foreign"}
    about: str


@immutable
class Item:
    """One thing that has a fate, or several of one file that have it for the same reason."""

    file: str  # within the directory that was opened; else the whole path
    place: str  # in the file's tree, steps joined by slashes, of the first one; empty for the file itself
    kind: str  # {"file", "record", "tensor", "value"}
    fate: str  # one of `FATES`
    about: str  # which slots, under which key, by which rule, or for what reason
    nbytes: int = 0  # of tensors' elements, of a record, or of a file that is not looked into
    count: int = 1  # how many there are
    trained: bool = False  # whether it is, as far as anyone can tell, state of a model or of an optimizer
    error: SourceError | None = None  # why it could not be read, where a file is left out because of that

    @property
    def name(self) -> str:
        """What a pattern of the user's names it by: `FILE`, or `FILE:PLACE`."""
        return f"{self.file}:{self.place}" if self.place else self.file

    def is_named(self, patterns: Iterable[str]) -> bool:
        """Tell whether a pattern names it, its file, or its place: shell wildcards, which match slashes too."""
        names = {self.name, self.file, self.place or self.file}
        return any(name == pattern or fnmatchcase(name, pattern) for pattern in patterns for name in names)

    def as_dict(self) -> dict[str, object]:
        """Return it as JSON-able data."""
        return values_of(self, ("file", "place", "kind", "fate", "about", "nbytes", "count"))


@mutable
class Inventory:
    """Everything that the files of a checkpoint hold, and what became of it."""

    items: list[Item] = field(default_factory=list)  # what is left out is listed one by one
    nbytes: dict[str, dict[str, int]] = field(default_factory=dict)
    """Bytes; by file and fate, of every file that was looked into: together the size of the file. What a format itself
    needs (headers, pickles, alignment) is implied.
    """

    @property
    def left_out(self) -> list[Item]:
        """What no one has claimed."""
        return list(self.of(LEFT_OUT))

    def of(self, fate: str) -> Iterator[Item]:
        """Yield the items of one fate."""
        return (item for item in self.items if item.fate == fate)

    def without(self, patterns: Sequence[str]) -> tuple[list[Item], list[Item], list[str]]:
        """Return what is left out and named by a pattern, what is left out and not, and patterns that name nothing."""
        dropped = [item for item in self.left_out if item.is_named(patterns)]
        others = [item for item in self.left_out if not item.is_named(patterns)]
        idle = [pattern for pattern in patterns if not any(item.is_named([pattern]) for item in dropped)]
        return dropped, others, idle

    def as_dict(self) -> dict[str, object]:
        """Return it as JSON-able data."""
        return {"items": [item.as_dict() for item in self.items], "nbytes": self.nbytes}
