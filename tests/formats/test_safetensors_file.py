"""What zckpt writes the safetensors library reads, what the library writes zckpt reads, and nothing else passes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import zckpt
from tests.formats.some_tensors import assert_same, random_tensor, stored
from tests.live import trained
from tests.logical import opened
from tests.plans import write_directory
from tests.refusals import refusing
from tests.strategies import shapes
from zckpt.engine.plan import plan
from zckpt.errors import DamagedFileError, ShardError, SourceError, UnsupportedError
from zckpt.formats.safetensors.file import INDEX_NAME, MAXIMUM_HEADER_NBYTES, is_safetensors, read, read_header
from zckpt.formats.safetensors.layout import Entry, lay_out, lay_out_directory
from zckpt.operations.target import write_target
from zckpt.state import WEIGHT, Extent, Slot, Span
from zckpt.state.dtypes import DTYPES

CODES = [info.name for info in DTYPES.values() if info.safetensors]


def entry(path, name, tensor) -> Entry:
    """Put a tensor's bytes in a file of their own and return the entry that writes them."""
    slot = stored(path, tensor)
    return Entry(name, slot, slot.dtype)


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert_same(found[name], tensor)


def some_tensors() -> dict[str, torch.Tensor]:
    return {
        "z.weight": random_tensor("bfloat16", (3, 5)),
        "a.bias": random_tensor("float32", ()),
        "empty": random_tensor("float16", (0, 4)),
        "flags": random_tensor("bool", (7,)),
        "empty too": random_tensor("int64", (0,)),
        'naïve "名前"\n': random_tensor("uint8", (1,)),
    }


# --- what zckpt writes the library reads ------------------------------------------------------------------------


def test_library_reads_what_is_written(tmp_path):
    tensors = some_tensors()
    entries = [entry(tmp_path / str(i), name, tensor) for i, (name, tensor) in enumerate(tensors.items())]
    assert_equal(load_file(written(tmp_path / "m", *entries)), tensors)


def written(path, *entries: Entry, metadata: dict[str, str] | None = None) -> Path:
    write_target(plan([lay_out("m", entries, metadata or {})]), path)
    return path


@pytest.mark.parametrize("dtype", CODES)
def test_every_element_type_passes_both_ways(dtype):
    tensors = {"t": random_tensor(dtype, (6, 4))}
    assert_equal(load_file(written(Path("m"), entry(Path("s"), "t", tensors["t"]))), tensors)
    save_file(tensors, "theirs")
    assert_equal(loaded(Path("theirs")), tensors)


@given(shapes())
def test_any_shape_is_laid_out_exactly(shape):
    slot = Slot(WEIGHT, "float32", shape, (Span(Extent.whole(shape), "s", 0, "float32"),))
    file = lay_out("m", [Entry("a", slot, "float32"), Entry("b", slot, "bfloat16")])
    (header,) = file.literals
    first, second = file.holes
    assert first.offset == len(header.data)
    assert first.offset % 8 == 0
    assert second.offset == first.offset + 4 * slot.numel
    assert file.nbytes == second.offset + 2 * slot.numel


def test_cast_is_said_in_the_header(tmp_path):
    tensor = torch.randn(100)
    one = Entry("t", stored(tmp_path / "s", tensor), "bfloat16")
    assert_equal(load_file(written(tmp_path / "m", one)), {"t": tensor.bfloat16()})


def test_metadata_is_written_and_read_back():
    path = written(Path("m"), metadata={"step": "7", "näme": "wört"})
    expected = {"format": "pt", "step": "7", "näme": "wört"}
    with safe_open(path, "pt") as file:
        assert file.metadata() == expected
    assert read_header(path)[1] == expected


@pytest.mark.parametrize("dtype", ["complex128", "float8_e4m3fnuz", "qint8"])
def test_element_type_without_a_code_is_refused(dtype):
    with refusing(UnsupportedError, f"no element type {dtype}, which t has; write a .pt file"):
        lay_out("m", [Entry("t", Slot(WEIGHT, dtype, (1,), ()), dtype)])


