"""What torch.save writes is read back: every tensor's bytes, every object's parts."""

import collections
import enum
import io
import json
import os
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.live import trained
from tests.refusals import refusing
from tests.torchfile.in_memory import read_torchbytes
from tests.torchfile.test_write import as_big_endian, views
from tests.truth import bits
from zckpt.errors import DamagedFileError, PickleError, SourceError, UnknownFormatError, UnsupportedError
from zckpt.torchfile import (
    Global,
    Object,
    OrderedMapping,
    Storage,
    Tensor,
    plain,
    read_torchfile,
    walk_tensors,
)

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")

FORMATS = [
    pytest.param({"pickle_protocol": 2}, id="zip-2"),
    pytest.param({"pickle_protocol": 3}, id="zip-3"),
    pytest.param({"pickle_protocol": 4}, id="zip-4"),
    pytest.param({"pickle_protocol": 5}, id="zip-5"),
    pytest.param({"_use_new_zipfile_serialization": False}, id="legacy-2"),
    pytest.param({"_use_new_zipfile_serialization": False, "pickle_protocol": 5}, id="legacy-5"),
]

DTYPES = [
    "float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool", "uint16", "uint32",
    "uint64", "complex32", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz",
    "float8_e5m2fnuz", "float8_e8m0fnu", *(new for new in ("float4_e2m1fn_x2", "bcomplex32") if hasattr(torch, new)),
]  # fmt: skip


PATH = Path("x.pt")
"""What most tests save."""


class Stage(enum.IntEnum):
    TWO = 2


class Custom:
    def __init__(self):
        self.rate = 0.5


def elements(path, tensor):
    """The bytes of a tensor's elements in row-major order, by its byte range alone."""
    raw = np.fromfile(path, "u1")[tensor.storage.offset : tensor.storage.offset + tensor.storage.nbytes]
    strides = [stride * tensor.itemsize for stride in tensor.strides]
    start = tensor.storage_offset * tensor.itemsize
    view = np.ndarray(
        (*tensor.shape, tensor.itemsize), "u1", raw.tobytes() + b"\0", start, (*strides, 1)
    )  # a spare byte: numpy wants a buffer even where there are no elements
    return view.tobytes()


def check(node, tensor, path=PATH):
    assert isinstance(node, Tensor)
    assert (node.shape, node.strides) == (tuple(tensor.shape), tensor.stride())
    assert f"torch.{node.dtype}" == str(tensor.dtype)
    assert node.storage_offset == tensor.storage_offset()
    assert node.numel == tensor.numel()
    assert node.nbytes == tensor.numel() * tensor.element_size()
    assert node.is_contiguous == tensor.is_contiguous()
    assert node.offset == node.storage.offset + tensor.storage_offset() * tensor.element_size()
    assert node.requires_grad == tensor.requires_grad
    assert elements(path, node) == bits(tensor).numpy().tobytes()


def save(value, path=PATH, **options):
    torch.save(value, path, **options)
    return read_torchfile(path)


def sample(dtype):
    size = getattr(torch, dtype).itemsize
    data = torch.arange(24 * size).remainder(2 if dtype == "bool" else 97).to(torch.uint8)
    return data.view(getattr(torch, dtype)).reshape(2, 3, 4)


@pytest.mark.parametrize("options", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_in_every_container(dtype, options):
    tensor = sample(dtype)
    file = save({"w": tensor, "row": tensor[1], "column": tensor[:, 1]}, **options)
    check(file.root["w"], tensor)
    check(file.root["row"], tensor[1])
    check(file.root["column"], tensor[:, 1])
    assert file.root["w"].storage is file.root["row"].storage
    assert len(file.storages) == 1
    assert file.container == ("legacy" if "_use_new_zipfile_serialization" in options else "zip")
    assert file.protocol == options.get("pickle_protocol", 2)
    assert file.nbytes == PATH.stat().st_size


@pytest.mark.parametrize("options", FORMATS)
def test_views_of_every_shape(options):
    value = views()
    file = save(value, **options)
    for node, tensor in zip(file.root, value, strict=True):
        check(node, tensor)


@pytest.mark.parametrize("options", FORMATS)
def test_model_and_optimizer(options):
    model, optimizer = trained(torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4)))
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    file = save(state, **options)
    assert isinstance(file.root["model"], OrderedMapping)
    assert file.root["model"].state["_metadata"]["0"] == {"version": 1}
    for name, tensor in state["model"].items():
        check(file.root["model"][name], tensor)
    check(file.root["optimizer"]["state"][2]["exp_avg"], state["optimizer"]["state"][2]["exp_avg"])
    assert file.root["optimizer"]["param_groups"][0]["betas"] == (0.9, 0.999)
    found = dict(walk_tensors(file.root))
    assert found["model", "0.weight"] is file.root["model"]["0.weight"]
    assert len(found) == 7 + 4 * 3
    (mentioned,) = file.globals.values()
    assert "collections.OrderedDict" in mentioned
    assert list(mentioned) == sorted(mentioned)


