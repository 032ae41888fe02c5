"""The fingerprint is what docs/diff.md says, computed here from that page alone and the truth beside a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from safetensors.torch import load_file

import zckpt
from tests.cli.console import FIXTURES
from tests.operations.diff.checkpoints import copied, rewrite
from tests.refusals import refusing
from zckpt.compare.digests import bytes_of, changes, read_digests
from zckpt.errors import DamagedFileError, SourceError, UnsupportedError

LEAF = 262_144


def digest(tensor: torch.Tensor) -> str:
    data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    step = LEAF * tensor.element_size()
    leaves = [xxhash.xxh3_128_digest(data[at : at + step]) for at in range(0, len(data), step)]
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{dtype} {json.dumps(list(tensor.shape))} {xxhash.xxh3_128_hexdigest(b''.join(leaves))}"


def entries_of(name: str) -> dict[str, dict[str, str]]:
    """What the truth of a bfloat16 training with AdamW says."""
    truth = load_file(FIXTURES / name / "truth.safetensors")
    about = json.loads((FIXTURES / name / "truth.json").read_text())
    persistent = set(zckpt.open(FIXTURES / name).buffers)
    found: dict[str, dict[str, str]] = {}
    for key, tensor in truth.items():
        kind, _, parameter = key.partition("/")
        if parameter in about["tied"] or (kind == "buffer" and parameter not in persistent):
            continue
        entry = found.setdefault(parameter, {})
        if kind in ("module", "buffer"):
            entry["weight"] = digest(tensor)
        elif kind == "fp32":
            entry["master"] = digest(tensor)
        else:
            entry |= {kind: digest(tensor), "step": "5"}
    return found


@pytest.mark.parametrize("name", ["s2_bf16_dp2", "s3_bf16_dp2", "s1_bf16_dp3_fused"])
def test_it_is_what_its_specification_says_of_the_truth(name):
    found = zckpt.fingerprint(FIXTURES / name)
    expected = entries_of(name)
    assert found.entries == expected
    lines = sorted(json.dumps([n, key, value]) for n, one in expected.items() for key, value in one.items())
    assert found.text == "zckpt1:" + xxhash.xxh3_128_hexdigest("\n".join(lines).encode())


@pytest.mark.parametrize("numel", [LEAF - 1, LEAF, LEAF + 1, 3 * LEAF + 5])
def test_tensors_of_several_leaves(numel):
    weight = torch.randn(numel, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    torch.save({"weight": weight}, "model.pt")
    assert zckpt.fingerprint("model.pt", memory=1).entries == {"weight": {"weight": digest(weight)}}


def test_weights_and_masters_count_each():
    for key in ("weight", "master"):
        copy = copied("s2_bf16_dp2", key)
        before = zckpt.fingerprint(copy)
        rewrite(copy, "fc1.weight", key, 3, lambda x: x + 1)
        after = zckpt.fingerprint(copy)
        assert [(one.name, one.entry) for one in changes(before, after)] == [("fc1.weight", key)]
        assert after.text != before.text


def test_masters_of_the_weights_type_are_left_out_where_they_are_the_weights():
    assert not any("master" in one for one in zckpt.fingerprint(FIXTURES / "s2_fp32_dp2").entries.values())
    copy = copied("s2_fp32_dp2")
    rewrite(copy, "fc1.weight", "master", 3, lambda x: x + 1)
    assert [n for n, one in zckpt.fingerprint(copy).entries.items() if "master" in one] == ["fc1.weight"]


def test_one_nan_is_another():
    for number, word in enumerate((0x7FC00000, 0x7FC00001, -0x3FFFFF, 0x7F800000)):
        weight = torch.tensor([1, word], dtype=torch.int32).view(torch.float32)
        torch.save({"weight": weight}, f"{number}.pt")
    found = [zckpt.fingerprint(f"{number}.pt").text for number in range(4)]
    assert found[0] == found[1] == found[2] != found[3]


def test_changes_name_what_is_gone_and_new():
    a, b = ({"x": torch.ones(3), name: torch.ones(2)} for name in ("old", "new"))
    b["x"][0] = 2
    for file, one in (("a.pt", a), ("b.pt", b)):
        torch.save(one, file)
    found = changes(zckpt.fingerprint("a.pt"), zckpt.fingerprint("b.pt"))
    assert [(one.name, one.entry) for one in found] == [("old", None), ("x", "weight"), ("new", None)]


def test_stored_digests_are_checked():
    found = zckpt.fingerprint(FIXTURES / "s2_bf16_dp2")
    file = Path("digests.json")
    file.write_bytes(bytes_of(found))
    assert read_digests(file) == found
    document = json.loads(file.read_text())
    more = {**document["entries"], "x": {"a": "b"}}
    bad: list[tuple[type[Exception], str, Any]] = [
        (DamagedFileError, "changed since it was written", {**document, "entries": more}),
        (UnsupportedError, "another version", {**document, "fingerprint": "zckpt2:00"}),
        (DamagedFileError, "holds no digests", {"fingerprint": "zckpt1:00"}),
        (DamagedFileError, "holds no digests", {**document, "entries": {"x": {"a": 1}}}),
        (DamagedFileError, "holds no digests", [1]),
    ]
    for error, words, content in bad:
        file.write_text(json.dumps(content))
        with pytest.raises(error, match=words):
            read_digests(file)
    file.write_text("{")
    with refusing(DamagedFileError, "unreadable"):
        read_digests(file)
    with refusing(SourceError, "cannot be opened"):
        read_digests("none")
