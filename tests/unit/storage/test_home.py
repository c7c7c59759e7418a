"""`home://`: what processes on other hosts read of a run's home, and what its trainer leaves there."""

import asyncio
import os
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from areal_async.base.addresses import Address
from areal_async.base.errors import FaultError, RunError
from areal_async.launch.commands import ControlSocket
from areal_async.launch.home_files import (
    HomeFilesServer,
    bring_content,
    moved_to,
    with_home_store,
)
from areal_async.launch.one_host import make_host, topology_here
from areal_async.rpc.client import Client
from areal_async.rpc.home_messages import ListHome, ReadHome, RemoveHome, WriteHome
from areal_async.rpc.secret import RunSecret
from areal_async.storage.home import PIECE_BYTES, HomeFileSystem
from areal_async.storage.remote import Remote, StorageError
from areal_async.storage.transfer import fetch, push

SECRET = RunSecret.generate()


@pytest.fixture
def named(job, tmp_path):
    """A job with a model, tasks and a reward of its own, and secrets beside them."""
    data = tmp_path / "data"
    (data / "model").mkdir(parents=True)
    (data / "model" / "config.json").write_text("{}")
    (data / "model" / "model.safetensors").write_bytes(os.urandom(PIECE_BYTES + 17))
    (data / "code").mkdir()
    (data / "code" / "mine.py").write_text("def score(): ...")
    (data / "code" / "data.bin").write_bytes(b"not code")
    (data / "train.jsonl").write_text("{}\n")
    (data / "key").write_text("private")
    update = {
        "model": data / "model",
        "tasks": job.tasks.model_copy(update={"train": data / "train.jsonl"}),
        "reward": job.reward.model_copy(update={"name": f"{data}/code/mine.py:score"}),
    }
    return job.model_copy(update=update)


@pytest.fixture
def run_dir(tmp_path):
    folder = tmp_path / "runs" / "rhome"
    folder.mkdir(parents=True)
    (folder / "job.yaml").write_text("job: rhome")
    return folder


@pytest.fixture
def home(named, run_dir, tmp_path):
    host = make_host("home", run_dir=run_dir, socket_dir=tmp_path / "s", shm_dir=tmp_path)
    Path(host.socket_dir).mkdir(exist_ok=True)
    topology = topology_here("r", host, [], {}, {})
    files = HomeFilesServer(run_dir, named)
    socket = ControlSocket("j", topology, SECRET.of("supervisor"), 0.1, None, files)
    socket.start()
    yield Address(topology.control, "supervisor")
    socket.stop()


@contextmanager
def as_role(home, role):
    HomeFileSystem.connect(home, job="j", role=role, name=role, access=SECRET.of(role))
    try:
        yield
    finally:
        HomeFileSystem.disconnect()


def test_what_the_job_names_comes_whole_and_nothing_else_of_the_home_host_does(home, named, tmp_path):
    data = named.model.parent
    with as_role(home, "rollout"):
        fetch(f"home://files{named.model}", tmp_path / "there")
        there = {path.name: path.read_bytes() for path in (tmp_path / "there").iterdir()}
        assert there == {path.name: path.read_bytes() for path in named.model.iterdir()}
        fetch(f"home://files{data}/code", tmp_path / "code")
        assert [path.name for path in (tmp_path / "code").iterdir()] == ["mine.py"]
        for other in (f"{data}/key", "/etc/passwd", f"{data}", f"{named.model}/../key"):
            with pytest.raises((StorageError, ValueError)):
                Remote(f"home://files{other}").listing()
        with pytest.raises(StorageError, match="not of this run"):
            Remote("home://run/rhome/job.yaml").listing()


def test_a_trainer_leaves_its_checkpoints_and_its_model_and_reads_them_again(home, run_dir, named, tmp_path):
    from trainer_service.checkpoint_store import CheckpointStore  # the others here need no torch

    store = f"{with_home_store(named).checkpoint.store}/rhome"
    step = tmp_path / "step"
    step.mkdir()
    content = {"manifest.json": b'{"files": {}}', "state.bin": os.urandom(2 * PIECE_BYTES + 3), "empty": b""}
    for name, data in content.items():
        (step / name).write_bytes(data)
    with as_role(home, "trainer"):
        checkpoints = CheckpointStore(f"{store}/checkpoints")
        checkpoints.put(7, step, ["state.bin", "empty"])
        assert checkpoints.whole() == []
        checkpoints.finish(7, step)
        assert checkpoints.whole() == [7]
        checkpoints.bring(7, tmp_path / "back")
        push(named.model, f"{store}/model")
        assert checkpoints.remove(7)
        assert checkpoints.whole() == []
    assert (tmp_path / "back" / "state.bin").read_bytes() == content["state.bin"]
    at_home = run_dir / "model" / "model.safetensors"
    assert at_home.read_bytes() == (named.model / "model.safetensors").read_bytes()
    assert not list(run_dir.rglob(".upload-*"))


