"""Which ranks a checkpoint should have files of, and whether those that are there belong together. No layout.

`select` stops at the first problem, as opening does; `survey` reads every file that can be read and returns them all.

What model-parallel ranks have to say alike, for a checkpoint keeps it once: steps, and hyperparameters of slices.

tensor-parallel ranks   have slices of the same groups: all but what is each rank's own, see `values`, is one for all
stages of a pipeline    have groups of their own, with hyperparameters of their own; but all have taken the same steps
model files             say how many steps the run has taken

Data-parallel ranks are held against each other in `ranks`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from os.path import commonprefix
from pathlib import Path
from typing import TypeVar

from zckpt.codes import HYPERPARAMETERS_DIFFER, MISSING_FILE, OTHER_RUN, OTHER_WORLD_SIZE, STEPS_DIFFER, VALUES_DIFFER
from zckpt.errors import DamagedFileError, ShardError, SourceError, listed
from zckpt.formats.deepspeed.directory import MODEL, OPTIMIZER, TagDirectory
from zckpt.formats.deepspeed.origin import Rank
from zckpt.formats.deepspeed.shards import ModelShard, OptimizerShard, read_models, read_optimizer
from zckpt.formats.deepspeed.values import own_hyperparameters
from zckpt.formats.format import Survey
from zckpt.formats.lost import MOST_RANKS, stand_in
from zckpt.formats.remainder import jsonables
from zckpt.formats.torch_files.tensors import describe
from zckpt.state import FOLLOWS_FROM_STEPS, ParamGroup, SourceFile, as_float, differ, number_of, without
from zckpt.storage.nodes import ADVICE
from zckpt.torchfile import plain, read_torchfile

Of = TypeVar("Of", ModelShard, OptimizerShard)

STRUCTURE = ("ZeRO stage", "form of the optimizer state", "number of groups")
PARAM_GROUPS = "param groups"
"""Names of what all ranks' files have in common."""
_CODES = {**dict.fromkeys(STRUCTURE, OTHER_RUN), PARAM_GROUPS: HYPERPARAMETERS_DIFFER}

SHOWN_CHARACTERS = 60

SHOWN_RANKS = 16
"""More ranks than this are counted, not listed."""


def listed_ranks(ranks: Sequence[int]) -> str:
    """Return ranks as text a person can read, however many there are."""
    return listed(ranks, most=SHOWN_RANKS)


def data_parallel_size(models: Sequence[ModelShard], shards: Sequence[OptimizerShard]) -> int:
    """Return the number of ranks that share the state: what most optimizer files say, the model file breaking a tie."""
    recorded = next((n for m in models if type(n := m.content.get("dp_world_size")) is int), None)
    counts = Counter(map(recorded_size, shards)) or Counter([1 if recorded is None else recorded])
    return max(counts, key=lambda size: (size == recorded, counts[size], size))


def recorded_size(shard: OptimizerShard) -> int:
    """Return over how many ranks a file's state is cut: its dense groups, for experts may be over more or fewer."""
    dense = [count for index, count in enumerate(shard.partition_count) if shard.group(index).get("moe") is not True]
    return max(dense or shard.partition_count, default=1)


def missing_ranks(size: int, present: Collection[int]) -> str | None:
    """Return the ranks below `size` that are not present, as text; None if there are none.

    `size` comes from a file and may be any number: nothing here is as large as it.
    """
    count = size - sum(rank < size for rank in present)
    if count <= 0:
        return None
    first = _first_missing(size, present)
    return ", ".join(map(str, first)) + (f" and {count - len(first)} more" if count > len(first) else "")


def missing_files(what: str, size: int, present: Collection[int], path: Path | str | None = None) -> ShardError | None:
    """Return the error for files of ranks below `size` that are not present; None if all are."""
    lost = missing_ranks(size, present)
    if lost is None:
        return None
    return ShardError(
        f"{what} are missing for rank{'s' if ' ' in lost else ''} {lost}",
        path=path,
        expected=f"{size} ranks",
        found="1 file" if len(present) == 1 else f"{len(present)} files",
        advice=ADVICE,
        code=MISSING_FILE,
        ranks=_first_missing(size, present),
    )


def _first_missing(size: int, present: Collection[int]) -> list[int]:
    return list(islice((rank for rank in range(size) if rank not in present), SHOWN_RANKS))


