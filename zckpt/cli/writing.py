"""The verbs that write a checkpoint: `consolidate`, `reshard`, `convert`, `strip`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from zckpt.cli.options import (
    ConvertCommand,
    Place,
    ReshardCommand,
    comma_separated,
    dequantize_option,
    exclude_frozen_option,
    max_shard_size_option,
    proof_options,
    show,
    source_argument,
    tied_option,
    write_options,
)
from zckpt.cli.streams import reporter
from zckpt.operations.options import ReadWritten, Renamed

target_argument = click.argument("target", type=Place())


@click.command("consolidate")
@source_argument
@target_argument
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
@tied_option
@exclude_frozen_option
@max_shard_size_option
@click.option(
    "--config",
    type=Place(),
    metavar="DIR",
    help="Where config.json, tokenizer and so on are that go into a directory. Default: SOURCE, or huggingface/ in it.",
)
@dequantize_option
@click.option(
    "--hyperparameters",
    type=Place(),
    metavar="FILE",
    help="JSON list, an object for each param group: for --slots of an elastic SOURCE, which holds none.",
)
@write_options(Renamed)
def consolidate_command(
    source: Path,
    target: Path,
    dtype: str | None,
    slots: tuple[str, ...],
    tied: str,
    exclude_frozen: bool,
    max_shard_size: int,
    config: Path | None,
    dequantize: bool,
    hyperparameters: Path | None,
    as_json: bool,
    quiet: bool,
    shared: dict[str, Any],
) -> None:
    """Turn a sharded checkpoint into one model.

    TARGET x.safetensors is one file, x.pt or x.bin a torch state dict, any other name a directory as Hugging Face
    lays it out, for from_pretrained: safetensors, with the config.json and tokenizer that SOURCE has. Names that end as
    other programs' files do (.gguf, .onnx, .ckpt, ...) are refused.
    """
    from zckpt.operations.consolidate import consolidate

    done = consolidate(
        source,
        target,
        dtype=dtype,
        slots=comma_separated(slots),
        tied=tied,
        exclude_frozen=exclude_frozen,
        max_shard_size=max_shard_size,
        config=config,
        dequantize=dequantize,
        hyperparameters=hyperparameters,
        reporter=reporter("consolidate", quiet=quiet),
        **shared,
    )
    show(done, as_json=as_json, quiet=quiet)


@click.command("reshard", cls=ReshardCommand)
@source_argument
@target_argument
@click.option("--world-size", type=int, required=True, metavar="N", help="Data-parallel ranks that will load TARGET.")
@proof_options
@dequantize_option
@write_options(Renamed)
def reshard_command(
    source: Path,
    target: Path,
    world_size: int,
    verify: bool,
    fingerprint: bool | None,
    dequantize: bool,
    as_json: bool,
    quiet: bool,
    shared: dict[str, Any],
    **options: object,
) -> None:
    """Cut a DeepSpeed ZeRO checkpoint for another number of data-, expert- or tensor-parallel ranks, or another stage.

    Stock DeepSpeed loads TARGET with load_checkpoint, as if that number of ranks had saved it. A run directory
    comes out as a run directory with `latest`, a tag directory as a tag directory. At T tensor-parallel ranks,
    N x T ranks will load it. Of Hugging Face's Trainer, SOURCE is `checkpoint-N`: all that it keeps there comes along,
    and the Trainer resumes from TARGET. Names stay as they are (`convert --to deepspeed` changes them),
    but of a pipeline, of which --rename or --map makes one model.

    Megatron's legacy files (mp_rank_TT_PPP) are cut for other tensor-, pipeline- and expert-parallel ranks, too.
    """
    from zckpt.operations.reshard import reshard

    done = reshard(
        source,
        target,
        world_size=world_size,
        verify=verify,
        fingerprint=bool(fingerprint),
        dequantize=dequantize,
        reporter=reporter("reshard", quiet=quiet),
        **shared,
        **ReshardCommand.typed(options),
    )
    show(done, as_json=as_json, quiet=quiet)


@click.command("convert", cls=ConvertCommand, short_help="Write a checkpoint in another format, with all of its state.")
@source_argument
@target_argument
@proof_options
@dequantize_option
@write_options(Renamed)
def convert_command(
    source: Path,
    target: Path,
    to: str,
    verify: bool,
    fingerprint: bool | None,
    dequantize: bool,
    as_json: bool,
    quiet: bool,
    shared: dict[str, Any],
    **options: object,
) -> None:
    """Write a checkpoint in another format, with all of its state."""
    from zckpt.operations.convert import convert

    done = convert(
        source,
        target,
        to=to,
        verify=verify,
        fingerprint=fingerprint,
        dequantize=dequantize,
        reporter=reporter("convert", quiet=quiet),
        **shared,
        **ConvertCommand.typed(options),
    )
    show(done, as_json=as_json, quiet=quiet)


@click.command("strip")
@source_argument
@target_argument
@click.option("--padding", is_flag=True, help="Remove the padding at the end of each rank's partition (ZeRO-1, 2).")
@click.option(
    "--optimizer",
    is_flag=True,
    help="Remove the optimizer's state: slots, and masters of which there is a weight as well.",
)
@click.option("--unreferenced", is_flag=True, help="Remove bytes of storages that no tensor uses.")
@click.option(
    "--keep-slots",
    multiple=True,
    metavar="SLOT,...",
    help="Remove all slots of the optimizer but these; weights and masters stay. May be repeated.",
)
@write_options(ReadWritten)
def strip_command(
    source: Path,
    target: Path,
    padding: bool,
    optimizer: bool,
    unreferenced: bool,
    keep_slots: tuple[str, ...],
    as_json: bool,
    quiet: bool,
    shared: dict[str, Any],
) -> None:
    """Write a checkpoint again without what is not needed; the program it came from loads TARGET.

    TARGET has SOURCE's format and form: a file, a run directory or a tag directory. Without any of the first four
    options, what each would save is said and nothing is written.
    """
    from zckpt.operations.strip import strip

    done = strip(
        source,
        target,
        padding=padding,
        optimizer=optimizer,
        unreferenced=unreferenced,
        keep_slots=comma_separated(keep_slots) if keep_slots else None,
        reporter=reporter("strip", quiet=quiet),
        **shared,
    )
    show(done, as_json=as_json, quiet=quiet)
