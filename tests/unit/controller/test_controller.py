"""The controller over made-up processes: what it does, and what its death at any step cannot make it do."""

import sqlite3

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from areal_async.base.mistakes import ConfigError
from areal_async.cluster import store as store_module
from areal_async.cluster.resources import Resources
from areal_async.cluster.states import JobRefused, UnknownJob
from areal_async.cluster.store import JobStore, JobStoreError
from tests.harness.profiles import examples
from tests.unit.controller.world import World, submission


def run_of(world, name):
    """Key of the present attempt of a job."""
    job = world.controller.find(name)
    return job.id, job.attempt


def serve(world):
    world.tick()
    world.real.arrive()
    world.real.serve()
    world.tick()


def test_a_job_waits_starts_serves_and_ends_and_its_history_says_so(world, sums):
    world.controller.submit(sums)
    assert world.states() == {"sums": "PENDING"}
    world.tick()
    world.real.arrive()
    world.tick()
    assert world.states() == {"sums": "STARTING"}
    world.real.serve()
    world.tick()
    assert world.states() == {"sums": "RUNNING"}
    world.real.end(run_of(world, "sums"))
    world.tick()
    job = world.controller.find("sums")
    assert (job.state, job.gpus, job.attempt) == ("SUCCEEDED", [], 1)
    history = world.controller.store.get(job.id).history
    assert [(entry.state, entry.reason) for entry in history] == [
        ("PENDING", "submitted"),
        ("STARTING", "its turn came"),
        ("RUNNING", "all services serve"),
        ("SUCCEEDED", "it is done"),
    ]
    assert [entry.time_s for entry in history] == sorted(entry.time_s for entry in history)


def test_jobs_start_by_priority_as_far_as_there_is_room(world):
    for name, priority in (("low", -1), ("first", 0), ("second", 0), ("high", 5)):
        world.controller.submit(submission(name, priority=priority))
    world.tick()
    assert world.states() == {"low": "PENDING", "first": "STARTING", "second": "PENDING", "high": "STARTING"}
    waits = world.controller.turns().waits
    assert list(waits.values()) == ["waits for 2 cores", "waits behind second"]
    assert world.controller.free() == Resources(0)


def test_a_pause_ends_the_processes_in_order_frees_the_room_and_a_resume_queues_again(world, sums):
    world.controller.submit(sums)
    serve(world)
    paused = run_of(world, "sums")
    world.controller.ask("sums", "pause")
    world.tick()
    assert paused in world.real.told
    assert (world.states(), world.controller.free()) == ({"sums": "RUNNING"}, Resources(2))
    world.real.obey()
    world.tick()
    assert (world.states(), world.controller.free()) == ({"sums": "PAUSED"}, Resources(4))
    job = world.controller.ask("sums", "resume", ["trainer.steps=7"])
    assert (job.state, job.overrides) == ("PENDING", ["trainer.steps=7"])
    serve(world)
    assert run_of(world, "sums") == (paused[0], 2)
    assert world.states() == {"sums": "RUNNING"}
    assert world.controller.find("sums").overrides == []  # they are in the run's own job file by now


def test_a_job_that_fails_keeps_the_words_of_its_run(world, sums):
    world.controller.submit(sums)
    serve(world)
    world.real.end(run_of(world, "sums"), "failed", "the trainer ended with status 1: no memory")
    world.tick()
    job = world.controller.find("sums")
    assert (job.state, job.reason) == ("FAILED", "the trainer ended with status 1: no memory")
    assert world.controller.ask("sums", "resume").state == "PENDING"


def test_a_run_that_does_not_end_in_time_is_killed(world, sums):
    world.controller.submit(sums)
    serve(world)
    world.controller.ask("sums", "stop")
    world.tick(60)
    assert world.states() == {"sums": "RUNNING"}
    world.tick(3)
    assert world.states() == {"sums": "STOPPED"}


