"""Checkpoints are read from stores as from disk: the same result, in few requests, and errors that name URLs."""

from __future__ import annotations

import gc
import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from functools import partial
from http.server import SimpleHTTPRequestHandler
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import zckpt
from tests.cli.console import FIXTURES, environment, in_time, refused, run, succeeded
from tests.folders import names_in
from tests.pairwise import some
from tests.refusals import refusing
from tests.storage.remote.conftest import Served
from tests.storage.remote.servers import PASSWORD, USER, answering, endless, free_port, hub
from zckpt.engine.workers import running_on
from zckpt.errors import Interrupted
from zckpt.storage import stand_ins
from zckpt.storage.journal import Purpose
from zckpt.storage.remote import attempts, web
from zckpt.storage.remote.addresses import address_of

SOURCE = FIXTURES / "s2_bf16_dp2"


def put(served: Served, source: Path, name: str) -> str:
    """The URL of a copy of a checkpoint."""
    if not (served.directory / name).exists():
        shutil.copytree(source, served.directory / name)
    return f"{served.url}/{name}"


def without_user(url: str) -> str:
    return url.replace(f"{USER}:{PASSWORD}@", "")


def of_url(document: Any, url: str, path: Path) -> Any:
    return json.loads(json.dumps(document).replace(url, str(path)))


def undated(document: dict[str, Any]) -> dict[str, Any]:
    """Without when it was written: a copy is newer."""
    return {key: value for key, value in document.items() if key != "saved"}


@pytest.mark.parametrize("kind", ["s3", "http", "sftp", "webdav"])
def test_a_checkpoint_in_a_store_is_what_it_is_on_disk(kind, served, s3):
    url = put(s3 if kind == "s3" else served(kind), SOURCE, "run")
    inside, outside = zckpt.inspect(url).as_dict(), zckpt.inspect(SOURCE).as_dict()
    assert undated(of_url(inside, without_user(url), SOURCE)) == undated(outside)
    zckpt.consolidate(url, "a.safetensors", slots=["all"])
    zckpt.consolidate(SOURCE, "b.safetensors", slots=["all"])
    for ending in (".safetensors", ".optimizer.safetensors"):
        assert Path(f"a{ending}").read_bytes() == Path(f"b{ending}").read_bytes()


def test_verbs_read_files_in_a_store_as_on_disk(served):
    sftp = served("sftp")
    url = put(sftp, SOURCE, "run")
    assert zckpt.diff(url, SOURCE).equal
    assert of_url(zckpt.scan(url).as_dict(), without_user(url), SOURCE) == zckpt.scan(SOURCE).as_dict()
    zckpt.sanitize(url, "clean")
    for one in SOURCE.rglob("*.pt"):
        assert Path("clean", one.relative_to(SOURCE)).read_bytes() == one.read_bytes()


def test_names_of_sftp_are_as_they_are_and_secrets_are_written_with_per_cent_signs(served):
    url = put(served("sftp"), SOURCE, "a b/x#1?%41[1]")
    found = zckpt.inspect(url.replace("zckpt-secret", "zckpt%2Dsecret"))
    assert found.step == zckpt.inspect(SOURCE).step
    assert address_of("webdav://a%40b:p%3A%2F@host:1/x").credentials == ("a@b", "p:/")


def test_a_server_without_ranges_is_told_from_one_that_fails():
    handler = partial(SimpleHTTPRequestHandler, directory=str(SOURCE))
    with answering(handler) as address:
        url = f"{address}/global_step5/mp_rank_00_model_states.pt"
        with refusing(zckpt.SourceError, "range requests") as error:
            zckpt.inspect(url)
    assert error.value.path == url


def test_memory_and_file_urls():
    import fsspec

    fsspec.filesystem("memory").put(str(SOURCE), "/run", recursive=True)
    assert zckpt.diff("memory://run", SOURCE).equal
    assert zckpt.diff(SOURCE.as_uri(), SOURCE).equal


FORMATS = [
    "s3_bf16_dp2", "moe_ep2_s2_bf16_dp2", "tp2_s1_bf16_dp2", "pp2_tp2_s1_bf16_dp1", "s2_bf16_dp2_multitag",
    "other/dcp_fsdp2_dp3/ckpt", "other/dcp_fsdp2_dp2_2dtp/ckpt", "other/dcphf_sharded_dp3/ckpt",
    "other/zro_dp2_adamw/ckpt", "other/plain_adamw/ckpt.pt", "other/zckpt_v1", "other/trainer_ds2_gpt2/checkpoint-4",
    "other/accel_fsdp2_dp2/state", "other/lightning_fsdp2/epoch=0-step=5.ckpt",
]  # fmt: skip


