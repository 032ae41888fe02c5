"""zckpt's own format loses nothing: fields, slots, groups and trees of any objects come back as they were.

The specification in `docs/formats.md` is proven by a second reader below, written from that page alone.
"""

from __future__ import annotations

import functools
import json
import math
import operator
import os
import shutil
import zlib
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

import zckpt
from tests.damage import flip
from tests.formats.native_files import change_document, exchange_tensors
from tests.formats.some_tensors import as_bytes, random_tensor, stored
from tests.pairwise import each
from tests.plans import read_slot, write_directory
from tests.refusals import refusing
from tests.strategies import shapes, tilings
from tests.torchfile.test_write import CONTENTS, ONLY_IN_ZIP, as_big_endian
from zckpt.engine.plan import plan
from zckpt.errors import DamagedFileError, LayoutError, ShardError, SourceError, UnsupportedError, UsageError
from zckpt.formats import open_checkpoint
from zckpt.formats.native import rank_file as ranks
from zckpt.formats.native import reader
from zckpt.formats.native.document import encode, read_document
from zckpt.formats.native.files import is_native, is_own, rank_name
from zckpt.formats.native.nodes import NodeReader, NodeWriter
from zckpt.formats.native.rank_file import Cut, Layouts, PieceSpans, Table, offsets_in, spans_of, summed
from zckpt.formats.native.reader import Reading, check_digests, headers_shared, read
from zckpt.formats.native.writer import describe, lay_out, lay_out_document, place
from zckpt.formats.remainder import origin
from zckpt.formats.torch_files import writer as torch_writer
from zckpt.operations.target import write_target
from zckpt.state import Checkpoint, Extent, Parameter, ParamGroup, Scalar, Slot
from zckpt.state.boxes import bounds
from zckpt.state.dtypes import DTYPES, itemsize
from zckpt.state.partition import even_extents
from zckpt.torchfile import (
    DefaultMapping,
    Device,
    DType,
    FromFile,
    Global,
    Layout,
    Namespace,
    NumpyScalar,
    Object,
    OrderedMapping,
    Size,
    Tensor,
    dump,
    read_torchfile,
)

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")

FIXTURES = Path(__file__).parents[2] / "fixtures"
WORLD_SIZES = [1, 3, 7]
RUNS = sorted(p.name for p in FIXTURES.iterdir() if (p / "latest").is_file())
OTHERS = [
    *(f"universal/{p.name}" for p in sorted((FIXTURES / "universal").iterdir())),
    *(f"other/{p.parent.name}/{p.name}" for p in sorted((FIXTURES / "other").glob("plain_*/ckpt.pt"))),
    "other/zro_dp2_adamw/ckpt/consolidated.pt",
    "other/litsim_ds2/epoch=0-step=5.ckpt",
    "other/accel_ds2_bf16/state",
]
FEW = ["s2_bf16_dp2_client", "s3_bf16_dp2", "tp2_s1_bf16_dp2", "other/plain_mixed/ckpt.pt"]


Told = tuple[str, tuple[int, ...], bytes]
"""Type, shape and bytes of a tensor."""


def written(checkpoint, directory, world_size=1) -> Path:
    write_directory(plan(lay_out(checkpoint, world_size=world_size)), directory)
    return Path(directory)


def every_slot(checkpoint) -> dict[tuple[str, str], Told]:
    """What every slot holds, by its parameter's name and its own."""
    found = {}
    for parameter in checkpoint.holders():
        for name, slot in parameter.slots.items():
            assert slot.name == name
            found[parameter.name, name] = slot.dtype, slot.shape, read_slot(slot).tobytes()
    return found


def told(tensor) -> Told:
    return str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), as_bytes(tensor)


def as_torch_file(tree, path) -> bytes:
    """The bytes of a torch file: equal only for trees of equal objects, of which the same ones are one and the same."""
    write_target(plan([torch_writer.lay_out("tree.pt", tree)]), path, overwrite=True)
    return path.read_bytes()


def assert_same_parameter(found, expected):
    assert list(found.slots) == list(expected.slots)
    assert dump(found.state, stand_in).data == dump(expected.state, stand_in).data
    for field in fields(Parameter):
        if field.name not in ("slots", "state"):
            assert getattr(found, field.name) == getattr(expected, field.name), field.name


def stand_in(node) -> object:
    """Pickles tell Scalars apart by their bits and types."""
    return Object(Global("zckpt", "Scalar"), (node.value, node.dtype)) if isinstance(node, Scalar) else None


def assert_same_checkpoint(found, expected, directory):
    """Every field: all but those that say what was read, which are the new files'."""
    assert every_slot(found) == every_slot(expected)
    for section in ("parameters", "buffers", "unnamed"):
        mine, its = getattr(found, section), getattr(expected, section)
        assert list(mine) == list(its)
        for name, parameter in its.items():
            assert_same_parameter(mine[name], parameter)
    assert [g.parameters for g in found.param_groups] == [g.parameters for g in expected.param_groups]
    for mine, its in zip(found.param_groups, expected.param_groups, strict=True):
        for values in ("hyperparameters", "state"):
            assert dump(getattr(mine, values), stand_in).data == dump(getattr(its, values), stand_in).data
    for field in ("step", "loss_scale", "zero_stage", "topology", "world_size"):
        assert getattr(found, field) == getattr(expected, field), field
        assert type(getattr(found, field)) is type(getattr(expected, field)), field
    assert found.details == {"origin": origin(expected)}
    for field in ("metadata", "optimizer_metadata"):
        mine, its = getattr(found, field), getattr(expected, field)
        assert {k: type(v) for k, v in mine.items()} == {k: type(v) for k, v in its.items()}
        assert as_torch_file(mine, directory / "mine.pt") == as_torch_file(its, directory / "its.pt")
    compared = {"parameters", "buffers", "unnamed", "param_groups", "step", "loss_scale", "zero_stage", "topology",
                "world_size", "details", "metadata", "optimizer_metadata"}  # fmt: skip
    of_the_files = {
        "source", "format", "format_version", "origin", "padding", "files", "duplicates", "leftovers", "warnings",
        "opened", "claims", "padding_spans", "wrapped", "is_numbered", "per_rank", "roots", "given_names", "lost",
        "places",
    }  # fmt: skip
    assert {field.name for field in fields(Checkpoint)} == compared | of_the_files


