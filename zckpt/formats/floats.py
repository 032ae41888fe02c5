"""Quantised weights, and quantised state of optimizers, as floats, whichever format they are in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from zckpt.engine.computed import Computed
from zckpt.errors import UsageError, listed
from zckpt.formats.low_bit import codes_in
from zckpt.state import Checkpoint

AnyCheckpoint = TypeVar("AnyCheckpoint", bound=Checkpoint)


def with_floats(*checkpoints: AnyCheckpoint, keeps_files: bool = False) -> list[AnyCheckpoint]:
    """Return checkpoints with numbers in the place of quantised weights, and float32 slots in that of quantised state.

    `keeps_files`: whether DeepSpeed's are still of its files, to be cut for other ranks. Raises UsageError: none of
    them has any; UnsupportedError: state that is quantised in a way that is not known, or of which it is not certain
    what elements codes are of; DamagedFileError: codes, scales and map do not belong together.
    """
    from zckpt.formats.deepspeed.rare.quantised import with_float_slots  # verbs that never do this do not wait for it
    from zckpt.formats.low_bit_floats import weights_as_floats
    from zckpt.formats.torch_files.quantised import as_floats

    found, nested = [], False
    for one in checkpoints:
        path, own = one.source, weights_as_floats(with_float_slots(one, keeps_files=keeps_files))
        parameters = {name: as_floats(its, path) for name, its in own.parameters.items()}
        unnamed = {name: as_floats(its, path) for name, its in own.unnamed.items()}
        nested |= any(its is not own.parameters[name] for name, its in parameters.items())  # bitsandbytes', in floats
        found.append(replace(own, parameters=parameters, unnamed=unnamed))
    every = [each for one in found for each in (*one.tensors(), *one.unnamed.values())]
    computed = any(isinstance(slot, Computed) for each in every for slot in each.slots.values())
    of_ranks = any(one.per_rank for one in checkpoints)  # of small tensors, a rank's is in floats
    if not (computed or nested or of_ranks):
        raise UsageError(
            "there are no quantised weights and no quantised optimizer state to turn into floats",
            path=checkpoints[0].source,
            expected="low-bit weights with scales, bitsandbytes' 8-bit state, or torchao's 8-bit, 4-bit or fp8 state",
            advice="omit --dequantize",
        )
    return found


def dequantized(checkpoints: Sequence[AnyCheckpoint], wanted: bool) -> tuple[Sequence[AnyCheckpoint], tuple[str, ...]]:
    """Return checkpoints as `with_floats` does, if that is wanted, and notes on what is left out and is no code's."""
    if not wanted:
        return checkpoints, ()
    from zckpt.formats.low_bit_floats import cache_scales

    scales = [found for one in checkpoints if codes_in(one) and (found := cache_scales(one))]
    notes = (f"{listed(one)}: scales of a cache in FP8, which no plain model has, are left out" for one in scales)
    return with_floats(*checkpoints), tuple(notes)
