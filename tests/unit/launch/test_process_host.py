"""The host of one process on a node, without the Ray that tells it what to do."""

import os
import shutil
import signal
import socket
from pathlib import Path

import msgspec
import psutil
import pytest

from areal_async.base.errors import RunError
from areal_async.config.cluster import RaySection
from areal_async.launch.commands import ControlSocket
from areal_async.launch.home_files import HomeFilesServer
from areal_async.launch.one_host import topology_here
from areal_async.launch.plan import services_of
from areal_async.launch.ray import process_host
from areal_async.launch.ray.launcher import RayLauncher
from areal_async.launch.ray.orders import FileNews, PlaceOrder, StartOrder
from areal_async.launch.ray.process_host import ProcessHost, listen_in
from replay_buffer.redis.writer import FILE, ConfirmedRevision
from tests.unit.launch.launching import STAND_IN
from tests.waiting import wait_for

NODE, ADDRESS = "node-1", "127.0.0.1"


@pytest.fixture
def home(job, folders):
    """The control socket of the run, with its files."""
    job.model.mkdir(exist_ok=True)
    (job.model / "config.json").write_text("{}")
    job.tasks.train.write_text("{}")
    topology = topology_here(
        folders.run_id, folders.host, services_of(job, STAND_IN), job.model_dump(mode="json"), {}
    )
    files = HomeFilesServer(folders.run_dir, job)
    sockets = ControlSocket(job.job, topology, folders.secret.of("supervisor"), 0.1, None, files)
    sockets.start()
    yield topology
    sockets.stop()


@pytest.fixture
def node(tmp_path, monkeypatch):
    """Folders of a host of its own."""
    root = tmp_path / "node"
    (root / "shm").mkdir(parents=True)
    monkeypatch.setattr(process_host, "SHM_ROOT", root / "shm")
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(root))
    monkeypatch.setenv("AREAL_ASYNC_CACHE", str(root / "cache"))
    return root


@pytest.mark.parametrize(
    "name",
    [
        "../outside/x",
        "/etc/x",
        "logs/../../outside/x",
        "job.yaml",
        "logs/trainer.log",
        "logs/rollout-10.log",
        "logs/rollout-1.log/x",
        "./logs/rollout-1.log",
        "logs//rollout-1.log",
        "logs/rollout-1.log\0",
    ],
)
def test_a_node_appends_to_its_own_logs_and_events_alone(folders, name):
    launcher = RayLauncher(RaySection(address="auto"), folders, print)
    before = sorted(path for path in folders.run_dir.parent.rglob("*"))
    with pytest.raises(ValueError, match=r"no file of that process|no relative path"):
        launcher.bring_home("rollout-1", FileNews(name, 0, b"x"))
    assert sorted(path for path in folders.run_dir.parent.rglob("*")) == before


@pytest.mark.parametrize(
    "name", ["logs/rollout-1.log", "events/rollout-1-7.jsonl", "logs/rollout-1-vllm-0.log"]
)
def test_what_a_node_appends_comes_through_no_link(folders, tmp_path, name):
    launcher = RayLauncher(RaySection(address="auto"), folders, print)
    for piece in (b"a", b"b"):
        launcher.bring_home("rollout-1", FileNews(name, 0, piece))
    path = folders.run_dir / name
    assert path.read_bytes() == b"ab"
    path.unlink()
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match=r"ymbolic"):
        launcher.bring_home("rollout-1", FileNews(name, 0, b"x"))
    assert not (tmp_path / "elsewhere").exists()


class Placed:
    def __init__(self, home, folders, name="reward", ports=None):
        self.home, self.folders = home, folders
        place = home.place(name)
        self.host = ProcessHost(NODE, ADDRESS)
        self.placed = self.host.place(PlaceOrder(folders.run_id, place, folders.secret.of(place.role), ports))
        self.place = msgspec.structs.replace(place, node_id=NODE, status=self.placed.endpoints["status"])
        self.have, self.said, self.report, self.status = {}, {}, None, None

    def start(self, **environment):
        others = [place for place in self.home.services if place.name != self.place.name]
        hosts = {**self.home.hosts, NODE: self.placed.host}
        told = msgspec.structs.replace(self.home, services=[*others, self.place], hosts=hosts)
        self.report = self.status = None
        variables = {"PYTHONPATH": os.environ["PYTHONPATH"], **environment}
        return self.host.start(StartOrder(msgspec.json.encode(told), variables, meets=False, meeting=""))

    def follow(self, until_what):
        def told():
            news = self.host.news(self.have, 0.2, serves=self.report is not None)
            for piece in news.files:
                self.said[piece.name] = self.said.get(piece.name, b"") + piece.data
                assert len(self.said[piece.name]) == piece.offset + len(piece.data)
                self.have[piece.name] = piece.offset + len(piece.data)
            self.report, self.status = news.ready or self.report, news.status
            return until_what(self)

        wait_for(told, "the process")


@pytest.fixture
def placed(home, folders, node):
    made = []

    def make(**how):
        made.append(Placed(home, folders, **how))
        return made[-1]

    yield make
    for each in made:
        each.host.close()


def test_a_process_serves_on_the_port_that_was_taken_for_it_through_all_its_deaths(placed, behave):
    behave({"reward": "serve"})
    reward = placed(ports=(20_000, 29_999))
    port = int(reward.placed.endpoints["status"].rpartition(":")[2])
    assert 20_000 <= port <= 29_999
    pids = []
    for _ in range(2):
        pids.append(reward.start().pid)
        reward.follow(lambda it: it.report is not None)
        assert reward.report["ready"] == "reward"
        with pytest.raises(OSError, match="in use"):
            socket.create_server((ADDRESS, port))
        os.kill(pids[-1], signal.SIGKILL)
        reward.follow(lambda it: it.status is not None)
        assert reward.status == -signal.SIGKILL
    assert pids[0] != pids[1]


