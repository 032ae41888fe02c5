"""The model's files of all ranks: parameters, buffers, and what FSDP1 has wrapped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from zckpt.errors import DamagedFileError, LayoutError, UnsupportedError, about, listed
from zckpt.evidence import may_be_trained
from zckpt.formats.fsdp_rank_files.cut import RankFiles, add
from zckpt.formats.fsdp_rank_files.held import Held, RankReader, elements, rules_of
from zckpt.formats.torch_files.content import EXTRA_STATE
from zckpt.formats.torch_files.tensors import by_name, carried, describe, identity_of
from zckpt.state import WEIGHT, Checkpoint, Parameter
from zckpt.torchfile import OrderedMapping, TorchFile, brief, has_checksums, read_torchfile

FLAT = "_flat_param"
"""What FSDP1 calls the flat parameter of a unit, where a program saves that (LOCAL_STATE_DICT)."""


@dataclass(slots=True)
class Model:
    """What the model's files have.

    Parameters
    ----------
    files : RankFiles
    held : dict of str to list of Held
        By name, in the model's order; what each rank has, by rank.
    modules : tuple of str
        Names of all modules, as FSDP1 has wrapped them, in the model's order; empty where the file has none.
    sums : list of dict of int to (int, int)
        For each rank, size and CRC-32 of each record of the file by its offset, where the file has them.
    """

    files: RankFiles
    held: dict[str, list[Held]] = field(default_factory=dict)
    modules: tuple[str, ...] = ()
    sums: list[dict[int, tuple[int, int]]] = field(default_factory=list)

    @property
    def tells_parameters(self) -> bool:
        """Whether FSDP has shown of any tensor that it is a parameter: then the others are buffers."""
        return any(one[0].is_parameter for one in self.held.values())


def read_models(checkpoint: Checkpoint, paths: Sequence[Path]) -> Model:
    """Give a checkpoint the parameters and buffers of all ranks' files.

    Raises SourceError: a file is damaged, has other names than rank 0's, or ranks do not have every element once.
    """
    model = Model(RankFiles([str(path) for path in paths]))
    for rank, path in enumerate(paths):
        with about(path):
            file = read_torchfile(path)
            root = _root(file)
            tree = {name: elements(node) for name, node in root.items()}
            checkpoint.files.append(replace(describe(file, "model", dp_rank=rank, rules=rules_of("*")), tree=tree))
            records = file.records if has_checksums(file.records) else ()
            model.sums.append({record.offset: (record.nbytes, record.crc32) for record in records})
            reader = RankReader()
            nodes = by_name(root, file.path)
            held = {name: reader.held(node) for name, node in nodes.items()}
            tensors = {name: one for name, one in held.items() if one is not None}
            if not rank:
                rest = {name: value for name, value in nodes.items() if name not in tensors}
                strange = [name for name in rest if not name.endswith(EXTRA_STATE)]
                if strange:
                    raise UnsupportedError("holds what is no tensor", expected="a model's state dict",
                                           found=listed(strange))  # fmt: skip
                checkpoint.metadata |= {name: carried(file, value) for name, value in rest.items()}
                # `state_dict` sets the names of modules on its result.
                state = root.state if isinstance(root, OrderedMapping) else None
                versions = state.get("_metadata") if isinstance(state, dict) else None
                model.modules = tuple(map(str, versions)) if isinstance(versions, dict) else ()
                model.held = {name: [] for name in tensors}
            elif tensors.keys() != model.held.keys():
                strange = sorted(tensors.keys() ^ model.held.keys())
                raise LayoutError(
                    "has other tensors than rank 0's file",
                    expected=f"{len(model.held)} names",
                    found=f"{len(tensors)}; {listed(strange)} are in one only",
                    ranks=[rank],
                )
            for name, one in tensors.items():
                model.held[name].append(one)
    _place(checkpoint, model)
    flat = [name for name in model.held if name.rpartition(".")[2] == FLAT]
    if flat:
        checkpoint.warnings.append(
            f"{listed(flat)}: flat parameters of FSDP1, saved as they are; which parameters are in them, no file says "
            f"(save SHARDED_STATE_DICT or FULL_STATE_DICT)"
        )
    return model


def _root(file: TorchFile) -> dict[object, object]:
    if not isinstance(file.root, dict) or not file.root:
        raise DamagedFileError("unexpected content", expected="a state dict", found=brief(file.root, 60))
    return file.root


def _place(checkpoint: Checkpoint, model: Model) -> None:
    """Turn tensors into parameters and buffers.

    Where FSDP tells, what it has left alone is a buffer. Otherwise, as in any state dict, integers and bools are
    buffers and so are the running statistics of a batch norm.
    """
    owners: dict[tuple[object, ...], str] = {}
    is_shown = model.tells_parameters
    dtypes = {name: held[0].dtype for name, held in model.held.items()}
    for name, held in model.held.items():
        found = model.files.joined(WEIGHT, name, list(enumerate(held)))
        is_buffer = not held[0].is_parameter and (is_shown or not may_be_trained(name, dtypes))
        key = _identity(held)
        owner = name if is_buffer or key is None else owners.setdefault(key, name)
        parameter = Parameter(name, found[0][1].shape, found[0][1].dtype)
        (checkpoint.buffers if is_buffer else checkpoint.parameters)[name] = parameter
        if owner != name:
            parameter.tied_to = owner
        else:
            add(checkpoint, parameter, WEIGHT, found, "buffer" if is_buffer else "parameter")


def _identity(held: Sequence[Held]) -> tuple[object, ...] | None:
    """Return what two names of one tensor have in common: the storage in the first rank's file that has any of it."""
    for rank, one in enumerate(held):
        if one.boxes:
            return (rank, one.shape, *(identity_of(box.tensor) for box in one.boxes))
    return None
