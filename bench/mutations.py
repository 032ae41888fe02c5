"""Do the tests notice when the library is wrong? Single changes of it, each run against the tests that execute it.

    pip install pytest-cov
    python bench/mutations.py record --data cover.sqlite      # the whole suite once, with what each test executes
    python bench/mutations.py check --data cover.sqlite --changes 200 --seed 1 --results results.jsonl

A change is a comparison that is turned, a number off by one, `and` for `or`, or a branch that is never taken. They are
drawn by the seed, from every room of the package as many as it has lines, and at least three. Each is made in a copy of
the repository; the quickest tests that execute the line go first, the first failure ends it. What is done is in the
results and not done again, so that a run may be broken off. What no test executes is not caught, and told apart; so is
what runs out of time. A rank that several tests share is counted to the first.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import Queue

ROOT = Path(__file__).resolve().parent.parent
AT_LEAST = 3  # changes of each room
COVERAGE = """
[run]
source = zckpt
data_file = {data}
parallel = true
patch = subprocess, fork, _exit
sigterm = true
context = ${{PYTEST_CURRENT_TEST-}}
"""
TURNED = {
    "==": "!=",
    "!=": "==",
    "<": "<=",
    "<=": "<",
    ">": ">=",
    ">=": ">",
    "in": "not in",
    "not in": "in",
    "is": "is not",
    "is not": "is",
}
OPERATORS = {
    ast.Eq: "==",
    ast.NotEq: "!=",
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
    ast.In: "in",
    ast.NotIn: "not in",
}
OPERATORS |= {ast.Is: "is", ast.IsNot: "is not"}


@dataclass(frozen=True)
class Change:
    """One change: the characters `start` to `end` (bytes of the file) become `text`."""

    file: str
    line: int
    start: int
    end: int
    text: str
    kind: str

    @property
    def key(self) -> str:
        """Name the change, the same in every run over the same source."""
        return f"{self.file}:{self.line}:{self.start}:{self.kind}"


def changes_of(file: Path) -> Iterator[Change]:
    """Yield every change that can be made of a file."""
    source = file.read_bytes()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    name = file.relative_to(ROOT).as_posix()

    def change(node: ast.expr, text: str, kind: str) -> Change:
        start, end = (
            starts[line - 1] + column
            for line, column in ((node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset))
        )
        return Change(name, node.lineno, start, end, text, kind)

    def inside(node: ast.AST) -> Iterator[Change]:
        for child in ast.iter_child_nodes(node):
            yield from inside(child)
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            turned = TURNED[OPERATORS[type(node.ops[0])]]
            left, right = (ast.unparse(part) for part in (node.left, node.comparators[0]))
            yield change(node, f"(({left}) {turned} ({right}))", "comparison")
        elif isinstance(node, ast.BoolOp):
            other = " or " if isinstance(node.op, ast.And) else " and "
            yield change(node, "(" + other.join(f"({ast.unparse(value)})" for value in node.values) + ")", "and/or")
        elif isinstance(node, ast.Constant) and type(node.value) is int:
            yield change(node, f"({node.value + 1})", "number")
        elif isinstance(node, ast.If):
            yield change(node.test, "(False)", "branch")

    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for statement in node.body:
                yield from inside(statement)


def drawn(count: int, seed: int) -> list[Change]:
    """Draw changes from every room of the package."""
    rooms: dict[str, dict[str, Change]] = defaultdict(dict)
    lines: Counter[str] = Counter()
    for file in sorted((ROOT / "zckpt").rglob("*.py")):
        parts = file.relative_to(ROOT).parts
        room = "/".join(parts[: 3 if parts[1] == "formats" else 2])
        lines[room] += file.read_bytes().count(b"\n")
        rooms[room] |= {change.key: change for change in changes_of(file)}  # nested functions are met twice
    chance, chosen = random.Random(seed), []
    for room, found in sorted(rooms.items()):
        wanted = max(AT_LEAST, round(count * lines[room] / lines.total()))
        chosen += chance.sample(list(found.values()), min(wanted, len(found)))
    chance.shuffle(chosen)
    return chosen[:count]


def record(data: Path) -> None:
    """Run the suite, and keep what each test executes, with how long it took."""
    with tempfile.TemporaryDirectory() as work:
        settings, report = Path(work, "coveragerc"), Path(work, "report.xml")
        settings.write_text(COVERAGE.format(data=data.resolve()))
        suite = [sys.executable, "-m", "pytest", "-n", "2", "--dist", "worksteal", "-q", f"--junitxml={report}"]
        covered = ["--cov", f"--cov-config={settings}", "--cov-context=test", "--cov-report="]
        subprocess.run([*suite, *covered], cwd=ROOT, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"})
        combine = [sys.executable, "-m", "coverage", "combine", "--append", f"--rcfile={settings}"]
        subprocess.run(combine, cwd=ROOT, check=False)  # of processes that outlived the suite, if any
        shutil.copy(report, data.with_suffix(".xml"))


class Tests:
    """Which tests execute a line, the quickest first."""

    def __init__(self, data: Path) -> None:
        self._base = sqlite3.connect(data, check_same_thread=False)
        self._contexts = dict(self._base.execute("select id, context from context"))
        self._files = {path: number for number, path in self._base.execute("select id, path from file")}
        self._seconds: dict[str, float] = {}
        for line in data.with_suffix(".xml").read_text().split("<testcase ")[1:]:
            name, module, seconds = (
                line.split(f'{key}="', 1)[1].split('"', 1)[0] for key in ("name", "classname", "time")
            )
            self._seconds[f"{module.replace('.', '/')}.py::{name}"] = float(seconds)

    def of(self, change: Change) -> list[str]:
        """Name the tests that execute the line of a change."""
        number = next((number for path, number in self._files.items() if path.endswith(f"/{change.file}")), None)
        found = set()
        for context, bits in self._base.execute(
            "select context_id, numbits from line_bits where file_id = ?", (number,)
        ):
            if change.line // 8 < len(bits) and bits[change.line // 8] >> change.line % 8 & 1:
                found |= {part.split("|")[0].split(" (")[0] for part in self._contexts[context].split("|")}
        return sorted((test for test in found if "::" in test), key=lambda test: self._seconds.get(test, 60.0))


def tried(change: Change, tests: list[str], house: Path, seconds: int) -> str:
    """Make a change in a copy of the repository, run the tests, and say how it ended: caught, survived, slow."""
    file = house / change.file
    source = file.read_bytes()
    file.write_bytes(source[: change.start] + change.text.encode() + source[change.end :])
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    environment = os.environ | {"PYTHONPATH": str(house), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    running = subprocess.Popen(
        command,
        cwd=house,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        return "survived" if running.wait(seconds) == 0 else "caught"
    except subprocess.TimeoutExpired:
        os.killpg(running.pid, signal.SIGKILL)
        running.wait()
        return "slow"
    finally:
        file.write_bytes(source)


def check(args: argparse.Namespace) -> None:
    """Try the changes, write how each ended, and print the share that is caught."""
    tests = Tests(args.data)
    chosen = drawn(args.changes, args.seed)
    done = {}
    if args.results.exists():
        done = {row["change"]: row for row in map(json.loads, args.results.read_text().splitlines())}
    with (
        tempfile.TemporaryDirectory() as work,
        args.results.open("a") as results,
        ThreadPoolExecutor(args.workers) as pool,
    ):
        houses: Queue[Path] = Queue()
        for number in range(args.workers):
            unwanted = shutil.ignore_patterns(".git", ".venv", "cache", "__pycache__")
            houses.put(Path(shutil.copytree(ROOT, Path(work, str(number)), ignore=unwanted)))

        def one(change: Change) -> None:
            own = tests.of(change)[: args.tests]
            house = houses.get()
            ended = tried(change, own, house, args.seconds) if own else "unreached"
            houses.put(house)
            done[change.key] = {"change": change.key, "text": change.text, "tests": len(own), "ended": ended}
            results.write(json.dumps(done[change.key]) + "\n")
            results.flush()

        list(pool.map(one, (change for change in chosen if change.key not in done)))
    ended = Counter(done[change.key]["ended"] for change in chosen)
    for row in (done[change.key] for change in chosen):
        if row["ended"] != "caught":
            print(f"{row['ended']:9} {row['change']}  {row['text'][:80]}")
    print(f"{dict(ended)}: {ended['caught'] / len(chosen):.1%} of {len(chosen)} caught")


def main() -> None:
    """Record what tests execute, or try changes against them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=["record", "check"])
    parser.add_argument("--data", type=Path, required=True, help="what tests execute; its .xml beside it")
    parser.add_argument("--changes", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--tests", type=int, default=60, help="tests of a change, the quickest")
    parser.add_argument("--seconds", type=int, default=300, help="for the tests of one change")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--results", type=Path, default=Path("mutations.jsonl"))
    args = parser.parse_args()
    record(args.data) if args.step == "record" else check(args)


if __name__ == "__main__":
    main()
