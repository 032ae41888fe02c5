"""Meta's files as a Checkpoint: slices are spans of the whole tensors, copies are held against the first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from zckpt.errors import LayoutError, ShardError, about
from zckpt.evidence import is_trainable
from zckpt.formats.meta.cut import Sizes, cut_dimension, sizes_of
from zckpt.formats.torch_files.tensors import as_mapping, by_name, carried, describe, slot_of
from zckpt.state import WEIGHT, Checkpoint, Duplicate, Topology
from zckpt.state.inventory import Claim
from zckpt.state.views import concat
from zckpt.storage.files import is_file, json_object
from zckpt.torchfile import Tensor, TorchFile, is_tensor, read_torchfile

PARAMS_NAME = "params.json"
PARAMS = "params"
"""Under which the metadata have the content of `params.json`."""

MAXIMUM_NBYTES = 1 << 20
"""Of `params.json`, which has some hundred bytes."""

BUFFER = "rope.freqs"


def read(directory: Path, files: Mapping[int, Path]) -> Checkpoint:
    """Read the structure of a model.

    Parameters
    ----------
    directory : Path
    files : mapping of int to Path
        By rank.

    Raises
    ------
    ShardError
        A rank's file is missing.
    SourceError
        Files are damaged, contradict each other, or hold what no rule is known for.
    """
    missing = next((rank for rank in range(max(files)) if rank not in files), None)
    if missing is not None:
        raise ShardError(
            "a file of the model is missing",
            path=directory,
            expected=f"consolidated.{missing:02d}.pth",
            found=f"{len(files)} files up to {max(files):02d}",
        )
    checkpoint = Checkpoint(str(directory), "meta", topology=Topology(tp=len(files)))
    path = directory / PARAMS_NAME
    params = json_object(path, "sizes of the model", most=MAXIMUM_NBYTES) if is_file(path) else None
    if params is not None:
        checkpoint.metadata[PARAMS] = params
        checkpoint.claims[str(path)] = Claim("carried", f"as {PARAMS} of the metadata")
    elif len(files) > 1:
        raise ShardError(
            "has no params.json, which states how its tensors are cut",
            path=directory,
            advice="put it next to the files",
        )
    every = [read_torchfile(path) for path in files.values()]
    contents = [by_name(as_mapping(one.root, one.path, "a dict of tensors"), one.path) for one in every]
    _check_alike(every, contents)
    output = contents[0].get("output.weight")
    words = output.shape[0] * len(files) if isinstance(output, Tensor) and output.shape else None
    with about(every[0].path):
        _add(checkpoint, every, contents, sizes_of(params or {}, words))
    others = {name: value for name, value in contents[0].items() if not is_tensor(value)}
    checkpoint.metadata |= {name: carried(every[0], value) for name, value in others.items() if name != PARAMS}
    checkpoint.files += [describe(one, "model", mp_rank=rank) for rank, one in enumerate(every)]
    return checkpoint


def _check_alike(files: Sequence[TorchFile], contents: Sequence[Mapping[str, object]]) -> None:
    """Raise LayoutError unless all ranks have the same tensors, of the same shapes and types."""
    first, *rest = ({name: (one.shape, one.dtype) for name, one in content.items() if isinstance(one, Tensor)}
                    for content in contents)  # fmt: skip
    for file, its in zip(files[1:], rest, strict=True):
        name = next((one for one in [*first, *its] if first.get(one) != its.get(one)), None)
        if name is not None:
            raise LayoutError(
                f"{name} differs from {Path(files[0].path).name}",
                path=file.path,
                expected=first.get(name, "nothing"),
                found=its.get(name, "nothing"),
            )


def _add(
    checkpoint: Checkpoint, files: Sequence[TorchFile], contents: Sequence[Mapping[str, object]], sizes: Sizes
) -> None:
    for name, tensor in contents[0].items():
        if not isinstance(tensor, Tensor):
            continue
        cut = cut_dimension(name, tensor.shape, len(files), sizes)
        slots = [slot_of(WEIGHT, one, file.path) for content, file in zip(contents, files, strict=True)
                 if isinstance(one := content[name], Tensor)]  # fmt: skip
        is_buffer = name.endswith(BUFFER) or not is_trainable(tensor.dtype)
        slot = slots[0] if cut is None else concat(slots, cut)
        if cut is None:
            kind = "buffer" if is_buffer else "parameter"
            checkpoint.duplicates += [
                Duplicate(kind, name, name, one, slot, rank) for rank, one in enumerate(slots) if rank and one.numel
            ]
        checkpoint.place(name, slot, trained=not is_buffer)
