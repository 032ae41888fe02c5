"""`zckpt map`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from zckpt.cli.options import source_options
from zckpt.cli.pages import check_page, write_page
from zckpt.cli.streams import json_text
from zckpt.errors import UsageError

SUFFIXES = (".svg", ".png")


@click.command("map")
@click.argument("source", type=click.Path(path_type=Path))
@click.argument("target", required=False, type=click.Path(path_type=Path, dir_okay=False))
@click.option("--slots", multiple=True, metavar="SLOT,...", help="Draw these slots only: weight, master, exp_avg, ...")
@click.option(
    "--json", "as_json", is_flag=True, help="Print what is drawn as one JSON document; TARGET is optional then."
)
@click.option("--overwrite", is_flag=True, help="Replace TARGET if it exists.")
@source_options
def map_command(
    source: Path, target: Path | None, slots: tuple[str, ...], as_json: bool, overwrite: bool, where: dict[str, Any]
) -> None:
    """Draw which rank holds what of which parameter, to scale, as a picture. Reads no tensor.

    TARGET ends in .svg or .png; a PNG needs matplotlib (zckpt[png]).
    """
    from zckpt.operations.map import map as map_of

    suffix = target.suffix.lower() if target is not None else None
    if target is None and not as_json:
        raise UsageError("nowhere to draw the map", expected="a TARGET in .svg or .png, or --json")
    if target is not None and suffix not in SUFFIXES:
        raise UsageError("a map is drawn as SVG or PNG", path=target, expected="a name in .svg or .png")
    check_page(target, overwrite=overwrite)
    chosen = [name for one in slots for name in one.split(",") if name]
    document = map_of(source, slots=chosen or None, **where).as_dict()
    if target is not None:
        from zckpt.report.picture import png, svg

        write_page(target, svg(document) if suffix == ".svg" else png(document), overwrite=overwrite)
    if as_json:
        click.echo(json_text(document))
