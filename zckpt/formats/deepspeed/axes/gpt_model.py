"""Megatron-DeepSpeed's GPT models, by their names, shapes and the program's arguments in a checkpoint. Pure.

    0    a function                           input_layernorm, post_attention_layernorm   every rank has the whole
    1    [tied_modules.embed.]word_embeddings self_attention.query_key_value              rows over ranks
    2    a function, until July 2023          self_attention.dense, mlp.dense_4h_to_h     columns over ranks
    ...  blocks                               mlp.dense_h_to_4h                           rows; with a gate, each half
    then a function where layer 2 is one      word_embeddings, lm_head, output_layer      rows over ranks
    N    the final norm                       everything else                             every rank has the whole
    N+1  lm_head, or the tied embedding; where training is in 16 bits, a function

`universal_checkpoint_info`, which says how slices make up parameters, came in October 2023, and says of a training
without slices only what its vocabulary is. What it does not say of these names is known: whether there is a gate,
shapes tell (`dense_h_to_4h` has twice the rows that `dense_4h_to_h` has columns). Not so the order of queries, keys
and values: by heads or by groups of heads, or, from December 2024 on, all queries of a rank, then its keys, then its
values. That version is known by an argument that came with it; without arguments it is not known.

Source: GPTModelPipe, ParallelAttention, UniversalCheckpointInfo of microsoft/Megatron-DeepSpeed, 2022 to 2025 (#265,
#287, #291, #441); GPTModelPipe of bigscience-workshop/Megatron-DeepSpeed, 2023 (BLOOM).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from zckpt.errors import UnsupportedError
from zckpt.formats.deepspeed.axes.tp_rules import ARGUMENTS, INFO_KEY, REPLICATED_KEY, VOCABULARY_KEYS, Info, Rules
from zckpt.formats.torch_files.tensors import arguments_of
from zckpt.state import Parameter, Shape, list_of, size_of
from zckpt.torchfile import node_of, plain

JOINED = "ds_sequence_parallel_fpdt"
"""The argument that came with queries, keys and values of a rank end to end (#441)."""

_BLOCK = r"(\d+|language_model\.encoder\.layers\.\d+)\."
_EMBED = r"(\d+|tied_modules\.embed|language_model\.embedding)\."
_UP, _DOWN = "mlp.dense_h_to_4h.weight", "mlp.dense_4h_to_h.weight"
_ATTENTION = rf"{_BLOCK}self_attention\.query_key_value\.(weight|bias)$"
_GATED = rf"{_BLOCK}mlp\.dense_h_to_4h\.(weight|bias)$"
_VOCABULARY = (rf"{_EMBED}word_embeddings\.weight$", r"(\d+\.lm_head|language_model\.output_layer)\.weight$")
_BY_ROWS = rf"{_BLOCK}self_attention\.(query|key_value)\.(weight|bias)$"
_BY_COLUMNS = (rf"{_BLOCK}self_attention\.dense\.weight$", rf"{_BLOCK}mlp\.dense_4h_to_h\.weight$")
_WHOLE = (
    rf"{_BLOCK}(input|post_attention)_layernorm\.(weight|bias)$",
    rf"{_BLOCK}self_attention\.dense\.bias$",
    rf"{_BLOCK}mlp\.dense_4h_to_h\.bias$",
    r"(\d+|language_model\.encoder\.final_layernorm)\.(weight|bias)$",
    rf"{_EMBED}(position|tokentype)_embeddings\.weight$",
    rf"{_EMBED}word_embeddings\.norm\.(weight|bias)$",
)
_HEADS = re.compile(rf"{_BLOCK}self_attention\.(query_key_value|query)\.weight$")
_WIDE = re.compile(rf"{_BLOCK}mlp\.dense_h_to_4h\.weight$")

SHARED = "word_embeddings.weight"
"""What of a tied embedding all its stages train (`tied_weight_attr`); nothing uses the rest of its later uses."""


def is_gpt(names: Iterable[str]) -> bool:
    """Tell whether parameters have the names of these models."""
    every = list(names)
    return any(map(_HEADS.match, every)) and any(map(_WIDE.match, every))


def arguments_in(content: Mapping[str, object]) -> Mapping[object, object] | None:
    """Return the program's arguments in a model file; None where it has none, or another program's."""
    found = arguments_of(content.get(ARGUMENTS))
    return found if "num_attention_heads" in found and "hidden_size" in found else None


def known_rules(
    content: Mapping[str, object], shapes: Mapping[str, Shape], path: str, *, sliced: bool = False
) -> Info | None:
    """Return the rules for slices, completed by what is known of these models; as they are for other models.

    `content`: what a model file holds, or what is kept of it: `universal_checkpoint_info` and the arguments; `shapes`:
    of the parameters on one tensor-parallel rank of each stage; `sliced`: whether there are several of these. Raises
    UnsupportedError: there are slices, and how queries, keys and values lie in them is not known.
    """
    arguments, said = arguments_in(content), plain(node_of(content.get(INFO_KEY)))
    info: Info | None = said if isinstance(said, dict) else None
    if not is_gpt(shapes) or (arguments is None and info is None):
        return info
    free = _without_rule(info, shapes, path)
    every = (*_WHOLE, *_BY_COLUMNS, *_VOCABULARY, _ATTENTION, _GATED, _BY_ROWS)
    if info is None and not all(any(re.match(one, name) for one in every) for name in free):
        return None
    if sliced:
        check_degree(content, info, shapes, 1, path)
    if arguments is None:
        return info
    found: dict[str, object] = dict(info or {})
    if info is None:
        rows = arguments.get("padded_vocab_size")
        found = {"universal_checkpoint_version": 0.2, "parameter_with_2_sub_params_cat_dim_0": []}
        found |= {key: rows for key in ("original_vocab_size", "padded_vocab_size") if type(rows) is int}
    ratios = {  # of the rows that a block's first layer has and the second's columns: twice as many with a gate
        shape[0] / down[1]
        for name, shape in shapes.items()
        if name.endswith(_UP) and len(shape) == 2
        and len(down := shapes.get(name.removesuffix(_UP) + _DOWN, ())) == 2 and down[1]
    }  # fmt: skip
    halves = [_GATED] if ratios == {2.0} else []
    joined = []
    if JOINED in arguments and not _shares_keys(arguments):
        joined = [{"patterns": [_ATTENTION], "shape": (3,), "partition_dim": 0}]
    for key, patterns in (
        (REPLICATED_KEY, _WHOLE),
        ("parameter_with_row_parallelism_patterns", _BY_COLUMNS),
        ("parameter_with_2_sub_params_cat_dim_0", halves),
        (VOCABULARY_KEYS[0], _VOCABULARY),
    ):
        more = [one for one in patterns if any(re.match(one, name) for name in free)]
        found[key] = [*list_of(found.get(key)), *more]
    if joined and any(re.match(_ATTENTION, name) for name in free):
        found["parameter_with_sub_params"] = [*list_of(found.get("parameter_with_sub_params")), *joined]
    return found


def _shares_keys(arguments: Mapping[object, object]) -> bool:
    """Tell whether a rank has queries, keys and values end to end, cut in three although several heads share a key."""
    heads = arguments.get("num_attention_heads")
    return JOINED in arguments and arguments.get("num_key_value_heads", heads) not in (None, heads)


def _without_rule(info: Info | None, names: Iterable[str], path: str) -> list[str]:
    """Return the names that no rule for slices is about."""
    said = Rules(info or {}, path)
    return [name for name in names if said.matching(name) is None]


def unknown_order(content: Mapping[str, object], info: Info | None, names: Iterable[str], path: str) -> str | None:
    """Return the first queries, keys and values in one of which nothing says where each begins; None if there is none.

    Parameters are those of `check_degree`.
    """
    every, arguments = list(names), arguments_in(content)
    if not is_gpt(every) or (arguments is not None and not _shares_keys(arguments)):
        return None
    return next((name for name in _without_rule(info, every, path) if re.match(_ATTENTION, name)), None)


def check_degree(
    content: Mapping[str, object], info: Info | None, names: Iterable[str], degree: int, path: str
) -> None:
    """Raise where attention cannot be cut for a number of tensor-parallel ranks, or how is not known.

    `content`: of a model file; `info`: the rules that are cut by. Raises UnsupportedError: it is not known, or a head
    would be on two ranks.
    """
    every, known = list(names), arguments_in(content)
    first = unknown_order(content, info, every, path)
    if first is not None:
        raise UnsupportedError(
            f"the order of queries, keys and values in the slices of {first} is unknown",
            expected=f"the program's arguments, `{ARGUMENTS}`, in the model file",
            advice="give --tp-rules FILE: parameter_with_sub_params, if each rank has them end to end",
        )
    if known is None or _shares_keys(known) or not is_gpt(every):
        return
    for key in ("num_attention_heads", "num_key_value_heads"):
        heads = known.get(key)
        if type(heads) is int and heads % degree:
            raise UnsupportedError(
                f"attention heads would be split between two of {degree} tensor-parallel ranks",
                path=path, expected=f"a number that divides {key}", found=heads,
            )  # fmt: skip


def padded_rows(
    content: Mapping[str, object],
    info: Info | None,
    degree: int,
    parameters: Mapping[str, Parameter],
) -> int | None:
    """Return how many rows a vocabulary has at a number of tensor-parallel ranks, as the program or files say.

    Where the rules do not know how many rows are padding, and none is taken off, at least as many as there are. None:
    it is not known.

    `parameters`: of another format, which keeps no padding: the rows are those that were, if they divide.
    """
    arguments, known = arguments_in(content) or {}, info or {}
    size, multiple = known.get("original_vocab_size"), size_of(arguments, "make_vocab_size_divisible_by")
    if type(size) is int and multiple is not None:
        return -(-size // (multiple * degree)) * multiple * degree
    rows, rules = known.get("padded_vocab_size"), Rules.of_vocabulary(known, "")
    present = [p.shape[0] for name, p in parameters.items() if p.shape and rules.is_vocabulary(name)]
    return rows if type(rows) is int and not rows % degree and present and rows >= max(present) else None
