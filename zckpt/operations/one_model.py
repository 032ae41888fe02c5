"""One model of a checkpoint in the place of its own: one of several, a part, or what lies beside it, an average say."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from zckpt.errors import UsageError, listed
from zckpt.formats.torch_files.tensors import slot_of
from zckpt.state import WEIGHT, Checkpoint, Parameter, Slot, by_key, without
from zckpt.state.names import bare_names
from zckpt.torchfile import FromFile, Tensor, is_leaf, node_of

PART = "part"
"""Under which the details say that the source's configuration is of another model."""

OF_AVERAGE = frozenset({"decay", "num_updates"})
"""What latent-diffusion's LitEma has beside the model's parameters, whose names are without dots in it."""

DEEPEST = 8
"""Dicts and lists in each other in which tensors are looked for."""


def one_model(checkpoint: Checkpoint, key: str) -> Checkpoint:
    """Return a checkpoint of one model, without an optimizer.

    `key`: what the names of one of several models, or of a part of one, begin with; or where another set of the model's
    parameters lies beside it (`ema`, `callbacks.EMA.weights`): under their names, with anything before all of them, or
    as a list in the model's order. Buffers and frozen parameters that it lacks are the model's. Raises UsageError:
    there is none.
    """
    details = without(checkpoint.details, "models")
    bare = replace(checkpoint, unnamed={}, param_groups=[], wrapped={}, details=details)
    front = f"{key}."
    inside = {name.removeprefix(front): checkpoint.owner(name) for name in checkpoint.names if name.startswith(front)}
    if inside:
        gone = [f"{front}{name}" for name in inside]
        whole = replace(bare, parameters=without(bare.parameters, *gone), buffers=without(bare.buffers, *gone))
        if inside.keys() >= OF_AVERAGE and (slots := _without_dots(whole, without(inside, *OF_AVERAGE))):
            return _with(whole, slots)
        for section in ("parameters", "buffers"):
            own = ((name, one) for name, one in inside.items() if front + name in getattr(bare, section))
            setattr(bare, section, {name: replace(one, name=name, group=None) for name, one in own})
        bare.details[PART] = key
        return bare
    beside = {place: value for place, value in checkpoint.metadata.items() if not is_leaf(node_of(value))}
    near = [place for place in beside if f"{place}.".startswith(front) or front.startswith(f"{place}.")]
    every = [pair for place in near for pair in _slots(beside[place], place)]
    held = {name.removeprefix(front): slot for name, slot in every if name.startswith(front)}
    found = _sets(checkpoint.owners, held, lists=not checkpoint.is_sorted)
    if len(found) != 1:
        others = listed([*checkpoint.models(), *beside]) or "a checkpoint with several models"
        wanted = "all of the model's parameters, once, by name or in its order" if held else others
        raise UsageError(
            f"no model under the key {key}",
            path=checkpoint.source,
            expected=wanted,
            found=listed([f"{front}{more}".rstrip(".") for more in found] or list(held)) if held else "nothing there",
            advice="`zckpt inspect --files` shows what lies beside the model",
        )
    return _with(bare, *found.values())


def _without_dots(checkpoint: Checkpoint, held: Mapping[str, Parameter]) -> dict[str, Slot]:
    """Return the slots of tensors whose names are the model's, or those of its child, without dots; none of others."""
    every = {name: checkpoint.owner(name) for name in checkpoint.names}
    names = {part.replace(".", ""): name for name in every for part in (name, name.partition(".")[2])}
    slots = ((names.get(short), one.weight or one.master) for short, one in held.items())
    found = {name: slot for name, slot in slots if name and slot and slot.shape == every[name].shape}
    return found if len(found) == len(held) else {}


def _with(checkpoint: Checkpoint, slots: Mapping[str, Slot]) -> Checkpoint:
    """Return a checkpoint with other weights."""
    for section in ("parameters", "buffers"):
        tensors = {name: replace(one, group=None) for name, one in getattr(checkpoint, section).items()}
        for name, one in tensors.items():
            if name in slots and one.tied_to is None:
                tensors[name] = replace(one, slots={WEIGHT: slots[name]}, dtype=slots[name].dtype, state={})
        setattr(checkpoint, section, tensors)
    return checkpoint


def _slots(value: object, place: str, file: str = "", deep: int = DEEPEST) -> Iterator[tuple[str, Slot]]:
    """Yield the tensors below a value, by the keys that lead to them."""
    if isinstance(value, FromFile):
        yield from _slots(value.node, place, value.path, deep)
    elif isinstance(value, Tensor):
        yield place, slot_of(WEIGHT, value, file)
    elif deep:
        several = value if isinstance(value, Mapping) else dict(enumerate(value)) if isinstance(value, list) else {}
        for step, one in several.items():
            yield from _slots(one, f"{place}.{step}", file, deep - 1)


def _sets(owners: Sequence[Parameter], held: Mapping[str, Slot], *, lists: bool) -> dict[str, dict[str, Slot]]:
    """Return each set of slots that has all trained parameters, by their names, and what is before names in it."""
    whole = {one.name: one.shape for one in owners}
    trained = {one.name: one.shape for one in owners if one.group is not None}
    trained = trained or {one.name: one.shape for one in owners if not one.frozen} or whole
    first, found = next(iter(trained), ""), dict[str, dict[str, Slot]]()
    names = {new: old for old, new in bare_names(held).items()}
    fronts = (first[:at] for at in range(len(first)) if first[:at].endswith(".") or not at)  # which a set may lack
    for own in (front for front in fronts if all(name.startswith(front) for name in trained)):
        rest = first.removeprefix(own)
        if found:
            break
        for front in (name.removesuffix(rest) for name in names if f".{name}".endswith(f".{rest}")):
            its = {own + name.removeprefix(front): held[old] for name, old in names.items() if name.startswith(front)}
            if all(name in its and its[name].shape == shape for name, shape in trained.items()):
                found[front] = its
    ordered = by_key(
        (place, slot) for name, slot in held.items() for place, _, at in [name.rpartition(".")] if at.isdecimal()
    )
    for place, several in ordered.items() if lists and not found else ():
        shapes = [slot.shape for slot in several]
        order = next((one for one in (whole, trained) if [*one.values()] == shapes), None)
        found |= {} if order is None else {place: dict(zip(order, several, strict=True))}
    return found