def tied_names(models: Sequence[ModelShard]) -> list[str]:
    """Return names of ZeRO-3 that no file says a shape of, nor whose they are: the first rank's does."""
    known = {*models[0].frozen, *models[0].trained, *(name for one in models for name in one.shared)}
    return [name for name, one in models[0].module.items() if one.shape == (0,) and name not in known]


def with_lost(held: Sequence[Of], what: str, size: int, path: Path, names: Sequence[str] = ()) -> list[Of]:
    """Return files of all ranks: of a lost one, another's structure under its own name.

    What a rank's file says of its own share is left out of it. `names`: that only the first one's has. Raises
    ShardError: files may not be lost.
    """
    by_rank = {one.rank: one for one in held}
    error = missing_files(what, size, by_rank, path)
    if error is None:
        return list(held)
    if not held or size > MOST_RANKS:
        raise error
    for rank in (rank for rank in range(size) if rank not in by_rank):
        name = re.sub(r"zero_pp_rank_[0-9]+", f"zero_pp_rank_{rank}", held[0].shard.name)
        shard = replace(held[0].shard, path=stand_in(error, path / name, names if rank == 0 else ()), dp_rank=rank)
        by_rank[rank] = one = replace(held[0], shard=shard)
        if isinstance(one, OptimizerShard):
            one.paddings = one.mappings = None
            one.masters, one.tensors = list(one.masters), [dict(its) for its in one.tensors]
    return [by_rank[rank] for rank in sorted(by_rank)]


def select(
    directory: Path, models: Sequence[ModelShard], shards: Sequence[OptimizerShard], mp_rank: int
) -> tuple[list[OptimizerShard], dict[str, str]]:
    """Return one optimizer file for each data-parallel rank, in order, and which files are left aside and why.

    Files of higher ranks that themselves tell of a larger world are leftovers; they are left aside with a warning.
    Those that tell of the same one are replicas (MiCS cuts over some of the ranks); one set is enough.

    Raises ShardError: ranks are missing, or a file is from another world size, step or run; DamagedFileError: the files
    speak of a number of ranks that cannot be.
    """
    for problem in problems(directory, models, shards, mp_rank):
        raise problem
    size = data_parallel_size(models, shards)
    by_rank = {shard.rank: shard for shard in shards}
    extra = sorted(rank for rank, shard in by_rank.items() if rank >= size and recorded_size(shard) != size)
    said = f"{directory}: files of ranks {listed_ranks(extra)} are left over from a larger run; not used"
    return [by_rank[rank] for rank in range(size)], {by_rank[rank].path: said for rank in extra}


def problems(
    directory: Path,
    models: Sequence[ModelShard],
    shards: Sequence[OptimizerShard],
    mp_rank: int,
    present: Collection[int] = (),
) -> Iterator[ShardError | DamagedFileError]:
    """Yield what is wrong with the optimizer files of one model-parallel rank, taken together."""
    size = data_parallel_size(models, shards)
    by_rank = {shard.rank: shard for shard in shards}
    if size < 1:
        yield DamagedFileError("unreadable world size", path=directory, expected="at least 1 rank", found=size)
        return
    where = f" of mp_rank {mp_rank}" if mp_rank else ""
    if missing := missing_files(f"optimizer files{where}", size, {*by_rank, *present}, directory):
        yield missing
    members = [by_rank[rank] for rank in sorted(by_rank) if rank < size]
    stale = [m.rank for m in members if recorded_size(m) != size]
    if stale:
        found = sorted({recorded_size(by_rank[r]) for r in stale})
        yield ShardError(
            f"rank {listed_ranks(stale)} is from a run with another world size",
            path=by_rank[stale[0]].path,
            expected=f"{size} ranks",
            found=listed_ranks(found),
            advice="remove or replace it",
            code=OTHER_WORLD_SIZE,
            ranks=stale,
        )
    alike = [member for member in members if member.rank not in stale]
    if alike:
        # Of the run, less the skipped ones or not: with which of these an optimizer's files may go.
        steps, skipped = (models[0].content.get(key) for key in ("global_steps", "skipped_steps"))
        skipped = skipped if type(skipped) is int else 0
        yield from _differences(alike, {_number(steps), _number(steps - skipped)} if type(steps) is int else set())


