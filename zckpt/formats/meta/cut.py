"""How Meta cuts Llama's tensors for N ranks: which dimension, told by the name, and proved by the shapes. Pure.

dimension 0   wq, wk, wv, w1, w3, output      ColumnParallelLinear: each rank has some of the outputs
dimension 1   wo, w2                          RowParallelLinear: each rank has some of the inputs
either        tok_embeddings                  1 in Llama 1 and 2 (ParallelEmbedding), 0 in Llama 3
not at all    ...norm, rope.freqs             every rank has the whole

Source: github.com/meta-llama/llama and llama3, `model.py`.
"""

from __future__ import annotations

from collections.abc import Mapping

from zckpt.errors import LayoutError, UnsupportedError
from zckpt.state import Shape

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


def sizes_of(params: Mapping[str, object], words: int | None) -> Sizes:
    """Return the sizes that the content of `params.json` gives; None: it does not say.

    `words`: the output's, for a vocabulary of -1, which is the tokenizer's.
    """

    def known(key: str) -> int | None:
        value = params.get(key)
        return value if type(value) is int and value > 0 else None

    dim, heads, words = known("dim"), known("n_heads"), known("vocab_size") or words
    if dim is None or heads is None:
        return {DIM: dim, WORDS: words}
    head = known("head_dim") or dim // heads
    return {DIM: dim, QUERIES: heads * head, KEYS: (known("n_kv_heads") or heads) * head, WORDS: words}


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