# --- round trips ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "world_size"), each([*RUNS, *OTHERS], WORLD_SIZES))
@pytest.mark.every(9, 1)
def test_everything_comes_back(name, world_size, tmp_path):
    expected = open_checkpoint(FIXTURES / name)
    directory = written(expected, tmp_path / str(world_size), world_size)
    assert is_native(directory)
    assert_same_checkpoint(read(directory), expected, tmp_path)
    assert check_digests(directory) == []
    assert all(is_own(path.name) for path in directory.iterdir())


def test_native_of_native_is_the_same_at_any_world_size():
    first = written(open_checkpoint(FIXTURES / "s2_bf16_dp2_client"), "first")
    there = written(read(first), "there", 5)
    back = written(read(there), "back")
    for path in first.iterdir():
        assert path.read_bytes() == (back / path.name).read_bytes()


@pytest.mark.parametrize("content", [*CONTENTS, *ONLY_IN_ZIP], ids=lambda content: content.__name__)
def test_every_kind_of_object_in_metadata(content, torch_file):
    file = read_torchfile(torch_file(content()))
    shared = {"tree": FromFile.of(file, file.root), "again": FromFile.of(file, [file.root])}
    expected = Checkpoint("x", "torch", metadata=shared, optimizer_metadata={"tree": shared["tree"]})
    found = read(written(expected, "native", 2))
    for field in ("metadata", "optimizer_metadata"):
        trees = getattr(found, field), getattr(expected, field)
        assert as_torch_file(trees[0], Path("a.pt")) == as_torch_file(trees[1], Path("b.pt"))


def test_big_endian_storages_become_little_endian(torch_file):
    tensor = torch.arange(6, dtype=torch.int32)
    path = torch_file([tensor, tensor[2:], torch.tensor([1.5, 2], dtype=torch.float64)])
    as_big_endian(path)
    file = read_torchfile(path)
    found = read(written(Checkpoint("x", "torch", metadata={"t": FromFile.of(file, file.root)}), "native"))
    as_torch_file(found.metadata, Path("tree.pt"))
    loaded = torch.load("tree.pt")["t"]
    assert [t.tolist() for t in loaded] == [tensor.tolist(), tensor[2:].tolist(), [1.5, 2]]
    assert loaded[0].data_ptr() + 8 == loaded[1].data_ptr()


# --- values ---------------------------------------------------------------------------------------------------------

texts = st.text(st.characters(codec=None), max_size=6) | st.sampled_from(["$", "\ud800", "\ud83d\ude00", "ref", ""])
hashable = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    texts,
    st.binary(max_size=5).map(list).map(bytes),  # a single byte is one object in all of Python, as what is read
    st.builds(complex, st.floats(), st.floats()),
    st.builds(Global, st.just("m"), texts.filter(str.isidentifier)),
    st.builds(DType, st.sampled_from(["float32", "bfloat16"])),
    st.builds(Layout, st.just("torch.strided")),
    st.builds(Device, st.just("cuda"), st.none() | st.integers(0, 9)),
    st.lists(st.integers(0, 2**62), max_size=3).map(Size),
    st.builds(NumpyScalar, st.just("<f4"), st.binary(min_size=4, max_size=4).map(lambda data: bytes(bytearray(data)))),
)
leaves = st.one_of(
    hashable,
    st.binary(max_size=5).map(bytearray),
    st.builds(slice, st.none() | st.integers(0, 2**60)),
    st.builds(range, st.integers(-3, 2**60), st.integers(0, 9), st.integers(1, 2**60)),
)
keys = st.recursive(hashable, lambda inner: st.lists(inner, max_size=2).map(tuple), max_leaves=3)


def mapping(made, pairs: list[tuple[Any, Any]], state=None):
    made.update(pairs)
    if state is not None:
        made.state = state
    return made


@st.composite
def trees(draw) -> object:
    """Draw a tree of any nodes in which some objects occur several times, and some lead back to themselves."""
    made = []
    for _ in range(draw(st.integers(1, 12))):
        parts = st.one_of(leaves, st.sampled_from(made)) if made else leaves
        many = st.lists(parts, max_size=3)
        pairs = st.lists(st.tuples(keys, parts), max_size=3)
        few = st.lists(keys, max_size=1)
        one = draw(st.one_of(
            many,
            many.map(tuple),
            pairs.map(dict),
            st.dictionaries(texts, parts, max_size=3),
            few.map(set),
            few.map(frozenset),
            st.builds(mapping, st.builds(OrderedMapping), pairs, parts),
            st.builds(mapping, st.builds(DefaultMapping, st.none() | st.just(Global("m", "f"))), pairs),
            st.builds(mapping, st.builds(Namespace), pairs),
            st.builds(Object, st.just(Global("m", "C")), many.map(tuple), state=parts, items=many, entries=pairs,
                      has_state=st.just(True)),
        ))  # fmt: skip
        made.append(one)
    for one in made:
        if type(one) is list and draw(st.booleans()):
            one.append(draw(st.sampled_from(made)))
    return made