@pytest.mark.parametrize("name", some(FORMATS[1::2], FORMATS[0::2]))
@pytest.mark.every(2)
def test_every_format_is_read_from_a_store(name, s3):
    source = FIXTURES / name
    folder = "/".join(name.split("/")[:2])
    put(s3, FIXTURES / folder, folder)
    url = f"{s3.url}/{name}"
    ours, theirs = (zckpt.inspect(one, include_inventory=True).as_dict() for one in (source, url))
    assert undated(of_url(theirs, url, source)) == undated(ours)
    assert zckpt.fingerprint(url).text == zckpt.fingerprint(source).text
    here, there = zckpt.verify(source, deep=True).as_dict(), zckpt.verify(url, deep=True).as_dict()
    assert of_url(there, url, source) == here


def test_structure_takes_few_small_requests(s3, s3_proxy):
    """Eight ranks' files of a megabyte."""
    directory = s3.directory / "large"
    directory.mkdir()
    names = [f"model-{n:05d}-of-00008.safetensors" for n in range(1, 9)]
    for n, name in enumerate(names):
        save_file({f"layer.{n}.{i}": torch.full((1 << 16,), float(i)) for i in range(4)}, directory / name)
    index = {f"layer.{n}.{i}": name for n, name in enumerate(names) for i in range(4)}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    zckpt.inspect(f"{s3.url}/large")
    listings = [one for one in s3_proxy.requests if "list-type" in one.path]
    assert len(listings) == 1
    for name in names:
        found = s3_proxy.of(name)
        assert len(found) <= 4
        assert sum(one.nbytes for one in found) <= 256 << 10


def test_elements_come_in_large_requests(s3, s3_proxy):
    file = s3.directory / "one.safetensors"
    save_file({str(n): torch.randn(1000) for n in range(200)}, file)
    zckpt.convert(f"{s3.url}/one.safetensors", "dcp", to="dcp")
    assert zckpt.diff("dcp", file).equal
    assert len(s3_proxy.of("one.safetensors")) < 8


def test_columns_of_a_matrix_are_gathered(s3):
    """A slice along the last dimension, whose rows lie far apart in the file."""
    file = s3.directory / "wide.safetensors"
    tensor = torch.arange(6 * (1 << 19), dtype=torch.int32).reshape(6, 1 << 19)
    save_file({"w": tensor}, file)
    checkpoint = zckpt.open(f"{s3.url}/wide.safetensors")
    from zckpt.engine.copy import read_extent
    from zckpt.state import Extent
    from zckpt.storage.files import Sources

    extent = Extent((0, 5), (6, 7), 0, 42)
    with Sources() as sources:
        found = read_extent(next(iter(checkpoint.tensors())).slots["weight"], extent, sources)
    assert found.tolist() == tensor[:, 5:12].flatten().tolist()


def test_faults_that_pass_are_not_seen(s3, s3_proxy):
    url = put(s3, SOURCE, "run")
    seen = []

    def fault(method: str, _path: str) -> str | None:
        seen.append(method)
        return {1: "503", 3: "cut", 5: "drop", 8: "cut"}.get(len(seen) % 10)

    s3_proxy.fault = fault
    assert consolidated(url, "m.safetensors") == consolidated(SOURCE, "n.safetensors")
    assert len(seen) > 5


def test_faults_that_stay_are_one_line_as_the_store_says_it(s3, s3_proxy, monkeypatch):
    monkeypatch.setattr(attempts, "ATTEMPTS", 2)
    url = put(s3, SOURCE, "run")
    s3_proxy.fault = lambda _method, _path: "503"  # of which a library makes an errno
    line = refused(3, "inspect", url, words=(f"{url}: cannot be read", "503", "2 times"))
    assert "Errno" not in line
    s3_proxy.fault = lambda method, path: "cut" if method == "GET" and path.endswith(".pt") else None
    line = refused(3, "consolidate", url, "m.safetensors", words=(f"{url}/global_step5/", "cannot be read"))
    assert PASSWORD not in line
    assert names_in() == []


