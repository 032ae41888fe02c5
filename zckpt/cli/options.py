"""Options that several verbs share, and how their values are read."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

from zckpt.cli.streams import json_text
from zckpt.errors import UsageError, without_controls
from zckpt.operations.options import Shared, options_of
from zckpt.storage.remote import is_url

Command = TypeVar("Command", bound=Callable[..., Any])

if TYPE_CHECKING:
    from zckpt.formats.options import Option
    from zckpt.operations.target import Written

    _IntegerType = click.ParamType[int]
else:
    _IntegerType = click.ParamType  # generic since click 8.2 only

MAXIMUM_NAMES_NBYTES = 1 << 26
"""Of a file of names: half a million of a hundred characters."""

_UNITS = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "ki": 2**10,
    "mi": 2**20,
    "gi": 2**30,
    "ti": 2**40,
}


class ByteSize(_IntegerType):
    """A number of bytes with an optional unit: 64MB, 5GB, 512MiB, 1000."""

    name = "size"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return the number of bytes."""
        if isinstance(value, int):
            return value
        match = re.fullmatch(r"(\d{1,18}(?:\.\d{1,18})?)\s*([kmgt]i?)?b?", str(value).strip().lower())
        if match is None or float(match[1]) <= 0:
            self.fail(f"{value!r} is no size; write it like 64MB or 5GiB", param, ctx)
        return int(float(match[1]) * _UNITS[match[2] or ""])


class Place(click.Path):
    """A path, or a URL, which stays as it is."""

    name = "place"

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(
        self, value: str | os.PathLike[str], param: click.Parameter | None, ctx: click.Context | None
    ) -> str | bytes | os.PathLike[str]:
        """Return a Path, or the text of a URL."""
        return value if is_url(value) else super().convert(value, param, ctx)


source_argument = click.argument("source", type=Place())
tied_option = click.option(
    "--tied",
    type=click.Choice(["duplicate", "drop"]),
    default="duplicate",
    show_default=True,
    help="Write a tied parameter under all its names, or its owner's only.",
)
max_shard_size_option = click.option(
    "--max-shard-size", type=ByteSize(), default="5GB", show_default=True, help="Largest file of a directory."
)
dequantize_option = click.option(
    "--dequantize",
    is_flag=True,
    help="Take quantised optimizer state (8-bit, 4-bit or fp8, of bitsandbytes or torchao) as floats.",
)
exclude_frozen_option = click.option("--exclude-frozen", is_flag=True, help="Leave frozen parameters out.")


def comma_separated(values: Iterable[str]) -> list[str]:
    """Return the names in values that have several each, `a,b`."""
    return [name for value in values for name in value.split(",") if name]


def _add(command: Command, options: Sequence[Callable[[Command], Command]]) -> Command:
    for option in reversed(options):
        command = option(command)
    return command


def takes(group: type, *, suffix: str = "") -> Callable[[Command], Command]:
    """Add the options of a group that verbs share; the command gets them as `shared`, for any verb's function.

    Parameters
    ----------
    group : type
        Of `operations/options.py`.
    suffix : str
        Of a verb's second source: `_b` gives `--tag-b`, ..., and `shared_b`.
    """
    options = {name: one for name, one in options_of(group).items() if one.flag != ""}

    def add(command: Command) -> Command:
        @wraps(command)
        def with_shared(*arguments: object, **given: Any) -> object:  # noqa: ANN401  # what click gives
            shared: dict[str, Any] = {name: given.pop(f"{name}{suffix}") for name in options}
            shared |= {name: not shared[name] for name, one in options.items() if one.unset}
            shared["names"] = read_names(shared["names"])
            if shared.get("rename"):
                from zckpt.naming.renames import parsed

                shared["rename"] = parsed(shared["rename"])
            return command(*arguments, **{f"shared{suffix}": shared}, **given)

        return _add(cast("Command", with_shared), [_flag(name, one, suffix) for name, one in options.items()])

    return add


def _flag(name: str, one: Shared, suffix: str) -> Callable[[Command], Command]:
    """Return the flag of an option that verbs share."""
    flag = f"--{'no-' if one.unset else ''}{(one.flag or name).replace('_', '-')}"
    text = f"As {flag}, of {suffix[1:].upper()}." if suffix else one.unset or one.text
    if one.kind == "flag":
        return click.option(flag, f"{name}{suffix}", is_flag=True, help=text)
    if one.kind == "size":
        return click.option(flag, type=ByteSize(), default="64MB", show_default=True, help=text)
    if one.choices:
        return click.option(flag, type=click.Choice(one.choices), default=one.default, show_default=True, help=text)
    kind = {"place": Place(), "file": click.Path(path_type=Path, dir_okay=False), "text": click.STRING}[one.kind]
    flag += suffix.replace("_", "-")
    return click.option(
        flag, f"{name}{suffix}", type=kind, multiple=one.several, metavar=one.metavar,
        help=text + " May be repeated." * one.several,
    )  # fmt: skip


