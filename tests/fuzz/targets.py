"""One target for each reader: bytes to a right result, or a `ZckptError`. Nothing here needs torch."""

from __future__ import annotations

import json
import math
import os
import shutil
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import zckpt
from tests.fuzz.oracles import check_plain_pickle, check_safetensors, check_torch_file, read_slots
from tests.fuzz.places import Base, in_memory, new_folder
from tests.fuzz.trees import EDIT, Node, Tree, leaf, of_file, of_folder, of_json, written
from zckpt.compare.digests import read_digests
from zckpt.formats import open_checkpoint
from zckpt.formats.deepspeed.axes.tp_rules import read_rules
from zckpt.formats.deepspeed.hyperparameters import read_hyperparameters
from zckpt.formats.safetensors.file import header_in
from zckpt.naming import Naming
from zckpt.operations.shared_target import _said
from zckpt.report.reports import render_inspection
from zckpt.report.text import printable
from zckpt.storage.durable import _go_on
from zckpt.storage.files import read_whole
from zckpt.storage.journal import Journal, Purpose, journal_name
from zckpt.storage.packed.store import PackedMount, PackedStore
from zckpt.torchfile import alike, dump, plain, read_source
from zckpt.torchfile.reader import run_pickle

ROOT = Path(__file__).resolve().parents[2]
FIXTURES = ROOT / "fixtures"
TINY = FIXTURES / "versions/ds0189_s2_bf16_dp2"


@dataclass
class Target:
    """A reader of bytes.

    Parameters
    ----------
    run : callable
        Reads an input, and holds what was read to what it has to be.
    seeds : callable
        Returns inputs to begin with.
    most : int, bytes
        Of an input.
    mends : bool
        Whether inputs are files, half of whose mutations are edits of their trees.
    """

    run: Callable[[bytes], object]
    seeds: Callable[[], Iterable[bytes]]
    most: int = 4096
    mends: bool = True


# --- small files to begin with


def _call(module: str, name: str, *args: Node) -> Node:
    return Node("reduce", (Node("global", (), (module, name)), Node("tuple", args)))


def _tensor(key: str, shape: Sequence[int], *, legacy: bool = False, kind: str = "FloatStorage") -> Node:
    numel, strides = 1, list[int]()
    for size in reversed(shape):
        strides.insert(0, numel)
        numel *= size
    storage = (leaf("storage"), Node("global", (), ("torch", kind)), leaf(key), leaf("cpu"), leaf(numel))
    args = Node("persid", (Node("tuple", (*storage, *([leaf(None)] if legacy else []))),)), leaf(0)
    sizes = (Node("tuple", tuple(map(leaf, some))) for some in (shape, strides))
    return _call("torch._utils", "_rebuild_tensor_v2", *args, *sizes, leaf(False), _call("collections", "OrderedDict"))


def _dict(**values: Node) -> Node:
    return Node("dict", tuple(node for key, value in values.items() for node in (leaf(key), value)))


def _state_dict(shapes: Mapping[str, Sequence[int]], **more: Node) -> tuple[Node, list[bytes]]:
    """Return a dict of tensors of float32 and other values, and the bytes of the storages, called 0, 1, ..."""
    tensors = {name: _tensor(str(number), shape) for number, (name, shape) in enumerate(shapes.items())}
    sizes = [4 * math.prod(shape) for shape in shapes.values()]
    return _dict(**tensors, **more), [bytes(n % 61 for n in range(size)) for size in sizes]


def zipped(root: Node, storages: Sequence[bytes]) -> Node:
    """Return a torch file of today."""
    records = {"a/data.pkl": Node("pickle", (root,)), "a/byteorder": leaf(b"little"), "a/version": leaf(b"3\n")}
    records |= {f"a/data/{number}": leaf(data) for number, data in enumerate(storages)}
    return Node("zip", tuple(node for name, one in records.items() for node in (leaf(name), one)))


def _legacy() -> bytes:
    pickles = [leaf(0x1950A86A20F9469CFC6C), leaf(1001), _dict(little_endian=leaf(True))]
    root = _dict(w=_tensor("7", (2, 3), legacy=True), b=_tensor("x", (2,), legacy=True, kind="HalfStorage"))
    pickles += [root, Node("list", (leaf("7"), leaf("x")))]
    data = b"".join(written(Node("pickle", (one,)), "file") for one in pickles)
    return data + struct.pack("<q24s", 6, bytes(24)) + struct.pack("<q4s", 2, bytes(4))


