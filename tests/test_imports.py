"""What zckpt imports: no torch to inspect or to write safetensors, and DeepSpeed never."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterable

import torch
from safetensors.torch import load_file

from tests.cli.console import COMMANDS, FIXTURES, ROOT, environment, words_of
from tests.folders import names_in
from tests.truth import Truth, assert_same

BLOCKED = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"{{name}} is not to be imported", name=name)

sys.meta_path.insert(0, Blocker())
"""

EVERYTHING = ("torch", "deepspeed", "transformers", "safetensors")
MODULES = sorted((ROOT / "zckpt").rglob("*.py"))
MAY_IMPORT_TORCH = (
    "operations/open.py",
    "engine/tensors.py",
    "optim/",
    "training/",
    "dcp/",
    "deepspeed/",
    "hf.py",
    "lightning.py",
    "accelerate.py",
    "torchtitan.py",
)

SAMPLE = ("s2_bf16_dp2", "s3_bf16_dp3", "moe_ep2_s2_bf16_dp2", "tp2_s1_bf16_dp2")
SOURCES = [
    "s0_fp32_dp2", "s1_bf16_dp2_bf16opt", "s2_bf16_dp2_client", "s3_bf16_dp2", "moe_ep2_s2_bf16_dp2",
    "tp2_s1_bf16_dp2", "ds0145_s2_bf16_dp4", "s2_bf16_dp2_elastic", "other/plain_adamw/ckpt.pt",
    "other/plain_mixed/ckpt.pt", "other/plain_legacy/ckpt.pt", "other/trainer_ds2_gpt2/checkpoint-4",
    "other/trainer_ds2_gpt2/checkpoint-4/model.safetensors",
]  # fmt: skip


