"""Let each version of DeepSpeed make checkpoints, zckpt work on them, and that same version resume what came of it.

    python bench/compatibility.py [--versions V,...] [--kinds KIND,...] [--environments DIR] [--table-only]

Each cell is a kind of checkpoint by one version: made by its real engine on CPU ranks, read by zckpt and held against
the truth gathered from the live optimizer, resharded and loaded by that version's `load_checkpoint`, which trains on,
and converted and held against the truth again. The cells that ran are merged into `bench/compatibility.json`, from
which `docs/compatibility.md` is made. Versions other than the installed one are installed, without what they depend
on, in directories of their own that come first on the path: they run with the installed torch.
"""

from __future__ import annotations

import argparse
import fcntl
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

VERSIONS = ("0.14.5", "0.15.4", "0.16.9", "0.17.6", "0.18.9", "0.19.8")
COLUMNS = ("made", "read", "reshard", "resumed", "convert")
RESULTS = ROOT / "bench" / "compatibility.json"
TABLE = ROOT / "docs" / "compatibility.md"
YES = "yes"
BLOCKED = "blocked"  # an earlier column of the same cell failed
REASON_LENGTH = 300

# By version: kinds that fail, and the cause that was found in DeepSpeed.
_LOSSES = (
    "The loaded state is bit-equal, and so are the losses at the same number of ranks (tried): only the order of"
    " 16-bit rounding differs."
)
_SLICES = (
    "The loaded state is bit-equal, and in fp32 (`tp2_s2_fp32_dp2`) losses are within 2e-5: only the order of 16-bit"
    " rounding differs."
)
CAUSES = {
    **{version: [("tp2_s1_bf16_dp2", _SLICES)] for version in VERSIONS},
    "0.17.6": [
        ("tp2_s1_bf16_dp2", _SLICES),
        (
            "s1_fp32_dp2, s2_bf16_dp2, s2_bf16_dp2_elastic_fused, s2_fp16_dp2, s2_bf16_dp2_rr",
            "DeepSpeed's `get_flat_partition` raises on a rank that holds nothing of a group; here one group has one"
            " element. With two groups (also listed), it trains.",
        ),
        (
            "s0_bf16_dp2, s1_bf16_dp2_bf16opt",
            "DeepSpeed saves no optimizer: the model file has None in its place, and there is no other file. zckpt"
            " reads the weights, and at stage 0 copies them for other ranks; DeepSpeed itself cannot load"
            " the checkpoint.",
        ),
    ],
    "0.18.9": [
        ("tp2_s1_bf16_dp2", _SLICES),
        (
            "pp2_s1_bf16_dp1",
            "DeepSpeed's step gathers tensors that require gradients, and gloo's `all_gather_into_tensor` refuses them"
            " (also with torch 2.7.1, tried on `s1_fp32_dp2_2groups`). The bench runs all steps under"
            " `torch.no_grad()`, which works.",
        ),
        ("s1_bf16_dp2_bf16opt", _LOSSES),
    ],
}


class CannotInstallError(Exception):
    """What pip said of a version that it could not install."""


class Kind(NamedTuple):
    """A checkpoint of `tests.deepspeed_engine.SPECS`, and the data-parallel ranks that it is resharded to."""

    spec: str
    ranks: int
    about: str
    groups: int = 0  # of parameters, where not as many as the description has

    @property
    def name(self) -> str:
        """What the command line and the results call it."""
        return f"{self.spec}_{self.groups}groups" if self.groups else self.spec


