"""A LoRA adapter merged into the model that it was trained on, without either of them in memory."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from zckpt.compare.slots import differences, pair
from zckpt.engine.cast import Array
from zckpt.engine.computed import Computed, Function
from zckpt.engine.scan import refuse_endless
from zckpt.engine.sums import KEPT_NBYTES, LowRank, Norms, Sum
from zckpt.errors import LayoutError, UnsupportedError, UsageError, listed
from zckpt.formats.adapters import CONFIG_NAME, Adapter, Product, holds_adapter, read_adapter, without_adapters
from zckpt.formats.assets import CONFIG_NAME as MODEL_CONFIG
from zckpt.formats.floats import dequantized
from zckpt.formats.low_bit import codes_in, settings_of
from zckpt.formats.low_bit_floats import weights_as_floats
from zckpt.immutable import immutable
from zckpt.operations.consolidate import NUMBERS, Chosen, Consolidated, as_beside, write_computed
from zckpt.operations.losses import check_nothing_lost
from zckpt.operations.open import Source, opened
from zckpt.operations.options import Merging, Place, Unpack, naming_of, shares
from zckpt.operations.target import How, summary
from zckpt.state import MASTER, WEIGHT, Checkpoint, Document, Parameter, Shape, Slot
from zckpt.state.views import concat, narrow, reshape, transpose
from zckpt.storage.files import read_json
from zckpt.storage.recent import Recent


@immutable(kw_only=True)
class Merged(Consolidated):
    """What `merge_adapter` wrote.

    Parameters
    ----------
    base, adapter : dict
        Descriptions of the two.
    num_merged, num_replaced, num_added : int
        Weights and biases that something was added to or that got rows; tensors taken from the adapter; and of these,
        those that the base lacks.
    """

    base: Document
    adapter: Document
    num_merged: int
    num_replaced: int
    num_added: int


@shares(Merging)
def merge_adapter(
    base: Source,
    adapter: Place,
    target: Place,
    *,
    adapter_config: Place | None = None,
    adapter_name: str | None = None,
    fan_in_fan_out: bool | None = None,
    verify: bool = False,
    **shared: Unpack[Merging],
) -> Merged:
    """Merge a LoRA or DoRA adapter into its base model, as PEFT's `merge_and_unload` does.

    scale * B @ A is computed in float32 (float64 for float64 weights), added to the weight, or to its master if the
    base has one, and rounded once to the target's type (with DoRA, after normalising each row). Options for opening and
    renaming apply to the base, and give it the names that the adapter was trained with.

    Parameters
    ----------
    base : path-like or Checkpoint
        The model that the adapter was trained on, in any format; or a whole model with the adapter in it.
    adapter : path-like
        A directory that PEFT saved, or a checkpoint that holds an adapter.
    target : path-like
        As for `consolidate`.
    adapter_config : path-like, optional
        The adapter's `adapter_config.json`, or its directory. Default: next to the adapter's tensors.
    adapter_name : str, optional
        Which of several adapters: its folder, or its name in a whole model; "default" is the directory's own.
    fan_in_fan_out : bool, optional
        Whether square weights are (in, out), which shapes cannot tell. Default: as the adapter's other weights, or as
        its configuration says.
    verify : bool
        After writing, compute everything again and compare every byte.
    **shared

    Returns
    -------
    Merged

    Raises
    ------
    UsageError
        An option cannot be used, or the adapter is not for this model.
    SourceError
        One of them cannot be read or contradicts itself; `UnsupportedError` if it is not plain LoRA.
    TargetError
        The target exists or cannot be written.
    """
    if isinstance(base, (str, os.PathLike)) and holds_adapter(Path(base)) and not holds_adapter(Path(adapter)):
        raise UsageError("is an adapter", path=base, expected="the model, then the adapter", advice="swap them")
    how = How.of(
        "merge-adapter", shared, adapter_config=adapter_config, adapter_name=adapter_name, fan_in_fan_out=fan_in_fan_out
    )
    chosen = Chosen.of(target, how, shared)
    sources = [opened(base, **shared)]

    def read(path: Path) -> Checkpoint:
        sources.append(opened(path))
        return weights_as_floats(sources[-1]) if chosen.dequantize else sources[-1]

    [plain], left_out = dequantized(sources, chosen.dequantize)
    settings = None if adapter_config is None else Path(adapter_config)
    added = read_adapter(Path(adapter), read, settings, adapter_name)
    dropped = check_nothing_lost(sources, shared["drop"], of_model=True)
    model, notes = naming_of(shared).of(plain)
    stated = (chosen.config and read_json(Path(chosen.config) / MODEL_CONFIG)) or settings_of(model)[0]
    merging = _Merging(model, added, fan_in_fan_out, chosen.dtype, stated.get("text_config") or stated)
    result = merging.merged()
    try:
        [result], told = as_beside([result], chosen)
    except UnsupportedError as error:
        told = (f"names are as they were, of memory: {error.message}",)
    done = write_computed(
        Merged, result, [plain, added.checkpoint], chosen, verify=verify, dropped=dropped,
        without=[CONFIG_NAME], settings=merging.settings(), base=summary(model), adapter=summary(added.checkpoint),
        num_merged=len(added.products) + sum(one.bias is not None for one in added.products) + len(added.tokens),
        num_replaced=len(added.replaced), num_added=merging.num_added,
    )  # fmt: skip
    return replace(done, notes=(*notes, *told, *done.notes, *left_out, *merging.notes))


class _Merging:
    """One merge: a checkpoint of the base's slots, of computed ones, and of the adapter's."""

    def __init__(
        self,
        base: Checkpoint,
        adapter: Adapter,
        fan_in_fan_out: bool | None,
        dtype: str | None,
        config: Mapping[str, Any],
    ) -> None:
        self.base, self.adapter, self.dtype, self.config = base, adapter, dtype, config
        self.notes: list[str] = []
        self.fan_in_fan_out = fan_in_fan_out
        self.num_added = 0
        self.kept = Recent[int, tuple[Slot, Array]](KEPT_NBYTES)
        self.result = Checkpoint(base.source, base.format, opened=base.opened, step=base.step)
        bare = without_adapters(base.names)
        for name, short in bare.items():
            one = base.parameters.get(name) or base.buffers[name]
            tied_to = None if one.tied_to is None else bare.get(one.tied_to, one.tied_to)
            section = self.result.parameters if name in base.parameters else self.result.buffers
            section[short] = replace(one, name=short, tied_to=tied_to, slots=dict(one.slots), group=None)

    def merged(self) -> Checkpoint:
        """Return what is to be written.

        Raises UsageError: the adapter does not fit the base; UnsupportedError: a weight is none that numbers are added
        to.
        """
        adapter, result = self.adapter, self.result
        every = {**result.parameters, **result.buffers}
        codes = codes_in(result)
        modules = {one.module for one in adapter.products} | adapter.experts.keys()
        modules |= {name.rpartition(".")[0] for name in adapter.saved}
        if quantised := [name for name in codes if name.rpartition(".")[0] in modules]:
            raise UnsupportedError(
                f"{listed(quantised)}: nothing can be added to low-bit codes",
                path=self.base.named,
                advice="--dequantize merges into the floats that they stand for; or give the unquantised model",
            )
        self._tie(every)
        own = {name: one for name, one in adapter.replaced.items() if name in every or not self._is_tied(name, every)}
        needed = [(name, name) for name in own if name not in adapter.saved]
        needed += [(one.name, one.module) for one in adapter.products]
        needed += [(name, name) for name in adapter.tokens]
        needed += [(one.bias_name, one.bias_name) for one in adapter.products if one.bias]
        if missing := [said for name, said in needed if name not in every]:
            raise UsageError(
                f"{listed(missing)}: not in {self.base.named}",
                path=adapter.checkpoint.source,
                expected=f"names as {listed(list(every), most=2)}" if every else "a base model, not an adapter",
                advice="give the model that the adapter was trained on; transformers may have other names in memory "
                "than in files: --map=transformers gives them",
            )
        for name, one in own.items():
            self._replace(name, one)
        changed: dict[str, tuple[str, object]] = {}  # by owner, what changes it: of one weight, one thing alone
        for name, (new, indexes) in adapter.tokens.items():
            owner = result.owner(name)
            other, same = changed.setdefault(owner.name, (name, new))
            if same is not new:
                raise self._both(name, other)
            if other == name:
                self._replace_rows(owner, new, indexes)
        adapter.products += adapter.of_parameters({name: one.shape for name, one in every.items()})
        for product in adapter.products:
            other, same = changed.setdefault(result.owner(product.name).name, (product.module, product))
            if same is not product:
                raise self._both(product.module, other)
        for product in adapter.products:
            self._add(product)
        return result

    def _tie(self, every: Mapping[str, Parameter]) -> None:
        """Tie what DCP and ranks of FSDP hold twice, and what is one in memory, where something is added to it."""
        adapter, size = self.adapter, self.config.get("vocab_size")
        own = {*adapter.tokens, *(one.name for one in adapter.products if one.is_embedding or "lm_head" in one.module)}
        own |= {one.name for one in adapter.products if one.name in every and every[one.name].shape[:1] == (size,)}
        owners = {self.result.owner(name).name for name in own & every.keys()} - adapter.saved
        for name in sorted(owners):
            other = self._copy_of(_values(self.result.owner(name)), owners | adapter.saved)
            if other is not None and other.name in self.result.parameters:
                self.notes.append(f"{other.name} equals {name}, and gets the same: the two are tied")
                self.result.parameters[other.name] = replace(other, slots={}, tied_to=name)

    def _is_tied(self, name: str, every: Collection[str]) -> bool:
        """Tell whether a tensor is one of the base under another name: PEFT has saved both to keep them tied."""
        saved = self.adapter.replaced[name]
        if name not in self.adapter.saved:
            return self._copy_of(_values(saved), ()) is not None
        others = [one for its, one in self.adapter.replaced.items() if its in every and one.shape == saved.shape]
        pairs = [[pair(one.name, _values(saved), _values(one))] for one in others]
        ensured = bool(self.adapter.settings.get("ensure_weight_tying"))
        return ensured and any(not differences(one) for one in pairs)

    def _copy_of(self, slot: Slot, but: Collection[str]) -> Parameter | None:
        """Return the one other tensor of the base of this shape, if its elements are the same, and tied."""
        every = [one for one in self.result.tensors() if one.shape == slot.shape and not one.tied_to]
        found = [one for one in every if one.name not in but]
        if len(found) != 1 or len(slot.shape) != 2 or self.config.get("tie_word_embeddings") is False:
            return None
        return None if differences([pair(found[0].name, slot, _values(found[0]))]) else found[0]

    def settings(self) -> Document:
        """Return what config.json is to say otherwise: that an embedding or a head that was replaced is tied no more.

        Raises UnsupportedError: the other one is in no file.
        """
        adapter, size = self.adapter, self.config.get("vocab_size")
        own = [name for name in sorted(adapter.saved) if adapter.replaced[name].shape[:1] == (size,)]
        stated = adapter.settings
        if not own or self.config.get("tie_word_embeddings") is False or stated.get("ensure_weight_tying"):
            return {}
        shape = adapter.replaced[own[0]].shape
        alike = [one for one in self.result.tensors() if one.shape == shape and one.tied_to is None]
        if len(alike) == 1 and stated.get("task_type") in (None, "CAUSAL_LM", "SEQ_2_SEQ_LM"):
            raise UnsupportedError(
                f"{own[0]} replaces a tied tensor, but the other name's original values are in no file",
                path=self.base.named,
                expected="both names, as in a state dict from torch.save",
                advice="--map=transformers gives both, if it knows the model; or merge it with PEFT's merge_and_unload",
            )
        return {"tie_word_embeddings": False} if len(alike) > 1 else {}

    def _misfit(self, what: str, expected: object, found: object) -> UsageError:
        return UsageError(
            f"{what} does not fit {self.base.named}", path=self.adapter.checkpoint.source, expected=expected,
            found=found, advice="give the model that the adapter was trained on, with its vocabulary resized",
        )  # fmt: skip

    def _both(self, one: str, other: str) -> UnsupportedError:
        return UnsupportedError(
            f"{one} and {other} are one tied weight, and both have an adapter",
            path=self.adapter.checkpoint.source,
            advice="merge it with PEFT's merge_and_unload",
        )

    def _replace_rows(self, owner: Parameter, rows: Parameter, indexes: list[int]) -> None:
        """Let rows of the adapter take the place of some of a weight."""
        new = _values(rows)
        if len(owner.shape) != 2 or new.shape[1:] != owner.shape[1:] or max(indexes) >= owner.shape[0]:
            found = f"{rows.shape}, of rows up to {max(indexes)}"
            raise self._misfit(f"the trained part of {owner.name}", owner.shape, found)
        if isinstance(_values(owner), Computed):
            raise UnsupportedError(f"{owner.name} has codes, whose rows cannot be replaced", path=self.base.named,
                                   advice="merge into what `zckpt consolidate --dequantize` writes")  # fmt: skip
        for key in {WEIGHT, MASTER} & owner.slots.keys():
            slot, done, parts = owner.slots[key], 0, list[Slot]()
            for at, number in sorted((number, at) for at, number in enumerate(indexes)):
                parts += [narrow(slot, 0, done, at - done), narrow(new, 0, number, 1)]
                done = at + 1
            parts = [one for one in (*parts, narrow(slot, 0, done, slot.shape[0] - done)) if one.numel]
            owner.slots[key] = replace(concat(parts, 0), name=key, dtype=slot.dtype)

    def _replace(self, name: str, one: Parameter) -> None:
        """Let a tensor of the adapter take the place of one of the base.

        One that was tied and belongs to a module of its own is tied no more.
        """
        slot = _values(one)
        section = self.result.buffers if name in self.result.buffers else self.result.parameters
        if name not in section:
            self.num_added += 1
            section[name] = Parameter(name, slot.shape, one.dtype, {WEIGHT: replace(slot, name=WEIGHT)})
            return
        was = self.result.owner(name)
        if was.shape != slot.shape:
            raise self._misfit(f"{name} has another shape, and", was.shape, slot.shape)
        slots = {
            key: replace(slot, name=key, dtype=was.slots[key].dtype) for key in (WEIGHT, MASTER) if key in was.slots
        }
        if name not in self.adapter.saved:
            was.slots.update(slots)
            return
        first, *rest = [alias for alias, other in self.result.parameters.items() if other.tied_to == name] or [""]
        if first:
            self.result.parameters[first] = replace(was, name=first, slots=dict(was.slots), tied_to=None)
        for alias in rest:
            self.result.parameters[alias] = replace(was, name=alias, slots={}, tied_to=first)
        section[name] = replace(was, name=name, slots=slots, tied_to=None)

    def _add(self, product: Product) -> None:
        owner = self.result.owner(product.name)
        slot = _values(owner)
        if slot.dtype not in NUMBERS:
            raise UnsupportedError(
                f"{owner.name} is not a weight that numbers can be added to",
                path=self.base.source,
                expected=" or ".join(NUMBERS),
                found=slot.dtype,
                advice="merge into the unquantised model",
            )
        a, b = product.a, product.b
        transposed = product.is_embedding or self._is_transposed(product, slot.shape)
        rows, columns = (a.shape[1:], b.shape[:1]) if transposed else (b.shape[:1], a.shape[1:])
        lead = () if product.num_experts is None else (product.num_experts,)
        if (*lead, *rows, *columns) != slot.shape or any(size != 1 for size in b.shape[2:]):
            raise self._misfit(
                f"the adapter of {product.module}",
                f"B @ A of {slot.shape}, or {slot.shape[::-1]} if it is (in, out)",
                f"A {a.shape}, B {b.shape}",
            )
        dtype = "float64" if slot.dtype == "float64" else "float32"
        if isinstance(slot, Computed) and self.dtype in NUMBERS:
            slot = replace(slot, dtype=self.dtype)
        left, right = (a, b) if transposed else (b, a)
        for one in (slot, left, right):
            refuse_endless(one, owner.name)
        if product.num_experts:  # rows of all experts, one below the other, and their right factors
            num = product.num_experts
            rank = a.shape[0] // num
            each = reshape(a, (num, rank, *a.shape[1:])), reshape(b, (*b.shape[:1], rank, num))
            left = transpose(each[0], (0, 2, 1)) if transposed else transpose(each[1], (2, 0, 1))
            right = transpose(each[1], (2, 1, 0)) if transposed else each[0]
            left, right = reshape(left, (num * rows[0], rank)), reshape(right, (num * rank, *columns))
            shape = (num * rows[0], *columns)
            slot = replace(slot, shape=shape) if isinstance(slot, Computed) else reshape(slot, shape)
            transposed = False
        function = LowRank(slot, left, right, product.scale, dtype, transposed, self.kept, product.num_experts or 1)
        if product.magnitude is not None:
            if product.magnitude.numel != (function.columns if transposed else slot.shape[0]):
                raise self._misfit(
                    f"the lora_magnitude_vector of {product.module}", f"norms of {slot.shape}", product.magnitude.shape
                )
            norms = Computed("norms", dtype, (function.columns,), (), function=Norms(function))
            magnitude = reshape(product.magnitude, (product.magnitude.numel,))
            function = replace(function, magnitude=magnitude, norms=norms if transposed else None)
        _compute(owner, function)
        if product.bias is not None:
            biased = self.result.owner(product.bias_name)
            slot = _values(biased)
            if slot.shape != product.bias.shape or slot.dtype not in NUMBERS:
                raise self._misfit(f"the lora_B.bias of {product.module}", slot.shape, product.bias.shape)
            _compute(biased, Sum((slot, product.bias), dtype, (1.0, product.scale)))

    def _is_transposed(self, product: Product, shape: Shape) -> bool:
        """Tell whether a weight lies as (in, out): by its shape, or by others' if it is square."""
        shape = shape[-2:] if product.num_experts else shape
        found = _lies(product, shape)
        if found is not None:
            return found
        if self.fan_in_fan_out is not None:
            return self.fan_in_fan_out
        every = [
            (one.module.rpartition(".")[2], lies)
            for one in self.adapter.products
            if not one.is_embedding
            and (one.num_experts is None) == (product.num_experts is None)
            and (lies := _lies(one, self.result.owner(one.name).shape[-len(shape) :])) is not None
        ]
        alike = {lies for name, lies in every if name == product.module.rpartition(".")[2]}
        if len(alike) == 1:
            return alike.pop()
        if product.num_experts or {lies for _, lies in every} - {self.adapter.fan_in_fan_out}:
            raise UnsupportedError(
                f"{product.name} is square, and may lie as (out, in) or as (in, out)",
                path=self.adapter.checkpoint.source,
                expected="other weights of the adapter that fit its fan_in_fan_out",
                advice="give --fan-in-fan-out (as GPT-2's Conv1D) or --no-fan-in-fan-out",
            )
        return self.adapter.fan_in_fan_out


def _lies(product: Product, shape: Shape) -> bool | None:
    """Tell whether a weight can only lie as (in, out), or only as (out, in); None if it may be either."""
    straight = (product.b.shape[0], *product.a.shape[1:])
    if len(straight) != 2 or straight != straight[::-1]:
        return shape != straight and shape == straight[::-1]
    return None


def _values(one: Parameter) -> Slot:
    slot = one.master or one.weight
    if slot is None:
        raise LayoutError(f"{one.name} has no values", expected="a weight or a master")
    return slot


def _compute(one: Parameter, function: Function) -> None:
    for key in {WEIGHT, MASTER} & one.slots.keys():
        own = one.slots[key]
        one.slots[key] = Computed(key, own.dtype, own.shape, (), function=function)
