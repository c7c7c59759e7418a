"""`home://`: what processes on other hosts read of a run's home, and what its trainer leaves there."""

import asyncio
import os
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from areal_async.errors import FaultError
from areal_async.launch.commands import ControlSocket
from areal_async.launch.home_files import (
    HomeFilesServer,
    bring_content,
    exported,
    moved_to,
    with_home_store,
)
from areal_async.launch.one_host import make_host, topology_here
from areal_async.rpc.address import Address
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
    files = HomeFilesServer(run_dir, exported(named))
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
    from trainer_service.stored import CheckpointStore  # the others here need no torch

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