def test_whole_model_stays_inert():
    file = save(torch.nn.Linear(2, 3))
    assert isinstance(file.root, Object)
    assert file.root.cls == Global("torch.nn.modules.linear", "Linear")
    weight = file.root.get("_parameters")["weight"]
    assert weight.is_parameter
    assert weight.requires_grad
    assert weight.shape == (3, 2)
    assert [path[-1] for path, _ in walk_tensors(file.root)] == ["weight", "bias"]


def test_values_of_numpy_are_known():
    scalars = [np.float32(1.5), np.int64(-3), np.bool_(True), np.complex64(1j), np.str_("é"), np.uint8(7)]
    arrays = [np.asfortranarray(np.arange(6.0).reshape(2, 3)), np.array("text"), np.zeros((0, 2)), np.array(5, ">u2")]
    objects, structured = np.array([None, "x", 3], dtype=object), np.array([(1, 2.0)], dtype="i4,f8")
    file = save([scalars, arrays, objects, structured, np.dtype("f4")])
    assert [node.value for node in file.root[0]] == [scalar.item() for scalar in scalars]
    for node, array in zip(file.root[1], arrays, strict=True):
        order = "F" if node.fortran_order else "C"
        np.testing.assert_array_equal(np.frombuffer(node.data, node.dtype).reshape(node.shape, order=order), array)
    assert file.root[2].items == [None, "x", 3]
    assert file.root[3].data == structured.tobytes()
    assert file.root[4].text == "<f4"
    json.dumps(plain(file.root))


def test_unknown_classes_are_kept_and_shown():
    value = {
        "stage": Stage.TWO,
        "custom": Custom(),
        "queue": collections.deque([1, 2], 3),
        "count": collections.Counter("aab"),
    }
    file = save(value)
    custom = file.root["custom"]
    assert isinstance(custom, Object)
    assert (custom.how, custom.args, custom.state) == ("newobj", (), {"rate": 0.5})
    shown = plain(file.root)
    assert shown["stage"] == 2
    assert shown["custom"]["class"].endswith(".Custom")
    assert shown["custom"]["state"] == {"rate": 0.5}
    assert shown["queue"] == [1, 2]
    assert shown["count"] == {"a": 2, "b": 1}


def test_plain_is_json_whatever_is_in_the_tree():
    value = {"nan": float("nan"), "t": torch.ones(2, 3), "s": {3, 1, 2}, 1: "int key", "1": "string key",
             "b": b"\xff", "d": torch.int8, "m": torch.empty(2, device="meta"), "a": np.ones((2, 3)),
             "o": np.array([None, "x"], dtype=object), "f": np.float32(1.5), "k": np.dtype("f4")}  # fmt: skip
    value["loop"] = [value]
    shown = plain(save(value).root)
    text = json.dumps(shown, allow_nan=False)
    pairs = dict(map(tuple, [pair for pair in shown["pairs"] if pair[0] != "1"]))
    assert pairs["nan"] == "nan"
    assert pairs["t"] == {"tensor": "float32", "shape": [2, 3]}
    assert pairs["s"] == [1, 2, 3]
    assert pairs["loop"] == ["<cycle>"]
    assert "int key" in text
    assert "string key" in text


