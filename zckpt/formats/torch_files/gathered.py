"""State that a program has lost when it gathered it: what can be noticed of that in a file. Reads a few elements.

torch 2.1 to 2.15, FSDP1 with `use_orig_params=True` and FULL_STATE_DICT, on CPU: every slot of a parameter is gathered
in one memory, and all of them come out as the last.
"""

from __future__ import annotations

from itertools import pairwise

from zckpt.formats.torch_files.state_dicts import OptimizerState
from zckpt.storage.files import opened
from zckpt.torchfile import Tensor

SAMPLED = 4
"""Parameters that are looked at, those with the most elements."""

SAMPLE_NBYTES = 4096
"""Of each slot of them, from its beginning."""


def lost_in_gathering(optimizer: OptimizerState, path: str) -> str | None:
    """Return a warning if slots of an optimizer are equal, bit for bit, which are never equal in training.

    `optimizer`: with names; `path`: the file that has it.
    """
    several = {}
    for number, name in optimizer.names.items():
        slots = {
            key: tensor
            for key, tensor in optimizer.tensors(number).items()
            if tensor.shape and tensor.numel > 1 and tensor.is_contiguous
        }
        if len(slots) > 1 and len({(one.shape, one.dtype) for one in slots.values()}) == 1:
            several[name] = slots
    largest = sorted(several, key=lambda name: -max(one.numel for one in several[name].values()))[:SAMPLED]
    equal = {name for name in largest if _are_equal(list(several[name].values()), path)}
    if not equal:
        return None
    name = next(one for one in largest if one in equal)
    return (
        f"{' and '.join(several[name])} of {name} are equal bit for bit: FSDP1 with use_orig_params=True gathers state "
        f"wrongly on CPU, and all slots but the last are lost (save it sharded, or by zckpt.save)"
    )


def _are_equal(tensors: list[Tensor], path: str) -> bool:
    """Tell whether tensors begin with the same bytes, and not only with zeros."""
    with opened(path) as file:
        found = [file.at(one.offset, min(one.numel * one.itemsize, SAMPLE_NBYTES)) for one in tensors]
    return any(found[0]) and all(bytes(a) == bytes(b) for a, b in pairwise(found))
