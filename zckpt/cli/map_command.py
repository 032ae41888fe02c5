"""`zckpt map`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from zckpt.cli.options import source_options
from zckpt.cli.pages import check_page, write_page
from zckpt.errors import UsageError

SUFFIXES = (".svg", ".png")


@click.command("map")
@click.argument("source", type=click.Path(path_type=Path))
@click.argument("target", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--slots", multiple=True, metavar="SLOT,...", help="Draw these slots only: weight, master, exp_avg, ...")
@click.option("--overwrite", is_flag=True, help="Replace TARGET if it exists.")
@source_options
def map_command(
    source: Path,
    target: Path,
    slots: tuple[str, ...],
    overwrite: bool,
    where: dict[str, Any],
) -> None:
    """Draw which rank holds what of which parameter, to scale, as a picture. Reads no tensor.

    TARGET ends in .svg or .png; a PNG needs matplotlib (zckpt[png]).
    """
    from zckpt.formats import open_checkpoint
    from zckpt.operations.map import layout_map
    from zckpt.report.picture import png, svg

    suffix = target.suffix.lower()
    if suffix not in SUFFIXES:
        raise UsageError("a map is drawn as SVG or PNG", path=target, expected="a name in .svg or .png")
    check_page(target, overwrite=overwrite)
    checkpoint = open_checkpoint(source, **where)
    chosen = [name for one in slots for name in one.split(",") if name]
    unknown = [name for name in chosen if name not in checkpoint.slot_names()]
    if unknown:
        there = ", ".join(checkpoint.slot_names())
        raise UsageError("no such slot", path=source, expected=f"some of {there}", found=", ".join(unknown))
    layout = layout_map(checkpoint, slots=chosen or None)
    write_page(target, svg(layout) if suffix == ".svg" else png(layout), overwrite=overwrite)