def test_logs_come_as_they_are_written_and_nothing_twice(placed, behave):
    behave({"reward": "serve"})
    reward = placed()
    reward.start()
    reward.follow(lambda it: it.report is not None and b"service starts" in it.said["logs/reward.log"])
    reward.host.terminate()
    reward.follow(lambda it: it.status is not None)
    log = Path(reward.placed.host.run_dir) / "logs" / "reward.log"
    reward.follow(lambda it: it.said["logs/reward.log"] == log.read_bytes())


def test_only_its_own_files_are_handed_on_and_not_those_of_another_whose_name_begins_alike(placed, behave):
    behave({"trainer": "serve"})
    trainer = placed(name="trainer")
    trainer.start()
    trainer.follow(lambda it: it.report is not None)
    run_dir = Path(trainer.placed.host.run_dir)
    (run_dir / "events").mkdir(exist_ok=True)
    own = ("logs/trainer-sglang-0.log", "events/trainer-77.jsonl")
    others = ("logs/trainer-1.log", "logs/trainer-1-sglang-0.log", "events/trainer-1-78.jsonl", "logs/notes")
    for name in (*own, *others):
        (run_dir / name).write_text(name)
    trainer.follow(lambda it: set(own) <= it.said.keys())
    assert not set(others) & trainer.said.keys()


def test_what_the_job_names_lies_on_the_host_before_the_process_starts(placed, behave, job, node):
    behave({"reward": "serve"})
    worker = placed(name="rollout-0")
    worker.start()
    (written,) = Path(worker.placed.host.run_dir).glob("rollout-0.topology.json")
    there = msgspec.json.decode(written.read_bytes())["job"]
    model = Path(there["model"].replace("home://", f"{node}/cache/home/"))
    assert model != job.model
    assert {path.name for path in model.iterdir()} == {path.name for path in job.model.iterdir()}
    assert not Path(there["tasks"]["train"].replace("home://", f"{node}/cache/home/")).exists(), "not its own"


def test_nothing_is_left_of_it_and_the_last_one_on_a_node_takes_the_folders_away(placed, behave, node):
    behave({"reward": "leaves helpers"})
    reward, worker = placed(), placed(name="rollout-0")
    pid = reward.start().pid
    reward.follow(lambda it: it.report is not None)
    helpers = [p for p in psutil.process_iter() if _marked(p, reward)]
    assert helpers
    folders = [Path(getattr(reward.placed.host, name)) for name in ("run_dir", "socket_dir", "shm_dir")]
    reward.host.close()
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    assert not [p for p in helpers if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    assert all(folder.is_dir() for folder in folders), "the worker is still there"
    worker.host.close()
    assert not any(folder.exists() for folder in folders)


def test_a_buffer_tells_home_how_much_is_confirmed(placed, behave):
    behave({"buffer": "serve"})
    buffer = placed(name="buffer")
    buffer.start()
    mark = ConfirmedRevision(Path(buffer.placed.host.run_dir) / "buffer" / FILE)
    mark.write(1 << 40)
    mark.close()
    assert buffer.host.news({}, 0.0, serves=False).confirmed == 1 << 40


def _marked(process, placed):
    try:
        return process.environ().get("AREAL_ASYNC_RUN") == f"{placed.folders.run_id}.{placed.place.name}"
    except psutil.Error:
        return False


def test_a_process_does_not_get_what_opens_the_cluster_and_workers_not_the_stores(
    placed, behave, monkeypatch
):
    behave({"reward": "serve", "buffer": "serve"})
    for name in ("RAY_AUTH_TOKEN", "RAY_TLS_SERVER_KEY", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "secret of the node")
    found = {}
    for name in ("reward", "buffer"):
        process = placed(name=name)
        pid = process.start().pid
        process.follow(lambda it: it.report is not None)
        found[name] = psutil.Process(pid).environ()
    assert not {name for name in found["reward"] if name.startswith(("RAY_AUTH", "RAY_TLS", "AWS_"))}
    assert not {name for name in found["buffer"] if name.startswith(("RAY_AUTH", "RAY_TLS"))}
    assert found["buffer"]["AWS_SECRET_ACCESS_KEY"]


def test_folders_of_a_host_that_was_killed_go_with_the_next_run(placed, home, folders, node):
    dead = process_host.make_folders("0123456789ab", NODE, ADDRESS)
    folders_there = [str(folder) for folder in process_host.folders_of(dead)]
    in_use = process_host.InUse("0123456789ab", folders_there)
    (Path(dead.run_dir) / process_host.IN_USE).write_bytes(msgspec.json.encode(in_use))
    shutil.rmtree(dead.socket_dir)  # by who cleaned up after its supervisor, if that was on this host
    live = placed()
    assert not Path(dead.run_dir).exists()
    assert not Path(dead.shm_dir).exists()
    process_host.sweep("another run")
    assert Path(live.placed.host.socket_dir).is_dir(), "somebody holds it"


def test_a_range_without_a_free_port_is_named():
    with listen_in(ADDRESS, None) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(RunError, match=f"no port of {port} to {port} is free"):
            listen_in(ADDRESS, (port, port))


@pytest.mark.parametrize("name", ["/etc/passwd", "logs/../../job.yaml", ".."])
def test_what_a_node_says_it_wrote_is_within_the_folder_of_the_run(name):
    news = msgspec.msgpack.encode([{"name": name, "offset": 0, "data": b"x"}])
    with pytest.raises(ValueError, match="no relative path"):
        msgspec.msgpack.decode(news, type=list[FileNews])