def run_without(modules: tuple[str, ...], program: str, given: str = "") -> str:
    """Run a program where these modules cannot be imported; return what it prints."""
    words = [sys.executable, "-c", BLOCKED.format(blocked=set(modules)) + program]
    done = subprocess.run(words, input=given, capture_output=True, text=True, env=environment(), check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def commands_without(modules: tuple[str, ...], *commands: str, after: str = "") -> list[str]:
    """Run commands after a program, in one process where these modules cannot be imported; return what each prints."""
    given = json.dumps([words_of(one) for one in commands])
    said = json.loads(run_without(modules, after + COMMANDS, given).splitlines()[-1])
    for command, (status, _, errors) in zip(commands, said, strict=True):
        assert (status, errors if "inspect" in command else "") == (0, ""), (command, errors)
    return [out for _, out, _ in said]


def test_blocked_module_cannot_be_imported():
    program = "try:\n    import torch\nexcept ModuleNotFoundError as error:\n    print(error)"
    assert run_without(("torch",), program) == "torch is not to be imported\n"


def test_neither_what_is_inspected_nor_what_is_written_as_safetensors_needs_torch(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    documents = [f"inspect fixtures/{source} --json" for source in SOURCES]
    texts = [f"inspect fixtures/{source} --parameters --files --globals" for source in SOURCES]
    written = [f"consolidate fixtures/{name} {name}.safetensors --slots all" for name in SAMPLE]
    said = commands_without(EVERYTHING, *documents, *texts, *written)
    assert all(json.loads(one)["num_parameters"] > 0 for one in said[: len(SOURCES)])
    for name in SAMPLE:
        model = load_file(f"{name}.safetensors")
        for parameter, value in Truth(FIXTURES / name).masters.items():
            assert_same(model[parameter], value, parameter)


PUBLIC = f"""
import zckpt
checkpoint = zckpt.open({str(FIXTURES / "s2_bf16_dp2")!r})
assert checkpoint.read("fc1.weight", "exp_avg").shape == (13, 8)
zckpt.inspect(checkpoint)
zckpt.consolidate(checkpoint, "m.safetensors", dtype="bfloat16")
assert zckpt.hf.prepare_resume and zckpt.dcp.Reader and zckpt.optim and zckpt.deepspeed.any_world_size
"""
"""Functions of Python, and modules without a further import."""


def test_everything_works_without_deepspeed_and_what_is_written_loads_in_torch(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    targets = {f"{dtype}{end}": dtype for dtype in ("float32", "bfloat16", "float16", "keep")
               for end in (".safetensors", ".pt", "")}  # fmt: skip
    source = "fixtures/s2_bf16_dp2"
    commands = (f"consolidate {source} {one} --dtype {dtype} --slots all" for one, dtype in targets.items())
    commands_without(("deepspeed",), *commands, after=PUBLIC)
    assert {"m.safetensors", *targets} <= set(names_in())
    model = torch.load("float32.pt", weights_only=True)
    optimizer = torch.load("float32.optimizer.pt", weights_only=True)
    assert len(optimizer["state"]) == sum(len(group["params"]) for group in optimizer["param_groups"])
    for name, value in Truth(FIXTURES / "s2_bf16_dp2").masters.items():
        assert_same(model[name], value, name)


def test_import_of_zckpt_loads_neither_torch_nor_deepspeed():
    imports = "import zckpt, zckpt.cli, zckpt.formats; from zckpt import open"
    assert run_without((), f"{imports}; print({{'torch', 'deepspeed', 'tqdm'}} & set(sys.modules))") == "set()\n"


def imported(nodes: Iterable[ast.AST]) -> set[str]:
    """The packages that nodes of a tree import."""
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.partition(".")[0])
    return found


def at_module_level(tree: ast.Module) -> ast.Module:
    """What runs when the module is imported: no function bodies, nothing under TYPE_CHECKING."""

    class Outer(ast.NodeTransformer):
        def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
            return None

        def visit_If(self, node: ast.If) -> ast.AST | None:
            return None if "TYPE_CHECKING" in ast.unparse(node.test) else self.generic_visit(node)

    visited = Outer().visit(tree)
    assert isinstance(visited, ast.Module)
    return visited


FLOORS = [
    {"__main__", "__init__"}, {"cli"}, {"notebook"}, {"report"}, {"hf", "accelerate", "lightning", "torchtitan"},
    {"dcp", "deepspeed"}, {"training"}, {"optim"},
    {"operations"}, {"naming"}, {"formats"}, {"compare"}, {"evidence"}, {"torchfile"}, {"executors"}, {"engine"},
    {"storage"}, {"state"}, {"errors", "codes", "version"}, {"immutable"},
]  # fmt: skip
"""The rooms of the house, from the roof down."""


WRITES_PICKLES = "deepspeed/saving.py"


def test_each_module_imports_only_what_it_may():
    """Floors below it; torch where it may; what reads pickles, and DeepSpeed, nowhere."""
    level = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
    for path in MODULES:
        inside = path.relative_to(ROOT / "zckpt").as_posix()
        room = inside.partition("/")[0].removesuffix(".py")
        tree = ast.parse(path.read_text())
        imports = [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
        assert "deepspeed" not in imported(imports), inside  # `zckpt.deepspeed` finds it where it is loaded
        if inside != WRITES_PICKLES:
            assert "pickle" not in imported(imports), inside
        if "torch" in imported(imports) and not inside.startswith(MAY_IMPORT_TORCH):
            assert "torch" not in imported(ast.walk(at_module_level(tree))), inside
        for node in imports:
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("zckpt."):
                below = str(node.module).split(".")[1]
                assert below == room or level[below] > level[room], f"{path}:{node.lineno} imports {below}"


def test_what_writes_pickles_reads_none():
    tree = ast.parse((ROOT / "zckpt" / WRITES_PICKLES).read_text())
    assert "pickle" not in imported(node for node in ast.walk(tree) if isinstance(node, ast.Import))
    found = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module == "pickle"]
    assert [alias.name for node in found for alias in node.names] == ["Pickler"]
