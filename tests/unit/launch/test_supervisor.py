import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from areal_async.base.metrics import elsewhere
from areal_async.base.processes import exit_text, service_environment
from areal_async.config.job import RedisLoginSection
from areal_async.launch.folders import claim_folders
from areal_async.launch.lifecycle import Ending
from areal_async.launch.local_launcher import LocalChild, LocalLauncher
from areal_async.launch.summary import failure_text
from tests.processes import processes_of
from tests.unit.launch.launching import changed, supervisor_of
from tests.waiting import LIMIT_S, wait_for


def supervise(job, folders, on_serving=lambda: None, **options):
    supervisor = supervisor_of(job, folders, on_serving=on_serving, **options)
    try:
        ending = supervisor.run()
    finally:
        folders.release()
    assert_nothing_is_left(folders)
    return ending, supervisor


def assert_nothing_is_left(folders):
    assert processes_of(folders.run_id) == []
    assert not folders.socket_dir.exists()
    assert not folders.shm_dir.exists()
    assert not folders.targets.exists()


def test_all_serve_before_their_endpoints_are_named_and_the_run_ends_once_the_trainer_is_done(
    job, folders, behave
):
    behave({"trainer": "finishes"})
    seen = []
    ending, _ = supervise(job, folders, lambda: seen.extend(json.loads(folders.targets.read_text())))
    assert ending == Ending("finished")
    names = ["buffer", "trainer", "reward", "rollout-0"]
    assert [entry["labels"]["process"] for entry in seen] == names
    assert all(entry["targets"][0] != "127.0.0.1:0" for entry in seen)
    assert (folders.run_dir / "order").read_text().split() == ["rollout-0", "reward", "buffer"]
    assert {path.name for path in folders.logs.iterdir()} == {f"{name}.log" for name in names}


def test_a_process_on_another_host_is_scraped_through_the_supervisors_own_port(job, folders, behave):
    behave({"trainer": "finishes"})
    job = changed(job, "placement", pretend={"rollout-0": "gpu-7"})
    seen = {}

    def look():
        seen.update({one["labels"]["process"]: one for one in json.loads(folders.targets.read_text())})

    supervise(job, folders, look, metrics_port=9999)
    there, here = seen["rollout-0"], seen["reward"]
    assert there["targets"] == ["127.0.0.1:9999"] != here["targets"]
    assert (there["labels"]["host"], here["labels"]["host"]) == ("gpu-7", "local")
    paths = {name for name, one in seen.items() if "__metrics_path__" in one["labels"]}
    assert paths == {"rollout-0"}
    assert there["labels"]["__metrics_path__"] == elsewhere("rollout-0")
    assert seen["supervisor"]["targets"] == ["127.0.0.1:9999"]


@pytest.mark.parametrize(
    ("behaviour", "status", "said"),
    [
        ("dies at start", 1, "reward: the model directory /nowhere has no config.json."),
        ("crashes at start", 1, "an index was out of range"),
        ("killed", -9, "killed by SIGKILL"),
        ("ends by itself", 0, "no service may before the trainer is done"),
    ],
)
def test_a_death_ends_the_run_and_names_the_service(job, folders, behave, behaviour, status, said):
    behave({"reward": behaviour})
    ending, _ = supervise(job, folders)
    assert (ending.kind, ending.culprit, ending.status) == ("died", "reward", status)
    text = failure_text(ending, folders.logs / "reward.log")
    assert text.startswith("reward ")
    assert said in text
    assert "logs/reward.log" in text


def test_a_service_that_is_started_again_knows_that_it_has_served(job, folders, behave):
    behave({"reward": "killed once", "trainer": "waits for the next"})
    assert supervise(changed(job, "supervisor", restarts=2), folders)[0].kind == "finished"


def test_a_service_that_never_serves_ends_the_run(job, folders, behave):
    behave({"buffer": "never ready"})
    ending, supervisor = supervise(changed(job, "supervisor", ready_s=2.0), folders)
    assert (ending.kind, ending.culprit) == ("not_ready", "buffer")
    assert list(supervisor.children) == ["buffer"]
    assert "supervisor.ready_s" in failure_text(ending, folders.logs / "buffer.log")


