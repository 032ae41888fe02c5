"""A checkpoint that was opened, whose tensors can be read."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from zckpt.errors import UsageError
from zckpt.formats import open_checkpoint
from zckpt.state import MASTER, WEIGHT, Checkpoint, Extent, Slot

if TYPE_CHECKING:
    import torch


@dataclass(slots=True)
class OpenedCheckpoint(Checkpoint):
    """A Checkpoint with its tensors at hand. Made by `open`."""

    def read(self, name: str, slot: str | None = None) -> torch.Tensor:
        """Read one slot of one parameter, and only its bytes.

        Parameters
        ----------
        name : str
            A parameter or buffer, as the bare model or as the files call it; a tied name gives its owner's values.
        slot : str, optional
            By default the master if there is one, else the weight.

        Returns
        -------
        torch.Tensor
            On the CPU, of the slot's shape and element type.

        Raises
        ------
        UsageError
            There is no such parameter or slot.
        SourceError
            The files cannot be read.
        """
        import torch

        from zckpt.operations.tensors import Wanted, read_tensors

        found = self._slot(name, slot)
        tensor = torch.empty(found.shape, dtype=getattr(torch, found.dtype))
        read_tensors([Wanted(found, Extent.whole(found.shape), tensor)])
        return tensor

    def _slot(self, name: str, slot: str | None) -> Slot:
        if name in self.unnamed:
            owner = self.unnamed[name]
        elif name in self.parameters or name in self.buffers:
            owner = self.owner(name)
        elif name in self.wrapped.values():
            owner = self.owner(next(bare for bare, filed in self.wrapped.items() if filed == name))
        else:
            raise UsageError(f"no parameter {name}", path=self.source)
        wanted = slot or (MASTER if MASTER in owner.slots else WEIGHT)
        if wanted not in owner.slots:
            raise UsageError(
                f"{name} has no slot {wanted}", path=self.source, expected=", ".join(owner.slots) or "none"
            )
        return owner.slots[wanted]


def open(  # noqa: A001
    source: str | os.PathLike[str],
    *,
    roots: Sequence[str | os.PathLike[str]] = (),
    tag: str | None = None,
    names: Sequence[str] | None = None,
) -> OpenedCheckpoint:
    """Open a checkpoint of any format zckpt reads. Reads its structure only, and runs nothing of it.

    Parameters
    ----------
    source : path-like
        A file, or a directory: of a run, of one tag, or of a wrapper that contains one.
    roots : sequence of path-like
        The same directory on other nodes, where shards were left on the node that wrote them.
    tag : str, optional
        Which checkpoint of a run directory; by default the one that `latest` names.
    names : sequence of str, optional
        Names of the optimizer's parameters in its order, for files that only number them.

    Raises
    ------
    SourceError
        The source cannot be read, is damaged, or no adapter recognises it.
    """
    found = open_checkpoint(source, roots=roots, tag=tag, names=names)
    return OpenedCheckpoint(**{field.name: getattr(found, field.name) for field in fields(found)})
