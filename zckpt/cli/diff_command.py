"""`zckpt diff`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import click

from zckpt.cli.options import ByteSize, source_options
from zckpt.cli.pages import check_page, page_options, write_page
from zckpt.cli.streams import json_text, paint, width
from zckpt.errors import UsageError


@click.command("diff")
@click.argument("sources", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="A B")
@click.option("--rtol", type=float, default=0.0, help="Relative tolerance; by default bits are compared.")
@click.option("--atol", type=float, default=0.0, help="Absolute tolerance.")
@click.option(
    "--slots", multiple=True, metavar="SLOT,...", help="Compare these slots only: weight, master, exp_avg, ..."
)
@click.option("--parameters", multiple=True, metavar="GLOB", help="Compare these parameters only; may be repeated.")
@click.option("--rename", multiple=True, metavar="OLD=NEW", help="Regular expression for names of A; may be repeated.")
@click.option("--ignore", type=click.Choice(["metadata"]), help="Compare tensors only.")
@click.option(
    "--series", is_flag=True, help="Several checkpoints of one run: how each slot moved from one to the next."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@page_options
@click.option("--memory", type=ByteSize(), default="64MB", show_default=True, help="Bound of all buffers.")
@click.option("--quiet", "-q", is_flag=True, help="No progress bar, no table.")
@source_options
@partial(source_options, suffix="b")
def diff_command(
    sources: tuple[Path, ...],
    rtol: float,
    atol: float,
    slots: tuple[str, ...],
    parameters: tuple[str, ...],
    rename: tuple[str, ...],
    ignore: str | None,
    series: bool,
    as_json: bool,
    html: Path | None,
    overwrite: bool,
    memory: int,
    quiet: bool,
    where: dict[str, Any],
    where_b: dict[str, Any],
) -> int:
    """Compare two checkpoints of any formats and world sizes: every slot of every parameter, and their settings.

    --tag, --root, --names and --tp-rules are about A; those that end in -b about B.

    Exit status 0: equal; 1: different.
    """
    from zckpt.cli.streams import reporter

    check_page(html, overwrite=overwrite)
    chosen = [name for one in slots for name in one.split(",") if name]
    told = reporter("diff", quiet=quiet)
    if series:
        from zckpt.operations.series import series as measure_series
        from zckpt.report.difference import render_series

        if rtol or atol or rename or ignore or any(where[key] for key in ("tag", "roots")) or any(where_b.values()):
            raise UsageError("--series takes --slots, --parameters, --names and --tp-rules only")
        common = {key: where[key] for key in ("names", "tp_rules")}
        moved = measure_series(sources, slots=chosen, parameters=parameters, memory=memory, reporter=told, **common)
        found = moved.as_dict()
        text, status = render_series(found, width=width()), 0
    else:
        if len(sources) != 2:
            raise UsageError("two checkpoints are compared", expected="A B", found=f"{len(sources)} given")
        from zckpt.operations.diff import diff
        from zckpt.report.difference import render

        done = diff(
            sources[0],
            sources[1],
            rtol=rtol,
            atol=atol,
            slots=chosen,
            parameters=parameters,
            rename=[_renaming(one) for one in rename],
            ignore_metadata=ignore == "metadata",
            memory=memory,
            reporter=told,
            **where,
            **{f"{key}_b": value for key, value in where_b.items()},
        )
        found = done.as_dict()
        text, status = render(found, width=width(), paint=paint()), 0 if done.equal else 1
    if html is not None:
        from zckpt.report.page import diff_page, series_page

        write_page(html, series_page(found) if series else diff_page(found), overwrite=overwrite)
    if as_json:
        click.echo(json_text(found))
    elif not quiet:
        click.echo(text)
    return status


def _renaming(text: str) -> tuple[str, str]:
    old, mark, new = text.partition("=")
    if not old or not mark:
        raise UsageError("--rename cannot be used", expected="OLD=NEW", found=text)
    return old, new
