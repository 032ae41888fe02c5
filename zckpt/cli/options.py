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
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?", str(value).strip().lower())
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
overflow_option = click.option(
    "--overflow",
    type=click.Choice(["refuse", "allow"]),
    default="refuse",
    show_default=True,
    help="Finite values beyond the type that is written: refuse, or write infinity and count them.",
)
exclude_frozen_option = click.option("--exclude-frozen", is_flag=True, help="Leave frozen parameters out.")
executor_option = click.option(
    "--executor",
    metavar="threads|dask://HOST:PORT|mpi|ray|torchrun",
    help="Who reads and writes: docs/scale.md. Default: threads; under torchrun, its ranks.",
)
direct_option = click.option(
    "--direct", is_flag=True, help="Read (and write) past the page cache, where that can be: docs/copying.md."
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")


def memory_option(help: str) -> Callable[[Command], Command]:  # noqa: A002
    """Return the option that bounds buffers."""
    return click.option("--memory", type=ByteSize(), default="64MB", show_default=True, help=help)


def comma_separated(values: Iterable[str]) -> list[str]:
    """Return the names in values that have several each, `a,b`."""
    return [name for value in values for name in value.split(",") if name]


def _add(command: Command, options: Sequence[Callable[[Command], Command]]) -> Command:
    for option in reversed(options):
        command = option(command)
    return command


def source_options(command: Command, *, suffix: str = "") -> Command:
    """Add the options that say which checkpoint is meant; the command gets them as `where`, for any verb's function.

    Parameters
    ----------
    command : callable
    suffix : str
        Of a verb's second source: `b` gives `--tag-b`, ..., and `where_b`.
    """
    path = Place()
    options: dict[str, dict[str, Any]] = {
        "tag": {"help": "Which checkpoint of a run directory; by default the one `latest` names."},
        "root": {
            "type": path, "multiple": True, "metavar": "DIR",
            "help": "The same directory on another node, whose files belong in too; may be repeated.",
        },
        "names": {
            "type": click.Path(path_type=Path, dir_okay=False), "metavar": "FILE",
            "help": "Names of the optimizer's parameters, one a line in its order, where a file has numbers only; of "
            "safetensors, of the model's parameters in its order, which the files do not have.",
        },
        "tp-rules": {
            "type": path, "metavar": "FILE",
            "help": "How tensor-parallel slices make up parameters: universal_checkpoint_info as JSON. "
            "Default: the checkpoint's own.",
        },
    }  # fmt: skip
    mark = f"_{suffix}" if suffix else ""

    @wraps(command)
    def with_where(*arguments: object, **given: Any) -> object:  # noqa: ANN401  # what click gives
        tag, roots, names, tp_rules = (given.pop(f"{name.replace('-', '_')}{mark}") for name in options)
        found = {"tag": tag, "roots": roots, "names": read_names(names), "tp_rules": tp_rules}
        return command(*arguments, **{f"where{mark}": found}, **given)

    for name, one in options.items():
        if suffix:
            one["help"] = f"As --{name}, of {suffix.upper()}."
    flags = [click.option(f"--{name}{mark.replace('_', '-')}", **one) for name, one in options.items()]
    return _add(cast("Command", with_where), flags)


def naming_options(command: Command) -> Command:
    """Add the options that give tensors other names; the command gets them as `naming`, for any verb's function."""

    @wraps(command)
    def with_naming(*arguments: object, rename: tuple[str, ...], **given: Any) -> object:  # noqa: ANN401
        from zckpt.naming.renames import parsed

        keys = ("strip_prefix", "add_prefix", "map", "map_config")
        naming = {"rename": parsed(rename), **{key: given.pop(key) for key in keys}}
        return command(*arguments, naming=naming, **given)

    return _add(
        cast("Command", with_naming),
        (
            click.option("--strip-prefix", metavar="P", help="Take P off the names that have it, before all else."),
            click.option(
                "--rename",
                multiple=True,
                metavar="OLD=NEW",
                help="Regular expression, and what it becomes wherever it is in a name (\\1: a group); "
                "with * in NEW, a glob of whole names.",
            ),
            click.option(
                "--map",
                metavar="NAME|FILE",
                help="Name and arrange the weights as another program does; NAME is of a map that zckpt has, as "
                "`zckpt formats` lists them.",
            ),
            click.option(
                "--map-config",
                type=click.Path(path_type=Path, dir_okay=False),
                metavar="FILE",
                help="The model's config.json or params.json, for the map. Default: the one with SOURCE.",
            ),
            click.option("--add-prefix", metavar="P", help="Put P before all names, after all else."),
        ),
    )


def write_options(command: Command) -> Command:
    """Add the options of every verb that writes a target; the command gets them as `writing`, but for how to print."""

    @wraps(command)
    def with_writing(*arguments: object, no_weight_check: bool, no_checksums: bool, **given: Any) -> object:  # noqa: ANN401
        keys = ("memory", "executor", "direct", "overwrite", "drop", "dry_run", "resume", "restart")
        writing = {key: given.pop(key) for key in keys}
        writing |= {"weight_check": not no_weight_check, "checksums": not no_checksums}
        return command(*arguments, writing=writing, **given)

    return _add(
        cast("Command", with_writing),
        (
            click.option("--no-weight-check", is_flag=True, help="Do not hold masters against their weights."),
            click.option(
                "--no-checksums",
                is_flag=True,
                help="Copy bytes that are not those of SOURCE's own checksums, to salvage what is left.",
            ),
            memory_option("Bound of the copy buffers of all workers together."),
            executor_option,
            direct_option,
            click.option("--overwrite", is_flag=True, help="Replace TARGET if it exists."),
            click.option("--resume", is_flag=True, help="Go on with what a run to TARGET that was killed has done."),
            click.option("--restart", is_flag=True, help="Remove what a run to TARGET that was killed has left."),
            click.option(
                "--drop",
                multiple=True,
                metavar="PATTERN",
                help="Write without this, which nothing reads: FILE or FILE:PLACE, * for any; may be repeated.",
            ),
            click.option("--dry-run", is_flag=True, help="Say what would be written; write nothing."),
            json_option,
            click.option("--quiet", "-q", is_flag=True, help="No progress bar, no messages."),
        ),
    )


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
    """Return the names in a file, one a line.

    Raises
    ------
    UsageError
        The file cannot be read.
    """
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
