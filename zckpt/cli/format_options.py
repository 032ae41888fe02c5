"""The options of `convert`, which the formats state: looked up when the verb is, so that no other verb waits for it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import click

from zckpt.formats.format import Format
from zckpt.formats.options import Option, options_of
from zckpt.formats.registry import formats, names


def complete(command: click.Command) -> None:
    """Give a command `--to`, an option for each that a format has, and a list of formats in its help."""
    written = [one for one in formats() if one.writes]
    width = max(len(one.name) for one in written)
    listed = "\n".join(f"{one.name:{width}}  {one.writes}" for one in written)
    command.help = f"{command.help}\n\n\b\n{listed}\n"  # the paragraph after this character is not wrapped
    known = {one.name for one in command.params}
    command.params[2:2] = [_to(written), *(one for one in _options(written) if one.name not in known)]


def typed(given: dict[str, Any]) -> dict[str, Any]:
    """Return the values of formats' options as their formats want them, from what click has made of them."""
    kinds = {option.name: option.kind for one in formats() for option in options_of(one.options)}
    return {name: None if value is None else kinds[name](value) for name, value in given.items()}


def _to(written: Iterable[Format]) -> click.Option:
    unwritten = {one.name for one in formats()} - {one.name for one in written}
    choices = [name for name in names() if name not in unwritten]  # with those that cannot be loaded, to say so
    return click.Option(["--to"], type=click.Choice(choices), required=True, help="Format of TARGET.")


def _options(written: Iterable[Format]) -> list[click.Option]:
    """Return one option for each name; what it means for which formats is in its help."""
    every: dict[str, list[tuple[str, Option]]] = {}
    for one in written:
        for option in options_of(one.options):
            every.setdefault(option.name, []).append((one.name, option))
    return [_option([option for _, option in same], _help(same)) for same in every.values()]


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