def check_models(models: Sequence[ModelShard], word: str, steps: Collection[object] = ()) -> None:
    """Raise ShardError if the model files of several ranks are of different steps.

    `word`: {"rank", "mp_rank"}, what they are numbered by; `steps`: those that the optimizer's files speak of: where as
    many files say one as another, it is one of these.
    """
    found = [repr(plain(model.content.get("global_steps"))) for model in models]
    usual, odd = _odd_ones(found, {_number(step).removesuffix(".0") for step in steps})
    if odd:
        numbers = [getattr(models[index], word) for index in odd]
        raise ShardError(
            f"model file of {word} {listed_ranks(numbers)} is from another step",
            path=models[odd[0]].path,
            expected=f"step {usual}",
            found=found[odd[0]],
            advice="replace it with the file of this step",
            code=STEPS_DIFFER,
            ranks=numbers if word == "rank" else (),
        )


def _odd_ones(values: Sequence[str | None], preferred: Collection[str]) -> tuple[str, list[int]]:
    """Return the usual value, one of `preferred` where several are as usual, and which others differ from it."""
    counts = Counter(value for value in values if value is not None)
    if len(counts) < 2:
        return next(iter(counts), ""), []
    usual = max(counts, key=lambda value: (counts[value], value in preferred))
    return usual, [index for index, value in enumerate(values) if value not in (None, usual)]


def _differences(members: Sequence[OptimizerShard], steps: Collection[str]) -> Iterator[ShardError]:
    """Yield in what some ranks' files differ from the rest that all ranks have in common; of each rank the first."""
    seen: set[int] = set()  # by their places among `members`
    for what, facts in _common_facts(members).items():
        usual, odd = _odd_ones(facts, steps)
        odd = [index for index in odd if index not in seen]
        if not odd:
            continue
        seen.update(odd)
        ranks, first = [members[index].rank for index in odd], odd[0]
        texts, begin = [usual, facts[first] or ""], 0
        if max(map(len, texts)) > SHOWN_CHARACTERS:  # where they first differ is shown, from the word before it on
            at = len(commonprefix(texts))  # noqa: RUF071  # of characters
            begin = max(usual.rfind(", '", 0, at), usual.rfind("{", 0, at), 0) + 1
        texts = [text[begin:].strip() for text in texts]
        told, other = (t if len(t) <= SHOWN_CHARACTERS else t[: SHOWN_CHARACTERS - 3] + "..." for t in texts)
        their = "differ" if what == PARAM_GROUPS else "differs"
        said = f"rank {listed_ranks(ranks)} is from another step or run: its {what} {their}"
        if facts.count(usual) == facts.count(facts[first]) and usual not in steps:  # nobody can tell which are right
            ranks = [m.rank for m, fact in zip(members, facts, strict=True) if fact is not None]
            said = f"ranks {listed_ranks(ranks)} are from different steps or runs: their {what} {their}"
        yield ShardError(
            said,
            path=members[first].path,
            expected=told,
            found=other,
            advice="replace it with the file of this step",
            code=_CODES.get(what, STEPS_DIFFER if what.startswith("step of") else VALUES_DIFFER),
            ranks=ranks,
        )


def _number(value: object) -> str:
    """Return a single value as text that does not depend on how it was stored."""
    number = as_float(value)
    return repr(plain(number_of(value)) if number is None else number)


def _common_facts(members: Sequence[OptimizerShard]) -> dict[str, list[str | None]]:
    """Return facts that must be alike on all ranks, as comparable text; None where a rank does not have one."""
    stage, form, count = STRUCTURE
    facts: dict[str, list[str | None]] = {
        stage: [str(m.stage) for m in members],
        form: ["elastic" if m.elastic else "rigid" for m in members],
        count: [str(len(m.masters)) for m in members],
    }
    if differ(facts[count]):
        return facts
    for index in range(len(members[0].masters)):
        states = [member.scalars[index] for member in members]
        for key in dict.fromkeys(key for state in states for key in state if key in FOLLOWS_FROM_STEPS):
            facts[f"{key} of group {index}"] = [_number(state[key]) if key in state else None for state in states]
    own = dict(enumerate(own_hyperparameters(members, index) for index in range(len(members[0].groups))))
    shared = [[without(g, *own.get(i, ())) for i, g in enumerate(m.groups)] for m in members]
    facts[PARAM_GROUPS] = [repr(jsonables(groups)) if groups else None for groups in shared]
    facts["loss scale"] = [repr(plain(m.content.get("loss_scaler"))) for m in members]
    return facts


