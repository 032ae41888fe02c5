"""A single file written by `torch.save`: a model's state dict, or a dict that holds one and an optimizer's.

{name: tensor, ...}                                            a state dict by itself
{"model": {name: tensor}, "optimizer": {state, param_groups}, "step": 5, ...}      under any keys
{..., "zckpt": {...}}                                          what `zckpt convert` keeps besides both, see `remainder`
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from zckpt.codes import UNSUPPORTED
from zckpt.errors import SourceError, UnsupportedError
from zckpt.formats.remainder import KEY, remainder_rules, restore
from zckpt.formats.torch_files.optimizer import attach, looks_like_optimizer, optimizer_rules, parse
from zckpt.formats.torch_files.tensors import by_name, carried, describe, identity_of, slot_of
from zckpt.state import WEIGHT, Checkpoint, Parameter, Scalar
from zckpt.state.dtypes import is_floating
from zckpt.state.inventory import Rule
from zckpt.torchfile import Object, Tensor, read_torchfile

STATE_DICT_KEYS = ("model", "module", "state_dict", "model_state_dict", "model_state", "net", "network", "weights")
"""Keys under which programs keep the model, most usual first; decides only where several dicts of tensors are there."""

OPTIMIZER_KEYS = ("optimizer", "optimizer_state_dict", "optimizer_states", "optim", "optimizer_state")

EXTRA_STATE = "_extra_state"
"""What the name of a module's extra state ends with, be it a tensor or not (torch 2.13, `Module.get_extra_state`)."""

STEP_KEYS = ("step", "global_step", "global_steps", "iteration")


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
    root = {key: _only(value, str(key), checkpoint) for key, value in root.items() if key != KEY}
    model_key, model = _model(root, checkpoint)
    optimizer_key = _optimizer_key(root)
    if model is None and optimizer_key is None and not looks_like_optimizer(root):
        raise UnsupportedError(
            "holds no state dict",
            path=path,
            expected="a dict of tensors, or one that has one",
            found=f"keys {', '.join(map(str, list(root)[:8]))}",
        )
    add_tensors(checkpoint, model or {}, str(path))
    optimizer = root if looks_like_optimizer(root) else root.get(optimizer_key)
    if optimizer is not None:
        attach(checkpoint, parse(optimizer, str(path)), str(path), names=names)
    if optimizer is not root:
        others = _others(root, model_key, model or {}, optimizer_key)
        checkpoint.metadata = {key: carried(file, value) for key, value in by_name(others, file.path).items()}
    checkpoint.step = _step(checkpoint, root)
    if isinstance(rest, dict):
        restore(checkpoint, rest, file)
    checkpoint.files.append(describe(file, "model", rules=_rules(file.root, optimizer_key)))
    return checkpoint


def _rules(root: object, optimizer_key: object) -> tuple[Rule, ...]:
    """Return what is known of the values in the file."""
    if looks_like_optimizer(root):
        return (*optimizer_rules(), *remainder_rules(KEY))
    key = str(optimizer_key)
    return (*optimizer_rules(key), *optimizer_rules(key, "0"), *remainder_rules(KEY))


def is_state_dict(node: object) -> bool:
    """Tell a dict of tensors; what a module keeps as its extra state may be anything."""
    if not isinstance(node, dict) or not all(isinstance(key, str) for key in node):
        return False
    values = [value for key, value in node.items() if isinstance(value, Tensor) or not key.endswith(EXTRA_STATE)]
    return bool(values) and all(isinstance(value, Tensor) for value in values)


def _others(
    root: Mapping[object, object], model_key: object, model: Mapping[object, object], optimizer_key: object
) -> dict[object, object]:
    """Return what a file holds besides the tensors of its model and its optimizer: every value once.

    What a state dict has that is no tensor stays under the name that the state dict has in the file.
    """
    extra = {key: value for key, value in model.items() if not isinstance(value, Tensor)}
    if model_key is None:  # the tensors are the file's own entries, if any are
        return {key: value for key, value in root.items() if key not in (*model, optimizer_key)} | extra
    rest = {key: value for key, value in root.items() if key not in (model_key, optimizer_key)}
    return {model_key: extra, **rest} if extra else rest


