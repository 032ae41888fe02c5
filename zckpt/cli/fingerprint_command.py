"""`zckpt fingerprint`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from zckpt.cli.options import ByteSize, source_options
from zckpt.cli.streams import json_text


@click.command("fingerprint")
@click.argument("source", type=click.Path(path_type=Path))
@click.option("--write", is_flag=True, help="Also store it beside the checkpoint, with the digest of each slot.")
@click.option("--output", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help="Store it there.")
@click.option("--overwrite", is_flag=True, help="Replace the file if it exists.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON with the digest of each slot.")
@click.option("--memory", type=ByteSize(), default="64MB", show_default=True, help="Bound of all buffers.")
@click.option("--quiet", "-q", is_flag=True, help="No progress bar.")
@source_options
def fingerprint_command(
    source: Path,
    write: bool,
    output: Path | None,
    overwrite: bool,
    as_json: bool,
    memory: int,
    quiet: bool,
    where: dict[str, Any],
) -> None:
    """Print a digest of a checkpoint's logical state, the same for every format, stage and world size.

    Two people compare a terabyte by one line. `zckpt verify --against FILE` tells by what is stored which slot is not
    as it was.
    """
    from zckpt.cli.streams import reporter
    from zckpt.compare.digests import digests_path, write_digests
    from zckpt.operations.fingerprint import fingerprint
    from zckpt.operations.open import opened
    from zckpt.storage.ownership import check_target

    checkpoint = opened(source, **where)
    target = output or (digests_path(checkpoint) if write else None)
    if target is not None:
        check_target(target, overwrite=overwrite)
    found = fingerprint(checkpoint, memory=memory, reporter=reporter("fingerprint", quiet=quiet))
    if target is not None:
        write_digests(found, target, overwrite=overwrite)
    click.echo(json_text(found.as_dict()) if as_json else found.text)
