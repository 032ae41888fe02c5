"""Runs targets: a process for each, one after the other or several at once, and says what was found.

    python -m tests.fuzz.run --time 60                    all targets, each its part of a minute
    python -m tests.fuzz.run --time 600 --target pickle   one
    python -m tests.fuzz.run --lines                      replays what was kept, and counts lines of the readers

Where something else than a result or a ZckptError came out, the input and the traceback are kept below `--out`, once
for each place in the library; the target goes on. What hangs or takes too much memory by Python's doing is found the
same way, else by libFuzzer, and the target begins again. Exit status 1: there was a find.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import mmap
import os
import random
import re
import resource
import signal
import struct
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NoReturn

ROOT = Path(__file__).parents[2]
HANG_SECONDS = 10
STUCK_SECONDS = 120
"""Of a process that reads one input, or makes its seeds, on a machine that does other things, too."""

MEMORY_NBYTES = 1 << 30
OF_OTHERS = re.compile(r"zckpt\.(?:cli|optim|training|dcp|deepspeed|executors|hf|accelerate|lightning|torchtitan|"
                       r"__main__|engine\.tensors)\b")  # fmt: skip
"""What needs torch or another program, and reads no file by itself."""

READERS = re.compile(
    r"zckpt/(?:torchfile/(?!pickle_stream|pickle_writer)|formats/(?!.*(?:write|target|recut|strip|options|in_place|"
    r"restage|suffixes|format\.py))|naming/(?:document|axes|sizes|taken|apply)|storage/(?:files|journal|packed/(?!write)|"
    r"remote/(?:web|s3|stores|addresses)|stand_ins)|compare/digests|operations/(?:open|inspect)\b)"
)
"""Of which the lines are counted: what reads; of storage, formats and maps not what writes."""

QUICK = re.compile(r"zckpt/(?:torchfile/(?!pickle_writer)|formats/safetensors/file|storage/remote/(?:web|s3)\b)")
"""Of which the branches guide the fuzzer in a short run: what is read hundreds of times in a second. To let the others
tell their branches takes as long as a quarter of a minute's fuzzing, and makes them slower."""

LONG = 300
"""Seconds from which on the branches of everything guide the fuzzer."""

COUNTS = ("executions", "accepted", "refused", "finds", "last_find")


class HangError(BaseException):
    """Ten seconds of computing for one input."""


