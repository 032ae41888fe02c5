"""Quantised state for ranks that hold other elements: made floats, cut, and made codes anew.

    partition of a rank   |exp_avg of a |exp_avg of b  |padding|     as `--dequantize` would write it
    codes                 |code|code|code ...                        } of its blocks, counted from its first element
    scales                |scale    |scale ...                       }
    map                   as every rank of the source has it

What was too small to be quantised stays in float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from zckpt.engine.computed import Computed
from zckpt.errors import UnsupportedError, UsageError, about
from zckpt.formats.deepspeed.decide import decide
from zckpt.formats.deepspeed.options import RecutOptions
from zckpt.formats.deepspeed.rare.quantised import (
    CODES,
    SCALE,
    Kept,
    by_group,
    bytes_of,
    is_quantised,
    with_float_slots,
)
from zckpt.formats.deepspeed.target import Target
from zckpt.formats.format import TargetFiles
from zckpt.formats.torch_files.quantised import BLOCKS, NESTED, Moment
from zckpt.formats.torch_files.writer import NewStorage, SlotContent, new_storage
from zckpt.state import Checkpoint, differ
from zckpt.state.checkpoint import RankValue
from zckpt.torchfile import Tensor

SMALLEST_NUMEL = 4096
"""Elements of a tensor that torchao quantises, if they are whole blocks."""


def decide_requantised(checkpoint: Checkpoint, options: RecutOptions) -> Target:
    """Return the target for a checkpoint with 8-bit state: cut as it is if blocks allow it, else quantised anew.

    Raises UsageError: there is no such state; UnsupportedError: it is not certain what it is of, or it is of a kind
    that is not made anew; DamagedFileError: codes, scales and map do not belong together.
    """
    if not any(map(is_quantised, checkpoint.per_rank)):
        raise UsageError(
            "there is no quantised state to quantise again",
            path=checkpoint.source,
            expected=f"{NESTED} of bitsandbytes, or moments of torchao, in DeepSpeed's files",
            advice="omit --requantize",
        )
    try:
        return decide(checkpoint, options)
    except UnsupportedError:
        floats = with_float_slots(checkpoint, keeps_files=True)
    target = decide(floats, options)
    with about(checkpoint.source):
        if target.elastic:
            raise UnsupportedError("the elastic form cannot hold quantised state", expected="--rigid")
        if target.regrouped and len(target.origin.ranks) > 1:
            raise UnsupportedError(
                "quantised state of stages or slices can only be quantised again for the same ones",
                expected="the source's tensor- and pipeline-parallel sizes",
                advice="--dequantize writes it as float32, for an optimizer that keeps floats",
            )
        # The form of a param group's quantised state has to be one on all data-parallel ranks.
        held = by_group(checkpoint)
        target.coded.update((key, _form(values, f"group {key[1]}")) for key, values in held.items())
    return target


def with_notes(written: TargetFiles, target: Target) -> TargetFiles:
    """Say what was rounded once more: moments that were quantised anew, as floats are called, by parameter."""
    forms = {key: form for key, form in target.coded.items() if isinstance(form, Form) and form.blocks}
    if not forms:
        return written
    rounded = {
        p.name: frozenset(forms[rank.mp_rank, group.index].blocks)
        for rank in target.ranks for group in rank.groups if (rank.mp_rank, group.index) in forms
        for own in group.experts for p in own
    }  # fmt: skip
    groups = sorted({index for _, index in forms})
    what = f"param group{'s' if len(groups) > 1 else ''} {', '.join(map(str, groups))}"
    if any(held[0].cls for form in forms.values() for held in form.kept.moments.values()):
        what += f", of partitions with whole blocks and {SMALLEST_NUMEL} elements at least (others are in float32),"
    note = f"state of {what} was quantised again: blocks have other elements than in the source"
    return replace(written, notes=[*written.notes, note], rounded=rounded)


def _form(values: list[RankValue], what: str) -> Form:
    """Return the form of a group's partitions; small ones may be in float32."""
    kept, blocks = Kept.of(values, what), {}
    if differ([len(held) for held in kept.moments.values()]) or differ([one.key == NESTED for one in values]):
        raise _refused(what, "another form on another rank, or in another sub-group")
    for name, held in kept.moments.items():
        coded = [one for one in held if one.scale is not None]
        if not coded:
            continue
        maps = {bytes_of(one.qmap) for one in coded}
        if len({(one.cls, one.codes.dtype) for one in coded}) > 1 or len(maps) > 1:
            raise _refused(what, f"another form of {name} on another rank")
        if not (np.diff(np.frombuffer(maps.pop(), "<f4")) >= 0).all():
            raise _refused(what, f"a map of {name} that is not ascending")
        sizes = set.intersection(*map(_blocks, coded))
        if len(sizes) != 1:
            raise _refused(what, f"scales of {name} that fit {len(sizes)} sizes of blocks")
        blocks[name] = sizes.pop()
    return Form(kept, blocks)