def test_a_source_that_changes_is_an_error(s3, s3_proxy):
    file = s3.directory / "changing.safetensors"
    save_file({"w": torch.zeros(1 << 20)}, file)

    def before(method: str, _path: str) -> None:
        if method == "GET" and len(s3_proxy.of("changing")) == 2:
            save_file({"w": torch.ones(1 << 20)}, file)

    s3_proxy.before = before
    refused(3, "consolidate", f"{s3.url}/changing.safetensors", "m.safetensors",
            words=("s3://bucket/changing.safetensors", "changed while it was read"))  # fmt: skip
    assert names_in() == []


def test_a_source_that_changes_where_versions_are_not_known(served, monkeypatch):
    sftp = served("sftp")
    file = sftp.directory / "changing.safetensors"
    save_file({"w": torch.zeros(1 << 10)}, file)
    from zckpt.storage.remote.fsspec_stores import SftpStore

    kept = SftpStore._fetch

    def fetch(self: SftpStore, *arguments: Any) -> bytes:
        data = kept(self, *arguments)
        save_file({"w": torch.ones(1 << 11)}, file)
        return data

    monkeypatch.setattr(SftpStore, "_fetch", fetch)
    with refusing(zckpt.SourceError, "changed while it was read"):
        zckpt.fingerprint(f"{sftp.url}/changing.safetensors")


OF_THE_HUB = """
import sys
from pathlib import Path

import zckpt
from zckpt.cli import main

source, file, target = sys.argv[1:]
assert zckpt.diff("hf://models/me/run@main/run", source).equal
checkpoint = zckpt.open("hf://me/run/run")
was = Path(file).read_bytes()
Path(file).write_bytes(was[:-1] + b"!")
try:
    zckpt.consolidate(checkpoint, target, weight_check=False)
except zckpt.SourceError as error:
    print(error)
Path(file).write_bytes(was)
sys.argv[1:] = ["diff", "hf://me/run/run", source]
main()
"""