def test_an_interrupt_ends_everything_and_its_repetitions_count_once(job, folders, behave):
    behave({"rollout-0": "leaves helpers", "trainer": "blocks in native code"})
    numbers = (signal.SIGHUP, signal.SIGTERM, signal.SIGINT)
    before = [signal.getsignal(number) for number in numbers]
    ending, _ = supervise(job, folders, lambda: [os.kill(os.getpid(), number) for number in numbers])
    assert ending == Ending("interrupted")
    assert [signal.getsignal(number) for number in numbers] == before
    assert (folders.run_dir / "order").read_text().split()[-1] == "buffer"


def test_services_that_ignore_the_stop_are_cancelled_or_killed(job, folders, behave):
    behave({"buffer": "ignores SIGTERM", "reward": "ignores SIGTERM", "rollout-0": "ignores stop"})
    ending, _ = supervise(job, folders, on_serving=lambda: os.kill(os.getpid(), signal.SIGINT))
    assert ending == Ending("interrupted")
    # A stage longer than the services' grace: only the first is.
    assert "cancelled" in (folders.logs / "rollout-0.log").read_text()


def test_a_second_interrupt_kills_at_once(tmp_path, job, behave):
    behave({"trainer": "ignores SIGTERM"})
    run = start_run(tmp_path, job, same_interrupt_s=0.0)
    wait_for(lambda: (tmp_path / "serving").exists())
    os.kill(run.pid, signal.SIGINT)
    order = job.run_dir / job.job / "order"
    wait_for(lambda: order.exists() and "rollout-0" in order.read_text().split())  # the first was heard
    os.kill(run.pid, signal.SIGINT)
    assert run.wait(timeout=LIMIT_S) == 0
    assert "buffer" not in order.read_text().split(), "it was not waited for"
    assert volatile_folders(job) == []


def test_services_die_with_a_killed_supervisor_and_the_next_run_cleans_up(tmp_path, job, behave):
    behave({"trainer": "leaves helpers", "reward": "ignores SIGTERM"})
    run = start_run(tmp_path, job)
    wait_for(lambda: (tmp_path / "serving").exists())
    run_id = json.loads((job.run_dir / job.job / "topology.json").read_text())["run_id"]
    os.kill(run.pid, signal.SIGKILL)
    run.wait(timeout=LIMIT_S)
    order, orderly = job.run_dir / job.job / "order", {"buffer", "rollout-0"}
    wait_for(lambda: order.exists() and orderly <= set(order.read_text().split()))
    assert volatile_folders(job) != []

    behave({"trainer": "finishes"})
    folders = claim_folders(job, overwrite=True)
    assert processes_of(run_id) == []
    ending, _ = supervise(job, folders)
    assert ending == Ending("finished")
    assert volatile_folders(job) == []


def start_run(tmp_path, job, same_interrupt_s=0.5):
    """A supervisor in a process of its own, which makes the file `serving` once all serve."""
    script = (
        "import sys; from pathlib import Path\n"
        "from areal_async.config.job import JobConfig\n"
        "from areal_async.launch.folders import claim_folders\n"
        "from areal_async.launch import supervisor\n"
        "from areal_async.launch.plan import MODULES\n"
        "job = JobConfig.model_validate_json(sys.argv[1])\n"
        "folders = claim_folders(job, overwrite=False)\n"
        "supervisor.SAME_INTERRUPT_S = float(sys.argv[3])\n"
        "hooks = supervisor.RunHooks(on_serving=Path(sys.argv[2]).touch)\n"
        "modules = dict.fromkeys(MODULES, 'stand_in')\n"
        "supervisor.Supervisor(job, folders, modules=modules, hooks=hooks).run()\n"
        "folders.release()\n"
    )
    arguments = [job.model_dump_json(), str(tmp_path / "serving"), str(same_interrupt_s)]
    return subprocess.Popen([sys.executable, "-c", script, *arguments])


