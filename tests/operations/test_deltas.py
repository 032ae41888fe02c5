"""Versions of weights as slime publishes them, written here as its documentation says; read, applied and made."""

from __future__ import annotations

import json
import zlib
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save
from safetensors.torch import load_file, save_file

import zckpt
from tests.cli.console import FIXTURES, printed, refused, run
from tests.folders import contents, names_in
from tests.logical import assert_same_tree
from tests.refusals import refusing
from zckpt.formats.safetensors import deltas

Tensors = dict[str, torch.Tensor]
SUMS = {"xxh3-128": xxhash.xxh3_128_hexdigest, "adler32": lambda data: f"{zlib.adler32(data):08x}"}
CHANGED = ("a.weight", "b.weight", "steps")


def model(version: int) -> Tensors:
    """A model of odd sizes, several types, an empty tensor; some elements change with each version."""
    random = torch.Generator().manual_seed(0)
    made = {
        "a.weight": torch.randn(300, 17, generator=random).bfloat16(),
        "b.weight": torch.randn(5001, generator=random),
        "frozen": torch.randn(40, generator=random).half(),
        "nothing": torch.zeros(0),
        "steps": torch.arange(7),
    }
    for one in range(1, version + 1):
        for name in CHANGED:
            made[name].view(-1)[one :: 7 * one] += one
    return made


def raw(tensor: torch.Tensor) -> np.ndarray:
    return tensor.reshape(-1).view(torch.uint8).numpy()