def _pickles() -> list[bytes]:
    tree = _dict(a=Node("list", (leaf(1), leaf(1.5), leaf("x"))), b=Node("tuple", (leaf(None), leaf(True))))
    data = [_state_dict({"w": (2, 3)})[0], tree, _call("numpy", "dtype", leaf("f4"), leaf(False), leaf(True))]
    found = [written(Node("pickle", (one,)), "file") for one in data]
    found += [b"(lp0\nI1\naL5L\naS'a'\np1\nag1\na.", b"\x80\x04\x95\x0b\0\0\0\0\0\0\0}\x94(\x8c\1a\x94K\1u.",
              b"\x80\x04\x8f\x94(K\1K\2\x90.", b"\x80\x03cm\nC\n)\x81}q\0X\1\0\0\0aK\1sb."]  # fmt: skip
    for name in ("plain_mixed", "quantised_ao_adamw4bit", "quantised_bnb_lion8bit"):
        archive = of_file((FIXTURES / "other" / name / "ckpt.pt").read_bytes(), "ckpt.pt")
        found.append(b"\x80\x02" + written(next(one for one in archive.below if one.kind == "pickle"), "pickle") + b".")
    return found


def _headers() -> list[bytes]:
    header = {"__metadata__": {"format": "pt"}, "a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]},
              "b": {"dtype": "BF16", "shape": [3], "data_offsets": [16, 22]},
              "c": {"dtype": "U8", "shape": [0, 4], "data_offsets": [22, 22]}}  # fmt: skip
    return [written(Node("safetensors", (of_json(one), leaf(bytes(22)))), "file") for one in (header, {})]


# --- raw files


def read_pickle(data: bytes) -> None:
    machine, root = run_pickle(data, "data.pkl")
    plain(root, limit=2000)
    if not machine.globals.names:
        check_plain_pickle(data, root)
    again = dump(root)
    if not again.storages:
        machine, same = run_pickle(again.data, "data.pkl")
        assert alike(same, root) or "__builtin__.getattr" in machine.globals.names  # as protocol 2 says A.B


def read_torch(data: bytes) -> None:
    check_torch_file(read_source(in_memory(data)))


def read_safetensors(data: bytes) -> None:
    check_safetensors(data, header_in(in_memory(data))[0])


# --- checkpoints: scripts


class Checkpoints(Target):
    """Checkpoints of some format, or some formats, to be mutated and read by some verb.

    An input is the number of a checkpoint, that of a verb, and edits.
    """

    def __init__(self, bases: Callable[[], list[Base]], verbs: Sequence[Callable[[Path], object]]) -> None:
        super().__init__(self._read, self._scripts, 2 + 6 * EDIT.size, mends=False)
        self._make, self._verbs = bases, verbs

    @cached_property
    def bases(self) -> list[Base]:
        return self._make()

    def _read(self, data: bytes) -> None:
        if len(data) >= 2:
            self._verbs[data[1] % len(self._verbs)](self.bases[data[0] % len(self.bases)].put(data[2:]))

    def _scripts(self) -> Iterable[bytes]:
        verbs = len(self._verbs)
        for number in range(max(len(self.bases), verbs)):
            yield bytes((number % len(self.bases), number % verbs)) + EDIT.pack(40 * number, number, 7 * number)


def opened(path: Path) -> None:
    read_slots(open_checkpoint(path))


def salvaged(path: Path) -> None:
    read_slots(open_checkpoint(path, salvage=True))


def inspected(path: Path) -> None:
    found = zckpt.inspect(path, include_globals=True, include_inventory=True).as_dict()
    json.dumps(found)
    text = render_inspection(printable(found), parameters=True, files=True, with_globals=True)
    assert not any(ord(one) < 32 and one != "\n" for one in text)


def verified(path: Path) -> None:
    json.dumps(zckpt.verify(path).as_dict())


def verified_deep(path: Path) -> None:
    json.dumps(zckpt.verify(path, deep=True).as_dict())


def mapped(path: Path) -> None:
    json.dumps(zckpt.map(path).as_dict(), default=str)


def converted(path: Path) -> None:
    """Write zckpt's own format; what is read of that is the same."""
    with Out() as out:
        zckpt.convert(path, out, to="zckpt", verify=True)
        assert zckpt.diff(path, out).equal, f"{path} as zckpt is another checkpoint"


def consolidated(path: Path) -> None:
    with Out() as out:
        zckpt.consolidate(path, out / "model.safetensors")


