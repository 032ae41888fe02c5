"""Write a checkpoint of any format in any other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from zckpt.errors import UnsupportedError, UsageError, about, listed
from zckpt.evidence import refuse_ungrouped
from zckpt.formats.assets import CONFIG_NAME, find_assets, is_adapter
from zckpt.formats.consolidated.model import optimizer_slots
from zckpt.formats.floats import dequantized
from zckpt.formats.format import Format, Job, TargetFiles
from zckpt.formats.low_bit import codes_in
from zckpt.formats.options import choose
from zckpt.formats.registry import find_format, formats
from zckpt.formats.transformers_trainer.architectures import lacks_tied_name
from zckpt.naming import AS_IT_IS, Naming
from zckpt.operations.losses import check_nothing_lost, keeps_beside, refuse_rank_values, without_rank_values
from zckpt.operations.open import Source, opened
from zckpt.operations.options import Converted, Filled, Place, Unpack, naming_of, others, shares
from zckpt.operations.proof import slots_proof
from zckpt.operations.salvage import salvage
from zckpt.operations.target import How, Written, write_from
from zckpt.state import MASTER, WEIGHT, Checkpoint
from zckpt.state.names import as_filed

TIED_NAME = (
    "config.json says that the output layer is the embedding, for which files of transformers have no second name: "
    "programs that load strictly refuse this; --map=transformers adds the name"
)

ADAPTERS_NAME = (r"(lora_[AB])\.weight$", r"\1.default.weight")
"""What PEFT's names in files become in memory, for an adapter that has no name of its own."""

LIVE_ADAPTER = (
    "names are those of PEFT's files, and none is one of the model in memory, into which other programs load: a "
    "Trainer with DeepSpeed goes on with other weights without a word; "
    f"--rename='{'='.join(ADAPTERS_NAME)}' gives LoRA's their names in memory"
)


@shares(Filled, more=True)
def convert(
    source: Source,
    target: Place,
    *,
    to: str,
    verify: bool = False,
    fingerprint: bool | None = None,
    **given: Unpack[Converted],
) -> Written:
    """Convert a checkpoint to another format: model, masters, every optimizer slot, param groups and everything else.

    Parameters
    ----------
    source : path-like or Checkpoint
        Anything that `open` reads, or returned.
    target : path-like
        A directory that does not exist. With `to="consolidated"`, also a name that ends in .pt, .pth or .bin, for one
        file. With `to="universal"`, its parent gets `latest_universal`, which names it, as DeepSpeed expects.
    to : str
        The target format: "deepspeed", "universal", "consolidated", "zckpt", "dcp", "zero-redundancy",
        "fsdp-rank-files", "torch-checkpointing", "transformers-trainer", "accelerate", "megatron", or one from another
        package.
    verify : bool
        After writing, compare every byte with the source.
    fingerprint : bool, optional
        Store the target's fingerprint with it. Default: only for `zckpt`.
    **shared
    **options
        Options of the format, which `zckpt formats` explains. `deepspeed`: world_size, stage, elastic, round_robin and
        parameter_alignment, by default the source's. `zckpt` and `dcp`: world_size, the number of files, by default
        one; any number of ranks can load them. `zero-redundancy`: world_size, to write each rank's own file as well.
        `fsdp-rank-files`: world_size, fsdp_version, fsdp_size, device, torch_version, groups, units.
        `torch-checkpointing`: world_size, by default the source's, keys, device. `consolidated`, `dcp`, `deepspeed`,
        `zero-redundancy`: dtype of trained parameters in the model, by default "keep". None means not given.

    Raises
    ------
    UsageError
        An option cannot be used.
    SourceError
        The source cannot be read, contradicts itself, or holds something that the format cannot.
    TargetError
        The target exists or cannot be written.
    """
    options = others(given)
    how = How.of("convert", given, to=to, **options)
    written = find_format(to)
    if written is None or not written.writes:
        why = "unknown format" if written is None else f"{to} can be read, but not written"
        raise UsageError(why, expected=", ".join(one.name for one in formats() if one.writes), found=repr(to))
    chosen = choose(written.options, options, to)
    naming = naming_of(given)
    whole = opened(source, **given)
    found, values, drop = without_rank_values(whole, given["drop"])
    dropped = (*values, *check_nothing_lost([whole], drop))
    left = salvage(found, given, of_optimizer=True)
    left.refuse()
    [found], left_out = dequantized([left.checkpoint], given["dequantize"])
    checkpoint, notes = _as_expected(found, written, naming)
    path = Path(target)
    with about(checkpoint.source):
        laid = written.lay_out(Job(checkpoint, Path(checkpoint.named), path, chosen))
        if given["dequantize"] and CONFIG_NAME in laid.copied and codes_in(whole):
            raise UnsupportedError(
                f"its {CONFIG_NAME} says that weights are quantised, which would not be true for {to}",
                advice="`zckpt consolidate --dequantize` writes a plain model, which you can then convert",
            )
    recorded = written.fingerprinted if fingerprint is None else fingerprint
    looked_for: tuple[str, ...] = ()  # by programs, and not in the target
    if written.every_name:
        from zckpt.naming.sizes import read_config

        names = checkpoint.names
        config: Mapping[str, object] = {}
        with suppress(UsageError):  # one that cannot be read
            config, _ = read_config(None, whole)
        tied = (TIED_NAME,) if lacks_tied_name(config, names) else ()
        looked_for = (*tied, LIVE_ADAPTER) if is_adapter(names, find_assets(whole)) else tied
    laid = replace(laid, notes=(*notes, *left_out, *laid.notes, *looked_for))
    proof = slots_proof(checkpoint, laid, how, drop, verify=verify, records=recorded)
    done = write_from(
        Written, found, laid, path, how, owns=written.owns, inside=[checkpoint.source], proof=proof, dropped=dropped,
        sources=left.sources(found), missing=left.missing, filled=left.filled,
    )  # fmt: skip
    told = _of_optimizers(checkpoint, written, laid, getattr(chosen, "dtype", None))
    return replace(done, notes=(*done.notes, *told))