def through_json(root) -> object:
    """What comes back from the text of a document that holds a value."""
    nodes = NodeWriter([root])
    value = nodes.write(root)
    assert nodes.storages == []
    text = encode({"format": "zckpt", "version": 1, "value": value, "objects": nodes.objects})
    assert deepest(text.decode()) < 64
    document = json.loads(text)
    return NodeReader(document["objects"], [], "none", len(text)).read(document["value"])


def deepest(text) -> int:
    level = most = 0
    for character in text:
        level += (character in "[{") - (character in "]}")
        most = max(most, level)
    return most


@settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(trees())
def test_any_tree_comes_back_with_what_is_shared_and_what_leads_back(tree):
    carried = FromFile(tree, "none")
    found = through_json(carried)
    assert isinstance(found, FromFile)
    assert dump(found.node).data == dump(tree).data


@given(st.floats(), st.integers(), texts)
def test_numbers_and_text_are_exact(number, integer, text):
    values = [number, integer, text, {text: number}, -number, (number, integer)]
    assert dump(through_json(values)).data == dump(values).data


def test_large_integers_and_scalars_of_every_type():
    state = {
        "unsigned": Scalar(2**64 - 1, "uint64"),
        "infinite": Scalar(math.inf, "float32"),
        "flag": Scalar(True, "bool"),
        "signed": Scalar(5, "int64"),
        "negative zero": Scalar(-0.0, "bfloat16"),
        "large": [2**2000, -(2**53), 2**53 - 1],
        "apart": [1.0, 1, True],
    }
    group = ParamGroup({"lr": Scalar(0.1, "float64"), "betas": (0.9, [0.999]), "eps": math.nan, "f": None}, [], state)
    expected = Checkpoint("x", "torch", param_groups=[group], loss_scale=math.inf)
    found = read(written(expected, "native"))
    assert repr(found.param_groups) == repr(expected.param_groups)
    assert found.loss_scale == math.inf


def test_deep_trees_are_written_flat_up_to_the_depth_that_readers_take():
    tree = "bottom"
    for _ in range(150):
        tree = [(tree,)] if isinstance(tree, str) else [tree]
    assert dump(through_json(tree)).data == dump(tree).data
    for _ in range(100):
        tree = [tree]
    with refusing(UnsupportedError, "too deep"):
        lay_out(Checkpoint("x", "torch", metadata={"tree": tree}))


def test_what_the_format_cannot_say_is_refused(torch_file):
    tensor = torch.ones(2)
    node = read_torchfile(torch_file(tensor)).root
    assert isinstance(node, Tensor)
    for value, words in [(node, "a tensor of an unnamed file"), (object(), "type object"), (slice("a"), "slice")]:
        with refusing(UnsupportedError, words):
            lay_out(Checkpoint("x", "torch", metadata={"value": value}))
    with refusing(UnsupportedError, "surrogate"):
        lay_out(Checkpoint("x", "torch", buffers={"\ud800": Parameter("\ud800", (), "float32")}))
    with refusing(UsageError, "world size"):
        lay_out(Checkpoint("x", "torch"), world_size=0)


# --- tensors --------------------------------------------------------------------------------------------------------


def of_tensors(tensors, directory) -> Checkpoint:
    directory.mkdir(exist_ok=True)
    checkpoint = Checkpoint("x", "torch")
    for number, (name, tensor) in enumerate(tensors.items()):
        slot = stored(directory / f"{number}.bin", tensor)
        checkpoint.parameters[name] = Parameter.of(name, slot)
    return checkpoint


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_every_element_type(world_size):
    names = [name for name in DTYPES if not name.startswith(("qint", "quint")) and hasattr(torch, name)]
    made = {name: random_tensor(name, (3, 5)) for name in names} | {"": random_tensor("complex128", ())}
    expected = of_tensors(made, Path("source"))
    assert every_slot(read(written(expected, "native", world_size))) == every_slot(expected)


@given(tensors=st.lists(st.tuples(st.integers(0, 50), st.sampled_from([1, 2, 4, 8, 16])), max_size=12),
       world_size=st.integers(1, 20), before=st.integers(0, 100))  # fmt: skip
def test_files_are_of_one_size_and_hold_every_element_once(tensors, world_size, before):
    loads = [before] + [0] * (world_size - 1)
    count = last = 0
    for (numel, size), runs in zip(tensors, even_extents(tensors, world_size, before=before), strict=True):
        assert [run.start for run in runs] == [sum(r.numel for r in runs[:i]) for i in range(len(runs))]
        assert sum(run.numel for run in runs) == numel
        assert all(run.numel for run in runs) or [run.numel for run in runs] == [0]
        for run in runs:
            assert last <= run.file < world_size
            loads[last := run.file] += run.numel * size
        count += len(runs)
    share = sum(loads) / world_size
    assert all(load <= share + 16 for load in loads[1:])
    assert loads[0] <= max(share, before)
    assert count <= len(tensors) + world_size - 1