def stripped(path: Path) -> None:
    with Out() as out:
        zckpt.strip(path, out, optimizer=True)


def resharded(path: Path) -> None:
    with Out() as out:
        zckpt.reshard(path, out, world_size=3)


def resumed(path: Path) -> None:
    for program in ("deepspeed", "trainer", "megatron", "verl"):
        json.dumps(zckpt.resume_check(path, program=program).as_dict())


class Out:
    """A name for a target, of which nothing is left afterwards."""

    _folders: dict[int, Path] = {}  # noqa: RUF012  # one for each process

    def __enter__(self) -> Path:
        if os.getpid() not in self._folders:
            self._folders[os.getpid()] = new_folder()
        self.path = self._folders[os.getpid()] / "out"
        return self.path

    def __exit__(self, *_: object) -> None:
        if self.path.exists():
            shutil.rmtree(self.path.parent)
            self.path.parent.mkdir()


READ = (opened,) * 5 + (inspected, salvaged, verified)
"""What is done with a checkpoint, the cheap ones more often."""

WRITE = (verified_deep, converted, consolidated, mapped, stripped, resharded, resumed)


def fixtures(*names: str, root: Path = FIXTURES, without: str = "truth") -> Callable[[], list[Base]]:
    """Return what makes bases of fixtures: their names, and behind a colon what is opened, if that is not all."""

    def make() -> list[Base]:
        found = []
        for name in names:
            folder, _, inside = name.partition(":")
            tree = of_folder(root / folder)
            pairs = zip(tree.below[::2], tree.below[1::2], strict=True)
            kept = [pair for pair in pairs if not pair[0].value.startswith(without)]
            found.append(Base(Node("folder", tuple(node for pair in kept for node in pair)), inside))
        return found

    return make


def from_tiny(**formats: Mapping[str, object]) -> Callable[[], list[Base]]:
    """Return what makes bases of the tiny model of DeepSpeed, in other formats."""

    def make() -> list[Base]:
        found = []
        for name, options in formats.items():
            folder = new_folder() / "run"
            zckpt.convert(TINY, folder, to=name.replace("_", "-"), **options)
            found.append(Base(of_folder(folder)))
        return found

    return make


def both(*makers: Callable[[], list[Base]]) -> Callable[[], list[Base]]:
    return lambda: [base for make in makers for base in make()]


# --- models with an adapter, a map, versions; stores


