"""A fork is the service that a fresh process would be, and whatever happens to the fork server, services
start."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from areal_async.base.processes import RUN_VARIABLE, kill_processes_of, service_environment
from areal_async.base.topology import ServicePlace
from areal_async.config.job import JobConfig
from areal_async.launch.forks import ForkServer, StartedService
from areal_async.launch.local_launcher import roles_of_servers
from areal_async.service.fork_server import MODULE
from tests.processes import is_gone, words_of
from tests.waiting import wait_for

TRAINER = ServicePlace("trainer", "trainer", 0, "becomes", 0)
BUFFER = ServicePlace("buffer", "buffer", 0, "becomes", 0)
BECOMES = """
import json, os, random, signal, sys, threading
fd = int(os.environ["GIVEN"])
state = {
    "argv": sys.argv,
    "word": os.environ["WORD"],
    "pid": os.getpid(),
    "draw": random.random(),
    "folder": os.getcwd(),
    "loaded": sorted({"torch", "numpy", "slow"} & set(sys.modules)),
}
if "numpy.random" in sys.modules:
    state["numpy"] = sys.modules["numpy.random"].random()
if "torch" in sys.modules:
    torch = sys.modules["torch"]
    state["cuda"] = torch.cuda.is_initialized()
    exec(os.environ["THREADS"])
    state["threads"] = threads
os.write(fd, json.dumps(state).encode())
print("printed", flush=True)
os.write(int(sys.argv[sys.argv.index("--ready-fd") + 1]), b'{"ready": "trainer"}\\n')
if os.environ["WORD"] == "leave":
    sys.exit(7)
signal.pause()
"""


THREADS = (
    "one = torch.ones(1500, 1500); one @ one; "
    "threads = [torch.get_num_threads(), len(os.listdir('/proc/self/task'))]"
)
"""Count the threads of torch, and all threads once it has computed."""


def fresh_threads(threads: int) -> list[int]:
    """Return these counts in a fresh process."""
    variables = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(threads))
    code = f"import json, os, torch; {THREADS}; print(json.dumps(threads))"
    said = subprocess.run([sys.executable, "-c", code], env=os.environ | variables, capture_output=True)
    counts: list[int] = json.loads(said.stdout)
    return counts


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Callable[..., ForkServer]]:
    """Make servers with these modules. By default they take no time to import."""
    (tmp_path / "becomes.py").write_text(BECOMES)
    (tmp_path / "threads.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(1000,), daemon=True).start()\n"
    )
    (tmp_path / "slow.py").write_text("open('loads', 'w').close()\nimport time\ntime.sleep(1000)\n")
    environment = service_environment("", 1) | {"PYTHONPATH": f"{tmp_path}:{os.getcwd()}"}
    environment.pop(RUN_VARIABLE)
    made: list[ForkServer] = []

    def make(*heavy: str) -> ForkServer:
        made.append(ForkServer(("json",), heavy, environment))
        return made[-1]

    yield make
    for each in made:
        each.close()


class Starter:
    """Starts services of a test in its folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = service_environment(f"run-{folder.name}", 1) | {"PYTHONPATH": str(folder)}

    @contextmanager
    def started(
        self, server: ForkServer, place: ServicePlace = TRAINER, **variables: str
    ) -> Iterator[tuple[StartedService, Callable[[], dict[str, Any]]]]:
        """Yield the service, and a function that waits for what it says."""
        read_fd, write_fd = os.pipe()
        environment = self.environment | {"WORD": "stay", "THREADS": THREADS} | variables
        output = self.folder / f"{place.name}.log"
        child = server.start(place, self.folder / "topology.json", output, environment, {"GIVEN": write_fd})
        os.close(write_fd)

        def said() -> dict[str, Any]:
            wait_for(lambda: child.ready_report() == {"ready": "trainer"} or child.poll() is not None)
            state: dict[str, Any] = json.loads(os.read(read_fd, 1 << 16))
            return state

        try:
            yield child, said
        finally:
            child.kill()
            wait_for(lambda: child.poll() is not None)
            child.close()
            os.close(read_fd)


