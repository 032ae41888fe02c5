"""The folder of one parameter: what its files hold, and what they are to hold. Lays out nothing yet.

fp32.pt, SLOT.pt
    {param: tensor, cat_dim, vocab_tensor, ...}    DeepSpeed's ZeRO-1 and 2, and zckpt
    {param: tensor}                                of a parameter that is not trained
    tensor                                         DeepSpeed's ZeRO-3: flat
step.pt
    number or tensor                               by itself; not of DeepSpeed's ZeRO-3

DeepSpeed's ZeRO-1 and 2 read every file of a folder, and need the same ones for all parameters of a group: a parameter
that no step has reached gets zeros, as DeepSpeed itself has them. The values next to a tensor say how a tensor-parallel
training slices it again (`merge_tp_slices` of DeepSpeed 0.19; the patterns are those of `tp_rules`):

    cat_dim               slices along this dimension
    param_n_sub_params    that many equal sub-parameters along it, each sliced
    sub_param_shape       sub-parameters of these sizes, each sliced
    vocab_tensor          rows of a vocabulary, padded again for the number of ranks
    is_expert_param       AutoEP's experts, all of them, of which each rank takes its own;
    ep_num_experts        how many they are
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any

from zckpt.codes import MISSING_FILE
from zckpt.compare.logical import parameter_values
from zckpt.errors import DamagedFileError, LayoutError, UnsupportedError, about
from zckpt.formats.alike_files import AlikeReader
from zckpt.formats.deepspeed.axes.auto_ep import FOLDING_KEY, SLICED_AS_WELL, expert_counts, holds_all
from zckpt.formats.deepspeed.axes.gpt_model import known_rules
from zckpt.formats.deepspeed.axes.tp_rules import AVERAGED, REPLICATED, SLICED, SUB, TWO, Rules
from zckpt.formats.deepspeed.origin import origin_of
from zckpt.formats.deepspeed.values import implied, refuse_to_begin, weight_or_master
from zckpt.formats.lost import stand_in, tensor_of
from zckpt.formats.torch_files.tensors import describe, read_scalars, refuse_taken, slot_of
from zckpt.formats.torch_files.writer import SlotContent, SlotTensor, new_storage, value_node, view
from zckpt.formats.universal.directory import MASTER_STEM, STEP_STEM, SUFFIX
from zckpt.immutable import immutable, mutable
from zckpt.state import (
    MASTER,
    WEIGHT,
    Checkpoint,
    Parameter,
    Scalar,
    Shape,
    Slot,
    SourceFile,
    dict_of,
    is_floating,
)
from zckpt.state.inventory import STATE, Rule
from zckpt.state.views import reshape
from zckpt.storage.files import files_in
from zckpt.torchfile import Global, Object, Tensor

Values = dict[str, object]
"""What is under the keys of a file, or of a parameter's state."""

EXPERT_KEY = "is_expert_param"
COUNT_KEY = "ep_num_experts"

PART_KEYS = ("sub_param_shape", "param_n_sub_params")
"""Of a tensor that was put together from slices of its parts."""

_RULES = (
    *implied("how the tensor is sliced", "cat_dim", "vocab_tensor", EXPERT_KEY, COUNT_KEY, *PART_KEYS),
    Rule((), STATE, "the step"),
    Rule(("param",), STATE, "the step"),
)  # fmt: skip
"""Of the values in a folder's files."""


@immutable
class Stored:
    """A tensor of a folder and what its file says of it."""

    tensor: Tensor
    path: str
    flat: bool
    padding_stripped: bool
    experts: int | None = None
    has_parts: bool = False

    def slot(self, name: str, shape: Shape) -> Slot:
        """Return the tensor as a slot of a parameter.

        State that is not per element keeps its own shape.

        Raises LayoutError: it does not have as many elements as the parameter.
        """
        tensor = self.tensor
        if tensor.shape == shape:
            return slot_of(name, tensor, self.path)
        if (self.flat or shape == ()) and tensor.numel == math.prod(shape):
            return reshape(slot_of(name, tensor, self.path), shape if self.flat else tensor.shape[1:])
        if self.flat or name == MASTER:
            raise LayoutError(
                "does not have the parameter's shape",
                path=self.path,
                expected=f"{shape}, as in the model file",
                found=tensor.shape,
            )
        return slot_of(name, tensor, self.path)