def test_walk_visits_shared_and_cyclic_objects_once():
    tensor = torch.ones(2)
    value = {"a": [tensor], "b": tensor, "tuple": (torch.zeros(1),)}
    value["self"] = value
    found = list(walk_tensors(save(value).root))
    assert [path for path, _ in found] == [("a", 0), ("tuple", 0)]
    alone = save(tensor, "y.pt").root
    assert list(walk_tensors(alone)) == [((), alone)]


def test_storages_saved_alone_and_never_mentioned():
    file = save([torch.arange(4.0).untyped_storage()])
    assert file.root == [Storage("0", "uint8", 16, "cpu", file.storages["0"].offset)]
    with zipfile.ZipFile(PATH, "a") as archive:
        archive.writestr(f"{file.archive}/data/7", b"unused")
    storage = read_torchfile(PATH).storages["7"]
    assert PATH.read_bytes()[storage.offset : storage.offset + storage.nbytes] == b"unused"


def rewrite(path, change):
    """Write the archive again with Python's zipfile; `change` maps name and data to records to write."""
    with zipfile.ZipFile(path) as archive:
        records = [(name, archive.read(name)) for name in archive.namelist()]
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in records:
            for new_name, new_data in change(name, data):
                archive.writestr(new_name, new_data)


def test_big_endian_archive():
    torch.save([torch.arange(5, dtype=torch.int32)], PATH)
    as_big_endian(PATH)
    file = read_torchfile(PATH)
    (node,) = file.root
    assert (file.byteorder, node.byteorder) == ("big", "big")
    assert np.frombuffer(elements(PATH, node), ">i4").tolist() == torch.load(PATH)[0].tolist() == [0, 1, 2, 3, 4]


def test_archive_without_byteorder_is_little_endian():
    torch.save([torch.ones(2)], PATH)
    rewrite(PATH, lambda name, data: [] if name.endswith("byteorder") else [(name, data)])
    file = read_torchfile(PATH)
    assert file.byteorder == "little"
    check(file.root[0], torch.ones(2))


def test_zip64_directory_is_followed():
    torch.save([torch.arange(3.0)], PATH)
    data = PATH.read_bytes()
    end = data.rindex(b"PK\5\6")
    count, size, offset = struct.unpack_from("<H2L", data, end + 10)
    entries, at = b"", offset
    while at < offset + size:  # every size and offset moves to a zip64 field
        fields = list(struct.unpack_from("<4s6H3L5H2L", data, at))
        name_size, extra_size = fields[10], fields[11]
        name = data[at + 46 : at + 46 + name_size]
        at += 46 + name_size + extra_size + fields[12]
        extra = struct.pack("<2H3Q", 1, 24, fields[9], fields[8], fields[16])
        fields[8] = fields[9] = fields[16] = 0xFFFFFFFF
        fields[11], fields[12] = len(extra), 0
        entries += struct.pack("<4s6H3L5H2L", *fields) + name + extra
    zip64 = struct.pack("<4sQ2H2L4Q", b"PK\6\6", 44, 45, 45, 0, 0, count, count, len(entries), offset)
    locator = struct.pack("<4sLQL", b"PK\6\7", 0, offset + len(entries), 1)
    closing = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0)
    PATH.write_bytes(data[:offset] + entries + zip64 + locator + closing)
    assert torch.load(PATH)[0].tolist() == [0, 1, 2]
    check(read_torchfile(PATH).root[0], torch.arange(3.0))


@pytest.mark.parametrize("legacy", [False, True])
def test_torch_file_within_another_file(legacy):
    buffer = io.BytesIO()
    tensor = torch.arange(6.0)[2:]
    torch.save({"t": tensor}, buffer, _use_new_zipfile_serialization=not legacy)
    path = Path("items.distcp")
    path.write_bytes(b"x" * 1000 + buffer.getvalue() + b"y" * 77)
    nbytes = len(buffer.getvalue())
    check(read_torchfile(path, offset=1000, nbytes=nbytes).root["t"], tensor, path)
    check(read_torchbytes(buffer.getvalue(), path=path, base_offset=1000).root["t"], tensor, path)
    with pytest.raises(DamagedFileError):
        read_torchfile(path, offset=1000, nbytes=nbytes + 78)


