"""Meta's files as a Checkpoint: slices are spans of the whole tensors, copies are held against the first.

In which dimension Llama's tensors are cut is told by the name, and proved by the shapes:

dimension 0   wq, wk, wv, w1, w3, output      ColumnParallelLinear: each rank has some of the outputs
dimension 1   wo, w2                          RowParallelLinear: each rank has some of the inputs
either        tok_embeddings                  1 in Llama 1 and 2 (ParallelEmbedding), 0 in Llama 3
not at all    ...norm, rope.freqs             every rank has the whole

Source: github.com/meta-llama/llama and llama3, `model.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from zckpt.errors import LayoutError, ShardError, UnsupportedError, about
from zckpt.evidence import is_trainable
from zckpt.formats.torch_files.tensors import as_mapping, by_name, carried, describe, slot_of
from zckpt.state import WEIGHT, Checkpoint, Duplicate, Shape, Topology, size_of
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

Sizes = Mapping[str, int | None]

DIM, QUERIES, KEYS, WORDS, HIDDEN = "dim", "queries", "keys", "words", "hidden"
"""Sizes of the model: of the hidden state; of all heads' queries, and keys or values; of the vocabulary; inside."""

LAYERS = {
    "wq": (QUERIES, DIM), "wk": (KEYS, DIM), "wv": (KEYS, DIM), "wo": (DIM, QUERIES),
    "w1": (HIDDEN, DIM), "w3": (HIDDEN, DIM), "w2": (DIM, HIDDEN),
    "output": (WORDS, DIM), "tok_embeddings": (WORDS, DIM),
}  # fmt: skip
"""The shape of each weight."""

CUTS = {"wo": (1,), "w2": (1,), "tok_embeddings": (0, 1)}
"""In which dimension it may be cut, if not in the first."""


def read(directory: Path, files: Mapping[int, Path]) -> Checkpoint:
    """Read the structure of a model.

    `files`: by rank. Raises ShardError: a rank's file is missing; SourceError: files are damaged, contradict each
    other, or hold what no rule is known for.
    """
    for rank in range(max(files)):
        if rank not in files:
            raise ShardError(
                "a file of the model is missing",
                path=directory,
                expected=f"consolidated.{rank:02d}.pth",
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
    first, *rest = ({name: (one.shape, one.dtype) for name, one in content.items() if isinstance(one, Tensor)}
                    for content in contents)  # fmt: skip
    for file, its in zip(every[1:], rest, strict=True):
        for name in [*first, *its]:
            if first.get(name) != its.get(name):
                raise LayoutError(
                    f"{name} differs from {Path(every[0].path).name}",
                    path=file.path,
                    expected=first.get(name, "nothing"),
                    found=its.get(name, "nothing"),
                )
    output = contents[0].get("output.weight")
    words = output.shape[0] * len(files) if isinstance(output, Tensor) and output.shape else None
    with about(every[0].path):
        _add(checkpoint, every, contents, sizes_of(params or {}, words))
    others = {name: value for name, value in contents[0].items() if not is_tensor(value)}
    checkpoint.metadata |= {name: carried(every[0], value) for name, value in others.items() if name != PARAMS}
    checkpoint.files += [describe(one, "model", mp_rank=rank) for rank, one in enumerate(every)]
    return checkpoint


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


def sizes_of(params: Mapping[str, object], words: int | None) -> Sizes:
    """Return the sizes that the content of `params.json` gives; None: it does not say.

    `words`: the output's, for a vocabulary of -1, which is the tokenizer's.
    """
    dim, heads, words = size_of(params, "dim"), size_of(params, "n_heads"), size_of(params, "vocab_size") or words
    if dim is None or heads is None:
        return {DIM: dim, WORDS: words}
    head = size_of(params, "head_dim") or dim // heads
    return {DIM: dim, QUERIES: heads * head, KEYS: (size_of(params, "n_kv_heads") or heads) * head, WORDS: words}


def cut_dimension(name: str, shape: Shape, ranks: int, sizes: Sizes) -> int | None:
    """Return the dimension in which a tensor is cut; None for a copy, and for the whole in the only file.

    `shape`: of each rank's slice. Raises UnsupportedError: no rule is known for the name; LayoutError: the shape is not
    that of a slice.
    """
    steps = name.split(".")
    kind = steps[-2] if len(steps) > 1 and steps[-1] in ("weight", "bias") else ""
    layer = LAYERS.get(kind) if steps[-1] == "weight" and len(shape) == 2 else None
    is_whole = name.endswith("rope.freqs") or (kind.endswith("norm") and len(shape) == 1)
    # In the only file, what is not a layer's may be of another part of the model, with sizes of its own.
    if is_whole or (ranks == 1 and (layer is None or steps[0] != "layers")):
        return None
    if layer is None:
        raise UnsupportedError(
            f"there is no known rule for cutting {name}, and there are {ranks} files",
            expected="tensors of Llama 1, 2 or 3",
            found=f"shape {shape}",
        )
    whole, cuts = [sizes.get(size) for size in layer], CUTS.get(kind, (0,))
    found = {cut: [n * ranks if at == cut else n for at, n in enumerate(shape)] for cut in cuts}
    fitting = [cut for cut, its in found.items() if all(n in (None, its[at]) for at, n in enumerate(whole))]
    if len(fitting) != 1:
        along = f" along dimension {cuts[0]}" if len(cuts) == 1 else ""
        is_not = f"does not match {(f'1/{ranks} of ' if ranks > 1 else '')}params.json"
        raise LayoutError(
            f"{name} {('could be cut either way' if fitting else is_not)}",
            expected=f"{ranks} slices{along} of ({', '.join(str(size or '?') for size in whole)})",
            found=f"slices of {shape}",
            advice="give these files' params.json" + (", or the files of the other ranks" if ranks == 1 else ""),
        )
    return fitting[0] if ranks > 1 else None
