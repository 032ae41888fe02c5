"""The verbs that only read: `inspect`, `diff`, `fingerprint`, `verify`, `map`, `formats`. Some also write a page."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from zckpt.cli.options import Place, comma_separated, dequantize_option, json_option, source_argument, takes
from zckpt.cli.streams import json_text, paint, reporter, width
from zckpt.errors import TargetError, UsageError, without_controls
from zckpt.operations.options import Compared, Copying, ReadCopied, Reading, Renaming, only

if TYPE_CHECKING:
    from zckpt.state import Checkpoint

Command = TypeVar("Command", bound=Callable[..., Any])

UNSOUND = 1
PICTURES = (".svg", ".png")


def page_options(command: Command) -> Command:
    """Add `--html` and `--overwrite`."""
    html = click.option(
        "--html", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help="Also write a page."
    )
    return html(click.option("--overwrite", is_flag=True, help="Replace FILE if it exists.")(command))


def _check_page(page: Path | None, *, overwrite: bool) -> None:
    """Raise TargetError if a page cannot be written, before the work for it is done."""
    from zckpt.storage.ownership import check_target

    if page is not None:
        check_target(page, overwrite=overwrite)


def _write_page(page: Path, content: str | bytes, *, overwrite: bool) -> None:
    """Write a page or a picture, whole or not at all."""
    from zckpt.storage.durable import written_files

    with written_files([page], overwrite=overwrite) as (partial_page,):
        try:
            partial_page.write_bytes(content.encode() if isinstance(content, str) else content)
        except OSError as error:
            raise TargetError("cannot be written", path=page, found=error.strerror) from error


def _say_what_is_cached(checkpoints: Iterable[Checkpoint], *, direct: bool, quiet: bool) -> None:
    """Say on standard error which files --direct does not read past the page cache."""
    if direct and not quiet:
        from zckpt.storage.direct import unavailable

        for line in unavailable(file.path for one in checkpoints for file in one.files):
            click.echo(without_controls(line), err=True)


@click.command("inspect")
@source_argument
@json_option
@click.option("--parameters", is_flag=True, help="List every parameter.")
@click.option("--files", is_flag=True, help="List every file, and what became of everything in it.")
@click.option("--globals", "with_globals", is_flag=True, help="List the globals that each pickle mentions.")
@page_options
@takes(Reading)
def inspect_command(
    source: Path,
    as_json: bool,
    parameters: bool,
    files: bool,
    with_globals: bool,
    html: Path | None,
    overwrite: bool,
    shared: dict[str, Any],
) -> None:
    """Show what is in a checkpoint: format, topology, slots, groups, padding, files. Reads no tensor."""
    from zckpt.operations.inspect import inspect
    from zckpt.operations.open import open as opened

    _check_page(html, overwrite=overwrite)
    checkpoint = opened(source, **shared)
    document = inspect(checkpoint, include_globals=with_globals, include_inventory=files).as_dict()
    if html is not None:
        from zckpt.operations.map import map as map_of
        from zckpt.report.page import inspect_page

        _write_page(html, inspect_page(document, map_of(checkpoint).as_dict()), overwrite=overwrite)
    if as_json:
        click.echo(json_text(document))
        return
    from zckpt.report.inspection import render

    click.echo(render(document, parameters=parameters, files=files, with_globals=with_globals))


@click.command("diff")
@click.argument("sources", nargs=-1, required=True, type=Place(), metavar="A B")
@click.option("--rtol", type=float, default=0.0, help="Relative tolerance; by default bits are compared.")
@click.option("--atol", type=float, default=0.0, help="Absolute tolerance.")
@click.option(
    "--slots", multiple=True, metavar="SLOT,...", help="Compare these slots only: weight, master, exp_avg, ..."
)
@click.option("--parameters", multiple=True, metavar="GLOB", help="Compare these parameters only; may be repeated.")
@click.option("--ignore", type=click.Choice(["metadata"]), help="Compare tensors only.")
@click.option(
    "--series", is_flag=True, help="Several checkpoints of one run: how each slot moved from one to the next."
)
@json_option
@page_options
@click.option("--quiet", "-q", is_flag=True, help="No progress bar, no table.")
@dequantize_option
@takes(Compared)
@takes(Reading, suffix="_b")
def diff_command(
    sources: tuple[Path, ...],
    rtol: float,
    atol: float,
    slots: tuple[str, ...],
    parameters: tuple[str, ...],
    ignore: str | None,
    series: bool,
    as_json: bool,
    html: Path | None,
    overwrite: bool,
    quiet: bool,
    dequantize: bool,
    shared: dict[str, Any],
    shared_b: dict[str, Any],
) -> int:
    """Compare two checkpoints of any formats and world sizes: every slot of every parameter, and their settings.

    --tag, --root, --names and --tp-rules are about A, and so are other names; those that end in -b about B.

    Exit status 0: equal; 1: different.
    """
    _check_page(html, overwrite=overwrite)
    of_each = {*Copying.__annotations__, "names", "tp_rules"}
    common: dict[str, Any] = {
        "slots": comma_separated(slots), "parameters": parameters, "reporter": reporter("diff", quiet=quiet),
        **{key: value for key, value in shared.items() if key in of_each},
    }  # fmt: skip
    two: dict[str, Any] = {
        "rtol": rtol, "atol": atol, "ignore_metadata": ignore == "metadata", "dequantize": dequantize,
        **{key: value for key, value in shared.items() if key not in of_each},
        **{f"{key}_b": value for key, value in shared_b.items()},
    }  # fmt: skip
    compared = _series(sources, two, common) if series else _difference(sources, two, common)
    _say_what_is_cached(compared.checkpoints, direct=shared["direct"], quiet=quiet)
    if html is not None:
        _write_page(html, compared.page(), overwrite=overwrite)
    if as_json:
        click.echo(json_text(compared.found))
    elif not quiet:
        click.echo(compared.text)
    return compared.status


@dataclass(frozen=True, slots=True)
class _Shown:
    """What `diff` shows of a comparison, and ends with."""

    checkpoints: list[Checkpoint]
    found: dict[str, Any]
    text: str
    page: Callable[[], str]
    status: int


def _difference(sources: tuple[Path, ...], options: dict[str, Any], common: dict[str, Any]) -> _Shown:
    """Compare two checkpoints."""
    from zckpt.operations.diff import diff
    from zckpt.report.difference import render
    from zckpt.report.page import diff_page

    if len(sources) != 2:
        raise UsageError("two checkpoints are compared", expected="A B", found=f"{len(sources)} given")
    done = diff(sources[0], sources[1], **options, **common)
    found = done.as_dict()
    text = render(found, width=width(), paint=paint())
    return _Shown([done.a, done.b], found, text, lambda: diff_page(found), 0 if done.equal else 1)


def _series(sources: tuple[Path, ...], two: dict[str, Any], common: dict[str, Any]) -> _Shown:
    """Compare each of a run's checkpoints with the next; options about two (`two`) are refused."""
    from zckpt.operations.series import series
    from zckpt.report.difference import render_series
    from zckpt.report.page import series_page

    if any(two.values()):
        raise UsageError("--series takes --slots, --parameters, --names and --tp-rules only")
    done = series(sources, **common)
    found = done.as_dict()
    return _Shown(done.checkpoints, found, render_series(found, width=width()), lambda: series_page(found), 0)