KINDS = (
    Kind("s1_fp32_dp2", 3, "ZeRO-1, fp32"),
    Kind("s1_fp32_dp2", 3, "ZeRO-1, fp32, every rank has a part of each group", groups=2),
    Kind("s2_bf16_dp2", 3, "ZeRO-2, bf16"),
    Kind("s2_bf16_dp2", 3, "ZeRO-2, bf16, every rank has a part of each group", groups=2),
    Kind("s3_bf16_dp2", 3, "ZeRO-3, bf16"),
    Kind("s2_bf16_dp2_elastic_fused", 3, "ZeRO-2, elastic, FusedAdam's layout"),
    Kind("s0_bf16_dp2", 3, "stage 0, bf16"),
    Kind("pp2_s1_bf16_dp1", 2, "pipeline of two stages, ZeRO-1, bf16"),
    Kind("s3_bf16_dp2_subgroup", 3, "ZeRO-3, small sub-groups"),
    Kind("moe_ep2_s2_bf16_dp2", 4, "experts over two ranks, ZeRO-2, bf16"),
    Kind("s1_bf16_dp2_bf16opt", 3, "BF16_Optimizer, ZeRO-1"),
    Kind("s2_fp16_dp2", 3, "ZeRO-2, fp16"),
    Kind("tp2_s1_bf16_dp2", 1, "tensor parallel over two ranks, ZeRO-1, bf16"),
    Kind("s2_bf16_dp2_rr", 3, "ZeRO-2, round robin gradients"),
    Kind("s2_bf16_dp2_elastic_fused", 3, "ZeRO-2, elastic, every rank has a part of each group", groups=2),
    Kind("s2_fp16_dp2", 3, "ZeRO-2, fp16, every rank has a part of each group", groups=2),
    Kind("s2_bf16_dp2_rr", 3, "ZeRO-2, round robin, every rank has a part of each group", groups=2),
    Kind("tp2_s2_fp32_dp2", 1, "tensor parallel over two ranks, ZeRO-2, fp32"),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--versions", default=",".join(VERSIONS))
    parser.add_argument("--kinds", default=",".join(kind.name for kind in KINDS))
    parser.add_argument("--environments", type=Path, default=ROOT / "bench" / "cache" / "deepspeed")
    parser.add_argument("--table-only", action="store_true", help="make the table from the results that there are")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)  # in the environment of one version
    arguments = parser.parse_args()
    wanted = arguments.kinds.split(",")
    if unknown := set(wanted) - {kind.name for kind in KINDS} | set(arguments.versions.split(",")) - set(VERSIONS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    kinds = [kind for kind in KINDS if kind.name in wanted]
    if arguments.here:
        for kind in kinds:
            print(json.dumps([kind.name, run_cell(kind)]), flush=True)
        return 0
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for version in () if arguments.table_only else arguments.versions.split(","):
        environment = environment_of(version, arguments.environments)
        for kind, cell in cells(version, environment, kinds):
            results.setdefault(version, {})[kind] = cell
            if cell["deepspeed"] != version:
                raise SystemExit(f"DeepSpeed {cell['deepspeed']} ran in the place of {version}")
            RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
            print(version, kind, *(f"{column}: {cell.get(column, BLOCKED)}" for column in COLUMNS), sep="\t")
    TABLE.write_text(table(results))
    return 0


def environment_of(version: str, directory: Path) -> Path | None:
    """Return the directory that this version of DeepSpeed is installed in, installing it; None for .venv's own.

    It appears whole or not at all, and processes that want it at the same time wait for the first.
    """
    if importlib.metadata.version("deepspeed") == version:
        return None
    place = directory / version
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / f"{version}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (place / f"deepspeed-{version}.dist-info").exists():
            with tempfile.TemporaryDirectory(prefix=f".{version}-", dir=directory) as name:
                target = Path(name) / version
                how = ("--quiet", "--no-deps", "--no-build-isolation", "--target", str(target))
                command = [sys.executable, "-m", "pip", "install", *how, f"deepspeed=={version}"]
                without_kernels = os.environ | {"DS_BUILD_OPS": "0", "DS_ACCELERATOR": "cpu"}
                done = subprocess.run(command, check=False, env=without_kernels, capture_output=True, text=True)
                if done.returncode:
                    raise CannotInstallError(done.stderr)
                shutil.rmtree(place, ignore_errors=True)  # half of it
                target.rename(place)
    return place


def cells(version: str, environment: Path | None, kinds: list[Kind]):
    """Run the cells of one version in a process that finds it first; yields (kind, cell)."""
    path = os.pathsep.join(str(place) for place in (environment, ROOT) if place)
    command = [sys.executable, __file__, "--here", "--kinds", ",".join(kind.name for kind in kinds)]
    variables = os.environ | {"PYTHONPATH": path, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    variables["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"  # old versions do not say that they trust what they load
    with subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout or ():
            if line.startswith('["'):  # what imports say is not
                yield json.loads(line)
    if process.returncode:
        raise SystemExit(f"DeepSpeed {version}: its process ended with {process.returncode}")


def run_cell(kind: Kind) -> dict[str, str]:
    """Run one cell; returns what came of each column: `yes`, or why not."""
    import torch

    import zckpt
    from tests.deepspeed_engine import SPECS, resume, train
    from tests.truth import Truth, assert_consolidated

    spec = SPECS[kind.spec]
    if kind.groups:
        spec = spec.at(spec.world_size, groups=kind.groups)
    wider = spec.at(kind.ranks * spec.tensor_parallel * spec.pipeline_parallel)
    cell = {"deepspeed": importlib.metadata.version("deepspeed"), "torch": torch.__version__.split("+")[0]}
    with tempfile.TemporaryDirectory(prefix="zckpt-compatibility-") as name:
        place = Path(name)

        def column(column: str, action: Callable[[], Any]) -> bool:
            try:
                verdict = action()
                cell[column] = YES if verdict is None or verdict.ok else f"differs: {_first(verdict)}"
            except Exception as error:  # noqa: BLE001 (a cell that fails is a result)
                cell[column] = _reason(error, place)
            return cell[column] == YES

        def read(source: Path, scratch: str) -> None:
            (place / scratch).mkdir()
            assert_consolidated(source, Truth(folder), place / scratch)

        def make() -> None:
            about = json.loads((train(spec, place) / "truth.json").read_text())
            if about["deepspeed"] != cell["deepspeed"]:  # what its ranks imported
                raise SystemExit(f"the ranks run DeepSpeed {about['deepspeed']}, not {cell['deepspeed']}")

        folder = place / spec.name
        if column("made", make):
            column("read", lambda: read(folder, "read"))
            if column("reshard", lambda: zckpt.reshard(folder, place / "cut", world_size=kind.ranks) and None):
                column("resumed", lambda: resume(place / "cut", wider, folder))
            converted = place / "converted"
            column("convert", lambda: zckpt.convert(folder, converted, to="zckpt") and read(converted, "again"))
    return cell


def _first(verdict: Any) -> str:
    """Say what a resumed run had that the truth has not."""
    for what in ("slots", "weights", "hyperparameters", "steps"):
        if found := getattr(verdict, what):
            return f"{what}: {found[0]} and {len(found) - 1} more"
    return f"losses by {verdict.loss_difference:.2g}, allowed are {verdict.loss_tolerance:.2g}"


def _reason(error: Exception, place: Path) -> str:
    """Return the line of an error that says what it is, of the first rank for those of ranks, without paths."""
    lines = [line for line in str(error).splitlines() if re.match(r"[\w.]*(Error|Exception)\b", line)]
    lines = [line for line in lines if "gloo/transport" not in line] or lines  # said by the other ranks
    text = lines[0] if lines else f"{type(error).__name__}: {' '.join(str(error).split())}"
    return text.replace(f"{place}/", "").replace(f"{ROOT}/", "")[:REASON_LENGTH]


def table(results: dict[str, dict[str, dict[str, str]]]) -> str:
    """Return the page: a row for each kind, a column for each version, and below what failed and why."""
    torches = sorted({cell["torch"] for row in results.values() for cell in row.values()})
    ran = sum(len(row) for row in results.values())
    failures, rows = [], []
    for kind in KINDS:
        texts = []
        for version in VERSIONS:
            cell = results.get(version, {}).get(kind.name)
            if cell is None:
                texts.append("not run")
                continue
            failed = [column for column in COLUMNS if cell.get(column, YES) != YES]
            texts.append(", ".join(f"{column} fails" for column in failed) or "all")
            failures += [f"- {version}, `{kind.name}`, {column}: `{cell[column]}`" for column in failed]
        rows.append(f"| {kind.about} (`{kind.name}`) | {kind.ranks} | {' | '.join(texts)} |")
    head = f"| checkpoint | resharded to | {' | '.join(VERSIONS)} |\n|---|---|{'---|' * len(VERSIONS)}"
    return "\n".join([
        "# Versions of DeepSpeed",
        "",
        "`make compatibility` makes this page. Each cell is a checkpoint that this version's real engine made on CPU",
        "ranks (gloo) in five steps of a small model. Four things are checked:",
        "",
        "- **read**: what `zckpt consolidate` writes, optimizer included, is bit for bit what the live optimizer held;",
        "- **reshard**: `zckpt reshard` writes it for another number of data-parallel ranks, given in the table;",
        "- **resumed**: *that version's* `load_checkpoint` then holds bit-equal masters, slots, weights, steps and",
        "  hyperparameters on those ranks, and its next five losses equal those of the uninterrupted run",
        "  (within 2e-5 in fp32, 3e-3 in 16 bits);",
        "- **convert**: `zckpt convert --to zckpt`, read again, is still bit-equal to the live optimizer.",
        "",
        f"All cells ran with torch {' and '.join(torches) or '(none)'} and `TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1`.",
        "Without it, torch 2.6 and newer refuse what old versions of DeepSpeed load, whoever wrote the checkpoint.",
        f"`all`: all four hold; `not run`: not tried. {ran} of {len(KINDS) * len(VERSIONS)} cells ran.",
        "",
        head,
        *rows,
        "",
        "## What fails",
        "",
        *(failures or ["Nothing that ran."]),
        "",
        "Causes:",
        "",
        *(f"- {v}, `{names.replace(', ', '`, `')}`: {cause}" for v, found in CAUSES.items() for names, cause in found),
        "",
    ])  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