@pytest.fixture
def hostile_code(named):
    """A folder of a part of the user's with secrets in it and links out of it."""
    code, private = named.model.parent / "code", named.model.parent / "key"
    (code / ".ssh").mkdir()
    (code / "keys").mkdir()
    (code / ".aws").mkdir()
    for name in (".ssh/id_ed25519", ".aws/credentials", "keys/token", ".ssh/config.json", ".env.py"):
        (code / name).write_text("private")
    (code / "keys" / "private.json").symlink_to(private)
    (code / "up").symlink_to(code.parent)
    (code / "config.json").write_text("{}")  # a model has one, but this folder was not named as a model
    (code / "keys" / "fine.py").write_text("1")
    return code


@pytest.mark.parametrize(
    "name",
    [
        ".ssh/id_ed25519",
        ".ssh/config.json",
        ".aws/credentials",
        ".env.py",
        "keys/token",
        "keys/private.json",
        "up/key",
        "up/code/mine.py",
        "data.bin",
        "../key",
        "./mine.py",
        "keys//fine.py",
    ],
)
async def test_a_file_is_read_only_if_it_is_listed(home, hostile_code, name):
    async with Client(home, job="j", role="rollout", name="r", access=SECRET.of("rollout")) as client:
        listed, _ = await client.exchange(ListHome(f"files{hostile_code}"), timeout_s=60)
        assert set(listed.files) == {"mine.py", "config.json", "keys/fine.py"}
        for asked in (f"files{hostile_code}/{name}", f"files{hostile_code}/{name}".replace("/", "//", 1)):
            with pytest.raises(FaultError, match="forbidden"):
                await client.exchange(ReadHome(asked, 0, 99), timeout_s=60)
        for below in (".ssh", "up", "keys"):
            found, _ = await client.exchange(ListHome(f"files{hostile_code}/{below}"), timeout_s=60)
            assert set(found.files) == ({"fine.py"} if below == "keys" else set())
        _, fine = await client.exchange(ReadHome(f"files{hostile_code}/keys/fine.py", 0, 99), timeout_s=60)
        assert bytes(fine[0]) == b"1"
        _, none = await client.exchange(ReadHome(f"files{hostile_code}/keys/fine.py", 0, -1), timeout_s=60)
        assert bytes(none[0]) == b""


async def test_a_link_put_in_the_place_of_a_listed_file_is_not_followed(home, hostile_code):
    async with Client(home, job="j", role="rollout", name="r", access=SECRET.of("rollout")) as client:
        await client.exchange(ListHome(f"files{hostile_code}"), timeout_s=60)
        (hostile_code / "mine.py").unlink()
        (hostile_code / "mine.py").symlink_to("/etc/passwd")
        (hostile_code / "keys").rename(hostile_code / "before")
        (hostile_code / "keys").symlink_to(hostile_code / "before")
        for name in ("mine.py", "keys/fine.py"):
            with pytest.raises(FaultError, match="cannot be read"):
                await client.exchange(ReadHome(f"files{hostile_code}/{name}", 0, 99), timeout_s=60)


async def test_links_of_a_model_are_refused_by_name_but_for_those_of_the_hub_s_cache(home, named, tmp_path):
    cached, blob = tmp_path / "models--a--b" / "snapshots" / "1f", tmp_path / "models--a--b" / "blobs" / "aa"
    cached.mkdir(parents=True)
    blob.parent.mkdir()
    blob.write_bytes(b"weights")
    (cached / "model.safetensors").symlink_to("../../blobs/aa")
    (cached / ".cache").symlink_to("/etc")
    named.model.rename(named.model.with_name("old"))
    named.model.symlink_to(cached)
    async with Client(home, job="j", role="rollout", name="r", access=SECRET.of("rollout")) as client:
        listed, _ = await client.exchange(ListHome(f"files{named.model}"), timeout_s=60)
        assert listed.files["model.safetensors"].size_bytes == 7
        assert len(listed.files) == 1
        asked = ReadHome(f"files{named.model}/model.safetensors", 0, 99)
        assert bytes((await client.exchange(asked, timeout_s=60))[1][0]) == b"weights"
        for target in ("/etc/passwd", "../../../data/key", "../../refs/aa", "../1f"):
            (cached / "extra").symlink_to(target)
            with pytest.raises(FaultError, match="extra is a link"):
                await client.exchange(ListHome(f"files{named.model}"), timeout_s=60)
            with pytest.raises(FaultError):
                await client.exchange(ReadHome(f"files{named.model}/extra", 0, 9), timeout_s=60)
            (cached / "extra").unlink()