@mutable
class StoredFolder:
    """What the folder of a parameter holds; `tensors` by the slot's name."""

    tensors: dict[str, Stored] = field(default_factory=dict)
    values: Values = field(default_factory=dict)
    files: list[SourceFile] = field(default_factory=list)


def read_folder(folder: Path, reader: AlikeReader, known: dict[int, SourceFile], shape: Shape | None) -> StoredFolder:
    """Read the structure of a folder, and its step.

    Its trees, and what is `known` of its files, are those of others that are alike. `shape`: of the parameter, whose
    master may be lost if it is given.

    Raises LayoutError: it is not there; DamagedFileError: a file of it holds something else.
    """
    names = [name for name in (files_in(folder) if folder.is_dir() else ()) if name.endswith(SUFFIX)]
    found = StoredFolder()
    if MASTER_STEM + SUFFIX not in names:
        master = folder / (MASTER_STEM + SUFFIX)
        error = LayoutError("there are no values of this parameter", path=master, expected="a file", code=MISSING_FILE,
                            parameters=[folder.name])  # fmt: skip
        if shape is None:
            raise error
        found.tensors[MASTER] = Stored(tensor_of("float32", shape), stand_in(error, master), False, False)
    for stem in (name.removesuffix(SUFFIX) for name in names):
        file = reader.read(folder / (stem + SUFFIX))
        found.files.append(describe(file, "optimizer", rules=_RULES, known=known))
        root, path, content = file.root, file.path, dict_of(file.root)
        with about(path):
            refuse_taken([stem], MASTER)
        if stem == STEP_STEM and isinstance(root, (int, float)):
            found.values[stem] = root
            continue
        tensor = root if isinstance(root, Tensor) else content.get("param")
        if not isinstance(tensor, Tensor):
            raise DamagedFileError("unexpected content", path=path, found=type(root).__name__,
                                   expected="a tensor, or a dict that has one as `param`")  # fmt: skip
        if stem == STEP_STEM and tensor.shape == ():
            (found.values[stem],) = read_scalars(path, [tensor])
            continue
        experts = None
        if content.get(EXPERT_KEY):  # a tensor of AutoEP's
            if content.get(FOLDING_KEY) is not None:
                raise UnsupportedError(SLICED_AS_WELL)
            count = content.get(COUNT_KEY)
            if not isinstance(count, int) or not holds_all(tensor.shape, count):
                raise LayoutError("does not have all experts", expected=f"{count}, rows and columns",
                                  found=tensor.shape)  # fmt: skip
            experts = tensor.shape[0]
        stripped = content.get("vocab_tensor") is True
        key = MASTER if stem == MASTER_STEM else stem
        found.tensors[key] = Stored(tensor, path, isinstance(root, Tensor), stripped, experts,
                                    has_parts=not content.keys().isdisjoint(PART_KEYS))  # fmt: skip
    return found


_SUB_PARAM_SHAPE = Global("deepspeed.checkpoint.universal_checkpoint", "SubparamShape")

TAKEN = (MASTER_STEM, WEIGHT, MASTER)
"""Names that a slot of an optimizer cannot have here."""


@immutable
class Folder:
    """The folder of one parameter."""

    name: str
    files: Values  # content of each file, by its stem
    values: Values = field(default_factory=dict)  # state that is neither tensor nor step, which no file here can hold
    filled: Sequence[str] = ()  # stems of files that the source has nothing for


def folders(checkpoint: Checkpoint) -> Iterator[Folder]:
    """Yield the folders of all parameters, in the model's order.

    Raises UnsupportedError: state that a universal checkpoint cannot hold.
    """
    slices = Slices(checkpoint)
    states: dict[str, Values] = {}
    needed: list[Values] = []  # of every parameter of a group: slots by element type, and the step
    for group in checkpoint.param_groups:
        needed.append({})
        for name in group.parameters:
            own = parameter_values(checkpoint, checkpoint.parameters[name])
            for key in own:
                if key in TAKEN:
                    raise UnsupportedError(
                        f"{name} has a slot {key!r}, which has another meaning here",
                        advice="`zckpt convert --to zckpt` or `--to=dcp` keeps it",
                    )
            # a single value that its group has too is taken as that, which is known already
            known = {key: group.state[key] for key in own if key in group.state and isinstance(own[key], Slot)}
            states[name] = {**own, **known}
            for key, value in states[name].items():
                if key == STEP_STEM:
                    needed[-1].setdefault(key, value)
                elif isinstance(value, Slot) and value.shape == checkpoint.parameters[name].shape:
                    needed[-1].setdefault(key, value.dtype)
    for parameter in checkpoint.parameters.values():
        if parameter.group is not None:
            yield _trained(parameter, states[parameter.name], needed[parameter.group], slices.keys(parameter))
            continue
        slot, files = weight_or_master(checkpoint.owner(parameter.name)), Values()
        if not slot.dtype.startswith("complex"):  # as DeepSpeed writes it; codes of a quantised weight are not cast
            dtype = "float32" if is_floating(slot.dtype) else slot.dtype
            files[MASTER_STEM] = {"param": SlotTensor(slot, dtype, f"{MASTER_STEM}/{parameter.name}")}
        yield Folder(parameter.name, files)


