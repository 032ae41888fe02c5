"""Readers, a training that saves, prunes and packs at one run's directory at once, in any order of their system calls.

Each is a process that is stopped before each of its calls about the run, and hypothesis says whose turn it is, and for
how many calls. So an order that goes wrong is found again, and becomes short. What holds:

- whoever reads has a checkpoint of one step, whole, or an error in one line;
- what `latest` names is there and whole at every moment;
- what has a name is whole, whoever writes and removes; the last ones stay;
- what a store has is what was saved, and a pack beside a prune has all of a checkpoint or none of it.
"""

from __future__ import annotations

import shutil
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests import gloo
from tests.cli.console import run
from tests.faults.system_calls import SYNCING, Answer, Call, Supervised, can_ask, real_syncs
from tests.faults.verbs import RUN, called, checkpointer, held, saved, trained, tree, unpacked, whole_save
from tests.pairwise import some
from zckpt.errors import ZckptError
from zckpt.training.run_directory import unsound

pytestmark = can_ask

FIRST = (1, 2)
ACTORS = 4
"""At once."""


def expected(step: int) -> list[Any]:
    return [step, *held(*trained(step))]


def resume(out: Path) -> None:
    """Resume, as a training does that begins; what it loads is of one step."""
    model, optimizer = trained(0)
    restored = checkpointer(out).resume(model=model, optimizer=optimizer)
    assert [restored.step, *held(model, optimizer)] == expected(restored.step)


def consolidate(out: Path) -> Any:
    return run("consolidate", out / RUN, out / "model.safetensors", "--overwrite")


def prune(out: Path) -> Any:
    return run("prune", out / RUN, "--keep-last", "1", "--settle", "0", "--delete")


def pack(out: Path) -> Any:
    return run("pack", out / RUN, out / "store")


def verify(out: Path) -> Any:
    return run("fingerprint", out / RUN)


READERS: list[Callable[[Path], Any]] = [resume, consolidate, verify, prune, pack]


class Together(RuleBasedStateMachine):
    """The actors, and whose turn it is."""

    def __init__(self) -> None:
        super().__init__()
        self.base = Path(tempfile.mkdtemp(prefix="zckpt-together-"))
        self.out = self.base / "out"
        shutil.copytree(BEGUN["run"], self.out)
        self.actors: list[tuple[str, Supervised]] = []
        self.step = max(FIRST)
        self.number = 0

    def begin(self, act: Callable[[Path], Any]) -> None:
        self.number += 1
        said = self.base / f"{self.number}.said"

        def acting() -> int:
            try:
                done = act(self.out)
                done = called(lambda _: None, self.out) if done is None else done
            except Exception as error:
                is_told = isinstance(error, ZckptError)
                said.write_text(f"zckpt: {error}" if is_told else traceback.format_exc())
                return error.exit_status if isinstance(error, ZckptError) else 70
            said.write_text(done.stderr if done.returncode else done.stdout)
            return int(done.returncode)

        def decide(call: Call) -> Answer:
            return 0 if call.name in SYNCING else None

        self.actors.append((f"{act.__name__} {said}", Supervised(acting, self.out, decide)))

    @precondition(lambda self: len(self.actors) < ACTORS)
    @rule(act=st.sampled_from(READERS))
    def one_begins(self, act: Callable[[Path], Any]) -> None:
        self.begin(act)

    @precondition(lambda self: not any(name.startswith("save") for name, _ in self.actors))
    @rule()
    def a_save_begins(self) -> None:
        self.step += 1

        def save(out: Path, step: int = self.step) -> None:
            saved(out, step)

        self.begin(save)

    @precondition(lambda self: self.actors)
    @rule(which=st.integers(0, ACTORS - 1), calls=st.sampled_from([1, 3, 10, 30, 100, 300]))
    def one_goes_on(self, which: int, calls: int) -> None:
        _, actor = self.actors[which % len(self.actors)]
        for _ in range(calls):
            if actor.status is None:
                actor.advance()
        self.ended()

    @precondition(lambda self: self.actors)
    @rule(which=st.integers(0, ACTORS - 1))
    def one_is_killed(self, which: int) -> None:
        _, actor = self.actors.pop(which % len(self.actors))
        actor.kill()

    def ended(self) -> None:
        for name, actor in [one for one in self.actors if one[1].status is not None]:
            self.actors.remove((name, actor))
            said = Path(name.split()[1]).read_text()
            assert actor.status in (0, 2, 3, 4, 5), f"{name}: {actor.status}: {said}"
            assert actor.status == 0 or "prune" in name or len(said.splitlines()) == 1, said

    @invariant()
    def what_is_latest_is_whole(self) -> None:
        latest = (self.out / RUN / "latest").read_text()
        assert unsound(self.out / RUN / latest) is None

    def teardown(self) -> None:
        try:
            for _, actor in self.actors:
                actor.run()
            self.ended()
            for path in (self.out / RUN).glob("step-*"):
                assert whole_save(path) == expected(int(path.name.removeprefix("step-"))), path
            assert all_packed_is_whole(self.out)
            saved(self.out, self.step + 1)  # whatever was killed
            done = pack(self.out)
            assert done.returncode == 0, done.stderr
            assert all_packed_is_whole(self.out)
            assert not [name for name in tree(self.out) if "zckpt-partial" in name and "/step" in name]
        finally:
            for _, actor in self.actors:
                actor.kill()
            shutil.rmtree(self.base)


def all_packed_is_whole(out: Path) -> bool:
    return all(whole_save(at) == expected(int(name.removeprefix("step-"))) for name, at in unpacked(out))


BEGUN: dict[str, Path] = {}


def together(examples: int) -> None:
    """Run the machine in a process of its own, which nothing else has threads in."""
    real_syncs()
    with tempfile.TemporaryDirectory(prefix="zckpt-together-") as folder:
        BEGUN["run"] = Path(folder)
        saved(Path(folder), *FIRST)
        for act in READERS:  # what those that are forked need is imported
            shutil.copytree(folder, Path(folder).with_suffix(".warm"))
            act(Path(folder).with_suffix(".warm"))
            shutil.rmtree(Path(folder).with_suffix(".warm"))
        given = settings(
            max_examples=examples, stateful_step_count=15, deadline=None, database=None,
            suppress_health_check=list(HealthCheck), derandomize=True, print_blob=False,
        )  # fmt: skip
        run_state_machine_as_test(Together, settings=given)


@pytest.mark.parametrize("examples", some([3], [100]))
def test_readers_saves_prunes_and_packs_at_once(examples):
    gloo.forked(together, examples)
