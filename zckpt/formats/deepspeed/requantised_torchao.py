"""Quantised state of torchao for ranks that hold other elements: floats of a share, made codes anew.

    partition of a rank   |exp_avg of a |exp_avg of b  |padding|     as `--dequantize` would write it
    exp_avg.codes         |code|code|code ...                        } of its blocks, counted from its first element
    exp_avg.scale         |scale    |scale ...                       }
    exp_avg.qmap          as every rank of the source has it; fp8: none

torchao quantises what has at least 4,096 elements and whole blocks; anything else stays in float32, as it keeps it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from zckpt.engine.computed import Computed
from zckpt.engine.requantise_torchao import RequantisedAsTorchao
from zckpt.errors import UnsupportedError
from zckpt.formats.deepspeed.codes import bytes_of
from zckpt.formats.deepspeed.portions import TOGETHER_NUMEL, portions_of
from zckpt.formats.torch_files import torchao
from zckpt.formats.torch_files.writer import SlotContent, new_storage, view
from zckpt.state import Parameter
from zckpt.state.checkpoint import RankValue
from zckpt.torchfile import FromFile, MetaTensor, Size, Tensor

SMALLEST_NUMEL = 4096
"""Elements of a tensor that torchao quantises."""


@dataclass(frozen=True, slots=True)
class TorchaoForm:
    """How torchao keeps the moments of a param group.

    Parameters
    ----------
    values : mapping of str to FromFile
        As the first rank has each, by key.
    moments : mapping of str to Quantised
        Their tensors.
    """

    values: Mapping[str, FromFile]
    moments: Mapping[str, torchao.Quantised]

    @property
    def rounded(self) -> frozenset[str]:
        """The moments that are made codes."""
        return frozenset(self.moments)

    def of(self, tensors: dict[object, object]) -> dict[object, object]:
        """Return a share's slots with the moments among them as codes."""
        return {key: self._in_form(str(key), value) for key, value in tensors.items()}

    def _in_form(self, key: str, moment: object) -> object:
        held = self.moments.get(key)
        if held is None or not isinstance(moment, Tensor):
            return moment
        if moment.numel < SMALLEST_NUMEL or moment.numel % held.block:
            return moment
        first = self.values[key]
        node = first.node
        if not isinstance(node, MetaTensor):
            raise TypeError("a moment of torchao's is a tensor without elements of its own")
        attributes = dict(node.attributes or {})
        for name in ("codes", "scale"):
            attributes[name] = _made(key, held, moment, attributes[name], gives_scales=name == "scale")
        if "_shape" in attributes:
            attributes["_shape"] = Size((moment.numel,))
        return replace(first, node=replace(node, shape=(moment.numel,), attributes=attributes))


def _made(key: str, held: torchao.Quantised, moment: Tensor, like: object, *, gives_scales: bool) -> Tensor:
    """Return the codes or the scales of a moment of a share."""
    dtype = "float32" if gives_scales else held.codes.dtype
    contents, at = [], 0
    for portions in portions_of(moment, held.block * max(TOGETHER_NUMEL // held.block, 1)):
        function = RequantisedAsTorchao(portions, held.block, held.qmap, gives_scales, held.cls == torchao.PACKED)
        slot = Computed(key, dtype, (function.step,), (), function=function)
        contents.append(SlotContent(at // function.unit, slot, f"{key}, quantised anew"))
        at += function.numel
    numel = moment.numel // contents_unit(held, gives_scales=gives_scales)
    return view(new_storage(dtype, numel, contents), (numel,), like=like if isinstance(like, Tensor) else None)


def contents_unit(held: torchao.Quantised, *, gives_scales: bool) -> int:
    """Return how many elements a scale, or what holds a code, is of."""
    return held.block if gives_scales else 2 if held.cls == torchao.PACKED else 1


def form_of(values: Sequence[RankValue], what: str, path: str) -> TorchaoForm:
    """Return the form of a param group's moments, which has to be one on all ranks.

    Raises
    ------
    UnsupportedError
        It is not.
    DamagedFileError
        Codes, scales and map do not belong together.
    """
    first: dict[str, FromFile] = {}
    moments: dict[str, torchao.Quantised] = {}
    for key, value, found in _moments(values, what, path):
        known = moments.setdefault(key, found)
        first.setdefault(key, value)
        if (found.cls, found.block, _map(found)) != (known.cls, known.block, _map(known)):
            raise _refused(what, path, f"another form of {key} on another rank")
        if found.qmap is not None and not (np.diff(np.frombuffer(_map(found), "<f4")) >= 0).all():
            raise _refused(what, path, f"a map of {key} that does not ascend")
    return TorchaoForm(first, moments)


def _moments(values: Sequence[RankValue], what: str, path: str) -> Iterator[tuple[str, FromFile, torchao.Quantised]]:
    for one in values:
        node = one.value.node if isinstance(one.value, FromFile) else None
        if not isinstance(one.value, FromFile) or not isinstance(node, MetaTensor):
            raise _refused(what, path, f"{one.key} of another kind")
        partition = Parameter(what, node.shape, node.dtype, state={one.key: one.value})
        yield one.key, one.value, torchao.quantised(one.key, partition, path)


def _map(found: torchao.Quantised) -> bytes:
    return b"" if found.qmap is None else bytes_of(found.qmap)


def _refused(what: str, path: str, found: str) -> UnsupportedError:
    return UnsupportedError(
        f"the quantised state of {what} cannot be quantised anew",
        path=path,
        expected="moments of one class and block, with one ascending map, on all ranks",
        found=found,
        advice="--dequantize writes it as float32, which torchao's optimizers take, too",
    )
