"""The registry says what docs/supported.md, `convert` and `zckpt formats` say of formats; packages add to it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import zckpt
from tests.cli.console import FIXTURES, ROOT, environment, refused, succeeded
from tests.refusals import refusing
from zckpt.errors import DamagedFileError, UnsupportedError
from zckpt.formats.format import Format, Found, InFolder, Search
from zckpt.formats.options import options_of
from zckpt.formats.registry import BUILT_IN, find_format, formats, get

WRITTEN = [name for name in BUILT_IN if get(name).writes]


def test_the_table_of_formats_is_what_the_formats_say():
    table = [line for line in (ROOT / "docs" / "supported.md").read_text().splitlines() if line.startswith("| ")]
    rows = [
        f"| {what} | {details} | `{name}` |" if get(name).writes and not number else f"| {what} | {details} | |"
        for name in BUILT_IN
        for number, (what, details) in enumerate(get(name).reads)
    ]
    missing = [row for row in rows if row not in table]
    assert not missing, "rows that the table lacks:\n" + "\n".join(missing)
    assert [row for row in table if row not in rows and not row.endswith("| |")] == [table[0]]


def test_formats_are_listed_with_their_options():
    document = json.loads(succeeded("formats", "--json").stdout)
    found = {one["name"]: one for one in document["formats"]}
    assert list(found) == list(BUILT_IN)
    assert document["broken"] == []
    assert [option["name"] for option in found["dcp"]["options"]] == ["world_size", "dtype", "keys"]
    stage = next(option for option in found["deepspeed"]["options"] if option["name"] == "stage")
    assert stage == {"name": "stage", "type": "int", "default": None, "choices": [1, 2, 3],
                     "help": "ZeRO stage. Required unless SOURCE states one, which is the default."}  # fmt: skip
    assert {name for name, one in found.items() if one["reshard"]} == {"deepspeed", "megatron", "nanochat"}
    assert {name for name, one in found.items() if one["written"]} == set(WRITTEN)
    text = succeeded("formats").stdout
    assert all(name in text for name in BUILT_IN)
    assert "--stage 1|2|3" in text


@pytest.mark.parametrize(
    ("source", "advice"),
    [
        ("zro_dp2_adamw/ckpt", "`zckpt convert --to zero-redundancy --world-size N` writes it for N ranks"),
        ("plain_adamw/ckpt.pt", "any number of ranks can load"),
    ],
)
def test_what_is_not_resharded_is_refused_with_what_writes_it_for_other_ranks(source, advice):
    with refusing(UnsupportedError, "can be resharded.*" + re.escape(advice)):
        zckpt.reshard(FIXTURES / "other" / source, "out", world_size=3)


def test_help_of_convert_has_every_option_and_format():
    text = " ".join(succeeded("convert", "--help-all").stdout.split())
    for name in WRITTEN:
        assert get(name).writes in text
        own = " ".join(succeeded("convert", "--to", name, "--help").stdout.split())
        for option in options_of(get(name).options):
            assert f"--{option.flag}" in text
            assert option.help.split(".")[0] in own.replace("- ", "-")


@pytest.mark.parametrize(
    ("to", "options", "said"),
    [
        ("dcp", {"stage": 2}, "--stage does not apply to dcp: expected --world-size, --dtype"),
        ("universal", {"world_size": 2}, "--world-size does not apply to universal: expected no option"),
        ("deepspeed", {"frobnicate": 1}, "--frobnicate does not apply to deepspeed"),
        ("deepspeed", {"stage": 4}, "unusable --stage: expected 1 or 2 or 3, found 4"),
        ("deepspeed", {"elastic": "yes"}, "unusable --elastic: expected a value of type bool"),
        ("zckpt", {"world_size": True}, "unusable --world-size: expected a value of type int"),
        ("zckpt", {"world_size": 0}, "world size"),
        ("dcp", {"dtype": "int8"}, "unusable --dtype: expected float32 or bfloat16 or float16 or keep"),
        ("torch", {}, "torch can be read, but not written"),
        ("nothing", {}, "unknown format: expected zckpt, universal"),
    ],
)
def test_keywords_of_convert_are_those_of_the_format(to, options, said, tmp_path):
    with refusing(zckpt.UsageError, re.escape(said)):
        zckpt.convert(FIXTURES / "s2_bf16_dp2", tmp_path / "out", to=to, **options)
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_format_is_answered_with_those_that_are_written():
    with pytest.raises(zckpt.UsageError) as refusal:
        zckpt.convert(FIXTURES / "s2_bf16_dp2", "out", to="nothing")
    assert refusal.value.expected.split(", ") == [one.name for one in formats() if one.writes]


def test_what_is_not_given_is_none_or_nothing():
    zckpt.convert(FIXTURES / "s2_bf16_dp2", "out", to="universal", world_size=None, stage=None)


@pytest.mark.parametrize(
    ("place", "named"), [("shards", "run"), (None, "run"), (Path("run/step1"), "run/step1"), (Search(Path("x")), "x")]
)
def test_error_that_names_no_file_names_what_was_found(place, named, tmp_path, monkeypatch):
    class Broken(Format):
        def read(self, found, search):
            raise DamagedFileError("broken", found=found.place)

    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    monkeypatch.setattr("zckpt.formats.recognise", lambda *_: (Broken(), Found(place)))
    with refusing(DamagedFileError, f"^{named}: broken"):
        zckpt.formats.open_checkpoint("run")


def test_every_format_states_what_a_stranger_needs():
    for one in formats():
        assert one.name
        assert one.title
        assert one.reads
        lays_out = type(one).lay_out not in {Format.lay_out, InFolder.lay_out}
        if isinstance(one, InFolder):
            lays_out = lays_out or find_spec(f"{type(one).__module__}.writer") is not None
        assert bool(one.writes) == lays_out
        assert (one.owns is not None) == bool(one.writes or one.recut_options)
        assert all(option.help.endswith(".") for option in options_of(one.options))


def test_inspect_of_deepspeed_loads_no_other_format():
    program = f"""