@pytest.mark.parametrize("below", ["code", "code/home", "link", "link/home"])
def test_a_part_in_the_home_folder_itself_does_not_travel(named, run_dir, monkeypatch, below):
    data = named.model.parent
    (data / "code" / "home").mkdir()
    (data / "link").symlink_to("code")
    monkeypatch.setenv("HOME", str(data / below))
    with pytest.raises(RunError, match="move the part into a folder of its own"):
        HomeFilesServer(run_dir, named)


async def test_a_trainer_writes_and_removes_through_no_link(home, run_dir, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("x")
    (run_dir / "checkpoints").symlink_to(outside)
    (run_dir / "model").mkdir()
    (run_dir / "model" / "link").symlink_to(outside)
    upload = "0" * 16
    async with Client(home, job="j", role="trainer", name="t", access=SECRET.of("trainer")) as client:
        for place in ("checkpoints", "model/link"):
            with pytest.raises(FaultError, match="failed"):
                await client.exchange(
                    WriteHome(f"run/rhome/{place}/x", upload, 0, True), attachments=[b""], timeout_s=60
                )
            with pytest.raises(FaultError, match="failed"):
                await client.exchange(RemoveHome(f"run/rhome/{place}/kept"), timeout_s=60)
            with pytest.raises(FaultError):
                await client.exchange(ReadHome(f"run/rhome/{place}/kept", 0, 9), timeout_s=60)
            assert (await client.exchange(ListHome(f"run/rhome/{place}"), timeout_s=60))[0].files == {}
        await client.exchange(RemoveHome("run/rhome/model/link"), timeout_s=60)
    assert [path.name for path in outside.iterdir()] == ["kept"]
    assert not (run_dir / "model" / "link").exists()


async def test_who_may_do_what_and_where_is_decided_at_home(home, run_dir):
    async def ask(role, request, attachments=()):
        async with Client(home, job="j", role=role, name=role, access=SECRET.of(role)) as client:
            await client.exchange(request, attachments=attachments, timeout_s=60)

    piece, upload = [b"x"], "0" * 16
    refused = [
        ("rollout", WriteHome("run/rhome/model/x", upload, 0, False), piece),
        ("rollout", RemoveHome("run/rhome/model"), ()),
        ("reward", ReadHome("run/rhome/job.yaml", 0, 10), ()),
        ("cli", ListHome("files/etc"), ()),
        ("buffer", ReadHome("run/rhome/job.yaml", 0, 10), ()),
        ("rollout", ReadHome("run/rhome/buffer/dump.rdb", 0, 10), ()),
        ("trainer", ReadHome("run/rhome/job.yaml", 0, 10), ()),
        ("trainer", WriteHome("run/rhome/job.yaml", upload, 0, False), piece),
        ("trainer", WriteHome("run/other/model/x", upload, 0, False), piece),
        ("trainer", WriteHome("run/rhome/model/../job.yaml", upload, 0, False), piece),
        ("trainer", WriteHome("run/rhome/model/x", "../../x", 0, False), piece),
        ("trainer", WriteHome("run/rhome/model/x", upload, -1, False), piece),
        ("trainer", WriteHome("files/etc/x", upload, 0, False), piece),
        ("trainer", RemoveHome("run/rhome"), ()),
        ("trainer", RemoveHome("run/rhome/logs"), ()),
        ("trainer", ReadHome("run/rhome/model/\0", 0, 1), ()),
    ]
    for role, request, attachments in refused:
        with pytest.raises(FaultError, match="forbidden"):
            await ask(role, request, attachments)
    assert await asyncio.to_thread(lambda: [path.name for path in run_dir.iterdir()]) == ["job.yaml"]


def test_a_process_has_its_own_content_and_finds_it_where_it_lies(home, named, tmp_path, monkeypatch):
    monkeypatch.setenv("AREAL_ASYNC_CACHE", str(tmp_path / "cache"))
    told = named.model_dump(mode="json")
    with as_role(home, "reward"):
        here = bring_content(told, "reward")
    code, _, name = here["reward"]["name"].partition(":")
    assert (Path(code).read_text(), name) == ("def score(): ...", "score")
    assert str(tmp_path / "cache") in code
    assert not list((tmp_path / "cache").rglob("model.safetensors")), "a reward needs no model"


def test_paths_move_as_wholes():
    job = {"a": "/d/model", "b": ["/d/model/x.py:f", "/d/model2"], "c": {"d": "see /d/model"}, "n": 3}
    moved = moved_to(job, {"/d/model": Path("/c/m"), "/d": Path("/other")})
    assert moved == {"a": "/c/m", "b": ["/c/m/x.py:f", "/other/model2"], "c": {"d": "see /d/model"}, "n": 3}
    assert msgspec.json.encode(moved)
