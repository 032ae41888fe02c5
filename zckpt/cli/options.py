"""Options that several verbs share, and how their values are read."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from functools import reduce, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from zckpt.cli.verbs import EMPTY, Near, Verb, chosen_format, flag
from zckpt.errors import UsageError
from zckpt.operations.options import Shared, options_of
from zckpt.storage.remote import is_url

Command = TypeVar("Command", bound=Callable[..., Any])

if TYPE_CHECKING:
    from zckpt.formats.options import Option

    _IntegerType = click.ParamType[int]
else:
    _IntegerType = click.ParamType  # generic since click 8.2 only

MAXIMUM_NAMES_NBYTES = 1 << 26
"""Of a file of names: half a million of a hundred characters."""


class ByteSize(_IntegerType):
    """A number of bytes with an optional unit: 64MB, 5GB, 512MiB, 1000."""

    name = "size"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return the number of bytes."""
        match = re.fullmatch(r"(\d{1,18}(?:\.\d{1,18})?)\s*([kmgt]i?)?b?", str(value).strip().lower())
        if match is None or float(match[1]) <= 0:
            self.fail(f"{value!r} is not a size; write, for example, 64MB or 5GiB", param, ctx)
        unit = match[2] or ""
        return int(float(match[1]) * (1024 if unit.endswith("i") else 1000) ** " kmgt".index(unit[:1] or " "))


class Named(click.Path):
    """A path on this machine, which is not empty: that would be the current directory."""

    elsewhere = False
    """Whether it may be a URL of a store, which stays as it is."""

    def __init__(self, **options: Any) -> None:  # noqa: ANN401  # those of click
        super().__init__(path_type=Path, **options)

    def convert(
        self, value: str | os.PathLike[str], param: click.Parameter | None, ctx: click.Context | None
    ) -> str | bytes | os.PathLike[str]:
        """Return a Path, or the text of a URL."""
        if not value:
            self.fail(EMPTY, param, ctx)
        if is_url(value):
            from zckpt.operations.places import place_of

            value = place_of(value)
            if isinstance(value, str):
                return value if self.elsewhere else self.fail("is a URL: expected a path on this machine", param, ctx)
        return super().convert(value, param, ctx)


class Place(Named):
    """A path, or a URL."""

    name, elsewhere = "place", True


def comma_separated(_context: click.Context, _option: click.Parameter, values: Iterable[str]) -> list[str]:
    """Return the names in values that have several each, `a,b`."""
    return [name for value in values for name in value.split(",") if name]


def names_option(flag: str, metavar: str, text: str) -> Callable[[Command], Command]:
    """Return an option whose values have several names each."""
    return click.option(flag, multiple=True, metavar=metavar, help=text, callback=comma_separated)


