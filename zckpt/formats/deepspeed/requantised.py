"""Quantised state for ranks that hold other elements: made floats, cut, and made codes anew.

    partition of a rank   |exp_avg of a |exp_avg of b  |padding|     as `--dequantize` would write it
    codes                 |code|code|code ...                        } of its blocks, counted from its first element
    scales                |scale    |scale ...                       }
    map                   as every rank of the source has it

What was too small to be quantised stays in float32; `codes` says what that is.
"""

from __future__ import annotations

import numpy as np

from zckpt.errors import UnsupportedError, UsageError
from zckpt.formats.deepspeed.codes import SMALLEST_NUMEL, Form, Kept, bytes_of
from zckpt.formats.deepspeed.decide import decide
from zckpt.formats.deepspeed.options import RecutOptions
from zckpt.formats.deepspeed.quantised import is_quantised, with_float_slots
from zckpt.formats.deepspeed.target import Target
from zckpt.formats.torch_files.quantised import BLOCKS, NESTED, Moment
from zckpt.state import Checkpoint
from zckpt.state.checkpoint import RankValue


def decide_requantised(checkpoint: Checkpoint, options: RecutOptions) -> Target:
    """Return the target for a checkpoint with 8-bit state: cut as it is if blocks allow it, else quantised anew.

    Raises
    ------
    UsageError
        There is no such state.
    UnsupportedError
        It is not certain what it is of, or it is of a kind that is not made anew.
    DamagedFileError
        Codes, scales and map do not belong together.
    """
    if not any(map(is_quantised, checkpoint.per_rank)):
        raise UsageError(
            "no quantised state of ranks' partitions that could be quantised anew",
            path=checkpoint.source,
            expected=f"{NESTED} of bitsandbytes, or moments of torchao, in DeepSpeed's files",
            advice="leave --requantize out",
        )
    try:
        return decide(checkpoint, options)
    except UnsupportedError:
        floats = with_float_slots(checkpoint, keeps_files=True)
    target = decide(floats, options)
    if target.elastic:
        raise UnsupportedError("the elastic form is not written with quantised state", path=checkpoint.source,
                               expected="--rigid")  # fmt: skip
    if target.regrouped and len(target.origin.ranks) > 1:
        raise UnsupportedError(
            "quantised state of stages or slices is quantised anew for these only",
            path=checkpoint.source,
            expected="the tensor- and pipeline-parallel sizes that it has",
            advice="--dequantize writes it as float32, for an optimizer that keeps it so",
        )
    held: dict[tuple[int, int], list[RankValue]] = {}
    for one in checkpoint.per_rank:
        held.setdefault((one.mp_rank, one.group), []).append(one)
    # The form of a param group's quantised state has to be one on all data-parallel ranks.
    target.forms.update((key, _form(values, f"group {key[1]}", checkpoint.source)) for key, values in held.items())
    return target


def rounded(target: Target) -> dict[str, frozenset[str]]:
    """Return the moments that were quantised anew, as floats are called, by parameter."""
    found = {key: frozenset(form.blocks) for key, form in target.forms.items()}
    return {
        parameter.name: found[rank.mp_rank, group.index]
        for rank in target.ranks
        for group in rank.groups
        for parameters in group.experts
        for parameter in parameters
        if found.get((rank.mp_rank, group.index))
    }


def notes(target: Target) -> list[str]:
    """Say what was rounded once more."""
    groups = [str(index) for index in sorted({index for (_, index), form in target.forms.items() if form.blocks})]
    if not groups:
        return []
    what = f"param group{'s' if len(groups) > 1 else ''} {', '.join(groups)}"
    if any(any(held[0].cls for held in form.kept.moments.values()) for form in target.forms.values()):
        what += f", of partitions with whole blocks and {SMALLEST_NUMEL} elements at least (others are in float32),"
    return [f"quantised state of {what} was quantised anew: blocks have other elements than in the source"]


def _form(values: list[RankValue], what: str, path: str) -> Form:
    """Return the form of a group's partitions; small ones may be in float32."""
    kept, blocks = Kept.of(values, what, path), {}
    if len({len(held) for held in kept.moments.values()}) > 1 or len({one.key == NESTED for one in values}) > 1:
        raise _refused(what, path, "another form on another rank, or in another sub-group")
    for name, held in kept.moments.items():
        coded = [one for one in held if one.scale is not None]
        if not coded:
            continue
        maps = {bytes_of(one.qmap) for one in coded}
        if len({(one.cls, one.codes.dtype) for one in coded}) > 1 or len(maps) > 1:
            raise _refused(what, path, f"another form of {name} on another rank")
        if not (np.diff(np.frombuffer(maps.pop(), "<f4")) >= 0).all():
            raise _refused(what, path, f"a map of {name} that does not ascend")
        sizes = set.intersection(*map(_blocks, coded))
        if len(sizes) != 1:
            raise _refused(what, path, f"scales of {name} that fit {len(sizes)} sizes of blocks")
        blocks[name] = sizes.pop()
    return Form(kept, blocks)


def _blocks(moment: Moment) -> set[int]:
    """Return the sizes of a block that the number of scales allows."""
    if moment.cls or moment.scale is None:
        return {moment.block}
    return {size for size in BLOCKS if -(-moment.numel // size) == moment.scale.numel}


def _refused(what: str, path: str, found: str) -> UnsupportedError:
    return UnsupportedError(
        f"the quantised state of {what} cannot be quantised anew",
        path=path,
        expected="moments of one class, in blocks of one size, with one ascending map on all ranks",
        found=found,
        advice="--dequantize writes it as float32, for an optimizer that keeps it so",
    )
