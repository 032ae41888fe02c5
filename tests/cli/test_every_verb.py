"""What every verb that writes does alike: what it prints where, what it refuses, and that nothing else is touched."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.console import copy, printed, refused, succeeded
from tests.folders import contents, names_in, nbytes_in, snapshot
from tests.pairwise import each

SOURCE = "fixtures/s2_bf16_dp2"
VERBS = {
    "consolidate": ("m.safetensors", "--slots all"),
    "consolidate to torch": ("m.pt", "--slots all"),
    "consolidate to a directory": ("m", "--slots all --max-shard-size 1KB"),
    "convert": ("m", "--to consolidated"),
    "convert to dcp": ("m", "--to dcp"),
    "reshard": ("m", "--world-size 3"),
    "strip": ("m", "--padding"),
    "sanitize": ("m", ""),
}
"""The verb's target and options."""


def of(verb: str, target: Path | str | None = None, *, source: Path | str = SOURCE) -> str:
    """A command, which writes to the verb's target or to another."""
    own, options = VERBS[verb]
    return f"{verb.partition(' ')[0]} {source} {target or own} {options}"


# --- what is printed


@pytest.mark.parametrize("verb", VERBS)
def test_a_dry_run_tells_exactly_what_is_written_and_the_document_is_one(verb):
    planned = printed(of(verb), "--dry-run")
    assert snapshot() == {}
    written = printed(of(verb))
    assert sorted(written["files"]) == sorted(contents())
    assert written["write_nbytes"] == nbytes_in(".")
    assert (planned.pop("dry_run"), written.pop("dry_run")) == (True, False)
    assert planned.pop("checksummed_nbytes") == 0
    assert written.pop("checksummed_nbytes") > 0
    assert planned.pop("foresight")["num_files"] == len(contents())
    written.pop("foresight", None)
    assert planned == written
    assert verb not in ("consolidate", "reshard") or written["checked_elements"] > 0


@pytest.mark.parametrize(("verb", "quiet"), each(VERBS, ["--quiet", "-q"]))
def test_what_a_person_reads_and_what_is_there_is_replaced_only_when_told_and_only_if_it_is_a_target(verb, quiet):
    target = Path(VERBS[verb][0])
    planned = succeeded(of(verb), "--dry-run").stdout
    assert "would write" in planned
    assert snapshot() == {}
    done = succeeded(of(verb))
    assert done.stdout == ""
    assert f"wrote {target}" in done.stderr
    assert verb != "reshard" or all(name in planned for name in contents())
    before = snapshot()
    refused(4, of(verb), words=(f"zckpt: {target.stem}", "already exists", "--overwrite"))
    assert snapshot() == before
    done = succeeded(of(verb), "--overwrite", quiet)
    assert (done.stdout, done.stderr) == ("", "")
    assert snapshot().keys() == before.keys()
    if target.is_dir():
        (target / "mine.txt").write_text("precious")
        before = snapshot()
        refused(4, of(verb), "--overwrite", words="mine.txt")
        assert snapshot() == before


@pytest.mark.parametrize("verb", VERBS)
def test_targets_that_cannot_be_are_refused_before_anything_is_written(verb):
    target = Path(VERBS[verb][0])
    Path("file").touch()
    refused(4, of(verb, f"file/{target}"), words=(f"zckpt: file/{target.stem}", "a directory file"))
    refused(4, of(verb, "x" * 300 + target.suffix))
    target.symlink_to("nowhere")
    refused(4, of(verb))
    assert names_in() == ["file", target.name]
    assert target.is_symlink()
    refused(4, of(verb, f"/proc/{target}"))


@pytest.mark.parametrize("verb", [verb for verb, (target, _) in VERBS.items() if target == "m"])
def test_the_source_is_neither_replaced_nor_written_into(verb):
    """What is written into it would be read with it from then on, and lost with it."""
    Path("around").mkdir()
    source = copy("s2_bf16_dp2", "around")
    before = snapshot()
    tag = source / "global_step5"
    targets = [(read, target) for read in (source, tag) for target in (source, tag, source.parent)]
    if "consolidate" not in verb:
        targets += [(source, tag / "cut"), (tag, tag / "cut")]
    if verb in ("reshard", "strip", "sanitize"):  # the others may write a checkpoint beside those of a run
        targets += [(source, source / "cut")]
    for read, target in targets:
        refused(2, of(verb, target, source=read), "--overwrite", words="source")
        assert snapshot() == before


# --- the source


@pytest.mark.parametrize(("verb", "name"), each(VERBS, ["s2_bf16_dp4", "s3_bf16_dp4"]))
def test_a_missing_rank_is_named_and_nothing_is_written(verb, name):
    source = copy(name)
    (source / "global_step5/bf16_zero_pp_rank_2_mp_rank_00_optim_states.pt").unlink()
    refused(3, of(verb, source=source), words=("rank 2", "missing"))
    refused(3, of(verb, source="absent"), words="absent")
    assert names_in() == [name]