def test_more_ranks_than_elements():
    made = {"one": torch.ones(1), "none": torch.empty(0, 3), "three": torch.arange(3)}
    expected = of_tensors(made, Path("source"))
    directory = written(expected, "native", 12)
    assert every_slot(read(directory)) == every_slot(expected)
    assert len([load_file(path) for path in directory.glob("*.safetensors")]) == 12


def test_one_file_is_a_safetensors_file_of_whole_tensors():
    expected = open_checkpoint(FIXTURES / "s2_bf16_dp2_client")
    directory = written(expected, "native")
    tensors = load_file(directory / "rank-00000-of-00001.safetensors")
    for (parameter, name), slot in every_slot(expected).items():
        assert told(tensors.pop(f"{name}/{parameter}")) == slot
    assert {name.partition("/")[0] for name in tensors} == {"storage", "digests"}


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_tensors_start_on_multiples_of_their_elements(world_size):
    directory = written(open_checkpoint(FIXTURES / "s2_bf16_dp2_client"), "native", world_size)
    for parameter in read(directory).tensors():
        for slot in parameter.slots.values():
            assert all(span.offset % itemsize(span.dtype) == 0 for span in slot.spans)


def test_names_that_would_be_one_key_stay_apart(tmp_path):
    checkpoint = of_tensors({"0": torch.ones(2), "b/c": torch.full((3,), 2.0)}, tmp_path / "source")
    other = of_tensors({"x": torch.zeros(4), "y": torch.full((5,), 4.0)}, tmp_path / "other")
    slot = replace(other.parameters["x"].slots["weight"], name="weight")
    checkpoint.unnamed["0"] = Parameter.of("0", slot)
    clash = replace(other.parameters["y"].slots["weight"], name="weight/b")
    checkpoint.parameters["c"] = Parameter("c", (5,), "float32", {"weight/b": clash})
    found = read(written(checkpoint, tmp_path / "native", 2))
    assert_same_checkpoint(found, checkpoint, tmp_path)


@given(data=st.data(), shape=shapes(), dtype=st.sampled_from(["float32", "complex64", "bool"]))
def test_boxes_and_ranges_of_any_layout_are_read(data, shape, dtype):
    with TemporaryDirectory() as folder:
        assert_layout_is_read(Path(folder), shape, dtype, data.draw(tilings(shape)))


def assert_layout_is_read(directory, shape: tuple[int, ...], dtype, extents: list[Extent]):
    slot = stored(directory / "source.bin", random_tensor(dtype, shape))
    identity = "0" * 32
    files = [
        ranks.lay_out(f"{number}.safetensors", [ranks.slot_entry("weight/x", slot, extent)], identity)
        for number, extent in enumerate(extents)
    ]
    write_directory(plan(files), directory / "files")
    opened = [
        ranks.open_rank_file(directory / "files" / file.name, identity=identity, nbytes=file.nbytes) for file in files
    ]
    pieces = [
        {"file": n, "offsets": list(e.offsets), "sizes": list(e.sizes), "start": e.start, "numel": e.numel}
        for n, e in enumerate(extents)
    ]
    cut = Cut("weight", "weight/x", dtype, shape, Layouts([pieces], len(files)).pieces(0, "weight/x", shape))
    where = summed([ranks.listed(file) for file in files], identity, [cut])
    assert where is not None
    both = zip(cut.pieces, where[cut.key], offsets_in(opened, [cut])[cut.key], strict=True)
    assert all(computed == read or not extent.numel for (_, extent), computed, read in both)
    spans = spans_of(cut, where, [file.path for file in opened])
    assert read_slot(replace(slot, spans=spans)).tobytes() == read_slot(slot).tobytes()


# --- the specification: a reader written from docs/formats.md, of json and safetensors only ---------------------------


def lie_where_the_document_says(document, directory):
    """Hold the headers against what follows from the document: see "A rank's file" in docs/formats.md."""
    rows = [[] for _ in document["files"]]
    rows[0] += [(-1, f"storage/{n}", one["nbytes"]) for n, one in enumerate(document["storages"])]
    for parameter in document["parameters"] + document["buffers"] + document["unnamed"]:
        for slot in parameter["slots"]:
            width = getattr(torch, slot["dtype"]).itemsize
            for piece in document["layouts"][slot["layout"]]:
                sizes = piece.get("sizes", slot.get("shape", parameter["shape"]))
                key = slot.get("key", f"{slot['name']}/{parameter['name']}")
                rows[piece["file"]].append((-width, key, piece.get("numel", math.prod(sizes)) * width))
    for file, tensors in zip(document["files"], rows, strict=True):
        data = (directory / file["name"]).read_bytes()
        header = data[: file["header_nbytes"]]
        assert (len(data), f"{zlib.crc32(header):08x}") == (file["nbytes"], file["header_crc32"])
        offsets = {key: one["data_offsets"] for key, one in json.loads(header[8:]).items() if key != "__metadata__"}
        at = 8 * len(tensors)
        expected = {"digests": [0, at]}
        for _, key, nbytes in sorted(tensors):
            expected[key] = [at, at + nbytes]
            at += nbytes
        assert offsets == expected


