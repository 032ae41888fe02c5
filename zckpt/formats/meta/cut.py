"""How Meta cuts Llama's tensors for N ranks: which dimension, told by the name, and proved by the shapes. Pure.

dimension 0   wq, wk, wv, w1, w3, output      ColumnParallelLinear: each rank has some of the outputs
dimension 1   wo, w2                          RowParallelLinear: each rank has some of the inputs
either        tok_embeddings                  1 in Llama 1 and 2 (ParallelEmbedding), 0 in Llama 3
not at all    ...norm, rope.freqs             every rank has the whole

Source: github.com/meta-llama/llama and llama3, `model.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from zckpt.errors import LayoutError, UnsupportedError

COLUMNS = frozenset({"wq", "wk", "wv", "w1", "w3", "output"})
ROWS = frozenset({"wo", "w2"})
EMBEDDING = "tok_embeddings"

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Sizes:
    """The model's, of `params.json`; None: it does not say.

    Parameters
    ----------
    dim, queries, keys : int or None, elements
        Of the hidden state, and of all heads' queries, and keys or values.
    vocabulary : int or None
    """

    dim: int | None = None
    queries: int | None = None
    keys: int | None = None
    vocabulary: int | None = None

    @classmethod
    def of(cls, params: Mapping[str, object]) -> Sizes:
        """Return the sizes that the content of `params.json` gives; a vocabulary of -1 is the tokenizer's."""
        dim, heads = _positive(params, "dim"), _positive(params, "n_heads")
        if dim is None or heads is None:
            return cls(dim, vocabulary=_positive(params, "vocab_size"))
        head = _positive(params, "head_dim") or dim // heads
        keys = _positive(params, "n_kv_heads") or heads
        return cls(dim, heads * head, keys * head, _positive(params, "vocab_size"))

    def whole(self, kind: str, dimension: int) -> int | None:
        """Return the size of a dimension of the whole tensor, as far as it is known."""
        outputs = {"wq": self.queries, "wk": self.keys, "wv": self.keys, "wo": self.dim, "w2": self.dim}
        inputs = {"wo": self.queries, "w2": None}
        if kind in ("output", EMBEDDING):
            return self.vocabulary if dimension == 0 else self.dim
        return outputs.get(kind) if dimension == 0 else inputs.get(kind, self.dim)


def _positive(params: Mapping[str, object], key: str) -> int | None:
    value = params.get(key)
    return value if type(value) is int and value > 0 else None


def cut_dimension(name: str, shape: Shape, ranks: int, sizes: Sizes, vocabulary: int | None, path: str) -> int | None:
    """Return the dimension in which a tensor is cut; None for a copy, and for the whole in the only file.

    Parameters
    ----------
    name : str
    shape : tuple of int
        Of each rank's slice.
    ranks : int
    sizes : Sizes
    vocabulary : int or None
        That of the output, for an embedding where `params.json` does not say.
    path : str
        For messages.

    Raises
    ------
    UnsupportedError
        No rule is known for the name.
    LayoutError
        The shape is not that of a slice.
    """
    steps = name.split(".")
    kind = steps[-2] if len(steps) > 1 and steps[-1] in ("weight", "bias") else ""
    if name.endswith("rope.freqs") or (kind.endswith("norm") and len(shape) == 1):
        return None
    if ranks == 1:  # what is not a layer's may be of another part of the model, with sizes of its own
        if steps[0] == "layers" and steps[-1] == "weight" and len(shape) == 2 and kind in COLUMNS | ROWS:
            _checked(name, shape, ranks, sizes, 0 if kind in COLUMNS else 1, kind, path)
        return None
    if steps[-1] == "weight" and len(shape) == 2:
        if kind == EMBEDDING:
            return _of_embedding(name, shape, ranks, sizes, vocabulary, path)
        if kind in COLUMNS | ROWS:
            return _checked(name, shape, ranks, sizes, 0 if kind in COLUMNS else 1, kind, path)
    raise UnsupportedError(
        f"{name} is cut by no rule that is known, and there are {ranks} files",
        path=path,
        expected="tensors of Llama 1, 2 or 3",
        found=f"shape {shape}",
    )


def _checked(name: str, shape: Shape, ranks: int, sizes: Sizes, cut: int, kind: str, path: str) -> int:
    whole = tuple(n * ranks if at == cut else n for at, n in enumerate(shape))
    expected = tuple(sizes.whole(kind, at) for at in range(2))
    if any(size not in (None, n) for size, n in zip(expected, whole, strict=True)):
        raise LayoutError(
            f"{name} is not {f'1/{ranks} of ' if ranks > 1 else ''}what params.json says",
            path=path,
            expected=f"{ranks} slices along dimension {cut} of {tuple(n or '?' for n in expected)}",
            found=f"slices of {shape}",
            advice="give the params.json of these files" + (", or the files of the other ranks" if ranks == 1 else ""),
        )
    return cut


def _of_embedding(name: str, shape: Shape, ranks: int, sizes: Sizes, vocabulary: int | None, path: str) -> int:
    """Return which dimension of an embedding is cut: that of which the ranks' sizes add up, if it is the only one."""
    words = sizes.vocabulary or vocabulary
    known = {0: words, 1: sizes.dim}
    fitting = [
        cut
        for cut in (0, 1)
        if (known[cut] is None or known[cut] == shape[cut] * ranks) and known[1 - cut] in (None, shape[1 - cut])
    ]
    if len(fitting) != 1:
        raise LayoutError(
            f"{name} is not 1/{ranks} of what params.json says" if not fitting else f"{name} may be cut either way",
            path=path,
            expected=f"{ranks} slices of ({words or '?'}, {sizes.dim or '?'})",
            found=f"slices of {shape}",
            advice="give the params.json of these files",
        )
    return fitting[0]
