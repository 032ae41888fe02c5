"""What was read from a torch file is written again so that the program that wrote it loads equal objects."""

import argparse
import collections
import dataclasses
import decimal
import enum
import os
import pickle
import random
import struct
import subprocess
import sys
import types
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests import plans
from tests.cli.console import FIXTURES, environment
from tests.live import trained
from tests.pairwise import some
from tests.plans import slot_of
from tests.refusals import refusing
from zckpt.engine.plan import plan
from zckpt.errors import LayoutError, UnsupportedError
from zckpt.formats.torch_files.writer import (
    FromFile,
    SlotContent,
    SlotTensor,
    ValueContent,
    ValueTensor,
    lay_out,
    new_storage,
    view,
)
from zckpt.operations.target import write_target
from zckpt.state import Extent
from zckpt.torchfile import (
    Global,
    MemoryFormat,
    OrderedMapping,
    Tensor,
    dump,
    read_pickle,
    read_torchfile,
)

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")

FORMATS = [
    pytest.param({"pickle_protocol": 2}, id="zip-2"),
    pytest.param({"pickle_protocol": 4}, id="zip-4"),
    pytest.param({"_use_new_zipfile_serialization": False}, id="legacy-2"),
    pytest.param({"pickle_protocol": 5}, id="zip-5"),
]
"""Of most contents every run has the first and the third."""


class Stage(enum.IntEnum):
    TWO = 2


class Custom:
    def __init__(self, **attributes):
        self.__dict__.update(attributes)


class Slotted:
    __slots__ = ("rate",)

    def __init__(self, rate):
        self.rate = rate


class Keyed:
    """Made by `__new__` with keyword arguments: NEWOBJ_EX from protocol 4 on."""

    def __new__(cls, first, *, second):
        made = super().__new__(cls)
        made.both = (first, second)
        return made

    def __getnewargs_ex__(self):
        return (self.both[0],), {"second": self.both[1]}


class Called:
    """Made by a function, which keeps what it was called with."""

    def __init__(self, *args):
        self.args = args

    def __reduce__(self):
        return Called, self.args


class Outer:
    class Inner:
        value = 3


class Longer(list):
    pass


class Mapping(dict):
    pass


class Ordered(collections.OrderedDict):
    pass


class Members(set):
    pass


class Tagged(torch.Tensor):
    pass


class SlottedTensor(torch.Tensor):
    __slots__ = ("note",)


