"""What a format leaves to choose of a target: the fields of a frozen dataclass, from which all else is derived.

    @immutable
    class Options:
        world_size: int = option("Files to spread it over.", 1, metavar="N")

`convert --help`, the checks of `zckpt.convert`'s keywords, and `zckpt formats` come from such fields.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Any, get_args, get_type_hints

from zckpt.errors import UsageError
from zckpt.immutable import immutable


@immutable
class Option:
    """What a format leaves to choose.

    Parameters
    ----------
    name : str
        As a keyword in Python; on the command line with hyphens.
    kind : type
        int, bool or str.
    default : object
        None: decided by the format, as `help` says.
    help : str
        One line.
    choices : tuple
        All values there are; empty: any.
    opposite : str
        Of a bool: what the command line calls False.
    metavar : str or None
    """

    name: str
    kind: type
    default: object
    help: str
    choices: tuple[object, ...] = ()
    opposite: str = ""
    metavar: str | None = None

    @property
    def flag(self) -> str:
        """The option on the command line, without its hyphens."""
        return self.name.replace("_", "-")


def option(
    help: str,  # noqa: A002
    default: object = None,
    *,
    choices: Sequence[object] = (),
    opposite: str = "",
    metavar: str | None = None,
) -> Any:  # noqa: ANN401  # a field, which stands where its value will
    """Return a field of a format's `options`. The arguments are those of `Option`; the annotation is its kind."""
    about = {"help": help, "choices": tuple(choices), "opposite": opposite, "metavar": metavar}
    return field(default=default, metadata=about)


DTYPES = ("float32", "bfloat16", "float16", "keep")


def dtype_option() -> Any:  # noqa: ANN401  # a field
    """Return the field of formats that have a whole model."""
    return option("Element type of trained parameters in the model.", "keep", choices=DTYPES)


def options_of(kind: type | None) -> list[Option]:
    """Return the options that a frozen dataclass of `option` fields has; of None, none."""
    if kind is None:
        return []
    kinds = get_type_hints(kind)
    return [
        Option(
            one.name, (*get_args(kinds[one.name]), kinds[one.name])[0], one.default, **one.metadata
        )  # of `int | None`
        for one in dataclasses.fields(kind)
    ]


def choose(kind: type | None, given: Mapping[str, object], what: str) -> Any:  # noqa: ANN401  # one of that dataclass
    """Return a format's options as they were given; what is None was not.

    Raises
    ------
    UsageError
        An option that does not apply to `what`, or a value that it cannot have.
    """
    known = {one.name: one for one in options_of(kind)}
    chosen = {
        name: os.fspath(value) if isinstance(value, os.PathLike) else value
        for name, value in given.items()
        if value is not None
    }
    for name, value in chosen.items():
        if name not in known:
            flags = ", ".join(f"--{one.flag}" for one in known.values())
            raise UsageError(f"--{name.replace('_', '-')} does not apply to {what}", expected=flags or "no option")
        one = known[name]
        if one.choices and value not in one.choices:
            raise UsageError(f"unusable --{one.flag}", expected=" or ".join(map(str, one.choices)), found=repr(value))
        if not isinstance(value, one.kind) or (one.kind is int and isinstance(value, bool)):
            raise UsageError(
                f"unusable --{one.flag}", expected=f"a value of type {one.kind.__name__}", found=repr(value)
            )
        if name == "world_size" and isinstance(value, int):
            from zckpt.state.partition import check_world_size

            check_world_size(value)
    return kind(**chosen) if kind is not None else None
