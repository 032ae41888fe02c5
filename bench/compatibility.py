"""Let each version of each program make checkpoints, zckpt work on them, and that same version resume what came of it.

    python bench/compatibility.py [--programs P,...] [--versions V,...] [--kinds KIND,...]
                                  [--environments DIR] [--keep] [--table-only]

The programs, their versions and what is tried of each are in `programs.py`. The cells that ran are merged into
`bench/compatibility.json`, from which `docs/compatibility.md` is made. A version other than the installed one is
installed in a directory of its own, which comes first on the path and is removed when its cells are done.
"""

from __future__ import annotations

import argparse
import fcntl
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]

from programs import COLUMNS, PROGRAMS, YES, Cell, Kind, Program, number  # noqa: E402  after the path to it

RESULTS = ROOT / "bench" / "compatibility.json"
TABLE = ROOT / "docs" / "compatibility.md"

Results = dict[str, dict[str, dict[str, dict[str, str]]]]
"""By program, version and kind: what came of each column, and the versions of Python and torch that ran it."""


class CannotInstallError(Exception):
    """What pip said of a version that it could not install."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", default=",".join(one.name for one in PROGRAMS))
    parser.add_argument("--versions", help="any that there are; without, those of the table")
    parser.add_argument("--kinds", help="without, all of the program")
    parser.add_argument("--environments", type=Path, default=ROOT / "bench" / "cache" / "environments")
    parser.add_argument("--keep", action="store_true", help="do not remove what was installed")
    parser.add_argument("--table-only", action="store_true", help="make the page from the results that there are")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)  # in the environment of one version
    arguments = parser.parse_args()
    programs = [one for one in PROGRAMS if one.name in arguments.programs.split(",")]
    kinds = {kind.name for one in programs for kind in one.kinds}
    wanted = set(arguments.kinds.split(",")) if arguments.kinds else kinds
    unknown = set(arguments.programs.split(",")) - {one.name for one in PROGRAMS} | wanted - kinds
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    for program in () if arguments.table_only else programs:
        chosen = [kind for kind in program.kinds if kind.name in wanted]
        if arguments.here:
            for kind in chosen:
                print(json.dumps([kind.name, run_cell(program, kind)]), flush=True)
            continue
        for version in arguments.versions.split(",") if arguments.versions else program.versions:
            found = cells(program, version, chosen, arguments.environments, keep=arguments.keep)
            for kind_name, cell in found:
                merge(program.name, version, kind_name, cell)
                said = (f"{column}: {cell[column]}" for column in COLUMNS if column in cell)
                print(program.name, version, kind_name, *said, sep="\t", flush=True)
    if not arguments.here:
        TABLE.write_text(page(json.loads(RESULTS.read_text())))
    return 0


def merge(program: str, version: str, kind: str, cell: dict[str, str]) -> None:
    """Put a cell among the results, to which other runs may be adding theirs."""
    with RESULTS.open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        results: Results = json.load(file)
        results.setdefault(program, {}).setdefault(version, {})[kind] = cell
        file.seek(0)
        file.write(json.dumps(results, indent=1, sort_keys=True) + "\n")
        file.truncate()


def cells(program: Program, version: str, kinds: list[Kind], environments: Path, *, keep: bool):
    """Run the cells of one version in a process that finds it first; yields (kind, cell)."""
    try:
        environment = environment_of(program, version, environments)
    except CannotInstallError as error:
        said = [line for line in str(error).splitlines() if "ERROR" in line] or str(error).splitlines()[-1:]
        yield from ((kind.name, {"made": f"not installed: {said[-1]}"} | machine("")) for kind in kinds)
        return
    path = os.pathsep.join(str(place) for place in (environment, ROOT) if place)
    variables = os.environ | {"PYTHONPATH": path, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    variables |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONDONTWRITEBYTECODE": ""}
    if program.alone:  # with a newer torch than they know; old versions do not say that they trust what they load
        variables["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"
    while kinds:
        names = ",".join(kind.name for kind in kinds)
        command = [sys.executable, __file__, "--here", "--programs", program.name, "--kinds", names]
        with (
            tempfile.TemporaryFile("w+") as errors,
            subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
        ):
            for line in process.stdout or ():
                if line.startswith('["'):  # what imports say is not
                    name, cell = json.loads(line)
                    if cell[program.name] != version:
                        raise SystemExit(f"{program.name} {cell[program.name]} ran in the place of {version}")
                    yield name, cell
                    kinds = [kind for kind in kinds if kind.name != name]
            if process.wait():
                errors.seek(0)
                last = (errors.read().strip() or f"it ended with {process.returncode}").splitlines()[-1]
                yield kinds[0].name, {"made": last} | machine("")
                kinds = kinds[1:]
    if environment and not keep:
        shutil.rmtree(environment)


def environment_of(program: Program, version: str, directory: Path) -> Path | None:
    """Return the directory that this version is installed in, installing it; None for the installed one.

    It appears whole or not at all, and processes that want it at the same time wait for the first.
    """
    if installed(program.name) == version:
        return None
    place = directory / program.name / version
    place.parent.mkdir(parents=True, exist_ok=True)
    with place.with_name(f"{version}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not place.exists():
            with tempfile.TemporaryDirectory(prefix=f".{version}-", dir=place.parent) as name:
                target = Path(name) / version
                pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(target)]
                beside = next((its for before, its in program.beside if number(version) < number(before)), ())
                ways = [["--no-deps", "--no-build-isolation"], ["--no-deps"]] if program.alone else [[]]
                without_kernels = os.environ | {"DS_BUILD_OPS": "0"}
                without_kernels.pop("DS_ACCELERATOR", None)  # with a CPU old versions want a package to be built
                for how in ways:  # some old versions want what this setuptools has no more
                    command = [*pip, *how, f"{program.name}=={version}", *beside]
                    done = subprocess.run(command, check=False, env=without_kernels, capture_output=True, text=True)
                    if not done.returncode:
                        break
                else:
                    raise CannotInstallError(done.stderr)
                target.rename(place)
    return place


def installed(package: str) -> str:
    return importlib.metadata.version(package).split("+")[0]


def machine(torch: str) -> dict[str, str]:
    return {"python": platform.python_version(), **({"torch": torch} if torch else {})}


def run_cell(program: Program, kind: Kind) -> dict[str, str]:
    """Run one cell; returns what came of each column: `yes`, or why not."""
    with tempfile.TemporaryDirectory(prefix="zckpt-compatibility-", ignore_cleanup_errors=True) as name:
        cell = Cell(Path(name))
        try:
            kind.run(cell)
        except Exception as error:  # noqa: BLE001 (a program that cannot be imported is a result)
            cell.columns.setdefault("made", cell.reason(error))
        return cell.columns | machine(installed("torch")) | {program.name: installed(program.name)}


def page(results: Results) -> str:
    """Return the page: for each program a table, what fails in it, and why."""
    ran = {"python": set[str](), "torch": set[str]()}
    for name, versions in results.items():
        for cell in (cell for row in versions.values() for cell in row.values()):
            ran["python"] |= {cell["python"]} - {""}
            ran["torch"] |= {cell.get("torch", "")} - {""} if name != "torch" else set()
    pythons, torches = (" and ".join(sorted(some, key=number)) for some in ran.values())
    return INTRODUCTION.format(pythons=pythons, torches=torches) + "".join(
        _section(program, results.get(program.name, {})) for program in PROGRAMS
    )


INTRODUCTION = """\
# Versions that were tried