json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")


def write_options(group: type) -> Callable[[Command], Command]:
    """Add the options of a verb that writes a target: those that it shares, and how to print what it did."""
    quiet = click.option("--quiet", "-q", is_flag=True, help="No progress bar, no messages.")
    return lambda command: _add(command, (takes(group), json_option, quiet))


def proof_options(command: Command) -> Command:
    """Add the options that have all of a target compared with its source, and its fingerprint recorded."""
    return _add(
        command,
        (
            click.option("--verify", is_flag=True, help="After writing, compare every byte with SOURCE."),
            click.option(
                "--fingerprint/--no-fingerprint", default=None, help="Record the fingerprint of TARGET with it."
            ),
        ),
    )


def show(done: Written, *, as_json: bool, quiet: bool) -> None:
    """Print what a verb did: a document or a dry run to standard output, messages to standard error."""
    from zckpt.report.text import written

    document = done.as_dict()
    if as_json:
        click.echo(json_text(document))
    elif done.dry_run or not quiet:
        click.echo(without_controls(written(document)), err=not done.dry_run)


def read_names(path: Path | None) -> list[str] | None:
    """Return the names in a file, one a line."""
    if path is None:
        return None
    try:
        with path.open("rb") as file:  # a pipe too: `--names <(command)`
            text = file.read(MAXIMUM_NAMES_NBYTES + 1)
        if len(text) > MAXIMUM_NAMES_NBYTES:
            raise UsageError("too large", path=path, expected=f"names in at most {MAXIMUM_NAMES_NBYTES} bytes")
        return [line.strip() for line in text.decode("utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError("cannot be read", path=path, found=str(error)) from error


class FormatCommand(click.Command):
    """A command with the options that formats state; they are looked up when it is called, so that no other waits."""

    stated: str
    """Which attribute of a format states them."""

    completed = False

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Return the parameters, those of formats included."""
        if not self.completed:
            self.completed = True
            own = {one.name for one in self.params}
            at = [one.name for one in self.params].index("verify")
            self.params[at:at] = [one for one in self.of_formats() if one.name not in own]
        return super().get_params(ctx)

    def of_formats(self) -> list[click.Option]:
        """Return one option for each name; what it means for which formats is in its help."""
        from zckpt.formats.options import options_of
        from zckpt.formats.registry import formats

        every: dict[str, list[tuple[str, Option]]] = {}
        for one in formats():
            for option in options_of(getattr(one, self.stated)):
                every.setdefault(option.name, []).append((one.name, option))
        return [_option([option for _, option in same], _help(same)) for same in every.values()]

    @classmethod
    def typed(cls, given: dict[str, Any]) -> dict[str, Any]:
        """Return the values of formats' options as their formats take them, from what click returns."""
        from zckpt.formats.options import options_of
        from zckpt.formats.registry import formats

        kinds = {option.name: option.kind for one in formats() for option in options_of(getattr(one, cls.stated))}
        return {name: None if value is None else kinds[name](value) for name, value in given.items()}


class ReshardCommand(FormatCommand):
    """A command with the options of formats that are resharded."""

    stated = "recut_options"


class ConvertCommand(FormatCommand):
    """A command with `--to` and the options of formats that are written, which its help lists."""

    stated = "options"

    def of_formats(self) -> list[click.Option]:
        """Return `--to` and the options of formats that are written."""
        from zckpt.formats.registry import formats, names

        written = [one for one in formats() if one.writes]
        width = max(len(one.name) for one in written)
        listed = "\n".join(f"{one.name:{width}}  {one.writes}" for one in written)
        self.help = f"{self.help}\n\n\b\n{listed}\n"  # the paragraph after this character is not wrapped
        unwritten = {one.name for one in formats()} - {one.name for one in written}
        choices = [name for name in names() if name not in unwritten]  # with those that cannot be loaded, to say so
        to = click.Option(["--to"], type=click.Choice(choices), required=True, help="Format of TARGET.")
        return [to, *super().of_formats()]


def _option(same: list[Option], text: str) -> click.Option:
    first = same[0]
    if first.kind is bool:
        opposite = first.opposite or f"no-{first.flag}"
        return click.Option([f"--{first.flag}/--{opposite}"], default=None, help=text)
    choices = list(dict.fromkeys(str(choice) for option in same for choice in option.choices))
    kind = click.Choice(choices) if choices else first.kind
    return click.Option([f"--{first.flag}"], type=kind, metavar=first.metavar, help=text)


def _help(same: list[tuple[str, Option]]) -> str:
    texts: dict[str, list[str]] = {}
    for name, option in same:
        default = "" if option.default is None else f" Default: {option.default}."
        texts.setdefault(option.help + default, []).append(name)
    return " ".join(f"{text} ({', '.join(names)})" for text, names in texts.items())
