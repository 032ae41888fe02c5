"""`zckpt strip`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from zckpt.cli.options import show, source_options, write_options


@click.command("strip")
@click.argument("source", type=click.Path(path_type=Path))
@click.argument("target", type=click.Path(path_type=Path))
@click.option("--padding", is_flag=True, help="Remove the padding at the end of each rank's partition (ZeRO-1, 2).")
@click.option(
    "--optimizer",
    is_flag=True,
    help="Remove the optimizer's state: slots, and masters that have a weight beside them.",
)
@click.option("--unreferenced", is_flag=True, help="Remove bytes of storages that no tensor uses.")
@click.option(
    "--keep-slots",
    multiple=True,
    metavar="SLOT,...",
    help="Remove all slots of the optimizer but these; weights and masters stay. May be repeated.",
)
@write_options
@source_options
def strip_command(
    source: Path,
    target: Path,
    padding: bool,
    optimizer: bool,
    unreferenced: bool,
    keep_slots: tuple[str, ...],
    as_json: bool,
    quiet: bool,
    writing: dict[str, Any],
    where: dict[str, Any],
) -> None:
    """Write a checkpoint again without what is not needed; the program it came from loads TARGET.

    TARGET has SOURCE's format and form: a file, a run directory or a tag directory. Without any of the first four
    options, what each would save is said and nothing is written.
    """
    from zckpt.cli.streams import reporter
    from zckpt.operations.strip import strip

    done = strip(
        source,
        target,
        padding=padding,
        optimizer=optimizer,
        unreferenced=unreferenced,
        keep_slots=[slot for one in keep_slots for slot in one.split(",") if slot] if keep_slots else None,
        reporter=reporter("strip", quiet=quiet),
        **writing,
        **where,
    )
    show(done, as_json=as_json, quiet=quiet)