@click.command("fingerprint")
@source_argument
@click.option(
    "--write",
    is_flag=True,
    help="Also store it, with the digest of each slot, in the checkpoint's directory, or next to its file.",
)
@click.option("--output", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help="Store it there.")
@click.option("--overwrite", is_flag=True, help="Replace the file if it exists.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON with the digest of each slot.")
@click.option("--quiet", "-q", is_flag=True, help="No progress bar.")
@dequantize_option
@takes(Compared)
def fingerprint_command(
    source: Path,
    write: bool,
    output: Path | None,
    overwrite: bool,
    as_json: bool,
    quiet: bool,
    dequantize: bool,
    shared: dict[str, Any],
) -> None:
    """Print a digest of a checkpoint's logical state, the same for every format, stage and world size.

    Two people compare a terabyte by one line. `zckpt verify --against FILE` tells by what is stored which slot is not
    as it was. State that is each rank's own is not in it; `zckpt diff` compares that, too.
    """
    from zckpt.compare.digests import digests_path, write_digests
    from zckpt.operations.fingerprint import fingerprint
    from zckpt.operations.open import open as opened
    from zckpt.storage.ownership import check_target

    checkpoint = opened(source, **only(Reading, shared))
    if write and (dequantize or any(only(Renaming, shared).values())):
        raise UsageError(
            "digests under other names, or of other values, are not the source's own",
            expected="--output FILE, not --write",
        )
    target = output or (digests_path(checkpoint) if write else None)
    if target is not None:
        check_target(target, overwrite=overwrite)
    others = {key: value for key, value in shared.items() if key not in Reading.__annotations__}
    found = fingerprint(checkpoint, reporter=reporter("fingerprint", quiet=quiet), dequantize=dequantize, **others)
    _say_what_is_cached([checkpoint], direct=shared["direct"], quiet=quiet)
    if target is not None:
        write_digests(found, target, overwrite=overwrite)
    click.echo(json_text(found.as_dict()) if as_json else found.text)


