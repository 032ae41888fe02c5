"""The logical state of a checkpoint and where its elements lie. Data only, no I/O.

Checkpoint
|-- parameters: name -> Parameter          trainable, frozen and tied ones
|-- buffers:    name -> Parameter          model tensors that no optimizer owns
|   `-- slots:  name -> Slot               weight, master, and the optimizer's own keys
|       `-- spans                         which elements lie in which bytes of which file, see `spans`
|-- param_groups: ParamGroup, ...          hyperparameters, ordered names, state that is one value per group
|-- per_rank: RankValue, ...               state that belongs to what one rank holds, as a whole
`-- files: SourceFile, ...                 what was read, and every rank's share of it
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, field, replace
from pathlib import Path
from typing import Any

from zckpt.errors import SHOWN_PATH, listed, shortened, without_controls
from zckpt.immutable import immutable, mutable
from zckpt.state.inventory import Claim, Rule
from zckpt.state.mappings import dict_of, nbytes_of, without
from zckpt.state.spans import Padding, PaddingSpan, Shape, Slot

WEIGHT = "weight"
MASTER = "master"

HAS_FROZEN = "has_frozen"
"""Of `Checkpoint.details`: False if frozen parameters were left out when it was saved."""

FOLLOWS_FROM_STEPS = frozenset({"step", "mu_product", "eta", "mu"})
"""Single values that depend on hyperparameters and the number of steps only (torch 2.13: all, NAdam, ASGD)."""

GivenNames = Sequence[str] | None
"""Names of an optimizer's parameters in its order, as the user gave them for files that only number them."""

SHOWN_KEYS = 6
"""Of optimizer state in a message; more are counted."""


@immutable
class Scalar:
    """A single number that a file holds as a 0-d tensor, such as AdamW's `step`."""

    value: float | int | bool
    dtype: str


def number_of(value: object) -> Any:  # noqa: ANN401  # whatever a state dict has
    """Return the number of a value that may be a Scalar."""
    return value.value if isinstance(value, Scalar) else value


def as_float(value: object) -> float | None:
    """Return a single value, a Scalar or plain, as a float; None of what is none, or an integer beyond all floats."""
    plain = number_of(value)
    try:
        return float(plain) if isinstance(plain, (int, float)) else None
    except OverflowError:
        return None


def most_steps(values: Iterable[object]) -> int | None:
    """Return the largest of counts of steps, which may be Scalars; what is no whole number counts nothing."""
    return max((int(n) for n in map(as_float, values) if n is not None and n.is_integer()), default=None)


@mutable
class Parameter:
    """A named tensor of the model and all its slots.

    Parameters
    ----------
    name : str
    shape : tuple of int
    dtype : str
        Type of the model weight.
    slots : dict of str to Slot
        Empty for an alias of a tied parameter: its owner has them.
    group : int or None
        Index of its param group; None if no optimizer owns it.
    frozen : bool
        A parameter that is not trained.
    tied_to : str or None
        Name of the parameter that this one is another name of.
    state : dict
        The optimizer's per-parameter state that is not a tensor, by key.
    """

    name: str
    shape: Shape
    dtype: str
    slots: dict[str, Slot] = field(default_factory=dict)
    group: int | None = None
    frozen: bool = False
    tied_to: str | None = None
    state: dict[str, object] = field(default_factory=dict)

    def __repr__(self) -> str:
        """Return a line: its name, shape and type, and which slots it has."""
        what = f"tied to {self.tied_to}" if self.tied_to is not None else ", ".join(self.slots)
        return f"<Parameter {self.name} {list(self.shape)} {self.dtype}{', frozen' * self.frozen}: {what}>"

    @classmethod
    def of(cls, name: str, weight: Slot) -> Parameter:
        """Return one that has only a weight."""
        return cls(name, weight.shape, weight.dtype, {WEIGHT: weight})

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def weight(self) -> Slot | None:
        """Its weight, if a file has it."""
        return self.slots.get(WEIGHT)

    @property
    def master(self) -> Slot | None:
        """Its master, if it has one."""
        return self.slots.get(MASTER)

    @property
    def optimizer_slots(self) -> dict[str, Slot]:
        """Its slots except the weight and the master."""
        return without(self.slots, WEIGHT, MASTER)


def alias_of(owner: Parameter, name: str) -> Parameter:
    """Return another name of a parameter."""
    return Parameter(name, owner.shape, owner.dtype, tied_to=owner.name)


@mutable
class ParamGroup:
    """Hyperparameters and the ordered names of the parameters they apply to.

    Parameters
    ----------
    hyperparameters : dict
        The optimizer's group without `params`; values as the file has them.
    parameters : list of str
        In the optimizer's order, not the order of a flat buffer.
    state : dict
        Optimizer state that is one value for the group: number, bool or Scalar, by key (`step`).
    optimizer : str or None
        The name of the group's optimizer, if several were saved together; otherwise None.
    """

    hyperparameters: dict[str, object]
    parameters: list[str]
    state: dict[str, object] = field(default_factory=dict)
    optimizer: str | None = None


