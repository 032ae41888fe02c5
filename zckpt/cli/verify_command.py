"""`zckpt verify`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from zckpt.cli.options import ByteSize, source_options
from zckpt.cli.pages import check_page, page_options, write_page
from zckpt.cli.streams import json_text, paint, width

UNSOUND = 1


@click.command("verify")
@click.argument("source", type=click.Path(path_type=Path))
@click.option("--deep", is_flag=True, help="Read every byte: checksums, NaN and Inf, all weights, padding, copies.")
@click.option(
    "--against",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="DIGESTS",
    help="Compare with the digests that `zckpt fingerprint --write` stored.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@page_options
@click.option("--memory", type=ByteSize(), default="64MB", show_default=True, help="Bound of all buffers.")
@click.option("--quiet", "-q", is_flag=True, help="No progress bar, no text; only the exit status.")
@source_options
def verify_command(
    source: Path,
    deep: bool,
    against: Path | None,
    as_json: bool,
    html: Path | None,
    overwrite: bool,
    memory: int,
    quiet: bool,
    where: dict[str, Any],
) -> int:
    """Find out whether a checkpoint is whole and makes sense: every defect by a stable code, what it is in, what to do.

    Reads structure and a sample of the weights; with --deep every byte. Exit status: 0 sound, 1 unsound, 2 unusable
    arguments, 3 there is nothing to verify.
    """
    from zckpt.cli.streams import reporter
    from zckpt.operations.verify import verify

    check_page(html, overwrite=overwrite)
    found = verify(
        source,
        deep=deep,
        against=against,
        memory=memory,
        reporter=reporter("verify", quiet=quiet),
        **where,
    )
    document = found.as_dict()
    if html is not None:
        from zckpt.operations.map import map as map_of
        from zckpt.report.page import verify_page

        layout = None if found.checkpoint is None else map_of(found.checkpoint).as_dict()
        write_page(html, verify_page(document, layout), overwrite=overwrite)
    if as_json:
        click.echo(json_text(document))
    elif not quiet:
        from zckpt.report.verification import render

        click.echo(render(document, width=width(), paint=paint()))
    return 0 if found.sound else UNSOUND