def as_converted(found: Checkpoint, written: Format, naming: Naming = AS_IT_IS) -> Checkpoint:
    """Return a checkpoint as `convert` would lay it out in a format, given no options but those of names.

    Raises LeftOutError: something in it would be lost; UnsupportedError: it has what no other format can hold.
    """
    check_nothing_lost([found], ())
    return _as_expected(found, written, naming)[0]


def _of_optimizers(checkpoint: Checkpoint, written: Format, laid: TargetFiles, dtype: str | None) -> Iterator[str]:
    """Say what becomes of several optimizers, of masters, and of no hyperparameters, in formats of other programs."""
    names = checkpoint.optimizers()
    if (
        dtype not in (None, "float32")
        and written.family != "deepspeed"
        and MASTER in optimizer_slots(checkpoint, dtype)
    ):
        reader = ", and zckpt.dcp.Reader reads them from here" if written.name == "dcp" else ""
        yield (
            f"other programs read the weights, and not the masters, which the optimizer's state holds: "
            f"--dtype float32 writes the masters as the weights{reader}"
        )
    if checkpoint.is_bare and written.name != checkpoint.format:
        yield (
            "the source has no hyperparameters for its param groups, so the target has none; torch's optimizers "
            "load its state, but cannot step; zckpt.load keeps the live optimizer's own"
        )
    if keeps_beside(checkpoint) and written.name != checkpoint.format and not laid.keeps_rest:
        yield (
            "only zckpt.load restores what the optimizer kept in addition to parameter state: its own "
            "program does not see it"
        )
    if names and not written.keeps_optimizers:
        yield (
            f"the param groups of {listed(names, by=' and ')} are written one after another as those of one optimizer; "
            "only zckpt's metadata says which is whose"
        )


def _as_expected(found: Checkpoint, written: Format, naming: Naming) -> tuple[Checkpoint, tuple[str, ...]]:
    """Return a checkpoint under the names that the target's programs look for, and what to know about them.

    Raises UnsupportedError: it has what no other format can hold.
    """
    if naming.changes or not written.keeps_ranks:
        round_means(found)
    checkpoint, notes = under_names(found, naming)
    own = find_format(checkpoint.format)
    if own is not None and own.family and own.family == written.family:
        checkpoint = as_filed(checkpoint)
    if written.needs_groups:
        refuse_ungrouped(checkpoint)
    if written is not own:  # its own format knows when it can go along
        refuse_rank_values(checkpoint, expected=f"--to={checkpoint.format} at {checkpoint.topology.dp} ranks")
    return checkpoint, notes


def under_names(checkpoint: Checkpoint, naming: Naming) -> tuple[Checkpoint, tuple[str, ...]]:
    """Return a checkpoint under other names, inside what it carries along, too, and what to know about them."""
    found = naming.traced(checkpoint)
    if not naming.changes:
        return found.checkpoint, ()
    from zckpt.naming.inside import follow_names

    return found.checkpoint, (*found.notes, *follow_names(found.checkpoint, checkpoint, found.names))


def round_means(checkpoint: Checkpoint) -> None:
    """Let weights that are means over ranks be the rounded means of masters: the mean of weights need not be."""
    for name, parameter in checkpoint.parameters.items():
        weight, master = parameter.weight, parameter.master
        if weight is not None and weight.replicas and master is not None:
            slots = {**parameter.slots, WEIGHT: replace(master, name=WEIGHT, dtype=weight.dtype)}
            checkpoint.parameters[name] = replace(parameter, slots=slots)
