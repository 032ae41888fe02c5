"""What every verb that writes does alike: what it prints where, what it refuses, and that nothing else is touched."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.cli.console import FIXTURES, copy, refused, succeeded
from tests.folders import snapshot
from tests.pairwise import each

SOURCE = FIXTURES / "s2_bf16_dp2"
VERBS: dict[str, tuple[object, ...]] = {
    "consolidate": ("m.safetensors", "--slots", "all"),
    "consolidate to torch": ("m.pt", "--slots", "all"),
    "consolidate to a directory": ("m", "--slots", "all", "--max-shard-size", "1KB"),
    "convert": ("m", "--to", "consolidated"),
    "convert to dcp": ("m", "--to", "dcp"),
    "reshard": ("m", "--world-size", 3),
    "strip": ("m", "--padding"),
    "sanitize": ("m",),
}
OF_DIRECTORIES = [verb for verb, (target, *_) in VERBS.items() if target == "m"]


def of(verb: str, target: Path | None = None, *, below: Path = Path(), source: Path = SOURCE) -> tuple[object, ...]:
    """The words of a command, which writes to the verb's target below a directory, or to another."""
    name, *options = VERBS[verb]
    return verb.partition(" ")[0], source, target or below / str(name), *options


# --- what is printed


@pytest.mark.parametrize("verb", VERBS)
def test_a_dry_run_tells_exactly_what_is_written_and_the_document_is_one(verb, tmp_path):
    command = (*of(verb, below=tmp_path), "--json")
    planned = json.loads(succeeded(*command, "--dry-run").stdout)
    assert snapshot(tmp_path) == {}
    written = json.loads(succeeded(*command).stdout)
    files = sorted(str(path) for path in tmp_path.rglob("*") if path.is_file())
    assert sorted(written["files"]) == files
    assert written["write_nbytes"] == sum(Path(path).stat().st_size for path in files)
    assert (planned.pop("dry_run"), written.pop("dry_run")) == (True, False)
    assert planned.pop("checksummed_nbytes") == 0
    assert written.pop("checksummed_nbytes") > 0
    assert planned.pop("foresight")["num_files"] == len(files)
    written.pop("foresight", None)
    assert planned == written
    assert verb not in ("consolidate", "reshard") or written["checked_elements"] > 0


@pytest.mark.parametrize(("verb", "quiet"), each(VERBS, ["--quiet", "-q"]))
def test_what_a_person_reads_and_what_is_there_is_replaced_only_when_told_and_only_if_it_is_a_target(
    verb, quiet, tmp_path
):
    target = tmp_path / str(VERBS[verb][0])
    planned = succeeded(*of(verb, target), "--dry-run").stdout
    assert "would write" in planned
    assert snapshot(tmp_path) == {}
    done = succeeded(*of(verb, target))
    assert done.stdout == ""
    assert str(target) in done.stderr
    assert verb != "reshard" or all(str(path) in planned for path in tmp_path.rglob("*") if path.is_file())
    before = snapshot(tmp_path)
    refused(4, *of(verb, target), words=(str(target.with_suffix("")), "already exists", "--overwrite"))
    assert snapshot(tmp_path) == before
    done = succeeded(*of(verb, target), "--overwrite", quiet)
    assert (done.stdout, done.stderr) == ("", "")
    assert snapshot(tmp_path).keys() == before.keys()
    if target.is_dir():
        (target / "mine.txt").write_text("precious")
        before = snapshot(tmp_path)
        refused(4, *of(verb, target), "--overwrite", words=("mine.txt",))
        assert snapshot(tmp_path) == before


@pytest.mark.parametrize("verb", VERBS)
def test_targets_that_cannot_be_are_refused_before_anything_is_written(verb, tmp_path):
    name = str(VERBS[verb][0])
    (tmp_path / "file").touch()
    refused(4, *of(verb, tmp_path / "file" / name), words=(str(tmp_path / "file"), "a directory"))
    refused(4, *of(verb, tmp_path / ("x" * 300 + Path(name).suffix)))
    (tmp_path / name).symlink_to(tmp_path / "nowhere")
    refused(4, *of(verb, tmp_path / name))
    assert {path.name for path in tmp_path.iterdir()} == {"file", name}
    assert (tmp_path / name).is_symlink()
    refused(4, *of(verb, Path("/proc") / name))


@pytest.mark.parametrize("verb", OF_DIRECTORIES)
def test_the_source_is_neither_replaced_nor_written_into(verb, tmp_path):
    """What is written into it would be read with it from then on, and lost with it."""
    source = copy("s2_bf16_dp2", tmp_path / "around")
    before = snapshot(tmp_path)
    tag = source / "global_step5"
    targets = [(read, target) for read in (source, tag) for target in (source, tag, source.parent)]
    if "consolidate" not in verb:
        targets += [(source, tag / "cut"), (tag, tag / "cut")]
    if verb in ("reshard", "strip", "sanitize"):  # the others may write a checkpoint beside those of a run
        targets += [(source, source / "cut")]
    for read, target in targets:
        refused(2, *of(verb, target, source=read), "--overwrite", words=("source",))
        assert snapshot(tmp_path) == before


# --- the source


@pytest.mark.parametrize(("verb", "name"), each(VERBS, ["s2_bf16_dp4", "s3_bf16_dp4"]))
def test_a_missing_rank_is_named_and_nothing_is_written(verb, name, tmp_path):
    source = copy(name, tmp_path)
    (source / "global_step5" / "bf16_zero_pp_rank_2_mp_rank_00_optim_states.pt").unlink()
    refused(3, *of(verb, below=tmp_path, source=source), words=("rank 2", "missing"))
    refused(3, *of(verb, below=tmp_path, source=tmp_path / "absent"), words=("absent",))
    shutil.rmtree(source)
    assert snapshot(tmp_path) == {}