def test_a_model_of_the_hub_of_which_nothing_is_left_after_a_command():
    """In a process of its own: the library reads where the hub is when it is imported."""
    shutil.copytree(SOURCE, "hub/run")
    Path("temporary").mkdir()
    file = next(Path("hub").rglob("*rank_1*optim_states.pt"))
    with hub(Path("hub")) as address:
        program = [sys.executable, "-c", OF_THE_HUB, str(SOURCE), str(file), "m.safetensors"]
        variables = {"HF_ENDPOINT": address, "HF_HUB_OFFLINE": "0", "TMPDIR": str(Path("temporary").absolute())}
        done = subprocess.run(program, env=environment() | variables, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "optim_states.pt: changed while it was read" in done.stdout
    assert not Path("m.safetensors").exists()
    assert names_in("temporary") == []


def test_nothing_there_and_no_such_scheme(s3):
    refused(3, "inspect", "s3://bucket/no/such/run", words=("s3://bucket/no/such/run: ", "nothing there"))
    refused(2, "inspect", "gopher://host/run", words=("gopher://host/run",))
    refused(2, "inspect", "s3://bucket/a/../b", words=("no such place",))


def test_wrong_credentials_are_named_and_not_shown(s3, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another-secret")
    line = refused(3, "inspect", put(s3, SOURCE, "run"), words=("s3://bucket/run",))
    assert "another-secret" not in line


def signed_s3(request) -> tuple[str, str]:
    """Part of a name."""
    s3 = request.getfixturevalue("s3")
    return put(s3, SOURCE, f"signed{SIGNATURE}"), f"{s3.url}/signed"


def signed_http(request) -> tuple[str, str]:
    """Asked for with every request."""
    put(request.getfixturevalue("served")("http"), SOURCE, "signed")
    proxy = request.getfixturevalue("proxies")("http")
    proxy.fault = lambda _method, path: None if path.endswith(SIGNATURE) else "503"
    url = f"http://127.0.0.1:{proxy.port}/bucket/signed"
    return f"{url}{SIGNATURE}", url


def webdav(request) -> tuple[str, str]:
    url = put(request.getfixturevalue("served")("webdav"), SOURCE, "run")
    return url, without_user(url)


SIGNATURE = "?X-Amz-Signature=SIGNED"


@pytest.mark.parametrize("made", [signed_s3, signed_http, webdav])
def test_what_is_opened_by_a_url_is_called_by_it_without_what_is_secret(made, request):
    """In all that is returned, printed, drawn or refused, also of a checkpoint that is open."""
    given, url = made(request)
    checkpoint = zckpt.open(given)
    assert checkpoint.opened == url
    with pytest.raises(zckpt.UsageError) as raised:
        checkpoint.read("nothing")
    texts = [repr(checkpoint), str(raised.value)]
    for done in (zckpt.map(checkpoint), zckpt.inspect(checkpoint, include_inventory=True), zckpt.verify(checkpoint)):
        texts.append(json.dumps(done.as_dict()))
    sources = [str(file.path) for file in checkpoint.files]
    texts.append(str(Purpose.of("consolidate", {"config": given}, [], [1], sources, [])))
    for verb, *options in (("inspect", "--json"), ("verify", "--deep")):
        page = Path(f"{verb}.html")
        done = succeeded(verb, given, *options, "--html", page)
        texts += [done.stdout, done.stderr, page.read_text()]
        assert url in done.stdout
    texts.append(succeeded("consolidate", given, "m.safetensors", "--json").stdout)
    texts.append(succeeded("convert", given, "again", "--to", "dcp", "--dry-run", "--json").stdout)
    texts.append(refused(3, "inspect", given, "--tag", "nope", words=(url,)))
    there, nowhere = "/bucket/", "/bucket/none/"
    texts.append(refused(3, "inspect", given.replace(there, nowhere), words=(url.replace(there, nowhere),)))
    assert not [text for text in texts if "SIGNED" in text or PASSWORD in text or "zckpt-remote-" in text]


def test_a_server_without_an_end():
    with endless() as (address, asked):
        refused(5, "inspect", f"{address}/dir/?token=x", words=("an endless chain of directories",))
    assert len(asked) < 50
    assert not [path for path in asked if not path.endswith("/?token=x")]


@pytest.mark.parametrize("link", ["%2e%2e%2f%2e%2e%2fw.bin", "%2e%2e", "w%00.bin", "%2Fw.bin", "a%2F%2Fw.bin"])
def test_links_that_lead_elsewhere_are_none(link, monkeypatch, tmp_path):
    """Or a server would make files where it likes."""
    found = {"size": 5, "etag": "x", "ranges": True, "html": False}
    monkeypatch.setattr(web.HttpStore, "_links", lambda self, url: iter([f"{url}w.bin", f"{url}{link}"]))
    monkeypatch.setattr(web.HttpStore, "_info", lambda self, url: found if url.endswith((".bin", "e")) else None)
    monkeypatch.setattr(stand_ins, "_BASE", [(os.getpid(), tmp_path / "a/b")])
    refused(5, "inspect", "http://127.0.0.1:1/run/", words=("cannot be a file name",))
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.parametrize("size", [10**30, -5])
def test_a_size_that_no_file_has_is_one_line(size, monkeypatch):
    found = {"size": size, "etag": "x", "ranges": True, "html": False}
    monkeypatch.setattr(web.HttpStore, "_links", lambda self, url: iter([f"{url}w.bin"]))
    monkeypatch.setattr(web.HttpStore, "_info", lambda self, url: found)
    refused(3, "inspect", "http://127.0.0.1:1/run/", words=("/run/w.bin", "cannot hold such names"))


def consolidated(source: object, target: str) -> bytes:
    zckpt.consolidate(source, target)
    return Path(target).read_bytes()


def test_a_server_that_stalls_is_told_of_and_given_up(served, proxies, monkeypatch):
    put(served("http"), SOURCE, "run")
    proxy = proxies("http")
    proxy.fault = lambda method, path: "stall" if method == "GET" and path.endswith(".pt") else None
    proxy.released.clear()
    monkeypatch.setattr(web, "SILENT_SECONDS", 0.1)
    monkeypatch.setattr(attempts, "PATIENCE_SECONDS", 0.3)
    monkeypatch.setattr(attempts, "TOLD_SECONDS", 0.05)
    url = f"http://127.0.0.1:{proxy.port}"
    with in_time():
        done = run("consolidate", f"{url}/bucket/run", "m.safetensors")
        quiet = run("consolidate", f"{url}/bucket/run", "m.safetensors", "--quiet")
    proxy.released.set()
    *told, line = done.stderr.splitlines()
    assert told
    for one in told:  # a busy machine is told of more than once
        assert "Timeout" in one
        assert one.startswith(f"zckpt: waiting for {url}: ")
    assert "cannot be read" in line
    assert " times in " in line
    assert done.returncode == quiet.returncode == 3
    assert len(quiet.stderr.splitlines()) == 1


class Clock:
    """Time that passes with sleep, and with requests that take long."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        for name, value in (("time", self), ("_SERVERS", {}), ("FIRST_PAUSE", 0.25)):
            monkeypatch.setattr(attempts, name, value)

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def asked(self, error: BaseException | None, takes: float = 0.0) -> tuple[int, float]:
        """How often a request is made, and how long that takes."""
        begun, times = self.now, 0

        def request() -> None:
            nonlocal times
            times += 1
            self.now += takes
            if error is not None:
                raise error

        with suppress(zckpt.SourceError):
            attempts.attempt(request, "s3://bucket/x")
        return times, self.now - begun


class NoCredentialsError(Exception):
    """As botocore calls it."""


def test_how_often_something_is_asked_for(monkeypatch):
    clock, refused_, slow = Clock(monkeypatch), ConnectionRefusedError(), TimeoutError()
    assert clock.asked(NoCredentialsError("no")) == (1, 0)
    assert clock.asked(ValueError("Invalid endpoint: x")) == (1, 0)
    times, seconds = clock.asked(refused_)  # of who has never answered
    assert 1 < times < 6
    assert seconds < 4
    assert clock.asked(refused_) == (1, 0)  # and is known to be gone
    clock.sleep(attempts.GONE_SECONDS)
    assert clock.asked(None) == (1, 0)
    with pytest.warns(UserWarning, match="waiting for s3://bucket: ConnectionRefusedError"):
        times, seconds = clock.asked(refused_)  # of who has answered
    assert times == attempts.ATTEMPTS
    assert 7 < seconds < 40  # half of 15.75, by chance, at least
    clock.asked(None)
    with pytest.warns(UserWarning, match="TimeoutError"):
        times, seconds = clock.asked(slow, takes=20)
    assert times > 1
    assert seconds < attempts.PATIENCE_SECONDS + 20
    clock.asked(None)
    monkeypatch.setattr(Interrupted, "came", True)
    assert clock.asked(refused_) == (1, 0)


def test_who_does_not_answer_is_named(monkeypatch, s3):
    port = free_port()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    monkeypatch.setattr(attempts, "_SERVERS", {})
    monkeypatch.setattr(attempts, "ATTEMPTS", 2)
    for url in ("s3://bucket/run", *(f"{one}://{USER}:{PASSWORD}@127.0.0.1:{port}/run" for one in ("sftp", "webdav"))):
        line = refused(3, "inspect", url, words=(f"{without_user(url)}: cannot be read", str(port)))
        assert PASSWORD not in line


def test_what_is_opened_is_read_until_it_is_let_go(s3):
    url = put(s3, SOURCE, "run")
    checkpoint, here = zckpt.open(url), zckpt.open(SOURCE)
    assert (checkpoint.source, checkpoint.opened) == (f"{url}/global_step5", url)
    name = next(iter(here.parameters))
    assert torch.equal(checkpoint.read(name), here.read(name))
    zckpt.convert(checkpoint, "dcp", to="dcp")
    assert zckpt.diff("dcp", checkpoint).equal
    assert zckpt.diff(checkpoint, SOURCE).equal
    assert zckpt.inspect(checkpoint).source.startswith("s3://bucket/run")
    gc.collect()  # what other tests have opened
    ((_, inside),) = stand_ins._BASE
    count = len(list(inside.iterdir()))
    del checkpoint
    gc.collect()
    assert len(list(inside.iterdir())) == count - 1


def test_workers_in_other_processes_go_to_the_store_themselves(s3):
    url = put(s3, SOURCE, "run")
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool, running_on(pool):
        found = consolidated(url, "m.safetensors")
    assert found == consolidated(SOURCE, "n.safetensors")


def test_a_file_has_its_companions(s3):
    """Fingerprints and optimizers lie beside the file that they belong to."""
    zckpt.consolidate(SOURCE, s3.directory / "with.safetensors", slots=["all"])
    whole = zckpt.inspect(s3.directory / "with.safetensors")
    assert zckpt.inspect(f"{s3.url}/with.safetensors").slots == whole.slots
    assert load_file(s3.directory / "with.safetensors")


def test_a_package_that_no_extra_has_is_asked_for_by_its_name(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    monkeypatch.setitem(sys.modules, "huggingface_hub.hf_file_system", None)
    with refusing(zckpt.MissingPackageError, r"huggingface_hub.*; install the package that is named"):
        zckpt.open("hf://nobody/nothing")
