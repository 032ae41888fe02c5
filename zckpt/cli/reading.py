"""The verbs that only read, such as `inspect`, `diff`, `verify`. Some write a page, or elements, to a file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import zckpt
from zckpt.cli.options import (
    FILE,
    PLACE,
    barless_option,
    json_option,
    names_option,
    overwrite_option,
    page_options,
    source_argument,
    takes,
)
from zckpt.cli.streams import check_file, json_text, paint, reporter, width, write_file
from zckpt.cli.verbs import Near, flag, verb
from zckpt.cli.writing import run_argument, watched
from zckpt.errors import UsageError, without_controls
from zckpt.immutable import immutable
from zckpt.operations.options import Compared, Copying, ReadCopied, Reading, Renaming, Salvaged, only

if TYPE_CHECKING:
    from zckpt.state import Checkpoint, Document

PICTURES = (".svg", ".png")


def _no_page(_document: Document) -> str:
    raise UsageError("there is no page for two runs; give two checkpoints, or several of one run")


@immutable
class _Shown:
    """What a verb has found, how it is shown, and what the command ends with."""

    checkpoints: Sequence[Checkpoint]
    document: Document
    text: Callable[[Document], str]
    page: Callable[[Document], str] = _no_page
    status: int = 0


def _shows(command: Callable[..., _Shown]) -> Callable[..., int]:
    """Let a command show its progress, print what it has found, and write a page of it if that is asked for."""

    @wraps(command)
    def run(
        *,
        as_json: bool,
        html: Path | None = None,
        overwrite: bool = False,
        quiet: bool = False,
        barless: bool = False,
        **given: Any,  # noqa: ANN401  # what click gives
    ) -> int:
        check_file(html, overwrite=overwrite)
        shared = given.get("shared", {})
        if "memory" in shared:  # elements are read
            shared["reporter"] = reporter(str(click.get_current_context().command.name), quiet=quiet or barless)
        shown = command(**given)
        _say_what_is_cached(shown.checkpoints, direct=shared.get("direct", False), quiet=quiet)
        if html is not None:
            write_file(html, shown.page(shown.document), overwrite=overwrite)
        if as_json:
            click.echo(json_text(shown.document))
        elif not quiet:
            click.echo(shown.text(shown.document))
        return shown.status

    return run


def _say_what_is_cached(checkpoints: Sequence[Checkpoint], *, direct: bool, quiet: bool) -> None:
    """Say on standard error which files --direct does not read past the page cache."""
    if direct and checkpoints and not quiet:
        from zckpt.storage.disk import unavailable

        for line in unavailable(file.path for one in checkpoints for file in one.files):
            click.echo(without_controls(line), err=True)


@verb("inspect")
@click.argument("sources", nargs=-1, required=True, type=PLACE, metavar="SOURCE...")
@json_option
@flag("--parameters", help="List every parameter.")
@flag("--files", help="List every file, and what became of its contents.")
@flag("--globals", "with_globals", help="List the classes and functions that each pickle names.")
@page_options
@takes(Salvaged)
@_shows
def inspect_command(
    *,
    sources: tuple[Path, ...],
    parameters: bool,
    files: bool,
    with_globals: bool,
    shared: dict[str, Any],
) -> _Shown:
    """Show what is in a checkpoint: format, topology, slots, groups, padding, files. Reads no tensor.

    Of several checkpoints it prints a table, with a line for each.
    """
    documents = [
        zckpt.inspect(source, include_globals=with_globals, include_inventory=files, **shared).as_dict()
        for source in sources
    ]

    def text(_document: Document) -> str:
        from zckpt.report.reports import render_inspection, render_several

        listed = {"parameters": parameters, "files": files, "with_globals": with_globals}
        if len(sources) > 1 and not any(listed.values()):
            return render_several(documents)
        return "\n\n".join(render_inspection(one, **listed) for one in documents)

    def page(document: Document) -> str:
        from zckpt.report.page import inspect_page

        if len(sources) > 1:
            raise UsageError("a page shows one checkpoint", found=f"{len(sources)} given")
        return inspect_page(document, zckpt.map(sources[0], **shared).as_dict())

    return _Shown([], documents[0] if len(sources) == 1 else {"checkpoints": documents}, text, page)


@verb("list")
@run_argument
@flag("--deep", help="Read every byte of each to check that it is sound.")
@flag("--fingerprint", help="Compute fingerprints that are not recorded, to find equal checkpoints.")
@json_option
@page_options
@barless_option
@takes(Copying)
@_shows
def list_command(*, run: Path, shared: dict[str, Any], **given: Any) -> _Shown:  # noqa: ANN401  # what click gives
    """List the checkpoints of a run, of any formats: step, date, size, ranks, which are sound, which is latest.

    Reads the structure and a sample of the weights of each, or with --deep every byte.
    """
    from zckpt.report.page.history import history_page
    from zckpt.report.reports import render_history

    return _Shown([], zckpt.history(run, **given, **shared).as_dict(), render_history, history_page)


@verb("diff")
@click.argument("sources", nargs=-1, required=True, type=PLACE, metavar="A B")
@click.option("--rtol", default=0.0, help="Relative tolerance. Default: compare bits.")
@click.option("--atol", default=0.0, help="Absolute tolerance.")
@names_option("--slots", "SLOT,...", "Compare only these slots: weight, master, exp_avg, ...")
@click.option("--parameters", multiple=True, metavar="GLOB", help="Compare only these parameters; may be repeated.")
@click.option("--ignore", type=click.Choice(["metadata"]), help="Compare only tensors.")
@click.option("--only", type=click.Choice(["weights"]), help="As --slots=weight and --ignore=metadata.")
@flag(
    "--series",
    help="Compare several checkpoints of a run: how far each slot moved between them. Of two runs: where they part.",
)
@json_option
@page_options
@click.option("--limit", type=click.IntRange(min=1), default=40, show_default=True, help="Rows of each table.")
@flag("--quiet", "-q", help="No progress bar, no table.")
@takes(Compared)
@takes(Reading, suffix="_b")
@_shows
def diff_command(
    *,
    sources: tuple[Path, ...],
    slots: list[str],
    parameters: tuple[str, ...],
    ignore: str | None,
    only: str | None,
    series: bool,
    limit: int,
    shared: dict[str, Any],
    shared_b: dict[str, Any],
    **two: Any,  # noqa: ANN401  # what click gives, of two checkpoints
) -> _Shown:
    """Compare two checkpoints of any formats and world sizes: every slot of every parameter, and their settings.

    --tag, --root, --names, --tp-rules and the renaming options apply to A; options that end in -b apply to B.

    Exit status 0: equal; 1: different.
    """
    if only and slots:
        raise UsageError("--only and --slots exclude each other", expected="one of them")
    slots = ["weight"] if only else slots
    common: dict[str, Any] = {"slots": slots, "parameters": parameters}
    of_each = {*Copying.__annotations__, "names", "tp_rules"}
    for name, value in shared.items():
        (common if name in of_each else two)[name] = value
    tensors_only = ignore == "metadata" or (only is not None and not series)
    two |= {"ignore_metadata": tensors_only, **{f"{key}_b": value for key, value in shared_b.items()}}
    if series:
        if any(two.values()):
            raise UsageError("--series only takes --slots, --parameters, --names and --tp-rules")
        from zckpt.operations.parting import is_run

        if len(sources) == 2 and all(map(is_run, sources)):
            from zckpt.report.reports import render_parting

            if common.pop("names") or common.pop("tp_rules"):
                raise UsageError("--names and --tp-rules do not apply to two runs")
            parted = zckpt.parting(*sources, **common)
            text = partial(render_parting, limit=limit)
            return _Shown([], parted.as_dict(), text, status=int(bool(parted.changed)))
        from zckpt.report.page import series_page
        from zckpt.report.reports import render_series

        moved = zckpt.series(sources, **common)
        text = partial(render_series, width=width(), limit=limit)
        return _Shown(moved.checkpoints, moved.as_dict(), text, series_page)
    if len(sources) != 2:
        raise UsageError("diff compares two checkpoints", expected="A B", found=f"{len(sources)} given")
    from zckpt.report.page import diff_page
    from zckpt.report.reports import render_difference

    done = zckpt.diff(sources[0], sources[1], **two, **common)
    text = partial(render_difference, width=width(), paint=paint(), limit=limit)
    return _Shown([done.a, done.b], done.as_dict(), text, diff_page, int(not done.equal))


@verb("resume-check")
@source_argument
@click.option(
    "--for",
    "program",
    required=True,
    type=Near(["deepspeed", "trainer", "accelerate", "fsdp2", "megatron", "verl", "lightning", "zckpt"]),
    help="The program that will resume it.",
)
@click.option("--world-size", type=int, metavar="N", help="Data-parallel ranks. Default: as many as saved it.")
@click.option(
    "--model",
    type=PLACE,
    metavar="CONFIG",
    help="The model that will resume it: a transformers config.json, its directory, or any checkpoint.",
)
@json_option
@takes(Reading)
@_shows
def resume_check_command(*, source: Path, shared: dict[str, Any], **given: Any) -> _Shown:  # noqa: ANN401  # what click gives
    """Tell whether a program can resume a checkpoint as it is, what would be lost, and what to run if it cannot.

    Reads no tensor. Exit status 0: everything comes back; 1: something is lost, it does not resume, or zckpt cannot
    tell.
    """
    from zckpt.report.reports import render_resume_check

    found = zckpt.resume_check(source, **given, **shared)
    return _Shown([], found.as_dict(), render_resume_check, status=int(not found.resumes))


@verb("fingerprint")
@source_argument
@flag(
    "--write",
    help="Also store it, with a digest of each slot, in the checkpoint's directory or next to its file.",
)
@click.option("--output", type=FILE, help="Store it in FILE.")
@flag("--overwrite", help="Replace the file if it exists.")
@flag("--json", "as_json", help="Print one JSON document with a digest of each slot.")
@barless_option
@takes(Compared)
def fingerprint_command(
    source: Path,
    write: bool,
    output: Path | None,
    overwrite: bool,
    as_json: bool,
    barless: bool,
    shared: dict[str, Any],
) -> None:
    """Print a digest of a checkpoint's logical state, the same for every format, stage and world size.

    So one line is enough to compare a terabyte. With stored digests, `zckpt verify --against FILE` tells which slot has
    changed. It does not cover state that each rank has for itself; `zckpt diff` does.
    """
    from zckpt.compare.digests import bytes_of, digests_path
    from zckpt.state import without

    checkpoint = zckpt.open(source, **only(Reading, shared))
    if write and (shared["dequantize"] or any(only(Renaming, shared).values())):
        raise UsageError(
            "--write cannot store digests of other names or values with the source",
            expected="--output FILE",
        )
    target = output or (digests_path(checkpoint) if write else None)
    check_file(target, overwrite=overwrite)
    others = without(shared, *Reading.__annotations__)
    found = zckpt.fingerprint(checkpoint, reporter=reporter("fingerprint", quiet=barless), **others)
    _say_what_is_cached([checkpoint], direct=shared["direct"], quiet=barless)
    if target is not None:
        write_file(target, bytes_of(found), overwrite=overwrite)
    click.echo(json_text(found.as_dict()) if as_json else found.text)


@_shows
def _verified(*, source: Path, shared: dict[str, Any], **given: Any) -> _Shown:  # noqa: ANN401  # what click gives
    found = zckpt.verify(source, **given, **shared)
    checkpoint = found.checkpoint

    def text(document: Document) -> str:
        from zckpt.report.reports import render_verification

        return render_verification(document, width=width(), paint=paint())

    def page(document: Document) -> str:
        from zckpt.report.page import verify_page

        return verify_page(document, None if checkpoint is None else zckpt.map(checkpoint).as_dict())

    return _Shown([] if checkpoint is None else [checkpoint], found.as_dict(), text, page, int(not found.sound))


@verb("verify")
@source_argument
@flag("--deep", help="Read every byte: checksums, NaN and Inf, all weights, padding, copies.")
@click.option(
    "--against",
    type=PLACE,
    metavar="DIGESTS",
    help="Compare with the digests that `zckpt fingerprint --write` stored: a file, or a checkpoint that has them.",
)
@flag("--watch", help="SOURCE is a run: verify each checkpoint as it appears, until there is a finding.")
@click.option(
    "--settle",
    type=float,
    metavar="S",
    help="Watch: a checkpoint is finished S seconds after its last write. Default: 60.",
)
@click.option("--idle", type=float, metavar="S", help="Watch: stop when nothing has changed for S seconds.")
@click.option("--factor", type=float, metavar="F", help="Watch: factor by which a norm may change. Default: 10.")
@click.option(
    "--on-finding", metavar="COMMAND", help="Watch: run COMMAND, with the line on its standard input, and go on."
)
@json_option
@page_options
@flag("--quiet", "-q", help="No progress bar, no text; only the exit status.")
@takes(ReadCopied)
def verify_command(
    *,
    source: Path,
    watch: bool,
    shared: dict[str, Any],
    **given: Any,  # noqa: ANN401  # what click gives
) -> int:
    """Check that a checkpoint is whole and makes sense. Each defect has a stable code, a location and advice.

    Reads the structure and a sample of the weights, or with --deep every byte. Exit status: 0 sound, 1 unsound, 2
    unusable arguments, 3 nothing to verify.

    --watch verifies each checkpoint of a run as it appears, computes its fingerprint, compares it with the one before,
    and prints a line of JSON. Exit status: 1 at the first finding.
    """
    from zckpt.state import stated

    said = stated({name: given.pop(name) for name in ("settle", "idle", "factor", "on_finding")})
    if not watch:
        if said:
            raise UsageError(f"--{min(said).replace('_', '-')} needs --watch")
        return _verified(source=source, shared=shared, **given)
    quiet, deep, _ = given.pop("quiet"), given.pop("deep"), given.pop("as_json")
    given |= only(Reading, shared)
    if idle_ones := [name for name, value in given.items() if value]:
        raise UsageError(f"--{min(idle_ones).replace('_', '-').removesuffix('s')} does not go with --watch")
    return watched(source, quiet=quiet, deep=deep, **said, **only(Copying, shared))


@verb("scan")
@click.argument("place", metavar="SOURCE", type=PLACE)
@click.option("--sarif", "html", type=FILE, help="Also write SARIF 2.1.0.")
@overwrite_option
@json_option
@flag("--quiet", "-q", help="No text; only the exit status.")
@_shows
def scan_command(place: Path) -> _Shown:
    """Tell what each pickle in SOURCE would import and call, in every file whatever it is called. Runs none of them.

    Graded: data; known classes of frameworks, and which program needs them; unknown; dangerous, which is what runs
    code, and what shows one program something else than another. Exit status: 1 if anything is dangerous.
    """
    from zckpt.report.reports import render_scan, sarif
    from zckpt.torchfile.grades import DANGEROUS

    found = zckpt.scan(place)
    sarif_text = lambda document: json_text(sarif(document)) + "\n"  # noqa: E731
    return _Shown([], found.as_dict(), render_scan, sarif_text, int(found.grade == DANGEROUS))


@verb("map")
@source_argument
@click.argument("target", required=False, type=FILE)
@names_option("--slots", "SLOT,...", "Draw only these slots: weight, master, exp_avg, ...")
@flag("--json", "as_json", help="Print the data as one JSON document; TARGET is then optional.")
@flag("--overwrite", help="Replace TARGET if it exists.")
@takes(Salvaged)
def map_command(
    source: Path, target: Path | None, slots: list[str], as_json: bool, overwrite: bool, shared: dict[str, Any]
) -> None:
    """Draw a picture, to scale, of which rank holds which part of which parameter. Reads no tensor.

    TARGET ends in .svg or .png; a PNG needs matplotlib (zckpt[png]).
    """
    if target is None and not as_json:
        raise UsageError("no TARGET for the map", expected="a TARGET that ends in .svg or .png, or --json")
    if target is not None and target.suffix.lower() not in PICTURES:
        raise UsageError("a map is drawn as SVG or PNG", path=target, expected="a name that ends in .svg or .png")
    check_file(target, overwrite=overwrite)
    document = zckpt.map(source, slots=slots or None, **shared).as_dict()
    if target is not None:
        from zckpt.report.picture import png, svg

        write_file(target, (svg if target.suffix.lower() == ".svg" else png)(document), overwrite=overwrite)
    if as_json:
        click.echo(json_text(document))


@verb("formats")
@json_option
def formats_command(as_json: bool) -> None:
    """List the formats that can be read and written, their options, and the verbs that take them.

    This includes formats that other packages add.
    """
    from zckpt.operations.listing import list_formats
    from zckpt.report.text import formats

    document = list_formats()
    click.echo(json_text(document) if as_json else without_controls(formats(document)))


@verb("stats")
@source_argument
@names_option("--slots", "SLOT,...", "Only these slots: weight, master, exp_avg, ...")
@click.option("--parameters", multiple=True, metavar="GLOB", help="Only these parameters; may be repeated.")
@flag("--layers", help="One row per slot and layer (names that begin alike up to their number).")
@flag("--csv", "as_csv", help="Print rows of comma-separated values.")
@json_option
@page_options
@barless_option
@takes(Compared)
@_shows
def stats_command(
    *,
    source: Path,
    layers: bool,
    as_csv: bool,
    shared: dict[str, Any],
    **given: Any,  # noqa: ANN401  # what click gives
) -> _Shown:
    """Show statistics of each tensor: min, max, mean, deviation, norm, zeros, NaN and infinities.

    Reads every element once. --json also has a histogram of each tensor, by powers of two.
    """
    if as_csv and click.get_current_context().params["as_json"]:
        raise UsageError("--csv and --json exclude each other", expected="one of them")
    from zckpt.report.page import stats_page
    from zckpt.report.reports import comma_separated, render_figures

    def text(document: Document) -> str:
        if as_csv:
            return comma_separated(document, layers=layers).removesuffix("\n")
        return render_figures(document, layers=layers, width=width())

    return _Shown([], zckpt.stats(source, **given, **shared).as_dict(), text, stats_page)


@verb("show")
@source_argument
@click.argument("name")
@click.option("--slot", metavar="SLOT", help="Default: the master if there is one, else the weight.")
@click.option("--slice", metavar="0:4,:,-1", help="An index or a range for each dimension. Default: all.")
@click.option("--npy", type=FILE, help="Write the elements to FILE instead.")
@overwrite_option
@json_option
@takes(Salvaged)
def show_command(*, source: Path, name: str, as_json: bool, shared: dict[str, Any], **given: Any) -> None:  # noqa: ANN401
    """Show elements of the tensor NAME in SOURCE, and read nothing else.

    In an .npy file, types that NumPy lacks are stored exactly, as float32.
    """
    from zckpt.report.reports import render_elements

    found = zckpt.show(source, name, **given, **shared)
    click.echo(json_text(found.as_dict(), indent=None) if as_json else render_elements(found, width=width()))