def test_a_job_that_is_stopped_before_its_process_came_is_never_run(world, sums):
    world.controller.submit(sums)
    world.tick(2)  # a process is on its way
    world.controller.ask("sums", "stop")
    world.tick()
    world.real.arrive()
    world.tick()
    assert world.states() == {"sums": "STOPPED"}
    assert world.real.runs.total() == 0


def test_a_process_that_came_just_before_it_was_to_be_kept_away_is_told_to_stop(world, sums):
    world.controller.submit(sums)
    world.tick()
    world.controller.ask("sums", "stop")
    processes, void = world.controller._processes, world.controller._processes.void
    processes.void = lambda job: world.real.arrive() or void(job)  # between the look and this
    world.tick()
    assert world.states() == {"sums": "STARTING"}
    world.tick()
    world.real.obey()
    world.tick()
    assert world.states() == {"sums": "STOPPED"}
    assert world.real.alive == {}


def test_a_job_that_could_never_fit_is_refused_with_what_it_lacks(world):
    with pytest.raises(ConfigError, match=r"it needs 1 GPU, and the whole cluster has 4 cores, 0 GPUs"):
        world.controller.submit(submission("sums", job={"trainer": {"device": "cuda"}}))
    assert world.states() == {}
    assert not list((world.folder / "jobs").iterdir())


def test_gpus_are_one_jobs_at_a_time(tmp_path):
    world = World(tmp_path, Resources(8, 3))
    for name in ("a", "b", "c"):
        world.controller.submit(submission(name, job={"trainer": {"device": "cuda"}}))
    world.controller.submit(submission("wide", job={"trainer": {"device": "cuda", "ranks": 2}}, priority=1))
    world.tick()
    held = {name: world.controller.find(name).gpus for name in ("wide", "a", "b")}
    assert held == {"wide": [0, 1], "a": [2], "b": []}
    world.end()


def test_a_name_is_free_again_once_its_job_has_ended(world, sums):
    first = world.controller.submit(sums)
    again = msgspec.structs.replace(sums, key="another-key")
    with pytest.raises(JobRefused, match="job sums is PENDING already"):
        world.controller.submit(again)
    world.controller.ask("sums", "stop")
    second = world.controller.submit(again)
    assert world.controller.find("sums") == second
    assert world.controller.find(str(first.id)).state == "STOPPED"
    with pytest.raises(UnknownJob):
        world.controller.find("nothing")


def test_a_job_that_is_refused_leaves_nothing(world, monkeypatch):
    lr = "trainer.optimizer.lr"
    taken = [world.controller.submit(submission(f"sums-{n}", overrides=[f"{lr}={n}e-3"])) for n in (1, 2)]
    assert [job.content["trainer"]["optimizer"]["lr"] for job in taken] == [1e-3, 2e-3]
    assert [job.id for job in taken] == [1, 2]
    again = msgspec.structs.replace(submission("sums-2"), key="another-key")
    with pytest.raises(JobRefused, match="sums-2 is PENDING"):
        world.controller.submit(again)
    assert len(world.states()) == 2
    monkeypatch.setattr(store_module, "MOST_WAITING", 2)
    with pytest.raises(JobRefused, match="at most 2 waiting jobs"):
        world.controller.submit(submission("more"))
    assert len(list((world.folder / "jobs").iterdir())) == 2


def test_what_was_run_is_never_deleted_even_if_the_database_is_gone(world, sums):
    world.controller.submit(sums)
    (world.folder / "jobs" / "1-sums" / "attempts").mkdir()
    (world.folder / "jobs" / "40-old" / "attempts").mkdir(parents=True)
    (world.folder / "jobs" / "41-half" / "files").mkdir(parents=True)
    (world.folder / "jobs" / "notes").mkdir()
    world.controller.store.close()
    for path in world.folder.glob("jobs.sqlite3*"):
        path.unlink()
    world.controller = world._begin()
    assert {path.name for path in (world.folder / "jobs").iterdir()} == {"1-sums", "40-old", "notes"}
    job = world.controller.submit(sums)
    assert job.id == 41


def test_workers_that_join_take_cores(world, sums):
    world.controller.submit(sums)
    serve(world)
    world.controller.scaled(world.controller.find("sums"), 3)
    assert world.controller.find("sums").needs == Resources(4)
    assert world.controller.free() == Resources(0)


