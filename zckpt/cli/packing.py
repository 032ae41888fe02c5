"""The verbs about stores of checkpoints: `pack`, `unpack`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from zckpt.cli.history import run_argument
from zckpt.cli.options import json_option, target_argument, together
from zckpt.cli.streams import json_text, reporter
from zckpt.errors import without_controls

writing_options = together(
    click.option("--overwrite", is_flag=True, help="Replace TARGET if it exists."),
    click.option("--dry-run", is_flag=True, help="Say what would be written; write nothing."),
    json_option,
    click.option("--quiet", "-q", is_flag=True, help="No progress bar, no messages."),
)
store_argument = click.argument("store", type=click.Path(path_type=Path))


def _say(document: dict[str, Any], text: str, *, as_json: bool, quiet: bool) -> None:
    if as_json:
        click.echo(json_text(document))
    elif document["dry_run"] or not quiet:
        click.echo(without_controls(text), err=not document["dry_run"])


@click.command("pack")
@run_argument
@store_argument
@click.option(
    "--full-every",
    type=int,
    default=10,
    show_default=True,
    metavar="K",
    help="Read K checkpoints at most to read one; a larger one takes less room.",
)
@click.option("--dry-run", is_flag=True, help="Say what would be packed; write nothing.")
@json_option
@click.option("--quiet", "-q", is_flag=True, help="No progress bar, no messages.")
def pack_command(run: Path, store: Path, full_every: int, dry_run: bool, as_json: bool, quiet: bool) -> None:
    """Add a run's checkpoints, of any formats, to a STORE, in a fraction of the room.

    STORE/NAME is a SOURCE of every verb. What is in STORE stays as it is, and so does RUN.
    """
    from zckpt.operations.pack import pack
    from zckpt.report.packing import packed

    found = pack(run, store, full_every=full_every, dry_run=dry_run, reporter=reporter("pack", quiet=quiet)).as_dict()
    _say(found, packed(found), as_json=as_json, quiet=quiet)


@click.command("unpack")
@store_argument
@target_argument
@writing_options
def unpack_command(store: Path, target: Path, overwrite: bool, dry_run: bool, as_json: bool, quiet: bool) -> None:
    """Write the files of a checkpoint of a store, STORE/NAME, or of all of them, STORE, bit for bit as they were."""
    from zckpt.operations.unpack import unpack
    from zckpt.report.packing import unpacked

    told = reporter("unpack", quiet=quiet)
    found = unpack(store, target, overwrite=overwrite, dry_run=dry_run, reporter=told).as_dict()
    _say(found, unpacked(found), as_json=as_json, quiet=quiet)