def together(*options: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return several decorators as one."""
    return lambda command: reduce(lambda made, option: option(made), reversed(options), command)


PLACE = Place()
FILE = Named(dir_okay=False)
PATH = Named()

source_argument = click.argument("source", type=PLACE)
target_argument = click.argument("target", type=PLACE)
json_option = flag("--json", "as_json", help="Print one JSON document.")
quiet_option = flag("--quiet", "-q", help="No progress bar, no messages.")
barless_option = flag("--quiet", "-q", "barless", help="No progress bar.")
overwrite_option = flag("--overwrite", help="Replace FILE if it exists.")


def takes(group: type, *, suffix: str = "") -> Callable[[Any], Any]:
    """Add the options of a group that verbs share; the command gets them as `shared`, for any verb's function.

    Parameters
    ----------
    group : type
        Of `operations/options.py`.
    suffix : str
        Of a verb's second source: `_b` gives `--tag-b`, ..., and `shared_b`.
    """
    options = {name: one for name, one in options_of(group).items() if one.flag != ""}

    def sharing(command: Callable[..., object]) -> Callable[..., object]:
        @wraps(command)
        def with_shared(**given: Any) -> object:  # noqa: ANN401  # what click gives
            shared: dict[str, Any] = {name: given.pop(f"{name}{suffix}") for name in options}
            shared |= {name: not shared[name] for name, one in options.items() if one.unset}
            if "names" in shared:
                shared["names"] = _read_names(shared["names"])
            if shared.get("rename"):
                from zckpt.naming.renames import parsed

                shared["rename"] = parsed(shared["rename"])
            return command(**{f"shared{suffix}": shared}, **given)

        return with_shared

    return together(*(_option_of(name, one, suffix) for name, one in options.items()), sharing)


def _option_of(name: str, one: Shared, suffix: str) -> Callable[[Any], Any]:
    """Return the flag of an option that verbs share."""
    option = f"--{'no-' if one.unset else ''}{(one.flag or name).replace('_', '-')}"
    text = f"As {option}, for {suffix[1:].upper()}." if suffix else one.unset or one.text
    if isinstance(one.default, bool):
        return flag(option, f"{name}{suffix}", help=text)
    if isinstance(one.default, int):
        nbytes = one.default
        default = f"{nbytes // 10**9}GB" if nbytes >= 10**9 else f"{nbytes // 10**6}MB"  # as one would write it
        return click.option(option, type=ByteSize(), default=default, show_default=True, help=text)
    if one.kind == "names":
        return names_option(option, str(one.metavar), text)
    if one.choices:
        return click.option(option, type=Near(one.choices), default=one.default, show_default=True, help=text)
    kind = {
        "place": PLACE,
        "file": FILE,
        "path": PATH,
        "text": click.STRING,
    }[one.kind]
    option += suffix.replace("_", "-")
    several = one.default == ()
    return click.option(
        option, f"{name}{suffix}", type=kind, multiple=several, metavar=one.metavar,
        help=text + " May be repeated." * several,
    )  # fmt: skip


def _read_names(path: Path | None) -> list[str] | None:
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
        raise UsageError("cannot be read", path=path, found=getattr(error, "strerror", str(error))) from error


class FormatCommand(Verb):
    """A command with the options that formats state; they are looked up when it is called, so that no other waits."""

    stated: str
    """Which attribute of a format states them."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Return the parameters, those of formats included."""
        if not self.of_formats:
            names = [one.name for one in self.params]
            at = names.index("verify")
            added = [one for one in self.made() if one.name not in names]
            self.params[at:at] = added
            self.of_formats = frozenset(str(one.name) for one in added)
        return super().get_params(ctx)

    def made(self) -> list[click.Option]:
        """Return one option for each name; what it means for which formats is in its help."""
        from zckpt.formats.options import options_of
        from zckpt.formats.registry import formats

        every: dict[str, list[tuple[str, Option]]] = {}
        for one in formats():
            for option in options_of(getattr(one, self.stated)):
                every.setdefault(option.name, []).append((one.name, option))
        return [_option(one, has_to=self.stated == ConvertCommand.stated) for one in every.values()]


class ReshardCommand(FormatCommand):
    """A command with the options of formats that are resharded."""

    stated = "recut_options"


class ConvertCommand(FormatCommand):
    """A command with `--to` and the options of formats that are written, which its help lists."""

    stated = "options"

    def made(self) -> list[click.Option]:
        """Return `--to` and the options of formats that are written."""
        from zckpt.formats.registry import formats, names

        writes = {one.name: one.writes for one in formats()}
        width = max(len(name) for name, text in writes.items() if text)
        listed = "\n".join(f"{name:{width}}  {text}" for name, text in writes.items() if text)
        self.help = f"{self.help}\n\n\b\n{listed}\n"  # the paragraph after this character is not wrapped
        choices = [name for name in names() if writes.get(name, "?")]  # with those that cannot be loaded, to say so
        to = click.Option(["--to"], type=Near(choices), required=True, help="Format of TARGET.")
        return [to, *super().made()]


class FormatOption(click.Option):
    """An option of one or several formats: its help is that of the format which `--to` names, if that is given."""

    texts: Mapping[str, str]

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """Return its line of the help; None: the format that is named has no such option."""
        chosen = chosen_format(ctx)
        if chosen is None:
            return super().get_help_record(ctx)
        if chosen not in self.texts:
            return None
        general, self.help = self.help, self.texts[chosen]
        record = super().get_help_record(ctx)
        self.help = general
        return record


def _option(same: list[tuple[str, Option]], *, has_to: bool) -> click.Option:
    """Return an option of one or several formats; `has_to`: `--to FORMAT --help` says more of it."""
    texts = {
        name: option.help + ("" if option.default is None else f" Default: {option.default}.") for name, option in same
    }
    several = {text: [name for name, its in texts.items() if its == text] for text in texts.values()}
    if has_to and len(several) > 1:
        text = f"Depends on the format: see --to FORMAT --help. ({', '.join(texts)})"
    else:
        text = " ".join(f"{one} ({', '.join(names)})" for one, names in several.items())
    first = same[0][1]
    name, how = f"--{first.flag}", dict[str, Any]()
    if first.kind is bool:
        name += f"/--{first.opposite or f'no-{first.flag}'}"
    else:
        choices = list(dict.fromkeys(str(choice) for _, option in same for choice in option.choices))
        how = {
            "type": Near(choices) if choices else first.kind,
            "metavar": first.metavar,
            "callback": lambda _context, _option, value: None if value is None else first.kind(value),
        }
    made = FormatOption([name], default=None, help=text, **how)
    made.texts = texts
    return made


page_options = together(
    click.option("--html", type=FILE, help="Also write an HTML page."),
    overwrite_option,
)
