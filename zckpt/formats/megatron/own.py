"""`zckpt.pt` beside the files of a `torch_dist` directory: what those have no place for. Megatron-Core leaves it alone.

{**formats.remainder,
 "megatron": {"groups": [[name]],        of each param group of `common.pt`, in its order
              "names": {name: name},     in the files, and here, where they differ
              "absent": {name: {"shape": [int], "dtype": str}},      of further names of tied parameters
              "ranks": {"tp": int, "pp": int, "ep": int, "tied": bool,
                        "rows": int}}}     of legacy files; of a vocabulary that has zeros behind these
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import field, replace
from pathlib import Path

from zckpt.errors import DamagedFileError, about
from zckpt.formats.megatron.cut import VOCABULARY
from zckpt.formats.remainder import described, descriptions, remainder, remainder_rules, restore
from zckpt.formats.suffixes import OWN_NAME
from zckpt.formats.torch_files.tensors import as_mapping, as_names, describe
from zckpt.immutable import immutable
from zckpt.state import Checkpoint, Parameter, are_texts, without
from zckpt.state.inventory import IMPLIED, Rule
from zckpt.storage.files import is_file
from zckpt.torchfile import TorchFile, read_torchfile

KEY = "megatron"

ROWS = "padded vocabulary"
"""Under which `Checkpoint.details` have the rows of a target's vocabulary, where they are more than the source's."""

RULES = (*remainder_rules(), Rule((KEY, "**"), IMPLIED, "names, and the parameters of each param group"))


def own_tree(
    checkpoint: Checkpoint,
    *,
    held: Collection[str],
    groups: Sequence[Sequence[str]],
    names: Mapping[str, str],
    ranks: Mapping[str, int] | None = None,
) -> dict[str, object]:
    """Return the tree.

    `held`: keys of metadata, and of the optimizer's, that the other files have; `groups`: names of each group's
    parameters; `names`: names here by those in the files; `ranks`: of legacy files: how many of each kind.
    """
    rest = without(checkpoint.metadata, *held)
    others = without(checkpoint.optimizer_metadata, *held)
    return {
        **remainder(replace(checkpoint, metadata=rest, optimizer_metadata=others)),
        KEY: {
            "groups": [list(its) for its in groups],
            "names": {filed: name for filed, name in sorted(names.items()) if filed != name},
            "absent": descriptions(map(checkpoint.parameters.__getitem__, checkpoint.aliases)),
            **({} if ranks is None else {"ranks": dict(ranks)}),
        },
    }


@immutable
class Own:
    """What the file says that is needed before the rest; nothing where there is none."""

    file: TorchFile | None = None
    names: dict[str, str] = field(default_factory=dict)
    groups: list[list[str]] | None = None
    ranks: dict[str, int] = field(default_factory=dict)
    absent: dict[str, Parameter] = field(default_factory=dict)


def read_own(directory: Path) -> Own:
    """Read the file of a directory, if zckpt wrote it. Raises DamagedFileError: it is malformed."""
    path = directory / OWN_NAME
    if not is_file(path):
        return Own()
    file = read_torchfile(path)

    with about(file.path):

        def has(key: str) -> dict[object, object]:
            return as_mapping(node.get(key, {}))

        node = as_mapping(as_mapping(file.root).get(KEY))
        names, listed = has("names"), node.get("groups", [])
        if not isinstance(listed, list) or not are_texts(names.values()):
            raise DamagedFileError("unexpected content", expected="names, and param groups as lists")
        return Own(
            file,
            {str(key): str(name) for key, name in names.items()},
            [as_names(its) for its in listed],
            {str(key): n for key, n in has("ranks").items() if isinstance(n, int)},
            described(has("absent")),
        )


def restore_own(checkpoint: Checkpoint, own: Own) -> None:
    """Give a checkpoint, whose parameters and groups are there, what the file says of it.

    A vocabulary loses the rows of zeros that it was given for this target. Raises DamagedFileError: the file is
    malformed, or speaks of what is not there.
    """
    if own.file is None:
        return
    rows = own.ranks.get("rows")
    for one in checkpoint.tensors():
        if rows is not None and one.name.endswith(VOCABULARY) and one.shape[:1] > (rows,):
            checkpoint.details[ROWS] = one.shape[0]
            # Spans may reach over the end of a slot with fewer rows; what is not there is not read.
            one.slots = {key: replace(slot, shape=(rows, *slot.shape[1:])) if slot.shape == one.shape else slot
                         for key, slot in one.slots.items()}  # fmt: skip
            one.shape = (rows, *one.shape[1:])
    for name in own.absent:
        if name in checkpoint.parameters or name in checkpoint.buffers:
            raise DamagedFileError("unexpected content", path=own.file.path, expected=f"no {name}")
    checkpoint.parameters |= own.absent
    checkpoint.files.append(describe(own.file, "metadata", rules=RULES))
    metadata, of_optimizer, scale = checkpoint.metadata, checkpoint.optimizer_metadata, checkpoint.loss_scale
    restore(checkpoint, own.file.root, own.file)
    checkpoint.metadata = {**metadata, **checkpoint.metadata}
    checkpoint.optimizer_metadata = {**of_optimizer, **checkpoint.optimizer_metadata}
    checkpoint.loss_scale = scale if checkpoint.loss_scale is None else checkpoint.loss_scale
