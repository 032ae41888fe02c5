"""The files of one parameter's folder, as tensors and single values.

{param: tensor, cat_dim, vocab_tensor, ...}    DeepSpeed's ZeRO-1 and 2, and zckpt
tensor                                         DeepSpeed's ZeRO-3: flat
step.pt: number or tensor                      not of DeepSpeed's ZeRO-3
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from pathlib import Path

from zckpt.codes import MISSING_FILE
from zckpt.errors import DamagedFileError, LayoutError, SourceError, UnsupportedError
from zckpt.formats.torch_files.tensors import describe, read_scalars, slot_of, span_of
from zckpt.formats.universal.directory import MASTER_STEM, STEP_STEM, SUFFIX
from zckpt.state import MASTER, WEIGHT, Extent, Slot, SourceFile
from zckpt.state.inventory import IMPLIED, STATE, Rule
from zckpt.torchfile import Tensor, TorchFile, read_torchfile

_RULES = (
    *(
        Rule((key, "**"), IMPLIED, "how the tensor is sliced")
        for key in ("cat_dim", "vocab_tensor", "is_expert_param", "sub_param_shape", "param_n_sub_params")
    ),
    Rule((), STATE, "the step"),
    Rule(("param",), STATE, "the step"),
)
"""Of the values in a folder's files."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor of a folder and what its file says of it."""

    tensor: Tensor
    path: str
    flat: bool
    padding_stripped: bool

    def slot(self, name: str, shape: tuple[int, ...]) -> Slot:
        """Return the tensor as a slot of a parameter.

        State that is not per element keeps its own shape.

        Raises
        ------
        LayoutError
            It does not have as many elements as the parameter.
        """
        tensor = self.tensor
        if tensor.shape == shape:
            return slot_of(name, tensor, self.path)
        if (self.flat or shape == ()) and tensor.numel == math.prod(shape) and tensor.is_contiguous:
            span = span_of(tensor, self.path, Extent.whole(shape))
            return Slot(name, tensor.dtype, shape, (span,) if tensor.numel else ())
        if self.flat or name == MASTER:
            raise LayoutError(
                "does not have the parameter's shape",
                path=self.path,
                expected=f"{shape}, as in the model file",
                found=tensor.shape,
            )
        return slot_of(name, tensor, self.path)


@dataclass(slots=True)
class StoredFolder:
    """What the folder of a parameter holds; `tensors` by the slot's name."""

    tensors: dict[str, Stored] = field(default_factory=dict)
    values: dict[str, object] = field(default_factory=dict)
    files: list[SourceFile] = field(default_factory=list)


def read_folder(folder: Path) -> StoredFolder:
    """Read the structure of a folder, and its step.

    Raises
    ------
    LayoutError
        It is not there.
    DamagedFileError
        A file of it holds something else.
    """
    try:
        names = sorted(entry.name for entry in os.scandir(folder) if entry.name.endswith(SUFFIX) and entry.is_file())
    except FileNotFoundError:
        names = []
    except OSError as error:
        raise SourceError("cannot be read", path=folder, found=error.strerror) from error
    if MASTER_STEM + SUFFIX not in names:
        raise LayoutError("no values of this parameter", path=folder / (MASTER_STEM + SUFFIX), expected="a file",
                          code=MISSING_FILE, parameters=[folder.name])  # fmt: skip
    found = StoredFolder()
    for name in names:
        _read_file(found, name.removesuffix(SUFFIX), read_torchfile(folder / name))
    return found


def _read_file(found: StoredFolder, stem: str, file: TorchFile) -> None:
    root, path = file.root, file.path
    if stem in (WEIGHT, MASTER):
        raise UnsupportedError(f"a slot named {stem!r}, which means something else", path=path)
    found.files.append(describe(file, "optimizer", rules=_RULES))
    if stem == STEP_STEM and isinstance(root, (int, float)):
        found.values[stem] = root
        return
    flat = isinstance(root, Tensor)
    tensor = root if isinstance(root, Tensor) else root.get("param") if isinstance(root, dict) else None
    if not isinstance(tensor, Tensor):
        raise DamagedFileError("unexpected content", path=path, expected="a tensor, or a dict that has one as `param`",
                               found=type(root).__name__)  # fmt: skip
    content = root if isinstance(root, dict) else {}
    if content.get("is_expert_param"):
        raise UnsupportedError("experts placed by AutoEP", path=path)
    if stem == STEP_STEM and tensor.shape == ():
        (found.values[stem],) = read_scalars(path, [tensor])
        return
    name = MASTER if stem == MASTER_STEM else stem
    found.tensors[name] = Stored(tensor, path, flat, content.get("vocab_tensor") is True)
