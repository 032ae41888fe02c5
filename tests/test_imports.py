"""What zckpt imports: no torch to inspect or to write safetensors, and DeepSpeed never."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterable

import pytest
import torch
from safetensors.torch import load_file

from tests.cli.console import FIXTURES, ROOT, environment
from tests.truth import Truth, assert_same

PROGRAM = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"{{name}} is not to be imported", name=name)

sys.meta_path.insert(0, Blocker())
from zckpt.cli import main
sys.argv[0] = "zckpt"
main()
"""

SEVERAL = PROGRAM.replace(
    'sys.argv[0] = "zckpt"\nmain()\n',
    """
import contextlib, io, json

done = []
for arguments in json.load(sys.stdin):
    sys.argv = ["zckpt", *arguments]
    out, errors, status = io.StringIO(), io.StringIO(), 0
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
            main()
    except SystemExit as exit_:
        status = exit_.code or 0
    done.append((status, out.getvalue(), errors.getvalue()))
print(json.dumps(done))
""",
)

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


def without(modules: tuple[str, ...], *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run the command line where these modules cannot be imported."""
    return subprocess.run(
        [sys.executable, "-c", PROGRAM.format(blocked=set(modules)), *map(str, arguments)],
        capture_output=True,
        text=True,
        env=environment(),
        check=False,
    )


def several_without(modules: tuple[str, ...], *commands: tuple[object, ...]) -> list[tuple[int, str, str]]:
    """Run commands in one process where these modules cannot be imported; return status, output and errors of each."""
    done = subprocess.run(
        [sys.executable, "-c", SEVERAL.format(blocked=set(modules))],
        input=json.dumps([[str(argument) for argument in command] for command in commands]),
        capture_output=True,
        text=True,
        env=environment(),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [(status, out, errors) for status, out, errors in json.loads(done.stdout)]


def test_blocked_module_cannot_be_imported():
    program = PROGRAM.format(blocked={"torch"}).replace("from zckpt.cli import main", "import torch")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "torch is not to be imported" in done.stderr


def test_inspect_needs_neither_torch_nor_deepspeed():
    commands = [
        ("inspect", FIXTURES / source, *options)
        for source in SOURCES
        for options in (("--json",), ("--parameters", "--files", "--globals"))
    ]
    for command, (status, out, errors) in zip(commands, several_without(EVERYTHING, *commands), strict=True):
        assert (status, errors) == (0, ""), command
        if "--json" in command:
            assert json.loads(out)["num_parameters"] > 0, command


def test_safetensors_are_written_without_torch(tmp_path):
    targets = {name: tmp_path / f"{name}.safetensors" for name in SAMPLE}
    commands = (("consolidate", FIXTURES / name, one, "--slots", "all") for name, one in targets.items())
    assert [status for status, _, _ in several_without(EVERYTHING, *commands)] == [0] * len(targets)
    for name, one in targets.items():
        model = load_file(one)
        for parameter, value in Truth(FIXTURES / name).masters.items():
            assert_same(model[parameter], value, parameter)


def test_everything_works_without_deepspeed(tmp_path):
    targets = {
        tmp_path / f"{dtype}{end}": dtype
        for dtype in ("float32", "bfloat16", "float16", "keep")
        for end in (".safetensors", ".pt", "")
    }
    results = several_without(
        ("deepspeed",),
        *(
            ("consolidate", FIXTURES / "s2_bf16_dp2", one, "--dtype", dtype, "--slots", "all")
            for one, dtype in targets.items()
        ),
    )
    for one, (status, _, errors) in zip(targets, results, strict=True):
        assert status == 0, errors
        assert one.exists()


def test_optimizer_and_model_written_without_deepspeed_load_in_torch(tmp_path):
    done = without(("deepspeed",), "consolidate", FIXTURES / "s2_bf16_dp2", tmp_path / "model.pt", "--slots", "all")
    assert done.returncode == 0, done.stderr
    model = torch.load(tmp_path / "model.pt", weights_only=True)
    optimizer = torch.load(tmp_path / "model.optimizer.pt", weights_only=True)
    assert len(optimizer["state"]) == sum(len(group["params"]) for group in optimizer["param_groups"])
    for name, value in Truth(FIXTURES / "s2_bf16_dp2").masters.items():
        assert_same(model[name], value, name)


def test_public_functions_work_without_deepspeed_and_modules_without_a_further_import(tmp_path):
    program = PROGRAM.format(blocked={"deepspeed"}).replace(
        "main()",
        f"""
import zckpt
checkpoint = zckpt.open({str(FIXTURES / "s2_bf16_dp2")!r})
assert checkpoint.read("fc1.weight", "exp_avg").shape == (13, 8)
zckpt.inspect(checkpoint)
zckpt.consolidate(checkpoint, {str(tmp_path / "m.safetensors")!r}, dtype="bfloat16")
print(zckpt.hf.prepare_resume.__name__, zckpt.dcp.Reader.__name__, zckpt.optim.__name__)
print(zckpt.deepspeed.any_world_size.__name__)
""",
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment(), check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-4:] == ["prepare_resume", "Reader", "zckpt.optim", "any_world_size"]
    assert (tmp_path / "m.safetensors").exists()


@pytest.mark.parametrize(
    "statement", ["import zckpt", "import zckpt.cli", "import zckpt.formats", "from zckpt import open"]
)
def test_import_of_zckpt_loads_neither_torch_nor_deepspeed(statement):
    program = f"import sys; {statement}; print(sorted(m for m in sys.modules if m in ('torch', 'deepspeed', 'tqdm')))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment(), check=True
    )
    assert done.stdout == "[]\n"


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


WRITES_PICKLES = "deepspeed/pickled.py"


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