def independently(directory) -> dict[tuple[str, str], torch.Tensor]:
    """Every slot of every parameter, buffer and unnamed parameter."""
    document = json.loads((directory / "checkpoint.json").read_text())
    assert (document["format"], document["version"]) == ("zckpt", 2)
    files = [safe_open(directory / file["name"], "pt") for file in document["files"]]
    lie_where_the_document_says(document, directory)
    found = {}
    for parameter in document["parameters"] + document["buffers"] + document["unnamed"]:
        for slot in parameter["slots"]:
            dtype, shape = getattr(torch, slot["dtype"]), slot.get("shape", parameter["shape"])
            whole = torch.zeros(shape, dtype=dtype)
            for piece in document["layouts"][slot["layout"]]:
                stored = files[piece["file"]].get_tensor(slot.get("key", f"{slot['name']}/{parameter['name']}"))
                if stored.dtype != dtype:
                    stored = stored.reshape(-1).view(dtype) if stored.numel() else torch.empty(0, dtype=dtype)
                offsets, sizes = piece.get("offsets", [0] * len(shape)), piece.get("sizes", shape)
                box = whole[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))]
                flat = box.reshape(-1).clone()
                start, numel = piece.get("start", 0), piece.get("numel", box.numel())
                flat[start : start + numel] = stored.reshape(-1)
                box.copy_(flat.reshape(box.shape))
            found[parameter["name"], slot["name"]] = whole
    return found


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("name", FEW)
@pytest.mark.every(3)
def test_specification_suffices_to_read_all_tensors(name, world_size):
    expected = open_checkpoint(FIXTURES / name)
    found = independently(written(expected, "native", world_size))
    assert {key: told(tensor) for key, tensor in found.items()} == every_slot(expected)


# --- where tensors lie: the document says it, headers are held against it ---------------------------------------------


def test_directory_of_version_1_is_read(tmp_path):
    """A directory that zckpt wrote when documents did not list headers; no header has its tensors in today's order."""
    found = read(FIXTURES / "other" / "zckpt_v1")
    assert found.format_version == "1"
    assert_same_checkpoint(found, open_checkpoint(FIXTURES / "s2_bf16_dp2_client"), tmp_path)
    assert check_digests(FIXTURES / "other" / "zckpt_v1") == []


def test_ranks_that_share_the_headers_each_look_at_their_own(directory):
    """What a rank does not look at, another does; together they look at each file once."""
    (directory / "rank-00001-of-00002.safetensors").unlink()
    with headers_shared(0, 2):
        assert read(directory).files[1].nbytes > 0
    with headers_shared(1, 2), refusing(ShardError, "missing"):
        read(directory)


def test_tensors_are_found_where_they_are_though_a_header_was_rewritten(directory):
    expected = every_slot(read(directory))
    exchanged = exchange_tensors(directory / rank_name(1, 2))
    assert every_slot(read(directory)) == expected
    assert len(set(exchanged)) == 2
    with headers_shared(1, 2), refusing(DamagedFileError, "header"):
        read(directory)


@pytest.mark.parametrize("name", FEW)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.every(2)
def test_table_of_kinds_says_the_same_as_sums_one_by_one(name, world_size):
    reading = reading_of(written(open_checkpoint(FIXTURES / name), "native", world_size))
    table = Table(reading.listed, reading.cuts)
    assert table.is_proven
    for cut in reading.cuts:
        expected, found = spans_of(cut, reading.where, reading.paths), spans_of(cut, table, reading.paths)
        assert isinstance(found, PieceSpans)
        assert found == expected
        assert tuple(found[n] for n in range(len(found))) == tuple(expected) == found[:]
        assert tuple(table[cut.key][file] for file, _ in cut.pieces) == reading.where[cut.key]
        for span in expected:
            low, high = bounds(span.extent, cut.shape)
            assert span in found.reaching(low, high)
            assert span in found.within({span.path})
        assert found.within(()) == ()


def reading_of(directory) -> Reading:
    document, nbytes = read_document(directory)
    return Reading(directory, document, nbytes, headers=False)


