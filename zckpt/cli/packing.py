"""The verbs about stores of checkpoints, and about what changed: `pack`, `unpack`, `patch`, `apply`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from zckpt.cli.history import run_argument
from zckpt.cli.options import Place, json_option, takes, target_argument, together
from zckpt.cli.streams import json_text, reporter
from zckpt.cli.verbs import verb
from zckpt.errors import without_controls
from zckpt.operations.options import ReadCopied

writing_options = together(
    click.option("--overwrite", is_flag=True, help="Replace TARGET if it exists."),
    click.option("--dry-run", is_flag=True, help="Show what would be written; write nothing."),
    json_option,
    click.option("--quiet", "-q", is_flag=True, help="No progress bar, no messages."),
)
store_argument = click.argument("store", type=click.Path(path_type=Path))


def _say(document: dict[str, Any], text: str, *, as_json: bool, quiet: bool) -> None:
    if as_json:
        click.echo(json_text(document))
    elif document.get("dry_run") or not quiet:
        click.echo(without_controls(text), err=not document.get("dry_run"))


@verb("pack")
@run_argument
@store_argument
@click.option(
    "--full-every",
    type=int,
    default=10,
    show_default=True,
    metavar="K",
    help="At most K checkpoints must be read to restore one; a larger K saves more space.",
)
@click.option("--name", metavar="NAME", help="Name in STORE, if RUN is a single checkpoint. Default: its own name.")
@click.option("--dry-run", is_flag=True, help="Show what would be packed; write nothing.")
@json_option
@click.option("--quiet", "-q", is_flag=True, help="No progress bar, no messages.")
def pack_command(run: Path, store: Path, as_json: bool, quiet: bool, **given: Any) -> None:  # noqa: ANN401  # what click gives
    """Add a run's checkpoints, of any formats, to a STORE, in a fraction of the space.

    Every verb takes STORE/NAME as a SOURCE. RUN, and what is already in STORE, stay as they are.
    """
    from zckpt.operations.pack import pack
    from zckpt.report.packing import packed

    found = pack(run, store, reporter=reporter("pack", quiet=quiet), **given).as_dict()
    _say(found, packed(found), as_json=as_json, quiet=quiet)


@verb("unpack")
@store_argument
@target_argument
@writing_options
def unpack_command(store: Path, target: Path, overwrite: bool, dry_run: bool, as_json: bool, quiet: bool) -> None:
    """Restore the files of one checkpoint, STORE/NAME, or of all in STORE, bit for bit."""
    from zckpt.operations.unpack import unpack
    from zckpt.report.packing import unpacked

    told = reporter("unpack", quiet=quiet)
    found = unpack(store, target, overwrite=overwrite, dry_run=dry_run, reporter=told).as_dict()
    _say(found, unpacked(found), as_json=as_json, quiet=quiet)


@verb("patch")
@click.argument("a", type=Place())
@click.argument("b", type=Place())
@target_argument
@click.option(
    "--to",
    type=click.Choice(["zckpt", "slime"]),
    default="zckpt",
    show_default=True,
    help="slime: the changed bytes of weights, as slime publishes them; TARGET is called weight_v000001, ...",
)
@click.option("--encoding", type=click.Choice(["xor", "overwrite"]), default="xor", help="For slime. Default: xor.")
@writing_options
@takes(ReadCopied)
def patch_command(
    a: Path,
    b: Path,
    target: Path,
    as_json: bool,
    quiet: bool,
    shared: dict[str, Any],
    **given: Any,  # noqa: ANN401  # what click gives
) -> None:
    """Write what turns checkpoint A into checkpoint B of the same model, whatever their formats and world sizes.

    A and B are identified by their fingerprints: a patch applies to A in any format, and to nothing else.
    """
    from zckpt.operations.patch import patch
    from zckpt.report.packing import patched

    found = patch(a, b, target, reporter=reporter("patch", quiet=quiet), **given, **shared).as_dict()
    _say(found, patched(found), as_json=as_json, quiet=quiet)


@verb("apply")
@click.argument("a", type=Place())
@click.argument("patch", type=click.Path(path_type=Path))
@target_argument
@writing_options
@takes(ReadCopied)
def apply_command(
    a: Path,
    patch: Path,
    target: Path,
    as_json: bool,
    quiet: bool,
    shared: dict[str, Any],
    **given: Any,  # noqa: ANN401  # what click gives
) -> None:
    """Apply PATCH to A: write the files of the other checkpoint, bit for bit.

    PATCH can also be a version that slime has published, weight_v000003, with A the model at any earlier version.
    """
    from zckpt.operations.patch import apply
    from zckpt.report.packing import unpacked

    found = apply(a, patch, target, reporter=reporter("apply", quiet=quiet), **given, **shared).as_dict()
    _say(found, unpacked(found), as_json=as_json, quiet=quiet)
