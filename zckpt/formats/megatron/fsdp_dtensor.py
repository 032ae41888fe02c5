"""A `fsdp_dtensor` directory, which Megatron-FSDP writes, as a Checkpoint: a directory of torch's DCP with names.

RUN/iter_0000004/.metadata, __R_N.distcp
    args, iteration, checkpoint_version, opt_param_scheduler, rng_state          values
    model.module.<name>                                                          fp32 where the run has masters
    optimizer.state.module.module.<name>.{exp_avg, exp_avg_sq, ...}
    optimizer.param_to_group_meta.module.module.<name>.{lr, wd_mult, step, ...}  hyperparameters, for each parameter

<name> is that of the module on one rank. A gated `linear_fc1` is two tensors, `weight_w` and `weight_v`, of the model
and of its state; its hyperparameters are under `weight`. Experts have their numbers in the whole model. Parameters with
the same hyperparameters are one group.

Source: megatron-core 0.15 and 0.16, Megatron-LM's `checkpointing.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from zckpt.errors import DamagedFileError, LayoutError, UnsupportedError, listed
from zckpt.formats.dcp.directory import Directory
from zckpt.formats.dcp.items import ObjectItem
from zckpt.formats.dcp.models import hyperparameters
from zckpt.formats.dcp.reader import fill, say_what_values_are, tree_of
from zckpt.formats.dcp.tree import GROUPS, PARAMS, STATE, Branch, Node, Tree, branch, leaves
from zckpt.formats.megatron.cut import Shapes, end_to_end
from zckpt.formats.megatron.directory import FORMAT, FSDP_DTENSOR, Place
from zckpt.formats.megatron.keys import stored
from zckpt.formats.megatron.names import by_itself, in_order
from zckpt.formats.megatron.objects import OPTIMIZER, settle, topology_of
from zckpt.formats.torch_files.tensors import TensorItem, arguments_of
from zckpt.state import Checkpoint, Duplicate, differ
from zckpt.torchfile import Digests

MODEL, META, STEP = "model", "param_to_group_meta", "step"


_WRAPPERS = re.compile(r"^(?:module\.)+")


def read(place: Place) -> Checkpoint:
    """Read the structure of a directory.

    Raises SourceError: files are missing or damaged, or contradict each other.
    """
    path = place.path
    checkpoint = Checkpoint(str(path), FORMAT)
    root, folders = tree_of(Directory(path, {"": path}), checkpoint)
    checkpoint.format_version = FSDP_DTENSOR
    tree = dict(root)
    model = branch(tree.get(MODEL))
    if not model or not all(isinstance(item, TensorItem) for item in model.values()):
        raise UnsupportedError("holds no model", expected=f"tensors under {MODEL}", found=listed(list(root)))
    items = {bare: item for bare, name in _named(map(str, model)).items()
             if isinstance(item := model[name], TensorItem)}  # fmt: skip
    shapes = {bare: item.shape for bare, item in items.items()}
    joined = {one.key: _whole(one.key, [items[part] for part in one.parts]) for one in stored(items)}
    whole: Tree = {name: joined[name] for name in in_order(joined)}
    tree[MODEL] = whole
    if tree.get(OPTIMIZER) is not None:
        optimizer = _optimizer(tree[OPTIMIZER], shapes, checkpoint.duplicates)
        others = [str(name) for name in branch(optimizer[STATE]) or () if name not in whole]
        if others:
            raise LayoutError("the optimizer has state for something that is not a model tensor", found=listed(others))
        tree[OPTIMIZER] = optimizer
    fill(checkpoint, tree)
    say_what_values_are(checkpoint, folders, rewritten=False)
    settle(checkpoint)
    for group in checkpoint.param_groups:
        if STEP in group.hyperparameters and STEP not in group.state:
            group.state[STEP] = group.hyperparameters.pop(STEP)
    args = tree.get("args")
    known = arguments_of(args.node) if isinstance(args, ObjectItem) else {}
    checkpoint.topology, checkpoint.world_size = topology_of(known, checkpoint)
    return checkpoint


def _named(names: Iterable[str]) -> dict[str, str]:
    """Return names by what they are in the bare model, with experts as modules of their own."""
    found: dict[str, str] = {}
    for name in names:
        bare = by_itself(_WRAPPERS.sub("", name))
        if bare in found:
            raise DamagedFileError(f"two tensors are named {bare}", found=f"{name} and {found[bare]}")
        found[bare] = name
    return found


def _whole(key: str, items: list[TensorItem]) -> TensorItem:
    """Return the tensor of which others are the parts along its first axis."""
    if len(items) == 1:
        return items[0]
    whole = end_to_end([item.slot("") for item in items], key)
    return TensorItem(key, whole.dtype, whole.shape, whole.spans, None, items[0].path)


def _optimizer(node: Node, shapes: Shapes, copies: list[Duplicate]) -> Tree:
    """Return an optimizer with groups in a list; of a chain of them, one that has all of their parameters."""
    content = branch(node) or {}
    several = [part for part in content.values() if META in (branch(part) or {})]
    every = [content] if META in content else [branch(part) or {} for part in several]
    if not every or (several and len(several) != len(content)):
        raise UnsupportedError("holds an unknown kind of optimizer",
                               expected=f"{STATE} and {META}", found=listed(list(content)))  # fmt: skip
    state: Tree = {}
    groups: dict[bytes, tuple[Branch, list[str]]] = {}
    others: Tree = {}
    digests = Digests()
    for number, one in enumerate(every):
        state |= _state(branch(one.get(STATE, {})) or {}, shapes, copies)
        meta = branch(one[META]) or {}
        for bare, name in _named(map(str, meta)).items():
            values = branch(meta[name]) or {}
            key = digests.of(hyperparameters(values))
            groups.setdefault(key, (values, []))[1].append(bare)
        front = f"{number}." if several else ""
        others |= {f"{front}{key}": value for key, value in one.items() if key not in (STATE, META)}
    listed_groups: Tree = {}
    for number, (values, members) in enumerate(groups.values()):
        sample = next((leaf for leaf in leaves(dict(values)) if isinstance(leaf, ObjectItem)), None)
        if sample is None:
            raise DamagedFileError("unreadable param group", expected="hyperparameters")
        listed_groups[number] = {**values, PARAMS: ObjectItem(f"{META}.{PARAMS}", sample.file, in_order(members))}
    return {**others, STATE: state, GROUPS: listed_groups}


def _state(state: Branch, shapes: Shapes, copies: list[Duplicate]) -> Tree:
    """Return the state of each parameter, by slot; `copies` gets what two parts of one have both."""
    names = _named(map(str, state))
    found: Tree = {}
    for one in stored(names):
        parts = [branch(state[names[part]]) or {} for part in one.parts]
        if differ([part.keys() for part in parts]):
            raise LayoutError(f"the state of {one.key} is not whole", expected=listed(list(parts[0])))
        own: Tree = {}
        for slot in parts[0]:
            items = [part[slot] for part in parts]
            tensors = [item for item in items if isinstance(item, TensorItem)]
            if len(items) == 1 or len(tensors) != len(items):
                own[slot] = items[0]
            elif [item.shape for item in tensors] == [shapes.get(part) for part in one.parts]:
                own[slot] = _whole(f"{slot} of {one.key}", tensors)
            else:  # only the moments are cut, the rest is whole in both
                own[slot] = tensors[0]
                first, *rest = (item.slot(str(slot)) for item in tensors)
                copies += [Duplicate("parameter", one.key, one.key, copy, first) for copy in rest]
        found[one.key] = own
    return found
