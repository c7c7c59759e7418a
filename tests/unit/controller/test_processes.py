"""Attempts with real processes, which run the real supervisor over stand-in services."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from areal_async.base.own_files import read_record
from areal_async.cluster import processes
from areal_async.cluster.attempt import CLAIM, ENDING, claim, holder_of, void
from areal_async.cluster.controller import Controller
from areal_async.cluster.processes import RealProcesses
from areal_async.cluster.resources import Resources
from areal_async.cluster.states import RunEnded
from areal_async.cluster.store import JobStore
from areal_async.cluster.submission import pack
from areal_async.config.cluster import ClusterConfig
from areal_async.launch.folders import Owner
from areal_async.service.record import read_run_log
from tests.jobs import make_workspace
from tests.processes import is_gone, processes_of
from tests.unit.launch.conftest import behave  # noqa: F401
from tests.unit.launch.launching import STAND_IN
from tests.waiting import LIMIT_S, wait_for

CLAIMING = """
import sys, time
from pathlib import Path
from areal_async.cluster.attempt import claim
print("claimed" if claim(Path(sys.argv[1])) else "taken", flush=True)
sys.stdin.read()
"""


def claiming(folder):
    return subprocess.Popen(
        [sys.executable, "-c", CLAIMING, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_of_many_processes_one_has_the_claim_as_long_as_it_lives(tmp_path):
    assert holder_of(tmp_path) == "nobody"
    them = [claiming(tmp_path) for _ in range(4)]
    try:
        said = [process.stdout.readline().strip() for process in them]
        assert sorted(said) == ["claimed", "taken", "taken", "taken"]
        winner = them[said.index("claimed")]
        assert holder_of(tmp_path).pid == winner.pid
        assert not void(tmp_path)
        winner.kill()
        winner.wait()
        assert holder_of(tmp_path) == "gone"
    finally:
        for process in them:
            process.kill()
            process.communicate()
    assert not claim(tmp_path)  # it was run once
    assert [path.name for path in tmp_path.iterdir()] == [CLAIM]


def test_an_attempt_that_is_nobodys_stays_so(tmp_path):
    assert void(tmp_path)
    assert void(tmp_path)
    assert holder_of(tmp_path) == "void"
    assert not claim(tmp_path)


class Place:
    """A controller over real processes, and as many others as a test likes."""

    def __init__(self, folder, workspace):
        self.jobs = folder / "jobs"
        self.store = JobStore(folder / "jobs.sqlite3")
        self.workspace = workspace
        self.processes = self.table()
        self.controller = Controller(self.store, self.processes, self.jobs, Resources(8))

    def table(self):
        return RealProcesses(self.jobs, ClusterConfig(), STAND_IN)

    def submit(self, name, **changes):
        path = self.workspace.job(name, **changes)
        self.controller.submit(pack(path, (), key=f"key-of-{name}", here=True))
        return self.controller.find(name)

    def until(self, name, *states):
        def there():
            self.controller.reconcile()
            return self.controller.find(name).state in states

        wait_for(there, f"{name} to be {' or '.join(states)}")
        return self.controller.find(name)

    def run_folder(self, job):
        return self.controller.folder(job).run_folder

    def end(self):
        for job in self.store.in_states(("STARTING", "RUNNING")):
            self.processes.kill(job)
            wait_for(lambda job=job: isinstance(self.processes.look(job), RunEnded), "its end")
        self.store.close()


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    return make_workspace(tmp_path_factory.mktemp("workspace"))


@pytest.fixture
def place(tmp_path, workspace, behave):  # noqa: F811
    place = Place(tmp_path, workspace)
    yield place
    place.end()


def test_a_run_that_several_controllers_start_is_run_once_to_its_end(place, behave):  # noqa: F811
    behave({"trainer": "trains"})
    job = place.submit("sums", trainer__steps=2)
    place.controller.reconcile()
    job = place.controller.find("sums")
    place.table().start(job)
    place.table().start(job)
    done = place.until("sums", "SUCCEEDED", "FAILED")
    assert (done.state, done.attempt) == ("SUCCEEDED", 1), done.reason
    records = read_run_log(place.run_folder(job) / "metrics.jsonl")
    assert sum(record["kind"] == "start" for record in records) == 1
    assert {"PENDING", "STARTING", "SUCCEEDED"} <= {each.state for each in place.store.get(job.id).history}
    assert "sums is done" in place.controller.folder(job).output.read_text()
    folder = place.controller.folder(job)
    assert (folder.files / "reward.py").exists()
    assert stat_of(folder.output) == stat_of(folder.path / "attempts" / "1" / CLAIM) == 0o600


def stat_of(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_a_stop_and_a_kill_leave_nothing_and_the_job_can_go_on(place):
    job = place.submit("sums")
    place.until("sums", "RUNNING")
    run = msgspec.json.decode((place.run_folder(job) / "run.lock").read_bytes(), type=Owner)
    place.controller.ask("sums", "pause")
    # Told again and again, also by another controller: it is one stop, and the run ends in its order.
    place.table().tell_to_stop(place.controller.find("sums"))
    paused = place.until("sums", "PAUSED", "FAILED")
    assert (paused.state, paused.reason) == ("PAUSED", "paused on request")
    order = (place.run_folder(job) / "order").read_text().split()
    assert order[-1] == "buffer"
    assert processes_of(run.run_id) == []
    assert not Path(run.socket_dir).exists()

    place.controller.ask("sums", "resume")
    place.until("sums", "RUNNING")
    run = msgspec.json.decode((place.run_folder(job) / "run.lock").read_bytes(), type=Owner)
    os.kill(run.pid, signal.SIGKILL)
    failed = place.until("sums", "FAILED")
    assert "was killed, or the machine went down" in failed.reason
    assert processes_of(run.run_id) == []
    assert not Path(run.socket_dir).exists()
    assert not Path(run.shm_dir).exists()


def test_a_run_that_cannot_be_says_why_in_its_own_words(place, monkeypatch):
    place.submit("nowhere", model="nothing-here")
    failed = place.until("nowhere", "FAILED")
    assert "nothing-here does not exist" in failed.reason
    assert (
        read_record(place.controller.folder(failed).path / "attempts" / "1" / ENDING, RunEnded).how
        == "failed"
    )
    monkeypatch.setattr(sys, "executable", "/bin/false")
    place.submit("broken")
    failed = place.until("broken", "FAILED")
    assert "ended with status 1 before it ran" in failed.reason
    monkeypatch.setattr(sys, "executable", "/no/such/program")
    place.submit("none")
    assert "cannot be started" in place.until("none", "FAILED").reason


def test_a_job_sees_the_gpus_that_it_holds_and_no_others(place, monkeypatch, tmp_path):
    told = []
    monkeypatch.setattr(processes.subprocess, "Popen", lambda command, **options: told.append(options["env"]))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b,GPU-c")
    monkeypatch.setenv("AREAL_ASYNC_RUN", "of another run")
    monkeypatch.setenv("PYTHONPATH", f".{os.pathsep}/elsewhere")
    job = msgspec.structs.replace(place.submit("sums"), attempt=1, gpus=[0, 2])
    place.table().start(job)
    place.table().start(msgspec.structs.replace(job, gpus=[]))
    RealProcesses(place.jobs, ClusterConfig(launcher="ray")).start(job)
    assert [each["CUDA_VISIBLE_DEVICES"] for each in told] == ["GPU-a,GPU-c", "", "GPU-a,GPU-b,GPU-c"]
    assert told[0]["PYTHONPATH"].split(os.pathsep) == [os.getcwd(), "/elsewhere"]
    assert "AREAL_ASYNC_RUN" not in told[0]


def test_what_a_killed_run_left_does_not_say_that_the_next_one_serves(place, monkeypatch):
    monkeypatch.setattr(processes.subprocess, "Popen", lambda *_, **__: None)
    job = msgspec.structs.replace(place.submit("sums"), attempt=2)
    left = place.controller.folder(job).targets
    left.parent.mkdir(parents=True)
    left.touch()
    place.table().start(job)
    assert not left.exists()


def test_a_process_that_comes_too_late_leaves_at_once(place):
    job = place.submit("late")
    place.controller.reconcile()
    job = place.controller.find("late")
    late = place.processes._started[job.id, job.attempt]
    late.send_signal(signal.SIGSTOP)  # it is slow
    try:
        if holder_of(place.controller.folder(job).path / "attempts" / "1") != "nobody":
            pytest.skip("it was there before it could be held up")
        place.controller.ask("late", "stop")
        place.controller.reconcile()
        assert place.controller.find("late").state == "STOPPED"
    finally:
        late.send_signal(signal.SIGCONT)
    assert late.wait(LIMIT_S) == 0
    assert is_gone(late.pid)
    assert not place.run_folder(job).exists()
