"""Meta's files of Llama: slices of any number of ranks are the whole model, and what fits no rule is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import zckpt
from tests.damage import edit
from tests.formats.holding import converted
from tests.interop.test_fsdp_rank_files import assert_is
from tests.pairwise import each
from tests.refusals import refusing
from zckpt.errors import LayoutError, ShardError, UnsupportedError
from zckpt.formats.account import take_inventory

DIM, HEADS, KEYS, WORDS, HIDDEN = 32, 16, 8, 48, 40
PARAMS = {"dim": DIM, "n_layers": 2, "n_heads": HEADS, "n_kv_heads": KEYS, "vocab_size": WORDS, "norm_eps": 1e-5}
CUT = {"wq": 0, "wk": 0, "wv": 0, "w1": 0, "w3": 0, "output": 0, "wo": 1, "w2": 1}

Tensors = dict[str, torch.Tensor]


def llama() -> Tensors:
    """Return a model as one rank of `llama/model.py` has it."""
    torch.manual_seed(0)
    head = DIM // HEADS
    shapes = {"tok_embeddings": (WORDS, DIM), "norm": (DIM,), "output": (WORDS, DIM)}
    for layer in range(2):
        at = f"layers.{layer}"
        shapes |= {f"{at}.attention.{one}": (n * head, DIM) for one, n in (("wq", HEADS), ("wk", KEYS), ("wv", KEYS))}
        shapes |= {f"{at}.attention.wo": (DIM, HEADS * head), f"{at}.feed_forward.w2": (DIM, HIDDEN)}
        shapes |= {f"{at}.feed_forward.{one}": (HIDDEN, DIM) for one in ("w1", "w3")}
        shapes |= {f"{at}.attention_norm": (DIM,), f"{at}.ffn_norm": (DIM,)}
    found = {f"{name}.weight": torch.randn(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    return {**found, "rope.freqs": torch.rand(head // 2)}


def write(folder, whole: Tensors, ranks, *, embedding, params: dict[str, object] | None = None) -> Path:
    folder.mkdir()
    for rank in range(ranks):
        mine = {}
        for name, tensor in whole.items():
            kind = name.split(".")[-2]
            cut = embedding if kind == "tok_embeddings" else CUT.get(kind)
            mine[name] = tensor.clone() if cut is None else tensor.chunk(ranks, cut)[rank].clone()
        torch.save(mine, folder / f"consolidated.{rank:02d}.pth")
    (folder / "params.json").write_text(json.dumps(PARAMS | (params or {})))
    return folder


@pytest.mark.parametrize(("embedding", "ranks"), each([0, 1], [1, 2, 4, 8]))  # 0 is Llama 3, 1 is Llama 2
def test_slices_are_the_whole_model(ranks, embedding):
    whole = llama()
    unsaid = {"vocab_size": -1} if embedding else {}  # the tokenizer's, in Llama 1 and 2
    source = write(Path("m"), whole, ranks, embedding=embedding, params=unsaid)
    opened, truth = zckpt.open(source), {f"weight/{name}": one for name, one in whole.items()}
    assert_is(opened, truth)
    assert list(opened.buffers) == ["rope.freqs"]
    assert not take_inventory(opened).left_out
    there = zckpt.open(converted(source, "z", "zckpt"))
    assert_is(there, truth)
    assert there.metadata["params"]["n_kv_heads"] == KEYS


def changed(folder, rank, name, tensor: torch.Tensor | None):
    def change(content):
        del content[name]
        content.update({} if tensor is None else {name: tensor})

    edit(folder / f"consolidated.{rank:02d}.pth", change)


def test_copies_are_compared():
    source = write(Path("m"), llama(), 2, embedding=0)
    assert zckpt.verify(source, deep=True).findings == []
    changed(source, 1, "norm.weight", torch.ones(DIM, dtype=torch.bfloat16))
    [finding] = zckpt.verify(source, deep=True).findings
    assert "norm.weight" in finding.title + str(finding.as_dict())


def test_one_of_several_files_is_not_the_model(tmp_path):
    source = write(tmp_path / "m", llama(), 2, embedding=0)
    with refusing(ShardError, "is one of 2 files of a tensor-parallel model") as raised:
        zckpt.open(source / "consolidated.00.pth")
    assert str(source) in str(raised.value.advice)
    alone = write(tmp_path / "one", llama(), 1, embedding=0)
    assert zckpt.open(alone / "consolidated.00.pth").format == "torch"


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("layers.0.attention.wk.weight", (KEYS * DIM // HEADS, DIM)),
        ("layers.1.feed_forward.w2.weight", (DIM + 1, HIDDEN // 2)),
        ("tok_embeddings.weight", (WORDS // 2, DIM // 2)),
    ],
)
def test_a_shape_that_fits_no_cut_is_refused(name, shape):
    source = write(Path("m"), llama(), 2, embedding=0)
    for rank in range(2):
        changed(source, rank, name, torch.ones(shape))
    with refusing(LayoutError, f"{name} does not match 1/2"):
        zckpt.open(source)


def test_a_rank_of_any_number_costs_nothing():
    source = write(Path("m"), llama(), 1, embedding=0)
    (source / "consolidated.00.pth").rename(source / f"consolidated.{'9' * 18}.pth")
    with refusing(ShardError, "expected consolidated.00.pth"):
        zckpt.open(source)


def test_what_is_missing_or_unknown_is_refused(tmp_path):
    source = write(tmp_path / "m", llama(), 4, embedding=1)

    def refused(kind, words):
        with refusing(kind, words):
            zckpt.open(source)

    (source / "consolidated.02.pth").rename(tmp_path / "2")
    refused(ShardError, r"expected consolidated.02.pth")
    (tmp_path / "2").rename(source / "consolidated.02.pth")
    for rank in (3, 2, 1):
        (source / f"consolidated.{rank:02d}.pth").rename(tmp_path / f"{rank}")
        refused(LayoutError, "does not match")
    for rank in (1, 2, 3):
        (tmp_path / f"{rank}").rename(source / f"consolidated.{rank:02d}.pth")
    changed(source, 3, "norm.weight", None)
    refused(LayoutError, "norm.weight differs from consolidated.00.pth")
    source = write(tmp_path / "u", {**llama(), "vision.patch.weight": torch.ones(4, 4)}, 2, embedding=0)
    refused(UnsupportedError, r"no known rule for cutting vision.patch.weight")
    (source / "params.json").unlink()
    refused(ShardError, r"has no params.json")