class Counter:
    """Numbers that another process sees, and the input that is being read."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 8 * len(COUNTS))
        self._input = mmap.mmap(-1, 1 << 16)

    @property
    def being_read(self) -> bytes:
        return self._input[4 : 4 + int.from_bytes(self._input[:4], "little")]

    @being_read.setter
    def being_read(self, data: bytes) -> None:
        self._input[: 4 + len(data)] = len(data).to_bytes(4, "little") + data

    def add(self, name: str, number: int = 1) -> int:
        at = 8 * COUNTS.index(name)
        value = struct.unpack_from("<q", self._memory, at)[0] + number
        struct.pack_into("<q", self._memory, at, value)
        return value

    def get(self) -> dict[str, int]:
        return dict(zip(COUNTS, struct.unpack(f"<{len(COUNTS)}q", self._memory[:]), strict=True))


class Watched:
    """A target whose every outcome is counted, and kept where it is a find."""

    def __init__(self, name: str, run: Callable[[bytes], object], counts: Counter, out: Path) -> None:
        self.name, self._run, self._counts, self._out = name, run, counts, out
        self._known: set[str] = set()

    def __call__(self, data: bytes) -> None:
        from tests.fuzz.oracles import check_error
        from zckpt.errors import ZckptError

        self._counts.being_read = data
        executions = self._counts.add("executions")
        signal.setitimer(signal.ITIMER_VIRTUAL, HANG_SECONDS)
        try:
            try:
                self._run(data)
                self._counts.add("accepted")
            except ZckptError as error:
                self._counts.add("refused")
                check_error(error)
        except (Exception, HangError) as error:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            self._counts.add("finds")
            self._counts.add("last_find", executions - self._counts.get()["last_find"])
            self._keep(data, error)
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)

    def _keep(self, data: bytes, error: BaseException) -> None:
        frames = traceback.extract_tb(error.__traceback__)
        own = [one for one in frames if "/zckpt/" in one.filename] or frames
        place = f"{Path(own[-1].filename).stem}-{own[-1].lineno}" if own else ""
        if isinstance(error, HangError):  # the place is another each time
            place = next((f"{Path(one.filename).stem}-{one.lineno}" for one in own), "")
        key = re.sub(r"[^\w-]", "_", f"{self.name}-{type(error).__name__}-{place}")
        if key not in self._known and len(self._known) < 200:
            self._known.add(key)
            self._out.mkdir(parents=True, exist_ok=True)
            if not (self._out / f"{key}.bin").exists():
                (self._out / f"{key}.bin").write_bytes(data)
                text = "".join(traceback.format_exception(error))[-6000:]
                (self._out / f"{key}.txt").write_text(text, "utf-8", "replace")


def interrupt(_signal: int, _frame: FrameType | None) -> NoReturn:
    """End what computes for too long; for `SIGVTALRM`."""
    raise HangError


def limited() -> None:
    """Let memory that is asked for without measure be refused, and what computes without an end be interrupted."""
    signal.signal(signal.SIGVTALRM, interrupt)
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_NBYTES, MEMORY_NBYTES))
    warnings.simplefilter("ignore")
    sys.set_int_max_str_digits(4300)
    time.sleep = lambda _: None  # type: ignore[assignment]  # what asks a server again does not wait


def modules() -> dict[str, Path]:
    """Return all that a target may import, and its file; to walk the packages would import torch, too."""
    paths = {path: path.relative_to(ROOT).with_suffix("") for path in sorted((ROOT / "zckpt").rglob("*.py"))}
    found = {".".join(one.parts).removesuffix(".__init__"): path for path, one in paths.items()}
    return {name: path for name, path in found.items() if not OF_OTHERS.match(name)}


def import_readers() -> None:
    """Import all that is not imported before it is needed."""
    for name in modules():
        import_module(name)


def fuzz(name: str, counts: Counter, args: argparse.Namespace, seconds: float, seed: int) -> NoReturn:
    """Run one target in this process, which ends with it."""
    import atheris

    from tests.fuzz.targets import TARGETS, mended

    target = TARGETS[name]
    corpus, out = args.out / "corpus" / name, args.out / "finds"
    corpus.mkdir(parents=True, exist_ok=True)
    for one in target.seeds():
        (corpus / hashlib.sha1(one).hexdigest()).write_bytes(one)
    for one in (Path(__file__).parent / "corpus" / name).glob("*"):
        (corpus / one.name).write_bytes(one.read_bytes())
    descriptor = os.open(args.out / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    limited()

    def mutate(data: bytes, most: int, number: int) -> bytes:
        chosen = random.Random(number)
        if chosen.random() < 0.7:
            return atheris.Mutate(data, len(data))
        return mended(data, chosen.randbytes(5 * chosen.choice((1, 1, 2, 3))))[:most]

    flags = [f"-max_total_time={int(seconds) or 1}", f"-seed={seed}", f"-max_len={target.most}", "-timeout=1200",
             f"-rss_limit_mb={MEMORY_NBYTES >> 20}", f"-artifact_prefix={out}/{name}-killed-", "-print_final_stats=1",
             "-len_control=0", "-reload=0", *([f"-runs={args.runs}"] if args.runs else [])]  # fmt: skip
    more = {"custom_mutator": mutate} if target.mends else {}
    atheris.Setup(["fuzz", *flags, str(corpus)], Watched(name, target.run, counts, out), **more)
    atheris.Fuzz()
    raise AssertionError


def run_all(args: argparse.Namespace) -> int:
    import atheris

    others = [name for name, path in modules().items() if args.time < LONG and not QUICK.search(str(path))]
    with atheris.instrument_imports(include=["zckpt"], exclude=others):
        import_readers()
    from tests.fuzz.places import gathered
    from tests.fuzz.targets import TARGETS

    names = args.target or list(TARGETS)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "finds").mkdir(exist_ok=True)
    part = args.time * args.jobs / len(names)
    several = math.ceil(part / args.time)  # processes of a target, none of which has longer than there is
    counts = {name: [Counter() for _ in range(several)] for name in names}
    waiting = [(name, one, part / several) for name, each in counts.items() for one in each]
    running: dict[int, tuple[str, Counter, float]] = {}
    number = 0
    with gathered():
        while waiting or running:
            while waiting and len(running) < args.jobs:
                name, count, seconds = waiting.pop(0)
                number += 1
                pid = os.fork()
                if pid == 0:
                    fuzz(name, count, args, seconds, args.seed + number)
                running[pid] = name, count, time.monotonic() + seconds
            pid, status = ended(running)
            name, count, until = running.pop(pid)
            left = until - time.monotonic()
            if status:
                count.add("finds")
                (args.out / "finds" / f"{name}-killed-{number}.bin").write_bytes(count.being_read)
                text = f"status {status}\n{(args.out / f'{name}.log').read_text(errors='replace')[-4000:]}"
                (args.out / "finds" / f"{name}-killed-{number}.txt").write_text(text)
                waiting += [(name, count, left)] if left > 2 else []
    return report(counts, args)


def ended(running: dict[int, tuple[str, Counter, float]]) -> tuple[int, int]:
    """Wait until a process has ended; one that gets nowhere is killed."""
    seen = {pid: (count.get(), time.monotonic()) for pid, (_, count, _) in running.items()}
    while True:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in running:
            return pid, status
        time.sleep(0.1)
        for one, (_, count, _) in running.items():
            now = count.get()
            if now != seen[one][0]:
                seen[one] = now, time.monotonic()
            elif time.monotonic() - seen[one][1] > STUCK_SECONDS:
                os.kill(one, signal.SIGKILL)


def report(counts: dict[str, list[Counter]], args: argparse.Namespace) -> int:
    """Print what was run, and keep it."""
    found = {}
    for name, several in counts.items():
        each = [one.get() for one in several]
        found[name] = {key: sum(one[key] for one in each) for key in COUNTS} | covered(args.out / f"{name}.log")
        found[name]["clean"] = sum(one["executions"] - one["last_find"] for one in each)
    (args.out / f"totals-{int(time.time())}-{os.getpid()}.json").write_text(json.dumps(found))
    columns = {"executions": 12, "accepted": 12, "refused": 12, "finds": 8, "clean": 12, "branches": 10}
    print(f"{'target':<18}" + "".join(f"{key:>{width}}" for key, width in columns.items()))
    for name, one in found.items():
        print(f"{name:<18}" + "".join(f"{one[key]:>{width},}" for key, width in columns.items()))
    total = {key: sum(one[key] for one in found.values()) for key in ("executions", "finds", "clean")}
    print(f"{total['executions']:,} executions, {total['finds']:,} finds, {total['clean']:,} executions since the last "
          f"find of each target; kept in {args.out}")  # fmt: skip
    return int(total["finds"] > 0)


def covered(log: Path) -> dict[str, int]:
    """Return how many branches of the library libFuzzer has seen."""
    found = re.findall(r"cov: (\d+)", log.read_text(errors="replace")) if log.exists() else []
    return {"branches": int(found[-1]) if found else 0}


# --- lines


def lines_of(code: CodeType) -> Iterator[tuple[str, int]]:
    """Yield the lines of a module's functions, which importing does not run."""
    for one in code.co_consts:
        if isinstance(one, CodeType):
            if one.co_flags & 2:  # a function's, not a class's
                lines = {line for *_, line in one.co_lines() if line is not None} - {one.co_firstlineno}
                yield from ((one.co_filename, line) for line in lines)
            yield from lines_of(one)


