"""Write a checkpoint of any format in any other."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from zckpt.engine import DEFAULT_MEMORY_NBYTES, Reporter
from zckpt.engine.checking import Checked, Checks
from zckpt.engine.plan import Plan, plan
from zckpt.errors import UsageError
from zckpt.formats.checksums import source_checks
from zckpt.formats.writers import Made, Wanted, lay_out
from zckpt.operations.left_out import check_nothing_lost
from zckpt.operations.open import Source, named, opened
from zckpt.operations.proof import Proof, check_apart, check_companions, check_sources
from zckpt.operations.result import Written
from zckpt.operations.target import write_target
from zckpt.state import MASTER, WEIGHT, Checkpoint
from zckpt.storage.ownership import check_replaceable


def convert(
    source: Source,
    target: str | os.PathLike[str],
    *,
    to: str,
    world_size: int | None = None,
    stage: int | None = None,
    elastic: bool | None = None,
    round_robin: bool | None = None,
    parameter_alignment: bool | None = None,
    dtype: str | None = None,
    weight_check: bool = True,
    checksums: bool = True,
    verify: bool = False,
    fingerprint: bool | None = None,
    overwrite: bool = False,
    dry_run: bool = False,
    memory: int = DEFAULT_MEMORY_NBYTES,
    reporter: Reporter | None = None,
    drop: Sequence[str] = (),
    roots: Sequence[str | os.PathLike[str]] = (),
    tag: str | None = None,
    names: Sequence[str] | None = None,
    tp_rules: str | os.PathLike[str] | None = None,
) -> Written:
    """Write a checkpoint in another format: model, masters, every optimizer slot, param groups and all the rest.

    Parameters
    ----------
    source : path-like or Checkpoint
        Anything that `open` reads, or has opened.
    target : path-like
        A directory that does not exist. `to="consolidated"`: or a name that ends in .pt, .pth or .bin, for one file.
        `to="universal"`: its parent gets `latest_universal`, which names it, as DeepSpeed expects it.
    to : {"deepspeed", "universal", "consolidated", "zckpt", "dcp", "zero-redundancy"}
    world_size : int, optional
        Ranks of the target. `deepspeed`: by default the source's. `zckpt`, `dcp`: files to spread it over, by
        default one; any number of ranks loads it. `zero-redundancy`: also write each rank's own file.
    stage : {1, 2, 3}, optional
        ZeRO stage, for `deepspeed`; by default the source's.
    elastic, round_robin, parameter_alignment : bool, optional
        For `deepspeed`, as for `reshard`.
    dtype : {"float32", "bfloat16", "float16", "keep"}, optional
        Of trained parameters in the model of `consolidated`, `dcp` and `zero-redundancy`; by default "keep".
    verify : bool
        Compare all that was written with the source, before it gets its name.
    fingerprint : bool, optional
        Record the fingerprint of what was written with it; by default for `zckpt` only.
    weight_check, checksums, overwrite, dry_run, memory, reporter, drop, roots, tag, names, tp_rules
        As for `consolidate`.

    Raises
    ------
    UsageError
        An option that cannot be used.
    SourceError
        The source cannot be read, contradicts itself, or holds what the format cannot.
    TargetError
        The target exists or cannot be written.
    """
    if memory < 1:
        raise UsageError("sizes must be positive", found=memory)
    checkpoint = opened(source, roots=roots, tag=tag, names=names, tp_rules=tp_rules)
    dropped = check_nothing_lost(checkpoint, drop)
    if to != "deepspeed":  # whose own writer keeps what each rank has
        _round_means(checkpoint)
    path = Path(target)
    wanted = Wanted(world_size, stage, elastic, round_robin, parameter_alignment, dtype)
    made = lay_out(checkpoint, named(checkpoint), path, to, wanted)
    planned = plan(made.files)
    recorded = to == "zckpt" if fingerprint is None else fingerprint
    proof = Proof(checkpoint, path, verify, recorded, memory, reporter, drop, made.restated)
    if made.is_file:
        check_sources(checkpoint, [path, *proof.beside])
        if overwrite:
            check_companions(path, [path, *proof.beside])
    else:
        check_apart(checkpoint, path, overwrite=overwrite, owned=made.owned)
    for one in made.beside:
        check_replaceable(path.parent / one.name)
    compared = _compared(checkpoint) if weight_check else 0
    checked = Checked()
    if not dry_run:
        checks = source_checks(checkpoint.files, planned) if checksums else None
        checked = _write(proof, made, planned, overwrite, checks)
    inside = [path if made.is_file else path / one.name for one in made.files]
    return Written(
        dry_run=dry_run,
        files=tuple(inside + [path.parent / one.name for one in made.beside]),
        read_nbytes=planned.read_nbytes,
        write_nbytes=planned.write_nbytes,
        memory=memory,
        compared=compared,
        checksummed=checked.nbytes,
        verified=proof.verified,
        notes=(*made.notes, *_of_several(checkpoint, to)),
        dropped=dropped,
        warnings=tuple(checkpoint.warnings),
    )


def _of_several(checkpoint: Checkpoint, to: str) -> tuple[str, ...]:
    """Say what becomes of several optimizers in a format of programs that have one."""
    names = checkpoint.optimizers()
    if not names or to == "zckpt":
        return ()
    return (
        f"the param groups of {' and '.join(names)} follow each other as those of one optimizer; which is of which, "
        f"only zckpt's own metadata says",
    )


def _round_means(checkpoint: Checkpoint) -> None:
    """Let weights that are means over ranks be the rounded means of masters: the mean of weights need not be."""
    for name, parameter in checkpoint.parameters.items():
        weight, master = parameter.slots.get(WEIGHT), parameter.slots.get(MASTER)
        if weight is not None and weight.replicas and master is not None:
            slots = {**parameter.slots, WEIGHT: replace(master, name=WEIGHT, dtype=weight.dtype)}
            checkpoint.parameters[name] = replace(parameter, slots=slots)


def _compared(checkpoint: Checkpoint) -> int:
    if not any(MASTER in p.slots and WEIGHT in p.slots for p in checkpoint.parameters.values()):
        return 0
    from zckpt.compare.weights import check_weights

    return check_weights(checkpoint)


def _write(proof: Proof, made: Made, planned: Plan, overwrite: bool, checks: Checks | None) -> Checked:
    """Write the target, prove it before it gets its name, then write what points to it; return what was checked."""
    path = proof.target
    checked = write_target(
        planned,
        path,
        owned=None if made.is_file else made.owned,
        more=proof.beside if made.is_file else (),
        overwrite=overwrite,
        memory=proof.memory,
        reporter=proof.reporter,
        checks=checks,
        prove=proof.of,
    )
    for one in made.beside:
        write_target(plan([one]), path.parent / one.name, overwrite=True)
    return checked
