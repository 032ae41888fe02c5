"""Targets in stores: what is written there is what is written on disk, whole or not at all."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import zckpt
from tests import folders
from tests.cli.console import FIXTURES, command, environment, refused, run, succeeded
from tests.pairwise import each, some
from tests.refusals import refusing
from tests.storage.remote.conftest import store, unfinished
from tests.storage.remote.servers import PASSWORD, USER, Proxy, moto, proxied
from zckpt.engine import upload
from zckpt.errors import TargetError
from zckpt.storage import journal
from zckpt.storage.remote import attempts, named_uploads
from zckpt.storage.remote.fsspec_stores import FsspecStore

SOURCE = FIXTURES / "s2_bf16_dp2"
PART_NBYTES = 1 << 18
LITTLE = 12 * PART_NBYTES


@pytest.fixture
def s3_kind() -> str:
    return "s3-alone"


def put(source: Path, url: str) -> str:
    """Copy a file or directory into S3; return its URL."""
    at = store(url)
    for path in folders.files_in(source) if source.is_dir() else [source]:
        name = "/".join([at.root, *path.relative_to(source).parts])
        at.call("put_object", **at.place(name), Body=path.read_bytes())
    return url


@pytest.fixture
def small_parts(monkeypatch) -> None:
    """Let a file of a megabyte have many parts, of which each is recorded; those of `LITTLE` memory are small."""
    monkeypatch.setattr(upload, "LEAST_PART_NBYTES", PART_NBYTES)
    monkeypatch.setattr(upload, "PIECE_NBYTES", PART_NBYTES // 8)
    monkeypatch.setattr(journal, "LEAST_NBYTES", 1)
    monkeypatch.setattr(named_uploads, "RECORD_NBYTES", 1)


def contents(directory: Path) -> dict[str, bytes]:
    found = folders.contents(directory)
    return {name: data for name, data in found.items() if ".rclone_temp_multipart" not in name}


def bucket() -> Any:
    return store("s3://bucket/x")


WRITTEN: dict[str, Callable[[Any, Any], object]] = {
    "model.safetensors": lambda source, target: zckpt.consolidate(source, target, slots=["all"]),
    "model.pt": zckpt.consolidate,
    "model": lambda source, target: zckpt.consolidate(source, target, max_shard_size=3000),
    "dcp": lambda source, target: zckpt.convert(source, target, to="dcp", world_size=2, verify=True),
    "zckpt": lambda source, target: zckpt.convert(source, target, to="zckpt", world_size=2),
    "universal": lambda source, target: zckpt.convert(source, target, to="universal"),
    "deepspeed": lambda source, target: zckpt.reshard(source, target, world_size=3),
}


@pytest.mark.parametrize(("name", "kind"), each(WRITTEN, ["s3", "sftp", "webdav"]))
def test_what_is_written_to_a_store_is_what_is_written_on_disk(kind, name, served, s3, tmp_path):
    place = s3 if kind == "s3" else served(f"{kind}-alone")
    Path("here/new").mkdir(parents=True)
    WRITTEN[name](SOURCE, f"{place.url}/{name}.d/new/{name}")
    WRITTEN[name](SOURCE, tmp_path / "here/new" / name)
    assert contents(place.directory / f"{name}.d") == contents("here")
    if kind == "s3":
        assert unfinished() == []


def test_from_store_to_store(s3, served):
    put(SOURCE, f"{s3.url}/from")
    zckpt.convert(f"{s3.url}/from", f"{s3.url}/to/dcp", to="dcp", verify=True)
    zckpt.consolidate(f"{s3.url}/to/dcp", f"{served('sftp-alone').url}/to.safetensors")
    zckpt.consolidate(s3.directory / "to/dcp", "here.safetensors")
    found = served("sftp-alone").directory / "to.safetensors"
    assert found.read_bytes() == Path("here.safetensors").read_bytes()
    assert zckpt.diff(s3.directory / "to/dcp", SOURCE).equal


@pytest.mark.parametrize("name", ["r*", "r[ab]", "r?"])
def test_names_are_no_patterns(name):
    """fsspec takes them for such where it removes and moves: of another run, whose name fits, too."""
    import fsspec

    fs = fsspec.filesystem("memory")
    for other in ("ra", ".ra.zckpt-partial", ".ra.safetensors.zckpt-partial"):
        fs.pipe_file(f"/odd/{other}/file", b"theirs")
    for _ in range(2):
        zckpt.reshard(SOURCE, f"memory://odd/{name}", world_size=1, overwrite=True)
        zckpt.consolidate(SOURCE, f"memory://odd/{name}.safetensors", overwrite=True)
    assert zckpt.diff(SOURCE, f"memory://odd/{name}").equal
    assert zckpt.open(f"memory://odd/{name}.safetensors").parameters
    assert len([one for one in fs.find("/odd") if one.endswith("/file")]) == 3
    fs.rm("/odd", recursive=True)


def test_memory():
    import fsspec

    zckpt.convert(SOURCE, "memory://some/dcp", to="dcp")
    fsspec.filesystem("memory").get("/some", "some", recursive=True)
    assert zckpt.diff("some/dcp", SOURCE).equal
    assert folders.names_in("some") == ["dcp"]


@pytest.mark.usefixtures("small_parts")
def test_files_of_many_parts(s3):
    """Tensors, headers and checksums lie over the ends of parts."""
    source, here = Path("a.safetensors"), Path("here")
    here.mkdir()
    torch.manual_seed(0)
    save_file({f"w{n}": torch.randn(1000 + n * 75_001) for n in range(7)} | {"s": torch.ones(())}, source)
    for name in ("many.safetensors", "many.pt"):
        zckpt.consolidate(source, f"{s3.url}/parts/{name}", dtype="bfloat16", memory=LITTLE, direct=True)
        zckpt.consolidate(source, here / name, dtype="bfloat16")
    zckpt.convert(source, f"{s3.url}/parts/many", to="zckpt", memory=LITTLE)
    zckpt.convert(source, here / "many", to="zckpt")
    # between objects of a store that does not copy ranges
    zckpt.strip(put(source, f"{s3.url}/a.safetensors"), f"{s3.url}/parts/b.safetensors", padding=True, memory=LITTLE)
    zckpt.strip(source, here / "b.safetensors", padding=True)
    assert contents(s3.directory / "parts") == contents(here)
    assert zckpt.verify(s3.directory / "parts/many", deep=True).sound
    assert len(torch.load(s3.directory / "parts/many.pt", weights_only=True)) == 8
    assert unfinished() == []


def test_what_is_there_is_kept_or_replaced(s3):
    target = f"{s3.url}/there/dcp"
    done = succeeded("convert", SOURCE, target, "--to", "dcp", "--world-size", 3, "--json")
    assert sorted(json.loads(done.stdout)["files"])[0].startswith("s3://bucket/there/dcp/")
    refused(4, "convert", SOURCE, target, "--to", "dcp", words=(target, "already exists"))
    zckpt.convert(SOURCE, target, to="dcp", world_size=2, overwrite=True)
    assert {path.name for path in (s3.directory / "there/dcp").iterdir()} >= {"__0_0.distcp", "__1_0.distcp"}
    assert not (s3.directory / "there/dcp/__2_0.distcp").exists()
    assert zckpt.diff(target, SOURCE).equal
    Path("notes.txt").write_text("mine")
    put(Path("notes.txt"), f"{target}/notes.txt")
    refused(4, "convert", SOURCE, target, "--to", "dcp", "--overwrite", words=("notes.txt",))


def test_the_source_is_no_target(s3):
    url = put(SOURCE, f"{s3.url}/source")
    before = contents(s3.directory / "source")
    refused(2, "convert", url, url, "--to", "zckpt", "--overwrite", words=("the source",))
    refused(2, "convert", url, f"{url}/global_step5/x", "--to", "dcp", words=("source",))
    checkpoint = zckpt.open(url)
    with refusing(zckpt.UsageError, "source"):
        zckpt.convert(checkpoint, f"{url}/global_step5/dcp", to="dcp")
    assert contents(s3.directory / "source") == before


def gone_after(parts: int, proxy: Proxy, then: Callable[[], object] = lambda: None) -> None:
    """Let nothing be answered any more after so many parts."""
    seen = 0

    def fault(method: str, _path: str) -> str | None:
        nonlocal seen
        seen += method == "PUT"
        if seen == parts + 1 and method == "PUT":
            then()
        return "drop" if seen > parts else None

    proxy.fault = fault


@pytest.mark.usefixtures("small_parts")
def test_a_store_that_goes_away_is_named_and_what_it_has_is_kept(s3, s3_proxy, monkeypatch, capfd):
    """Each further request is made once; nobody can say that nothing is left."""
    monkeypatch.setattr(attempts, "_SERVERS", {})
    monkeypatch.setattr(attempts, "TOLD_SECONDS", 1000)
    save_file({f"w{n}": torch.randn(1 << 15) for n in range(16)}, "a.safetensors")
    target = f"{s3.url}/gone.pt"
    given = ("consolidate", "a.safetensors", target, "--memory", LITTLE)
    gone_after(3, s3_proxy)
    line = refused(4, *given, "-q", words=(f"{target}: cannot be written",))
    assert f"of {2 << 20} bytes are sent and kept in unfinished uploads: --resume continues" in line
    assert capfd.readouterr().err == ""
    s3_proxy.mend()
    succeeded(*given, "--resume")
    assert unfinished() == []
    main = threading.main_thread().ident or 0  # as a terminal's Ctrl-C reaches it, whatever it waits for
    kept = "bytes are sent and kept in unfinished uploads: --resume continues with them"
    for least, words in ((1, kept), (1 << 20, "could not be removed")):  # of less, nothing is kept
        monkeypatch.setattr(journal, "LEAST_NBYTES", least)
        gone_after(3, s3_proxy, lambda: signal.pthread_kill(main, signal.SIGINT))
        done = run("consolidate", SOURCE, f"{s3.url}/gone", "--max-shard-size", "2kB", "--restart")
        s3_proxy.mend()
        assert done.returncode == 130
        assert "nothing was left behind" not in done.stderr
        assert words in done.stderr
        assert PASSWORD not in done.stderr
    zckpt.consolidate(SOURCE, f"{s3.url}/gone", max_shard_size=2000)
    assert unfinished() == []


@pytest.mark.parametrize("most", some([20], [100]))
def test_faults_while_writing(most, s3, s3_proxy):
    """Requests refused, answers cut, connections dropped."""
    seen = faults = 0

    def fault(_method: str, _path: str) -> str | None:
        nonlocal seen, faults
        seen += 1
        found = {1: "503", 3: "cut", 4: "drop"}.get(seen % 6)
        faults += found is not None
        return found

    s3_proxy.fault = fault
    directory = f"faults-{most}"
    for n in range(most // 2):
        zckpt.convert(SOURCE, f"{s3.url}/{directory}/{n}", to="dcp", world_size=2)
        if faults >= most:
            break
    s3_proxy.mend()
    zckpt.convert(SOURCE, "dcp", to="dcp", world_size=2)
    assert faults >= most
    for one in (s3.directory / directory).iterdir():
        assert contents(one) == contents("dcp")
    assert unfinished() == []


@pytest.mark.parametrize("method", ["PUT", "POST"])
def test_a_failure_leaves_nothing(method, s3, s3_proxy, monkeypatch):
    monkeypatch.setattr(attempts, "ATTEMPTS", 2)
    seen = 0

    def fault(found: str, path: str) -> str | None:
        nonlocal seen
        seen += found == method and "failing" in path
        return "503" if found == method and "failing" in path and seen > 1 else None

    s3_proxy.fault = fault
    line = refused(4, "convert", SOURCE, f"{s3.url}/failing/dcp", "--to", "dcp", "--world-size", "2",
                   words=("s3://bucket/failing/dcp",))  # fmt: skip
    assert PASSWORD not in line
    s3_proxy.mend()
    assert not folders.files_in(s3.directory / "failing")
    assert unfinished() == []


def test_a_source_that_is_damaged_leaves_nothing(s3):
    source = Path(shutil.copytree(SOURCE, "run"))
    file = next(source.rglob("*rank_1*optim_states.pt"))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(zckpt.SourceError):
        zckpt.consolidate(source, f"{s3.url}/damaged.safetensors", weight_check=False)
    assert not (s3.directory / "damaged.safetensors").exists()
    assert unfinished() == []


def ended(arguments: list[Any], proxy: Proxy, by: signal.Signals, when: Callable[[], bool]) -> str:
    """Run a command that is ended by a signal as soon as something is so; what it said."""
    proxy.released.clear()
    child = subprocess.Popen(arguments, env=environment(), stderr=subprocess.PIPE, text=True)
    while not when() and child.poll() is None:
        time.sleep(0.02)
    child.send_signal(by)
    proxy.released.set()
    said = child.communicate(timeout=300)[1]
    assert child.returncode == (130 if by == signal.SIGINT else -9), said
    proxy.mend()
    return said


def parts(proxy: Proxy, name: str) -> list[str]:
    """The parts that a server has taken."""
    return [one.path for one in proxy.of(name, "PUT") if "partNumber" in one.path and one.status == 200]


def dropped(proxy: Proxy, method: str, part: str, count: int, how: str = "drop") -> Callable[[], bool]:
    """Let requests fail, but for some; what tells that one has, and that the others have been answered.

    Of a run that is ended, what is to fail is held until then, or it might give up before.
    """
    seen: list[str] = []

    def answered() -> int:
        return sum(one.method == method and part in one.path for one in proxy.requests)

    before = answered()

    def fault(found: str, path: str) -> str | None:
        if found == method and part in path:
            seen.append(path)
            return how if len(seen) > count else None
        return None

    proxy.fault = fault
    return lambda: len(seen) > count and answered() >= before + count


@pytest.mark.usefixtures("small_parts")
def test_a_run_goes_on_with_what_another_has_sent(s3, s3_proxy, monkeypatch):
    monkeypatch.setattr(attempts, "ATTEMPTS", 2)
    save_file({f"w{n}": torch.randn(3 << 16) for n in range(2)}, "large.safetensors")
    given = ("consolidate", "large.safetensors", f"{s3.url}/again", "--max-shard-size", "800kB",
             "--memory", LITTLE)  # fmt: skip
    dropped(s3_proxy, "PUT", "again", 2)
    refused(4, *given, words=("bytes are sent and kept in unfinished uploads: --resume continues with them",))
    sent = parts(s3_proxy, "again")
    assert 2 <= len(sent) < 6
    refused(4, *given, words=("did not finish", "--resume"))
    dropped(s3_proxy, "POST", "uploadId", 1)
    refused(4, *given, "--resume")  # objects were there, and are removed
    assert len(parts(s3_proxy, "again")) == len(set(parts(s3_proxy, "again")))
    s3_proxy.requests.clear()
    s3_proxy.fault = lambda _method, _path: "drop" if s3_proxy.of("partial/note", "PUT") else None
    refused(4, *given, "--resume")  # so that nothing can be removed
    s3_proxy.mend()
    sent = parts(s3_proxy, "again")
    refused(4, *given, "--overwrite", words=("did not finish", "all elements sent, but not renamed"))
    refused(4, *given, "--resume", "--dtype", "bfloat16", words=("started with other options: dtype",))
    succeeded(*given, "--resume")
    assert parts(s3_proxy, "again") == sent
    succeeded(*given[:2], "here", *given[3:])
    assert contents(s3.directory / "again") == contents("here")
    assert unfinished() == []
    assert not (s3.directory / ".again.zckpt-partial").exists()


@pytest.mark.nightly
def test_what_a_run_has_left_is_thrown_away(s3, s3_proxy):
    save_file({"w": torch.randn(6 << 20)}, "large.safetensors")
    given = ("convert", "large.safetensors", f"{s3.url}/left", "--to", "zckpt")
    s3_proxy.fault = lambda method, path: "hold" if method == "POST" and "uploadId" in path else None
    ended(command(*given), s3_proxy, signal.SIGKILL, lambda: bool(s3_proxy.of("partial/note", "PUT")))
    noted = json.loads((s3.directory / ".left.zckpt-partial/note").read_bytes())
    name, (_, sent) = next(iter(noted["sent"].items()))
    other = Path("other")
    other.write_bytes(bytes(sum(nbytes for _, nbytes in sent.values())))
    for one in unfinished():
        bucket().call("abort_multipart_upload", Bucket="bucket", Key=one["Key"], UploadId=one["UploadId"])
    s3_proxy.mend()
    put(other, f"{s3.url}/left/{name}")
    refused(4, *given, "--restart", words=("exists",))  # an object of somebody else's, as large as the run's
    assert (s3.directory / "left" / name).read_bytes() == other.read_bytes()
    succeeded(*given, "--restart", "--overwrite")
    assert zckpt.diff(s3.directory / "left", "large.safetensors").equal
    assert unfinished() == []
    assert not (s3.directory / ".left.zckpt-partial").exists()


def test_options_that_a_store_limits_are_named():
    """Past the page cache the same bytes are sent; a store without part uploads makes them of little memory, too."""
    save_file({"w": torch.randn(3 << 20)}, "a.safetensors")
    done = zckpt.consolidate("a.safetensors", "memory://limits/a.safetensors", direct=True, memory=1 << 20)
    assert [note for note in done.notes if "parts for a store need up to" in note]
    assert not [note for note in done.notes if "is written through the page cache" in note]
    again = zckpt.consolidate("memory://limits/a.safetensors", "memory://limits/b.safetensors", direct=True)
    assert "--direct: neither source nor target is on a disk here" in again.notes
    zckpt.consolidate("memory://limits/b.safetensors", "b.safetensors")
    assert zckpt.diff("b.safetensors", "a.safetensors").equal
    with ThreadPoolExecutor(1) as pool:
        done = zckpt.consolidate("a.safetensors", "memory://limits/c.safetensors", executor=pool)
    assert [note for note in done.notes if "this process makes and sends" in note]


def third_refused(monkeypatch, counts: Callable[[str, int], bool]) -> list[str]:
    """Let a store refuse the third of the files that count, once another has come; return what gets their names."""
    write, sent, come = FsspecStore.send, [], threading.Event()

    def send(store: FsspecStore, key: str, nbytes: int, parts: Any) -> str:
        name = key.partition("zckpt-partial/")[2]
        if not counts(name, nbytes):
            return write(store, key, nbytes, parts)
        sent.append(name)
        if len(sent) == 3:
            assert come.wait(60)  # one of those that other threads are sending
            raise PermissionError("no more")
        version = write(store, key, nbytes, parts)
        come.set()
        return version

    monkeypatch.setattr(FsspecStore, "send", send)
    return sent


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("kind", ["webdav", "sftp"])
def test_files_that_have_come_are_not_sent_again(kind, served, monkeypatch):
    """To stores without uploads in parts: of a run that fails, whole files are gone on with."""
    place = served(f"{kind}-alone")
    save_file({f"w{n}": torch.randn(3 << 16) for n in range(4)}, "large.safetensors")
    given = ("consolidate", "large.safetensors", f"{place.url}/again", "--max-shard-size", "800kB")
    partial, record = (place.directory / f".again.zckpt-{what}" for what in ("partial", "journal"))
    sent = third_refused(monkeypatch, lambda _name, nbytes: nbytes > 1 << 19)
    refused(4, *given, words=("bytes are sent and kept in .again.zckpt-partial: --resume continues with them",))
    refused(4, *given, words=("did not finish", "in .again.zckpt-partial", "--resume"))
    recorded = {json.loads(line[9:])[0] for one in record.glob("0*") for line in one.read_bytes().splitlines()}
    assert recorded
    sent[3:] = []
    with store(place.url).client.open("bucket/.again.zckpt-partial/more", "wb") as file:
        file.write(b"of other options")
    succeeded(*given, "--resume")
    assert not recorded & {*sent[3:]}
    succeeded(*given[:2], "here", *given[3:])
    assert contents(place.directory / "again") == contents("here")
    assert not partial.exists()
    assert not record.exists()


@pytest.mark.usefixtures("small_parts")
def test_where_the_record_is_refused_too_the_first_error_is_told(monkeypatch):
    """With what another run will know of: files in lines that have come, not those in lines that have not."""
    target, write = "memory://refusing/target", FsspecStore.send
    sent, recorded, refuses = {}, {}, True

    def failing(store: FsspecStore, key: str, nbytes: int, parts: Any) -> str:
        name = key.partition("zckpt-partial/")[2]
        if refuses and recorded and len(sent) > len(recorded):
            raise PermissionError(f"not {name or 'the record'}")
        version = write(store, key, nbytes, parts)
        if name:
            sent[name] = nbytes
        elif refuses:
            recorded.update(sent)
            monkeypatch.setattr(named_uploads, "RECORD_NBYTES", 1 << 20)
        return version

    monkeypatch.setattr(FsspecStore, "send", failing)
    with ThreadPoolExecutor(1) as pool, pytest.raises(TargetError) as refusal:
        zckpt.convert(SOURCE, target, to="universal", executor=pool)
    assert recorded
    assert "not zero/" in str(refusal.value)
    assert f" {sum(recorded.values())} of " in str(refusal.value)
    assert "--resume continues with them" in str(refusal.value)
    refuses = False
    sent.clear()
    zckpt.convert(SOURCE, target, to="universal", resume=True)
    assert not recorded.keys() & sent.keys()
    assert zckpt.diff(SOURCE, target).equal
    assert not [key for key in store(target).client.find("refusing") if "zckpt-" in key]


@pytest.mark.usefixtures("small_parts")
def test_what_was_sent_with_other_options_is_not_taken_for_the_target(monkeypatch):
    source, target = SOURCE, "memory://others/target"
    third_refused(monkeypatch, lambda name, _nbytes: name.startswith("zero/"))
    with refusing(TargetError, "--resume continues with them"):
        zckpt.convert(source, target, to="universal")
    assert [key for key in store(target).client.find("others") if "partial/zero/" in key]
    zckpt.convert(source, target, to="dcp", resume=True)
    assert zckpt.open(target).format == "dcp"
    assert zckpt.diff(source, target).equal
    assert not [key for key in store(target).client.find("others") if "zckpt-" in key]


def test_web_servers_are_read_only(served):
    refused(4, "consolidate", SOURCE, f"{served('http').url}/m.safetensors", words=("read-only",))


@pytest.mark.nightly
def test_a_store_copies_what_passes_unchanged(monkeypatch):
    """Between two objects of one store, of a server that does so; not where bytes are held against checksums."""
    torch.manual_seed(0)
    save_file({f"w{n}": torch.randn(4 << 20) for n in range(4)}, "a.safetensors")
    torch.save({f"w{n}": torch.randn(4 << 20) for n in range(2)}, "a.pt")
    with moto() as port, proxied(port) as proxy:
        for key, value in {"ENDPOINT_URL": f"http://127.0.0.1:{proxy.port}", "ACCESS_KEY_ID": USER,
                           "SECRET_ACCESS_KEY": PASSWORD, "DEFAULT_REGION": "us-east-1"}.items():  # fmt: skip
            monkeypatch.setenv(f"AWS_{key}", value)
        bucket().call("create_bucket", Bucket="bucket")
        for name in ("a.safetensors", "a.pt"):
            put(Path(name), f"s3://bucket/from/{name}")
        proxy.requests.clear()
        for name, target in (("a.safetensors", "b.safetensors"), ("a.pt", "c.safetensors")):
            zckpt.consolidate(f"s3://bucket/from/{name}", f"s3://bucket/to/{target}", dtype="keep")
            zckpt.consolidate(name, target, dtype="keep")
            assert bucket().body({"Bucket": "bucket", "Key": f"to/{target}"}) == Path(target).read_bytes()
        copied = [one for one in proxy.requests if "x-amz-copy-source" in one.headers and one.status == 200]
        assert len([one for one in copied if "/to/b." in one.path]) >= 10
        assert sum(one.nbytes for one in proxy.of("from/a.safetensors")) < 32 << 20  # of 64 MB
        assert sum(one.nbytes for one in proxy.of("from/a.pt")) > 30 << 20
        assert unfinished() == []