def test_records_are_reported_as_they_lie():
    path = Path("name.of.file.pt")
    file = save([torch.ones(3)], path)
    with zipfile.ZipFile(path) as archive:
        expected = {info.filename: (info.file_size, info.CRC, archive.read(info)) for info in archive.infolist()}
    raw = path.read_bytes()
    found = {r.name: (r.nbytes, r.crc32, raw[r.offset : r.offset + r.nbytes]) for r in file.records}
    assert found == expected
    assert file.archive == "name.of.file"


def test_legacy_file_with_pickles_longer_than_the_first_read():
    value = {"text": ["x" * 1000 + str(i) for i in range(2000)], "t": torch.arange(3)}
    file = save(value, _use_new_zipfile_serialization=False)
    assert file.root["text"] == value["text"]
    check(file.root["t"], value["t"])


@pytest.mark.parametrize(
    ("content", "error", "found"),
    [
        (b"", DamagedFileError, "is empty"),
        (b"hello world\n", UnknownFormatError, "text"),
        (struct.pack("<Q", 2) + b"{}", UnknownFormatError, "safetensors"),
        (b"\x80\x04N.", UnknownFormatError, "pickle"),
        (bytes(4096), DamagedFileError, "zeros"),
        (b"x" * 257 + b"ustar\0" + b"y" * 300, UnsupportedError, "tar"),
        (b"\xfe\xba\xff\xfe" * 9, UnknownFormatError, "not a torch file"),
        (b"PK\3\4" + bytes(100), DamagedFileError, "truncated"),
    ],
)
def test_other_files_are_refused_by_what_they_are(content, error, found):
    path = Path("other")
    path.write_bytes(content)
    with pytest.raises(error, match=found) as caught:
        read_torchfile(path)
    assert type(caught.value) is error
    assert str(caught.value).startswith(f"{path}: ")


def test_missing_file_directory_and_pipe(tmp_path):
    os.mkfifo("pipe")
    for path in (Path("none"), tmp_path, Path("pipe")):
        with refusing(SourceError, str(path)):
            read_torchfile(path)


def test_torchscript_is_named():
    torch.jit.save(torch.jit.script(torch.nn.Linear(1, 1)), PATH)
    with refusing(UnsupportedError, "TorchScript"):
        read_torchfile(PATH)


def test_zip_without_pickle_and_compressed_zip():
    path = Path("x.zip")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/b.txt", b"text")
    with pytest.raises(UnknownFormatError):
        read_torchfile(path)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/data.pkl", b"\x80\x02N.")
    with refusing(UnsupportedError, "compressed"):
        read_torchfile(path)


def duplicate(name, data):
    return [(name, data), (name, data)] if name.endswith("data/0") else [(name, data)]


def shorten(name, data):
    return [(name, data[:-1] if name.endswith("data/0") else data)]


def remove(name, data):
    return [] if name.endswith("data/0") else [(name, data)]


@pytest.mark.parametrize(
    ("change", "error"), [(duplicate, DamagedFileError), (shorten, PickleError), (remove, PickleError)]
)
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_storage_records_must_be_as_the_pickle_says(change, error):
    torch.save([torch.ones(3)], PATH)
    rewrite(PATH, change)
    with pytest.raises(error, match=r"data/0|storage '0'"):
        read_torchfile(PATH)


def test_overlapping_records_are_refused():
    torch.save([torch.ones(3), torch.zeros(3)], PATH)
    data = bytearray(PATH.read_bytes())
    first, second = (data.rindex(f"x/data/{key}".encode()) - 46 for key in (0, 1))
    data[second + 42 : second + 46] = data[first + 42 : first + 46]
    PATH.write_bytes(data)
    with refusing(DamagedFileError, "overlaps"):
        read_torchfile(PATH)


def test_truncation_anywhere_is_noticed():
    for legacy in (False, True):
        path = Path(f"{legacy}.pt")
        torch.save([torch.ones(3)], path, _use_new_zipfile_serialization=not legacy)
        data = path.read_bytes()
        for size in range(0, len(data), 7):
            path.write_bytes(data[:size])
            with pytest.raises(SourceError):
                read_torchfile(path)