def volatile_folders(job):
    record = (job.run_dir / job.job / "run.lock").read_text()
    if not record:
        return []
    places = json.loads(record)
    return [path for name in ("socket_dir", "shm_dir") if (path := Path(places[name])).exists()]


def test_a_password_for_redis_reaches_the_buffer_alone(job, folders, behave, monkeypatch):
    """Reward and workflow code is a user's."""
    monkeypatch.setenv("OUR_REDIS_PASSWORD", "hunter2")
    login = RedisLoginSection(password_env="OUR_REDIS_PASSWORD")
    job = changed(job, "buffer", redis="redis://user@127.0.0.1", redis_login=login)
    behave({})
    knowing = []

    def look():
        for process in processes_of(folders.run_id):
            if "hunter2" in process.environ().values():
                knowing.append(process.cmdline()[process.cmdline().index("--name") + 1])
        os.kill(os.getpid(), signal.SIGTERM)

    supervise(job, folders, on_serving=look)
    assert knowing == ["buffer"]
    for path in folders.run_dir.rglob("*"):
        assert not path.is_file() or b"hunter2" not in path.read_bytes(), path


@pytest.mark.parametrize(
    ("name", "ours", "users"), [("MALLOC_ARENA_MAX", "2", "7"), ("OMP_WAIT_POLICY", "passive", "active")]
)
def test_memory_arenas_and_waiting_threads_of_a_service_are_limited_unless_told_otherwise(
    monkeypatch, name, ours, users
):
    monkeypatch.delenv(name, raising=False)
    assert service_environment("run", 1)[name] == ours
    monkeypatch.setenv(name, users)
    assert service_environment("run", 1)[name] == users


class PlayedChild(LocalChild):
    """A service that is what the test says."""

    pid, status = 1, None

    def __init__(self, name):
        self.name = name

    def ready_report(self):
        return {"metrics_port": 0}

    def poll(self):
        return self.status

    def lost(self):
        return ""

    def heard(self):
        return b""

    def terminate(self):
        self.status = self.status or 0

    def kill(self):
        if self.status is None:
            self.status = -signal.SIGKILL

    def close(self):
        pass


class PlayedLauncher(LocalLauncher):
    def start(self, place, *, served_before):
        return PlayedChild(place.name)


@pytest.mark.parametrize(
    ("restarts", "died", "restarted", "dead"),
    [
        (1, {"trainer": -7, "reward": -9, "rollout-0": 1}, {"trainer", "reward"}, {"rollout-0"}),
        (0, {"reward": -7, "rollout-0": -7, "buffer": -9}, set(), {"reward", "rollout-0", "buffer"}),
        (1, {"trainer": -7, "trainer-1": -7}, {"trainer"}, {"trainer-1"}),
        (1, {"trainer-1": -7}, {"trainer-1"}, set()),
    ],
    ids=["three at once", "they end the run", "two ranks at once", "a rank and those that it brings down"],
)
def test_every_death_is_told_with_its_cause(job, folders, restarts, died, restarted, dead):
    job = changed(changed(job, "supervisor", restarts=restarts), "trainer", ranks=2)
    told, ended = {}, {}
    supervisor = supervisor_of(
        job,
        folders,
        launcher=PlayedLauncher(job, folders),
        on_restart=lambda name, text: told.setdefault(name, text),
        on_death=lambda name, text: ended.setdefault(name, text),
    )
    supervisor._apply(supervisor.lifecycle.begin(0.0))
    for _ in range(3):
        supervisor._observe()
    for name, status in died.items():
        supervisor.children[name].status = status
    for _ in range(3):
        supervisor._observe()
    supervisor._launcher.close()
    folders.release()
    assert (set(told), set(ended)) == (restarted, dead)
    for name, text in (told | ended).items():
        assert text.startswith(f"{name} {exit_text(died[name])}")
        assert ("shared memory is full" in text) is (died[name] == -signal.SIGBUS)
