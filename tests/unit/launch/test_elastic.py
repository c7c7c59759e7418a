"""Workers join and leave a run: the lifecycle, the choice of names, and the supervisor with its socket."""

import json
import os
import signal
import threading
from pathlib import Path

import pytest

from areal_async.base.errors import RunError, RunFolderError
from areal_async.base.own_files import take_lock
from areal_async.base.processes import RestartPolicy
from areal_async.base.topology import ServicePlace
from areal_async.config.load import load_job
from areal_async.launch.lifecycle import STAGE_LIMITS_S, Action, Ending, Lifecycle
from areal_async.launch.one_host import make_host
from areal_async.launch.plan import name_is_held, services_of, workers_to_change
from areal_async.launch.run_handle import change_workers
from areal_async.rpc.control_messages import DrainWorker, ScaleWorkers
from tests.unit.launch.launching import supervisor_of
from tests.waiting import wait_for


@pytest.fixture(autouse=True)
def _silent_buffer(monkeypatch):
    """The stand-in of the buffer does not answer."""
    monkeypatch.setattr("areal_async.launch.supervisor.BUFFER_WAIT_S", 0.2)


def worker(number):
    return ServicePlace(f"rollout-{number}", "rollout", number, "rollout_service", 0)


def life_of(job, restarts=5, *, joined=False):
    """One whose services all serve at time 0; with `joined`, rollout-1 does since time 2."""
    life = Lifecycle(services_of(job), 60.0, RestartPolicy(restarts))
    life.begin(0.0)
    for name in life.states:
        life.ready(name, 0.0)
    if joined:
        life.join(worker(1), 1.0)
        life.ready("rollout-1", 2.0)
    return life


def test_those_that_join_take_the_lowest_free_names_and_the_newest_leave_first():
    joining, leaving = workers_to_change([worker(0)], 3, "m", {"rollout-0", "rollout-2"}.__contains__)
    assert [place.name for place in joining] == ["rollout-1", "rollout-3"]
    assert leaving == []
    joining, leaving = workers_to_change([worker(0), worker(2), worker(1)], 1, "m", lambda name: True)
    assert joining == []
    assert [place.name for place in leaving] == ["rollout-1", "rollout-2"]


def test_a_name_is_held_as_long_as_its_process_lives(tmp_path):
    host = make_host("local", run_dir=tmp_path, socket_dir=tmp_path / "s", shm_dir=tmp_path)
    Path(host.socket_dir).mkdir(exist_ok=True)
    with (Path(host.socket_dir) / "rollout-3.name").open("w") as file:
        assert take_lock(file.fileno())
        assert name_is_held(host, "rollout-3")
    assert not name_is_held(host, "rollout-3")
    assert not name_is_held(host, "rollout-4")


def test_one_that_joins_while_the_buffer_is_away_waits_for_it(job):
    life = life_of(job)
    life.exited("buffer", -9, 5.0)
    assert life.join(worker(1), 5.1) == []
    assert life.tick(7.0) == [Action("start", "buffer")]
    assert life.ready("buffer", 8.0) == [Action("start", "rollout-1")]


@pytest.mark.parametrize(("status", "after_s"), [(1, 1.0), (-9, 1.0), (143, 62.0)])
def test_one_that_joins_and_never_serves_does_not_take_the_job_along(job, status, after_s):
    life = life_of(job, restarts=0)
    life.join(worker(1), 5.0)
    late = [Action("terminate", "rollout-1")] if after_s > 60 else []
    assert life.tick(5.0 + after_s) == late, "it has a minute to come to serve"
    assert life.exited("rollout-1", status, 6.0 + after_s) == []
    assert life.states["rollout-1"].gone
    assert not life.stopping
    life.forget("rollout-1")
    assert life.all_serve()


@pytest.mark.parametrize("status", [0, 1, -9, 143])
def test_a_drained_worker_is_not_started_again_however_it_ends(job, status):
    life = life_of(job, joined=True)
    assert life.leave("rollout-1", 30.0, 10.0) == []
    assert life.exited("rollout-1", status, 12.0) == []
    assert life.states["rollout-1"].gone
    assert life.tick(100.0) == []
    assert not life.stopping


def test_a_drained_worker_that_stays_is_told_to_end_and_then_killed(job):
    life = life_of(job, joined=True)
    life.leave("rollout-1", 30.0, 10.0)
    assert life.tick(39.9) == []
    assert life.tick(40.0) == [Action("terminate", "rollout-1")]
    assert life.tick(40.1) == []
    assert life.tick(40.0 + STAGE_LIMITS_S[0]) == [Action("kill", "rollout-1")]
    assert life.tick(50.0) == []