@contextmanager
def traced(seen: set[tuple[str, int]]) -> Iterator[None]:
    """Note the lines of readers that run."""

    def line(frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            seen.add((frame.f_code.co_filename, frame.f_lineno))
        return line

    def call(frame: FrameType, _event: str, _: Any) -> Any:
        return line if READERS.search(frame.f_code.co_filename) else None

    sys.settrace(call)
    try:
        yield
    finally:
        sys.settrace(None)


def count_lines(args: argparse.Namespace) -> int:
    import_readers()
    from tests.fuzz.targets import TARGETS

    limited()
    seen: set[tuple[str, int]] = set()
    for name in args.target or TARGETS:
        watched = Watched(name, TARGETS[name].run, Counter(), args.out / "finds")
        paths = sorted({*(args.out / "corpus" / name).glob("*"), *(Path(__file__).parent / "corpus" / name).glob("*")})
        with traced(seen):
            for one in [*TARGETS[name].seeds(), *(path.read_bytes() for path in paths)]:
                watched(one)
    every = set()
    for module in list(sys.modules.values()):
        path = getattr(module, "__file__", None) or ""
        if module.__name__.startswith("zckpt") and READERS.search(path):
            every |= set(lines_of(compile(Path(path).read_text("utf-8"), path, "exec")))
    share = len(seen & every) / len(every)
    print(f"{len(seen & every):,} of {len(every):,} lines of the readers' functions: {share:.1%}")
    by_file: dict[str, list[int]] = {}
    for path, line_number in every - seen:
        by_file.setdefault(path, []).append(line_number)
    missed = {path: sorted(some) for path, some in sorted(by_file.items(), key=lambda one: -len(one[1]))}
    (args.out / "missed.json").write_text(json.dumps(missed, indent=1))
    return 0


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--time", type=float, default=60, help="seconds, of all targets together")
    options.add_argument("--runs", type=int, default=0, help="executions of each target, at most")
    options.add_argument("--target", action="append", help="one of them; may be repeated")
    options.add_argument("--jobs", type=int, default=1, help="processes at once")
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--out", type=Path, default=Path("build/fuzz"))
    options.add_argument("--lines", action="store_true")
    args = options.parse_args()
    args.out = args.out.absolute()
    return count_lines(args) if args.lines else run_all(args)


if __name__ == "__main__":
    sys.exit(main())