import sys
sys.argv = ["zckpt", "inspect", {str(FIXTURES / "s2_bf16_dp4")!r}, "--json"]
from zckpt.cli import main
try:
    main()
finally:
    print(sorted(sys.modules), file=sys.stderr)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment(), check=False
    )
    loaded = set(re.findall(r"'(.+?)'", done.stderr))
    others = {
        "zckpt.formats.safetensors",
        "zckpt.formats.consolidated",
        "zckpt.formats.dcp",
        "zckpt.formats.zero_redundancy",
        "zckpt.formats.native.reader",
        "zckpt.formats.universal.reader",
        "zckpt.formats.near",
        "zckpt.formats.survey",
        "importlib.metadata",
    }
    assert "zckpt.formats.deepspeed.reader" in loaded
    assert not loaded & others


# --- formats of other packages


@pytest.fixture(scope="module")
def example(tmp_path_factory) -> Path:
    """Where the example package is installed."""
    path = tmp_path_factory.mktemp("installed")
    source = path / "source"
    source.mkdir()
    for one in (ROOT / "examples" / "format_package").iterdir():
        if one.is_file():
            (source / one.name).write_bytes(one.read_bytes())
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-build-isolation"]
    subprocess.run([*pip, "--target", str(path / "packages"), str(source)], check=True)
    return path / "packages"


PROGRAM = """
import json, sys
from tests.cli.console import run

done = [run(*command) for command in json.load(sys.stdin)]
print(json.dumps([[one.returncode, one.stdout, one.stderr] for one in done]))
"""


