"""Files made to harm their reader: each is refused with one clear error, and nothing in them ever runs."""

import collections
import functools
import io
import json
import os
import pickle
import struct
import tracemalloc
import zipfile
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.refusals import refusing
from tests.torchfile.in_memory import read_torchbytes
from zckpt.errors import DamagedFileError, PickleError, UnsupportedError, ZckptError
from zckpt.torchfile import Object, plain, read_torchfile, walk_tensors

MANY = 6_000


def archive(data, storages=()):
    """A torch zip archive around any pickle."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        file.writestr("x/data.pkl", data)
        for key, content in storages:
            file.writestr(f"x/data/{key}", content)
    return buffer.getvalue()


def read(data, storages=()):
    return read_torchbytes(archive(data, storages), path="x.pt")


def text(value):
    encoded = value.encode()
    return b"X" + struct.pack("<I", len(encoded)) + encoded


def integer(value):
    raw = value.to_bytes((value.bit_length() + 8) // 8, "little", signed=True)
    return b"\x8a" + bytes([len(raw)]) + raw


def storage(numel=b"K\x04", key="0", cls=b"ctorch\nFloatStorage\n"):
    return b"(" + text("storage") + cls + text(key) + text("cpu") + numel + b"tQ"


def tensor(*, start=b"K\0", shape=b"K\x04\x85", strides=b"K\x01\x85", pid=None, function=b"_rebuild_tensor_v2"):
    return (
        b"ctorch._utils\n" + function + b"\n(" + (pid or storage()) + start + shape + strides
        + b"\x89ccollections\nOrderedDict\n)RtR."
    )  # fmt: skip


MALFORMED = {
    "empty": b"",
    "no STOP": b"\x80\x02]",
    "two STOPs": b"N..",
    "nothing at STOP": b".",
    "two objects at STOP": b"NN.",
    "open mark at STOP": b"(N.",
    "unknown opcode": b"\xffN.",
    "protocol 6": b"\x80\x06N.",
    "underflow of APPEND": b"]a.",
    "underflow of REDUCE": b")R.",
    "underflow of TUPLE3": b"NN\x87.",
    "underflow of BINPUT": b"q\0.",
    "underflow of DUP": b"2.",
    "underflow of BUILD": b"Nb.",
    "APPENDS without a mark": b"]Ne.",
    "TUPLE without a mark": b"Nt.",
    "pop of nothing": b"0N.",
    "unset memo entry": b"h\x05.",
    "unset memo entry as text": b"g99999999\n.",
    "memo index that is no number": b"Np-x\n.",
    "dict with a key alone": b"}(Nu.",
    "list as a key": b"}]Ns.",
    "dict as a key": b"}}Ns.",
    "set member that is a list": b"\x8f(]\x90.",
    "list in a tuple as a key": b"}]\x85Ns.",
    "SETITEM on a list": b"]NNs.",
    "APPEND to a dict": b"}Na.",
    "APPEND to a tuple": b")Na.",
    "BUILD on a list": b"]}b.",
    "BUILD on a string": text("a") + b"}b.",
    "two states": b"cm\nC\n)\x81}b}b.",
    "call of a string": text("os.system") + b")R.",
    "call of a list": b"])R.",
    "call without a tuple": b"cm\nf\nNR.",
    "NEWOBJ of None": b"N)\x81.",
    "OBJ without a class": b"(o.",
    "global named by numbers": b"K\x01K\x02\x93.",
    "persistent id as text": b"Pid\n.",
    "persistent id that is no tuple": b"K\x01Q.",
    "persistent id of another kind": b"(" + text("module") + b"NNNNtQ.",
    "string that is not UTF-8": b"X\x02\0\0\0\xff\xfe.",
    "string without quotes": b"Sabc\n.",
    "number that is none": b"Fabc\n.",
    "integer that is none": b"Iabc\n.",
    "BINUNICODE8 of 2**60 bytes": b"\x8d" + struct.pack("<Q", 1 << 60) + b"x.",
    "BINBYTES8 of 2**60 bytes": b"\x8e" + struct.pack("<Q", 1 << 60) + b"x.",
    "BYTEARRAY8 of 2**63 bytes": b"\x96" + struct.pack("<Q", 1 << 63) + b"x.",
    "FRAME of 2**60 bytes": b"\x80\x04\x95" + struct.pack("<Q", 1 << 60) + b"N.",
    "LONG4 of 2 GB": b"\x8b" + struct.pack("<I", 1 << 31) + b"x.",
    "LONG4 of a megabyte": b"\x8b" + struct.pack("<I", 1 << 20) + b"\x01" * (1 << 20) + b".",
    "INT of a megabyte of digits": b"I" + b"9" * (1 << 20) + b"\n.",
    "LONG of a megabyte of digits": b"L" + b"9" * (1 << 20) + b"L\n.",
    "GLOBAL without end": b"c" + b"m" * (1 << 20),
    "nested lists": b"]" * MANY + b"a" * (MANY - 1) + b".",
    "nested tuples": b"N" + b"\x85" * MANY + b".",
    "nested dicts": b"}" + b"N}" * MANY + b"s" * MANY + b".",
    "nested calls": b"cm\nf\n" + b")R" * MANY + b".",
    "nested marks": b"(" * MANY,
    "deep list built backwards": b"".join(b"]r" + struct.pack("<I", i) + b"0" for i in range(300))
    + b"".join(b"j" + struct.pack("<I", i) + b"j" + struct.pack("<I", i + 1) + b"a0" for i in range(299))
    + b"j\0\0\0\0.",
    "deep state of a dtype": b"cnumpy\ndtype\n" + text("f4") + b"\x89\x88\x87R" + b")" + b"\x85" * 1000 + b"b.",
    "deep tuple as a key": b"}N" + b"\x85" * MANY + b"Ns.",
    "wide tuple as a key": b"}(" + b"N" * MANY + b"tNs.",
    "key of 2**60 parts": b"}N" + b"\x85q\0h\0\x86" * 60 + b"Ns.",
    "a key that is hashed too often": b"}(" + b"N" * 900 + b"tq\0Ns" + b"0}h\0Ns" * 400 + b".",
    "colliding integers": b"}(" + b"".join(integer(i * ((1 << 61) - 1)) + b"N" for i in range(1, 100)) + b"u.",
    "colliding tuples": b"}("
    + b"".join(
        b"(" + b"".join(b"J" + struct.pack("<i", -1 - (i >> bit & 1)) for bit in range(8)) + b"tN" for i in range(256)
    )
    + b"u.",
    "set copied again and again": b"]q\0(" + b"".join(b"M" + struct.pack("<H", i) for i in range(20_000)) + b"e0"
    + b"c__builtin__\nset\nq\x010](" + b"h\x01h\0\x85R" * 100 + b"e.",
    "text encoded again and again": text("x" * MANY) + b"q\0" + text("latin1") + b"\x86q\0"
    + b"c_codecs\nencode\nq\x0100](" + b"h\x01h\0R" * 100 + b"e.",
    "too many globals": b"](" + b"".join(b"cm\nn%d\n" % i for i in range(5000)) + b"e.",
    "bytes of a length": b"c__builtin__\nbytes\n" + integer(1 << 60) + b"\x85R.",
    "bytearray of a length": b"c__builtin__\nbytearray\n" + integer(1 << 60) + b"\x85R.",
    "encode to another codec": b"c_codecs\nencode\n" + text("x") + text("zip") + b"\x86R.",
    "OrderedDict of numbers": b"ccollections\nOrderedDict\nK\x01\x85R.",
    "device that is a number": b"ctorch\ndevice\nK\x01\x85R.",
    "Size of strings": b"ctorch\nSize\n" + text("a") + b"\x85\x85R.",
    "numpy array with too little data": b"cnumpy.core.multiarray\n_reconstruct\n"
    + b"cnumpy\nndarray\nK\0\x85C\x01b\x87R(K\x01" + integer(1 << 40)
    + b"\x85cnumpy\ndtype\n" + text("f8") + b"\x89\x88\x87R\x89C\x01xtb.",
    "tensor without storage": tensor(pid=b"N"),
    "tensor past its storage": tensor(shape=b"K\x05\x85"),
    "tensor beyond its storage by its offset": tensor(start=b"K\x01"),
    "tensor beyond its storage by its stride": tensor(strides=b"K\x02\x85"),
    "tensor of negative size": tensor(shape=b"J\xff\xff\xff\xff\x85"),
    "tensor of negative stride": tensor(strides=b"J\xff\xff\xff\xff\x85"),
    "tensor of negative offset": tensor(start=b"J\xff\xff\xff\xff"),
    "tensor of 2**64 elements": tensor(shape=integer(1 << 64) + b"\x85", strides=b"K\0\x85"),
    "tensor of 2**120 elements": tensor(
        shape=integer(1 << 60) + integer(1 << 60) + b"\x86", strides=b"K\0K\0\x86"
    ),
    "tensor of 100 dimensions": tensor(shape=b"(" + b"K\x01" * 100 + b"t", strides=b"(" + b"K\0" * 100 + b"t"),
    "tensor with more strides than sizes": tensor(strides=b"K\x01K\x01\x86"),
    "tensor of floating size": tensor(shape=b"G" + struct.pack(">d", 4.0) + b"\x85"),
    "tensor with too few arguments": b"ctorch._utils\n_rebuild_tensor_v2\n)R.",
    "storage of negative size": storage(b"J\xff\xff\xff\xff") + b".",
    "storage of 2**100 elements": storage(integer(1 << 100)) + b".",
    "storage of another size than its record": storage(b"K\x05") + b".",
    "storage without a record": storage(key="9") + b".",
    "storage outside of its folder": storage(key="../data.pkl") + b".",
    "storage mentioned with two dtypes": b"]" + storage() + b"a" + storage(cls=b"ctorch\nIntStorage\n") + b"a.",
    "unknown storage class": storage(cls=b"cevil\nStorage\n") + b".",
}  # fmt: skip

UNSUPPORTED = {
    "extension registry": b"\x82\x01.",
    "buffer out of band": b"\x80\x05\x97.",
    "unknown dtype": tensor(function=b"_rebuild_tensor_v3")[:-3] + b"ctorch\nfloat99\ntR.",
}


@pytest.mark.parametrize("data", MALFORMED.values(), ids=MALFORMED)
def test_hostile_pickle_is_refused(data):
    tracemalloc.start()
    try:
        with pytest.raises(PickleError) as caught:
            read(data, [("0", bytes(16))])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < (16 << 20) + 300 * len(data)
    message = str(caught.value)
    assert message.startswith("x.pt: ")
    assert "data.pkl" in message
    assert len(message) < 500


@pytest.mark.parametrize("data", UNSUPPORTED.values(), ids=UNSUPPORTED)
def test_what_cannot_be_represented_is_refused(data):
    with refusing(UnsupportedError, r"x\.pt: data\.pkl"):
        read(data, [("0", bytes(16))])


def test_honest_forms_of_the_attacks_are_read():
    assert read(b"N" + b"\x85" * 150 + b".").root is not None
    assert read(tensor(), [("0", bytes(16))]).root.shape == (4,)
    assert len(read(b"}(" + b"".join(integer(i) + b"N" for i in range(5000)) + b"u.").root) == 5000
    assert read(b"Nr\xff\xff\xff\xff0j\xff\xff\xff\xff.").root is None
    assert read(b"I" + b"9" * 1000 + b"\n.").root == int("9" * 1000)


def test_a_graph_of_2_to_the_60_paths_is_not_expanded():
    data = b"]q\0" + b"0(h\0h\0lq\0" * 100 + b"."
    root = read(data).root
    assert list(walk_tensors(root)) == []
    assert len(json.dumps(plain(root, limit=1000))) < 10_000


def test_a_cycle_is_read_and_shown_once():
    root = read(b"]q\0h\0a.").root
    assert root[0] is root
    assert plain(root) == ["<cycle>"]


class Calls:
    """Pickles as a call of any function."""

    def __init__(self, function, *args):
        self.call = (function, args)

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_payload_never_runs(tmp_path, protocol):
    """Other payloads are in `tests/test_safety.py`."""
    touch = f"touch {tmp_path / 'sentinel'}"
    called = Calls(torch._tensor._rebuild_from_type_v2, os.system, torch.Tensor, (touch,), {})
    factory = collections.defaultdict(functools.partial(os.system, touch), {1: 2})
    root = read(
        pickle.dumps(
            [called, factory, Calls(type, "X", (), {"__del__": os.system}), Calls(functools.partial(os.system, touch))],
            protocol,
        )
    ).root
    plain(root)
    list(walk_tensors(root))
    repr(root)
    assert list(tmp_path.iterdir()) == []


def test_payload_stays_an_inert_node(tmp_path):
    path = Path("x.pt")
    for legacy in (False, True):
        torch.save(
            {"w": torch.ones(1), "x": Calls(os.system, f"touch {tmp_path}/sentinel")},
            path,
            _use_new_zipfile_serialization=not legacy,
        )
        file = read_torchfile(path)
        node = file.root["x"]
        assert isinstance(node, Object)
        assert node.qualified in ("posix.system", "nt.system")
        assert node.args == (f"touch {tmp_path}/sentinel",)
        assert node.qualified in next(iter(file.globals.values()))
        assert not Path("sentinel").exists()


def test_hand_written_chains_stay_inert():
    chain = b"cbuiltins\ngetattr\ncos\npath\n" + text("__class__") + b"\x86R" + text("x") + b"\x85R}b."
    root = read(chain).root
    assert isinstance(root.cls, Object)
    assert root.qualified == "builtins.getattr"
    dotted = read(b"\x80\x04" + text("os") + text("path.join.__globals__") + b"\x93.").root
    assert dotted.qualified == "os.path.join.__globals__"
    assert read(b"(cos\nsystem\n" + text("true") + b"o.").root.how == "obj"
    assert read(b"(" + text("true") + b"ios\nsystem\n.").root.how == "obj"


def test_legacy_storage_sizes_are_checked():
    path = Path("x.pt")
    torch.save([torch.ones(3)], path, _use_new_zipfile_serialization=False)
    data = path.read_bytes()
    for count in (-1, 2, 4, 1 << 62):
        path.write_bytes(data[:-20] + struct.pack("<q", count) + data[-12:])
        with pytest.raises(DamagedFileError):
            read_torchfile(path)
    path.write_bytes(data + b"x")
    with refusing(DamagedFileError, "last storage"):
        read_torchfile(path)


def real_file(*, legacy):
    buffer = io.BytesIO()
    value = {
        "w": torch.ones(2, 3),
        "p": torch.nn.Parameter(torch.ones(1)),
        "o": {0: {"step": 1, "m": torch.zeros(2, 2).T}},
        "u": [b"x", {1, 2}, torch.Size([2]), torch.float16, Calls(print, "x")],
    }
    torch.save(value, buffer, _use_new_zipfile_serialization=not legacy)
    return buffer.getvalue()


FILES = [real_file(legacy=False), real_file(legacy=True)]


MANY = 5 * settings.default.max_examples


def consume(data):
    """Read and look at everything; only errors made for users may come out."""
    try:
        file = read_torchbytes(data, path="x.pt")
    except ZckptError:
        return
    json.dumps(plain(file.root))
    for _, tensor in walk_tensors(file.root):
        assert 0 <= tensor.storage.offset <= tensor.storage.offset + tensor.storage.nbytes <= len(data)


@settings(max_examples=MANY, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    which=st.sampled_from([0, 1]),
    edits=st.lists(st.tuples(st.floats(0, 1), st.binary(min_size=1, max_size=4)), min_size=1, max_size=6),
    cut=st.one_of(st.none(), st.floats(0, 1)),
)
def test_damaged_files_give_errors_for_users_only(which, edits, cut):
    data = bytearray(FILES[which])
    for where, new in edits:
        at = int(where * (len(data) - len(new)))
        data[at : at + len(new)] = new
    consume(bytes(data if cut is None else data[: int(cut * len(data))]))


PICKLED = zipfile.ZipFile(io.BytesIO(FILES[0])).read("archive/data.pkl")


@settings(max_examples=MANY, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    edits=st.lists(
        st.tuples(
            st.integers(0, len(PICKLED) - 1),
            st.integers(0, 3),
            st.one_of(
                st.binary(max_size=3),
                st.sampled_from([bytes([code]) for code in b"NK(t)}]asuRbQ20hq.\x81\x85\x86\x87"]),
            ),
        ),
        min_size=1,
        max_size=8,
    )
)
def test_damaged_pickles_give_errors_for_users_only(edits):
    data = bytearray(PICKLED)
    for at, removed, new in edits:
        data[at : at + removed] = new
    storages = [(info.filename.rpartition("/")[2], bytes(info.file_size)) for info in
                zipfile.ZipFile(io.BytesIO(FILES[0])).infolist() if "/data/" in info.filename]  # fmt: skip
    consume(archive(bytes(data), storages))


@settings(max_examples=MANY, deadline=None)
@given(st.binary(max_size=200))
def test_random_bytes_as_a_pickle(data):
    consume(archive(data))


@pytest.mark.parametrize("members", [(0.5, 1.5), ((1, 2), (3,)), (1 << 62,)])
@pytest.mark.parametrize("kind", [set, frozenset])
@pytest.mark.parametrize("protocol", [2, 4])
def test_many_equal_sets_are_no_collision(members, kind, protocol):
    sets = [kind(members) for _ in range(300)]
    assert read(pickle.dumps(sets, protocol)).root == sets
