"""Turn a sharded checkpoint into one model, and its optimizer into one file next to it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from zckpt.engine import DEFAULT_MEMORY_NBYTES, Reporter
from zckpt.engine.targets import TargetFile
from zckpt.errors import UsageError
from zckpt.formats.assets import ADAPTER_CONFIG, copies_of, find_assets
from zckpt.formats.consolidated.model import (
    DEFAULT_MAX_SHARD_NBYTES,
    Tensors,
    model_tensors,
    model_tree,
    optimizer_slots,
)
from zckpt.formats.format import TargetFiles
from zckpt.formats.options import DTYPES
from zckpt.formats.safetensors import file as safetensors_file
from zckpt.formats.suffixes import DIRECTORY, SAFETENSORS, TORCH, kind_of_model
from zckpt.operations.open import Source, opened
from zckpt.operations.proof import check_companions, check_sources
from zckpt.operations.target import How, Written, check_nothing_lost, write_from
from zckpt.state import WEIGHT, Checkpoint
from zckpt.state.names import PEFT
from zckpt.storage.ownership import Owned, check_replaceable

ADAPTER_NAME = "adapter_model.safetensors"

TIED = ("duplicate", "drop")
OWNED = Owned(lambda name: safetensors_file.OWN_NAMES.fullmatch(name) is not None)
"""The directories of models that are replaced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Consolidated(Written):
    """What `consolidate` wrote.

    Parameters
    ----------
    num_tensors : int
        Of the model.
    """

    num_tensors: int

    def as_dict(self) -> dict[str, object]:
        """Return the result as JSON-able data, the document of `--json`."""
        return {**Written.as_dict(self), "num_tensors": self.num_tensors}


def consolidate(
    source: Source,
    target: str | os.PathLike[str],
    *,
    dtype: str | None = None,
    slots: str | Sequence[str] = (),
    tied: str = "duplicate",
    exclude_frozen: bool = False,
    max_shard_size: int = DEFAULT_MAX_SHARD_NBYTES,
    config: str | os.PathLike[str] | None = None,
    weight_check: bool = True,
    checksums: bool = True,
    overwrite: bool = False,
    dry_run: bool = False,
    memory: int = DEFAULT_MEMORY_NBYTES,
    reporter: Reporter | None = None,
    drop: Sequence[str] = (),
    roots: Sequence[str | os.PathLike[str]] = (),
    tag: str | None = None,
    names: Sequence[str] | None = None,
    tp_rules: str | os.PathLike[str] | None = None,
) -> Consolidated:
    """Write the model of a checkpoint, whole, under the parameters' own names.

    Parameters
    ----------
    source : path-like or Checkpoint
    target : path-like
        `x.safetensors`: one file; `x.pt`, `x.pth` or `x.bin`: a torch state dict; any other name, but for those that
        end as other programs' files do: a directory in Hugging Face's layout, `model.safetensors` or shards with an
        index, and next to them the configuration and tokenizer that the source has. Of an adapter of PEFT, with its
        `adapter_config.json`, a directory that PEFT loads.
    dtype : {"float32", "bfloat16", "float16", "keep"}, optional
        Element type of trained parameters; frozen parameters and buffers keep theirs. By default masters are
        written as float32 and parameters without a master in their own type. "keep": the model's own type.
    slots : "all" or sequence of str
        Optimizer slots to write to a second file, `x.optimizer.safetensors` or `x.optimizer.pt` next to the target
        (for a directory, `optimizer.safetensors` in it). The masters are among "all" where the model's file does not
        hold them exactly.
    tied : {"duplicate", "drop"}
        Whether a tied parameter is written under all its names or its owner's only.
    exclude_frozen : bool
    max_shard_size : int, bytes
        Of each file of a directory.
    config : path-like, optional
        The directory whose `config.json`, tokenizer and so on go into a directory; by default the source's, or
        `huggingface/` in it.
    weight_check : bool
        Hold a sample of every master against its weight before anything is written.
    checksums : bool
        Hold what is copied against the checksums of the source's files; what is damaged is not written.
    overwrite : bool
        Replace the target: a file and the optimizer's next to it, or a directory that `consolidate` wrote.
    dry_run : bool
        Plan everything, write nothing.
    memory : int, bytes
        Upper bound of what copy buffers take together.
    reporter : Reporter, optional
    drop : sequence of str
        What the source holds, nothing reads, and may be lost: `FILE`, `FILE:PLACE` or `PLACE` as the inventory has it,
        with shell wildcards. Without, such a source is refused.
    roots, tag, names, tp_rules
        As for `open`; of a path only.

    Returns
    -------
    Consolidated

    Raises
    ------
    UsageError
        An option that cannot be used.
    SourceError
        The source cannot be read or contradicts itself (`WeightMismatchError`, `LayoutError`, ...).
    TargetError
        The target exists or cannot be written.
    """
    _check_choice("dtype", dtype, (None, *DTYPES))
    _check_choice("tied", tied, TIED)
    if max_shard_size < 1:
        raise UsageError("sizes must be positive", found=max_shard_size)
    how = How(
        weight_check=weight_check, checksums=checksums, overwrite=overwrite, dry_run=dry_run, memory=memory,
        reporter=reporter,
    )  # fmt: skip
    checkpoint = opened(source, roots=roots, tag=tag, names=names, tp_rules=tp_rules)
    dropped = check_nothing_lost(checkpoint, drop)
    path = Path(target)
    kind_of_model(path)
    tensors = _model(checkpoint, dtype, tied=tied, exclude_frozen=exclude_frozen)
    assets = _assets(checkpoint, path, config)
    files = _model_files(path, tensors, max_shard_size, is_adapter=ADAPTER_CONFIG in assets and _is_adapter(tensors))
    optimizer = _optimizer_file(checkpoint, path, slots, dtype)
    files += [*([optimizer] if optimizer else []), *copies_of(assets)]
    laid = TargetFiles(files, is_file=kind_of_model(path) != DIRECTORY, copied=frozenset(assets))
    owned = None if laid.is_file else Owned(lambda name: OWNED.is_own(name) or name in assets)
    _check_apart(checkpoint, path, laid, owned, overwrite=overwrite)
    done = write_from(checkpoint, laid, path, how, owned=owned, dropped=dropped)
    return Consolidated(**done.fields(), num_tensors=len(tensors))