def _model(
    shapes: Mapping[str, Sequence[int]], metadata: Mapping[str, str] | None = None, dtype: str = "F32",
    dtypes: Mapping[str, str] | None = None, contents: Mapping[str, Node] | None = None,
) -> Node:  # fmt: skip
    """Return a file of tensors: of float32, matrices of `dtype`, some of others; some with certain bytes."""
    header, parts, at = dict[str, Any](), list[Node](), 0
    if metadata:
        header["__metadata__"] = metadata
    for name, shape in shapes.items():
        kind = (dtypes or {}).get(name, dtype if len(shape) > 1 else "F32")
        size = math.prod(shape) * {"F32": 4, "I32": 4, "BF16": 2, "F16": 2, "I64": 8}.get(kind, 1)
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [at, at + size]}
        numbers = b"".join(struct.pack("<f", n % 7 / 2 - 1) for n in range(-(-size // 4)))
        parts.append((contents or {}).get(name, leaf(numbers[:size])))
        at += size
    return Node("safetensors", (of_json(header), *parts))


def _folder(files: Mapping[str, Node]) -> Node:
    return Node("folder", tuple(node for name, one in files.items() for node in (leaf(name), one)))


def _json(value: object) -> Node:
    return Node("json", (of_json(value),))


MODEL = {"model.embed.weight": (5, 4), "model.layers.0.q.weight": (4, 4), "model.layers.1.q.weight": (4, 4),
         "model.layers.0.up.weight": (6, 4), "model.layers.1.up.weight": (6, 4), "model.norm.weight": (4,)}  # fmt: skip

MAP = {
    "sides": ["mine", "theirs"],
    "sizes": {"heads": ["num_heads", "d/2"], "half": "head_dim/2", "d": 4, "head_dim": 2, "a": 2},
    "rules": [
        {"mine": "model.embed.weight", "theirs": "tok.weight"},
        {"mine": "model.norm.weight", "theirs": "norm.weight"},
        {"mine": {"model.layers.{l}.q.weight": "(heads two half) in"}, "theirs": {"l.{l}.wq": "(heads half two) in"}},
        {"mine": {"model.layers.{l}.up.weight": "(a b) c"}, "theirs": {"l.{l}.up": "(b a) c"}},
    ],
    "tied": {"theirs": {"out.weight": "tok.weight"}},
    "order": {"theirs": ["tok.weight", "l.{l}.wq"]},
    "ignored": {"theirs": ["rope"]},
    "refused": {"theirs": {"l.{l}.bias": "no place"}},
    "settings": {"flag": False},
    "implied": {"mine": ["lm_head.weight"]},
}
TAKEN = {"taken": {"model.layers.{l}.": "0-0,1-1"}}


def _maps() -> list[Base]:
    model, config = _model(MODEL), _json({"num_heads": 2, "hidden_size": 4, "flag": False})
    again = {**MAP, "again": [{"model.layers.": "model.blocks."}], "copies": {"theirs": {"tok2.weight": "tok.weight"}}}
    return [Base(_folder({"m/model.safetensors": model, "m/config.json": config, "map.json": _json(one)}))
            for one in (MAP, TAKEN, again)]  # fmt: skip


def map_applied(path: Path) -> None:
    found, notes = Naming(map=path / "map.json").of(open_checkpoint(path / "m"))
    read_slots(found)
    assert all(isinstance(one, str) for one in notes)


ADAPTER = {
    "peft_type": "LORA", "r": 2, "lora_alpha": 4, "rank_pattern": {"q": 2}, "alpha_pattern": {}, "use_rslora": False,
    "fan_in_fan_out": False, "bias": "none", "target_modules": ["q", "up"], "modules_to_save": ["norm"],
    "task_type": None, "base_model_name_or_path": "x", "init_lora_weights": True, "layers_to_transform": None,
    "use_dora": False, "trainable_token_indices": {"embed": [0, 2]}, "target_parameters": [], "lora_dropout": 0.0,
}  # fmt: skip


def _adapters() -> list[Base]:
    found, tensors, at = list[Base](), dict[str, Sequence[int]](), "base_model.model.model"
    base = {"base/model.safetensors": _model(MODEL, dtype="BF16"), "base/config.json": _json({"vocab_size": 5})}
    modules = {f"{at}.layers.{layer}.{name}": out for layer in range(2) for name, out in (("q", 4), ("up", 6))}
    for module, out in modules.items():
        tensors |= {f"{module}.lora_A.weight": (2, 4), f"{module}.lora_B.weight": (out, 2)}
    more = {f"{at}.norm.weight": (4,), f"{at}.embed.token_adapter.trainable_tokens_delta": (2, 4)}
    scaled = {f"{module}.lora_magnitude_vector": (out,) for module, out in modules.items()}
    for config, its in ((ADAPTER, more), ({**ADAPTER, "use_dora": True}, scaled)):
        own = {"adapter_config.json": _json(config), "adapter_model.safetensors": _model({**tensors, **its})}
        found.append(Base(_folder({**base, **{f"adapter/{name}": one for name, one in own.items()}})))
    return found


def adapter_merged(path: Path) -> None:
    with Out() as out:
        zckpt.merge_adapter(path / "base", path / "adapter", out / "model.safetensors")


def _low_bit() -> list[Base]:
    """Models of a few bits: tensors, types of those that are not float32, settings, and certain bytes."""
    ints = {"num_bits": 4, "group_size": 4, "symmetric": True, "type": "int", "strategy": "group"}
    groups = {"group_0": {"weights": ints, "targets": ["Linear"]}}
    state = {"shape": [4, 8], "blocksize": 64, "dtype": "float32", "quant_type": "nf4", "nested_blocksize": 256,
             "nested_offset": 0.5}  # fmt: skip
    quant_state = "a.weight.quant_state.bitsandbytes__nf4"
    every: list[tuple[dict[str, Sequence[int]], dict[str, str], dict[str, Any], dict[str, Node]]] = [
        ({"a.weight": (4, 4), "a.weight_scale_inv": (2, 2)}, {"a.weight": "F8_E4M3"},
         {"quant_method": "fp8", "weight_block_size": [2, 2], "fmt": "e4m3", "activation_scheme": "dynamic"}, {}),
        ({"a.weight_packed": (4, 1), "a.weight_scale": (4, 2), "a.weight_shape": (2,)},
         {"a.weight_packed": "I32", "a.weight_shape": "I64"},
         {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups},
         {"a.weight_shape": leaf(struct.pack("<2q", 4, 8))}),
        ({"a_blocks": (2, 3, 1, 16), "a_scales": (2, 3, 1)}, {"a_blocks": "U8", "a_scales": "U8"},
         {"quant_method": "mxfp4"}, {}),
        ({"a.qweight": (1, 8), "a.qzeros": (2, 1), "a.scales": (2, 8), "a.g_idx": (8,)},
         {"a.qweight": "I32", "a.qzeros": "I32", "a.scales": "F16", "a.g_idx": "I32"},
         {"quant_method": "gptq", "bits": 4, "group_size": 4, "sym": True, "desc_act": False},
         {"a.g_idx": leaf(struct.pack("<8i", 0, 0, 0, 0, 1, 1, 1, 1))}),
        ({"a.qweight": (8, 1), "a.qzeros": (2, 1), "a.scales": (2, 8)},
         {"a.qweight": "I32", "a.qzeros": "I32", "a.scales": "F16"},
         {"quant_method": "awq", "bits": 4, "group_size": 4, "version": "gemm"}, {}),
        ({"a.weight": (16, 1), "a.weight.absmax": (1,), "a.weight.quant_map": (16,), quant_state: (140,)},
         {"a.weight": "U8", quant_state: "U8"}, {"quant_method": "bitsandbytes", "load_in_4bit": True},
         {quant_state: Node("padded", (of_json(state),), 140)}),
        ({"a.weight": (16, 1), "a.weight.absmax": (1,), "a.weight.quant_map": (16,), quant_state: (140,),
          "a.weight.nested_absmax": (1,), "a.weight.nested_quant_map": (256,)},
         {"a.weight": "U8", "a.weight.absmax": "U8", quant_state: "U8"}, {"quant_method": "bitsandbytes"},
         {quant_state: Node("padded", (of_json(state),), 140)}),
        ({"a.weight": (4, 8), "a.weight_scale": (4, 1), "a.weight_scale_2": ()},
         {"a.weight": "U8", "a.weight_scale": "F8_E4M3"}, {"quant_method": "modelopt", "quant_algo": "NVFP4"}, {}),
        ({"a.weight": (4, 4), "a.SCB": (4,)}, {"a.weight": "I8"}, {"quant_method": "bitsandbytes"}, {}),
    ]  # fmt: skip
    return [
        Base(_folder({
            "model.safetensors": _model({**tensors, "norm": (4,)}, dtypes=dtypes, contents=contents),
            "config.json": _json({"torch_dtype": "bfloat16", "quantization_config": settings}),
        }))
        for tensors, dtypes, settings, contents in every
    ]  # fmt: skip


def dequantised(path: Path) -> None:
    with Out() as out:
        zckpt.consolidate(path, out / "model.safetensors", dequantize=True)


def _versions() -> list[Base]:
    found = []
    for encoding in ("xor", "overwrite"):
        top = new_folder()
        for name, shift in (("model", 0), ("after", 1)):
            (top / name).mkdir()
            node = _model(MODEL)
            data = node.below[1].value
            node = Node("safetensors", (node.below[0], leaf(data[shift:] + data[:shift]), *node.below[2:]))
            (top / name / "model-00001-of-00001.safetensors").write_bytes(written(node, "file"))
            index = {"metadata": {}, "weight_map": dict.fromkeys(MODEL, "model-00001-of-00001.safetensors")}
            (top / name / "model.safetensors.index.json").write_text(json.dumps(index))
        zckpt.patch(top / "model", top / "after", top / "weight_v000001", to="slime", encoding=encoding)
        shutil.rmtree(top / "after")
        found.append(Base(of_folder(top)))
    return found


def version_applied(path: Path) -> None:
    with Out() as out:
        zckpt.apply(path / "model", path / "weight_v000001", out / "model")


def _stores() -> list[Base]:
    top = new_folder()
    for step in (1, 2):
        (top / f"run/step{step}").mkdir(parents=True)
        node = _model(MODEL, {"step": str(step)})
        (top / f"run/step{step}/model.safetensors").write_bytes(written(node, "file"))
        (top / f"run/step{step}/config.json").write_text("{}")
    zckpt.pack(top / "run", top / "store")
    return [Base(of_folder(top / "store"))]


def store_mounted(path: Path) -> None:
    """Read all files of all checkpoints in a store, in steps of an odd size."""
    store = PackedStore(path)
    names, wrong = store.names()
    for error in wrong.values():
        str(error)
    for name, number in names.items():
        mount = PackedMount(PackedStore(path), name)
        mount.close()
        for count, one in enumerate(store.index(number).files):
            if one.kind == "file" and one.nbytes < 1 << 16:
                buffer = memoryview(bytearray(one.nbytes))
                for at in range(0, one.nbytes, 97):
                    store.read_into(number, count, at, buffer[at : at + 97])


def store_unpacked(path: Path) -> None:
    with Out() as out:
        zckpt.unpack(path, out)


def _patches() -> list[Base]:
    top = new_folder()
    for name, shift in (("a", 0), ("b", 1)):
        (top / name).mkdir()
        node = _model(MODEL, {"shift": str(shift)})
        (top / name / "model.safetensors").write_bytes(written(node, "file"))
    zckpt.patch(top / "a", top / "b", top / "p")
    shutil.rmtree(top / "b")
    return [Base(of_folder(top))]


def patch_applied(path: Path) -> None:
    with Out() as out:
        zckpt.apply(path / "a", path / "p", out / "b")


# --- documents by themselves

PURPOSE = Purpose("0.1.0", "convert", {"to": "dcp"}, "ab", 1 << 25, {"/a": (1, 2, 3)}, ["x"])
WORK = ["k", [[0, 10, 5]], {"/a": [[0, 10, 5]]}]


def _documents() -> list[Base]:
    purpose = json.loads(json.dumps({one: getattr(PURPOSE, one) for one in PURPOSE.__dataclass_fields__}))
    rules = {"universal_checkpoint_version": 0.2, "vocabulary_parameter_patterns": ["^emb"], "original_vocab_size": 5,
             "tp_replicated_parameter_patterns": ["norm"], "parameter_to_average_patterns": ["avg"],
             "parameter_with_row_parallelism_patterns": ["down"], "parameter_with_2_sub_params_cat_dim_0": ["gate"],
             "parameter_with_sub_params": [{"patterns": ["qkv"], "shape": [[2, 1], 4], "partition_dim": 0}],
             "sub_param_shard_widths": {"qkv": [[2, 2], [1, 1]]}}  # fmt: skip
    recorded = new_folder() / "digests.json"
    recorded.write_bytes(b"{}")
    zckpt.fingerprint(TINY)
    files = {
        ".out.zckpt-journal": Node("lines", (of_json(purpose), of_json(WORK))),
        "note.json": _json({**purpose, "sent": {"a": ["id", {"1": ["etag", 5]}]}}),
        "naming": _json([["a", 5, 7], ["b", 6, 8]]),
        "rules.json": _json(rules),
        "groups.json": _json([{"lr": 0.1, "betas": [0.9, 0.99]}]),
        "digests.json": _json(zckpt.fingerprint(TINY).as_dict()),
    }
    return [Base(_folder(files))]


def document_read(path: Path) -> None:
    """Read each document with what reads it; one that is refused keeps no other from being read."""
    target, refused = path / "out", None
    for read in (
        lambda: Journal(target, PURPOSE, resume=True)._look(),
        lambda: Journal(target, PURPOSE, restart=True)._look(),
        lambda: _said(read_whole(str(path / "note.json"), most=1 << 20)),
        lambda: read_rules(path / "rules.json"),
        lambda: read_hyperparameters(path / "groups.json", 1),
        lambda: read_digests(path / "digests.json"),
        lambda: _named(path),
    ):
        try:
            read()
        except zckpt.ZckptError as error:
            refused = error
    if refused is not None:
        raise refused


def _named(path: Path) -> None:
    if (path / "naming").is_file():
        with (path / "naming").open("rb") as file:
            _go_on(file.fileno(), path)


assert journal_name(Path("a/out")) == Path("a/.out.zckpt-journal")


# --- servers


@dataclass
class Server:
    """What a server answers to all requests."""

    data: bytes = b""
    asked: int = 0
    made: dict[str, Any] = field(default_factory=dict)


def web_listed(data: bytes) -> None:
    """List what pages say that is there."""
    import httpx

    from zckpt.storage.remote.addresses import address_of
    from zckpt.storage.remote.web import HttpStore

    asked = 0

    def answer(request: httpx.Request) -> httpx.Response:
        nonlocal asked
        asked += 1
        if asked > 300:
            raise AssertionError("asks without an end")
        if request.method == "HEAD":
            return httpx.Response(200, headers={"Content-Length": "5", "ETag": "x", "Content-Type": "a/b"})
        body = data if request.url.path.count("/") < 4 else b""
        return httpx.Response(200, content=body, headers={"Content-Type": "text/html"})

    class Stored(HttpStore):
        def _open(self) -> tuple[Any, str]:
            self._query = ""
            return httpx.Client(transport=httpx.MockTransport(answer)), "http://h/d"

    store = Stored(address_of("http://h/d/"))
    for one in store.listed():
        assert not {"", ".", ".."} & {*one.parts}
        assert not any("/" in part or "\0" in part for part in one.parts), one.parts


def bucket_listed(data: bytes) -> None:
    """List what S3 says that is there."""
    import botocore.session
    from botocore.awsrequest import AWSResponse

    from zckpt.storage.remote.addresses import address_of
    from zckpt.storage.remote.s3 import S3Store

    if "client" not in SERVER.made:
        client = SERVER.made["client"] = botocore.session.get_session().create_client(
            "s3", region_name="x", aws_access_key_id="a", aws_secret_access_key="b", endpoint_url="http://h"
        )  # fmt: skip

        class Raw:
            def stream(self, *_: object, **__: object) -> Iterable[bytes]:
                return [SERVER.data]

        def answer(request: Any, **_: object) -> AWSResponse:
            SERVER.asked += 1
            assert SERVER.asked < 300, "asks without an end"
            return AWSResponse(request.url, 200, {}, Raw())

        client.meta.events.register("before-send.s3", answer)
    SERVER.data, SERVER.asked = data, 0

    class Stored(S3Store):
        def _open(self) -> tuple[Any, str]:
            return SERVER.made["client"], "bucket/run"

    for one in Stored(address_of("s3://bucket/run")).listed():
        assert not {"", ".", ".."} & {*one.parts}


SERVER = Server()

PAGE = b"""<html><a href="a.pt">a</a> <a href='b/'>b</a> <a href="../">up</a><a href="/x">x</a> <A HREF="c%20d.pt?x=1">
<a href="http://h/d/e&amp;f.pt">e</a> http://h/d/g.pt</html>"""

BUCKET = b"""<?xml version="1.0"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Name>bucket</Name>
<Prefix>run/</Prefix><KeyCount>2</KeyCount><IsTruncated>false</IsTruncated><Contents><Key>run/a.pt</Key><LastModified>
2026-01-01T00:00:00.000Z</LastModified><ETag>"x"</ETag><Size>5</Size></Contents><Contents><Key>run/b/c</Key>
<LastModified>2026-01-01T00:00:00.000Z</LastModified><ETag>"y"</ETag><Size>0</Size></Contents>
<NextContinuationToken>t</NextContinuationToken></ListBucketResult>"""


# --- others


def _meta() -> list[Base]:
    shapes = {"tok_embeddings.weight": (3, 4), "norm.weight": (4,), "output.weight": (3, 4)}
    shapes |= {f"layers.0.attention.{one}.weight": (2, 4) for one in ("wq", "wk", "wv")}
    shapes |= {"layers.0.attention.wo.weight": (4, 2), "layers.0.feed_forward.w2.weight": (4, 3)}
    ranks = {f"consolidated.{rank:02d}.pth": zipped(*_state_dict(shapes)) for rank in range(2)}
    params = {"dim": 4, "n_layers": 1, "n_heads": 2, "vocab_size": 6, "norm_eps": 1e-5}
    return [Base(_folder({**ranks, "params.json": _json(params)}))]


def _shards() -> list[Base]:
    names = {f"model-0000{n}-of-00002.safetensors": {f"m.{n}.w": (2, 3), f"m.{n}.b": (3,)} for n in (1, 2)}
    index = {"metadata": {"total_size": 72}, "weight_map": {one: file for file, some in names.items() for one in some}}
    files = {file: _model(some) for file, some in names.items()}
    return [Base(_folder({**files, "model.safetensors.index.json": _json(index), "config.json": _json({"a": 1})}))]


TARGETS: dict[str, Target] = {
    "pickle": Target(read_pickle, _pickles),
    "torch_zip": Target(read_torch, lambda: [written(zipped(*_state_dict({"w": (2, 3), "b": (2,)})), "file")]),
    "torch_legacy": Target(read_torch, lambda: [_legacy(), b"storages\0" + bytes(300)]),
    "safetensors": Target(read_safetensors, _headers, 1024),
    "torch": Checkpoints(
        fixtures("other/plain_mixed:ckpt.pt", "other/plain_legacy:ckpt.pt", "other/plain_proto4:ckpt.pt"), READ + WRITE
    ),
    "quantised": Checkpoints(
        fixtures(*(f"other/quantised_{one}:ckpt.pt" for one in
                   ("bnb_adamw8bit", "bnb_lion8bit", "ao_adamw8bit", "ao_adamw4bit", "ao_adamwfp8"))),
        (*READ, converted, verified_deep),
    ),
    "deepspeed": Checkpoints(
        fixtures("versions/ds0189_s2_bf16_dp2", "versions/ds0189_s3_fp32_dp2", "ds0176_s0_bf16_dp2",
                 "versions/ds0189_zenflow_s3_bf16_dp2", "versions/ds0189_one_bit_lamb_s0_fp16_dp2",
                 "versions/ds0154_s2_bf16_dp2"),
        READ + WRITE,
    ),
    "deepspeed_axes": Checkpoints(
        fixtures("pp2_s0_fp32_dp2", "pp2_s1_bf16_dp1", "tp2_s1_bf16_dp2", "moe_ep2_s2_bf16_dp2", "muon_s2_bf16_dp3"),
        READ + WRITE,
    ),
    "universal": Checkpoints(
        both(from_tiny(universal={}), fixtures("universal/s3_bf16_dp2")), (*READ, converted, stripped)
    ),
    "zckpt": Checkpoints(both(from_tiny(zckpt={}), fixtures("other/zckpt_v1")), READ + WRITE),
    "dcp": Checkpoints(
        both(from_tiny(dcp={}),
             fixtures("other/dcp_fsdp2_dp2_stformat:ckpt", "other/lightning_fsdp2:epoch=0-step=5.ckpt",
                      "other/olmo3_fsdp2_dp2:step3", "other/quantised_dcp_ao_4bit:ckpt")),
        (*READ, converted, consolidated),
    ),
    "dcp_hf": Checkpoints(fixtures("other/dcphf_sharded_dp3:ckpt", "other/dcphf_consolidated_dp2:ckpt"), READ),
    "megatron_legacy": Checkpoints(fixtures("other/mcore_legacy_mtp_pp2:ckpt", "other/mcore_legacy_dist_vp2:ckpt"),
                                   (*READ, converted, resharded)),
    "megatron_dist": Checkpoints(
        fixtures("other/mcore11_gathered_fp16_dp2:ckpt", "other/mcore16_fsdp_dp2:ckpt", "other/mcore08_zarr_tp2:ckpt"),
        READ,
    ),
    "fsdp_rank_files": Checkpoints(from_tiny(fsdp_rank_files={}), READ + WRITE),
    "zero_redundancy": Checkpoints(from_tiny(zero_redundancy={"world_size": 2}), READ + WRITE),
    "consolidated": Checkpoints(from_tiny(consolidated={}, transformers_trainer={}, accelerate={}), READ + WRITE),
    "companions": Checkpoints(
        fixtures("other/trainer_ds2_gpt2:checkpoint-4", "other/accel_ds2_bf16:state"), (*READ, resumed)
    ),
    "nanotron": Checkpoints(fixtures("other/nanotron_zero1_tp2_dp2:ckpt"), READ),
    "nanochat": Checkpoints(fixtures("other/nanochat_dp2:ckpt"), (*READ, resharded)),
    "others": Checkpoints(
        both(_meta, fixtures("colossalai/ckpt", "torch_checkpointing/ckpt", root=ROOT / "tests/formats")),
        (*READ, converted),
    ),
    "shards": Checkpoints(_shards, READ + WRITE),
    "low_bit": Checkpoints(_low_bit, (opened, inspected, dequantised, dequantised, converted)),
    "maps": Checkpoints(_maps, (map_applied,)),
    "adapters": Checkpoints(_adapters, (adapter_merged,)),
    "versions": Checkpoints(_versions, (version_applied,)),
    "stores": Checkpoints(_stores, (store_mounted, store_mounted, store_unpacked)),
    "patches": Checkpoints(_patches, (patch_applied,)),
    "documents": Checkpoints(_documents, (document_read,)),
    "web": Target(web_listed, lambda: [PAGE], 1024, mends=False),
    "bucket": Target(bucket_listed, lambda: [BUCKET], 1024, mends=False),
}  # fmt: skip


@lru_cache(maxsize=512)
def _tree(data: bytes) -> Tree:
    return Tree(of_file(data, ""))


def mended(data: bytes, script: bytes) -> bytes:
    """Return a file with edits of its tree; the file itself where it has none that is small."""
    try:
        return written(_tree(data).edited(script), "file")
    except Exception:  # whatever it is, it is no tree
        return data
