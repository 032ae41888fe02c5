"""A bit flipped, or the end cut off, in files of all formats: `python bench/damage.py [--flips N] [--truncations N]`.

The sources are all fixtures, and what zckpt itself writes: its own format, FSDP's rank files, a store. Each trial
damages one file of a copy, drawn by --seed from all formats alike, and converts it (`--to zckpt`, all that there is).
A trial is refused, or gives the bytes of the undamaged source, or other bytes. Other bytes are listed by format and
kind of file, and are wrong if the file has checksums. Exit 1: some are; or an error was not zckpt's own.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
import zipfile
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path

import zckpt
from zckpt.formats.units import units

FIXTURES = Path(__file__).resolve().parent.parent / "fixtures"


def made(work: Path) -> dict[str, list[Path]]:
    """Return sources that can be converted, by format: copies, which may be damaged, and what zckpt makes."""
    tops = [FIXTURES, *(FIXTURES / name for name in ("other", "universal", "versions"))]
    every = [one for top in tops for one in sorted(top.iterdir()) if one.is_dir() and one not in tops]
    own = work / "own"
    zckpt.convert(FIXTURES / "s2_bf16_dp3", own / "native", to="zckpt", world_size=2)
    zckpt.convert(FIXTURES / "s2_fp32_dp2", own / "ranks", to="fsdp-rank-files", world_size=2)
    zckpt.convert(FIXTURES / "s2_fp32_dp2", own / "torch-checkpointing", to="torch-checkpointing")
    zckpt.consolidate(FIXTURES / "s2_fp32_dp2", own / "model", max_shard_size=10_000)
    zckpt.pack(FIXTURES / "s2_fp32_dp2" / "global_step5", own / "store", name="step5")
    found = defaultdict(list)
    for number, source in enumerate([*every, *sorted(own.iterdir())]):
        copy = work / str(number) / source.name
        shutil.copytree(source, copy)
        for place in (
            [copy / "step5"] if source.name == "store" else [one for unit in units(copy) for one in unit.states]
        ):
            try:
                content(place, work / "clean" / str(number))
                found["store" if source.name == "store" else zckpt.open(place).format].append(place)
            except zckpt.ZckptError:  # truth beside a fixture, or what this verb does not write
                continue
    return found


def content(source: Path, target: Path) -> dict[str, bytes]:
    """Return all files that a conversion writes."""
    try:
        zckpt.convert(source, target, to="zckpt")
        return {str(one.relative_to(target)): one.read_bytes() for one in target.rglob("*") if one.is_file()}
    finally:
        shutil.rmtree(target, ignore_errors=True)


def has_checksum(path: Path, before: bytes, at: int) -> bool:
    """Tell a byte that has a checksum: of torch's archives, which DCP puts one behind the other, and zckpt's files."""
    end = before.rfind(b"PK\5\6") if path.suffix == ".distcp" else len(before) * zipfile.is_zipfile(path)
    return at < end or path.suffix in (".zckpt", ".chunks", ".index")


def flipped(data: bytearray, chance: random.Random) -> None:
    """Flip one bit."""
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)


def cut(data: bytearray, chance: random.Random) -> None:
    """Cut off the end: most often a little, which is what few would notice."""
    del data[chance.choice([max(len(data) - chance.randrange(1, 64), 0), chance.randrange(len(data))]) :]


def trials(
    found: dict[str, list[Path]], count: int, damage: Callable[[bytearray, random.Random], None], seed: int, work: Path
) -> tuple[Counter[tuple[str, str]], list[str]]:
    """Return how many trials of each format ended how, and what went wrong."""
    chance, ended, wrong = random.Random(seed), Counter[tuple[str, str]](), []
    clean: dict[Path, dict[str, bytes]] = {}
    for number in range(count):
        kind = sorted(found)[number % len(found)]
        source = chance.choice(found[kind])
        if source not in clean:
            clean[source] = content(source, work / "target")
        top = source.parent if kind == "store" else source
        files = [one for one in [top, *sorted(top.rglob("*"))] if one.is_file() and one.stat().st_size]
        path = (
            chance.choices(files, [1 + one.stat().st_size for one in files])[0] if number % 2 else chance.choice(files)
        )
        before = path.read_bytes()
        data = bytearray(before)
        damage(data, chance)
        path.write_bytes(data)
        try:
            end = "equal" if content(source, work / "target") == clean[source] else "other"
        except zckpt.ZckptError:
            end = "refused"
        except Exception as error:  # noqa: BLE001  # what must not be
            end = "bare"
            wrong.append(f"{kind}: {path.relative_to(top.parent)}: {error!r}")
        finally:
            path.write_bytes(before)
        if end == "other":
            at = next((n for n, (a, b) in enumerate(zip(before, data, strict=False)) if a != b), len(data))
            checked = has_checksum(path, before, at)
            end = f"other, {'with' if checked else 'without'} checksums: {path.suffix or path.name}"
            if checked:
                wrong.append(f"{kind}: {path.relative_to(top.parent)}: byte {at:,} of {len(before):,}")
        ended[kind, end] += 1
    return ended, wrong


def main() -> int:
    """Run the trials and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flips", type=int, default=5000)
    parser.add_argument("--truncations", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    every = []
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        found = made(work)
        for what, count, damage in (("flips", given.flips, flipped), ("truncations", given.truncations, cut)):
            ended, wrong = trials(found, count, damage, given.seed, work)
            every += wrong
            print(f"{count} {what}")
            for kind in sorted(found):
                ends = {end: n for (of, end), n in sorted(ended.items()) if of == kind}
                print(
                    f"  {kind:22} {len(found[kind]):3} sources  " + ", ".join(f"{n} {end}" for end, n in ends.items())
                )
            total = Counter[str]()
            for (_, end), n in ended.items():
                total[end] += n
            print("  in all: " + ", ".join(f"{n} {end}" for end, n in sorted(total.items())), flush=True)
    print("\n".join(["WRONG", *every] if every else ["none wrong where there are checksums"]))
    return bool(every)


if __name__ == "__main__":
    sys.exit(main())