@immutable
class RankValue:
    """One such value."""

    key: str  # the optimizer's own
    group: int  # the param group
    part: int  # which tensor of the group it is of, where a rank's share of the group is in several
    rank: int  # the data- and the model-parallel rank
    mp_rank: int
    value: object  # a number, a Scalar, or a `torchfile.FromFile`: a tree and the file in which its tensors lie
    in_group: bool = False  # whether the rank's file has it in the param group itself, among the hyperparameters

    @property
    def is_single(self) -> bool:
        """Whether it is one value, not a tree of tensors."""
        return self.value is None or isinstance(self.value, (bool, int, float, str, Scalar))


def how_to_drop(values: Sequence[RankValue]) -> str | None:
    """Return the options that leave such values out, for a message; None where they cannot be left out."""
    if not all(value.is_single and not value.in_group for value in values):
        return None
    drops = " ".join(f"--drop '{key}'" for key in dict.fromkeys(value.key for value in values))
    return f"{drops} writes the rest without them"


def keys_listed(values: Iterable[RankValue]) -> str:
    """Return the optimizer's keys of such values, each once, for a message."""
    return listed(list(dict.fromkeys(value.key for value in values)), most=SHOWN_KEYS)


@immutable
class Topology:
    """Data-, tensor-, pipeline- and expert-parallel degrees."""

    dp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1


@immutable
class Duplicate:
    """A further copy of a slot, which nothing is read from: it should be equal, or its rounding."""

    kind: str
    """{"tied", "parameter", "layer", "buffer"}; another name of a tied parameter; a parameter that several ranks have
    whole; one of a tied layer, which each stage of a pipeline steps by itself; a buffer that every rank keeps.
    """
    name: str  # of the parameter or buffer; of a tied one, the name whose copy it is
    of: str  # of the parameter that `slot` is held against
    slot: Slot  # the copy
    original: Slot
    """What it should equal, of the same shape: bit for bit, after rounding where the copy has another type."""
    rank: int | None = None  # which rank's copy it is


@mutable
class SourceFile:
    """A file of the checkpoint and what of it is used."""

    path: str
    nbytes: int  # size of the file
    role: str  # `model`, `optimizer`, `expert`, ...
    dp_rank: int | None = None  # which rank wrote it, where its name says so
    mp_rank: int | None = None
    tensor_nbytes: int = 0  # bytes of storages that some tensor uses, and that none does
    unreferenced_nbytes: int = 0
    archives: Iterable[tuple[int, int]] = ()
    """Bytes; offset and length of the torch files within the file, where it is not one itself."""
    tree: object = field(default=None, repr=False, compare=False)
    """What the file holds, for the inventory: an object tree, or slots by the names that the file has for them. Of a
    torch file it is `read_torchfile(path).root`, of any other `{"layer.weight": slot, "epoch": 3}`. Each value that is
    no slot is in `Checkpoint.metadata` under the same key, or has a rule. None: no value is looked at, and the whole
    file is state, or what the checkpoint's claim says.
    """
    records: Sequence[tuple[str, int, int, int]] = field(default=(), repr=False, compare=False)
    """Name, byte offset, bytes and CRC-32 of each record of an archive that was read."""
    rules: tuple[Rule, ...] = field(default=(), repr=False, compare=False)
    """What the adapter knows of the values in the tree."""
    header: tuple[int, int] | None = field(default=None, repr=False, compare=False)
    """What the file has to begin with for its tensors to be where they are said to be, if not all of it was read."""
    archive: str = ""
    """What a torch file calls its folder: as a rule its own name without the suffix; empty where it has none."""

    @property
    def name(self) -> str:
        """Its own name, in whatever folder."""
        return Path(self.path).name


