"""The verbs about the checkpoints of a run that do more than read: `prune`, and `verify --watch`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

import zckpt
from zckpt.cli.options import PLACE, json_option
from zckpt.cli.streams import json_text
from zckpt.cli.verbs import flag, verb
from zckpt.errors import TargetError

STANDARD_ERROR = 2

run_argument = click.argument("run", type=PLACE)


@verb("prune")
@run_argument
@click.option("--keep-last", type=int, required=True, metavar="N", help="Keep the N sound ones with the highest steps.")
@click.option("--keep-every", type=int, metavar="K", help="Keep those whose step is a multiple of K.")
@click.option(
    "--keep-best", metavar="METRIC[:min|max]", help="Keep the best one by a logged metric; for a loss, the lowest."
)
@flag("--delete", help="Remove them. Without this, nothing changes.")
@click.option(
    "--also",
    multiple=True,
    metavar="PATTERN",
    help="Also remove these files with a checkpoint, even if they may be yours.",
)
@flag("--unsound", help="Also remove checkpoints that are not sound.")
@flag("--deep", help="Read every byte of each to check that it is sound.")
@click.option(
    "--settle",
    default=60.0,
    show_default=True,
    metavar="S",
    help="Keep what was written to in the last S seconds.",
)
@json_option
def prune_command(run: Path, as_json: bool, **given: Any) -> int:  # noqa: ANN401  # what click gives
    """Show which checkpoints of a run can be removed, and how much that frees; --delete removes them.

    Only sound ones count. Checkpoints stay if `latest` or a link names them, if they are being written, are not sound,
    or hold files that may be yours. A kill never leaves half a checkpoint.
    """
    from zckpt.report.history import render_pruned

    found = zckpt.prune(run, **given).as_dict()
    click.echo(json_text(found) if as_json else render_pruned(found))
    return TargetError.exit_status if found["failed"] else 0


def watched(run: Path, *, on_finding: str | None = None, quiet: bool, **given: Any) -> int:  # noqa: ANN401  # what click gives
    """Print a line for each checkpoint that appears; a finding ends it, or runs a command that gets the line."""
    import subprocess
    import sys

    odd = False
    for one in zckpt.watch(run, **given):
        line = json_text(one.as_dict(), indent=None)
        if not quiet:
            click.echo(line)
            sys.stdout.flush()
        if one.findings:
            odd = True
            if on_finding is None:
                break
            command = ["sh", "-c", on_finding]  # the user's own
            subprocess.run(command, input=line.encode(), stdout=STANDARD_ERROR, check=False)  # noqa: S603
    return int(odd)