def _model(root: Mapping[object, object], checkpoint: Checkpoint) -> tuple[object, Mapping[object, object] | None]:
    """Return the model's state dict and the key it is under; `extra state` that is no tensor is let pass."""
    if is_state_dict(root):
        return None, root
    found = {key: value for key, value in root.items() if is_state_dict(value)}
    if not found:
        tensors = {key: value for key, value in root.items() if isinstance(value, Tensor)}
        mostly = len(tensors) * 2 > len(root) and not looks_like_optimizer(root)
        return (None, tensors) if mostly else (None, None)
    usual = [key for key in STATE_DICT_KEYS if key in found]
    key = usual[0] if usual else next(iter(found))
    if len(found) > 1:
        checkpoint.warnings.append(
            f"several dicts of tensors ({', '.join(map(str, found))}); the model is taken to be {key!r}"
        )
    value = found[key]
    return key, value if isinstance(value, dict) else None


def _only(value: object, key: str, checkpoint: Checkpoint) -> object:
    """Return the first optimizer of a list of them, as Lightning keeps them; anything else as it is."""
    if isinstance(value, list) and value and all(looks_like_optimizer(one) for one in value):
        if len(value) > 1:
            checkpoint.warnings.append(f"{key} holds {len(value)} optimizers; the first one is read")
        return value[0]
    return value


def _optimizer_key(root: Mapping[object, object]) -> object:
    found = [key for key, value in root.items() if looks_like_optimizer(value)]
    usual = [key for key in OPTIMIZER_KEYS if key in found]
    return usual[0] if usual else (found[0] if found else None)


def add_tensors(checkpoint: Checkpoint, model: Mapping[object, object], path: str) -> None:
    """Turn the entries of a state dict into parameters and buffers; two names of the same bytes are tied.

    A file does not say which entries are buffers. Integers and bools cannot be trained, so they are, and so are the
    running statistics of a batch norm; the rest are taken for parameters.
    """
    owners: dict[tuple[object, ...], str] = {}
    for name, tensor in by_name(model, path).items():
        if not isinstance(tensor, Tensor):
            continue
        slots = {WEIGHT: slot_of(WEIGHT, tensor, path)}
        if not _trainable(tensor) or _is_running_statistic(name, model):
            checkpoint.buffers[name] = Parameter(name, tensor.shape, tensor.dtype, slots)
            continue
        owner = owners.setdefault(identity_of(tensor), name) if tensor.numel else name
        if owner != name:
            checkpoint.parameters[name] = Parameter(name, tensor.shape, tensor.dtype, tied_to=owner)
        else:
            checkpoint.parameters[name] = Parameter(name, tensor.shape, tensor.dtype, slots)


def _trainable(tensor: Tensor) -> bool:
    return is_floating(tensor.dtype) or tensor.dtype.startswith("complex")


def _is_running_statistic(name: str, model: Mapping[object, object]) -> bool:
    """Tell whether an entry is a batch norm's running mean or variance: the integer count next to it says so."""
    module, _, last = name.rpartition(".")
    count = model.get(f"{module}.num_batches_tracked" if module else "num_batches_tracked")
    return last in ("running_mean", "running_var") and isinstance(count, Tensor) and not _trainable(count)


def _step(checkpoint: Checkpoint, root: Mapping[object, object]) -> int | None:
    for key in STEP_KEYS:
        value = root.get(key)
        if type(value) is int:
            return value
    steps = [group.state.get("step") for group in checkpoint.param_groups]
    numbers = [s.value if isinstance(s, Scalar) else s for s in steps]
    whole = [int(n) for n in numbers if isinstance(n, (int, float))]
    return max(whole, default=None)