@click.command("verify")
@source_argument
@click.option("--deep", is_flag=True, help="Read every byte: checksums, NaN and Inf, all weights, padding, copies.")
@click.option(
    "--against",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="DIGESTS",
    help="Compare with the digests that `zckpt fingerprint --write` stored.",
)
@json_option
@page_options
@click.option("--quiet", "-q", is_flag=True, help="No progress bar, no text; only the exit status.")
@takes(ReadCopied)
def verify_command(
    source: Path,
    deep: bool,
    against: Path | None,
    as_json: bool,
    html: Path | None,
    overwrite: bool,
    quiet: bool,
    shared: dict[str, Any],
) -> int:
    """Find out whether a checkpoint is whole and makes sense: every defect by a stable code, what it is in, what to do.

    Reads structure and a sample of the weights; with --deep every byte. Exit status: 0 sound, 1 unsound, 2 unusable
    arguments, 3 there is nothing to verify.
    """
    from zckpt.operations.verify import verify

    _check_page(html, overwrite=overwrite)
    found = verify(source, deep=deep, against=against, reporter=reporter("verify", quiet=quiet), **shared)
    if found.checkpoint is not None:
        _say_what_is_cached([found.checkpoint], direct=shared["direct"], quiet=quiet)
    document = found.as_dict()
    if html is not None:
        from zckpt.operations.map import map as map_of
        from zckpt.report.page import verify_page

        layout = None if found.checkpoint is None else map_of(found.checkpoint).as_dict()
        _write_page(html, verify_page(document, layout), overwrite=overwrite)
    if as_json:
        click.echo(json_text(document))
    elif not quiet:
        from zckpt.report.verification import render

        click.echo(render(document, width=width(), paint=paint()))
    return 0 if found.sound else UNSOUND


@click.command("map")
@source_argument
@click.argument("target", required=False, type=click.Path(path_type=Path, dir_okay=False))
@click.option("--slots", multiple=True, metavar="SLOT,...", help="Draw these slots only: weight, master, exp_avg, ...")
@click.option(
    "--json", "as_json", is_flag=True, help="Print what is drawn as one JSON document; TARGET is optional then."
)
@click.option("--overwrite", is_flag=True, help="Replace TARGET if it exists.")
@takes(Reading)
def map_command(
    source: Path, target: Path | None, slots: tuple[str, ...], as_json: bool, overwrite: bool, shared: dict[str, Any]
) -> None:
    """Draw which rank holds what of which parameter, to scale, as a picture. Reads no tensor.

    TARGET ends in .svg or .png; a PNG needs matplotlib (zckpt[png]).
    """
    from zckpt.operations.map import map as map_of

    suffix = target.suffix.lower() if target is not None else None
    if target is None and not as_json:
        raise UsageError("nowhere to draw the map", expected="a TARGET in .svg or .png, or --json")
    if target is not None and suffix not in PICTURES:
        raise UsageError("a map is drawn as SVG or PNG", path=target, expected="a name in .svg or .png")
    _check_page(target, overwrite=overwrite)
    document = map_of(source, slots=comma_separated(slots) or None, **shared).as_dict()
    if target is not None:
        from zckpt.report.picture import png, svg

        _write_page(target, svg(document) if suffix == ".svg" else png(document), overwrite=overwrite)
    if as_json:
        click.echo(json_text(document))


@click.command("formats")
@json_option
def formats_command(as_json: bool) -> None:
    """List the formats that are read and written, what each leaves to choose, and which verbs take it.

    Formats that other packages add are listed, too.
    """
    from zckpt.operations.listing import list_formats
    from zckpt.report.text import formats

    document = list_formats()
    click.echo(json_text(document) if as_json else without_controls(formats(document)))
