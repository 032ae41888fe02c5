"""A checkpoint that was opened, whose tensors can be read; and what every verb takes: a path, or an open one."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from zckpt.errors import UsageError, require_torch
from zckpt.formats import open_checkpoint
from zckpt.operations.options import Place, Reading, Salvaged, Unpack, only, shares
from zckpt.state import MASTER, WEIGHT, Checkpoint, Parameter, Slot
from zckpt.state.brief import Named, near

if TYPE_CHECKING:
    import torch

Source = Place | Checkpoint
"""What a verb takes: a path, which it opens, or a checkpoint that `open` returned."""


@dataclass(repr=False)
class OpenedCheckpoint(Checkpoint):
    """A Checkpoint whose tensors can be read, as `open` returns it."""

    __slots__ = ("__weakref__", "_checks")  # what is remote is let go of with it

    @classmethod
    def of(cls, found: Checkpoint) -> OpenedCheckpoint:
        """Return a checkpoint as one whose tensors can be read."""
        return cls(**{one.name: getattr(found, one.name) for one in fields(found)})

    def read(self, name: str, slot: str | None = None, *, verify: bool = True) -> torch.Tensor:
        """Read one slot of one parameter, and only its bytes.

        Parameters
        ----------
        name : str
            A parameter or buffer, by its name in the bare model or in the files; a tied name gives its owner's values.
        slot : str, optional
            Default: the master if there is one, otherwise the weight. State quantised by bitsandbytes or torchao is
            read as float32, under Adam's names.
        verify : bool
            Compare records with the checksums in their files, once calls have read all of a record.

        Returns
        -------
        torch.Tensor
            On the CPU, of the slot's shape and element type.

        Raises
        ------
        UsageError
            There is no such parameter or slot.
        MissingPackageError
            torch is not installed.
        DamagedFileError
            The bytes have changed since they were written.
        SourceError
            The files cannot be read.
        """
        require_torch("read()", since=(2, 0))
        import torch

        from zckpt.engine.checking import Checks
        from zckpt.engine.tensors import TensorRead, read_tensors
        from zckpt.formats.survey import checksums_by_path

        found = self.slot(name, slot)
        tensor = torch.empty(found.shape, dtype=getattr(torch, found.dtype), device="cpu")
        wanted = [TensorRead(found, found.whole, tensor)]
        if not verify:
            read_tensors(wanted)
            return tensor
        if not hasattr(self, "_checks"):
            self._checks = Checks()
            self._checks.find = checksums_by_path([self])
        checks = self._checks
        read_tensors(wanted, checks=checks)
        if checks.wrong:
            del self._checks  # another call finds what is damaged again
        checks.refuse()
        return tensor

    def state_dict(self, slot: str = WEIGHT) -> dict[str, torch.Tensor]:
        """Read one slot of everything that has it, by name; a tied parameter is one tensor under each of its names.

        Raises
        ------
        UsageError
            There is no such slot.
        MissingPackageError, DamagedFileError, SourceError
            As for `read`.
        """
        held = {one.name: self.read(one.name, slot) for one in self.holders() if slot in one.slots}
        if not held:
            raise UsageError(f"there is no slot {slot}", path=self.source, expected=", ".join(self.slot_names()))
        owners = {name: self.aliases.get(name, name) for name in self}
        return {name: held[owner] for name, owner in owners.items() if owner in held}

    def __getitem__(self, name: str) -> Parameter:
        """Return the parameter or buffer of a name; of a tied one, its owner. Raises KeyError: there is none."""
        found = self.find(name)
        if found is None:
            raise KeyError(f"{name}{near(name, list(self))}")
        return found if found.tied_to is None else self.parameters[found.tied_to]

    def __contains__(self, name: object) -> bool:
        """Tell whether a parameter or buffer has a name."""
        return any(name in names for names in (self.parameters, self.buffers, self.unnamed))

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names of parameters, buffers, and what an optimizer only numbers."""
        return iter([*self.parameters, *self.buffers, *self.unnamed])

    def slot(self, name: str, slot: str | None = None) -> Slot:
        """Return one slot of one parameter, as `read` finds it. Raises UsageError if there is none."""
        bare = name
        if name not in self:
            bare = next((bare for bare, filed in self.wrapped.items() if filed == name), name)
        if bare not in self:
            advice = "`zckpt inspect --parameters` lists them"
            raise UsageError(f"no parameter {name}{near(name, self)}", path=self.source, advice=advice)
        owner = self.unnamed.get(bare) or self.owner(bare)
        key = slot or (MASTER if owner.master else WEIGHT)
        if key in owner.slots:
            return owner.slots[key]
        from zckpt.formats.deepspeed.rare.quantised import with_float_slots
        from zckpt.formats.torch_files.quantised import float_slots

        floats = float_slots(owner, self.source)
        if owner.name in self.parameters and any(one.group == owner.group for one in self.per_rank):
            floats |= with_float_slots(self).parameters[owner.name].slots
        if key not in floats:
            there = ", ".join({**owner.slots, **floats})
            raise UsageError(f"{name} has no slot {key}", path=self.source, expected=there or "none")
        return floats[key]


@shares(Reading)
def open(source: Place, **shared: Unpack[Reading]) -> OpenedCheckpoint:  # noqa: A001
    """Open a checkpoint of any format that zckpt reads. Reads only its structure, and executes nothing in it.

    Parameters
    ----------
    source : path-like
        A file, or a directory: of a run, of one tag, or of a trainer around them.
    **shared

    Raises
    ------
    UsageError
        An option does not apply to the source's format.
    SourceError
        The source cannot be read, is damaged, or no adapter recognises it.
    """
    found = open_checkpoint(source, **shared)
    for name in ("parameters", "buffers", "unnamed"):
        setattr(found, name, Named(getattr(found, name)))
    return OpenedCheckpoint.of(found)


def several(sources: Source | Sequence[Source]) -> list[Source]:
    """Return the sources that a verb is given; a text is one of them, not its letters."""
    return [sources] if isinstance(sources, str | os.PathLike | Checkpoint) else [*sources]


def opened(source: Source, **given: Any) -> Checkpoint:  # noqa: ANN401  # what a verb is given, as well
    """Return the checkpoint that a verb works on: opened here, or a copy of an open one, which stays as it is.

    Of the options given, only those of `Salvaged` count.

    Raises UsageError: an option is given with a checkpoint that is open already, or does not apply to the source's
    format; SourceError: the source cannot be opened.
    """
    shared = only(Salvaged, given)
    if not isinstance(source, Checkpoint):
        found = open_checkpoint(source, **shared)
        if found.given_names and found.unnamed and found.format == "transformers-trainer" and given.get("map") is None:
            raise UsageError(
                "the names do not match the optimizer",
                path=found.named,
                expected="the names of the model in its file",
                found=f"{len(found.given_names)} names, some of which are not its tensors",
                advice="if they are the names of the model in memory, add --map=transformers",
            )
        return found
    if idle := [name for name, value in shared.items() if value not in (None, (), [], False)]:
        raise UsageError(
            f"{', '.join(idle)}: the checkpoint is open already",
            path=source.named,
            advice="give it to zckpt.open",
        )
    where_it_is, as_named, its_roots = source.places or (source.source, source.opened, source.roots)
    return replace(
        source,
        source=where_it_is,
        opened=as_named,
        roots=its_roots,
        places=None,
        parameters=dict(source.parameters),
        buffers=dict(source.buffers),
        unnamed=dict(source.unnamed),
        warnings=list(source.warnings),
    )