def test_many_slots_by_many_files_have_no_object_for_each(monkeypatch):
    """More pieces than are summed up one by one; all elements are where they were written."""
    count, each, large = 32, 3, 1 << 12
    monkeypatch.setattr(reader, "LARGE", large)
    shape = (count * each,)
    names = [f"layers.{number}" for number in range(large // count + 1)]
    values = {name: np.arange(shape[0], dtype=np.float32) + number for number, name in enumerate(names)}
    checkpoint, slot = Checkpoint("", "zckpt"), Slot("weight", "float32", shape, ())
    placed = []
    for name in names:
        checkpoint.parameters[name] = Parameter.of(name, slot)
        cut = tuple((rank, Extent.flat(shape, rank * each, each)) for rank in range(count))
        placed.append(Cut("weight", f"weight/{name}", slot.dtype, slot.shape, cut))
    files = []
    for rank in range(count):
        entries = [
            ranks.slot_entry(one.key, slot, one.pieces[rank][1],
                             memoryview(value[rank * each : (rank + 1) * each]).cast("B"))
            for value, one in zip(values.values(), placed, strict=True)
        ]  # fmt: skip
        files.append(ranks.lay_out(rank_name(rank, count), entries, "0" * 32))
    members = place(checkpoint, describe(checkpoint)[0], placed)
    document = lay_out_document(members, "0" * 32, [ranks.listed(file) for file in files])
    write_directory(plan([*files, document]), "native")
    found = read(Path("native"))
    for name in names[::50]:
        slot = found.parameters[name].weight
        assert isinstance(slot.spans, PieceSpans)
        assert np.array_equal(read_slot(slot), values[name])
    exchange_tensors(Path("native", files[-1].name))
    assert np.array_equal(read_slot(read(Path("native")).parameters[names[0]].weight), values[names[0]])


# --- damage ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Path:
    return written(open_checkpoint(FIXTURES / "s2_bf16_dp2_client"), tmp_path_factory.mktemp("original") / "native", 2)


@pytest.fixture
def directory(original) -> Path:
    return Path(shutil.copytree(original, "native"))


def test_flipped_bits_are_found_and_the_tensor_named(directory):
    span = read(directory).parameters["emb.weight"].slots["exp_avg"].spans[0]
    flip(Path(span.path), span.offset + 3)
    last = directory / rank_name(0, 2)
    flip(last, last.stat().st_size - 1)
    found = check_digests(directory)
    assert [one.message for one in found] == ["exp_avg/emb.weight is damaged", "storage/1 is damaged"]
    assert span.path in str(found[0])


def test_any_flipped_bit_of_a_data_section_is_found():
    tensors = {"a": random_tensor("float32", (3,)), "b": random_tensor("bool", (5,)), "c": torch.empty(0)}
    directory = written(of_tensors(tensors, Path("source")), "native")
    path = directory / "rank-00000-of-00001.safetensors"
    sound = path.read_bytes()
    for offset in range(8 + int.from_bytes(sound[:8], "little"), len(sound)):
        flip(path, offset)
        assert len(check_digests(directory)) == 1
        path.write_bytes(sound)
    assert check_digests(directory) == []


def test_any_flipped_bit_of_the_document_is_found(directory):
    path = directory / "checkpoint.json"
    sound = path.read_bytes()
    for offset in [*range(0, len(sound), 97), *range(len(sound) - 30, len(sound))]:
        flip(path, offset)
        with refusing(SourceError, r"checkpoint\.json"):
            read(directory)
        path.write_bytes(sound)


def test_tensors_that_have_changed_places_are_read_where_they_are(directory):
    """By every verb: no reader takes the document's word for where they were."""
    before = zckpt.fingerprint(directory)
    zckpt.consolidate(directory, "before.safetensors", slots=["exp_avg"], checksums=False)
    exchange_tensors(directory / "rank-00001-of-00002.safetensors")
    zckpt.consolidate(directory, "after.safetensors", slots=["exp_avg"], checksums=False)
    assert Path("after.safetensors").read_bytes() == Path("before.safetensors").read_bytes()
    assert zckpt.fingerprint(directory).text == before.text
    found = [one.code for one in zckpt.verify(directory, deep=True).findings]
    assert found.count("ZC-121") == 1


@pytest.mark.parametrize(("text", "other"), [(b'"digests"', b'"digestx"'), (b'"I64"', b'"F64"'), (b"{", b"\xff")])
def test_damage_to_any_header_is_one_clear_error(text, other, directory):
    path = directory / "rank-00001-of-00002.safetensors"
    path.write_bytes(path.read_bytes().replace(text, other, 1))
    with pytest.raises(DamagedFileError):
        zckpt.consolidate(directory, "model.safetensors")
    found = zckpt.verify(directory, deep=True)
    assert not found.sound
    assert str(path) in {one.file for one in found.findings}


def test_damaged_identity_of_a_file_is_one_clear_error(directory):
    path = directory / "rank-00001-of-00002.safetensors"
    identity = json.loads((directory / "checkpoint.json").read_bytes())["id"].encode()
    path.write_bytes(path.read_bytes().replace(identity, b"\xb0" + identity[1:], 1))
    with pytest.raises(SourceError):
        read(directory)


def test_save_that_did_not_finish_is_named(directory):
    (directory / "checkpoint.json").unlink()
    assert is_native(directory)
    with refusing(DamagedFileError, f"{directory}: .*did not finish.*{rank_name(0, 2)}"):
        read(directory)


def test_missing_file_and_file_of_another_checkpoint_are_named(directory):
    other, name = written(open_checkpoint(FIXTURES / "s2_bf16_dp2"), "other", 2), rank_name(1, 2)
    shutil.copy(other / name, directory / name)
    with refusing(ShardError, rf"{name}: belongs to another checkpoint"):
        read(directory)
    (directory / name).unlink()
    with refusing(ShardError, rf"{name}.*missing|missing.*{name}"):
        read(directory)


def test_one_ranks_file_is_no_model(directory):
    """Whatever it is called: it has pieces of tensors, and an optimizer's among them."""
    shutil.copy(directory / rank_name(1, 2), "model.safetensors")
    for path in (directory / rank_name(0, 2), "model.safetensors"):
        with refusing(SourceError, "is one rank's file of a zckpt checkpoint; give its directory"):
            zckpt.open(path)


def test_truncated_file_is_refused(directory):
    path = directory / "rank-00001-of-00002.safetensors"
    os.truncate(path, path.stat().st_size - 1)
    with refusing(DamagedFileError, "fill the file"):
        read(directory)


def test_directories_of_others_are_not_taken_for_this_format(tmp_path):
    assert not is_native(tmp_path)
    assert not is_native(tmp_path / "none")
    (tmp_path / "checkpoint.json").write_text('{"format": "other"}')
    assert not is_native(tmp_path)
    (tmp_path / "checkpoint.json").write_text('{ "format" : "zckpt" }')
    assert is_native(tmp_path)
    for name in ("model.safetensors", "checkpoint.json.bak", "rank-1-of-2.safetensors", "x/checkpoint.json"):
        assert not is_own(name), name


def test_a_tag_may_have_slashes(directory, tmp_path):
    shutil.copytree(directory, tmp_path / "epoch1" / "step5")
    (tmp_path / "latest").write_text("epoch1/step5\n")
    assert zckpt.open(tmp_path).source == str(tmp_path / "epoch1" / "step5")
    assert zckpt.open(tmp_path, tag="epoch1/step5").format == "zckpt"
    (tmp_path / "epoch1" / "latest").write_text("../epoch1/step5")
    with pytest.raises(zckpt.errors.SourceError):
        zckpt.open(tmp_path / "epoch1")


def test_document_may_be_changed_and_written_by_any_json_library(directory):
    change_document(directory, lambda d: d["param_groups"][0]["hyperparameters"].update(lr=0.5))
    assert read(directory).param_groups[0].hyperparameters["lr"] == 0.5


def test_later_version_is_refused(directory):
    change_document(directory, lambda d: d.update(version=3))
    with refusing(UnsupportedError, "newer version"):
        read(directory)


def nested(levels):
    found = 0
    for _ in range(levels):
        found = [found]
    return found


def first(document):
    return document["parameters"][0]


def chain(count) -> list[Any]:
    return [{"$": "tuple", "items": [{"$": "ref", "id": n - 1}] if n else []} for n in range(count)]


HOSTILE_MEMBERS = {
    # case: (place in the document, value, words of the error)
    "no files": ("files", [], "files"),
    "file elsewhere": ("files.0.name", "../rank-00000-of-00002.safetensors", "files"),
    "absolute file": ("files.0.name", "/etc/passwd", "files"),
    "other size": ("files.0.nbytes", 7, "size"),
    "other id": ("id", "0" * 32, "another checkpoint"),
    "unknown member": ("more", 1, "document"),
    "document is a list": ("parameters", {}, "parameters"),
    "unknown slot": ("parameters.0.slots.0.name", "other", "is missing"),
    "other key": ("parameters.0.slots.0.key", "digests", "used twice"),
    "element type": ("parameters.0.slots.0.dtype", "float32", "differs from checkpoint.json"),
    "no element type": ("parameters.0.slots.0.dtype", "float33", "element type"),
    "shape": ("parameters.0.shape", [2], "checkpoint.json"),
    "negative shape": ("parameters.0.shape", [-1], "shape"),
    "huge shape": ("parameters.0.shape", [2**62, 2**62], "checkpoint.json"),
    "shape of floats": ("parameters.0.shape", [1.0], "shape"),
    "shape of bools": ("parameters.0.shape", [True], "shape"),
    "layout": ("parameters.0.slots.0.layout", 99, "layout"),
    "negative layout": ("parameters.0.slots.0.layout", -1, "layout"),
    "file number": ("layouts.0.0.file", 2, "file of piece"),
    "no pieces": ("layouts.0", [], "does not fit"),
    "group number": ("parameters.0.group", 7, "group of"),
    "group that does not list it": ("parameters.0.group", 0, "group of"),
    "tied to nothing": ("parameters.-1.tied_to", "none", "tied_to"),
    "tied to itself": ("parameters.-1.tied_to", "head.weight", "tied_to"),
    "tied with slots": ("parameters.0.tied_to", "emb.weight", "tied_to"),
    "frozen": ("parameters.0.frozen", 1, "frozen"),
    "step": ("step", "5", "step"),
    "world size": ("world_size", 0, "world_size"),
    "topology": ("topology", [1], "topology"),
    "loss scale": ("loss_scale", "1", "loss_scale"),
    "version": ("version", "1", "version"),
    "format": ("format", "zckpy", "not a zckpt checkpoint"),
    "storage too large": ("storages.0.nbytes", 2**60, "storage/0"),
    "metadata is a list": ("metadata", [], "dict"),
    "metadata key": ("metadata", {"$": "dict", "items": [[1, 2]]}, "dict"),
    "ref to itself": ("objects", [{"$": "ref", "id": 0}], "before it"),
    "tuple of itself": ("objects", [{"$": "tuple", "items": [{"$": "ref", "id": 0}]}], "before it"),
}

HOSTILE = {
    # case: (change to the document, words of the error)
    "another order": (lambda d: d["files"].reverse(), "files"),
    "missing member": (lambda d: d.pop("layouts"), "layouts"),
    "parameter is a number": (lambda d: d["parameters"].insert(0, 5), "parameter"),
    "parameter twice": (lambda d: d["parameters"].append(d["buffers"][0]), "twice"),
    "alias twice": (lambda d: d["parameters"].append(dict(d["parameters"][-1])), "every name once"),
    "parameter and buffer": (lambda d: d["buffers"].append(dict(d["parameters"][-1])), "buffers"),
    "slot twice": (lambda d: first(d)["slots"].append(first(d)["slots"][0]), "every slot once"),
    "tensor left over": (lambda d: first(d)["slots"].pop(), "does not mention"),
    "piece too large": (lambda d: d["layouts"][0][0].update(start=0, numel=2**63 - 1), "range"),
    "piece too small": (lambda d: d["layouts"][0][0].update(start=0, numel=0), "does not fit"),
    "box of dimensions": (lambda d: d["layouts"][0][0].update(offsets=[0] * 9, sizes=[1] * 9), "box"),
    "group twice": (lambda d: d["param_groups"][0]["parameters"].append("emb.weight"), "each once"),
    "storage not whole": (lambda d: d["storages"][0].update(dtype="float64", nbytes=5057), "whole elements"),
    "storage missing": (lambda d: d["storages"].pop(), "storage"),
    "deep tuples": (lambda d: d.update(objects=chain(5000), metadata={"x": {"$": "ref", "id": 4999}}), "too deep"),
}  # fmt: skip

HOSTILE_VALUES = {
    # case: (a value in the metadata, words of the error)
    "unknown kind": ({"$": "eval", "code": "1"}, "known kind"),
    "kind is a list": ({"$": []}, "known kind"),
    "unknown field": ({"$": "tuple", "items": [], "more": 1}, "tuple"),
    "missing field": ({"$": "global", "name": "x"}, "module"),
    "wrong field": ({"$": "object", "cls": "os.system"}, "cls of a object"),
    "wrong text": ({"$": "object", "cls": None, "how": "exec"}, "object"),
    "ref too large": ({"$": "ref", "id": 10**6}, "ref"),
    "ref negative": ({"$": "ref", "id": -1}, "ref"),
    "ref is a bool": ({"$": "ref", "id": True}, "ref"),
    "bytes": ({"$": "bytes", "data": "a*"}, "base64"),
    "float": ({"$": "float", "bits": "7ff0"}, "float"),
    "int": ({"$": "int", "hex": "0x" + "f" * 5000}, "int"),
    "int in words": ({"$": "int", "hex": "12"}, "int"),
    "range": ({"$": "range", "start": 0, "stop": 9, "step": 0}, "range"),
    "complex": ({"$": "complex", "real": 1, "imag": None}, "float"),
    "text": ({"$": "text", "utf8": "/w=="}, "UTF-8"),
    "unhashable": ({"$": "set", "items": [[]]}, "used as a key"),
    "key twice": ({"$": "dict", "items": [[1, 2], [1, 3]]}, "every key once"),
    "deep lists": (nested(300), "too deep"),
    "numpy array": ({"$": "numpy_array", "dtype": "<c9", "shape": [1], "data": "AAAA"}, "bytes"),
    "tensor outside": (
        {"$": "tensor", "storage": 0, "dtype": "uint8", "shape": [5057], "strides": [1]}, "exceeds storage",
    ),
    "tensor of no storage": (
        {"$": "tensor", "storage": 9, "dtype": "uint8", "shape": [1], "strides": [1]}, "storage",
    ),
}  # fmt: skip


def setting(place, value) -> Callable[[Any], None]:
    """Set a member of a document, at steps that are joined by dots."""

    def change(document):
        *above, last = (int(step) if step.lstrip("-").isdigit() else step for step in place.split("."))
        functools.reduce(operator.getitem, above, document)[last] = value

    return change


CASES = HOSTILE | {case: (setting(place, value), words) for case, (place, value, words) in HOSTILE_MEMBERS.items()}
CASES |= {case: (setting("metadata.x", value), words) for case, (value, words) in HOSTILE_VALUES.items()}


@pytest.mark.parametrize(("change", "words"), CASES.values(), ids=CASES)
def test_hostile_document_is_one_clear_error(change, words, directory):
    change_document(directory, change)
    with pytest.raises(SourceError) as caught:
        read(directory)
    assert words in str(caught.value)
    assert str(directory) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b"{",
        b'{"format":"zckpt","version":1,"version":1}',
        b'{"format":"zckpt","version":NaN}',
        b'{"format":"zckpt","version":1e999}',
        b'{"format":"zckpt","version":' + b"1" * 10**6 + b"}",
        b'{"format":"zckpt","version":' + b"[" * 10**6 + b"}",
        b'{"format":"zckpt","version":1,"crc32":"00000000"}',
        b'{"format":"zckpt","version":1,"id":"\xff"}',
        b'\x00\x01{"format":"zckpt"}',
    ],
)
def test_text_that_is_no_document_is_one_clear_error(text, directory):
    (directory / "checkpoint.json").write_bytes(text)
    with refusing(DamagedFileError, r"checkpoint\.json"):
        read(directory)


