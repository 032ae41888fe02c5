"""Turn a sharded checkpoint into one model, and its optimizer into one file next to it.

A model whose tensors are computed, as a mean or with an adapter in it, is written in the same way, and proven: it is
opened again before it has its name, and every tensor of the model is there, of its shape and type. And every byte, if
that is asked for, is what the same functions compute once more.

One model can take the place of the checkpoint's own: one of several, a part, or what lies beside it, an average say.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from zckpt.engine.computed import Computed
from zckpt.engine.scan import SlotSet
from zckpt.engine.targets import TargetFile
from zckpt.errors import UnsupportedError, UsageError, listed
from zckpt.evidence.solver import NAMES_ADVICE
from zckpt.formats import open_checkpoint
from zckpt.formats.adapters import MAXIMUM_CONFIG_NBYTES, has_live_adapter, names_in_files, of_modules
from zckpt.formats.assets import (
    ADAPTER_CONFIG,
    CONFIG_NAME,
    OF_CODES,
    copies_of,
    find_assets,
    is_adapter,
    modules_of,
    stem_of,
)
from zckpt.formats.consolidated.model import Tensors, model_tensors, optimizer_slots
from zckpt.formats.deepspeed.hyperparameters import read_hyperparameters, with_hyperparameters
from zckpt.formats.floats import dequantized
from zckpt.formats.format import TargetFiles
from zckpt.formats.low_bit import codes_in, settings_in
from zckpt.formats.safetensors import layout as safetensors_layout
from zckpt.formats.suffixes import DIRECTORY, IN_DIRECTORY, OWN_MODEL, SAFETENSORS, TORCH, kind_of_model, optimizer_path
from zckpt.formats.torch_files.tensors import slot_of
from zckpt.immutable import immutable
from zckpt.naming import TRANSFORMERS
from zckpt.operations.losses import check_nothing_lost, refuse_beside, refuse_rank_values, without_rank_values
from zckpt.operations.open import Source, opened
from zckpt.operations.options import (
    Consolidating,
    Dequantized,
    OfWholeModel,
    Place,
    Unpack,
    naming_of,
    only,
    shares,
)
from zckpt.operations.proof import check_arrived, check_same
from zckpt.operations.salvage import salvage
from zckpt.operations.target import How, Made, Proof, Written, write_from
from zckpt.state import WEIGHT, Checkpoint, Parameter, Slot, Span, by_key, dict_of, without
from zckpt.state.dtypes import is_floating, itemsize
from zckpt.state.names import bare_names, like_model, renamed
from zckpt.storage.files import json_object, read_json
from zckpt.storage.ownership import Owned, called
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


NUMBERS = ("float64", "float32", "float16", "bfloat16")
"""Types whose elements are numbers by themselves; 8-bit ones mean nothing without their scales."""

ADAPTER_NAME = "adapter_model.safetensors"

MEGATRONS = ".self_attention.linear_"
"""What names have in Megatron-Core, and in no model of transformers."""

NO_CONFIG = f"no {CONFIG_NAME} was found, which from_pretrained needs; give its directory with --config DIR"

NO_ADAPTER_CONFIG = (
    f"no {ADAPTER_CONFIG} was found, which PEFT needs: add the one that save_pretrained of the adapter writes"
)

NO_MODEL = "no config.json is written, for the names are Megatron's: --map NAME gives transformers' (docs/maps.md)"

OWNED = Owned(called(OWN_MODEL))
"""The directories of models that are replaced."""


@immutable
class Chosen:
    """Where a model is written, what of it, and how: `OfWholeModel`, with `dequantize`.

    Raises
    ------
    UsageError
        One of them cannot be used.
    """

    path: Path
    how: How
    dtype: str | None
    tied: str
    max_shard_size: int
    config: Place | None
    dequantize: bool
    quantize: str | None
    slots: str | Sequence[str] = ()
    exclude_frozen: bool = False

    @classmethod
    def of(cls, target: Place, how: How, shared: Mapping[str, object]) -> Chosen:
        """Return what is chosen for a target by the options that verbs share."""
        return cls(Path(target), how, **only(OfWholeModel, shared), **only(Dequantized, shared))

    def __post_init__(self) -> None:
        if self.quantize is not None:
            from zckpt.formats.low_bit_codes import block_of

            block_of(self.quantize)
            if self.slots:
                raise UsageError("a quantised model cannot be written with its optimizer", expected="no --slots")


@immutable(kw_only=True)
class Consolidated(Written):
    """What `consolidate` wrote.

    Parameters
    ----------
    num_tensors : int
        Of the model.
    """

    num_tensors: int


@shares(Consolidating)
def consolidate(
    source: Source, target: Place, *, hyperparameters: Place | None = None, **shared: Unpack[Consolidating]
) -> Consolidated:
    """Merge a checkpoint's shards into one model, under the parameters' own names.

    Parameters
    ----------
    source : path-like or Checkpoint
    target : path-like
        `x.safetensors`: one file; `x.pt`, `x.pth` or `x.bin`: a torch state dict; any other name, except with endings
        of other programs' files: a directory in Hugging Face's layout, with `model.safetensors` or shards and their
        index, and the source's configuration and tokenizer. For a PEFT adapter with its `adapter_config.json`, a
        directory that PEFT loads.
    hyperparameters : path-like, optional
        A JSON list with one object per param group, for a source without hyperparameters (DeepSpeed's elastic form):
        torch's optimizers cannot step without them.
    **shared

    Returns
    -------
    Consolidated

    Raises
    ------
    UsageError
        An option cannot be used.
    SourceError
        The source cannot be read or contradicts itself (`WeightMismatchError`, `LayoutError`, ...).
    TargetError
        The target exists or cannot be written.
    """
    how = How.of("consolidate", shared, hyperparameters=hyperparameters)
    chosen, slots = Chosen.of(target, how, shared), shared["slots"]
    naming = naming_of(shared)
    whole = opened(source, **shared)
    found, values, drop = without_rank_values(whole, shared["drop"])
    dropped = (*values, *check_nothing_lost([whole], drop, salvages=True, of_model=not slots))
    if shared["model"] is not None:
        if slots:
            raise UsageError("--model writes no optimizer", expected="no --slots")
        found = one_model(found, shared["model"])
    left = salvage(found, shared, of_optimizer=bool(slots))
    found = left.checkpoint
    if chosen.dequantize and not slots and not codes_in(found):
        raise UsageError(
            "--dequantize finds no weights of few bits, and the optimizer's slots are not written",
            path=found.named, advice="add --slots=all",
        )  # fmt: skip
    [found], left_out = dequantized([found], chosen.dequantize)
    if hyperparameters is not None:
        if not (slots and found.is_bare):
            raise UsageError(
                "--hyperparameters only applies to --slots of a checkpoint without hyperparameters",
                path=found.source,
                found="a checkpoint with hyperparameters" if slots else "no --slots",
            )
        groups = found.param_groups
        stated = read_hyperparameters(hyperparameters, len(groups))
        found = replace(found, param_groups=with_hyperparameters(groups, stated))
    named = found
    if not slots and found.unnamed and found.parameters:  # an optimizer that only numbers its parameters
        parameters = {name: replace(one, group=None) for name, one in found.parameters.items()}
        named = replace(found, parameters=parameters, unnamed={}, param_groups=[])
        found = replace(found, warnings=[one for one in found.warnings if NAMES_ADVICE not in one])  # of no model's
    checkpoint, notes = naming.of(named)
    [checkpoint], told = as_beside([checkpoint], chosen)
    notes = (*notes, *told)
    laid, num_tensors = lay_out(checkpoint, chosen)
    adapter = any(one.name == ADAPTER_NAME for one in laid.files)
    if not laid.is_file and not {ADAPTER_CONFIG, *(() if adapter else (CONFIG_NAME,))} & set(laid.copied):
        notes = (*notes, NO_MODEL if has_megatrons_names(checkpoint) else NO_ADAPTER_CONFIG if adapter else NO_CONFIG)
    return write_from(
        Consolidated, found, replace(laid, notes=(*notes, *left_out)), chosen.path, how, owns=OWNED, dropped=dropped,
        sources=left.sources(found), missing=left.missing, filled=left.filled, num_tensors=num_tensors,
    )  # fmt: skip


def as_beside(checkpoints: Sequence[Checkpoint], chosen: Chosen) -> tuple[list[Checkpoint], tuple[str, ...]]:
    """Return checkpoints under the names that go with a model's configuration where that is written, too; and notes.

    Raises UsageError: as `assets_of`; or names may be of files or memory.
    """
    assets = assets_of(checkpoints[0], chosen)
    if kind_of_model(chosen.path) == DIRECTORY and (named := names_in_files(checkpoints[0])):
        left = [name for name in checkpoints[0].buffers if name not in named]
        alone = [replace(one, buffers=without(one.buffers, *left)) for one in checkpoints]
        told = f"{listed(left)}: buffers of the base, of which PEFT's files have none, are left out"
        return [renamed(one, named) for one in alone], (told,) if left else ()
    beside = read_json(assets.get(CONFIG_NAME, ""))
    if beside is None or chosen.how.options["map"] is not None:
        return list(checkpoints), ()
    from zckpt.naming.installed import as_in_files

    done = [as_in_files(one, beside) for one in checkpoints]
    return [one for one, _ in done], tuple(dict.fromkeys(note for _, told in done for note in told))


def has_megatrons_names(checkpoint: Checkpoint) -> bool:
    """Tell whether tensors are called as in Megatron-Core: what lies beside them is of another program."""
    return any(MEGATRONS in name for name in checkpoint.names)


def assets_of(checkpoint: Checkpoint, chosen: Chosen) -> dict[str, Path]:
    """Return the files that go with a model into a directory.

    Raises UsageError: a configuration is given, and there is none, or no directory.
    """
    given = None if chosen.config is None else Path(chosen.config)
    if kind_of_model(chosen.path) != DIRECTORY:
        if given is not None:
            raise UsageError(
                "--config needs a directory as the target", path=chosen.path, expected="the name of a directory"
            )
        return {}
    found = find_assets(checkpoint, given) if given is not None or PART not in checkpoint.details else {}
    if given is not None or (chosen.how.options["map"] in (None, TRANSFORMERS) and not has_megatrons_names(checkpoint)):
        return found
    is_own = is_adapter(checkpoint.names, found)  # a map's model has another configuration, and an adapter's says it
    return {key: one for key, one in found.items() if key == ADAPTER_CONFIG and is_own}


def lay_out(
    checkpoint: Checkpoint, chosen: Chosen, settings: Mapping[str, object] | None = None
) -> tuple[TargetFiles, int]:
    """Return the files of a model and of its optimizer, and the number of the model's tensors.

    `settings`: what config.json says otherwise than the source's.

    Raises
    ------
    UsageError
        The name of the target, or a slot, cannot be used.
    """
    is_directory = kind_of_model(chosen.path) == DIRECTORY
    tensors = model_tensors(checkpoint, chosen.dtype, tied=chosen.tied, exclude_frozen=chosen.exclude_frozen)
    if not tensors:
        raise UsageError("holds no model, only optimizer state", path=checkpoint.source)
    assets = assets_of(checkpoint, chosen)
    adapted = not is_adapter(tensors, assets) and has_live_adapter(tensors)
    if CONFIG_NAME in assets and (adapted or has_megatrons_names(checkpoint)):
        what = "has an adapter in it" if adapted else "has Megatron's names"
        how = "`zckpt merge-adapter SOURCE SOURCE TARGET` merges it" if adapted else "give --map (docs/maps.md)"
        raise UsageError(
            f"{what}, and from_pretrained would load none of its names",
            path=checkpoint.source,
            expected="the model's own names",
            advice=f"{how}; or write everything unchanged to x.safetensors",
        )
    types = Counter(type_ for slot, type_ in tensors.values() if isinstance(slot, Computed))
    dtype = types.most_common(1)[0][0] if types and chosen.dequantize else None
    if chosen.config is not None and settings_in([Path(chosen.config)])[1] and not codes_in(checkpoint):
        every = Counter(type_ for slot, type_ in tensors.values() if len(slot.shape) > 1)
        if all(is_floating(type_) and itemsize(type_) > 1 for type_ in every):  # not what the configuration is of
            dtype = dtype or next((type_ for type_, _ in every.most_common(1)), None)
    if chosen.quantize is not None:
        from zckpt.formats.low_bit_codes import block_of, in_block_fp8

        if CONFIG_NAME not in assets:
            raise UsageError(
                "--quantize needs a config.json in the target directory", path=chosen.path, advice="give --config DIR"
            )
        if codes_in(checkpoint):
            raise UsageError("is already quantised", path=checkpoint.source, advice="add --dequantize")
        told = json_object(assets[CONFIG_NAME], "configuration", most=MAXIMUM_CONFIG_NBYTES)
        tensors, quantisation = in_block_fp8(tensors, block_of(chosen.quantize), told, checkpoint.source)
        settings = {**(settings or {}), "quantization_config": quantisation}
    if dtype or chosen.quantize is not None:
        assets = without(assets, *OF_CODES)
    copied = copies_of(assets)
    if CONFIG_NAME in assets and (dtype or settings):
        from zckpt.formats.low_bit_floats import plain_config

        data = plain_config(assets[CONFIG_NAME], dtype, settings or {})
        own = TargetFile.of(CONFIG_NAME, data)
        copied = [own if one.name == CONFIG_NAME else one for one in copied]
    if ADAPTER_CONFIG in assets and chosen.config is None and chosen.how.options["map"] not in (None, TRANSFORMERS):
        copied = [TargetFile.of(ADAPTER_CONFIG, of_modules(assets[ADAPTER_CONFIG], tensors))]
    files = _model_files(checkpoint, chosen, tensors, assets)
    if chosen.slots:
        files.append(_optimizer_file(checkpoint, chosen))
    return TargetFiles([*files, *copied], is_file=not is_directory, copied=frozenset(assets)), len(tensors)


def _model_files(
    checkpoint: Checkpoint, chosen: Chosen, tensors: Tensors, assets: Mapping[str, Path]
) -> list[TargetFile]:
    kind, name = kind_of_model(chosen.path), chosen.path.name
    if kind == TORCH:
        from zckpt.formats.consolidated.model import model_tree
        from zckpt.formats.torch_files import writer as torch_writer

        return [torch_writer.lay_out(name, model_tree(checkpoint, tensors))]
    entries = [safetensors_layout.Entry(own, *one) for own, one in tensors.items()]
    texts = _texts(checkpoint, tensors)
    if kind == SAFETENSORS:
        return [safetensors_layout.lay_out(name, entries, texts)]
    if is_adapter(tensors, assets):
        return [safetensors_layout.lay_out(ADAPTER_NAME, entries, texts)]
    return safetensors_layout.lay_out_directory(
        entries, chosen.max_shard_size, stem=stem_of(assets), metadata=texts, folders=modules_of(assets)
    )


def _texts(checkpoint: Checkpoint, tensors: Tensors) -> dict[str, str]:
    """Return what the headers of safetensors say, and no two of them otherwise, of tensors that stay as they are."""
    kept = dict_of(checkpoint.details.get("origin"))  # through zckpt's own format
    if kept.get("format", checkpoint.format) != "safetensors" or any(
        isinstance(slot, Computed) or slot.dtype != type_ for slot, type_ in tensors.values()
    ):
        return {}
    from zckpt.formats.safetensors.file import SHARDING_KEY

    said, stems = checkpoint.metadata, {f"{Path(one.path).stem}." for one in checkpoint.files}
    stems |= {one[0] for key in said if (one := re.match(r"[^.]*-\d{5}-of-\d{5}\.", key))}
    others = {key: key.removeprefix(stem) for stem in stems for key in said if key.startswith(stem)}
    own = without(said, "param_groups", SHARDING_KEY, *others, *others.values())
    return {key: text for key, text in own.items() if isinstance(text, str)}


def _optimizer_file(checkpoint: Checkpoint, chosen: Chosen) -> TargetFile:
    from zckpt.formats.consolidated.optimizer import optimizer_safetensors, optimizer_torch

    available = [name for name in checkpoint.slot_names() if name != WEIGHT]
    slots = [chosen.slots] if isinstance(chosen.slots, str) else list(chosen.slots)
    if slots == ["all"]:
        refuse_rank_values(checkpoint)
        refuse_beside(checkpoint)
        slots = optimizer_slots(checkpoint, chosen.dtype)
    unknown = [name for name in slots if name not in available]
    if unknown or not (available or checkpoint.param_groups):  # an optimizer may have no state, as SGD
        raise UsageError(
            f"no slot {', '.join(unknown) or 'of an optimizer'}",
            path=checkpoint.source,
            expected=", ".join(available) or "a checkpoint that has an optimizer",
        )
    kind = kind_of_model(chosen.path)
    if kind == TORCH and checkpoint.is_bare:
        raise UnsupportedError(
            "its param groups have no hyperparameters; torch's optimizers would load the state, but could not step",
            path=checkpoint.source,
            advice="give `zckpt consolidate` --hyperparameters FILE, a JSON list with one object per param group; "
            "or use a target name that ends in .safetensors",
        )
    name = IN_DIRECTORY if kind == DIRECTORY else optimizer_path(chosen.path).name
    lay_out = optimizer_torch if kind == TORCH else optimizer_safetensors
    return lay_out(checkpoint, name, slots)


# --- what is computed


def write_computed(
    kind: type[Made],
    checkpoint: Checkpoint,
    sources: Sequence[Checkpoint],
    chosen: Chosen,
    *,
    verify: bool,
    dropped: tuple[str, ...],
    without: Collection[str] = (),
    settings: Mapping[str, object] | None = None,
    **more: Any,  # noqa: ANN401  # of the result
) -> Made:
    """Write a model whose slots are computed from those of sources, or are theirs.

    `verify`: compute all elements once more after writing, and compare; `without`: names of files next to the sources
    that do not go with what is written; `settings`: what config.json says otherwise.
    """
    laid, num_tensors = lay_out(checkpoint, chosen, settings)
    kept = [one for one in laid.files if one.name not in without]
    laid = replace(laid, files=kept, copied=frozenset(laid.copied) - frozenset(without))

    def look(written: Path, files: Sequence[Path], _record: Path | None) -> int:
        holes = {hole.label: hole for one in laid.files for hole in one.holes}
        tensors = [name for name in checkpoint.names if name in holes]
        found = like_model(open_checkpoint(written), tensors)
        for name in tensors:
            there = name in found.parameters or name in found.buffers
            copy = found.owner(name).weight if there else None
            check_arrived(name, copy, holes[name].slot.shape, holes[name].dtype)
        if not verify:
            return 0
        sets = [
            SlotSet(hole.label, (hole.slot, Slot(hole.label, hole.dtype, hole.slot.shape, spans)), (hole.dtype,) * 2)
            for path, one in zip(files, laid.files, strict=True)
            for hole in one.holes
            for spans in [(Span(hole.extent, str(path), hole.offset, hole.dtype),)]
        ]
        return check_same(sets, "differ from the computed values", chosen.how)

    return write_from(
        kind, checkpoint, laid, chosen.path, chosen.how, owns=OWNED, proof=Proof(look), dropped=dropped,
        sources=sources, num_tensors=num_tensors, **more,
    )  # fmt: skip