`make compatibility` makes this page: it lets each version of each program make small checkpoints on CPU ranks, zckpt
work on them, and that same version go on from what zckpt wrote. A cell is one kind of checkpoint of one version. Four
things are checked in it:

- **made**: the program trains a small model and saves it; what it holds in memory then is the truth;
- **read**: what zckpt reads, optimizer included, is bit for bit the truth;
- **written**: zckpt writes it again in a format of that program, mostly for another number of ranks, and compares it
  with its source;
- **resumed**: *that version* loads what zckpt wrote. Either all that it then holds is equal to the truth, bit for bit,
  or its next losses are those of the run that was not stopped: equal where the ranks are as many, within 1e-5 where
  another number of ranks sums in another order. Tables say where it is otherwise.

`all`: all of these hold. `not run`: not tried. What fails is listed below each table, with the cause where it is known.

To repeat a part: `python bench/compatibility.py --programs torch --versions 2.4.1 --kinds plain,dcp_fsdp1`. It installs
the version in a directory of its own, and merges what comes of it into `bench/compatibility.json`; `--versions` takes
any version that pip finds. What is tried of each program is in `bench/programs.py`.

The cells ran with Python {pythons}; those of all programs but torch with torch {torches}. Versions that have no wheel
for that Python are named as such.
"""


def _section(program: Program, found: dict[str, dict[str, dict[str, str]]]) -> str:
    versions = sorted(found, key=number)
    untried = [one for one in program.versions if one not in found]
    failures, rows = [], []
    for kind in program.kinds:
        texts = []
        for version in versions:
            cell = found.get(version, {}).get(kind.name)
            failed = [column for column in COLUMNS if cell and cell.get(column, YES) != YES]
            texts.append("not run" if not cell else ", ".join(f"{one} fails" for one in failed) or "all")
            failures += [(kind.name, column, cell[column], version) for column in failed if cell]
        rows.append(f"| {kind.about} (`{kind.name}`) | {' | '.join(texts)} |")
    said: dict[tuple[str, str, str], list[str]] = {}
    for *what, version in failures:
        said.setdefault((what[0], what[1], what[2]), []).append(version)
    lines = [f"- {', '.join(some)}, `{name}`, {column}: `{why}`" for (name, column, why), some in said.items()]
    causes = [f"- {some}, `{names.replace(', ', '`, `')}`: {cause}" for some, names, cause in program.causes]
    ran = sum(kind.name in found.get(version, {}) for kind in program.kinds for version in versions)
    table = [f"| checkpoint | {' | '.join(versions)} |", f"|---|{'---|' * len(versions)}", *rows, ""]
    return "\n".join([
        "",
        f"## {program.name}",
        "",
        *([textwrap.fill(program.about, 120), ""] if program.about else []),
        f"{ran} of {len(program.kinds) * (len(versions) + len(untried))} cells ran."
        + (f" Not tried: {', '.join(untried)}." if untried else ""),
        "",
        *(table if versions else []),
        *(["What fails:", "", *lines, ""] if lines else []),
        *(["Causes:", "", *causes, ""] if causes else []),
    ])  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