@mutable
class Checkpoint:
    """The logical state of a checkpoint, and where every element lies. An adapter creates it.

    Parameters
    ----------
    source, opened : str
        The file or directory that was read, and what the user named: the same, or a directory that contains it.
    roots : tuple of str
        The same directory on other nodes, as the user named them.
    places : tuple of str, str and tuple of str, or None
        `source`, `opened` and `roots` as this machine's paths, if they are URLs.
    given_names : tuple of str or None
        Names of the optimizer's parameters that the user gave, for files that only number them.
    format, format_version : str
        Name of the adapter (`deepspeed`, `torch`), and version of the program that wrote it, if known.
    parameters, buffers : dict of str to Parameter
        In the model's order.
    unnamed : dict of str to Parameter
        Optimizer state of parameters with a number but no known name, by number.
    param_groups : list of ParamGroup
    per_rank : list of RankValue
        Optimizer state that is of no use to other ranks; almost always empty.
    zero_stage : int or None
    topology : Topology
    world_size : int
    step : int or None
        Optimizer steps taken by the run.
    loss_scale : float or None
    details : dict
        Facts of the format worth showing (rigid or elastic, round robin, ...), JSON-able.
    metadata : dict
        Everything else in the files, by key: client state, scheduler, random states; inert. A value that is not plain
        data is a `torchfile.FromFile`: a tree, and the file that holds its tensors.
    optimizer_metadata : dict
        What the optimizer keeps in addition to its state, in the same form: loss scaler, clipping.
    origin : object
        What the adapter needs to write the format again; meaningless to others.
    padding : list of Padding
    padding_spans : list of iterable of PaddingSpan
        Where all padding lies, zero or not, including that of frozen parameters.
    files : list of SourceFile
    claims : dict of str to Claim
        What other files of the checkpoint are, by path: an index, `latest`.
    duplicates : list of Duplicate
        Copies in the files, in addition to what is read.
    leftovers : dict of str to str
        Files next to the checkpoint's that do not belong to it, by path, with what `warnings` say about them.
    lost : dict of str to tuple of str
        Missing files whose contents spans describe, by path (`Slot.lost`), with the names of tensors in them that are
        otherwise unknown.
    wrapped : dict of str to str
        Names in the files, by names here, for tensors whose names wrappers have extended.
    is_numbered : bool
        Whether files only number the optimizer's parameters, so names are deduced.
    warnings : list of str
    """

    source: str
    format: str
    format_version: str | None = None
    parameters: dict[str, Parameter] = field(default_factory=dict)
    buffers: dict[str, Parameter] = field(default_factory=dict)
    unnamed: dict[str, Parameter] = field(default_factory=dict)
    param_groups: list[ParamGroup] = field(default_factory=list)
    per_rank: list[RankValue] = field(default_factory=list)
    zero_stage: int | None = None
    topology: Topology = field(default_factory=Topology)
    world_size: int = 1
    step: int | None = None
    loss_scale: float | None = None
    details: dict[str, object] = field(default_factory=dict)
    metadata: dict[str, object] = field(default_factory=dict)
    optimizer_metadata: dict[str, object] = field(default_factory=dict)
    origin: object = None
    padding: list[Padding] = field(default_factory=list)
    padding_spans: list[Iterable[PaddingSpan]] = field(default_factory=list)
    files: list[SourceFile] = field(default_factory=list)
    claims: dict[str, Claim] = field(default_factory=dict)
    duplicates: list[Duplicate] = field(default_factory=list)
    leftovers: dict[str, str] = field(default_factory=dict)
    lost: dict[str, tuple[str, ...]] = field(default_factory=dict)
    wrapped: dict[str, str] = field(default_factory=dict)
    is_numbered: bool = False
    warnings: list[str] = field(default_factory=list)
    opened: str = ""
    roots: tuple[str, ...] = ()
    given_names: tuple[str, ...] | None = None
    places: tuple[str, str, tuple[str, ...]] | None = None

    def __repr__(self) -> str:
        """Return two lines: what was read, of which format and topology; and how much is in it."""
        owners = self.owners
        ranks = self.topology
        words = f"{self.world_size} rank" + "s" * (self.world_size != 1)
        first = [
            " ".join(filter(None, (self.format, self.format_version))),
            *([] if self.zero_stage is None else [f"ZeRO stage {self.zero_stage}"]),
            " ".join(f"{axis}={n}" for axis, n in asdict(ranks).items() if n > 1) or words,
        ]
        second = {
            "parameters": len(owners),
            "elements": sum(p.numel for p in owners),
            "files": len(self.files),
            "bytes": nbytes_of(self.files),
            "step": self.step,
        }
        lines = (
            f"{self.source!r}: {', '.join(first)}",
            " ".join(f"{key}={value:,}" for key, value in second.items() if value is not None),
        )
        shown = [shortened(" ".join(without_controls(line).split()), SHOWN_PATH) for line in lines]
        return f"<{type(self).__name__} {shown[0]}\n {shown[1]}>"

    def owner(self, name: str) -> Parameter:
        """Return the parameter or buffer called `name`; for a tied one, the parameter that has its slots.

        Raises
        ------
        KeyError
            There is none.
        """
        parameter = self.parameters[name] if name in self.parameters else self.buffers[name]
        return parameter if parameter.tied_to is None else self.parameters[parameter.tied_to]

    @property
    def most_steps(self) -> int | None:
        """The most steps that an optimizer is known to have taken; None if nothing counts them."""
        return most_steps([self.step, *(group.state.get("step") for group in self.param_groups)])

    @property
    def is_bare(self) -> bool:
        """Whether there is an optimizer without hyperparameters, as in DeepSpeed's elastic form."""
        return bool(self.param_groups) and not any(group.hyperparameters for group in self.param_groups)

    @property
    def converted_from(self) -> dict[str, Any]:
        """What it says of where it was read from in the first place; empty where it was not converted."""
        return dict_of(self.details.get("origin"))

    def optimizers(self) -> list[str]:
        """Return the names of the optimizers that were saved together; empty if there was one, or none."""
        names = dict.fromkeys(group.optimizer for group in self.param_groups)
        return [str(name) for name in names] if len(names) > 1 else []

    def models(self) -> list[str]:
        """Return the names of the models that were saved together; their tensors' names begin with these.

        Empty if there was one, or if some tensor's name begins with none of them.
        """
        names = self.details.get("models") or self.converted_from.get("models")
        if not isinstance(names, list) or len(names) < 2:
            return []
        fronts = tuple(f"{name}." for name in names)
        return list(map(str, names)) if all(name.startswith(fronts) for name in self.names) else []

    @property
    def is_sorted(self) -> bool:
        """Whether the model's tensors are in the order of safetensors, which is not the model's."""
        return any(file.role == "model" and file.path.endswith(".safetensors") for file in self.files)

    @property
    def named(self) -> str:
        """What the user named when it was opened: itself, or a directory that contains it."""
        return self.opened or self.source

    @property
    def owners(self) -> list[Parameter]:
        """The parameters, each under one name."""
        return [one for one in self.parameters.values() if one.tied_to is None]

    @property
    def aliases(self) -> dict[str, str]:
        """Further names of parameters, each with its owner's name."""
        return {one.name: one.tied_to for one in self.parameters.values() if one.tied_to is not None}

    @property
    def grouped(self) -> list[str]:
        """Names of the parameters in param groups, group by group."""
        return [name for group in self.param_groups for name in group.parameters]

    @property
    def number_keys(self) -> frozenset[str]:
        """The optimizer's keys under which some parameter has one number for all of its elements.

        What a parameter that is a single number has under another key is of its one element.
        """
        found, of_elements = {"step"}, set[str]()
        for own in self.owners:
            if own.shape:
                found |= {key for key, one in own.state.items() if isinstance(one, (int, float, Scalar))}
                found |= {key for key, slot in own.slots.items() if not slot.shape}
                of_elements |= {key for key, slot in own.slots.items() if slot.shape}
        return frozenset(found | FOLLOWS_FROM_STEPS - of_elements)

    def place(self, name: str, weight: Slot, *, trained: bool) -> None:
        """Add a tensor of the model, as a parameter or a buffer."""
        (self.parameters if trained else self.buffers)[name] = Parameter.of(name, weight)

    def regrouped(self, groups: Iterable[ParamGroup]) -> Checkpoint:
        """Return it with other param groups; parameters become members as listed."""
        listed = list(groups)
        number = {name: at for at, group in enumerate(listed) for name in group.parameters}
        parameters = {name: replace(one, group=number.get(name)) for name, one in self.parameters.items()}
        return replace(self, param_groups=listed, parameters=parameters)

    def find(self, name: str) -> Parameter | None:
        """Return the parameter or buffer with a name, or what an optimizer only numbers; None if there is none."""
        return self.parameters.get(name) or self.buffers.get(name) or self.unnamed.get(name)

    @property
    def names(self) -> list[str]:
        """Names of parameters, then buffers."""
        return [one.name for one in self.tensors()]

    @property
    def has_masters(self) -> bool:
        """Whether some parameter has a master."""
        return any(one.master for one in self.parameters.values())

    def tensors(self) -> Iterator[Parameter]:
        """Iterate over parameters, then buffers."""
        yield from self.parameters.values()
        yield from self.buffers.values()

    def holders(self) -> Iterator[Parameter]:
        """Iterate over everything with slots: parameters, buffers, and what an optimizer only numbers."""
        yield from self.tensors()
        yield from self.unnamed.values()

    @property
    def all_parameters(self) -> list[Parameter]:
        """The parameters, and then what an optimizer only numbers."""
        return [*self.parameters.values(), *self.unnamed.values()]

    def slot_names(self) -> list[str]:
        """Return the names of all slots, `weight` and `master` first, each once."""
        names = dict.fromkeys(name for p in self.holders() for name in p.slots)
        first = [name for name in (WEIGHT, MASTER) if name in names]
        return [*first, *without(names, WEIGHT, MASTER)]

    def optimizer_slot_names(self) -> list[str]:
        """Return the names of all slots except the weight and the master."""
        return [name for name in self.slot_names() if name not in (WEIGHT, MASTER)]