def _check_choice(option: str, value: str | None, choices: Sequence[str | None]) -> None:
    if value not in choices:
        raise UsageError(f"unusable {option}", expected=" or ".join(str(c) for c in choices if c), found=repr(value))


def _model(checkpoint: Checkpoint, dtype: str | None, *, tied: str, exclude_frozen: bool) -> Tensors:
    tensors = model_tensors(checkpoint, dtype, tied=tied, exclude_frozen=exclude_frozen)
    if not tensors:
        raise UsageError("holds no model, only optimizer state", path=checkpoint.source)
    return tensors


def _assets(checkpoint: Checkpoint, path: Path, config: str | os.PathLike[str] | None) -> dict[str, Path]:
    """Return the files that go into a directory with the model."""
    if kind_of_model(path) == DIRECTORY:
        return find_assets(checkpoint, None if config is None else Path(config))
    if config is not None:
        raise UsageError("a configuration goes into a directory", path=path, expected="the name of a directory")
    return {}


def _is_adapter(tensors: Tensors) -> bool:
    """Tell whether a model is all of what PEFT has added to one."""
    return all(name.startswith(PEFT) for name in tensors)


def _model_files(path: Path, tensors: Tensors, max_shard_size: int, *, is_adapter: bool) -> list[TargetFile]:
    kind = kind_of_model(path)
    if kind == TORCH:
        from zckpt.formats.torch_files import writer as torch_writer

        return [torch_writer.lay_out(path.name, model_tree(tensors))]
    entries = [safetensors_file.Entry(name, slot, dtype, name) for name, (slot, dtype) in tensors.items()]
    if kind == SAFETENSORS:
        return [safetensors_file.lay_out(path.name, entries)]
    if is_adapter:
        return [safetensors_file.lay_out(ADAPTER_NAME, entries, safetensors_file.FOR_TORCH)]
    return safetensors_file.lay_out_directory(entries, max_shard_size, metadata=safetensors_file.FOR_TORCH)


def _optimizer_file(
    checkpoint: Checkpoint, path: Path, slots: str | Sequence[str], dtype: str | None
) -> TargetFile | None:
    chosen = [slots] if isinstance(slots, str) else list(slots)
    if not chosen:
        return None
    from zckpt.formats.consolidated.optimizer import (
        IN_DIRECTORY,
        optimizer_path,
        optimizer_safetensors,
        optimizer_torch,
    )

    available = [name for name in checkpoint.slot_names() if name != WEIGHT]
    if chosen == ["all"]:
        chosen = optimizer_slots(checkpoint, dtype)
    unknown = [name for name in chosen if name not in available]
    if unknown or not available:
        raise UsageError(
            f"no slot {', '.join(unknown) or 'of an optimizer'}",
            path=checkpoint.source,
            expected=", ".join(available) or "a checkpoint that has an optimizer",
        )
    kind = kind_of_model(path)
    name = IN_DIRECTORY if kind == DIRECTORY else optimizer_path(path).name
    lay_out = optimizer_torch if kind == TORCH else optimizer_safetensors
    return lay_out(checkpoint, name, chosen)


def _check_apart(
    checkpoint: Checkpoint, path: Path, laid: TargetFiles, owned: Owned | None, *, overwrite: bool
) -> None:
    """Raise unless the target can be replaced without losing a source file or anything that is no model of ours."""
    if owned is None:
        paths = [path.parent / one.name for one in laid.files]
        check_sources(checkpoint, paths)
        if overwrite:
            check_companions(path, paths)
    else:
        check_sources(checkpoint, [path])
        if overwrite:
            check_replaceable(path, owned)