class Doubled(torch.Tensor):
    """A wrapper subclass: a shell without data around another tensor."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, strides=inner.stride())

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function, kinds, args=(), kwargs=None):
        return NotImplemented


class OnDevice:
    def __init__(self, data):
        self.data = data

    def __reduce__(self):
        return torch._utils._rebuild_device_tensor_from_cpu_tensor, (self.data, torch.bfloat16, "cpu", True)


def hook(gradient):
    return gradient


ATOMS = (
    bool, int, str, bytes, range, slice, type(None), type, types.FunctionType, types.BuiltinFunctionType, enum.Enum,
    torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, np.dtype, np.generic,
)  # fmt: skip
GENERATORS = np.random.RandomState, np.random.Generator, random.Random


class Same:
    """Holds two object graphs against each other: types, values, and which objects are one object."""

    def __init__(self):
        self.there, self.back, self.kept = {}, {}, []

    def matched(self, a, b):
        """Whether two objects have been compared; they must have been with each other."""
        known = id(a) in self.there
        assert self.there.setdefault(id(a), id(b)) == id(b)
        assert self.back.setdefault(id(b), id(a)) == id(a)
        self.kept.append((a, b))
        return known

    def __call__(self, a, b):
        assert type(a) is type(b)
        if isinstance(a, ATOMS):
            assert a == b or (a != a and b != b)
            assert str(a) == str(b)
        elif isinstance(a, float):
            assert struct.pack("d", a) == struct.pack("d", b)
        elif isinstance(a, complex):
            self((a.real, a.imag), (b.real, b.imag))
        elif isinstance(a, tuple):
            for one, other in zip(a, b, strict=True):
                self(one, other)
        elif isinstance(a, frozenset):
            assert a == b
        elif not self.matched(a, b):
            self.contents(a, b)

    def contents(self, a, b):
        if isinstance(a, torch.Tensor):
            self.tensor(a, b)
        elif isinstance(a, np.ndarray):
            # numpy gives an array of the other byte order the processor's own when it unpickles protocol 2
            assert (a.dtype.newbyteorder("="), a.shape, a.strides) == (b.dtype.newbyteorder("="), b.shape, b.strides)
            self(a.ravel().tolist(), b.ravel().tolist())
        elif isinstance(a, GENERATORS):
            assert pickle.dumps(a) == pickle.dumps(b)
            return
        elif isinstance(a, torch.storage.TypedStorage):
            assert (a.dtype, a.nbytes(), list(a.untyped())) == (b.dtype, b.nbytes(), list(b.untyped()))
            return
        elif isinstance(a, (list, collections.deque)):
            self(tuple(a), tuple(b))
        elif isinstance(a, dict):
            self(tuple(a.items()), tuple(b.items()))
            self(getattr(a, "default_factory", None), getattr(b, "default_factory", None))
        elif isinstance(a, set):
            if all(isinstance(member, (str, int, tuple, bytes, frozenset, type(None))) for member in a):
                assert a == b
            else:
                self(tuple(sorted(a, key=str)), tuple(sorted(b, key=str)))
        elif not hasattr(a, "__dict__") and not hasattr(a, "__slots__"):
            assert a == b
        self(vars(a) if hasattr(a, "__dict__") else None, vars(b) if hasattr(b, "__dict__") else None)
        for name in getattr(type(a), "__slots__", ()):
            self(getattr(a, name), getattr(b, name))

    def tensor(self, a, b):
        assert (a.dtype, a.requires_grad, a.layout, a.device) == (b.dtype, b.requires_grad, b.layout, b.device)
        if a.is_nested:
            self((a.values(), a._nested_tensor_size()), (b.values(), b._nested_tensor_size()))
            return
        assert a.shape == b.shape
        if a.layout is torch.sparse_coo:
            assert a.is_coalesced() == b.is_coalesced()
            self((a._indices(), a._values()), (b._indices(), b._values()))
        elif a.layout is torch.sparse_csr:
            self((a.crow_indices(), a.col_indices(), a.values()), (b.crow_indices(), b.col_indices(), b.values()))
        elif isinstance(a, Doubled):
            assert a.stride() == b.stride()
        else:
            assert (a.stride(), a.storage_offset()) == (b.stride(), b.storage_offset())
            assert (a.is_conj(), a.is_neg(), a.is_quantized) == (b.is_conj(), b.is_neg(), b.is_quantized)
            assert list((a._backward_hooks or {}).items()) == list((b._backward_hooks or {}).items())
            if a.is_quantized:
                assert a.qscheme() == b.qscheme()
                assert torch.equal(a.dequantize(), b.dequantize())
            if a.device.type != "meta":
                one, other = a.untyped_storage(), b.untyped_storage()
                assert one.nbytes() == other.nbytes()
                assert bytes(list(one)) == bytes(list(other))
                if one.nbytes():
                    places = one.data_ptr(), other.data_ptr()
                    assert self.there.setdefault(("storage", places[0]), places[1]) == places[1]
                    assert self.back.setdefault(("storage", places[1]), places[0]) == places[0]


def write(path, root):
    """Write a tree, check the archive as zip and as torch has it, and return our own reading of it."""
    path = Path(path)
    write_target(plan([lay_out(path.name, root)]), path, overwrite=True)
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        assert {info.compress_type for info in archive.infolist()} == {zipfile.ZIP_STORED}
    file = read_torchfile(path)
    assert {record.offset % 64 for record in file.records} == {0}
    assert [record.name for record in file.records if "/data/" in record.name] == [
        f"{path.stem}/data/{key}" for key in range(len(file.storages))
    ]
    assert file.protocol == 2
    return file


def rewrite(source="source.pt", target="target.pt"):
    """Read a file and write it again; return our readings of both."""
    file = read_torchfile(source)
    return file, write(target, FromFile.of(file, file.root))


def load(path="target.pt", **options):
    return torch.load(path, map_location="cpu", **{"weights_only": False, **options})


def outcome(path, **options):
    """What torch.load gives, or the class of its error."""
    try:
        return load(path, **options)
    except pickle.UnpicklingError as error:
        return type(error)


def check_rewritten(source="source.pt", target="target.pt"):
    """Rewrite a file and hold what torch loads from both against each other, in every way of loading."""
    before, after = rewrite(source, target)
    Same()(load(source), load(target))
    Same()(load(source), load(target, mmap=True))
    plainly = outcome(source, weights_only=True)
    if before.protocol == 2 or plainly is not pickle.UnpicklingError:  # it does not know every opcode of later ones
        for mmap in (False, True):
            Same()(plainly, outcome(target, weights_only=True, mmap=mmap))
    again = Path("again", target)
    again.parent.mkdir(exist_ok=True)
    rewrite(target, again)
    if before.protocol == 2:  # what later ones say is spelled in another way
        assert again.read_bytes() == Path(target).read_bytes(), "what we read of ours is not what we read of theirs"
    return before, after


def plain_data():
    value = {
        "numbers": [0, 1, -1, 255, 256, 65535, 65536, -(2**31), 2**31, 2**100, -(2**100), 2**2030, 0.1, -0.0, 1e308],
        "constants": [True, False, None, float("inf"), float("nan")],
        "text": ["", "ascii", "ünïcode \U0001f600", "x" * 300, "lone \ud800 surrogate", "line\nbreak"],
        "bytes": [b"", b"abc\xff", bytearray(b"xyz"), bytearray(), b"y" * 300],
        ("tuple", 1, (2,)): ((), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)),
        3: {1, 2, "three", None, b"four", 5.0},
        "empty": [set(), frozenset(), [], {}, ()],
        frozenset([1]): frozenset(["a", (1, 2)]),
        "others": [1j, complex("nan"), slice(1, 2), slice(None, None, -1), range(0, 9, 2), [[]], {}],
    }
    value["again"] = [value["text"], value["bytes"][2], value["bytes"], value]
    return value


def mappings():
    default = collections.defaultdict(list, {1: [2]})
    state_dict = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3)).state_dict()
    bare = collections.defaultdict()
    bare["only"] = bare
    counts = collections.Counter("abca")
    return [default, bare, collections.OrderedDict(a=1), state_dict, argparse.Namespace(), default, counts]


def namespaces():
    namespace = argparse.Namespace(lr=0.1, names=["x"], tensor=torch.ones(2))
    namespace.self = namespace
    return [namespace, namespace]


def torch_values():
    return [torch.Size([2, 3]), torch.Size([]), torch.float16, torch.float8_e5m2, torch.device("cuda:1"),
            torch.device("cpu"), torch.sparse_coo, torch.strided, torch.Tensor, torch.nn.functional.relu]  # fmt: skip


def objects():
    longer, mapping, ordered = Longer([1, [2]]), Mapping(a=1), Ordered(b=2)
    longer.note = mapping.note = ordered.note = "kept"
    keyed = Keyed(1, second=[2])
    keyed.more = keyed
    return [Stage.TWO, Custom(rate=0.5), Slotted(0.25), Called(1, [2]), longer, mapping, ordered, keyed, Outer.Inner,
            Outer.Inner(), collections.deque([1, 2], 3), Members({1, 2}), decimal.Decimal("1.50"), random.Random(4),
            torch.nn.Linear(2, 3), torch.optim.lr_scheduler.LambdaLR, Custom()]  # fmt: skip


def cycles():
    items, mapping, custom, called = [], {}, Custom(), Called([])
    items.append(items)
    mapping["self"] = mapping
    custom.self = [custom]
    called.args[0].append(called)
    through_tuple = ([], 1)
    through_tuple[0].append(through_tuple)
    long_tuple = ([], 1, 2, 3, 4)
    long_tuple[0].append(long_tuple)
    member = Custom()
    member.within = {member}
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.self = [parameter]
    return [parameter, items, mapping, custom, through_tuple, long_tuple, member, called, member.within, items]


def arrays():
    shared = np.arange(3)
    objects_array = np.array([None, "x", [3], shared], dtype=object)
    objects_array[0] = objects_array
    columns = np.asfortranarray(np.array([["a", None]] * 3, dtype=object))
    return [np.arange(6, dtype="<i4").reshape(2, 3), np.asfortranarray(np.ones((2, 3))), np.array("text"), shared,
            np.zeros((0, 2)), np.array([1 + 2j]), np.array(5, ">u2"), np.array([True, False]), objects_array, shared,
            np.array([(1, 2.0)], dtype="i4,f8"), np.arange(24).reshape(2, 3, 4)[:, ::2], np.array([b"ab", b"c"]),
            np.array(["2020-01-01"], dtype="M8[D]"), columns,
            np.rec.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")])]  # fmt: skip


def scalars():
    return [np.float32(1.5), np.float16(2), np.float64("nan"), np.longdouble(0.1), np.int64(-3), np.uint8(7),
            np.bool_(True), np.complex64(1j), np.str_("é"), np.bytes_(b"ab"), np.void(b"\x01\x02"),
            np.datetime64("2020-01-01"), np.array((1, 2.0), dtype="i4,f8")[()], np.dtype("f4"), np.dtype(">i8"),
            np.dtype([("a", "i4"), ("b", "U3")])]  # fmt: skip


def random_states():
    return {
        "numpy": np.random.RandomState(3).get_state(),
        "legacy": np.random.RandomState(4),
        "generator": np.random.default_rng(6),
        "python": random.Random(5).getstate(),
        "torch": torch.get_rng_state(),
    }


def views():
    base = torch.arange(60.0).reshape(3, 4, 5)
    return [base, base.T, base[1:, ::2], base[:, :, 3], base[0, 0, 0], base[:0], torch.ones(1).expand(4, 3),
            base[:, None], torch.empty(0), torch.empty(2, 0), torch.tensor(7), base]  # fmt: skip


def element_types():
    return of_types("float64 float32 float16 bfloat16 int64 int32 int16 int8 uint8 bool complex64 complex128")


def newer_element_types():
    names = "float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu uint16 uint32 uint64 complex32"
    frozen = torch.nn.Parameter(torch.ones(3, dtype=torch.float8_e5m2), requires_grad=False)
    return [of_types(names), frozen]


def of_types(names):
    types_ = {name: getattr(torch, name) for name in names.split()}
    made = {name: torch.arange(5 * t.itemsize).remainder(2).to(torch.uint8).view(t) for name, t in types_.items()}
    return {**made, **{f"{name}, a part": tensor[2:4] for name, tensor in made.items()}}


def parameters():
    plain, frozen = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2), requires_grad=False)
    with_state, attributed = torch.nn.Parameter(torch.ones(3)), torch.ones(4)
    gradient = torch.ones(5, requires_grad=True)
    with_state.ds_id, attributed.ds_id, attributed.plain = 4, 5, plain
    return [plain, frozen, with_state, attributed, gradient, plain]


def subclasses():
    tagged, untagged = torch.ones(5).as_subclass(Tagged), torch.ones(5).as_subclass(Tagged)
    tagged.note = "kept"
    slotted = torch.ones(5).as_subclass(SlottedTensor)
    slotted.note = ["in a slot"]
    return [tagged, untagged, slotted, tagged]


def flagged():
    numbers = torch.tensor([1 + 2j, 3 - 4j])
    negative = torch.ones(2, dtype=torch.complex64).conj().imag
    return [numbers.conj(), negative, numbers, torch.nn.Parameter(numbers.conj())]


def other_tensors():
    dense = torch.eye(3)
    row_index = torch.tensor([[0, 0], [1, 1]])
    return [dense.to_sparse(), torch.sparse_coo_tensor(row_index, torch.ones(2), (2, 2)), dense.to_sparse_csr(),
            torch.quantize_per_tensor(dense, 0.1, 3, torch.qint8),
            torch.quantize_per_channel(dense, torch.ones(3), torch.zeros(3), 0, torch.quint8),
            torch.empty(3, 4, device="meta"), torch.nn.Parameter(torch.empty(2, device="meta")),
            Doubled(torch.ones(2, 3))]  # fmt: skip


def computed_tensors():
    return [torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), OnDevice(torch.ones(2))]


def storages():
    tensor = torch.arange(4.0)
    return [tensor, tensor.storage(), torch.arange(3, dtype=torch.uint8).storage()]  # fmt: skip


def training():
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 4))
    model[2].weight = torch.nn.Parameter(model[2].weight.detach())
    _, optimizer = trained(model)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "lr": scheduler.state_dict(), "step": 1}


CONTENTS = [plain_data, mappings, namespaces, torch_values, objects, cycles, arrays, scalars, random_states, views,
            element_types, parameters, subclasses, flagged, other_tensors, storages, training]  # fmt: skip
ONLY_IN_ZIP = [newer_element_types, computed_tensors]  # torch cannot load these from legacy files
FOR_WEIGHTS_ONLY = [training, element_types, newer_element_types, views, parameters]
CASES = [
    pytest.param(content, options.values[0], id=f"{content.__name__}-{options.id}")
    for content in [*CONTENTS, *ONLY_IN_ZIP]
    for options in FORMATS
    if content in CONTENTS or options.id != "legacy-2"
]


@pytest.mark.parametrize(("content", "options"), CASES)
@pytest.mark.every(3)
def test_what_torch_saved_is_loaded_equal_from_our_file(content, options):
    torch.save(content(), "source.pt", **options)
    before, after = check_rewritten()
    if options.get("pickle_protocol") == 2:
        assert after.globals == before.globals
        if content in FOR_WEIGHTS_ONLY:
            assert outcome("target.pt", weights_only=True) is not pickle.UnpicklingError


def test_backward_hooks():
    tensor = torch.ones(2)
    args = (tensor._typed_storage(), 0, (2,), (1,), True, collections.OrderedDict({3: hook}))

    class Hooked:
        def __reduce__(self):
            return torch._utils._rebuild_tensor_v2, args

    torch.save([Hooked()], "source.pt")
    check_rewritten()
    assert list(load()[0]._backward_hooks.values()) == [hook]


def reloaded(data):
    """What Python unpickles from our pickle of what we read from its pickle."""
    Path("x.pkl").write_bytes(data)
    return pickle.loads(dump(read_pickle(Path("x.pkl")).root).data)


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("content", [plain_data, objects, cycles, arrays, scalars])
def test_every_protocol(content, protocol):
    value = content()
    if content is objects:
        unfit = (torch.nn.Module,) if protocol > 1 else (torch.nn.Module, Slotted)
        value = [one for one in value if not isinstance(one, unfit)]
    if content is cycles:
        value = [one for one in value if not isinstance(one, (torch.Tensor, set) if protocol < 2 else torch.Tensor)]
    data = pickle.dumps(value, protocol)
    Same()(pickle.loads(data), reloaded(data))


@pytest.mark.parametrize(
    "data",
    [
        b"(cdecimal\nDecimal\nX\3\0\0\0" + b"1.5o.",
        b"(X\3\0\0\0" + b"1.5idecimal\nDecimal\n.",
        b"(iargparse\nNamespace\n(dX\1\0\0\0aK\1sb.",
    ],
)
def test_instances_of_old_protocols(data):
    Same()(pickle.loads(data), reloaded(data))


def test_memory_formats_and_globals_by_name():
    names = [(__name__, "Outer.Inner"), ("builtins", "len"), ("os", "path.join")]
    tree = [MemoryFormat("channels_last"), *(Global(module, name) for module, name in names)]
    assert pickle.loads(dump(tree).data) == [torch.channels_last, Outer.Inner, len, os.path.join]


@pytest.mark.parametrize("module", ["numpy.core.multiarray", "numpy._core.multiarray"])
def test_numpy_functions_keep_the_name_that_the_file_has_for_them(module):
    torch.save([np.arange(3), np.float32(1), np.datetime64("2020-01-01")], "source.pt")
    file = read_torchfile("source.pt")
    (names,) = file.globals.values()
    file.globals = {"data.pkl": tuple(name.replace("numpy._core.multiarray", module) for name in names)}
    after = write("target.pt", FromFile.of(file, file.root))
    assert after.globals == file.globals
    Same()(load("source.pt"), load())


def test_globals_allowed_by_the_user_are_found_by_weights_only():
    torch.save(np.arange(3.0), "source.pt")
    rewrite()
    allowed = [np._core.multiarray._reconstruct, np.ndarray, np.dtype, type(np.dtype("f8"))]
    with torch.serialization.safe_globals(allowed):
        assert load(weights_only=True).tolist() == [0, 1, 2]


def test_location_is_kept():
    torch.save([torch.ones(2), torch.zeros(3)], "source.pt")
    file = read_torchfile("source.pt")
    there = dataclasses.replace(file.root[0].storage, location="cuda:3")
    file.root[0] = dataclasses.replace(file.root[0], storage=there)
    after = write("target.pt", FromFile.of(file, file.root))
    assert [node.storage.location for node in after.root] == ["cuda:3", "cpu"]
    Same()([torch.ones(2), torch.zeros(3)], load())


def test_depth_is_no_matter():
    tree = []
    for _ in range(5_000):
        tree = [tree]
    loaded = pickle.loads(dump(tree).data)
    for _ in range(5_000):
        (loaded,) = loaded
        (tree,) = tree
    assert loaded == tree == []


def as_big_endian(path):
    """Turn a file that torch wrote into what a big-endian machine would have written."""
    with zipfile.ZipFile(path) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    sizes = {storage.key: storage.dtype for storage in read_torchfile(path).storages.values()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in records.items():
            if "/data/" in name:
                dtype = getattr(torch, sizes[name.rpartition("/")[2]])
                size = dtype.itemsize // (2 if dtype.is_complex else 1)
                archive.writestr(name, np.frombuffer(data, f"u{size}").byteswap().tobytes())
            else:
                archive.writestr(name, b"big" if name.endswith("/byteorder") else data)


def test_big_endian_source_is_written_little_endian():
    tensor = torch.arange(6, dtype=torch.int32)
    value = [tensor, tensor[2:], torch.ones(3, dtype=torch.complex64) * 2j, torch.ones(2, dtype=torch.bool),
             torch.tensor([1.5, 2]).storage()]  # fmt: skip
    torch.save(value, "source.pt")
    as_big_endian("source.pt")
    _, after = rewrite()
    assert after.byteorder == "little"
    Same()(value, load())


def test_untyped_storage_of_a_big_endian_file_has_the_order_of_its_tensors():
    torch.save([torch.tensor([0, 1, 2, 3], dtype=torch.uint16)], "source.pt")
    file = read_torchfile("source.pt")
    raw = bytearray(Path("source.pt").read_bytes())
    storage = file.root[0].storage
    raw[storage.offset : storage.offset + 8] = np.arange(4, dtype=">u2").tobytes()
    Path("source.pt").write_bytes(raw)
    root = [dataclasses.replace(file.root[0], byteorder="big")]
    write("target.pt", FromFile(root, file.path, "big"))
    Same()([torch.tensor([0, 1, 2, 3], dtype=torch.uint16)], load())
    root.append(dataclasses.replace(root[0], dtype="uint32", shape=(2,)))
    with refusing(UnsupportedError, "uint16, uint32"):
        lay_out("target.pt", FromFile(root, file.path, "big"))


def test_parts_of_two_files_in_one():
    torch.save({"t": torch.ones(2)}, "a.pt")
    torch.save({"t": torch.zeros(2)}, "b.pt")
    a, b = read_torchfile("a.pt"), read_torchfile("b.pt")
    root = {"a": FromFile.of(a, a.root["t"]), "b": FromFile.of(b, b.root["t"]), "again": FromFile.of(a, a.root)}
    write("c.pt", root)
    loaded = load("c.pt", weights_only=True)
    assert torch.equal(loaded["a"], torch.ones(2))
    assert torch.equal(loaded["b"], torch.zeros(2))
    assert loaded["again"]["t"] is loaded["a"]


@pytest.fixture
def stored():
    """A slot of 6 float32 values, 0 to 5, that lies in a file."""
    return slot_of(plans.stored("values", np.arange(6, dtype="<f4").reshape(2, 3)))


def test_views_of_one_new_storage_with_padding(stored):
    shape = stored.shape
    parts = [
        SlotContent(2, stored, "weight/w"),
        ValueContent(8, struct.pack("<f", 7)),
        SlotContent(12, stored, "weight/tail", Extent.flat(shape, 4, 2)),
    ]
    flat = new_storage("float32", 16, parts)
    root = OrderedMapping()
    root |= {"w": view(flat, shape, start=2), "t": view(flat, (3, 2), start=2, strides=(1, 3))}
    root |= {"one": view(flat, (), start=8), "partition": view(flat, (14,)), "empty": view(flat, (0, 3), start=16)}
    write("new.pt", root)
    for options in ({}, {"mmap": True}):
        loaded = load("new.pt", weights_only=True, **options)
        expected = [0, 0, 0, 1, 2, 3, 4, 5, 7, 0, 0, 0, 4, 5]
        assert loaded["partition"].tolist() == expected
        assert loaded["partition"].untyped_storage().nbytes() == 64
        assert loaded["w"].tolist() == [[0, 1, 2], [3, 4, 5]]
        assert loaded["t"].tolist() == [[0, 3], [1, 4], [2, 5]]
        assert loaded["one"].item() == 7
        assert loaded["empty"].shape == (0, 3)
        assert len({tensor.untyped_storage().data_ptr() for tensor in loaded.values()}) == 1


@pytest.mark.parametrize("gap", [1, 2**20 - 1, 3 * 2**20 + 5])
def test_checksum_counts_what_no_part_fills(stored, gap):
    storage = new_storage("bfloat16", 12 + gap, [SlotContent(0, stored, "a"), SlotContent(6 + gap, stored, "b")])
    file = write("new.pt", {"flat": view(storage, (12 + gap,))})
    (record,) = [record for record in file.records if "/data/" in record.name]
    values = b"".join(np.float32(v).tobytes()[2:] for v in range(6))
    assert record.crc32 == zlib.crc32(values + bytes(2 * gap) + values)
    flat = load("new.pt", weights_only=True)["flat"]
    assert (flat.dtype, flat[:6].tolist(), flat[6:-6].any().item()) == (torch.bfloat16, [0, 1, 2, 3, 4, 5], False)
    assert flat[-6:].tolist() == [0, 1, 2, 3, 4, 5]


def test_storage_of_nothing_but_zeros_or_values():
    zeros = new_storage("int64", 3)
    values = new_storage("int16", 4, [ValueContent(3, b"\1\0"), ValueContent(0, b"\2\0\3\0")])
    write("new.pt", [view(zeros, (3,)), view(values, (4,)), view(new_storage("int8", 0), (0,))])
    loaded = load("new.pt", weights_only=True)
    assert [tensor.tolist() for tensor in loaded] == [[0, 0, 0], [2, 3, 0, 1], []]


@pytest.mark.parametrize("dtype", ["float32", "float8_e5m2"])
def test_new_tensor_has_the_class_and_attributes_of_the_old(stored, dtype):
    parameter = torch.nn.Parameter(torch.ones(4))
    attributed, gradient = torch.ones(4), torch.ones(4, requires_grad=True)
    parameter.ds_id, attributed.ds_id = 1, 2
    tensors = [parameter, attributed, torch.ones(4).as_subclass(Tagged)]
    if dtype == "float32":  # torch loads no other tensor with a gradient of the newer types than a parameter
        tensors.append(gradient)
    torch.save(tensors, "source.pt")
    file = read_torchfile("source.pt")
    storage = new_storage(dtype, 6, [SlotContent(0, stored, "weight")])
    root = [view(storage, (3,), start=index % 2, like=old) for index, old in enumerate(file.root)]
    write("target.pt", FromFile.of(file, root))
    for index, (old, new) in enumerate(zip(load("source.pt"), load(), strict=True)):
        assert (type(new), new.requires_grad, vars(new)) == (type(old), old.requires_grad, vars(old))
        assert str(new.dtype) == f"torch.{dtype}"
        assert new.detach().float().tolist() == [0 + index % 2, 1 + index % 2, 2 + index % 2]


def test_slot_tensors_share_a_storage_and_value_tensors_hold_their_value(stored):
    slot, step = SlotTensor(stored, "float16", "weight/w"), ValueTensor(struct.pack("<f", 5), "float32", ())
    beside = {"step": step, "same": step, "empty": ValueTensor(b"", "int64", (0,))}
    write("new.pt", {"a": slot, "tied": slot, "own": SlotTensor(stored, "float32", "w"), **beside})
    loaded = load("new.pt", weights_only=True)
    assert loaded["a"].data_ptr() == loaded["tied"].data_ptr() != loaded["own"].data_ptr()
    assert (loaded["a"].dtype, loaded["a"].tolist()) == (torch.float16, [[0, 1, 2], [3, 4, 5]])
    assert (loaded["step"].shape, loaded["step"].item()) == ((), 5)
    assert loaded["step"].data_ptr() == loaded["same"].data_ptr()
    assert (loaded["empty"].shape, loaded["empty"].dtype) == ((0,), torch.int64)


def test_what_cannot_be_laid_out_is_refused(stored):
    slot = SlotContent(0, stored, "weight")
    for parts in ([slot, SlotContent(5, stored, "b")], [SlotContent(5, stored, "b")], [ValueContent(0, b"abc")]):
        with pytest.raises(LayoutError):
            new_storage("float32", 10, parts)
    with pytest.raises(LayoutError):
        view(new_storage("float32", 10, [slot]), (3, 3), start=2)
    torch.save([torch.ones(2)], "source.pt")
    with refusing(UnsupportedError, "a tensor of an unnamed file"):
        lay_out("x.pt", read_torchfile("source.pt").root)
    for node in (object(), torch.ones(2), 1 + 2j * np.float32(1), Stage.TWO, Global("a\nb", "c")):
        with pytest.raises(UnsupportedError):
            lay_out("x.pt", [node])


IN_A_PROCESS = """
import sys
from zckpt.torchfile import plain, read_torchfile