def run_with(packages, *commands: Sequence[object], after="") -> list[tuple[int, str, str]]:
    """Run commands, and then a program, in a process that has the packages of a directory; exit status, output, errors.

    A command that is refused says so in one line.
    """
    found = environment()
    found["PYTHONPATH"] += f":{packages}"
    listed = json.dumps([[str(word) for word in command] for command in commands])
    done = subprocess.run([sys.executable, "-c", PROGRAM + after], input=listed, capture_output=True, text=True,
                          env=found, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert all(len(errors.splitlines()) == 1 for status, _, errors in said if status)
    return said


@pytest.fixture
def model() -> Path:
    torch.manual_seed(1)
    tensors = {"a.weight": torch.randn(3, 5), "a.bias": torch.randn(3).bfloat16(), "n": torch.arange(7)}
    save_file(tensors, "model.safetensors")
    return Path("model.safetensors")


def test_format_of_another_package_is_written_and_read_refuses_and_checks(example, model):
    target, back = Path("raw"), Path("back")
    program = f"""
import torch, zckpt
from safetensors.torch import load_file
target = {str(target)!r}
opened, truth = zckpt.open(target), load_file({str(model)!r})
assert {{*opened.parameters, *opened.buffers}} == set(truth)
assert all(torch.equal(opened.read(name), value) for name, value in truth.items())
zckpt.convert({str(model)!r}, {"again"!r}, to="rawtensors", alignment=1)
try:
    zckpt.convert({str(model)!r}, {"again"!r}, to="rawtensors", alignment=3)
except zckpt.UsageError as error:
    assert str(error) == "unusable alignment=: expected 1 or 64 or 4096, found 3"
else:
    raise AssertionError
with open(target + "/tensors.raw", "r+b") as file:
    file.truncate(10)
short, alone = run("inspect", target), run("inspect", target + "/tensors.raw")
assert short.returncode == 3
assert "is not in the file" in short.stderr
assert "without their list; give" in alone.stderr
"""
    no_model, written, shown, *others, listed = run_with(
        example,
        ("convert", FIXTURES / "s2_bf16_dp2", Path("out"), "--to", "rawtensors"),
        ("convert", model, target, "--to", "rawtensors", "--alignment", 4096, "--verify"),
        ("inspect", target, "--json", "--files"),
        ("convert", target, back, "--to", "consolidated"),
        ("diff", back, model),
        ("verify", target, "--deep"),
        ("formats",),
        after=program,
    )
    assert [status for status, _, _ in (written, shown, *others, listed)] == [0] * 6
    assert "byte for byte" in written[2]
    document = json.loads(shown[1])
    assert document["format"] == "rawtensors"
    assert next(one["nbytes"] for one in document["files"] if "tensors.raw" in one["path"]) > 2 * 4096
    assert {(one["file"], one["kind"], one["fate"], one["count"]) for one in document["inventory"]["items"]} == {
        ("tensors.raw", "tensor", "state", 3), ("tensors.json", "file", "implied", 1),
    }  # fmt: skip
    assert "rawtensors" in listed[1]
    assert no_model[0] == 5
    assert "zckpt consolidate" in no_model[2]


def test_without_the_package_its_format_is_none(model):
    assert find_format("rawtensors") is None
    refused(2, "convert", model, model.parent / "out", "--to", "rawtensors", words=("rawtensors",))


CLAIMS = """
from zckpt.errors import DamagedFileError, UnknownFormatError
from zckpt.formats.format import Format, Found
from zckpt.state import WEIGHT, Checkpoint, Extent, Parameter, Slot, SourceFile, Span

class Claims(Format):
    name, title, reads = "claims", "numbers", (("numbers", "any"),)

    def find(self, search):
        return Found(search.path, sure=False) if search.path.is_file() else None

    def read(self, found, search):
        path, nbytes = str(found.place), found.place.stat().st_size
        if nbytes == 5:
            raise DamagedFileError("has lost numbers", path=path)
        if nbytes == 6:
            raise UnknownFormatError("holds no numbers", path=path)
        slot = Slot(WEIGHT, "uint8", (nbytes,), (Span(Extent.whole((nbytes,)), path, 0, "uint8"),))
        file = SourceFile(path, nbytes, "model", tensor_nbytes=nbytes, tree={"x": slot})
        return Checkpoint(path, self.name, parameters={"x": Parameter.of("x", slot)}, files=[file])

FORMAT = Claims()
"""


def add_package(packages, name, content):
    """A package of one module, which is said to have a format in it."""
    about = packages / f"of_{name}-1.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: of-{name}\nVersion: 1\n")
    (about / "entry_points.txt").write_text(f"[zckpt.formats]\n{name} = of_{name}:FORMAT\n")
    (packages / f"of_{name}.py").write_text(content + "\n")


def test_file_that_a_format_claims_is_not_called_another_programs(tmp_path):
    """Even if the format is not sure, and whatever it finds wrong with the file."""
    add_package(tmp_path / "packages", "claims", CLAIMS)
    said = {9: "", 5: "has lost numbers", 6: "holds no numbers"}
    paths = {}
    for mark in (b"GGUF", b"\x93NUMPY", b"PK\3\4", b"\x1f\x8b"):
        for name in ("flax_model.msgpack", "model.onnx", "x.npz", "x.zip"):
            for nbytes, wrong in said.items():
                path = tmp_path / f"{mark.hex()}-{nbytes}-{name}"
                path.write_bytes(mark.ljust(nbytes, b"x")[:nbytes])
                paths[path] = wrong
    done = run_with(tmp_path / "packages", *(("inspect", path) for path in paths))
    for (path, wrong), (status, shown, errors) in zip(paths.items(), done, strict=True):
        assert (status, errors) == ((3, f"zckpt: {path}: {wrong}\n") if wrong else (0, ""))
        assert wrong or re.search("format +claims", shown)


def test_broken_packages_are_one_clear_line_each(model, tmp_path):
    packages = tmp_path / "packages"
    contents = {
        "import nothing_of_this_name": "ModuleNotFoundError",
        "FORMAT = object()": "has no title",
        "raise RuntimeError('two\\nlines')": "RuntimeError: two lines",
    }
    for number, content in enumerate(contents):
        add_package(packages, f"broken{number}", content)
    (tmp_path / "unknown").mkdir()
    listed, other, unknown, *told = run_with(
        packages,
        ("formats",),
        ("convert", model, tmp_path / "out", "--to", "zckpt"),
        ("inspect", tmp_path / "unknown"),
        *(("convert", model, tmp_path / "other", "--to", f"broken{number}") for number in range(3)),
    )
    assert [status for status, _, _ in (listed, other, unknown, *told)] == [0, 0, 3, 2, 2, 2]
    assert "not recognised as a checkpoint" in unknown[2]
    for number, said in enumerate(contents.values()):
        assert f"the format broken{number} of of-broken{number} cannot be loaded" in told[number][2]
        assert said in told[number][2]
        assert f"broken{number}" in listed[1]
        assert f"broken{number}" in unknown[2]
