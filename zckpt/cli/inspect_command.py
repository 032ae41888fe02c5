"""`zckpt inspect`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from zckpt.cli.options import source_options
from zckpt.cli.pages import check_page, page_options, write_page
from zckpt.cli.streams import json_text


@click.command("inspect")
@click.argument("source", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.option("--parameters", is_flag=True, help="List every parameter.")
@click.option("--files", is_flag=True, help="List every file, and what became of everything in it.")
@click.option("--globals", "with_globals", is_flag=True, help="List the globals that each pickle mentions.")
@page_options
@source_options
def inspect_command(
    source: Path,
    as_json: bool,
    parameters: bool,
    files: bool,
    with_globals: bool,
    html: Path | None,
    overwrite: bool,
    where: dict[str, Any],
) -> None:
    """Show what is in a checkpoint: format, topology, slots, groups, padding, files. Reads no tensor."""
    from zckpt.operations.inspect import inspect
    from zckpt.operations.open import opened

    check_page(html, overwrite=overwrite)
    checkpoint = opened(source, **where)
    document = inspect(checkpoint, include_globals=with_globals, include_inventory=files).as_dict()
    if html is not None:
        from zckpt.operations.map import map as map_of
        from zckpt.report.page import inspect_page

        write_page(html, inspect_page(document, map_of(checkpoint).as_dict()), overwrite=overwrite)
    if as_json:
        click.echo(json_text(document))
        return
    from zckpt.report.inspection import render

    click.echo(render(document, parameters=parameters, files=files, with_globals=with_globals))