def _trained(parameter: Parameter, state: Values, needed: Values, keys: Values) -> Folder:
    name, numel, values = parameter.name, parameter.numel, Values()

    def tensor(slot: Slot, stem: str, dtype: str) -> Values:
        label = f"{stem}/{name}"
        if parameter.shape == () and slot.numel == 1:  # DeepSpeed's loader cuts a dimension: there is one more
            one = view(new_storage(dtype, 1, [SlotContent(0, slot, label)]), (1, *slot.shape))
            return {**keys, "param": one}
        return {**keys, "param": SlotTensor(slot, dtype, label)}

    master = parameter.master or weight_or_master(parameter)
    dtype = "float32" if not parameter.master and is_floating(master.dtype) else master.dtype
    files: Values = {MASTER_STEM: tensor(master, MASTER_STEM, dtype)}
    missing = [key for key in needed if key not in state]
    refuse_to_begin(parameter, missing)
    for key, value in {**state, **{key: needed[key] for key in missing}}.items():
        if key == STEP_STEM and isinstance(value, Slot):
            files[key] = SlotTensor(value, value.dtype, f"{key}/{name}")
        elif key == STEP_STEM and (key in missing or isinstance(value, (Scalar, int, float))):
            files[key] = value_node(value)
        elif isinstance(value, Slot):
            files[key] = tensor(value, key, value.dtype)
        elif isinstance(value, Scalar):
            files[key] = {"param": value_node(value)}
        elif key in missing:
            files[key] = {**keys, "param": view(new_storage(str(value), numel), parameter.shape or (1,))}
        else:
            values[key] = value
    return Folder(name, files, values, missing)


class Slices:
    """The rules that a checkpoint carries, if it carries any.

    Raises
    ------
    UnsupportedError
        Rules that zckpt does not know or cannot match safely.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        origin, shapes = origin_of(checkpoint), {one.name: one.shape for one in checkpoint.parameters.values()}
        known = known_rules(checkpoint.metadata, shapes, checkpoint.source) if origin is None else origin.rules
        self.info: Mapping[str, Any] = known or {}
        self.rules = Rules(self.info, checkpoint.source)
        self.experts = expert_counts(checkpoint)

    def keys(self, parameter: Parameter) -> Values:
        """Return the values next to the tensor in each file of a parameter."""
        if parameter.name in self.experts:
            return {"cat_dim": 0, EXPERT_KEY: True, COUNT_KEY: self.experts[parameter.name]}
        kind, dim, pattern, sizes = self.rules.named(parameter.name)
        keys: Values = {"cat_dim": dim if kind == SLICED else 0}
        if self.rules.mapped(parameter.name) is not None or kind in (REPLICATED, AVERAGED):
            keys = {}  # the training cuts by its own map
        elif kind == TWO:
            keys["param_n_sub_params"] = 2
        elif kind == SUB and dim < len(parameter.shape):
            # DeepSpeed's object for a rule, with the sizes of its parts: older rules say how many equal ones.
            rule = next(one for one in self.info["parameter_with_sub_params"] if pattern in one["patterns"])
            shape = [tuple(n) if isinstance(n, list) else n for n in rule["shape"]]
            shape += parameter.shape[len(shape) :]  # DeepSpeed views the whole as it
            if isinstance(sizes, int) and sizes > 0:
                shape[dim] = (parameter.shape[dim] // sizes,) * sizes
            state = {"patterns": list(rule["patterns"]), "shape": tuple(shape), "partition_dim": dim}
            keys = {"sub_param_shape": Object(_SUB_PARAM_SHAPE, how="newobj", state=state, has_state=True)}
        return keys | ({"vocab_tensor": True} if self.rules.is_vocabulary(parameter.name) else {})