def write(name: str, tensors: Tensors) -> Path:
    """A directory of two shards, with a file that is not the model's."""
    folder = Path(name)
    folder.mkdir(parents=True)
    where = {}
    for number, some in enumerate((["a.weight", "steps"], ["b.weight", "frozen", "nothing"]), 1):
        file = f"model-{number:05d}-of-00002.safetensors"
        save_file({name: tensors[name] for name in some}, folder / file)
        where |= dict.fromkeys(some, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    (folder / "config.json").write_text("{}")
    return folder


def publish(
    version: int,
    encoding: str = "xor",
    algorithm: str = "xxh3-128",
    about: dict[str, str] | None = None,
    at: str = "run",
) -> Path:
    """What slime writes of a version."""
    made, sums = {}, {}
    for name, new in model(version).items():
        after, before = raw(new), raw(model(version - 1)[name])
        if np.array_equal(after, before):
            continue
        where = np.flatnonzero(after != before).astype("<u4")
        pairs = [np.array([len(where)], "<u4").view(np.uint8), where.view(np.uint8), after[where]]
        plain = after ^ before if encoding == "xor" else np.concatenate(pairs)
        made[name] = np.frombuffer(zstandard.ZstdCompressor(level=1).compress(plain.tobytes()), np.uint8)
        sums[name] = SUMS[algorithm](after.tobytes())
    out = Path(at, f"weight_v{version:06d}")
    out.mkdir(parents=True)
    (out / "model-00000-of-00001.safetensors").write_bytes(save(made, metadata=sums))
    metadata = {
        "version": f"{version:06d}", "base_version": f"{version - 1:06d}", "delta_encoding": encoding,
        "compression_format": "zstd", "checksum_format": algorithm,
    } | (about or {})  # fmt: skip
    where = dict.fromkeys(made, "model-00000-of-00001.safetensors")
    (out / "model.safetensors.index.json").write_text(json.dumps({"metadata": metadata, "weight_map": where}))
    return out


def assert_version(folder: Path | str, version: int) -> None:
    found: Tensors = {}
    for file in Path(folder).glob("*.safetensors"):
        found |= load_file(file)
    assert_same_tree(found, model(version))


@pytest.fixture(params=["xor", "overwrite"])
def encoding(request) -> str:
    return str(request.param)


@pytest.mark.parametrize("algorithm", SUMS)
def test_versions_are_applied_in_order_to_what_inference_began_with(encoding, algorithm):
    base = write("base", model(0))
    last = [publish(version, encoding, algorithm) for version in (1, 2, 3)][-1]
    before = contents(base)
    done = zckpt.apply(base, last, "out")
    assert done.checkpoints == ["weight_v000001", "weight_v000002", "weight_v000003"]
    assert_version("out", 3)
    assert Path("out/config.json").read_text() == "{}"
    assert contents(base) == before
    zckpt.apply(base, "run/weight_v000001", "one")
    assert_version("one", 1)


def test_a_model_of_a_version_needs_only_later_ones(encoding):
    whole = write("run/weight_v000002", model(2))
    last = publish(3, encoding)
    assert zckpt.apply(whole, last, "out").checkpoints == ["weight_v000003"]
    assert_version("out", 3)
    copied = write("local", model(2))
    (copied / ".weight_sync").mkdir()
    (copied / ".weight_sync/state.json").write_text('{"version": "000002"}')
    zckpt.apply(copied, last, "again")
    assert_version("again", 3)
    base = write("base", model(0))
    refused(3, "apply", base, last, "none", words=("version 2 is a whole model", "weight_vNNNNNN"))
    (copied / ".weight_sync/state.json").write_text('{"version": "000003"}')
    refused(3, "apply", copied, last, "none", words="for another version")


def test_another_model_is_refused_and_nothing_is_written():
    last = publish(1)
    other = write("base", model(2))
    for options in ("", "--dry-run"):
        words = ("a.weight differs from what was published", "version 0")
        refused(3, "apply", other, last, "out", options, words=words)
    short = {name: one for name, one in model(0).items() if name != "b.weight"}
    save_file(short, "short.safetensors")
    refused(3, "apply", "short.safetensors", last, "out", words="a directory of safetensors")
    Path("short").mkdir()
    save_file(short, "short/model.safetensors")
    refused(3, "apply", "short", last, "out", words="has no tensor b.weight")
    assert names_in() == ["base", "run", "short", "short.safetensors"]


def test_what_is_made_is_what_slime_would_publish(encoding):
    for version in range(3):
        write(str(version), model(version))
    zckpt.convert("2", "dcp", to="dcp")
    for version, after in ((1, "1"), (2, "dcp")):
        done = zckpt.patch(str(version - 1), after, f"weight_v{version:06d}", to="slime", encoding=encoding)
        assert (done.equal, done.changed, done.differences) == (2, 3, sorted(CHANGED))
        slime = publish(version, encoding, at="slime")
        ours, theirs = (deltas.read_delta(one) for one in (Path(slime.name), slime))
        assert (ours.version, ours.base, ours.encoding, ours.sums) == (version, version - 1, encoding, theirs.sums)
        assert {name: slot.shape for name, slot in ours.changed.items()} == {
            name: slot.shape for name, slot in theirs.changed.items()
        }
    zckpt.apply("0", "weight_v000002", "out")
    assert_version("out", 2)


def test_large_versions_are_several_files(monkeypatch):
    write("0", model(0)), write("1", model(1))
    monkeypatch.setattr("zckpt.operations.deltas.SHARD_NBYTES", 100)
    made = Path("weight_v000001")
    assert zckpt.patch("0", "1", made, to="slime", dry_run=True).dry_run
    assert not made.exists()
    zckpt.patch("0", "1", made, to="slime")
    assert len([*made.glob("model-0000?-of-0000?.safetensors")]) > 1
    zckpt.apply("0", made, "out")
    assert_version("out", 1)


def test_equal_models_make_a_version_that_changes_nothing():
    base = write("0", model(0))
    assert zckpt.patch(base, base, "weight_v000001", to="slime").changed == 0
    zckpt.apply(base, "weight_v000001", "out")
    assert_version("out", 0)


def test_what_cannot_be_published_is_refused():
    base = write("0", model(0))
    refused(2, "patch", base, base, "p --to slime", words="weight_v000001")
    refused(2, "patch", base, base, "p --encoding overwrite", words="unknown form")
    other = write("1", model(0) | {"b.weight": torch.zeros(3)})
    refused(5, "patch", base, other, "weight_v000001 --to slime", words="b.weight differs in shape or type")


def test_masters_alone_are_refused():
    """ZeRO-3 files no weights of what it trains: two steps of it would differ in nothing."""
    with refusing(zckpt.UnsupportedError, "holds no weights of alpha"):
        zckpt.patch(FIXTURES / "s3_bf16_dp2", FIXTURES / "s3_bf16_dp2", "weight_v000001", to="slime")


def test_what_is_written_replaces_neither_model_nor_version():
    base = write("base", model(0))
    version = publish(1)
    for target in (base, base / "inside", version, version / "inside", "."):
        refused(2, "apply", base, version, target, "--overwrite", words="the source")
    other = write("other", model(1))
    for target in (base / "weight_v000001", other / "weight_v000001"):
        refused(2, "patch", base, other, target, "--to slime", words="inside the source")
        refused(2, "patch", base, other, target, words="inside the source")
    assert_version(base, 0)


def test_a_version_is_no_checkpoint_and_says_what_it_is():
    version = publish(1)
    for path in (version, version / "model-00000-of-00001.safetensors"):
        refused(3, "inspect", path, words=("as slime publishes them", "zckpt apply"))
    write("run/whole", model(0))
    assert [one["name"] for one in printed("list", "run")["checkpoints"]] == ["whole"]


@pytest.mark.parametrize(
    ("about", "words"),
    [
        ({"version": "x"}, "unreadable index"),
        ({"base_version": "000001"}, "a base before 1"),
        ({"compression_format": "lz4"}, "has an unknown form"),
        ({"delta_encoding": "sum"}, "has an unknown form"),
        ({"checksum_format": "crc"}, "unknown checksums"),
    ],
)
def test_forms_that_are_not_known_are_refused(about, words):
    version = publish(1, about=about)
    base = write("0", model(0))
    with refusing(zckpt.ZckptError, words):
        zckpt.apply(base, version, "out")
    assert not Path("out").exists()


def test_no_flip_gives_a_wrong_model(encoding):
    base = write("0", model(0))
    version = publish(1, encoding)
    file = version / "model-00000-of-00001.safetensors"
    whole = file.read_bytes()
    refusals = 0
    for at in range(0, len(whole), max(len(whole) // 25, 1)):
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :])
        done = run("apply", base, version, f"out{at} -q")
        refusals += done.returncode == 3
        if done.returncode == 0:
            assert_version(f"out{at}", 1)
    assert refusals > 16


@given(st.binary(max_size=60), st.data(), st.sampled_from(deltas.ENCODINGS))
def test_what_is_encoded_is_applied(before, data, encoding):
    after = data.draw(st.binary(min_size=len(before), max_size=len(before)))
    old, new = (np.frombuffer(one, np.uint8).copy() for one in (before, after))
    stored = deltas.encode(old, new, encoding)
    if stored is None:
        assert before == after
        return
    empty = deltas.Delta(Path(), 1, 0, encoding, "xxh3-128", {}, {})
    empty._change(old, stored)
    assert old.tobytes() == after


@given(st.binary(max_size=60), st.binary(max_size=40), st.sampled_from(deltas.ENCODINGS))
def test_noise_is_refused_or_stays_in_the_tensor(noise, before, encoding):
    old = np.frombuffer(before, np.uint8).copy()
    delta = deltas.Delta(Path(), 1, 0, encoding, "xxh3-128", {}, {})
    with suppress(ValueError, zstandard.ZstdError):
        delta._change(old, zstandard.compress(noise))
    assert len(old) == len(before)