def _blocks(moment: Moment) -> set[int]:
    """Return the sizes of a block that the number of scales allows."""
    if moment.cls or moment.scale is None:
        return {moment.block}
    return {size for size in BLOCKS if -(-moment.numel // size) == moment.scale.numel}


def _refused(what: str, found: str) -> UnsupportedError:
    return UnsupportedError(
        f"the quantised state of {what} cannot be quantised again",
        expected="moments of one class, in blocks of one size, with one ascending map on all ranks",
        found=found,
        advice="--dequantize writes it as float32, for an optimizer that keeps floats",
    )


class Form(NamedTuple):
    """How the moments of a param group are made codes anew."""

    kept: Kept
    blocks: Mapping[str, int]  # elements; of moments that were codes, by the names that they have as floats

    def of(self, tensors: Mapping[object, object], _rank: int, _partition: int) -> dict[object, object]:
        """Return a share's slots with the moments among them in the form in which the program keeps them."""
        made: dict[str, dict[str, Tensor | NewStorage]] = {}
        numel = 0
        for name, held in self.kept.moments.items():
            moment = tensors.get(name)
            if isinstance(moment, Tensor):
                numel, block = moment.numel, self.blocks.get(name)
                like = next((one for one in held if one.scale is not None), held[0])
                made[name] = {CODES: moment}
                if block is None:
                    continue
                # The program has codes of a share: bitsandbytes of what was some, or is padding alone.
                contents = _contents(moment)
                of_codes = not contents or any(isinstance(one.slot, Computed) for one in contents)
                if like.cls:
                    of_codes = numel >= SMALLEST_NUMEL and numel % block == 0
                if of_codes:
                    made[name] = {kind: _made_anew(moment, like, block, kind) for kind in (CODES, SCALE)}
        found = self.kept.put(made, numel)
        return {key: found.get(key, value) for key, value in tensors.items() if key not in made or key in found} | found


def _made_anew(moment: Tensor, like: Moment, block: int, kind: str) -> NewStorage:
    from zckpt.engine.quantise import by_bitsandbytes, by_torchao, end_to_end, quantised

    contents = ((one.start, one.covered.numel, one.covered.start, one.slot) for one in _contents(moment))
    rule, scales = by_torchao if like.cls else by_bitsandbytes, kind == SCALE
    values, halves = end_to_end(contents, moment.numel), like.per_code == 2
    function = quantised(values, block, like.qmap, rule, scales=scales, halves=halves)
    dtype, numel = "float32" if scales else like.codes.dtype, function.portions[0].count
    slot = Computed(like.key, dtype, (numel,), (), function=function)
    return new_storage(dtype, numel, [SlotContent(0, slot, f"{like.key}, quantised anew")])


def _contents(moment: Tensor) -> list[SlotContent]:
    """Return what lies in a tensor that is to be written, in order."""
    contents = moment.storage.contents if isinstance(moment.storage, NewStorage) else ()
    ordered = [one for one in contents if isinstance(one, SlotContent)]
    if len(ordered) < len(contents):
        raise ValueError("a share of quantised state has contents that are not slots")
    return ordered
