"""The verbs about stores of checkpoints, and about what changed: `pack`, `unpack`, `patch`, `apply`."""

from __future__ import annotations

import click

from zckpt.cli.options import PATH, Place, json_option, quiet_option, takes, target_argument, together
from zckpt.cli.verbs import flag, verb
from zckpt.cli.writing import running
from zckpt.operations.options import ReadCopied

writing_options = together(
    flag("--overwrite", help="Replace TARGET if it exists."),
    flag("--dry-run", help="Show what would be written; write nothing."),
    json_option,
    quiet_option,
)
store_argument = click.argument("store", type=PATH)


@verb("pack")
@click.argument("source", type=Place(), metavar="RUN")
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
@flag("--dry-run", help="Show what would be packed; write nothing.")
@json_option
@quiet_option
@running("packing.packed")
def pack_command() -> None:
    """Add a run's checkpoints, of any formats, to a STORE, in a fraction of the space.

    Every verb takes STORE/NAME as a SOURCE. RUN, and what is already in STORE, stay as they are.
    """


@verb("unpack")
@store_argument
@target_argument
@writing_options
@running("packing.unpacked")
def unpack_command() -> None:
    """Restore the files of one checkpoint, STORE/NAME, or of all in STORE, bit for bit."""


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
@running("packing.patched")
def patch_command() -> None:
    """Write what turns checkpoint A into checkpoint B of the same model, whatever their formats and world sizes.

    A and B are identified by their fingerprints: a patch applies to A in any format, and to nothing else.
    """


@verb("apply")
@click.argument("a", type=Place())
@click.argument("patch", type=PATH)
@target_argument
@writing_options
@takes(ReadCopied)
@running("packing.unpacked")
def apply_command() -> None:
    """Apply PATCH to A: write the files of the other checkpoint, bit for bit.

    PATCH can also be a version that slime has published, weight_v000003, with A the model at any earlier version.
    """