file = read_torchfile(sys.argv[1])
plain(file.root)
assert not {"torch", "numpy", "pickle", "zipfile"} & set(sys.modules)

from zckpt.formats.torch_files.writer import FromFile, lay_out

made = lay_out("x.pt", FromFile.of(file, file.root))
sys.stdout.buffer.write(b"".join(literal.data for literal in made.literals))
assert not {"torch", "numpy"} & set(sys.modules)
"""


def test_the_same_tree_gives_the_same_bytes_in_every_process_which_imports_neither_torch_nor_numpy():
    tree = {"names": {f"name {number}" for number in range(50)}, "t": torch.ones(2), "a": np.ones(2)}
    torch.save(tree, "source.pt")
    command = [sys.executable, "-c", IN_A_PROCESS, "source.pt"]
    seeded = [{**environment(), "PYTHONHASHSEED": seed} for seed in "12"]
    first, second = (subprocess.run(command, env=one, capture_output=True, check=True).stdout for one in seeded)
    assert first == second != b""


def test_each_storage_is_written_once_in_the_order_of_its_first_mention():
    first, second = torch.ones(2), torch.zeros(3)
    torch.save([second[1:], first, second], "source.pt")
    _, after = rewrite()
    assert [storage.nbytes for storage in after.storages.values()] == [12, 8]
    assert [node.storage.key for node in after.root] == ["0", "1", "0"]
    assert isinstance(after.root[0], Tensor)


values = st.one_of(
    st.none(), st.booleans(), st.integers(), st.integers(-(2**2000), 2**2000), st.floats(), st.complex_numbers(),
    st.text(), st.text(st.characters()), st.binary(), st.builds(bytearray, st.binary()), st.slices(9),
    st.builds(range, st.integers(0, 9)),
)  # fmt: skip
hashables = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(), st.binary())


@st.composite
def graphs(draw):
    """Plain data in which containers refer to earlier values, so that some are shared, and at times to themselves."""
    made = draw(st.lists(values, min_size=1, max_size=4))
    for _ in range(draw(st.integers(0, 8))):
        kind = draw(st.sampled_from(["list", "tuple", "dict", "set", "frozenset", "loop"]))
        chosen = draw(st.lists(st.sampled_from(range(len(made))), max_size=5))
        parts = [made[index] for index in chosen]
        keys = draw(st.lists(hashables, min_size=len(parts), max_size=len(parts), unique=True))
        if kind == "dict":
            made.append(dict(zip(keys, parts, strict=True)))
        elif kind == "tuple":
            made.append(tuple(parts))
        elif kind in ("set", "frozenset"):
            made.append((set if kind == "set" else frozenset)(keys))
        else:
            made.append(parts)
            if kind == "loop":
                made[-1].append((made[-1],))
    return made


@given(graphs())
def test_any_plain_data_is_unpickled_equal(graph):
    Same()(graph, pickle.loads(dump(graph).data))


OTHER_FILES = sorted((FIXTURES / "other").glob("plain_*/**/*.pt"))


@pytest.mark.parametrize("path", OTHER_FILES, ids=lambda path: str(path.relative_to(FIXTURES / "other")))
@pytest.mark.every(2)
def test_real_torch_files_are_loaded_equal(path):
    check_rewritten(path)


RUNS = [
    "s2_bf16_dp2_client", "s3_bf16_dp2", "moe_ep2_s2_fp32_dp4", "s1_bf16_dp2_elastic", "s1_bf16_dp2_bf16opt",
    "s2_fp16_dp2", "s3_fp16_dp2", "s0_fp32_dp2", "tp2_s1_bf16_dp2", "pp2_s1_bf16_dp1", "ds0145_s2_bf16_dp4",
    "ds0145_s3_bf16_dp2", "s2_bf16_dp2_ucinfo",
]  # fmt: skip


@pytest.mark.interop
@pytest.mark.parametrize("run", some(RUNS[-1:], RUNS[:-1]))
def test_deepspeed_unpickles_its_own_classes_from_our_files(run, monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    import deepspeed  # noqa: F401  # its classes are named by the files

    files = sorted((FIXTURES / run).rglob("*_states.pt"))
    assert files
    for path in files:
        before, after = check_rewritten(path, path.name)
        assert after.globals == before.globals
        assert sum(s.nbytes for s in after.storages.values()) == sum(s.nbytes for s in before.storages.values())


@pytest.mark.interop
def test_deepspeed_objects_have_their_types(monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    (path,) = (FIXTURES / "s2_bf16_dp2_client").rglob("bf16_zero_pp_rank_0_*")
    rewrite(path)
    state = load()["optimizer_state_dict"]
    assert state["zero_stage"] is ZeroStageEnum.gradients
    assert type(state["loss_scaler"]).__name__ == "LossScaler"
    assert all(type(one) is fragment_address for group in state["param_slice_mappings"] for one in group.values())
    (path,) = (FIXTURES / "s2_bf16_dp2_client").rglob("mp_rank_00_*")
    rewrite(path, "model.pt")
    weights = load("model.pt")["module"].values()
    assert len({tensor.untyped_storage().data_ptr() for tensor in weights}) < len(weights)