@pytest.fixture
def starter(tmp_path: Path) -> Iterator[Starter]:
    made = Starter(tmp_path)
    yield made
    kill_processes_of(f"run-{tmp_path.name}")


def server_pids() -> list[int]:
    """Return the fork servers of this process, the light one last."""
    named = [each for each in psutil.Process().children() if MODULE in words_of(each)]
    return [pid for each in named for pid in (each.pid, *(child.pid for child in each.children()))]


def test_a_fork_is_the_service_that_a_fresh_process_would_be(server, starter, tmp_path, monkeypatch):
    with server("numpy.random", "torch") as made:
        monkeypatch.setenv("AFTER_THE_SERVER", "1")
        places = (TRAINER, ServicePlace("trainer-1", "trainer", 1, "becomes", 0))
        with (
            starter.started(made, places[0], OMP_NUM_THREADS="2", MKL_NUM_THREADS="2") as (first, first_said),
            starter.started(made, places[1], SECRET="s" * 10_000) as (second, second_said),
        ):
            one, two = first_said(), second_said()
            for place, child, state in ((places[0], first, one), (places[1], second, two)):
                process = psutil.Process(child.pid)
                arguments = ["--topology", str(tmp_path / "topology.json"), "--name", place.name]
                assert process.ppid() == os.getpid(), "its death is seen here"
                assert os.getsid(child.pid) == os.getpgid(child.pid) == child.pid == state["pid"]
                assert state["argv"][1:5] == arguments
                assert state["folder"] == os.getcwd()
                assert process.cmdline()[:8] == [sys.executable, "-P", "-m", "becomes", *arguments]
                assert process.environ()[RUN_VARIABLE] == f"run-{tmp_path.name}"
                assert (tmp_path / f"{place.name}.log").read_text() == "printed\n"
                assert os.readlink(f"/proc/{child.pid}/fd/0") == os.devnull
                assert len(os.listdir(f"/proc/{child.pid}/fd")) == 5, "streams, readiness, the given pipe"
            assert one["threads"] == fresh_threads(2)
            assert two["threads"] == fresh_threads(1)
            assert one["threads"][0] == 2
            assert one["draw"] != two["draw"]
            assert one["numpy"] != two["numpy"]
            first.terminate()
            wait_for(lambda: first.poll() == -signal.SIGTERM)
            assert second.alive


def test_the_modules_of_services_start_no_thread(server, starter):
    server()
    with ForkServer.of_services() as made, starter.started(made) as (_, said):
        state = said()
        assert state["loaded"] == ["numpy", "torch"], "it is a fork of the server that has imported them"
        assert state["threads"] == fresh_threads(1)
        assert not state["cuda"]


def test_its_status_is_seen_and_the_server_does_not_know_its_environment(server, starter):
    with server() as made:
        with starter.started(made, WORD="leave", PASSWORD="hidden-from-others") as (child, said):
            assert said()["word"] == "leave"
            wait_for(lambda: child.poll() == 7)
        for pid in server_pids():
            assert b"hidden-from-others" not in memory_of(pid)


def memory_of(pid: int) -> bytes:
    """Return the writable memory of a process."""
    found = []
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            area, mode, *_ = line.split()
            if mode.startswith("rw") and "[v" not in line:
                begin, end = (int(bound, 16) for bound in area.split("-"))
                memory.seek(begin)
                found.append(memory.read(end - begin))
    return b"".join(found)


