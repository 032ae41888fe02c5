"""The verbs about the checkpoints of a run: `list`, `prune`, and `verify --watch`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from zckpt.cli.options import Place, json_option, page_options, takes
from zckpt.cli.streams import check_file, json_text, reporter, write_file
from zckpt.cli.verbs import verb
from zckpt.errors import TargetError
from zckpt.operations.options import Copying

STANDARD_ERROR = 2

run_argument = click.argument("run", type=Place())


@verb("list")
@run_argument
@click.option("--deep", is_flag=True, help="Read every byte of each, to tell whether it is sound.")
@click.option("--fingerprint", is_flag=True, help="Compute the fingerprints that are not recorded, to tell equal ones.")
@json_option
@page_options
@click.option("--quiet", "-q", is_flag=True, help="No progress bar.")
@takes(Copying)
def list_command(
    run: Path,
    deep: bool,
    fingerprint: bool,
    as_json: bool,
    html: Path | None,
    overwrite: bool,
    quiet: bool,
    shared: dict[str, Any],
) -> None:
    """List the checkpoints of a run, of whatever formats: step, date, size, ranks, which are sound, which is latest.

    Reads structure and a sample of the weights of each; with --deep every byte.
    """
    from zckpt.operations.history import history
    from zckpt.report.history import render

    check_file(html, overwrite=overwrite)
    found = history(run, deep=deep, fingerprint=fingerprint, reporter=reporter("list", quiet=quiet), **shared).as_dict()
    if html is not None:
        from zckpt.report.page.history import history_page

        write_file(html, history_page(found), overwrite=overwrite)
    click.echo(json_text(found) if as_json else render(found))


@verb("prune")
@run_argument
@click.option(
    "--keep-last", type=int, required=True, metavar="N", help="How many sound ones stay, of the highest steps."
)
@click.option("--keep-every", type=int, metavar="K", help="Those stay whose step is a multiple of K.")
@click.option(
    "--keep-best", metavar="METRIC[:min|max]", help="The best by what was logged with it stays; of a loss, the least."
)
@click.option("--delete", is_flag=True, help="Remove what goes. Without it nothing changes.")
@click.option(
    "--also", multiple=True, metavar="PATTERN", help="Files that may go with a checkpoint though they may be yours."
)
@click.option("--unsound", is_flag=True, help="Remove what is not sound, too.")
@click.option("--deep", is_flag=True, help="Read every byte of each, to tell whether it is sound.")
@click.option(
    "--settle",
    type=float,
    default=60.0,
    show_default=True,
    metavar="S",
    help="What was written to within so many seconds stays.",
)
@json_option
def prune_command(run: Path, as_json: bool, **given: Any) -> int:  # noqa: ANN401  # what click gives
    """Say which checkpoints of a run may go and what that frees, and with --delete remove them.

    Only sound ones count. What `latest` or a link names, what is being written, what is not sound, and what holds files
    that may be yours stays. A kill leaves no half of one.
    """
    from zckpt.operations.prune import prune
    from zckpt.report.history import render_pruned

    found = prune(run, **given).as_dict()
    click.echo(json_text(found) if as_json else render_pruned(found))
    return TargetError.exit_status if found["failed"] else 0


def watched(run: Path, *, on_finding: str | None = None, quiet: bool, **given: Any) -> int:  # noqa: ANN401  # what click gives
    """Print a line for each checkpoint that appears; a finding ends it, or runs a command that gets the line."""
    import subprocess
    import sys

    from zckpt.operations.watch import watch

    odd = False
    for one in watch(run, **given):
        line = json_text(one.as_dict(), indent=None)
        if not quiet:
            click.echo(line)
            sys.stdout.flush()
        odd = odd or bool(one.findings)
        if one.findings and on_finding is None:
            break
        if one.findings and on_finding is not None:
            command = ["sh", "-c", on_finding]  # the user's own
            subprocess.run(command, input=line.encode(), stdout=STANDARD_ERROR, check=False)  # noqa: S603
    return int(odd)
