"""A single file written by `torch.save`: a model's state dict, or a dict that holds one and an optimizer's.

{name: tensor, ...}                                            a state dict by itself
{"model": {name: tensor}, "optimizer": {state, param_groups}, "step": 5, ...}      under any keys
{..., "zckpt": {...}}                                          what `zckpt convert` keeps besides both, see `remainder`
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from zckpt.codes import UNSUPPORTED
from zckpt.errors import SourceError, UnsupportedError
from zckpt.evidence import may_be_trained
from zckpt.formats.fsdp_rank_files.held import refuse_share
from zckpt.formats.remainder import KEY, names_in, remainder_rules, restore
from zckpt.formats.torch_files.content import content_of, dtypes_of
from zckpt.formats.torch_files.optimizer import attach
from zckpt.formats.torch_files.tensors import by_name, carried, describe, identity_of, slot_of
from zckpt.state import WEIGHT, Checkpoint, Parameter
from zckpt.torchfile import Object, Tensor, oddity, read_torchfile

STEP_KEYS = ("step", "global_step", "global_steps", "iteration")

COMPOSERS_STEP = ("timestamp", "Timestamp", "batch")
"""Where Composer has it, next to the model."""


def read(path: Path, *, names: Sequence[str] | None = None) -> Checkpoint:
    """Read the structure of a file written by `torch.save`.

    Parameters
    ----------
    path : Path
    names : sequence of str, optional
        Names of the optimizer's parameters, in its order.

    Raises
    ------
    UnsupportedError
        It holds no state dict.
    """
    file = read_torchfile(path)
    refuse_share(file)
    checkpoint = Checkpoint(str(path), "torch")
    root = file.root
    if isinstance(root, Object):
        error = UnsupportedError(
            f"holds an object of {root.qualified}, not a state dict",
            path=path,
            advice="save model.state_dict() in the program that wrote it",
            code=UNSUPPORTED,
        )
        error.exit_status = SourceError.exit_status  # loading it makes that object, whatever it is: it is unsafe
        raise error
    if not isinstance(root, dict) or not root:
        raise UnsupportedError("holds no state dict", path=path, found=type(root).__name__)
    rest = root.get(KEY)
    content = content_of({key: value for key, value in root.items() if key != KEY}, path)
    if not content.models and not content.optimizers:
        strange = _without_elements(root)
        raise UnsupportedError(
            "holds no state dict",
            path=path,
            expected="a dict of tensors, or one that has one" + (", all dense and with elements" if strange else ""),
            found=strange or f"keys {', '.join(map(str, list(root)[:8]))}",
        )
    checkpoint.warnings += content.warnings
    if len(content.models) > 1:
        checkpoint.details["models"] = [prefix.removesuffix(".") for prefix in content.models]
    add_tensors(checkpoint, content.tensors, str(path))
    if content.state is not None:
        certain = names_in(rest, checkpoint, str(path)) if isinstance(rest, dict) and names is None else None
        attach(checkpoint, content.state, str(path), names=names, certain=certain)
    checkpoint.metadata = {key: carried(file, value) for key, value in by_name(content.others, file.path).items()}
    checkpoint.step = _step(checkpoint, {**content.root, **content.base})
    if isinstance(rest, dict):
        restore(checkpoint, rest, file)
    rules = [rule for one in content.optimizers for rule in one.rules]
    checkpoint.files.append(describe(file, "model", rules=(*rules, *remainder_rules(KEY))))
    return checkpoint


def _without_elements(root: Mapping[object, object], deep: int = 2) -> str | None:
    """Say which entry of a dict, or of one so deep in it, is no plain tensor."""
    for key, value in root.items():
        if (odd := oddity(value)) is not None:
            return f"{key}, {odd}"
        if isinstance(value, dict) and deep and (inside := _without_elements(value, deep - 1)) is not None:
            return f"{key}.{inside}"
    return None


def add_tensors(checkpoint: Checkpoint, model: Mapping[object, object], path: str) -> None:
    """Turn the entries of a state dict into parameters and buffers; two names of the same bytes are tied.

    A file does not say which entries are buffers. Integers and bools cannot be trained, so they are, and so are the
    running statistics of a batch norm; the rest are taken for parameters.
    """
    owners: dict[tuple[object, ...], str] = {}
    dtypes = dtypes_of(model)
    for name, tensor in by_name(model, path).items():
        if not isinstance(tensor, Tensor):
            continue
        one = Parameter(name, tensor.shape, tensor.dtype, {WEIGHT: slot_of(WEIGHT, tensor, path)})
        if not may_be_trained(name, dtypes):
            checkpoint.buffers[name] = one
            continue
        owner = owners.setdefault(identity_of(tensor), name) if tensor.numel else name
        checkpoint.parameters[name] = one if owner == name else replace(one, slots={}, tied_to=owner)


def _step(checkpoint: Checkpoint, root: Mapping[object, object]) -> int | None:
    for key in STEP_KEYS:
        value = root.get(key)
        if type(value) is int:
            return value
    clock: object = root
    for key in COMPOSERS_STEP:
        clock = clock.get(key) if isinstance(clock, Mapping) else None
    if type(clock) is int:
        return clock
    return checkpoint.most_steps
