"""`zckpt consolidate`."""

from __future__ import annotations

from pathlib import Path

import click

from zckpt.cli.options import ByteSize, names_option, read_names, show, source_options, write_options


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
@names_option
@source_options
def consolidate_command(
    source: Path,
    target: Path,
    dtype: str | None,
    slots: tuple[str, ...],
    tied: str,
    exclude_frozen: bool,
    max_shard_size: int,
    no_weight_check: bool,
    no_checksums: bool,
    memory: int,
    overwrite: bool,
    drop: tuple[str, ...],
    dry_run: bool,
    as_json: bool,
    quiet: bool,
    roots: tuple[Path, ...],
    tag: str | None,
    names_file: Path | None,
) -> None:
    """Turn a sharded checkpoint into one model.

    TARGET x.safetensors is one file, x.pt or x.bin a torch state dict, any other name a directory of
    safetensors shards with an index, as Hugging Face lays it out. Names that end as other programs' files do
    (.gguf, .onnx, .ckpt, ...) are refused.
    """
    from zckpt.cli.progress import reporter
    from zckpt.operations.consolidate import consolidate
    from zckpt.report.written import document, render

    done = consolidate(
        source,
        target,
        dtype=dtype,
        slots=[name for one in slots for name in one.split(",") if name],
        tied=tied,
        exclude_frozen=exclude_frozen,
        max_shard_size=max_shard_size,
        weight_check=not no_weight_check,
        checksums=not no_checksums,
        memory=memory,
        overwrite=overwrite,
        drop=drop,
        dry_run=dry_run,
        reporter=reporter("consolidate", quiet=quiet),
        roots=roots,
        tag=tag,
        names=read_names(names_file),
    )
    show(
        document(done, dry_run=dry_run),
        render(done, dry_run=dry_run),
        as_json=as_json,
        dry_run=dry_run,
        quiet=quiet,
    )