def test_services_without_torch_start_while_the_server_still_imports_it(
    server, starter, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    with server("slow") as made:
        wait_for((tmp_path / "loads").exists)
        with starter.started(made, BUFFER) as (_, said):
            assert said()["loaded"] == []


def test_a_service_asked_to_end_before_it_is_forked_never_runs(server, starter, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with server("slow") as made:
        wait_for((tmp_path / "loads").exists)
        with starter.started(made) as (child, _):
            assert child.poll() is None
            assert child.pid == 0, "nothing is forked before the imports"
            child.terminate()
            for pid in server_pids():
                os.kill(pid, signal.SIGKILL)
            wait_for(lambda: child.poll() == -signal.SIGTERM)
        assert (tmp_path / "trainer.log").read_text() == ""


@pytest.mark.parametrize("loaded", [True, False])
def test_a_server_that_is_killed_loses_nothing_and_the_next_service_has_another(
    server, starter, tmp_path, monkeypatch, loaded
):
    monkeypatch.chdir(tmp_path)
    with server(*(() if loaded else ("slow",))) as made:
        with starter.started(made, BUFFER) as (buffer, buffer_said):
            buffer_said()
            killed = server_pids()
            wait_for(lambda: loaded or (tmp_path / "loads").exists())
            with starter.started(made) as (waiting, waiting_said):
                if loaded:
                    waiting_said()
                for pid in killed:
                    os.kill(pid, signal.SIGKILL)
                if not loaded:
                    assert waiting_said()["pid"] == waiting.pid, "it is a fresh process"
                assert buffer.alive
                assert waiting.alive
            wait_for(lambda: all(map(is_gone, killed)))
            (tmp_path / "slow.py").write_text("")
            with starter.started(made) as (child, said):
                assert said()["loaded"] == ([] if loaded else ["slow"]), "it is a fork"
                assert child.alive
            assert len(server_pids()) == 2
            assert not set(server_pids()) & set(killed)


def test_a_server_with_a_second_thread_forks_nothing(server, starter, caplog):
    with server("threads") as made:
        for _ in range(5):
            with starter.started(made) as (child, said):
                assert said()["loaded"] == []
                assert child.alive
        made.look()
        assert server_pids() == [], "it is given up"
    assert any("it has 2 threads" in record.getMessage() for record in caplog.records)


def test_a_server_whose_modules_cannot_be_imported_forks_nothing(server, starter):
    with server("no_such_module") as made:
        for _ in range(5):
            with starter.started(made) as (child, said):
                assert said()["pid"] == child.pid
        assert server_pids() == []


def test_servers_end_with_the_process_that_started_them_and_services_are_told(starter, tmp_path):
    (tmp_path / "becomes.py").write_text(BECOMES)
    script = """
        import os, sys, time
        from pathlib import Path
        from areal_async.base.topology import ServicePlace
        from areal_async.base.processes import service_environment
        from areal_async.launch.forks import ForkServer
        folder = Path(sys.argv[1])
        environment = service_environment("", 1) | {"PYTHONPATH": str(folder)}
        server = ForkServer(("json",), (), environment)
        server.begin()
        place = ServicePlace("trainer", "trainer", 0, "becomes", 0)
        child = server.start(place, folder, folder / "log", environment | {"WORD": "stay"}, {"GIVEN": 1})
        while child.ready_report() is None:
            time.sleep(0.01)
        children = [server._child.pid, child.pid]
        print()
        print(*children, flush=True)
        os.kill(os.getpid(), 9)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)], capture_output=True, text=True
    )
    pids = [int(pid) for pid in done.stdout.split()[-2:]]
    assert len(pids) == 2, done.stderr
    wait_for(lambda: all(map(is_gone, pids)))


@pytest.mark.parametrize(
    ("rollout", "evaluation", "light"),
    [
        ("local", "same", set()),
        ("sglang", "same", {"rollout", "evaluator"}),
        ("vllm", "local", {"rollout"}),
    ],
)
def test_processes_that_only_talk_to_engine_servers_have_no_torch(
    rollout: str, evaluation: str, light: set[str]
) -> None:
    content = {"job": "j", "model": "m", "tasks": {"train": "t.jsonl"}, "reward": {"name": "exact_match"}}
    engines = {"rollout": {"engine": rollout}, "evaluation": {"engine": evaluation}}
    job = JobConfig.model_validate({**content, **engines})
    assert roles_of_servers(job) == light