def test_a_worker_that_does_not_serve_leaves_at_once(job):
    life = life_of(job)
    life.join(worker(1), 1.0)
    assert life.leave("rollout-1", 30.0, 2.0) == [Action("terminate", "rollout-1")]
    life.exited("rollout-0", -9, 1.0)
    assert life.leave("rollout-0", 30.0, 1.1) == []
    assert life.states["rollout-0"].gone


def drive(job, folders, script, on_restart=lambda name, text: None, **hooks):
    """Run the supervisor; `script` runs beside it, in a thread, once all serve. The run is then stopped."""
    failures = []

    def follow():
        try:
            script(supervisor)
        except BaseException as error:
            failures.append(error)
        finally:
            os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=follow)
    told = {"on_serving": thread.start, "on_restart": on_restart, **hooks}
    supervisor = supervisor_of(job, folders, **told)
    try:
        ending = supervisor.run()
    finally:
        folders.release()
    thread.join()
    if failures:
        raise failures[0]
    assert ending == Ending("interrupted")
    return supervisor


def watched(folders):
    return {entry["labels"]["process"] for entry in json.loads(folders.targets.read_text())}


def test_workers_join_and_leave_a_run(job, folders, behave):
    behave({"rollout-1": "drains"})
    first = {"buffer", "trainer", "reward", "rollout-0"}

    def script(supervisor):
        told = change_workers(folders.run_dir, ScaleWorkers(3, 1000))
        assert told.text == "started rollout-1, rollout-2"
        assert told.workers == ["rollout-0", "rollout-1", "rollout-2"]
        wait_for(lambda: watched(folders) == first | {"rollout-1", "rollout-2"})
        context = json.loads(folders.topology.read_text())
        assert [place["name"] for place in context["services"]][-2:] == ["rollout-1", "rollout-2"]
        assert context["job"]["rollout"]["workers"] == 3
        assert set(supervisor.phases()) == first | {"rollout-1", "rollout-2"}

        told = change_workers(folders.run_dir, DrainWorker("rollout-1", 20_000))
        assert told.text.startswith("rollout-1 has finished, handed back the rest and ended")
        assert told.workers == ["rollout-0", "rollout-2"]
        wait_for(lambda: watched(folders) == first | {"rollout-2"})
        assert set(supervisor.phases()) == first | {"rollout-2"}

        # This one does not end by itself.
        told = change_workers(folders.run_dir, ScaleWorkers(1, 1000))
        assert told.text.startswith("draining rollout-2 (at most 1 s)")
        assert supervisor.phases()["rollout-2"] == "draining"
        assert supervisor.phases()["rollout-0"] == "serving"
        wait_for(lambda: set(supervisor.phases()) == first)
        assert "asked to stop" in (folders.logs / "rollout-2.log").read_text()

        started = change_workers(folders.run_dir, ScaleWorkers(2, 100))
        assert started.text == "started rollout-1", "a name is used again"

    drive(job, folders, script)
    # A resume begins with as many workers as were wanted last.
    resumed = load_job(folders.run_dir / "job.yaml", files=False)
    assert resumed.rollout.workers == 2


def test_what_makes_no_sense_is_refused_with_the_reason(job, folders, behave):
    def script(supervisor):
        for request, words in (
            (DrainWorker("rollout-5", 100), r"rollout-5 is no worker.*workers are rollout-0.*--outside"),
            (DrainWorker("trainer", 100), "trainer is no worker"),
            (DrainWorker("rollout-0", 100), "the only worker"),
            (ScaleWorkers(2000, 100), "1 to 1024 workers"),
            (ScaleWorkers(0, 100), "1 to 1024 workers"),
        ):
            with pytest.raises(RunError, match=words):
                change_workers(folders.run_dir, request)
        told = change_workers(folders.run_dir, ScaleWorkers(1, 100))
        assert told.text == "nothing to do: the workers are rollout-0"

    drive(job, folders, script)
    with pytest.raises(RunFolderError, match="is not running"):
        change_workers(folders.run_dir, ScaleWorkers(2, 100))


def test_a_worker_that_cannot_start_leaves_the_run_alone(job, folders, behave):
    behave({"rollout-1": "dies at start"})
    told = []

    def script(supervisor):
        change_workers(folders.run_dir, ScaleWorkers(2, 100))
        wait_for(lambda: told)

    supervisor = drive(job, folders, script, lambda name, text: told.append(text))
    assert told == ["rollout-1 joined but did not come to serve; see logs/rollout-1.log"]
    assert [place.name for place in supervisor.services][-1] == "rollout-0"
    assert load_job(folders.run_dir / "job.yaml", files=False).rollout.workers == 1