def survey(directory: TagDirectory) -> Survey:
    """Return the files that can be read, and an error for each other one and for what ranks disagree on."""
    from zckpt.formats.deepspeed.layouts.layout import in_one_order

    files: list[SourceFile] = []
    errors: list[SourceError] = []
    models: list[ModelShard] = []
    shards: list[OptimizerShard] = []
    unread: list[tuple[int, int]] = []  # optimizer files
    for shard in directory.shards:
        try:
            if shard.role == MODEL:
                models += read_models([shard])
                file = models[-1].file
            elif shard.role == OPTIMIZER:
                shards.append(read_optimizer(shard))
                file = shards[-1].file
            else:
                file = read_torchfile(shard.path)
            files.append(describe(file, shard.role, shard.dp_rank, shard.mp_rank))
        except SourceError as error:
            if not error.ranks and shard.dp_rank is not None:
                error.ranks = (shard.dp_rank,)
            if shard.role == OPTIMIZER:
                unread.append((shard.mp_rank or 0, shard.dp_rank or 0))
            errors.append(error)
    for mp_rank in sorted({m.mp_rank for m in models} | {s.mp_rank for s in shards}):
        own = [m for m in models if m.mp_rank == mp_rank]
        its = in_one_order([s for s in shards if s.mp_rank == mp_rank])
        there = [rank for mp, rank in unread if mp == mp_rank]
        if own and (its or there):
            errors += problems(directory.path, own, its, mp_rank, there)
    return Survey(files, errors)


def check_slices_alike(states: Sequence[Rank]) -> None:
    """Raise ShardError where tensor-parallel ranks have other steps or other hyperparameters of a group.

    All have the same parameters and groups.
    """
    rows = list(zip(*(state.param_groups for state in states), strict=False))
    _check_steps(states, rows)
    for index, (mine, *others) in enumerate(rows):
        for state, its in zip(states[1:], others, strict=True):
            first, second = jsonables([mine.hyperparameters, its.hyperparameters])
            for key in dict.fromkeys([*first, *second]):
                one, another = repr(first.get(key)), repr(second.get(key))
                if one != another:
                    what = (
                        f"{key} of its param group {index} differs from that of mp_rank {states[0].mp_rank}, which has "
                        f"slices of the same parameters"
                    )
                    raise _other_run(what, state.mp_rank, one, another, HYPERPARAMETERS_DIFFER)
    for name, parameter in states[0].parameters.items():  # without ZeRO, each has its own
        for other in states[1:] if parameter.state else ():
            _check_same(parameter.state, other.parameters[name].state, name, other.mp_rank)


def check_stages_alike(stages: Sequence[Rank], rows: Sequence[Sequence[ParamGroup | None]]) -> None:
    """Raise ShardError where stages have taken other steps with what they have of a group, or with all that they have.

    `rows`: for each group of the training what each stage has of it.
    """
    _check_steps(stages, rows)
    taken = [(stage, {_number(g.state["step"]) for g in stage.param_groups if "step" in g.state}) for stage in stages]
    taken = [(stage, steps) for stage, steps in taken if steps]
    for stage, steps in taken[1:]:
        if steps.isdisjoint(taken[0][1]):
            expected, found = (listed(sorted(map(str, one))) for one in (taken[0][1], steps))
            raise _other_run("step of its param groups differs", stage.mp_rank, expected, found)


def _check_steps(states: Sequence[Rank], rows: Sequence[Sequence[ParamGroup | None]]) -> None:
    for index, row in enumerate(rows):
        known = [(state, group.state) for state, group in zip(states, row, strict=True) if group is not None]
        for state, its in known[1:]:
            _check_same(known[0][1], its, f"its param group {index}", state.mp_rank)


def _check_same(mine: Mapping[str, object], its: Mapping[str, object], whose: str, mp_rank: int) -> None:
    for key in sorted(FOLLOWS_FROM_STEPS & mine.keys() & its.keys()):
        if (one := _number(mine[key])) != (another := _number(its[key])):
            raise _other_run(f"{key} of {whose} differs", mp_rank, one, another)


def _other_run(what: str, mp_rank: int, expected: str, found: str, code: str = STEPS_DIFFER) -> ShardError:
    return ShardError(
        f"mp_rank {mp_rank} is from another step or run: {what}",
        expected=expected,
        found=found,
        advice="replace its files with those of this step",
        code=code,
    )
