"""Limits of memory: what the system's files say of them, and a process that lives under one."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.console import environment
from tests.refusals import refusing
from zckpt.errors import UsageError
from zckpt.storage import memory
from zckpt.storage.memory import LEAST_NBYTES, RESERVED_NBYTES, buffers_within, check_memory, limits

MIB = 1 << 20


def system(folder: Path, group: str, **files: str) -> tuple[Path, Path]:
    """Files as Linux has them in /proc and /sys/fs/cgroup; a name's `__` is a step down."""
    proc, groups = folder / "proc", folder / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "self/cgroup").write_text(group)
    for name, text in files.items():
        path = groups.joinpath(*name.split("__"))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_name(path.name.replace("memory_", "memory.")).write_text(text)
    return proc, groups


def test_version_2_counts_what_cannot_be_given_back(tmp_path):
    proc, groups = system(
        tmp_path, "0::/jobs/mine\n",
        jobs__mine__memory_max="104857600\n", jobs__mine__memory_current="94371840\n",
        jobs__mine__memory_stat="anon 10485760\nactive_file 31457280\ninactive_file 41943040\n",
        jobs__memory_max="max\n", jobs__memory_current="94371840\n",
    )  # fmt: skip
    assert dict(limits(proc, groups)) == {"memory.max of cgroup /jobs/mine": 80 * MIB}


def test_version_2_takes_the_least_of_the_groups_that_it_is_in(tmp_path, monkeypatch):
    proc, groups = system(
        tmp_path, "0::/jobs/mine\n",
        jobs__mine__memory_max="1048576000\n", jobs__mine__memory_current="0\n",
        jobs__memory_max="104857600\n", jobs__memory_current="94371840\n",
    )  # fmt: skip
    monkeypatch.setattr(memory, "limits", lambda: limits(proc, groups))
    assert memory.free_memory() == ("memory.max of cgroup /jobs", 10 * MIB)


@pytest.mark.parametrize("seen", ["/docker/abc", "/"])
def test_version_1_is_found_in_a_container_that_does_not_see_its_path(seen, tmp_path):
    stat = "cache 52428800\ntotal_rss 20971520\ntotal_shmem 10485760\nhierarchical_memory_limit 104857600\n"
    proc, groups = system(tmp_path, f"9:cpu,cpuacct:{seen}\n4:memory:{seen}\n", memory__memory_stat=stat)
    assert [free for _, free in limits(proc, groups)] == [70 * MIB]


@pytest.mark.parametrize("most", ["9223372036854771712", ""])
def test_version_1_without_a_limit(most, tmp_path):
    text = f"total_rss 5\nhierarchical_memory_limit {most}\n"
    proc, groups = system(tmp_path, "4:memory:/\n", memory__memory_stat=text)
    assert list(limits(proc, groups)) == []


def test_the_machine_has_what_it_says(tmp_path):
    proc, groups = system(tmp_path, "")
    (proc / "meminfo").write_text("MemTotal:  24000 kB\nMemAvailable:  2048 kB\nSwapFree:  1024 kB\n")
    assert dict(limits(proc, groups)) == {"the machine's available memory": 3 * MIB}


def test_a_system_that_says_nothing_limits_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "limits", lambda: limits(tmp_path / "proc", tmp_path / "cgroup"))
    assert buffers_within(1 << 50) == 1 << 50


@pytest.mark.parametrize(("free", "expected"), [(1 << 40, 64 * MIB), (RESERVED_NBYTES + 5 * MIB, 5 * MIB), (0, MIB)])
def test_buffers_are_as_large_as_they_may_be(free, expected, monkeypatch):
    monkeypatch.setattr(memory, "free_memory", lambda: ("a limit", free))
    assert buffers_within(64 * MIB) == expected


def test_what_leaves_nothing_is_refused(monkeypatch):
    monkeypatch.setattr(memory, "free_memory", lambda: ("a limit", RESERVED_NBYTES + LEAST_NBYTES - 1))
    with refusing(UsageError, "not enough memory under a limit: expected 26214400 free bytes"):
        check_memory()


THREADS = """
import resource, threading
from zckpt.storage.memory import confine_threads, limits

def mapped():
    return int(open("/proc/self/statm").read().split()[0]) * 4096

resource.setrlimit(resource.RLIMIT_AS, (1 << 31, 1 << 31))
assert next(limits())[0].startswith("RLIMIT_AS")
confine_threads()
confine_threads()
before, go = mapped(), threading.Event()
for _ in range(8):
    threading.Thread(target=lambda: (bytearray(1000), go.wait())).start()
print(mapped() - before)
go.set()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="of Linux")
def test_threads_are_small_where_address_space_is_scarce():
    done = subprocess.run(
        [sys.executable, "-c", THREADS], capture_output=True, text=True, env=environment(), check=True
    )
    assert int(done.stdout) < 16 * MIB  # else 8 x 72


def test_without_a_limit_threads_are_left_alone():
    if resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY:
        assert memory.address_space() is None
