"""`zckpt formats`."""

from __future__ import annotations

import click

from zckpt.cli.streams import json_text
from zckpt.errors import without_controls


@click.command("formats")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def formats_command(as_json: bool) -> None:
    """List the formats that are read and written, what each leaves to choose, and which verbs take it.

    Formats that other packages add are listed, too.
    """
    from zckpt.operations.formats import list_formats
    from zckpt.report.text import formats

    document = list_formats()
    click.echo(json_text(document) if as_json else without_controls(formats(document)))