def test_a_database_that_is_none_or_of_another_release_is_refused(tmp_path):
    path = tmp_path / "jobs.sqlite3"
    path.write_text("no database at all, but long enough to be looked at")
    with pytest.raises(JobStoreError, match="no database of a controller"):
        JobStore(path)
    path.unlink()
    JobStore(path).close()
    with sqlite3.connect(path) as database:
        database.execute("PRAGMA user_version = 99")
    with pytest.raises(JobStoreError, match="schema 99"):
        JobStore(path)


def test_a_history_is_bounded(world, sums, monkeypatch):
    monkeypatch.setattr(store_module, "MOST_HISTORY", 5)
    world.controller.submit(sums)
    for _ in range(10):
        world.controller.ask("sums", "pause")
        world.controller.ask("sums", "resume")
    history = world.controller.store.get(1).history
    assert len(history) == 5
    assert history[-1].state == "PENDING"


# --- death between any two steps -------------------------------------------------------------------


def live_through_all(world):
    """A story with everything in it: submit, start, pause, resume, stop, end."""
    world.do(lambda controller: controller.submit(submission("one")))
    world.do(lambda controller: controller.submit(submission("two")))
    world.do(lambda controller: controller.submit(submission("three")))
    world.tick()
    world.real.arrive()
    world.tick()
    world.real.serve()
    world.tick()
    asks(world, "one", "pause")
    world.tick()
    world.real.obey()
    world.tick()
    world.real.arrive()
    asks(world, "one", "resume")
    asks(world, "two", "stop")
    world.tick(2)
    world.real.obey()
    for _ in range(4):
        world.tick(2)
        world.real.arrive()
        world.real.serve()
        world.tick()
        for key in [key for key in world.real.alive if key not in world.real.told]:
            world.real.end(key)
    world.tick(2)


def asks(world, name, verb):
    """As a client that heard no answer asks again: what is done already is refused, and that is an answer."""

    def ask(controller):
        try:
            controller.ask(name, verb)
        except JobRefused:
            assert world.deaths

    world.do(ask)


def check(world):
    """Nothing was lost, and nothing was run twice."""
    assert world.states() == {"one": "SUCCEEDED", "two": "STOPPED", "three": "SUCCEEDED"}
    assert max(world.real.runs.values()) == 1
    assert max(world.real.most_at_once.values()) == 1
    assert world.real.alive == {}
    assert world.controller.find("one").attempt == 2
    jobs = world.folder / "jobs"
    world.restart()  # which removes what was half submitted
    assert len(list(jobs.iterdir())) == 3
    assert all((folder / "files" / "train.jsonl").exists() for folder in jobs.iterdir())


def test_a_controller_killed_at_any_step_loses_no_job_and_starts_none_twice(tmp_path):
    (tmp_path / "calm").mkdir()
    calm = World(tmp_path / "calm")
    begun = calm.death.steps
    live_through_all(calm)
    steps = calm.death.steps
    check(calm)
    calm.end()
    assert steps - begun > 25
    for at in range(begun, steps):
        for after in (False, True):
            folder = tmp_path / f"{at}-{after}"
            folder.mkdir()
            world = World(folder)
            world.death.at, world.death.after = at, after
            live_through_all(world)
            assert world.deaths == 1, at
            check(world)
            world.end()


@given(deaths=st.lists(st.tuples(st.integers(0, 25), st.booleans()), min_size=2, max_size=6))
@settings(max_examples=examples(40), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_so_does_one_after_another(tmp_path_factory, deaths):
    world = World(tmp_path_factory.mktemp("world"))
    waiting = list(deaths)
    begin = world.restart

    def restart():
        if waiting:
            steps, after = waiting.pop()
            world.death.at, world.death.after = world.death.steps + 2 + steps, after
        begin()

    world.restart = restart
    world.restart()
    live_through_all(world)
    waiting.clear()
    world.death.at = -1
    check(world)
    world.end()
