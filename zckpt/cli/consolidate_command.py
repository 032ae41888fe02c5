"""`zckpt consolidate`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from zckpt.cli.options import ByteSize, show, source_options, write_options


@click.command("consolidate")
@click.argument("source", type=click.Path(path_type=Path))
@click.argument("target", type=click.Path(path_type=Path))
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16", "float16", "keep"]),
    help="Element type of trained parameters; frozen ones and buffers keep theirs. "
    "Default: masters as float32, parameters without a master in their own type.",
)
@click.option(
    "--slots",
    multiple=True,
    metavar="all|SLOT,...",
    help="Also write these optimizer slots, to TARGET's name with .optimizer in it, or into the directory.",
)
@click.option(
    "--tied",
    type=click.Choice(["duplicate", "drop"]),
    default="duplicate",
    show_default=True,
    help="Write a tied parameter under all its names, or its owner's only.",
)
@click.option("--exclude-frozen", is_flag=True, help="Leave frozen parameters out.")
@click.option(
    "--max-shard-size", type=ByteSize(), default="5GB", show_default=True, help="Largest file of a directory."
)
@write_options
@source_options
def consolidate_command(
    source: Path,
    target: Path,
    dtype: str | None,
    slots: tuple[str, ...],
    tied: str,
    exclude_frozen: bool,
    max_shard_size: int,
    as_json: bool,
    quiet: bool,
    writing: dict[str, Any],
    where: dict[str, Any],
) -> None:
    """Turn a sharded checkpoint into one model.

    TARGET x.safetensors is one file, x.pt or x.bin a torch state dict, any other name a directory of
    safetensors shards with an index, as Hugging Face lays it out. Names that end as other programs' files do
    (.gguf, .onnx, .ckpt, ...) are refused.
    """
    from zckpt.cli.streams import reporter
    from zckpt.operations.consolidate import consolidate

    done = consolidate(
        source,
        target,
        dtype=dtype,
        slots=[name for one in slots for name in one.split(",") if name],
        tied=tied,
        exclude_frozen=exclude_frozen,
        max_shard_size=max_shard_size,
        reporter=reporter("consolidate", quiet=quiet),
        **writing,
        **where,
    )
    show(done, as_json=as_json, quiet=quiet)
