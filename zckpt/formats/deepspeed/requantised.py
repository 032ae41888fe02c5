"""8-bit state of bitsandbytes for ranks that hold other elements: made floats, cut, and made codes anew.

    partition of a rank   |exp_avg of a |exp_avg of b  |padding|     as `--dequantize` would write it
    state1                |code|code|code ...                        } of its blocks, counted from its first element
    absmax1               |scale    |scale ...                       }
    qmap1                 as every rank of the source has it

That rounds once more, as each step of such an optimizer does, where a block's elements are others than before. A param
group that was too small to be quantised stays in float32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from zckpt.engine.computed import Computed
from zckpt.engine.requantise import Requantised
from zckpt.errors import UnsupportedError, UsageError
from zckpt.formats.deepspeed.codes import KNOWN, alike_forms, bytes_of
from zckpt.formats.deepspeed.decide import decide
from zckpt.formats.deepspeed.options import RecutOptions
from zckpt.formats.deepspeed.portions import TOGETHER_NUMEL, contents_of, portions_of
from zckpt.formats.deepspeed.quantised import is_quantised, with_float_slots
from zckpt.formats.deepspeed.requantised_torchao import SMALLEST_NUMEL, TorchaoForm, form_of
from zckpt.formats.deepspeed.target import Target
from zckpt.formats.torch_files.quantised import ADAM, BLOCKS, NESTED, block_of, pieces_of
from zckpt.formats.torch_files.writer import SlotContent, new_storage, view
from zckpt.state import Checkpoint, Slot
from zckpt.state.checkpoint import RankValue
from zckpt.torchfile import FromFile, Tensor


@dataclass(frozen=True, slots=True)
class Form:
    """How the 8-bit state of a param group is kept.

    Parameters
    ----------
    value : FromFile
        As the first rank has it.
    pieces : mapping of str to Slot
        Its tensors.
    blocks : dict of str to int
        Elements of a block, by the number of the moment; without those that are in float32.
    """

    value: FromFile
    pieces: Mapping[str, Slot]
    blocks: Mapping[str, int]

    @property
    def rounded(self) -> frozenset[str]:
        """The moments that are made codes, as floats are called."""
        return frozenset(self.names[number] for number in self.blocks)

    @property
    def names(self) -> dict[str, str]:
        """What the moments are called as floats, by their numbers."""
        states = [key for key in ADAM if key in self.pieces]
        return {key[-1]: ADAM[key] if len(states) == len(ADAM) else key for key in states}

    def of(self, tensors: dict[object, object]) -> dict[object, object]:
        """Return a share's slots with the moments among them in the form in which the program keeps them."""
        names, node = self.names, self.value.node if isinstance(self.value.node, dict) else {}
        moments = {number: tensors.get(name) for number, name in names.items()}
        nested: dict[object, object] = {}
        for key, like in node.items():
            moment, block = moments.get(str(key)[-1]), self.blocks.get(str(key)[-1])
            if not isinstance(moment, Tensor):
                continue
            if block is not None and not _has_codes(moment):  # of a small sub-group, in floats before, too
                if str(key).startswith("state"):
                    nested[key] = moment
            elif str(key).startswith("qmap"):
                nested[key] = like
            elif block is None:
                nested[key] = moment
            else:
                nested[key] = self._quantised(str(key), moment, block)
        rest = {key: value for key, value in tensors.items() if key not in names.values()}
        return {**rest, NESTED: replace(self.value, node=nested)} if nested else rest

    def _quantised(self, key: str, moment: Tensor, block: int) -> Tensor:
        """Return the codes or the scales of a moment of a share."""
        qmap, scales = self.pieces[f"qmap{key[-1]}"], key.startswith("absmax")
        dtype, unit, numel = ("float32", block, -(-moment.numel // block)) if scales else ("uint8", 1, moment.numel)
        contents, at = [], 0
        for portions in portions_of(moment, block * max(TOGETHER_NUMEL // block, 1)):
            function = Requantised(portions, block, qmap, gives_scales=scales)
            slot = Computed(key, dtype, (function.step,), (), function=function)
            contents.append(SlotContent(at // unit, slot, f"{key}, quantised anew"))
            at += function.numel
        return view(new_storage(dtype, numel, contents), (numel,))


def _has_codes(moment: Tensor) -> bool:
    """Tell whether some of a share, or none of it that is not padding, was codes before."""
    ordered = contents_of(moment)
    return not ordered or any(isinstance(one.slot, Computed) for one in ordered)


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
    target.forms.update(_forms(checkpoint))
    return target


def rounded(target: Target) -> dict[str, frozenset[str]]:
    """Return the moments that were quantised anew, as floats are called, by parameter."""
    found = {key: form.rounded for key, form in target.forms.items()}
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
    groups = [str(index) for index in sorted({index for (_, index), form in target.forms.items() if form.rounded})]
    if not groups:
        return []
    what = f"param group{'s' if len(groups) > 1 else ''} {', '.join(groups)}"
    if any(isinstance(form, TorchaoForm) for form in target.forms.values()):
        what += f", of partitions with whole blocks and {SMALLEST_NUMEL} elements at least (others are in float32),"
    return [f"quantised state of {what} was quantised anew: blocks have other elements than in the source"]


def _forms(checkpoint: Checkpoint) -> dict[tuple[int, int], Form | TorchaoForm]:
    """Return the form of each param group that has quantised state, which has to be one on all data-parallel ranks."""
    held: dict[tuple[int, int], list[RankValue]] = {}
    for one in checkpoint.per_rank:
        held.setdefault((one.mp_rank, one.group), []).append(one)
    return {key: _form_of(values, f"group {key[1]}", checkpoint.source) for key, values in held.items()}


def _form_of(values: Sequence[RankValue], what: str, path: str) -> Form | TorchaoForm:
    if all(one.key != NESTED for one in values):
        return form_of(values, what, path)
    parts: dict[int, list[FromFile]] = {}
    for one in values:
        if one.key != NESTED or not isinstance(one.value, FromFile):
            raise _refused(what, path, f"{one.key} beside {NESTED}")
        parts.setdefault(one.part, []).append(one.value)
    return _form(list(parts.values()), what, path)


def _form(parts: Sequence[Sequence[FromFile]], what: str, path: str) -> Form:
    """Return the form of a group's partitions; of ZeRO-3's sub-groups, small ones may be in float32."""
    pieces = [[pieces_of(value, what, path)[1] for value in values] for values in parts]
    if not all(alike_forms(one) and one[0].keys() <= KNOWN for one in pieces):
        raise _refused(what, path, "another form on another rank")
    chosen = [index for index, one in enumerate(pieces) if any(key.startswith("absmax") for key in one[0])] or [0]
    first = pieces[chosen[0]][0]
    if len({frozenset(ADAM.keys() & one[0].keys()) for one in pieces}) > 1 or any(
        pieces[index][0].keys() != first.keys() for index in chosen
    ):
        raise _refused(what, path, "another form in another sub-group")
    quantised = [one for index in chosen for one in pieces[index]]
    blocks = {}
    for key in (key for key in ADAM if key in first):
        number = key[-1]
        if first[key].dtype == "float32" and f"absmax{number}" not in first:
            continue
        sizes = set(BLOCKS)
        for index in chosen:
            one = pieces[index][0]
            codes, scale = one[key], one.get(f"absmax{number}")
            block_of(key, codes, scale, one.get(f"qmap{number}"), what, path)
            sizes &= {size for size in BLOCKS if scale is not None and -(-codes.numel // size) == scale.numel}
        if len(sizes) != 1:
            raise _refused(what, path, f"scales that fit {len(sizes)} sizes of blocks")
        blocks[number] = sizes.pop()
    for key in (key for key in first if key.startswith("qmap")):
        data = bytes_of(first[key])
        if any(bytes_of(one[key]) != data for one in quantised[1:]):
            raise _refused(what, path, f"another {key} on another rank")
        if key[-1] in blocks and not (np.diff(np.frombuffer(data, "<f4")) >= 0).all():
            raise _refused(what, path, f"{key} that does not ascend")
    return Form(parts[chosen[0]][0], first, blocks)


def _refused(what: str, path: str, found: str) -> UnsupportedError:
    return UnsupportedError(
        f"the 8-bit state of {what} cannot be quantised anew",
        path=path,
        expected="codes of one or two moments, in blocks of one size, with one ascending map on all ranks",
        found=found,
        advice="--dequantize writes it as float32, for an optimizer that keeps it so",
    )