def test_checksum_of_a_document_is_that_of_all_before_it(directory):
    text = (directory / "checkpoint.json").read_bytes()
    body, mark, end = text[:-22], text[-22:-11], text[-11:]
    assert (mark, end[8:]) == (b',\n"crc32":"', b'"}\n')
    assert int(end[:8], 16) == zlib.crc32(body)
    assert read_document(directory)[0]["version"] == 2


def test_what_lies_twice_is_refused_when_it_is_read(directory):
    def overlap(document):
        (cut,) = [layout for layout in document["layouts"] if len(layout) == 2]
        cut[1]["start"] -= 1
        assert cut[1]["numel"] > 1

    change_document(directory, overlap)
    checkpoint = read(directory)
    slots = [slot for parameter in checkpoint.holders() for slot in parameter.slots.values() if len(slot.spans) == 2]
    with refusing(LayoutError, "more than once"):
        read_slot(slots[0])


@pytest.mark.parametrize("step", [-1, 1 << 70])
def test_what_is_no_count_of_steps_is_carried_and_not_the_documents(step, torch_file):
    zckpt.convert(torch_file({"model": torch.nn.Linear(2, 2).state_dict(), "step": step}), "c", to="zckpt")
    found = zckpt.open("c")
    assert found.step is None
    assert found.metadata["step"] == step
