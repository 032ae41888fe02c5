"""The verbs that look at elements of tensors: `stats` and `show`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from zckpt.cli.options import FILE, dequantize_option, json_option, names_option, page_options, source_argument, takes
from zckpt.cli.streams import check_file, json_text, reporter, width, write_file
from zckpt.cli.verbs import flag, verb
from zckpt.errors import UsageError
from zckpt.operations.options import Compared, Salvaged


@verb("stats")
@source_argument
@names_option("--slots", "SLOT,...", "Only these slots: weight, master, exp_avg, ...")
@click.option("--parameters", multiple=True, metavar="GLOB", help="Only these parameters; may be repeated.")
@flag("--layers", help="One row per slot and layer (names that begin alike up to their number).")
@flag("--csv", "as_csv", help="Print rows of comma-separated values.")
@json_option
@page_options
@flag("--quiet", "-q", help="No progress bar.")
@dequantize_option
@takes(Compared)
def stats_command(
    *,
    source: Path,
    layers: bool,
    as_csv: bool,
    as_json: bool,
    html: Path | None,
    overwrite: bool,
    quiet: bool,
    shared: dict[str, Any],
    **given: Any,  # noqa: ANN401  # what click gives
) -> None:
    """Show statistics of each tensor: min, max, mean, deviation, norm, zeros, NaN and infinities.

    Reads every element once. --json also has a histogram of each tensor, by powers of two.
    """
    if as_csv and as_json:
        raise UsageError("--csv and --json exclude each other", expected="one of them")
    from zckpt.operations.stats import stats
    from zckpt.report.figures import comma_separated, render

    check_file(html, overwrite=overwrite)
    document = stats(source, reporter=reporter("stats", quiet=quiet), **given, **shared).as_dict()
    if html is not None:
        from zckpt.report.page.figures import stats_page

        write_file(html, stats_page(document), overwrite=overwrite)
    if as_json:
        click.echo(json_text(document))
    elif as_csv:
        click.echo(comma_separated(document, layers=layers), nl=False)
    else:
        click.echo(render(document, layers=layers, width=width()))


@verb("show")
@source_argument
@click.argument("name")
@click.option("--slot", metavar="SLOT", help="Default: the master if there is one, else the weight.")
@click.option("--slice", metavar="0:4,:,-1", help="An index or a range for each dimension. Default: all.")
@click.option("--npy", type=FILE, metavar="FILE", help="Write the elements to FILE instead.")
@flag("--overwrite", help="Replace FILE if it exists.")
@json_option
@takes(Salvaged)
def show_command(*, source: Path, name: str, as_json: bool, shared: dict[str, Any], **given: Any) -> None:  # noqa: ANN401
    """Show elements of the tensor NAME in SOURCE, and read nothing else.

    In an .npy file, types that NumPy lacks are stored exactly, as float32.
    """
    from zckpt.operations.show import show
    from zckpt.report.figures import render_elements

    found = show(source, name, **given, **shared)
    click.echo(json_text(found.as_dict(), indent=None) if as_json else render_elements(found, width=width()))