def test_header_beyond_the_formats_bound_is_refused():
    slot = Slot(WEIGHT, "float32", (0,), ())
    names = [str(i) + "x" * (MAXIMUM_HEADER_NBYTES // 10) for i in range(10)]
    with refusing(UnsupportedError, "too many tensors"):
        lay_out("m", [Entry(name, slot, "float32") for name in names])


def test_directory_has_shards_and_an_index_as_hugging_face_lays_them_out():
    tensors = {f"layer.{i}": random_tensor("float32", (25,)) for i in range(7)}
    entries = [entry(Path(name), name, tensor) for name, tensor in tensors.items()]
    write_directory(plan(lay_out_directory(entries, 250)), "out")
    names = [f"model-0000{i}-of-00004.safetensors" for i in range(1, 5)]
    assert sorted(path.name for path in Path("out").iterdir()) == [*names, INDEX_NAME]
    index = json.loads(Path(f"out/{INDEX_NAME}").read_text())
    assert index["metadata"] == {"total_size": 700}
    found = {}
    for name in names:
        shard = load_file(f"out/{name}")
        assert all(index["weight_map"][tensor] == name for tensor in shard)
        assert sum(tensor.nbytes for tensor in shard.values()) <= 250
        found.update(shard)
    assert_equal(found, tensors)
    assert list(read(Path("out")).parameters) == list(tensors)


def test_tensor_larger_than_a_shard_has_one_to_itself():
    sizes = [10, 100, 10, 10]
    entries = [Entry(str(i), Slot(WEIGHT, "uint8", (n,), ()), "uint8") for i, n in enumerate(sizes)]
    assert [[hole.nbytes for hole in file.holes] for file in lay_out_directory(entries, 50)[:-1]] == [
        [10],
        [100],
        [10, 10],
    ]


# --- what the library writes zckpt reads ------------------------------------------------------------------------


def loaded(path) -> dict[str, torch.Tensor]:
    """Read all tensors of a file or directory with zckpt."""
    checkpoint = opened(read(path))
    return {one.name: checkpoint.read(one.name) for one in checkpoint.tensors()}


def test_what_the_library_writes_is_read():
    tensors = some_tensors()
    save_file(tensors, "m.safetensors", {"format": "pt"})
    assert_equal(loaded(Path("m.safetensors")), tensors)


def test_whole_numbers_are_buffers_and_the_rest_parameters():
    save_file(some_tensors(), "m")
    checkpoint = read(Path("m"))
    assert set(checkpoint.parameters) == {"z.weight", "a.bias", "empty"}
    assert set(checkpoint.buffers) == {"flags", "empty too", 'naïve "名前"\n'}


def test_directory_with_one_file_or_with_an_index_is_read(tmp_path):
    tensors = {name: random_tensor("float32", (3,)) for name in "abc"}
    (whole := tmp_path / "whole").mkdir()
    save_file(tensors, whole / "model.safetensors")
    save_file({"a": tensors["a"], "c": tensors["c"]}, tmp_path / "one.safetensors")
    save_file({"b": tensors["b"]}, tmp_path / "two.safetensors")
    write_index(tmp_path, {"a": "one.safetensors", "b": "two.safetensors", "c": "one.safetensors"})
    for directory in (whole, tmp_path):
        assert is_safetensors(directory)
        assert_equal(loaded(directory), tensors)


def test_other_files_are_not_taken_for_safetensors(tmp_path):
    torch.save({"a": torch.ones(1)}, tmp_path / "m.pt")
    (tmp_path / "short").write_bytes(b"1234")
    (tmp_path / "empty").write_bytes(b"")
    assert not any(is_safetensors(path) for path in tmp_path.iterdir())
    assert not is_safetensors(tmp_path)


# --- files that are not what they should be ---------------------------------------------------------------------


def made(path, header, data=b"", *, length: int | None = None) -> Path:
    """Write a file with a header of one's own, given as data, text or bytes."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


def one(begin, end, shape=(1,), dtype="F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


MALFORMED = {
    "hole before the first tensor": ({"a": one(4, 8)}, 8),
    "hole between tensors": ({"a": one(0, 4), "b": one(8, 12)}, 12),
    "hole at the end": ({"a": one(0, 4)}, 8),
    "overlap": ({"a": one(0, 4), "b": one(2, 6)}, 6),
    "same place twice": ({"a": one(0, 4), "b": one(0, 4)}, 4),
    "place beyond the file": ({"a": one(0, 4), "b": one(4, 8)}, 4),
    "negative place": ({"a": one(-4, 0)}, 0),
    "end before begin": ({"a": one(4, 0)}, 4),
    "size that is not the shape's": ({"a": one(0, 8)}, 8),
    "negative size": ({"a": one(0, 4, [-1, -1])}, 4),
    "size that overflows": ({"a": one(0, 4, [2**40, 2**40])}, 4),
    "size that is no number": ({"a": one(0, 4, ["1"])}, 4),
    "size that is a fraction": ({"a": one(0, 4, [1.0])}, 4),
    "size that is a truth value": ({"a": one(0, 4, [True])}, 4),
    "place that is a fraction": ({"a": one(0, 4.0), "b": one(4.0, 8)}, 8),
    "place that is a truth value": ({"a": one(False, True, dtype="U8")}, 1),
    "place that is a text": ({"a": one("0", "4")}, 4),
    "three places": ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4, 8]}}, 4),
    "no places": ({"a": {"dtype": "F32", "shape": [1]}}, 4),
    "no shape": ({"a": {"dtype": "F32", "data_offsets": [0, 4]}}, 4),
    "no element type": ({"a": {"shape": [1], "data_offsets": [0, 4]}}, 4),
    "unknown element type": ({"a": one(0, 4, dtype="F31")}, 4),
    "element type that is a list": ({"a": one(0, 4, dtype=["F32"])}, 4),
    "entry that is no object": ({"a": 5}, 4),
    "entry that is null": ({"a": None}, 4),
    "header that is a list": ([], 0),
    "header that is a number": (5, 0),
    "header that is not JSON": (b"{'a': 1}", 0),
    "header that is not UTF-8": (b'{"\xff": 1}', 0),
    "header that is empty": (b"", 0),
    "header nested without end": (b'{"a":' + b"[" * 100_000, 0),
    "header with a name twice": (
        f'{{"a":{json.dumps(one(0, 4))},"a":{json.dumps(one(0, 4, dtype="I32"))}}}'.encode(),
        4,
    ),
    "metadata that is a number": ({"__metadata__": 5, "a": one(0, 4)}, 4),
    "metadata that is a text": ({"__metadata__": "param_groups", "a": one(0, 4)}, 4),
    "metadata that is not all text": ({"__metadata__": {"param_groups": [1]}, "a": one(0, 4)}, 4),
}


@pytest.mark.parametrize(("header", "nbytes"), MALFORMED.values(), ids=MALFORMED)
def test_malformed_header_is_refused(header, nbytes, tmp_path):
    with pytest.raises(DamagedFileError) as caught:
        read(made(tmp_path / "m", header, bytes(nbytes)))
    assert str(caught.value).startswith(f"{tmp_path}/m: ")
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("length", [9, 100, MAXIMUM_HEADER_NBYTES + 1, 2**63, 2**64 - 1])
def test_header_longer_than_the_file_is_refused_without_reading_it(length):
    with refusing(DamagedFileError, f"unreadable header: expected at most 2 bytes, found {length}"):
        read(made(Path("m"), {}, length=length))


def test_header_longer_than_the_formats_bound_is_refused():
    path = made(Path("m"), {}, length=MAXIMUM_HEADER_NBYTES + 1)
    with path.open("r+b") as file:
        file.truncate(2 * MAXIMUM_HEADER_NBYTES)
    with refusing(DamagedFileError, f"unreadable header: .*found {MAXIMUM_HEADER_NBYTES + 1}$"):
        read(path)


def test_metadata_may_be_null_as_mlx_writes_it():
    path = made(Path("m.safetensors"), {"__metadata__": None, "a": one(0, 4)}, bytes(4))
    assert [*load_file(path), *zckpt.open(path).names] == ["a", "a"]


def test_truncated_file_is_refused():
    path = Path("m")
    save_file({"a": torch.ones(4)}, path)
    content = path.read_bytes()
    for kept in range(len(content)):
        path.write_bytes(content[:kept])
        with pytest.raises(DamagedFileError):
            read(path)


def test_bytes_after_the_last_tensor_are_refused():
    save_file({"a": torch.ones(4)}, "m")
    with Path("m").open("ab") as file:
        file.write(b"x")
    with refusing(DamagedFileError, "do not fill the file"):
        read(Path("m"))


# --- an index that is not what it should be ---------------------------------------------------------------------


def write_index(directory, places: dict[str, str]):
    (directory / INDEX_NAME).write_text(json.dumps({"weight_map": places}))


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "below/x", "..", "."])
def test_index_that_names_a_file_elsewhere_is_refused(name):
    (directory := Path("in")).mkdir()
    save_file({"a": torch.ones(1)}, "x")  # which is there
    write_index(directory, {"a": name})
    with refusing(SourceError, "is missing, but" if name == ".." else "the index names a file outside its directory"):
        read(directory)


@pytest.mark.parametrize(
    "index",
    [b"", b"{", b"[]", b"{}", b"5", b'{"weight_map": 5}', b'{"weight_map": []}', b'{"weight_map": {"a": 5}}',
     b'{"weight_map": {"a": ["x"]}}', b'{"weight_map": {"a": null, "b": "x"}}', b"[" * 100_000,
     b'{"weight_map": {"\xff": "x"}}'],
    ids=lambda text: repr(text[:30]),
)  # fmt: skip
def test_malformed_index_is_refused(index, tmp_path):
    (tmp_path / INDEX_NAME).write_bytes(index)
    with refusing(DamagedFileError, "unreadable index"):
        read(tmp_path)


ELSEWHERE = "b is not in the file that the index names: expected one"


@pytest.mark.parametrize(
    ("shards", "places", "error", "said"),
    [
        ("a", {"a": "one", "b": "two"}, SourceError, "two: is missing, but the index names it"),
        ("aa", {"a": "one", "b": "two"}, DamagedFileError, "a is in two files"),
        ("ab", {"a": "one", "b": "one", "c": "two"}, DamagedFileError, f"{ELSEWHERE}, found two"),
        ("a", {"a": "one", "b": "one"}, DamagedFileError, ELSEWHERE),
    ],
    ids=["a shard is missing", "two shards have it", "it is in another", "none has it"],
)
def test_tensor_that_is_not_where_the_index_says_is_refused(shards, places, error, said, tmp_path):
    for name, tensor in zip(("one", "two"), shards, strict=False):
        save_file({tensor: torch.ones(1)}, tmp_path / name)
    write_index(tmp_path, places)
    with refusing(error, said):
        read(tmp_path)


def test_texts_that_a_program_put_into_the_header_are_carried():
    """As trainers of adapters for diffusion models put their settings there."""
    source = Path("source")
    source.mkdir()
    names = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    for key, name in zip("ab", names, strict=True):
        save_file({key: torch.ones(2)}, source / name, metadata={"format": "pt", "ss_steps": "7", "part": f"of {key}"})
    write_index(source, dict(zip("ab", names, strict=True)))
    texts = {"ss_steps": "7", "part": "of a", "model-00002-of-00002.part": "of b"}
    assert zckpt.open(source).metadata == texts
    zckpt.convert(source, "out", to="dcp")
    assert zckpt.open("out").metadata == texts


def test_shards_without_an_index_are_read_where_all_are_there(tmp_path):
    tensors = {f"layer.{number}": torch.full((2, 3), float(number)) for number in range(3)}
    for number, (name, tensor) in enumerate(tensors.items(), 1):
        save_file({name: tensor}, tmp_path / f"model-{number:05d}-of-00003.safetensors")
    checkpoint = zckpt.open(tmp_path)
    assert list(checkpoint.parameters) == list(tensors)
    assert_equal({name: checkpoint.read(name) for name in tensors}, tensors)
    (tmp_path / "model-00002-of-00003.safetensors").rename(tmp_path / "model-00002-of-00004.safetensors")
    with refusing(ShardError, "shards of several models"):
        zckpt.open(tmp_path)
    (tmp_path / "model-00002-of-00004.safetensors").unlink()
    with refusing(ShardError, r"expected 3 files .*found 2, without model-00002-of-00003\.safetensors"):
        zckpt.open(tmp_path)


def test_texts_in_the_header_of_a_model_beside_an_optimizer_are_carried():
    model, optimizer = trained(torch.nn.Linear(3, 2))
    Path("run").mkdir()
    save_file(model.state_dict(), "run/model.safetensors", {"format": "pt", "license": "mine"})
    torch.save(optimizer.state_dict(), "run/optimizer.pt")
    zckpt.convert("run", "out", to="zckpt")
    assert zckpt.open("out").metadata["license"] == "mine"
